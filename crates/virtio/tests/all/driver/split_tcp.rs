//! Header split behind the headers, and large segments, by Netmem's device: the split points, the
//! joined segments, and the use of pages.

use std::collections::VecDeque;

use etherparse::PacketBuilder;
use netmem_packet::{Checksum, GsoKind, Headers};
use netmem_testing::driver::split::{BoundDevice, DeviceMemory, take};
use netmem_testing::driver::tcp::{RINGS, WireFrames, bytes, flow, payload, receive, seal, tcp};
use netmem_testing::driver::*;
use netmem_virtio::device::{DropReason, NetDevice, Options};
use netmem_virtio::driver::{NetOptions, RxMode, SplitOptions};
use netmem_virtio::net::{VnetHdr, feature};

fn options(memory: &DeviceMemory, mode: RxMode, rings: u64) -> NetOptions {
    memory.add(NetOptions::new(mode)).ring_features(rings).pages(2000)
}

/// A bound queue of a device with these frames.
fn bound(
    port: WireFrames,
    memory: &DeviceMemory,
    options: NetOptions,
    split: impl Fn(SplitOptions) -> SplitOptions,
) -> BoundDevice<WireFrames> {
    let b = BoundDevice::new(port, options, &split(memory.split().header_bytes(SplitOptions::TCP_V6)));
    assert!(b.rx.splits_headers());
    b
}

/// Adds frames to the port. The device stops for that.
fn feed(b: &mut BoundDevice<WireFrames>, frames: &[Vec<u8>]) {
    let connection = b.device_thread.connection.take();
    let mut device = std::mem::replace(&mut b.device_thread, DeviceThread::one(WireFrames(VecDeque::new()))).stop();
    device.ports()[0] = WireFrames::new(VnetHdr::PLAIN, frames);
    b.device_thread = DeviceThread::new(device);
    b.device_thread.connection = connection;
}

/// An IPv4 frame with options, and a checksum that is right.
fn with_ip_options(words: usize) -> Vec<u8> {
    let mut frame = tcp(false, 1, 1, &[1; 40], &bytes(5, 700));
    frame.splice(34..34, std::iter::repeat_n(1, 4 * words));
    frame[14] = 0x45 + words as u8;
    let total = (frame.len() - 14) as u16;
    frame[16..18].copy_from_slice(&total.to_be_bytes());
    seal(&mut frame);
    frame
}

/// An IPv6 frame with extension headers of `words` times 8 bytes.
fn with_extensions(words: usize) -> Vec<u8> {
    let mut frame = tcp(true, 1, 1, &[], &bytes(6, 700));
    if words > 0 {
        let mut extension = vec![0; 8 * words];
        (extension[0], extension[1]) = (6, words as u8 - 1);
        // PadN.
        let pad = 8 * words - 4;
        let mut at = 2;
        while at < extension.len() {
            let n = (extension.len() - at - 2).min(255).min(pad);
            (extension[at], extension[at + 1]) = (1, n as u8);
            at += 2 + n;
        }
        frame[20] = 60;
        frame.splice(54..54, extension);
        let len = (frame.len() - 54) as u16;
        frame[18..20].copy_from_slice(&len.to_be_bytes());
        seal(&mut frame);
    }
    frame
}

