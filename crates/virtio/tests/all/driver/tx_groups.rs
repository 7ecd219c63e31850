//! Packets are sent and completed in groups: what a device does, and which packet is of another
//! kind, at each place of a group.

use netmem_packet::{Checksum, Meta, Packet, Poll, RxQueue, TxBulk, TxQueue};
use netmem_pool::{Page, PeerShared};
use netmem_testing::driver::hostile::{FORMATS, Harness};
use netmem_testing::driver::*;
use netmem_virtio::driver::{DeviceFault, NetOptions, RxMode, VirtioRx};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::PackedDesc;

/// Packets that are sent before the others, so that the group goes around the end of the ring.
const BEFORE: u64 = 200;
/// Packets that are sent at a time: more than two runs.
const GROUP: u64 = 140;
/// Places in such a group: both ends, those of runs and of the ring, and others.
const PLACES: [u64; 9] = [0, 1, 31, 55, 56, 63, 64, 128, GROUP - 1];

/// A domain without syncs: packets are sent in groups.
fn harness(format: u64) -> Harness {
    Harness::coherent(format, NetOptions::new(RxMode::Small).pages(1024))
}

fn each_place(case: impl Fn(u64, u64)) {
    FORMATS
        .into_iter()
        .flat_map(|format| PLACES.map(|place| (format, place)))
        .for_each(|(format, place)| case(format, place));
}

/// Frame `i`, of a length of its own.
fn numbered(i: u64) -> Vec<u8> {
    frame(i, 60 + (i % 40) as usize)
}

fn alloc(rx: &mut VirtioRx) -> Page<PeerShared> {
    rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap()
}

/// A packet of these parts, each in a page of its own with `room` bytes in front of it.
fn packet(harness: &mut Harness, room: usize, parts: &[&[u8]]) -> Packet<PeerShared> {
    let mut frags = parts.iter().map(|bytes| {
        let mut page = alloc(&mut harness.pair.rx);
        page.copy_from(room, bytes).unwrap();
        page.freeze_range(room..room + bytes.len())
    });
    let mut packet = Packet::new(frags.next().unwrap());
    frags.for_each(|frag| packet.push(frag).unwrap());
    packet
}

fn plain(harness: &mut Harness, i: u64) -> Option<Packet<PeerShared>> {
    Some(packet(harness, 64, &[&numbered(i)]))
}

/// Sends these frames as a group.
fn send(harness: &mut Harness, frames: std::ops::Range<u64>) {
    let mut packets: Vec<_> = frames.map(|i| plain(harness, i)).collect();
    assert_eq!(harness.pair.tx.send_group(&mut packets), packets.len());
    assert!(packets.iter().all(Option::is_none));
    harness.pair.tx.flush();
}

/// What a chain has on the wire.
fn wire(harness: &Harness, head: u16) -> Vec<u8> {
    let chain = harness.tx.chain(head);
    assert!(chain.iter().all(|d| d.flags & netmem_virtio::virtqueue::DESC_WRITE == 0 && d.len > 0));
    chain.iter().flat_map(|d| harness.device.read(d.addr, d.len as usize)).collect()
}

/// Takes what the driver has made available, and compares it with these frames, of which each has a
/// plain header. Returns the heads.
#[track_caller]
fn took(harness: &mut Harness, frames: std::ops::Range<u64>) -> Vec<u16> {
    let heads: Vec<_> = std::iter::from_fn(|| harness.tx.take()).collect();
    assert_eq!(heads.len() as u64, frames.end - frames.start);
    for (&head, i) in heads.iter().zip(frames) {
        assert!(wire(harness, head) == [&[0; VnetHdr::LEN], &numbered(i)[..]].concat(), "frame {i}");
    }
    heads
}

/// A queue in the middle of its ring.
fn started(format: u64) -> Harness {
    let mut harness = harness(format);
    send(&mut harness, 0..BEFORE);
    for head in took(&mut harness, 0..BEFORE) {
        harness.tx.write(head.into(), 0);
    }
    harness.tx.publish();
    assert_eq!(harness.pair.tx.complete() as u64, BEFORE);
    harness
}

/// All pages return, and further groups are sent.
#[track_caller]
fn assert_goes_on(mut harness: Harness) {
    assert_eq!((harness.pair.tx.posted(), harness.pair.tx.stats().stopped), (0, None));
    harness.assert_all_posted(RxMode::Small);
    for _ in 0..3 {
        send(&mut harness, 0..GROUP);
        for head in took(&mut harness, 0..GROUP) {
            harness.tx.write(head.into(), 0);
        }
        harness.tx.publish();
        assert_eq!(harness.pair.tx.complete() as u64, GROUP);
    }
    let stats = harness.pair.tx.stats();
    assert_eq!(stats.frames, stats.completed);
    harness.assert_all_posted(RxMode::Small);
    harness.close();
}

