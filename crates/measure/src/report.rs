//! The common parts of the reports of all commands that measure. Their JSON is described by `schema/bench.json` and
//! `schema/perf.json` beside this crate's sources, and by `docs/measuring.md`.

use crate::load::{CpuTime, Meter};
use netmem::virtio::net::feature;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The version of the JSON: raised when a field changes its name, its unit or its meaning, and not when one is added.
pub(crate) const SCHEMA: u32 = 2;

/// The names of the features of virtio-net in a set.
pub(crate) fn names(features: u64) -> impl Iterator<Item = &'static str> {
    (0..64).map(move |bit| features & 1 << bit).filter(|&mask| mask != 0).map(feature::name)
}

/// What was really done. The parameters in the report say what was planned.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Done {
    /// Whether a signal ended the measurement before all planned runs were made.
    pub(crate) interrupted: bool,
    pub(crate) elapsed_s: f64,
    /// The CPUs that threads were moved to.
    pub(crate) cpus: BTreeSet<usize>,
    /// Which programs used the CPUs meanwhile, if the kernel says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_time: Option<CpuTime>,
}

impl Done {
    /// What was done since the meter was made.
    pub(crate) fn new(meter: &Meter, cpus: BTreeSet<usize>, interrupted: bool) -> Self {
        Self { interrupted, elapsed_s: meter.elapsed_s(), cpus, cpu_time: meter.read() }
    }

    /// The lines at the end of a table: how long the measurement took, and which programs used the CPUs.
    pub(crate) fn lines(&self) -> String {
        let cpus: Vec<usize> = self.cpus.iter().copied().collect();
        let pinned = if cpus.is_empty() { "none".into() } else { crate::cpus::list(&cpus) };
        let time = self.cpu_time.as_ref().map_or_else(|| "CPU time is not known".into(), CpuTime::to_string);
        let interrupted = if self.interrupted { "interrupted: the figures are of the runs until then\n" } else { "" };
        format!("{interrupted}{:.1} s on CPUs {pinned}. {time}", self.elapsed_s)
    }
}
