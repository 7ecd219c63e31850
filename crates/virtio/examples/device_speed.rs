//! What the device costs: frames from the generator into a driver that only posts its buffers
//! again, on one thread. Run with
//! `cargo run --release -p netmem-virtio --example device_speed [ROW [FRAMES]]`: all rows, or those
//! with `ROW` in their name.
#![allow(clippy::unwrap_used)]

use anyhow::Context;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use netmem_testing::device::rings::{Queue, WRITE};
use netmem_testing::device::*;
use netmem_virtio::device::port::PortError;
use netmem_virtio::device::port::{Cross, Echo, Gen, Port, Sink};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::{DESC_WRITE, PackedDesc, Position};

const RING: u16 = 1024;
const BUFFER: usize = 2048;

/// How many frames of `size` bytes a row moves, if it was asked for.
fn frames_of(row: &str, size: usize) -> Option<u64> {
    let mut args = std::env::args().skip(1);
    row.contains(&args.next().unwrap_or_default()).then_some(())?;
    let asked = args.next().map(|n| n.parse().unwrap());
    Some(asked.unwrap_or((20_000_000 * 64 / size.max(64) as u64).max(200_000)))
}

/// Posts all that the device gave back again, after a `look` at each. Returns how many there were.
fn repost(r: &mut Ring, look: impl Fn(u16)) -> u64 {
    let (from, to) = (r.used, r.ring.used_idx());
    while r.used != to {
        let id = r.ring.used_entry(r.used).0 as u16;
        look(id);
        r.used = r.used.wrapping_add(1);
        r.ring.set_avail_entry(r.avail, id);
        r.avail = r.avail.wrapping_add(1);
    }
    if from != to {
        r.ring.set_avail_idx(r.avail);
    }
    u64::from(to.wrapping_sub(from))
}

fn receive(what: &str, size: usize, features: u64, each: usize) {
    receive_in(what, size, features, each, 1);
}

/// The same in memory of so many regions, which take turns with the buffers.
fn receive_in(what: &str, size: usize, features: u64, each: usize, regions: usize) {
    let Some(total) = frames_of(what, size) else { return };
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(size, None)).unwrap();
    let mut driver = Driver::connect(&device, features);
    let part = (MEMORY / regions) as u64;
    let parts =
        (0..regions as u64).map(|n| region(&driver.memory.file, GUEST + n * part, USER + n * part, part, n * part));
    driver.set_memory(&parts.collect::<Vec<_>>());
    driver.start_ring(RING);
    driver.front.set_vring_enable(0, true).unwrap();
    for n in 0..RING {
        let region = u64::from(n) % regions as u64;
        let addr = GUEST + region * part + BUFFERS as u64 + u64::from(n) * each as u64;
        driver.rings[0].chain(n, &[(addr, each as u32, DESC_WRITE)]);
    }
    let (start, mut posting) = (Instant::now(), 0u64);
    while frames(&driver.stats).0 < total {
        device.poll();
        let t = Instant::now();
        repost(&mut driver.rings[0], |_| {});
        posting += t.elapsed().as_nanos() as u64;
    }
    report(what, start, &driver, posting);
}

/// The device on a thread of its own, as the command runs it.
fn receive_across(what: &str, size: usize, features: u64) {
    let Some(total) = frames_of(what, size) else { return };
    let mut device = NetDevice::new(one_pair(), |_| Gen::new(size, None)).unwrap();
    let mut driver = Driver::connect(&device, features);
    driver.share_memory();
    driver.start_ring(RING);
    driver.front.set_vring_enable(0, true).unwrap();
    for n in 0..RING {
        let addr = GUEST + BUFFERS as u64 + u64::from(n) * BUFFER as u64;
        driver.rings[0].chain(n, &[(addr, BUFFER as u32, DESC_WRITE)]);
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Relaxed) {
                device.poll();
            }
        });
        let (start, mut posting, mut seen) = (Instant::now(), 0u64, 0u64);
        while seen < total {
            let t = Instant::now();
            let memory = &driver.memory;
            // The driver reads the header, as any driver must.
            let n = repost(&mut driver.rings[0], |id| {
                std::hint::black_box(memory.peek(BUFFERS + usize::from(id) * BUFFER));
            });
            if n == 0 {
                std::hint::spin_loop();
                continue;
            }
            seen += n;
            posting += t.elapsed().as_nanos() as u64;
        }
        stop.store(true, Relaxed);
        report(what, start, &driver, posting);
    });
}

