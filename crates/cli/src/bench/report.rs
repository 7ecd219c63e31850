//! The report: what `--json` prints, and what the table and the charts are made of. Field names are a contract; new ones
//! may be added.

use super::plan::Plan;
use crate::machine::Machine;
use crate::perf::PoolReport;
use crate::stats::Spread;
use serde::Serialize;

/// One object on standard output.
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
    /// Unlike that of any other row with as many threads.
    pub(crate) name: String,
    pub(crate) section: &'static str,
    pub(crate) threads: usize,
    /// Operation that the value is for.
    pub(crate) per: &'static str,
    pub(crate) unit: &'static str,
    /// Counters that each thread uses in turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) counters: Option<usize>,
    /// Where the count of an object lies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) layout: Option<&'static str>,
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
    /// How many times as fast as `RefCount` doing the same with as many threads, run by run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vs_refcount: Option<Spread>,
    /// Nanoseconds for which something else had a CPU.
    pub(crate) lost_ns: u64,
}

impl Row {
    pub(crate) fn new(head: Head, percpu: &str, samples: Vec<Sample>, skipped: Option<String>) -> Self {
        let measured = (!samples.is_empty()).then(|| {
            let tsc: Option<Vec<f64>> = samples.iter().map(|s| s.tsc).collect();
            Measured {
                value: Spread::of(samples.iter().map(|s| s.value)),
                runs: samples.len(),
                tsc: tsc.map(Spread::of),
                vs_refcount: None,
                lost_ns: samples.iter().map(|s| s.lost_ns).sum(),
            }
        });
        Self { head, percpu: percpu.to_owned(), skipped, measured, samples }
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
