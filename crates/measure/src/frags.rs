//! Page fragments, the way in which network drivers allocated buffers before page pools: a block of
//! pages has many buffers. This is a baseline, implemented as efficiently as the idea allows.
//!
//! ```text
//!   alloc ◄─ the next buffer of this thread's block        a subtraction; no atomic
//!             block used up ◄── this thread's free blocks ◄── 4 blocks under the lock ── buddy allocator
//!   release ► the block's count, one less                    one atomic subtraction
//!             0 ──► unmapped, this thread's free blocks (last in, first out) ── the 4 coldest, likewise ─►
//! ```
//!
//! Linux calls this a page fragment cache (`page_frag_cache`, `skb_page_frag_refill`). The thread
//! that carves a block acquires all references of the block at once. When the block is used up, the
//! thread returns the references that it did not use (`pagecnt_bias`). So an allocation does not
//! change the count. If all buffers of the block have been given back by then, the block is used
//! again. A block is mapped for the device as a whole, once for all its buffers. Each thread has a
//! cache of blocks in front of the buddy allocator, like Linux's per-CPU lists for small orders.

use crate::buddy::Buddy;
use crate::thread_cache::{Cached, ThreadCache, with_cache};
use netmem_pool::{Direction, DmaDomain, Memory, PeerShared, Provider, RawPage, Region, VhostDomain};
use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::LocalKey;

/// The order of a block.
const ORDER: usize = 4;
/// Buffers in a block: as many as buffers of 2 KiB in Linux's blocks of 32 KiB. A buffer is a page
/// here, as it is in the other rows.
const BUFFERS: u32 = 1 << ORDER;
/// References of a block that is being carved: one for each buffer, and one for the carving thread,
/// so that the count cannot become 0 while the block is carved.
const ALL: u32 = BUFFERS + 1;
/// Blocks that move between a cache and the buddy allocator at a time.
const BATCH: usize = 4;
/// Blocks that a cache holds before it returns some.
const HIGH: usize = 4 * BATCH;

type M = PeerShared;

/// An allocator of page fragments over one region. Share it as [`Arc`] of a [`Provider`] for a pool
/// without a cache and without a domain: blocks are mapped and unmapped here, and buffers are
/// posted by this process's addresses.
///
/// Cost of a buffer: a subtraction when it is taken and an atomic subtraction when it is given
/// back. Cost of a block of 16 buffers: a map and an unmap, a pop and a push of the thread's cache,
/// and every fourth time a lock. A thread's cache is given back when the thread ends.
pub struct PageFrags {
    zone: Arc<Zone>,
}

/// The state that the threads' caches share.
struct Zone {
    region: Arc<Region<M>>,
    /// The domain in which blocks are mapped.
    domain: Option<VhostDomain>,
    /// References of each block.
    counts: Box<[Count]>,
    buddy: Mutex<Buddy>,
    /// Blocks mapped and unmapped by threads that have ended.
    mapped: AtomicU64,
    unmapped: AtomicU64,
}

/// The count of a block, on a cache line of its own, like the descriptor of a block's first page.
#[repr(align(64))]
#[derive(Default)]
struct Count(AtomicU32);

