//! A user's area with a refill ring, of device memory and of host memory.

use crate::memory_common::Memory;
use netmem_devmem::{AreaError, AreaProvider, AreaStats, RefillRing};
use netmem_pool::{Device, Frag, Memory as Kind, PagePool, PoolOptions, Private, Region, RegionOptions};
use std::sync::Arc;

fn area(pages: usize, entries: usize) -> (Memory, Arc<AreaProvider<Device>>, RefillRing<Device>) {
    let memory = Memory::pages(pages);
    let (provider, ring) = AreaProvider::new(Region::unmapped(memory.fd(), 0).unwrap(), entries).unwrap();
    (memory, provider, ring)
}

fn pool<M: Kind>(area: &Arc<AreaProvider<M>>) -> PagePool<M> {
    PoolOptions::new("rx").cache(8).build(area.clone(), None).unwrap()
}

fn stats(delivered: u64, returned: u64, invalid: u64, ring_full: u64) -> impl Fn(AreaStats) -> bool {
    move |s| (s.delivered, s.returned, s.invalid, s.ring_full) == (delivered, returned, invalid, ring_full)
}

/// Proves MEM-12: buffers circulate through the ring many times. When the queue has no pages left,
/// it drains the ring by itself.
#[test]
fn buffers_circulate() {
    fn run<M: Kind>(region: Region<M>) {
        let (area, mut ring) = AreaProvider::new(region, 64).unwrap();
        let mut pool = pool(&area);
        for round in 0..1000 {
            // Allocate in the poll context and outside of it, more pages than are left if no buffer
            // came back.
            let frags: Vec<Frag<M>> = if round % 2 == 0 {
                pool.poll(|napi| (0..20).map(|_| napi.alloc().unwrap().freeze_range(100..600)).collect())
            } else {
                (0..20).map(|_| pool.alloc().unwrap().freeze_range(100..600)).collect()
            };
            for frag in frags {
                let index = u64::from(frag.index());
                let buffer = area.deliver(frag).unwrap();
                assert_eq!((buffer.offset, buffer.len), (index * 4096 + 100, 500));
                ring.push(buffer.offset);
            }
        }
        ring.flush();
        let s = ring.stats();
        assert_eq!((s.delivered, s.returned, s.invalid), (20_000, 20_000, 0));
        assert_eq!(pool.stats().inflight(), 0);
    }
    run(Region::<Device>::unmapped(Memory::pages(40).fd(), 0).unwrap());
    run(RegionOptions::new(40).huge_pages(false).build::<Private>().unwrap());
}

/// Proves MEM-12: a full ring loses no buffer: the thread that fills it returns the buffers that
/// are in it.
#[test]
fn a_full_ring() {
    let (_memory, area, mut ring) = area(200, 4);
    let mut pool = pool(&area);
    let buffers: Vec<_> = (0..150).map(|_| area.deliver(pool.alloc().unwrap().freeze()).unwrap()).collect();
    buffers.iter().for_each(|b| ring.push(b.offset));
    // Four offsets wait in the ring; the push of the fifth returns all five.
    assert!(stats(150, 150, 0, 30)(ring.stats()), "{:?}", ring.stats());
    assert_eq!(pool.stats().inflight(), 0);
}

/// Proves MEM-12: offsets of pages that were not delivered, or not as often, and offsets that do
/// not exist are ignored and counted. A page that was delivered twice is returned to its pool with
/// the second return.
#[test]
fn what_comes_back_is_not_believed() {
    let (_memory, area, mut ring) = area(16, 64);
    let mut pool = pool(&area);
    let frag = pool.alloc().unwrap().freeze();
    let first = area.deliver(frag.slice(0..100)).unwrap();
    let second = area.deliver(frag.slice(2048..2148)).unwrap();
    drop(frag);
    for offset in [16 * 4096, u64::MAX, 15 * 4096, first.offset + 4095] {
        ring.push(offset);
    }
    ring.flush();
    assert!(stats(2, 1, 3, 0)(ring.stats()), "{:?}", ring.stats());
    assert_eq!(pool.stats().inflight(), 1);
    ring.push(second.offset);
    ring.push(second.offset);
    ring.flush();
    assert!(stats(2, 2, 4, 0)(ring.stats()), "{:?}", ring.stats());
    assert_eq!(pool.stats().inflight(), 0);
}

/// Proves MEM-12: when the user's end is dropped, all its buffers are returned, and nothing is
/// delivered any more. Fragments of another area are never delivered.
#[test]
fn the_user_goes() {
    let ((_memory, area, ring), (_others, other, _other_ring)) = (area(64, 8), area(64, 8));
    let (mut pool, mut others) = (pool(&area), pool(&other));
    assert_eq!(area.deliver(others.alloc().unwrap().freeze()), Err(AreaError::Foreign));
    for _ in 0..50 {
        area.deliver(pool.alloc().unwrap().freeze()).unwrap();
    }
    drop(ring);
    assert_eq!(pool.stats().inflight(), 0);
    assert_eq!(area.deliver(pool.alloc().unwrap().freeze()), Err(AreaError::Closed));
    assert_eq!((pool.stats().inflight(), others.stats().inflight()), (0, 0));
}

/// Proves MEM-12: if the user's end is dropped while a queue delivers, each page is returned once.
#[test]
fn the_user_goes_while_a_queue_delivers() {
    for _ in 0..200 {
        let (_memory, area, mut ring) = area(64, 8);
        let mut pool = pool(&area);
        let (first, deliver) = std::sync::mpsc::channel();
        std::thread::scope(|s| {
            s.spawn(|| {
                loop {
                    let Some(page) = pool.alloc() else { continue };
                    match area.deliver(page.freeze()) {
                        Ok(buffer) => _ = first.send(buffer.offset),
                        Err(error) => return assert_eq!(error, AreaError::Closed),
                    }
                }
            });
            for _ in 0..20 {
                ring.push(deliver.recv().unwrap());
            }
            drop(ring);
        });
        assert_eq!(pool.stats().inflight(), 0);
    }
}
