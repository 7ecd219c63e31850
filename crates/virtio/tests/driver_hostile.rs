//! A device that lies about what it received. Each lie ends in a named error and a stopped queue, or in a counted frame;
//! no page is lost.
#![allow(clippy::unwrap_used)]

mod driver_common;

use std::sync::atomic::{AtomicBool, Ordering};

use driver_common::hostile::{Behaviour, Bench, FEATURES};
use driver_common::*;
use netmem_packet::{Checksum, GsoKind, Meta, Packet, Verdict, XdpFrame};
use netmem_pool::PeerShared;
use netmem_virtio::driver::{DeviceFault, NetOptions, RxMode};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::Desc;

const DROP: fn() -> DropAll = DropAll::default;

fn each(lie: impl Fn(RxMode, &mut Bench) -> DeviceFault) {
    for mode in MODES {
        // From the first buffer on, and in the middle of good ones.
        for good in [0, 3] {
            let mut bench = Bench::new(NetOptions::new(mode));
            for i in 0..good {
                bench.deliver(&frame(i, 300));
            }
            let error = lie(mode, &mut bench);
            receive(&mut bench.pair.rx, &mut DROP());
            assert_eq!(bench.pair.rx.stats().frames, good);
            bench.assert_stopped(error);
        }
    }
}

/// Proves NET-6, as do all tests here.
#[test]
fn ids_out_of_range() {
    for id in [256, 257, 65535, 65536, u32::MAX] {
        each(|_, b| {
            b.ring.give(id, 100);
            DeviceFault::BadId { id }
        });
    }
    // No head of a chain.
    for id in [1, 16, 18, 255] {
        let mut bench = Bench::new(NetOptions::new(RxMode::Big));
        bench.ring.give(id, 100);
        receive(&mut bench.pair.rx, &mut DROP());
        bench.assert_stopped(DeviceFault::BadId { id });
    }
}

#[test]
fn a_buffer_used_twice() {
    for mode in MODES {
        let mut bench = Bench::new(NetOptions::new(mode));
        let head = bench.ring.ring.avail_entry(0);
        bench.deliver(&frame(1, 88));
        bench.ring.give(u32::from(head), 100);
        receive(&mut bench.pair.rx, &mut DROP());
        assert_eq!(bench.pair.rx.stats().frames, 1);
        bench.assert_stopped(DeviceFault::NotPosted { id: head });
    }
}

#[test]
fn a_buffer_that_was_never_posted() {
    for mode in MODES {
        let (entries, pages) = if mode == RxMode::Big { (64, 3 * 17) } else { (8, 8) };
        let mut bench = Bench::new(NetOptions::new(mode).ring_size(entries).pages(pages).cache(8));
        // The user holds all pages that come: nothing replaces the buffer.
        bench.deliver(&frame(1, 100));
        let held = take(&mut bench.pair.rx);
        assert_eq!(held.len(), 1);
        bench.ring.give(0, 100);
        receive(&mut bench.pair.rx, &mut DROP());
        drop(held);
        bench.assert_stopped(DeviceFault::NotPosted { id: 0 });
    }
}

#[test]
fn lengths_beyond_the_buffer() {
    for excess in [1, 100, 1 << 20, 1 << 31] {
        each(|mode, b| {
            let head = b.ring.take().unwrap();
            let have: u32 = b.ring.chain(head).iter().map(|d| d.len).sum();
            b.ring.give(u32::from(head), have + excess);
            assert!(mode != RxMode::Small || have == 1530);
            DeviceFault::BadLength { len: have + excess, have }
        });
    }
    each(|_, b| {
        let head = b.ring.take().unwrap();
        let have = b.ring.chain(head).iter().map(|d| d.len).sum();
        b.ring.give(u32::from(head), u32::MAX);
        DeviceFault::BadLength { len: u32::MAX, have }
    });
}

