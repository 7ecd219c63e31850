//! DPDK's vhost, 22.11 and 24.11, under our driver: in each ring format, with and without event
//! index, indirect tables and in-order use, in every receive mode, with one and two queue pairs.
//! Frames of every length come back as they were sent.
//!
//! Needs `dpdk-testpmd` (the system's is 22.11 on Debian 12), two CPUs and the archive of Debian 13
//! (24.11), and is skipped, saying so, without. No huge pages and no privileges.

use std::path::Path;
use std::time::{Duration, Instant};

use etherparse::PacketBuilder;
use netmem_packet::{Checksum, Gso, GsoKind, Meta, Packet, Poll, RxQueue, TxQueue};
use netmem_pool::PeerShared;
use netmem_testing::driver::testpmd::{Dpdk, Testpmd};
use netmem_testing::driver::*;
use netmem_virtio::VhostUser;
use netmem_virtio::driver::{NetOptions, QueuePair, RxMode, VirtioNet};
use netmem_virtio::net::feature;
use netmem_virtio::virtqueue::Negotiated;

/// The frame that is sent until it comes back. No other frame is like it.
const GREETING: [u8; 700] = [0x88; 700];

/// Waits until frames come back from this pair. DPDK's vhost starts to receive from a new
/// connection a moment before it sends to it, and drops what testpmd forwards in between; testpmd
/// forwards nothing before it has heard that its port is up.
fn greet(pair: &mut QueuePair) {
    let mut sent: Option<Instant> = None;
    until(|| {
        if sent.is_none_or(|sent| sent.elapsed() > Duration::from_millis(100)) {
            let mut page = pair.rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap();
            page.copy_from(64, &GREETING).unwrap();
            pair.tx.send(Packet::new(page.freeze_range(64..64 + GREETING.len()))).unwrap();
            pair.tx.flush();
            sent = Some(Instant::now());
        }
        pair.tx.complete();
        !take(&mut pair.rx).is_empty()
    });
}

/// Sends frames in one to three fragments, 32 at a time, and compares what comes back, in order.
fn exchange(pair: &mut QueuePair, frames: &[Vec<u8>], what: &str) {
    let (mut sent, mut back, mut rng) = (0, 0, Rng(frames.len() as u64));
    until(|| {
        pair.tx.complete();
        while sent < frames.len() && sent - back < 32 {
            let frame = &frames[sent];
            let pieces = frame.chunks((frame.len() / (1 + rng.below(3) as usize)).clamp(30, 3800));
            let mut fragments = Vec::new();
            for piece in pieces {
                let Some(mut page) = pair.rx.poll(|poll| poll.with_napi(|napi| napi.alloc())) else { break };
                // With and without room for the header in front.
                let room = if sent % 2 == 0 { 64 } else { 0 };
                page.copy_from(room, piece).unwrap();
                fragments.push(page.freeze_range(room..room + piece.len()));
            }
            let mut fragments = fragments.into_iter();
            let mut packet = Packet::new(fragments.next().unwrap());
            fragments.for_each(|fragment| packet.push(fragment).unwrap());
            assert_eq!(packet.len(), frame.len());
            pair.tx.send(packet).unwrap();
            sent += 1;
        }
        pair.tx.flush();
        for packet in take(&mut pair.rx).into_iter().map(|packet| packet.to_vec()).filter(|packet| *packet != GREETING)
        {
            let mut expected = frames[back].clone();
            expected[..12].rotate_left(6);
            assert!(packet == expected, "{what}: frame {back} of {} bytes is another", expected.len());
            back += 1;
        }
        back == frames.len()
    });
    until(|| {
        pair.tx.complete();
        pair.tx.posted() == 0
    });
}

/// Connects with some ring features, in one mode, and exchanges frames on each pair.
fn connect(socket: &Path, ring: u64, mode: RxMode, pairs: u16, what: &str) {
    let max = if mode == RxMode::Small { 1518 } else { 9014 };
    let accounting = Accounting::default();
    let options = NetOptions::new(mode).pairs(pairs).max_frame(max).pages(4096).ring_features(ring);
    let backend = VhostUser::connect(socket).unwrap();
    let (net, mut queues) = VirtioNet::probe(backend, accounting.count(options)).unwrap();
    assert_eq!(net.features() & Negotiated::RING, ring, "{what}");
    for (i, pair) in queues.iter_mut().enumerate() {
        let mut rng = Rng(ring + i as u64);
        let mut lengths: Vec<_> = (60..=1518).step_by(3).chain((1519..=max).step_by(250)).chain([1518, max]).collect();
        (1..lengths.len()).for_each(|at| lengths.swap(at, rng.below(at as u64 + 1) as usize));
        let frames: Vec<_> = lengths.iter().enumerate().map(|(seed, len)| frame(seed as u64, *len)).collect();
        greet(pair);
        exchange(pair, &frames, what);
    }
    queues.into_iter().for_each(close_clean);
    drop(net);
    accounting.assert_balanced();
}

