//! The part of a polled pool behind its header: the array cache, and everything else that only the
//! pool's owner touches.
//!
//! Why an array: allocation and return in the poll context are a load, a comparison and a store,
//! and the page that was used last, whose lines are in this CPU's cache, is allocated first.

use crate::desc::{Desc, ListNode};
use crate::header::{PoolHeader, ReturnFn};
use crate::list::{node_of, split_first};
use crate::memory::PAGE_SIZE;
use crate::stats::{Counters, PoolStats};
use netmem_percpu::{CpuCache, Depot, MAGAZINE, Taker};
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A header that can be entered.
#[repr(C)]
pub(crate) struct PolledHeader {
    /// The first field: pages point to it, and it is what a drop compares with the context.
    pub(crate) header: PoolHeader,
    pub(crate) cache: Cache,
}

impl PolledHeader {
    /// With the depot that pages are dropped into, if there is one, and its taker.
    pub(crate) fn new(remote_free: ReturnFn, domain: usize, depot: Option<(Depot, Taker)>, cache: Cache) -> Self {
        let (depot, taker) = depot.unzip();
        cache.taker.set(taker);
        Self { header: PoolHeader::new(remote_free, domain, depot, cache.page_size), cache }
    }

    /// With magazines from which any thread allocates pages.
    pub(crate) fn with_cpu_cache(remote_free: ReturnFn, domain: usize, cpus: CpuCache, cache: Cache) -> Self {
        Self { header: PoolHeader::with_cpu_cache(remote_free, domain, cpus, cache.page_size), cache }
    }

    /// Runs `f` on the depot and its taker. `None` if there is no depot, or if an `f` is running.
    /// For the pool's owner.
    #[inline(always)]
    pub(crate) fn with_taker<R>(&self, f: impl FnOnce(&mut Taker, &Depot) -> R) -> Option<R> {
        /// Puts the taker back, also after a panic.
        struct Back<'h>(&'h Cell<Option<Taker>>, Option<Taker>);
        impl Drop for Back<'_> {
            fn drop(&mut self) {
                self.0.set(self.1.take());
            }
        }
        let mut back = Back(&self.cache.taker, Some(self.cache.taker.take()?));
        Some(f(back.1.as_mut()?, self.header.depot()?))
    }

    /// The counters, if `released` pages have left the pool without passing through the owner. Any
    /// thread may call this while the owner exists: it reads only what is atomic or never changes.
    pub(crate) fn stats(&self, released: u64) -> PoolStats {
        let c = &self.cache.counters;
        let slow = c.alloc_slow.get();
        let high = self.cache.page_size as usize > PAGE_SIZE;
        let mapped = c.mapped.get();
        let all_unmapped = c.all_unmapped.get();
        let stats = PoolStats {
            recycle_cached: c.recycle_cached.get(),
            recycle_cache_full: c.recycle_cache_full.get(),
            recycle_ring: c.recycle_ring.get(),
            recycle_ring_full: c.recycle_ring_full.get(),
            alloc_fast: self.cache.popped(),
            alloc_slow: if high { 0 } else { slow },
            alloc_slow_high_order: if high { slow } else { 0 },
            alloc_empty: c.alloc_empty.get(),
            alloc_refill: c.alloc_refill.get(),
            alloc_failed: c.alloc_failed.get(),
            reclaims: c.reclaims.get(),
            unasked: c.unasked.get(),
            reclaimed: c.reclaimed.get(),
            released: 0,
            mapped,
            unmapped: if all_unmapped { mapped } else { c.unmapped.get() },
            quarantined: c.quarantined.get(),
        };
        stats.with_released(released, c.maps.get() && !all_unmapped)
    }
}

