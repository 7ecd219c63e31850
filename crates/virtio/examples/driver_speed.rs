//! What the driver costs: frames from our device, and to it, on one thread. The two take turns, so
//! that no cache line changes its CPU, and instructions can be counted:
//! `valgrind --tool=callgrind --toggle-collect='*driver_speed::timed*'`. Run with
//! `cargo run --release -p netmem-virtio --example driver_speed [ROW [ROUNDS]]`.
//!
//! The rows of segments receive large segments into device memory that this process does not map,
//! of pages of 4 KiB and of 64 KiB.
#![allow(clippy::unwrap_used)]

use anyhow::Context;
use etherparse::PacketBuilder;
use netmem_packet::{Handler, Packet, Poll, RxGroup, RxQueue, SplitFrame, TxBulk, TxQueue, Verdict, XdpFrame};
use netmem_pool::{PAGE_SIZE, PeerShared, Region, RegionProvider};
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::{ALL_OFFLOADS, Gen, Port};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, QueuePair, RxMode, SplitOptions, VirtioNet};
use netmem_virtio::net::{VnetHdr, feature};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Packets that are sent at a time.
const BATCH: usize = 64;

/// Reads 16 bytes of each frame, then drops it (`PASS`: after the application got it).
struct Look<const PASS: bool>(u64);

impl<const PASS: bool> Handler<PeerShared> for Look<PASS> {
    fn run(&mut self, frame: &mut XdpFrame<PeerShared>) -> Verdict {
        let head: [u8; 16] = frame.read_at(0).unwrap_or_default();
        self.0 += u64::from(head[12]);
        if PASS { Verdict::Pass } else { Verdict::Drop }
    }

    fn pass(&mut self, packet: Packet<PeerShared>) {
        self.0 += packet.len() as u64;
    }
}

/// Reads 16 bytes of each frame of a group. Then removes its page and drops that in line (`TAKE`),
/// or leaves the page in the frame.
struct LookAtGroups<const TAKE: bool>(u64);

impl<const TAKE: bool> Handler<PeerShared> for LookAtGroups<TAKE> {
    fn run_batch(&mut self, group: &mut RxGroup<'_, PeerShared>) {
        for mut frame in group.frames() {
            let head: [u8; 16] = frame.read_at(0).unwrap_or_default();
            self.0 += u64::from(head[12]);
            if TAKE && let Some(page) = frame.take_page() {
                page.release();
            }
        }
    }

    fn pass(&mut self, packet: Packet<PeerShared>) {
        self.0 += packet.len() as u64;
    }
}

/// Frames that a turn moved, and the nanoseconds of what is measured.
#[inline(never)]
fn timed(turn: impl FnOnce() -> usize) -> (usize, f64) {
    let start = Instant::now();
    let frames = turn();
    (frames, start.elapsed().as_nanos() as f64)
}

fn receive<const PASS: bool>(_: &mut NetDevice<Gen>, pair: &mut QueuePair) -> (usize, f64) {
    let mut handler = Look::<PASS>(0);
    let done = timed(|| pair.rx.poll(|poll| poll.receive(256, &mut handler)));
    std::hint::black_box(handler.0);
    done
}

fn receive_groups<const TAKE: bool>(_: &mut NetDevice<Gen>, pair: &mut QueuePair) -> (usize, f64) {
    let mut handler = LookAtGroups::<TAKE>(0);
    let done = timed(|| pair.rx.poll(|poll| poll.receive(256, &mut handler)));
    std::hint::black_box(handler.0);
    done
}

fn send(_: &mut NetDevice<Gen>, pair: &mut QueuePair) -> (usize, f64) {
    let QueuePair { rx, tx, .. } = pair;
    rx.poll(|poll| {
        poll.with_napi(|napi| {
            let packets: Vec<_> =
                (0..BATCH).filter_map(|_| Some(Packet::new(napi.alloc()?.freeze_range(64..124)))).collect();
            timed(|| {
                tx.complete();
                let sent = packets.into_iter().filter_map(|packet| tx.send(packet).ok()).count();
                tx.flush();
                sent
            })
        })
    })
}

fn send_bulk(_: &mut NetDevice<Gen>, pair: &mut QueuePair) -> (usize, f64) {
    let QueuePair { rx, tx, .. } = pair;
    let mut bulk = TxBulk::new(tx);
    rx.poll(|poll| {
        poll.with_napi(|napi| {
            let packets: Vec<_> =
                (0..BATCH).filter_map(|_| Some(Packet::new(napi.alloc()?.freeze_range(64..124)))).collect();
            timed(|| {
                packets.into_iter().for_each(|packet| bulk.push(packet));
                bulk.flush();
                bulk.stats().sent as usize
            })
        })
    })
}

fn send_groups(_: &mut NetDevice<Gen>, pair: &mut QueuePair) -> (usize, f64) {
    let QueuePair { rx, tx, .. } = pair;
    rx.poll(|poll| {
        poll.with_napi(|napi| {
            let mut packets: Vec<_> =
                (0..BATCH).map(|_| Some(Packet::new(napi.alloc()?.freeze_range(64..124)))).collect();
            timed(|| {
                tx.complete();
                let sent = tx.send_group(&mut packets);
                tx.flush();
                sent
            })
        })
    })
}

type Turn = fn(&mut NetDevice<Gen>, &mut QueuePair) -> (usize, f64);