/// Proves MEM-11: headers of any length go to the host part, and payload begins with a page, in
/// every format of rings, in both modes.
#[test]
fn payload_begins_with_a_page() {
    let mut want: Vec<(Vec<u8>, usize)> = Vec::new();
    for options in (0..=40).step_by(4) {
        for v6 in [false, true] {
            let frame = tcp(v6, 1, 1, &vec![1; options], &bytes(7, 1000));
            want.push((frame, if v6 { 74 } else { 54 } + options));
        }
    }
    want.extend((0..=10).map(|words| (with_ip_options(words), 94 + 4 * words)));
    want.extend((0..=12).map(|words| (with_extensions(words), 74 + 8 * words)));
    let udp = |n| {
        let mut frame = Vec::new();
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(7, 9);
        builder.write(&mut frame, &bytes(8, n)).unwrap();
        frame
    };
    want.extend([1, 700, 1400].map(|n| (udp(n), 42)));
    // With VLAN tags.
    for tags in 1..=2 {
        let mut frame = tcp(false, 1, 1, &[], &bytes(9, 100));
        (0..tags).for_each(|tag| _ = frame.splice(12..12, [0x81, 0, 0, tag as u8]));
        want.push((frame, 54 + 4 * tags));
    }
    for rings in RINGS {
        for (mode, room) in [(RxMode::Small, 244), (RxMode::Big, 244), (RxMode::Big, SplitOptions::TCP_V4)] {
            let memory = DeviceMemory::new(2000);
            let port = WireFrames::new(VnetHdr::PLAIN, want.iter().map(|(frame, _)| frame));
            let mut b = bound(port, &memory, options(&memory, mode, rings), |o| o.header_bytes(room));
            for (frame, (want, headers)) in receive(&mut b.rx, want.len()).iter().zip(&want) {
                assert_eq!(memory.bytes(frame), *want);
                // Headers that do not fit are cut off at the end of the host part, and so is their
                // payload.
                let head = if *headers <= room.into() { *headers } else { want.len().min(room.into()) };
                assert_eq!((frame.head().len(), frame.payload().len()), (head, want.len() - head));
                assert!(frame.payload().fragments().all(|frag| frag.offset() == 0));
                assert_eq!((frame.meta.checksum, frame.meta.gso), (Checksum::Verified, None));
            }
            assert_eq!(b.rx.stats().errors().filter(|&(name, _)| name != "out_of_buffers").count(), 0);
            b.close();
        }
    }
}

/// Proves MEM-11: frames without payload use no page, whatever follows them on the wire.
#[test]
fn frames_without_payload_take_no_page() {
    let mut acks: Vec<Vec<u8>> = Vec::new();
    for v6 in [false, true] {
        acks.push(tcp(v6, 1, 1, &[], &[]));
        acks.push(tcp(v6, 1, 1, &[1; 40], &[]));
        // Padded to the shortest Ethernet frame, and beyond.
        for len in [60, 80] {
            let mut padded = tcp(v6, 1, 1, &[], &[]);
            padded.resize(len.max(padded.len()), 0xee);
            acks.push(padded);
        }
    }
    let arp: Vec<u8> = [&[0xff; 6][..], &[2; 6], &[8, 6], &bytes(1, 28)].concat();
    acks.push(arp);
    let memory = DeviceMemory::new(300);
    let port = WireFrames::new(VnetHdr::PLAIN, &acks);
    let mut b = bound(port, &memory, options(&memory, RxMode::Small, 0), |o| o);
    let before = b.rx.pool_stats().1.allocated();
    for (frame, want) in receive(&mut b.rx, acks.len()).iter().zip(&acks) {
        assert_eq!((memory.bytes(frame), frame.payload().len()), (want.clone(), 0));
    }
    assert_eq!(b.rx.pool_stats().1.allocated(), before);
    b.close();
    // Behind payload, padding is cut off: the page has the payload and nothing else.
    let mut frame = tcp(false, 1, 1, &[], b"abc");
    frame.resize(60, 0xee);
    let mut b = bound(WireFrames::new(VnetHdr::PLAIN, [&frame]), &memory, options(&memory, RxMode::Small, 0), |o| o);
    assert_eq!(payload(&memory, &receive(&mut b.rx, 1)[0]), b"abc");
    b.close();
}