/// Shorter than a header, or than an Ethernet header behind it: nothing to deliver, and no reason to stop. The buffers are
/// posted again as they are, so that the device cannot make the pool work.
#[test]
fn lengths_short_of_a_header() {
    for mode in MODES {
        let mut bench = Bench::new(NetOptions::new(mode));
        let allocated = bench.pair.rx.pool_stats().allocated();
        for len in [0, 1, 11, 12, 13, 25] {
            let head = bench.ring.take().unwrap();
            bench.ring.give(u32::from(head), len);
        }
        assert_eq!(take(&mut bench.pair.rx).len(), 0);
        let s = bench.pair.rx.stats();
        assert_eq!((s.short, s.frames, s.stopped), (6, 0, None));
        assert_eq!(bench.pair.rx.pool_stats().allocated(), allocated, "{mode}");
        bench.deliver(&frame(1, 14));
        assert_eq!(take(&mut bench.pair.rx)[0].to_vec(), frame(1, 14));
        bench.assert_home(mode);
        bench.close();
    }
}

/// A frame in `used` buffers whose header counts `buffers`.
fn count(bench: &mut Bench, buffers: u16, used: u16) {
    for i in 0..used {
        let head = bench.ring.take().unwrap();
        if i == 0 {
            let header = VnetHdr { num_buffers: buffers, ..VnetHdr::PLAIN };
            bench.device.write(bench.ring.ring.desc(head).addr, &header.to_bytes());
        }
        bench.ring.write(u32::from(head), 100);
    }
    bench.ring.show();
    receive(&mut bench.pair.rx, &mut DROP());
}

#[test]
fn buffer_counts_that_cannot_be() {
    for (buffers, used) in [(0, 1), (0, 30), (19, 19), (19, 1), (65535, 200), (256, 256)] {
        let mut bench = Bench::new(NetOptions::new(RxMode::Mergeable));
        count(&mut bench, buffers, used);
        bench.assert_stopped(DeviceFault::BadBufferCount { buffers });
    }
    for (buffers, used) in [(2, 1), (18, 17), (18, 1)] {
        let mut bench = Bench::new(NetOptions::new(RxMode::Mergeable));
        count(&mut bench, buffers, used);
        bench.assert_stopped(DeviceFault::MissingBuffers { buffers, used });
    }
    // The others do not look at it.
    for mode in [RxMode::Small, RxMode::Big] {
        let mut bench = Bench::new(NetOptions::new(mode));
        count(&mut bench, 65535, 3);
        assert_eq!(bench.pair.rx.stats().frames, 3);
        assert_eq!(bench.pair.rx.stats().stopped, None);
        bench.close();
    }
}

/// A lie in the middle of a frame of several buffers: those before it go home, once.
#[test]
fn lies_inside_of_a_merged_frame() {
    type Lie = fn(&mut Bench) -> DeviceFault;
    let lies: [Lie; 3] = [
        |b| {
            b.ring.write(70_000, 100);
            DeviceFault::BadId { id: 70_000 }
        },
        |b| {
            let id = b.ring.ring.avail_entry(0);
            b.ring.write(u32::from(id), 100);
            DeviceFault::NotPosted { id }
        },
        |b| {
            let head = b.ring.take().unwrap();
            let have = b.ring.ring.desc(head).len;
            b.ring.write(u32::from(head), have + 1);
            DeviceFault::BadLength { len: have + 1, have }
        },
    ];
    for lie in lies {
        for at in 1..6 {
            let mut bench = Bench::new(NetOptions::new(RxMode::Mergeable).max_frame(9014));
            let mut error = None;
            for i in 0..6 {
                if i == at {
                    error = Some(lie(&mut bench));
                    continue;
                }
                let head = bench.ring.take().unwrap();
                if i == 0 {
                    let header = VnetHdr { num_buffers: 6, ..VnetHdr::PLAIN };
                    bench.device.write(bench.ring.ring.desc(head).addr, &header.to_bytes());
                }
                bench.ring.write(u32::from(head), 500);
            }
            bench.ring.show();
            assert_eq!(receive(&mut bench.pair.rx, &mut DROP()), 0);
            bench.assert_stopped(error.unwrap());
        }
    }
}

/// Buffers of no bytes in the middle of a frame are odd, and harm nobody.
#[test]
fn empty_buffers_inside_of_a_merged_frame() {
    let mut bench = Bench::new(NetOptions::new(RxMode::Mergeable));
    for i in 0..5 {
        let head = bench.ring.take().unwrap();
        let header = VnetHdr { num_buffers: 5, ..VnetHdr::PLAIN };
        bench.device.write(bench.ring.ring.desc(head).addr, &header.to_bytes());
        bench.ring.write(u32::from(head), if i % 2 == 0 { 100 } else { 0 });
    }
    bench.ring.show();
    let packets = take(&mut bench.pair.rx);
    assert_eq!((packets.len(), packets[0].len()), (1, 288));
    drop(packets);
    bench.close();
}

