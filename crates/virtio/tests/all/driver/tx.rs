//! Transmission: what is sent leaves byte for byte, what cannot be sent is returned unchanged, and
//! a device that writes invalid values about completions stops the queue.

use netmem_packet::{Checksum, Gso, GsoKind, Meta, Packet, Poll, RxQueue, TxQueue, Verdict, XdpFrame};
use netmem_pool::{Page, PeerShared};
use netmem_testing::driver::hostile::{Behaviour, FEATURES, FORMATS, Harness};
use netmem_testing::driver::*;
use netmem_virtio::device::port::Echo;
use netmem_virtio::driver::{DeviceFault, NetOptions, RxMode, VirtioRx};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::{Desc, PackedDesc};

fn page(rx: &mut VirtioRx) -> Page<PeerShared> {
    rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap()
}

/// A packet of fragments of these bytes, each in a page of its own with `room` bytes before it.
fn packet(rx: &mut VirtioRx, room: usize, parts: &[&[u8]]) -> Packet<PeerShared> {
    let mut frags = parts.iter().map(|bytes| {
        let mut page = page(rx);
        page.copy_from(room, bytes).unwrap();
        page.freeze_range(room..room + bytes.len())
    });
    let mut packet = Packet::new(frags.next().unwrap());
    frags.for_each(|f| packet.push(f).unwrap());
    packet
}

/// Each frame of these sizes is among `frames`, as it was sent or with its addresses swapped.
fn assert_all_are_there(mut frames: Vec<Vec<u8>>, sizes: &[usize], mode: RxMode) {
    for (i, &size) in sizes.iter().enumerate() {
        let straight = frame(i as u64, size);
        let swapped = [&straight[6..12], &straight[..6], &straight[12..]].concat();
        let at = frames.iter().position(|f| *f == straight || *f == swapped);
        frames.swap_remove(at.unwrap_or_else(|| panic!("{mode}: the frame of {size} bytes is lost")));
    }
}

/// Proves NET-3 for transmission: frames go round between an echo and an XDP program, unchanged but
/// for the addresses, which the echo exchanges. In big-packet mode, whose pages are unmapped when
/// they are received, they are mapped again for each round.
#[test]
fn frames_go_round() {
    let cases = [
        (RxMode::Small, 1518, true),
        (RxMode::Small, 1518, false),
        (RxMode::Mergeable, 1518, true),
        (RxMode::Mergeable, 65549, true),
        (RxMode::Mergeable, 65549, false),
        (RxMode::Big, 65549, true),
        (RxMode::Big, 65549, false),
    ];
    for (mode, max, premapped) in cases {
        let mut device_thread = DeviceThread::one(Echo::new());
        let options = NetOptions::new(mode).max_frame(max).premapped(premapped);
        let accounting = Accounting::default();
        let (_net, mut pairs) = device_thread.probe(if premapped { accounting.count(options) } else { options });
        let mut pair = pairs.remove(0);
        let sizes = [60, 61, 500, 1400, max.min(1518), max / 2, max];
        for (i, size) in sizes.into_iter().enumerate() {
            let bytes = frame(i as u64, size);
            // In pieces, and the first one with no room for the header in half of the cases.
            let parts: Vec<&[u8]> = bytes.chunks(4000).collect();
            let room = if i % 2 == 0 { 64 } else { 0 };
            let packet = if mode == RxMode::Big {
                // Its pages are from no pool: what was received can be sent, so begin with a single
                // page of the pool.
                packet(&mut pair.rx, room, &[&bytes[..size.min(4000)]])
            } else {
                packet(&mut pair.rx, room, &parts)
            };
            pair.tx.send(packet).unwrap();
            pair.tx.flush();
        }
        let rounds = if cfg!(debug_assertions) { 2_000 } else { 50_000 };
        let (mut bounced, mut queue) = (0, Vec::new());
        until(|| {
            let tx = &mut pair.tx;
            pair.rx.poll(|poll| {
                let mut program = Program::<false, _, _, _> {
                    run: |f: &mut XdpFrame<PeerShared>| {
                        let mut head = [0u8; 14];
                        f.copy_to(0, &mut head).unwrap();
                        Verdict::Tx
                    },
                    pass: |_| {},
                    tx: |p: Packet<PeerShared>| queue.push(p),
                };
                poll.receive(64, &mut program);
                for p in queue.drain(..) {
                    bounced += 1;
                    tx.send(p).unwrap();
                }
                tx.flush();
                tx.complete();
            });
            bounced >= rounds
        });
        // The last round: everything is still there.
        let mut left: Vec<Vec<u8>> = Vec::new();
        until(|| {
            receive(&mut pair.rx, &mut |p: Packet<PeerShared>| left.push(p.to_vec()));
            pair.tx.complete();
            left.len() == sizes.len()
        });
        let sent = if mode == RxMode::Big { sizes.map(|size| size.min(4000)) } else { sizes };
        assert_all_are_there(left, &sent, mode);
        let s = pair.tx.stats();
        assert_eq!((s.frames, s.full, s.wrong_domain, s.no_offload), (s.completed, 0, 0, 0));
        // All but the first of them, which were of the pool.
        let mapped = if mode == RxMode::Big && premapped { s.frames - sizes.len() as u64 } else { 0 };
        assert_eq!(s.mapped, mapped, "{mode}");
        close_clean(pair);
        if premapped {
            accounting.assert_balanced();
        }
    }
}

