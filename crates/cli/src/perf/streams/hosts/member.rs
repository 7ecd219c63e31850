//! A host's end of a measurement: what the driver asks for is done here, on the kernel's sockets or
//! on our stack. The driver's own end is one, too, behind a pair of sockets.
//!
//! The driver may be gone or wrong at any time. A run then ends, and with it its flows.

use super::channel::{Channel, ChannelError};
use super::message::{Answer, Ask, CpuShare, Ended, Host, Measured, Prepare, Start};
use super::plan::{MAX_DURATION, Own, OwnStack};
use crate::host::{DeviceThreads, HostOptions, Stacks, with_device};
use crate::link::one_each;
use crate::perf::streams::pace::{intervals, ns};
use crate::perf::streams::plan::{MAX_FLOWS, MAX_RATE, PAGES, Proto, Work};
use crate::perf::streams::watch::{Closing, Flows, Routes, Watch};
use crate::perf::streams::{CHECK_EVERY, PATIENCE, PORT, kernel, ours};
use anyhow::Context;
use netmem::device::port::{Port, PortError, Tap};
use netmem::xdp::{Filter, Interface, ProgramOptions, Rule};
use netmem_inet::Address;
use netmem_measure::cpus::{allowed, pin};
use netmem_measure::load::{Cpus, Share};
use netmem_measure::machine;
use netmem_measure::threads::{propagate, spawn};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// How late a run may begin. The report has how far apart the hosts began.
const LATE: Duration = Duration::from_secs(5);

/// The longest wait that a driver may ask for after a run.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// The shortest time between two lines.
const MIN_INTERVAL: Duration = Duration::from_millis(1);

/// The stack of this host's flows.
pub(super) enum Ends<'a> {
    Kernel,
    Netmem(&'a mut Stacks),
}

