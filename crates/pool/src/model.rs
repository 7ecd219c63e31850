//! Loom models of a page's return path and of a pool's end. They run the product code: pools are
//! made by [`PoolOptions`] on a [`RegionProvider`], and pages are dropped as users drop them.
//! `MODELS.md` lists what each model proves, and how to see it fail.
//!
//! Only two things are different in a model. A pool that is freed keeps its memory until the end of
//! the execution ([`bury`]), so that a later access is reported and does not crash. Each access to
//! a pool reads a cell that freeing writes, so that loom sees the race.

use crate::{
    Direction, DmaDomain, MapError, PAGE_SIZE, Page, PagePool, PoolOptions, Private, Provider, Region, RegionProvider,
};
use loom::cell::UnsafeCell;
use loom::thread::{self, JoinHandle};
use netmem_percpu::run_on;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

mod shared_pool;

/// The most preemptions in one execution: the models are exhaustive up to that.
/// `LOOM_MAX_PREEMPTIONS` sets another bound.
const PREEMPTIONS: usize = 2;
/// Pages in a model's region.
const PAGES: usize = 3;

thread_local! {
    /// Pools that were freed in this execution. Loom runs all threads of a model on one.
    static FREED: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
    /// Whether the execution starts with the owner; see [`model`].
    static OWNER_FIRST: Cell<bool> = const { Cell::new(true) };
}

/// Keeps a pool that was freed until the end of the execution.
pub(crate) fn bury(pool: Box<dyn Any>) {
    FREED.with_borrow_mut(|freed| freed.push(pool));
}

/// Memory of the models' own, aligned as pages are.
#[repr(align(4096))]
struct Bytes([u8; PAGES * PAGE_SIZE]);

/// A domain that checks its calls: a page is not mapped twice, and each mapping is unmapped once.
/// Loom checks that the calls for a page are ordered.
struct Strict {
    base: usize,
    /// Whether it panics whenever it has unmapped a page.
    panics: AtomicBool,
    /// How often each page was mapped, and whether it is now.
    pages: [UnsafeCell<(u64, bool)>; PAGES],
}

// SAFETY: loom checks every access to the cells.
unsafe impl Sync for Strict {}
// SAFETY: as above.
unsafe impl Send for Strict {}

impl fmt::Debug for Strict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Strict")
    }
}

impl DmaDomain for Strict {
    fn map(&self, addr: *mut u8, _len: usize, _: Direction) -> Result<u64, MapError> {
        let page = (addr.addr() - self.base) / PAGE_SIZE;
        self.pages[page].with_mut(|state| {
            // SAFETY: loom checks that no other thread is here.
            let (maps, mapped) = unsafe { &mut *state };
            assert!(!*mapped, "mapped while it was mapped");
            (*maps, *mapped) = (*maps + 1, true);
            Ok(*maps << 32 | page as u64)
        })
    }

    fn unmap(&self, dma: u64, _len: usize) {
        self.pages[dma as u32 as usize].with_mut(|state| {
            // SAFETY: as above.
            let (maps, mapped) = unsafe { &mut *state };
            assert!(*mapped && *maps == dma >> 32, "unmapped what is not mapped");
            *mapped = false;
        });
        if self.panics.load(Ordering::Relaxed) {
            // This does not run the panic hook, so the expected panic prints nothing.
            resume_unwind(Box::new("as the model wants it"));
        }
    }
}

impl Strict {
    fn mapped(&self) -> usize {
        // SAFETY: loom checks that no other thread writes.
        self.pages.iter().filter(|page| page.with(|state| unsafe { (*state).1 })).count()
    }
}

/// The values of which a model makes its pools, and the contents of the pages.
struct Machine {
    memory: Arc<RegionProvider<Private>>,
    domain: Arc<Strict>,
    /// What the users of each page write, without any atomics.
    contents: [UnsafeCell<u32>; PAGES],
}

// SAFETY: loom checks every access to the cells.
unsafe impl Sync for Machine {}
// SAFETY: as above.
unsafe impl Send for Machine {}

impl Machine {
    fn new() -> Arc<Self> {
        let mut bytes = Box::new(Bytes([0; PAGES * PAGE_SIZE]));
        let at = NonNull::from(&mut bytes.0).cast::<u8>();
        // SAFETY: the memory is the region's, and kept by it.
        let region = unsafe { Region::<Private>::from_raw(at, PAGES * PAGE_SIZE, 0, bytes).unwrap() };
        let panics = AtomicBool::new(false);
        let domain =
            Strict { base: at.addr().get(), panics, pages: std::array::from_fn(|_| UnsafeCell::new((0, false))) };
        let contents = std::array::from_fn(|_| UnsafeCell::new(0));
        Arc::new(Self { memory: RegionProvider::new(region), domain: Arc::new(domain), contents })
    }

    fn pool(&self, options: PoolOptions) -> PagePool<Private> {
        options.build(self.memory.clone(), Some(self.domain.clone())).unwrap()
    }