fn transmit<P: Port>(what: &str, size: usize, port: impl FnMut(usize) -> Result<P, PortError>) {
    let Some(total) = frames_of(what, size) else { return };
    let mut device = NetDevice::new(one_pair(), port).unwrap();
    let mut driver = Driver::connect(&device, PLAIN);
    driver.share_memory();
    for index in 0..2 {
        driver.start_ring(RING);
        driver.front.set_vring_enable(index, true).unwrap();
    }
    for n in 0..RING {
        let addr = GUEST + BUFFERS as u64 + u64::from(n) * BUFFER as u64;
        driver.rings[0].chain(n, &[(addr, BUFFER as u32, DESC_WRITE)]);
        let addr = addr + u64::from(RING) * BUFFER as u64;
        driver.rings[1].chain(n, &[(addr, size as u32 + 12, 0)]);
    }
    let (start, mut posting) = (Instant::now(), 0u64);
    while frames(&driver.stats).1 < total {
        device.poll();
        let t = Instant::now();
        for r in &mut driver.rings {
            repost(r, |_| {});
        }
        posting += t.elapsed().as_nanos() as u64;
    }
    report(what, start, &driver, posting);
}

/// From one queue pair of a device to another: frames of `size` bytes in buffers of `each` bytes,
/// on both sides.
fn cross(what: &str, size: usize, features: u64, each: usize) {
    let Some(total) = frames_of(what, size) else { return };
    let mut ends = Cross::cable().into_iter();
    let options = Options { max_pairs: 2, ..one_pair() };
    let mut device = NetDevice::new(options, |_| Ok(ends.next().unwrap())).unwrap();
    let mut driver = Driver::start(&device, features | feature::MQ, 0);
    for index in 0..4 {
        driver.start_ring(RING);
        driver.front.set_vring_enable(index, true).unwrap();
    }
    let buffer = |n: usize| GUEST + (BUFFERS + n * each) as u64;
    let (chains, wire) = (usize::from(RING).min(64 * BUFFER / size.max(BUFFER)), size + VnetHdr::LEN);
    let pieces = wire.div_ceil(each);
    for n in 0..usize::from(RING) {
        driver.rings[2].chain(n as u16, &[(buffer(n), each as u32, DESC_WRITE)]);
    }
    for chain in 0..chains {
        let piece = |n| (buffer(usize::from(RING) + chain * pieces + n), each.min(wire - n * each) as u32, 0);
        driver.rings[1].chain((chain * pieces) as u16, &(0..pieces).map(piece).collect::<Vec<_>>());
    }
    let (start, mut posting) = (Instant::now(), 0u64);
    while frames(&driver.stats).0 < total {
        device.poll();
        let t = Instant::now();
        for r in [1, 2] {
            repost(&mut driver.rings[r], |_| {});
        }
        posting += t.elapsed().as_nanos() as u64;
    }
    report(what, start, &driver, posting);
}

/// The same as [`repost`] in a packed ring, whose chains have one descriptor each: it becomes
/// available again at its place.
fn repost_packed(q: &Queue, at: &mut Position, post: PackedDesc) -> u64 {
    let mut n = 0;
    loop {
        let d = q.packed().used_desc(at.offset());
        if !d.is_used(*at) {
            return n;
        }
        let next = at.step(RING, RING);
        // The address is still there.
        let flags = post.flags | next.available();
        q.packed().set_used_desc(at.offset(), PackedDesc { id: at.offset(), flags, ..post });
        *at = at.step(1, RING);
        n += 1;
    }
}

