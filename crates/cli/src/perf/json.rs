//! The report: what `--json` prints, and what the table is made of. Field names are a contract; new ones may be added.

use super::engine::Sample;
use super::error::PerfError;
use super::plan::{Alloc, Plan, Variant};
use crate::args::DeviceArg;
use crate::link::LinkReport;
use crate::machine::Machine;
use crate::stats::{Change, Spread};
use netmem::pool::PoolStats;
use netmem::virtio::net::feature;
use serde::Serialize;
use std::collections::BTreeMap;

/// One object on standard output.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) netmem: &'static str,
    pub(crate) command: &'static str,
    pub(crate) machine: Machine,
    pub(crate) params: Params,
    pub(crate) variants: Vec<Row>,
    /// What happened on the link of `--link`, in all runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) link: Option<LinkReport>,
    /// The page pools of all rows that have them.
    pub(crate) pool: PoolReport,
    /// The pools of the rows that take a page per packet.
    pub(crate) page: PoolReport,
}

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
    pub(crate) ring_features: Vec<&'static str>,
    pub(crate) lock: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) name: String,
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
}

/// What the runs of a row say.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) unit: &'static str,
    #[serde(flatten)]
    pub(crate) rate: Spread,
    pub(crate) runs: usize,
    /// Frames as they are in memory, without preamble, gap and frame check sequence.
    pub(crate) gbps: f64,
    /// Driver time in polls that found packets.
    pub(crate) ns_per_packet: f64,
    pub(crate) ns_per_packet_min: f64,
    pub(crate) ns_per_packet_max: f64,
    /// The same in ticks of the time stamp counter.
    pub(crate) tsc_per_packet: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device_ns_per_packet: Option<f64>,
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    /// Frames that netmem took and the program never saw: the device's drops and the driver's.
    pub(crate) dropped: u64,
    pub(crate) device_drops: BTreeMap<&'static str, u64>,
    /// Times that something else was given the driver's CPU.
    pub(crate) preempted: u64,
    pub(crate) errors: BTreeMap<&'static str, u64>,
    /// On the pool's rows: packets per second against the row beside it with a page per packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) change_pct: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) change: Option<Change>,
    /// The same for driver time per packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ns_change: Option<Change>,
}

/// Pages, all runs together.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct PoolReport {
    pub(crate) allocated: u64,
    pub(crate) returned: u64,
    pub(crate) mapped: u64,
    pub(crate) unmapped: u64,
    pub(crate) inflight: u64,
    pub(crate) leaked: u64,
    pub(crate) errors: BTreeMap<&'static str, u64>,
}

impl PoolReport {
    fn of<'a>(samples: impl Iterator<Item = &'a Sample>) -> Self {
        let (mut stats, mut leaked, mut errors) = (PoolStats::default(), 0, BTreeMap::new());
        for sample in samples {
            stats += sample.pool;
            leaked += sample.leaked;
            merge(&mut errors, &sample.errors);
        }
        Self { leaked, errors, ..Self::new(stats) }
    }

    /// What the pools counted, all of them together.
    pub(crate) fn new(stats: PoolStats) -> Self {
        Self {
            allocated: stats.allocated(),
            returned: stats.returned(),
            mapped: stats.mapped,
            unmapped: stats.unmapped,
            inflight: stats.inflight(),
            ..Self::default()
        }
    }

    /// Whether every page came back.
    pub(crate) fn balance(&self) -> Result<(), PerfError> {
        let Self { leaked, mapped, unmapped, .. } = *self;
        if leaked > 0 || mapped != unmapped {
            return Err(PerfError::Unbalanced { leaked, mapped, unmapped });
        }
        Ok(())
    }
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

impl Report {
    pub(crate) fn new(plan: &Plan, samples: &[Vec<Sample>], link: Option<LinkReport>) -> Self {
        let all = || plan.variants.iter().zip(samples);
        let pools = |alloc| {
            let rows = all().filter(move |(v, _)| v.alloc == alloc);
            PoolReport::of(rows.flat_map(|(_, samples)| samples))
        };
        let backing = samples.iter().flatten().next().map_or("none".into(), |s| s.backing.to_string());
        let rows = all().map(|(v, own)| {
            let twin = all().find(|(other, _)| v.alloc == Alloc::Pool && v.is_twin(other)).map(|(_, samples)| samples);
            Row::new(v, own, twin.map_or(&[], Vec::as_slice))
        });
        Self {
            netmem: env!("CARGO_PKG_VERSION"),
            command: "perf",
            machine: Machine::new(backing),
            params: Params::new(plan),
            variants: rows.collect(),
            link,
            pool: pools(Alloc::Pool),
            page: pools(Alloc::Page),
        }
    }

    /// Whether every page came back.
    pub(crate) fn verdict(&self) -> Result<(), PerfError> {
        self.pool.balance()?;
        self.page.balance()
    }
}

impl Params {
    fn new(plan: &Plan) -> Self {
        Self {
            device: plan.device.to_string(),
            port: (plan.device == DeviceArg::Embedded).then(|| plan.port.to_string()),
            modes: distinct(plan.variants.iter().map(|v| v.mode.to_string())),
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
            ring_features: (0..64)
                .map(|bit| plan.ring_features & 1 << bit)
                .filter(|&mask| mask != 0)
                .map(feature::name)
                .collect(),
            lock: plan.lock,
        }
    }
}

/// Each value once, in the order of their first.
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
            mode: v.mode.to_string(),
            size: v.size,
            alloc: v.alloc.name(),
            consumer: v.consumer.name(),
            queues: v.queues,
            skipped: v.skipped,
            measured: (!samples.is_empty()).then(|| Measured::new(samples, twin)),
        }
    }
}

impl Measured {
    fn new(samples: &[Sample], twin: &[Sample]) -> Self {
        let median = |of: &dyn Fn(&Sample) -> f64| Spread::of(samples.iter().map(of)).median;
        let pairs = |of: fn(&Sample) -> f64| Change::of(samples.iter().map(of).zip(twin.iter().map(of)));
        let ns = Spread::of(samples.iter().map(driver_ns));
        let device = |s: &Sample| s.device.as_ref().map_or(0.0, |d| per_packet(d.busy_ns, d.frames));
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
            gbps: median(&|s| s.counts.bytes as f64 * 8.0 / s.counts.elapsed_ns.max(1) as f64),
            ns_per_packet: ns.median,
            ns_per_packet_min: ns.min,
            ns_per_packet_max: ns.max,
            tsc_per_packet: median(&|s| per_packet(s.counts.busy_ticks, s.counts.frames)),
            device_ns_per_packet: samples.iter().all(|s| s.device.is_some()).then(|| median(&device)),
            frames: samples.iter().map(|s| s.counts.frames).sum(),
            bytes: samples.iter().map(|s| s.counts.bytes).sum(),
            dropped,
            device_drops,
            preempted: samples.iter().map(|s| s.counts.preempted).sum(),
            errors,
            change_pct: change.map(|c| c.median_pct),
            change,
            ns_change: pairs(driver_ns),
        }
    }
}