#[test]
fn the_used_index_jumps() {
    for mode in MODES {
        for by in [257, 0x8000, u16::MAX, u16::MAX - 256] {
            let mut bench = Bench::new(NetOptions::new(mode));
            let posted = bench.ring.available();
            bench.ring.ring.set_used_idx(by);
            assert_eq!(receive(&mut bench.pair.rx, &mut DROP()), 0);
            bench.assert_stopped(DeviceFault::IndexJump { by, posted });
        }
        // Within the ring, and more than was posted.
        let (entries, pages) = if mode == RxMode::Big { (64, 3 * 17) } else { (8, 8) };
        let mut bench = Bench::new(NetOptions::new(mode).ring_size(entries).pages(pages).cache(8));
        let posted = bench.ring.available();
        bench.deliver(&frame(1, 100));
        let held = take(&mut bench.pair.rx);
        let left = bench.ring.available();
        assert_eq!(left, posted - 1);
        bench.ring.ring.set_used_idx(1 + posted);
        assert_eq!(receive(&mut bench.pair.rx, &mut DROP()), 0);
        drop(held);
        bench.assert_stopped(DeviceFault::IndexJump { by: posted, posted: left });
    }
}

/// Headers that cannot be true: the frame is dropped and counted, the queue goes on.
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
        let mut bench = Bench::new(NetOptions::new(mode).max_frame(65549));
        for (i, header) in nonsense.into_iter().enumerate() {
            bench.device.deliver_with(&mut bench.ring, header, &frame(1, 5000));
            assert_eq!(take(&mut bench.pair.rx).len(), 0, "{header:?}");
            assert_eq!(bench.pair.rx.stats().bad_header, i as u64 + 1);
        }
        bench.assert_home(mode);
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
        bench.device.deliver_with(&mut bench.ring, header, &frame(1, 5000));
        let vouched = VnetHdr { flags: VnetHdr::DATA_VALID, ..plain };
        bench.device.deliver_with(&mut bench.ring, vouched, &frame(2, 60));
        let packets = take(&mut bench.pair.rx);
        let gso = packets[0].meta.gso.unwrap();
        assert_eq!((gso.kind, gso.size, gso.headers, gso.ecn), (GsoKind::TcpV4, 1448, 54, false));
        assert_eq!(packets[0].meta.checksum, Checksum::Partial { start: 34, offset: 16 });
        assert_eq!((packets[1].meta.checksum, packets[1].meta.gso), (Checksum::Vouched, None));
        drop(packets);
        bench.close();
    }
}

/// A device speaks of offloads that were not negotiated, by design or because it does so to every driver. Segments, and frames
/// without their checksum, are dropped and counted. A vouched checksum is not believed, and its frame is whole.
#[test]
fn what_was_not_negotiated_is_not_believed() {
    let plain = VnetHdr::PLAIN;
    let segment = |gso_type| VnetHdr { gso_type, gso_size: 1448, hdr_len: 54, ..plain };
    let partial = VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..plain };
    let vouched = VnetHdr { flags: VnetHdr::DATA_VALID, ..plain };
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
        let mut bench = Bench::with(behaviour, NetOptions::new(mode).max_frame(max_frame));
        for (i, &header) in refused.iter().enumerate() {
            bench.device.deliver_with(&mut bench.ring, header, &frame(1, 1500));
            assert_eq!(take(&mut bench.pair.rx).len(), 0, "{mode}: {header:?}");
            let s = bench.pair.rx.stats();
            assert_eq!((s.not_negotiated, s.bad_header, s.frames), (i as u64 + 1, 0, 0), "{mode}: {header:?}");
            assert!(s.errors().any(|e| e == ("not_negotiated", i as u64 + 1)));
        }
        bench.assert_home(mode);
        let believed = bench.net.features() & feature::GUEST_CSUM != 0;
        bench.device.deliver_with(&mut bench.ring, vouched, &frame(2, 60));
        let packets = take(&mut bench.pair.rx);
        let checksum = if believed { Checksum::Vouched } else { Checksum::Unknown };
        assert_eq!((packets[0].meta.checksum, packets[0].meta.gso), (checksum, None), "{mode}");
        drop(packets);
        bench.close();
    }
    // In small mode nothing is negotiated that a header could speak of, and so it is not read.
    let mut bench = Bench::new(NetOptions::new(RxMode::Small));
    for header in [all.as_slice(), &[vouched]].concat() {
        bench.device.deliver_with(&mut bench.ring, header, &frame(1, 1500));
        let packets = take(&mut bench.pair.rx);
        assert_eq!(packets[0].meta, Meta::default(), "{header:?}");
    }
    bench.close();
}

