//! Limits, exhaustion and failures: each is an error or a count, and leaks nothing.

use crate::common::{Flat, alloc, assert_balanced, close_balanced, counting, pool, provider, remote_frees};
use netmem_pool::{CountingDomain, PoolError, PoolOptions, Private, RegionOptions, RegionProvider};
use std::sync::Arc;

/// Proves POOL-13: a pool holds no more pages than its limit, counts the refusals, and continues
/// when pages are returned.
#[test]
fn the_limit() {
    for (cache, limit) in [(0, 5), (1, 5), (512, 5), (512, 100)] {
        let (mut pool, domain) = pool(PoolOptions::new("limit").cache(cache).limit(limit), 200);
        for round in 1..=3 {
            let mut out = alloc(&mut pool, limit);
            assert!(pool.alloc().is_none());
            assert_eq!(pool.stats().alloc_failed, 2 * round - 1, "cache {cache}");
            drop(out.pop());
            out.push(pool.alloc().expect("one came back"));
            assert!(pool.alloc().is_none());
            match round {
                1 => pool.poll(|_| drop(out)),
                _ => drop(out),
            }
        }
        assert!(close_balanced(pool, &domain).mapped >= limit as u64);
    }
}

/// Proves POOL-13: a provider without free pages has the same effect on a pool as the pool's limit.
#[test]
fn the_providers_end() {
    let (memory, domain) = (provider::<Private>(10), counting());
    let mut a = PoolOptions::new("a").cache(2).build(memory.clone(), Some(domain.clone())).unwrap();
    let mut b = PoolOptions::new("b").cache(2).build(memory, Some(domain.clone())).unwrap();
    let out = alloc(&mut a, 10);
    assert!(a.alloc().is_none() && b.alloc().is_none());
    drop(out);
    assert!(b.alloc().is_none(), "they are the first pool's");
    assert_balanced(a.close().stats, &domain);
    drop(alloc(&mut b, 10));
    assert_eq!(b.close().stats.alloc_failed, 2);
    assert_eq!((domain.maps(), domain.unmaps()), (20, 20));
}

/// Proves POOL-13: impossible options are refused when the pool is made, and everything that was
/// mapped until then is unmapped.
#[test]
fn a_pool_that_cannot_be() {
    let (memory, domain) = (provider::<Private>(100), counting());
    let build = |o: PoolOptions| o.build(memory.clone(), Some(domain.clone())).unwrap_err();
    assert!(matches!(build(PoolOptions::new("none").limit(0)), PoolError::NoPages));
    let error = build(PoolOptions::new("much").prefill(101));
    assert!(matches!(error, PoolError::Prefill { want: 101, got: 100 }), "{error}");
    let error = build(PoolOptions::new("limited").limit(7).prefill(8));
    assert!(matches!(error, PoolError::Prefill { want: 8, got: 7 }), "{error}");
    assert_eq!(domain.maps(), domain.unmaps());
    for good in 1..=99 {
        let domain = Arc::new(CountingDomain::new(Flat::failing_after(good)));
        let error = PoolOptions::new("half").prefill(100).build(memory.clone(), Some(domain.clone())).unwrap_err();
        assert!(matches!(error, PoolError::Map(_)), "{error}");
        assert_eq!((domain.maps(), domain.unmaps()), (good, good));
    }
    let domain = counting();
    let mut pool = PoolOptions::new("after").prefill(100).build(memory, Some(domain.clone())).unwrap();
    drop(alloc(&mut pool, 100));
    close_balanced(pool, &domain);
}

/// Proves POOL-1: if a map fails in the middle of a batch, the mapped pages stay usable and the
/// others stay with the provider.
#[test]
fn a_batch_that_is_mapped_in_part() {
    for good in 1..20 {
        let memory = provider::<Private>(20);
        let domain = Arc::new(CountingDomain::new(Flat::failing_after(good)));
        let mut pool = PoolOptions::new("batch").cache(16).build(memory.clone(), Some(domain.clone())).unwrap();
        let out: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
        assert_eq!(out.len() as u64, good);
        assert_eq!(pool.stats().alloc_failed, 1);
        drop(out);
        assert_eq!(alloc(&mut pool, good as usize).len() as u64, good, "those that were mapped circulate");
        close_balanced(pool, &domain);
        let mut next = PoolOptions::new("next").build(memory, None).unwrap();
        assert_eq!(alloc(&mut next, 20).len(), 20, "nothing was lost");
    }
}

/// Proves POOL-12 and POOL-13: growth beyond a batch, larger pages, and the counters of both.
#[test]
fn growth_is_counted() {
    for order in [0, 2] {
        let region = RegionOptions::new(300).order(order).huge_pages(false).populate(false).build::<Private>().unwrap();
        let domain = counting();
        let mut pool = PoolOptions::new("grows").build(RegionProvider::new(region), Some(domain.clone())).unwrap();
        let out = alloc(&mut pool, 300);
        let stats = pool.stats();
        let slow = [(stats.alloc_slow, stats.alloc_slow_high_order), (stats.alloc_slow_high_order, stats.alloc_slow)];
        assert_eq!(slow[usize::from(order > 0)], (5, 0), "64 at a time: {stats:?}");
        assert_eq!((stats.alloc_fast, stats.alloc_empty, stats.alloc_refill), (295, 5, 0));
        assert_eq!((stats.mapped, stats.allocated(), stats.inflight()), (300, 300, 300));
        drop(out);
        let again = alloc(&mut pool, 2);
        drop(again);
        let stats = close_balanced(pool, &domain);
        assert_eq!((stats.alloc_refill, remote_frees(stats), stats.mapped), (1, 302, 300));
    }
}

/// Proves POOL-13: a pool shrinks to the requested number of pages, or to the pages in flight,
/// wherever the idle pages are. It grows again up to its limit.
#[test]
fn shrinking() {
    for cache in [8, 512] {
        let (mut pool, domain) = pool(PoolOptions::new("shrinks").cache(cache).prefill(64), 100);
        assert_eq!(pool.held(), 64);
        let out = alloc(&mut pool, 20);
        std::thread::scope(|s| s.spawn(|| drop(alloc(&mut pool, 10))).join().unwrap());
        assert_eq!(pool.shrink(50), pool.stats().unmapped as usize);
        assert!(pool.held() <= 50 && pool.held() >= 20);
        pool.shrink(0);
        assert_eq!(pool.held(), 20, "what is out stays");
        pool.set_limit(30);
        assert_eq!((0..).map_while(|_| pool.alloc().map(std::mem::forget)).take(100).count(), 10);
        drop(out);
        assert_eq!(pool.shrink(0), 20);
        assert_eq!(domain.maps() - domain.unmaps(), 10);
    }
}

/// Proves POOL-12: sums add every counter.
#[test]
fn stats_add_up() {
    let (mut pool, _) = pool(PoolOptions::new("sum").cache(4), 20);
    pool.poll(|napi| drop((0..20).map(|_| napi.alloc()).collect::<Vec<_>>()));
    let one = pool.stats();
    let mut two = one;
    two += one;
    assert_eq!((two.allocated(), two.returned()), (2 * one.allocated(), 2 * one.returned()));
    assert_eq!(format!("{two:?}").split(',').count(), 17, "a new counter? add it to AddAssign, and here");
}
