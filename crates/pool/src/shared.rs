//! What a pool's owner and its pages share: allocation beyond the cache, pages that enter and leave, and the slow ways home.
//!
//! Reads top-down as the cost does: the array cache, refill from what came back, the provider; then how pages leave.

use crate::cache::PollHome;
use crate::desc::Desc;
use crate::dma::{self, Direction, DmaDomain, MapError};
use crate::home::{Home, desc_of, first, link_of, prefetch};
use crate::linger::Record;
use crate::memory::Memory;
use crate::page::Page;
use crate::provider::{Provider, RawPage};
use crate::remote::{Link, Remote};
use crate::stats::PoolStats;
use netmem_percpu::MAGAZINE;
use std::cell::Cell;
use std::hint::cold_path;
use std::mem::offset_of;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages asked of the provider at a time.
pub(crate) const BATCH: usize = 64;

/// The least time between two reclaims in polls: each costs a membarrier, and sends those who return pages another way meanwhile.
pub(crate) const REST: Duration = Duration::from_micros(100);

/// A value on lines of its own.
#[repr(align(128))]
pub(crate) struct Line<T>(pub(crate) T);

/// What the owner and the pages share. Its first field is the pages' [`Home`].
///
/// Lives as long as the owner or a page that is out: whoever is last frees it, see [`crate::remote`].
#[repr(C)]
pub(crate) struct Shared<M: Memory> {
    pub(crate) front: PollHome,
    pub(crate) remote: Line<Remote>,
    /// The home of pages that are not to circulate any more: whoever lets go of one last sends it here, to be counted.
    pub(crate) kept: Home,
    pub(crate) id: u64,
    pub(crate) limit: Cell<u64>,
    pub(crate) provider: Arc<dyn Provider<M>>,
    pub(crate) domain: Option<Arc<dyn DmaDomain>>,
    /// How pages are mapped there.
    pub(crate) direction: Direction,
    pub(crate) record: Arc<Record>,
    /// When the CPUs were last asked for what they hold.
    pub(crate) reclaimed: Cell<Option<Instant>>,
    /// Set once the device is gone.
    pub(crate) gone: Cell<bool>,
    /// Whether pages that come back from elsewhere wait for the owner; else they go to the provider at once.
    pub(crate) circulates: bool,
}

/// Unless said otherwise these are for the owner only: by exclusive reference to the pool, or in its poll context.
impl<M: Memory> Shared<M> {
    pub(crate) fn page_size(&self) -> usize {
        self.front.cache.page_size as usize
    }

    /// A page, looking for it with the CPUs no sooner than `rest` after the last time.
    #[inline(always)]
    pub(crate) unsafe fn alloc(this: NonNull<Self>, rest: Duration) -> Option<Page<M>> {
        // SAFETY: the owner calls; no reference is held across `slow`, which calls strangers.
        unsafe {
            let cache = &(*this.as_ptr()).front.cache;
            let page_size = cache.page_size;
            let desc = match cache.pop() {
                Some(desc) => desc,
                None => {
                    cold_path();
                    Self::slow(this, rest)?
                }
            };
            Some(Page::from_desc(desc, 0, page_size))
        }
    }

    #[cold]
    #[inline(never)]
    unsafe fn slow(this: NonNull<Self>, rest: Duration) -> Option<NonNull<Desc>> {
        // SAFETY: the owner calls. Shared references to `Shared` live across strangers' calls, but everything in it that
        // those may change is a cell or an atomic.
        let s = unsafe { this.as_ref() };
        let cache = &s.front.cache;
        let refilled = || {
            let desc = cache.take()?;
            cache.counters.alloc_refill.bump();
            Some(desc)
        };
        if s.gone.get() {
            // Nothing is kept any more, and what came back is not to wait.
            s.drain();
        }
        if cache.capacity() > 0 {
            s.refill();
            if let Some(desc) = refilled() {
                return Some(desc);
            }
            cache.counters.alloc_empty.bump();
        }
        // A page per packet takes one at a time, and pays for one.
        // SAFETY: as above.
        match unsafe { if cache.capacity() == 0 { Self::take::<1>(this) } else { Self::take::<BATCH>(this) } } {
            Ok(Some(desc)) => {
                cache.counters.alloc_slow.bump();
                return Some(desc);
            }
            Ok(None) => {}
            Err(error) => tracing::debug!(pool = s.record.name(), %error, "a page could not be mapped"),
        }
        s.reclaim_after(rest);
        refilled().or_else(|| {
            cache.counters.alloc_failed.bump();
            None
        })
    }

