//! Panics in code that the user provided, while the pool has pages in hand. No page is lost, no
//! thread hangs, and no page that a device may still write is handed out.

use crate::common::{Flat, provider};
use netmem_pool::{
    Bulk, CountingDomain, Direction, DmaDomain, MapError, Page, PagePool, PoolOptions, Private, Provider, RawPage,
    Region, RegionProvider,
};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

/// Panics in calls of one kind: in the next call, in every call, or in those after some calls.
#[derive(Debug, Default)]
struct Fuse {
    /// Calls that still succeed. If negative, all calls do.
    good: AtomicI64,
    lit: AtomicBool,
    blown: AtomicU64,
}

impl Fuse {
    /// From now on every call panics, after `good` calls that do not.
    fn light(&self, good: i64) {
        self.good.store(good, Ordering::Relaxed);
        self.lit.store(true, Ordering::Relaxed);
    }

    fn put_out(&self) {
        self.lit.store(false, Ordering::Relaxed);
    }

    fn burn(&self) {
        if self.lit.load(Ordering::Relaxed) && self.good.fetch_sub(1, Ordering::Relaxed) <= 0 {
            self.blown.fetch_add(1, Ordering::Relaxed);
            // `resume_unwind` does not run the panic hook, so these expected panics print nothing.
            resume_unwind(Box::new("as the test wants it"));
        }
    }

    fn blown(&self) -> u64 {
        self.blown.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
struct Fuses {
    take: Fuse,
    give: Fuse,
    each: Fuse,
    map: Fuse,
    unmap: Fuse,
}

/// A provider that panics after it has done half of its work, and a domain that panics after it has
/// done all of its work.
#[derive(Debug)]
struct Brittle(Arc<RegionProvider<Private>>, Arc<Fuses>);

// SAFETY: all pages and regions are those of the provider within.
unsafe impl Provider<Private> for Brittle {
    fn alloc(&self, pages: &mut [Option<RawPage<Private>>]) -> usize {
        let half = pages.len().div_ceil(2);
        let n = self.0.alloc(&mut pages[..half]);
        self.1.take.burn();
        n + self.0.alloc(&mut pages[half..])
    }

    unsafe fn release(&self, page: RawPage<Private>) {
        // SAFETY: it came from there.
        unsafe { self.0.release(page) };
        self.1.give.burn();
    }

    fn page_size(&self) -> usize {
        self.0.page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<Private>)) {
        self.1.each.burn();
        self.0.each(f);
    }
}

#[derive(Debug)]
struct BrittleDomain(Flat, Arc<Fuses>);

impl DmaDomain for BrittleDomain {
    fn map(&self, addr: *mut u8, len: usize, direction: Direction) -> Result<u64, MapError> {
        self.1.map.burn();
        self.0.map(addr, len, direction)
    }

    fn unmap(&self, dma: u64, len: usize) {
        self.0.unmap(dma, len);
        self.1.unmap.burn();
    }
}

struct Setup {
    memory: Arc<RegionProvider<Private>>,
    fuses: Arc<Fuses>,
    domain: Arc<CountingDomain<BrittleDomain>>,
    /// Fails to upgrade once the last pool has been freed.
    alive: Weak<Brittle>,
    pages: usize,
}

fn setup(options: PoolOptions, pages: usize) -> (PagePool<Private>, Setup) {
    let (memory, fuses) = (provider(pages), Arc::new(Fuses::default()));
    let domain = Arc::new(CountingDomain::new(BrittleDomain(Flat::default(), fuses.clone())));
    let brittle = Arc::new(Brittle(memory.clone(), fuses.clone()));
    let alive = Arc::downgrade(&brittle);
    let pool = options.build(brittle, Some(domain.clone())).unwrap();
    (pool, Setup { memory, fuses, domain, alive, pages })
}

impl Setup {
    /// Checks that every page is with the provider exactly once and unmapped, and that no pool is
    /// left.
    #[track_caller]
    fn check(self) {
        assert!(self.alive.upgrade().is_none(), "the pool is still there");
        assert_eq!(self.domain.maps(), self.domain.unmaps());
        let all: Vec<_> = std::iter::from_fn(|| self.memory.page()).collect();
        assert_eq!(all.len(), self.pages, "pages were lost");
        let mut numbers: Vec<_> = all.iter().map(Page::index).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), self.pages);
    }
}

fn panics(f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}

fn alloc(pool: &mut PagePool<Private>, n: usize) -> Vec<Page<Private>> {
    (0..n).map(|_| pool.alloc().unwrap()).collect()
}

/// Drops pages one by one, and catches panics.
fn drop_all(pages: Vec<Page<Private>>) -> u64 {
    pages.into_iter().map(|page| u64::from(panics(|| drop(page)))).sum()
}

