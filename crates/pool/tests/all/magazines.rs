//! Pages that wait in the magazines of CPUs: no page is stranded, and a pool with enough pages pays
//! nothing.

use crate::common::{alloc, assert_balanced, close_balanced, pool, remote_frees};
use netmem_percpu::{Mode, Why, cpus, mode};
use netmem_pool::{Bulk, Frag, PoolOptions, Private};
use std::thread;
use std::time::{Duration, Instant};

/// Runs `f` on a thread that is bound to `cpu`.
fn on<R: Send>(cpu: usize, f: impl FnOnce() -> R + Send) -> R {
    let bound = || {
        // SAFETY: sets the CPUs of this thread, with a set of the given size. A CPU that this
        // process may not use is refused.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &set);
        }
        f()
    };
    thread::scope(|s| s.spawn(bound).join().unwrap())
}

#[test]
fn the_mode_is_the_one_that_was_asked_for() {
    netmem_testing::assert_forced_mode();
}

/// Proves POOL-4: the pool can get all its pages again, however few there are and whichever CPUs
/// they were dropped on, also by threads that have ended.
#[test]
fn no_page_is_stranded() {
    for pages in [1, 2, 3, 5, 16, 100] {
        for magazine in [1, 4, 62] {
            let (mut pool, domain) = pool(PoolOptions::new("small").cache(4).magazine(magazine), pages);
            for round in 0..4 {
                for (n, page) in alloc(&mut pool, pages).into_iter().enumerate() {
                    on((n + round) % cpus(), || drop(page));
                }
            }
            let all = alloc(&mut pool, pages);
            assert!(pool.alloc().is_none());
            let stats = pool.stats();
            assert_eq!((stats.mapped, remote_frees(stats)), (pages as u64, 4 * pages as u64), "{stats:?}");
            assert!(magazine == 1 || stats.reclaimed > 0 || stats.recycle_ring == 0, "{stats:?}");
            drop(all);
            close_balanced(pool, &domain);
        }
    }
}

/// Proves POOL-4: a pool that has pages asks no CPU for any.
#[test]
fn who_is_not_short_reclaims_nothing() {
    if mode() == Mode::Portable(Why::Forced256) {
        return println!("each thread has a magazine of its own, so that the pool is short");
    }
    let (mut pool, domain) = pool(PoolOptions::new("ample").cache(64).magazine(16), 1024);
    for _ in 0..100 {
        let pages: Vec<_> = pool.poll(|napi| (0..64).map(|_| napi.alloc().unwrap()).collect());
        on(0, || drop(pages));
    }
    let stats = close_balanced(pool, &domain);
    assert_eq!((stats.reclaims, stats.alloc_failed), (0, 0), "{stats:?}");
    assert!(stats.alloc_refill > 0);
}

/// Proves POOL-4: in polls, a pool without pages reclaims at most every 100 us, however often it is
/// asked for pages.
#[test]
fn reclaiming_is_no_storm() {
    const PAGES: usize = 4096;
    let (mut pool, domain) = pool(PoolOptions::new("starving").cache(4).magazine(62), PAGES);
    let held = alloc(&mut pool, PAGES);
    let start = Instant::now();
    let back = thread::scope(|scope| {
        // Each page that is dropped could be reclaimed at once: there are several in the time
        // between two reclaims.
        scope.spawn(|| {
            for page in held {
                drop(page);
                let dropped = Instant::now();
                while dropped.elapsed() < Duration::from_micros(5) {}
            }
        });
        let mut back = Vec::new();
        while back.len() < PAGES {
            back.extend(pool.poll(|napi| napi.alloc()));
        }
        back
    });
    let most = start.elapsed().as_micros() as u64 / 100 + 1;
    drop(back);
    let stats = close_balanced(pool, &domain);
    assert!(stats.reclaims <= most, "{} reclaims in {most} times 100 us", stats.reclaims);
    assert!(stats.reclaims > 0 || stats.recycle_ring == 0);
}

/// Proves POOL-4: without magazines, each page is returned by itself.
#[test]
fn a_pool_without_magazines() {
    let (mut pool, domain) = pool(PoolOptions::new("none").magazine(0), 64);
    drop(alloc(&mut pool, 64));
    let stats = close_balanced(pool, &domain);
    assert_eq!((stats.recycle_ring, stats.recycle_ring_full), (0, 64));
}

/// Proves POOL-4: a bulk returns the pages of several pools to each of them, and a page in parts
/// when the last part is there. In the poll context of one pool, that pool's pages go to its cache.
#[test]
fn a_bulk_of_several_pools() {
    let mut pools: Vec<_> = (0..3).map(|n| pool(PoolOptions::new(format!("bulk{n}")), 200)).collect();
    let mut bulk = Bulk::new();
    let mut halves = Vec::new();
    for n in 0..100 {
        for (pool, _) in &mut pools {
            let mut page = pool.alloc().unwrap();
            if n % 10 == 0 {
                halves.push(page.split_off(64));
            }
            bulk.add(page);
        }
    }
    drop(bulk);
    for (pool, _) in &mut pools {
        let stats = pool.stats();
        assert_eq!((remote_frees(stats), stats.inflight()), (90, 10), "{stats:?}");
    }
    // All at once on another thread: first outside of any poll context, then in that of the first
    // pool.
    on(0, move || {
        halves.into_iter().fold(Bulk::new(), |mut bulk, half| {
            bulk.add(half);
            bulk
        })
    });
    let mut frags: Vec<Frag<Private>> = Vec::new();
    for (pool, _) in &mut pools {
        frags.extend(alloc(pool, 20).into_iter().map(Frag::from));
    }
    let (first, _) = &mut pools[0];
    first.poll(|_| {
        let mut bulk = Bulk::default();
        frags.into_iter().for_each(|frag| bulk.add(frag));
        assert!(format!("{bulk:?}").contains("60 pages"));
    });
    assert_eq!(first.stats().recycle_cached, 20);
    for (pool, domain) in pools {
        close_balanced(pool, &domain);
    }
}

/// Proves POOL-4: there are more bulks than magazines, and the pages that do not fit are returned
/// one by one.
#[test]
fn more_bulks_than_magazines() {
    let (mut pool, domain) = pool(PoolOptions::new("bulks").magazine(62), 1000);
    let pages = alloc(&mut pool, 1000);
    let mut bulk = Bulk::new();
    for (n, page) in pages.into_iter().enumerate() {
        bulk.add(page);
        if n % 8 == 7 {
            bulk.flush();
        }
    }
    drop(bulk);
    let stats = pool.stats();
    assert_eq!(remote_frees(stats), 1000);
    assert!(stats.recycle_ring >= 8 * 16, "{stats:?}");
    assert_balanced(stats, &domain);
    close_balanced(pool, &domain);
}
