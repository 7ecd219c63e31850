//! Checksums, segmentation and joining in software. They are compared with headers that another
//! library writes, and with each other.

use netmem_packet::{
    Checksum, ChecksumError, Gro, Gso, GsoKind, Handler, Meta, Packet, Reach, SegmentError, Sendable, SoftwareTx,
    TxBulk, TxQueue, complete_checksum,
};
use netmem_pool::{Frag, Page, PagePool, PeerShared, PoolOptions, RegionOptions, RegionProvider};
use netmem_testing::large_frames::{ACK, CWR, ECE, FIN, FrameKind, PSH, Tcp, URG, leave_partial};
use std::collections::VecDeque;

type Pool = PagePool<PeerShared>;

fn new_pool(pages: usize) -> Pool {
    let region = RegionOptions::new(pages).huge_pages(false).populate(false).build().unwrap();
    PoolOptions::new("offload").build(RegionProvider::new(region), None).unwrap()
}

/// A packet of fragments that begin at random places of their pages. At least `head` bytes are in
/// the first fragment.
fn packet(pool: &mut Pool, rng: &mut fastrand::Rng, bytes: &[u8], head: usize, most: usize) -> Packet<PeerShared> {
    let mut frag = |bytes: &[u8], rng: &mut fastrand::Rng| -> Frag<PeerShared> {
        let mut page = pool.alloc().unwrap();
        let at = rng.usize(0..=4096 - bytes.len());
        page.copy_from(at, bytes).unwrap();
        page.freeze_range(at..at + bytes.len())
    };
    let first =
        rng.usize(head.min(bytes.len())..=bytes.len().min(head + 2000)).max(bytes.len().saturating_sub(most * 4000));
    let mut packet = Packet::new(frag(&bytes[..first], rng));
    let mut rest = &bytes[first..];
    while !rest.is_empty() {
        // The fragment is long enough that the rest fits into the remaining fragments.
        let left = most - packet.frags().len() - 1;
        let least = rest.len().saturating_sub(left * 4000).max(1);
        let n = if left == 0 { rest.len() } else { rng.usize(least..=rest.len().min(4000)) };
        packet.push(frag(&rest[..n], rng)).unwrap();
        rest = &rest[n..];
    }
    packet
}

/// Proves NET-9: a large frame of any kind, with any layout in pages, is cut into the segments that
/// another library writes, byte for byte. The payload is not copied, and every page is returned.
#[test]
fn segments_against_a_reference() {
    let (mut rng, mut pool) = (fastrand::Rng::with_seed(7), new_pool(1024));
    for turn in 0..600 {
        let mut kind = FrameKind::random(&mut rng);
        if let Some(tcp) = &mut kind.tcp {
            tcp.flags |= rng.u8(..) & (FIN | PSH | ECE | CWR);
        }
        let payload: Vec<u8> =
            (0..rng.usize(2..if turn % 2 == 0 { 3000 } else { 60_000 })).map(|_| rng.u8(..)).collect();
        let size = rng.usize((payload.len() / 100).max(1)..payload.len() + 10);
        let mut frame = kind.frame(&payload);
        leave_partial(&mut frame, &kind);
        // A segment of 17 fragments at most.
        let mut large = packet(&mut pool, &mut rng, &frame, 0, 16);
        large.meta = Meta { checksum: kind.partial(), gso: Some(kind.gso(size as u16)) };
        let pages = large.fragments().count();
        let (complete, count, want) = (rng.bool(), payload.len().div_ceil(size), kind.segments(&payload, size));
        let before = pool.stats().inflight();
        let segments = large.segment(complete, || pool.alloc()).unwrap();
        assert_eq!((segments.len(), want.len()), (count, count));
        let got: Vec<_> = segments.collect();
        if count > 1 {
            assert!(
                pool.stats().inflight() as usize <= before as usize + count,
                "payload of {pages} pages is not copied"
            );
        }
        for (mut segment, want) in got.into_iter().zip(want) {
            assert_eq!(segment.meta.gso, None);
            if complete {
                assert_eq!(segment.meta.checksum, Checksum::Verified);
            } else {
                assert_eq!(segment.meta.checksum, kind.partial());
                segment.complete_checksum(|| pool.alloc()).unwrap();
            }
            assert!(segment.to_vec() == want, "{kind:?} {size} {turn}");
        }
        assert_eq!(pool.stats().inflight(), 0);
    }
}

