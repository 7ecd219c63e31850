//! A device that reports false values about received frames. Each case ends in a named error and a
//! stopped queue, or in a counted frame. No page is lost.

use std::sync::atomic::{AtomicBool, Ordering};

use netmem_packet::{Checksum, GsoKind, Meta, Packet, TxQueue, Verdict, XdpFrame};
use netmem_pool::PeerShared;
use netmem_testing::driver::hostile::{Behaviour, FEATURES, FORMATS, Harness};
use netmem_testing::driver::*;
use netmem_virtio::driver::{DeviceFault, NetOptions, RxMode};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::{DESC_WRITE, Desc, Event, PackedDesc};

const DROP: fn() -> DropAll = DropAll::default;

/// In every mode and format. `lie` has a parameter: whether rings are packed.
fn each(lie: impl Fn(bool, RxMode, &mut Harness) -> Option<DeviceFault>) {
    for (mode, format) in MODES.into_iter().flat_map(|mode| FORMATS.map(|format| (mode, format))) {
        // From the first buffer on, and in the middle of good ones.
        for good in [0, 3] {
            let mut harness = Harness::in_format(format, NetOptions::new(mode));
            for i in 0..good {
                harness.deliver(&frame(i, 300));
            }
            let Some(error) = lie(format & feature::RING_PACKED != 0, mode, &mut harness) else { continue };
            receive(&mut harness.pair.rx, &mut DROP());
            assert_eq!(harness.pair.rx.stats().frames, good);
            harness.assert_stopped(error);
        }
    }
}

/// Proves NET-6, as do all tests here.
#[test]
fn ids_out_of_range() {
    for id in [256, 257, 65535, 65536, u32::MAX] {
        each(|packed, _, b| {
            b.ring.add_used(id, 100);
            // An id of a packed ring has 16 bits.
            (!packed || id < 1 << 16).then_some(DeviceFault::BadId { id })
        });
    }
    // No head of a chain.
    for id in [1, 16, 18, 255] {
        let mut harness = Harness::new(NetOptions::new(RxMode::Big));
        harness.ring.add_used(id, 100);
        receive(&mut harness.pair.rx, &mut DROP());
        harness.assert_stopped(DeviceFault::BadId { id });
    }
    // A packed ring of 256 entries has 15 buffers of 17 pages.
    for id in [15, 16, 255] {
        let mut harness = Harness::in_format(feature::RING_PACKED, NetOptions::new(RxMode::Big));
        harness.ring.add_used(id, 100);
        receive(&mut harness.pair.rx, &mut DROP());
        harness.assert_stopped(DeviceFault::BadId { id });
    }
}

#[test]
fn a_buffer_used_twice() {
    for (mode, format) in MODES.into_iter().flat_map(|mode| FORMATS.map(|format| (mode, format))) {
        let mut harness = Harness::in_format(format, NetOptions::new(mode));
        let head = harness.device.deliver_with(&mut harness.ring, VnetHdr::PLAIN, &frame(1, 88));
        harness.ring.add_used(u32::from(head), 100);
        receive(&mut harness.pair.rx, &mut DROP());
        assert_eq!(harness.pair.rx.stats().frames, 1);
        harness.assert_stopped(DeviceFault::NotPosted { id: head });
    }
}

/// A queue with as many pages as it posts: nothing replaces those that the user holds.
fn few(mode: RxMode, format: u64) -> Harness {
    let (entries, pages) = if mode == RxMode::Big { (64, 3 * 17) } else { (8, 8) };
    Harness::in_format(format, NetOptions::new(mode).ring_size(entries).pages(pages).cache(8))
}

#[test]
fn a_buffer_that_was_never_posted() {
    for (mode, format) in MODES.into_iter().flat_map(|mode| FORMATS.map(|format| (mode, format))) {
        let mut harness = few(mode, format);
        // The user holds all pages that come: nothing replaces the buffer.
        harness.deliver(&frame(1, 100));
        let held = take(&mut harness.pair.rx);
        assert_eq!(held.len(), 1);
        harness.ring.add_used(0, 100);
        receive(&mut harness.pair.rx, &mut DROP());
        drop(held);
        harness.assert_stopped(DeviceFault::NotPosted { id: 0 });
    }
}

