//! Fragments as `bytes::Bytes`: the pool's memory in programs that do not know the pool.

use crate::common::{alloc, close_balanced, pool, provider};
use bytes::{Buf, BufMut, Bytes};
use netmem_pool::{Page, PoolOptions, Private, RegionOptions, RegionProvider, lingering};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;

/// Proves POOL-6 and POOL-5: no byte is copied, slices and clones hold the page, and the page is
/// returned when the last of them is dropped, on another thread.
#[test]
fn the_last_bytes_return_the_page() {
    let (mut pool, domain) = pool(PoolOptions::new("bytes"), 1);
    for round in 0..3u8 {
        let mut page = alloc(&mut pool, 1).remove(0);
        page.as_mut_slice().fill(round);
        page.as_mut_slice()[1000] = 77;
        let at = page.as_ptr().cast_const();
        let bytes = Bytes::from(page.freeze_range(500..2000));
        assert_eq!((bytes.as_ptr(), bytes.len()), (at.wrapping_add(500), 1500), "the page itself, not a copy");
        let mut tail = bytes.slice(500..);
        assert_eq!(tail.as_ptr(), at.wrapping_add(1000));
        let clone = tail.clone();
        drop(bytes);
        assert_eq!((tail.get_u8(), tail.get_u8(), tail.len()), (77, round, 998));
        drop(tail);
        assert!(pool.alloc().is_none(), "a clone is still out");
        let (send, receive) = mpsc::channel::<Bytes>();
        let other = thread::spawn(move || receive.recv().unwrap().iter().map(|&b| u32::from(b)).sum::<u32>());
        send.send(clone).unwrap();
        assert_eq!(other.join().unwrap(), 77 + 999 * u32::from(round));
        assert_eq!(pool.stats().inflight(), 0);
    }
    assert_eq!(close_balanced(pool, &domain).mapped, 1);
}

/// Proves POOL-11: bytes may outlive the pool, its provider and every other handle. When the last
/// of them is dropped, the pool is freed.
#[test]
fn bytes_outlive_their_pool() {
    let (mut pool, domain) = pool(PoolOptions::new("bytes that outlive"), 4);
    let mut page = pool.alloc().unwrap();
    page.as_mut_slice().fill(9);
    let bytes = Bytes::from(page.freeze());
    let part = bytes.slice(4000..);
    let closed = pool.close();
    assert_eq!((closed.outstanding, domain.maps() - domain.unmaps()), (1, 1));
    drop(bytes);
    let lingers = || lingering().iter().any(|l| l.name == "bytes that outlive" && l.pages == 1);
    assert!(lingers());
    assert!(thread::spawn(move || part.iter().all(|&b| b == 9)).join().unwrap());
    assert!(!lingers());
    assert_eq!(domain.maps(), domain.unmaps());
}

/// Proves POOL-6: a fragment is one of several holders, also if other holders are `Bytes`.
#[test]
fn bytes_and_fragments_share_a_page() {
    let (mut pool, domain) = pool(PoolOptions::new("bytes and fragments"), 1);
    let frag = pool.alloc().unwrap().freeze();
    let bytes = Bytes::from(frag.slice(10..20));
    let frag = frag.try_into_page().unwrap_err();
    assert!(!frag.clone().prepend(b"x"), "shared with the bytes");
    drop(bytes);
    drop(frag.try_into_page().unwrap());
    // Empty bytes hold the page too.
    let none = Bytes::from(pool.alloc().unwrap().freeze_range(7..7));
    assert!(none.is_empty());
    drop(none);
    close_balanced(pool, &domain);
}