/// Proves NET-9: a datagram that is to be fragmented is cut into fragments. After reassembly they
/// are the same datagram.
#[test]
fn fragments_of_a_datagram() {
    let (mut rng, mut pool) = (fastrand::Rng::with_seed(8), new_pool(256));
    for _ in 0..100 {
        let kind = FrameKind { v6: false, tcp: None, may_fragment: true, ..FrameKind::random(&mut rng) };
        let payload: Vec<u8> = (0..rng.usize(2..30_000)).map(|_| rng.u8(..)).collect();
        let whole = kind.frame(&payload);
        let mut frame = whole.clone();
        leave_partial(&mut frame, &kind);
        let mut large = packet(&mut pool, &mut rng, &frame, 42, 17);
        let size = rng.u16(300..1500);
        let gso = Gso { kind: GsoKind::UdpFragment, ..kind.gso(size) };
        large.meta = Meta { checksum: kind.partial(), gso: Some(gso) };
        let (l4, l3, mut datagram) = (kind.l4(), kind.l4() - 20, Vec::new());
        let fragments: Vec<_> = large.segment(true, || pool.alloc()).unwrap().map(|p| p.to_vec()).collect();
        for (n, fragment) in fragments.iter().enumerate() {
            let field = u16::from_be_bytes([fragment[l3 + 6], fragment[l3 + 7]]);
            if fragments.len() > 1 {
                assert_eq!(usize::from(field & 0x1fff) * 8, datagram.len());
                assert_eq!(field & 0x2000 != 0, n + 1 < fragments.len());
            }
            assert_eq!(fragment[l3 + 4..l3 + 6], kind.id.to_be_bytes());
            assert_eq!(fragment[l3 + 2..l3 + 4], ((fragment.len() - l3) as u16).to_be_bytes());
            let mut sum = netmem_packet::Sum::default();
            sum.add(&fragment[l3..l4]);
            assert_eq!(sum.value(), 0xffff);
            assert!(fragment.len() - l4 <= usize::from(size).max(8));
            datagram.extend_from_slice(&fragment[l4..]);
        }
        assert!(datagram == whole[l4..], "{kind:?}");
    }
    assert_eq!(pool.stats().inflight(), 0);
}

/// Collects the packets that are passed on.
type Passed = Vec<Packet<PeerShared>>;

fn joined(frames: impl IntoIterator<Item = Packet<PeerShared>>, udp: bool) -> (Passed, u64) {
    let mut passed = Vec::new();
    let mut gro = Gro::new(|packet| passed.push(packet)).udp(udp);
    frames.into_iter().for_each(|frame| gro.pass(frame));
    gro.flush();
    let wrong = gro.stats().wrong_checksum;
    drop(gro);
    (passed, wrong)
}

/// Proves NET-9: segments of a frame are joined to the same frame again, with the same offload
/// information.
#[test]
fn segments_are_joined_to_the_frame_they_were() {
    let (mut rng, mut pool) = (fastrand::Rng::with_seed(9), new_pool(1024));
    for turn in 0..600 {
        let mut kind = FrameKind::random(&mut rng);
        if let Some(tcp) = &mut kind.tcp {
            tcp.flags |= rng.u8(..) & (PSH | ECE | CWR);
        }
        let size = rng.usize(1..1500);
        // The number of bytes is limited by the number of fragments: each segment of the frame is
        // in one or two pages.
        let payload: Vec<u8> = (0..size + rng.usize(1..=8 * size)).map(|_| rng.u8(..)).collect();
        let mut frame = kind.frame(&payload);
        leave_partial(&mut frame, &kind);
        let mut large = packet(&mut pool, &mut rng, &frame, kind.headers(), 17);
        let meta = Meta { checksum: kind.partial(), gso: Some(kind.gso(size as u16)) };
        large.meta = meta;
        // Segments as a device delivers them: each is in one page, with a verified, an unknown or a
        // partial checksum.
        let segments: Vec<_> = large.segment(turn % 3 > 0, || pool.alloc()).unwrap().collect();
        let segments = segments.into_iter().map(|segment| {
            let mut received = packet(&mut pool, &mut rng, &segment.to_vec(), segment.len(), 1);
            received.meta = if turn % 3 == 2 { Meta::default() } else { segment.meta };
            received
        });
        let segments: Vec<_> = segments.collect();
        let (mut passed, wrong) = joined(segments, true);
        assert_eq!((passed.len(), wrong), (1, 0), "{kind:?} {size} {}", payload.len());
        let packet = passed.remove(0);
        assert_eq!(packet.meta, meta, "{kind:?}");
        assert!(packet.to_vec() == frame, "{kind:?}");
        drop(packet);
        assert_eq!(pool.stats().inflight(), 0);
    }
}