/// Groups of each size, with what is in the ring completed at any time.
#[test]
fn groups_of_each_size() {
    for format in FORMATS {
        let mut harness = harness(format);
        let (mut sent, mut bytes, mut rng, mut out) = (0, 0, fastrand::Rng::with_seed(format), Vec::new());
        for size in (0..=GROUP).chain([256]) {
            while out.len() as u64 + size > 256 || rng.bool() {
                let used = rng.usize(0..=out.len());
                out.drain(..used).for_each(|head: u16| harness.tx.write(head.into(), 0));
                harness.tx.publish();
                assert_eq!(harness.pair.tx.complete(), used);
            }
            send(&mut harness, sent..sent + size);
            bytes += (sent..sent + size).map(|i| numbered(i).len() as u64).sum::<u64>();
            out.extend(took(&mut harness, sent..sent + size));
            sent += size;
            let stats = harness.pair.tx.stats();
            assert_eq!((stats.frames, stats.bytes, stats.full), (sent, bytes, 0));
            assert_eq!((harness.pair.tx.posted(), stats.completed), (out.len(), sent - out.len() as u64));
        }
        out.drain(..).for_each(|head| harness.tx.write(head.into(), 0));
        harness.tx.publish();
        while harness.pair.tx.complete() > 0 {}
        assert_goes_on(harness);
    }
}

/// A full ring: a prefix is accepted, and the other packets stay as they are, also behind places
/// without a packet.
#[test]
fn a_full_ring_accepts_a_prefix() {
    for format in FORMATS {
        let mut harness = started(format);
        let mut packets: Vec<_> = (0..300).map(|i| plain(&mut harness, i)).collect();
        packets[3] = None;
        packets[280] = None;
        let mut done = 0;
        while done < packets.len() {
            let sent = harness.pair.tx.send_group(&mut packets[done..]);
            assert!(packets[..done + sent].iter().all(Option::is_none));
            for (place, i) in packets.iter().zip(0..).skip(done + sent).filter(|(_, i)| *i != 280) {
                let left = place.as_ref().unwrap();
                assert_eq!((left.to_vec(), left.head().offset()), (numbered(i), 64), "{format:#x}");
                assert!(left.head().is_writable());
            }
            let expected = if done == 0 { 257 } else { 43 };
            assert_eq!(sent, expected, "{format:#x}");
            assert_eq!(harness.pair.tx.send_group(&mut packets[done + sent..]), 0);
            harness.pair.tx.flush();
            let frames = (done as u64..(done + sent) as u64).filter(|i| *i != 3 && *i != 280);
            let heads: Vec<_> = std::iter::from_fn(|| harness.tx.take()).collect();
            assert!(heads.iter().map(|&head| wire(&harness, head)[VnetHdr::LEN..].to_vec()).eq(frames.map(numbered)));
            heads.into_iter().for_each(|head| harness.tx.write(head.into(), 0));
            harness.tx.publish();
            while harness.pair.tx.complete() > 0 {}
            done += sent;
        }
        // Two groups of the first 256, and none of the last: an empty slice was sent.
        assert_eq!(harness.pair.tx.stats().full, 2, "{format:#x}");
        assert_goes_on(harness);
    }
}

