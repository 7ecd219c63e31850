//! Providers: one that is not part of the crate, and one that grows.

use crate::common::{Strict, counting};
use netmem_pool::{
    CountingDomain, Direction, DmaDomain, GrowingProvider, MapError, Page, PagePool, PeerShared, PoolOptions, Private,
    Provider, RawPage, Region, RegionError, RegionOptions, SystemMemory,
};
use std::collections::HashSet;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

fn sparse(pages: usize) -> RegionOptions {
    RegionOptions::new(pages).huge_pages(false).populate(false)
}

/// A provider that is not part of the crate: a bit for each page, and the lowest free page first.
#[derive(Debug)]
struct Bitmap<M: SystemMemory> {
    region: Region<M>,
    free: Mutex<Vec<u64>>,
}

impl<M: SystemMemory> Bitmap<M> {
    fn new(pages: u32) -> Arc<Self> {
        let region = sparse(pages as usize).build().unwrap();
        let mut free = vec![!0; pages.div_ceil(64) as usize];
        if !pages.is_multiple_of(64) {
            *free.last_mut().unwrap() = (1 << (pages % 64)) - 1;
        }
        Arc::new(Self { region, free: Mutex::new(free) })
    }

    fn free_pages(&self) -> u32 {
        self.free.lock().unwrap().iter().map(|word| word.count_ones()).sum()
    }
}

// SAFETY: a page's bit is set while the page is free. There is one region, and it lives as long as
// the provider.
unsafe impl<M: SystemMemory> Provider<M> for Bitmap<M> {
    fn alloc(&self, pages: &mut [Option<RawPage<M>>]) -> usize {
        let mut free = self.free.lock().unwrap();
        let mut taken = 0;
        for (n, word) in free.iter_mut().enumerate() {
            while *word != 0 && taken < pages.len() {
                let index = n as u32 * 64 + word.trailing_zeros();
                *word &= *word - 1;
                // SAFETY: its bit was set until now.
                pages[taken] = Some(unsafe { self.region.claim(index) });
                taken += 1;
            }
        }
        taken
    }

    unsafe fn release(&self, page: RawPage<M>) {
        // SAFETY: the page is one of this provider, which is alive.
        let index = unsafe { page.index() };
        let word = &mut self.free.lock().unwrap()[index as usize / 64];
        assert_eq!(*word & 1 << (index % 64), 0, "page {index} was here already");
        *word |= 1 << (index % 64);
    }

    fn page_size(&self) -> usize {
        self.region.page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<M>)) {
        f(&self.region);
    }
}

/// Proves POOL-10: pools work with a provider of another author, with and without a cache, until
/// its last page is taken.
#[test]
fn a_provider_of_somebody_elses() {
    fn check<M: SystemMemory>(pages: u32, cache: usize) {
        let memory = Bitmap::<M>::new(pages);
        let domain = counting();
        let mut pool = PoolOptions::new("bitmap").cache(cache).build(memory.clone(), Some(domain.clone())).unwrap();
        for _ in 0..3 {
            let out: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
            assert_eq!(out.iter().map(|p| p.index()).collect::<HashSet<_>>().len(), pages as usize);
            assert_eq!(memory.free_pages(), 0);
            let (here, there) = out.into_iter().partition::<Vec<_>, _>(|p| p.index() % 3 == 0);
            pool.poll(|_| drop(here));
            thread::spawn(move || drop(there)).join().unwrap();
        }
        let stats = pool.close().stats;
        assert_eq!((stats.inflight(), stats.alloc_failed), (0, 3));
        assert_eq!((memory.free_pages(), domain.maps()), (pages, domain.unmaps()));
        // The same pages again, in another pool.
        let mut pool = PoolOptions::new("next").build(memory.clone(), None).unwrap();
        assert_eq!(std::iter::from_fn(|| pool.alloc()).collect::<Vec<_>>().len(), pages as usize);
    }
    for cache in [0, 1, 16, 512] {
        check::<Private>(1, cache);
        check::<PeerShared>(64, cache);
        check::<Private>(200, cache);
    }
}