impl Zone {
    fn with<R>(&self, f: impl FnOnce(&mut Buddy) -> R) -> R {
        f(&mut self.buddy.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[inline]
    fn count(&self, block: u32) -> &AtomicU32 {
        &self.counts[block as usize].0
    }

    /// Removes references of a block. Returns whether they were the last.
    #[inline]
    fn put(&self, block: u32, references: u32) -> bool {
        self.count(block).fetch_sub(references, Ordering::AcqRel) == references
    }

    #[inline]
    fn block_size(&self) -> usize {
        self.region.page_size() << ORDER
    }
}

thread_local! {
    static CACHES: RefCell<Vec<Cached<Cache>>> = const { RefCell::new(Vec::new()) };
}

/// One thread's blocks of one zone.
struct Cache {
    /// The block that is being carved, if `left` or `unused` is not 0.
    block: u32,
    /// The number of its buffers that were not taken yet.
    left: u32,
    /// The number of its references that were not used yet.
    unused: u32,
    /// Free blocks, the hottest last. They are not mapped.
    free: Vec<u32>,
    mapped: u64,
    unmapped: u64,
}

impl Cache {
    /// Allocates a buffer. Returns the number of its page.
    #[inline]
    fn take(&mut self, zone: &Zone) -> Option<u32> {
        if self.left == 0 {
            self.next_block(zone)?;
        }
        self.left -= 1;
        self.unused -= 1;
        Some(self.block * BUFFERS + self.left)
    }

    /// Starts the next block when the present one is used up. If all buffers of the present one
    /// have been given back, it is carved once more. Otherwise its last buffer frees it, and
    /// another block is taken.
    #[inline(never)]
    fn next_block(&mut self, zone: &Zone) -> Option<()> {
        let unused = std::mem::take(&mut self.unused);
        if unused == 0 || !zone.put(self.block, unused) {
            if self.free.is_empty() {
                zone.with(|buddy| self.free.extend(std::iter::from_fn(|| buddy.take(ORDER)).take(BATCH)));
                // The block that the buddy allocator gave first is used first.
                self.free.reverse();
            }
            let first = self.free.pop()?;
            if let Some(domain) = &zone.domain {
                let addr = zone.region.as_ptr().wrapping_add(first as usize * zone.region.page_size());
                // This succeeds, because the region is in the domain.
                domain.map(addr, zone.block_size(), Direction::Bidirectional).ok()?;
                self.mapped += 1;
            }
            self.block = first / BUFFERS;
        }
        // No other thread has a reference to this block.
        zone.count(self.block).store(ALL, Ordering::Relaxed);
        (self.left, self.unused) = (BUFFERS, ALL);
        Some(())
    }

    /// Returns a buffer of this block.
    #[inline]
    fn give(&mut self, zone: &Zone, block: u32) {
        if zone.put(block, 1) {
            self.free_block(zone, block);
        }
    }

    /// Frees a block: all its buffers were given back, and it is not being carved any more.
    #[inline(never)]
    fn free_block(&mut self, zone: &Zone, block: u32) {
        if let Some(domain) = &zone.domain {
            let base = domain.regions().first().map_or(0, |entry| entry.bus());
            domain.unmap(base + u64::from(block) * zone.block_size() as u64, zone.block_size());
            self.unmapped += 1;
        }
        if self.free.len() == HIGH {
            self.flush(zone, BATCH);
        }
        self.free.push(block * BUFFERS);
    }

    /// Returns the `n` coldest blocks.
    fn flush(&mut self, zone: &Zone, n: usize) {
        zone.with(|buddy| self.free.drain(..n).for_each(|first| buddy.give(first, ORDER)));
    }

    /// Ends the carving of the present block.
    fn end(&mut self, zone: &Zone) {
        self.left = 0;
        let unused = std::mem::take(&mut self.unused);
        if unused > 0 && zone.put(self.block, unused) {
            self.free_block(zone, self.block);
        }
    }
}

impl Default for Cache {
    fn default() -> Self {
        Self { block: 0, left: 0, unused: 0, free: Vec::with_capacity(HIGH), mapped: 0, unmapped: 0 }
    }
}

impl ThreadCache for Cache {
    type Zone = Zone;

    #[inline]
    fn caches() -> &'static LocalKey<RefCell<Vec<Cached<Self>>>> {
        &CACHES
    }

    fn drain(&mut self, zone: &Zone) {
        self.end(zone);
        self.flush(zone, self.free.len());
        zone.mapped.fetch_add(self.mapped, Ordering::Relaxed);
        zone.unmapped.fetch_add(self.unmapped, Ordering::Relaxed);
    }
}

impl PageFrags {
    /// An allocator for the pages of `region`. Pages at the end that do not fill a block are not
    /// used. `maps`: whether blocks are mapped for a device; for AF_XDP, the kernel maps all memory
    /// once.
    #[must_use]
    pub fn new(region: Region<M>, maps: bool) -> Arc<Self> {
        let region = Arc::new(region);
        let blocks = region.pages() / BUFFERS;
        let zone = Zone {
            domain: maps.then(|| VhostDomain::new(std::slice::from_ref(&region))),
            counts: (0..blocks).map(|_| Count::default()).collect(),
            buddy: Mutex::new(Buddy::new(blocks * BUFFERS)),
            region,
            mapped: AtomicU64::new(0),
            unmapped: AtomicU64::new(0),
        };
        Arc::new(Self { zone: Arc::new(zone) })
    }

    /// The memory.
    #[must_use]
    pub fn region(&self) -> &Arc<Region<M>> {
        &self.zone.region
    }

    /// Buffers that are in use, if no other live thread carves a block. Ends the carving of this
    /// thread's block. Reads the counts of all blocks.
    #[must_use]
    pub fn out(&self) -> u64 {
        with_cache(&self.zone, |cache: &mut Cache| cache.end(&self.zone));
        // If a block is not being carved any more, it has one reference for each buffer in use.
        self.zone.counts.iter().map(|count| u64::from(count.0.load(Ordering::Acquire))).sum()
    }

    /// Blocks that were mapped and unmapped by this thread, and by threads that have ended.
    #[must_use]
    pub fn maps(&self) -> (u64, u64) {
        let (mapped, unmapped) = with_cache(&self.zone, |c: &mut Cache| (c.mapped, c.unmapped)).unwrap_or_default();
        (mapped + self.zone.mapped.load(Ordering::Relaxed), unmapped + self.zone.unmapped.load(Ordering::Relaxed))
    }
}

// SAFETY: one thread carves a block, and hands out each buffer of it once until the block is free
// again. A block is free when all its buffers were given back. The zone keeps the region alive.
// There is one region, and the provider reports its page size.
unsafe impl Provider<M> for PageFrags {
    #[inline]
    fn alloc(&self, pages: &mut [Option<RawPage<M>>]) -> usize {
        let fill = |cache: &mut Cache| {
            let empty = pages.iter_mut().position(|place| {
                // SAFETY: the number is one of a buffer that is not in use.
                *place = cache.take(&self.zone).map(|page| unsafe { self.zone.region.claim(page) });
                place.is_none()
            });
            empty.unwrap_or(pages.len())
        };
        with_cache(&self.zone, fill).unwrap_or(0)
    }

