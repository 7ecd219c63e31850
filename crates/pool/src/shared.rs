//! What a pool's owner and its pages share: allocation beyond the cache, pages that enter and leave, and the slow ways home.
//!
//! Reads top-down as the cost does: the array cache, refill from what came back, the provider; then how pages leave.

use crate::desc::Desc;
use crate::dma::{self, DmaDomain, MapError};
use crate::home::{Home, Ops, first, link_of};
use crate::linger::Record;
use crate::memory::Memory;
use crate::page::Page;
use crate::provider::{Provider, RawPage};
use crate::remote::Remote;
use crate::stats::PoolStats;
use std::cell::Cell;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;

/// Pages asked of the provider at a time.
pub(crate) const BATCH: usize = 64;

/// What the owner and the pages share. Its first field is the pages' [`Home`].
///
/// Lives as long as the owner or a page that is out: whoever is last frees it, see [`crate::remote`].
#[repr(C)]
pub(crate) struct Shared<M: Memory> {
    pub(crate) home: Home,
    /// The home of pages that are not to circulate any more: whoever lets go of one last sends it here, to be counted.
    pub(crate) kept: Home,
    pub(crate) id: u64,
    pub(crate) page_size: usize,
    pub(crate) limit: u64,
    pub(crate) provider: Arc<dyn Provider<M>>,
    pub(crate) domain: Option<Arc<dyn DmaDomain>>,
    pub(crate) record: Arc<Record>,
    /// Set once the device is gone.
    pub(crate) gone: Cell<bool>,
    /// Whether pages that come back from elsewhere wait for the owner; else they go to the provider at once.
    pub(crate) circulates: bool,
}

/// Unless said otherwise these are for the owner only: by exclusive reference to the pool, or in its poll context.
impl<M: Memory> Shared<M> {
    pub(crate) const OPS: &'static Ops = &Ops { overflow: Self::overflow, elsewhere: Self::elsewhere };
    pub(crate) const KEPT: &'static Ops = &Ops { overflow: Self::keep, elsewhere: Self::keep };

    #[inline]
    pub(crate) unsafe fn alloc(this: NonNull<Self>) -> Option<Page<M>> {
        // SAFETY: the owner calls; no reference is held across `slow`, which calls strangers.
        unsafe {
            let cache = &(*this.as_ptr()).home.cache;
            let desc = match cache.pop() {
                Some(desc) => {
                    cache.counters.alloc_fast.bump();
                    desc
                }
                None => Self::slow(this)?,
            };
            Some(Page::from_desc(desc, 0, (*this.as_ptr()).page_size as u32))
        }
    }

    #[inline(never)]
    unsafe fn slow(this: NonNull<Self>) -> Option<NonNull<Desc>> {
        // SAFETY: the owner calls. Shared references to `Shared` live across strangers' calls, but everything in it that
        // those may change is a cell or an atomic.
        let s = unsafe { this.as_ref() };
        let cache = &s.home.cache;
        // SAFETY: as above.
        unsafe { Self::drain(this) };
        if cache.capacity() > 0 {
            cache.refill();
            if let Some(desc) = cache.pop() {
                cache.counters.alloc_refill.bump();
                return Some(desc);
            }
            cache.counters.alloc_empty.bump();
        }
        // A page per packet takes one at a time, and pays for one.
        // SAFETY: as above.
        match unsafe { if cache.capacity() == 0 { Self::take::<1>(this) } else { Self::take::<BATCH>(this) } } {
            Ok(Some(desc)) => {
                cache.counters.alloc_slow.bump();
                Some(desc)
            }
            Ok(None) => {
                cache.counters.alloc_failed.bump();
                None
            }
            Err(error) => {
                tracing::debug!(pool = s.record.name(), %error, "a page could not be mapped");
                cache.counters.alloc_failed.bump();
                None
            }
        }
    }

