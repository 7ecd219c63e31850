//! Used buffers are read and handled in groups: what a device does, and what user code does, at
//! each place of a group.

use netmem_packet::{Checksum, Handler, Packet, Poll, RxGroup, RxQueue, Verdict, XdpFrame};
use netmem_pool::{Page, PeerShared};
use netmem_testing::driver::hostile::{FORMATS, Harness};
use netmem_testing::driver::*;
use netmem_virtio::driver::{DeviceFault, NetOptions, RxMode};
use netmem_virtio::net::{VnetHdr, feature};
use netmem_virtio::virtqueue::PackedDesc;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The modes whose buffers are one segment.
const ONE_SEGMENT: [RxMode; 2] = [RxMode::Small, RxMode::Mergeable];
/// Buffers that are used before the others, so that the group goes around the end of the ring.
const BEFORE: u64 = 200;
/// Buffers that are used at a time: more than a batch.
const GROUP: u64 = 140;
/// Places in such a group: both ends, those of batches and of the ring, and others.
const PLACES: [u64; 9] = [0, 1, 31, 55, 56, 63, 64, 128, GROUP - 1];

/// A bit of a format in this file: the domain needs no syncs, so that frames are delivered in groups.
const COHERENT: u64 = 1 << 63;
/// Another one: the pool has no array cache, so that no page is kept in its slot.
const UNCACHED: u64 = 1 << 62;

fn harness(format: u64, mode: RxMode) -> Harness {
    let (ring, options) = (format & !COHERENT & !UNCACHED, NetOptions::new(mode));
    let options = if format & UNCACHED == 0 { options } else { options.cache(0) };
    if format & COHERENT == 0 { Harness::in_format(ring, options) } else { Harness::coherent(ring, options) }
}

/// The formats with and without groups, and the places in each. Without groups, some are enough.
fn formats_and_places() -> impl Iterator<Item = (u64, u64)> {
    let some = |format| [0, 63, GROUP - 1].map(|place| (format, place));
    let all = |format| PLACES.map(|place| (format | COHERENT, place));
    let uncached = move |format| some(format | COHERENT | UNCACHED);
    FORMATS.into_iter().flat_map(move |format| [&some(format)[..], &all(format), &uncached(format)].concat())
}

fn each_place(case: impl Fn(u64, RxMode, u64)) {
    for ((format, place), mode) in formats_and_places().flat_map(|at| ONE_SEGMENT.map(|mode| (at, mode))) {
        case(format, mode, place);
    }
}

/// Frame `i`, of a length of its own.
fn numbered(i: u64) -> Vec<u8> {
    frame(i, 60 + (i % 40) as usize)
}

/// The device's next buffer, with frame `i` in it: its head and the length of header and frame.
fn filled(harness: &mut Harness, i: u64) -> (u16, u32) {
    let head = harness.ring.take().expect("the driver has posted buffers");
    let wire = [&VnetHdr::PLAIN.to_bytes(), &numbered(i)[..]].concat();
    harness.device.write(harness.ring.chain(head)[0].addr, &wire);
    (head, wire.len() as u32)
}

/// The device uses buffers for these frames, and does not show it yet. Returns the last head.
fn used(harness: &mut Harness, frames: impl Iterator<Item = u64>) -> Option<u16> {
    frames.fold(None, |_, i| {
        let (head, len) = filled(harness, i);
        harness.ring.write(head.into(), len);
        Some(head)
    })
}

/// The frames that arrive until there are none.
fn arrived(harness: &mut Harness) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    while receive(&mut harness.pair.rx, &mut |p: Packet<PeerShared>| got.push(p.to_vec())) > 0 {}
    got
}

/// A queue in the middle of its ring.
fn started(format: u64, mode: RxMode) -> Harness {
    let mut harness = harness(format, mode);
    used(&mut harness, 0..BEFORE);
    harness.ring.publish();
    assert!(arrived(&mut harness) == (0..BEFORE).map(numbered).collect::<Vec<_>>());
    harness
}

/// All buffers are posted again, and all pages return.
fn assert_goes_on(mut harness: Harness, mode: RxMode) {
    assert_eq!(harness.pair.rx.posted(), 256);
    harness.assert_all_posted(mode);
    used(&mut harness, 0..250);
    harness.ring.publish();
    assert!(arrived(&mut harness) == (0..250).map(numbered).collect::<Vec<_>>());
    harness.close();
}