/// The owner's array of free pages, without a lock, the most recently used last; and an unbounded
/// list for pages that do not fit.
///
/// ```text
///   │ null │ page │ page │ page │      │      │
///     bottom               newest        last
/// ```
/// Two pointers are enough: the newest of an empty cache is the null at the bottom, that of a full
/// cache is the last place.
///
/// Invariant (*owner's*): only the thread that has the pool by exclusive reference, or is in its
/// poll context, touches the cache. Other threads may read the counters, `newest`, and what never
/// changes. No reference into the cache lives across a call that could drop a page.
#[repr(C, align(128))]
pub(crate) struct Cache {
    /// Atomic for [`popped`](Self::popped) alone, which other threads may call.
    newest: AtomicPtr<CachedPage>,
    last: Cell<*mut CachedPage>,
    bottom: *mut CachedPage,
    /// Bytes in a page. It is here because every allocation reads this cache line anyway.
    pub(crate) page_size: u32,
    entries: u32,
    spill: Cell<*mut ListNode>,
    /// Removes pages from the depot. It is moved out of the cache while it does so.
    taker: Cell<Option<Taker>>,
    /// The context that this thread was in when it entered this one.
    pub(crate) outer: Cell<*const PolledHeader>,
    /// Returns a page in the poll context when the array is full.
    pub(crate) overflow: ReturnFn,
    /// Pages taken from the provider and not released by the owner.
    pub(crate) held: Cell<u64>,
    pub(crate) counters: Counters,
}

/// A page, or nothing below the first one.
type CachedPage = Option<NonNull<Desc>>;

impl Cache {
    /// A cache for `capacity` pages of `page_size` bytes. Further pages go to `overflow`.
    pub(crate) fn new(capacity: u32, page_size: u32, overflow: ReturnFn) -> Self {
        let entries: Box<[CachedPage]> = vec![None; capacity as usize + 1].into();
        let bottom = Box::into_raw(entries).cast::<CachedPage>();
        Self {
            newest: AtomicPtr::new(bottom),
            // SAFETY: the last of the places just made.
            last: Cell::new(unsafe { bottom.add(capacity as usize) }),
            bottom,
            page_size,
            entries: capacity,
            spill: Cell::new(ptr::null_mut()),
            taker: Cell::default(),
            outer: Cell::new(ptr::null()),
            overflow,
            held: Cell::new(0),
            counters: Counters::default(),
        }
    }

    /// The fast path of allocation. It counts nothing, because [`popped`](Self::popped) can be
    /// computed.
    #[inline(always)]
    pub(crate) fn pop(&self) -> Option<NonNull<Desc>> {
        let newest = self.newest.load(Ordering::Relaxed);
        // SAFETY: a place that has a page, or the bottom, where there is none.
        let desc = unsafe { *newest }?;
        // SAFETY: not the bottom.
        self.newest.store(unsafe { newest.sub(1) }, Ordering::Relaxed);
        Some(desc)
    }

    /// The fast path of a return. False if the array is full.
    #[inline(always)]
    pub(crate) fn push(&self, desc: NonNull<Desc>) -> bool {
        let newest = self.newest.load(Ordering::Relaxed);
        if newest == self.last.get() {
            return false;
        }
        // SAFETY: there is a place behind it.
        unsafe {
            *newest.add(1) = Some(desc);
            self.newest.store(newest.add(1), Ordering::Relaxed);
        }
        self.counters.recycle_cached.bump();
        true
    }

    /// The fast path of the allocation of several pages: moves up to `into.len()` of them into
    /// `into`, the newest first. Returns how many. It counts nothing, as [`pop`](Self::pop) does.
    /// It is for pages that are taken while the cache is in use; see
    /// [`pop_in_place`](Self::pop_in_place).
    #[inline(always)]
    pub(crate) fn pop_many(&self, into: &mut [MaybeUninit<NonNull<Desc>>]) -> usize {
        let n = into.len().min(self.len());
        let newest = self.newest.load(Ordering::Relaxed);
        // SAFETY: there are that many pages above the bottom, none of which is null.
        unsafe {
            let first = newest.sub(n).add(1);
            // Moved before any of them is used: a return may write over the places.
            ptr::copy_nonoverlapping(first.cast::<MaybeUninit<NonNull<Desc>>>(), into.as_mut_ptr(), n);
            self.newest.store(newest.sub(n), Ordering::Relaxed);
        }
        n
    }