    /// Takes up to `N` pages from the provider and maps them: one to return, more for the cache if there is one.
    pub(crate) unsafe fn take<const N: usize>(this: NonNull<Self>) -> Result<Option<NonNull<Desc>>, MapError> {
        // SAFETY: the owner calls; see `slow`.
        let s = unsafe { this.as_ref() };
        let cache = &s.home.cache;
        let mut room = s.limit.saturating_sub(cache.held.get());
        if room == 0 {
            // Pages that went past the owner are out of the pool, though it had counted them as held.
            room = (s.limit + s.home.remote.0.gone_past_owner()).saturating_sub(cache.held.get());
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
            } else if !cache.fill(desc) {
                cache.spill(desc);
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
                let dma = unsafe { dma::map_page::<M>(&**domain, desc, self.page_size)? };
                desc.set_mapped(self.id, dma);
                self.home.cache.counters.mapped.bump();
            }
            None => desc.set_mapped(0, desc.addr().addr() as u64),
        }
        desc.set_home(this.as_ptr().cast());
        Ok(())
    }

    /// Moves what came back from elsewhere into the cache, and what does not fit onto the list behind it.
    pub(crate) unsafe fn drain(this: NonNull<Self>) {
        // SAFETY: the owner calls; see `slow`.
        let s = unsafe { this.as_ref() };
        let cache = &s.home.cache;
        if s.home.remote.0.is_empty() {
            return;
        }
        let mut list = s.home.remote.0.take_all();
        // SAFETY: what was on the stack is the pool's.
        while let Some((desc, rest)) = unsafe { first(list) } {
            list = rest;
            if !s.arrives(desc) {
                continue;
            }
            if s.gone.get() || cache.capacity() == 0 {
                s.give_back(desc);
            } else if !cache.fill(desc) {
                cache.spill(desc);
            }
        }
    }

    /// Counts a page that came by the stack; false if it is not to be used again.
    pub(crate) fn arrives(&self, desc: NonNull<Desc>) -> bool {
        let c = &self.home.cache.counters;
        // SAFETY: what was on the stack is the pool's.
        let kept = unsafe { desc.as_ref() }.home().cast_const() == &raw const self.kept;
        if kept {
            c.quarantined.bump();
            self.home.cache.held.set(self.home.cache.held.get() - 1);
        } else {
            c.recycle_ring.bump();
        }
        !kept
    }

    /// Gives every page at home to the provider, and keeps none from now on.
    pub(crate) unsafe fn empty(this: NonNull<Self>) {
        // SAFETY: the owner calls; see `slow`.
        let s = unsafe { this.as_ref() };
        while let Some(desc) = s.home.cache.pop().or_else(|| s.home.cache.unspill()) {
            s.give_back(desc);
        }
        s.home.cache.disable();
        if s.gone.get() {
            // SAFETY: as above.
            unsafe { Self::drain(this) };
        }
    }

    /// A page leaves the pool.
    pub(crate) fn give_back(&self, desc: NonNull<Desc>) {
        // SAFETY: the pool owns the page, and passes it on.
        unsafe {
            self.unmap(desc.as_ref(), Desc::claim_unmap_alone);
            self.home.cache.held.set(self.home.cache.held.get() - 1);
            self.provider.give(RawPage::from_desc(desc));
        }
    }

    /// Unmaps a page if this pool has it mapped and the claim says that it is for us to do.
    pub(crate) fn unmap(&self, desc: &Desc, claim: fn(&Desc, u64) -> Option<u64>) {
        if let (Some(dma), Some(domain)) = (claim(desc, self.id), &self.domain) {
            domain.unmap(dma, self.page_size);
            self.home.cache.counters.unmapped.bump();
        }
    }

    /// In the poll context, with the cache full; or with none, and then the page leaves the pool.
    unsafe fn overflow(home: NonNull<Home>, desc: NonNull<Desc>) {
        const { assert!(offset_of!(Self, home) == 0) };
        // SAFETY: the home of a pool's page is the first field of this; the owner's context keeps it.
        let s = unsafe { home.cast::<Self>().as_ref() };
        s.home.cache.counters.recycle_cache_full.bump();
        if s.home.cache.capacity() == 0 {
            s.give_back(desc);
        } else {
            s.home.cache.spill(desc);
        }
    }

    /// Any thread.
    unsafe fn elsewhere(home: NonNull<Home>, desc: NonNull<Desc>) {
        let this = home.cast::<Self>().as_ptr();
        // SAFETY: the page that is coming home keeps the pool until it is pushed, or until it leaves past the owner and
        // we count it. No reference to the pool is held across either.
        unsafe {
            let push = || Remote::push(&raw const (*this).home.remote.0, link_of(desc)).is_ok();
            if (*this).circulates && push() {
                return;
            }
            if let Some(domain) = &(*this).domain {
                match desc.as_ref().claim_unmap((*this).id) {
                    Some(dma) => domain.unmap(dma, (*this).page_size),
                    // The device has gone, and the owner may be unmapping this page right now: it passes the page on
                    // when it is done. An owner that has closed the stack has been done for long.
                    None if push() => return,
                    None => {}
                }
            }
            (*this).provider.give(RawPage::from_desc(desc));
            if Remote::leave(&raw const (*this).home.remote.0) {
                drop(Box::from_raw(this));
            }
        }
    }

    /// Any thread, for a page in quarantine. `kept` is never entered, so that all of them come this way.
    unsafe fn keep(kept: NonNull<Home>, desc: NonNull<Desc>) {
        // SAFETY: as for `elsewhere`; the page's home is `kept`, which lies in its pool.
        unsafe {
            let this = kept.as_ptr().byte_sub(offset_of!(Self, kept)).cast::<Self>();
            let remote = &raw const (*this).home.remote.0;
            if Remote::push(remote, link_of(desc)).is_err() && Remote::leave(remote) {
                drop(Box::from_raw(this));
            }
        }
    }

    /// The counters, when `released` pages have left past the owner.
    pub(crate) fn stats(&self, released: u64) -> PoolStats {
        let c = &self.home.cache.counters;
        let slow = c.alloc_slow.get();
        let high = self.page_size > crate::PAGE_SIZE;
        PoolStats {
            alloc_fast: c.alloc_fast.get(),
            alloc_slow: if high { 0 } else { slow },
            alloc_slow_high_order: if high { slow } else { 0 },
            alloc_empty: c.alloc_empty.get(),
            alloc_refill: c.alloc_refill.get(),
            alloc_failed: c.alloc_failed.get(),
            recycle_cached: c.recycle_cached.get(),
            recycle_cache_full: c.recycle_cache_full.get(),
            recycle_ring: c.recycle_ring.get(),
            released,
            mapped: c.mapped.get(),
            unmapped: c.unmapped.get() + if self.domain.is_some() { released } else { 0 },
            quarantined: c.quarantined.get(),
        }
    }
}
