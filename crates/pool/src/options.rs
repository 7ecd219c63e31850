//! The options of a pool, and the sizes that follow from them.
//!
//! Why sizes are computed: magazines hold pages back from the owner. A small pool on a large
//! machine would have all its pages in magazines.

use crate::dma::Direction;
use crate::error::PoolError;
use crate::memory::Memory;
use crate::provider::Provider;
use netmem_percpu::{CpuCache, Depot, MAGAZINE, NewCacheError, Taker};

/// The most full magazines that may wait for an owner: 128 KiB of them. Further pages return by the
/// slower path.
const MOST_FULL: usize = 256;
/// The fewest. Models check each magazine, so they have few.
const LEAST_FULL: usize = if cfg!(loom) { 1 } else { 16 };
/// The fewest pages in a magazine, if the pool chooses the size.
const LEAST_MAGAZINE: usize = if cfg!(loom) { 1 } else { 4 };
/// Magazines of a pool for every thread, in addition to those that it needs.
const SPARE: usize = if cfg!(loom) { 0 } else { 16 };

/// The most CPUs of which each has its magazine without asking. A machine can have hundreds, of
/// which a process uses few. More than so many take turns: idle ones are reclaimed for them.
const MOST_CPUS: usize = 32;

/// The options of a [`PagePool`](crate::PagePool). Start with [`PoolOptions::new`].
#[derive(Clone, Debug)]
pub struct PoolOptions {
    pub(crate) name: String,
    pub(crate) cache: usize,
    pub(crate) limit: u64,
    pub(crate) prefill: usize,
    magazine: Option<usize>,
    pub(crate) direction: Direction,
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

    /// Pages in the array cache. With 0, every allocation takes a page from the provider and maps
    /// it, and every return unmaps the page and releases it: a page per packet.
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

    /// Pages to take and map when the pool is made, so that a lack of pages shows then and not
    /// under traffic. A pool without a cache takes none, because it has nowhere to keep them.
    #[must_use]
    pub fn prefill(mut self, pages: usize) -> Self {
        self.prefill = pages;
        self
    }

    /// Pages in a magazine, at most 62. Pages that are dropped on a CPU wait in its magazine until
    /// it is full. With 0 there are no magazines, and each page comes back by one compare-and-swap.
    ///
    /// The default follows from the pool's size, so that a small pool does not strand its pages: a
    /// quarter of the pages beyond the cache, divided by the CPUs, 4 to 62; no magazines if there
    /// are fewer than 8 pages for each CPU. The CPUs are those that the machine can have
    /// ([`netmem_percpu::cpus`]), or 32 if there are more. On such a machine, the magazines of CPUs
    /// hold a quarter of the pages at most. If more CPUs return pages than there are magazines for,
    /// the pool takes those of CPUs that have been idle for 10 ms; meanwhile a page comes back by
    /// one compare-and-swap.
    #[must_use]
    pub fn magazine(mut self, pages: usize) -> Self {
        self.magazine = Some(pages);
        self
    }

    /// How pages are mapped in the pool's domain. The default is
    /// [`Bidirectional`](Direction::Bidirectional).
    ///
    /// [`ToDevice`](Direction::ToDevice) is for a pool whose pages are only sent: a device behind
    /// an IOMMU cannot write them. [`FromDevice`](Direction::FromDevice) is for a receive queue
    /// whose pages are not sent as they are. Such a page can still be sent, at the cost of sending
    /// a page of another domain: it is mapped for the transmission, because a device may not read
    /// it at [`Page::dma_addr`](crate::Page::dma_addr). Its [`dma_domain`](crate::Page::dma_domain)
    /// is 0.
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

    /// Whether a pool that is short of pages may interrupt other CPUs to take the pages in their
    /// magazines (a membarrier, which interrupts each CPU that runs a thread of this process).
    /// Default: true.
    ///
    /// With `false` the threads on isolated cores are not interrupted. A pool without pages then
    /// takes the pages that were returned by other ways: full magazines and the return stack. Pages
    /// in magazines that are not full stay there until the magazine is full, and count as in
    /// flight. [`PoolStats::unasked`](crate::PoolStats::unasked) counts how often the pool could
    /// have used them. [`PoolOptions::magazine`] bounds how many they are: the magazine's size for
    /// each CPU. The end of the pool interrupts once in any case, because no page may be left on a
    /// CPU. Threads cannot wait for a page of a [`SharedPool`](crate::SharedPool) that may not
    /// interrupt and has magazines: [`WaitError::NoInterrupts`](crate::WaitError::NoInterrupts).
    #[must_use]
    pub fn interrupt_cpus(mut self, allowed: bool) -> Self {
        self.interrupts = allowed;
        self
    }

    /// The depot for pages that are dropped outside of the poll context, and its taker. `None` for
    /// a pool that does not reuse pages.
    pub(crate) fn depot<M: Memory>(&self, provider: &dyn Provider<M>) -> Result<Option<(Depot, Taker)>, PoolError> {
        let cpus = netmem_percpu::cpus();
        let Some(Magazines { capacity, loaded, count }) = self.magazines(self.pages(provider), cpus) else {
            return Ok(None);
        };
        Ok(Some(Depot::with_lanes(capacity, count, loaded)?))
    }

    /// The magazines of a pool with this many pages, on a machine with this many CPUs. `None` for a
    /// pool without a depot.
    fn magazines(&self, pages: usize, cpus: usize) -> Option<Magazines> {
        let cpus_used = cpus.min(MOST_CPUS);
        let fair = (pages.saturating_sub(self.cache) / (4 * cpus_used)).clamp(LEAST_MAGAZINE, MAGAZINE);
        let capacity = self.magazine.unwrap_or(fair).min(MAGAZINE);
        // If magazines could strand half of the pages or more, each page returns by itself: that
        // costs less than to reclaim it.
        let few = self.magazine.is_none() && pages < 2 * 4 * cpus_used;
        if self.cache == 0 || capacity == 0 || few {
            return None;
        }
        // If the user chose the size, each CPU has one.
        let loaded = match self.magazine {
            Some(_) => cpus,
            None => (pages / 4 / capacity).max(cpus_used).min(cpus),
        };
        // Each of them has another on its way to it. In addition there are as many as can be full,
        // and a few for bulks that do not fill theirs.
        Some(Magazines { capacity, loaded, count: 2 * loaded + (pages / capacity).clamp(LEAST_FULL, MOST_FULL) })
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
        // Two on every CPU, one in the hand of a thread on it, and as many as all pages fill. A
        // reclaim leaves some that are not full.
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A pool of 1024 pages has magazines on a machine of any size, and those on CPUs hold at most
    /// a quarter of the pages.
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