/// Proves MEM-11 and NET-9: consecutive segments of a flow become one frame of up to 64 KiB, in one
/// page of 64 KiB, or in pages of 4 KiB that are few extents as long as the pool has pages in a
/// row.
#[test]
fn segments_are_joined() {
    let lens = vec![1400; 100];
    for (rings, order) in RINGS.into_iter().flat_map(|rings| [(rings, 0), (rings, 4)]) {
        for v6 in [false, true] {
            let want = bytes(3, 140_000);
            let memory = DeviceMemory::of_order(2048 >> order, order);
            let segments = flow(v6, 1, 3, &lens);
            let port = WireFrames::new(VnetHdr::PLAIN, &segments);
            let mut b = bound(port, &memory, options(&memory, RxMode::Big, rings), |o| o.cache(64));
            let chains = if rings & feature::INDIRECT_DESC != 0 { 256 } else { 256 / (1 + (16 >> order)).max(2) };
            assert_eq!(b.rx.posted(), chains.min(2048 / 16), "{rings:#x}");
            let frames = receive(&mut b.rx, 3);
            let got: Vec<u8> = frames.iter().flat_map(|frame| payload(&memory, frame)).collect();
            assert!(got == want);
            let headers = if v6 { 86 } else { 66 };
            for (frame, n) in frames.iter().zip([46, 46, 8]) {
                assert_eq!((frame.head().len(), frame.payload().len()), (headers, n * 1400));
                let gso = frame.meta.gso.unwrap();
                assert_eq!(gso.kind, if v6 { GsoKind::TcpV6 } else { GsoKind::TcpV4 });
                assert_eq!((gso.size, usize::from(gso.headers), gso.ecn), (1400, headers, false));
                // A pool gets pages in some runs, which need not begin where a buffer does.
                assert!(frame.payload().extents().count() <= if order == 0 { 2 } else { 1 }, "{rings:#x}");
                assert_eq!(frame.payload().fragments().count(), (n * 1400).div_ceil(4096 << order));
                // The headers are those of one segment.
                let head = memory.bytes(frame)[..headers].to_vec();
                let at = Headers::parse(&head).unwrap();
                assert_eq!(at.end(&head), frame.len());
                assert_eq!(frame.meta.checksum, Checksum::Partial { start: at.l4 as u16, offset: 16 });
            }
            // The device counts at the end of a pass, after the driver has the frames.
            until(|| b.device_thread.stats.counters().any(|c| c == ("rx_joined", 97)));
            drop(frames);
            b.close();
        }
    }
}

/// Pages that were returned in random order are sorted when a chain allocates them together: a
/// large segment stays in few extents, however its user returns pages.
#[test]
fn pages_of_a_chain_are_sorted() {
    // Four chains use all pages, so a chain gets the pages back that its frame consumed.
    let memory = DeviceMemory::new(64);
    let options = options(&memory, RxMode::Big, feature::INDIRECT_DESC);
    let mut b = bound(WireFrames(VecDeque::new()), &memory, options, |o| o.cache(64));
    assert_eq!(b.rx.posted(), 4);
    let mut rng = Rng(5);
    for round in 0..20 {
        feed(&mut b, &flow(false, 1, round, &[1400; 46]));
        let frame = receive(&mut b.rx, 1).remove(0);
        let payload = frame.into_parts().1;
        let extents = payload.extents().count();
        assert!(extents <= 2, "{extents} extents in round {round}");
        let mut pages: Vec<_> = payload.into_iter().collect();
        assert_eq!(pages.len(), 16);
        while !pages.is_empty() {
            pages.swap_remove(rng.below(pages.len() as u64) as usize);
        }
    }
    b.close();
}

