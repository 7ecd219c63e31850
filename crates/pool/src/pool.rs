//! The page pool as its owner has it: options, the poll context, and how a pool ends.
//!
//! The state that pages and owner share is in [`crate::shared`]. How the pool ends is in [`crate::end`].

use crate::cache::{Cache, PollHome};
use crate::desc::Unmapped;
use crate::dma::{Direction, DmaDomain, MapError};
use crate::end::{End, Record};
use crate::home::{Home, Return};
use crate::memory::Memory;
use crate::page::Page;
use crate::panics::Panics;
use crate::provider::Provider;
use crate::region::RegionError;
use crate::shared::{BATCH, REST, Shared};
use crate::shared_pool::SharedPool;
use crate::stats::{PoolStats, StatsReader};
use netmem_percpu::{CpuCache, Depot, MAGAZINE, NewCacheError, NoMemory, Taker};
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The most full magazines that may wait for an owner: 128 KiB of them. Further pages return by the slower path.
const MOST_FULL: usize = 256;
/// The fewest. Models check each magazine, so they have few.
const LEAST_FULL: usize = if cfg!(loom) { 1 } else { 16 };
/// The fewest pages in a magazine, if the pool chooses the size.
const LEAST_MAGAZINE: usize = if cfg!(loom) { 1 } else { 4 };
/// Magazines of a pool for every thread, in addition to those that it needs.
const SPARE: usize = if cfg!(loom) { 0 } else { 16 };

/// The most CPUs of which each has its magazine without asking. A machine can have hundreds, of which a process uses few. More than so
/// many take turns: idle ones are reclaimed for them.
const MOST_CPUS: usize = 32;

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The limit is 0.
    #[error("a pool limited to 0 pages can never deliver one; set a limit of at least 1")]
    NoPages,
    /// The provider's memory is not in the domain.
    #[error("the provider's memory cannot be mapped for the device")]
    Map(#[from] MapError),
    /// The memory for the pages could not be made.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// There is no memory for the magazines of the CPUs.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
    /// A pool for every thread that can have so many pages needs more magazines than there can be.
    #[error(
        "{magazines} magazines are too many for a pool, which has at most {most}: limit its pages, or make magazines larger"
    )]
    TooManyMagazines {
        /// The magazines that the pool would have.
        magazines: usize,
        /// The most that there can be.
        most: usize,
    },
    /// The provider has fewer pages than were requested in advance, or the limit is lower than that.
    #[error(
        "{got} of {want} pages could be had: raise the pool's limit, make the provider's region larger, or the queues fewer"
    )]
    Prefill {
        /// Pages that were requested.
        want: usize,
        /// Pages that there were.
        got: usize,
    },
}

/// The options of a [`PagePool`]. Start with [`PoolOptions::new`].
#[derive(Clone, Debug)]
pub struct PoolOptions {
    name: String,
    cache: usize,
    limit: u64,
    prefill: usize,
    magazine: Option<usize>,
    direction: Direction,
    pub(crate) interrupts: bool,
}

