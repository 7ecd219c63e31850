//! `netmem perf --proto tcp|udp`: flows between two ends, measured at the receiver.
//!
//! ```text
//!   both ours   source's stack ── pair 0 ── Cross ── pair 1 ── target's stack      one device, its thread apart
//!   tap         stack ── pair 0 ── tap ── the kernel's sockets
//! ```
//!
//! [`plan`] checks the arguments, [`ours`] and [`kernel`] are the two kinds of ends, with the tasks
//! of [`flows`] on ours; [`pace`] has when messages are due and how long requests took, [`search`]
//! finds the highest rate by bisection, and [`report`] shows the results. [`hosts`] has the same
//! ends on more hosts than one. The main thread samples the counters of [`watch`] at the beginning
//! and at the end of a run. The ends take no part in that.

mod cookie;
mod flows;
pub(super) mod hosts;
mod kernel;
mod ours;
mod pace;
mod plan;
mod report;
mod search;
mod watch;

use super::against;
use super::live::answering;
use crate::args::{PerfArgs, SearchArg};
use crate::host::{Accounting, DeviceThreads, HostOptions, Stacks, with_device};
use crate::link::{AskedLink, one_each};
use crate::metrics::Server;
use anyhow::Context;
use cookie::Cookie;
use netmem::device::port::{Cross, Port, PortError, Tap};
use netmem_inet::Address;
use netmem_measure::cpus::{pin, take_pinned};
use netmem_measure::load::{Cpus, Meter};
use netmem_measure::output;
use netmem_measure::report::Done;
use netmem_measure::signals::Interrupted;
use netmem_measure::threads::{propagate, spawn};
use pace::Latencies;
use plan::{Between, Plan, Proto};
use report::{Interval, Measured, Report, Sample};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};
use watch::{Current, Flows, Over, Route, Routes, Watch};

/// The target's port.
const PORT: u16 = 5201;
/// The longest time that is waited for all flows to begin, and again for all of them to end.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often threads check whether the run is over.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// Descriptors that the flows may need.
pub(super) fn descriptors(args: &PerfArgs) -> usize {
    let hosts = args.hosts.to.len().max(1);
    let flows = if args.hosts.agent.is_some() { plan::MAX_FLOWS } else { args.flows.unwrap_or(1) };
    2 * usize::from(flows) * hosts
}

/// Runs the measurement.
pub(super) fn run(args: &PerfArgs, stop: &AtomicBool) -> anyhow::Result<()> {
    let plan = Plan::new(args)?;
    if let Some(other) = &args.against {
        let unlimited = plan.search.is_none() && plan.rates == [None];
        return against::streams(other, plan.runs, unlimited.then(|| plan.work.message()), plan.json, stop);
    }
    exact_timers()?;
    let link = AskedLink::open(plan.link, plan.pcap.as_deref())?;
    let (server, current) = (Server::open(args.metrics)?, Current::default());
    let runs = Runs {
        plan: &plan,
        link: link.as_ref(),
        stop,
        current: &current,
        accounting: Accounting::default(),
        rows: Vec::new(),
    };
    answering(server.as_ref(), |page| current.figures(page, link.as_ref()), || all(runs))
}

/// For this thread and those it starts: a wait until a message is due would last up to 50 us longer
/// otherwise.
fn exact_timers() -> anyhow::Result<()> {
    rustix::thread::set_current_timer_slack(NonZeroU64::new(1)).context("the timers of a thread")
}

/// Makes all runs, and prints the report.
fn all(mut runs: Runs<'_>) -> anyhow::Result<()> {
    let (plan, link) = (runs.plan, runs.link);
    let meter = Meter::new();
    drop(take_pinned());
    let found = match plan.search {
        None => runs.rates(&plan.rates).map(|()| None),
        Some(goal) => runs.search(goal).map(Some),
    };
    let (found, interrupted) = match found {
        Err(error) if error.is::<Interrupted>() => (None, true),
        found => (found?, false),
    };
    let done = Done::new(&meter, take_pinned(), interrupted);
    let Runs { accounting, rows, .. } = runs;
    let report = Report::new(plan, &rows, found, done, link.and_then(AskedLink::report), accounting);
    if plan.json {
        output::json(&report)?
    } else {
        output::print(&report.to_string())?
    }
    link.map_or(Ok(()), AskedLink::finish)?;
    if interrupted { Err(Interrupted.into()) } else { Ok(()) }
}

