//! Flows steered to queues of host memory and of device memory, and both changed under full
//! traffic.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

use netmem_packet::{Checksum, Packet, Poll, RxQueue, SplitFrame};
use netmem_pool::PeerShared;
use netmem_testing::driver::split::{DeviceMemory, assert_split_closed, bind};
use netmem_testing::driver::*;
use netmem_testing::flows::{Ends, FIRST_PORT, Flows, number};
use netmem_virtio::device::port::{Port, Steered, Steering};
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{NetOptions, QueuePair, VirtioNet, VirtioRx};
use netmem_virtio::net::VnetHdr;

/// Frames that are under way at a time: fewer than wait for one queue before it loses frames.
const WINDOW: u64 = 1024;

struct Harness {
    limit: Arc<AtomicU64>,
    steering: Steering,
    device_thread: DeviceThread<Steered<Flows>>,
    net: VirtioNet,
    pairs: Vec<QueuePair>,
    accounting: Accounting,
}

fn harness(flows: u64, options: NetOptions) -> Harness {
    let (limit, steering) = (Arc::new(AtomicU64::new(0)), Steering::new());
    let mut ports = steering.spread(Flows::new(flows, limit.clone()), 2).unwrap().into_iter();
    let device = Options { max_pairs: 2, serve_control: true, ..Options::default() };
    let mut device_thread = DeviceThread::new(NetDevice::new(device, |_| Ok(ports.next().unwrap())).unwrap());
    let accounting = Accounting::default();
    let (net, pairs) = device_thread.probe(accounting.count(options.pairs(2)));
    Harness { limit, steering, device_thread, net, pairs, accounting }
}

fn host(flows: u64, packet: &Packet<PeerShared>) -> u64 {
    assert_eq!(packet.meta.checksum, Checksum::Verified);
    number(&packet.to_vec(), flows)
}

fn split(flows: u64, memory: &DeviceMemory, frame: &SplitFrame) -> u64 {
    assert_eq!(frame.meta.checksum, Checksum::Verified);
    number(&memory.bytes(frame), flows)
}

