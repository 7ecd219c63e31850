//! A page per packet: a buddy allocator with a cache for each thread in front of it. This is a
//! baseline, implemented as efficiently as the idea allows.
//!
//! ```text
//!   alloc ◄─ this thread's cache ◄── 63 pages under the lock ── buddy allocator
//!   release ► (last in, first out) ── the 63 coldest, likewise ─►
//! ```
//!
//! Linux does the same for a driver that asks for single pages: it has per-CPU lists in front of a
//! zone's free areas, with batches of the same size. As in Linux, the fast path shares nothing.

use crate::buddy::Buddy;
use crate::thread_cache::{Cached, ThreadCache, with_cache};
use netmem_pool::{Memory, PeerShared, Provider, RawPage, Region, RegionProvider};
use std::cell::RefCell;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::LocalKey;

/// Pages that move between a cache and the buddy allocator at a time: Linux's batch for a larger
/// machine.
const BATCH: usize = 63;
/// Pages that a cache holds before it returns some.
const HIGH: usize = 4 * BATCH;

type M = PeerShared;

/// A general-purpose allocator of single pages over one region. Share it as [`Arc`] of a
/// [`Provider`].
///
/// Cost: a few nanoseconds while the thread's cache has pages. Otherwise, once in 63 operations, a
/// lock and at most 63 splits or merges of blocks. A thread's cache is given back when the thread
/// ends.
pub struct PageAllocator {
    zone: Arc<Zone>,
}

/// The state that the threads' caches share.
struct Zone {
    /// Keeps the region, and with it every page.
    source: Arc<RegionProvider<M>>,
    shared: Mutex<Shared>,
}

struct Shared {
    buddy: Buddy,
    /// The free pages, by number.
    pages: Box<[Option<RawPage<M>>]>,
}

impl Shared {
    fn take(&mut self) -> Option<RawPage<M>> {
        let page = self.buddy.take(0)?;
        self.pages[page as usize].take()
    }

    /// # Safety
    ///
    /// The page is one of the zone's, which is alive.
    unsafe fn give(&mut self, page: RawPage<M>) {
        // SAFETY: the zone keeps the page's provider.
        let index = unsafe { page.index() };
        self.pages[index as usize] = Some(page);
        self.buddy.give(index, 0);
    }
}

