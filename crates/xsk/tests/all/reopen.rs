//! Queues that are opened again on the same pool: after their interface was deleted and made again,
//! was down, or has lost queues, and under traffic. No page is lost, and no frame comes twice.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Packet, Poll, RxQueue, TxQueue};
use netmem_pool::{KernelShared, RegionProvider};
use netmem_testing::namespace::{in_namespace, ip};
use netmem_testing::xsk::{Harness, Raw, frame, index, memory, name, on_wire, receive, until, veth};
use netmem_xsk::{
    ClosedQueue, Fault, FrameHolder, Program, ProgramOptions, QueueOptions, UmemOptions, XskError, XskRx, XskTx,
    reclaim,
};
use std::cell::Cell;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

fn options() -> QueueOptions {
    QueueOptions::new().fill(64)
}

fn packet(memory: &Arc<RegionProvider<KernelShared>>, bytes: &[u8]) -> Packet<KernelShared> {
    let mut page = memory.page().unwrap();
    page.copy_from(0, bytes).unwrap();
    Packet::new(page.freeze_range(0..bytes.len()))
}

fn free(memory: &Arc<RegionProvider<KernelShared>>) -> usize {
    std::iter::from_fn(|| memory.page()).collect::<Vec<_>>().len()
}

/// Sends frames, and waits until the kernel has them at the other end. The driver passes them on to
/// the socket before it lets an interface go down.
fn deliver(peer: &Raw, ours: &str, frames: u64) {
    let received = || {
        let table = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        let line = table.lines().find_map(|line| line.trim().strip_prefix(&format!("{ours}:"))).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let before = received();
    (0..frames).for_each(|i| peer.send(&frame(100, i)));
    until("frames at the interface", || (received() >= before + frames).then_some(()));
}

/// Opens a queue again. The kernel releases it some time after its socket was closed.
#[track_caller]
fn again(queue: ClosedQueue) -> (XskRx, XskTx) {
    let mut closed = Some(queue);
    until("a free queue", || match closed.take().unwrap().reopen(on_wire(options())) {
        Ok(queues) => Some(queues),
        Err(error) if matches!(error.source, XskError::Busy { .. }) => {
            closed = Some(error.queue);
            None
        }
        Err(error) => panic!("{error}: {}", error.source),
    })
}

/// The interface is deleted while the program holds packets, and frames are in all rings. While
/// there is none, the error says so. When it is made again, with another index, the queue goes on
/// with its pool and its counters.
#[test]
fn an_interface_that_is_made_again() {
    in_namespace(|| {
        let (memory, umem) = memory(512, &UmemOptions::new());
        let harness = Harness::with(memory.clone(), umem, 1500, options());
        let Harness { peer, mut rx, mut tx, ours, theirs, .. } = harness;
        deliver(&peer, &ours, 20);
        let held: Vec<_> = (0..5).map(|_| receive(&mut rx)).collect();
        // The peer does not read: what was sent is out.
        for i in 0..10 {
            tx.send(packet(&memory, &frame(60, i))).unwrap();
        }
        tx.flush();
        let before = (index(&ours), rx.pool_stats().inflight());
        ip(&format!("link delete {ours}"));
        drop(peer);
        until("the queue's end", || {
            rx.poll(|poll| poll.receive(0, &mut |_: Packet<_>| ()));
            tx.complete();
            (rx.stats().stopped == Some(Fault::Gone)).then_some(())
        });
        assert_eq!(before.1, 64 + 5);

        let queue = ClosedQueue::new(rx, tx).unwrap();
        let (stats, sent) = queue.stats();
        assert_eq!((stats.frames, stats.frames + stats.unpolled), (5, 20));
        assert_eq!(sent.descriptors, sent.completed + sent.unconfirmed);
        // The kernel has unbound the socket: its chunks are back already.
        assert_eq!((queue.left(), queue.interface(), queue.queue()), (0, ours.as_str(), 0));
        let error = queue.reopen(options()).unwrap_err();
        assert!(matches!(&error.source, XskError::NoInterface { interface } if *interface == ours), "{error:?}");
        assert_eq!(error.to_string(), format!("queue 0 of {ours} was not opened again"));

        veth(&ours, &theirs, 1, 1500);
        let peer = Raw::new(&theirs);
        let (mut rx, mut tx) = again(error.queue);
        assert_ne!(rx.socket().ifindex(), before.0);
        assert_eq!((rx.stats().frames, rx.stats().unpolled, rx.stats().stopped), (5, 15, None));
        assert_eq!(rx.drops().unwrap().unpolled, 15);
        let program = Program::attach(rx.socket().ifindex(), &ProgramOptions::default()).unwrap();
        program.insert(0, rx.socket().as_fd()).unwrap();
        for i in 0..200 {
            peer.send(&frame(100, 1000 + i));
            assert_eq!(receive(&mut rx).to_vec(), frame(100, 1000 + i));
            tx.send(packet(&memory, &frame(60, i))).unwrap();
            tx.flush();
            assert_eq!(peer.receive(), frame(60, i));
            tx.complete();
        }
        // What the program held is as it was, and returns to the same pool.
        for (i, packet) in held.into_iter().enumerate() {
            assert_eq!(packet.to_vec(), frame(100, i as u64));
        }
        assert_eq!((rx.pool_stats().inflight(), rx.posted()), (64, 64));
        assert_eq!(rx.stats().frames, 205);
        until("completions", || {
            tx.complete();
            (tx.outstanding() == 0).then_some(())
        });
        let stats = tx.stats();
        assert_eq!((stats.frames, stats.descriptors), (210, stats.completed + stats.unconfirmed));
        drop((rx, tx, program));
        ip(&format!("link delete {ours}"));
        reclaim();
        assert_eq!(free(&memory), 512);
    });
}

/// The interface is set down with frames to send in the ring, the queue is opened again meanwhile,
/// and goes on when the interface is up. The pages of the frames that were not sent are back when
/// the socket is bound, and the old frames are never sent.
#[test]
fn a_queue_of_an_interface_that_is_down() {
    in_namespace(|| {
        let harness = Harness::new(512, 1500, &UmemOptions::new(), options());
        let mut pool = harness.pool(64);
        let Harness { peer, mut rx, mut tx, ours, program, memory, .. } = harness;
        for round in 0..5 {
            let (frames, before) = (rx.stats().frames, rx.stats().unpolled);
            deliver(&peer, &ours, 10);
            let first = receive(&mut rx);
            ip(&format!("link set {ours} down"));
            for _ in 0..10 {
                let mut page = pool.alloc().unwrap();
                page.copy_from(0, &frame(61, round)).unwrap();
                tx.send(Packet::new(page.freeze_range(0..61))).unwrap();
            }
            tx.flush();
            let queue = ClosedQueue::new(rx, tx).unwrap();
            assert_eq!((queue.left(), queue.stats().0.unpolled), (64 - 9, before + 9));
            assert_eq!(pool.stats().inflight(), 10);
            (rx, tx) = again(queue);
            assert_eq!((pool.stats().inflight(), rx.posted(), rx.pool_stats().inflight()), (0, 64, 65));
            let (stats, sent) = (rx.stats(), tx.stats());
            assert_eq!((stats.frames, stats.unpolled), (frames + 1, before + 9));
            assert_eq!((sent.unconfirmed, sent.descriptors - sent.completed), (10 * (round + 1), 10 * (round + 1)));
            drop(first);
            program.insert(0, rx.socket().as_fd()).unwrap();
            ip(&format!("link set {ours} up"));
            until("a frame after the interface is up", || {
                peer.offer(&frame(200, round)).then_some(())?;
                let mut got = None;
                rx.poll(|poll| poll.receive(1, &mut |packet: Packet<_>| got = Some(packet.to_vec())));
                got.map(|bytes| assert_eq!(bytes, frame(200, round)))
            });
            tx.send(packet(&memory, &frame(60, round))).unwrap();
            tx.flush();
            assert_eq!(until("what was sent", || peer.try_receive()), frame(60, round));
            until("completions", || {
                tx.complete();
                (tx.outstanding() == 0).then_some(())
            });
            // More than one may have been offered.
            rx.poll(|poll| poll.receive(64, &mut |_: Packet<_>| ()));
        }
    });
}

/// The kernel lets no queue go that has a socket. When the queue is closed, and the interface has
/// fewer queues, the error names the queue and how many there are; with more queues, the queue is
/// opened again.
#[test]
fn the_number_of_queues_changes() {
    in_namespace(|| {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 2, 1500);
        let channels = |n: u32| {
            let n = n.to_string();
            Command::new("ethtool").args(["-L", &ours, "rx", &n, "tx", &n]).output().unwrap().status.success()
        };
        let (memory, umem) = memory(256, &UmemOptions::new());
        let (rx, tx) = umem.open(index(&ours), 1, memory.clone(), options()).unwrap();
        assert!(!channels(1), "the kernel has let the queue go");
        let queue = ClosedQueue::new(rx, tx).unwrap();
        until("fewer queues", || channels(1).then_some(()));
        let error = queue.reopen(options()).unwrap_err();
        let XskError::NoQueue { interface, queue, in_use } = &error.source else { panic!("{error:?}") };
        assert_eq!((interface, *queue, *in_use), (&ours, 1, Some(1)));
        assert!(error.source.to_string().contains("queues in use are those below 1"), "{}", error.source);
        assert!(channels(2));
        let (mut rx, tx) = again(error.queue);
        assert_eq!((rx.posted(), rx.pool_stats().inflight()), (64, 64));
        drop((rx, tx));
        ip(&format!("link delete {ours}"));
        reclaim();
        assert_eq!(free(&memory), 256);
    });
}

