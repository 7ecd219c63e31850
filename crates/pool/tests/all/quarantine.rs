//! Pages that a device kept.

use crate::common::{alloc, assert_balanced, close_balanced, pool, provider};
use netmem_pool::{PoolOptions, Private};
use std::sync::Arc;
use std::thread;

/// Proves POOL-11: a quarantined page is unmapped, counted, and never handed out again.
#[test]
fn quarantined_pages_do_not_circulate() {
    for cache in [0, 16] {
        let (mut pool, domain) = pool(PoolOptions::new("kept").cache(cache), 16);
        let mut pages = alloc(&mut pool, 16);
        let kept: Vec<_> = pages.iter().take(3).map(|p| p.index()).collect();
        pages.drain(..3).for_each(|page| pool.quarantine(page));
        drop(pages);
        let stats = pool.stats();
        assert_eq!((stats.quarantined, stats.inflight()), (3, 0));
        assert!(domain.unmaps() >= 3);
        let again: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
        assert_eq!(again.len(), 13);
        assert!(again.iter().all(|p| !kept.contains(&p.index())));
        drop(again);
        close_balanced(pool, &domain);
    }
}

/// Proves POOL-11 and POOL-6: of a page in parts, one part or all parts may be quarantined. The
/// page counts once, when the last part is dropped, on any thread.
#[test]
fn parts_of_a_page() {
    for kept_parts in 1..=3 {
        for cache in [0, 4] {
            let (mut pool, domain) = pool(PoolOptions::new("parts").cache(cache), 4);
            let mut first = pool.alloc().unwrap();
            let mut second = first.split_off(1024);
            let third = second.split_off(1024);
            let mut parts = vec![first, second, third];
            let rest = parts.split_off(kept_parts);
            parts.into_iter().for_each(|p| pool.quarantine(p));
            assert_eq!(domain.unmaps(), 1, "unmapped at the first part");
            thread::scope(|s| s.spawn(|| drop(rest)).join().unwrap());
            let stats = pool.stats();
            assert_eq!((stats.quarantined, stats.inflight()), (1, 0), "{stats:?}");
            assert_eq!(std::iter::from_fn(|| pool.alloc()).collect::<Vec<_>>().len(), 3);
            close_balanced(pool, &domain);
        }
    }
}

/// Proves POOL-11: a part that is still held keeps the pool and its memory alive, also after the
/// pool's owner has dropped the pool.
#[test]
fn a_part_outlives_the_pool() {
    let memory = provider::<Private>(4);
    let mut pool = PoolOptions::new("outlived").build(memory.clone(), None).unwrap();
    let weak = Arc::downgrade(&memory);
    drop(memory);
    let mut held = pool.alloc().unwrap();
    pool.quarantine(held.split_off(2048));
    assert_eq!(pool.close().outstanding, 1);
    held.as_mut_slice().fill(7);
    assert_eq!((held.dma_domain(), held.as_slice()[2047]), (0, 7));
    drop(held);
    assert!(weak.upgrade().is_none(), "the last part freed the pool");
}

/// Proves POOL-1 and POOL-11: a page of another pool, or of none, does not disturb the accounting
/// of this pool, and is counted where it belongs.
#[test]
fn somebody_elses_page() {
    let (mut a, domain_a) = pool(PoolOptions::new("a"), 4);
    let (mut b, domain_b) = pool(PoolOptions::new("b"), 4);
    let out = a.alloc().unwrap();
    a.quarantine(b.alloc().unwrap());
    a.quarantine(provider(1).page().unwrap());
    let stats = a.stats();
    assert_eq!((stats.quarantined, stats.inflight()), (0, 1));
    drop(out);
    close_balanced(a, &domain_a);
    assert_eq!((b.stats().quarantined, b.stats().inflight()), (0, 1));
    b.device_gone();
    assert_eq!(domain_b.maps(), domain_b.unmaps());
    assert_eq!(b.close().outstanding, 1);
}

/// Proves POOL-1: quarantine after the device was removed unmaps nothing twice.
#[test]
fn after_the_device() {
    let (mut pool, domain) = pool(PoolOptions::new("after"), 4);
    let (one, two) = (pool.alloc().unwrap(), pool.alloc().unwrap());
    pool.quarantine(one);
    pool.device_gone();
    pool.quarantine(two);
    let stats = pool.stats();
    assert_balanced(stats, &domain);
    assert_eq!((stats.quarantined, stats.mapped, stats.unmapped), (2, 4, 4));
}