    /// Moves pages that came back into the empty cache: a magazine of them, or else all that came past the magazines.
    fn refill(&self) {
        if self.take_magazine() {
            return;
        }
        self.drain_stack();
        self.front.cache.refill();
    }

    /// Empties one full magazine into the cache. The next user of each page is told to come for its descriptor.
    fn take_magazine(&self) -> bool {
        let cache = &self.front.cache;
        if let Some(room) = cache.room_for_magazine() {
            let n = self.next_magazine(|n, item| {
                let desc = desc_of(item);
                prefetch(desc);
                // SAFETY: a magazine at most, for which there is room.
                unsafe { *room.add(n) = Some(desc) };
            });
            cache.grew(n.unwrap_or(0));
            return n.is_some();
        }
        // By way of a copy, for strangers may be called, who may panic: nothing else is lost then.
        let mut items = [NonZeroUsize::MIN; MAGAZINE];
        let n = self.next_magazine(|n, item| items[n] = item);
        items[..n.unwrap_or(0)].iter().for_each(|&item| self.keep_or_give(desc_of(item)));
        n.is_some()
    }

    /// Hands the items of one full magazine to `take`, with their number in it; how many there were, if there was one.
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

    /// For a pool that is out of pages: takes what the CPUs hold, unless that was done a moment ago.
    fn reclaim_after(&self, rest: Duration) {
        let now = Instant::now();
        if self.reclaimed.get().is_none_or(|last| now.duration_since(last) >= rest) && self.reclaim() {
            self.reclaimed.set(Some(now));
            self.front.cache.counters.reclaims.bump();
        }
    }

    /// Takes what the CPUs hold. False: they seem to hold nothing, or cannot be asked.
    fn reclaim(&self) -> bool {
        let Some(depot) = self.front.home.depot() else { return false };
        if depot.peek() == 0 {
            return false;
        }
        let c = &self.front.cache.counters;
        let mut n = 0;
        let done = self.front.with_taker(|taker, depot| {
            taker.reclaim(depot, |item| {
                self.keep_or_give(desc_of(item));
                n += 1;
            })
        });
        if let Some(Err(error)) = &done {
            tracing::warn!(pool = self.record.name(), %error, "pages that other CPUs hold cannot be reclaimed");
        }
        c.reclaimed.add(n);
        c.recycle_ring.add(n);
        // While it lasted others came past the magazines.
        self.drain_stack();
        matches!(done, Some(Ok(())))
    }

    /// A page that came back: to be used again, unless the pool has nowhere to keep it.
    fn keep_or_give(&self, desc: NonNull<Desc>) {
        if self.gone.get() || self.front.cache.capacity() == 0 {
            self.give_back(desc);
        } else {
            self.front.cache.put(desc);
        }
    }