/// Proves POOL-11: if a domain panics in `unmap`, or a provider in `release`, for a page that is
/// dropped on another thread, neither the page nor the pool is lost.
#[test]
fn over_a_page_that_is_dropped_elsewhere() {
    for close_first in [false, true] {
        for cache in [0, 16] {
            if cache == 16 && !close_first {
                continue;
            }
            for give in [false, true] {
                let (mut pool, s) = setup(PoolOptions::new("elsewhere").cache(cache), 8);
                let pages = alloc(&mut pool, 8);
                let mut pool = Some(pool);
                if close_first {
                    drop(pool.take());
                }
                if give { &s.fuses.give } else { &s.fuses.unmap }.light(0);
                assert_eq!(thread::spawn(|| drop_all(pages)).join().unwrap(), 8);
                s.fuses.give.put_out();
                s.fuses.unmap.put_out();
                if let Some(mut pool) = pool.take() {
                    let stats = pool.stats();
                    assert_eq!((stats.released, stats.inflight(), stats.unmapped), (8, 0, 8));
                }
                s.check();
            }
        }
    }
}

/// Proves POOL-1: removing a device after an `unmap` that panicked waits for no thread, and unmaps
/// the remaining pages.
#[test]
fn before_the_device_goes() {
    let (mut pool, s) = setup(PoolOptions::new("device").cache(0), 8);
    let mut pages = alloc(&mut pool, 8);
    s.fuses.unmap.light(0);
    let three = pages.split_off(5);
    assert_eq!(drop_all(three), 3);
    s.fuses.unmap.put_out();
    pool.device_gone();
    assert_eq!(s.domain.maps(), s.domain.unmaps());
    drop(pages);
    drop(pool);
    s.check();
}

/// Proves POOL-1: if a panic happens for one page when a device is removed, the other pages are
/// unmapped all the same. If the provider could not name its regions, `device_gone` can be called
/// again.
#[test]
fn while_the_device_goes() {
    for cache in [0, 16] {
        let (mut pool, s) = setup(PoolOptions::new("device").cache(cache).prefill(8), 8);
        let mut pages = alloc(&mut pool, 8);
        pages.truncate(5);
        s.fuses.each.light(0);
        assert!(panics(|| pool.device_gone()));
        assert!(pool.alloc().is_none());
        s.fuses.each.put_out();
        s.fuses.unmap.light(0);
        s.fuses.give.light(0);
        assert!(panics(|| pool.device_gone()));
        assert_eq!(s.domain.maps(), s.domain.unmaps());
        s.fuses.give.put_out();
        pool.device_gone();
        drop(pages);
        let closed = pool.close();
        assert_eq!((closed.stats.mapped, closed.outstanding), (closed.stats.unmapped, 0));
        s.check();
    }
}

/// Proves POOL-11: if pages are returned to the provider together, all of them arrive there,
/// whichever of them panics: at the end of a pool, when the pool shrinks, and in a bulk.
#[test]
fn in_the_middle_of_a_batch() {
    for give in [false, true] {
        for good in [0, 3] {
            for step in 0..4 {
                let cache = if step == 3 { 0 } else { 16 };
                let (mut pool, s) = setup(PoolOptions::new("batch").cache(cache).magazine(4), 12);
                let mut pages = alloc(&mut pool, 12);
                let rest = pages.split_off(6);
                // Pages wait in every place: in magazines, in a full magazine, and in the cache.
                if step < 3 {
                    thread::spawn(|| drop(rest)).join().unwrap();
                    pool.poll(|_| drop(pages));
                    if give { &s.fuses.give } else { &s.fuses.unmap }.light(good);
                    match step {
                        0 => assert!(panics(|| {
                            let _ = pool.close();
                        })),
                        1 => {
                            assert!(panics(|| {
                                pool.shrink(0);
                            }));
                            drop_quietly(pool);
                        }
                        // A thread that already unwinds keeps its first panic.
                        _ => assert!(panics(move || {
                            let _pool = pool;
                            resume_unwind(Box::new("another panic"));
                        })),
                    }
                } else {
                    let mut bulk = Bulk::new();
                    pages.into_iter().chain(rest).for_each(|page| bulk.add(page));
                    if give { &s.fuses.give } else { &s.fuses.unmap }.light(good);
                    assert!(panics(|| bulk.flush()));
                    drop((bulk, pool));
                }
                assert!(s.fuses.give.blown() + s.fuses.unmap.blown() > 0);
                s.check();
            }
        }
    }
}

fn drop_quietly(pool: PagePool<Private>) {
    panics(|| drop(pool));
}