/// Changes one property of some frames, so that they do not continue the frame before. Returns the
/// length of the payload, and whether the checksum is to be wrong.
fn vary(kind: &mut FrameKind, size: usize, rng: &mut fastrand::Rng) -> (usize, bool) {
    match rng.u8(0..40) {
        0 => return (rng.usize(0..=size + 5), false),
        1 => kind.tos ^= 1,
        2 => kind.id = kind.id.wrapping_add(1),
        3 => return (size, true),
        4..12 => {
            if let Some(tcp) = &mut kind.tcp {
                match rng.u8(0..9) {
                    0 => tcp.flags |= FIN,
                    1 => tcp.flags |= PSH,
                    2 => tcp.flags |= URG,
                    3 => tcp.flags |= ECE,
                    4 => tcp.flags |= CWR,
                    5 => tcp.window ^= 1,
                    6 => tcp.sequence = tcp.sequence.wrapping_add(3),
                    7 => tcp.options = (tcp.options + 4) % 44,
                    _ => tcp.flags &= !ACK,
                }
            }
        }
        _ => {}
    }
    (size, false)
}

/// The frames of each flow, after packets that were joined are cut again. `want` are the frames
/// that were received.
fn cut_again(
    passed: Vec<Packet<PeerShared>>,
    base: &FrameKind,
    want: &[Vec<Vec<u8>>],
    pool: &mut Pool,
) -> Vec<Vec<Vec<u8>>> {
    let mut got: Vec<Vec<Vec<u8>>> = vec![Vec::new(); want.len()];
    for packet in passed {
        let cut: Vec<Vec<u8>> = if packet.meta.gso.is_some() {
            packet.segment(true, || pool.alloc()).unwrap().map(|p| p.to_vec()).collect()
        } else {
            vec![packet.to_vec()]
        };
        for mut frame in cut {
            let flow = usize::from(if base.v6 { frame[22] } else { frame[29] });
            // The identification of packets that may not be fragmented has no meaning.
            if !base.v6 && !base.may_fragment {
                let n = got[flow].len();
                frame[18..20].copy_from_slice(&want[flow][n][18..20]);
                frame[24..26].copy_from_slice(&want[flow][n][24..26]);
            }
            got[flow].push(frame);
        }
    }
    got
}

/// Proves NET-9: joined frames stand for exactly the frames that were received, in all cases. When
/// they are cut again, each flow is the same as before, in order and byte for byte. Frames that are
/// not joined are not changed.
#[test]
fn nothing_is_lost_by_joining() {
    let (mut rng, mut pool) = (fastrand::Rng::with_seed(10), new_pool(4096));
    let (mut made, mut came) = (0, 0);
    for turn in 0..150 {
        let base = FrameKind { vlan: false, may_fragment: turn % 2 == 0, ..FrameKind::random(&mut rng) };
        let flows = 1 + turn % 20;
        let size = rng.usize(1..1400);
        let mut next: Vec<FrameKind> = (0..flows).map(|flow| FrameKind { flow: flow as u8, ..base }).collect();
        let mut want: Vec<Vec<Vec<u8>>> = vec![Vec::new(); flows];
        let mut frames = Vec::new();
        for _ in 0..rng.usize(1..200) {
            let flow = rng.usize(..flows);
            let mut kind = next[flow];
            let (len, bad) = vary(&mut kind, size, &mut rng);
            let payload: Vec<u8> = (0..len).map(|_| rng.u8(..)).collect();
            let mut frame = kind.frame(&payload);
            next[flow].id = kind.id.wrapping_add(1);
            if let (Some(next), Some(tcp)) = (&mut next[flow].tcp, kind.tcp) {
                next.sequence = tcp.sequence.wrapping_add(len as u32);
            }
            if bad {
                let last = frame.len() - 1;
                frame[last] ^= 1;
            }
            let mut received = packet(&mut pool, &mut rng, &frame, frame.len(), 1);
            received.meta.checksum = if bad || rng.bool() { Checksum::Unknown } else { Checksum::Verified };
            // Another holder shares the page, so the headers may not be written.
            if rng.u8(0..30) == 0 {
                std::mem::forget(received.clone());
            }
            want[flow].push(frame);
            frames.push(received);
            came += 1;
        }
        let (passed, _) = joined(frames, turn % 3 != 0);
        made += passed.len();
        let got = cut_again(passed, &base, &want, &mut pool);
        assert!(got == want, "turn {turn}: {base:?}");
    }
    assert!(made < came * 2 / 3, "{came} frames became {made}");
}

