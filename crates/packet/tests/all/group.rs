//! Frames in groups: what a handler can do with them, what is counted, and what stays in its place.

use netmem_packet::{Checksum, FrameCounts, Handler, Packet, RxGroup, Verdict, XdpFrame};
use netmem_pool::{DataPage, PagePool, PoolOptions, Private, RegionOptions, RegionProvider};
use std::panic::{AssertUnwindSafe, catch_unwind};

const FRAMES: usize = 6;

fn pool() -> PagePool<Private> {
    let region = RegionOptions::new(16).huge_pages(false).build::<Private>().unwrap();
    PoolOptions::new("group").build(RegionProvider::new(region), None).unwrap()
}

/// Frame `i` has `20 + i` bytes, all of them `i`.
fn frames(pool: &mut PagePool<Private>) -> Vec<Option<DataPage<Private>>> {
    let frame = |i: u8| {
        let mut page = pool.alloc().unwrap();
        page.copy_from(128, &vec![i; 20 + usize::from(i)]).unwrap();
        Some(DataPage::new(page, 128, 20 + usize::from(i)))
    };
    (0..FRAMES as u8).map(frame).collect()
}

fn bytes(frames: &[Option<DataPage<Private>>]) -> u64 {
    frames.iter().flatten().map(|page| page.data().len() as u64).sum()
}

fn left(frames: &[Option<DataPage<Private>>]) -> Vec<usize> {
    let left: Vec<_> = (0..frames.len()).filter(|&i| frames[i].is_some()).collect();
    assert!(left.iter().all(|&i| frames[i].as_ref().unwrap().headroom() == 128), "each begins where it did");
    left
}

/// The handler's verdict about each frame, and what it receives.
struct Verdicts {
    run: fn(u8, &mut XdpFrame<Private>) -> Verdict,
    got: Vec<(&'static str, u8)>,
}

impl Verdicts {
    fn new(run: fn(u8, &mut XdpFrame<Private>) -> Verdict) -> Self {
        Self { run, got: Vec::new() }
    }

    fn got(&mut self, what: &'static str, packet: &Packet<Private>) {
        assert_eq!((packet.head().offset(), packet.meta.checksum), (128, Checksum::Verified));
        let first = packet.head()[0];
        assert_eq!(packet.to_vec(), vec![first; 20 + usize::from(first)]);
        self.got.push((what, first));
    }
}

impl Handler<Private> for Verdicts {
    fn run(&mut self, frame: &mut XdpFrame<Private>) -> Verdict {
        (self.run)(frame.data()[0], frame)
    }

    fn pass(&mut self, packet: Packet<Private>) {
        self.got("pass", &packet);
    }

    fn tx(&mut self, packet: Packet<Private>) {
        self.got("tx", &packet);
    }

