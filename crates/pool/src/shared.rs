//! The state that a pool's owner and its pages share, and the slow paths of allocation.
//!
//! The file is ordered by cost: the array cache, refill from returned pages, the provider, reclaim;
//! then how pages enter and leave the pool. Returns without a magazine, and the pool's end, are in
//! [`crate::end`].

use crate::cache::PolledHeader;
use crate::desc::{Desc, UnmapEvent};
use crate::dma::{self, Direction, DmaDomain};
use crate::error::MapError;
use crate::header::{PoolHeader, desc_of};
use crate::memory::Memory;
use crate::page::Page;
use crate::panics::Panics;
use crate::provider::Provider;
use crate::raw_page::RawPage;
use crate::return_path::ReturnPath;
use crate::stats::Counter;
use netmem_percpu::{Depot, MAGAZINE, prefetch};
use std::cell::Cell;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages that are requested from the provider at a time: the kernel's `PP_ALLOC_CACHE_REFILL`.
pub(crate) const CACHE_REFILL: usize = 64;

/// The least time between two reclaims in polls. A reclaim reads a word of each CPU. If it finds
/// pages, it costs a membarrier, and meanwhile threads that return pages take a slower path.
pub(crate) const RECLAIM_INTERVAL: Duration = Duration::from_micros(100);

/// The least time between two reclaims of idle CPUs. A CPU that has returned no page for so long is
/// idle.
const IDLE_INTERVAL: Duration = Duration::from_millis(10);

/// The state that the owner and the pages share. Its first field is the pages' [`PoolHeader`].
///
/// Lives as long as the owner or a page in flight: see [`crate::end`].
#[repr(C)]
pub(crate) struct Shared<M: Memory> {
    pub(crate) front: PolledHeader,
    pub(crate) returns: ReturnPath,
    /// The header of pages in quarantine: their last drop counts them here.
    pub(crate) quarantine: PoolHeader,
    pub(crate) id: u64,
    pub(crate) limit: Cell<u64>,
    pub(crate) provider: Arc<dyn Provider<M>>,
    pub(crate) domain: Option<Arc<dyn DmaDomain>>,
    /// The direction in which pages are mapped in the domain.
    pub(crate) direction: Direction,
    /// Where the owner waits for returns that are unmapping a page.
    pub(crate) unmap_event: UnmapEvent,
    /// When the owner last tried to reclaim the pages that other CPUs hold.
    pub(crate) last_reclaim: Cell<Option<Instant>>,
    /// When the owner last tried to reclaim the magazines of idle CPUs.
    pub(crate) last_idle_reclaim: Cell<Option<Instant>>,
    /// Whether the owner may interrupt other CPUs to take their pages.
    pub(crate) interrupts: bool,
    /// Set once the device is gone.
    pub(crate) gone: Cell<bool>,
    /// Whether pages that are returned by other threads wait for the owner. Otherwise they go to
    /// the provider at once.
    pub(crate) circulates: bool,
}

/// If no comment states otherwise, these functions are for the owner only: by exclusive reference
/// to the pool, or in its poll context.
///
/// Shared references to `Shared` live across calls of user code, and that code may drop pages of
/// this pool. Therefore every field that those drops change is a cell or an atomic.
impl<M: Memory> Shared<M> {
    pub(crate) fn name(&self) -> &str {
        self.returns.record.name()
    }

    #[inline]
    pub(crate) fn page_size(&self) -> usize {
        self.front.cache.page_size as usize
    }

    /// Pages that the pool has from its provider.
    pub(crate) fn held(&self) -> u64 {
        self.front.cache.held.get() - self.returns.released_remotely()
    }

    /// Allocates a page. Reclaims from other CPUs only if `interval` has passed since the last
    /// attempt.
    #[inline(always)]
    pub(crate) unsafe fn alloc(this: NonNull<Self>, interval: Duration) -> Option<Page<M>> {
        // SAFETY: the owner calls; no reference is held across `slow`, which calls user code.
        unsafe {
            let cache = &(*this.as_ptr()).front.cache;
            let page_size = cache.page_size;
            let desc = match cache.pop() {
                Some(desc) => desc,
                None => Self::alloc_slow(this, interval)?,
            };
            Some(Page::from_desc(desc, 0, page_size))
        }
    }

