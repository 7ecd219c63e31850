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
pub(crate) struct Books(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    stats: PoolStats,
    outstanding: u64,
    backing: Option<String>,
}

impl Books {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the counters of a closed pool.
    pub(crate) fn enter(&self, closed: &PoolClosed) {
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
    pub(crate) fn pool(&self, options: PoolOptions, pages: usize, order: u8) -> Result<Pool, BenchError> {
        // The contents of the pages are not used. Large pages need not be populated, because only descriptors and
        // addresses are passed on.
        let region = RegionOptions::new(pages)
            .reserved_huge_pages(true)
            .order(order)
            .populate(order == 0)
            .build::<M>()
            .map_err(unavailable)?;
        self.over(options, RegionProvider::new(region), |provider| provider.region().clone())
    }

    /// The same, as a pool that every thread can use.
    pub(crate) fn everyones(&self, options: PoolOptions, pages: usize) -> Result<Everyones, BenchError> {
        let region = RegionOptions::new(pages).reserved_huge_pages(true).build::<M>().map_err(unavailable)?;
        let provider = RegionProvider::new(region);
        self.entries().backing.get_or_insert_with(|| provider.region().backing().to_string());
        let domain = Arc::new(VhostDomain::new(&[provider.region().clone()]));
        let pool = options.prefill(pages).build_shared(provider, Some(domain)).map_err(unavailable)?;
        Ok(Everyones { pool: ManuallyDrop::new(pool), books: self.clone() })
    }

    /// A page per packet from a general-purpose allocator.
    pub(crate) fn page_per_packet(&self, pages: usize) -> Result<Pool, BenchError> {
        let region = RegionOptions::new(pages).reserved_huge_pages(true).build::<M>().map_err(unavailable)?;
        let options = PoolOptions::new("page per packet").cache(0);
        self.over(options, PageAllocator::new(region), |provider| provider.region().clone())
    }

    fn over<P: Provider<M> + 'static>(
        &self,
        options: PoolOptions,
        provider: Arc<P>,
        region: impl FnOnce(&P) -> Arc<netmem::pool::Region<M>>,
    ) -> Result<Pool, BenchError> {
        let region = region(&provider);
        self.entries().backing.get_or_insert_with(|| region.backing().to_string());
        let domain = Arc::new(VhostDomain::new(&[region]));
        let pool = options.build(provider as Arc<dyn Provider<M>>, Some(domain)).map_err(unavailable)?;
        Ok(Pool { pool: Some(pool), books: self.clone() })
    }
}

/// A pool that every thread can use. When it is dropped, it enters its counters into the books.
#[derive(Debug)]
pub(crate) struct Everyones {
    pool: ManuallyDrop<SharedPool<M>>,
    books: Books,
}

impl Everyones {
    #[inline(always)]
    pub(crate) fn pool(&self) -> &SharedPool<M> {
        &self.pool
    }
}

impl Drop for Everyones {
    fn drop(&mut self) {
        // SAFETY: the value is dropped, so nothing uses the pool afterwards.
        let pool = unsafe { ManuallyDrop::take(&mut self.pool) };
        self.books.enter(&pool.close());
    }
}

fn unavailable(error: impl Error + Send + Sync + 'static) -> BenchError {
    BenchError::Unavailable { what: "a pool", why: format!("{:#}", anyhow::Error::new(error)) }
}

/// A pool that enters its counters into the books when it is dropped.
#[derive(Debug)]
pub(crate) struct Pool {
    /// `None` once the pool is closed.
    pool: Option<PagePool<M>>,
    books: Books,
}

impl Pool {
    /// Runs `f` in the poll context. Returns what `f` returns.
    #[inline(always)]
    pub(crate) fn poll<R>(&mut self, f: impl FnOnce(&mut Napi<'_, M>) -> Option<R>) -> Option<R> {
        self.pool.as_mut()?.poll(f)
    }

    /// Takes up to `n` pages.
    pub(crate) fn take(&mut self, n: usize) -> Vec<Page<M>> {
        self.poll(|napi| Some(std::iter::from_fn(|| napi.alloc()).take(n).collect())).unwrap_or_default()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            self.books.enter(&pool.close());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_goes_enters_what_it_counted() {
        let books = Books::default();
        let mut pool = books.pool(PoolOptions::new("test"), 64, 0).unwrap();
        let pages = pool.take(10);
        assert_eq!(pages.len(), 10);
        drop(pages);
        assert_eq!(books.stats().allocated(), 0);
        drop(pool);
        let stats = books.stats();
        assert_eq!((stats.allocated(), stats.returned(), books.outstanding()), (10, 10, 0));
        assert!(stats.mapped >= 10 && stats.mapped == stats.unmapped);

        let mut pool = books.page_per_packet(64).unwrap();
        let kept = pool.take(1);
        drop(pool);
        assert_eq!((books.outstanding(), books.stats().inflight()), (1, 1));
        drop(kept);
    }
}
