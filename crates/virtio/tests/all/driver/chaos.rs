//! Devices that act at random: mostly as they should, and sometimes in any other way. The driver
//! neither panics nor loses a page.

use std::collections::HashSet;

use netmem_packet::{Packet, TxQueue, Verdict, XdpFrame};
use netmem_pool::{PAGE_SIZE, PeerShared, lingering};
use netmem_testing::driver::hostile::{Behaviour, DeviceRing, FORMATS, Harness, OnStop};
use netmem_testing::driver::*;
use netmem_virtio::driver::{NetOptions, RxMode};
use netmem_virtio::net::VnetHdr;
use netmem_virtio::virtqueue::{Desc, Event, PackedDesc};

fn options(rng: &mut Rng) -> (RxMode, NetOptions) {
    let entries = 32 << rng.below(4);
    let pages = 512 + rng.below(512) as usize;
    let (mode, options) = match rng.below(5) {
        0 => (RxMode::Small, NetOptions::new(RxMode::Small)),
        1 => (RxMode::Small, NetOptions::new(RxMode::Small).buffers_per_page(2)),
        2 => (RxMode::Mergeable, NetOptions::new(RxMode::Mergeable)),
        3 => (RxMode::Mergeable, NetOptions::new(RxMode::Mergeable).max_frame(65549)),
        _ => (RxMode::Big, NetOptions::new(RxMode::Big).max_frame(9014)),
    };
    let cache = [0, 16, 512][rng.below(3) as usize];
    (mode, options.ring_size(entries).pages(pages).cache(cache))
}

/// Any number, most likely one that matters.
fn number(rng: &mut Rng) -> u64 {
    let near = [0, 1, 2, 17, 18, 32, 64, 128, 256, 1530, 4096, 0x8000, 0xffff, 0x1_0000, u64::from(u32::MAX)];
    match rng.below(3) {
        0 => near[rng.below(near.len() as u64) as usize],
        1 => near[rng.below(near.len() as u64) as usize].wrapping_add(rng.below(5)).wrapping_sub(2),
        _ => rng.next(),
    }
}

/// Receives a frame into as many chains as the dice say, with a header that is mostly right.
fn deliver(harness: &mut Harness, mode: RxMode, rng: &mut Rng) {
    let want = if mode == RxMode::Mergeable { 1 + rng.below(4) as u16 * (rng.below(2) as u16) } else { 1 };
    if !harness.ring.may_have(want) {
        return;
    }
    for i in 0..want {
        let Some(head) = harness.ring.take() else { return };
        let d = harness.ring.chain(head)[0];
        let more = u16::from(rng.below(200) == 0);
        let mut header = VnetHdr { num_buffers: want + more, ..VnetHdr::PLAIN };
        if rng.below(20) == 0 {
            header.gso_type = rng.next() as u8;
            header.flags = rng.next() as u8;
            header.csum_start = number(rng) as u16;
            header.gso_size = number(rng) as u16;
        }
        let bytes = if i == 0 { header.to_bytes().to_vec() } else { vec![rng.next() as u8; 12] };
        harness.device.try_write(d.addr, &bytes);
        let most = if mode == RxMode::Big { 9000 } else { 1500 };
        harness.ring.write(u32::from(head), 26 + rng.below(most) as u32);
    }
    harness.ring.publish();
}

/// Something that no device should do.
fn lie(ring: &mut DeviceRing, rng: &mut Rng) {
    if ring.is_packed() {
        return packed_lie(ring, rng);
    }
    match rng.below(6) {
        0 => ring.add_used(number(rng) as u32, number(rng) as u32),
        1 => ring.split().set_used_idx(ring.used.wrapping_add(number(rng) as u16)),
        2 => {
            let id = ring.split().avail_entry(rng.next() as u16);
            ring.add_used(u32::from(id), number(rng) as u32);
        }
        3 => ring.split().set_used_entry(rng.next() as u16, number(rng) as u32, number(rng) as u32),
        4 => ring.split().set_desc(
            rng.next() as u16,
            Desc { addr: rng.next(), len: rng.next() as u32, flags: rng.next() as u16, next: rng.next() as u16 },
        ),
        _ => {
            ring.split().set_avail_entry(rng.next() as u16, rng.next() as u16);
            ring.split().set_used_flags(rng.next() as u16);
            if rng.below(4) == 0 {
                ring.split().set_avail_idx(rng.next() as u16);
            }
        }
    }
}

/// The same of a packed ring.
fn packed_lie(ring: &mut DeviceRing, rng: &mut Rng) {
    let (kind, size) = (rng.below(6), ring.size);
    let words = ring.packed();
    // Half of them with flags that the driver believes.
    let flags = if rng.below(2) == 0 { words.used.used() } else { rng.next() as u16 };
    let d = PackedDesc { addr: rng.next(), len: number(rng) as u32, id: number(rng) as u16, flags };
    match kind {
        0 => ring.add_used(number(rng) as u32, number(rng) as u32),
        1 => words.ring.set_used_desc(rng.below(size.into()) as u16, d),
        2 => {
            let id = words.seen_id(rng.next()).unwrap_or(0);
            ring.add_used(u32::from(id), number(rng) as u32);
        }
        3 => words.ring.set_used_desc(words.used.offset(), d),
        4 => words.ring.set_desc(rng.below(size.into()) as u16, d),
        _ => {
            words.ring.set_device_event(Event { position: rng.next() as u16, flags: rng.next() as u16 });
            words.used = words.used.step(rng.below(u64::from(size) + 1) as u16, size);
        }
    }
}