/// The device claims more buffers than it has, each as the next one in order with the length of a
/// frame. No group contains one that was not posted.
#[test]
fn more_than_was_posted() {
    for (format, mode) in FORMATS.into_iter().flat_map(|format| ONE_SEGMENT.map(|mode| (format | COHERENT, mode))) {
        let options = NetOptions::new(mode).pages(280).cache(8);
        let mut harness = Harness::coherent(format & !COHERENT, options);
        // So that what is claimed in the end does not go around the end of the ring.
        used(&mut harness, 0..56);
        harness.ring.publish();
        assert_eq!(arrived(&mut harness).len(), 56);
        let mut kept = Vec::new();
        while harness.pair.rx.posted() > 40 {
            used(&mut harness, 0..20);
            harness.ring.publish();
            while receive(&mut harness.pair.rx, &mut |p: Packet<PeerShared>| kept.push(p)) > 0 {}
        }
        let posted = harness.pair.rx.posted() as u64;
        let last = used(&mut harness, 0..posted).unwrap();
        for more in 1..=8 {
            harness.ring.write((u32::from(last) + more) % 256, 100);
        }
        harness.ring.publish();
        let before = harness.pair.rx.stats().frames;
        let got = arrived(&mut harness);
        assert_eq!(harness.pair.rx.stats().frames - before, got.len() as u64, "{format:#x}, {mode:?}");
        if harness.ring.is_packed() {
            assert!(got == (0..posted).map(numbered).collect::<Vec<_>>(), "{} frames", got.len());
            // The driver has posted buffers where the others were claimed.
            assert_eq!(harness.pair.rx.stats().stopped, None, "{format:#x}, {mode:?}");
        } else {
            assert!(got.is_empty(), "nothing is believed of such an index");
            let posted = posted as u16;
            let fault = DeviceFault::IndexJump { by: posted + 8, posted };
            assert_eq!(harness.pair.rx.stats().stopped, Some(fault), "{format:#x}, {mode:?}");
        }
        drop(kept);
        harness.close();
    }
}

/// What a handler leaves in a group returns to a pool without an array cache, and stays posted
/// otherwise.
#[test]
fn frames_that_are_left_are_kept_or_released() {
    struct Leave(u64);
    impl Handler<PeerShared> for Leave {
        fn run_batch(&mut self, group: &mut RxGroup<'_, PeerShared>) {
            self.0 += group.frames().count() as u64;
        }

        fn pass(&mut self, _: Packet<PeerShared>) {
            unreachable!("each is left")
        }
    }
    for (format, mode) in FORMATS.into_iter().flat_map(|format| ONE_SEGMENT.map(|mode| (format | COHERENT, mode))) {
        for uncached in [0, UNCACHED] {
            let mut harness = started(format | uncached, mode);
            let before = harness.pair.rx.pool_stats();
            used(&mut harness, 0..GROUP);
            harness.ring.publish();
            let mut left = Leave(0);
            while harness.pair.rx.poll(|poll| poll.receive(64, &mut left)) > 0 {}
            assert_eq!(left.0, GROUP);
            let allocated = harness.pair.rx.pool_stats().alloc_slow - before.alloc_slow;
            assert_eq!(allocated, if uncached == 0 { 0 } else { GROUP }, "{format:#x}, {mode:?}");
            assert_goes_on(harness, mode);
        }
    }
}

/// What a handler does not take stays in its slot, also behind slots for which there is no page. If
/// the next group is taken as a whole, that page is neither lost nor posted at another place.
#[test]
fn pages_that_were_left_behind_empty_slots() {
    struct Keep {
        all: bool,
        kept: Vec<Page<PeerShared>>,
    }
    impl Handler<PeerShared> for Keep {
        fn run_batch(&mut self, group: &mut RxGroup<'_, PeerShared>) {
            if self.all {
                // There are pages again.
                self.kept.clear();
            }
            let every = if self.all { 1 } else { 2 };
            self.kept.extend(group.frames().step_by(every).filter_map(|mut frame| frame.take_page()));
        }

        fn pass(&mut self, _: Packet<PeerShared>) {
            unreachable!("each comes in a group")
        }
    }
    for (format, mode) in FORMATS.into_iter().flat_map(|format| ONE_SEGMENT.map(|mode| (format | COHERENT, mode))) {
        let options = NetOptions::new(mode).pages(280).cache(8);
        let mut harness = Harness::coherent(format & !COHERENT, options);
        let mut handler = Keep { all: false, kept: Vec::new() };
        for (all, n) in [(false, 40), (false, 40), (true, 6)] {
            handler.all = all;
            used(&mut harness, 0..n);
            harness.ring.publish();
            assert_eq!(harness.pair.rx.poll(|poll| poll.receive(64, &mut handler)), n as usize);
            assert_eq!(harness.pair.rx.posted() < 256 - 10, !all && handler.kept.len() == 40, "{format:#x}, {mode:?}");
        }
        assert_eq!(handler.kept.len(), 6);
        handler.kept.clear();
        assert!(arrived(&mut harness).is_empty());
        assert_goes_on(harness, mode);
    }
}

