//! A pool for every thread: any thread allocates pages from it, and any thread returns pages to it.
//!
//! ```text
//!   alloc   this CPU's magazines ──► the depot ──► under the owner's lock:
//!                                                  the return stack ──► the provider ──► reclaim
//!   drop    this CPU's magazines ──► the depot ──► the return stack, if they refuse the page
//! ```
//!
//! The magazines are a [`CpuCache`] in the [header](crate::header) of the pages, beside the place
//! of a [`PagePool`]'s depot. Behind the cache there is a `PagePool` without a depot, under a lock:
//! the *owner*. The owner allocates pages from the provider and maps them, pops pages off the
//! return stack, and ends the pool. Pages are therefore the same as those of a queue's pool, and
//! return by the same code, also after the pool has been closed.
//!
//! **Which thread gets an item.** A pop is a restartable sequence. If its commit comes before the
//! barrier of a reclaim, the page belongs to the popping thread. Otherwise the sequence restarts
//! and finds the gate closed. See `netmem_percpu`'s `cpu_cache.rs`.
//!
//! **A thread that needs a page waits for it** ([`SharedPool::alloc_blocking`],
//! [`SharedPool::alloc_async`]): see [`crate::waiters`].
//!
//! **Allocation against `device_gone`.** A thread may have a magazine in hand while another thread
//! unmaps all pages:
//!
//! ```text
//!   alloc                                   device_gone (under the lock)
//!   pops a magazine of the depot
//!                                           gone = true, closes the magazines, unmaps every page
//!                                           releases what is in the depot to the provider
//!   pops a page of the magazine
//!   puts the magazine back: on a closed list
//!   list closed? acquires the lock. gone? releases its page, and what is in the depot
//! ```
//!
//! So a thread that has put a magazine back tests whether the list is closed. If the magazine is
//! back before the list is closed, `device_gone` finds it. If not, the thread finds the list
//! closed. A page whose allocation has found the list open counts as allocated before
//! `device_gone`, and is unmapped where it is. Model: `shared_alloc_against_device_gone`.

use crate::cache::PolledHeader;
use crate::dma::DmaDomain;
use crate::error::{PoolError, WaitError};
use crate::frag::Frag;
use crate::header::{PoolHeader, desc_of};
use crate::memory::{Mapped, Memory, SystemMemory};
use crate::options::PoolOptions;
use crate::page::Page;
use crate::panics::Panics;
use crate::pool::PagePool;
use crate::provider::{Provider, RegionProvider};
use crate::recycle::allocates_from;
use crate::region_options::RegionOptions;
use crate::shared::{CACHE_REFILL, Shared};
use crate::stats::{PoolClosed, SharedPoolStats};
use crate::sync::AtomicBool;
use crate::waiters::{AllocFuture, EndReason, Waiters, Wakers};
use netmem_percpu::CpuCache;
use owner::OwnerLock;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

mod owner;
mod search;

/// A page pool from which every thread allocates, by shared reference.
///
/// An allocation pops a page from this CPU's magazine, and a drop puts one there: a plain store
/// each, in a restartable sequence. The cost does not depend on how many threads do so. Whole
/// magazines are exchanged with a depot. A thread that finds no page in either acquires a lock,
/// requests pages from the provider, and then reclaims those that other CPUs hold.
///
/// Use it where the thread that needs a page polls no queue: for senders on worker threads, for
/// servers, for io_uring. Where one thread polls a queue, its [`PagePool`] is cheaper. [`Page`],
/// [`Frag`] and `Bytes` are the same for both.
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
/// Threads share it by reference or by `Arc`. If it is dropped while pages are in flight, it
/// lingers until the last of them is returned ([`lingering`](crate::lingering)), as a `PagePool`
/// does.
///
/// **If there is no page**, [`alloc`](Self::alloc) returns `None`.
/// [`alloc_blocking`](Self::alloc_blocking) sleeps until there is one, and
/// [`alloc_async`](Self::alloc_async) is a future.
///
/// **Signal handlers** may drop pages while no thread waits for one, and must not allocate.
/// **Fork**: the child has a copy of the magazines. If another thread of the parent held the lock,
/// an allocation in the child that needs the lock waits for ever. The same holds for a drop in the
/// child, if threads of the parent waited for a page at the fork. Pages that threads of the parent
/// held stay held in the child. Regions are not inherited (`MADV_DONTFORK`), so the child must not
/// use the pages.
pub struct SharedPool<M: Memory> {
    page_size: u32,
    shared: NonNull<Shared<M>>,
    /// The device is gone.
    gone: AtomicBool,
    /// Threads and tasks that wait for a page.
    waiters: Arc<Waiters>,
    owner: OwnerLock<M>,
}