#[test]
fn lengths_beyond_the_buffer() {
    for excess in [1, 100, 1 << 20, 1 << 31] {
        each(|_, mode, b| {
            let head = b.ring.take().unwrap();
            let have: u32 = b.ring.chain(head).iter().map(|d| d.len).sum();
            b.ring.add_used(u32::from(head), have + excess);
            assert!(mode != RxMode::Small || have == 1530);
            Some(DeviceFault::BadLength { len: have + excess, have })
        });
    }
    each(|_, _, b| {
        let head = b.ring.take().unwrap();
        let have = b.ring.chain(head).iter().map(|d| d.len).sum();
        b.ring.add_used(u32::from(head), u32::MAX);
        Some(DeviceFault::BadLength { len: u32::MAX, have })
    });
}

/// Shorter than a header, or than an Ethernet header behind it: nothing to deliver, and no reason
/// to stop. The buffers are posted again as they are, so that the device cannot make the pool work.
#[test]
fn lengths_short_of_a_header() {
    for (mode, format) in MODES.into_iter().flat_map(|mode| FORMATS.map(|format| (mode, format))) {
        let mut harness = Harness::in_format(format, NetOptions::new(mode));
        let allocated = harness.pair.rx.pool_stats().allocated();
        for len in [0, 1, 11, 12, 13, 25] {
            let head = harness.ring.take().unwrap();
            harness.ring.add_used(u32::from(head), len);
        }
        assert_eq!(take(&mut harness.pair.rx).len(), 0);
        let s = harness.pair.rx.stats();
        assert_eq!((s.short, s.frames, s.stopped), (6, 0, None));
        assert_eq!(harness.pair.rx.pool_stats().allocated(), allocated, "{mode}");
        harness.deliver(&frame(1, 14));
        assert_eq!(take(&mut harness.pair.rx)[0].to_vec(), frame(1, 14));
        harness.assert_all_posted(mode);
        harness.close();
    }
}

/// A frame in `used` buffers whose header counts `buffers`.
fn count(harness: &mut Harness, buffers: u16, used: u16) {
    for i in 0..used {
        let head = harness.ring.take().unwrap();
        if i == 0 {
            let header = VnetHdr { num_buffers: buffers, ..VnetHdr::PLAIN };
            harness.device.write(harness.ring.chain(head)[0].addr, &header.to_bytes());
        }
        harness.ring.write(u32::from(head), 100);
    }
    harness.ring.publish();
    receive(&mut harness.pair.rx, &mut DROP());
}

#[test]
fn buffer_counts_that_cannot_be() {
    for format in FORMATS {
        for (buffers, used) in [(0, 1), (0, 30), (19, 19), (19, 1), (65535, 200), (256, 256)] {
            let mut harness = Harness::in_format(format, NetOptions::new(RxMode::Mergeable));
            count(&mut harness, buffers, used);
            harness.assert_stopped(DeviceFault::BadBufferCount { buffers });
        }
        for (buffers, used) in [(2, 1), (18, 17), (18, 1)] {
            let mut harness = Harness::in_format(format, NetOptions::new(RxMode::Mergeable));
            count(&mut harness, buffers, used);
            harness.assert_stopped(DeviceFault::MissingBuffers { buffers, used });
        }
        // The other modes do not read it.
        for mode in [RxMode::Small, RxMode::Big] {
            let mut harness = Harness::in_format(format, NetOptions::new(mode));
            count(&mut harness, 65535, 3);
            assert_eq!(harness.pair.rx.stats().frames, 3);
            assert_eq!(harness.pair.rx.stats().stopped, None);
            harness.close();
        }
    }
}

