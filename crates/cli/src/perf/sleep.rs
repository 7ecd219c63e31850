//! `netmem perf --spin`: a driver that sleeps, at fixed rates. Measures how often it is woken, for
//! how many packets, and how old the first packet of a wake-up is.
//!
//! ```text
//!   CPU device   NetDevice::poll ── Paced: a frame each 1/rate s, with the time in it ── rings ──┐
//!   CPU net      PollThenSleep: polls, sleeps, is woken ── the first frame after a wake-up ◄──────┘ its age: idle to busy
//! ```
//!
//! The embedded device polls all the time, so the driver's side is what is measured. The policy is
//! the same in every row. Only the rate and the kind of events differ.

use super::error::PerfError;
use super::mailbox::{Halt, idle};
use super::plan::Plan;
use hdrhistogram::Histogram;
use netmem::device::port::{Gen, Port, PortError};
use netmem::device::{NetDevice, Options, Stats};
use netmem::net::{Packet, Poll, PollThenSleep, RxQueue, SleepStats, Turn};
use netmem::pool::PeerShared;
use netmem::virtio::{NetOptions, RxMode, VhostUser, VirtioNet, VnetHdr, feature};
use netmem_measure::cpus::{pin, take_pinned};
use netmem_measure::load::{Meter, thread_time};
use netmem_measure::machine::Machine;
use netmem_measure::report::{Done, SCHEMA};
use netmem_measure::signals::Interrupted;
use netmem_measure::table::table;
use netmem_measure::threads::spawn;
use netmem_measure::units::show;
use quanta::Clock;
use serde::Serialize;
use std::fmt::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The largest number of frames of a poll.
const BUDGET: usize = 256;
/// The offset of the sending time in a frame: behind the headers of Ethernet, IPv4 and UDP.
const STAMP: usize = 42;
/// How the driver asks for signals, and the ring feature for that.
const EVENTS: [(&str, u64); 2] = [("flag", 0), ("index", feature::EVENT_IDX)];
/// The longest sleep. The driver then checks the time and signals.
const NAP: Duration = Duration::from_millis(50);
/// The longest age that the histogram distinguishes.
const AGE_NS: u64 = 1_000_000_000;
/// A row is reported when a packet has ended a sleep, or when so many polls have found packets:
/// then the rate is so high that the driver does not sleep.
const ENOUGH: u64 = 100;
/// The longest time for that after the row's own time, if other threads have the CPUs.
const PATIENCE_NS: u64 = 5_000_000_000;
/// If the generator is this far behind its rate, it does not catch up.
const BEHIND_NS: u64 = 2_000_000;

/// Sends the generator's frame at a fixed rate, with the sending time in it.
struct Paced {
    wire: Box<[u8]>,
    clock: Clock,
    begin: u64,
    interval_ns: f64,
    /// When the next frame is due, in ns since `begin`.
    due_ns: f64,
}

impl Paced {
    fn new(size: usize, rate: u64, clock: &Clock) -> Result<Self, PortError> {
        let mut wire = VnetHdr::PLAIN.to_bytes().to_vec();
        wire.extend_from_slice(Gen::new(size, None)?.frame());
        // The UDP checksum would be wrong, so it is set to "none".
        wire[VnetHdr::LEN + 40..VnetHdr::LEN + 42].fill(0);
        let interval_ns = 1e9 / rate.max(1) as f64;
        Ok(Self { wire: wire.into(), clock: clock.clone(), begin: clock.raw(), interval_ns, due_ns: 0.0 })
    }
}

impl Port for Paced {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = Gen::FEATURES;

    #[inline]
    fn peek(&mut self) -> Option<&[u8]> {
        let now = self.clock.raw();
        let behind_ns = self.clock.delta_as_nanos(self.begin, now) as f64 - self.due_ns;
        if behind_ns < 0.0 {
            return None;
        }
        if behind_ns > BEHIND_NS as f64 {
            self.due_ns += behind_ns;
        }
        self.wire[VnetHdr::LEN + STAMP..][..8].copy_from_slice(&now.to_le_bytes());
        Some(&self.wire)
    }

    #[inline]
    fn consume(&mut self) {
        self.due_ns += self.interval_ns;
    }

    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}

/// The parameters of a row.
struct Variant {
    rate: u64,
    events: &'static str,
    features: u64,
}

/// A row of the report.
#[derive(Debug, Serialize)]
struct Row {
    rate: u64,
    events: &'static str,
    received_per_s: f64,
    sleeps: u64,
    wakeups: u64,
    wakeups_per_packet: f64,
    signals_per_packet: f64,
    cpu_pct: f64,
    idle_to_busy_ns: Quantiles,
    /// Upper bounds in ns, each with the number of values above the previous bound and up to this
    /// one.
    histogram: Vec<(u64, u64)>,
}

#[derive(Debug, Serialize)]
struct Quantiles {
    p50: u64,
    p90: u64,
    p99: u64,
    p999: u64,
    max: u64,
}

#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    netmem: &'static str,
    command: &'static str,
    machine: Machine,
    done: Done,
    spin_us: u128,
    size: usize,
    rows: Vec<Row>,
}

