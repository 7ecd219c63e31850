//! The pools that are measured, and the sum of what they counted.

use crate::error::BenchError;
use netmem::pool::{
    Napi, Page, PagePool, PeerShared, PoolClosed, PoolOptions, PoolStats, Provider, RegionOptions, RegionProvider,
    SharedPool, VhostDomain,
};
use netmem_measure::pages::PageAllocator;
use std::error::Error;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The kind of memory that a device writes into, as in receive queues.
pub(crate) type M = PeerShared;

/// Pages in the array cache of every pool that has one: the default of `PoolOptions`.
pub(crate) const CACHE: usize = 512;

/// The counters of the pools that have been closed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Accounting(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    stats: PoolStats,
    outstanding: u64,
    backing: Option<String>,
}

impl Accounting {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the counters of a closed pool.
    pub(crate) fn add(&self, closed: &PoolClosed) {
        let mut entries = self.entries();
        entries.stats += closed.stats;
        entries.outstanding += closed.outstanding;
    }

    pub(crate) fn stats(&self) -> PoolStats {
        self.entries().stats
    }

    /// Pages that were not returned.
    pub(crate) fn outstanding(&self) -> u64 {
        self.entries().outstanding
    }

    /// The backing of the first pool's pages.
    pub(crate) fn backing(&self) -> String {
        self.entries().backing.clone().unwrap_or_else(|| "none".into())
    }

    /// A pool over `pages` pages of its own, mapped for a device as virtio's are.
    pub(crate) fn pool(&self, options: PoolOptions, pages: usize, order: u8) -> Result<CountedPool, BenchError> {
        // The contents of the pages are not used. Large pages need not be populated, because only
        // descriptors and addresses are passed on.
        let region = RegionOptions::new(pages)
            .reserved_huge_pages(true)
            .order(order)
            .populate(order == 0)
            .build::<M>()
            .map_err(unavailable)?;
        self.over(options, RegionProvider::new(region), |provider| provider.region().clone())
    }

    /// The same, as a pool that every thread can use.
    pub(crate) fn shared_pool(&self, options: PoolOptions, pages: usize) -> Result<CountedSharedPool, BenchError> {
        let region = RegionOptions::new(pages).reserved_huge_pages(true).build::<M>().map_err(unavailable)?;
        let provider = RegionProvider::new(region);
        self.entries().backing.get_or_insert_with(|| provider.region().backing().to_string());
        let domain = Arc::new(VhostDomain::new(&[provider.region().clone()]));
        let pool = options.prefill(pages).build_shared(provider, Some(domain)).map_err(unavailable)?;
        Ok(CountedSharedPool { pool: ManuallyDrop::new(pool), accounting: self.clone() })
    }

    /// A page per packet from a general-purpose allocator.
    pub(crate) fn page_per_packet(&self, pages: usize) -> Result<CountedPool, BenchError> {
        let region = RegionOptions::new(pages).reserved_huge_pages(true).build::<M>().map_err(unavailable)?;
        let options = PoolOptions::new("page per packet").cache(0);
        self.over(options, PageAllocator::new(region), |provider| provider.region().clone())
    }

    fn over<P: Provider<M> + 'static>(
        &self,
        options: PoolOptions,
        provider: Arc<P>,
        region: impl FnOnce(&P) -> Arc<netmem::pool::Region<M>>,
    ) -> Result<CountedPool, BenchError> {
        let region = region(&provider);
        self.entries().backing.get_or_insert_with(|| region.backing().to_string());
        let domain = Arc::new(VhostDomain::new(&[region]));
        let pool = options.build(provider as Arc<dyn Provider<M>>, Some(domain)).map_err(unavailable)?;
        Ok(CountedPool { pool: Some(pool), accounting: self.clone() })
    }
}

/// A pool that every thread can use. When it is dropped, it enters its counters into the
/// accounting.
#[derive(Debug)]
pub(crate) struct CountedSharedPool {
    pool: ManuallyDrop<SharedPool<M>>,
    accounting: Accounting,
}

impl CountedSharedPool {
    #[inline(always)]
    pub(crate) fn pool(&self) -> &SharedPool<M> {
        &self.pool
    }
}

impl Drop for CountedSharedPool {
    fn drop(&mut self) {
        // SAFETY: the value is dropped, so nothing uses the pool afterwards.
        let pool = unsafe { ManuallyDrop::take(&mut self.pool) };
        self.accounting.add(&pool.close());
    }
}

fn unavailable(error: impl Error + Send + Sync + 'static) -> BenchError {
    BenchError::Unavailable { what: "a pool", why: format!("{:#}", anyhow::Error::new(error)) }
}

/// A pool that enters its counters into the accounting when it is dropped.
#[derive(Debug)]
pub(crate) struct CountedPool {
    /// `None` once the pool is closed.
    pool: Option<PagePool<M>>,
    accounting: Accounting,
}

impl CountedPool {
    /// Runs `f` in the poll context. Returns what `f` returns.
    #[inline(always)]
    pub(crate) fn poll<R>(&mut self, f: impl FnOnce(&mut Napi<'_, M>) -> Option<R>) -> Option<R> {
        self.pool.as_mut()?.poll(f)
    }

    /// Allocates up to `n` pages.
    pub(crate) fn take(&mut self, n: usize) -> Vec<Page<M>> {
        self.poll(|napi| Some(std::iter::from_fn(|| napi.alloc()).take(n).collect())).unwrap_or_default()
    }
}

impl Drop for CountedPool {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            self.accounting.add(&pool.close());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_goes_enters_what_it_counted() {
        let accounting = Accounting::default();
        let mut pool = accounting.pool(PoolOptions::new("test"), 64, 0).unwrap();
        let pages = pool.take(10);
        assert_eq!(pages.len(), 10);
        drop(pages);
        assert_eq!(accounting.stats().allocated(), 0);
        drop(pool);
        let stats = accounting.stats();
        assert_eq!((stats.allocated(), stats.returned(), accounting.outstanding()), (10, 10, 0));
        assert!(stats.mapped >= 10 && stats.mapped == stats.unmapped);

        let mut pool = accounting.page_per_packet(64).unwrap();
        let kept = pool.take(1);
        drop(pool);
        assert_eq!((accounting.outstanding(), accounting.stats().inflight()), (1, 1));
        drop(kept);
    }
}