/// Segments that are not one, for each rule: the second does not continue the first.
fn not_joined() -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let pair = |edit: &dyn Fn(&mut Vec<u8>, &mut Vec<u8>)| {
        let mut pair = flow(false, 1, 3, &[500, 500]);
        let (first, second) = pair.split_at_mut(1);
        edit(&mut first[0], &mut second[0]);
        pair.iter_mut().for_each(|frame| seal(frame));
        pair
    };
    let mut cases: Vec<(&str, Vec<Vec<u8>>)> = vec![
        ("a gap", pair(&|_, b| b[41] = b[41].wrapping_add(1))),
        ("another acknowledgement", pair(&|_, b| b[45] += 1)),
        ("another window", pair(&|_, b| b[49] += 1)),
        ("other options", pair(&|_, b| b[60] = 0)),
        ("a mark of congestion", pair(&|_, b| b[15] = 3)),
        ("PSH ends", pair(&|a, _| a[47] |= 8)),
        ("FIN", pair(&|_, b| b[47] |= 1)),
        ("URG", pair(&|_, b| b[47] |= 32)),
        ("CWR in the second", pair(&|_, b| b[47] |= 128)),
        ("another flow", pair(&|_, b| b[36] ^= 1)),
        ("another identification, and may be fragmented", pair(&|a, b| (a[20], b[20], b[19]) = (0, 0, 9))),
        ("shorter, then longer", flow(false, 1, 3, &[400, 500])),
        ("payload after none", vec![tcp(false, 1, 1, &[], &[]), tcp(false, 1, 1, &[], b"abc")]),
    ];
    // Of two that continue each other, one is damaged: neither is joined to the other, and the
    // damaged one is unverified.
    let places = [
        ("damaged payload", 100),
        ("a damaged header", 44),
        ("a damaged IP header", 22),
        ("a damaged IP checksum", 24),
    ];
    for (name, at) in places {
        for which in 0..2 {
            let mut pair = flow(false, 1, 3, &[500, 500]);
            pair[which][at] ^= 0x10;
            cases.push((name, pair));
        }
    }
    cases
}

/// Proves MEM-10 and MEM-11: a frame that does not continue a segment is delivered separately, in
/// order. A wrong checksum is never marked as verified.
#[test]
fn what_is_not_joined() {
    for (name, frames) in not_joined() {
        let memory = DeviceMemory::new(600);
        let port = WireFrames::new(VnetHdr::PLAIN, &frames);
        let mut b = bound(port, &memory, options(&memory, RxMode::Big, 0), |o| o);
        for (got, want) in receive(&mut b.rx, 2).iter().zip(&frames) {
            assert_eq!(memory.bytes(got), *want, "{name}");
            let right = Headers::parse(want).is_some_and(|at| at.has_right_checksum(want));
            let checksum = if right { Checksum::Verified } else { Checksum::Unknown };
            assert_eq!((got.meta.checksum, got.meta.gso), (checksum, None), "{name}");
        }
        b.close();
    }
}

/// Proves MEM-11: segments of some flows that come in turn are joined to those of their own flow;
/// all frames of a flow stay in order.
#[test]
fn flows_in_turn() {
    let memory = DeviceMemory::new(1000);
    let flows: Vec<_> = (0..8).map(|n| flow(n % 2 == 1, n as u8, n, &[1000; 40])).collect();
    let turns: Vec<_> = (0..40).flat_map(|i| flows.iter().map(move |flow| flow[i].clone())).collect();
    let port = WireFrames::new(VnetHdr::PLAIN, &turns);
    let mut b = bound(port, &memory, options(&memory, RxMode::Big, feature::INDIRECT_DESC), |o| o);
    for (n, frame) in (0..).zip(receive(&mut b.rx, 8)) {
        assert_eq!(frame.payload().len(), 40_000);
        assert!(payload(&memory, &frame) == bytes(n, 40_000), "flow {n}");
    }
    b.close();
}

/// Proves NET-7: a driver that did not accept segments, or a mode that has no room for them, gets
/// every segment as it came.
#[test]
fn who_accepts_no_segments_gets_none() {
    let frames = flow(false, 1, 3, &[1000; 50]);
    let memory = DeviceMemory::new(600);
    let mut b = bound(WireFrames::new(VnetHdr::PLAIN, &frames), &memory, options(&memory, RxMode::Small, 0), |o| o);
    for (got, want) in receive(&mut b.rx, 50).iter().zip(&frames) {
        assert_eq!((memory.bytes(got), got.meta.gso), (want.clone(), None));
    }
    b.close();
}

