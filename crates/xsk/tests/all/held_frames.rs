//! Frames that have not come back for longer than a limit are named, with what has them.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Handler, Packet, Poll, RxQueue, TxQueue, Verdict, XdpFrame};
use netmem_pool::KernelShared;
use netmem_testing::namespace::{in_namespace, ip};
use netmem_testing::xsk::{Harness, frame, on_wire, until};
use netmem_xsk::{ClosedQueue, FrameHolder, HeldFrame, QueueOptions, UmemOptions, XskError};
use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

fn pages(frames: &[HeldFrame]) -> BTreeSet<u32> {
    frames.iter().map(|frame| frame.page).collect()
}

/// The page of a packet.
fn page(harness: &Harness, packet: &Packet<KernelShared>) -> u32 {
    harness.memory.region().index_of(packet.head()).unwrap()
}

/// Drops a third of the frames in the receive pass, and keeps the others.
#[derive(Default)]
struct Keep(u64, Vec<Packet<KernelShared>>);

impl Handler<KernelShared> for Keep {
    fn run(&mut self, _: &mut XdpFrame<KernelShared>) -> Verdict {
        self.0 += 1;
        if self.0.is_multiple_of(3) { Verdict::Drop } else { Verdict::Pass }
    }

    fn pass(&mut self, packet: Packet<KernelShared>) {
        self.1.push(packet);
    }
}

/// Frames pass through the pages of a small pool. At most four are out at a time, and come back
/// from two threads.
fn pass(harness: &mut Harness, frames: u64) {
    let mut keep = Keep::default();
    for i in 0..frames {
        harness.peer.send(&frame(100, i));
        until("a frame", || {
            let got = harness.rx.poll(|poll| poll.receive(64, &mut keep));
            (got > 0).then_some(())
        });
        if keep.1.len() == 4 {
            let rest = keep.1.split_off(2);
            thread::scope(|s| drop(s.spawn(move || drop(rest)).join()));
            keep.1.clear();
        }
    }
}

/// The next frame, kept.
fn hold(harness: &mut Harness, i: u64) -> Packet<KernelShared> {
    harness.peer.send(&frame(100, i));
    harness.receive()
}

fn small(chunk: usize) -> Harness {
    Harness::new(160, 1500, &UmemOptions::new().chunk(chunk), QueueOptions::new().fill(64).cache(16))
}

/// A few frames are held, and thousands pass through the other pages: those that are held are
/// named, and no others, in pages of one and of two chunks.
#[test]
fn received_frames_that_are_held_are_named() {
    for chunk in [4096, 2048] {
        in_namespace(|| {
            let mut harness = small(chunk);
            pass(&mut harness, 200);
            let begin = Instant::now();
            let held: Vec<_> = (0..5).map(|i| hold(&mut harness, i)).collect();
            // Two chunks may be of one page.
            let expected: BTreeSet<_> = held.iter().map(|packet| page(&harness, packet)).collect();
            assert_eq!(pages(&harness.rx.held_frames(Duration::ZERO)), expected);
            let first = Instant::now();
            for _ in 0..5 {
                pass(&mut harness, 200);
                // At this moment the program has another one, too.
                let other = hold(&mut harness, 7);
                let mut now = expected.clone();
                now.insert(page(&harness, &other));
                assert_eq!(pages(&harness.rx.held_frames(Duration::ZERO)), now);
                let old = harness.rx.held_frames(first.elapsed());
                assert_eq!(pages(&old), expected, "{old:?}");
                for frame in &old {
                    assert!((begin..=first).contains(&frame.since), "{frame:?}");
                    assert_eq!((frame.queue, frame.holder), (0, FrameHolder::Program));
                    assert_eq!(frame.address / 4096, u64::from(frame.page));
                }
                assert_eq!(harness.rx.held_frames(Duration::from_secs(3600)), []);
            }
            let text = harness.rx.held_frames(first.elapsed())[0].to_string();
            let said = format!("queue 0 of {}: page ", harness.ours);
            assert!(text.starts_with(&said) && text.contains("held by the program for"), "{text}");
            drop(held);
            assert_eq!(harness.rx.held_frames(Duration::ZERO), []);
        });
    }
}