/// Measures a driver that sleeps after `spin` without packets, at each of the plan's rates.
pub(crate) fn run(plan: &Plan, spin: Duration, stop: &AtomicBool) -> anyhow::Result<()> {
    let (mode, size) = plan.variants.first().map_or((RxMode::Small, 64), |v| (v.mode, v.size.unwrap_or(64)));
    let measurement = Measurement { plan, mode, size, spin, clock: Clock::new(), stop };
    let mut report = Report {
        schema: SCHEMA,
        netmem: env!("CARGO_PKG_VERSION"),
        command: "perf",
        machine: Machine::new("as available".into()),
        done: Done::default(),
        spin_us: spin.as_micros(),
        size,
        rows: Vec::new(),
    };
    let (meter, mut interrupted) = (Meter::new(), false);
    drop(take_pinned());
    for (rate, (events, features)) in plan.rates.iter().flat_map(|&rate| EVENTS.map(|events| (rate, events))) {
        let variant = Variant { rate, events, features };
        match measurement.measure(&variant) {
            Err(PerfError::Interrupted) => {
                interrupted = true;
                break;
            }
            row => report.rows.push(row?),
        }
    }
    report.done = Done::new(&meter, take_pinned(), interrupted);
    if plan.json {
        netmem_measure::output::json(&report)?
    } else {
        netmem_measure::output::print(&render(plan, &report))?
    }
    if interrupted { Err(Interrupted.into()) } else { Ok(()) }
}

/// What all rows have in common.
struct Measurement<'a> {
    plan: &'a Plan,
    mode: RxMode,
    /// Bytes of a frame.
    size: usize,
    /// How long the driver polls after the last packet before it sleeps.
    spin: Duration,
    clock: Clock,
    stop: &'a AtomicBool,
}

impl Measurement<'_> {
    /// Measures one row: a generator on the device's CPU, and the driver on this thread.
    fn measure(&self, v: &Variant) -> Result<Row, PerfError> {
        let (plan, size, clock) = (self.plan, self.size, &self.clock);
        let mut device = NetDevice::new(Options::default(), |_| Paced::new(size, v.rate, clock))?;
        let (front, back) = UnixStream::pair().map_err(PerfError::io("a socket pair"))?;
        let connection = device.control().serve(back)?;
        let (stats, halt) = (device.stats(), AtomicBool::new(false));
        let cpus = plan.cpus;
        let row = std::thread::scope(|scope| {
            let generator = || {
                pin(cpus.device);
                while !halt.load(Ordering::Relaxed) {
                    device.poll();
                    idle(cpus.device == cpus.net);
                }
            };
            spawn(scope, "netmem-device", generator).map_err(PerfError::io("a thread"))?;
            let _ends = Halt(&halt);
            pin(cpus.net);
            self.drive(v, front, &stats)
        });
        drop(connection);
        row
    }

    /// The driver's thread: it polls, and sleeps when there was no packet for a while.
    fn drive(&self, v: &Variant, front: UnixStream, stats: &Stats) -> Result<Row, PerfError> {
        let Self { plan, mode, size, spin, ref clock, stop } = *self;
        let name = || format!("{mode}-{size} at {}/s", v.rate);
        let options = NetOptions::new(mode)
            .ring_size(plan.ring)
            .max_frame(size)
            .lock(plan.lock)
            .reserved_huge_pages(true)
            .ring_features(plan.ring_features & !feature::EVENT_IDX | v.features);
        let backend = VhostUser::own_device(front).map_err(PerfError::Backend)?;
        let (_net, mut pairs) =
            VirtioNet::probe(backend, options).map_err(|source| PerfError::Driver { variant: name(), source })?;
        let rx = &mut pairs[0].rx;
        let mut pause = PollThenSleep::new(spin);
        // Of the packets that ended a sleep, in nanoseconds.
        let mut ages = Histogram::new_with_bounds(1, AGE_NS, 3).expect("bounds that are possible");
        // A run is long enough for two packets. A tenth of its time passes before the counters are
        // read.
        let run_ns = u64::try_from(plan.duration.as_nanos()).unwrap_or(u64::MAX).max(2_000_000_000 / v.rate.max(1));
        let (mut begin, mut before, mut warm) = (clock.raw(), Counters::default(), false);
        let (mut woken, mut found) = (false, 0);
        loop {
            let (mut first, mut frames) = (None, 0);
            rx.poll(|poll| {
                frames = poll.receive(BUDGET, &mut |packet: Packet<PeerShared>| {
                    if woken && first.is_none() {
                        let mut stamp = [0; 8];
                        let sent = packet.copy_to(STAMP, &mut stamp).map(|()| u64::from_le_bytes(stamp));
                        first = sent.ok().map(|sent| clock.delta_as_nanos(sent, clock.raw()));
                    }
                });
            });
            if let Some(age) = first {
                woken = false;
                if warm {
                    ages.saturating_record(age.max(1));
                }
            }
            found += u64::from(frames > 0);
            let elapsed = clock.delta_as_nanos(begin, clock.raw());
            let measures = warm;
            if !warm && elapsed >= run_ns / 10 {
                (warm, begin) = (true, clock.raw());
                before = Counters::now(rx.stats().frames, pause.stats(), stats);
                // A wake-up from before is not counted, and so its packet is not either.
                (woken, found) = (false, 0);
            }
            // If other threads had the CPU of the driver or of the generator all the time, there is
            // nothing to report yet.
            let enough = !ages.is_empty() || found >= ENOUGH || elapsed >= run_ns + PATIENCE_NS;
            if measures && elapsed >= run_ns && enough {
                break;
            }
            if stop.load(Ordering::Relaxed) {
                return Err(PerfError::Interrupted);
            }
            if let Some(source) = rx.stats().stopped {
                return Err(PerfError::Broken { variant: name(), source });
            }
            woken |= pause.turn(frames, &mut [rx], Some(NAP)).map_err(PerfError::io("poll"))? == Turn::Woken;
        }
        let seconds = clock.delta_as_nanos(begin, clock.raw()) as f64 / 1e9;
        let after = Counters::now(rx.stats().frames, pause.stats(), stats);
        Ok(Row::new(v, seconds, &before, &after, &ages))
    }
}