/// The device overwrites what is the driver's: the descriptor table and the available ring. The driver reads neither.
#[test]
fn the_drivers_part_of_the_ring_is_overwritten() {
    for mode in MODES {
        let mut bench = Bench::new(NetOptions::new(mode));
        // Heads and the length of a chain stay; addresses are new with every buffer.
        let heads: Vec<u16> = std::iter::from_fn(|| bench.ring.take()).collect();
        for turn in 0..5 {
            let at: Vec<u64> = heads.iter().map(|&h| bench.ring.ring.desc(h).addr).collect();
            for i in 0..256 {
                bench.ring.ring.set_desc(i, Desc { addr: u64::MAX, len: u32::MAX, flags: 0xffff, next: 0xffff });
                bench.ring.ring.set_avail_entry(i, 0x7fff);
            }
            bench.ring.ring.set_avail_idx(0x1234);
            bench.ring.ring.set_avail_flags(0xffff);
            for (i, (&head, &addr)) in heads.iter().zip(&at).enumerate() {
                let wire = [&VnetHdr::PLAIN.to_bytes()[..], &frame(turn * 1000 + i as u64, 200)].concat();
                bench.device.write(addr, &wire);
                bench.ring.give(u32::from(head), wire.len() as u32);
            }
            let mut seen = 0;
            while seen < heads.len() {
                for p in take(&mut bench.pair.rx) {
                    assert_eq!(p.to_vec(), frame(turn * 1000 + seen as u64, 200));
                    seen += 1;
                }
            }
        }
        assert_eq!(bench.pair.rx.stats().stopped, None);
        bench.assert_home(mode);
        bench.close();
    }
}

/// The memory files are sealed: shrinking one, which would be a SIGBUS for the driver, is refused.
#[test]
fn the_memory_cannot_be_truncated() {
    for mode in MODES {
        let mut bench = Bench::new(NetOptions::new(mode));
        let results = bench.device.truncate();
        assert_eq!(results.len(), 2);
        assert!(results.iter().all(|r| *r == Err(rustix::io::Errno::PERM)), "{results:?}");
        bench.deliver(&frame(1, 100));
        assert_eq!(take(&mut bench.pair.rx).len(), 1);
        bench.close();
    }
}

/// Header bytes, used entries, index and flags change all the time while the driver polls. Whatever it makes of that, what
/// it hands out lies within the buffers, and the books balance.
#[test]
fn everything_changes_between_two_reads() {
    for mode in MODES {
        for seed in 0..12 {
            let mut bench = Bench::new(NetOptions::new(mode).max_frame(mode.max_frame()));
            let stop = AtomicBool::new(false);
            let heads: Vec<u16> = (0..bench.ring.available()).map(|i| bench.ring.ring.avail_entry(i)).collect();
            let buffers: Vec<u64> = heads.iter().map(|&h| bench.ring.ring.desc(h).addr).collect();
            let (device, ring) = (&bench.device, bench.device.ring(0));
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
                            ring.ring.set_used_idx(used);
                        }
                        ring.ring.set_used_flags(header[2].into());
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
                    frames += receive(&mut bench.pair.rx, &mut program) as u64;
                }
                stop.store(true, Ordering::Relaxed);
            });
            let s = bench.pair.rx.stats();
            assert_eq!(s.frames, s.passed + s.dropped);
            bench.assert_home(mode);
            bench.close();
        }
    }
}
