//! Timings: one value covers as much work as fits into the planned time.

use crate::error::BenchError;
use crate::harness::{Harness, Timed, each};
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use std::sync::atomic::{Ordering, compiler_fence};
use std::time::Instant;

/// Operations in a block. A driver gets this number of frames in one poll.
pub(crate) const BATCH: u64 = 64;

/// Keeps the compiler from merging a pop and a push into one operation. Costs no instruction.
#[inline(always)]
pub(crate) fn apart() {
    compiler_fence(Ordering::SeqCst);
}

/// Work that can be done for any number of blocks.
pub(crate) trait Work {
    /// Warms up, then does this many blocks. Returns the time of the blocks.
    fn run(&mut self, harness: &Harness, blocks: u64) -> Result<Timed, BenchError>;

    /// The smallest number of blocks that gives a useful value.
    fn least(&self) -> u64 {
        16
    }

    /// See [`Benchmark::note`].
    fn note(&self) -> Option<String> {
        None
    }
}

/// Makes the work. Called when the row is prepared.
type Make = Box<dyn FnOnce(&Harness) -> Result<Box<dyn Work>, BenchError>>;

/// A row of a [`Work`]: nanoseconds for one of the [`BATCH`] operations of a block.
pub(crate) struct Timing {
    head: Head,
    make: Option<Make>,
    work: Option<Box<dyn Work>>,
    blocks: u64,
}

impl Timing {
    pub(crate) fn benchmark<W: Work + 'static>(
        head: Head,
        make: impl FnOnce(&Harness) -> Result<W, BenchError> + 'static,
    ) -> Box<dyn Benchmark> {
        let make: Make = Box::new(|harness| Ok(Box::new(make(harness)?)));
        Box::new(Self { head, make: Some(make), work: None, blocks: 0 })
    }
}

impl Benchmark for Timing {
    fn heads(&self) -> Vec<Head> {
        vec![self.head.clone()]
    }

    fn prepare(&mut self, harness: &Harness) -> Result<(), BenchError> {
        let Some(make) = self.make.take() else { return Ok(()) };
        let work = self.work.insert(make(harness)?);
        let mut blocks = work.least();
        let mut runs = 0;
        // The number of blocks grows until three runs had no more room. One run is not enough,
        // because other programs may have lengthened it.
        while runs < 3 {
            let begin = Instant::now();
            work.run(harness, blocks)?;
            match room(harness, begin) {
                0 | 1 => runs += 1,
                more => blocks *= more,
            }
        }
        self.blocks = blocks;
        Ok(())
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let Some(work) = &mut self.work else { return Ok(Vec::new()) };
        let (begin, blocks) = (Instant::now(), self.blocks);
        let timed = work.run(harness, blocks)?;
        self.blocks *= room(harness, begin).max(1);
        Ok(vec![each(harness, &[timed], &[blocks * BATCH])])
    }

    fn note(&self) -> Option<String> {
        self.work.as_ref()?.note()
    }
}

/// How many times the work that was done since `begin` fits into the planned time, at most 16. All
/// of the elapsed time counts, including time that is not measured.
fn room(harness: &Harness, begin: Instant) -> u64 {
    let ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    (harness.duration_ns() / ns.max(1)).min(16)
}