/// A handler exchanges its group for another one, and forgets it, so that nothing counts the frames
/// that it left. Their pages stay in their slots.
#[test]
fn a_group_that_is_forgotten() {
    struct Forget;
    impl Handler<PeerShared> for Forget {
        fn run_batch(&mut self, group: &mut RxGroup<'_, PeerShared>) {
            let counts = Box::leak(Box::default());
            std::mem::forget(std::mem::replace(group, RxGroup::new(&mut [], 0, Checksum::Unknown, counts)));
        }

        fn pass(&mut self, _: Packet<PeerShared>) {
            unreachable!("each comes in a group")
        }
    }
    for (format, mode) in FORMATS.into_iter().flat_map(|format| ONE_SEGMENT.map(|mode| (format | COHERENT, mode))) {
        let mut harness = started(format, mode);
        // The array cache gets pages with which a refill can fill slots.
        let rx = &mut harness.pair.rx;
        let pages = rx.poll(|poll| poll.with_napi(|napi| (0..64).map_while(|_| napi.alloc()).collect::<Vec<_>>()));
        rx.poll(|_| drop(pages));
        used(&mut harness, 0..GROUP);
        harness.ring.publish();
        while harness.pair.rx.poll(|poll| poll.receive(64, &mut Forget)) > 0 {}
        assert_eq!(harness.pair.rx.pool_stats().inflight(), 256, "{format:#x}, {mode:?}");
        assert_goes_on(harness, mode);
    }
}

/// The device uses a group of which `lie` uses the buffer at `place`. `lie` has as a parameter the
/// head of the buffer before. If it returns a fault, the frames in front of it arrive, and
/// the queue stops. Otherwise the other frames arrive, and the queue goes on.
fn group_with(
    format: u64,
    mode: RxMode,
    place: u64,
    lie: impl FnOnce(&mut Harness, Option<u16>) -> Option<DeviceFault>,
) {
    let mut harness = started(format, mode);
    let before = used(&mut harness, 0..place);
    let fault = lie(&mut harness, before);
    used(&mut harness, place + 1..GROUP);
    harness.ring.publish();
    let expected: Vec<_> = match fault {
        Some(_) => (0..place).map(numbered).collect(),
        None => (0..GROUP).filter(|&i| i != place).map(numbered).collect(),
    };
    let got = arrived(&mut harness);
    assert!(got == expected, "{format:#x}, {mode:?}, at {place}: {fault:?}, {} frames", got.len());
    match fault {
        Some(fault) => harness.assert_stopped(fault),
        None => assert_goes_on(harness, mode),
    }
}

/// Proves NET-6, as the next two tests do.
#[test]
fn a_wrong_id_at_each_place() {
    each_place(|format, mode, place| {
        for id in [256, 40_000] {
            group_with(format, mode, place, |harness, _| {
                let (_, len) = filled(harness, 0);
                harness.ring.write(id, len);
                Some(DeviceFault::BadId { id })
            });
        }
        // At the end of the ring a group ends, and its buffers are posted again: the device has that
        // buffer.
        if place > 0 && (format & COHERENT == 0 || place != 256 - BEFORE) {
            group_with(format, mode, place, |harness, before| {
                let (_, len) = filled(harness, 0);
                let id = before.unwrap();
                harness.ring.write(id.into(), len);
                Some(DeviceFault::NotPosted { id })
            });
        }
        // The one in front of that. A group of the driver's may end with an entry less.
        if place > 1 && place != 256 - BEFORE {
            group_with(format, mode, place, |harness, before| {
                let (_, len) = filled(harness, 0);
                let id = (before.unwrap() + 255) % 256;
                harness.ring.write(id.into(), len);
                Some(DeviceFault::NotPosted { id })
            });
        }
    });
}