/// A queue is opened again with frames on their way in both directions, in either mode: the driver
/// has as many chunks each time, and all pages come back to the pool.
#[test]
fn a_queue_is_opened_again_in_either_mode() {
    in_namespace(|| {
        let harness = Harness::new(4096, 1500, &UmemOptions::new(), options());
        let Harness { peer, mut rx, mut tx, program, memory, .. } = harness;
        let level = rx.fill_level();
        // A frame of the round before may come late.
        let expect = |rx: &mut XskRx, seed| {
            until("the frame", || Some(receive(rx)).filter(|packet| packet.to_vec() == frame(100, seed)))
        };
        for round in 0..5 {
            for i in 1000 * round..1000 * round + 50 {
                peer.send(&frame(100, i));
                drop(expect(&mut rx, i));
                tx.send(packet(&memory, &frame(60, i))).unwrap();
                tx.flush();
                until("the frame at the peer", || (peer.receive() == frame(60, i)).then_some(()));
                tx.complete();
            }
            let first = 1000 * round + 500;
            (first..first + 20).for_each(|i| peer.send(&frame(100, i)));
            let held = expect(&mut rx, first);
            (first..first + 20).for_each(|i| tx.send(packet(&memory, &frame(60, i))).unwrap());
            tx.flush();
            let mode = rx.socket().mode();
            let queue = ClosedQueue::new(rx, tx).unwrap();
            let (received, sent) = queue.stats();
            assert!(received.frames + received.unpolled <= 70 * (round + 1), "{received:?}");
            assert_eq!(sent.descriptors, sent.completed + sent.unconfirmed, "{sent:?}");
            (rx, tx) = again(queue);
            program.insert(0, rx.socket().as_fd()).unwrap();
            assert_eq!((rx.socket().mode(), rx.posted(), rx.fill_level()), (mode, level, level));
            assert_eq!(rx.pool_stats().inflight(), level as u64 + 1);
            assert_eq!(held.to_vec(), frame(100, first));
            drop(held);
        }
    });
}