/// An invalid value in the middle of a frame of several buffers: the pages of those before it are
/// returned, once.
#[test]
fn lies_inside_of_a_merged_frame() {
    type Lie = fn(&mut Harness, u16) -> DeviceFault;
    let lies: [Lie; 3] = [
        |b, _| {
            b.ring.take();
            b.ring.write(40_000, 100);
            DeviceFault::BadId { id: 40_000 }
        },
        |b, first| {
            b.ring.take();
            b.ring.write(u32::from(first), 100);
            DeviceFault::NotPosted { id: first }
        },
        |b, _| {
            let head = b.ring.take().unwrap();
            let have = b.ring.chain(head)[0].len;
            b.ring.write(u32::from(head), have + 1);
            DeviceFault::BadLength { len: have + 1, have }
        },
    ];
    for (format, lie) in FORMATS.into_iter().flat_map(|format| lies.map(|lie| (format, lie))) {
        for at in 1..6 {
            let mut harness = Harness::in_format(format, NetOptions::new(RxMode::Mergeable).max_frame(9014));
            let (mut error, mut first) = (None, 0);
            for i in 0..6 {
                if i == at {
                    error = Some(lie(&mut harness, first));
                    continue;
                }
                let head = harness.ring.take().unwrap();
                if i == 0 {
                    first = head;
                    let header = VnetHdr { num_buffers: 6, ..VnetHdr::PLAIN };
                    harness.device.write(harness.ring.chain(head)[0].addr, &header.to_bytes());
                }
                harness.ring.write(u32::from(head), 500);
            }
            harness.ring.publish();
            assert_eq!(receive(&mut harness.pair.rx, &mut DROP()), 0);
            harness.assert_stopped(error.unwrap());
        }
    }
}

/// Buffers of no bytes in the middle of a frame add nothing to it, and the queue goes on.
#[test]
fn empty_buffers_inside_of_a_merged_frame() {
    for format in FORMATS {
        let mut harness = Harness::in_format(format, NetOptions::new(RxMode::Mergeable));
        for i in 0..5 {
            let head = harness.ring.take().unwrap();
            let header = VnetHdr { num_buffers: 5, ..VnetHdr::PLAIN };
            harness.device.write(harness.ring.chain(head)[0].addr, &header.to_bytes());
            harness.ring.write(u32::from(head), if i % 2 == 0 { 100 } else { 0 });
        }
        harness.ring.publish();
        let packets = take(&mut harness.pair.rx);
        assert_eq!((packets.len(), packets[0].len()), (1, 288));
        drop(packets);
        harness.close();
    }
}

const PACKED: [u64; 2] = [feature::RING_PACKED, feature::RING_PACKED | feature::IN_ORDER];

/// Flags of another wrap, or inconsistent ones: the descriptor is not used, and the queue waits for
/// the true ones.
#[test]
fn flags_of_another_turn_are_not_believed() {
    for (mode, format) in MODES.into_iter().flat_map(|mode| PACKED.map(|format| (mode, format))) {
        let mut harness = Harness::in_format(format, NetOptions::new(mode).ring_size(32));
        // In the first turn, and in each of the next ones.
        for turn in 0..70 {
            let words = harness.ring.packed();
            let (at, true_flags) = (words.used.offset(), words.used.used());
            let before = words.ring.desc(at);
            for flags in [0, PackedDesc::AVAIL, PackedDesc::USED, PackedDesc::AVAIL | PackedDesc::USED] {
                if flags != true_flags {
                    let d = PackedDesc { addr: 1, len: 100, id: 0, flags: flags | DESC_WRITE };
                    harness.ring.packed().ring.set_desc(at, d);
                    assert_eq!(receive(&mut harness.pair.rx, &mut DROP()), 0, "{mode}, turn {turn}: {flags:#x}");
                }
            }
            harness.ring.packed().ring.set_desc(at, before);
            harness.deliver(&frame(turn, 100));
            assert_eq!(take(&mut harness.pair.rx)[0].to_vec(), frame(turn, 100));
        }
        harness.assert_all_posted(mode);
        harness.close();
    }
}

/// A packed ring has no index that could jump: the device marks a descriptor as used that the
/// driver has not posted.
#[test]
fn more_is_used_than_was_posted() {
    for (mode, format) in MODES.into_iter().flat_map(|mode| PACKED.map(|format| (mode, format))) {
        let mut harness = few(mode, format);
        let posted = u64::from(harness.ring.available());
        (0..posted).for_each(|i| harness.deliver(&frame(i, 100)));
        let held = take(&mut harness.pair.rx);
        assert_eq!((held.len() as u64, harness.ring.available()), (posted, 0));
        harness.ring.add_used(0, 100);
        assert_eq!(receive(&mut harness.pair.rx, &mut DROP()), 0);
        drop(held);
        harness.assert_stopped(DeviceFault::IndexJump { by: 1, posted: 0 });
    }
}

