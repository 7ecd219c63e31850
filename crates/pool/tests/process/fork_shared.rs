//! What a child process may do with a shared pool of its parent: see `docs/design/shared-pool.md`.
//!
//! No thread of another test may hold a lock when a child is made.

use crate::common::{counting, provider};
use netmem_pool::{Bulk, Frag, Page, PoolOptions, Private, Provider, RawPage, Region, RegionProvider, SharedPool};
use netmem_testing::is_emulated;
use netmem_testing::skip;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Runs `f` in a child. Returns how the child ended: `Ok(0)`, `Ok(1)` for a panic, or a signal. If
/// the child hangs, the alarm ends it.
fn in_child(f: impl FnOnce()) -> Result<i32, i32> {
    // SAFETY: the C library makes its own locks usable in the child. The child exits and does not
    // unwind.
    unsafe {
        match libc::fork() {
            0 => {
                libc::alarm(60);
                // The address sanitizer has a handler for this signal, which would exit.
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                let failed = catch_unwind(AssertUnwindSafe(f)).is_err();
                libc::_exit(i32::from(failed));
            }
            child => {
                assert!(child > 0);
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                if libc::WIFEXITED(status) { Ok(libc::WEXITSTATUS(status)) } else { Err(libc::WTERMSIG(status)) }
            }
        }
    }
}

/// What the parent holds when a child is made.
struct Held {
    page: Page<Private>,
    frag: Frag<Private>,
    rest: Vec<Page<Private>>,
}

impl Held {
    fn new(pool: &SharedPool<Private>, pages: usize) -> ManuallyDrop<Self> {
        let mut rest = alloc(pool, pages);
        rest.iter_mut().for_each(|page| page.as_mut_slice()[0] = 7);
        let (page, frag) = (rest.pop().unwrap(), rest.pop().unwrap().freeze());
        ManuallyDrop::new(Self { page, frag, rest })
    }

    /// Drops the child's copy of everything, in every possible way.
    fn dropped_in_child(held: &ManuallyDrop<Self>) {
        // SAFETY: the child never returns, so it drops its copy once.
        let Self { page, frag, rest } = unsafe { std::ptr::read(&**held) };
        drop(page);
        drop(frag.clone());
        drop(frag);
        let mut bulk = Bulk::new();
        rest.into_iter().for_each(|page| bulk.add(page));
    }

    fn dropped(held: ManuallyDrop<Self>) {
        let Self { page, frag, rest } = ManuallyDrop::into_inner(held);
        assert_eq!((page.as_slice()[0], frag[0]), (7, 7));
        assert!(rest.iter().all(|page| page.as_slice()[0] == 7));
    }
}

fn alloc(pool: &SharedPool<Private>, pages: usize) -> Vec<Page<Private>> {
    let mut got = Vec::new();
    while got.len() < pages {
        match pool.alloc() {
            Some(page) => got.push(page),
            None => pool.reclaim(),
        }
    }
    got
}

/// No other thread uses the pool: the child can use the whole pool, except for the memory of the
/// pages.
fn of_a_quiet_pool(magazine: usize) {
    let (memory, domain) = (provider::<Private>(64), counting());
    let options = PoolOptions::new("parent").magazine(magazine);
    let pool = ManuallyDrop::new(options.build_shared(memory.clone(), Some(domain.clone())).unwrap());
    let held = Held::new(&pool, 40);
    // Some pages are in magazines.
    thread::scope(|s| _ = s.spawn(|| drop(alloc(&pool, 20))));
    let before = pool.stats();

    // Every page is in the child's copy exactly once. When that copy ends, nothing stays mapped in
    // its copy of the domain.
    let end = in_child(|| {
        Held::dropped_in_child(&held);
        let pages = alloc(&pool, 64);
        assert!(pool.alloc().is_none());
        drop(pages);
        pool.reclaim();
        assert_eq!(pool.stats().inflight, 0);
        // SAFETY: the child never returns, so the pool ends once.
        let closed = unsafe { std::ptr::read(&*pool) }.close();
        assert_eq!((closed.outstanding, domain.maps()), (0, domain.unmaps()));
        assert_eq!(std::iter::from_fn(|| memory.page()).map(std::mem::forget).count(), 64);
    });
    assert_eq!(end, Ok(0), "magazines of {magazine}");

    // The pool ends before its pages are dropped.
    let end = in_child(|| {
        // SAFETY: as above.
        let closed = unsafe { std::ptr::read(&*pool) }.close();
        assert_eq!(closed.outstanding, 40);
        Held::dropped_in_child(&held);
        assert_eq!(domain.maps(), domain.unmaps());
    });
    assert_eq!(end, Ok(0), "magazines of {magazine}");

    // The pages' memory is not in the child.
    assert_eq!(in_child(|| pool.alloc().unwrap().as_mut_slice()[0] = 1), Err(libc::SIGSEGV));

    // A pool of the child, for all its threads.
    let end = in_child(|| {
        let own = PoolOptions::new("child").build_shared(provider::<Private>(64), None).unwrap();
        thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| (0..1000).for_each(|_| alloc(&own, 1)[0].as_mut_slice()[0] = 1));
            }
        });
        assert_eq!(own.close().outstanding, 0);
    });
    assert_eq!(end, Ok(0), "magazines of {magazine}");

    // The parent's pool has not changed.
    assert_eq!(pool.stats(), before);
    Held::dropped(held);
    assert_eq!(ManuallyDrop::into_inner(pool).close().outstanding, 0);
    assert_eq!(domain.maps(), domain.unmaps());
    assert_eq!(std::iter::from_fn(|| memory.page()).map(std::mem::forget).count(), 64);
}