    /// Uses a page as its only user.
    fn write(&self, page: &Page<Private>) {
        // SAFETY: loom checks that no other thread reads or writes.
        self.contents[page.index() as usize].with_mut(|contents| unsafe { *contents += 1 });
    }

    /// Writes a page and drops it, in a thread on `cpu`.
    fn drop_on(self: &Arc<Self>, cpu: usize, page: Page<Private>) -> JoinHandle<()> {
        let this = self.clone();
        thread::spawn(move || {
            run_on(cpu);
            this.write(&page);
            let dropped = catch_unwind(AssertUnwindSafe(|| drop(page)));
            assert!(dropped.is_ok() || this.domain.panics.load(Ordering::Relaxed));
        })
    }

    /// The end of a model: `pools` pools were freed, and all pages but `lost` are with the
    /// provider, each once and unmapped.
    fn check(&self, pools: usize, lost: usize) {
        assert_eq!(FREED.with_borrow(Vec::len), pools, "pools freed");
        assert_eq!(self.domain.mapped(), 0, "pages still mapped");
        let mut found = [const { None }; PAGES + 1];
        assert_eq!(self.memory.alloc(&mut found), PAGES - lost, "pages with the provider");
        // SAFETY: the provider is alive.
        let mut numbers: Vec<_> = found.iter().flatten().map(|page| unsafe { page.index() }).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), PAGES - lost, "a page is there twice");
        FREED.with_borrow_mut(Vec::clear);
    }
}

/// Checks `body` twice: starting from the execution in which the owner runs first where it can, and
/// from the one in which the other threads run first. Loom derives the other orders from the last
/// access to each object only. From a single start it would miss some orders in which a load comes
/// before an exchange.
fn model(body: impl Fn() + Sync + Send + 'static) {
    let body = Arc::new(body);
    let from = |owner_first| {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = model.preemption_bound.or(Some(PREEMPTIONS));
        model.max_branches = 10_000;
        let body = body.clone();
        model.check(move || {
            OWNER_FIRST.set(owner_first);
            body();
        });
    };
    netmem_percpu::both_ways(|| [true, false].into_iter().for_each(&from));
}

/// The point in a model at which the other threads have been started and the owner continues.
fn owners_turn() {
    if !OWNER_FIRST.get() {
        thread::yield_now();
    }
}

/// Pools of two pages, of the three kinds: with magazines of one page, with the return stack only,
/// and a page per packet.
fn magazines() -> PoolOptions {
    PoolOptions::new("model").cache(PAGES).magazine(1).limit(2)
}

fn stack_only() -> PoolOptions {
    PoolOptions::new("model").cache(PAGES).magazine(0).limit(2)
}

fn page_per_packet() -> PoolOptions {
    PoolOptions::new("model").cache(0).limit(2)
}

/// Two pages dropped on two CPUs while the pool ends.
fn return_against_close(options: fn() -> PoolOptions) {
    model(move || {
        let machine = Machine::new();
        let mut pool = machine.pool(options());
        let pages = [pool.alloc().unwrap(), pool.alloc().unwrap()];
        let mut cpu = 0..;
        let threads = pages.map(|page| machine.drop_on(cpu.next().unwrap(), page));
        owners_turn();
        let reader = pool.stats_reader();
        let closed = pool.close();
        assert_eq!(closed.stats.mapped - closed.stats.unmapped, closed.outstanding);
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!((reader.stats().inflight(), reader.stats().unmapped), (0, 2));
        machine.check(1, 0);
    });
}

/// Return against close: every page is returned once, and one thread frees the pool, after the last
/// touch of every other thread.
#[test]
fn return_against_close_magazines() {
    return_against_close(magazines);
}

/// The same for pages that are returned by the return stack.
#[test]
fn return_against_close_stack() {
    return_against_close(stack_only);
}

/// The same for a pool without a cache. Its pages leave without passing through the owner also
/// before the owner leaves.
#[test]
fn return_against_close_page_per_packet() {
    return_against_close(page_per_packet);
}

/// A full magazine on its way to the depot against close: its pages keep the pool alive, and are
/// returned one by one if the magazine is late.
#[test]
fn magazine_against_close() {
    magazine_and_close(false);
}

/// The same with a domain that panics over each page that it unmaps: the other pages of the
/// magazine are not lost.
#[test]
fn magazine_against_close_with_panics() {
    magazine_and_close(true);
}

fn magazine_and_close(panics: bool) {
    model(move || {
        let machine = Machine::new();
        let mut pool = machine.pool(magazines().magazine(2).limit(3));
        let [first, second, third] = std::array::from_fn(|_| pool.alloc().unwrap());
        // They fill the magazine of CPU 0, so that the next drop there hands it over.
        machine.drop_on(0, first).join().unwrap();
        machine.drop_on(0, second).join().unwrap();
        machine.domain.panics.store(panics, Ordering::Relaxed);
        let thread = machine.drop_on(0, third);
        owners_turn();
        let closed = catch_unwind(AssertUnwindSafe(|| pool.close()));
        assert!(closed.is_ok() || panics);
        thread.join().unwrap();
        machine.check(1, 0);
    });
}