/// One used descriptor stands for a batch: the buffers that it skips are full. A batch that ends
/// with a buffer that the device does not have is none.
#[test]
fn batches_that_skip_buffers() {
    let format = feature::RING_PACKED | feature::IN_ORDER;
    let mut harness = Harness::in_format(format, NetOptions::new(RxMode::Small));
    let heads = [(); 4].map(|()| harness.ring.take().unwrap());
    let (len, wire) = (harness.ring.chain(heads[0])[0].len as usize, VnetHdr::PLAIN.to_bytes());
    for (n, &head) in (0..).zip(&heads) {
        harness.device.write(harness.ring.chain(head)[0].addr, &[&wire[..], &frame(n, len - wire.len())].concat());
    }
    let words = harness.ring.packed();
    let flags = words.used.used() | DESC_WRITE;
    words.ring.set_used_desc(words.used.offset(), PackedDesc { addr: 0, len: 112, id: heads[3], flags });
    words.used = words.used.step(4, 256);
    let packets = take(&mut harness.pair.rx);
    for (n, packet) in (0..).zip(&packets) {
        let bytes = if n < 3 { len - wire.len() } else { 100 };
        assert_eq!(packet.to_vec(), frame(n, len - wire.len())[..bytes]);
    }
    assert_eq!(packets.len(), 4);
    drop(packets);
    harness.ring.add_used(300, 100);
    receive(&mut harness.pair.rx, &mut DROP());
    harness.assert_stopped(DeviceFault::BadId { id: 300 });
}

/// The device requests notifications by its event structure. Whatever is in it, both queues go on.
#[test]
fn event_words_that_mean_nothing() {
    for format in [PACKED[0], PACKED[0] | feature::EVENT_IDX, PACKED[1] | feature::EVENT_IDX] {
        let mut harness = Harness::in_format(format, NetOptions::new(RxMode::Mergeable).ring_size(32));
        let (mut rng, mut n) = (Rng(format), 0);
        for flags in [Event::ENABLE, Event::DISABLE, Event::AT, 3, 4, 6, 0xfffe, 0xffff] {
            for position in [0, 1, 31, 32, 33, 0x7fff, 0x8000, 0x801f, 0x8020, 0xffff, rng.next() as u16] {
                for ring in [&mut harness.ring, &mut harness.tx] {
                    ring.packed().ring.set_device_event(Event { position, flags });
                }
                harness.deliver(&frame(n, 100));
                let packet = take(&mut harness.pair.rx).pop().unwrap();
                assert_eq!(packet.to_vec(), frame(n, 100));
                harness.pair.tx.send(packet).unwrap();
                harness.pair.tx.flush();
                let head = harness.tx.take().unwrap();
                harness.tx.add_used(u32::from(head), 0);
                assert_eq!(harness.pair.tx.complete(), 1);
                n += 1;
            }
        }
        assert_eq!((harness.pair.rx.stats().stopped, harness.pair.tx.stats().stopped), (None, None));
        harness.assert_all_posted(RxMode::Mergeable);
        harness.close();
    }
}

#[test]
fn the_used_index_jumps() {
    for mode in MODES {
        for by in [257, 0x8000, u16::MAX, u16::MAX - 256] {
            let mut harness = Harness::new(NetOptions::new(mode));
            let posted = harness.ring.available();
            harness.ring.split().set_used_idx(by);
            assert_eq!(receive(&mut harness.pair.rx, &mut DROP()), 0);
            harness.assert_stopped(DeviceFault::IndexJump { by, posted });
        }
        // Within the ring, and more than was posted.
        let (entries, pages) = if mode == RxMode::Big { (64, 3 * 17) } else { (8, 8) };
        let mut harness = Harness::new(NetOptions::new(mode).ring_size(entries).pages(pages).cache(8));
        let posted = harness.ring.available();
        harness.deliver(&frame(1, 100));
        let held = take(&mut harness.pair.rx);
        let left = harness.ring.available();
        assert_eq!(left, posted - 1);
        harness.ring.split().set_used_idx(1 + posted);
        assert_eq!(receive(&mut harness.pair.rx, &mut DROP()), 0);
        drop(held);
        harness.assert_stopped(DeviceFault::IndexJump { by: posted, posted: left });
    }
}

