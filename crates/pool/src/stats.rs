//! A pool's counters. They are always on: each costs an increment in a cache line that the pool's owner has in its
//! cache anyway.
//!
//! A counter is written by one thread, the pool's owner, and any thread may read it. [`StatsReader`] reads without the
//! pool.

use crate::end::Record;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Written by one thread, readable by all.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn bump(&self) {
        self.add(1);
    }

    #[inline]
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Set once by one thread, readable by all.
#[derive(Debug, Default)]
pub(crate) struct Flag(AtomicBool);

impl Flag {
    #[inline]
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The owner's counters.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Also says how many were allocated from the cache, see [`Cache::popped`](crate::cache::Cache::popped).
    pub(crate) recycle_cached: Counter,
    /// Pages that slow paths put into the cache, less those that slow paths took out.
    pub(crate) filled: Counter,
    pub(crate) alloc_slow: Counter,
    pub(crate) alloc_empty: Counter,
    pub(crate) alloc_refill: Counter,
    pub(crate) alloc_failed: Counter,
    pub(crate) recycle_cache_full: Counter,
    pub(crate) recycle_ring: Counter,
    pub(crate) recycle_ring_full: Counter,
    pub(crate) reclaims: Counter,
    pub(crate) reclaimed: Counter,
    pub(crate) mapped: Counter,
    pub(crate) unmapped: Counter,
    pub(crate) quarantined: Counter,
    pub(crate) unasked: Counter,
    /// The pool maps its pages in a domain.
    pub(crate) maps: Flag,
    /// The device is gone, and every page that the pool had mapped was unmapped.
    pub(crate) all_unmapped: Flag,
}

/// A pool's counters at one moment. Names follow the kernel's page pool where they mean the same; all count pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Allocated from the array cache.
    pub alloc_fast: u64,
    /// Allocated from the provider (pages of 4 KiB).
    pub alloc_slow: u64,
    /// Allocated from the provider (larger pages).
    pub alloc_slow_high_order: u64,
    /// How often no page had been returned, so that the provider was asked.
    pub alloc_empty: u64,
    /// Allocated by refilling the cache from returned pages.
    pub alloc_refill: u64,
    /// Allocations that failed: the pool's limit was reached, the provider had no page, or mapping failed. Also, the
    /// other CPUs had no page, or had been asked less than 100 us ago.
    pub alloc_failed: u64,
    /// Returned in the poll context, into the array cache.
    pub recycle_cached: u64,
    /// Returned in the poll context while the array cache was full.
    pub recycle_cache_full: u64,
    /// Returned from other threads or CPUs in a magazine, a CPU's or a [`Bulk`](crate::Bulk)'s own, and taken in by the
    /// owner.
    pub recycle_ring: u64,
    /// Returned from other threads or CPUs without a magazine, by one compare-and-swap each: there was no empty
    /// magazine, or another thread was reclaiming, or, in portable mode, the CPU's lock was taken, or the pool is too
    /// small for magazines.
    pub recycle_ring_full: u64,
    /// How often the pages of the CPUs were taken because the pool was out of pages.
    pub reclaims: u64,
    /// How often the pool was out of pages, other CPUs seemed to have some, and the pool did not ask for them because
    /// [`PoolOptions::interrupt_cpus`](crate::PoolOptions::interrupt_cpus) forbids it.
    pub unasked: u64,
    /// Pages taken from the CPUs, for that reason or for exact counts. They count as `recycle_ring`, too.
    pub reclaimed: u64,
    /// Returned from other threads or CPUs straight to the provider, by pools without a cache.
    pub released: u64,
    /// Mapped for the device.
    pub mapped: u64,
    /// Unmapped.
    pub unmapped: u64,
    /// Given up because a device kept them when it stopped answering.
    pub quarantined: u64,
}

impl PoolStats {
    /// Pages handed out.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.alloc_fast + self.alloc_slow + self.alloc_slow_high_order + self.alloc_refill
    }

    /// Pages that were returned.
    #[must_use]
    pub fn returned(&self) -> u64 {
        self.recycle_cached + self.recycle_cache_full + self.recycle_ring + self.recycle_ring_full + self.released
    }

    /// Pages in flight: posted to the device, held by a user, or being returned.
    #[must_use]
    pub fn inflight(&self) -> u64 {
        // Saturating: a reader in another thread may find a return counted and its allocation not.
        self.allocated().saturating_sub(self.returned()).saturating_sub(self.quarantined)
    }

    /// The same when `released` more pages have left past the owner, each of which was unmapped by that, or not.
    pub(crate) fn with_released(mut self, released: u64, unmaps: bool) -> Self {
        self.released += released;
        self.unmapped += if unmaps { released } else { 0 };
        self
    }
}

/// Reads a pool's counters from any thread. It is cheap to clone, and outlives the pool.
///
/// Reading neither interrupts nor delays the thread that polls the pool, and moves no page. Therefore it is not exact.
/// Pages that wait in the CPUs' magazines or on the return stack count as in flight until the owner takes them: up to a
/// magazine for each CPU, and the pages that were returned since the last refill. If counters change while they are
/// read, the result differs by these changes.
/// [`PagePool::stats`](crate::PagePool::stats) picks those pages up first, and is exact.
///
/// After the pool's end the counters do not change any more, except that pages which are returned late count as
/// released.
///
/// ```
/// # use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
/// # let region = RegionOptions::new(8).huge_pages(false).build::<Private>()?;
/// let mut pool = PoolOptions::new("rx0").build(RegionProvider::new(region), None)?;
/// let reader = pool.stats_reader();
/// let page = pool.alloc().ok_or("no page")?;
/// assert_eq!(std::thread::spawn(move || reader.stats().inflight()).join().unwrap(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct StatsReader(Arc<Record>);

impl StatsReader {
    pub(crate) fn new(record: Arc<Record>) -> Self {
        Self(record)
    }

    /// The pool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Whether the pool's owner has left. The pool may still wait for pages: see [`lingering`](crate::lingering).
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// The counters. Takes a lock that only other readers and the pool's end take, and loads that miss the cache if the pool is being
    /// polled.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.0.stats()
    }
}

impl fmt::Debug for StatsReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StatsReader({}, {:?})", self.name(), self.stats())
    }
}

impl std::ops::AddAssign for PoolStats {
    fn add_assign(&mut self, o: Self) {
        self.alloc_fast += o.alloc_fast;
        self.alloc_slow += o.alloc_slow;
        self.alloc_slow_high_order += o.alloc_slow_high_order;
        self.alloc_empty += o.alloc_empty;
        self.alloc_refill += o.alloc_refill;
        self.alloc_failed += o.alloc_failed;
        self.recycle_cached += o.recycle_cached;
        self.recycle_cache_full += o.recycle_cache_full;
        self.recycle_ring += o.recycle_ring;
        self.recycle_ring_full += o.recycle_ring_full;
        self.reclaims += o.reclaims;
        self.unasked += o.unasked;
        self.reclaimed += o.reclaimed;
        self.released += o.released;
        self.mapped += o.mapped;
        self.unmapped += o.unmapped;
        self.quarantined += o.quarantined;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A reader in another thread may find a return counted and its allocation not.
    #[test]
    fn in_flight_is_never_less_than_nothing() {
        let stats = PoolStats { recycle_cached: 2, quarantined: 1, alloc_slow: 1, ..PoolStats::default() };
        assert_eq!(stats.inflight(), 0);
    }
}
