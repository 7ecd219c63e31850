//! Pages dropped at the least convenient place: inside a call of the pool to its provider or
//! domain.

use crate::common::{close_balanced, provider, remote_frees};
use netmem_pool::{
    CountingDomain, Direction, DmaDomain, MapError, Page, PagePool, PoolOptions, Private, Provider, RawPage, Region,
    RegionProvider,
};
use std::sync::{Arc, Mutex};

/// Pages to be dropped, one at each call.
#[derive(Debug, Default)]
struct Stash(Mutex<Vec<Page<Private>>>);

impl Stash {
    fn drop_one(&self) {
        // The lock is released first, because the drop may call this function again.
        let page = self.0.lock().unwrap().pop();
        drop(page);
    }

    fn add(&self, page: Page<Private>) {
        self.0.lock().unwrap().push(page);
    }

    fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

#[derive(Debug)]
struct Meddler(Arc<RegionProvider<Private>>, Arc<Stash>);

// SAFETY: all pages and regions are those of the provider within.
unsafe impl Provider<Private> for Meddler {
    fn alloc(&self, pages: &mut [Option<RawPage<Private>>]) -> usize {
        self.1.drop_one();
        let n = self.0.alloc(pages);
        self.1.drop_one();
        n
    }

    unsafe fn release(&self, page: RawPage<Private>) {
        self.1.drop_one();
        // SAFETY: it came from there.
        unsafe { self.0.release(page) };
        self.1.drop_one();
    }

    fn page_size(&self) -> usize {
        self.0.page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<Private>)) {
        self.0.each(f);
    }
}

#[derive(Debug)]
struct MeddlingDomain(crate::common::Flat, Arc<Stash>);

impl DmaDomain for MeddlingDomain {
    fn map(&self, addr: *mut u8, len: usize, direction: Direction) -> Result<u64, MapError> {
        self.1.drop_one();
        self.0.map(addr, len, direction)
    }

    fn unmap(&self, dma: u64, len: usize) {
        self.1.drop_one();
        self.0.unmap(dma, len);
    }
}

struct Setup {
    pool: PagePool<Private>,
    stash: Arc<Stash>,
    domain: Arc<CountingDomain<MeddlingDomain>>,
}

fn meddled(cache: usize, pages: usize) -> Setup {
    let stash = Arc::new(Stash::default());
    let domain = Arc::new(CountingDomain::new(MeddlingDomain(crate::common::Flat::default(), stash.clone())));
    let provider = Arc::new(Meddler(provider(pages), stash.clone()));
    let pool = PoolOptions::new("meddled").cache(cache).build(provider, Some(domain.clone())).unwrap();
    Setup { pool, stash, domain }
}

/// Proves POOL-5: pages of the pool that are dropped inside `alloc`, `release`, `map` and `unmap`
/// are returned, in the poll context and outside of it. No page is lost or handed out twice.
#[test]
fn drops_inside_of_callbacks() {
    for cache in [0, 1, 2, 8, 512] {
        let Setup { mut pool, stash, domain } = meddled(cache, 64);
        for round in 0..50 {
            pool.poll(|napi| {
                let mut mine = Vec::new();
                for _ in 0..64 {
                    let Some(mut page) = napi.alloc() else { break };
                    page.as_mut_slice()[0] = 1;
                    if page.index() % 3 == round % 3 { stash.add(page) } else { mine.push(page) }
                }
                let mut seen: Vec<_> = mine.iter().map(Page::index).collect();
                seen.sort_unstable();
                assert!(seen.windows(2).all(|w| w[0] != w[1]), "handed out twice");
            });
            if round % 7 == 0 {
                pool.alloc().into_iter().for_each(|page| stash.add(page));
            }
        }
        let stats = pool.stats();
        assert_eq!(stats.inflight() as usize, stash.len(), "cache {cache}: {stats:?}");
        let closed = pool.close();
        assert_eq!(closed.outstanding as usize, stash.len(), "what was not dropped on the way");
        while stash.len() > 0 {
            stash.drop_one();
        }
        assert_eq!(domain.maps(), domain.unmaps(), "cache {cache}");
    }
}

/// Proves POOL-1: the same while the device is removed, and while a pool is dropped.
#[test]
fn drops_inside_of_the_end() {
    for device_first in [false, true] {
        for cache in [0, 4, 64] {
            let Setup { mut pool, stash, domain } = meddled(cache, 64);
            let mut pages: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
            assert_eq!(pages.len(), 64);
            stash.0.lock().unwrap().extend(pages.drain(..40));
            pool.poll(|_| pages.truncate(8));
            if device_first {
                pool.device_gone();
                assert_eq!(domain.maps(), domain.unmaps());
            }
            drop(pages);
            drop(pool);
            while stash.len() > 0 {
                stash.drop_one();
            }
            assert_eq!(domain.maps(), domain.unmaps());
        }
    }
}

/// Proves POOL-3: a page of another pool that is dropped inside a callback of this pool returns to
/// its own pool.
#[test]
fn another_pools_page_inside_of_a_callback() {
    let Setup { mut pool, stash, .. } = meddled(4, 64);
    let (mut other, domain) = crate::common::pool(PoolOptions::new("other"), 4);
    stash.add(other.alloc().unwrap());
    stash.add(other.alloc().unwrap());
    other.poll(|_| drop(pool.alloc()));
    let stats = close_balanced(other, &domain);
    assert_eq!((stats.recycle_cached, remote_frees(stats)), (2, 0));
}