/// One packed ring: to the driver with a generator, or from it with a sink.
fn packed<P: Port>(what: &str, size: usize, ring: u64, rx: bool, port: impl FnMut(usize) -> Result<P, PortError>) {
    let Some(total) = frames_of(what, size) else { return };
    let features = feature::RING_PACKED | ring;
    let mut device = NetDevice::new(one_pair(), port).unwrap();
    let mut driver = Driver::connect(&device, PLAIN | features);
    driver.share_memory();
    let queue = Queue::start(&mut driver, usize::from(!rx), RING, features);
    let len = if rx { BUFFER as u32 } else { size as u32 + 12 };
    let post = PackedDesc { addr: 0, len, id: 0, flags: if rx { WRITE } else { 0 } };
    for id in 0..RING {
        let addr = GUEST + BUFFERS as u64 + u64::from(id) * BUFFER as u64;
        let flags = post.flags | Position::START.available();
        queue.packed().set_desc(id, PackedDesc { addr, len, id, flags });
    }
    let (start, mut posting, mut at) = (Instant::now(), 0u64, Position::START);
    let mut moved = 0;
    while moved < total {
        moved += device.poll() as u64;
        let t = Instant::now();
        if ring & feature::IN_ORDER != 0 && !rx {
            // The whole batch is one used descriptor, and its chains are posted again.
            while let d = queue.packed().used_desc(at.offset())
                && d.is_used(at)
            {
                loop {
                    let (offset, next) = (at.offset(), at.step(RING, RING));
                    queue
                        .packed()
                        .set_used_desc(offset, PackedDesc { id: offset, flags: post.flags | next.available(), ..post });
                    at = at.step(1, RING);
                    if offset == d.id {
                        break;
                    }
                }
            }
        } else {
            repost_packed(&queue, &mut at, post);
        }
        posting += t.elapsed().as_nanos() as u64;
    }
    report(what, start, &driver, posting);
}

fn report(what: &str, start: Instant, driver: &Driver, posting: u64) {
    let wall = start.elapsed().as_nanos() as f64;
    let (rx, tx) = frames(&driver.stats);
    let n = rx.max(tx) as f64;
    let busy = driver.stats.busy_ns.load(Relaxed) as f64 / n;
    println!("{what:<30} {busy:7.2} ns device   {:7.2} ns driver   {:7.2} ns in all", posting as f64 / n, wall / n);
}

fn main() -> anyhow::Result<()> {
    // Checked once, before the first row.
    std::env::args().nth(2).map(|frames| frames.parse::<u64>()).transpose().context("the number of frames")?;
    receive("gen 64 small", 64, PLAIN, BUFFER);
    receive_in("gen 64 small, two regions", 64, PLAIN, BUFFER, 2);
    receive("gen 64 mergeable", 64, MERGEABLE, BUFFER);
    receive("gen 1500 mergeable", 1500, MERGEABLE, BUFFER);
    receive("gen 64000 mergeable 4 KiB", 64000, MERGEABLE, 4096);
    receive_across("gen 64 small, two threads", 64, PLAIN);
    receive_across("gen 64 mergeable, two threads", 64, MERGEABLE);
    receive_across("gen 1500 merg., two threads", 1500, MERGEABLE);
    packed("gen 64 small, packed", 64, 0, true, |_| Gen::new(64, None));
    packed("gen 1500 small, packed", 1500, 0, true, |_| Gen::new(1500, None));
    packed("sink 64, packed", 64, 0, false, |_| Ok(Sink));
    packed("sink 64, packed in order", 64, feature::IN_ORDER, false, |_| Ok(Sink));
    transmit("sink 64", 64, |_| Ok(Sink));
    transmit("echo 64, both ways", 64, |_| Ok(Echo::new()));
    cross("cross 64 small", 64, PLAIN, BUFFER);
    cross("cross 1500 small", 1500, PLAIN, BUFFER);
    cross("cross 64000 mergeable 4 KiB", 64000, MERGEABLE, 4096);
    Ok(())
}
