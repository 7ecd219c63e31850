//! The report: what `--json` prints, and what the table is made of. Field names are a contract,
//! which `schema/perf.json` has; new ones may be added. Units are in the names.

use super::compare::{Comparison, compare};
use super::plan::{Plan, Variant};
use super::sample::{Sample, SocketMode};
use crate::args::{AllocArg, DeviceArg};
use crate::link::LinkReport;
use netmem::pool::PoolStats;
use netmem_measure::goals::{Goal, Unmet};
use netmem_measure::machine::Machine;
use netmem_measure::report::{Done, PoolReport, SCHEMA, Unbalanced, names};
use netmem_measure::stats::{Change, Spread};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// One object on standard output.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// [`netmem_measure::report::SCHEMA`].
    pub(crate) schema: u32,
    pub(crate) netmem: &'static str,
    pub(crate) command: &'static str,
    pub(crate) machine: Machine,
    pub(crate) params: Params,
    pub(crate) done: Done,
    pub(crate) variants: Vec<Row>,
    /// The events on the link of `--link`, in all runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) link: Option<LinkReport>,
    /// The page pools of all rows that have them.
    pub(crate) pool: PoolReport,
    /// The pools of the rows that take a page per packet.
    pub(crate) page: PoolReport,
    /// The pools of the rows that take page fragments. They map blocks of fragments.
    pub(crate) frags: PoolReport,
    /// The page pool's rows compared with the baselines.
    pub(crate) comparisons: Vec<Comparison>,
    /// The goals of the comparisons, and whether this measurement reached them.
    pub(crate) goals: Vec<Goal>,
}

/// The planned measurement. [`Done`] and each row report what was done.
#[derive(Debug, Serialize)]
pub(crate) struct Params {
    pub(crate) device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) port: Option<String>,
    pub(crate) modes: Vec<String>,
    pub(crate) sizes: Vec<usize>,
    pub(crate) allocs: Vec<&'static str>,
    pub(crate) consumers: Vec<&'static str>,
    pub(crate) queues: Vec<u16>,
    pub(crate) xdp: String,
    pub(crate) cpus: BTreeMap<&'static str, usize>,
    pub(crate) duration_s: f64,
    pub(crate) warmup_s: f64,
    pub(crate) runs: u32,
    pub(crate) ring: u16,
    /// The features that the device must have.
    pub(crate) ring_features: Vec<&'static str>,
    pub(crate) lock: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// How frames lie in buffers.
    pub(crate) mode: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) size: Option<usize>,
    pub(crate) alloc: &'static str,
    pub(crate) consumer: &'static str,
    pub(crate) queues: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<&'static str>,
    #[serde(flatten)]
    pub(crate) measured: Option<Measured>,
    /// The names of the features that driver and device have negotiated. Empty if there are none,
    /// as with AF_XDP.
    pub(crate) features: Vec<&'static str>,
    /// How the AF_XDP socket of each queue was bound. Empty without AF_XDP.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) sockets: Vec<SocketMode>,
    /// The CPUs that threads were moved to.
    pub(crate) cpus: BTreeSet<usize>,
    /// Run by run, in the order in which they were made.
    pub(crate) samples: Vec<Run>,
}

/// One run of a row.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Run {
    pub(crate) packets_per_s: f64,
    pub(crate) ns_per_packet: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device_ns_per_packet: Option<f64>,
    /// How long frames were counted.
    pub(crate) elapsed_ns: u64,
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    pub(crate) preempted: u64,
}