/// Runs `run` with the stack of this host's flows.
pub(super) fn with_ends<T>(own: &Own, run: impl FnOnce(Ends<'_>) -> anyhow::Result<T>) -> anyhow::Result<T> {
    match &own.stack {
        OwnStack::Kernel => run(Ends::Kernel),
        OwnStack::Tap(name, address) => over(own, *address, name, one_each(Tap::open(name, 1, true)?), run),
        OwnStack::Xsk(xsk, address) => {
            let rule = Rule { address: Some(address.addr), ..Rule::default() };
            let program = ProgramOptions { filter: Filter::new([rule])?, ..ProgramOptions::default() };
            let ports = own.af_xdp.ports(xsk, 1, program)?;
            over(own, *address, &xsk.interface, one_each(ports), run)
        }
    }
}

fn over<P: Port + 'static, T>(
    own: &Own,
    address: Address,
    interface: &str,
    port: impl FnMut(usize) -> Result<P, PortError>,
    run: impl FnOnce(Ends<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mtu = Interface::by_name(interface).with_context(|| format!("the MTU of {interface}"))?.mtu;
    let options = HostOptions {
        addresses: vec![address],
        mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
        // Those of the last run may still be in the ring when the next one begins.
        pages: 4 * PAGES,
        restored: 0,
        device: DeviceThreads::One { cpu: own.cpus.device },
    };
    let (value, _) = with_device(port, 1, &options, |net, pairs, _| {
        let mut stacks = Stacks::new(net, pairs, &options)?;
        let value = run(Ends::Netmem(&mut stacks))?;
        stacks.close()?;
        Ok(value)
    })?;
    Ok(value)
}

/// See the module.
pub(super) struct Member<'a, 's> {
    own: &'a Own,
    ends: Ends<'a>,
    channel: Channel<'s>,
    epoch: Instant,
}

impl<'a, 's> Member<'a, 's> {
    pub(super) fn new(own: &'a Own, ends: Ends<'a>, channel: Channel<'s>) -> Self {
        Self { own, ends, channel, epoch: Instant::now() }
    }

    /// Does what the driver asks for, from `first` on until it closes the connection. Calls `ended`
    /// after each run.
    pub(super) fn serve(&mut self, first: Ask, mut ended: impl FnMut(&Prepare, &Ended)) -> anyhow::Result<()> {
        let mut first = Some(first);
        loop {
            match first.take().map_or_else(|| self.channel.recv(None), Ok) {
                Err(ChannelError::Closed) => return Ok(()),
                Err(error) => return Err(error.into()),
                Ok(Ask::Clock) => {
                    let now_ns = ns(self.epoch.elapsed());
                    let (host, address) = self.host();
                    self.channel.send(&Answer::Clock { now_ns, host, address })?;
                }
                Ok(Ask::Prepare(prepare)) => match self.run(&prepare) {
                    Ok(result) => {
                        ended(&prepare, &result);
                        self.channel.send(&Answer::Ended(result))?;
                    }
                    Err(error) if error.is::<ChannelError>() => return Err(error),
                    Err(error) => self.channel.send(&Answer::Failed(format!("{error:#}")))?,
                },
                // Of a run that has failed here.
                Ok(Ask::Close) => {}
                Ok(_) => self.channel.send(&Answer::Failed("asked for something without a run".into()))?,
            }
        }
    }

    /// This host, and the address of our stack.
    fn host(&self) -> (Host, Option<IpAddr>) {
        let (stack, address) = match &self.own.stack {
            OwnStack::Kernel => ("kernel".into(), None),
            OwnStack::Tap(name, address) => (format!("netmem on tap:{name}"), Some(address.addr)),
            OwnStack::Xsk(xsk, address) => (format!("netmem on {xsk}"), Some(address.addr)),
        };
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let host = Host { stack, kernel: machine::kernel(), boot: boot.trim().into(), cpus: allowed().len() };
        (host, address)
    }

    /// One run, until the driver has closed it.
    fn run(&mut self, prepare: &Prepare) -> anyhow::Result<Ended> {
        check(prepare)?;
        let &Prepare { work, ref targets, sent, all, rate, cookie } = prepare;
        let counted = if work.answer.is_some() { sent } else { targets.iter().sum() };
        let watch = Watch::new(work, Flows { counted, sent, all, are_local: false, cookie }, rate, true);
        let (watch, routes, kernel) = (&watch, Routes::default(), matches!(self.ends, Ends::Kernel));
        let Self { own, ends, channel, epoch } = self;
        let ended = std::thread::scope(|scope| {
            let closing = Closing(watch);
            let (ports, end): (Vec<u16>, _) = match ends {
                Ends::Kernel => {
                    let opened: anyhow::Result<Vec<_>> =
                        targets.iter().map(|flows| listen(work.proto, *flows)).collect();
                    let (ports, targets) = opened?.into_iter().unzip();
                    let (end, cpu) = (kernel::End { targets, routes: Arc::clone(&routes) }, own.kernel_cpu);
                    let run = move || {
                        cpu.into_iter().for_each(pin);
                        kernel::run(watch, &end)
                    };
                    (ports, spawn(scope, "netmem-kernel", run).context("cannot start a thread")?)
                }
                Ends::Netmem(stacks) => {
                    let end = ours::End { targets: targets.clone(), routes: Arc::clone(&routes) };
                    let (cpu, spin) = (own.cpus.net, own.spin);
                    let run = move || {
                        pin(cpu);
                        stacks.run(|_, running| ours::run(running, watch, &end, spin)).map(drop)
                    };
                    let ports = (PORT..).take(targets.len()).collect();
                    (ports, spawn(scope, "netmem-stack", run).context("cannot start a thread")?)
                }
            };
            channel.send(&Answer::Ready { ports })?;
            let done = Phases { own, kernel, channel, watch, routes: &routes, end: &end, epoch: *epoch }.all();
            drop(closing);
            let ended = propagate(end.join());
            done?;
            anyhow::Ok(ended)
        })?;
        let size = if work.proto == Proto::Udp || work.answer.is_some() { 0 } else { work.size as u64 };
        let received = if size == 0 { 0 } else { watch.totals().iter().sum() };
        Ok(Ended {
            latencies: watch.latencies(),
            datagrams: watch.datagrams(),
            bytes: [watch.messages() * size, received],
            failed: ended.err().map(|error| format!("{error:#}")),
        })
    }
}

/// A driver that knows the key may be wrong all the same.
fn check(prepare: &Prepare) -> anyhow::Result<()> {
    let Prepare { work, targets, sent, all, rate, .. } = prepare;
    let incoming: usize = targets.iter().copied().map(usize::from).sum();
    let most = MAX_FLOWS.into();
    anyhow::ensure!(
        incoming <= most && usize::from(*sent) <= most && usize::from(*all) <= most,
        "{incoming} flows to this host and {sent} from it, of {all}: {most} are possible"
    );
    let all = usize::from(*all);
    anyhow::ensure!(
        targets.len() <= most && !targets.contains(&0) && all >= incoming.max(usize::from(*sent)).max(1),
        "{} targets, {incoming} flows to this host and {sent} from it, of {all}",
        targets.len()
    );
    let Work { proto, size, answer, on_way, drain } = *work;
    anyhow::ensure!(on_way.max(drain) <= MAX_WAIT, "a wait of {:?}", on_way.max(drain));
    let possible = proto.min_message(answer)..=proto.max_message();
    let sizes = [Some(size), answer];
    anyhow::ensure!(
        sizes.into_iter().flatten().all(|size| possible.contains(&size))
            && rate.is_none_or(|rate| (1..=MAX_RATE).contains(&rate)),
        "messages of {sizes:?} bytes, {rate:?} a second"
    );
    Ok(())
}

/// Opens a socket of the kernel for flows of any family. Returns its port, and what the end needs.
fn listen(proto: Proto, flows: u16) -> anyhow::Result<(u16, (kernel::Listening, u16))> {
    let open = |any: IpAddr| kernel::Listening::open(proto, SocketAddr::new(any, 0));
    // The first fails where the kernel has no IPv6.
    let opened = open(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| open(Ipv4Addr::UNSPECIFIED.into()));
    let (socket, at) = opened?;
    Ok((at.port(), (socket, flows)))
}

/// The run goes on, or the driver has closed it.
#[derive(PartialEq, Eq)]
enum Next {
    GoesOn,
    Closed,
}

/// A run, from the listening targets to the driver's `Close`.
struct Phases<'r, 's, 'e> {
    own: &'r Own,
    kernel: bool,
    channel: &'r mut Channel<'s>,
    watch: &'r Watch,
    routes: &'r Routes,
    end: &'r ScopedJoinHandle<'e, anyhow::Result<()>>,
    epoch: Instant,
}

