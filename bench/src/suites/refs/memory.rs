//! The memory of a count.

use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use netmem_refs::{PercpuRef, RcuRef, RefCount};

/// Bytes of one count: in the object, and elsewhere.
pub(super) struct Memory {
    name: &'static str,
    bytes: usize,
}

/// A benchmark for each count.
pub(super) fn all() -> Vec<Memory> {
    // The two counts of an `Arc`. The pointer that the holder needs for its put is not included.
    let arc = 2 * size_of::<usize>();
    let list = [
        ("plain", size_of::<u64>()),
        ("arc", arc),
        ("refcount", size_of::<RefCount>()),
        ("rcuref", size_of::<RcuRef>()),
        ("percpuref", size_of::<PercpuRef>() + per_cpu()),
    ];
    list.into_iter().map(|(name, bytes)| Memory { name, bytes }).collect()
}

/// Bytes of a `PercpuRef` that are not in it.
fn per_cpu() -> usize {
    netmem_percpu::cpus() * size_of::<usize>()
}

impl Benchmark for Memory {
    fn heads(&self) -> Vec<Head> {
        let name = format!("memory_{}", self.name);
        vec![Head { name, section: "memory", threads: 1, per: "count", unit: "B", ..Head::default() }]
    }

    fn measure(&mut self, _harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        Ok(vec![Sample::of(self.bytes as f64)])
    }
}