/// At each place of a group there is a packet that is no part of a run: it leaves between the
/// others, with its header apart or in place, and with its offloads.
#[test]
fn a_packet_of_another_kind_at_each_place() {
    each_place(|format, place| {
        for kind in 0..6 {
            let mut harness = started(format);
            let mut packets: Vec<_> = (0..GROUP).map(|i| plain(&mut harness, i)).collect();
            let bytes = numbered(place);
            let mut kept = None;
            let mut header = VnetHdr { num_buffers: 0, ..VnetHdr::PLAIN };
            let at = &mut packets[place as usize];
            *at = Some(match kind {
                0 => packet(&mut harness, 64, &[&bytes[..20], &bytes[20..]]),
                1 => packet(&mut harness, 11, &[&bytes]),
                2 => packet(&mut harness, 12, &[&bytes]),
                3 => packet(&mut harness, 64, &[&[], &bytes]),
                _ => packet(&mut harness, 64, &[&bytes]),
            });
            if kind == 4 {
                kept = at.as_ref().map(|packet| packet.head().clone());
            }
            if kind == 5 {
                header.flags = VnetHdr::NEEDS_CSUM;
                (header.csum_start, header.csum_offset) = (34, 16);
                at.as_mut().unwrap().meta = Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: None };
            }
            assert_eq!(harness.pair.tx.send_group(&mut packets) as u64, GROUP);
            harness.pair.tx.flush();
            let heads: Vec<_> = std::iter::from_fn(|| harness.tx.take()).collect();
            assert_eq!(heads.len() as u64, GROUP);
            for (&head, i) in heads.iter().zip(0..) {
                let of = if i == place { header.to_bytes() } else { [0; VnetHdr::LEN] };
                assert!(wire(&harness, head) == [&of, &numbered(i)[..]].concat(), "{format:#x}, {i} of {kind}");
                let segments = harness.tx.chain(head).len();
                assert_eq!(segments, if i == place && [0, 1, 4].contains(&kind) { 2 } else { segments.min(2) });
                assert!(i == place || segments == 1);
            }
            heads.into_iter().for_each(|head| harness.tx.write(head.into(), 0));
            harness.tx.publish();
            while harness.pair.tx.complete() > 0 {}
            if let Some(kept) = kept {
                let mut copy = vec![0; kept.len()];
                kept.copy_to(0, &mut copy).unwrap();
                assert!(copy == bytes && kept.is_writable());
            }
            assert_goes_on(harness);
        }
    });
}

/// The device uses a group, of which `lie` uses the packet at `place`. `lie` has as parameters the
/// head of that packet and those of all. If it returns a fault, the packets in front of it
/// complete, and the queue stops. Otherwise all complete, and the queue goes on.
fn group_with(format: u64, place: u64, lie: impl FnOnce(&mut Harness, u16, &[u16]) -> Option<DeviceFault>) {
    let mut harness = started(format);
    send(&mut harness, 0..GROUP);
    let heads = took(&mut harness, 0..GROUP);
    let before = harness.pair.tx.stats().completed;
    let at = place as usize;
    heads[..at].iter().for_each(|&head| harness.tx.write(head.into(), 0));
    let fault = lie(&mut harness, heads[at], &heads);
    heads[at + 1..].iter().for_each(|&head| harness.tx.write(head.into(), 0));
    harness.tx.publish();
    while harness.pair.tx.complete() > 0 {}
    let stats = harness.pair.tx.stats();
    let completed = if fault.is_some() { place } else { GROUP };
    assert_eq!((stats.completed - before, stats.stopped), (completed, fault), "{format:#x}, at {place}");
    assert_eq!(harness.pair.tx.posted() as u64, GROUP - completed);
    if fault.is_none() {
        return assert_goes_on(harness);
    }
    // It stays so, and refuses: a group, too.
    harness.tx.publish_garbage(1);
    assert_eq!(harness.pair.tx.complete(), 0);
    let mut packets = [plain(&mut harness, 0), plain(&mut harness, 1)];
    assert_eq!(harness.pair.tx.send_group(&mut packets), 0);
    assert!(packets.iter().zip(0..).all(|(packet, i)| packet.as_ref().unwrap().to_vec() == numbered(i)));
    assert_eq!(harness.pair.tx.stats(), stats);
    drop(packets);
    harness.close();
}

/// Proves NET-6 for transmission by groups, as the next tests do.
#[test]
fn a_wrong_id_at_each_place() {
    each_place(|format, place| {
        let packed = format & feature::RING_PACKED != 0;
        for id in [256, 40_000, 65_535, 65_536, u32::MAX] {
            if !packed || id < 1 << 16 {
                group_with(format, place, |harness, _, _| {
                    harness.tx.write(id, 0);
                    Some(DeviceFault::BadId { id })
                });
            }
        }
        // A slot that is free.
        group_with(format, place, |harness, _, heads| {
            let id = (0..256).find(|id| !heads.contains(id)).unwrap();
            harness.tx.write(id.into(), 0);
            Some(DeviceFault::NotPosted { id })
        });
        // The one before, twice.
        if place > 0 {
            group_with(format, place, |harness, _, heads| {
                let id = heads[place as usize - 1];
                harness.tx.write(id.into(), 0);
                Some(DeviceFault::NotPosted { id })
            });
        }
    });
}

