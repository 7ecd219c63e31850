//! What a pool counts. Always on: each count is an increment of a line that its owner has in hand anyway.

use std::sync::atomic::{AtomicU64, Ordering};

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

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The owner's counters.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Also says how many were allocated from the cache, see [`Cache::popped`](crate::home::Cache::popped).
    pub(crate) recycle_cached: Counter,
    /// Put into the cache by a slow way, less those that a slow way took out.
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
}

/// A pool's counters at one moment. Names follow the kernel's page pool where they mean the same; all count pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Allocated from the array cache.
    pub alloc_fast: u64,
    /// Allocated from the provider (pages of 4 KiB).
    pub alloc_slow: u64,
    /// Allocated from the provider (larger pages).
    pub alloc_slow_high_order: u64,
    /// Times that nothing had been returned, so that the provider was asked.
    pub alloc_empty: u64,
    /// Allocated by refilling the cache from returned pages.
    pub alloc_refill: u64,
    /// Allocations that failed: the pool's limit or the provider's end was reached, or mapping failed, and other CPUs held
    /// nothing or had been asked less than 100 us ago.
    pub alloc_failed: u64,
    /// Returned in the poll context, into the array cache.
    pub recycle_cached: u64,
    /// Returned in the poll context while the array cache was full.
    pub recycle_cache_full: u64,
    /// Returned from elsewhere in a magazine, a CPU's or a [`Bulk`](crate::Bulk)'s own, and picked up by the owner.
    pub recycle_ring: u64,
    /// Returned from elsewhere past the magazines, by one compare-and-swap each: there was no empty magazine, or somebody was
    /// reclaiming, or, in portable mode, the CPU's lock was taken, or the pool is too small for magazines.
    pub recycle_ring_full: u64,
    /// Times that what the CPUs hold was taken from them because the pool was out of pages.
    pub reclaims: u64,
    /// Pages taken from the CPUs, for that reason or for exact counts. They count as `recycle_ring`, too.
    pub reclaimed: u64,
    /// Returned from elsewhere straight to the provider, by pools without a cache.
    pub released: u64,
    /// Mapped for the device.
    pub mapped: u64,
    /// Unmapped.
    pub unmapped: u64,
    /// Given up because their device kept them when it stopped answering.
    pub quarantined: u64,
}

impl PoolStats {
    /// Pages handed out.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.alloc_fast + self.alloc_slow + self.alloc_slow_high_order + self.alloc_refill
    }

    /// Pages that came back.
    #[must_use]
    pub fn returned(&self) -> u64 {
        self.recycle_cached + self.recycle_cache_full + self.recycle_ring + self.recycle_ring_full + self.released
    }

    /// Pages out: posted to the device, or held by somebody.
    #[must_use]
    pub fn inflight(&self) -> u64 {
        self.allocated() - self.returned() - self.quarantined
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
        self.reclaimed += o.reclaimed;
        self.released += o.released;
        self.mapped += o.mapped;
        self.unmapped += o.unmapped;
        self.quarantined += o.quarantined;
    }
}
