//! A pool for every thread: any thread allocates pages from it, and any thread returns pages to it.
//!
//! ```text
//!   alloc   this CPU's magazines ──► the depot ──► under the owner's lock: the return stack ──► the provider ──► reclaim
//!   drop    this CPU's magazines ──► the depot ──► the return stack, if the magazines refuse the page
//! ```
//!
//! The magazines are a [`CpuCache`]. It lies where a [`PagePool`] has its depot: in the [home](crate::home) of the
//! pages. Behind the cache there is a `PagePool` without a depot, under a lock: the *owner*. The owner takes pages from
//! the provider and maps them, takes pages off the return stack, and ends the pool. Pages are therefore the same as
//! those of a queue's pool, and return by the same code, also after the pool has been closed.
//!
//! **Which thread gets an item.** A pop is a restartable sequence. If its commit comes before the barrier of a reclaim, the page belongs to
//! the popping thread. Otherwise the sequence restarts and finds the gate closed. See `netmem_percpu`'s `cpu_cache.rs`.
//!
//! **A lost race is not "no page".** A thread that finds nothing takes the lock and looks again, because the thread
//! that had the lock may have taken pages from the provider. At the end of its search it compares how many magazines
//! have left the depot. If another thread has taken one in between, the search begins anew. A magazine may also be on
//! its way between the depot and a CPU: another thread holds it. Then this thread yields and the search begins anew, at
//! most `YIELDS` times.
//!
//! **Allocation against `device_gone`.** A thread may have a magazine in hand while another thread unmaps all pages:
//!
//! ```text
//!   alloc                                   device_gone (under the lock)
//!   takes a magazine from the depot
//!                                           gone = true, closes the magazines, unmaps every page
//!                                           gives what is in the depot to the provider
//!   takes a page of the magazine
//!   puts the magazine back: on a closed list
//!   gone? returns the page, takes the lock, and gives what is in the depot to the provider
//! ```
//!
//! So a thread asks for `gone` after it has put the magazine back. The list orders the two: closing it is a release, and a thread
//! that puts a magazine back acquires that. If the magazine is back before the list is closed, `device_gone` finds it. If not,
//! the thread finds `gone` set. A page whose allocation has read `gone` before it was set counts as allocated before
//! `device_gone`, and is unmapped where it is. Model: `shared_alloc_against_device_gone`.
//!
//! **The lock is never held by a thread that waits for this pool.** The owner calls the provider and the domain under
//! the lock. If such a call allocates from this pool, it gets no page ([`SharedPool::alloc`]). If it drops pages of
//! this pool, they are returned without the lock.

use crate::cache::PollHome;
use crate::desc::Desc;
use crate::dma::DmaDomain;
use crate::frag::Frag;
use crate::home::{desc_of, item_of, takes_from};
use crate::memory::{Mapped, Memory, SystemMemory};
use crate::page::Page;
use crate::panics::Panics;
use crate::pool::{PagePool, PoolClosed, PoolError, PoolOptions, within};
use crate::provider::{Provider, RegionProvider};
use crate::region::RegionOptions;
use crate::shared::{BATCH, REST, Shared};
use crate::sync::{AtomicBool, Mutex, MutexGuard, yield_now};
use netmem_percpu::{CpuCache, MAGAZINE, NothingFound};
use std::cell::Cell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// A page pool from which every thread allocates, by shared reference.
///
/// An allocation takes a page from this CPU's magazine, and a drop puts one there: a plain store each, in a restartable
/// sequence. The cost does not depend on how many threads do so. Whole magazines are exchanged with a depot. A thread
/// that finds no page in either takes a lock, asks the provider, and then takes the pages that other CPUs hold.
///
/// Use it where the thread that needs a page polls no queue: for senders on worker threads, for servers, for io_uring. Where one thread
/// polls a queue, its [`PagePool`] is cheaper. [`Page`], [`Frag`] and `Bytes` are the same for both.
///
/// ```
/// # use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
/// let region = RegionOptions::new(256).huge_pages(false).build::<Private>()?;
/// let pool = PoolOptions::new("senders").build_shared(RegionProvider::new(region), None)?;
/// std::thread::scope(|scope| {
///     for _ in 0..4 {
///         scope.spawn(|| {
///             let page = pool.alloc().expect("a page");
///             drop(page.freeze());
///         });
///     }
/// });
/// let closed = pool.close();
/// assert_eq!(closed.outstanding, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Threads share it by reference or by `Arc`. If it is dropped while pages are in flight, it lingers until the last of
/// them is returned ([`lingering`](crate::lingering)), as a `PagePool` does.
///
/// **Signal handlers** may drop pages, and must not allocate. **Fork**: the child has a copy of the magazines. If another thread of the
/// parent held the lock, an allocation in the child that needs the lock waits for ever. Pages that threads of the parent held stay held
/// in the child. Regions are not inherited (`MADV_DONTFORK`), so the child must not use the pages.
pub struct SharedPool<M: Memory> {
    /// Lies in the owner's home, which lives as long as the owner or a page in flight.
    cpus: NonNull<CpuCache>,
    page_size: u32,
    shared: NonNull<Shared<M>>,
    /// The device is gone.
    gone: AtomicBool,
    owner: Locked<M>,
}

