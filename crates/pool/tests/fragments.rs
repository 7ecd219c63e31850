//! Pages in parts: every part comes to an end, and then the page comes home.
#![allow(clippy::unwrap_used)]

mod common;

use common::{alloc, close_balanced, pool, provider};
use netmem_pool::{Frag, OutOfRange, Page, PeerShared, PoolOptions, Private};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

/// Proves POOL-6: the page is home when the last part of it is gone, whichever that is and wherever it goes.
#[test]
fn the_last_part_brings_the_page_home() {
    let (mut pool, domain) = pool(PoolOptions::new("parts"), 1);
    for last in 0..5 {
        for remote in [false, true] {
            let mut page = pool.alloc().unwrap();
            page.as_mut_slice().copy_from_slice(&[last as u8; 4096]);
            let tail = page.split_off(1000).freeze();
            let head = page.freeze();
            let mut parts = vec![head.slice(0..500), head.slice(500..1000), tail.clone(), tail, head];
            let kept = parts.swap_remove(last);
            drop(parts);
            assert!(pool.alloc().is_none(), "a part is still out");
            assert!(kept.iter().all(|&b| b == last as u8));
            match remote {
                true => thread::scope(|s| s.spawn(|| drop(kept)).join().unwrap()),
                false => drop(kept),
            }
            assert_eq!(pool.stats().inflight(), 0);
        }
    }
    assert_eq!(close_balanced(pool, &domain).mapped, 1);
}

/// Proves POOL-6: parts know their place, and the device's address of it.
#[test]
fn parts_know_their_place() {
    let (mut pool, _) = pool(PoolOptions::new("place"), 2);
    let mut page = pool.alloc().unwrap();
    let (addr, dma) = (page.as_ptr().addr(), page.dma_addr());
    let rest = page.split_off(100);
    assert_eq!((page.offset(), page.len(), rest.offset(), rest.len()), (0, 100, 100, 3996));
    assert_eq!((rest.as_ptr().addr(), rest.dma_addr()), (addr + 100, dma + 100));
    let frag = rest.freeze_range(28..128).slice(10..20);
    assert_eq!((frag.offset(), frag.len(), frag.as_ptr().addr(), frag.dma_addr()), (138, 10, addr + 138, dma + 138));
    assert_eq!((frag.index(), frag.dma_domain()), (page.index(), pool.dma_domain()));
    let mut none = page.split_off(100);
    assert_eq!((none.len(), none.as_mut_slice().len(), Frag::from(none).len()), (0, 0, 0));
}

/// Proves POOL-7 as far as a count can: whoever is alone on a page gets it back writable, and nobody else does.
#[test]
fn a_sole_holder_owns_the_page() {
    let (mut pool, domain) = pool(PoolOptions::new("sole"), 1);
    let frag = pool.alloc().unwrap().freeze();
    let clone = frag.clone();
    let frag = frag.try_into_page().unwrap_err();
    thread::scope(|s| s.spawn(|| drop(clone)).join().unwrap());
    let mut page = frag.slice(0..10);
    drop(frag);
    let mut whole = page.try_into_page().unwrap();
    assert_eq!(whole.len(), 10, "the bytes that it had");
    whole.as_mut_slice().fill(1);
    let other = whole.split_off(5);
    page = whole.freeze().try_into_page().unwrap_err();
    drop((page, other));
    assert_eq!(pool.alloc().unwrap().len(), 4096, "allocated whole again");
    close_balanced(pool, &domain);
}

/// Proves POOL-6: ranges beyond the part, inside of the page or not, are refused, and the page comes home all the same.
#[test]
fn ranges_are_checked() {
    fn panics(f: impl FnOnce()) {
        assert!(catch_unwind(AssertUnwindSafe(f)).is_err());
    }
    #[allow(clippy::reversed_empty_ranges)]
    let bad = [0..101, 101..101, 60..50, usize::MAX..usize::MAX, 0..usize::MAX, (1 << 32)..(1 << 32) + 1];
    let (mut pool, domain) = pool(PoolOptions::new("ranges"), 2);
    for range in bad {
        let mut page = pool.alloc().unwrap();
        let mut part = page.split_off(50);
        let _beyond = part.split_off(100);
        panics(|| drop(part.split_off(range.end.max(101))));
        panics(|| drop(part.freeze_range(range.clone())));
        let frag = page.freeze_range(0..40);
        panics(|| drop(frag.slice(range)));
    }
    close_balanced(pool, &domain);
}

/// Proves POOL-10 and decision 4: peer-shared bytes are copied, within bounds, and a failed copy writes nothing.
#[test]
fn peer_shared_bytes_are_copied() {
    let memory = provider::<PeerShared>(2);
    let mut pool = PoolOptions::new("peer").build(memory.clone(), None).unwrap();
    let mut page = pool.alloc().unwrap();
    let tail = page.split_off(4000);
    let bytes: Vec<u8> = (0..4000).map(|n| n as u8).collect();
    page.copy_from(0, &bytes).unwrap();
    let error = page.copy_from(3990, &[0xff; 11]).unwrap_err();
    assert_eq!(error, OutOfRange { offset: 3990, len: 11, have: 4000 });
    assert_eq!(page.read_at::<4>(3996), Ok([156, 157, 158, 159]));
    assert!(page.read_at::<4>(3997).is_err() && page.read_at::<1>(usize::MAX).is_err());
    assert!(page.read_at::<0>(4000).is_ok() && page.read_at::<0>(4001).is_err());
    let frag = page.freeze_range(100..200);
    let mut copy = [0; 64];
    frag.copy_to(36, &mut copy).unwrap();
    assert_eq!(copy, bytes[136..200]);
    assert!(frag.copy_to(37, &mut copy).is_err() && frag.read_at::<8>(usize::MAX - 3).is_err());
    assert_eq!(tail.read_at::<96>(0), Ok([0; 96]), "the neighbour's bytes were not touched");
}

/// Proves POOL-6: no order makes an offset overflow.
#[test]
fn the_largest_pages() {
    let region = netmem_pool::RegionOptions::new(2).order(9).huge_pages(false).populate(false).build::<Private>();
    let mut pool = PoolOptions::new("large").build(netmem_pool::RegionProvider::new(region.unwrap()), None).unwrap();
    let mut pages: Vec<Page<Private>> = alloc(&mut pool, 2);
    let mut end = pages[0].split_off((2 << 20) - 1);
    end.as_mut_slice()[0] = 9;
    assert_eq!((end.offset(), end.len()), (0x1f_ffff, 1));
    assert_eq!(pages[1].as_slice()[0], 0);
    drop((pages, end));
    let stats = pool.stats();
    assert_eq!((stats.alloc_slow, stats.alloc_slow_high_order, stats.inflight()), (0, 1, 0), "{stats:?}");
    assert_eq!(stats.alloc_fast, 1);
}
