//! A device that is removed while its pages are in flight.

use crate::common::{Strict, alloc, assert_balanced, pool, provider};
use netmem_pool::{CountingDomain, Direction, DmaDomain, MapError, Page, PoolOptions, Private};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

/// Proves POOL-1: when a device is removed, all its pages are unmapped at once, wherever they are.
/// Pages that are returned later are neither synced nor unmapped, and nothing is allocated.
#[test]
fn everything_is_unmapped_at_once() {
    for cache in [0, 4, 64] {
        let (mut pool, domain) = pool(PoolOptions::new("gone").cache(cache), 32);
        let mut out = alloc(&mut pool, 16);
        drop(out.split_off(8));
        pool.device_gone();
        assert_eq!(domain.maps(), domain.unmaps(), "cache {cache}");
        let (unmaps, syncs) = (domain.unmaps(), domain.syncs());
        assert!(pool.alloc().is_none());
        pool.poll(|napi| {
            assert!(napi.alloc().is_none());
            let page = out.pop().unwrap();
            napi.sync_for_cpu(&page, 0..64);
            napi.sync_for_device(&page, 0..64);
        });
        drop(out.pop());
        thread::scope(|s| s.spawn(|| drop(out.split_off(3))).join().unwrap());
        pool.device_gone();
        assert_eq!(pool.stats().inflight(), 3, "{:?}", pool.stats());
        let closed = pool.close();
        assert_eq!(closed.outstanding, 3);
        drop(out);
        assert_eq!((domain.unmaps(), domain.syncs()), (unmaps, syncs));
        assert_eq!((closed.stats.mapped, closed.stats.unmapped), (domain.maps(), domain.unmaps()));
    }
}

/// Proves POOL-10 and POOL-1: syncs are limited to the bytes in use.
#[test]
fn syncs_cover_the_bytes_in_use() {
    let (mut pool, domain) = pool(PoolOptions::new("sync"), 4);
    pool.poll(|napi| {
        let mut page = napi.alloc().unwrap();
        napi.sync_for_cpu(&page, 0..60);
        drop(page.split_off(100));
        napi.sync_for_device(&page, 0..4096);
    });
    assert_eq!(domain.syncs(), (2, 60 + 100));
}

