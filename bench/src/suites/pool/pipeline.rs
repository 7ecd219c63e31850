//! Pages that one thread allocates and other threads drop.
//!
//! ```text
//!   first CPU                                  each of the other CPUs
//!   take 32 ──► ring of 1024, one each ──────► drop up to 32
//!      ▲                                          │
//!      └──────────── any return path ◄────────────┘
//! ```
//!
//! The time is the first thread's, from empty rings to empty rings: every page that was taken in
//! that time was dropped. Rings, batches and the loops around them are the same for all variants.

use super::solo::{Buffer, buffer};
use crate::accounting::{CountedPool, M};
use crate::error::BenchError;
use crate::harness::{Harness, Timed};
use crate::timing::{BATCH as BLOCK, Work};
use netmem::pool::{Bulk, Page};
use netmem_bench::baselines::{
    FairPage, FairPool, FairReturner, FloorPage, Forward, LockedPage, LockedPool, SpscPool, SpscReturner, return_as,
};
use rtrb::chunks::{ReadChunk, WriteChunkUninit};
use rtrb::{Consumer, Producer, RingBuffer};
use std::hint::spin_loop;
use std::iter::from_fn;
use std::sync::atomic::{AtomicBool, Ordering};

/// Places in a ring.
pub(super) const RING: usize = 1024;
/// Pages that are passed on together.
const BATCH: usize = 32;
/// Pages of a pool. The number does not depend on the number of droppers as long as each dropper
/// can have some: otherwise the size of the working set would be measured.
pub(super) fn pages(droppers: usize) -> usize {
    (4 * RING).max(256 * droppers)
}

/// A source of buffers.
pub(super) trait Source: Send {
    type Item: Send;

    /// Fills as many places as there are buffers. Returns how many.
    fn fill(&mut self, places: WriteChunkUninit<'_, Self::Item>) -> usize;

    /// What each of `droppers` threads does with the buffers from its ring.
    fn droppers(&mut self, droppers: usize) -> Vec<impl FnMut(ReadChunk<'_, Self::Item>) + Send + use<Self>> {
        vec![|items: ReadChunk<'_, Self::Item>| items.into_iter().for_each(drop); droppers]
    }

    /// Called in every turn in which the first thread has nothing to do.
    fn idle(&mut self) {
        spin_loop();
    }
}

/// Pages of a pool, or what is made of them.
pub(super) struct Pages<F> {
    pool: CountedPool,
    make: F,
}

impl<F> Pages<F> {
    pub(super) fn new(pool: CountedPool, make: F) -> Self {
        Self { pool, make }
    }
}

impl<T: Send, F: Fn(Page<M>) -> T + Send> Source for Pages<F> {
    type Item = T;

    fn fill(&mut self, places: WriteChunkUninit<'_, T>) -> usize {
        let make = &self.make;
        let filled = self.pool.poll(|napi| Some(places.fill_from_iter(from_fn(|| napi.alloc().map(make)))));
        filled.unwrap_or(0)
    }
}

/// Pages of a pool that is polled all the time, mostly without need: one empty poll for each page,
/// and one for each idle turn.
pub(super) struct Busy<F>(pub(super) Pages<F>);

impl<F: Fn(Page<M>) -> Page<M> + Send> Source for Busy<F> {
    type Item = Page<M>;

    fn fill(&mut self, places: WriteChunkUninit<'_, Page<M>>) -> usize {
        let filled = self.0.fill(places);
        for _ in 0..filled {
            self.idle();
        }
        filled
    }

    fn idle(&mut self) {
        self.0.pool.poll(|napi| {
            std::hint::black_box(napi);
            Some(())
        });
    }
}

/// Pages of a pool that the droppers return in bulk.
pub(super) struct Bulky<F>(pub(super) Pages<F>);

impl<F: Fn(Page<M>) -> Page<M> + Send> Source for Bulky<F> {
    type Item = Page<M>;

    fn fill(&mut self, places: WriteChunkUninit<'_, Page<M>>) -> usize {
        self.0.fill(places)
    }

    fn droppers(&mut self, droppers: usize) -> Vec<impl FnMut(ReadChunk<'_, Page<M>>) + Send + use<F>> {
        let dropper = || {
            let mut bulk = Bulk::new();
            move |pages: ReadChunk<'_, Page<M>>| {
                pages.into_iter().for_each(|page| bulk.add(page));
                bulk.flush();
            }
        };
        std::iter::repeat_with(dropper).take(droppers).collect()
    }
}

/// Pages that are not returned: the dropper only reads the count of each.
impl Source for Forward {
    type Item = FloorPage;

