//! Proves NET-11 with processes: `netmem device` is killed and started again ten times under a
//! driver that goes on.

use crate::command::{Background, await_that, background};
use netmem::net::{Packet, Poll, RxQueue, TxQueue};
use netmem::pool::PeerShared;
use netmem::virtio::{NetError, NetOptions, QueuePair, RxMode, VhostUser, VirtioNet};
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const RESTARTS: u64 = 10;
/// Frames of 60 bytes: a number, 8 bytes, at 14.
const FRAME: usize = 60;

fn start(socket: &Path) -> Background {
    background(&["device", "--listen", socket.to_str().unwrap(), "--port", "echo"])
}

/// Connects as soon as the device listens.
#[track_caller]
fn connect<T>(socket: &Path, mut then: impl FnMut(VhostUser) -> Result<T, NetError>) -> T {
    let begin = Instant::now();
    loop {
        match VhostUser::connect(socket).map_err(NetError::from).and_then(&mut then) {
            Ok(done) => return done,
            Err(e) => assert!(begin.elapsed() < Duration::from_secs(60), "{e}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends frames with numbers, and notes which come back.
struct Traffic {
    pair: QueuePair,
    sent: u64,
    back: HashMap<u64, u32>,
}

impl Traffic {
    fn turn(&mut self, send: bool) {
        self.pair.tx.complete();
        // Few at a time, so that they are on their way and not in a queue.
        while send && self.pair.tx.posted() < 16 {
            let page = self.pair.rx.poll(|poll| poll.with_napi(|napi| napi.alloc()));
            let Some(mut page) = page else { break };
            let mut bytes = [0; FRAME];
            bytes[14..22].copy_from_slice(&self.sent.to_be_bytes());
            page.copy_from(64, &bytes).unwrap();
            self.pair.tx.send(Packet::new(page.freeze_range(64..64 + FRAME))).unwrap();
            self.sent += 1;
        }
        self.pair.tx.flush();
        let Self { pair, back, .. } = self;
        pair.rx.poll(|poll| {
            poll.receive(64, &mut |packet: Packet<PeerShared>| {
                let bytes = packet.to_vec();
                let number = u64::from_be_bytes(bytes[14..22].try_into().unwrap());
                *back.entry(number).or_default() += 1;
            })
        });
    }
}

#[test]
fn a_device_is_killed_ten_times() {
    for mode in [RxMode::Small, RxMode::Mergeable, RxMode::Big] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("device.sock");
        let mut device = start(&socket);
        let (mut net, mut pairs) =
            connect(&socket, |backend| VirtioNet::probe(backend, NetOptions::new(mode).pages(2048)));
        let mut traffic = Traffic { pair: pairs.remove(0), sent: 0, back: HashMap::new() };
        let (stop, came) = (AtomicBool::new(false), AtomicU64::new(0));
        let mut traffic = std::thread::scope(|s| {
            let polls = s.spawn(|| {
                while !stop.load(Relaxed) {
                    traffic.turn(true);
                    came.store(traffic.back.len() as u64, Relaxed);
                    std::thread::yield_now();
                }
                traffic
            });
            let flows = || {
                let (before, begin) = (came.load(Relaxed), Instant::now());
                while came.load(Relaxed) < before + 500 {
                    assert!(begin.elapsed() < Duration::from_secs(60), "no traffic in {mode} mode");
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            for _ in 0..RESTARTS {
                flows();
                device.0.kill().unwrap();
                device.0.wait().unwrap();
                assert!(!net.is_connected());
                device = start(&socket);
                connect(&socket, |backend| net.reconnect(backend));
            }
            flows();
            stop.store(true, Relaxed);
            polls.join().unwrap()
        });
        // Nothing is killed any more, so the device receives what was sent.
        await_that(|| {
            traffic.turn(false);
            traffic.pair.tx.posted() == 0
        });
        let Traffic { pair, sent, back } = traffic;
        let (rx, tx) = (pair.rx.stats(), pair.tx.stats());
        assert_eq!((rx.restarts, tx.restarts, rx.stopped, tx.stopped), (RESTARTS, RESTARTS, None, None));
        assert_eq!((tx.frames, tx.completed + tx.unconfirmed), (sent, sent), "{tx:?}");
        assert!(back.values().all(|&n| n == 1), "a frame came twice");
        // Lost is what was in flight at a kill: not confirmed as sent, not read, or in the device's
        // own hands.
        let (lost, unconfirmed) = (sent - back.len() as u64, tx.unconfirmed);
        println!(
            "{mode} mode: {sent} frames, {lost} lost in {RESTARTS} kills ({unconfirmed} unconfirmed, {} unread)",
            rx.unread
        );
        assert!(lost <= RESTARTS * (16 + 256 + 256), "{lost} lost");
        drop(pair.tx);
        let closed = pair.rx.close().unwrap();
        let s = closed.stats;
        assert_eq!((closed.outstanding, s.quarantined), (0, 0), "{s:?}");
        assert_eq!((s.allocated(), s.mapped), (s.returned(), s.unmapped), "{s:?}");
        drop(net);
    }
}