/// The runs of a measurement.
struct Runs<'a> {
    plan: &'a Plan,
    link: Option<&'a AskedLink>,
    stop: &'a AtomicBool,
    current: &'a Current,
    accounting: Accounting,
    rows: Vec<Measured>,
}

impl Runs<'_> {
    /// Measures each rate, in turns.
    fn rates(&mut self, rates: &[Option<u64>]) -> anyhow::Result<()> {
        let first = self.rows.len();
        self.rows.extend(rates.iter().map(|&rate| Measured { rate, samples: Vec::new() }));
        for _ in 0..self.plan.runs {
            for row in first..self.rows.len() {
                let sample = self.run(self.rows[row].rate)?;
                self.rows[row].samples.push(sample);
            }
        }
        Ok(())
    }

    /// Finds the highest rate that reaches a goal.
    fn search(&mut self, goal: SearchArg) -> anyhow::Result<Option<u64>> {
        search::search(goal, &self.plan.work, self.plan.flows, |rate| {
            self.rates(&[rate])?;
            Ok(self.rows.last().map(|row| row.samples.clone()).unwrap_or_default())
        })
    }

    fn run(&mut self, rate: Option<u64>) -> anyhow::Result<Sample> {
        let (sample, ended) = match &self.plan.between {
            Between::Ours => self.over(rate, 2, one_each(Cross::cable().into())),
            Between::Tap { name, .. } => self.over(rate, 1, one_each(Tap::open(name, 1, true)?)),
        }?;
        self.accounting.allocated += ended.allocated;
        Ok(sample)
    }

    /// A run with these ports, or with a bad link before the first port.
    fn over<P: Port + 'static>(
        &self,
        rate: Option<u64>,
        pairs: u16,
        mut port: impl FnMut(usize) -> Result<P, PortError>,
    ) -> anyhow::Result<(Sample, Accounting)> {
        let watch = self.plan.watch(rate)?;
        self.current.set(&watch);
        match self.link {
            None => once(self.plan, &watch, pairs, port, self.stop),
            Some(link) => once(self.plan, &watch, pairs, |pair| Ok(link.over(port(pair)?, pair)), self.stop),
        }
    }
}

impl Plan {
    fn watch(&self, rate: Option<u64>) -> anyhow::Result<Arc<Watch>> {
        let datagrams = self.work.proto == Proto::Udp;
        let has_target = matches!(self.between, Between::Ours) || datagrams && self.ends()[1] == "kernel";
        let flows = Flows::both(self.flows, Cookie::random()?);
        Ok(Arc::new(Watch::new(self.work, flows, rate, has_target)))
    }
}

