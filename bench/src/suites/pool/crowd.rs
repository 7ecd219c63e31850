//! The cost of allocating and returning pages when every thread does both, alone and at the same
//! time as the others.
//!
//! Each thread allocates a page and drops it, then the next, as the row `in_context` does on one
//! thread. The value is the mean time of all threads. If the cost does not depend on the number of
//! threads, the rows of one thread and of many threads are equal.

use super::solo::{buffer, limit};
use crate::accounting::{Accounting, CACHE, CountedSharedPool};
use crate::error::BenchError;
use crate::harness::{Harness, Timed};
use crate::timing::{BATCH, Work, apart};
use crossbeam_queue::ArrayQueue;
use netmem::pool::PoolOptions;
use netmem_percpu::{CpuCache, MAGAZINE, NewCacheError};
use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

/// Pages of a pool that every thread can use.
const PAGES: usize = 4096;

/// A stock of buffers that the threads share.
pub(super) trait Stock: Sync + Send {
    /// Allocates a buffer and returns it, as often as a block has operations. `false` if the stock
    /// was empty.
    fn block(&self) -> bool;
}

/// A stock, and how many threads use it.
pub(super) struct Crowd<S> {
    name: &'static str,
    stock: S,
    threads: usize,
}

impl<S: Stock> Crowd<S> {
    pub(super) fn new(name: &'static str, stock: S, threads: usize) -> Self {
        Self { name, stock, threads }
    }
}

impl<S: Stock> Work for Crowd<S> {
    fn run(&mut self, harness: &Harness, blocks: u64) -> Result<Timed, BenchError> {
        let work = |_: usize, blocks: u64| (0..blocks).all(|_| self.stock.block());
        let timed = harness.crew(&vec![blocks; self.threads], &work)?.ok_or(BenchError::NoPage(self.name))?;
        Ok(mean(&timed))
    }
}

/// An array of each thread's own, which nothing is shared by: the limit for the growth of the other
/// rows with the number of threads.
pub(super) struct PrivateArray {
    threads: usize,
}

impl PrivateArray {
    pub(super) fn new(threads: usize) -> Self {
        Self { threads }
    }
}

impl Work for PrivateArray {
    fn run(&mut self, harness: &Harness, blocks: u64) -> Result<Timed, BenchError> {
        let work = |_: usize, blocks: u64| limit(CACHE)(blocks);
        let timed = harness.crew(&vec![blocks; self.threads], &work)?.ok_or(BenchError::NoPage("private_array"))?;
        Ok(mean(&timed))
    }
}

/// The mean time of the threads, and the time that they lost together.
fn mean(timed: &[Timed]) -> Timed {
    let mean = |of: fn(&Timed) -> u64| timed.iter().map(of).sum::<u64>() / timed.len().max(1) as u64;
    Timed { ns: mean(|t| t.ns), ticks: mean(|t| t.ticks), lost_ns: timed.iter().map(|t| t.lost_ns).sum() }
}

/// Netmem's pool that every thread can use.
pub(super) struct Shared(CountedSharedPool);

impl Shared {
    pub(super) fn new(accounting: &Accounting) -> Result<Self, BenchError> {
        accounting.shared_pool(PoolOptions::new("shared"), PAGES).map(Self)
    }
}

impl Stock for Shared {
    #[inline(always)]
    fn block(&self) -> bool {
        (0..black_box(BATCH)).all(|_| {
            let Some(page) = self.0.pool().alloc() else { return false };
            apart();
            drop(page);
            apart();
            true
        })
    }
}

/// The same, 64 pages at a time, so that magazines are exchanged.
pub(super) struct Bursts(CountedSharedPool);

impl Bursts {
    pub(super) fn new(accounting: &Accounting) -> Result<Self, BenchError> {
        accounting.shared_pool(PoolOptions::new("shared_burst64"), PAGES).map(Self)
    }
}

impl Stock for Bursts {
    fn block(&self) -> bool {
        let mut held = [const { None }; BATCH as usize];
        for place in &mut held {
            *place = self.0.pool().alloc();
        }
        apart();
        held.into_iter().all(|page| page.is_some())
    }
}

/// Numbers of buffers in the magazines of CPUs, without a pool: a pop and a push are a restartable
/// sequence each. The floor under [`Shared`].
pub(super) fn bare_sequences() -> Result<CpuCache, BenchError> {
    let unavailable = |why: NewCacheError| BenchError::Unavailable { what: "bare_sequences", why: why.to_string() };
    let cache = CpuCache::new(MAGAZINE, 256).map_err(unavailable)?;
    for n in (1..=PAGES).filter_map(NonZeroUsize::new) {
        put(&cache, n);
    }
    Ok(cache)
}

#[inline(always)]
fn put(cache: &CpuCache, n: NonZeroUsize) -> bool {
    // SAFETY: the cache outlives the call, and is never closed; the number is small.
    unsafe { CpuCache::push_at_once(cache, n) || CpuCache::push(cache, n, |_| ()) }
}

impl Stock for CpuCache {
    #[inline(always)]
    fn block(&self) -> bool {
        (0..black_box(BATCH)).all(|_| {
            let Some(n) = self.pop_at_once().or_else(|| self.pop().ok()) else { return false };
            apart();
            put(self, black_box(n))
        })
    }
}

/// Numbers of buffers in a bounded queue without locks.
pub(super) fn array_queue() -> ArrayQueue<usize> {
    let queue = ArrayQueue::new(PAGES);
    (0..PAGES).for_each(|n| assert!(queue.push(n).is_ok()));
    queue
}

impl Stock for ArrayQueue<usize> {
    #[inline(always)]
    fn block(&self) -> bool {
        (0..black_box(BATCH)).all(|_| {
            let Some(n) = self.pop() else { return false };
            apart();
            self.push(black_box(n)).is_ok()
        })
    }
}

/// Numbers of buffers in an array under a lock.
pub(super) fn mutex_vec() -> Mutex<Vec<usize>> {
    Mutex::new((0..PAGES).collect())
}

impl Stock for Mutex<Vec<usize>> {
    #[inline(always)]
    fn block(&self) -> bool {
        (0..black_box(BATCH)).all(|_| {
            let taken = self.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(n) = taken else { return false };
            apart();
            self.lock().unwrap_or_else(PoisonError::into_inner).push(black_box(n));
            true
        })
    }
}

/// The system's allocator.
pub(super) struct Malloc;

impl Stock for Malloc {
    fn block(&self) -> bool {
        for _ in 0..BATCH {
            drop(black_box(buffer()));
        }
        true
    }
}