/// Receives with a program whose verdicts are random. Keeps the packets that pass.
fn receive_some(harness: &mut Harness, held: &mut Vec<Packet<PeerShared>>, rng: &mut Rng) {
    let mut verdicts = Rng(rng.next());
    let pass = |p: Packet<PeerShared>| {
        assert_eq!(p.len(), p.fragments().map(netmem_pool::Frag::len).sum::<usize>());
        assert_eq!(p.to_vec().len(), p.len());
        held.push(p);
    };
    let run = |f: &mut XdpFrame<PeerShared>| {
        let _ = f.adjust_head(verdicts.below(300) as i32 - 250);
        let _ = f.adjust_tail(verdicts.below(300) as i32 - 150);
        match verdicts.below(6) {
            0 => Verdict::Drop,
            1 => Verdict::Aborted,
            2 => Verdict::Tx,
            3 => Verdict::Redirect,
            _ => Verdict::Pass,
        }
    };
    if rng.below(3) == 0 {
        receive(&mut harness.pair.rx, &mut Program::<true, _, _, _> { run, pass, tx: drop });
    } else {
        receive(&mut harness.pair.rx, &mut Program::<false, _, _, _> { run, pass, tx: drop });
    }
}

/// Sends a packet that was kept.
fn send_one(harness: &mut Harness, held: &mut Vec<Packet<PeerShared>>, rng: &mut Rng) {
    if let Some(p) = held.pop() {
        // Some are shared, so that the header is a separate segment. Not whole pages: the accounts
        // treat those as a pool's, which are mapped once.
        let copy = Some(p.head().clone()).filter(|head| head.len() < PAGE_SIZE);
        if let Err(p) = harness.pair.tx.send(p) {
            held.push(p);
        }
        if rng.below(2) == 0 {
            held.extend(copy.map(Packet::new));
        }
        harness.pair.tx.flush();
    }
}

/// Returns what stopped the receive queue, and how many frames came.
fn chaos(seed: u64) -> (Option<&'static str>, u64) {
    let mut rng = Rng(seed);
    let (mode, options) = options(&mut rng);
    let mut harness = Harness::in_format(FORMATS[rng.below(4) as usize], options);
    let mut held: Vec<Packet<PeerShared>> = Vec::new();
    // Some devices are honest for long.
    let honesty = 20 << rng.below(8);
    for _ in 0..3000 {
        if rng.below(honesty) == 0 {
            let ring = if rng.below(3) == 0 { &mut harness.tx } else { &mut harness.ring };
            lie(ring, &mut rng);
        }
        match rng.below(8) {
            0..3 => deliver(&mut harness, mode, &mut rng),
            3 => {
                if let Some(head) = harness.tx.may_have(1).then(|| harness.tx.take()).flatten() {
                    harness.tx.add_used(u32::from(head), 0);
                }
            }
            4 => receive_some(&mut harness, &mut held, &mut rng),
            5 => send_one(&mut harness, &mut held, &mut rng),
            6 => {
                harness.pair.tx.complete();
            }
            _ => {
                held.truncate(rng.below(40) as usize);
            }
        }
    }
    let (stats, pool) = (harness.pair.rx.stats(), harness.pair.rx.pool_stats());
    let forwarded = stats.transmitted + stats.redirected;
    assert_eq!(stats.frames, stats.passed + stats.dropped + forwarded + stats.aborted);
    let out: HashSet<u32> = held.iter().flat_map(|p| p.fragments().map(netmem_pool::Frag::index)).collect();
    assert!(mode == RxMode::Big || pool.inflight() >= out.len() as u64);
    // The end comes in one of several ways, and packets go before it or after.
    match rng.below(4) {
        0 => harness.device.kill(),
        1 => harness.device.behave(|b: &mut Behaviour| b.on_stop = OnStop::Refuse),
        _ => {}
    }
    let early = rng.below(2) == 0;
    if early {
        held.clear();
    }
    drop(harness.pair.tx);
    let closed = harness.pair.rx.close().unwrap();
    let s = closed.stats;
    assert_eq!(s.allocated(), s.returned() + s.quarantined + closed.outstanding, "seed {seed}: {s:?}");
    assert!(!early || closed.outstanding == 0, "seed {seed}: {} are out", closed.outstanding);
    drop(harness.net);
    std::thread::spawn(move || drop(held)).join().unwrap();
    harness.accounting.assert_balanced();
    (stats.stopped.map(|e| e.name()), stats.frames)
}

/// Proves NET-6 and POOL-1, for devices that act at random.
#[test]
fn anything_at_all() {
    let seeds = if cfg!(debug_assertions) { 300 } else { 1500 };
    let (mut ends, mut frames) = (HashSet::new(), 0);
    for seed in 0..seeds {
        let (end, received) = chaos(seed);
        ends.insert(end);
        frames += received;
    }
    until(|| lingering().is_empty());
    // It got far, and everywhere.
    assert!(frames > seeds * 20, "{frames} frames");
    for name in ["bad_id", "not_posted", "bad_length", "index_jump", "bad_buffer_count", "missing_buffers"] {
        assert!(ends.contains(&Some(name)), "{name} is missing in {ends:?}");
    }
    assert!(ends.contains(&None));
}