/// Proves MEM-11: a segment that is large already, from a sender with segmentation offload, is
/// split like any other.
#[test]
fn large_segments_of_a_port() {
    let memory = DeviceMemory::new(600);
    let large = tcp(true, 1, 1, &[1; 12], &bytes(4, 60_000));
    let header = VnetHdr {
        flags: VnetHdr::NEEDS_CSUM,
        gso_type: VnetHdr::GSO_TCPV6,
        gso_size: 1428,
        // A hint, which the device does not follow.
        hdr_len: 20,
        csum_start: 54,
        csum_offset: 16,
        num_buffers: 1,
    };
    let mut b = bound(WireFrames::new(header, [&large, &large]), &memory, options(&memory, RxMode::Big, 0), |o| o);
    for frame in receive(&mut b.rx, 2) {
        assert!(payload(&memory, &frame) == bytes(4, 60_000));
        assert_eq!((frame.head().len(), frame.meta.gso.unwrap().size), (86, 1428));
        assert_eq!(frame.meta.checksum, Checksum::Partial { start: 54, offset: 16 });
    }
    b.close();
}

/// Proves POOL-3 and MEM-2: short frames leave most pages of a long chain. When the user holds the
/// others, those are collected, and the queue receives until no buffer can be made of what is left.
#[test]
fn pages_that_are_left_are_posted_again() {
    const PAGES: usize = 100;
    let frames: Vec<_> = (0..400).map(|i| tcp(false, i as u8, i, &[], &bytes(i.into(), 1000))).collect();
    for rings in [feature::INDIRECT_DESC, feature::RING_PACKED] {
        let memory = DeviceMemory::new(PAGES);
        let port = WireFrames::new(VnetHdr::PLAIN, &frames);
        let mut b = bound(port, &memory, options(&memory, RxMode::Big, rings), |o| o.cache(16));
        let mut held = Vec::new();
        until(|| {
            held.extend(take(&mut b.rx));
            held.len() > PAGES - 16
        });
        assert_eq!((held.len(), b.rx.posted()), (PAGES - 15, 0), "a buffer has 16 pages, of which a frame takes one");
        for (frame, want) in held.iter().zip(&frames) {
            assert_eq!(memory.bytes(frame), *want);
        }
        // Each goes on where it is.
        let mut seen = held.len();
        drop(held);
        until(|| {
            for frame in take(&mut b.rx) {
                assert_eq!(memory.bytes(&frame), frames[seen]);
                seen += 1;
            }
            seen == frames.len()
        });
        b.close();
        assert_eq!(memory.free_pages(), PAGES);
    }
}

