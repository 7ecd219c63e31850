//! The page pool as its owner uses it, and the poll context.
//!
//! The state that pages and owner share is in [`crate::shared`]. How the pool ends is in
//! [`crate::end`].

use crate::cache::{Cache, PolledHeader};
use crate::cached_pages::{CachedPages, PageRoom};
use crate::desc::{Desc, UnmapEvent, put_last};
use crate::dma::{Direction, DmaDomain};
use crate::error::PoolError;
use crate::frag::Frag;
use crate::header::{PoolHeader, ReturnFn};
use crate::memory::Memory;
use crate::options::PoolOptions;
use crate::page::Page;
use crate::panics::Panics;
use crate::provider::Provider;
use crate::record::{Record, StatsReader};
use crate::return_path::ReturnPath;
use crate::shared::{CACHE_REFILL, RECLAIM_INTERVAL, Shared};
use crate::stats::{PoolClosed, PoolStats};
use netmem_percpu::Depot;
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

impl PoolOptions {
    /// Makes the pool. A `domain` of `None` means that the device uses this process's addresses.
    ///
    /// # Errors
    ///
    /// See [`PoolError`]; nothing is left mapped.
    pub fn build<M: Memory>(
        self,
        provider: Arc<dyn Provider<M>>,
        domain: Option<Arc<dyn DmaDomain>>,
    ) -> Result<PagePool<M>, PoolError> {
        let depot = self.depot(&*provider)?;
        PagePool::build(self, provider, domain, |remote_free, domain, cache| {
            PolledHeader::new(remote_free, domain, depot, cache)
        })
    }
}

/// A page pool, owned by one receive queue.
///
/// It can move to another thread, but has one owner at a time: allocation takes the pool by
/// exclusive reference or happens in its poll context. Pages are returned by any thread. If a pool
/// is dropped while pages are in flight, it lingers until the last page is returned
/// ([`lingering`](crate::lingering)).
///
/// # Panics of user code
///
/// The pool calls its domain, its provider and the program's log subscriber. If one of them panics,
/// the pool finishes its work, so that no page is lost. Then it propagates the panic: out of the
/// pool's method, or out of the drop of a page. `unmap` is called once for each mapping, also if it
/// panics.
///
/// # Fork
///
/// A child process has a copy of the pool's accounting, and none of the pages' memory
/// (see [`Region`](crate::Region)). It may drop pages. It may close a pool only if the pool
/// has no domain, or one whose state is in the memory of the process: otherwise the child would
/// unmap what its parent's device uses. At the fork no other thread may be in a call of the pool or
/// of its provider. `docs/design/return-path.md` has the table.
pub struct PagePool<M: Memory> {
    shared: NonNull<Shared<M>>,
}

// SAFETY: the owner's part is reached through this value alone (*owner's*), the rest is shareable.
unsafe impl<M: Memory> Send for PagePool<M> {}

/// The poll context of the pool: exists inside [`PagePool::poll`], on its thread, for this pool
/// alone.
///
/// The lifetime is invariant and different for every poll, so that a context can neither leave its
/// poll nor be exchanged for another pool's. Two [reborrowed](Self::reborrow) contexts of nested
/// polls can be exchanged with each other. That is harmless: each is still the only context of its
/// pool, and ends before the inner poll does.
pub struct Napi<'q, M: Memory> {
    /// Also what keeps the context on its thread: a pointer can be neither sent nor shared.
    shared: NonNull<Shared<M>>,
    brand: PhantomData<fn(&'q ()) -> &'q ()>,
}

