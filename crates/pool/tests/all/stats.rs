//! Counters read from any thread, and pools that leave other CPUs alone.

use crate::common::{alloc, pool};
use netmem_pool::{PoolOptions, PoolStats, StatsReader};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

/// Proves POOL-12: another thread reads what the owner has counted, and moves no page to do so.
/// Pages that wait in magazines count as in flight until the owner collects them.
#[test]
fn another_thread_reads() {
    let (mut pool, domain) = pool(PoolOptions::new("read").cache(16).magazine(8), 64);
    let reader = pool.stats_reader();
    let read = || thread::scope(|s| s.spawn(|| reader.stats()).join().unwrap());
    assert_eq!(read(), PoolStats::default());
    let mut pages = alloc(&mut pool, 20);
    pool.poll(|_| drop(pages.split_off(10)));
    let before = read();
    assert_eq!((before.allocated(), before.recycle_cached, before.inflight()), (20, 10, 10));
    assert_eq!(before.mapped, domain.maps());
    thread::spawn(move || drop(pages)).join().unwrap();
    assert_eq!(read(), before, "what is in magazines is in flight, and stays there");
    assert_eq!(pool.stats().inflight(), 0);
    assert_eq!(read(), pool.stats());
    assert_eq!((reader.name(), reader.is_closed()), ("read", false));
}

/// Proves POOL-11: a reader outlives the pool, and counts pages that are returned late.
#[test]
fn a_reader_outlives_its_pool() {
    for cache in [0, 16] {
        let (mut pool, domain) = pool(PoolOptions::new("outlived").cache(cache), 8);
        let reader = pool.stats_reader();
        let mut pages = alloc(&mut pool, 8);
        let mut given_up = pages.pop().unwrap();
        let kept = given_up.split_off(100);
        pool.quarantine(given_up);
        drop(pages.split_off(4));
        let closed = pool.close();
        assert!(reader.is_closed());
        assert_eq!((closed.outstanding, closed.stats.inflight()), (5, 5));
        assert_eq!(reader.stats(), closed.stats);
        let late = reader.clone();
        thread::spawn(move || drop(pages)).join().unwrap();
        assert_eq!((late.stats().inflight(), late.stats().quarantined), (1, 0));
        drop(kept);
        let last = late.stats();
        assert_eq!((last.inflight(), last.quarantined, last.allocated()), (0, 1, 8), "{last:?}");
        assert_eq!((last.mapped, last.unmapped), (domain.maps(), domain.unmaps()));
    }
}

/// Proves POOL-12: while the pool works and ends, another thread reads its counters and never waits
/// for the owner. A counter never falls. The sums are no snapshot, because the counters change
/// between two loads of the reader: pages in flight have no bound here, except that they do not
/// wrap around.
#[test]
fn reading_while_the_pool_works() {
    const PAGES: usize = 64;
    let current: Mutex<Option<StatsReader>> = Mutex::new(None);
    let (done, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    let counters = |s: PoolStats| {
        [s.alloc_slow, s.alloc_empty, s.alloc_refill, s.alloc_failed, s.recycle_cached, s.recycle_cache_full, s.mapped]
    };
    thread::scope(|s| {
        let observer = s.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let Some(reader) = current.lock().unwrap().clone() else { continue };
                let mut before = reader.stats();
                for _ in 0..10 {
                    let now = reader.stats();
                    assert!(now.alloc_fast < 1 << 40 && now.inflight() < 1 << 40, "{now:?}");
                    assert!(
                        counters(before).iter().zip(counters(now)).all(|(b, n)| *b <= n),
                        "{before:?}, then {now:?}"
                    );
                    before = now;
                }
                reads.fetch_add(1, Ordering::Relaxed);
            }
        });
        while reads.load(Ordering::Relaxed) < 100 && !observer.is_finished() {
            let (mut pool, _) = pool(PoolOptions::new("busy").cache(16), PAGES);
            let reader = pool.stats_reader();
            *current.lock().unwrap() = Some(reader.clone());
            for _ in 0..100 {
                pool.poll(|napi| {
                    let pages: Vec<_> = std::iter::from_fn(|| napi.alloc()).take(40).collect();
                    drop(pages);
                });
            }
            let exact = pool.stats();
            drop(pool);
            assert_eq!(counters(reader.stats()), counters(exact));
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// Proves POOL-4: a pool that may not interrupt other CPUs collects the pages that were returned by
/// other ways, and counts that there were more. A pool without pages reads the CPUs' lengths at
/// most every 100 us.
#[test]
fn a_pool_that_leaves_other_cpus_alone() {
    let options = PoolOptions::new("alone").cache(16).magazine(8).interrupt_cpus(false);
    let (mut pool, domain) = pool(options, 32);
    let pages = alloc(&mut pool, 32);
    thread::spawn(move || {
        // As far as the test can tell, all drops are on one CPU. At least the first magazine fills
        // up, unless the thread is moved each time.
        drop(pages);
    })
    .join()
    .unwrap();
    let start = Instant::now();
    let (mut got, mut failed) = (Vec::new(), 0);
    while failed < 500 {
        match pool.poll(|napi| napi.alloc()) {
            Some(page) => got.push(page),
            None => failed += 1,
        }
    }
    let micros = start.elapsed().as_micros() as u64;
    let stats = pool.stats_reader().stats();
    assert_eq!((stats.reclaims, stats.reclaimed, stats.alloc_failed), (0, 0, 500), "{stats:?}");
    assert!(stats.unasked > 0 || got.len() == 32, "{stats:?}");
    assert!(stats.unasked <= micros / 100 + 1, "{} looks in {micros} us", stats.unasked);
    drop(got);
    let closed = pool.close();
    assert_eq!((closed.outstanding, domain.maps() - domain.unmaps()), (0, 0), "the end takes everything");
}
