//! The last put of a count.

use super::counts::{BATCH, Last};
use crate::error::BenchError;
use crate::harness::{Harness, each};
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use std::hint::black_box;
use std::marker::PhantomData;

/// Counts that are ended, one after another, for one value: as many cache lines as fit into a
/// second-level cache.
const MANY: usize = 4096;

/// One variant. Counts are made before the timed part and freed after it.
pub(super) struct FinalPut<C>(PhantomData<C>);

impl<C: Last> FinalPut<C> {
    pub(super) fn new() -> Self {
        Self(PhantomData)
    }
}

#[inline(never)]
fn drive<C: Last>(counts: &mut [Own<C>]) -> bool {
    counts.chunks_mut(BATCH).all(|block| C::batch(|batch| block.iter_mut().all(|count| count.0.put(batch))))
}

/// A value on a cache line of its own that can be changed, because it has one owner.
#[repr(align(64))]
struct Own<C>(C);

impl<C: Last> Benchmark for FinalPut<C> {
    fn heads(&self) -> Vec<Head> {
        let name = format!("final_put_{}", C::NAME);
        vec![Head { name, section: "final put", threads: 1, per: "put", unit: "ns", ..Head::default() }]
    }

    fn prepare(&mut self, harness: &Harness) -> Result<(), BenchError> {
        self.measure(harness).map(drop)
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        harness.alone(|| {
            let mut counts: Vec<Own<C>> = (0..MANY).map(|_| C::last().map(Own)).collect::<Result<_, _>>()?;
            let (timed, ok) = harness.time(|| drive(black_box(&mut counts)));
            if !ok {
                return Err(BenchError::Unbalanced(format!("final_put_{}", C::NAME)));
            }
            Ok(vec![each(harness, &[timed], &[MANY as u64])])
        })?
    }
}