impl PoolOptions {
    /// A pool that keeps up to 512 pages in its cache and takes as many as the provider has.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            cache: 512,
            limit: u64::MAX,
            prefill: 0,
            magazine: None,
            direction: Direction::default(),
            interrupts: true,
        }
    }

    /// Pages in the array cache. 0 makes every allocation ask the provider and map, and every return unmap and give
    /// back: a page per packet.
    #[must_use]
    pub fn cache(mut self, pages: usize) -> Self {
        self.cache = pages;
        self
    }

    /// The most pages that the pool takes from the provider at a time.
    #[must_use]
    pub fn limit(mut self, pages: usize) -> Self {
        self.limit = pages as u64;
        self
    }

    /// Pages to take and map when the pool is made, so that a lack of pages shows then and not under traffic. A pool without a cache
    /// takes none, because it has nowhere to keep them.
    #[must_use]
    pub fn prefill(mut self, pages: usize) -> Self {
        self.prefill = pages;
        self
    }

    /// Pages in a magazine, at most 62. Pages that are dropped on a CPU wait in its magazine until it is full. With 0 there are no
    /// magazines, and each page comes back by one compare-and-swap.
    ///
    /// The default follows from the pool's size, so that a small pool does not strand its pages: a quarter of the pages beyond the
    /// cache, divided by the CPUs, 4 to 62; no magazines if there are fewer than 8 pages for each CPU. The CPUs
    /// are those that the machine can have ([`netmem_percpu::cpus`]), or 32 if there are more. On such a machine, the magazines of CPUs
    /// hold a quarter of the pages at most. If more CPUs return pages than there are magazines for, the pool takes those of CPUs that
    /// have been idle for 10 ms; meanwhile a page comes back by one compare-and-swap.
    #[must_use]
    pub fn magazine(mut self, pages: usize) -> Self {
        self.magazine = Some(pages);
        self
    }

    /// How pages are mapped in the pool's domain. The default is [`Bidirectional`](Direction::Bidirectional).
    ///
    /// [`ToDevice`](Direction::ToDevice) is for a pool whose pages are only sent: a device behind an IOMMU cannot write
    /// them. [`FromDevice`](Direction::FromDevice) is for a receive queue whose pages are not sent as they are. Such a
    /// page can still be sent, at the cost of sending a page of another domain: it is mapped for the transmission,
    /// because a device may not read it at [`Page::dma_addr`]. Its [`dma_domain`](Page::dma_domain) is 0.
    ///
    /// ```
    /// # use netmem_pool::{Direction, VhostDomain, PeerShared, PoolOptions, RegionOptions, RegionProvider};
    /// # use std::sync::Arc;
    /// let memory = RegionProvider::new(RegionOptions::new(64).build::<PeerShared>()?);
    /// let domain = Arc::new(VhostDomain::new(&[memory.region().clone()]));
    /// let headers = PoolOptions::new("tx-headers").direction(Direction::ToDevice).build(memory, Some(domain))?;
    /// assert_ne!(headers.dma_domain(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn direction(mut self, direction: Direction) -> Self {
        self.direction = direction;
        self
    }

    /// Whether a pool that is short of pages may interrupt other CPUs to take the pages in their magazines (a membarrier, which
    /// interrupts each CPU that runs a thread of this process). Default: true.
    ///
    /// With `false` the threads on isolated cores are not interrupted. A pool without pages then
    /// takes the pages that were returned by other ways: full magazines and the return stack. Pages
    /// in magazines that are not full stay there until the magazine is full, and count as in
    /// flight. [`PoolStats::unasked`] says how often the pool could have used them.
    /// [`PoolOptions::magazine`] bounds how many they are: the magazine's size for each CPU. The
    /// end of the pool interrupts once in any case, because no page may be left on a CPU. Threads
    /// cannot wait for a page of a [`SharedPool`] that may not interrupt and has magazines:
    /// [`WaitError::NoInterrupts`](crate::WaitError::NoInterrupts).
    #[must_use]
    pub fn interrupt_cpus(mut self, allowed: bool) -> Self {
        self.interrupts = allowed;
        self
    }

    /// The depot for pages that are dropped outside of the poll context, and its taker. `None` for a pool that does not
    /// reuse pages.
    fn depot<M: Memory>(&self, provider: &dyn Provider<M>) -> Result<Option<(Depot, Taker)>, PoolError> {
        let cpus = netmem_percpu::cpus();
        let Some(Magazines { capacity, loaded, count }) = self.magazines(self.pages(provider), cpus) else {
            return Ok(None);
        };
        let (depot, taker) = Depot::new(capacity, count)?;
        // Where each CPU can have one, they are not counted.
        Ok(Some((if loaded < cpus { depot.loaded_at_most(loaded) } else { depot }, taker)))
    }

    /// The magazines of a pool with this many pages, on a machine with this many CPUs. `None` for a pool without a depot.
    fn magazines(&self, pages: usize, cpus: usize) -> Option<Magazines> {
        let cpus_used = cpus.min(MOST_CPUS);
        let fair = (pages.saturating_sub(self.cache) / (4 * cpus_used)).clamp(LEAST_MAGAZINE, MAGAZINE);
        let capacity = self.magazine.unwrap_or(fair).min(MAGAZINE);
        // If magazines could strand half of the pages or more, each page returns by itself: that costs less than to
        // reclaim it.
        let few = self.magazine.is_none() && pages < 2 * 4 * cpus_used;
        if self.cache == 0 || capacity == 0 || few {
            return None;
        }
        // If the user chose the size, each CPU has one.
        let loaded = match self.magazine {
            Some(_) => cpus,
            None => (pages / 4 / capacity).max(cpus_used).min(cpus),
        };
        // Each of them has another on its way to it. In addition there are as many as can be full, and a few
        // for bulks that do not fill theirs.
        Some(Magazines { capacity, loaded, count: 2 * loaded + (pages / capacity).clamp(LEAST_FULL, MOST_FULL) })
    }

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
        PagePool::build(self, provider, domain, |elsewhere, domain, cache| {
            PollHome::new(elsewhere, domain, depot, cache)
        })
    }

    /// Makes a pool from which every thread allocates. Of the options, [`cache`](Self::cache) is not used: the CPUs' magazines are the
    /// cache. [`magazine`](Self::magazine) is the size of a magazine, of which each CPU has two. Without that option it is chosen from the
    /// pool's size, so that up to 32 CPUs hold at most a quarter of the pages. A pool with fewer than 8 pages for each CPU, or for each of
    /// 32 if the machine can have more, has no magazines.
    /// With 0, each allocation takes a lock, and each return is a compare-and-swap.
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

    /// The number of pages that the pool can have, as far as it is known now.
    fn pages<M: Memory>(&self, provider: &dyn Provider<M>) -> usize {
        usize::try_from(provider.pages().min(self.limit)).unwrap_or(usize::MAX)
    }

    /// The magazines of a pool for every thread.
    pub(crate) fn cpus<M: Memory>(&self, provider: &dyn Provider<M>) -> Result<CpuCache, PoolError> {
        let (pages, slots) = (self.pages(provider), netmem_percpu::cpus().min(MOST_CPUS));
        let fair = (pages / (8 * slots)).min(MAGAZINE);
        let capacity = self.magazine.unwrap_or(fair).min(MAGAZINE);
        let made = |capacity, magazines| CpuCache::new(capacity, magazines).map_err(not_made);
        if capacity == 0 {
            return made(1, 0);
        }
        // Two on every CPU, one in the hand of a thread on it, and as many as all pages fill. A reclaim leaves some that are not full.
        made(capacity, (5 * slots + SPARE).saturating_add(pages.div_ceil(capacity)))
    }
}

