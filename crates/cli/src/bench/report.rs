//! The report: what `--json` prints, and what the table and the charts are made of. Field names are a contract; new ones
//! may be added.

use super::plan::Plan;
use crate::machine::Machine;
use crate::perf::PoolReport;
use crate::stats::Spread;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// One suite: an object on standard output, or one of several in it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) netmem: &'static str,
    pub(crate) command: &'static str,
    pub(crate) suite: &'static str,
    pub(crate) machine: Machine,
    pub(crate) params: Params,
    pub(crate) variants: Vec<Row>,
    /// What the suite was built to reach, and whether it did this time.
    pub(crate) goals: Vec<Goal>,
    /// Pages that the suite moved.
    pub(crate) pool: PoolReport,
}

/// Several suites, as one object.
#[derive(Debug, Serialize)]
pub(crate) struct Reports<'a> {
    pub(crate) netmem: &'static str,
    pub(crate) command: &'static str,
    pub(crate) suites: &'a [Report],
}

#[derive(Debug, Serialize)]
pub(crate) struct Params {
    pub(crate) threads: Vec<usize>,
    /// Where threads ran, the first thread first.
    pub(crate) cpus: Vec<usize>,
    /// How long each thread worked for one value.
    pub(crate) duration_s: f64,
    /// As planned; each row says how many it had.
    pub(crate) runs: u32,
}

impl Params {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            threads: plan.threads.clone(),
            cpus: plan.cpus[..plan.most().min(plan.cpus.len())].to_vec(),
            duration_s: plan.duration.as_secs_f64(),
            runs: plan.runs,
        }
    }
}

/// What a row is about.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Head {
    /// Unlike that of any other row of the section with as many threads.
    pub(crate) name: String,
    pub(crate) section: &'static str,
    pub(crate) threads: usize,
    /// Operation that the value is for.
    pub(crate) per: &'static str,
    pub(crate) unit: &'static str,
    /// Counters that each thread uses in turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) counters: Option<usize>,
    /// Pages in a magazine of the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) magazine: Option<usize>,
    /// Page order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) order: Option<u8>,
    /// Where the count of an object lies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) layout: Option<&'static str>,
    /// Bindings that fragments come from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bindings: Option<u32>,
    /// How the pages of a binding follow each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sequence: Option<&'static str>,
    /// Whether device memory is received into or sent from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) direction: Option<&'static str>,
    /// Other per-CPU counts that are alive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) others: Option<usize>,
}

/// One value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    pub(crate) value: f64,
    /// The same in ticks of the time stamp counter, where there is one and the value is a time.
    pub(crate) tsc: Option<f64>,
    /// Nanoseconds for which something else had a CPU meanwhile.
    pub(crate) lost_ns: u64,
}

/// A row, and what its runs say.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) head: Head,
    /// How per-CPU data was reached.
    pub(crate) percpu: String,
    /// Why it was not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
    /// What is to be known of how it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
    #[serde(flatten)]
    pub(crate) measured: Option<Measured>,
    /// Run by run.
    #[serde(skip)]
    pub(crate) samples: Vec<Sample>,
}

/// What the runs of a row say.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    #[serde(flatten)]
    pub(crate) value: Spread,
    pub(crate) runs: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tsc: Option<Spread>,
    /// Against the row that it is compared with, which does the same with as many threads.
    #[serde(flatten)]
    pub(crate) versus: Option<Versus>,
    /// Of what is done for every packet.
    #[serde(flatten)]
    pub(crate) packet: Option<PacketCost>,
    /// Nanoseconds for which something else had a CPU.
    pub(crate) lost_ns: u64,
}

/// How many times as fast as another row, run by run. In JSON a field whose name has the other's: `vs_refcount`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Versus {
    pub(crate) base: &'static str,
    pub(crate) ratio: Spread,
}

impl Serialize for Versus {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry(&format!("vs_{}", self.base), &self.ratio)?;
        map.end()
    }
}

/// The median as a packet has to pay for it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct PacketCost {
    /// Ticks of the time stamp counter, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tsc_cycles: Option<f64>,
    /// Share of the time from one 64-byte frame to the next on 10 Gbit/s Ethernet, in percent.
    pub(crate) budget_10g_pct: f64,
    /// The same on 100 Gbit/s.
    pub(crate) budget_100g_pct: f64,
}

impl PacketCost {
    /// Of a row that takes nanoseconds for a packet.
    pub(crate) fn of(measured: &Measured) -> Self {
        // 64 bytes, preamble and start of 8, and a gap of 12.
        let wire_ns = |gbps: f64| f64::from((64 + 8 + 12) * 8) / gbps;
        let ns = measured.value.median;
        Self {
            tsc_cycles: measured.tsc.map(|tsc| tsc.median),
            budget_10g_pct: ns / wire_ns(10.0) * 100.0,
            budget_100g_pct: ns / wire_ns(100.0) * 100.0,
        }
    }
}

/// A row to compare others with.
pub(crate) struct Base {
    pub(crate) name: &'static str,
    /// As results call it.
    pub(crate) called: &'static str,
}

/// Compares rows with each other: `base` says with which of the section, of as many threads.
pub(crate) fn compare(rows: &mut [Row], base: impl Fn(&Head) -> Option<Base>) {
    let versus = |row: &Row| {
        let Base { name, called } = base(&row.head)?;
        let of = |head: &Head| (head.section, head.threads);
        let base = rows.iter().find(|base| base.head.name == name && of(&base.head) == of(&row.head))?;
        Some(Versus { base: called, ratio: row.under(base)? })
    };
    let compared: Vec<_> = rows.iter().map(versus).collect();
    for (row, versus) in rows.iter_mut().zip(compared) {
        if let Some(measured) = &mut row.measured {
            measured.versus = versus;
        }
    }
}

impl Row {
    pub(crate) fn new(head: Head, percpu: &str, samples: Vec<Sample>, skipped: Option<String>) -> Self {
        let measured = (!samples.is_empty()).then(|| {
            let tsc: Option<Vec<f64>> = samples.iter().map(|s| s.tsc).collect();
            Measured {
                value: Spread::of(samples.iter().map(|s| s.value)),
                runs: samples.len(),
                tsc: tsc.map(Spread::of),
                versus: None,
                packet: None,
                lost_ns: samples.iter().map(|s| s.lost_ns).sum(),
            }
        });
        Self { head, percpu: percpu.to_owned(), skipped, note: None, measured, samples }
    }

    /// How many times as much `over` took as this row, run by run.
    pub(crate) fn under(&self, over: &Self) -> Option<Spread> {
        let pairs = over.samples.iter().zip(&self.samples).map(|(over, own)| (over.value, own.value));
        Spread::of_ratios(pairs)
    }
}

/// Something that the suite was built to reach.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Goal {
    pub(crate) goal: String,
    pub(crate) threads: usize,
    pub(crate) unit: &'static str,
    pub(crate) percpu: String,
    pub(crate) bound: f64,
    /// Whether the value must not be less than the bound, or not more.
    pub(crate) at_least: bool,
    #[serde(flatten)]
    pub(crate) value: Spread,
    /// Whether the median keeps the bound.
    pub(crate) reached: bool,
}