/// Impossible headers: the frame is dropped and counted, and the queue goes on.
#[test]
fn headers_that_claim_nonsense() {
    let (csum, plain) = (VnetHdr::NEEDS_CSUM, VnetHdr::PLAIN);
    let nonsense = [
        VnetHdr { gso_type: 2, gso_size: 100, ..plain },
        VnetHdr { gso_type: 9, gso_size: 100, ..plain },
        VnetHdr { gso_type: 0x7f, gso_size: 100, ..plain },
        VnetHdr { gso_type: VnetHdr::GSO_ECN, gso_size: 100, ..plain },
        VnetHdr { gso_type: VnetHdr::GSO_TCPV4, gso_size: 0, ..plain },
        VnetHdr { gso_type: VnetHdr::GSO_TCPV6, gso_size: 100, hdr_len: 5001, ..plain },
        VnetHdr { gso_type: VnetHdr::GSO_TCPV4, gso_size: 1, ..plain },
        VnetHdr { flags: csum, csum_start: 4999, csum_offset: 0, ..plain },
        VnetHdr { flags: csum, csum_start: u16::MAX, csum_offset: u16::MAX, ..plain },
        VnetHdr { flags: csum | VnetHdr::DATA_VALID, csum_start: 0, csum_offset: 4999, ..plain },
    ];
    for mode in [RxMode::Mergeable, RxMode::Big] {
        let mut harness = Harness::new(NetOptions::new(mode).max_frame(65549));
        for (i, header) in nonsense.into_iter().enumerate() {
            harness.device.deliver_with(&mut harness.ring, header, &frame(1, 5000));
            assert_eq!(take(&mut harness.pair.rx).len(), 0, "{header:?}");
            assert_eq!(harness.pair.rx.stats().bad_header, i as u64 + 1);
        }
        harness.assert_all_posted(mode);
        // What can be true is passed on in words of our own.
        let header = VnetHdr {
            flags: csum,
            gso_type: VnetHdr::GSO_TCPV4,
            hdr_len: 54,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
            ..plain
        };
        harness.device.deliver_with(&mut harness.ring, header, &frame(1, 5000));
        let verified = VnetHdr { flags: VnetHdr::DATA_VALID, ..plain };
        harness.device.deliver_with(&mut harness.ring, verified, &frame(2, 60));
        let packets = take(&mut harness.pair.rx);
        let gso = packets[0].meta.gso.unwrap();
        assert_eq!((gso.kind, gso.size, gso.headers, gso.ecn), (GsoKind::TcpV4, 1448, 54, false));
        assert_eq!(packets[0].meta.checksum, Checksum::Partial { start: 34, offset: 16 });
        assert_eq!((packets[1].meta.checksum, packets[1].meta.gso), (Checksum::Verified, None));
        drop(packets);
        harness.close();
    }
}