/// Proves POOL-11: if a provider panics in `take`, it gets back the pages that it had handed out.
/// If a domain panics in `map`, it keeps no page.
#[test]
fn while_the_pool_fills() {
    for map in [false, true] {
        for good in [0, 3] {
            let (mut pool, s) = setup(PoolOptions::new("fill").cache(16), 16);
            if map { &s.fuses.map } else { &s.fuses.take }.light(if map { good } else { 0 });
            assert!(panics(|| drop(pool.alloc())));
            assert_eq!((s.fuses.map.blown(), s.fuses.take.blown()), (u64::from(map), u64::from(!map)));
            // The pages that were mapped before the panic belong to the pool, which has them at
            // hand.
            let kept = if map { good as usize } else { 0 };
            let stats = pool.stats();
            assert_eq!((pool.held(), stats.inflight(), stats.allocated()), (kept, 0, 0));
            s.fuses.map.put_out();
            s.fuses.take.put_out();
            assert_eq!(std::iter::from_fn(|| pool.alloc().map(std::mem::forget)).count(), 16);
            let stats = pool.stats();
            assert_eq!((stats.mapped, stats.inflight()), (16, 16));
        }
    }
    let (pool, s) = setup(PoolOptions::new("fill").cache(16), 16);
    drop(pool);
    s.fuses.take.light(0);
    let (provider, domain) = (Arc::new(Brittle(s.memory.clone(), s.fuses.clone())), s.domain.clone());
    assert!(panics(|| drop(PoolOptions::new("prefill").cache(16).prefill(8).build(provider, Some(domain)))));
    s.check();
}

/// Proves POOL-11: a panic of a thread drops a page, and the page's domain panics in turn. This
/// does not end the process.
#[test]
fn while_unwinding() {
    let (mut pool, s) = setup(PoolOptions::new("unwinding").cache(0), 4);
    let page = pool.alloc().unwrap();
    s.fuses.unmap.light(0);
    s.fuses.give.light(0);
    assert!(panics(move || {
        let _page = page;
        resume_unwind(Box::new("the first panic"));
    }));
    assert_eq!((s.fuses.unmap.blown(), s.fuses.give.blown()), (1, 1));
    drop(pool);
    s.check();
}

/// Proves NET-6: a quarantined page is not returned if the domain panics for it, because its device
/// may still write to it.
#[test]
fn over_a_page_in_quarantine() {
    let (mut pool, s) = setup(PoolOptions::new("quarantine").cache(16), 4);
    let page = pool.alloc().unwrap();
    let index = page.index();
    s.fuses.unmap.light(0);
    assert!(panics(|| pool.quarantine(page)));
    s.fuses.unmap.put_out();
    let stats = pool.stats();
    assert_eq!((stats.quarantined, stats.inflight()), (1, 0));
    let others: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
    assert_eq!(others.len(), 3);
    assert!(others.iter().all(|page| page.index() != index), "a page was handed out that the device may write");
}

/// A domain. Its `unmap` returns when the thread that removes the device sleeps.
#[derive(Debug)]
struct Patient {
    /// The thread that removes the device, or 0.
    owner: AtomicI64,
    entered: AtomicBool,
    slept: AtomicBool,
}

impl DmaDomain for Patient {
    fn map(&self, addr: *mut u8, _len: usize, _: Direction) -> Result<u64, MapError> {
        Ok(addr.addr() as u64)
    }

    fn unmap(&self, _dma: u64, _len: usize) {
        self.entered.store(true, Ordering::Release);
        // The owner may get here at any time. It fails to sleep if it takes a second of CPU time
        // instead.
        let mut first = None;
        loop {
            thread::sleep(std::time::Duration::from_millis(1));
            let id = self.owner.load(Ordering::Acquire);
            let Ok(stat) = std::fs::read_to_string(format!("/proc/self/task/{id}/stat")) else { continue };
            // The name, which may contain spaces, ends with `)`. The state comes next. The times in
            // user and kernel mode are 11 and 12 fields later, in hundredths of a second.
            let fields: Vec<_> = stat.rsplit(") ").next().unwrap_or_default().split_whitespace().collect();
            if fields[0] == "S" {
                return self.slept.store(true, Ordering::Release);
            }
            let time: u64 = fields[11..=12].iter().map(|time| time.parse::<u64>().unwrap()).sum();
            if time - *first.get_or_insert(time) >= 100 {
                return;
            }
        }
    }
}

/// Proves POOL-1: a thread removes a device while another thread is unmapping a page. The first
/// thread sleeps until that is done, and takes no CPU time from the other.
#[test]
fn a_device_that_goes_sleeps() {
    let domain =
        Arc::new(Patient { owner: AtomicI64::new(0), entered: AtomicBool::new(false), slept: AtomicBool::new(false) });
    let mut pool = PoolOptions::new("patient").cache(0).build(provider::<Private>(1), Some(domain.clone())).unwrap();
    let page = pool.alloc().unwrap();
    thread::scope(|s| {
        s.spawn(|| drop(page));
        while !domain.entered.load(Ordering::Acquire) {
            thread::yield_now();
        }
        // SAFETY: the call has no arguments.
        domain.owner.store(unsafe { libc::syscall(libc::SYS_gettid) }, Ordering::Release);
        pool.device_gone();
        assert!(domain.slept.load(Ordering::Acquire), "device_gone did not sleep");
    });
}