    fn redirect(&mut self, packet: Packet<Private>) {
        self.got("redirect", &packet);
    }
}

fn run(frames: &mut [Option<DataPage<Private>>], handler: &mut impl Handler<Private>) -> FrameCounts {
    let mut counts = FrameCounts::default();
    let bytes = bytes(frames);
    let run = || handler.run_batch(&mut RxGroup::new(frames, bytes, Checksum::Verified, &mut counts));
    let _ = catch_unwind(AssertUnwindSafe(run));
    counts
}

/// (frames, bytes), (passed, dropped, transmitted, redirected, aborted)
type Counted = ((u64, u64), [u64; 5]);

fn counted(c: FrameCounts) -> Counted {
    ((c.frames, c.bytes), [c.passed, c.dropped, c.transmitted, c.redirected, c.aborted])
}

#[test]
fn each_verdict_is_executed_and_counted() {
    let mut pool = pool();
    let mut frames = frames(&mut pool);
    let mut handler = Verdicts::new(|i, _| match i {
        0 => Verdict::Drop,
        1 => Verdict::Pass,
        2 => Verdict::Tx,
        3 => Verdict::Redirect,
        4 => Verdict::Aborted,
        _ => Verdict::Drop,
    });
    let counts = run(&mut frames, &mut handler);
    assert_eq!(counted(counts), ((6, 135), [1, 2, 1, 1, 1]));
    assert_eq!(handler.got, [("pass", 1), ("tx", 2), ("redirect", 3)]);
    assert_eq!(left(&frames), [0, 4, 5]);
}

#[test]
fn only_the_same_bytes_go_back_to_a_place() {
    let mut pool = pool();
    let mut frames = frames(&mut pool);
    /// Exchanges each frame with the one before, and drops both.
    struct Exchange(Option<XdpFrame<Private>>);
    impl Handler<Private> for Exchange {
        fn run(&mut self, frame: &mut XdpFrame<Private>) -> Verdict {
            match &mut self.0 {
                Some(before) => std::mem::swap(before, frame),
                None => {
                    let page = RegionOptions::new(1).huge_pages(false).build::<Private>().unwrap();
                    let mut pool = PoolOptions::new("other").build(RegionProvider::new(page), None).unwrap();
                    self.0 = Some(std::mem::replace(frame, XdpFrame::new(pool.alloc().unwrap(), 128, 20)));
                }
            }
            Verdict::Drop
        }

        fn pass(&mut self, _: Packet<Private>) {}
    }
    let counts = run(&mut frames, &mut Exchange(None));
    assert_eq!((counts.dropped, left(&frames)), (6, vec![]));
}

#[test]
fn a_panic_leaves_the_frames_behind_it_uncounted() {
    for at in 0..FRAMES as u8 {
        let mut pool = pool();
        let mut frames = frames(&mut pool);
        struct PanicAt(u8, bool, Vec<u8>);
        impl Handler<Private> for PanicAt {
            fn run(&mut self, frame: &mut XdpFrame<Private>) -> Verdict {
                assert!(self.1 || frame.data()[0] != self.0, "as the test wants it");
                Verdict::Pass
            }

            fn pass(&mut self, packet: Packet<Private>) {
                let first = packet.head()[0];
                self.2.push(first);
                assert!(first != self.0, "as the test wants it");
            }
        }
        for in_pass in [false, true] {
            let mut handler = PanicAt(at, in_pass, Vec::new());
            let counts = run(&mut frames, &mut handler);
            let seen: Vec<_> = (0..FRAMES as u8).collect();
            let passed = usize::from(at) + usize::from(in_pass);
            assert_eq!(handler.2, seen[..passed]);
            let handled = &seen[..=usize::from(at)];
            let bytes = handled.iter().map(|&i| 20 + u64::from(i)).sum();
            assert_eq!(counted(counts), ((handled.len() as u64, bytes), [passed as u64, 0, 0, 0, 0]));
            assert_eq!(left(&frames), (usize::from(at) + 1..FRAMES).collect::<Vec<_>>());
            frames = self::frames(&mut pool);
        }
    }
}

/// A program moves both ends of a frame and drops it: its page is where it was.
#[test]
fn a_frame_whose_ends_were_moved_goes_back_as_it_was() {
    let mut pool = pool();
    let mut frames = frames(&mut pool);
    let mut handler = Verdicts::new(|i, frame| {
        frame.adjust_head(if i % 2 == 0 { 7 } else { -50 }).unwrap();
        frame.adjust_tail(30).unwrap();
        if i < 3 { Verdict::Drop } else { Verdict::Aborted }
    });
    let counts = run(&mut frames, &mut handler);
    assert_eq!(counted(counts), ((6, 135), [0, 3, 0, 0, 3]));
    // It looks where each begins.
    assert_eq!(left(&frames), [0, 1, 2, 3, 4, 5]);
}

/// What a handler does with the rest of a group.
type Then = fn(&mut RxGroup<'_, Private>, &mut Verdicts);

/// Takes every other frame, then does what it is told.
struct Takes(Then, Vec<u8>);

impl Handler<Private> for Takes {
    fn run_batch(&mut self, group: &mut RxGroup<'_, Private>) {
        assert_eq!((group.len(), group.is_empty(), group.checksum()), (FRAMES, false, Checksum::Verified));
        for (i, mut frame) in group.frames().enumerate() {
            assert_eq!(frame.read_at(19), Ok([i as u8]));
            assert!(frame.read_at::<2>(19 + i).is_err());
            if i % 2 == 1 {
                let packet = frame.take().unwrap();
                assert_eq!((packet.len(), packet.meta.checksum), (20 + i, Checksum::Verified));
                self.1.push(packet.head()[0]);
                assert!(frame.take().is_none() && frame.read_at::<1>(0).is_err());
            }
        }
        assert_eq!(group.frames().count(), FRAMES / 2);
        (self.0)(group, &mut Verdicts::new(|i, _| if i == 0 { Verdict::Tx } else { Verdict::Drop }));
    }

    fn pass(&mut self, _: Packet<Private>) {}
}

#[test]
fn what_is_left_in_a_group_is_dropped() {
    let mut pool = pool();
    let cases: [(Then, [u64; 5], &[usize]); 4] = [
        (|_, _| (), [3, 3, 0, 0, 0], &[0, 2, 4]),
        (|group, _| assert_eq!(group.take_all().count(), 3), [6, 0, 0, 0, 0], &[]),
        (|group, verdicts| group.run_each(verdicts), [3, 2, 1, 0, 0], &[2, 4]),
        (|_, _| panic!("as the test wants it"), [3, 3, 0, 0, 0], &[0, 2, 4]),
    ];
    for (then, expected, in_place) in cases {
        let mut frames = frames(&mut pool);
        let mut handler = Takes(then, Vec::new());
        let counts = run(&mut frames, &mut handler);
        assert_eq!(counted(counts), ((6, 135), expected));
        assert_eq!((handler.1, left(&frames)), (vec![1, 3, 5], in_place.to_vec()));
    }
}

/// A panic in a program that runs behind frames that were taken: all frames stay counted.
#[test]
fn a_panic_behind_frames_that_were_taken() {
    let mut pool = pool();
    let mut frames = frames(&mut pool);
    let then = |group: &mut RxGroup<'_, Private>, _: &mut Verdicts| {
        group.run_each(&mut Verdicts::new(|i, _| if i == 2 { panic!("as the test wants it") } else { Verdict::Drop }));
    };
    let counts = run(&mut frames, &mut Takes(then, Vec::new()));
    assert_eq!(counted(counts), ((6, 135), [3, 1, 0, 0, 0]));
    assert_eq!(left(&frames), [0, 4]);
}

#[test]
fn a_page_of_a_frame_has_its_bytes() {
    let mut pool = pool();
    let mut frames = frames(&mut pool);
    struct Pages(Vec<(usize, usize)>);
    impl Handler<Private> for Pages {
        fn run_batch(&mut self, group: &mut RxGroup<'_, Private>) {
            let pages = group.frames().filter_map(|mut frame| frame.take_page());
            self.0.extend(pages.map(|page| (page.offset(), page.len())));
        }

        fn pass(&mut self, _: Packet<Private>) {}
    }
    let mut handler = Pages(Vec::new());
    let counts = run(&mut frames, &mut handler);
    assert_eq!((counts.passed, left(&frames)), (6, vec![]));
    assert_eq!(handler.0, (20..26).map(|len| (128, len)).collect::<Vec<_>>());
}
