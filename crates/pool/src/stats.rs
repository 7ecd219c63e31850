//! A pool's counters. They are always on: each costs an increment in a cache line that the pool's
//! owner has in its cache anyway.
//!
//! A counter is written by one thread, the pool's owner, and any thread may read it.
//! [`StatsReader`](crate::StatsReader) reads without the pool.

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
    /// The pages allocated from the cache are computed from it:
    /// [`Cache::popped`](crate::cache::Cache::popped).
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

/// A pool's counters at one moment. Names follow the kernel's page pool where they mean the same;
/// all count pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Allocated from the array cache.
    pub alloc_fast: u64,
    /// Allocated from the provider (pages of 4 KiB).
    pub alloc_slow: u64,
    /// Allocated from the provider (larger pages).
    pub alloc_slow_high_order: u64,
    /// How often no page had been returned, so that the provider was called.
    pub alloc_empty: u64,
    /// Allocated by refilling the cache from returned pages.
    pub alloc_refill: u64,
    /// Allocations that failed: the pool's limit was reached, the provider had no page, or mapping
    /// failed. Also, the other CPUs had no page, or the last reclaim was less than 100 us ago.
    pub alloc_failed: u64,
    /// Returned in the poll context, into the array cache.
    pub recycle_cached: u64,
    /// Returned in the poll context while the array cache was full.
    pub recycle_cache_full: u64,
    /// Returned from other threads or CPUs in a magazine, a CPU's or a [`Bulk`](crate::Bulk)'s own,
    /// and taken in by the owner.
    pub recycle_ring: u64,
    /// Returned from other threads or CPUs without a magazine, by one compare-and-swap each: there
    /// was no empty magazine, or another thread was reclaiming, or, in portable mode, the CPU's
    /// lock was taken, or the pool is too small for magazines.
    pub recycle_ring_full: u64,
    /// How often the pages of the CPUs were taken because the pool was out of pages.
    pub reclaims: u64,
    /// How often the pool was out of pages, other CPUs seemed to have some, and the pool did not
    /// reclaim them because [`PoolOptions::interrupt_cpus`](crate::PoolOptions::interrupt_cpus)
    /// forbids it.
    pub unasked: u64,
    /// Pages taken from the CPUs, for that reason or for exact counts. They count as
    /// `recycle_ring`, too.
    pub reclaimed: u64,
    /// Returned from other threads or CPUs straight to the provider, by pools without a cache.
    pub released: u64,
    /// Mapped for the device.
    pub mapped: u64,
    /// UnmapEvent.
    pub unmapped: u64,
    /// Given up because a device kept them when it stopped answering.
    pub quarantined: u64,
}

impl PoolStats {
    /// Pages allocated.
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

    /// The same when `released` more pages have left past the owner, each of which was unmapped by
    /// that, or not.
    pub(crate) fn with_released(mut self, released: u64, unmaps: bool) -> Self {
        self.released += released;
        self.unmapped += if unmaps { released } else { 0 };
        self
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

/// A pool's counters at one moment. They are read one after another, so they may not match exactly
/// while threads allocate and return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedPoolStats {
    /// Pages in magazines, on CPUs or in the depot.
    pub idle: u64,
    /// Pages that a user or a device holds, or that are on the return stack. A page that the
    /// magazines refused stays on the return stack until the next allocation that acquires the
    /// lock, or [`SharedPool::reclaim`](crate::SharedPool::reclaim).
    pub inflight: u64,
    /// Magazines that were fetched from the depot, modulo 2^32. Allocations within a magazine are
    /// not counted: a counter would cost half as much as the allocation.
    pub magazines: u64,
    /// Pages taken from the provider.
    pub alloc_slow: u64,
    /// Allocations that failed: the pool's limit was reached, or the provider had no page, or
    /// mapping failed; and other CPUs held no page, or the last reclaim was less than 100 us ago.
    pub alloc_failed: u64,
    /// Pages that returned by the return stack, by one compare-and-swap each, because the magazines
    /// refused them: a thread was reclaiming, or no empty magazine was left, or, in portable mode,
    /// the CPU's lock was taken.
    pub recycle_ring_full: u64,
    /// Reclaims: how often the pages that CPUs hold were moved to the depot because the pool was
    /// out of pages.
    pub reclaims: u64,
    /// Pages that reclaims moved to the depot.
    pub reclaimed: u64,
    /// How often the pool was out of pages, other CPUs seemed to hold some, and the pool did not
    /// reclaim them because [`PoolOptions::interrupt_cpus`](crate::PoolOptions::interrupt_cpus) is
    /// off.
    pub unasked: u64,
    /// Pages mapped for the device.
    pub mapped: u64,
    /// Pages unmapped.
    pub unmapped: u64,
    /// Pages in quarantine: their device stopped answering, and may still write to them.
    pub quarantined: u64,
}

/// The state of a pool when its owner closed it.
#[derive(Clone, Copy, Debug)]
#[must_use]
#[non_exhaustive]
pub struct PoolClosed {
    /// The final counters.
    pub stats: PoolStats,
    /// Pages that were in flight then, without quarantined ones.
    pub outstanding: u64,
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