/// Return against refill: no page is lost between a push and the owner's swap, and no page is taken
/// twice. What was written to a page is there when the page is allocated again.
#[test]
fn return_against_refill() {
    model(|| {
        let machine = Machine::new();
        let mut pool = machine.pool(stack_only());
        let pages = [pool.alloc().unwrap(), pool.alloc().unwrap()];
        let threads = pages.map(|page| machine.drop_on(0, page));
        owners_turn();
        let mut got: Vec<_> = pool.alloc().into_iter().collect();
        got.iter().for_each(|page| machine.write(page));
        threads.into_iter().for_each(|t| t.join().unwrap());
        while let Some(page) = pool.alloc() {
            machine.write(&page);
            got.push(page);
        }
        assert_eq!(got.len(), 2);
        drop(got);
        assert_eq!(pool.close().outstanding, 0);
        machine.check(1, 0);
    });
}

/// Return against `device_gone`: each page is unmapped once, before `device_gone` returns, at the
/// address at which its pool had mapped it. The counters are right also while the page is between
/// its unmapping and its count.
fn return_against_device_gone(options: fn() -> PoolOptions) {
    model(move || {
        let machine = Machine::new();
        let mut pool = machine.pool(options().limit(1));
        let page = pool.alloc().unwrap();
        let thread = machine.drop_on(1, page);
        owners_turn();
        pool.device_gone();
        assert_eq!(machine.domain.mapped(), 0, "device_gone returned before the last page was unmapped");
        let closed = pool.close();
        assert_eq!((closed.stats.mapped, closed.stats.unmapped), (1, 1));
        thread.join().unwrap();
        machine.check(1, 0);
    });
}

#[test]
fn return_against_device_gone_magazines() {
    return_against_device_gone(magazines);
}

#[test]
fn return_against_device_gone_page_per_packet() {
    return_against_device_gone(page_per_packet);
}

/// The same when the next pool maps the page as soon as it is with the provider.
#[test]
fn return_against_device_gone_and_the_next_pool() {
    model(|| {
        let machine = Machine::new();
        let mut old = machine.pool(page_per_packet().limit(1));
        let page = old.alloc().unwrap();
        let this = machine.clone();
        let thread = thread::spawn(move || {
            run_on(1);
            drop(page);
            let mut new = this.pool(page_per_packet());
            let pages: Vec<_> = std::iter::from_fn(|| new.alloc()).collect();
            pages.iter().for_each(|page| this.write(page));
            drop(pages);
            assert_eq!(new.close().outstanding, 0);
        });
        owners_turn();
        old.device_gone();
        let _ = old.close();
        thread.join().unwrap();
        machine.check(2, 0);
    });
}

/// Restart: a queue's pool ends with a page out, and the next pool starts on the same memory while
/// that page is being returned. The page leaves the old pool, the new pool gets it in the end, and
/// the page's next drop returns it to the new pool.
fn restart(options: fn() -> PoolOptions) {
    model(move || {
        let machine = Machine::new();
        let mut old = machine.pool(options());
        let late = machine.drop_on(1, old.alloc().unwrap());
        owners_turn();
        let _ = old.close();
        let mut new = machine.pool(options());
        // One page can be allocated at once, the late one at once or later.
        let mut pages: Vec<_> = std::iter::from_fn(|| new.alloc()).collect();
        assert!(!pages.is_empty());
        late.join().unwrap();
        pages.extend(std::iter::from_fn(|| new.alloc()));
        assert_eq!(pages.len(), 2, "the restarted queue has all pages");
        pages.iter().for_each(|page| machine.write(page));
        for page in pages {
            machine.drop_on(0, page).join().unwrap();
        }
        let closed = new.close();
        assert_eq!((closed.outstanding, closed.stats.mapped), (0, 2));
        machine.check(2, 0);
    });
}

#[test]
fn restart_magazines() {
    restart(magazines);
}

#[test]
fn restart_page_per_packet() {
    restart(page_per_packet);
}

/// Quarantine against close: the last holder of a quarantined page counts the page, and frees the
/// pool if the page is the last one.
#[test]
fn quarantine_against_close() {
    model(|| {
        let machine = Machine::new();
        let mut pool = machine.pool(stack_only());
        let mut page = pool.alloc().unwrap();
        let (part, this) = (page.split_off(PAGE_SIZE / 2), machine.clone());
        let thread = thread::spawn(move || this.write(&part));
        owners_turn();
        pool.quarantine(page);
        let reader = pool.stats_reader();
        let closed = pool.close();
        assert_eq!((closed.stats.quarantined + closed.outstanding, closed.stats.unmapped), (1, 1));
        thread.join().unwrap();
        let stats = reader.stats();
        assert_eq!((stats.quarantined, stats.released, stats.inflight(), stats.unmapped), (1, 0, 0, 1));
        machine.check(1, 1);
    });
}