/// A domain that records the direction of every call.
#[derive(Debug, Default)]
struct Directions(Mutex<Vec<(&'static str, Direction)>>);

impl DmaDomain for Directions {
    fn map(&self, addr: *mut u8, _: usize, direction: Direction) -> Result<u64, MapError> {
        self.0.lock().unwrap().push(("map", direction));
        Ok(addr.addr() as u64)
    }

    fn unmap(&self, _: u64, _: usize) {}

    fn needs_sync(&self) -> bool {
        true
    }

    fn sync_for_device(&self, _: u64, _: usize, direction: Direction) {
        self.0.lock().unwrap().push(("sync", direction));
    }
}

/// Proves POOL-1: a pool maps its pages in its direction, and syncs the pages that it posts for
/// writing. If a device may not read a page, the page reports that, so that a transmit queue maps
/// it.
#[test]
fn directions() {
    use Direction::{Bidirectional, FromDevice, ToDevice};
    for direction in [None, Some(FromDevice), Some(ToDevice), Some(Bidirectional)] {
        let domain = Arc::new(Directions::default());
        let options = PoolOptions::new("direction").cache(2);
        let options = direction.into_iter().fold(options, PoolOptions::direction);
        let mut pool = options.build(provider::<Private>(4), Some(domain.clone())).unwrap();
        let page = pool.alloc().unwrap();
        pool.poll(|napi| napi.sync_for_device(&page, 0..64));
        let direction = direction.unwrap_or(Bidirectional);
        assert_eq!(*domain.0.lock().unwrap(), [("map", direction), ("sync", FromDevice)]);
        let id = if direction == FromDevice { 0 } else { Arc::as_ptr(&domain).addr() };
        assert_eq!((page.dma_domain(), pool.dma_domain()), (id, id));
        assert_eq!(page.dma_addr(), page.as_ptr().addr() as u64, "it is mapped in any case");
    }
}

/// Proves POOL-1: pages that are returned on other threads while the device is removed are unmapped
/// once each. No page is mapped for the next pool before that.
#[test]
fn late_returns_race_with_the_device() {
    const PAGES: usize = 64;
    for round in 0..200 {
        let memory = provider::<Private>(PAGES);
        let strict = Arc::new(CountingDomain::new(Strict::default()));
        let make =
            |name, cache| PoolOptions::new(name).cache(cache).build(memory.clone(), Some(strict.clone())).unwrap();
        let mut old = make("old", if round % 4 == 0 { 16 } else { 0 });
        let mut out: Vec<Page<Private>> = (0..PAGES).map(|_| old.alloc().unwrap()).collect();
        let start = Barrier::new(3);
        let next = thread::scope(|s| {
            let half = out.split_off(PAGES / 2);
            s.spawn(|| {
                start.wait();
                drop(half);
            });
            let next = s.spawn(|| {
                let mut new = make("new", 0);
                start.wait();
                drop(out);
                let got: Vec<_> = std::iter::from_fn(|| new.alloc()).collect();
                drop(got);
                new.close()
            });
            start.wait();
            old.device_gone();
            next.join().unwrap()
        });
        assert_eq!(next.outstanding, 0);
        let closed = old.close();
        assert_eq!(closed.outstanding, 0);
        assert_eq!((closed.stats.mapped, closed.stats.unmapped), (64, 64), "round {round}: {:?}", closed.stats);
        assert_eq!((strict.maps(), strict.unmaps()), (64 + next.stats.mapped, 64 + next.stats.mapped));
    }
}

/// Proves POOL-1: a device is removed, then another one uses the same memory.
#[test]
fn the_next_device_maps_again() {
    let memory = provider::<Private>(8);
    for _ in 0..3 {
        let domain = crate::common::counting();
        let mut pool = PoolOptions::new("next").build(memory.clone(), Some(domain.clone())).unwrap();
        let out = alloc(&mut pool, 8);
        pool.device_gone();
        drop(out);
        let stats = pool.stats();
        assert_balanced(stats, &domain);
        assert_eq!((stats.mapped, stats.unmapped), (8, 8));
    }
}

/// Proves NET-6 for the pool: a page in quarantine counts once, even if several parts of it are
/// quarantined. Pages of other pools are not counted.
#[test]
fn quarantine_counts_pages_once() {
    let (mut first, domain) = pool(PoolOptions::new("quarantine"), 8);
    let (mut other, other_domain) = pool(PoolOptions::new("bystander"), 8);
    let mut pages = alloc(&mut first, 3);
    let mut whole = pages.remove(0);
    let mut part = whole.split_off(2048);
    let quarter = part.split_off(1024);
    for page in [quarter, whole, part, pages.remove(0)] {
        first.quarantine(page);
    }
    first.quarantine(other.alloc().unwrap());
    let stats = first.stats();
    assert_eq!((stats.quarantined, stats.inflight()), (2, 1), "{stats:?}");
    drop(pages);
    let closed = first.close();
    assert_eq!((closed.outstanding, closed.stats.quarantined), (0, 2));
    assert_balanced(closed.stats, &domain);
    assert_eq!(domain.maps(), domain.unmaps());
    let closed = other.close();
    assert_eq!((closed.outstanding, closed.stats.quarantined, other_domain.unmaps()), (1, 0, 7));
}

/// Proves POOL-11: a page of which one part is quarantined and another is held stays valid for its
/// holder, also after the pool's end. Afterwards the page is not used again.
#[test]
fn quarantine_waits_for_other_holders() {
    for close_first in [false, true] {
        let domain = crate::common::counting();
        let supply = provider::<Private>(4);
        let mut pool = PoolOptions::new("held").build(supply.clone(), Some(domain.clone())).unwrap();
        let mut pages = alloc(&mut pool, 4);
        let mut page = pages.pop().unwrap();
        let index = page.index();
        let mut held = page.split_off(2048);
        held.copy_from(0, b"still here").unwrap();
        pool.quarantine(page);
        drop(pages);
        let held = held.freeze();
        if !close_first {
            drop(held.clone());
            pool.poll(|_| drop(held));
            // The other pages go on circulating, without a cache. The page in quarantine is not
            // among them.
            for _ in 0..8 {
                assert_ne!(pool.alloc().unwrap().index(), index);
            }
            assert_eq!(pool.stats().inflight(), 0);
            assert_eq!(pool.close().outstanding, 0);
        } else {
            assert_eq!(pool.close().outstanding, 1);
            // The page was unmapped together with the part in quarantine, and is in no domain.
            assert_eq!((&held[..10], held.dma_domain()), (&b"still here"[..], 0));
            thread::spawn(move || drop(held)).join().unwrap();
        }
        assert_eq!(domain.maps(), domain.unmaps());
        let left: Vec<_> = std::iter::from_fn(|| supply.page()).collect();
        assert_eq!(left.len(), 3);
        assert!(left.iter().all(|p| p.index() != index));
    }
}