#[test]
fn a_wrong_length_at_each_place() {
    each_place(|format, mode, place| {
        for more in [1, u32::MAX >> 1] {
            group_with(format, mode, place, |harness, _| {
                let (head, _) = filled(harness, 0);
                let have = harness.ring.chain(head)[0].len;
                harness.ring.write(head.into(), have + more);
                Some(DeviceFault::BadLength { len: have + more, have })
            });
        }
        for len in [0, 11, 25] {
            group_with(format, mode, place, |harness, _| {
                let (head, _) = filled(harness, 0);
                harness.ring.write(head.into(), len);
                None
            });
        }
    });
}

#[test]
fn a_wrong_header_at_each_place() {
    let with = |header: VnetHdr, fault| {
        move |harness: &mut Harness, _| {
            let (head, len) = filled(harness, 0);
            harness.device.write(harness.ring.chain(head)[0].addr, &header.to_bytes());
            harness.ring.write(head.into(), len);
            fault
        }
    };
    let mode = RxMode::Mergeable;
    for (format, place) in formats_and_places() {
        for buffers in [0, 19, u16::MAX] {
            let header = VnetHdr { num_buffers: buffers, ..VnetHdr::PLAIN };
            group_with(format, mode, place, with(header, Some(DeviceFault::BadBufferCount { buffers })));
        }
        for header in [
            VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 14, csum_offset: 6, ..VnetHdr::PLAIN },
            VnetHdr { flags: 0x40, gso_type: 0x7f, ..VnetHdr::PLAIN },
            VnetHdr { gso_type: VnetHdr::GSO_TCPV4, gso_size: 1, ..VnetHdr::PLAIN },
        ] {
            group_with(format, mode, place, with(header, None));
        }
        if place == GROUP - 1 {
            let header = VnetHdr { num_buffers: 2, ..VnetHdr::PLAIN };
            let fault = DeviceFault::MissingBuffers { buffers: 2, used: 1 };
            group_with(format, mode, place, with(header, Some(fault)));
        }
    }
}

/// A used descriptor whose flags are of the turn before, or one flag only, is not used, and neither
/// is what follows it, until the flags are right.
#[test]
fn flags_of_a_packed_ring_at_each_place() {
    each_place(|format, mode, place| {
        if format & feature::RING_PACKED == 0 {
            return;
        }
        let mut harness = started(format, mode);
        used(&mut harness, 0..GROUP);
        harness.ring.publish();
        let (at, ring) = (((BEFORE + place) % 256) as u16, &harness.ring.packed().ring);
        let right = ring.used_desc(at);
        let turn = PackedDesc::AVAIL | PackedDesc::USED;
        for flip in [PackedDesc::AVAIL, PackedDesc::USED, turn] {
            let ring = &harness.ring.packed().ring;
            ring.set_used_desc(at, PackedDesc { flags: right.flags ^ flip, ..right });
            let got = arrived(&mut harness);
            // The first time those in front of it.
            let expected = if flip == PackedDesc::AVAIL { 0..place } else { 0..0 };
            assert!(got == expected.map(numbered).collect::<Vec<_>>(), "{format:#x}, {mode:?}, at {place}");
        }
        harness.ring.packed().ring.set_used_desc(at, right);
        assert!(arrived(&mut harness) == (place..GROUP).map(numbered).collect::<Vec<_>>());
        assert_goes_on(harness, mode);
    });
}