/// Proves NET-9: a segment with a wrong checksum is not joined, and so never gets a correct one.
#[test]
fn a_wrong_checksum_stays_wrong() {
    let (mut rng, mut pool) = (fastrand::Rng::with_seed(12), new_pool(64));
    for wrong in 0..3 {
        let tcp = Tcp { sequence: 1, flags: ACK, options: 12, window: 9 };
        let kind = FrameKind { v6: false, vlan: false, tcp: Some(tcp), ..FrameKind::random(&mut rng) };
        let mut want = kind.segments(&[7; 3000], 1000);
        want[wrong][500] ^= 1;
        let frames: Vec<_> = want.iter().map(|f| packet(&mut pool, &mut rng, f, f.len(), 1)).collect();
        let (passed, count) = joined(frames, false);
        let cut: Vec<_> = passed
            .into_iter()
            .flat_map(|p| match p.meta.gso {
                Some(_) => p.segment(true, || pool.alloc()).unwrap().collect(),
                None => vec![p],
            })
            .map(|p| p.to_vec())
            .collect();
        assert!(cut == want, "{wrong}");
        assert!(count > 0);
    }
}

/// Proves NET-9 and NET-6: offload information that cannot be true for its frame is refused with a
/// reason, and the packet is returned unchanged.
#[test]
fn metas_that_make_no_sense() {
    let (mut rng, mut pool) = (fastrand::Rng::with_seed(13), new_pool(600));
    let kind = FrameKind {
        v6: false,
        vlan: false,
        tcp: Some(Tcp { sequence: 1, flags: ACK, options: 0, window: 9 }),
        ..FrameKind::random(&mut rng)
    };
    let frame = kind.frame(&[5; 3000]);
    let good = Meta { checksum: kind.partial(), gso: Some(kind.gso(1000)) };
    let gso = |gso: Gso| Meta { gso: Some(gso), ..good };
    let place = |start, offset| Meta { checksum: Checksum::Partial { start, offset }, ..good };
    let wrong = |kind| SegmentError::Headers { kind };
    let elsewhere = |start| SegmentError::ChecksumPlace { start, transport: 34 };
    let cases = [
        (Meta { gso: None, ..good }, SegmentError::NoGso),
        (gso(kind.gso(0)), SegmentError::NoSize),
        (gso(Gso { kind: GsoKind::UdpFragment, ..kind.gso(7) }), wrong(GsoKind::UdpFragment)),
        (gso(kind.gso(1)), SegmentError::TooMany { segments: 3000, size: 1 }),
        (gso(Gso { kind: GsoKind::TcpV6, ..kind.gso(1000) }), wrong(GsoKind::TcpV6)),
        (gso(Gso { kind: GsoKind::UdpSegment, ..kind.gso(1000) }), wrong(GsoKind::UdpSegment)),
        (place(34, 6), elsewhere(34)),
        (place(u16::MAX, 16), elsewhere(u16::MAX)),
        (place(54, 16), elsewhere(54)),
    ];
    for (meta, error) in cases {
        let mut large = packet(&mut pool, &mut rng, &frame, 10, 17);
        large.meta = meta;
        let refused = large.segment(true, || pool.alloc()).unwrap_err();
        assert_eq!(refused.error, error);
        assert_eq!((refused.packet.meta, refused.packet.to_vec() == frame), (meta, true));
    }
    // A segment of 18 fragments: the rest of the head, 16 of one byte each, and a part of the last.
    let mut large = packet(&mut pool, &mut rng, &frame[..60], 60, 17);
    for n in 60..76 {
        large.push(packet(&mut pool, &mut rng, &frame[n..=n], 1, 1).head().clone()).unwrap();
    }
    large.push(packet(&mut pool, &mut rng, &frame[76..], 2000, 1).head().clone()).unwrap();
    large.meta = good;
    let refused = large.segment(true, || pool.alloc()).unwrap_err();
    assert_eq!((refused.error, refused.packet.frags().len()), (SegmentError::TooManyFrags, 17));
    drop(refused);
    // The hint may be wrong: it can point beyond the frame.
    let mut large = packet(&mut pool, &mut rng, &frame, 10, 17);
    large.meta = gso(Gso { headers: u16::MAX, ..kind.gso(1000) });
    assert_eq!(large.segment(true, || pool.alloc()).unwrap().len(), 3);
    // Headers that are truncated at every byte, and bytes that are no headers.
    for len in 0..54 {
        let mut short = packet(&mut pool, &mut rng, &frame[..len], 0, 17);
        short.meta = good;
        assert_eq!(short.segment(true, || pool.alloc()).unwrap_err().error, wrong(GsoKind::TcpV4), "{len}");
    }
    for _ in 0..5000 {
        let mut noise = frame.clone();
        for _ in 0..rng.usize(1..4) {
            noise[rng.usize(10..60)] = rng.u8(..);
        }
        let mut large = packet(&mut pool, &mut rng, &noise, 0, 17);
        let kinds = [GsoKind::TcpV4, GsoKind::TcpV6, GsoKind::UdpSegment, GsoKind::UdpFragment];
        let kind = kinds[rng.usize(..4)];
        large.meta =
            Meta { checksum: Checksum::Unknown, gso: Some(Gso { kind, size: rng.u16(..), headers: 0, ecn: false }) };
        let bytes: usize = match large.segment(rng.bool(), || pool.alloc()) {
            Ok(segments) => segments.map(|segment| segment.len()).sum(),
            Err(refused) => refused.packet.len(),
        };
        assert!(bytes >= noise.len());
    }
    assert_eq!(pool.stats().inflight(), 0);
}

