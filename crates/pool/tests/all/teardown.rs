//! Every order in which pools, devices, providers and pages can end.

use crate::common::{alloc, counting, pool, provider};
use netmem_pool::{Lingering, PoolOptions, Private, lingering};
use std::sync::Arc;
use std::thread;

fn lingers(name: &str) -> Option<Lingering> {
    lingering().into_iter().find(|l| l.name == name)
}

/// Proves POOL-11: a pool that is closed while pages are in flight lingers. It is listed with count
/// and age, and is freed with the last page, on whichever thread that page is dropped.
#[test]
fn a_pool_lingers_until_its_last_page() {
    for cache in [0, 2, 512] {
        let name = format!("lingers-{cache}");
        let (memory, domain) = (provider::<Private>(8), counting());
        let weak = Arc::downgrade(&memory);
        let mut pool = PoolOptions::new(&name).cache(cache).build(memory, Some(domain.clone())).unwrap();
        let mut out = alloc(&mut pool, 8);
        drop(out.split_off(3));
        assert!(lingers(&name).is_none(), "not yet");
        assert_eq!(pool.close().outstanding, 3);
        let first = lingers(&name).unwrap();
        assert_eq!(first.pages, 3);
        thread::scope(|s| s.spawn(|| drop(out.pop())).join().unwrap());
        let then = lingers(&name).unwrap();
        assert_eq!(then.pages, 2);
        assert!(then.age >= first.age);
        assert_eq!(domain.maps() - domain.unmaps(), 2, "late returns are unmapped");
        let last = out.pop();
        drop(out);
        assert!(weak.upgrade().is_some(), "the last page keeps the memory");
        thread::spawn(move || drop(last)).join().unwrap();
        assert!(lingers(&name).is_none());
        assert!(weak.upgrade().is_none(), "and the memory is gone with it");
        assert_eq!(domain.maps(), domain.unmaps());
    }
}

/// Proves POOL-5: a page that is leaked on purpose shows as in flight, and keeps its pool
/// lingering.
#[test]
fn a_forgotten_page_shows() {
    let (mut pool, _) = pool(PoolOptions::new("forgotten"), 2);
    std::mem::forget(pool.alloc());
    assert_eq!(pool.stats().inflight(), 1);
    assert_eq!(pool.close().outstanding, 1);
    assert_eq!(lingers("forgotten").unwrap().pages, 1);
}

/// Proves POOL-11: no order of the four ends leaks, frees early or unmaps twice.
#[test]
fn every_order() {
    let mut orders = vec![];
    for n in 0..4usize.pow(4) {
        let order = [n & 3, n >> 2 & 3, n >> 4 & 3, n >> 6 & 3];
        if (0..4).all(|step| order.contains(&step)) {
            orders.push(order);
        }
    }
    assert_eq!(orders.len(), 24);
    for order in orders {
        for cache in [0, 1, 64] {
            let (memory, domain) = (provider::<Private>(16), counting());
            let weak = Arc::downgrade(&memory);
            let pool = PoolOptions::new("order").cache(cache).build(memory.clone(), Some(domain.clone()));
            let (mut pool, mut handle) = (Some(pool.unwrap()), Some(memory));
            let mut out = alloc(pool.as_mut().unwrap(), 12);
            drop(out.split_off(8));
            for step in order {
                match step {
                    0 => drop(pool.take()),
                    1 => pool.iter_mut().for_each(|p| p.device_gone()),
                    2 => thread::scope(|s| s.spawn(|| out.clear()).join().unwrap()),
                    _ => drop(handle.take()),
                }
            }
            assert!(weak.upgrade().is_none(), "{order:?} leaks");
            assert_eq!(domain.maps(), domain.unmaps(), "{order:?}");
        }
    }
}

/// Proves POOL-11: a queue is restarted repeatedly while pages of the previous pool are in flight.
#[test]
fn restarts_with_pages_out() {
    let (memory, domain) = (provider::<Private>(64), counting());
    let mut held = Vec::new();
    for generation in 0..50 {
        let mut pool = PoolOptions::new("restart").cache(8).build(memory.clone(), Some(domain.clone())).unwrap();
        let new = alloc(&mut pool, 20);
        pool.poll(|_| held = new);
        assert_eq!(pool.close().outstanding, 20, "generation {generation}");
    }
    drop(held);
    assert_eq!(domain.maps(), domain.unmaps());
    let mut pool = PoolOptions::new("restart").build(memory, None).unwrap();
    assert_eq!(alloc(&mut pool, 64).len(), 64);
}