/// The results of a row's runs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    /// The unit of median, min and max: packets/s.
    pub(crate) unit: &'static str,
    #[serde(flatten)]
    pub(crate) rate: Spread,
    pub(crate) runs: usize,
    /// Bits of frames as they are in memory, without preamble, gap and frame check sequence.
    pub(crate) bits_per_s: f64,
    /// The driver's own time: in polls that found packets, while the driver's thread had the CPU.
    pub(crate) ns_per_packet: f64,
    pub(crate) ns_per_packet_min: f64,
    pub(crate) ns_per_packet_max: f64,
    /// The same in ticks of the time stamp counter.
    pub(crate) tsc_per_packet: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device_ns_per_packet: Option<f64>,
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    /// Frames that netmem received and the program never got: drops of the device and of the
    /// driver.
    pub(crate) dropped: u64,
    pub(crate) device_drops: BTreeMap<&'static str, u64>,
    /// How often another thread got the driver's CPU.
    pub(crate) preempted: u64,
    pub(crate) errors: BTreeMap<&'static str, u64>,
    /// For the pool's rows: packets per second compared with the row that allocates a page per
    /// packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) change_pct: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) change: Option<Change>,
    /// The same for driver time per packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ns_change: Option<Change>,
}

/// The counts of the pools of some runs, together.
fn pool_report<'a>(samples: impl Iterator<Item = &'a Sample>) -> PoolReport {
    let (mut stats, mut leaked, mut errors) = (PoolStats::default(), 0, BTreeMap::new());
    for sample in samples {
        stats += sample.pool;
        leaked += sample.leaked;
        merge(&mut errors, &sample.errors);
    }
    PoolReport { leaked, errors, ..PoolReport::new(stats) }
}

fn merge(into: &mut BTreeMap<&'static str, u64>, from: &BTreeMap<&'static str, u64>) {
    for (name, n) in from {
        *into.entry(name).or_default() += n;
    }
}

/// Packets per second.
fn rate(s: &Sample) -> f64 {
    s.counts.frames as f64 * 1e9 / s.counts.elapsed_ns.max(1) as f64
}

fn per_packet(total: u64, frames: u64) -> f64 {
    total as f64 / frames.max(1) as f64
}

fn driver_ns(s: &Sample) -> f64 {
    per_packet(s.counts.busy_ns, s.counts.frames)
}

fn device_ns(s: &Sample) -> f64 {
    s.device.as_ref().map_or(0.0, |d| per_packet(d.busy_ns, d.frames))
}

impl Report {
    pub(crate) fn new(plan: &Plan, samples: &[Vec<Sample>], done: Done, link: Option<LinkReport>) -> Self {
        let all = || plan.variants.iter().zip(samples);
        let pools = |alloc| {
            let rows = all().filter(move |(v, _)| v.alloc == alloc);
            pool_report(rows.flat_map(|(_, samples)| samples))
        };
        let backing = samples.iter().flatten().next().map_or("none".into(), |s| s.backing.to_string());
        let rows = all().map(|(v, own)| {
            let page = |other: &Variant| (v.alloc, other.alloc) == (AllocArg::Pool, AllocArg::Page) && v.is_twin(other);
            let twin = all().find(|(other, _)| page(other)).map(|(_, samples)| samples);
            Row::new(v, own, twin.map_or(&[], Vec::as_slice))
        });
        let machine = Machine::new(backing);
        let (comparisons, goals) = compare(&plan.variants, samples, rate, driver_ns, &machine.percpu);
        Self {
            schema: SCHEMA,
            netmem: env!("CARGO_PKG_VERSION"),
            command: "perf",
            machine,
            params: Params::new(plan),
            done,
            variants: rows.collect(),
            link,
            pool: pools(AllocArg::Pool),
            page: pools(AllocArg::Page),
            frags: pools(AllocArg::Frags),
            comparisons,
            goals,
        }
    }

    /// The goals and rows that `--check` makes an error.
    pub(crate) fn unmet(&self) -> Unmet {
        Unmet::of(self.variants.iter().map(|row| row.skipped.is_some()), &self.goals)
    }

    /// Fails unless every page was returned.
    pub(crate) fn verdict(&self) -> Result<(), Unbalanced> {
        self.pool.balance()?;
        self.page.balance()?;
        self.frags.balance()
    }
}