    #[inline]
    unsafe fn release(&self, page: RawPage<M>) {
        // SAFETY: the zone keeps the region.
        let block = unsafe { page.index() } / BUFFERS;
        if with_cache(&self.zone, |cache: &mut Cache| cache.give(&self.zone, block)).is_none() {
            // The thread is ending and has no cache any more: a temporary cache is used.
            let mut cache = Cache::default();
            cache.give(&self.zone, block);
            cache.drain(&self.zone);
        }
    }

    fn page_size(&self) -> usize {
        self.region().page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<M>)) {
        f(self.region());
    }
}

impl fmt::Debug for PageFrags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageFrags<{}>({:?})", PeerShared::NAME, self.region())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_pool::{Page, PoolOptions, RegionOptions};
    use std::collections::HashSet;

    fn frags(pages: usize) -> Arc<PageFrags> {
        PageFrags::new(RegionOptions::new(pages).huge_pages(false).populate(false).build().unwrap(), true)
    }

    fn take(from: &PageFrags) -> Option<RawPage<M>> {
        let mut one = [None];
        let [page] = (from.alloc(&mut one) == 1).then_some(one)?;
        page
    }

    fn give(to: &PageFrags, page: RawPage<M>) {
        // SAFETY: the buffer came out of `alloc`.
        unsafe { to.release(page) };
    }

    #[test]
    fn no_buffer_is_handed_out_twice_and_all_come_back() {
        // The last 3 pages do not fill a block.
        let a = frags(64 * 16 + 3);
        for _ in 0..3 {
            let pages: Vec<_> = std::iter::from_fn(|| take(&a)).collect();
            // SAFETY: the allocator is alive.
            let numbers: HashSet<u32> = pages.iter().map(|p| unsafe { p.index() }).collect();
            assert_eq!((pages.len(), numbers.len(), a.out()), (1024, 1024, 1024));
            pages.into_iter().for_each(|page| give(&a, page));
            assert_eq!(a.out(), 0);
        }
        assert_eq!(a.maps(), (3 * 64, 3 * 64));
    }

    #[test]
    fn a_block_is_free_when_its_last_buffer_is_back() {
        let a = frags(64);
        let mut pages: Vec<_> = (0..17).map(|_| take(&a).unwrap()).collect();
        let second = pages.pop().unwrap();
        let last = pages.remove(5);
        pages.into_iter().for_each(|page| give(&a, page));
        assert_eq!((a.out(), a.maps()), (2, (2, 0)));
        give(&a, last);
        assert_eq!((a.out(), a.maps()), (1, (2, 1)));
        give(&a, second);
        assert_eq!((a.out(), a.maps()), (0, (2, 2)));
    }

    #[test]
    fn a_block_whose_buffers_are_all_back_is_carved_again() {
        let a = frags(64);
        for _ in 0..100 {
            give(&a, take(&a).unwrap());
        }
        assert_eq!(a.maps(), (1, 0));
        assert_eq!((a.out(), a.maps()), (0, (1, 1)));
    }

    /// The same through a pool; another thread drops half of the buffers.
    #[test]
    fn a_pool_of_fragments_balances() {
        const ROUNDS: u64 = if cfg!(miri) { 10 } else { 2000 };
        let a = frags(1024);
        let mut pool = PoolOptions::new("frags").cache(0).build(a.clone(), None).unwrap();
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
        assert_eq!(pool.close().outstanding, 0);
        assert_eq!(a.out(), 0);
        let (mapped, unmapped) = a.maps();
        assert!(mapped == unmapped && mapped <= 2 * ROUNDS.div_ceil(16), "{mapped} {unmapped}");
    }

    #[test]
    fn threads_share_an_allocator() {
        let a = frags(4096);
        let threads: Vec<_> = (0..4)
            .map(|t| {
                let a = a.clone();
                std::thread::spawn(move || {
                    let mut held = Vec::new();
                    for round in 0..20_000usize {
                        if (round * 7 + t) % 13 < 7 && held.len() < 600 {
                            held.extend(take(&a));
                        } else if !held.is_empty() {
                            give(&a, held.swap_remove(round % held.len()));
                        }
                    }
                    held
                })
            })
            .collect();
        let held: Vec<_> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
        // SAFETY: the allocator is alive.
        let numbers: HashSet<u32> = held.iter().map(|p| unsafe { p.index() }).collect();
        assert_eq!((numbers.len(), a.out()), (held.len(), held.len() as u64));
        held.into_iter().for_each(|page| give(&a, page));
        assert_eq!(a.out(), 0);
        let (mapped, unmapped) = a.maps();
        assert_eq!(mapped, unmapped);
    }
}