fn not_made(why: NewCacheError) -> PoolError {
    match why {
        NewCacheError::TooMany { magazines, most } => PoolError::TooManyMagazines { magazines, most },
        NewCacheError::NoMemory(why) => why.into(),
    }
}

/// Sizes of a pool's depot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Magazines {
    /// Pages in each.
    capacity: usize,
    /// The most that CPUs hold.
    loaded: usize,
    /// All of them.
    count: usize,
}

/// A page pool, owned by one receive queue.
///
/// It can move to another thread, but has one owner at a time: allocation takes the pool by exclusive reference or
/// happens in its poll context. Pages are returned by any thread. If a pool is dropped while pages are in flight, it
/// lingers until the last page is returned ([`lingering`](crate::lingering)).
///
/// # Panics of user code
///
/// The pool calls its domain, its provider and the program's log subscriber. If one of them panics, the pool finishes
/// its work, so that no page is lost. Then it propagates the panic: out of the pool's method, or out of the drop of a
/// page. `unmap` is called once for each mapping, also if it panics.
///
/// # Fork
///
/// A child process has a copy of the pool's books, and none of the pages' memory ([`Region`](crate::Region) says more). It may drop
/// pages. It may close a pool only if the pool has no domain, or one whose state is in the memory of the process: otherwise the child
/// would unmap what its parent's device uses. At the fork no other thread may be in a call of the pool or of its provider.
/// `docs/design/return-path.md` has the table.
pub struct PagePool<M: Memory> {
    shared: NonNull<Shared<M>>,
}

// SAFETY: the owner's part is reached through this value alone (*owner's*), the rest is shareable.
unsafe impl<M: Memory> Send for PagePool<M> {}

/// The poll context of the pool: exists inside [`PagePool::poll`], on its thread, for this pool alone.
///
/// The lifetime is invariant and different for every poll, so that a context can neither leave its poll nor be exchanged for another
/// pool's. Two [reborrowed](Self::reborrow) contexts of nested polls can be exchanged with each other. That is harmless: each is still
/// the only context of its pool, and ends before the inner poll does.
pub struct Napi<'q, M: Memory> {
    /// Also what keeps the context on its thread: a pointer can be neither sent nor shared.
    shared: NonNull<Shared<M>>,
    brand: PhantomData<fn(&'q ()) -> &'q ()>,
}