/// The header lies in the head's own headroom where that is ours alone, else in a descriptor of its
/// own; the frame is not touched. A holder that the queue makes itself is none before the header is
/// written.
#[test]
fn where_the_header_goes() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Mergeable));
    let bytes = frame(1, 3000);
    let parts = [&bytes[..1000], &bytes[1000..1900], &bytes[1900..]];
    let own = [(64, false, 3), (12, false, 3), (11, false, 4), (0, false, 4), (64, true, 4)];
    let cases = own.into_iter().flat_map(|case| [(case, false), (case, true)]);
    for ((room, share, descriptors), hold) in cases {
        let packet = packet(&mut harness.pair.rx, room, &parts);
        let kept = share.then(|| packet.head().clone());
        let held = if hold {
            Some(harness.pair.tx.send_held(packet).unwrap())
        } else {
            harness.pair.tx.send(packet).unwrap();
            None
        };
        assert_eq!(harness.tx.available(), 0, "nothing is seen before it is flushed");
        harness.pair.tx.flush();
        let head = harness.tx.take().unwrap();
        let chain = harness.tx.chain(head);
        assert_eq!(chain.len(), descriptors, "{room} {share} {hold}");
        assert!(held.as_ref().is_none_or(|held| !held.is_writable()), "the device has the packet");
        assert!(chain.iter().all(|d| d.flags & netmem_virtio::virtqueue::DESC_WRITE == 0 && d.len > 0));
        let wire: Vec<u8> = chain.iter().flat_map(|d| harness.device.read(d.addr, d.len as usize)).collect();
        let header = VnetHdr { num_buffers: 0, ..VnetHdr::PLAIN };
        assert_eq!(wire, [&header.to_bytes()[..], &bytes].concat());
        harness.tx.add_used(u32::from(head), 0);
        assert_eq!((harness.pair.tx.posted(), harness.pair.tx.complete(), harness.pair.tx.posted()), (1, 1, 0));
        assert!(held.is_none_or(|held| share || held.is_writable()), "the device is done with it");
        if let Some(kept) = kept {
            let mut copy = vec![0; kept.len()];
            kept.copy_to(0, &mut copy).unwrap();
            assert_eq!(copy, parts[0]);
        }
    }
    // What the CPU wrote was synced: the frame ten times, and four headers in their places.
    let posted = harness.pair.rx.posted() as u64;
    let buffers = harness.accounting.synced.device.load(std::sync::atomic::Ordering::Relaxed) - (10 * 3000 + 4 * 12);
    assert_eq!(buffers % posted, 0);
    harness.assert_all_posted(RxMode::Mergeable);
    harness.close();
}