/// Proves NET-7 on a back end that is not ours.
#[test]
fn dpdk_vhost_in_every_format() {
    let _alone = crate::alone();
    let features = [feature::EVENT_IDX, feature::INDIRECT_DESC, feature::IN_ORDER, feature::RING_PACKED];
    for dpdk in [Dpdk::System, Dpdk::Debian13] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("vhost.sock");
        let vhost = format!("net_vhost0,iface={},queues=2", socket.display());
        let Some(_testpmd) = Testpmd::run(dpdk, &vhost, "--forward-mode=macswap --rxq=2 --txq=2", "") else { return };
        for chosen in 0..1 << features.len() {
            let ring = (0..features.len()).filter(|i| chosen >> i & 1 == 1).map(|i| features[i]).sum();
            // Each mode meets each feature on and off, and each number of pairs. But for big mode
            // on packed rings, which DPDK fills wrongly: see "Where a peer differs" in
            // docs/design/virtio.md.
            let modes = &MODES[..if ring & feature::RING_PACKED == 0 { 3 } else { 2 }];
            let mode = modes[(chosen + chosen / 3 + dpdk as usize) % modes.len()];
            let pairs = 1 + (chosen / 2 % 2) as u16;
            let what = format!("DPDK {dpdk:?}, {:?}, {mode}, {pairs} pairs", Negotiated::new(ring));
            connect(&socket, ring, mode, pairs, &what);
        }
    }
}

/// A frame of TCP or UDP over IPv4 or IPv6, its checksum right, and where its transport header
/// begins and its sum is (from there).
struct Transport {
    bytes: Vec<u8>,
    start: usize,
    offset: usize,
    headers: usize,
}

impl Transport {
    /// The four kinds are counted by `kind`.
    fn new(kind: usize, payload: usize) -> Self {
        let ethernet = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
        let (v4, tcp) = (kind & 1 == 0, kind & 2 == 0);
        let ip = if v4 {
            ethernet.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
        } else {
            ethernet.ipv6([0xfd; 16], [0xfe; 16], 64)
        };
        let (mut bytes, payload) = (Vec::new(), frame(payload as u64, payload));
        if tcp {
            ip.tcp(1000, 2000, 7, 512).ack(3).write(&mut bytes, &payload).unwrap();
        } else {
            ip.udp(1000, 2000).write(&mut bytes, &payload).unwrap();
        }
        let headers = bytes.len() - payload.len();
        Self { bytes, start: if v4 { 34 } else { 54 }, offset: if tcp { 16 } else { 6 }, headers }
    }

    fn sum_at(&self) -> std::ops::Range<usize> {
        self.start + self.offset..self.start + self.offset + 2
    }

    /// The frame with the sum of its pseudo-header in the sum's place, as a driver leaves it to the
    /// device.
    fn partial(&self) -> Vec<u8> {
        self.pseudo(self.bytes.len() - self.start)
    }

    fn pseudo(&self, length: usize) -> Vec<u8> {
        let protocol = if self.offset == 16 { 6 } else { 17 };
        let addresses = if self.start == 34 { 26..34 } else { 22..54 };
        let mut pseudo = self.bytes[addresses].to_vec();
        pseudo.extend([0, protocol, (length >> 8) as u8, length as u8]);
        let mut bytes = self.bytes.clone();
        bytes[self.sum_at()].copy_from_slice(&(!checksum(&pseudo)).to_be_bytes());
        bytes
    }

    /// What a device makes of [`partial`](Self::partial) that sums.
    fn complete(&self, bytes: &mut [u8]) {
        let sum = checksum(&bytes[self.start..]);
        // A checksum of zero would mean that the datagram has none.
        let sum = if self.offset == 6 && sum == 0 { 0xffff } else { sum };
        bytes[self.sum_at()].copy_from_slice(&sum.to_be_bytes());
    }

    fn meta(&self, gso: Option<u16>) -> Meta {
        let kind = if self.start == 34 { GsoKind::TcpV4 } else { GsoKind::TcpV6 };
        Meta {
            checksum: Checksum::Partial { start: self.start as u16, offset: self.offset as u16 },
            gso: gso.map(|size| Gso { kind, size, headers: self.headers as u16, ecn: false }),
        }
    }
}

/// The Internet checksum.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w.get(1).copied().unwrap_or(0)])));
    let sum = words.sum::<u32>();
    let sum = (sum & 0xffff) + (sum >> 16);
    !(((sum & 0xffff) + (sum >> 16)) as u16)
}