impl<M: Memory> Napi<'_, M> {
    /// Allocates a whole page: a pop of the array cache. If the cache is empty, the pool looks in this order: a
    /// magazine of pages that were returned by other threads, the provider, and, at most every 100 us, the magazines of
    /// other CPUs. `None` if none of these has a page, or if it is too early to look at the other CPUs again; counted
    /// as `alloc_failed`. If a thread is going to sleep because of that, it calls [`PagePool::reclaim`] first.
    #[inline]
    pub fn alloc(&mut self) -> Option<Page<M>> {
        // SAFETY: the context exists inside of its pool's `poll`.
        unsafe { Shared::alloc(self.shared, REST) }
    }

    /// The same context for a shorter time, to be kept in a structure.
    #[inline]
    pub fn reborrow(&mut self) -> Napi<'_, M> {
        Napi { shared: self.shared, brand: PhantomData }
    }

    /// For a page of this pool: the device wrote these bytes of `page`, and the CPU is about to read them.
    pub fn sync_for_cpu(&self, page: &Page<M>, bytes: Range<usize>) {
        if let Some(domain) = self.live_domain() {
            let (dma, len) = within(page, &bytes);
            domain.sync_for_cpu(dma, len);
        }
    }

    /// For a page of this pool: the device is about to write these bytes of `page`.
    pub fn sync_for_device(&self, page: &Page<M>, bytes: Range<usize>) {
        if let Some(domain) = self.live_domain() {
            let (dma, len) = within(page, &bytes);
            domain.sync_for_device(dma, len, Direction::FromDevice);
        }
    }

    fn live_domain(&self) -> Option<&dyn DmaDomain> {
        // SAFETY: the context exists inside of its pool's `poll`.
        let s = unsafe { self.shared.as_ref() };
        s.domain.as_deref().filter(|_| M::MAPPED && !s.gone.get())
    }
}

/// Device address and length of the part of `bytes` that is in `page`.
pub(crate) fn within<M: Memory>(page: &Page<M>, bytes: &Range<usize>) -> (u64, usize) {
    let start = bytes.start.min(page.len());
    (page.dma_addr() + start as u64, bytes.end.min(page.len()).saturating_sub(start))
}

impl<M: Memory> fmt::Debug for Napi<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Napi")
    }
}