impl Zone {
    fn with<R>(&self, f: impl FnOnce(&mut Shared) -> R) -> R {
        f(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

thread_local! {
    static CACHES: RefCell<Vec<Cached<Cache>>> = const { RefCell::new(Vec::new()) };
}

/// One thread's pages of one zone.
struct Cache {
    /// The page that was used last is at the end.
    pages: Vec<RawPage<M>>,
}

impl Cache {
    #[inline]
    fn take(&mut self, zone: &Zone) -> Option<RawPage<M>> {
        self.pages.pop().or_else(|| self.refill(zone))
    }

    #[inline(never)]
    fn refill(&mut self, zone: &Zone) -> Option<RawPage<M>> {
        zone.with(|shared| self.pages.extend(std::iter::from_fn(|| shared.take()).take(BATCH)));
        // The page that the buddy allocator gave first is used first.
        self.pages.reverse();
        self.pages.pop()
    }

    /// # Safety
    ///
    /// The page is one of the zone's.
    #[inline]
    unsafe fn give(&mut self, zone: &Zone, page: RawPage<M>) {
        if self.pages.len() == HIGH {
            self.flush(zone, BATCH);
        }
        self.pages.push(page);
    }

    /// Returns the `n` coldest pages.
    #[inline(never)]
    fn flush(&mut self, zone: &Zone, n: usize) {
        zone.with(|shared| {
            for page in self.pages.drain(..n) {
                // SAFETY: a cache holds pages of its zone only.
                unsafe { shared.give(page) };
            }
        });
    }
}

impl Default for Cache {
    fn default() -> Self {
        Self { pages: Vec::with_capacity(HIGH) }
    }
}

impl ThreadCache for Cache {
    type Zone = Zone;

    #[inline]
    fn caches() -> &'static LocalKey<RefCell<Vec<Cached<Self>>>> {
        &CACHES
    }

    fn drain(&mut self, zone: &Zone) {
        self.flush(zone, self.pages.len());
    }
}

/// Fills `places` from the front, until there are no more pages. Returns how many were filled.
#[inline]
fn fill(places: &mut [Option<RawPage<M>>], mut take: impl FnMut() -> Option<RawPage<M>>) -> usize {
    let empty = places.iter_mut().position(|place| {
        *place = take();
        place.is_none()
    });
    empty.unwrap_or(places.len())
}

impl PageAllocator {
    /// An allocator for the pages of `region`.
    #[must_use]
    pub fn new(region: Region<M>) -> Arc<Self> {
        let source = RegionProvider::new(region);
        let count = source.region().pages();
        let mut pages: Box<[_]> = (0..count).map(|_| None).collect();
        let taken = source.alloc(&mut pages);
        debug_assert_eq!(taken, count as usize, "the new provider has all of its pages");
        // SAFETY: `source` is alive.
        pages.sort_unstable_by_key(|page| page.as_ref().map(|page| unsafe { page.index() }));
        let shared = Mutex::new(Shared { buddy: Buddy::new(count), pages });
        Arc::new(Self { zone: Arc::new(Zone { source, shared }) })
    }

    /// The memory.
    #[must_use]
    pub fn region(&self) -> &Arc<Region<M>> {
        self.zone.source.region()
    }

    /// Pages in the allocator: those that are neither in use nor in the cache of another live
    /// thread. Acquires the lock.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        let cached = with_cache(&self.zone, |c: &mut Cache| c.pages.len()).unwrap_or(0);
        cached + self.zone.with(|shared| shared.buddy.free())
    }
}

// SAFETY: the buddy allocator hands out each number once until it is returned, and a raw page moves
// together with its number. A cache is used by one thread. The zone keeps the region alive. There
// is one region, and the provider reports its page size.
unsafe impl Provider<M> for PageAllocator {
    #[inline]
    fn alloc(&self, pages: &mut [Option<RawPage<M>>]) -> usize {
        with_cache(&self.zone, |cache: &mut Cache| fill(pages, || cache.take(&self.zone)))
            .unwrap_or_else(|| self.zone.with(|shared| fill(pages, || shared.take())))
    }

    #[inline]
    unsafe fn release(&self, page: RawPage<M>) {
        let mut page = Some(page);
        // SAFETY: the page came out of `alloc`, so it is one of the zone's.
        let cached =
            with_cache(&self.zone, |cache: &mut Cache| page.take().map(|page| unsafe { cache.give(&self.zone, page) }));
        if let (None, Some(page)) = (cached, page) {
            // SAFETY: as above.
            self.zone.with(|shared| unsafe { shared.give(page) });
        }
    }

    fn page_size(&self) -> usize {
        self.region().page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<M>)) {
        f(self.region());
    }
}