/// Proves NET-9 and POOL-5: if there are not enough pages for all headers, nothing is cut, the
/// packet is returned, and so are the pages.
#[test]
fn too_few_pages() {
    let (mut rng, mut pool) = (fastrand::Rng::with_seed(14), new_pool(256));
    let kind = FrameKind { tcp: None, v6: true, vlan: true, ..FrameKind::random(&mut rng) };
    let frame = kind.frame(&[5; 9000]);
    let mut large = packet(&mut pool, &mut rng, &frame, 10, 17);
    large.meta = Meta { checksum: kind.partial(), gso: Some(kind.gso(1000)) };
    for had in 0..9 {
        let mut pages: Vec<Page<PeerShared>> = (0..had).map(|_| pool.alloc().unwrap()).collect();
        let refused = large.segment(true, || pages.pop()).unwrap_err();
        assert_eq!(refused.error, SegmentError::NoPages { needed: 9, had });
        large = refused.packet;
    }
    assert!(large.to_vec() == frame);
    let segments = large.segment(true, || pool.alloc()).unwrap();
    // Only some of the segments are taken from the iterator.
    assert_eq!(segments.take(4).filter(|segment| segment.len() == 1066).count(), 4);
    assert_eq!(pool.stats().inflight(), 0);
}

/// Proves NET-9: a partial checksum is completed over fragments of any length and alignment, also
/// if its field is in two fragments, and if another holder may read the page.
#[test]
fn partial_checksums_over_fragments() {
    let (mut rng, mut pool) = (fastrand::Rng::with_seed(15), new_pool(256));
    for turn in 0..2000 {
        let kind = FrameKind::random(&mut rng);
        let payload: Vec<u8> = (0..rng.usize(0..3000)).map(|_| rng.u8(..)).collect();
        let whole = kind.frame(&payload);
        let mut frame = whole.clone();
        leave_partial(&mut frame, &kind);
        let head = rng.usize(0..=kind.headers() + 5).min(frame.len());
        let mut partial = Packet::new({
            let mut page = pool.alloc().unwrap();
            page.copy_from(300, &frame[..head]).unwrap();
            page.freeze_range(300..300 + head)
        });
        let rest = packet(&mut pool, &mut rng, &frame[head..], 0, 16);
        let (first, frags) = rest.into_fragments();
        std::iter::once(first).chain(frags).for_each(|frag| _ = partial.push(frag));
        if partial.len() < frame.len() {
            continue;
        }
        partial.meta.checksum = kind.partial();
        let shared = (turn % 3 == 0).then(|| partial.clone());
        if shared.is_some() {
            let mut other = partial.clone();
            assert_eq!(other.complete_checksum(|| None), Err(ChecksumError::NoPage));
            assert!(other.to_vec() == frame && other.meta == partial.meta);
        }
        partial.complete_checksum(|| pool.alloc()).unwrap();
        assert_eq!(partial.meta.checksum, Checksum::Verified);
        assert!(partial.to_vec() == whole, "{kind:?}");
        assert!(shared.is_none_or(|shared| shared.to_vec() == frame), "another holder sees what it saw");
        // The field is beyond the end of the frame.
        partial.meta.checksum = Checksum::Partial { start: whole.len() as u16 - 1, offset: 0 };
        assert!(matches!(partial.complete_checksum(|| pool.alloc()), Err(ChecksumError::OutOfRange(_))));
    }
    assert_eq!(pool.stats().inflight(), 0);
}