impl<M: Memory> PagePool<M> {
    /// `front` makes the front of the pool: its arguments are the function for the slow return, the domain's identity
    /// and the array cache.
    pub(crate) fn build(
        o: PoolOptions,
        provider: Arc<dyn Provider<M>>,
        domain: Option<Arc<dyn DmaDomain>>,
        front: impl FnOnce(Return, usize, Cache) -> PollHome,
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
            front: front(Shared::<M>::elsewhere, domain_id, Cache::new(cache, page_size, Shared::<M>::overflow)),
            end: End::new(record.clone()),
            kept: Home::new(Shared::<M>::keep, domain_id, None, page_size),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            limit: Cell::new(o.limit),
            provider,
            domain,
            direction: o.direction,
            unmapped: Unmapped::new(),
            looked: Cell::new(None),
            looked_for_idle: Cell::new(None),
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
        let magazine = pool.shared().front.home.depot().map_or(0, Depot::capacity);
        tracing::debug!(pool = name, kind, page_size, cache, magazine, held = pool.held(), "pool made");
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
            let taken = unsafe { Shared::take::<BATCH>(self.shared, &mut panics) };
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

    /// Runs `f` in the pool's poll context: if code on this thread drops pages of this pool meanwhile, they go straight
    /// into the array cache. The context ends with `f`, also after a panic.
    ///
    /// Polls of several pools nest, and end in the reverse of the order in which they began.
    /// **Note:** a library that switches stacks (fibres, stackful coroutines) must not suspend `f`:
    /// a context that ends on another thread, or before one that began in it, aborts the process.
    #[inline]
    pub fn poll<R>(&mut self, f: impl FnOnce(&mut Napi<'_, M>) -> R) -> R {
        let _in_context = self.shared().front.enter();
        f(&mut Napi { shared: self.shared, brand: PhantomData })
    }

    /// Allocates a page outside of a poll, for example to fill a queue before its first poll. Like [`Napi::alloc`], but
    /// asks the other CPUs every time when there is no other page.
    #[inline]
    pub fn alloc(&mut self) -> Option<Page<M>> {
        // SAFETY: the reference is exclusive, and no poll runs, because a poll would hold the reference.
        unsafe { Shared::alloc(self.shared, Duration::ZERO) }
    }

    /// Takes the pages that were returned by other threads, and those in the magazines of other CPUs, now. For an owner
    /// that is about to sleep: a page that is returned later would not wake it. One membarrier, if any pages wait.
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

    /// Changes the most pages that the pool takes from its provider at a time. Pages beyond it stay until they are given up by
    /// [`shrink`](Self::shrink).
    pub fn set_limit(&mut self, pages: usize) {
        self.shared().limit.set(pages as u64);
    }

    /// Unmaps idle pages and gives them back to the provider, also those in magazines of other CPUs, until the pool
    /// [holds](Self::held) no more than `pages` or no page is idle. Returns how many pages were given back.
    pub fn shrink(&mut self, pages: usize) -> usize {
        let mut panics = Panics::default();
        let s = self.shared();
        s.drain(&mut panics);
        let mut gone = 0;
        while self.held() > pages
            && !panics.any()
            && let Some(desc) = s.front.cache.take()
        {
            s.give_back(desc, &mut panics);
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

    /// Identity of the pool's [domain](crate::DmaDomain); 0 for none, and for a pool whose pages a device may not read. See
    /// [`Page::dma_domain`].
    #[must_use]
    pub fn dma_domain(&self) -> usize {
        self.shared().front.home.domain()
    }

    /// Whether returned pages stay with the pool. If not, every packet takes a page from the provider.
    #[must_use]
    pub fn circulates(&self) -> bool {
        self.shared().circulates
    }

    /// Whether [`Napi::sync_for_cpu`] and its counterpart do anything. Ask once, not per packet.
    #[must_use]
    pub fn needs_sync(&self) -> bool {
        M::MAPPED && self.shared().domain.as_ref().is_some_and(|d| d.needs_sync())
    }

    /// The counters, exact for what this thread can know. Pages that other threads returned are taken in first, with a
    /// membarrier if any wait on other CPUs (and if [`PoolOptions::interrupt_cpus`] allows it).
    /// [`stats_reader`](Self::stats_reader) disturbs no thread.
    pub fn stats(&mut self) -> PoolStats {
        self.drain();
        let s = self.shared();
        s.front.stats(s.end.left_directly())
    }

    /// Reads the pool's counters from any thread, also after the pool's end. Costs one atomic addition.
    #[must_use]
    pub fn stats_reader(&self) -> StatsReader {
        StatsReader::new(self.shared().end.record().clone())
    }

    /// Gives up a page that a device kept when it stopped answering. The device may still write to the page. Therefore
    /// the page is unmapped, and not used again until its region is dropped, or until its provider claims it anew
    /// ([`Region::claim`](crate::Region::claim)). If a page was split or shared, any part
    /// can be given: the page is counted as quarantined once, when its last part is dropped. A page of another pool is
    /// only kept from returning, and shows in that pool as in flight.
    pub fn quarantine(&mut self, page: Page<M>) {
        let mut panics = Panics::default();
        let s = self.shared();
        let desc = page.desc();
        if ![&raw const s.front.home, &raw const s.kept].contains(&desc.home().cast_const()) {
            // This comes first, because the log subscriber may panic, and the page must not be returned then.
            let page = ManuallyDrop::new(page);
            tracing::error!(pool = self.name(), ?page, "asked to quarantine a page of another pool");
            return;
        }
        desc.set_quarantined();
        // First, for the domain may panic. By the pool's own pointer: the last page that is returned this way may free
        // the pool.
        // SAFETY: the owner keeps it.
        desc.set_home(unsafe { &raw mut (*self.shared.as_ptr()).kept });
        s.unmap_alone(desc, &mut panics);
        drop(page);
        s.drain_stack(&mut panics);
        panics.resume();
    }

    /// The device is gone, or is about to go: every mapped page is unmapped now, wherever it is. The pool allocates no
    /// more, and pages that are returned later are neither synced nor unmapped. Walks all descriptors in use, and
    /// sleeps while another thread is unmapping a page of the pool.
    pub fn device_gone(&mut self) {
        self.shared().device_gone();
    }

    /// Ends the pool and returns its final state. If pages are still in flight, the pool lingers until the last of them
    /// is returned, as it does when it is dropped.
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
        write!(f, "PagePool({}, {:?})", self.name(), s.front.stats(s.end.left_directly()))
    }
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

    /// A pool of 1024 pages has magazines on a machine of any size, and those on CPUs hold at most a quarter of the pages.
    #[test]
    fn a_small_pool_on_a_large_machine_has_magazines() {
        let options = PoolOptions::new("sized");
        let sizes = |capacity, loaded, count| Some(Magazines { capacity, loaded, count });
        assert_eq!(options.magazines(1024, 4), sizes(32, 4, 8 + 32));
        assert_eq!(options.magazines(1024, 32), sizes(4, 32, 64 + 256));
        assert_eq!(options.magazines(1024, 256), sizes(4, 64, 128 + 256));
        for pages in 600..5000 {
            let Some(Magazines { capacity, loaded, .. }) = options.magazines(pages, 256) else { panic!("{pages}") };
            assert!(4 * capacity * loaded <= pages, "{pages}: {loaded} of {capacity}");
        }
        assert_eq!(options.magazines(255, 256), None);
        assert_eq!(options.clone().magazine(16).magazines(1024, 240), sizes(16, 240, 480 + 64));
        assert_eq!(options.clone().magazine(0).magazines(1024, 4), None);
        assert_eq!(options.cache(0).magazines(1024, 4), None);
    }
}
