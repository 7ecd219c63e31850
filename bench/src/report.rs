//! The report: what `--json` prints, and what the table and the charts are made of. Field names are
//! a contract, which `schema/bench.json` has; new ones may be added. Numbers are in base units: ns,
//! B, b/s, requests.

use crate::plan::Plan;
use netmem_measure::goals::{Goal, Unmet};
use netmem_measure::machine::Machine;
use netmem_measure::report::PoolReport;
use netmem_measure::report::{Done, names};
use netmem_measure::stats::Spread;
use serde::Serialize;
use std::collections::BTreeSet;

/// One suite: an object on standard output, or one of several in it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// [`netmem_measure::report::SCHEMA`].
    pub(crate) schema: u32,
    pub(crate) netmem: &'static str,
    pub(crate) command: &'static str,
    pub(crate) suite: &'static str,
    /// What the suite answers, for the page.
    #[serde(skip)]
    pub(crate) question: &'static str,
    /// The command that measures the suite again, for the page.
    #[serde(skip)]
    pub(crate) invocation: String,
    /// The day of the measurement (UTC).
    pub(crate) date: String,
    /// The commit of the sources. `None` where git does not know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) commit: Option<String>,
    pub(crate) machine: Machine,
    pub(crate) params: Params,
    pub(crate) done: Done,
    pub(crate) variants: Vec<Row>,
    /// The suite's goals, and whether this measurement reached them.
    pub(crate) goals: Vec<Goal>,
    /// The pages that the pools of the suite handed out and got back.
    pub(crate) pool: PoolReport,
}

impl Report {
    /// The least and the most runs of a row that was not skipped; `None` if all rows were.
    pub(crate) fn runs(&self) -> Option<(usize, usize)> {
        let wanted = self.variants.iter().filter(|row| row.skipped.is_none());
        let runs = wanted.map(|row| row.samples.len());
        runs.fold(None, |ends, runs| match ends {
            None => Some((runs, runs)),
            Some((least, most)) => Some((runs.min(least), runs.max(most))),
        })
    }

    /// The goals and rows that `--check` makes an error.
    pub(crate) fn unmet(&self) -> Unmet {
        Unmet::of(self.variants.iter().map(|row| row.skipped.is_some()), &self.goals)
    }
}

/// Several suites, as one object.
#[derive(Debug, Serialize)]
pub(crate) struct Reports<'a> {
    pub(crate) schema: u32,
    pub(crate) netmem: &'static str,
    pub(crate) command: &'static str,
    pub(crate) suites: &'a [Report],
}

/// The planned measurement. [`Done`] and each row report what was done.
#[derive(Debug, Serialize)]
pub(crate) struct Params {
    pub(crate) threads: Vec<usize>,
    /// The CPUs of the threads, the first thread's first.
    pub(crate) cpus: Vec<usize>,
    /// How long each thread works for one value.
    pub(crate) duration_s: f64,
    pub(crate) runs: u32,
    /// The rows that were chosen, as names or patterns; empty: all.
    pub(crate) rows: Vec<String>,
}

impl Params {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            threads: plan.threads.clone(),
            cpus: plan.cpus[..plan.most().min(plan.cpus.len())].to_vec(),
            duration_s: plan.duration.as_secs_f64(),
            runs: plan.runs,
            rows: plan.rows.patterns().to_vec(),
        }
    }
}

/// The name and the parameters of a row.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Head {
    /// Unique among the rows of the section with the same number of threads.
    pub(crate) name: String,
    pub(crate) section: &'static str,
    pub(crate) threads: usize,
    /// The operation to which the value refers.
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
    /// The place of an object's count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) layout: Option<&'static str>,
    /// Bindings that fragments come from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bindings: Option<u32>,
    /// The order in which the pages of a binding are received.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sequence: Option<&'static str>,
    /// Whether device memory is received into or sent from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) direction: Option<&'static str>,
    /// Other per-CPU counts that exist at the same time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) others: Option<usize>,
}

/// One run of a row.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Sample {
    /// In the row's unit.
    pub(crate) value: f64,
    /// The same in ticks of the time stamp counter, where there is one and the value is a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tsc: Option<f64>,
    /// Nanoseconds in which the measured threads did not have their CPUs.
    pub(crate) lost_ns: u64,
    /// Nanoseconds of the counted part, for the thread that took longest. Missing if the
    /// measurement does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) elapsed_ns: Option<u64>,
    /// Operations that were counted in that time, by all threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) operations: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) packets: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    /// The features that driver and device have negotiated; 0 if the row has no rings of ours. All
    /// runs of a row have the same.
    #[serde(skip)]
    pub(crate) features: u64,
    /// Nanoseconds of the whole run, with what comes before and after the counted part. The rounds
    /// write it.
    pub(crate) run_ns: u64,
}

impl Sample {
    /// A sample that has only a value.
    pub(crate) fn of(value: f64) -> Self {
        Self { value, ..Self::default() }
    }
}

/// A row, and the results of its runs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) head: Head,
    /// How per-CPU data was reached.
    pub(crate) percpu: String,
    /// The names of the features that driver and device have negotiated. Empty if the row has no
    /// rings of ours.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) features: Vec<&'static str>,
    /// Why it was not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
    /// A remark on how the row was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
    #[serde(flatten)]
    pub(crate) measured: Option<Measured>,
    /// The CPUs that its threads were moved to.
    pub(crate) cpus: BTreeSet<usize>,
    /// Run by run, in the order in which they were made.
    pub(crate) samples: Vec<Sample>,
}

/// The results of a row's runs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    #[serde(flatten)]
    pub(crate) value: Spread,
    pub(crate) runs: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tsc: Option<Spread>,
    /// The comparison with the base row, which does the same work with the same number of threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) versus: Option<Versus>,
    /// The cost for a packet, in rows of work that is done once per packet.
    #[serde(flatten)]
    pub(crate) packet: Option<PacketCost>,
    /// Nanoseconds in which the measured threads did not have their CPUs.
    pub(crate) lost_ns: u64,
}

/// The speed relative to another row, run by run.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Versus {
    pub(crate) base: &'static str,
    #[serde(flatten)]
    pub(crate) ratio: Spread,
}

/// The cost for a packet, computed from the median.
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
    /// The cost of a row whose unit is nanoseconds per packet.
    pub(crate) fn of(measured: &Measured) -> Self {
        // A frame of 64 bytes has 8 bytes of preamble and start before it, and a gap of 12 bytes
        // behind it.
        let wire_ns = |gbps: f64| f64::from((64 + 8 + 12) * 8) / gbps;
        let ns = measured.value.median;
        Self {
            tsc_cycles: measured.tsc.map(|tsc| tsc.median),
            budget_10g_pct: ns / wire_ns(10.0) * 100.0,
            budget_100g_pct: ns / wire_ns(100.0) * 100.0,
        }
    }
}

/// The row with which others are compared.
pub(crate) struct Base {
    pub(crate) name: &'static str,
    /// Its name in results.
    pub(crate) called: &'static str,
}

/// Compares rows. `base` returns the row of the same section and number of threads to compare a row
/// with.
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
        let features = samples.first().map_or_else(Vec::new, |sample| names(sample.features).collect());
        Self {
            head,
            percpu: percpu.to_owned(),
            features,
            skipped,
            note: None,
            measured,
            cpus: BTreeSet::new(),
            samples,
        }
    }

    /// `over` divided by this row, run by run.
    pub(crate) fn under(&self, over: &Self) -> Option<Spread> {
        let pairs = over.samples.iter().zip(&self.samples).map(|(over, own)| (over.value, own.value));
        Spread::of_ratios(pairs)
    }
}
