//! The common parts of the reports of all programs that measure. A JSON schema describes each
//! report: `schema/perf.json` of the command, `schema/bench.json` of the benchmarks.

use crate::load::{CpuTime, Meter};
use netmem_pool::PoolStats;
use netmem_virtio::net::feature;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The version of the JSON: raised when a field changes its name, its unit or its meaning, and not
/// when one is added.
pub const SCHEMA: u32 = 2;

/// The names of the features of virtio-net in a set.
pub fn names(features: u64) -> impl Iterator<Item = &'static str> {
    (0..64).map(move |bit| features & 1 << bit).filter(|&mask| mask != 0).map(feature::name)
}

/// What was really done. The parameters in the report are what was planned.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Done {
    /// Whether a signal ended the measurement before all planned runs were made.
    pub interrupted: bool,
    /// How long the measurement took.
    pub elapsed_s: f64,
    /// The CPUs that threads were moved to.
    pub cpus: BTreeSet<usize>,
    /// Which programs used the CPUs meanwhile, if the kernel reports that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_time: Option<CpuTime>,
}

impl Done {
    /// What was done since the meter was made.
    pub fn new(meter: &Meter, cpus: BTreeSet<usize>, interrupted: bool) -> Self {
        Self { interrupted, elapsed_s: meter.elapsed_s(), cpus, cpu_time: meter.read() }
    }

    /// The lines at the end of a table: how long the measurement took, and which programs used the
    /// CPUs.
    pub fn lines(&self) -> String {
        let cpus: Vec<usize> = self.cpus.iter().copied().collect();
        let pinned = if cpus.is_empty() { "none".into() } else { crate::cpus::list(&cpus) };
        let time = self.cpu_time.as_ref().map_or_else(|| "CPU time is not known".into(), CpuTime::to_string);
        let interrupted = if self.interrupted { "interrupted: the figures are of the runs until then\n" } else { "" };
        format!("{interrupted}{:.1} s on CPUs {pinned}. {time}", self.elapsed_s)
    }
}

/// Counts of pages, for all runs together.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PoolReport {
    /// Pages that were allocated.
    pub allocated: u64,
    /// Pages that were returned.
    pub returned: u64,
    /// Pages that were mapped for the device.
    pub mapped: u64,
    /// Pages that were unmapped.
    pub unmapped: u64,
    /// Pages that are allocated and not returned.
    pub inflight: u64,
    /// Pages that the pools missed when they closed.
    pub leaked: u64,
    /// Errors of the rings, by name.
    pub errors: BTreeMap<&'static str, u64>,
}

impl PoolReport {
    /// From the sum of the pools' counters.
    pub fn new(stats: PoolStats) -> Self {
        Self {
            allocated: stats.allocated(),
            returned: stats.returned(),
            mapped: stats.mapped,
            unmapped: stats.unmapped,
            inflight: stats.inflight(),
            ..Self::default()
        }
    }

    /// Checks that each page was returned.
    ///
    /// # Errors
    ///
    /// A page was not returned, or is still mapped.
    pub fn balance(&self) -> Result<(), Unbalanced> {
        let Self { leaked, mapped, unmapped, .. } = *self;
        if leaked > 0 || mapped != unmapped {
            return Err(Unbalanced { leaked, mapped, unmapped });
        }
        Ok(())
    }
}

/// Pages were not returned, or are still mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "pages do not balance: {leaked} leaked, {mapped} mapped and {unmapped} unmapped; this is a bug of netmem, please \
         report it with the command line"
)]
pub struct Unbalanced {
    /// Pages that were not returned.
    pub leaked: u64,
    /// Pages that were mapped.
    pub mapped: u64,
    /// Pages that were unmapped.
    pub unmapped: u64,
}
