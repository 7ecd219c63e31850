//! Work of which so much is done for one value as fits into the planned time.

use super::BATCH;
use crate::bench::error::BenchError;
use crate::bench::lab::{Lab, Timed, each};
use crate::bench::report::{Head, Sample};
use crate::bench::rounds::Cell;
use std::time::Instant;

/// Something of which any number of blocks can be done.
pub(super) trait Work {
    /// Does so many blocks, and as much as it takes to warm up before; says what the blocks took.
    fn run(&mut self, lab: &Lab, blocks: u64) -> Result<Timed, BenchError>;

    /// Blocks below which a value means nothing.
    fn least(&self) -> u64 {
        16
    }

    /// See [`Cell::note`].
    fn note(&self) -> Option<String> {
        None
    }
}

/// What makes the work, when its turn has come.
type Make = Box<dyn FnOnce(&Lab) -> Result<Box<dyn Work>, BenchError>>;

/// A row that is measured that way: nanoseconds for one of the [`BATCH`] operations of a block.
pub(super) struct Timing {
    head: Head,
    make: Option<Make>,
    work: Option<Box<dyn Work>>,
    blocks: u64,
}

impl Timing {
    pub(super) fn cell<W: Work + 'static>(
        head: Head,
        make: impl FnOnce(&Lab) -> Result<W, BenchError> + 'static,
    ) -> Box<dyn Cell> {
        let make: Make = Box::new(|lab| Ok(Box::new(make(lab)?)));
        Box::new(Self { head, make: Some(make), work: None, blocks: 0 })
    }
}

impl Cell for Timing {
    fn heads(&self) -> Vec<Head> {
        vec![self.head.clone()]
    }

    fn prepare(&mut self, lab: &Lab) -> Result<(), BenchError> {
        let Some(make) = self.make.take() else { return Ok(()) };
        let work = self.work.insert(make(lab)?);
        let mut blocks = work.least();
        // All that a value takes, whatever part of it is timed.
        let ns = loop {
            let begin = Instant::now();
            work.run(lab, blocks)?;
            let ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1);
            if ns >= lab.duration_ns() / 2 {
                break ns;
            }
            // As far as this run is anything to go by, and not much further.
            blocks *= (lab.duration_ns() / ns).clamp(2, 16);
        };
        let fitting = blocks as f64 * lab.duration_ns() as f64 / ns as f64;
        self.blocks = (fitting as u64).max(work.least());
        Ok(())
    }

    fn measure(&mut self, lab: &Lab) -> Result<Vec<Sample>, BenchError> {
        let Some(work) = &mut self.work else { return Ok(Vec::new()) };
        let timed = work.run(lab, self.blocks)?;
        Ok(vec![each(lab, &[timed], &[self.blocks * BATCH])])
    }

    fn note(&self) -> Option<String> {
        self.work.as_ref()?.note()
    }
}

/// Work of one thread: does so many blocks, and says whether it could.
pub(super) struct Alone<F> {
    name: &'static str,
    blocks: F,
}

impl<F: FnMut(u64) -> bool + Send> Alone<F> {
    pub(super) fn new(name: &'static str, blocks: F) -> Self {
        Self { name, blocks }
    }
}

impl<F: FnMut(u64) -> bool + Send> Work for Alone<F> {
    fn run(&mut self, lab: &Lab, blocks: u64) -> Result<Timed, BenchError> {
        let work = &mut self.blocks;
        let (timed, ok) = lab.alone(|| {
            let warm = work(blocks / 16);
            let (timed, ok) = lab.time(|| work(blocks));
            (timed, warm && ok)
        })?;
        ok.then_some(timed).ok_or(BenchError::NoPage(self.name))
    }
}