/// A page that came back is held anew, also if no sample has seen it in between.
#[test]
fn a_page_that_comes_back_and_is_held_again_is_not_old() {
    for chunk in [4096, 2048] {
        in_namespace(|| {
            let mut harness = small(chunk);
            let packet = hold(&mut harness, 8);
            let number = page(&harness, &packet);
            assert_eq!(pages(&harness.rx.held_frames(Duration::ZERO)), [number].into());
            let before = Instant::now();
            drop(packet);
            let packet = until("the same page", || {
                let packet = hold(&mut harness, 9);
                (page(&harness, &packet) == number).then_some(packet)
            });
            let held = harness.rx.held_frames(Duration::ZERO);
            assert_eq!(pages(&held), [number].into());
            assert!(held[0].since >= before, "{held:?}");
            drop(packet);
        });
    }
}

/// Sent frames: in the TX ring while the interface is down, with the kernel while the receiver has
/// them. A received frame that is sent is listed once, where it is now.
#[test]
fn sent_frames_that_do_not_complete_are_named() {
    in_namespace(|| {
        let mut harness = Harness::new(1024, 1500, &UmemOptions::new(), on_wire(QueueOptions::new().fill(64)));
        // Some that complete.
        let mut pool = harness.pool(64);
        for i in 0..50 {
            let page = pool.alloc().unwrap();
            harness.send(Packet::new(page.freeze_range(0..60)));
            harness.peer.receive();
            if i % 10 == 0 {
                assert_eq!(harness.tx.held_frames(Duration::ZERO), []);
            }
        }
        harness.peer.send(&frame(100, 1));
        let echoed = harness.receive();
        let echo = page(&harness, &echoed);
        assert_eq!(pages(&harness.rx.held_frames(Duration::ZERO)), [echo].into());
        harness.tx.send(echoed).unwrap();
        harness.tx.flush();
        // The peer's socket has the frame, and does not read it.
        let sent = until("a frame at the kernel", || {
            let held = harness.tx.held_frames(Duration::ZERO);
            (held.len() == 1 && held[0].holder == FrameHolder::Kernel).then_some(held)
        });
        assert_eq!((pages(&sent), sent[0].queue), ([echo].into(), 0));
        ip(&format!("link set {} down", harness.ours));
        let page = pool.alloc().unwrap().freeze_range(0..60);
        let waiting = harness.memory.region().index_of(&page).unwrap();
        harness.tx.send(Packet::new(page)).unwrap();
        harness.tx.flush();
        let sent = harness.tx.held_frames(Duration::ZERO);
        let holders: Vec<_> = sent.iter().map(|frame| (frame.page, frame.holder)).collect();
        assert_eq!(holders, [(echo, FrameHolder::Kernel), (waiting, FrameHolder::TxRing)]);
        assert!(sent[1].to_string().contains("held by the TX ring"), "{}", sent[1]);
        // The kernel's frame is older.
        assert_eq!(pages(&harness.tx.held_frames(sent[0].since.elapsed())), [echo].into());
        let received = harness.rx.held_frames(Duration::ZERO);
        assert_eq!((pages(&received), received[0].holder), ([echo].into(), FrameHolder::Program));
        let merged = HeldFrame::merge(received, sent);
        let holders: Vec<_> = merged.iter().map(|frame| (frame.page, frame.holder)).collect();
        assert_eq!(holders, [(echo, FrameHolder::Kernel), (waiting, FrameHolder::TxRing)]);
        ip(&format!("link set {} up", harness.ours));
        until("completions", || {
            while harness.peer.try_receive().is_some() {}
            harness.tx.complete();
            harness.tx.held_frames(Duration::ZERO).is_empty().then_some(())
        });
        assert_eq!((harness.tx.outstanding(), harness.rx.held_frames(Duration::ZERO)), (0, vec![]));
    });
}

/// A frame is held across the opening of a queue, since the same time.
#[test]
fn a_frame_that_is_held_while_its_queue_is_opened_again() {
    in_namespace(|| {
        let mut harness = Harness::new(256, 1500, &UmemOptions::new(), QueueOptions::new().fill(64));
        harness.peer.send(&frame(100, 1));
        let held = harness.receive();
        let before = harness.rx.held_frames(Duration::ZERO);
        assert_eq!(pages(&before), [page(&harness, &held)].into());
        let Harness { rx, tx, .. } = harness;
        let mut queue = Some(ClosedQueue::new(rx, tx).unwrap());
        let (mut rx, _tx) =
            until("a free queue", || match queue.take().unwrap().reopen(QueueOptions::new().fill(64)) {
                Ok(queues) => Some(queues),
                Err(error) => {
                    assert!(matches!(error.source, XskError::Busy { .. }), "{error:?}");
                    queue = Some(error.queue);
                    None
                }
            });
        assert_eq!(rx.held_frames(Duration::ZERO), before);
        drop(held);
        assert_eq!(rx.held_frames(Duration::ZERO), []);
    });
}