/// Proves POOL-1 and POOL-10: a device that is removed is unmapped from every page of such a
/// provider too, once each, while the pages are returned on other threads.
#[test]
fn somebody_elses_pages_and_a_device_that_goes() {
    for _ in 0..100 {
        let memory = Bitmap::<Private>::new(100);
        let domain = Arc::new(CountingDomain::new(Strict::default()));
        let mut pool = PoolOptions::new("goes").cache(8).build(memory.clone(), Some(domain.clone())).unwrap();
        let out: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
        let barrier = Arc::new(Barrier::new(2));
        let other = thread::spawn({
            let barrier = barrier.clone();
            move || {
                barrier.wait();
                drop(out);
            }
        });
        barrier.wait();
        pool.device_gone();
        other.join().unwrap();
        assert_eq!(pool.close().outstanding, 0);
        assert_eq!((domain.maps(), domain.unmaps(), memory.free_pages()), (100, 100, 100));
    }
}

/// Proves POOL-10: a page that is outside of the region is not claimed.
#[test]
#[should_panic(expected = "page 64 of 64")]
fn a_page_that_is_not_there() {
    let region = sparse(64).build::<Private>().unwrap();
    // SAFETY: no page is in flight.
    let _ = unsafe { region.claim(64) };
}

fn growing(step: usize, limit: usize) -> Arc<GrowingProvider<Private>> {
    GrowingProvider::new(sparse(step), limit).unwrap()
}

fn all(pool: &mut PagePool<Private>) -> Vec<Page<Private>> {
    std::iter::from_fn(|| pool.alloc()).collect()
}

/// Proves POOL-13: memory is added one region at a time, only when no page is left, up to the
/// limit.
#[test]
fn growth_up_to_a_limit() {
    for (step, limit, regions) in [(64, 64, 1), (64, 256, 4), (64, 200, 4), (1, 10, 10), (100, 101, 2)] {
        let memory = growing(step, limit);
        assert_eq!((memory.pages(), memory.limit()), (step, limit));
        let domain = counting();
        let mut pool = PoolOptions::new("grows").cache(4).build(memory.clone(), Some(domain.clone())).unwrap();
        let mut out = Vec::new();
        for n in 1..=limit {
            out.push(pool.alloc().unwrap_or_else(|| panic!("page {n} of {limit}")));
            assert!(memory.pages() < (n + 2).next_multiple_of(step) + 1, "{} pages for {n}", memory.pages());
        }
        assert_eq!(out.iter().map(|p| p.as_ptr()).collect::<HashSet<_>>().len(), limit);
        let mut seen = 0;
        memory.each(&mut |region| seen += usize::from(region.pages() as usize <= step));
        assert_eq!((memory.pages(), seen), (limit, regions));
        for (n, page) in out.iter_mut().enumerate() {
            page.as_mut_slice().fill(n as u8);
        }
        assert!(out.iter().enumerate().all(|(n, p)| p.as_slice().iter().all(|&b| b == n as u8)), "pages overlap");
        drop(out);
        crate::common::close_balanced(pool, &domain);
        let mut next = PoolOptions::new("next").build(memory.clone(), None).unwrap();
        assert_eq!((all(&mut next).len(), memory.pages()), (limit, limit), "what came back is used again");
    }
}

/// Proves POOL-13 and POOL-12: a consumer that keeps all pages starves its queue. Pool and provider
/// count this alike, and other pools are not affected. It ends when the first page is returned.
#[test]
fn a_consumer_who_sits_on_everything() {
    let memory = growing(64, 150);
    let (domain, mut hoard) = (counting(), Vec::new());
    let mut greedy = PoolOptions::new("greedy").build(memory.clone(), Some(domain.clone())).unwrap();
    let mut starved = PoolOptions::new("starved").build(memory.clone(), Some(domain.clone())).unwrap();
    hoard.extend(all(&mut greedy));
    assert_eq!((hoard.len(), memory.pages(), memory.out_of_pages()), (150, 150, 1));
    for n in 1..=1000 {
        assert!(starved.poll(|napi| napi.alloc()).is_none());
        assert_eq!((starved.stats().alloc_failed, memory.out_of_pages()), (n, n + 1));
    }
    let sizes = [greedy.stats(), starved.stats()].map(|s| (s.inflight(), s.alloc_failed));
    assert_eq!((sizes, memory.pages()), ([(150, 1), (0, 1000)], 150));
    hoard.truncate(149);
    hoard.push(greedy.alloc().expect("one came back"));
    drop((hoard, greedy));
    assert_eq!(all(&mut starved).len(), 150, "the greedy pool has gone, and its pages are here");
    assert_eq!((domain.maps(), starved.close().stats.mapped), (300, 150));
}

