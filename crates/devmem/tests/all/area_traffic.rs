//! A queue of our device receives into a user's area. The buffers are returned only through the
//! area's refill ring.
//!
//! ```text
//!   numbered datagrams ─► device ─► queue ─► AreaProvider::deliver ─► user: compares, holds some
//!          ▲                          ▲                                 │
//!          │ as many as were seen     └──────── refill ring ◄─── offsets, in no order
//! ```

use crate::memory_common::{Memory, until};
use crate::net_common::{Harness, InTests};
use netmem_devmem::{AreaProvider, AreaStats, Buffer, Queues, RefillRing};
use netmem_packet::SplitFrame;
use netmem_pool::{Device, Region};
use netmem_testing::flows::{Ends, Flows, number};
use netmem_virtio::driver::SplitOptions;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;

const FRAMES: u64 = 20_000;
const PAGES: usize = 300;
/// Buffers that the user may hold. They are most of the area, so that the queue often has no pages.
const HELD: usize = 250;
/// The most datagrams in flight.
const WINDOW: u64 = 512;

/// The headers, from host memory, and the buffer of the rest.
type Delivered = (Vec<u8>, Buffer);

/// The user: compares each frame with what was sent, and returns the buffers. Returns how often
/// each page was received into.
fn user(
    memory: &Memory,
    ring: &mut RefillRing<Device>,
    frames: mpsc::Receiver<Delivered>,
    allow: impl Fn(u64),
) -> BTreeMap<u64, u64> {
    let (mut rng, mut next) = (fastrand::Rng::with_seed(5), 0);
    let (mut held, mut used) = (Vec::<Buffer>::new(), BTreeMap::<u64, u64>::new());
    for (mut frame, buffer) in frames {
        let at = frame.len();
        frame.resize(at + buffer.len as usize, 0);
        memory.read_exact_at(&mut frame[at..], buffer.offset).expect("it is there");
        // There is one queue, so frames come in order and none is missing.
        assert_eq!(number(&frame, 1), next);
        next += 1;
        allow(FRAMES.min(next + WINDOW));
        let page = buffer.offset / 4096;
        assert!(held.iter().all(|b| b.offset / 4096 != page), "a page was received into while the user held it");
        *used.entry(page).or_default() += 1;
        held.push(buffer);
        if held.len() == HELD {
            rng.shuffle(&mut held);
            for buffer in held.split_off(rng.usize(..HELD)) {
                // Any offset in the buffer returns it.
                ring.push(buffer.offset + u64::from(rng.u32(..buffer.len)));
            }
        }
    }
    // Buffers that are held now are returned when the ring is dropped.
    assert_eq!(next, FRAMES);
    used
}

/// Receives `FRAMES` frames into an area whose ring has `entries` entries.
fn circulate(entries: usize) -> AreaStats {
    let (memory, limit, stop) = (Memory::pages(PAGES), Arc::new(AtomicU64::new(0)), AtomicBool::new(false));
    let region = Region::unmapped(memory.fd(), 0).expect("it can be cut");
    let (area, mut ring) = AreaProvider::new(region, entries).expect("there is memory");
    let mut harness: Harness = Harness::new(vec![Flows::new(1, limit.clone())], &[area.region()], SplitOptions::UDP_V4);
    let mut queues = harness.queues();
    queues.attach(0, area.clone()).expect("the device goes on");
    let (deliver, frames) = mpsc::channel();
    let control = harness.control();
    let allow = |frames| {
        limit.store(frames, Relaxed);
        // The device may have found no frames, and sleep.
        control.wake();
    };
    allow(WINDOW);
    let used = thread::scope(|s| {
        let user = s.spawn(|| {
            let _ends = Ends(&stop);
            user(&memory, &mut ring, frames, allow)
        });
        until(|| {
            let mut handler = |frame: SplitFrame| {
                let (head, payload, _) = frame.into_parts();
                let mut bytes = vec![0; head.len()];
                head.copy_to(0, &mut bytes).expect("all of it");
                let buffer = {
                    let frag = payload.into_iter().next().expect("it is longer than its headers");
                    area.deliver(frag).expect("it is the area's")
                };
                // Sending fails only if the user thread has failed.
                _ = deliver.send((bytes, buffer));
            };
            queues.queue(0).split().expect("it is attached").poll(|poll| poll.receive(64, &mut handler));
            area.stats().delivered == FRAMES || stop.load(Relaxed)
        });
        drop(deliver);
        user.join().expect("the user has compared all")
    });
    println!("{entries} entries: {} pages, up to {:?} times; {:?}", used.len(), used.values().max(), area.stats());
    assert!(used.len() > HELD && FRAMES > 10 * PAGES as u64, "{} pages were used", used.len());
    // The queue is stopped while the user holds buffers. They are returned when the user's end is
    // dropped.
    queues.detach(0).expect("the device goes on");
    drop((queues, harness));
    let before = ring.stats();
    assert_eq!((before.delivered, before.invalid), (FRAMES, 0), "{before:?}");
    assert!(before.returned < FRAMES, "some are out: {before:?}");
    drop(ring);
    let after = area.stats();
    drop(area);
    memory.assert_gone();
    after
}

/// Proves MEM-12 and POOL-10: a device receives many times an area's size into the area. Only the
/// ring returns the buffers. Each frame is complete, at the offset that the user was told.
#[test]
fn an_area_under_traffic() {
    let stats = circulate(512);
    assert_eq!(stats.ring_full, 0, "it has room for all pages: {stats:?}");
}

/// Proves MEM-12: the same with a ring that is full all the time.
#[test]
fn a_full_ring_under_traffic() {
    let stats = circulate(8);
    assert!(stats.ring_full > 100, "{stats:?}");
}