impl fmt::Debug for PageAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageAllocator<{}>({:?})", M::NAME, self.region())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_pool::{CountingDomain, Page, PoolOptions, RegionOptions, VhostDomain};
    use std::collections::HashSet;

    fn allocator(pages: usize) -> Arc<PageAllocator> {
        PageAllocator::new(RegionOptions::new(pages).huge_pages(false).populate(false).build().unwrap())
    }

    fn take(from: &PageAllocator) -> Option<RawPage<M>> {
        let mut one = [None];
        let [page] = (from.alloc(&mut one) == 1).then_some(one)?;
        page
    }

    #[test]
    fn no_page_is_handed_out_twice_and_all_come_back() {
        let a = allocator(1500);
        let pages: Vec<_> = std::iter::from_fn(|| take(&a)).collect();
        // SAFETY: the allocator is alive.
        let numbers: HashSet<u32> = pages.iter().map(|p| unsafe { p.index() }).collect();
        assert_eq!((pages.len(), numbers.len(), a.free_pages()), (1500, 1500, 0));
        for page in pages {
            // SAFETY: it came out of `alloc`.
            unsafe { a.release(page) };
        }
        assert_eq!(a.free_pages(), 1500);
        assert_eq!(std::iter::from_fn(|| take(&a)).count(), 1500);
    }

    #[test]
    fn a_thread_that_ends_strands_nothing() {
        let a = allocator(512);
        let there = a.clone();
        let held = std::thread::spawn(move || {
            let pages: Vec<_> = (0..100).filter_map(|_| take(&there)).collect();
            let mut pages = pages.into_iter();
            let held = pages.next();
            for page in pages {
                // SAFETY: it came out of `alloc`.
                unsafe { there.release(page) };
            }
            held
        });
        let held = held.join().unwrap().unwrap();
        assert_eq!(a.free_pages(), 511);
        // SAFETY: it came out of `alloc`.
        unsafe { a.release(held) };
        assert_eq!(a.free_pages(), 512);
    }

    #[test]
    fn a_cache_outlives_its_allocator() {
        let (a, b) = (allocator(64), allocator(64));
        for it in [&a, &b, &a] {
            let page = take(it).unwrap();
            // SAFETY: it came out of `alloc`.
            unsafe { it.release(page) };
            assert_eq!(it.free_pages(), 64);
        }
        drop(a);
        assert!(take(&b).is_some());
    }

    /// A page per packet through a pool: the numbers of maps, unmaps and allocations are equal,
    /// also if other threads drop the pages.
    #[test]
    fn a_pool_without_cache_maps_and_unmaps_every_page() {
        const ROUNDS: u64 = if cfg!(miri) { 10 } else { 2000 };
        let a = allocator(1024);
        let domain = Arc::new(CountingDomain::new(VhostDomain::new(&[a.region().clone()])));
        let mut pool = PoolOptions::new("page").cache(0).build(a.clone(), Some(domain.clone())).unwrap();
        let (send, receive) = std::sync::mpsc::sync_channel::<Page<M>>(64);
        let elsewhere = std::thread::spawn(move || receive.into_iter().count() as u64);
        for _ in 0..ROUNDS {
            pool.poll(|napi| {
                let (here, there) = (napi.alloc().unwrap(), napi.alloc().unwrap());
                assert_ne!(here.index(), there.index());
                send.send(there).unwrap();
            });
        }
        drop(send);
        assert_eq!(elsewhere.join().unwrap(), ROUNDS);
        let stats = pool.stats();
        assert_eq!((stats.allocated(), stats.returned(), stats.inflight()), (2 * ROUNDS, 2 * ROUNDS, 0));
        assert_eq!((domain.maps(), domain.unmaps()), (2 * ROUNDS, 2 * ROUNDS));
        assert_eq!(pool.close().outstanding, 0);
        assert_eq!(a.free_pages(), 1024);
    }

    #[test]
    fn threads_share_an_allocator() {
        let a = allocator(4096);
        let threads: Vec<_> = (0..4)
            .map(|t| {
                let a = a.clone();
                std::thread::spawn(move || {
                    let mut held = Vec::new();
                    for round in 0..20_000usize {
                        if (round * 7 + t) % 13 < 7 && held.len() < 600 {
                            held.extend(take(&a));
                        } else if let Some(page) = held.pop() {
                            // SAFETY: it came out of `alloc`.
                            unsafe { a.release(page) };
                        }
                    }
                    held
                })
            })
            .collect();
        let held: Vec<_> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
        // SAFETY: the allocator is alive.
        let numbers: HashSet<u32> = held.iter().map(|p| unsafe { p.index() }).collect();
        assert_eq!(numbers.len(), held.len());
        assert_eq!(a.free_pages(), 4096 - held.len());
        for page in held {
            // SAFETY: it came out of `alloc`.
            unsafe { a.release(page) };
        }
        assert_eq!(a.free_pages(), 4096);
    }
}
