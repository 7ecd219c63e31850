//! Fragments as `bytes::Bytes`: our memory in programs that know nothing of it.
#![allow(clippy::unwrap_used)]

mod common;

use bytes::{Buf, Bytes};
use common::{alloc, close_balanced, pool};
use netmem_pool::{PoolOptions, lingering};
use std::sync::mpsc;
use std::thread;

/// Proves POOL-6 and POOL-5: no byte is copied, slices and clones hold the page, and it is home with the last of them,
/// which another thread drops.
#[test]
fn the_last_bytes_bring_the_page_home() {
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

/// Proves POOL-11: bytes may outlive the pool, its provider and every other handle; the last of them ends the pool.
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

/// Proves POOL-6: a fragment is one of several holders, in whichever shape the others have theirs.
#[test]
fn bytes_and_fragments_share_a_page() {
    let (mut pool, domain) = pool(PoolOptions::new("bytes and fragments"), 1);
    let frag = pool.alloc().unwrap().freeze();
    let bytes = Bytes::from(frag.slice(10..20));
    let frag = frag.try_into_page().unwrap_err();
    assert!(!frag.clone().prepend(b"x"), "shared with the bytes");
    drop(bytes);
    drop(frag.try_into_page().unwrap());
    // None are no exception: the page is held by them like by others.
    let none = Bytes::from(pool.alloc().unwrap().freeze_range(7..7));
    assert!(none.is_empty());
    drop(none);
    close_balanced(pool, &domain);
}