impl Params {
    fn new(plan: &Plan) -> Self {
        Self {
            device: plan.device.to_string(),
            port: (plan.device == DeviceArg::Embedded).then(|| plan.port.to_string()),
            modes: distinct(plan.variants.iter().map(|v| v.shape.clone())),
            sizes: distinct(plan.variants.iter().filter_map(|v| v.size)),
            allocs: distinct(plan.variants.iter().map(|v| v.alloc.name())),
            consumers: distinct(plan.variants.iter().map(|v| v.consumer.name())),
            queues: distinct(plan.variants.iter().map(|v| v.queues)),
            xdp: format!("{:?}", plan.xdp).to_lowercase(),
            cpus: [("net", plan.cpus.net), ("app", plan.cpus.app), ("device", plan.cpus.device)].into(),
            duration_s: plan.duration.as_secs_f64(),
            warmup_s: plan.warmup.as_secs_f64(),
            runs: plan.runs,
            ring: plan.ring,
            ring_features: names(plan.ring_features).collect(),
            lock: plan.lock,
        }
    }
}

/// Each value once, in the order in which the values first occur.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.fold(Vec::new(), |mut seen, value| {
        if !seen.contains(&value) {
            seen.push(value);
        }
        seen
    })
}

impl Row {
    fn new(v: &Variant, samples: &[Sample], twin: &[Sample]) -> Self {
        Self {
            name: v.name.clone(),
            mode: v.shape.clone(),
            size: v.size,
            alloc: v.alloc.name(),
            consumer: v.consumer.name(),
            queues: v.queues,
            skipped: v.skipped,
            measured: (!samples.is_empty()).then(|| Measured::new(samples, twin)),
            features: samples.first().map_or_else(Vec::new, |s| names(s.features).collect()),
            sockets: samples.first().map_or_else(Vec::new, |s| s.sockets.clone()),
            cpus: samples.iter().flat_map(|s| s.cpus.iter().copied()).collect(),
            samples: samples.iter().map(Run::new).collect(),
        }
    }
}

impl Run {
    fn new(s: &Sample) -> Self {
        Self {
            packets_per_s: rate(s),
            ns_per_packet: driver_ns(s),
            device_ns_per_packet: s.device.as_ref().map(|_| device_ns(s)),
            elapsed_ns: s.counts.elapsed_ns,
            frames: s.counts.frames,
            bytes: s.counts.bytes,
            preempted: s.counts.preempted,
        }
    }
}

impl Measured {
    fn new(samples: &[Sample], twin: &[Sample]) -> Self {
        let median = |of: &dyn Fn(&Sample) -> f64| Spread::of(samples.iter().map(of)).median;
        let pairs = |of: fn(&Sample) -> f64| Change::of(samples.iter().map(of).zip(twin.iter().map(of)));
        let ns = Spread::of(samples.iter().map(driver_ns));
        let (mut errors, mut device_drops) = (BTreeMap::new(), BTreeMap::new());
        for sample in samples {
            merge(&mut errors, &sample.errors);
            if let Some(device) = &sample.device {
                merge(&mut device_drops, &device.drops);
            }
        }
        let by_driver =
            ["short", "bad_header", "not_negotiated", "not_linear"].iter().filter_map(|name| errors.get(name));
        let dropped = device_drops.values().chain(by_driver).sum();
        let change = pairs(rate);
        Self {
            unit: "packets/s",
            rate: Spread::of(samples.iter().map(rate)),
            runs: samples.len(),
            bits_per_s: median(&|s| s.counts.bytes as f64 * 8e9 / s.counts.elapsed_ns.max(1) as f64),
            ns_per_packet: ns.median,
            ns_per_packet_min: ns.min,
            ns_per_packet_max: ns.max,
            tsc_per_packet: median(&|s| per_packet(s.counts.busy_ticks, s.counts.frames)),
            device_ns_per_packet: samples.iter().all(|s| s.device.is_some()).then(|| median(&device_ns)),
            frames: samples.iter().map(|s| s.counts.frames).sum(),
            bytes: samples.iter().map(|s| s.counts.bytes).sum(),
            dropped,
            device_drops: (device_drops),
            preempted: samples.iter().map(|s| s.counts.preempted).sum(),
            errors: (errors),
            change_pct: change.map(|c| c.median_pct),
            change,
            ns_change: pairs(driver_ns),
        }
    }
}