/// Fragments without bytes have no descriptors: many devices stop at one.
#[test]
fn empty_fragments() {
    for room in [64, 0] {
        let mut harness = Harness::new(NetOptions::new(RxMode::Mergeable));
        let bytes = frame(1, 100);
        let parts: [&[u8]; 5] = [&[], &bytes[..50], &[], &bytes[50..], &[]];
        let packet = packet(&mut harness.pair.rx, room, &parts);
        harness.pair.tx.send(packet).unwrap();
        harness.pair.tx.flush();
        let head = harness.tx.take().unwrap();
        let chain = harness.tx.chain(head);
        assert!(chain.iter().all(|d| d.len > 0), "{chain:?}");
        let wire: Vec<u8> = chain.iter().flat_map(|d| harness.device.read(d.addr, d.len as usize)).collect();
        assert_eq!(wire[12..], bytes);
        harness.close();
    }
}

/// A full queue refuses, and the packet comes back as it was; completions make room.
#[test]
fn a_full_queue() {
    for entries in [2u16, 4, 256] {
        let mut harness = Harness::new(NetOptions::new(RxMode::Small).ring_size(entries).pages(1024));
        for _ in 0..3 {
            let mut sent = 0;
            let refused = loop {
                let packet = packet(&mut harness.pair.rx, 64, &[&frame(sent, 70)]);
                match harness.pair.tx.send(packet) {
                    Ok(()) => sent += 1,
                    Err(packet) => break packet,
                }
            };
            // One entry is kept for a header that might not fit in place.
            assert_eq!(sent, u64::from(entries) - 1);
            assert_eq!((refused.to_vec(), refused.head().offset()), (frame(sent, 70), 64));
            harness.pair.tx.flush();
            assert_eq!(harness.pair.tx.complete(), 0);
            let heads: Vec<u16> = std::iter::from_fn(|| harness.tx.take()).collect();
            assert_eq!(heads.len() as u64, sent);
            // In another order than they were sent in.
            for head in heads.into_iter().rev() {
                harness.tx.add_used(u32::from(head), 0);
            }
            assert_eq!(harness.pair.tx.complete() as u64, sent);
        }
        assert_eq!(harness.pair.tx.stats().full, 3);
        harness.assert_all_posted(RxMode::Small);
        harness.close();
    }
    // More fragments than the ring has entries never fit.
    let mut harness = Harness::new(NetOptions::new(RxMode::Small).ring_size(2).pages(64));
    let packet = packet(&mut harness.pair.rx, 64, &[&[1; 60], &[2; 60]]);
    assert!(harness.pair.tx.send(packet).is_err());
    harness.close();
}

/// Proves POOL-3: pages that are completed inside of the poll return to the pool's cache.
#[test]
fn completions_in_the_poll_context() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Small));
    for i in 0..20 {
        harness.deliver(&frame(i, 100));
    }
    let tx = &mut harness.pair.tx;
    harness.pair.rx.poll(|poll| poll.receive(64, &mut |p: Packet<PeerShared>| tx.send(p).unwrap()));
    harness.pair.tx.flush();
    while let Some(head) = harness.tx.take() {
        harness.tx.add_used(u32::from(head), 0);
    }
    let before = harness.pair.rx.pool_stats();
    let tx = &mut harness.pair.tx;
    assert_eq!(harness.pair.rx.poll(|_| tx.complete()), 20);
    let after = harness.pair.rx.pool_stats();
    assert_eq!(after.recycle_cached - before.recycle_cached, 20);
    assert_eq!(after.recycle_ring, before.recycle_ring);
    harness.close();
}