/// A driver with all offloads.
fn offloading(socket: &Path, accounting: &Accounting) -> (VirtioNet, QueuePair) {
    let options = NetOptions::new(RxMode::Mergeable).max_frame(65549).pages(4096);
    let (net, mut pairs) = VirtioNet::probe(VhostUser::connect(socket).unwrap(), accounting.count(options)).unwrap();
    let mut pair = pairs.remove(0);
    greet(&mut pair);
    (net, pair)
}

/// Sends a frame with offloads and returns what comes back.
fn bounce(pair: &mut QueuePair, bytes: &[u8], meta: Meta) -> Packet<PeerShared> {
    let mut fragments = bytes.chunks(4000).map(|piece| {
        let mut page = pair.rx.poll(|poll| poll.with_napi(|napi| napi.alloc())).unwrap();
        page.copy_from(64, piece).unwrap();
        page.freeze_range(64..64 + piece.len())
    });
    let mut packet = Packet::new(fragments.next().unwrap());
    fragments.for_each(|fragment| packet.push(fragment).unwrap());
    packet.meta = meta;
    pair.tx.send(packet).unwrap();
    pair.tx.flush();
    let mut back = Vec::new();
    until(|| {
        pair.tx.complete();
        back.extend(take(&mut pair.rx).into_iter().filter(|packet| packet.len() != GREETING.len()));
        !back.is_empty()
    });
    assert_eq!(back.len(), 1);
    back.remove(0)
}

fn ends((net, pair): (VirtioNet, QueuePair), accounting: &Accounting) {
    close_clean(pair);
    drop(net);
    accounting.assert_balanced();
}

/// DPDK's `csum` engine computes what is left to it, and leaves to us what it may: each way the sum
/// is right in the end. Proves NET-9.
#[test]
fn dpdk_csum_engine() {
    let _alone = crate::alone();
    for (dpdk, hardware) in [(Dpdk::System, true), (Dpdk::Debian13, true), (Dpdk::Debian13, false)] {
        let dir = tempfile::tempdir().unwrap();
        let (socket, accounting) = (dir.path().join("vhost.sock"), Accounting::default());
        let place = if hardware { "hw" } else { "sw" };
        let commands = format!("port stop 0\ncsum set tcp {place} 0\ncsum set udp {place} 0\nport start 0\n");
        let vhost = format!("net_vhost0,iface={},queues=1", socket.display());
        let Some(_testpmd) = Testpmd::run(dpdk, &vhost, "--forward-mode=csum", &commands) else { return };
        let (net, mut pair) = offloading(&socket, &accounting);
        for kind in 0..4 {
            for payload in [1, 18, 19, 500, 1400, 1401, 3000, 8000] {
                let frame = Transport::new(kind, payload);
                let meta = frame.meta(None);
                let back = bounce(&mut pair, &frame.partial(), meta);
                let mut bytes = back.to_vec();
                if hardware {
                    assert_eq!(back.meta, meta, "{dpdk:?}, kind {kind}, {payload} bytes");
                    frame.complete(&mut bytes);
                } else {
                    assert_ne!(back.meta.checksum, meta.checksum);
                }
                // The engine sets addresses of its own.
                assert!(bytes[12..] == frame.bytes[12..], "{dpdk:?}, {place}, kind {kind}, {payload} bytes");
            }
        }
        ends((net, pair), &accounting);
    }
}

/// Large segments go through DPDK's vhost and come back as large segments, with their size and
/// their partial sum. DPDK leaves the length out of a large segment's pseudo-header, as network
/// cards want it. Proves NET-9.
#[test]
fn dpdk_passes_large_segments() {
    let _alone = crate::alone();
    for dpdk in [Dpdk::System, Dpdk::Debian13] {
        let dir = tempfile::tempdir().unwrap();
        let (socket, accounting) = (dir.path().join("vhost.sock"), Accounting::default());
        // Old flags: what vhost receives has the flags that transmission wants, so the segments'
        // size survives a forwarding that knows nothing of it. testpmd's own TSO wants a capability
        // that this port does not claim.
        let vhost = format!("net_vhost0,iface={},queues=1,tso=1,legacy-ol-flags=1", socket.display());
        let Some(_testpmd) = Testpmd::run(dpdk, &vhost, "--forward-mode=io", "") else { return };
        let (net, mut pair) = offloading(&socket, &accounting);
        for kind in 0..2 {
            for (payload, size) in [(1500, 1000), (9000, 1460), (30_001, 536), (64_000, 1448)] {
                let frame = Transport::new(kind, payload);
                let back = bounce(&mut pair, &frame.partial(), frame.meta(Some(size)));
                assert_eq!(back.meta, frame.meta(Some(size)), "{dpdk:?}, kind {kind}, {payload} bytes");
                assert!(back.to_vec() == frame.pseudo(0), "{dpdk:?}, kind {kind}, {payload} bytes are others");
            }
        }
        ends((net, pair), &accounting);
    }
}