/// A device uses offloads that were not negotiated, on purpose or because it does so with every
/// driver. Segments, and frames without their checksum, are dropped and counted. A mark of a
/// verified checksum is ignored, and its frame is delivered.
#[test]
fn what_was_not_negotiated_is_not_believed() {
    let plain = VnetHdr::PLAIN;
    let segment = |gso_type| VnetHdr { gso_type, gso_size: 1448, hdr_len: 54, ..plain };
    let partial = VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..plain };
    let verified = VnetHdr { flags: VnetHdr::DATA_VALID, ..plain };
    let tcp = segment(VnetHdr::GSO_TCPV4);
    let tsos = [tcp, segment(VnetHdr::GSO_TCPV6)];
    let never = [segment(VnetHdr::GSO_UDP_L4), segment(VnetHdr::GSO_TCPV4 | VnetHdr::GSO_ECN)];
    let ufo = segment(VnetHdr::GSO_UDP);
    let guest = feature::GUEST_CSUM | feature::GUEST_TSO4 | feature::GUEST_TSO6 | feature::GUEST_UFO;
    let all = [tsos.as_slice(), &never, &[ufo, partial]].concat();
    for (mode, max_frame, offered, refused) in [
        // Standard frames: the driver asks for no offload, although the device has them.
        (RxMode::Mergeable, 1518, FEATURES, all.clone()),
        (RxMode::Mergeable, 65549, FEATURES & !guest, all.clone()),
        (RxMode::Mergeable, 65549, FEATURES & !feature::GUEST_TSO4, [&never[..], &[tcp]].concat()),
        (RxMode::Big, 9014, FEATURES & !feature::GUEST_UFO, [&never[..], &[ufo]].concat()),
    ] {
        let behaviour = Behaviour { features: offered, ..Behaviour::default() };
        let mut harness = Harness::with(behaviour, NetOptions::new(mode).max_frame(max_frame));
        for (i, &header) in refused.iter().enumerate() {
            harness.device.deliver_with(&mut harness.ring, header, &frame(1, 1500));
            assert_eq!(take(&mut harness.pair.rx).len(), 0, "{mode}: {header:?}");
            let s = harness.pair.rx.stats();
            assert_eq!((s.not_negotiated, s.bad_header, s.frames), (i as u64 + 1, 0, 0), "{mode}: {header:?}");
            assert!(s.errors().any(|e| e == ("not_negotiated", i as u64 + 1)));
        }
        harness.assert_all_posted(mode);
        let believed = harness.net.features() & feature::GUEST_CSUM != 0;
        harness.device.deliver_with(&mut harness.ring, verified, &frame(2, 60));
        let packets = take(&mut harness.pair.rx);
        let checksum = if believed { Checksum::Verified } else { Checksum::Unknown };
        assert_eq!((packets[0].meta.checksum, packets[0].meta.gso), (checksum, None), "{mode}");
        drop(packets);
        harness.close();
    }
    // In small mode nothing is negotiated that a header could speak of, and so it is not read.
    let mut harness = Harness::new(NetOptions::new(RxMode::Small));
    for header in [all.as_slice(), &[verified]].concat() {
        harness.device.deliver_with(&mut harness.ring, header, &frame(1, 1500));
        let packets = take(&mut harness.pair.rx);
        assert_eq!(packets[0].meta, Meta::default(), "{header:?}");
    }
    harness.close();
}

/// The device overwrites what is the driver's: the descriptor table and the available ring. The
/// driver reads neither.
#[test]
fn the_drivers_part_of_the_ring_is_overwritten() {
    for mode in MODES {
        let mut harness = Harness::new(NetOptions::new(mode));
        // Heads and the length of a chain stay; addresses are new with every buffer.
        let heads: Vec<u16> = std::iter::from_fn(|| harness.ring.take()).collect();
        for turn in 0..5 {
            let at: Vec<u64> = heads.iter().map(|&h| harness.ring.split().desc(h).addr).collect();
            for i in 0..256 {
                harness.ring.split().set_desc(i, Desc { addr: u64::MAX, len: u32::MAX, flags: 0xffff, next: 0xffff });
                harness.ring.split().set_avail_entry(i, 0x7fff);
            }
            harness.ring.split().set_avail_idx(0x1234);
            harness.ring.split().set_avail_flags(0xffff);
            for (i, (&head, &addr)) in heads.iter().zip(&at).enumerate() {
                let wire = [&VnetHdr::PLAIN.to_bytes()[..], &frame(turn * 1000 + i as u64, 200)].concat();
                harness.device.write(addr, &wire);
                harness.ring.add_used(u32::from(head), wire.len() as u32);
            }
            let mut seen = 0;
            while seen < heads.len() {
                for p in take(&mut harness.pair.rx) {
                    assert_eq!(p.to_vec(), frame(turn * 1000 + seen as u64, 200));
                    seen += 1;
                }
            }
        }
        assert_eq!(harness.pair.rx.stats().stopped, None);
        harness.assert_all_posted(mode);
        harness.close();
    }
}