// SAFETY: the owner is reached under its lock, the magazines are made for all threads.
unsafe impl<M: Memory> Send for SharedPool<M> {}
// SAFETY: as above.
unsafe impl<M: Memory> Sync for SharedPool<M> {}

/// The owner and its lock, on separate cache lines, because every allocation reads the fields beside them.
#[repr(align(128))]
struct Locked<M: Memory> {
    pool: Mutex<Owner<M>>,
    /// The thread that has the lock ([`this_thread`]), or 0.
    holder: AtomicUsize,
    /// Allocations that found no page.
    failed: AtomicU64,
}

struct Owner<M: Memory> {
    /// Moved out when the pool ends.
    pool: ManuallyDrop<PagePool<M>>,
    /// When the pages on CPUs were last reclaimed.
    reclaimed: Option<Instant>,
}

/// The lock, held.
struct Held<'p, M: Memory> {
    owner: MutexGuard<'p, Owner<M>>,
    holder: &'p AtomicUsize,
}

impl<M: Memory> Drop for Held<'_, M> {
    fn drop(&mut self) {
        self.holder.store(0, Ordering::Relaxed);
    }
}

impl<M: Memory> Deref for Held<'_, M> {
    type Target = Owner<M>;

    fn deref(&self) -> &Owner<M> {
        &self.owner
    }
}

impl<M: Memory> DerefMut for Held<'_, M> {
    fn deref_mut(&mut self) -> &mut Owner<M> {
        &mut self.owner
    }
}

/// A number that no other running thread has, and that is not 0.
fn this_thread() -> usize {
    #[cfg(not(loom))]
    thread_local! {
        static HERE: Cell<u8> = const { Cell::new(0) };
    }
    // Boxed: the address of an empty value would be that of every thread's.
    #[cfg(loom)]
    loom::thread_local! {
        static HERE: Box<Cell<u8>> = Box::default();
    }
    HERE.with(|here| std::ptr::from_ref::<Cell<u8>>(here).addr())
}

/// A pool's counters at one moment. They are read one after another, so they may not match exactly while threads
/// allocate and return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedPoolStats {
    /// Pages in magazines, on CPUs or in the depot.
    pub idle: u64,
    /// Pages that a user or a device holds, or that are on the return stack. A page that the magazines refused stays on
    /// the return stack until the next allocation that takes the lock, or [`SharedPool::reclaim`].
    pub inflight: u64,
    /// Magazines that were fetched from the depot, modulo 2^31. Allocations within a magazine are not counted: a counter would cost half
    /// as much as the allocation.
    pub magazines: u64,
    /// Pages taken from the provider.
    pub alloc_slow: u64,
    /// Allocations that failed: the pool's limit was reached, or the provider had no page, or mapping failed; and other
    /// CPUs held no page, or the last reclaim was less than 100 us ago.
    pub alloc_failed: u64,
    /// Pages that returned by the return stack, by one compare-and-swap each, because the magazines refused them: a
    /// thread was reclaiming, or no empty magazine was left, or, in portable mode, the CPU's lock was taken.
    pub recycle_ring_full: u64,
    /// Reclaims: how often the pages that CPUs hold were moved to the depot because the pool was out of pages.
    pub reclaims: u64,
    /// Pages that reclaims moved to the depot.
    pub reclaimed: u64,
    /// How often the pool was out of pages, other CPUs seemed to hold some, and the pool did not reclaim them because
    /// [`PoolOptions::interrupt_cpus`] is off.
    pub unasked: u64,
    /// Pages mapped for the device.
    pub mapped: u64,
    /// Pages unmapped.
    pub unmapped: u64,
    /// Pages in quarantine: their device stopped answering, and may still write to them.
    pub quarantined: u64,
}