    fn fill(&mut self, places: WriteChunkUninit<'_, FloorPage>) -> usize {
        places.fill_from_iter(from_fn(|| Some(self.alloc())))
    }

    fn droppers(&mut self, droppers: usize) -> Vec<impl FnMut(ReadChunk<'_, FloorPage>) + Send + use<>> {
        let look = |page: FloorPage| _ = std::hint::black_box(page.is_sole());
        vec![move |pages: ReadChunk<'_, FloorPage>| pages.into_iter().for_each(look); droppers]
    }
}

/// Pages that each dropper returns by a plain ring of its own.
impl Source for SpscPool {
    type Item = FloorPage;

    fn fill(&mut self, places: WriteChunkUninit<'_, FloorPage>) -> usize {
        self.alloc(places)
    }

    fn droppers(&mut self, droppers: usize) -> Vec<impl FnMut(ReadChunk<'_, FloorPage>) + Send + use<>> {
        let put = |mut way: SpscReturner| move |pages: ReadChunk<'_, FloorPage>| way.put(pages.into_iter());
        self.returners(droppers).into_iter().map(put).collect()
    }
}

/// Pages that each dropper returns one by one, by an array of its own.
impl Source for FairPool {
    type Item = FloorPage;

    fn fill(&mut self, places: WriteChunkUninit<'_, FloorPage>) -> usize {
        self.alloc(places)
    }

    fn droppers(&mut self, droppers: usize) -> Vec<impl FnMut(ReadChunk<'_, FloorPage>) + Send + use<>> {
        let put = |mut way: FairReturner| {
            move |pages: ReadChunk<'_, FloorPage>| pages.into_iter().for_each(|page| way.put(page))
        };
        self.returners().take(droppers).map(put).collect()
    }
}

/// The same pages with a destructor.
pub(super) struct Dropping(pub(super) FairPool);

impl Source for Dropping {
    type Item = FairPage;

    fn fill(&mut self, places: WriteChunkUninit<'_, FairPage>) -> usize {
        self.0.alloc_dropping(places)
    }

    fn droppers(&mut self, droppers: usize) -> Vec<impl FnMut(ReadChunk<'_, FairPage>) + Send + use<>> {
        let dropper = |number| {
            move |pages: ReadChunk<'_, FairPage>| {
                return_as(number);
                pages.into_iter().for_each(drop);
            }
        };
        (0..droppers).map(dropper).collect()
    }
}

/// Pages that are returned by a locked ring.
impl Source for LockedPool {
    type Item = LockedPage;

    fn fill(&mut self, places: WriteChunkUninit<'_, LockedPage>) -> usize {
        places.fill_from_iter(from_fn(|| self.alloc()))
    }
}

/// Buffers of the system's allocator.
pub(super) struct Malloc;

impl Source for Malloc {
    type Item = Buffer;

    fn fill(&mut self, places: WriteChunkUninit<'_, Buffer>) -> usize {
        places.fill_from_iter(from_fn(|| Some(buffer())))
    }
}

/// A source, and this many threads that drop its buffers.
pub(super) struct Pipeline<S> {
    source: S,
    droppers: usize,
    /// What a dropper does while its ring is empty.
    idle: fn(),
    /// The CPU of each dropper. Droppers are numbered from 1.
    place: fn(usize) -> usize,
}

impl<S: Source> Pipeline<S> {
    /// For droppers with a CPU each.
    pub(super) fn new(source: S, droppers: usize) -> Self {
        Self { source, droppers, idle: spin_loop, place: |dropper| dropper }
    }