/// Proves MEM-2: with the option, a queue whose pages are all in the user's hands receives
/// acknowledgements, and drops payload, which it counts. With pages it goes on as before.
#[test]
fn headers_come_without_pages() {
    for (mode, order) in [(RxMode::Small, 0), (RxMode::Big, 0), (RxMode::Big, 4)] {
        let memory = DeviceMemory::of_order(300 >> order, order);
        let data = |n: u32| tcp(false, 1, n, &[], &bytes(n.into(), 1000));
        let ack = |n: u32| tcp(false, 1, n, &[], &[]);
        let filling: Vec<_> = (0..300).map(|n| data(9 * n)).collect();
        let port = WireFrames::new(VnetHdr::PLAIN, &filling);
        let options = options(&memory, mode, feature::INDIRECT_DESC);
        let mut b = bound(port, &memory, options, |o| o.cache(0).keep_receiving(true));
        let (mut held, mut lost) = (Vec::new(), 0);
        until(|| {
            for frame in take(&mut b.rx) {
                let want = &filling[held.len() + lost];
                match frame.lost() {
                    0 => {
                        assert_eq!(memory.bytes(&frame), *want);
                        held.push(frame);
                    }
                    n => {
                        assert_eq!((n, frame.head().len(), frame.payload().len(), frame.len()), (1000, 54, 0, 1054));
                        assert_eq!(frame.meta.checksum, Checksum::Verified);
                        lost += 1;
                    }
                }
            }
            held.len() + lost == filling.len()
        });
        assert!(!held.is_empty() && lost > 0, "{} held", held.len());
        assert_eq!(b.rx.stats().payload_dropped, lost as u64);
        assert!(b.rx.posted() > 0, "headers are always posted");
        let more: Vec<_> = (0..100).map(ack).chain((1000..1200).map(data)).collect();
        feed(&mut b, &more[..100]);
        for (frame, want) in receive(&mut b.rx, 100).iter().zip(&more) {
            assert_eq!((memory.bytes(frame), frame.lost()), (want.clone(), 0));
        }
        drop(held);
        // Once the pool has asked the CPUs for its pages, nothing is lost any more.
        let mut seen = 100;
        until(|| {
            let now = &more[seen..seen + 10];
            feed(&mut b, now);
            let frames = receive(&mut b.rx, now.len());
            seen = 100 + (seen - 90) % 200;
            frames.iter().zip(now).all(|(frame, want)| frame.lost() == 0 && memory.bytes(frame) == *want)
        });
        b.close();
        assert_eq!(memory.free_pages(), 300 >> order);
    }
}

/// A chain of big-packet mode holds the longest frame that there is; what is longer is dropped, and
/// counted.
#[test]
fn the_longest_frame() {
    let memory = DeviceMemory::new(600);
    let most = tcp(false, 1, 1, &[], &bytes(1, 65_535 - 40));
    let other: Vec<u8> = [&[1; 12][..], &[0x88, 0xb5], &bytes(2, 65_535)].concat();
    let longer: Vec<u8> = [&other[..], &[0; 200]].concat();
    let header = VnetHdr { num_buffers: 1, ..VnetHdr::PLAIN };
    let port = WireFrames::new(header, [&most, &longer, &other]);
    let mut b = bound(port, &memory, options(&memory, RxMode::Big, 0), |o| o);
    let frames = receive(&mut b.rx, 2);
    assert!(memory.bytes(&frames[0]) == most && memory.bytes(&frames[1]) == other);
    assert_eq!(frames[1].head().len(), usize::from(SplitOptions::TCP_V6));
    until(|| b.device_thread.stats.dropped(DropReason::TooBig) == 1);
    drop(frames);
    b.close();
}

/// Proves NET-7: a device that was not asked to split, and a driver whose device cannot, have the
/// first bytes in the host part.
#[test]
fn a_device_that_does_not_split() {
    let memory = DeviceMemory::new(600);
    let want = tcp(false, 1, 1, &[], &bytes(1, 1000));
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut port = Some(WireFrames::new(VnetHdr::PLAIN, [&want]));
    let device = NetDevice::new(Options::default(), |_| Ok(port.take().unwrap())).unwrap();
    let _connection = device.control().serve(theirs).unwrap();
    let backend = netmem_virtio::VhostUser::own_device(ours).unwrap();
    let (net, mut pairs) = netmem_virtio::driver::VirtioNet::probe(backend, memory.options()).unwrap();
    let mut rx = pairs.remove(0).rx;
    let _rig = DeviceThread::new(device);
    // Host memory first: the device splits nothing there.
    let mut got = Vec::new();
    until(|| {
        use netmem_packet::{Poll, RxQueue};
        rx.poll(|p| {
            p.receive(64, &mut |packet: netmem_packet::Packet<netmem_pool::PeerShared>| got.push(packet.to_vec()))
        });
        !got.is_empty()
    });
    assert_eq!(got, [want]);
    drop((rx, net));
}