/// A queue of a device with some offloads. It is full from time to time, and may stop.
#[derive(Default)]
struct Wire {
    checksums: bool,
    segments: bool,
    size: usize,
    posted: VecDeque<Packet<PeerShared>>,
    stopped: bool,
    calls: usize,
    queued: Vec<(Meta, Vec<u8>)>,
    sent: Vec<(Meta, Vec<u8>)>,
}

impl Wire {
    fn sendable_now(&self) -> Sendable {
        match (self.stopped, self.posted.len() < self.size) {
            (true, _) => Sendable::Never,
            (false, false) => Sendable::Later,
            (false, true) => Sendable::Now,
        }
    }
}

impl TxQueue for Wire {
    type Mem = PeerShared;

    fn send(&mut self, packet: Packet<PeerShared>) -> Result<(), Packet<PeerShared>> {
        if self.sendable(&packet) != Sendable::Now {
            return Err(packet);
        }
        self.queued.push((packet.meta, packet.to_vec()));
        self.posted.push_back(packet);
        Ok(())
    }

    fn sendable(&self, packet: &Packet<PeerShared>) -> Sendable {
        if self.supports(packet.meta) { self.sendable_now() } else { Sendable::Never }
    }

    fn supports(&self, meta: Meta) -> bool {
        (meta.gso.is_none() || self.segments) && (!matches!(meta.checksum, Checksum::Partial { .. }) || self.checksums)
    }

    fn flush(&mut self) {
        self.sent.append(&mut self.queued);
    }

    fn complete(&mut self) -> usize {
        // The device finishes a part of its packets, and sometimes none.
        self.calls += 1;
        let done = self.posted.len().min(self.calls % 5);
        self.posted.drain(..done);
        done
    }

    fn reach(&self, _: &Frag<PeerShared>) -> Reach {
        Reach::Map
    }
}

/// Proves NET-9: packets with any offload arrive at a device with few or no offloads as the frames
/// for which they stand, all of them and in order, even if the queue is often full and pages are
/// few. Every page is returned.
#[test]
fn any_offload_to_any_queue() {
    let (mut rng, mut pool, mut no_pages) = (fastrand::Rng::with_seed(16), new_pool(4096), 0);
    for turn in 0..120 {
        let (checksums, segments) = (turn % 2 == 0, turn % 4 == 0);
        let wire = Wire { checksums, segments, size: rng.usize(7..40), ..Wire::default() };
        let headers = new_pool(if turn % 3 == 0 { 66 } else { 600 });
        let (mut want, mut stats) = (Vec::new(), (0, 0));
        let headers = std::cell::RefCell::new(headers);
        let mut bulk = TxBulk::holding(SoftwareTx::new(wire, || headers.borrow_mut().alloc()), 64);
        for _ in 0..rng.usize(1..60) {
            let kind = FrameKind::random(&mut rng);
            let payload: Vec<u8> = (0..rng.usize(1..3000)).map(|_| rng.u8(..)).collect();
            let least = payload.len().div_ceil(60);
            let most = if rng.bool() { least + 5 } else { payload.len() + 100 };
            let size = rng.usize(least..most);
            let mut frame = kind.frame(&payload);
            let form = rng.u8(0..3);
            if form > 0 {
                leave_partial(&mut frame, &kind);
            }
            let mut packet = packet(&mut pool, &mut rng, &frame, 10, 10);
            if form > 0 {
                packet.meta = Meta { checksum: kind.partial(), gso: (form == 2).then(|| kind.gso(size as u16)) };
            }
            match form {
                0 => want.push(kind.frame(&payload)),
                2 if !segments => want.extend(kind.segments(&payload, size)),
                _ => want.push(kind.frame(&payload)),
            }
            stats.0 += u64::from(form == 1 && !checksums);
            stats.1 += u64::from(form == 2 && !segments);
            while bulk.room() == 0 {
                bulk.flush();
            }
            bulk.push(packet);
        }
        while bulk.held() > 0 || !bulk.target().queue().sent.len().eq(&want.len()) {
            bulk.flush();
            assert_eq!(bulk.stats().dropped, 0);
        }
        let soft = bulk.target().stats();
        assert_eq!((soft.checksummed, soft.segmented, soft.dropped, soft.refused), (stats.0, stats.1, 0, 0));
        no_pages += soft.no_page;
        let queue = bulk.target().queue();
        let sent = std::mem::take(&mut queue.sent);
        for ((meta, mut frame), want) in sent.into_iter().zip(want) {
            if let Checksum::Partial { start, offset } = meta.checksum {
                assert!(checksums && complete_checksum(&mut frame, start, offset));
            }
            assert!(meta.gso.is_none() || segments);
            assert!(frame == want, "turn {turn}");
        }
        drop(bulk);
        assert_eq!((pool.stats().inflight(), headers.borrow_mut().stats().inflight()), (0, 0));
    }
    assert!(no_pages > 0);
}