fn row(what: &str, mode: RxMode, ring: u64, rounds: usize, turn: Turn) {
    let mut device = NetDevice::new(Options::default(), |_| Gen::new(64, None)).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = device.control().serve(theirs).unwrap();
    let options = NetOptions::new(mode).ring_features(ring);
    let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(ours).unwrap(), options).unwrap();
    let mut turns = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        device.poll();
        let (frames, ns) = turn(&mut device, &mut pairs[0]);
        if frames > 0 {
            turns.push(ns / frames as f64);
        }
    }
    turns.sort_by(f64::total_cmp);
    println!("{what:<32} {:7.2} ns a frame, {:7.2} in the best tenth", turns[turns.len() / 2], turns[turns.len() / 10]);
    drop((pairs, net, connection));
}

/// The same large segment again and again, as a sender with segmentation offload would send it.
struct Segment(Vec<u8>);

impl Segment {
    fn new(len: usize) -> Self {
        let header = VnetHdr {
            flags: VnetHdr::NEEDS_CSUM,
            gso_type: if len > 1448 { VnetHdr::GSO_TCPV4 } else { VnetHdr::GSO_NONE },
            gso_size: if len > 1448 { 1448 } else { 0 },
            csum_start: 34,
            csum_offset: 16,
            ..VnetHdr::PLAIN
        };
        let mut wire = header.to_bytes().to_vec();
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        builder.tcp(1, 2, 3, 4).ack(5).write(&mut wire, &vec![7; len]).unwrap();
        Self(wire)
    }
}

impl Port for Segment {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = ALL_OFFLOADS;

    fn peek(&mut self) -> Option<&[u8]> {
        Some(&self.0)
    }

    fn consume(&mut self) {}

    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}

/// Receives segments of `len` bytes of payload into pages of `PAGE_SIZE` times 2 to the power of
/// `order`.
fn segments(what: &str, ring: u64, order: u8, len: usize, rounds: usize) {
    let file = memfd_create("device-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, (8192 * PAGE_SIZE) as u64).unwrap();
    let memory = RegionProvider::new(Region::unmapped(file, order).unwrap());
    let mut device = NetDevice::new(Options::default(), |_| Ok(Segment::new(len))).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = device.control().serve(theirs).unwrap();
    let options = NetOptions::new(RxMode::Big).ring_features(ring).device_memory(memory.region().clone());
    let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(ours).unwrap(), options).unwrap();
    let QueuePair { rx, tx } = pairs.remove(0);
    let split = SplitOptions::new(memory).header_bytes(SplitOptions::TCP_V6).cache(4096);
    let mut rx = rx.restart_split(&split).unwrap().queue;
    let (mut turns, mut bytes) = (Vec::with_capacity(rounds), 0);
    for _ in 0..rounds {
        device.poll();
        let mut handler = |frame: SplitFrame| bytes += frame.payload().extents().map(|e| u64::from(e.len)).sum::<u64>();
        let (frames, ns) = timed(|| rx.poll(|poll| poll.receive(64, &mut handler)));
        if frames > 0 {
            turns.push(ns / frames as f64);
        }
    }
    assert_eq!(bytes, rx.stats().frames * len as u64);
    turns.sort_by(f64::total_cmp);
    let frames = rx.stats().frames;
    println!(
        "{what:<32} {:7.2} ns a segment, {:7.2} in the best tenth; {frames} segments",
        turns[turns.len() / 2],
        turns[turns.len() / 10]
    );
    drop((rx, tx, net, connection));
}

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let only = args.next().unwrap_or_default();
    let rounds = args.next().map_or(Ok(20_000), |n| n.parse()).context("the number of rounds")?;
    let formats = [
        ("split", 0),
        ("packed", feature::RING_PACKED),
        ("split-in-order", feature::IN_ORDER),
        ("packed-in-order", feature::IN_ORDER | feature::RING_PACKED),
    ];
    for (format, ring) in formats {
        let rows: [(&str, RxMode, Turn); 11] = [
            ("small pass", RxMode::Small, receive::<true>),
            ("mergeable pass", RxMode::Mergeable, receive::<true>),
            ("small drop", RxMode::Small, receive::<false>),
            ("mergeable drop", RxMode::Mergeable, receive::<false>),
            ("small groups taken", RxMode::Small, receive_groups::<true>),
            ("mergeable groups taken", RxMode::Mergeable, receive_groups::<true>),
            ("small groups left", RxMode::Small, receive_groups::<false>),
            ("mergeable groups left", RxMode::Mergeable, receive_groups::<false>),
            ("send", RxMode::Small, send),
            ("send bulk", RxMode::Small, send_bulk),
            ("send groups", RxMode::Small, send_groups),
        ];
        for (what, mode, turn) in rows {
            let what = format!("{format} {what}");
            if what.contains(&only) {
                row(&what, mode, ring, rounds, turn);
            }
        }
        for (order, len) in
            [0, 4].into_iter().flat_map(|order| [64, 1448, 4096, 16_000, 64_000].map(|len| (order, len)))
        {
            let what = format!("{format} segments {} KiB {len}", (PAGE_SIZE << order) >> 10);
            if what.contains(&only) {
                segments(&what, ring | feature::INDIRECT_DESC, order, len, rounds);
            }
        }
    }
    Ok(())
}