/// A device that uses buffers in any order: each frame is in the buffer that it names, for many
/// turns of the ring, and buffers are used in order in between.
#[test]
fn any_order() {
    let formats = FORMATS.into_iter().flat_map(|format| [format, format | COHERENT]);
    for (format, mode) in formats.flat_map(|format| ONE_SEGMENT.map(|mode| (format, mode))) {
        if format & feature::IN_ORDER != 0 {
            continue;
        }
        let mut harness = harness(format, mode);
        let (mut rng, mut has) = (fastrand::Rng::with_seed(format), Vec::new());
        for round in 0..400u64 {
            while has.len() < 256 && harness.ring.available() > 0 {
                has.push(harness.ring.take().unwrap());
            }
            let mut ids = has.clone();
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), has.len(), "a slot is posted twice");
            if round % 3 > 0 {
                rng.shuffle(&mut has);
            }
            let n = rng.usize(0..=has.len());
            let mut expected = Vec::new();
            for (i, head) in (0..).zip(has.drain(..n)) {
                let frame = numbered(round * 256 + i);
                let wire = [&VnetHdr::PLAIN.to_bytes(), &frame[..]].concat();
                harness.device.write(harness.ring.chain(head)[0].addr, &wire);
                harness.ring.write(head.into(), wire.len() as u32);
                expected.push(frame);
            }
            harness.ring.publish();
            assert!(arrived(&mut harness) == expected, "{format:#x}, {mode:?}, round {round}");
        }
        harness.close();
    }
}

/// A handler that panics at one frame, in one of its two functions.
struct Panics {
    got: Vec<Vec<u8>>,
    at: u64,
    in_run: bool,
}

impl Panics {
    fn check(&self, i: u64) {
        if i == self.at {
            resume_unwind(Box::new("as the test wants it"));
        }
    }
}

impl Handler<PeerShared> for Panics {
    fn run(&mut self, frame: &mut XdpFrame<PeerShared>) -> Verdict {
        if self.in_run {
            self.check(self.got.len() as u64);
        }
        // Some pages are posted again as they are.
        if frame.len().is_multiple_of(3) { self.keep(frame) } else { Verdict::Pass }
    }

    fn pass(&mut self, packet: Packet<PeerShared>) {
        if !self.in_run {
            self.check(self.got.len() as u64);
        }
        self.got.push(packet.to_vec());
    }
}

impl Panics {
    fn keep(&mut self, frame: &XdpFrame<PeerShared>) -> Verdict {
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(0, &mut bytes).unwrap();
        self.got.push(bytes);
        Verdict::Drop
    }
}

/// A handler for groups: keeps a copy of each frame, takes every other one, and panics behind frame
/// `at`.
struct Groups {
    got: Vec<Vec<u8>>,
    kept: Vec<Packet<PeerShared>>,
    at: u64,
}

impl Handler<PeerShared> for Groups {
    fn run_batch(&mut self, group: &mut RxGroup<'_, PeerShared>) {
        assert!((1..=64).contains(&group.len()));
        for mut frame in group.frames() {
            self.got.push((0..frame.len()).map(|at| frame.read_at::<1>(at).unwrap()[0]).collect());
            if self.got.len().is_multiple_of(2) {
                self.kept.push(frame.take().unwrap());
                assert!(frame.take().is_none());
            }
            if self.got.len() as u64 == self.at {
                resume_unwind(Box::new("as the test wants it"));
            }
        }
    }

    fn pass(&mut self, packet: Packet<PeerShared>) {
        self.got.push(packet.to_vec());
    }
}

/// Frames that a handler gets in groups: each once and in its order, taken or not, with a buffer
/// that is too short at each place. The packets that it has taken do not change.
#[test]
fn groups_with_a_short_buffer_at_each_place() {
    each_place(|format, mode, place| {
        let mut harness = started(format, mode);
        used(&mut harness, 0..place);
        let (head, _) = filled(&mut harness, 0);
        harness.ring.write(head.into(), 25);
        used(&mut harness, place + 1..GROUP);
        harness.ring.publish();
        let before = harness.pair.rx.stats();
        let mut handler = Groups { got: Vec::new(), kept: Vec::new(), at: 0 };
        while receive(&mut harness.pair.rx, &mut handler) > 0 {}
        let expected: Vec<_> = (0..GROUP).filter(|&i| i != place).map(numbered).collect();
        assert!(handler.got == expected, "{format:#x}, {mode:?}, at {place}");
        let stats = harness.pair.rx.stats();
        assert_eq!((stats.frames - before.frames, stats.short - before.short), (GROUP - 1, 1));
        let bytes = expected.iter().map(|frame| frame.len() as u64).sum::<u64>();
        assert_eq!(stats.bytes - before.bytes, bytes);
        assert_eq!(stats.passed + stats.dropped - before.passed - before.dropped, GROUP - 1);
        let groups = stats.dropped > before.dropped;
        assert_eq!(groups, format & COHERENT != 0, "{format:#x}, {mode:?}, at {place}");
        // Their pages are not posted again while they are held.
        assert_eq!(harness.pair.rx.posted(), 256);
        used(&mut harness, 0..GROUP);
        harness.ring.publish();
        while receive(&mut harness.pair.rx, &mut |_: Packet<PeerShared>| ()) > 0 {}
        assert!(handler.kept.iter().all(|packet| expected.contains(&packet.to_vec())));
        drop(handler);
        assert_goes_on(harness, mode);
    });
}

