//! XDP verdicts on frames of one buffer and of several, what a program may do to a frame, and
//! queues without pages.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

use netmem_packet::{Packet, Poll, RxQueue, Verdict, XdpFrame};
use netmem_pool::PeerShared;
use netmem_testing::driver::hostile::Harness;
use netmem_testing::driver::*;
use netmem_virtio::driver::{NetOptions, Offload, RxMode};

const SHAPES: [(RxMode, usize, usize); 5] = [
    (RxMode::Small, 1518, 100),
    (RxMode::Mergeable, 1518, 100),
    (RxMode::Mergeable, 65549, 9000),
    (RxMode::Mergeable, 65549, 65549),
    (RxMode::Big, 65549, 9000),
];

/// Proves NET-3 and POOL-9: each verdict on frames of one buffer and of up to 17, each counted,
/// each page back exactly once.
#[test]
fn verdicts() {
    for (mode, max, size) in SHAPES {
        let which = [Verdict::Pass, Verdict::Drop, Verdict::Tx, Verdict::Redirect, Verdict::Aborted];
        for verdict in which {
            let mut harness = Harness::new(NetOptions::new(mode).max_frame(max));
            let posted = harness.pair.rx.posted();
            let (mut passed, mut sent) = (Vec::new(), Vec::new());
            for i in 0..40 {
                harness.deliver(&frame(i, size));
                let mut program = Program::<false, _, _, _> {
                    run: |f: &mut XdpFrame<PeerShared>| {
                        assert_eq!((f.len(), f.is_multi_buffer()), (size, size > 4096));
                        let mut copy = vec![0; size];
                        f.copy_to(0, &mut copy).unwrap();
                        assert_eq!(copy, frame(i, size));
                        verdict
                    },
                    pass: |p| passed.push(p),
                    tx: |p| sent.push(p),
                };
                assert_eq!(receive(&mut harness.pair.rx, &mut program), 1);
                let kept = passed.pop().or(sent.pop());
                assert_eq!(
                    kept.map(|p: Packet<PeerShared>| p.to_vec() == frame(i, size)),
                    match verdict {
                        Verdict::Pass | Verdict::Tx | Verdict::Redirect => Some(true),
                        _ => None,
                    }
                );
            }
            let s = harness.pair.rx.stats();
            let counts = [s.passed, s.dropped, s.transmitted, s.redirected, s.aborted];
            assert_eq!(counts, which.map(|v| if v == verdict { 40 } else { 0 }));
            assert_eq!((s.frames, s.bytes, s.stopped), (40, 40 * size as u64, None));
            assert_eq!(s.multi_buffer, if size > 4096 { 40 } else { 0 });
            assert_eq!(harness.pair.rx.posted(), posted);
            harness.assert_all_posted(mode);
            harness.close();
        }
    }
}

/// A handler that does not implement `tx` and `redirect` drops what it transmits.
#[test]
fn tx_without_a_queue() {
    struct Bounce(Verdict);
    impl netmem_packet::Handler<PeerShared> for Bounce {
        fn run(&mut self, _: &mut XdpFrame<PeerShared>) -> Verdict {
            self.0
        }
        fn pass(&mut self, _: Packet<PeerShared>) {}
    }
    let mut harness = Harness::new(NetOptions::new(RxMode::Small));
    for verdict in [Verdict::Tx, Verdict::Redirect] {
        harness.deliver(&frame(1, 60));
        assert_eq!(receive(&mut harness.pair.rx, &mut Bounce(verdict)), 1);
    }
    let s = harness.pair.rx.stats();
    assert_eq!((s.transmitted, s.redirected), (1, 1));
    harness.assert_all_posted(RxMode::Small);
    harness.close();
}

/// Proves NET-3: a program that wants one buffer gets one, of the pool; a frame that does not fit a
/// page is dropped and counted.
#[test]
fn linearising() {
    for mode in [RxMode::Mergeable, RxMode::Big] {
        let mut harness = Harness::new(NetOptions::new(mode).max_frame(65549));
        // What fits one buffer anyway, what is made to, what fills a page to the last byte, and
        // what is one byte more.
        for (size, fits) in [(60, true), (4080, true), (4090, true), (4096, true), (4097, false), (65549, false)] {
            let want = frame(size as u64, size);
            harness.deliver(&want);
            let mut got = None;
            let mut program = Program::<true, _, _, _> {
                run: |f: &mut XdpFrame<PeerShared>| {
                    assert!(!f.is_multi_buffer() && f.head_len() == size);
                    Verdict::Pass
                },
                pass: |p: Packet<PeerShared>| got = Some(p),
                tx: |_| {},
            };
            receive(&mut harness.pair.rx, &mut program);
            assert_eq!(got.map(|p| (p.frags().len(), p.to_vec())), fits.then_some((0, want)), "{mode} {size}");
        }
        let s = harness.pair.rx.stats();
        assert_eq!((s.not_linear, s.passed, s.frames), (2, 4, 4));
        harness.assert_all_posted(mode);
        harness.close();
    }
}