    #[cold]
    #[inline(never)]
    unsafe fn alloc_slow(this: NonNull<Self>, interval: Duration) -> Option<NonNull<Desc>> {
        let mut panics = Panics::default();
        // SAFETY: the owner calls.
        let (s, found) = unsafe { (this.as_ref(), Self::find(this, interval, &mut panics)) };
        let desc = match found {
            Some((desc, counter)) if !panics.any() => {
                counter.bump();
                Some(desc)
            }
            // The page stays in the pool, and the allocation ends with the panic.
            Some((desc, _)) => {
                s.front.cache.put(desc);
                None
            }
            None => {
                s.front.cache.counters.alloc_failed.bump();
                None
            }
        };
        panics.resume();
        desc
    }

    /// A page for an empty cache, and the counter of its source.
    unsafe fn find<'s>(
        this: NonNull<Self>,
        interval: Duration,
        panics: &mut Panics,
    ) -> Option<(NonNull<Desc>, &'s Counter)> {
        // SAFETY: the owner calls, and keeps the pool.
        let s: &'s Self = unsafe { this.as_ref() };
        let cache = &s.front.cache;
        let refilled = || Some((cache.take()?, &cache.counters.alloc_refill));
        if s.gone.get() {
            // The pool keeps no pages any more, and returned pages must not wait.
            s.drain(panics);
        }
        if cache.capacity() > 0 {
            if s.front.header.depot().is_some_and(Depot::is_crowded) {
                s.reclaim_idle(panics);
            }
            s.refill(panics);
            if let Some(found) = refilled() {
                return Some(found);
            }
            cache.counters.alloc_empty.bump();
        }
        // A pool without a cache allocates one page for each packet, and pays for one.
        // SAFETY: as above.
        let taken = unsafe {
            if cache.capacity() == 0 && !std::thread::panicking() {
                Self::alloc_one_from_provider(this)
            } else {
                Self::alloc_from_provider::<CACHE_REFILL>(this, panics)
            }
        };
        match taken {
            Ok(Some(desc)) => return Some((desc, &cache.counters.alloc_slow)),
            Ok(None) => {}
            Err(error) => {
                panics.call(|| netmem_percpu::trace::debug!(pool = s.name(), %error, "a page could not be mapped"));
            }
        }
        s.reclaim_after(interval, panics);
        refilled()
    }

    /// Moves returned pages into the empty cache: one magazine of them, or else all pages on the
    /// return stack.
    fn refill(&self, panics: &mut Panics) {
        if self.take_magazine(panics) {
            return;
        }
        self.drain_stack(panics);
        self.front.cache.refill();
    }

    /// Empties one full magazine into the cache. Prefetches each page's descriptor for the page's
    /// next user.
    fn take_magazine(&self, panics: &mut Panics) -> bool {
        let cache = &self.front.cache;
        if let Some(room) = cache.room_for_magazine() {
            let n = self.next_magazine(|n, item| {
                let desc = desc_of(item);
                prefetch::to_read(desc.as_ptr());
                // SAFETY: a magazine at most, for which there is room.
                unsafe { *room.add(n) = Some(desc) };
            });
            cache.grew(n.unwrap_or(0));
            return n.is_some();
        }
        // The magazine is copied first: user code may be called, which may drop pages of this pool.
        let mut items = [NonZeroUsize::MIN; MAGAZINE];
        let n = self.next_magazine(|n, item| items[n] = item);
        items[..n.unwrap_or(0)].iter().for_each(|&item| self.keep_or_release(desc_of(item), panics));
        n.is_some()
    }

    /// Hands the items of one full magazine to `take`, with their index in it. Returns how many
    /// there were, or `None` if there was no magazine.
    #[inline(always)]
    fn next_magazine(&self, mut take: impl FnMut(usize, NonZeroUsize)) -> Option<usize> {
        let cache = &self.front.cache;
        let mut n = 0;
        let found = self.front.with_taker(|taker, depot| {
            taker.refill(depot, |item| {
                take(n, item);
                n += 1;
            })
        })?;
        cache.counters.recycle_ring.add(n as u64);
        found.then_some(n)
    }

    /// For a pool that is out of pages: reclaims the pages of other CPUs, if `interval` has passed
    /// since the last attempt.
    fn reclaim_after(&self, interval: Duration, panics: &mut Panics) {
        if self.front.header.depot().is_none() {
            return;
        }
        let now = Instant::now();
        if self.last_reclaim.get().is_some_and(|last| now.duration_since(last) < interval) {
            return;
        }
        self.last_reclaim.set(Some(now));
        if self.reclaim(panics) {
            self.front.cache.counters.reclaims.bump();
        }
    }

    /// Reclaims the pages of other CPUs. False if they seem to have none, if they may not be
    /// interrupted, or if the barrier failed.
    fn reclaim(&self, panics: &mut Panics) -> bool {
        let Some(depot) = self.front.header.depot() else { return false };
        if depot.peek() == 0 {
            return false;
        }
        let c = &self.front.cache.counters;
        if !self.interrupts {
            c.unasked.bump();
            return false;
        }
        let mut n = 0;
        let done = self.front.with_taker(|taker, depot| {
            taker.reclaim(depot, |item| {
                self.keep_or_release(desc_of(item), panics);
                n += 1;
            })
        });
        c.reclaimed.add(n);
        c.recycle_ring.add(n);
        // While the gate was closed, other pages were pushed on the stack.
        self.drain_stack(panics);
        if let Some(Err(error)) = &done {
            panics.call(|| {
                netmem_percpu::trace::warn!(pool = self.name(), %error, "pages that other CPUs hold cannot be reclaimed");
            });
        }
        matches!(done, Some(Ok(())))
    }

    /// Reclaims the magazines of idle CPUs, for other CPUs that have none.
    #[cold]
    #[inline(never)]
    fn reclaim_idle(&self, panics: &mut Panics) {
        let now = Instant::now();
        let rests = self.last_idle_reclaim.get().is_some_and(|last| now.duration_since(last) < IDLE_INTERVAL);
        if rests || !self.interrupts {
            return;
        }
        self.last_idle_reclaim.set(Some(now));
        let c = &self.front.cache.counters;
        let mut n = 0;
        let done = self.front.with_taker(|taker, depot| {
            taker.reclaim_idle(depot, |item| {
                self.keep_or_release(desc_of(item), panics);
                n += 1;
            })
        });
        c.reclaimed.add(n);
        c.recycle_ring.add(n);
        match done {
            Some(Ok(true)) => c.reclaims.bump(),
            Some(Err(error)) => {
                panics.call(|| {
                    netmem_percpu::trace::warn!(pool = self.name(), %error, "magazines of idle CPUs cannot be reclaimed");
                });
            }
            _ => {}
        }
    }

    /// Keeps a returned page, to be used again, or releases it if the pool keeps no pages.
    pub(crate) fn keep_or_release(&self, desc: NonNull<Desc>, panics: &mut Panics) {
        if self.gone.get() || self.front.cache.capacity() == 0 {
            self.release(desc, panics);
        } else {
            self.front.cache.put(desc);
        }
    }

    /// Allocates a page from the provider and maps it, for a pool without a cache, which does this
    /// for each packet. Catching a panic would cost each packet nanoseconds. Therefore a guard
    /// cleans up while a panic unwinds; without a panic it costs nothing. For a thread that is not
    /// already unwinding. If the provider or the domain panics, the effect is that of
    /// [`alloc_from_provider`](Self::alloc_from_provider).
    unsafe fn alloc_one_from_provider(this: NonNull<Self>) -> Result<Option<NonNull<Desc>>, MapError> {
        /// A page that has not entered the pool is released to its provider.
        struct Back<'s, M: Memory>(&'s Shared<M>, [Option<RawPage<M>>; 1]);
        impl<M: Memory> Drop for Back<'_, M> {
            fn drop(&mut self) {
                if let [Some(page)] = std::mem::take(&mut self.1) {
                    let mut panics = Panics::default();
                    // SAFETY: the page came from the provider.
                    panics.call(|| unsafe { self.0.provider.release(page) });
                    panics.resume();
                }
            }
        }
        // SAFETY: the owner calls.
        let s = unsafe { this.as_ref() };
        if s.room() == 0 {
            return Ok(None);
        }
        let mut back = Back(s, [None]);
        s.provider.alloc(&mut back.1);
        let [Some(page)] = &back.1 else { return Ok(None) };
        // SAFETY: the page came from the provider just now.
        unsafe { s.admit(page, this)? };
        let held = &s.front.cache.held;
        held.set(held.get() + 1);
        let [page] = &mut back.1;
        Ok(page.take().map(RawPage::into_desc))
    }

    /// The number of pages that the pool may take from its provider now.
    #[inline]
    fn room(&self) -> u64 {
        if self.gone.get() {
            return 0;
        }
        let (limit, held) = (self.limit.get(), self.front.cache.held.get());
        match limit.saturating_sub(held) {
            // Pages that left without passing through the owner are not in the pool, but `held`
            // counts them.
            0 => limit.saturating_add(self.returns.released_remotely()).saturating_sub(held),
            room => room,
        }
    }

    /// Allocates up to `N` pages from the provider and maps them: one to return, more for the cache
    /// if there is one.
    ///
    /// If the provider panics in its `alloc`, the pages that it had handed out by then are released
    /// to it. If the domain panics in its `map`, the page counts as not mapped, and is released.
    pub(crate) unsafe fn alloc_from_provider<const N: usize>(
        this: NonNull<Self>,
        panics: &mut Panics,
    ) -> Result<Option<NonNull<Desc>>, MapError> {
        // SAFETY: the owner calls.
        let s = unsafe { this.as_ref() };
        let cache = &s.front.cache;
        let room = s.room();
        if room == 0 {
            return Ok(None);
        }
        let want = (cache.capacity() / 2).clamp(1, N).min(usize::try_from(room).unwrap_or(N));
        let mut raw = [const { None }; N];
        let taken = panics.call(|| s.provider.alloc(&mut raw[..want])).is_some();
        let mut answer = None;
        let mut entered = if taken { Ok(()) } else { Err(None) };
        for page in raw.into_iter().flatten() {
            if entered.is_ok() {
                // SAFETY: as above; the page came from the provider just now.
                entered = match panics.call(|| unsafe { s.admit(&page, this) }) {
                    Some(Ok(())) => Ok(()),
                    Some(Err(error)) => Err(Some(error)),
                    None => Err(None),
                };
            }
            if entered.is_err() {
                // SAFETY: as above.
                panics.call(|| unsafe { s.provider.release(page) });
                continue;
            }
            cache.held.set(cache.held.get() + 1);
            let desc = page.into_desc();
            if answer.is_none() {
                answer = Some(desc);
            } else {
                cache.put(desc);
            }
        }
        match (answer, entered) {
            (None, Err(Some(error))) => Err(error),
            (answer, _) => Ok(answer),
        }
    }

    /// A page from the provider enters the pool: it is mapped, and gets the pool's header.
    #[inline]
    unsafe fn admit(&self, page: &RawPage<M>, this: NonNull<Self>) -> Result<(), MapError> {
        // SAFETY: the pool keeps the provider.
        let desc = unsafe { page.desc() };
        match &self.domain {
            Some(domain) => {
                // SAFETY: the provider keeps the page's region.
                let dma = unsafe { dma::map_page::<M>(&**domain, desc, self.page_size(), self.direction)? };
                desc.set_mapped(self.id, dma);
                self.front.cache.counters.mapped.bump();
            }
            None => desc.set_mapped(0, desc.addr().addr() as u64),
        }
        desc.set_header(this.as_ptr().cast());
        Ok(())
    }

    /// Moves all pages that other threads returned into the cache, and those that do not fit onto
    /// the list behind it.
    pub(crate) fn drain(&self, panics: &mut Panics) {
        while self.take_magazine(panics) {}
        self.reclaim(panics);
        self.drain_stack(panics);
    }

    /// Releases every page in the pool to the provider. From now on the pool keeps no page.
    pub(crate) fn release_all(&self, panics: &mut Panics) {
        let cache = &self.front.cache;
        while let Some(desc) = cache.take() {
            self.release(desc, panics);
        }
        cache.disable();
        if self.gone.get() {
            self.drain(panics);
        }
    }

    /// A page leaves the pool.
    pub(crate) fn release(&self, desc: NonNull<Desc>, panics: &mut Panics) {
        // SAFETY: the pool owns the page, and passes it on.
        unsafe {
            self.unmap_alone(desc.as_ref(), panics);
            self.front.cache.held.set(self.front.cache.held.get() - 1);
            panics.call(|| self.provider.release(RawPage::from_desc(desc)));
        }
    }

    /// [`release`](Self::release) for a pool without a cache, as
    /// [`alloc_one_from_provider`](Self::alloc_one_from_provider) is to
    /// [`alloc_from_provider`](Self::alloc_from_provider).
    fn release_one(&self, desc: NonNull<Desc>) {
        /// Finishes the work after a panic of the domain.
        struct Rest<'s, M: Memory>(&'s Shared<M>, NonNull<Desc>);
        impl<M: Memory> Drop for Rest<'_, M> {
            fn drop(&mut self) {
                self.0.front.cache.counters.unmapped.bump();
                // By its descriptor the page is not mapped any more.
                self.0.release_unwinding(self.1);
            }
        }
        if std::thread::panicking() {
            return self.release_unwinding(desc);
        }
        // SAFETY: the pool owns the page, and passes it on.
        unsafe {
            if let (Some(dma), Some(domain)) = (desc.as_ref().claim_unmap_alone(self.id), &self.domain) {
                let rest = Rest(self, desc);
                domain.unmap(dma, self.page_size());
                std::mem::forget(rest);
                self.front.cache.counters.unmapped.bump();
            }
            self.front.cache.held.set(self.front.cache.held.get() - 1);
            self.provider.release(RawPage::from_desc(desc));
        }
    }

    #[cold]
    fn release_unwinding(&self, desc: NonNull<Desc>) {
        let mut panics = Panics::default();
        self.release(desc, &mut panics);
        panics.resume();
    }

    /// Unmaps a page that the owner has, if this pool has it mapped. If the domain panics, it is
    /// not called again for this page.
    pub(crate) fn unmap_alone(&self, desc: &Desc, panics: &mut Panics) {
        if let (Some(dma), Some(domain)) = (desc.claim_unmap_alone(self.id), &self.domain) {
            panics.call(|| domain.unmap(dma, self.page_size()));
            self.front.cache.counters.unmapped.bump();
        }
    }

    /// Unmaps a page wherever it is, if this pool has it mapped and no other thread is unmapping
    /// it.
    pub(crate) fn unmap_anywhere(&self, desc: &Desc, panics: &mut Panics) {
        if let (Some(dma), Some(domain)) = (desc.claim_unmap(self.id), &self.domain) {
            panics.call(|| domain.unmap(dma, self.page_size()));
            desc.finish_unmap(&self.unmap_event);
            self.front.cache.counters.unmapped.bump();
        }
    }

    /// Returns a page in the poll context when the cache is full. If the pool has no cache, the
    /// page leaves the pool.
    pub(crate) unsafe fn overflow(header: NonNull<PoolHeader>, desc: NonNull<Desc>) {
        // SAFETY: the header of a pool's page is the first field of this; the owner's context keeps
        // it.
        let s = unsafe { header.cast::<Self>().as_ref() };
        s.front.cache.counters.recycle_cache_full.bump();
        if s.front.cache.capacity() == 0 {
            s.release_one(desc);
        } else {
            s.front.cache.spill(desc);
        }
    }
}