/// The device completes the last packet out of its turn, and then the slot behind that, which is
/// free: the number is the next one of a run.
#[test]
fn the_slot_behind_the_last_one() {
    each_place(|format, place| {
        if format & feature::IN_ORDER != 0 || place == GROUP - 1 {
            return;
        }
        let mut harness = started(format);
        send(&mut harness, 0..GROUP);
        let heads = took(&mut harness, 0..GROUP);
        let last = heads[GROUP as usize - 1];
        heads[..place as usize].iter().for_each(|&head| harness.tx.write(head.into(), 0));
        harness.tx.write(last.into(), 0);
        harness.tx.write(u32::from(last) + 1, 0);
        harness.tx.publish();
        let before = harness.pair.tx.stats().completed;
        while harness.pair.tx.complete() > 0 {}
        let stats = harness.pair.tx.stats();
        assert_eq!(stats.stopped, Some(DeviceFault::NotPosted { id: last + 1 }), "{format:#x}, at {place}");
        assert_eq!(stats.completed - before, place + 1);
        harness.close();
    });
}

/// A length means nothing where the device writes nothing.
#[test]
fn any_length_at_each_place() {
    each_place(|format, place| {
        for len in [1, 72, u32::MAX] {
            group_with(format, place, |harness, head, _| {
                harness.tx.write(head.into(), len);
                None
            });
        }
    });
}

/// A used descriptor whose flags are of the turn before, or one flag only, is not used, and neither
/// is what follows it, until the flags are right.
#[test]
fn flags_of_a_packed_ring_at_each_place() {
    each_place(|format, place| {
        if format & feature::RING_PACKED == 0 {
            return;
        }
        let mut harness = started(format);
        send(&mut harness, 0..GROUP);
        for head in took(&mut harness, 0..GROUP) {
            harness.tx.write(head.into(), 0);
        }
        harness.tx.publish();
        let (at, ring) = (((BEFORE + place) % 256) as u16, &harness.tx.packed().ring);
        let right = ring.used_desc(at);
        let (turn, mut done) = (PackedDesc::AVAIL | PackedDesc::USED, 0);
        for flip in [PackedDesc::AVAIL, PackedDesc::USED, turn] {
            harness.tx.packed().ring.set_used_desc(at, PackedDesc { flags: right.flags ^ flip, ..right });
            done += harness.pair.tx.complete() as u64;
            assert_eq!(done, place, "{format:#x}");
        }
        harness.tx.packed().ring.set_used_desc(at, right);
        while harness.pair.tx.complete() > 0 {}
        assert_goes_on(harness);
    });
}

/// With tables of descriptors, frames of several segments complete in runs, too: each slot for
/// headers with its frame, and not before.
#[test]
fn slots_for_headers_complete_in_runs() {
    for format in [feature::INDIRECT_DESC, feature::INDIRECT_DESC | feature::RING_PACKED] {
        let mut harness = started(format);
        let completions = harness.pair.tx.header_slots().unwrap().completions();
        for round in 0..4 {
            let frames: Vec<_> = (0..GROUP)
                .map(|i| {
                    let payload = plain(&mut harness, i).unwrap();
                    harness.pair.tx.send_behind(&[i as u8; 54], payload).unwrap()
                })
                .collect();
            harness.pair.tx.flush();
            let heads: Vec<_> = std::iter::from_fn(|| harness.tx.take()).collect();
            assert_eq!(heads.len() as u64, GROUP);
            for used in [30 + round, GROUP as usize - 30 - round] {
                let done = heads.len() - harness.pair.tx.posted();
                heads[done..done + used].iter().for_each(|&head| harness.tx.write(head.into(), 0));
                harness.tx.publish();
                assert_eq!(harness.pair.tx.complete(), used);
                for (i, &frame) in frames.iter().enumerate() {
                    assert_eq!(completions.is_completed(frame), i < done + used, "{format:#x}, frame {i}");
                }
            }
        }
        assert_goes_on(harness);
    }
}

