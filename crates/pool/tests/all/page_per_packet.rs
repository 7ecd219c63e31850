//! Pools without a cache, and pages without a pool.

use crate::common::{alloc, assert_balanced, close_balanced, pool, provider, remote_frees};
use netmem_pool::{PeerShared, PoolOptions, Private};
use std::sync::Arc;
use std::thread;

/// Without a cache, each allocation obtains a page from the provider and maps it, and each return
/// unmaps and releases it.
#[test]
fn every_packet_maps_and_unmaps() {
    let (mut pool, domain) = pool(PoolOptions::new("ppp").cache(0).prefill(4), 4);
    assert_eq!(domain.maps(), 0, "nowhere to keep them");
    for n in 1..=10 {
        pool.poll(|napi| drop(napi.alloc().unwrap()));
        assert_eq!((domain.maps(), domain.unmaps()), (n, n));
    }
    drop(alloc(&mut pool, 4));
    thread::scope(|s| {
        let out = alloc(&mut pool, 3);
        s.spawn(|| drop(out)).join().unwrap()
    });
    let stats = pool.stats();
    assert_eq!((stats.alloc_slow, stats.recycle_cache_full, stats.released), (17, 10, 7), "{stats:?}");
    assert_eq!((stats.alloc_fast, stats.recycle_cached, remote_frees(stats), stats.alloc_empty), (0, 0, 0, 0));
    assert_balanced(stats, &domain);
    close_balanced(pool, &domain);
}

/// Proves NET-4: a page without a pool is freed by its drop, on any thread and in any poll context.
#[test]
fn a_page_without_a_pool() {
    let memory = provider::<PeerShared>(2);
    let mut pool = PoolOptions::new("other").build(memory.clone(), None).unwrap();
    for round in 0..3 {
        let (one, two) = (memory.page().unwrap(), memory.page().unwrap());
        assert!(memory.page().is_none());
        let part = two.freeze_range(5..6);
        match round {
            0 => drop((one, part)),
            1 => pool.poll(|_| drop((one, part))),
            _ => thread::scope(|s| s.spawn(|| drop((one, part))).join().unwrap()),
        }
    }
    assert_eq!(pool.stats().returned(), 0);
    assert!(pool.alloc().is_some());
}

/// Proves NET-4: such a page keeps its provider.
#[test]
fn it_outlives_the_handle() {
    let memory = provider::<Private>(2);
    let weak = Arc::downgrade(&memory);
    let mut page = memory.page().unwrap();
    drop(memory);
    page.as_mut_slice().fill(3);
    let frag = page.freeze();
    assert_eq!((frag[4095], frag.dma_domain()), (3, 0));
    thread::spawn(move || drop(frag)).join().unwrap();
    assert!(weak.upgrade().is_none());
}

/// Proves NET-4: pages move from a pool to no pool and back, and behave each time like a page of
/// their present owner.
#[test]
fn between_pool_and_none() {
    let memory = provider::<Private>(1);
    for _ in 0..3 {
        let domain = crate::common::counting();
        let mut pool = PoolOptions::new("between").build(memory.clone(), Some(domain.clone())).unwrap();
        assert_eq!(pool.alloc().unwrap().dma_domain(), pool.dma_domain());
        close_balanced(pool, &domain);
        let page = memory.page().unwrap();
        assert_eq!((page.dma_domain(), page.dma_addr() as usize), (0, page.as_ptr().addr()));
    }
}