// SAFETY: the owner is reached under its lock, the magazines are made for all threads.
unsafe impl<M: Memory> Send for SharedPool<M> {}
// SAFETY: as above.
unsafe impl<M: Memory> Sync for SharedPool<M> {}

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

impl PoolOptions {
    /// Makes a pool from which every thread allocates. Of the options, [`cache`](Self::cache) is
    /// not used: the CPUs' magazines are the cache. [`magazine`](Self::magazine) is the size of a
    /// magazine, of which each CPU has two. Without that option it is chosen from the pool's size,
    /// so that up to 32 CPUs hold at most a quarter of the pages. A pool with fewer than 8 pages
    /// for each CPU, or for each of 32 if the machine can have more, has no magazines. With 0, each
    /// allocation acquires a lock, and each return is a compare-and-swap.
    ///
    /// # Errors
    ///
    /// See [`PoolError`]; nothing is left mapped.
    pub fn build_shared<M: Memory>(
        self,
        provider: Arc<dyn Provider<M>>,
        domain: Option<Arc<dyn DmaDomain>>,
    ) -> Result<SharedPool<M>, PoolError> {
        SharedPool::build(self, provider, domain)
    }
}

impl<M: Memory> SharedPool<M> {
    fn build(
        options: PoolOptions,
        provider: Arc<dyn Provider<M>>,
        domain: Option<Arc<dyn DmaDomain>>,
    ) -> Result<Self, PoolError> {
        let cpus = options.cpus(&*provider)?;
        // The owner's array keeps pages from the provider until they are put into magazines.
        let options = options.cache(2 * CACHE_REFILL);
        let pool = PagePool::build(options, provider, domain, |remote_free, domain, cache| {
            PolledHeader::with_cpu_cache(remote_free, domain, cpus, cache)
        })?;
        let (page_size, shared) = (pool.shared().front.cache.page_size, NonNull::from(pool.shared()));
        let waiters = pool.shared().front.header.cpus().map(|cpus| Waiters::new(&pool.shared().returns.stack, cpus));
        let Some(waiters) = waiters else { unreachable!("the header was made of them") };
        pool.shared().returns.set_waiters(waiters.clone());
        Ok(Self { page_size, shared, gone: AtomicBool::new(false), waiters, owner: OwnerLock::new(pool) })
    }

    #[inline(always)]
    fn cpus(&self) -> &CpuCache {
        // SAFETY: the header was made of them.
        unsafe { self.header().cpus().unwrap_unchecked() }
    }

    #[inline(always)]
    fn header(&self) -> &PoolHeader {
        &self.shared().front.header
    }

    /// Allocates a whole page. Usually this is a plain store. If this CPU's magazines are empty,
    /// the page comes from the first of these that has one:
    ///
    /// * a magazine of the depot: two atomics;
    /// * under the lock: the return stack, then the provider, from which up to 64 pages are taken;
    /// * under the lock, at most every 100 us: the pages that other CPUs hold, by a membarrier.
    ///
    /// Returns `None` if none of them has a page, or if it is too early to reclaim again. This is
    /// counted as `alloc_failed`. In rare cases it returns `None` although a page is idle: another
    /// thread was moving a magazine between the depot and its CPU, and did not run while this
    /// thread searched 32 times. Each search but the first reads a line of each magazine, without
    /// the lock. A thread that needs a page must not sleep because it got `None`:
    /// [`alloc_blocking`](Self::alloc_blocking) and [`alloc_async`](Self::alloc_async) wait.
    ///
    /// If the pool's own provider or domain calls this, it gets a page only from the magazines,
    /// because the pool calls them under its lock. They are usually empty then. Not for signal
    /// handlers.
    #[inline]
    #[must_use]
    pub fn alloc(&self) -> Option<Page<M>> {
        allocates_from(self.header());
        let desc = match self.cpus().pop_at_once() {
            Some(item) => desc_of(item),
            None => self.slow()?,
        };
        // SAFETY: the page is this thread's alone from the commit of the pop on.
        Some(unsafe { Page::from_desc(desc, 0, self.page_size) })
    }

