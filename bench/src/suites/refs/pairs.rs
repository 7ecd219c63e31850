//! A get and a put: on one counter, and on each of 64 in turn.

use super::counts::{BATCH, Count};
use crate::error::BenchError;
use crate::harness::{Harness, each};
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use netmem_refs::OwnLine;
use std::hint::black_box;

/// Counters, each on a cache line of its own. The array is aligned to two lines, because processors
/// fetch lines in pairs.
#[repr(align(128))]
struct Counters<C, const N: usize>([OwnLine<C>; N]);

/// One variant with so many threads.
pub(super) struct Pairs<C, const N: usize> {
    head: Head,
    /// One set for all threads, or one for each thread.
    sets: Vec<Counters<C, N>>,
    blocks: u64,
}

impl<C: Count, const N: usize> Pairs<C, N> {
    pub(super) fn new(section: &'static str, per: &'static str, threads: usize) -> Self {
        let rotating = if N > 1 { "_rotating" } else { "" };
        let name = format!("{}{rotating}", C::NAME);
        let head = Head { name, section, threads, per, unit: "ns", counters: Some(N), ..Head::default() };
        Self { head, sets: Vec::new(), blocks: 0 }
    }

    fn make() -> Result<Counters<C, N>, BenchError> {
        let counts: Vec<_> = (0..N).map(|_| C::new().map(OwnLine::new)).collect::<Result<_, _>>()?;
        let counts = counts.try_into().map_err(|_| BenchError::Unbalanced(C::NAME.into()))?;
        Ok(Counters(counts))
    }

    /// The pairs of thread `thread`. Each thread starts at another counter: otherwise the threads
    /// would run in step, and meet at every counter or at none.
    fn work(&self, thread: usize, blocks: u64) -> bool {
        let set = &self.sets[thread % self.sets.len()];
        drive(black_box(set), thread * N / self.head.threads, blocks)
    }
}

/// `blocks` blocks of 64 pairs. The compiler sees the operations of the variant, but not the
/// counters nor their number.
#[inline(never)]
fn drive<C: Count, const N: usize>(set: &Counters<C, N>, start: usize, blocks: u64) -> bool {
    let (before, after) = set.0.split_at(start.min(N));
    for _ in 0..blocks {
        let ok = C::batch(|batch| match &set.0[..] {
            [count] => (0..black_box(BATCH)).all(|_| count.pair(batch)),
            _ => after.iter().all(|count| count.pair(batch)) && before.iter().all(|count| count.pair(batch)),
        });
        if !ok {
            return false;
        }
    }
    true
}

impl<C: Count, const N: usize> Benchmark for Pairs<C, N> {
    fn heads(&self) -> Vec<Head> {
        vec![self.head.clone()]
    }

    fn prepare(&mut self, harness: &Harness) -> Result<(), BenchError> {
        const { assert!(N == 1 || N == BATCH, "a block is one pass over all counters") };
        let sets = if C::SHARED { 1 } else { self.head.threads };
        self.sets = (0..sets).map(|_| Self::make()).collect::<Result<_, _>>()?;
        let blocks = harness.calibrate(self.head.threads, &|thread, blocks| self.work(thread, blocks))?;
        let blocks = blocks.ok_or_else(|| BenchError::Unbalanced(self.head.name.clone()))?;
        self.blocks = (blocks.iter().sum::<u64>() / blocks.len() as u64).max(1);
        Ok(())
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let blocks = vec![self.blocks; self.head.threads];
        let timed = harness.crew(&blocks, &|thread, blocks| self.work(thread, blocks))?;
        let timed = timed.ok_or_else(|| BenchError::Unbalanced(self.head.name.clone()))?;
        Ok(vec![each(harness, &timed, &vec![self.blocks * BATCH as u64; timed.len()])])
    }
}

#[cfg(test)]
mod tests {
    use super::super::counts::Swapped;
    use super::*;

    #[test]
    fn every_counter_gets_its_share_wherever_a_thread_starts() {
        for start in [0, 1, 63, 64] {
            let set = Pairs::<Swapped, 64>::make().unwrap();
            assert!(drive(&set, start, 3));
        }
    }
}