    /// For droppers that share the second CPU: a dropper with an empty ring yields to another one.
    pub(super) fn sharing(source: S, droppers: usize) -> Self {
        Self { source, droppers, idle: std::thread::yield_now, place: |_| 1 }
    }
}

impl<S: Source> Work for Pipeline<S> {
    fn run(&mut self, harness: &Harness, blocks: u64) -> Result<Timed, BenchError> {
        let (mut rings, ends): (Vec<_>, Vec<_>) = (0..self.droppers).map(|_| RingBuffer::new(RING)).unzip();
        let (source, idle) = (&mut self.source, self.idle);
        let droppers = ends
            .into_iter()
            .zip(source.droppers(self.droppers))
            .map(|(ring, dropper)| move |ended: &AtomicBool| drop_all(ring, dropper, ended, idle))
            .collect();
        let (timed, ok) = harness.served_at(droppers, self.place, || {
            let warm = send(source, &mut rings, (blocks / 16).max(1) * BLOCK);
            let (timed, ok) = harness.time(|| send(source, &mut rings, blocks * BLOCK));
            (timed, warm && ok)
        })?;
        ok.then_some(timed).ok_or(BenchError::NoPage("a pipeline"))
    }
}

/// Sends `left` buffers, to each ring in turn, and waits until all of them are dropped. `false` if
/// a dropper has ended.
fn send<S: Source>(source: &mut S, rings: &mut [Producer<S::Item>], mut left: u64) -> bool {
    let mut at = 0;
    while left > 0 {
        // A full ring is skipped, because its dropper is behind.
        at = if at + 1 < rings.len() { at + 1 } else { 0 };
        let ring = &mut rings[at];
        let want = BATCH.min(usize::try_from(left).unwrap_or(BATCH));
        match ring.write_chunk_uninit(want) {
            Ok(places) => {
                let filled = source.fill(places);
                left -= filled as u64;
                if filled < want {
                    source.idle();
                }
            }
            Err(_) => {
                if rings.iter().any(Producer::is_abandoned) {
                    return false;
                }
                source.idle();
            }
        }
    }
    rings.iter().all(|ring| {
        while ring.slots() < RING && !ring.is_abandoned() {
            spin_loop();
        }
        ring.slots() == RING
    })
}

/// Drops buffers from a ring until the sender has ended and the ring is empty.
pub(super) fn drop_all<T>(
    mut ring: Consumer<T>,
    mut dropper: impl FnMut(ReadChunk<'_, T>),
    ended: &AtomicBool,
    idle: fn(),
) {
    loop {
        // The flag is read before the ring: everything that was sent before the end is then seen in
        // the ring.
        let last = ended.load(Ordering::Acquire);
        match ring.slots().min(BATCH) {
            0 if last => return,
            0 => idle(),
            n => {
                if let Ok(chunk) = ring.read_chunk(n) {
                    dropper(chunk);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::solo::{cloned, split, whole};
    use super::*;
    use crate::accounting::Accounting;
    use netmem::pool::PoolOptions;

    fn runs<S: Source>(source: S) {
        let timed = Pipeline::new(source, 3).run(&Harness::for_tests(), 20).unwrap();
        assert!(timed.ns > 0);
    }

    /// More droppers than most machines that run this test have CPUs. Proves POOL-5: every page is
    /// returned in the end.
    #[test]
    fn whatever_is_taken_is_dropped_by_some_of_many() {
        let accounting = Accounting::default();
        let pool = || accounting.pool(PoolOptions::new("test").cache(64), 256, 0).unwrap();
        runs(Pages::new(pool(), whole));
        runs(Busy(Pages::new(pool(), whole)));
        runs(Bulky(Pages::new(pool(), whole)));
        runs(Pages::new(pool(), cloned));
        runs(Pages::new(pool(), split));
        runs(LockedPool::new(256));
        runs(Forward::new(256));
        runs(SpscPool::new(256));
        runs(FairPool::new(512, 3));
        runs(Dropping(FairPool::new(512, 3)));
        runs(Malloc);
        let stats = accounting.stats();
        // The counted blocks, and those of the warm-up.
        assert_eq!((stats.allocated(), stats.inflight()), (5 * 21 * BLOCK, 0));
        assert_eq!(accounting.outstanding(), 0);
    }

    #[test]
    fn a_source_does_not_wait_for_droppers_that_are_gone() {
        let (mut rings, ends): (Vec<_>, Vec<_>) = (0..2).map(|_| RingBuffer::new(RING)).unzip();
        drop(ends);
        assert!(!send(&mut Malloc, &mut rings, 10_000));
        assert!(!send(&mut Malloc, &mut rings, 0));
    }
}