    /// Allocates a page as soon as there is one, for tasks: a future, which needs no particular
    /// executor.
    ///
    /// The search is made by this call, and if it finds no page, the future has a place in the
    /// pool's queue from then on. Each page that is returned, on any thread, is passed to the first
    /// of the queue, so waiters are served in the order in which they came. An
    /// [`alloc`](Self::alloc) finds no page while there are waiters, unless there are more pages
    /// than they need.
    ///
    /// **Cost.** The first waiter of a queue closes all CPUs' magazines, by a membarrier. As long
    /// as there are waiters, each returned page acquires a lock, and **the thread that drops a page
    /// calls the waker** of its waiter. While there are none, a return costs nothing in addition.
    ///
    /// **Note:** only pages that return to this pool wake a waiter. Pages that another pool
    /// releases to a common provider, or that a provider gets later, are found by the next
    /// [`alloc`](Self::alloc), `alloc_async`, [`reclaim`](Self::reclaim) or
    /// [`set_limit`](Self::set_limit), which pass them to the waiters. Signal handlers must not
    /// drop pages while there are waiters.
    ///
    /// ```
    /// # use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
    /// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
    /// let region = RegionOptions::new(1).huge_pages(false).build::<Private>()?;
    /// let pool = PoolOptions::new("one page").build_shared(RegionProvider::new(region), None)?;
    /// let page = pool.alloc().ok_or("a page")?;
    /// let mut next = pin!(pool.alloc_async());
    /// let mut context = Context::from_waker(Waker::noop());
    /// assert!(next.as_mut().poll(&mut context).is_pending());
    /// drop(page); // goes to the waiter
    /// assert!(matches!(next.poll(&mut context), Poll::Ready(Ok(_))));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The future returns a [`WaitError`]: the pool or its device ends, or the pool cannot be
    /// waited for.
    pub fn alloc_async(&self) -> AllocFuture<M> {
        allocates_from(self.header());
        match self.cpus().pop_at_once() {
            Some(item) => AllocFuture::found(desc_of(item), self.page_size),
            None => self.wait().unwrap_or_else(AllocFuture::failed),
        }
    }

    /// Allocates a page, and sleeps until there is one. The same as
    /// [`alloc_async`](Self::alloc_async) for a thread, in the same queue. Not for a thread that
    /// must return the pages itself.
    ///
    /// # Errors
    ///
    /// See [`WaitError`].
    pub fn alloc_blocking(&self) -> Result<Page<M>, WaitError> {
        self.alloc_async().block()
    }

    /// Moves the pages that all CPUs hold, and those on the return stack, to the depot, where any
    /// thread finds them. Threads that wait for a page get what there is first. One membarrier, if
    /// any CPU holds pages.
    pub fn reclaim(&self) {
        let mut wakers = Wakers::default();
        let Some(mut owner) = self.owner.lock() else { return };
        owner.reclaim(Duration::ZERO);
        owner.pool.reclaim();
        self.serve(&mut owner, &mut wakers);
    }

    /// Changes the most pages that the pool may hold from its provider. Pages beyond the limit stay
    /// in the pool until [`shrink`](Self::shrink) releases them. Acquires the lock.
    pub fn set_limit(&self, pages: usize) {
        let mut wakers = Wakers::default();
        if let Some(mut owner) = self.owner.lock() {
            owner.pool.set_limit(pages);
            self.serve(&mut owner, &mut wakers);
        }
    }