/// The counters of a row, at its beginning and at its end.
#[derive(Default)]
struct Counters {
    frames: u64,
    sleeps: SleepStats,
    /// Signals that the device has sent.
    signals: u64,
    /// Seconds for which the driver's thread ran.
    busy_s: f64,
}

impl Counters {
    fn now(frames: u64, sleeps: SleepStats, stats: &Stats) -> Self {
        Self { frames, sleeps, signals: stats.calls.load(Ordering::Relaxed), busy_s: thread_time() as f64 / 1e9 }
    }
}

impl Row {
    fn new(v: &Variant, seconds: f64, before: &Counters, after: &Counters, ages: &Histogram<u64>) -> Self {
        let at = |quantile| ages.value_at_quantile(quantile);
        let frames = after.frames - before.frames;
        let wakeups = after.sleeps.wakeups - before.sleeps.wakeups;
        let per_packet = |n: u64| if frames == 0 { 0.0 } else { n as f64 / frames as f64 };
        let steps = ages.iter_log(1000, 2.0);
        Self {
            rate: v.rate,
            events: v.events,
            received_per_s: frames as f64 / seconds,
            sleeps: after.sleeps.sleeps - before.sleeps.sleeps,
            wakeups,
            wakeups_per_packet: per_packet(wakeups),
            signals_per_packet: per_packet(after.signals - before.signals),
            cpu_pct: (after.busy_s - before.busy_s) / seconds * 100.0,
            idle_to_busy_ns: Quantiles { p50: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), max: ages.max() },
            histogram: steps
                .map(|step| (step.value_iterated_to() + 1, step.count_since_last_iteration()))
                .skip_while(|step| step.1 == 0)
                .collect(),
        }
    }
}

fn render(plan: &Plan, report: &Report) -> String {
    let (m, cpus) = (&report.machine, plan.cpus);
    let mut out = format!(
        "netmem {} · {} CPUs (net {}, device {}) · Linux {} · frames of {} bytes\n\
         the driver polls for {} us after the last packet, then sleeps; {} s for each row\n\n",
        report.netmem,
        m.cpus,
        cpus.net,
        cpus.device,
        m.kernel,
        report.size,
        report.spin_us,
        plan.duration.as_secs_f64(),
    );
    let head = ["rate", "events", "received/s", "wake-ups", "wake-ups/pkt", "signals/pkt", "CPU", "idle to busy"];
    let cells = |row: &Row| {
        let time = |ns: u64| show(ns as f64, "ns");
        let q = &row.idle_to_busy_ns;
        let latency = match row.histogram.is_empty() {
            true => "never asleep".into(),
            false => format!("{} (99 %: {}, max {})", time(q.p50), time(q.p99), time(q.max)),
        };
        vec![
            row.rate.to_string(),
            row.events.into(),
            show(row.received_per_s, "packets/s"),
            row.wakeups.to_string(),
            format!("{:.4}", row.wakeups_per_packet),
            format!("{:.3}", row.signals_per_packet),
            format!("{:.1} %", row.cpu_pct),
            latency,
        ]
    };
    let rows = table(&head, report.rows.iter().map(cells), |column| (2..7).contains(&column));
    let _ = writeln!(out, "{rows}\n{}", report.done.lines());
    // The driver sleeps most in the first row.
    let first = report.rows.first().map(|row| row.rate);
    for row in report.rows.iter().filter(|row| Some(row.rate) == first && !row.histogram.is_empty()) {
        let _ = writeln!(out, "\nidle to busy at {} packets/s, {}:", row.rate, row.events);
        let most = row.histogram.iter().map(|step| step.1).max().unwrap_or(1).max(1);
        for &(bound, count) in &row.histogram {
            let bar = "#".repeat(usize::try_from(count * 50 / most).unwrap_or(0));
            let _ = writeln!(out, "{:>8} us {count:>8} {bar}", format!("< {}", bound / 1000));
        }
    }
    out
}