/// Proves NET-9: a packet that cannot be sent is returned and counted. The reason is an invalid
/// offload, no page for its headers, or a stopped queue. When a queue stops, waiting packets are
/// dropped and counted.
#[test]
fn refused_by_a_software_queue() {
    let (mut rng, mut pool) = (fastrand::Rng::with_seed(17), new_pool(256));
    let kind = FrameKind { tcp: None, v6: false, vlan: false, ..FrameKind::random(&mut rng) };
    let frame = kind.frame(&[9; 3000]);
    let mut large = packet(&mut pool, &mut rng, &frame, 10, 10);
    large.meta = Meta { checksum: kind.partial(), gso: Some(kind.gso(1000)) };
    let pages = std::cell::Cell::new(0);
    let mut headers = new_pool(64);
    let mut page = || {
        pages.set(pages.get() - 1);
        if pages.get() < 0 { None } else { headers.alloc() }
    };
    let mut soft = SoftwareTx::new(Wire { size: 2, ..Wire::default() }, &mut page);
    let back = soft.send(large).unwrap_err();
    assert!(back.to_vec() == frame && back.meta.gso == Some(kind.gso(1000)));
    assert_eq!((soft.stats().no_page, soft.sendable(&back)), (1, Sendable::Later));
    let mut nonsense = back.clone();
    nonsense.meta.gso = Some(kind.gso(0));
    let nonsense = soft.send(nonsense).unwrap_err();
    assert_eq!((soft.stats().refused, soft.sendable(&nonsense)), (1, Sendable::Never));
    drop(nonsense);
    let mut nonsense = back.clone();
    nonsense.meta = Meta { checksum: Checksum::Partial { start: u16::MAX, offset: 0 }, gso: None };
    let nonsense = soft.send(nonsense).unwrap_err();
    assert_eq!((soft.stats().refused, soft.sendable(&nonsense)), (2, Sendable::Never));
    drop(nonsense);
    // Two of the three packets fit, and one waits. A plain packet waits behind it.
    pages.set(100);
    soft.send(back).unwrap();
    soft.flush();
    assert_eq!((soft.queue().sent.len(), soft.waiting()), (2, 1));
    let plain = packet(&mut pool, &mut rng, &frame, 10, 10);
    assert_eq!(soft.sendable(&plain), Sendable::Later);
    let plain = soft.send(plain).unwrap_err();
    soft.queue().stopped = true;
    soft.flush();
    assert_eq!((soft.stats().segments, soft.stats().dropped), (3, 1));
    assert_eq!(soft.sendable(&plain), Sendable::Never);
    let mut large = soft.send(plain).unwrap_err();
    large.meta = Meta { checksum: kind.partial(), gso: Some(kind.gso(1000)) };
    let large = soft.send(large).unwrap_err();
    assert_eq!(soft.sendable(&large), Sendable::Never);
    drop((large, soft));
    assert_eq!((pool.stats().inflight(), headers.stats().inflight()), (0, 0));
}
