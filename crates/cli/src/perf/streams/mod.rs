//! `netmem perf --proto tcp|udp`: flows between two ends, measured at the receiver.
//!
//! ```text
//!   both ours   source's stack ── pair 0 ── Cross ── pair 1 ── target's stack      one device, its thread apart
//!   tap         stack ── pair 0 ── tap ── the kernel's sockets
//! ```
//!
//! [`plan`] checks the arguments, [`ours`] and [`kernel`] are the two kinds of ends, and [`report`]
//! shows the results. The main thread samples counters at the beginning and at the end of a run.
//! The ends take no part in that.

mod kernel;
mod ours;
mod plan;
mod report;

use crate::args::PerfArgs;
use crate::host::{Accounting, DeviceThreads, HostOptions, Stacks, with_device};
use crate::link::{AskedLink, one_each};
use anyhow::Context;
use netmem::device::port::{Cross, Port, PortError, Tap};
use netmem_inet::Address;
use netmem_measure::cpus::{pin, take_pinned};
use netmem_measure::load::{Cpus, Meter};
use netmem_measure::output;
use netmem_measure::report::Done;
use netmem_measure::signals::Interrupted;
use netmem_measure::threads::{propagate, spawn};
use plan::{Between, Plan, Proto};
use report::{Report, Sample};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// The target's port.
const PORT: u16 = 5201;
/// The longest time that is waited for all flows to begin, and again for all of them to end.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often threads check whether the run is over.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// What the threads of a run share.
#[derive(Debug)]
struct Watch {
    proto: Proto,
    /// Bytes of a message.
    size: usize,
    /// Set at the end of the run: sources send no more.
    over: AtomicBool,
    /// Flows that have received something.
    begun: AtomicUsize,
    /// Bytes that each flow has received.
    bytes: Vec<AtomicU64>,
    /// Nanoseconds that the source's and the target's thread have spent in polls that found
    /// nothing.
    empty_ns: [AtomicU64; 2],
    /// Set while a target on our stack has connections. The source stays alive until then, because
    /// its last acknowledgement may get lost with its rings.
    target_open: AtomicBool,
}

impl Watch {
    fn new(plan: &Plan) -> Self {
        let bytes = (0..plan.flows).map(|_| AtomicU64::new(0)).collect();
        let (over, begun, empty_ns) = Default::default();
        let target_open = AtomicBool::new(matches!(plan.between, Between::Ours));
        Self { proto: plan.proto, size: plan.size, over, begun, bytes, empty_ns, target_open }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Counts bytes that flow `flow` has received.
    fn count(&self, flow: usize, bytes: usize) {
        if let Some(count) = self.bytes.get(flow)
            && count.fetch_add(bytes as u64, Ordering::Relaxed) == 0
        {
            self.begun.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn totals(&self) -> Vec<u64> {
        self.bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed)).collect()
    }

    fn empty(&self) -> [u64; 2] {
        self.empty_ns.each_ref().map(|ns| ns.load(Ordering::Relaxed))
    }
}

/// Sets the flag when it is dropped, also in a panic.
struct Over<'a>(&'a Watch);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

/// Runs the measurement.
pub(super) fn run(args: &PerfArgs, stop: &AtomicBool) -> anyhow::Result<()> {
    let plan = Plan::new(args)?;
    let link = plan.link.map(AskedLink::new);
    let (mut samples, mut accounting) = (Vec::new(), Accounting::default());
    let run = || match &plan.between {
        Between::Ours => over(&plan, link.as_ref(), 2, one_each(Cross::cable().into()), stop),
        Between::Tap { name, .. } => over(&plan, link.as_ref(), 1, one_each(Tap::open(name, 1, true)?), stop),
    };
    let (meter, mut interrupted) = (Meter::new(), false);
    drop(take_pinned());
    for _ in 0..plan.runs {
        match run() {
            Err(error) if error.is::<Interrupted>() => {
                interrupted = true;
                break;
            }
            done => {
                let (sample, ended) = done?;
                samples.push(sample);
                accounting.allocated += ended.allocated;
            }
        }
    }
    let done = Done::new(&meter, take_pinned(), interrupted);
    let report = Report::new(&plan, &samples, done, link.as_ref().map(AskedLink::report), accounting);
    if plan.json {
        output::json(&report)?
    } else {
        output::print(&report.to_string())?
    }
    if interrupted { Err(Interrupted.into()) } else { Ok(()) }
}

/// A run with these ports, or with a bad link before the first port.
fn over<P: Port + 'static>(
    plan: &Plan,
    link: Option<&AskedLink>,
    pairs: u16,
    mut port: impl FnMut(usize) -> Result<P, PortError>,
    stop: &AtomicBool,
) -> anyhow::Result<(Sample, Accounting)> {
    match link {
        None => once(plan, pairs, port, stop),
        Some(link) => once(plan, pairs, |pair| Ok(link.over(port(pair)?, pair)), stop),
    }
}