impl<M: Memory> Napi<'_, M> {
    /// Allocates a whole page: a pop of the array cache. If the cache is empty, the page comes from
    /// the first of these that has one: a magazine of pages that other threads returned; the
    /// provider; at most every 100 us, the magazines of other CPUs. `None` if none of them has a
    /// page, or if it is too early to reclaim from other CPUs again; this is counted as
    /// `alloc_failed`. If a thread is going to sleep because of that, it calls
    /// [`PagePool::reclaim`] first.
    #[inline]
    pub fn alloc(&mut self) -> Option<Page<M>> {
        // SAFETY: the context exists inside of its pool's `poll`.
        unsafe { Shared::alloc(self.shared, RECLAIM_INTERVAL) }
    }

    /// Allocates up to `most` whole pages, and no more than `room` has room for, from the array
    /// cache. If the cache has fewer, the others are for [`alloc`](Self::alloc), which also fills
    /// the cache. Calls no user code. Pages that are not taken from the iterator stay with the pool.
    ///
    /// This is the safe form: the pages are moved into `room`, so that this thread may drop pages
    /// of this pool before all are taken. [`alloc_in_place`](Self::alloc_in_place) does not move
    /// them.
    #[inline(always)]
    pub fn alloc_cached<'n>(&'n mut self, room: &'n mut PageRoom, most: usize) -> CachedPages<'n, M> {
        let cache = &self.shared().front.cache;
        let n = cache.pop_many(&mut room.0[..most.min(PageRoom::PAGES)]);
        // SAFETY: the first `n` places have pages, popped from the cache, and `room` is borrowed.
        unsafe { CachedPages::new(cache, room.0.as_ptr().cast(), n) }
    }

    /// [`alloc_cached`](Self::alloc_cached) of pages that stay in their places of the array cache
    /// until they are taken from the iterator: none is copied.
    ///
    /// # Safety
    ///
    /// Until the value is dropped, this thread drops no page of this pool: the cache would write it
    /// over a page that was not taken.
    ///
    /// One exception: if the function given to [`CachedPages::take_with`] panics, pages that were
    /// taken from this value may be dropped, although the value lives. The `k`th page that is
    /// dropped is written to the `k`th of the places. At least `k` pages were taken before, from
    /// the first place on, so it is the place of a page that was taken.
    #[inline(always)]
    pub unsafe fn alloc_in_place(&mut self, most: usize) -> CachedPages<'_, M> {
        let cache = &self.shared().front.cache;
        let (first, n) = cache.pop_in_place(most);
        // SAFETY: the `n` places have pages, popped from the cache. The caller promises that the
        // cache does not write to them, except to places whose pages were taken.
        unsafe { CachedPages::new(cache, first, n) }
    }

    /// The same context for a shorter time, to be kept in a structure.
    #[inline]
    pub fn reborrow(&mut self) -> Napi<'_, M> {
        Napi { shared: self.shared, brand: PhantomData }
    }

    /// For a page of this pool: the device wrote these bytes of `page`, and the CPU is about to
    /// read them.
    pub fn sync_for_cpu(&self, page: &Page<M>, bytes: Range<usize>) {
        if let Some(domain) = self.live_domain() {
            let (dma, len) = page.dma_range(&bytes);
            domain.sync_for_cpu(dma, len);
        }
    }

    /// For a page of this pool: the device is about to write these bytes of `page`.
    pub fn sync_for_device(&self, page: &Page<M>, bytes: Range<usize>) {
        if let Some(domain) = self.live_domain() {
            let (dma, len) = page.dma_range(&bytes);
            domain.sync_for_device(dma, len, Direction::FromDevice);
        }
    }

    pub(crate) fn shared(&self) -> &Shared<M> {
        // SAFETY: the context exists inside of its pool's `poll`.
        unsafe { self.shared.as_ref() }
    }

    fn live_domain(&self) -> Option<&dyn DmaDomain> {
        let s = self.shared();
        s.domain.as_deref().filter(|_| M::MAPPED && !s.gone.get())
    }
}

impl<M: Memory> fmt::Debug for Napi<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Napi")
    }
}