/// Proves POOL-9: a page that the device cannot reach is refused, with a domain and without, and
/// the packet is unharmed.
#[test]
fn pages_of_another_device() {
    for (ours, theirs) in [(true, true), (true, false), (false, true), (false, false)] {
        let options = |premapped| NetOptions::new(RxMode::Small).premapped(premapped);
        let (mut first, mut second) = (DeviceThread::one(Echo::new()), DeviceThread::one(Echo::new()));
        let (_a, mut a) = first.probe(options(ours));
        let (_b, mut b) = second.probe(options(theirs));
        let (mut a, mut b) = (a.remove(0), b.remove(0));
        let foreign = packet(&mut b.rx, 64, &[&frame(1, 60)]);
        let refused = a.tx.send(foreign).unwrap_err();
        assert_eq!((refused.to_vec(), refused.head().offset()), (frame(1, 60), 64));
        // Not only in the head.
        let mut mixed = packet(&mut a.rx, 64, &[&frame(2, 60)]);
        mixed.push(refused.head().clone()).unwrap();
        assert!(a.tx.send(mixed).is_err());
        assert_eq!((a.tx.stats().wrong_domain, a.tx.stats().frames), (2, 0));
        drop(refused);
        close_clean(a);
        close_clean(b);
        assert_eq!(first.stats.queue_errors().map(|e| e.1).sum::<u64>(), 0);
    }
}

fn gso(kind: GsoKind, ecn: bool) -> Meta {
    let gso = Some(Gso { kind, size: 1000, headers: 54, ecn });
    Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso }
}

/// Frames that need what was not negotiated are refused; those that do not, are not.
#[test]
fn offloads_need_their_features() {
    let csum = Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: None };
    let verified = Meta { checksum: Checksum::Verified, gso: None };
    let (tso4, tso6) = (gso(GsoKind::TcpV4, false), gso(GsoKind::TcpV6, false));
    let never = [gso(GsoKind::TcpV4, true), gso(GsoKind::UdpFragment, false), gso(GsoKind::UdpSegment, false)];
    let tso = feature::HOST_TSO4 | feature::HOST_TSO6;
    for (without, can) in [
        (0, vec![csum, verified, tso4, tso6]),
        (feature::HOST_TSO4, vec![csum, verified, tso6]),
        (feature::HOST_TSO6, vec![csum, verified, tso4]),
        (tso, vec![csum, verified]),
        (tso | feature::CSUM, vec![verified]),
    ] {
        let behaviour = Behaviour { features: FEATURES & !without, ..Behaviour::default() };
        let mut harness = Harness::with(behaviour, NetOptions::new(RxMode::Mergeable));
        let mut refused = 0;
        for meta in [csum, verified, tso4, tso6].into_iter().chain(never) {
            let mut packet = packet(&mut harness.pair.rx, 64, &[&frame(1, 3000)]);
            packet.meta = meta;
            match harness.pair.tx.send(packet) {
                Ok(()) => assert!(can.contains(&meta), "{meta:?}"),
                Err(packet) => {
                    refused += 1;
                    assert!(!can.contains(&meta) && packet.meta == meta, "{meta:?}");
                }
            }
        }
        assert_eq!(harness.pair.tx.stats().no_offload, refused);
        harness.pair.tx.flush();
        for meta in can {
            let head = harness.tx.take().unwrap();
            let header = harness.device.read(harness.tx.split().desc(head).addr, 12);
            let header = VnetHdr::from_bytes(header.try_into().unwrap());
            assert_eq!(header.flags, if meta == verified { 0 } else { VnetHdr::NEEDS_CSUM });
            assert_eq!(header.gso_size, if meta.gso.is_some() { 1000 } else { 0 });
        }
        harness.close();
    }
}