/// Proves MEM-1 and MEM-10: eight flows are steered at random between a queue of host memory and
/// one of device memory, under full traffic; every frame arrives, once, whole and verified.
#[test]
fn steering_changes_in_full_traffic() {
    const FLOWS: u64 = 8;
    const FRAMES: u64 = 30_000;
    let memory = DeviceMemory::new(1024);
    let mut harness = harness(FLOWS, memory.options().pages(4096));
    let (pair, other) = (harness.pairs.remove(0), harness.pairs.remove(0));
    let (mut plain, mut bound) = (pair.rx, bind(other.rx, &memory.split()));
    let (seen, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let (first, second) = thread::scope(|s| {
        let (seen, stop, memory, steering) = (&seen, &stop, &memory, &harness.steering);
        let on_host = s.spawn(move || {
            let mut numbers = Vec::new();
            until(|| {
                let n = plain.poll(|p| p.receive(64, &mut |p: Packet<PeerShared>| numbers.push(host(FLOWS, &p))));
                seen.fetch_add(n as u64, Relaxed);
                stop.load(Relaxed)
            });
            assert_closed(&plain.close().unwrap(), 0);
            numbers
        });
        let on_device = s.spawn(move || {
            let mut numbers = Vec::new();
            until(|| {
                let n = bound.poll(|p| p.receive(64, &mut |f: SplitFrame| numbers.push(split(FLOWS, memory, &f))));
                seen.fetch_add(n as u64, Relaxed);
                stop.load(Relaxed)
            });
            assert_split_closed(&bound.close().unwrap(), 0);
            numbers
        });
        let mut rng = Rng(1);
        until(|| {
            let upto = FRAMES.min(seen.load(Relaxed) + WINDOW);
            if harness.limit.swap(upto, Relaxed) != upto {
                // The device may sleep, without a frame.
                harness.device_thread.control.wake();
            }
            // Also to a queue that there is not, which means the default.
            steering.steer(FIRST_PORT + rng.below(FLOWS) as u16, rng.below(3) as u8);
            seen.load(Relaxed) == FRAMES
        });
        stop.store(true, Relaxed);
        (on_host.join().unwrap(), on_device.join().unwrap())
    });
    assert!(first.len() > 1000 && second.len() > 1000, "{} {}", first.len(), second.len());
    let mut all = [first, second].concat();
    all.sort_unstable();
    assert!(all.iter().copied().eq(0..FRAMES));
    assert_eq!(harness.steering.dropped(), 0);
    drop((pair.tx, other.tx, harness.net));
    harness.accounting.assert_balanced();
}

/// Receives flow 0 of `flows`, frame by frame, until `stop` returns true. It is called after each
/// poll with the number up to which frames may be sent. Returns how many frames there were.
fn receive_in_order(mut rx: VirtioRx, flows: u64, stop: impl Fn(u64) -> bool) -> u64 {
    let mut next = 0;
    until(|| {
        rx.poll(|p| {
            p.receive(64, &mut |p: Packet<PeerShared>| {
                assert_eq!(host(flows, &p), next);
                next += flows;
            })
        });
        stop(next + WINDOW)
    });
    assert_closed(&rx.close().unwrap(), 0);
    next / flows
}

/// Proves MEM-1: a queue is bound, bound anew and unbound again and again while frames come for it
/// as fast as the other queue takes its own. The other queue misses nothing and waits for nothing;
/// of the frames for this one exactly those are lost that had arrived and were not polled, or that
/// the device counts.
#[test]
fn restarts_in_full_traffic() {
    const FLOWS: u64 = 2;
    let memory = DeviceMemory::new(1024);
    let mut harness = harness(FLOWS, memory.options().pages(4096));
    harness.steering.steer(FIRST_PORT + 1, 1);
    let (pair, other) = (harness.pairs.remove(0), harness.pairs.remove(0));
    let (plain, stop) = (pair.rx, AtomicBool::new(false));
    let (limit, control) = (&harness.limit, &harness.device_thread.control);
    // The last frames are asked for, and no more will be.
    let (last, asked) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|s| {
        let (stop, last, asked) = (&stop, &last, &asked);
        let beside = s.spawn(move || {
            receive_in_order(plain, FLOWS, |upto| {
                if last.load(Relaxed) {
                    asked.store(true, Relaxed);
                } else if limit.swap(upto, Relaxed) != upto {
                    control.wake();
                }
                stop.load(Relaxed)
            })
        });
        let (mut rx, mut next, seen, mut unread) = (other.rx, 1, AtomicU64::new(0), 0);
        let mut saw = |n: u64| {
            assert!(n >= next && n % FLOWS == 1, "{n} after {next}");
            seen.fetch_add(1, Relaxed);
            next = n + FLOWS;
        };
        let ends = Ends(stop);
        for round in 0..30 {
            let mut n = 0;
            until(|| {
                n += rx.poll(|p| p.receive(64, &mut |p: Packet<PeerShared>| saw(host(FLOWS, &p))));
                n > 300
            });
            let bound = rx.restart_split(&memory.split()).unwrap();
            assert_closed(&bound.closed, 0);
            unread += u64::from(bound.unread);
            let mut bound = bound.queue;
            for again in 0..=round % 2 {
                let mut n = 0;
                until(|| {
                    n += bound.poll(|p| p.receive(64, &mut |f: SplitFrame| saw(split(FLOWS, &memory, &f))));
                    n > 300
                });
                if again == 0 && round % 2 == 1 {
                    let anew = bound.restart_split(&memory.split()).unwrap();
                    assert_split_closed(&anew.closed, 0);
                    unread += u64::from(anew.unread);
                    bound = anew.queue;
                }
            }
            let unbound = bound.restart(None).unwrap();
            assert_split_closed(&unbound.closed, 0);
            unread += u64::from(unbound.unread);
            rx = unbound.queue;
        }
        last.store(true, Relaxed);
        until(|| {
            rx.poll(|p| p.receive(64, &mut |p: Packet<PeerShared>| saw(host(FLOWS, &p))));
            let accounted = seen.load(Relaxed) + unread + harness.steering.dropped();
            asked.load(Relaxed) && accounted == limit.load(Relaxed) / FLOWS
        });
        assert!(unread > 0, "restarted while frames were on their way");
        drop(ends);
        assert!(beside.join().unwrap() > 10_000);
        assert_closed(&rx.close().unwrap(), 0);
    });
    drop((pair.tx, other.tx, harness.net));
    assert_eq!(memory.free_pages(), 1024);
    harness.accounting.assert_balanced();
}

/// A queue whose user does not poll stops no other queue, and what is kept for it is bounded.
#[test]
fn a_slow_user_of_one_queue_stops_no_other() {
    let (limit, steering) = (Arc::new(AtomicU64::new(u64::MAX)), Steering::new());
    let mut ports = steering.spread(Flows::new(2, limit), 2).unwrap();
    steering.steer(FIRST_PORT + 1, 1);
    ports.iter_mut().for_each(|port| port.served(true));
    for n in 0..5000 {
        // A poll skips a bounded number of frames of other queues.
        until(|| ports[0].peek().is_some());
        assert_eq!(number(&ports[0].peek().unwrap()[VnetHdr::LEN..], 2), 2 * n);
        ports[0].consume();
    }
    let mut waited = 0;
    while ports[1].peek().is_some_and(|wire| number(&wire[VnetHdr::LEN..], 2) < 9999) {
        ports[1].consume();
        waited += 1;
    }
    assert!(waited > 500 && waited + steering.dropped() == 5000 - 1, "{waited} {}", steering.dropped());
}
