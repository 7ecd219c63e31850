//! Pages in parts: when every part has been dropped, the page is returned.

use crate::common::{alloc, close_balanced, pool, provider};
use netmem_pool::{Frag, OutOfRange, Page, PeerShared, PoolOptions, Private, WriteError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

/// Proves POOL-6: the page is returned when its last part is dropped, whichever part that is and on
/// whichever thread.
#[test]
fn the_last_part_returns_the_page() {
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

/// Proves POOL-6: parts know their offset in the page, and the device address of that offset.
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

/// Proves POOL-7 as far as a count can: a sole holder gets its page back writable, and no other
/// holder does.
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

/// Proves POOL-6 and POOL-7: bytes are removed from either end in place, for shared and for sole
/// fragments, and for pages. The number of holders does not change, and the remaining bytes are the
/// same.
#[test]
fn both_ends_are_stripped_in_place() {
    let (mut pool, domain) = pool(PoolOptions::new("strip"), 1);
    let bytes: Vec<u8> = (0..4096).map(|n| (n % 251) as u8).collect();
    let mut page = pool.alloc().unwrap();
    page.copy_from_slice(&bytes);
    page.advance(96);
    page.truncate(3000);
    page.truncate(3001);
    assert_eq!((page.offset(), page.len(), &*page), (96, 3000, &bytes[96..3096]));
    let front = page.split_to(1000);
    assert_eq!((&*front, &*page), (&bytes[96..1096], &bytes[1096..3096]));
    drop(front);

    let mut frag = page.freeze();
    let mut other = frag.clone();
    frag.advance(0);
    frag.advance(500);
    frag.truncate(0);
    assert_eq!((frag.len(), frag.offset()), (0, 1596));
    other.advance(1000);
    other.truncate(usize::MAX);
    assert_eq!(&*other, &bytes[2096..3096]);
    let (front, back) = (other.split_to(10), other.split_off(20));
    assert_eq!((&*front, &*other, &*back), (&bytes[2096..2106], &bytes[2106..2126], &bytes[2126..3096]));
    let other = other.try_into_page().unwrap_err();
    drop((front, back, frag));
    // The number of holders is the same as at the start.
    let mut sole = other.try_into_page().unwrap();
    assert_eq!((&*sole, sole.offset()), (&bytes[2106..2126], 2106));
    sole.advance(20);
    assert!(sole.is_empty() && sole.prepend(&[7; 2126]));
    assert_eq!((sole.len(), sole[2125], sole.offset()), (2126, 7, 0));
    drop(sole);
    close_balanced(pool, &domain);
}

/// Proves POOL-6 and NET-6: a fragment cannot grow into bytes of its page that are posted to a
/// device in another buffer, and it cannot be written while the page has another holder.
#[test]
fn a_page_that_is_split_between_buffers() {
    let (mut pool, domain) = pool(PoolOptions::new("buffers"), 1);
    let mut posted = pool.alloc().unwrap();
    let mut frag = posted.split_off(2048).freeze();
    let mut page = frag.clone();
    assert!(!page.prepend(b"x") && !frag.prepend(b"x"), "a clone, and a part that is posted");
    drop(page);
    // These bytes have one holder, and other bytes of the page have another.
    assert!(!frag.prepend(b"x") && !frag.is_writable());
    assert_eq!(frag.write_at(0, b"x"), Err(WriteError::Shared));
    let error = frag.write_at(2047, b"xy").unwrap_err();
    assert_eq!(error, WriteError::OutOfRange(OutOfRange { offset: 2047, len: 2, have: 2048 }));
    let mut frag = frag.try_into_page().unwrap_err();
    page = frag.clone();
    // The device is done with its buffer, which is dropped on another thread.
    thread::scope(|s| s.spawn(|| drop(posted)).join().unwrap());
    assert!(!frag.is_writable() && !frag.prepend(b"x"));
    drop(page);
    frag.write_at(0, b"xyz").unwrap();
    frag.advance(1);
    assert!(frag.prepend(b"vw") && frag.is_writable());
    assert_eq!((&frag[..4], frag.offset()), (&b"vwyz"[..], 2047));
    drop(frag);
    close_balanced(pool, &domain);
}

/// Proves POOL-6: the bytes behind a fragment belong to it while no other value is on its page.
#[test]
fn the_tail_of_a_page_is_separated_once() {
    let (mut pool, domain) = pool(PoolOptions::new("tail"), 1);
    let mut frag = pool.alloc().unwrap().freeze_range(100..164);
    let clone = frag.clone();
    assert!(frag.split_tail().is_none(), "a clone is on the page");
    drop(clone);
    let mut tail = frag.split_tail().unwrap();
    assert_eq!((tail.offset(), tail.len(), frag.offset(), frag.len()), (164, 4096 - 164, 100, 64));
    assert!(frag.split_tail().is_none() && tail.split_tail().is_none(), "it is another value on the page");
    tail.as_mut_slice()[..3].copy_from_slice(b"abc");
    let next = tail.split_to(3).freeze();
    assert!(frag.continues(&next));
    frag.join(next).unwrap();
    assert_eq!((frag.len(), &frag[64..]), (67, &b"abc"[..]));
    drop(frag);
    assert!(pool.alloc().is_none(), "the tail is still out");
    drop(tail);
    let mut page = pool.alloc().unwrap();
    assert!(page.split_tail().is_none(), "it is full");
    page.truncate(4095);
    assert_eq!(page.split_tail().unwrap().len(), 1);
    // A part that a device kept is not a tail.
    page.truncate(2000);
    let kept = page.split_tail().unwrap();
    pool.quarantine(kept);
    assert!(page.split_tail().is_none());
    drop(page);
    close_balanced(pool, &domain);
}

/// Proves NET-6 and POOL-10: a buffer that a device kept when it stopped answering is not reused. A
/// fragment of the same page works as before, and cannot grow into the buffer.
#[test]
fn a_buffer_in_quarantine() {
    let (mut pool, domain) = pool(PoolOptions::new("kept"), 2);
    let mut kept = pool.alloc().unwrap();
    let mut frag = kept.split_off(2048).freeze();
    frag.advance(10);
    pool.quarantine(kept);
    assert_eq!(pool.stats().quarantined, 0, "the fragment is still out");
    // As far as this process knows, this is the sole holder of the page.
    frag.write_at(0, b"mine").unwrap();
    assert!(!frag.prepend(b"x"));
    let mut page = frag.try_into_page().unwrap();
    assert!(!page.prepend(&[0; 10]) && !page.prepend(&[0; 11]));
    assert_eq!((page.len(), &page[..4]), (2038, &b"mine"[..]));
    drop(page);
    let stats = pool.close().stats;
    assert_eq!((stats.quarantined, stats.inflight(), domain.maps()), (1, 0, domain.unmaps()));
}

/// Proves POOL-6: a range beyond the part is refused, inside the page or not, and the page is
/// returned all the same.
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
        panics(|| page.advance(range.end.max(51)));
        panics(|| drop(page.split_to(range.end.max(51))));
        let mut frag = page.freeze_range(0..40);
        panics(|| frag.advance(range.end.max(41)));
        panics(|| drop(frag.split_to(range.end.max(41))));
        panics(|| drop(frag.slice(range)));
    }
    close_balanced(pool, &domain);
}

/// Proves POOL-10: peer-shared bytes are copied within their bounds, and a copy that fails writes
/// nothing.
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

/// Proves POOL-6: an offset does not overflow for any page order.
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