/// Proves NET-3: without a page to linearise into, the frame's own pages are returned, once.
#[test]
fn linearising_without_pages() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Mergeable).max_frame(9014).ring_size(8).pages(8));
    for i in 0..20 {
        harness.deliver(&frame(i, 4090));
        let mut program =
            Program::<true, _, _, _> { run: |_: &mut XdpFrame<PeerShared>| Verdict::Pass, pass: |_| {}, tx: |_| {} };
        receive(&mut harness.pair.rx, &mut program);
        assert_eq!(harness.pair.rx.stats().not_linear, i + 1);
        assert_eq!(harness.pair.rx.posted(), 8);
    }
    harness.assert_all_posted(RxMode::Mergeable);
    harness.close();
}

/// Proves POOL-9 as far as heads go: programs move both ends within the buffer, and not beyond.
#[test]
fn heads_and_tails_move_within_the_buffer() {
    let split = NetOptions::new(RxMode::Small).headroom(64).buffers_per_page(2);
    for options in [NetOptions::new(RxMode::Small), NetOptions::new(RxMode::Mergeable), split] {
        let mut harness = Harness::new(options);
        for i in 0..80 {
            let want = frame(i, 200);
            harness.deliver(&want);
            let mut got = None;
            let mut program = Program::<false, _, _, _> {
                run: |f: &mut XdpFrame<PeerShared>| {
                    let room = f.headroom() as i32;
                    assert!(room >= 64 + 12);
                    assert!(f.adjust_head(-room - 1).is_err() && f.adjust_head(201).is_err());
                    assert!(f.adjust_head(i32::MIN).is_err() && f.adjust_tail(i32::MIN).is_err());
                    assert!(f.adjust_tail(4096).is_err() && f.adjust_tail(-201).is_err());
                    assert_eq!((f.len(), f.headroom() as i32), (200, room));
                    f.adjust_head(200).unwrap();
                    assert_eq!(f.len(), 0);
                    f.adjust_head(-200).unwrap();
                    f.adjust_head(-room).unwrap();
                    f.adjust_head(room - 8).unwrap();
                    f.write_at(0, b"netmem!!").unwrap();
                    assert!(f.write_at(201, b"netmem!!").is_err());
                    f.adjust_tail(-50).unwrap();
                    Verdict::Pass
                },
                pass: |p: Packet<PeerShared>| got = Some(p.to_vec()),
                tx: |_| {},
            };
            receive(&mut harness.pair.rx, &mut program);
            assert_eq!(got.unwrap(), [b"netmem!!", &want[..150]].concat());
        }
        harness.close();
    }
}

/// Long frames have headroom as short ones have, with segments and without, down to the longest
/// frame there is.
#[test]
fn headroom_in_front_of_long_frames() {
    for (max, offloads, headroom) in [
        (9018, Offload::None, 256),
        (9018, Offload::Checksum, 2048),
        (9018, Offload::All, 256),
        (65549, Offload::All, 448),
    ] {
        let options = NetOptions::new(RxMode::Mergeable).max_frame(max).offloads(offloads).headroom(headroom);
        let mut harness = Harness::new(options);
        for i in 0..20 {
            let mut got = None;
            let mut program = Program::<false, _, _, _> {
                run: |f: &mut XdpFrame<PeerShared>| {
                    assert!(f.is_multi_buffer() && f.headroom() >= headroom.into());
                    f.adjust_head(-i32::from(headroom)).unwrap();
                    f.write_at(0, b"netmem!!").unwrap();
                    Verdict::Pass
                },
                pass: |p: Packet<PeerShared>| got = Some(p.to_vec()),
                tx: |_| {},
            };
            harness.deliver(&frame(i, max));
            receive(&mut harness.pair.rx, &mut program);
            let got = got.unwrap();
            assert_eq!(got[..8], *b"netmem!!");
            assert!(got[headroom.into()..] == frame(i, max), "{max} bytes, {offloads:?}");
        }
        harness.assert_all_posted(RxMode::Mergeable);
        harness.close();
    }
}

/// The head of a frame of several buffers can move; its tail is in another buffer.
#[test]
fn heads_move_on_multi_buffer_frames() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Mergeable).max_frame(65549));
    let want = frame(7, 20_000);
    harness.deliver(&want);
    let mut got = None;
    let mut program = Program::<false, _, _, _> {
        run: |f: &mut XdpFrame<PeerShared>| {
            assert!(f.adjust_tail(-1).is_err() && f.adjust_tail(1).is_err());
            assert!(f.adjust_head(f.head_len() as i32 + 1).is_err());
            f.adjust_head(14).unwrap();
            assert_eq!(f.len(), 20_000 - 14);
            Verdict::Pass
        },
        pass: |p: Packet<PeerShared>| got = Some(p.to_vec()),
        tx: |_| {},
    };
    receive(&mut harness.pair.rx, &mut program);
    assert_eq!(got.unwrap(), want[14..]);
    harness.close();
}