    /// The most pages that the pool can hold: its limit, or what its provider has. Acquires the
    /// lock.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.owner.lock().map_or(0, |owner| owner.pool.limit())
    }

    /// Unmaps idle pages and releases them to the provider, those that CPUs hold included, until
    /// the pool [holds](Self::held) no more than `pages` or none is idle. Returns how many pages
    /// were released. Acquires the lock. One membarrier, if any CPU holds pages.
    pub fn shrink(&self, pages: usize) -> usize {
        let Some(mut owner) = self.owner.lock() else { return 0 };
        owner.reclaim(Duration::ZERO);
        let mut gone = 0;
        loop {
            gone += owner.pool.shrink(pages);
            if owner.pool.held() <= pages {
                return gone;
            }
            // From the depot first: a pop would leave the rest of a magazine on this CPU, where
            // this thread does not find it if it is moved, or if the CPU's lock is taken.
            let item = self.cpus().take_from_depot().or_else(|| self.cpus().pop().ok());
            let Some(item) = item else { return gone };
            let cache = &owner.pool.shared().front.cache;
            cache.counters.recycle_ring.bump();
            cache.put(desc_of(item));
        }
    }

    /// Pages that the pool has from its provider: idle or in flight. Acquires the lock.
    #[must_use]
    pub fn held(&self) -> usize {
        self.owner.lock().map_or(0, |owner| owner.pool.held())
    }

    /// The fragment of `bytes`, if they lie in a page of the provider's regions and a fragment of
    /// them can be made: see [`Region::frag_of`](crate::Region::frag_of). The page may belong to
    /// any pool. With this, code that gets [`Bytes`](bytes::Bytes), or a slice of one, can send
    /// them without a copy.
    ///
    /// Cost: that of the region's method, and a call of the provider's [`each`](Provider::each),
    /// which may take a lock.
    #[must_use]
    pub fn frag_of(&self, bytes: &[u8]) -> Option<Frag<M>>
    where
        M: Mapped,
    {
        let mut found = None;
        self.shared().provider.each(&mut |region| found = found.take().or_else(|| region.frag_of(bytes)));
        found
    }

    /// The counters. Reads a line of each magazine. Acquires no lock that an allocation acquires,
    /// and interrupts no thread.
    #[must_use]
    pub fn stats(&self) -> SharedPoolStats {
        let stats = self.shared().returns.record.stats();
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

    /// The pool's name in reports.
    #[must_use]
    pub fn name(&self) -> &str {
        self.shared().name()
    }

    /// Identity of the pool's [domain](crate::DmaDomain), 0 for none; see [`Page::dma_domain`].
    #[must_use]
    pub fn dma_domain(&self) -> usize {
        self.shared().front.header.domain()
    }

    /// Whether [`sync_for_cpu`](Self::sync_for_cpu) and [`sync_for_device`](Self::sync_for_device)
    /// do anything. Ask once, not per packet.
    #[must_use]
    pub fn needs_sync(&self) -> bool {
        M::MAPPED && self.shared().domain.as_ref().is_some_and(|d| d.needs_sync())
    }

    /// Syncs bytes of `page`, which is one of this pool's, after the device wrote them and before
    /// the CPU reads them.
    pub fn sync_for_cpu(&self, page: &Page<M>, bytes: Range<usize>) {
        if let Some(domain) = self.live_domain() {
            let (dma, len) = page.dma_range(&bytes);
            domain.sync_for_cpu(dma, len);
        }
    }

    /// Syncs bytes of `page`, which is one of this pool's, before the device writes them, or reads
    /// what the CPU wrote.
    pub fn sync_for_device(&self, page: &Page<M>, bytes: Range<usize>) {
        if let Some(domain) = self.live_domain() {
            let (dma, len) = page.dma_range(&bytes);
            domain.sync_for_device(dma, len, self.shared().direction);
        }
    }

    fn live_domain(&self) -> Option<&dyn DmaDomain> {
        self.shared().domain.as_deref().filter(|_| M::MAPPED && !self.gone.load(Ordering::Relaxed))
    }

    /// The part that the owner and the pages share. Without the lock, only its fields that never
    /// change may be used.
    fn shared(&self) -> &Shared<M> {
        // SAFETY: alive as long as the owner, which is ours.
        unsafe { self.shared.as_ref() }
    }

    /// Puts a page in quarantine: its device stopped answering, and may still write to it. See
    /// [`PagePool::quarantine`]. Acquires the lock.
    pub fn quarantine(&self, page: Page<M>) {
        match self.owner.lock() {
            Some(mut owner) => owner.pool.quarantine(page),
            // The page is never returned, and stays in flight.
            None => std::mem::forget(page),
        }
    }

    /// Unmaps every page of the pool, wherever it is, because the device is gone or about to go.
    /// From then on the pool allocates no pages, and pages that are returned are neither synced nor
    /// unmapped. An allocation of another thread that has found its page by then keeps it: that
    /// page was in flight, and is unmapped like the others in flight. Walks all descriptors in use.
    /// Acquires the lock, and issues a membarrier.
    pub fn device_gone(&self) {
        let mut wakers = Wakers::default();
        let Some(mut owner) = self.owner.lock() else { return };
        // Before the list of magazines is closed: see the head of this file.
        self.gone.store(true, Ordering::Release);
        wakers.0.append(&mut self.waiters.end(EndReason::DeviceGone).0);
        let mut panics = Panics::default();
        // No thread pops a page from a magazine any more.
        owner.close_cpus(&mut panics);
        panics.call(|| owner.pool.device_gone());
        owner.empty_cpus(&mut panics);
        panics.resume();
    }

    /// Ends the pool and returns its final counters. If pages are still in flight, the pool lingers
    /// until the last of them is returned, as when it is dropped.
    ///
    /// In these counters a page counts as allocated when it goes from the owner to the magazines,
    /// and as returned when it goes from the magazines to the owner.
    pub fn close(self) -> PoolClosed {
        ManuallyDrop::new(self).end()
    }

    fn end(&mut self) -> PoolClosed {
        let _wakers = self.waiters.end(EndReason::Closed);
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
