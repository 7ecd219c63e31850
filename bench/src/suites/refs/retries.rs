//! How often the compare-and-swap loop of a get retries.

use super::counts::BATCH;
use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use netmem_refs::{OwnLine, RefCount};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

/// This many threads on one count.
pub(super) struct Retries {
    head: Head,
    count: OwnLine<RefCount>,
    blocks: u64,
}

impl Retries {
    pub(super) fn new(threads: usize) -> Self {
        let head = Head {
            name: "refcount_retries".into(),
            section: "retries",
            threads,
            per: "get",
            unit: "retries",
            counters: Some(1),
            ..Head::default()
        };
        Self { head, count: OwnLine::new(RefCount::new(1)), blocks: 0 }
    }

    fn unbalanced(&self) -> BenchError {
        BenchError::Unbalanced(self.head.name.clone())
    }
}

/// Does pairs. `None` if they do not balance, else the number of retries.
#[inline(never)]
fn drive(count: &RefCount, blocks: u64) -> Option<u64> {
    let mut retries = 0;
    for _ in 0..blocks {
        for _ in 0..black_box(BATCH) {
            let (got, again) = count.try_get_counting();
            retries += u64::from(again);
            if !got || count.put() {
                return None;
            }
        }
    }
    Some(retries)
}

impl Benchmark for Retries {
    fn heads(&self) -> Vec<Head> {
        vec![self.head.clone()]
    }

    fn prepare(&mut self, harness: &Harness) -> Result<(), BenchError> {
        let work = |_: usize, blocks| drive(black_box(&self.count), blocks).is_some();
        let blocks = harness.calibrate(self.head.threads, &work)?.ok_or_else(|| self.unbalanced())?;
        self.blocks = (blocks.iter().sum::<u64>() / blocks.len() as u64).max(1);
        Ok(())
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        // The value is a ratio, so all operations are counted, also those before and after the
        // timed part of a thread.
        let (retried, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let work = |_: usize, blocks: u64| {
            let Some(retries) = drive(black_box(&self.count), blocks) else { return false };
            retried.fetch_add(retries, Ordering::Relaxed);
            done.fetch_add(blocks * BATCH as u64, Ordering::Relaxed);
            true
        };
        let blocks = vec![self.blocks; self.head.threads];
        let timed = harness.crew(&blocks, &work)?.ok_or_else(|| self.unbalanced())?;
        let done = done.into_inner();
        Ok(vec![Sample {
            value: retried.into_inner() as f64 / done.max(1) as f64,
            lost_ns: timed.iter().map(|t| t.lost_ns).sum(),
            elapsed_ns: timed.iter().map(|t| t.ns).max(),
            operations: Some(done),
            ..Sample::default()
        }])
    }
}
