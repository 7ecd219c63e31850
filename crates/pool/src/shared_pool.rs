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
//! **A lost race is not "no page".** A thread that finds nothing takes the lock and searches again,
//! because the thread that had the lock may have taken pages from the provider. At the end of its
//! search it compares how many magazines have left the depot. If another thread has taken one in
//! between, or holds one on its way between the depot and a CPU, the thread releases the lock,
//! yields and searches again. One bound holds for all searches of an allocation, `SEARCHES`.
//!
//! **A thread that needs a page waits for it** ([`SharedPool::alloc_blocking`],
//! [`SharedPool::alloc_async`]): see [`crate::waiters`].
//!
//! **Allocation against `device_gone`.** A thread may have a magazine in hand while another thread
//! unmaps all pages:
//!
//! ```text
//!   alloc                                   device_gone (under the lock)
//!   takes a magazine from the depot
//!                                           gone = true, closes the magazines, unmaps every page
//!                                           gives what is in the depot to the provider
//!   takes a page of the magazine
//!   puts the magazine back: on a closed list
//!   list closed? takes the lock. gone? gives its page, and what is in the depot, to the provider
//! ```
//!
//! So a thread that has put a magazine back asks whether the list is closed. If the magazine is
//! back before the list is closed, `device_gone` finds it. If not, the thread finds the list
//! closed. A page whose allocation has found the list open counts as allocated before
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
use crate::waiters::{AllocFuture, Over, WaitError, Waiters, Wakers};
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
    /// Lies in the owner's home, which lives as long as the owner or a page in flight.
    cpus: NonNull<CpuCache>,
    page_size: u32,
    shared: NonNull<Shared<M>>,
    /// The device is gone.
    gone: AtomicBool,
    /// Threads and tasks that wait for a page.
    waiters: Arc<Waiters>,
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
    /// Magazines that were fetched from the depot, modulo 2^32. Allocations within a magazine are
    /// not counted: a counter would cost half as much as the allocation.
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
        let waiters = pool.shared().front.home.cpus().map(|cpus| Waiters::new(&pool.shared().end, cpus));
        let Some(waiters) = waiters else { unreachable!("the home was made of them") };
        pool.shared().end.set_waiters(waiters.clone());
        let owner = Owner { pool: ManuallyDrop::new(pool), reclaimed: None };
        owner.share();
        let locked = Locked { pool: Mutex::new(owner), holder: AtomicUsize::new(0), failed: AtomicU64::new(0) };
        Ok(Self { cpus, page_size, shared, gone: AtomicBool::new(false), waiters, owner: locked })
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
    /// Returns `None` if none of them has a page, or if it is too early to reclaim again. This is
    /// counted as `alloc_failed`. In rare cases it returns `None` although a page is idle: another
    /// thread was moving a magazine between the depot and its CPU, and did not run while this
    /// thread searched 32 times. Each search but the first reads a line of each magazine, without
    /// the lock. A thread that needs a page must not sleep because it got `None`:
    /// [`alloc_blocking`](Self::alloc_blocking) and [`alloc_async`](Self::alloc_async) wait.
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
        match self.cpus().pop() {
            Ok(item) => self.unless_closed(desc_of(item)),
            Err(_) => self.search_all(),
        }
    }

    /// Searches everywhere. In portable mode every allocation calls [`slow`](Self::slow), and few
    /// call this.
    #[cold]
    #[inline(never)]
    fn search_all(&self) -> Option<NonNull<Desc>> {
        /// The most searches of one allocation. In a model there are more than loom preempts.
        const SEARCHES: usize = if cfg!(loom) { 5 } else { 32 };
        let mut has_reclaimed = false;
        for search in 0..SEARCHES {
            let taken = self.cpus().magazines_taken();
            // This reads a line of each magazine. It is asked before the search, because a magazine
            // that a thread holds now may be on a CPU again when the reclaim is over. If a pop
            // takes a magazine later, that is counted. If a push replaces a magazine later, the
            // reclaim finds the item.
            let on_the_way = search > 0 && self.cpus().is_on_the_way();
            let mut owner = self.lock()?;
            if self.cpus().is_closed() {
                drop(owner);
                return self.while_closed(None);
            }
            if let Some(desc) = self.search(&mut owner, &mut has_reclaimed) {
                return Some(desc);
            }
            drop(owner);
            if search == 0 {
                continue;
            }
            if !on_the_way && self.cpus().magazines_taken() == taken {
                break;
            }
            yield_now();
        }
        self.owner.failed.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// One search: the magazines, the return stack and the provider, the pages of other CPUs.
    fn search(&self, owner: &mut Owner<M>, has_reclaimed: &mut bool) -> Option<NonNull<Desc>> {
        let refused = match self.cpus().pop() {
            Ok(item) => return Some(desc_of(item)),
            Err(why) => why == NothingFound::Refused,
        };
        if let Some(desc) = owner.take() {
            return Some(desc);
        }
        // In portable mode a pop can be refused, and then this CPU's magazine need not be empty. A
        // search that begins anew looks for pages that the last reclaim has missed. In both cases
        // the pause between reclaims is ignored.
        *has_reclaimed |= owner.reclaim(if refused || *has_reclaimed { Duration::ZERO } else { REST });
        self.cpus().pop().ok().map(desc_of)
    }

    /// A page that was found outside of the lock. Threads may have begun to wait meanwhile, and
    /// have not found what this thread has put back; or the device may have gone.
    #[inline]
    fn unless_closed(&self, desc: NonNull<Desc>) -> Option<NonNull<Desc>> {
        if self.cpus().is_closed() { self.while_closed(Some(desc)) } else { Some(desc) }
    }

    /// The end of an allocation that finds the magazines closed, and perhaps has a page: threads
    /// wait, or the device is gone.
    #[cold]
    #[inline(never)]
    fn while_closed(&self, found: Option<NonNull<Desc>>) -> Option<NonNull<Desc>> {
        // SAFETY: the page is this thread's alone from the commit of the pop on.
        let mut found = found.map(|desc| unsafe { Page::<M>::from_desc(desc, 0, self.page_size) });
        let mut wakers = Wakers::default();
        if let Some(mut owner) = self.lock() {
            if self.gone.load(Ordering::Relaxed) {
                // The page that was found, what was put back into the depot, and what was returned
                // go to the provider.
                let mut panics = Panics::default();
                panics.call(|| drop(found.take()));
                owner.empty_cpus(&mut panics);
                panics.call(|| owner.pool.reclaim());
                panics.resume();
            } else {
                self.serve(&mut owner, &mut wakers);
                match found.take().map(|page| self.waiters.pass(page.into_desc())) {
                    // Waiters that are left came first.
                    Some(Ok(waker)) => wakers.0.extend(waker),
                    // SAFETY: the page is this thread's alone.
                    Some(Err(desc)) => found = Some(unsafe { Page::from_desc(desc, 0, self.page_size) }),
                    None if self.cpus().is_closed() => {}
                    None => return self.search(&mut owner, &mut false),
                }
            }
        } else if self.gone.load(Ordering::Relaxed) {
            found = None;
        }
        if found.is_none() {
            self.owner.failed.fetch_add(1, Ordering::Relaxed);
        }
        found.map(Page::into_desc)
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
    /// as there are waiters, each returned page takes a lock, and **the thread that drops a page
    /// calls the waker** of its waiter. While there are none, a return costs nothing in addition.
    ///
    /// **Note:** only pages that return to this pool wake a waiter. Pages that another pool gives
    /// back to a common provider, or that a provider gets later, are found by the next
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
        takes_from(self.cpus.as_ptr());
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

    #[cold]
    #[inline(never)]
    fn wait(&self) -> Result<AllocFuture<M>, WaitError> {
        let found = |desc| Ok(AllocFuture::found(desc, self.page_size));
        if let Ok(item) = self.cpus().pop()
            && let Some(desc) = self.unless_closed(desc_of(item))
        {
            return found(desc);
        }
        let mut wakers = Wakers::default();
        let mut owner = self.lock().ok_or(WaitError::InProvider)?;
        // Without an interrupt of other CPUs first.
        if !self.cpus().is_closed()
            && let Some(desc) = owner.take()
        {
            return found(desc);
        }
        if !self.shared().interrupts && self.cpus().magazines() > 0 {
            return Err(WaitError::NoInterrupts);
        }
        let (number, list, moved) = self.waiters.wait()?;
        // From here on the place in the queue is given up if the provider panics.
        let future = AllocFuture::waits(self.waiters.clone(), number, self.page_size);
        let mut panics = Panics::default();
        owner.moved(moved);
        self.shared().take_in(list, &mut panics);
        panics.resume();
        self.serve(&mut owner, &mut wakers);
        Ok(future)
    }

    /// Passes the pages that there are to the waiters, whose wakers are woken by the caller, after
    /// it has released the lock.
    fn serve(&self, owner: &mut Owner<M>, wakers: &mut Wakers) {
        // No lock is held across the search, because it calls the provider, which may drop pages of
        // this pool.
        while self.waiters.any() {
            let in_depot = self.cpus().take_from_depot().map(desc_of);
            let Some(desc) = in_depot.or_else(|| owner.pool.alloc().map(Page::into_desc)) else { return };
            match self.waiters.pass(desc) {
                Ok(waker) => wakers.0.extend(waker),
                // SAFETY: the page is this thread's alone.
                Err(desc) => drop(unsafe { Page::<M>::from_desc(desc, 0, self.page_size) }),
            }
        }
        owner.share();
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

    /// Moves the pages that all CPUs hold, and those on the return stack, to the depot, where any
    /// thread finds them. Threads that wait for a page get what there is first. One membarrier, if
    /// any CPU holds pages.
    pub fn reclaim(&self) {
        let mut wakers = Wakers::default();
        let Some(mut owner) = self.lock() else { return };
        owner.reclaim(Duration::ZERO);
        owner.pool.reclaim();
        self.serve(&mut owner, &mut wakers);
    }

    /// Changes the most pages that the pool may hold from its provider. Pages beyond the limit stay in the pool until
    /// [`shrink`](Self::shrink) gives them back. Takes the lock.
    pub fn set_limit(&self, pages: usize) {
        let mut wakers = Wakers::default();
        if let Some(mut owner) = self.lock() {
            owner.pool.set_limit(pages);
            self.serve(&mut owner, &mut wakers);
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

    /// Unmaps every page of the pool, wherever it is, because the device is gone or about to go.
    /// From then on the pool allocates no pages, and pages that are returned are neither synced nor
    /// unmapped. An allocation of another thread that has found its page by then keeps it: that
    /// page was in flight, and is unmapped like the others in flight. Walks all descriptors in use.
    /// Takes the lock, and a membarrier.
    pub fn device_gone(&self) {
        let mut wakers = Wakers::default();
        let Some(mut owner) = self.lock() else { return };
        // Before the list of magazines is closed: see the head of this file.
        self.gone.store(true, Ordering::Release);
        wakers.0.append(&mut self.waiters.end(Over::DeviceGone).0);
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
        let _wakers = self.waiters.end(Over::Closed);
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
            // None is left, or the magazines are closed.
            if n == 0 || shared < n {
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
                self.moved(n);
                self.reclaimed = Some(now);
                true
            }
            Err(error) => {
                tracing::warn!(pool = self.pool.name(), %error, "pages that other CPUs hold cannot be reclaimed");
                false
            }
        }
    }

    /// Counts pages that were moved from CPUs to the depot.
    fn moved(&self, pages: usize) {
        let counters = &self.pool.shared().front.cache.counters;
        if pages > 0 {
            counters.reclaims.bump();
        }
        counters.reclaimed.add(pages as u64);
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