impl<M: SystemMemory> SharedPool<M> {
    /// A pool of so many pages of 4 KiB, in a region that is made for it: huge pages if there are
    /// any, resident from the start. No device has the memory. For other memory, sizes and devices
    /// there is [`PoolOptions::build_shared`](crate::PoolOptions::build_shared).
    ///
    /// ```
    /// use netmem_pool::{Private, SharedPool};
    ///
    /// let pool = SharedPool::<Private>::in_memory(256)?;
    /// let mut page = pool.alloc().ok_or("no page")?;
    /// page[..5].copy_from_slice(b"hello");
    /// drop(page.freeze_range(0..5)); // returns the page, on any thread
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PoolError::Region`] if there is no memory for the pages, [`PoolError::NoMemory`] if there
    /// is none for the pool itself.
    pub fn in_memory(pages: usize) -> Result<Self, PoolError> {
        let region = RegionOptions::new(pages).build::<M>()?;
        PoolOptions::new("in memory").build_shared(RegionProvider::new(region), None)
    }
}

impl<M: Memory> SharedPool<M> {
    pub(crate) fn build(
        options: PoolOptions,
        provider: Arc<dyn Provider<M>>,
        domain: Option<Arc<dyn DmaDomain>>,
    ) -> Result<Self, PoolError> {
        let cpus = options.cpus(&*provider)?;
        // The owner's array keeps pages from the provider until they are put into magazines.
        let options = options.cache(2 * BATCH);
        let pool = PagePool::build(options, provider, domain, |elsewhere, domain, cache| {
            PollHome::of_cpus(elsewhere, domain, cpus, cache)
        })?;
        let Some(cpus) = pool.shared().front.home.cpus().map(NonNull::from) else {
            unreachable!("the home was made of them");
        };
        let (page_size, shared) = (pool.shared().front.cache.page_size, NonNull::from(pool.shared()));
        let owner = Owner { pool: ManuallyDrop::new(pool), reclaimed: None };
        owner.share();
        let locked = Locked { pool: Mutex::new(owner), holder: AtomicUsize::new(0), failed: AtomicU64::new(0) };
        Ok(Self { cpus, page_size, shared, gone: AtomicBool::new(false), owner: locked })
    }

    #[inline(always)]
    fn cpus(&self) -> &CpuCache {
        // SAFETY: the owner's home, and the owner is ours.
        unsafe { self.cpus.as_ref() }
    }

    /// Allocates a whole page. Usually this is a plain store. If this CPU's magazines are empty, the page comes from
    /// the first of these that has one:
    ///
    /// * a magazine of the depot: two atomics;
    /// * under the lock: the return stack, then the provider, from which up to 64 pages are taken;
    /// * under the lock, at most every 100 us: the pages that other CPUs hold, by a membarrier.
    ///
    /// Returns `None` if none of them has a page, or if it is too early to reclaim again. This is counted as
    /// `alloc_failed`. In rare cases it returns `None` although a page is idle: another thread was moving a magazine
    /// between the depot and its CPU, and did not run while this thread yielded 32 times. Such a search reads a line of
    /// each magazine. Before a thread sleeps because it got `None`, it must call [`reclaim`](Self::reclaim).
    ///
    /// If the pool's own provider or domain calls this, it gets a page only from the magazines, because the pool calls them
    /// under its lock. They are usually empty then. Not for signal handlers.
    #[inline]
    #[must_use]
    pub fn alloc(&self) -> Option<Page<M>> {
        takes_from(self.cpus.as_ptr());
        let desc = match self.cpus().pop_at_once() {
            Some(item) => desc_of(item),
            None => self.slow()?,
        };
        // SAFETY: the page is this thread's alone from the commit of the pop on.
        Some(unsafe { Page::from_desc(desc, 0, self.page_size) })
    }

    #[cold]
    #[inline(never)]
    fn slow(&self) -> Option<NonNull<Desc>> {
        /// How often a search yields to threads that hold magazines. In a model this is more often than loom preempts.
        const YIELDS: usize = if cfg!(loom) { 3 } else { 32 };
        if let Ok(item) = self.cpus().pop() {
            let desc = desc_of(item);
            if self.gone.load(Ordering::Acquire) {
                return self.too_late(Some(desc));
            }
            return Some(desc);
        }
        let mut owner = self.lock()?;
        if self.gone.load(Ordering::Relaxed) {
            drop(owner);
            return self.too_late(None);
        }
        let (mut yields, mut has_reclaimed) = (0, false);
        loop {
            let taken = self.cpus().magazines_taken();
            let refused = match self.cpus().pop() {
                Ok(item) => return Some(desc_of(item)),
                Err(why) => why == NothingFound::Refused,
            };
            if let Some(desc) = owner.take() {
                return Some(desc);
            }
            // This is asked before the reclaim, because a magazine that a thread holds now may be on a CPU again when
            // the reclaim is over. If a pop takes a magazine later, that is counted. If a push replaces a magazine
            // later, the reclaim finds the item.
            let on_the_way = self.cpus().is_on_the_way();
            // In portable mode a pop can be refused, and then this CPU's magazine need not be empty. A search that
            // begins anew looks for pages that the last reclaim has missed. In both cases the pause between reclaims is
            // ignored.
            has_reclaimed |= owner.reclaim(if refused || has_reclaimed { Duration::ZERO } else { REST });
            if let Ok(item) = self.cpus().pop() {
                return Some(desc_of(item));
            }
            if self.cpus().magazines_taken() != taken {
                continue;
            }
            if yields == YIELDS || !on_the_way {
                self.owner.failed.fetch_add(1, Ordering::Relaxed);
                return None;
            }
            yields += 1;
            yield_now();
        }
    }

    /// The end of an allocation after the device has gone: returns the page that it found, and gives what was put back into
    /// the depot, and what was returned, to the provider.
    #[cold]
    fn too_late(&self, found: Option<NonNull<Desc>>) -> Option<NonNull<Desc>> {
        let mut panics = Panics::default();
        // SAFETY: the page is this thread's alone from the commit of the pop on.
        panics.call(|| drop(found.map(|desc| unsafe { Page::<M>::from_desc(desc, 0, self.page_size) })));
        if let Some(mut owner) = self.lock() {
            owner.empty_cpus(&mut panics);
            panics.call(|| owner.pool.reclaim());
        }
        self.owner.failed.fetch_add(1, Ordering::Relaxed);
        panics.resume();
        None
    }

    /// Takes the lock. `None` if this thread has it already: the thread is in a call of the provider or the domain.
    fn lock(&self) -> Option<Held<'_, M>> {
        let Locked { pool, holder, .. } = &self.owner;
        if holder.load(Ordering::Relaxed) == this_thread() {
            return None;
        }
        // A poisoned lock is used: a panic of the provider or the domain leaves the owner consistent.
        let owner = pool.lock().unwrap_or_else(PoisonError::into_inner);
        holder.store(this_thread(), Ordering::Relaxed);
        Some(Held { owner, holder })
    }

    /// Moves the pages that all CPUs hold, and those on the return stack, to the depot, where any thread finds them.
    /// For a thread that is about to sleep because there is no page: a page that is returned would not wake it. One
    /// membarrier, if any CPU holds pages.
    pub fn reclaim(&self) {
        let Some(mut owner) = self.lock() else { return };
        owner.reclaim(Duration::ZERO);
        owner.pool.reclaim();
        owner.share();
    }

    /// Changes the most pages that the pool may hold from its provider. Pages beyond the limit stay in the pool until
    /// [`shrink`](Self::shrink) gives them back. Takes the lock.
    pub fn set_limit(&self, pages: usize) {
        if let Some(mut owner) = self.lock() {
            owner.pool.set_limit(pages);
        }
    }

    /// The most pages that the pool can hold: its limit, or what its provider has. Takes the lock.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.lock().map_or(0, |owner| owner.pool.limit())
    }

    /// Unmaps idle pages and gives them back to the provider, those that CPUs hold included, until the pool
    /// [holds](Self::held) no more than `pages` or none is idle. Returns how many pages were given back. Takes the
    /// lock. One membarrier, if any CPU holds pages.
    pub fn shrink(&self, pages: usize) -> usize {
        let Some(mut owner) = self.lock() else { return 0 };
        owner.reclaim(Duration::ZERO);
        let mut gone = 0;
        loop {
            gone += owner.pool.shrink(pages);
            if owner.pool.held() <= pages {
                return gone;
            }
            // From the depot first: a pop would leave the rest of a magazine on this CPU, where this thread does not find it if
            // it is moved, or if the CPU's lock is taken.
            let item = self.cpus().take_from_depot().or_else(|| self.cpus().pop().ok());
            let Some(item) = item else { return gone };
            let cache = &owner.pool.shared().front.cache;
            cache.counters.recycle_ring.bump();
            cache.put(desc_of(item));
        }
    }

    /// Pages that the pool has from its provider: idle or in flight. Takes the lock.
    #[must_use]
    pub fn held(&self) -> usize {
        self.lock().map_or(0, |owner| owner.pool.held())
    }

    /// The fragment of `bytes`, if they lie in a page of the provider's regions and a fragment of them can be made: see
    /// [`Region::frag_of`](crate::Region::frag_of). The page may belong to any pool. With this, code that gets
    /// [`Bytes`](bytes::Bytes), or a slice of one, can send them without a copy.
    ///
    /// Cost: that of the region's method, and a call of the provider's [`each`](Provider::each), which may take a lock.
    #[must_use]
    pub fn frag_of(&self, bytes: &[u8]) -> Option<Frag<M>>
    where
        M: Mapped,
    {
        let mut found = None;
        self.shared().provider.each(&mut |region| found = found.take().or_else(|| region.frag_of(bytes)));
        found
    }

    /// The counters. Reads a line of each magazine. Takes no lock that an allocation takes, and interrupts no thread.
    #[must_use]
    pub fn stats(&self) -> SharedPoolStats {
        let stats = self.shared().end.record().stats();
        let idle = self.cpus().items() as u64;
        SharedPoolStats {
            idle,
            inflight: stats.inflight().saturating_sub(idle),
            magazines: u64::from(self.cpus().magazines_taken()),
            alloc_slow: stats.alloc_slow + stats.alloc_slow_high_order,
            alloc_failed: self.owner.failed.load(Ordering::Relaxed),
            recycle_ring_full: stats.recycle_ring_full,
            reclaims: stats.reclaims,
            reclaimed: stats.reclaimed,
            unasked: stats.unasked,
            mapped: stats.mapped,
            unmapped: stats.unmapped,
            quarantined: stats.quarantined,
        }
    }

    /// Bytes in each page.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.page_size as usize
    }

    /// The pool's name, as reports give it.
    #[must_use]
    pub fn name(&self) -> &str {
        self.shared().name()
    }

    /// Identity of the pool's [domain](crate::DmaDomain), 0 for none; see [`Page::dma_domain`].
    #[must_use]
    pub fn dma_domain(&self) -> usize {
        self.shared().front.home.domain()
    }

    /// Whether [`sync_for_cpu`](Self::sync_for_cpu) and [`sync_for_device`](Self::sync_for_device) do anything. Ask
    /// once, not per packet.
    #[must_use]
    pub fn needs_sync(&self) -> bool {
        M::MAPPED && self.shared().domain.as_ref().is_some_and(|d| d.needs_sync())
    }

    /// Syncs bytes of `page`, which is one of this pool's, after the device wrote them and before the CPU reads them.
    pub fn sync_for_cpu(&self, page: &Page<M>, bytes: Range<usize>) {
        if let Some(domain) = self.live_domain() {
            let (dma, len) = within(page, &bytes);
            domain.sync_for_cpu(dma, len);
        }
    }

    /// Syncs bytes of `page`, which is one of this pool's, before the device writes them, or reads what the CPU wrote.
    pub fn sync_for_device(&self, page: &Page<M>, bytes: Range<usize>) {
        if let Some(domain) = self.live_domain() {
            let (dma, len) = within(page, &bytes);
            domain.sync_for_device(dma, len, self.shared().direction);
        }
    }

    fn live_domain(&self) -> Option<&dyn DmaDomain> {
        self.shared().domain.as_deref().filter(|_| M::MAPPED && !self.gone.load(Ordering::Relaxed))
    }

    /// The part that the owner and the pages share. Without the lock, only its fields that never change may be used.
    fn shared(&self) -> &Shared<M> {
        // SAFETY: alive as long as the owner, which is ours.
        unsafe { self.shared.as_ref() }
    }

    /// Puts a page in quarantine: its device stopped answering, and may still write to it. See
    /// [`PagePool::quarantine`]. Takes the lock.
    pub fn quarantine(&self, page: Page<M>) {
        match self.lock() {
            Some(mut owner) => owner.pool.quarantine(page),
            // The page is never returned, and stays in flight.
            None => std::mem::forget(page),
        }
    }

    /// Unmaps every page of the pool, wherever it is, because the device is gone or about to go. From then on the pool
    /// allocates no pages, and pages that are returned are neither synced nor unmapped. An allocation of another thread
    /// that has found its page by then keeps it: that page was in flight, and is unmapped like the others in flight. Walks
    /// all descriptors in use. Takes the lock, and a membarrier.
    pub fn device_gone(&self) {
        let Some(mut owner) = self.lock() else { return };
        // Before the list of magazines is closed: see the head of this file.
        self.gone.store(true, Ordering::Release);
        let mut panics = Panics::default();
        // No thread takes a page from a magazine any more.
        owner.close_cpus(&mut panics);
        panics.call(|| owner.pool.device_gone());
        owner.empty_cpus(&mut panics);
        panics.resume();
    }

    /// Ends the pool and returns its final counters. If pages are still in flight, the pool lingers until the last of
    /// them is returned, as when it is dropped.
    ///
    /// In these counters a page counts as allocated when it goes from the owner to the magazines, and as returned when
    /// it goes from the magazines to the owner.
    pub fn close(self) -> PoolClosed {
        ManuallyDrop::new(self).end()
    }

    fn end(&mut self) -> PoolClosed {
        let owner = self.owner.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut panics = Panics::default();
        owner.close_cpus(&mut panics);
        owner.empty_cpus(&mut panics);
        // SAFETY: once, for `close` does not drop the pool.
        let closed = unsafe { ManuallyDrop::take(&mut owner.pool) }.close();
        panics.resume();
        closed
    }
}

impl<M: Memory> Drop for SharedPool<M> {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

impl<M: Memory> fmt::Debug for SharedPool<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedPool({}, {:?})", self.name(), self.stats())
    }
}

impl<M: Memory> Owner<M> {
    fn cpus(&self) -> Option<&CpuCache> {
        self.pool.shared().front.home.cpus()
    }

    /// Takes a page from the return stack or from the provider. Further pages that this yields are moved to the depot.
    fn take(&mut self) -> Option<NonNull<Desc>> {
        let desc = self.pool.alloc()?.into_desc();
        self.share();
        Some(desc)
    }

    /// Moves pages from the owner's array to the depot, while the depot has empty magazines.
    fn share(&self) {
        let (Some(cpus), cache) = (self.cpus(), &self.pool.shared().front.cache) else { return };
        let mut items = [NonZeroUsize::MIN; MAGAZINE];
        while !cpus.is_full() {
            let mut n = 0;
            while n < cpus.capacity()
                && let Some(desc) = cache.take()
            {
                items[n] = item_of(desc);
                n += 1;
            }
            // SAFETY: the owner keeps the cache.
            let shared = unsafe { CpuCache::push_many(cpus, &items[..n]) };
            cache.counters.alloc_refill.add(shared as u64);
            items[shared..n].iter().for_each(|&item| cache.put(desc_of(item)));
            if n == 0 {
                return;
            }
        }
    }

    /// Moves the pages that CPUs hold to the depot, unless that was done less than `rest` ago. Returns whether it did.
    fn reclaim(&mut self, rest: Duration) -> bool {
        let (Some(cpus), shared) = (self.cpus(), self.pool.shared()) else { return false };
        let counters = &shared.front.cache.counters;
        if cpus.on_cpus() == 0 {
            return false;
        }
        if !shared.interrupts {
            counters.unasked.bump();
            return false;
        }
        let now = Instant::now();
        if self.reclaimed.is_some_and(|last| now.duration_since(last) < rest) {
            return false;
        }
        match cpus.reclaim() {
            Ok(n) => {
                counters.reclaims.bump();
                counters.reclaimed.add(n as u64);
                self.reclaimed = Some(now);
                true
            }
            Err(error) => {
                tracing::warn!(pool = self.pool.name(), %error, "pages that other CPUs hold cannot be reclaimed");
                false
            }
        }
    }

    /// From now on no page goes into a magazine.
    fn close_cpus(&self, panics: &mut Panics) {
        let Some(cpus) = self.cpus() else { return };
        if let Err(error) = cpus.close() {
            panics.call(|| {
                let pool = self.pool.name();
                tracing::error!(pool, %error, "pages that other CPUs hold stay with a pool that lingers");
            });
        }
    }

    /// Gives the pages that are in magazines to the provider. The magazines are closed.
    fn empty_cpus(&self, panics: &mut Panics) {
        let (Some(cpus), shared) = (self.cpus(), self.pool.shared()) else { return };
        while let Ok(item) = cpus.pop() {
            shared.front.cache.counters.recycle_ring.bump();
            shared.give_back(desc_of(item), panics);
        }
    }
}
