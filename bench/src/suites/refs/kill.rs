//! The cost of ending a per-CPU count: it interrupts every CPU that runs a thread of the program,
//! and adds up all slots.

use super::counts::{BATCH, Count, PerCpu, Variant};
use crate::error::BenchError;
use crate::harness::{Harness, each};
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use netmem_refs::OwnLine;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts that are killed, one after another, for one value.
const KILLS: u64 = 64;
/// Counts that are killed before, as warm-up.
const WARM: u64 = KILLS / 16;

/// This many running threads, and this many other counts that are alive. One thread kills counts,
/// while the others get and put a count that stays alive.
pub(super) struct Kill {
    head: Head,
    others: usize,
}

impl Kill {
    pub(super) fn new(threads: usize, others: usize) -> Self {
        let name = format!("kill_{others}");
        let head =
            Head { name, section: "kill", threads, per: "kill", unit: "ns", others: Some(others), ..Head::default() };
        Self { head, others }
    }
}

impl Benchmark for Kill {
    fn heads(&self) -> Vec<Head> {
        vec![self.head.clone()]
    }

    fn prepare(&mut self, harness: &Harness) -> Result<(), BenchError> {
        self.measure(harness).map(drop)
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let make = |n| (0..n).map(|_| PerCpu::new().map(OwnLine::new)).collect::<Result<Vec<_>, _>>();
        let doomed = make(KILLS as usize + WARM as usize)?;
        let others = make(self.others)?;
        let next = AtomicUsize::new(0);
        let work = |thread: usize, blocks: u64| {
            if thread > 0 {
                return (0..blocks * BATCH as u64).all(|_| black_box(&others[0]).pair(&()));
            }
            // The blocks of the first thread are kills. When no count is left, the first thread
            // does nothing, because no other thread waits for its work.
            for _ in 0..blocks {
                let Some(count) = doomed.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                if count.kill().is_err() {
                    return false;
                }
            }
            true
        };
        // The other threads have no number of blocks: they run as long as the first thread does.
        let mut blocks = vec![0; self.head.threads];
        blocks[0] = KILLS;
        let timed = harness.crew(&blocks, &work)?;
        let timed = timed.ok_or_else(|| BenchError::Unbalanced(self.head.name.clone()))?;
        Ok(vec![each(harness, &timed[..1], &[KILLS])])
    }
}