impl<M: Memory> PagePool<M> {
    /// `front` makes the front of the pool: its arguments are the function for the slow return, the
    /// domain's identity and the array cache.
    pub(crate) fn build(
        o: PoolOptions,
        provider: Arc<dyn Provider<M>>,
        domain: Option<Arc<dyn DmaDomain>>,
        front: impl FnOnce(ReturnFn, usize, Cache) -> PolledHeader,
    ) -> Result<Self, PoolError> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        if o.limit == 0 {
            return Err(PoolError::NoPages);
        }
        // The identity is 0 for pages that a device may not read, so that transmit queues map them.
        let readable = domain.as_ref().filter(|_| o.direction != Direction::FromDevice);
        let domain_id = readable.map_or(0, |d| Arc::as_ptr(d).addr());
        let record = Record::new(&o.name);
        // A page has at most 2 MiB, and a region at most 2^32 pages.
        let page_size = provider.page_size() as u32;
        let cache = u32::try_from(o.cache).unwrap_or(u32::MAX);
        let shared = Box::new(Shared {
            front: front(Shared::<M>::remote_free, domain_id, Cache::new(cache, page_size, Shared::<M>::overflow)),
            returns: ReturnPath::new(record.clone()),
            quarantine: PoolHeader::new(Shared::<M>::quarantine_remote, domain_id, None, page_size),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            limit: Cell::new(o.limit),
            provider,
            domain,
            direction: o.direction,
            unmap_event: UnmapEvent::new(),
            last_reclaim: Cell::new(None),
            last_idle_reclaim: Cell::new(None),
            interrupts: o.interrupts,
            gone: Cell::new(false),
            circulates: o.cache > 0,
        });
        if shared.domain.is_some() {
            shared.front.cache.counters.maps.set();
        }
        let mut pool = Self { shared: NonNull::from(Box::leak(shared)) };
        record.open(pool.shared.cast());
        pool.prefill(o.prefill)?;
        let (name, kind, cache) = (pool.name(), M::NAME, pool.shared().front.cache.capacity());
        let magazine = pool.shared().front.header.depot().map_or(0, Depot::capacity);
        netmem_percpu::trace::debug!(pool = name, kind, page_size, cache, magazine, held = pool.held(), "pool made");
        Ok(pool)
    }

    fn prefill(&mut self, want: usize) -> Result<(), PoolError> {
        let s = self.shared();
        loop {
            let got = usize::try_from(s.front.cache.held.get()).unwrap_or(usize::MAX);
            if got >= want || !s.circulates {
                return Ok(());
            }
            let mut panics = Panics::default();
            // SAFETY: the reference is exclusive.
            let taken = unsafe { Shared::alloc_from_provider::<CACHE_REFILL>(self.shared, &mut panics) };
            if let Ok(Some(desc)) = &taken {
                s.front.cache.put(*desc);
            }
            panics.resume();
            taken?.ok_or(PoolError::Prefill { want, got })?;
        }
    }

    pub(crate) fn shared(&self) -> &Shared<M> {
        // SAFETY: the owner keeps it.
        unsafe { self.shared.as_ref() }
    }

    /// Runs `f` in the pool's poll context: if code on this thread drops pages of this pool
    /// meanwhile, they go straight into the array cache. The context ends with `f`, also after a
    /// panic.
    ///
    /// Polls of several pools nest, and end in the reverse of the order in which they began.
    /// **Note:** a library that switches stacks (fibres, stackful coroutines) must not suspend `f`:
    /// a context that ends on another thread, or before one that began in it, aborts the process.
    #[inline]
    pub fn poll<R>(&mut self, f: impl FnOnce(&mut Napi<'_, M>) -> R) -> R {
        let _in_context = self.shared().front.enter();
        f(&mut Napi { shared: self.shared, brand: PhantomData })
    }

    /// Allocates a page outside of a poll, for example to fill a queue before its first poll. Like
    /// [`Napi::alloc`], but reclaims from other CPUs each time that there is no other page.
    #[inline]
    pub fn alloc(&mut self) -> Option<Page<M>> {
        // SAFETY: the reference is exclusive, and no poll runs, because a poll would hold the
        // reference.
        unsafe { Shared::alloc(self.shared, Duration::ZERO) }
    }

    /// Allocates a page as [`Napi::alloc`] does, outside of a poll. It enters no poll context, so
    /// it reads no thread-local variable: a shared library finds one by a call, which costs more
    /// than a pop of the array cache.
    #[inline]
    pub fn alloc_single(&mut self) -> Option<Page<M>> {
        // SAFETY: as in `alloc`.
        unsafe { Shared::alloc(self.shared, RECLAIM_INTERVAL) }
    }

    /// Drops a fragment as in a poll of this pool, outside of a poll, and for the reason of
    /// [`alloc_single`](Self::alloc_single): if the fragment is the last holder of its page, the
    /// page is pushed onto the array cache.
    ///
    /// # Errors
    ///
    /// The page is of another pool, or was quarantined. The error is the fragment.
    #[inline]
    pub fn release_single(&mut self, frag: Frag<M>) -> Result<(), Frag<M>> {
        let front = &raw const self.shared().front;
        if frag.desc().header().cast_const() != front.cast() {
            return Err(frag);
        }
        let desc = frag.into_desc();
        // SAFETY: the count was the fragment's, and is put here.
        if unsafe { put_last(desc) } && !self.shared().front.cache.push(desc) {
            self.recycle_full(desc);
        }
        Ok(())
    }

    /// Returns a page of this pool for which the array cache has no room.
    #[cold]
    #[inline(never)]
    fn recycle_full(&mut self, desc: NonNull<Desc>) {
        // SAFETY: the caller has put the page's last count, and its header is this pool's.
        self.poll(|_| unsafe { PoolHeader::recycle(NonNull::new_unchecked(desc.as_ref().header()), desc) });
    }

    /// Reclaims the pages that other threads returned, and those in the magazines of other CPUs.
    /// For an owner that is about to sleep: a page that is returned later would not wake it. One
    /// membarrier, if any pages wait.
    pub fn reclaim(&mut self) {
        self.drain();
    }

    fn drain(&mut self) {
        let mut panics = Panics::default();
        self.shared().drain(&mut panics);
        panics.resume();
    }

    /// Pages that the pool has from its provider: in its cache, posted, or held by users.
    #[must_use]
    pub fn held(&self) -> usize {
        self.shared().held() as usize
    }

    /// The most pages that the pool can hold: its limit, or what its provider has.
    #[must_use]
    pub fn limit(&self) -> usize {
        let shared = self.shared();
        usize::try_from(shared.provider.pages().min(shared.limit.get())).unwrap_or(usize::MAX)
    }

    /// Changes the most pages that the pool allocates from its provider at a time. Pages beyond it
    /// stay until [`shrink`](Self::shrink) releases them.
    pub fn set_limit(&mut self, pages: usize) {
        self.shared().limit.set(pages as u64);
    }

    /// Unmaps idle pages and releases them to the provider, also those in magazines of other CPUs,
    /// until the pool [holds](Self::held) no more than `pages` or no page is idle. Returns how many
    /// pages were released.
    pub fn shrink(&mut self, pages: usize) -> usize {
        let mut panics = Panics::default();
        let s = self.shared();
        s.drain(&mut panics);
        let mut gone = 0;
        while self.held() > pages
            && !panics.any()
            && let Some(desc) = s.front.cache.take()
        {
            s.release(desc, &mut panics);
            gone += 1;
        }
        panics.resume();
        gone
    }

    /// Bytes in each page.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.shared().page_size()
    }

    /// The pool's name in reports.
    #[must_use]
    pub fn name(&self) -> &str {
        self.shared().name()
    }

    /// Identity of the pool's [domain](crate::DmaDomain); 0 for none, and for a pool whose pages a
    /// device may not read. See [`Page::dma_domain`].
    #[must_use]
    pub fn dma_domain(&self) -> usize {
        self.shared().front.header.domain()
    }

    /// Whether returned pages stay with the pool. If not, every packet allocates a page from the
    /// provider.
    #[must_use]
    pub fn circulates(&self) -> bool {
        self.shared().circulates
    }

    /// Whether [`Napi::sync_for_cpu`] and its counterpart have any effect. To be called once, not
    /// per packet.
    #[must_use]
    pub fn needs_sync(&self) -> bool {
        M::MAPPED && self.shared().domain.as_ref().is_some_and(|d| d.needs_sync())
    }

    /// The counters, exact for what this thread can know. Pages that other threads returned are
    /// taken in first, with a membarrier if any wait on other CPUs (and if
    /// [`PoolOptions::interrupt_cpus`] allows it). [`stats_reader`](Self::stats_reader) disturbs no
    /// thread.
    pub fn stats(&mut self) -> PoolStats {
        self.drain();
        let s = self.shared();
        s.front.stats(s.returns.released_remotely())
    }

    /// Reads the pool's counters from any thread, also after the pool's end. Costs one atomic
    /// addition.
    #[must_use]
    pub fn stats_reader(&self) -> StatsReader {
        StatsReader::new(self.shared().returns.record.clone())
    }

    /// Quarantines a page that a device kept when it stopped answering. The device may still write
    /// to the page. Therefore the page is unmapped, and not used again until its region is dropped,
    /// or until its provider claims it anew ([`Region::claim`](crate::Region::claim)). If a page
    /// was split or shared, any part can be passed: the page is counted as quarantined once, when
    /// its last part is dropped. A page of another pool is only kept from returning, and shows in
    /// that pool as in flight.
    pub fn quarantine(&mut self, page: Page<M>) {
        let mut panics = Panics::default();
        let s = self.shared();
        let desc = page.desc();
        if ![&raw const s.front.header, &raw const s.quarantine].contains(&desc.header().cast_const()) {
            // This comes first, because the log subscriber may panic, and the page must not be
            // returned then.
            let page = ManuallyDrop::new(page);
            netmem_percpu::trace::error!(pool = self.name(), ?page, "asked to quarantine a page of another pool");
            return;
        }
        desc.set_quarantined();
        // First, for the domain may panic. By the pool's own pointer: the last page that is
        // returned this way may free the pool.
        // SAFETY: the owner keeps it.
        desc.set_header(unsafe { &raw mut (*self.shared.as_ptr()).quarantine });
        s.unmap_alone(desc, &mut panics);
        drop(page);
        s.drain_stack(&mut panics);
        panics.resume();
    }

    /// The device is gone, or is about to go: every mapped page is unmapped now, wherever it is.
    /// The pool allocates no more, and pages that are returned later are neither synced nor
    /// unmapped. Walks all descriptors in use, and sleeps while another thread is unmapping a page
    /// of the pool.
    pub fn device_gone(&mut self) {
        self.shared().device_gone();
    }

    /// Ends the pool and returns its final state. If pages are still in flight, the pool lingers
    /// until the last of them is returned, as it does when it is dropped.
    pub fn close(self) -> PoolClosed {
        let pool = ManuallyDrop::new(self);
        // SAFETY: this is the owner's last use of the pool.
        unsafe { Shared::end(pool.shared) }
    }
}

impl<M: Memory> Drop for PagePool<M> {
    fn drop(&mut self) {
        // SAFETY: this is the owner's last use of the pool.
        let _ = unsafe { Shared::end(self.shared) };
    }
}

impl<M: Memory> fmt::Debug for PagePool<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.shared();
        write!(f, "PagePool({}, {:?})", self.name(), s.front.stats(s.returns.released_remotely()))
    }
}