/// The same in a packed ring, whose descriptors both sides write: the driver reads used ones alone,
/// and of these id, length and flags.
#[test]
fn packed_descriptors_are_overwritten() {
    for (mode, format) in MODES.into_iter().flat_map(|mode| PACKED.map(|format| (mode, format))) {
        let mut harness = Harness::in_format(format, NetOptions::new(mode));
        for turn in 0..5 {
            let heads: Vec<u16> = std::iter::from_fn(|| harness.ring.take()).collect();
            for at in 0..256 {
                let bad = PackedDesc { addr: u64::MAX, len: u32::MAX, id: 0x7fff, flags: 0x7fff };
                harness.ring.packed().ring.set_desc(at, bad);
            }
            harness.ring.packed().ring.set_driver_event(Event { position: 0xffff, flags: 0xffff });
            for (i, &head) in (0..).zip(&heads) {
                let wire = [&VnetHdr::PLAIN.to_bytes()[..], &frame(turn * 1000 + i, 200)].concat();
                harness.device.write(harness.ring.chain(head)[0].addr, &wire);
                harness.ring.add_used(u32::from(head), wire.len() as u32);
            }
            let mut seen = 0;
            while seen < heads.len() as u64 {
                for p in take(&mut harness.pair.rx) {
                    assert_eq!(p.to_vec(), frame(turn * 1000 + seen, 200));
                    seen += 1;
                }
            }
        }
        assert_eq!(harness.pair.rx.stats().stopped, None);
        harness.assert_all_posted(mode);
        harness.close();
    }
}

/// The memory files are sealed: shrinking one, which would be a SIGBUS for the driver, is refused.
#[test]
fn the_memory_cannot_be_truncated() {
    for mode in MODES {
        let mut harness = Harness::new(NetOptions::new(mode));
        let results = harness.device.truncate();
        assert_eq!(results.len(), 2);
        assert!(results.iter().all(|r| *r == Err(rustix::io::Errno::PERM)), "{results:?}");
        harness.deliver(&frame(1, 100));
        assert_eq!(take(&mut harness.pair.rx).len(), 1);
        harness.close();
    }
}

/// Header bytes, used entries, index and flags change all the time while the driver polls. In each
/// case, delivered frames lie within the buffers, and no page is lost.
#[test]
fn everything_changes_between_two_reads() {
    for mode in MODES {
        for seed in 0..12 {
            let mut harness = Harness::new(NetOptions::new(mode).max_frame(mode.max_frame()));
            let stop = AtomicBool::new(false);
            let heads: Vec<u16> = (0..harness.ring.available()).map(|i| harness.ring.split().avail_entry(i)).collect();
            let buffers: Vec<u64> = heads.iter().map(|&h| harness.ring.split().desc(h).addr).collect();
            let (device, ring) = (&harness.device, harness.device.ring(0));
            let mut frames = 0u64;
            std::thread::scope(|s| {
                let stop = &stop;
                s.spawn(move || {
                    let mut rng = Rng(seed);
                    let mut used = 0u16;
                    while !stop.load(Ordering::Relaxed) {
                        let at = rng.below(heads.len() as u64) as usize;
                        let header = rng.next().to_le_bytes();
                        device.write(buffers[at] + rng.below(12), &header[..1]);
                        device.write(buffers[at] + 10, &[1 + (header[1] & 1), 0]);
                        // Mostly true, now and then not.
                        let id = heads[usize::from(used) % heads.len()];
                        let most = if rng.below(500) == 0 { 9000 } else { 1400 };
                        ring.set_used_entry_of(used, id, 26 + rng.below(most));
                        if ring.lag(used) > 1 {
                            used = used.wrapping_add(1);
                            ring.split().set_used_idx(used);
                        }
                        ring.split().set_used_flags(header[2].into());
                    }
                });
                for _ in 0..3000 {
                    let mut program = Program::<false, _, _, _> {
                        run: |f: &mut XdpFrame<PeerShared>| {
                            let head: [u8; 14] = f.read_at(0).unwrap();
                            if head[0].is_multiple_of(2) { Verdict::Pass } else { Verdict::Drop }
                        },
                        pass: |p: Packet<PeerShared>| {
                            assert_eq!(p.to_vec().len(), p.len());
                            assert!(p.len() <= mode.max_frame() + 4096);
                        },
                        tx: |_| {},
                    };
                    frames += receive(&mut harness.pair.rx, &mut program) as u64;
                }
                stop.store(true, Ordering::Relaxed);
            });
            let s = harness.pair.rx.stats();
            assert_eq!(s.frames, s.passed + s.dropped);
            harness.assert_all_posted(mode);
            harness.close();
        }
    }
}