/// A provider that makes its callers wait when the test requests it.
#[derive(Debug)]
struct Waits {
    pages: Arc<RegionProvider<Private>>,
    asked: AtomicBool,
    waits: AtomicBool,
}

// SAFETY: all of it is the provider's behind it.
unsafe impl Provider<Private> for Waits {
    fn alloc(&self, pages: &mut [Option<RawPage<Private>>]) -> usize {
        while self.waits.load(Ordering::Relaxed) {
            self.asked.store(true, Ordering::Relaxed);
            thread::yield_now();
        }
        self.pages.alloc(pages)
    }

    unsafe fn release(&self, page: RawPage<Private>) {
        // SAFETY: the caller's.
        unsafe { self.pages.release(page) }
    }

    fn page_size(&self) -> usize {
        self.pages.page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<Private>)) {
        self.pages.each(f);
    }
}

/// Another thread holds the lock and never releases it in the child. A drop, an allocation from a
/// magazine, and the counters need no lock.
fn of_a_locked_pool(magazine: usize) {
    let memory = Arc::new(Waits { pages: provider(256), asked: AtomicBool::new(false), waits: AtomicBool::new(false) });
    let pool = PoolOptions::new("locked").magazine(magazine).build_shared(memory.clone(), None).unwrap();
    let held = Held::new(&pool, 40);
    thread::scope(|s| {
        memory.waits.store(true, Ordering::Relaxed);
        s.spawn(|| drop(alloc(&pool, 200)));
        while !memory.asked.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        let end = in_child(|| {
            let before = pool.stats();
            Held::dropped_in_child(&held);
            let after = pool.stats();
            if magazine == 0 {
                // These pages wait for the next allocation that acquires the lock.
                assert_eq!(after.inflight, before.inflight);
            } else {
                assert_eq!(after.inflight + 40, before.inflight);
                drop(pool.alloc().unwrap());
                assert_eq!(pool.stats(), after);
            }
        });
        memory.waits.store(false, Ordering::Relaxed);
        assert_eq!(end, Ok(0), "magazines of {magazine}");
    });
    Held::dropped(held);
    assert_eq!(pool.close().outstanding, 0);
}

/// Other threads allocate, drop and reclaim. At any point at which they are when the child is made,
/// the child can drop its pages.
fn of_a_busy_pool(magazine: usize) {
    let pool = PoolOptions::new("busy").magazine(magazine).build_shared(provider::<Private>(256), None).unwrap();
    let held = Held::new(&pool, 40);
    let over = AtomicBool::new(false);
    thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    drop(alloc(&pool, 20));
                    pool.reclaim();
                }
            });
        }
        for round in 0..200 {
            assert_eq!(in_child(|| Held::dropped_in_child(&held)), Ok(0), "magazines of {magazine}, child {round}");
        }
        over.store(true, Ordering::Relaxed);
    });
    Held::dropped(held);
    pool.reclaim();
    assert_eq!(pool.stats().inflight, 0);
    assert_eq!(pool.close().outstanding, 0);
}

/// Proves POOL-11 and POOL-15 across `fork`: drops in the child change only the child's copy of the
/// accounting, and wait for no thread that does not exist in the child.
#[test]
fn in_a_child() {
    let _alone = crate::alone();
    netmem_testing::assert_forced_mode();
    if is_emulated() {
        return skip("it is emulated, and QEMU 7.2 ignores MADV_DONTFORK");
    }
    for magazine in [0, 8] {
        of_a_quiet_pool(magazine);
        of_a_locked_pool(magazine);
        of_a_busy_pool(magazine);
    }
}