/// Proves NET-3: a program that panics loses nothing, and the queue goes on.
#[test]
fn a_panicking_program() {
    for (mode, max, size) in SHAPES {
        let mut harness = Harness::new(NetOptions::new(mode).max_frame(max));
        for turn in 0..30 {
            for i in 0..3 {
                harness.deliver(&frame(i, size.min(9000)));
            }
            let mut left = 1;
            let mut program = Program::<false, _, _, _> {
                run: |_: &mut XdpFrame<PeerShared>| {
                    left -= 1;
                    if left < 0 && turn % 2 == 0 {
                        std::panic::resume_unwind(Box::new("as the test wants it"));
                    }
                    Verdict::Pass
                },
                pass: |p: Packet<PeerShared>| {
                    if turn % 2 == 1 {
                        std::panic::resume_unwind(Box::new(p.len()));
                    }
                },
                tx: |_| {},
            };
            let unwound = catch_unwind(AssertUnwindSafe(|| receive(&mut harness.pair.rx, &mut program)));
            assert!(unwound.is_err());
            // What it had not come to is received by the next.
            let rest = if turn % 2 == 0 { 1 } else { 2 };
            assert_eq!(receive(&mut harness.pair.rx, &mut DropAll::default()), rest);
        }
        assert_eq!(harness.pair.rx.stats().stopped, None);
        harness.assert_all_posted(mode);
        harness.close();
    }
}

/// A queue whose pages are all held by their users waits, reports this, and goes on when the pages
/// are returned.
#[test]
fn a_queue_without_pages_recovers() {
    for (mode, max, size) in SHAPES {
        // Big-packet mode: for its three chains, and some to fill them up again.
        let pages = if mode == RxMode::Big { 3 * 17 + 10 } else { 64 };
        let mut harness = Harness::new(NetOptions::new(mode).max_frame(max).ring_size(64).pages(pages));
        for _ in 0..3 {
            let mut held = Vec::new();
            while harness.ring.available() > if mode == RxMode::Mergeable { 17 } else { 0 } {
                harness.deliver(&frame(held.len() as u64, size));
                held.append(&mut take(&mut harness.pair.rx));
                assert!(held.len() <= pages, "pages come from nowhere");
            }
            assert!(harness.pair.rx.stats().out_of_buffers > 0, "{mode} {max}");
            let before = harness.pair.rx.posted();
            assert_eq!(take(&mut harness.pair.rx).len(), 0);
            for (i, p) in held.iter().enumerate() {
                assert_eq!(p.to_vec(), frame(i as u64, size));
            }
            std::thread::spawn(move || drop(held)).join().unwrap();
            assert_eq!(take(&mut harness.pair.rx).len(), 0);
            assert!(harness.pair.rx.posted() > before, "{mode} {max}: {before} are posted still");
        }
        harness.assert_all_posted(mode);
        harness.close();
    }
}

/// Frames are received within the budget, and the rest by the next poll.
#[test]
fn budgets_hold_under_merging() {
    let mut harness = Harness::new(NetOptions::new(RxMode::Mergeable).max_frame(65549));
    for i in 0..10 {
        harness.deliver(&frame(i, 10_000));
    }
    for i in 0..10 {
        let mut got = Vec::new();
        let n = harness.pair.rx.poll(|poll| poll.receive(1, &mut |p: Packet<PeerShared>| got.push(p.to_vec())));
        assert_eq!((n, got), (1, vec![frame(i, 10_000)]));
    }
    harness.close();
}

/// A program moves the frame out and leaves another in its place, of its own page or of a part of
/// the same one. The frame that it moved out is its own: no buffer is posted there.
#[test]
fn a_program_that_takes_the_frame() {
    for mode in [RxMode::Small, RxMode::Mergeable] {
        for split in [false, true] {
            let mut harness = Harness::new(NetOptions::new(mode).pages(4096));
            let mut spare = harness.pair.rx.poll(|poll| poll.with_napi(|napi| napi.alloc()));
            harness.deliver(&frame(1, 60));
            while harness.ring.take().is_some() {}
            let mut taken = Vec::new();
            let mut program = Program::<false, _, _, _> {
                run: |f: &mut XdpFrame<PeerShared>| {
                    let mut page = mem::replace(f, XdpFrame::new(spare.take().unwrap(), 0, 0)).into_page();
                    if split {
                        let rest = page.split_off(512);
                        *f = XdpFrame::new(page, 0, 0);
                        page = rest;
                    }
                    taken.push(page);
                    Verdict::Drop
                },
                pass: |_| unreachable!(),
                tx: |_| unreachable!(),
            };
            assert_eq!(receive(&mut harness.pair.rx, &mut program), 1);
            let head = harness.ring.take().expect("another buffer is posted");
            let buffer = harness.ring.chain(head)[0];
            let page = taken.pop().unwrap();
            let taken = page.dma_addr()..page.dma_addr() + page.len() as u64;
            assert!(
                taken.start >= buffer.addr + u64::from(buffer.len) || taken.end <= buffer.addr,
                "{mode}, split: {split}"
            );
            drop(page);
            harness.close();
        }
    }
}