    /// The same without moving them: they stay in their places, in the order of the array. Returns
    /// the first place and how many there are. The cache writes over them when a page is returned.
    #[inline(always)]
    pub(crate) fn pop_in_place(&self, most: usize) -> (*const NonNull<Desc>, usize) {
        let n = most.min(self.len());
        // SAFETY: there are that many pages above the bottom.
        let newest = unsafe { self.newest.load(Ordering::Relaxed).sub(n) };
        self.newest.store(newest, Ordering::Relaxed);
        // A place with a page is not null. Without any, the place is not read.
        (newest.wrapping_add(1).cast(), n)
    }

    /// Moves pages into `out`, the newest first, as `made` makes them, until `out` is full or the
    /// array is empty. Returns how many. It counts nothing, as [`pop`](Self::pop) does. `made` must
    /// not use the cache.
    #[inline(always)]
    pub(crate) fn pop_into<T>(&self, out: &mut [MaybeUninit<T>], made: impl Fn(NonNull<Desc>) -> T) -> usize {
        let before = self.newest.load(Ordering::Relaxed);
        let mut newest = before;
        for room in out {
            // SAFETY: a place that has a page, or the bottom, where there is none.
            let Some(desc) = (unsafe { *newest }) else { break };
            room.write(made(desc));
            // SAFETY: not the bottom.
            newest = unsafe { newest.sub(1) };
        }
        self.newest.store(newest, Ordering::Relaxed);
        // SAFETY: of the same array.
        unsafe { before.offset_from_unsigned(newest) }
    }