/// Drops pages in the middle of an unmap.
#[derive(Debug, Default)]
struct Dropping(Mutex<Vec<Page<Private>>>);

impl DmaDomain for Dropping {
    fn map(&self, addr: *mut u8, _len: usize, _: Direction) -> Result<u64, MapError> {
        Ok(addr.addr() as u64)
    }

    fn unmap(&self, _dma: u64, _len: usize) {
        let page = self.0.lock().unwrap().pop();
        drop(page);
    }
}

/// Proves POOL-1 and POOL-10: a device that is removed is unmapped from the pages of every region.
/// Meanwhile a domain may return pages to the provider.
#[test]
fn a_device_that_goes_after_growth() {
    for cache in [0, 64] {
        let memory = growing(10, 50);
        let domain = Arc::new(CountingDomain::new(Dropping::default()));
        let mut pool = PoolOptions::new("goes").cache(cache).build(memory.clone(), Some(domain.clone())).unwrap();
        let out = all(&mut pool);
        assert_eq!(out.len(), 50);
        pool.device_gone();
        assert_eq!((domain.maps(), domain.unmaps()), (50, 50));
        drop(out);
        assert_eq!(pool.close().outstanding, 0);

        let domain = Arc::new(Dropping::default());
        let mut pool = PoolOptions::new("drops").cache(cache).build(memory.clone(), Some(domain.clone())).unwrap();
        let mut out = all(&mut pool);
        domain.0.lock().unwrap().extend(out.drain(..20));
        pool.device_gone();
        assert!(domain.0.lock().unwrap().is_empty());
        drop(out);
        assert_eq!(pool.close().outstanding, 0);
        let mut next = PoolOptions::new("next").build(memory, None).unwrap();
        assert_eq!(all(&mut next).len(), 50);
    }
}

/// Proves POOL-13: impossible growth is refused, with the figures in the error.
#[test]
fn errors() {
    let build = |o: RegionOptions, limit| GrowingProvider::<Private>::new(o, limit).unwrap_err();
    let error = build(sparse(64), 63);
    assert!(matches!(error, RegionError::Growth { limit: 63, step: 64 }), "{error}");
    assert!(error.to_string().contains("63 pages are the limit of growth, and it grows by 64"), "{error}");
    assert!(matches!(build(sparse(0), 0), RegionError::Pages { pages: 0 }));
    assert!(matches!(build(sparse(64).order(10), 64), RegionError::Order { order: 10 }));
}

/// Proves POOL-10 and POOL-13: pools on several threads share a provider that grows, and every page
/// has one owner at a time.
#[test]
fn growth_under_several_pools() {
    let memory = growing(16, 1000);
    let domain = Arc::new(CountingDomain::new(Strict::default()));
    thread::scope(|s| {
        for n in 0..4 {
            let (memory, domain) = (memory.clone(), domain.clone());
            s.spawn(move || {
                let options = PoolOptions::new(format!("rx{n}")).cache([0, 4, 16, 512][n]).limit(250);
                let mut pool = options.build(memory, Some(domain)).unwrap();
                for _ in 0..20 {
                    let mut out = all(&mut pool);
                    assert_eq!(out.len(), 250, "there is enough for all");
                    out.iter_mut().for_each(|p| p.copy_from(0, &[n as u8; 8]).unwrap());
                    assert!(out.iter().all(|p| p.read_at(0) == Ok([n as u8; 8])));
                }
                assert_eq!(pool.close().outstanding, 0);
            });
        }
    });
    assert_eq!((domain.maps(), memory.out_of_pages()), (domain.unmaps(), 0));
    assert!(memory.pages() <= 1000);
}