/// Proves POOL-6: the fragment of bytes is found by their address, also for clones and slices
/// of the bytes. The fragment that is found holds the page, as any fragment does.
#[test]
fn a_fragment_is_found_by_the_address_of_its_bytes() {
    let pool = PoolOptions::new("found").build_shared(provider::<Private>(4), None).unwrap();
    let frag = pool.alloc().unwrap().freeze_range(100..3000);
    assert!(pool.frag_of(&frag).is_none(), "it is in no Bytes");
    let bytes = Bytes::from(frag);
    let found = pool.frag_of(&bytes).unwrap();
    assert_eq!((found.offset(), found.len(), found.as_ptr()), (100, 2900, bytes.as_ptr()));
    let slice = bytes.slice(1000..1010);
    let part = pool.frag_of(&slice.clone()).unwrap();
    assert_eq!((part.offset(), part.len()), (1100, 10));
    drop((bytes, slice, part));
    pool.reclaim();
    assert_eq!(pool.stats().inflight, 1, "what was found keeps the page");
    assert!(pool.frag_of(&found).is_none(), "its Bytes are gone");
    let mut page = found.try_into_page().unwrap();
    page.as_mut_slice()[0] = 1;
    drop(page);
    assert_eq!(pool.close().outstanding, 0);
}

/// Bytes that may be written again are not found: their owner holds a `Page` of all bytes or of
/// some.
#[test]
fn bytes_that_can_be_written_again_are_not_found() {
    let pool = PoolOptions::new("not found").build_shared(provider::<Private>(4), None).unwrap();
    // An owner that gets the page back when the Bytes are gone.
    struct Shared(Arc<Page<Private>>);
    impl AsRef<[u8]> for Shared {
        fn as_ref(&self) -> &[u8] {
            self.0.as_slice()
        }
    }
    let mut page = Arc::new(pool.alloc().unwrap());
    let bytes = Bytes::from_owner(Shared(page.clone()));
    assert!(pool.frag_of(&bytes).is_none());
    drop(bytes);
    Arc::get_mut(&mut page).unwrap().as_mut_slice()[0] = 1;
    // It was found before, and is now a page again.
    let page = Arc::into_inner(page).unwrap();
    let bytes = Bytes::from(page.freeze());
    let found = pool.frag_of(&bytes).unwrap();
    drop(bytes);
    let page = Arc::new(found.try_into_page().unwrap());
    let bytes = Bytes::from_owner(Shared(page));
    assert!(pool.frag_of(&bytes).is_none());
    // The other half of the page is written while the `Bytes` live, so the lookup must not return a
    // fragment of it.
    let mut page = pool.alloc().unwrap();
    let half = page.split_to(2048);
    let bytes = Bytes::from(half.freeze());
    assert!(pool.frag_of(&bytes).is_none());
    page.as_mut_slice()[0] = 1;
}

/// Looks up addresses around the pages: on the boundary of two pages, in other pools, and in no
/// pool.
#[test]
fn only_bytes_of_one_page_of_these_regions_are_found() {
    let shared = provider::<Private>(4);
    let pool = PoolOptions::new("addresses").build_shared(shared.clone(), None).unwrap();
    let other = PoolOptions::new("elsewhere").build_shared(provider::<Private>(4), None).unwrap();
    let sibling = PoolOptions::new("sibling").build_shared(shared, None).unwrap();
    let theirs = Bytes::from(other.alloc().unwrap().freeze());
    assert!(pool.frag_of(&theirs).is_none() && other.frag_of(&theirs).is_some());
    let near = Bytes::from(sibling.alloc().unwrap().freeze());
    assert!(pool.frag_of(&near).is_some(), "a page of the same region, of another pool");
    assert_eq!(sibling.close().outstanding, 1);
    assert!(pool.frag_of(&near).is_some(), "it lingers");
    for foreign in [Bytes::from_static(b"static"), Bytes::from(vec![1; 5000]), Bytes::new(), near.slice(7..7)] {
        assert!(pool.frag_of(&foreign).is_none());
    }
    // All pages are frozen, so the neighbours are too.
    let all: Vec<Bytes> = (0..3).map(|_| Bytes::from(pool.alloc().unwrap().freeze())).collect();
    let mut pages: Vec<&Bytes> = all.iter().chain([&near]).collect();
    pages.sort_by_key(|bytes| bytes.as_ptr());
    for pair in pages.windows(2) {
        let first = pair[0];
        assert_eq!(first.as_ptr().wrapping_add(first.len()), pair[1].as_ptr(), "neighbours in memory");
        // SAFETY: both pages are held and not written, and they are neighbours in one mapping.
        let both = unsafe { std::slice::from_raw_parts(first.as_ptr(), 2 * first.len()) };
        assert!(pool.frag_of(both).is_none());
        assert!(pool.frag_of(&both[4090..4100]).is_none());
        assert_eq!(pool.frag_of(&both[4090..4096]).unwrap().offset(), 4090);
        assert_eq!(pool.frag_of(&both[4096..4097]).unwrap().offset(), 0);
    }
}