    /// Takes up to `N` pages from the provider and maps them: one to return, more for the cache if there is one.
    pub(crate) unsafe fn take<const N: usize>(this: NonNull<Self>) -> Result<Option<NonNull<Desc>>, MapError> {
        // SAFETY: the owner calls; see `slow`.
        let s = unsafe { this.as_ref() };
        let cache = &s.front.cache;
        let mut room = s.limit.get().saturating_sub(cache.held.get());
        if room == 0 {
            // Pages that went past the owner are out of the pool, though it had counted them as held.
            room = s.limit.get().saturating_add(s.remote.0.gone_past_owner()).saturating_sub(cache.held.get());
        }
        if room == 0 || s.gone.get() {
            return Ok(None);
        }
        let want = (cache.capacity() / 2).clamp(1, N).min(usize::try_from(room).unwrap_or(N));
        let mut raw = [const { None }; N];
        s.provider.take(&mut raw[..want]);
        let mut answer = None;
        let mut error = None;
        for page in raw.into_iter().flatten() {
            if error.is_none() {
                // SAFETY: as above; the page came from the provider just now.
                error = unsafe { s.enter(&page, this) }.err();
            }
            if error.is_some() {
                // SAFETY: as above.
                unsafe { s.provider.give(page) };
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
        match (answer, error) {
            (None, Some(e)) => Err(e),
            (answer, _) => Ok(answer),
        }
    }

    /// A page from the provider enters the pool.
    unsafe fn enter(&self, page: &RawPage<M>, this: NonNull<Self>) -> Result<(), MapError> {
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
        desc.set_home(this.as_ptr().cast());
        Ok(())
    }

    /// Moves all that came back from elsewhere into the cache, and what does not fit onto the list behind it.
    pub(crate) fn drain(&self) {
        while self.take_magazine() {}
        self.reclaim();
        self.drain_stack();
    }

    pub(crate) fn drain_stack(&self) {
        if self.remote.0.is_empty() {
            return;
        }
        self.take_in(self.remote.0.take_all());
    }

    /// Takes pages that came by the stack.
    fn take_in(&self, mut list: *mut Link) {
        // SAFETY: what was on the stack is the pool's.
        while let Some((desc, rest)) = unsafe { first(list) } {
            list = rest;
            if self.arrives(desc) {
                self.keep_or_give(desc);
            }
        }
    }

    /// Counts a page that came by the stack; false if it is not to be used again.
    fn arrives(&self, desc: NonNull<Desc>) -> bool {
        let c = &self.front.cache.counters;
        // SAFETY: what was on the stack is the pool's.
        let kept = unsafe { desc.as_ref() }.home().cast_const() == &raw const self.kept;
        if kept {
            c.quarantined.bump();
            self.front.cache.held.set(self.front.cache.held.get() - 1);
        } else {
            c.recycle_ring_full.bump();
        }
        !kept
    }

    /// Gives every page at home to the provider, and keeps none from now on.
    pub(crate) fn empty(&self) {
        let cache = &self.front.cache;
        while let Some(desc) = cache.take() {
            self.give_back(desc);
        }
        cache.disable();
        if self.gone.get() {
            self.drain();
        }
    }

    /// Takes all that came back, for the last time: what comes from now on leaves past the owner. The pool is
    /// [empty](Self::empty), and keeps nothing.
    pub(crate) fn close(&self) {
        let mut n = 0;
        let closed = self.front.with_taker(|taker, depot| {
            taker.close(depot, |item| {
                self.keep_or_give(desc_of(item));
                n += 1;
            })
        });
        self.front.cache.counters.recycle_ring.add(n);
        if let Some(Err(error)) = closed {
            tracing::error!(pool = self.record.name(), %error, "pages that other CPUs hold stay with a pool that lingers");
        }
        self.take_in(self.remote.0.close());
    }

    /// A page leaves the pool.
    pub(crate) fn give_back(&self, desc: NonNull<Desc>) {
        // SAFETY: the pool owns the page, and passes it on.
        unsafe {
            self.unmap(desc.as_ref(), Desc::claim_unmap_alone);
            self.front.cache.held.set(self.front.cache.held.get() - 1);
            self.provider.give(RawPage::from_desc(desc));
        }
    }

    /// Unmaps a page if this pool has it mapped and the claim says that it is for us to do.
    pub(crate) fn unmap(&self, desc: &Desc, claim: fn(&Desc, u64) -> Option<u64>) {
        if let (Some(dma), Some(domain)) = (claim(desc, self.id), &self.domain) {
            domain.unmap(dma, self.page_size());
            desc.unmapped();
            self.front.cache.counters.unmapped.bump();
        }
    }

    /// In the poll context, with the cache full; or with none, and then the page leaves the pool.
    pub(crate) unsafe fn overflow(home: NonNull<Home>, desc: NonNull<Desc>) {
        const { assert!(offset_of!(Self, front) == 0) };
        // SAFETY: the home of a pool's page is the first field of this; the owner's context keeps it.
        let s = unsafe { home.cast::<Self>().as_ref() };
        s.front.cache.counters.recycle_cache_full.bump();
        if s.front.cache.capacity() == 0 {
            s.give_back(desc);
        } else {
            s.front.cache.spill(desc);
        }
    }

    /// Any thread, for a page that the depot does not take.
    pub(crate) unsafe fn elsewhere(home: NonNull<Home>, desc: NonNull<Desc>) {
        let this = home.cast::<Self>().as_ptr();
        // SAFETY: the page that is coming home keeps the pool until it is pushed, or until it leaves past the owner and
        // we count it. No reference to the pool is held across either.
        unsafe {
            let push = || Remote::push(&raw const (*this).remote.0, link_of(desc)).is_ok();
            if (*this).circulates && push() {
                return;
            }
            if let Some(domain) = &(*this).domain {
                match desc.as_ref().claim_unmap((*this).id) {
                    Some(dma) => {
                        domain.unmap(dma, (*this).page_size());
                        desc.as_ref().unmapped();
                    }
                    // The device has gone, and the owner may be unmapping this page right now: it passes the page on
                    // when it is done. An owner that has closed the stack has been done for long.
                    None if push() => return,
                    None => {}
                }
            }
            (*this).provider.give(RawPage::from_desc(desc));
            if Remote::leave(&raw const (*this).remote.0) {
                drop(Box::from_raw(this));
            }
        }
    }

    /// Any thread, for a page in quarantine. `kept` is never entered, so that all of them come this way.
    pub(crate) unsafe fn keep(kept: NonNull<Home>, desc: NonNull<Desc>) {
        // SAFETY: as for `elsewhere`; the page's home is `kept`, which lies in its pool.
        unsafe {
            let this = kept.as_ptr().byte_sub(offset_of!(Self, kept)).cast::<Self>();
            let remote = &raw const (*this).remote.0;
            if Remote::push(remote, link_of(desc)).is_err() && Remote::leave(remote) {
                drop(Box::from_raw(this));
            }
        }
    }

    /// The counters, when `released` pages have left past the owner.
    pub(crate) fn stats(&self, released: u64) -> PoolStats {
        let c = &self.front.cache.counters;
        let slow = c.alloc_slow.get();
        let high = self.page_size() > crate::PAGE_SIZE;
        PoolStats {
            alloc_fast: self.front.cache.popped(),
            alloc_slow: if high { 0 } else { slow },
            alloc_slow_high_order: if high { slow } else { 0 },
            alloc_empty: c.alloc_empty.get(),
            alloc_refill: c.alloc_refill.get(),
            alloc_failed: c.alloc_failed.get(),
            recycle_cached: c.recycle_cached.get(),
            recycle_cache_full: c.recycle_cache_full.get(),
            recycle_ring: c.recycle_ring.get(),
            recycle_ring_full: c.recycle_ring_full.get(),
            reclaims: c.reclaims.get(),
            reclaimed: c.reclaimed.get(),
            released,
            mapped: c.mapped.get(),
            unmapped: c.unmapped.get() + if self.domain.is_some() { released } else { 0 },
            quarantined: c.quarantined.get(),
        }
    }
}
