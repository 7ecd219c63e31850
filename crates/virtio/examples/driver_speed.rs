//! What the driver costs: frames from our device, and to it, on one thread. The two take turns, so that no cache line changes its
//! CPU, and instructions can be counted: `valgrind --tool=callgrind --toggle-collect='*driver_speed::timed*'`.
//! Run with `cargo run --release -p netmem-virtio --example driver_speed [ROW [ROUNDS]]`.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Handler, Packet, Poll, RxQueue, TxQueue, Verdict, XdpFrame};
use netmem_pool::PeerShared;
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::Gen;
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, QueuePair, RxMode, VirtioNet};
use netmem_virtio::net::feature;
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Packets that are sent at a time.
const BATCH: usize = 64;

/// Looks at 16 bytes of each frame, then drops it (`PASS`: after the application got it).
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

fn main() {
    let mut args = std::env::args().skip(1);
    let (only, rounds) = (args.next().unwrap_or_default(), args.next().map_or(20_000, |n| n.parse().unwrap()));
    for (format, ring) in [("split", 0), ("packed", feature::RING_PACKED)] {
        let rows: [(&str, RxMode, Turn); 5] = [
            ("small pass", RxMode::Small, receive::<true>),
            ("mergeable pass", RxMode::Mergeable, receive::<true>),
            ("small drop", RxMode::Small, receive::<false>),
            ("mergeable drop", RxMode::Mergeable, receive::<false>),
            ("send", RxMode::Small, send),
        ];
        for (what, mode, turn) in rows {
            let what = format!("{format} {what}");
            if what.contains(&only) {
                row(&what, mode, ring, rounds, turn);
            }
        }
    }
}
