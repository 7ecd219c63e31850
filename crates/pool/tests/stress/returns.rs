//! Many threads drop pages at the same time, and the accounting balances.

use crate::common::{close_balanced, pool};
use netmem_pool::{Frag, PoolOptions, Private};
use std::sync::mpsc;
use std::thread;

/// Proves POOL-5 and POOL-1: pages and parts of pages that are dropped on four threads and in the
/// poll context are all returned.
#[test]
fn every_page_returns() {
    let _alone = crate::alone();
    const PACKETS: usize = 100_000;
    for cache in [0, 4, 64] {
        let (mut pool, domain) = pool(PoolOptions::new("stress").cache(cache), 256);
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..4).map(|_| mpsc::channel::<Frag<Private>>()).unzip();
        thread::scope(|s| {
            for receiver in receivers {
                s.spawn(move || {
                    let mut held = Vec::new();
                    for frag in receiver {
                        assert!(frag.iter().all(|&b| b == frag[0]), "somebody else writes this page");
                        held.push(frag);
                        if held.len() == 7 {
                            held.clear();
                        }
                    }
                });
            }
            let mut sent = 0;
            while sent < PACKETS {
                pool.poll(|napi| {
                    for _ in 0..64 {
                        let Some(mut page) = napi.alloc() else { break };
                        sent += 1;
                        page.as_mut_slice()[..64].fill(sent as u8);
                        let frag = page.freeze_range(0..64);
                        match sent % 5 {
                            0 => drop(frag),
                            1 => senders.iter().for_each(|to| to.send(frag.clone()).unwrap()),
                            n => senders[n - 2].send(frag).unwrap(),
                        }
                    }
                });
                thread::yield_now();
            }
            drop(senders);
        });
        let stats = pool.stats();
        eprintln!("cache {cache}: {stats:?}");
        assert!(stats.allocated() >= PACKETS as u64);
        // Pages were returned by each of the possible ways.
        assert!(stats.recycle_cached + stats.recycle_cache_full > 0 && stats.recycle_ring + stats.released > 0);
        close_balanced(pool, &domain);
    }
}

/// Proves POOL-11: pools are closed while their pages are returned on other threads. The last
/// return frees the pool, once.
#[test]
fn closing_races_with_returns() {
    let _alone = crate::alone();
    for round in 0..500 {
        let cache = [0, 1, 16][round % 3];
        let memory = crate::common::provider::<Private>(8);
        let (domain, weak) = (crate::common::counting(), std::sync::Arc::downgrade(&memory));
        let mut pool = PoolOptions::new("race").cache(cache).build(memory, Some(domain.clone())).unwrap();
        let mut one = crate::common::alloc(&mut pool, 8);
        let mut two = one.split_off(4);
        if round % 2 == 0 {
            // Both threads have a part of each page.
            for page in &mut one {
                two.push(page.split_off(8));
            }
        }
        thread::scope(|s| {
            s.spawn(move || drop(one));
            s.spawn(move || drop(two));
            assert!(pool.close().outstanding <= 8);
        });
        assert!(weak.upgrade().is_none(), "round {round}: leaked");
        assert_eq!((domain.maps(), domain.unmaps()), (domain.maps(), domain.maps()));
    }
}

/// Proves POOL-7: of several threads that drop a page, the last one sees what the others did, and
/// returns the page once.
#[test]
fn the_last_of_many() {
    let _alone = crate::alone();
    let (mut pool, domain) = pool(PoolOptions::new("last").cache(2), 2);
    for round in 0..500 {
        let frag = pool.alloc().unwrap().freeze();
        let clones = [frag.clone(), frag.clone(), frag];
        thread::scope(|s| {
            for clone in clones {
                s.spawn(move || match clone.try_into_page() {
                    Ok(mut page) => page.as_mut_slice()[0] = round as u8,
                    Err(frag) => drop(frag),
                });
            }
        });
        assert_eq!(pool.stats().inflight(), 0);
    }
    close_balanced(pool, &domain);
}