fn once<P: Port + 'static>(
    plan: &Plan,
    pairs: u16,
    port: impl FnMut(usize) -> Result<P, PortError>,
    stop: &AtomicBool,
) -> anyhow::Result<(Sample, Accounting)> {
    let at = |last| Address { addr: IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)), prefix_len: 24 };
    let host = |address, pages| HostOptions {
        addresses: vec![address],
        mtu: plan.mtu,
        pages,
        restored: 0,
        device: DeviceThreads::One { cpu: plan.cpus.device },
    };
    let watch = Watch::new(plan);
    let device = host(at(1), usize::from(pairs) * plan::PAGES);
    let (result, _) = with_device(port, pairs, &device, |net, pairs, _| {
        std::thread::scope(|scope| {
            let over = Over(&watch);
            let mut pairs = pairs.into_iter();
            let mut pair = || pairs.next().context("the device has too few queues");
            let ours = |scope, name, cpu, pair, address, end: ours::End| {
                let (spin, watch) = (plan.spin, &watch);
                let mut stacks = Stacks::new(net, vec![pair], &host(address, plan::PAGES))?;
                start(scope, name, cpu, move || {
                    stacks.run(|_, running| ours::run(running, watch, end, spin))?;
                    stacks.close()
                })
            };
            let flows = plan.flows;
            let mut ends: Vec<ScopedJoinHandle<'_, anyhow::Result<Accounting>>> = Vec::new();
            let kernel = |scope, cpu, end: kernel::End| {
                let watch = &watch;
                start(scope, "netmem-kernel", cpu, move || {
                    kernel::run(watch, flows, end).map(|()| Accounting::default())
                })
            };
            match plan.between {
                Between::Ours => {
                    let (source, target) = (pair()?, pair()?);
                    let to = SocketAddr::new(at(2).addr, PORT);
                    ends.push(ours(scope, "netmem-target", plan.cpus.app, target, at(2), ours::End::Target)?);
                    let source =
                        ours(scope, "netmem-source", plan.cpus.net, source, at(1), ours::End::Source { to, flows })?;
                    ends.push(source);
                }
                Between::Tap { address, kernel: peer, reverse: false, .. } => {
                    let (target, to) = kernel::Listening::open(plan.proto, SocketAddr::new(peer, 0))?;
                    ends.push(kernel(scope, plan.cpus.app, kernel::End::Target(target))?);
                    let end = ours::End::Source { to, flows };
                    ends.push(ours(scope, "netmem-source", plan.cpus.net, pair()?, address, end)?);
                }
                Between::Tap { address, reverse: true, .. } => {
                    ends.push(ours(scope, "netmem-target", plan.cpus.net, pair()?, address, ours::End::Target)?);
                    let to = SocketAddr::new(address.addr, PORT);
                    ends.push(kernel(scope, plan.cpus.app, kernel::End::Source(to))?);
                }
            }
            let sample = measure(plan, &watch, &ends, stop);
            drop(over);
            let mut accounting = Accounting::default();
            for end in ends {
                let ended = propagate(end.join())?;
                accounting.allocated += ended.allocated;
            }
            Ok((sample?, accounting))
        })
    })?;
    Ok(result)
}

fn start<'s, T: Send + 's>(
    scope: &'s Scope<'s, '_>,
    name: &str,
    cpu: usize,
    run: impl FnOnce() -> T + Send + 's,
) -> anyhow::Result<ScopedJoinHandle<'s, T>> {
    let pinned = move || {
        pin(cpu);
        run()
    };
    spawn(scope, name, pinned).context("cannot start a thread")
}

/// Waits until every flow has received bytes, and then for the time of the run. If other programs
/// had the CPUs all that time, or a flow waited for a retransmission, the run goes on until every
/// flow has received bytes in it, but no longer than [`PATIENCE`].
fn measure<T>(
    plan: &Plan,
    watch: &Watch,
    ends: &[ScopedJoinHandle<'_, T>],
    stop: &AtomicBool,
) -> anyhow::Result<Sample> {
    let wait = |until: Instant, done: &dyn Fn() -> bool| -> anyhow::Result<bool> {
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(Interrupted.into());
            }
            anyhow::ensure!(!ends.iter().any(ScopedJoinHandle::is_finished), "an end has ended before its time");
            let left = until.saturating_duration_since(Instant::now());
            if done() || left.is_zero() {
                return Ok(done());
            }
            std::thread::sleep(left.min(CHECK_EVERY));
        }
    };
    let begun = || watch.begun.load(Ordering::Relaxed);
    let all = wait(Instant::now() + PATIENCE, &|| begun() == usize::from(plan.flows))?;
    anyhow::ensure!(all, "{} of {} flows have begun in {} s", begun(), plan.flows, PATIENCE.as_secs());
    let (since, cpus, bytes, empty) = (Instant::now(), Cpus::now()?, watch.totals(), watch.empty());
    wait(since + plan.duration, &|| false)?;
    let moved = || watch.totals().iter().zip(&bytes).all(|(now, before)| now > before);
    wait(since + plan.duration + PATIENCE, &moved)?;
    let elapsed = since.elapsed();
    let (cpus_after, bytes_after, empty_after) = (Cpus::now()?, watch.totals(), watch.empty());
    let bytes = bytes_after.iter().zip(bytes).map(|(after, before)| after - before).collect();
    let idle = [0, 1].map(|end| (empty_after[end] - empty[end]) as f64 / elapsed.as_nanos() as f64);
    Ok(Sample { bytes, elapsed, cpus: plan.shares(&cpus_after.since(&cpus), idle) })
}