/// Sends three packets, the second of three fragments, lets the device write invalid values, and
/// sees the queue stopped.
fn lie(format: u64, lie: impl FnOnce(&mut Harness, [u16; 3]) -> DeviceFault) {
    let mut harness = Harness::in_format(format, NetOptions::new(RxMode::Mergeable));
    for parts in [1, 3, 1] {
        let packet = packet(&mut harness.pair.rx, 64, &vec![&[7; 100][..]; parts]);
        harness.pair.tx.send(packet).unwrap();
    }
    harness.pair.tx.flush();
    let heads = [(); 3].map(|()| harness.tx.take().unwrap());
    let error = lie(&mut harness, heads);
    // What was used before the invalid value is completed first.
    while harness.pair.tx.complete() > 0 {}
    let stats = harness.pair.tx.stats();
    assert_eq!(stats.stopped, Some(error));
    assert!(format!("{:?}", harness.pair.tx).contains(error.name()));
    // It stays so, and refuses.
    harness.tx.publish_garbage(1);
    assert_eq!(harness.pair.tx.complete(), 0);
    let packet = packet(&mut harness.pair.rx, 64, &[&[7; 100]]);
    assert_eq!(harness.pair.tx.send(packet).unwrap_err().to_vec(), [7; 100]);
    assert_eq!(harness.pair.tx.stats(), stats);
    // The receive queue is another queue.
    harness.deliver(&frame(1, 100));
    assert_eq!(take(&mut harness.pair.rx).len(), 1);
    harness.close();
}

/// Proves NET-6 for transmission.
#[test]
fn completions_that_cannot_be() {
    for format in FORMATS {
        let packed = format & feature::RING_PACKED != 0;
        for id in [256, 65535, 65536, u32::MAX] {
            // An id of a packed ring has 16 bits.
            if !packed || id < 1 << 16 {
                lie(format, |b, _| {
                    b.tx.add_used(id, 0);
                    DeviceFault::BadId { id }
                });
            }
        }
        lie(format, |b, heads| {
            b.tx.add_used(u32::from(heads[0]), 0);
            b.tx.add_used(u32::from(heads[0]), 0);
            DeviceFault::NotPosted { id: heads[0] }
        });
        // A chain of three fragments.
        lie(format, |b, heads| {
            b.tx.add_used(u32::from(heads[0]), 0);
            b.tx.add_used(u32::from(heads[1]), 0);
            b.tx.add_used(u32::from(heads[1]), 0);
            DeviceFault::NotPosted { id: heads[1] }
        });
        lie(format, |b, _| {
            b.tx.add_used(200, 0);
            DeviceFault::NotPosted { id: 200 }
        });
        if packed {
            lie(format, |b, heads| {
                heads.into_iter().chain([heads[0]]).for_each(|id| b.tx.add_used(u32::from(id), 0));
                DeviceFault::IndexJump { by: 4, posted: 3 }
            });
        }
    }
    // In the middle of a chain, and an index that jumps, in a split ring.
    lie(0, |b, heads| {
        let id = b.tx.split().desc(heads[1]).next;
        b.tx.add_used(u32::from(id), 0);
        DeviceFault::NotPosted { id }
    });
    for by in [4, 257, 0x8000, u16::MAX] {
        lie(0, |b, _| {
            b.tx.split().set_used_idx(by);
            DeviceFault::IndexJump { by, posted: 3 }
        });
    }
}

/// The length of a completion means nothing, and descriptors that the device overwrites are not
/// read back.
#[test]
fn completions_with_odd_lengths_and_broken_descriptors() {
    for format in FORMATS {
        let mut harness = Harness::in_format(format, NetOptions::new(RxMode::Mergeable));
        for round in 0..200 {
            let packet = packet(&mut harness.pair.rx, 0, &[&[7; 100], &[8; 100], &frame(round, 50)]);
            harness.pair.tx.send(packet).unwrap();
            harness.pair.tx.flush();
            let head = harness.tx.take().unwrap();
            for at in 0..256 {
                if harness.tx.is_packed() {
                    let bad = PackedDesc { addr: 1, len: u32::MAX, id: head, flags: 0x7fff };
                    harness.tx.packed().ring.set_desc(at, bad);
                } else {
                    harness.tx.split().set_desc(at, Desc { addr: 1, len: u32::MAX, flags: 0xffff, next: head });
                }
            }
            harness.tx.add_used(u32::from(head), u32::MAX);
            assert_eq!(harness.pair.tx.complete(), 1);
        }
        assert_eq!(harness.pair.tx.stats().stopped, None);
        harness.assert_all_posted(RxMode::Mergeable);
        harness.close();
    }
}