/// A handler for groups panics: its group is lost, all pages return, and the next frames arrive.
#[test]
fn a_handler_for_groups_panics() {
    each_place(|format, mode, place| {
        let mut harness = started(format, mode);
        used(&mut harness, 0..GROUP);
        harness.ring.publish();
        let mut handler = Groups { got: Vec::new(), kept: Vec::new(), at: place + 1 };
        let caught = catch_unwind(AssertUnwindSafe(|| while receive(&mut harness.pair.rx, &mut handler) > 0 {}));
        let seen = if caught.is_err() { place + 1 } else { GROUP };
        assert!(handler.got == (0..seen).map(numbered).collect::<Vec<_>>());
        assert_eq!(caught.is_err(), format & COHERENT != 0, "{format:#x}, {mode:?}, at {place}");
        handler.at = 0;
        while receive(&mut harness.pair.rx, &mut handler) > 0 {}
        drop(handler);
        assert_goes_on(harness, mode);
    });
}

/// A handler catches its own panic over a frame at each place of a group. The frames behind that
/// one arrive once, and count once for the budgets of the polls.
#[test]
fn a_handler_catches_its_panic_at_each_place() {
    struct Catches(Panics);
    impl Handler<PeerShared> for Catches {
        fn run_batch(&mut self, group: &mut RxGroup<'_, PeerShared>) {
            if catch_unwind(AssertUnwindSafe(|| group.run_each(&mut self.0))).is_err() {
                self.0.at = u64::MAX;
            }
        }

        fn run(&mut self, frame: &mut XdpFrame<PeerShared>) -> Verdict {
            self.0.run(frame)
        }

        fn pass(&mut self, packet: Packet<PeerShared>) {
            self.0.pass(packet);
        }
    }
    for (format, place) in FORMATS.into_iter().flat_map(|format| PLACES.map(|place| (format | COHERENT, place))) {
        for mode in ONE_SEGMENT {
            let mut harness = started(format, mode);
            used(&mut harness, 0..GROUP);
            harness.ring.publish();
            let mut handler = Catches(Panics { got: Vec::new(), at: place, in_run: true });
            let mut received = 0;
            loop {
                match harness.pair.rx.poll(|poll| poll.receive(256, &mut handler)) {
                    0 => break,
                    n => received += n as u64,
                }
            }
            assert!(handler.0.got == (0..GROUP).filter(|&i| i != place).map(numbered).collect::<Vec<_>>());
            assert_eq!(received, GROUP, "{format:#x}, {mode:?}, at {place}");
            assert_eq!(harness.pair.rx.stats().frames, BEFORE + GROUP);
            assert_goes_on(harness, mode);
        }
    }
}

/// A handler panics over a frame at each place of a group. That frame is lost, its page returns,
/// and the others arrive once, in their order.
#[test]
fn a_handler_panics_at_each_place() {
    each_place(|format, mode, place| {
        for in_run in [true, false] {
            let mut harness = started(format, mode);
            used(&mut harness, 0..GROUP);
            harness.ring.publish();
            let mut handler = Panics { got: Vec::new(), at: place, in_run };
            // A frame that is dropped has no `pass`: the next one panics.
            let caught = catch_unwind(AssertUnwindSafe(|| while receive(&mut harness.pair.rx, &mut handler) > 0 {}));
            let lost = handler.got.len() as u64;
            let panicked = caught.is_err();
            handler.at = u64::MAX;
            while receive(&mut harness.pair.rx, &mut handler) > 0 {}
            let expected = (0..GROUP).filter(|&i| !panicked || i != lost).map(numbered);
            assert!(handler.got == expected.collect::<Vec<_>>(), "{format:#x}, {mode:?}, at {place}");
            assert!(panicked || !in_run);
            assert_goes_on(harness, mode);
        }
    });
}