fn once<P: Port + 'static>(
    plan: &Plan,
    watch: &Watch,
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
    let device = host(at(1), usize::from(pairs) * plan::PAGES);
    let (result, _) = with_device(port, pairs, &device, |net, pairs, _| {
        std::thread::scope(|scope| {
            let over = Over(watch);
            let mut pairs = pairs.into_iter();
            let mut pair = || pairs.next().context("the device has too few queues");
            let ours = |scope, name, cpu, pair, address, end: ours::End| {
                let spin = plan.spin;
                let mut stacks = Stacks::new(net, vec![pair], &host(address, plan::PAGES))?;
                start(scope, name, cpu, move || {
                    stacks.run(|_, running| ours::run(running, watch, &end, spin))?;
                    stacks.close()
                })
            };
            let routes = |to| Arc::new(OnceLock::from(vec![Route { to, flows: plan.flows }]));
            let target = || ours::End { targets: vec![plan.flows], routes: Routes::default() };
            let mut ends: Vec<ScopedJoinHandle<'_, anyhow::Result<Accounting>>> = Vec::new();
            let kernel = |scope, cpu, end: kernel::End| {
                start(scope, "netmem-kernel", cpu, move || kernel::run(watch, &end).map(|()| Accounting::default()))
            };
            match plan.between {
                Between::Ours => {
                    let (first, second) = (pair()?, pair()?);
                    let to = SocketAddr::new(at(2).addr, PORT);
                    ends.push(ours(scope, "netmem-target", plan.cpus.app, second, at(2), target())?);
                    let end = ours::End { targets: Vec::new(), routes: routes(to) };
                    ends.push(ours(scope, "netmem-source", plan.cpus.net, first, at(1), end)?);
                }
                Between::Tap { address, kernel: peer, reverse: false, .. } => {
                    let (listening, to) = kernel::Listening::open(plan.work.proto, SocketAddr::new(peer, 0))?;
                    let none = Arc::new(OnceLock::from(Vec::new()));
                    let end = kernel::End { targets: vec![(listening, plan.flows)], routes: none };
                    ends.push(kernel(scope, plan.cpus.app, end)?);
                    let end = ours::End { targets: Vec::new(), routes: routes(to) };
                    ends.push(ours(scope, "netmem-source", plan.cpus.net, pair()?, address, end)?);
                }
                Between::Tap { address, reverse: true, .. } => {
                    ends.push(ours(scope, "netmem-target", plan.cpus.net, pair()?, address, target())?);
                    let to = SocketAddr::new(address.addr, PORT);
                    let end = kernel::End { routes: routes(to), ..Default::default() };
                    ends.push(kernel(scope, plan.cpus.app, end)?);
                }
            }
            let sample = measure(plan, watch, &ends, stop);
            drop(over);
            let mut accounting = Accounting::default();
            for end in ends {
                let ended = propagate(end.join())?;
                accounting.allocated += ended.allocated;
            }
            let (datagrams, latencies) = (watch.datagrams(), watch.latencies());
            Ok((Sample { datagrams, latencies, ..sample? }, accounting))
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

/// Waits until every flow has begun, and then for the time of the run. If other programs had the
/// CPUs all that time, or a flow waited for a retransmission, the run goes on until every flow has
/// received something in it, but no longer than [`PATIENCE`]. The ends are over when this returns.
fn measure(
    plan: &Plan,
    watch: &Watch,
    ends: &[ScopedJoinHandle<'_, anyhow::Result<Accounting>>],
    stop: &AtomicBool,
) -> anyhow::Result<Sample> {
    let wait = |until: Instant, done: &dyn Fn() -> bool| {
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
    let all = wait(Instant::now() + PATIENCE, &|| watch.have_begun())?;
    anyhow::ensure!(all, "{} of {} flows have begun in {} s", watch.begun(), plan.flows, PATIENCE.as_secs());
    let since = *watch.window.since.get_or_init(Instant::now);
    let (cpus, before, [sent, _], empty) = (Cpus::now()?, watch.totals(), watch.datagrams(), watch.empty());
    let (mut intervals, mut last) = (Vec::new(), (since, before.iter().sum::<u64>()));
    for interval in pace::intervals(plan.interval, plan.duration) {
        wait(since + interval, &|| false)?;
        let now = (Instant::now(), watch.totals().iter().sum());
        let line = Interval { until: now.0 - since, took: now.0 - last.0, amount: now.1 - last.1 };
        if !plan.json {
            output::print(&line.show(&plan.work, watch.rate))?;
        }
        intervals.push(line);
        last = now;
    }
    wait(since + plan.duration, &|| false)?;
    let moved = || watch.totals().iter().zip(&before).all(|(now, before)| now > before);
    wait(since + plan.duration + PATIENCE, &moved)?;
    let elapsed = watch.window.end.get_or_init(Instant::now).duration_since(since);
    let (cpus_after, after, [sent_after, _], empty_after) =
        (Cpus::now()?, watch.totals(), watch.datagrams(), watch.empty());
    let amounts = after.iter().zip(before).map(|(after, before)| after - before).collect();
    let idle = [0, 1].map(|end| (empty_after[end] - empty[end]) as f64 / elapsed.as_nanos() as f64);
    let cpus = plan.shares(&cpus_after.since(&cpus), idle);
    Ok(Sample {
        amounts,
        elapsed,
        intervals,
        sent: sent_after - sent,
        // When the ends have ended.
        datagrams: [0; 2],
        latencies: Latencies::default(),
        cpu_ns: report::cpu_ns(&cpus, elapsed),
        cpus,
    })
}