    /// Begins to push several pages. Nothing else uses the cache before the value is dropped.
    #[inline(always)]
    pub(crate) fn pushes(&self) -> Pushes<'_> {
        let newest = self.newest.load(Ordering::Relaxed);
        Pushes { cache: self, before: newest, newest, last: self.last.get() }
    }

    /// Undoes the [`pop`](Self::pop) of a page, also in the counters.
    #[inline]
    pub(crate) fn unpop(&self, desc: NonNull<Desc>) {
        if self.len() == self.capacity() {
            // It is not in the array, and was not popped from it.
            self.counters.filled.add(u64::MAX);
            return self.spill(desc);
        }
        // SAFETY: there is a place behind the newest.
        unsafe {
            let next = self.newest.load(Ordering::Relaxed).add(1);
            *next = Some(desc);
            self.newest.store(next, Ordering::Relaxed);
        }
    }

    /// Calls `f` for each page in the array and on the list. It must not use the cache.
    pub(crate) fn each(&self, mut f: impl FnMut(NonNull<Desc>)) {
        // SAFETY: these places have pages.
        (1..=self.len()).filter_map(|i| unsafe { *self.bottom.add(i) }).for_each(&mut f);
        let mut rest = self.spill.get();
        // SAFETY: what is on the list is the cache's.
        while let Some((desc, next)) = unsafe { split_first(rest) } {
            f(desc);
            rest = next;
        }
    }

    /// Pages in the array.
    #[inline]
    fn len(&self) -> usize {
        // SAFETY: of the same array.
        unsafe { self.newest.load(Ordering::Relaxed).offset_from_unsigned(self.bottom) }
    }

    /// Places in the array.
    #[inline]
    pub(crate) fn capacity(&self) -> usize {
        // SAFETY: of the same array.
        unsafe { self.last.get().offset_from_unsigned(self.bottom) }
    }

    /// How many pages were popped on the fast path: the pages that were pushed and are not in the
    /// array any more.
    fn popped(&self) -> u64 {
        let came = self.counters.recycle_cached.get().wrapping_add(self.counters.filled.get());
        // Another thread may find a page in the array that is not counted yet.
        came.wrapping_sub(self.len() as u64).cast_signed().max(0).cast_unsigned()
    }

    /// The slow path of a return: pushes onto the array, or onto the list behind it.
    #[inline]
    pub(crate) fn put(&self, desc: NonNull<Desc>) {
        if self.len() == self.capacity() {
            return self.spill(desc);
        }
        // SAFETY: there is a place behind the newest.
        unsafe { *self.newest.load(Ordering::Relaxed).add(1) = Some(desc) };
        self.grew(1);
    }

    /// The address for the next pages, if a whole magazine fits. The caller writes the pages there.
    /// It then calls [`grew`](Self::grew) before it uses the cache in another way.
    #[inline]
    pub(crate) fn room_for_magazine(&self) -> Option<*mut CachedPage> {
        // SAFETY: there are places behind the newest.
        (self.capacity() - self.len() >= MAGAZINE).then(|| unsafe { self.newest.load(Ordering::Relaxed).add(1) })
    }

    /// This many pages were written behind the newest.
    #[inline]
    pub(crate) fn grew(&self, n: usize) {
        // SAFETY: there are that many places, for they were written.
        self.newest.store(unsafe { self.newest.load(Ordering::Relaxed).add(n) }, Ordering::Relaxed);
        self.counters.filled.add(n as u64);
    }

    /// The slow path of allocation: pops from the array, or else from the list behind it.
    #[inline]
    pub(crate) fn take(&self) -> Option<NonNull<Desc>> {
        let Some(desc) = self.pop() else { return self.unspill() };
        self.counters.filled.add(u64::MAX);
        Some(desc)
    }

    /// From now on every page overflows.
    pub(crate) fn disable(&self) {
        debug_assert_eq!(self.len(), 0);
        self.last.set(self.bottom);
    }

    /// Puts a page onto the list behind the array.
    #[inline]
    pub(crate) fn spill(&self, desc: NonNull<Desc>) {
        let node = node_of(desc);
        // SAFETY: the page is the cache's now, and so is its node.
        unsafe { (*node).set(self.spill.get()) };
        self.spill.set(node);
    }

    /// Moves pages from that list into the array, while there are pages on the list and places in
    /// the array.
    pub(crate) fn refill(&self) {
        while self.len() < self.capacity()
            && let Some(desc) = self.unspill()
        {
            self.put(desc);
        }
    }

    /// Pops a page from that list.
    #[inline]
    fn unspill(&self) -> Option<NonNull<Desc>> {
        let node = self.spill.get();
        // SAFETY: what is on the list is the cache's.
        let (desc, next) = unsafe { split_first(node)? };
        self.spill.set(next);
        Some(desc)
    }
}

/// Pushes of several pages, which the cache has when this is dropped.
pub(crate) struct Pushes<'c> {
    cache: &'c Cache,
    before: *mut CachedPage,
    newest: *mut CachedPage,
    last: *mut CachedPage,
}

impl Pushes<'_> {
    #[inline(always)]
    pub(crate) fn is_full(&self) -> bool {
        self.newest == self.last
    }

    /// Pushes a page, for which there is room.
    #[inline(always)]
    pub(crate) fn push(&mut self, desc: NonNull<Desc>) {
        debug_assert!(!self.is_full());
        // SAFETY: there is a place behind the newest.
        unsafe {
            self.newest = self.newest.add(1);
            *self.newest = Some(desc);
        }
    }
}

impl Drop for Pushes<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.cache.newest.store(self.newest, Ordering::Relaxed);
        // SAFETY: of the same array.
        let pushed = unsafe { self.newest.offset_from_unsigned(self.before) };
        self.cache.counters.recycle_cached.add(pushed as u64);
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `new`, with this length.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(self.bottom, self.entries as usize + 1)) });
    }
}