/// A closed queue that is dropped ends like any other: what the kernel had returns to the memory.
#[test]
fn a_closed_queue_that_is_dropped() {
    in_namespace(|| {
        let (memory, umem) = memory(256, &UmemOptions::new());
        let Harness { rx, tx, ours, .. } = Harness::with(memory.clone(), umem.clone(), 1500, options());
        let queue = ClosedQueue::new(rx, tx).unwrap();
        assert_eq!(queue.left(), 64);
        drop(queue);
        assert_eq!(free(&memory), 256 - 64);
        let (rx, tx) = until("a free queue", || umem.open(index(&ours), 0, memory.clone(), options()).ok());
        assert_eq!(free(&memory), 256 - 64);
        drop((rx, tx));
        ip(&format!("link delete {ours}"));
        reclaim();
        assert_eq!(free(&memory), 256);
    });
}

/// A queue is opened again in another namespace, on an interface of the same name and index, while
/// its own one still exists: what the kernel had of that one is kept until it is gone. The pages
/// then return to the pool, which is in use elsewhere.
#[test]
fn another_interface_of_the_same_name() {
    in_namespace(|| {
        let (memory, umem) = memory(256, &UmemOptions::new());
        let Harness { rx, tx, ours, theirs, .. } = Harness::with(memory.clone(), umem, 1500, options());
        let queue = ClosedQueue::new(rx, tx).unwrap();
        let inside = ours.clone();
        let other = thread::spawn(move || {
            // SAFETY: this thread uses nothing of its old namespace but what it is passed.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
            veth(&inside, &theirs, 1, 1500);
            again(queue)
        });
        let (mut rx, tx) = other.join().unwrap();
        assert_eq!((rx.posted(), rx.pool_stats().inflight()), (64, 128));
        reclaim();
        assert_eq!(rx.pool_stats().inflight(), 128);
        let holders: Vec<_> = rx.held_frames(Duration::ZERO).iter().map(|frame| frame.holder).collect();
        assert_eq!(holders, [FrameHolder::Kernel; 64]);
        ip(&format!("link delete {ours}"));
        reclaim();
        assert_eq!(rx.pool_stats().inflight(), 64);
        drop((rx, tx));
    });
}