/// The device claims more packets than it has, each as the next one in order.
#[test]
fn more_than_was_posted() {
    for format in FORMATS {
        for (posted, more) in [(0, 1), (1, 1), (20, 1), (40, 8), (64, 1), (128, 1)] {
            let mut harness = started(format);
            send(&mut harness, 0..posted);
            let heads = took(&mut harness, 0..posted);
            let last = heads.last().map_or(BEFORE as u32 - 1, |&head| head.into());
            heads.iter().for_each(|&head| harness.tx.write(head.into(), 0));
            (1..=more).for_each(|n| harness.tx.write((last + n) % 256, 0));
            harness.tx.publish();
            while harness.pair.tx.complete() > 0 {}
            let stats = harness.pair.tx.stats();
            let (completed, fault) = (stats.completed - BEFORE, stats.stopped.unwrap());
            if harness.tx.is_packed() {
                // Those that it has are completed first, all of them or up to the last run.
                assert!(matches!(fault, DeviceFault::IndexJump { by, posted } if by == posted + 1), "{fault:?}");
                assert_eq!(completed, posted, "{format:#x}, {posted} and {more}");
            } else {
                let posted = posted as u16;
                assert_eq!(fault, DeviceFault::IndexJump { by: posted + more as u16, posted });
                assert_eq!(completed, 0, "{format:#x}, {posted} and {more}");
            }
            harness.close();
        }
    }
    for by in [GROUP as u16 + 1, 257, 0x8000, u16::MAX] {
        let mut harness = started(0);
        send(&mut harness, 0..GROUP);
        harness.tx.split().set_used_idx((BEFORE as u16).wrapping_add(by));
        assert_eq!(harness.pair.tx.complete(), 0);
        let fault = DeviceFault::IndexJump { by, posted: GROUP as u16 };
        assert_eq!(harness.pair.tx.stats().stopped, Some(fault));
        harness.close();
    }
}

/// A device that completes packets in any order: none leaves its page before it is completed, for
/// many turns of the ring, and groups are sent and completed in order in between.
#[test]
fn any_order() {
    for format in [0, feature::RING_PACKED] {
        let mut harness = harness(format);
        let (mut rng, mut out, mut sent) = (fastrand::Rng::with_seed(format), Vec::new(), 0);
        for round in 0..400 {
            let n = rng.u64(0..=256 - out.len() as u64);
            send(&mut harness, sent..sent + n);
            let heads: Vec<_> = std::iter::from_fn(|| harness.tx.take()).collect();
            assert_eq!(heads.len() as u64, n);
            out.extend(heads.into_iter().zip(sent..));
            sent += n;
            let mut ids: Vec<_> = out.iter().map(|(head, _)| *head).collect();
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), out.len(), "a slot is posted twice");
            if round % 3 > 0 {
                rng.shuffle(&mut out);
            } else {
                out.sort_by_key(|(_, i)| *i);
            }
            let used = rng.usize(0..=out.len());
            for (head, i) in out.drain(..used) {
                assert!(wire(&harness, head)[VnetHdr::LEN..] == numbered(i), "{format:#x}, frame {i}");
                harness.tx.write(head.into(), 0);
            }
            harness.tx.publish();
            assert_eq!(harness.pair.tx.complete(), used, "{format:#x}, round {round}");
            assert_eq!(harness.pair.rx.pool_stats().inflight(), (harness.pair.rx.posted() + out.len()) as u64);
        }
        out.drain(..).for_each(|(head, _)| harness.tx.write(head.into(), 0));
        harness.tx.publish();
        while harness.pair.tx.complete() > 0 {}
        harness.assert_all_posted(RxMode::Small);
        harness.close();
    }
}

/// A bulk sends its packets as groups, around the end of its places, also if the ring has room for
/// a part of each.
#[test]
fn a_bulk_sends_groups() {
    for format in FORMATS {
        let mut harness = Harness::coherent(format, NetOptions::new(RxMode::Small).ring_size(32).pages(1024));
        let Harness { pair, tx: ring, device, .. } = &mut harness;
        let (mut rng, mut made, mut came, mut heads) = (fastrand::Rng::with_seed(format), 0, 0, Vec::new());
        let mut bulk = TxBulk::holding(&mut pair.tx, 100);
        while came < 2000 {
            while bulk.room() > 0 && rng.u8(..8) > 0 {
                let mut page = alloc(&mut pair.rx);
                page.copy_from(64, &numbered(made)).unwrap();
                bulk.push(Packet::new(page.freeze_range(64..64 + numbered(made).len())));
                made += 1;
            }
            bulk.flush();
            while let Some(head) = ring.take() {
                let d = ring.chain(head)[0];
                assert!(device.read(d.addr, d.len as usize)[VnetHdr::LEN..] == numbered(came), "{format:#x}");
                heads.push(head);
                came += 1;
            }
            assert_eq!(bulk.stats(), bulk_stats(came, 0));
            assert_eq!(bulk.held() as u64, made - came);
            let used = rng.usize(0..=heads.len());
            heads.drain(..used).for_each(|head| ring.write(head.into(), 0));
            ring.publish();
        }
        heads.drain(..).for_each(|head| ring.write(head.into(), 0));
        ring.publish();
        bulk.flush();
        drop(bulk);
        harness.close();
    }
}