impl Phases<'_, '_, '_> {
    fn all(&mut self) -> anyhow::Result<()> {
        match self.channel.recv(Some(Instant::now() + 2 * PATIENCE))? {
            Ask::Begin(routes) => {
                let flows: usize = routes.iter().map(|route| usize::from(route.flows)).sum();
                anyhow::ensure!(
                    flows == usize::from(self.watch.flows.sent),
                    "{flows} flows begin here, not as prepared"
                );
                let _ = self.routes.set(routes);
            }
            Ask::Close => return Ok(()),
            _ => anyhow::bail!("asked for something else than to begin"),
        }
        if self.until(2 * PATIENCE, Watch::have_begun)? == Next::Closed {
            return Ok(());
        }
        self.channel.send(&Answer::Begun)?;
        match self.channel.recv(Some(Instant::now() + 2 * PATIENCE))? {
            Ask::Start(start) => {
                anyhow::ensure!(start.duration <= MAX_DURATION, "a run of {:?} is too long", start.duration);
                let interval = start.interval.unwrap_or(MIN_INTERVAL);
                anyhow::ensure!(interval >= MIN_INTERVAL, "a line every {interval:?} is too often");
                if self.measure(&start)? == Next::Closed {
                    return Ok(());
                }
            }
            Ask::Close => return Ok(()),
            _ => anyhow::bail!("asked for something else than to start"),
        }
        if self.until(PATIENCE + self.watch.work.drain, Watch::sources_ended)? == Next::Closed {
            return Ok(());
        }
        self.channel.send(&Answer::Drained)?;
        self.until(3 * PATIENCE + self.watch.work.drain, |_| false).map(drop)
    }

    /// Waits for `done`, but not longer than this, or for the driver's `Close`.
    fn until(&mut self, at_most: Duration, done: impl Fn(&Watch) -> bool) -> anyhow::Result<Next> {
        let begin = Instant::now();
        loop {
            if self.goes_on(CHECK_EVERY / 10)? == Next::Closed {
                return Ok(Next::Closed);
            }
            if done(self.watch) || begin.elapsed() >= at_most {
                return Ok(Next::GoesOn);
            }
            // Its error is reported when it is joined.
            anyhow::ensure!(
                self.watch.has_started() || !self.end.is_finished(),
                "the flows of this host have ended early"
            );
        }
    }

    /// Waits for the driver's `Close`, for this time.
    fn goes_on(&mut self, time: Duration) -> anyhow::Result<Next> {
        match self.channel.recv(Some(Instant::now() + time)) {
            Ok(Ask::Close) => Ok(Next::Closed),
            Ok(_) => anyhow::bail!("asked for something in the middle of a run"),
            Err(ChannelError::Late(_)) => Ok(Next::GoesOn),
            Err(error) => Err(error.into()),
        }
    }

    /// Sleeps until a moment of this host's clock.
    fn sleep(&mut self, until: Instant) -> anyhow::Result<Next> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left <= 2 * CHECK_EVERY {
                std::thread::sleep(left);
                return Ok(Next::GoesOn);
            }
            if self.goes_on((left - CHECK_EVERY).min(CHECK_EVERY))? == Next::Closed {
                return Ok(Next::Closed);
            }
        }
    }

    /// The measured time.
    fn measure(&mut self, start: &Start) -> anyhow::Result<Next> {
        let at = self.epoch.checked_add(Duration::from_nanos(start.at_ns)).context("a start that never comes")?;
        if self.sleep(at)? == Next::Closed {
            return Ok(Next::Closed);
        }
        let watch = self.watch;
        let since = *watch.window.since.get_or_init(Instant::now);
        anyhow::ensure!(since - at <= LATE, "the start came {:?} too late: this host is too slow", since - at);
        let (before, [sent, _], empty) = (watch.totals(), watch.datagrams(), watch.empty());
        let cpus = Cpus::now()?;
        let mut last: u64 = before.iter().sum();
        for interval in intervals(start.interval, start.duration) {
            if self.sleep(since + interval)? == Next::Closed {
                return Ok(Next::Closed);
            }
            let now: u64 = watch.totals().iter().sum();
            self.channel.send(&Answer::Interval { amount: now - last })?;
            last = now;
        }
        if self.sleep(since + start.duration)? == Next::Closed {
            return Ok(Next::Closed);
        }
        let end = *watch.window.end.get_or_init(Instant::now);
        let (after, [sent_after, _], empty_after) = (watch.totals(), watch.datagrams(), watch.empty());
        let shares = Cpus::now()?.since(&cpus);
        let empty: u64 = (0..2).map(|end| empty_after[end] - empty[end]).sum();
        let idle = empty as f64 / (end - since).as_nanos().max(1) as f64;
        let measured = Measured {
            window_ns: [ns(since - self.epoch), ns(end - self.epoch)],
            amounts: after.iter().zip(before).map(|(after, before)| after - before).collect(),
            sent: sent_after - sent,
            busy: self.busy(&shares, idle),
            cpus: self.shares(&shares, idle),
        };
        self.channel.send(&Answer::Measured(measured))?;
        Ok(Next::GoesOn)
    }

    fn share(&self, shares: &BTreeMap<usize, Share>, cpu: usize, idle: f64) -> Share {
        let share = shares.get(&cpu).copied().unwrap_or_default();
        if !self.kernel && cpu == self.own.cpus.net { share.with_idle(idle) } else { share }
    }

    /// The part of the time that each CPU was busy.
    fn busy(&self, shares: &BTreeMap<usize, Share>, idle: f64) -> Vec<(u32, f64)> {
        let busy = |cpu: usize| Some((u32::try_from(cpu).ok()?, self.share(shares, cpu, idle).busy() / 100.0));
        allowed().into_iter().filter_map(busy).collect()
    }

    /// The mean of all CPUs, and those of our stack. `idle` is the part of the time that it spent
    /// in empty polls.
    fn shares(&self, shares: &BTreeMap<usize, Share>, idle: f64) -> Vec<CpuShare> {
        let Own { cpus, .. } = self.own;
        let share = |cpu| self.share(shares, cpu, idle);
        let all: Vec<Share> = allowed().into_iter().map(share).collect();
        let mut rows = vec![CpuShare { role: "all".into(), cpus: all.len(), share: Share::mean(&all) }];
        if !self.kernel {
            let one = |role: &str, cpu| CpuShare { role: format!("{role} (CPU {cpu})"), cpus: 1, share: share(cpu) };
            rows.extend([one("stack", cpus.net), one("device", cpus.device)]);
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::streams::cookie::Cookie;

    /// What a driver must not ask for, though it knows the key.
    #[test]
    fn runs_that_are_refused() {
        let good = || Prepare {
            work: Work { proto: Proto::Tcp, size: 64, answer: None, on_way: Duration::ZERO, drain: Duration::ZERO },
            targets: vec![2, 3],
            sent: 4,
            all: 9,
            rate: Some(1000),
            cookie: Cookie::default(),
        };
        check(&good()).unwrap();
        let bad: [fn(&mut Prepare); 12] = [
            |run| run.targets = vec![65535; 3],
            |run| run.targets = vec![0; 500_000],
            |run| run.targets = vec![2, 0],
            |run| run.all = 4,
            |run| (run.targets, run.sent, run.all) = (Vec::new(), 0, 0),
            |run| run.sent = 501,
            |run| run.rate = Some(0),
            |run| run.rate = Some(u64::MAX),
            |run| run.work.size = 0,
            |run| run.work.size = usize::MAX,
            |run| (run.work.proto, run.work.size) = (Proto::Udp, 1453),
            |run| run.work.drain = Duration::MAX,
        ];
        for (n, change) in bad.into_iter().enumerate() {
            let mut run = good();
            change(&mut run);
            assert!(check(&run).is_err(), "{n}");
        }
    }
}