/// The sequence number of a frame of the test.
fn number(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[14..22].try_into().unwrap())
}

/// A queue is opened again and again under traffic, on memory for little more than one opening.
/// Each frame that was sent came once: to the program, to the kernel while no socket was in the
/// map, or it is in a counter.
#[test]
fn no_frame_is_lost_or_comes_twice_under_traffic() {
    in_namespace(|| {
        let (memory, umem) = memory::<KernelShared>(200, &UmemOptions::new());
        let harness = Harness::with(memory.clone(), umem, 1500, options());
        let Harness { peer, rx, tx, ours, program, .. } = harness;
        let kernel = Raw::new(&ours);
        let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        let (seen, here) = (Cell::new(Vec::<bool>::new()), Cell::new(0));
        let see = |bytes: &[u8]| {
            let (mut all, n) = (seen.take(), number(bytes) as usize);
            all.resize(all.len().max(n + 1), false);
            assert!(!all[n], "frame {n} came twice");
            all[n] = true;
            seen.set(all);
        };
        let turn = |rx: &mut XskRx| {
            rx.poll(|poll| {
                poll.receive(64, &mut |packet: Packet<_>| {
                    see(&packet.to_vec());
                    here.set(here.get() + 1);
                })
            });
            while let Some(bytes) = kernel.try_receive() {
                see(&bytes);
            }
        };
        let (mut rx, tx) = thread::scope(|s| {
            let (stop, sent, peer) = (&stop, &sent, &peer);
            let (mut rx, mut tx) = (rx, tx);
            let sender = s.spawn(move || {
                let mut bytes = frame(100, 0);
                while !stop.load(Ordering::Relaxed) {
                    let n = sent.load(Ordering::Relaxed);
                    bytes[14..22].copy_from_slice(&n.to_be_bytes());
                    // One without room is not counted as sent.
                    sent.store(n + u64::from(peer.offer(&bytes)), Ordering::Relaxed);
                    if n % 16 == 0 {
                        thread::sleep(Duration::from_micros(200));
                    }
                }
            });
            let _ended = EndOf(stop);
            for _ in 0..20 {
                let goal = here.get() + 200;
                until("frames", || {
                    turn(&mut rx);
                    (here.get() >= goal).then_some(())
                });
                (rx, tx) = again(ClosedQueue::new(rx, tx).unwrap());
                program.insert(0, rx.socket().as_fd()).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            sender.join().unwrap();
            (rx, tx)
        });
        let sent = sent.into_inner();
        until("all frames", || {
            turn(&mut rx);
            let all = seen.take();
            let came = all.iter().filter(|came| **came).count() as u64;
            seen.set(all);
            let drops = rx.drops().unwrap();
            assert!(came + drops.frames() <= sent, "{came} {drops:?} of {sent}");
            (came + drops.frames() == sent).then_some(())
        });
        assert_eq!(rx.stats().passed, here.get());
        assert_eq!((rx.pool_stats().inflight(), rx.posted(), tx.outstanding()), (64, 64, 0));
    });
}

/// Ends the sender, also if an assertion fails.
struct EndOf<'s>(&'s AtomicBool);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