/// Fragments compare and hash as their bytes, and are found in a map by bytes.
#[test]
fn fragments_are_keys() {
    let (mut pool, domain) = pool(PoolOptions::new("keys"), 4);
    let [first, second, other] = [b"key", b"key", b"yek"].map(|text| {
        let mut page = pool.alloc().unwrap();
        page.copy_from(100, text).unwrap();
        page.freeze_range(100..103)
    });
    assert!(first == second && first != other && first == b"key"[..]);
    let mut map = HashMap::from([(first, 1), (other, 2)]);
    assert_eq!((map.get(&b"key"[..]), map.get(&second)), (Some(&1), Some(&1)));
    assert_eq!(map.insert(second, 3), Some(1));
    assert_eq!(map.remove(&b"yek"[..]), Some(2));
    drop(map);
    close_balanced(pool, &domain);
}

/// A fragment is a `Buf`: what is read is taken off, and bytes that are taken out of it are not
/// copied.
#[test]
fn a_fragment_is_read_as_a_buffer() {
    let (mut pool, domain) = pool(PoolOptions::new("buf"), 1);
    let mut page = pool.alloc().unwrap();
    page.copy_from(0, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    let mut frag = page.freeze_range(..=7);
    let at = frag.as_ptr();
    assert_eq!((frag.get_u8(), frag.get_u16(), frag.remaining(), frag.len()), (1, 0x0203, 5, 5));
    let bytes = frag.copy_to_bytes(2);
    assert_eq!((&bytes[..], bytes.as_ptr()), (&[4, 5][..], at.wrapping_add(3)));
    assert_eq!((frag.slice(1..), frag.slice(..=1)), (frag.slice(1..3), frag.slice(0..2)));
    let mut rest = [0; 3];
    frag.copy_to_slice(&mut rest);
    assert_eq!((rest, frag.has_remaining()), ([6, 7, 8], false));
    assert!(catch_unwind(AssertUnwindSafe(|| frag.get_u8())).is_err());
    drop((frag, bytes));
    close_balanced(pool, &domain);
}

/// A page is a `BufMut`: it grows up to its end, of pages of any size, and only while it is the
/// only value on the page.
#[test]
fn a_page_is_written_as_a_buffer() {
    for order in [0, 2] {
        let size = 4096 << order;
        let region = RegionOptions::new(2).order(order).huge_pages(false).build::<Private>().unwrap();
        let provider = RegionProvider::new(region);
        let mut pool = PoolOptions::new("bufmut").build(provider.clone(), None).unwrap();
        let mut page = pool.alloc().unwrap();
        assert_eq!((page.remaining_mut(), page.chunk_mut().len()), (0, 0));
        page.advance(10);
        page.truncate(0);
        assert_eq!(page.remaining_mut(), size - 10);
        page.put_u32(0x0102_0304);
        page.put_bytes(9, size - 16);
        assert_eq!((page.len(), &page[..5], page.remaining_mut()), (size - 12, &[1, 2, 3, 4, 9][..], 2));
        assert!(catch_unwind(AssertUnwindSafe(|| page.put_slice(&[0; 3]))).is_err());
        assert_eq!(page.len(), size - 12);
        // Another value has the last bytes now.
        let tail = page.split_off(100);
        assert_eq!(page.remaining_mut(), 0);
        drop(tail);
        assert_eq!(page.remaining_mut(), size - 110);
        drop(page);
        assert_eq!(pool.close().outstanding, 0);
        // A page of no pool.
        let mut page = provider.page().unwrap();
        page.truncate(1);
        assert_eq!(page.remaining_mut(), size - 1);
    }
}
