//! The ids that a format reads for a run of completions.

use super::super::packed::Packed;
use super::super::runs::TakenRun;
use super::super::shape::{Setup, Shape};
use super::super::split::Split;
use super::*;

/// A value for each combination of a format, a turn of the ring, the place of the next used entry,
/// and how many entries the device has used from there on.
fn each_state(mut check: impl FnMut(Negotiated, u16, u16, u16)) {
    for negotiated in [0, feature::RING_PACKED].map(Negotiated::new) {
        for turn in 0..2 {
            for place in 0..SIZE {
                (0..=SIZE).for_each(|ready| check(negotiated, turn, place, ready));
            }
        }
    }
}

/// Uses `n` entries with ids from `first` on. Their lengths are other numbers.
fn uses(device: &mut Device<'_>, n: u16, first: u32) {
    (0..n.into()).for_each(|i| device.answer(first + i, 5000 + 3 * i, 1, 1));
}

/// What a format reads, for each number of posted buffers, and each limit.
fn read(format: &mut impl DriverFormat, ready: u16, at: (u16, u16), more: bool) {
    let (turn, place) = at;
    // Not more than the ring's size at a time.
    [turn * SIZE, place].into_iter().for_each(|n| format.consume(n));
    assert_eq!(format.used_place(), place);
    assert_eq!(format.has_used(), ready > 0, "{ready} at {at:?}");
    for posted in 0..=SIZE {
        for most in 0..=SIZE {
            let claimed = if more {
                ready.min(posted)
            } else if ready > posted {
                0
            } else {
                ready
            };
            let n = claimed.min(most).min(SIZE - place);
            let ids: Vec<_> = format.used_ids(posted, most).collect();
            assert_eq!(ids, (100..100 + u32::from(n)).collect::<Vec<_>>(), "{ready} of {posted}, {most} at {at:?}");
        }
    }
}

/// As many as the device has used, was given, and the caller wants, up to the end of the ring. If
/// the device claims more than it was given, a split ring returns none.
#[test]
fn ids_up_to_each_limit() {
    each_state(|negotiated, turn, place, ready| {
        let memory = Memory::new();
        let mut device = Device::new(&memory, negotiated);
        uses(&mut device, turn * SIZE + place, 900);
        uses(&mut device, ready, 100);
        let setup = Setup { negotiated, per_slot: 0 };
        match memory.ring(negotiated) {
            AnyRing::Split(ring) => {
                read(&mut Split::new(ring, setup, Shape::NONE, None), ready, (turn, place), false);
            }
            AnyRing::Packed(ring) => {
                read(&mut Packed::new(ring, setup, Shape::NONE, None), ready, (turn, place), true);
            }
        }
    });
}

/// The words of a split ring's elements are not aligned to 8 bytes. There is no run, and
/// completions are read one by one.
#[test]
fn a_ring_that_is_not_aligned() {
    let (memory, layout) = (Memory::new(), SplitLayout::new(SIZE));
    let ring = || {
        // SAFETY: the block outlives the rings, and has room behind the used ring, which is aligned
        // to 4 bytes.
        unsafe {
            let [avail, used] = [layout.avail, layout.used + 4].map(|at| memory.base.add(at));
            SplitRing::from_parts(memory.base, avail, used, SIZE)
        }
    };
    let device = ring();
    let mut queue = DriverQueue::<Split, Option<u32>>::new(ring(), Negotiated::new(0), None);
    let mut next = 0;
    let fill = |buffer: &mut Option<u32>| {
        *buffer = Some(next);
        next += 1;
        true
    };
    assert_eq!(queue.post_run(5, fill, |_| (0x1000, 60)), 5);
    queue.publish();
    (0..5).for_each(|i| device.set_used_entry(i, i.into(), 0));
    device.set_used_idx(5);
    assert_eq!(queue.format.used_ids(5, 5).count(), 0);
    assert_eq!(queue.take_run(|_, _| unreachable!()), TakenRun { buffers: 0, more: true });
    assert_eq!(queue.pending(), Ok(5));
    for i in 0..5 {
        assert_eq!(queue.take().map(|(slot, buffer)| (slot, *buffer)), Some((i, Some(i.into()))));
    }
    assert_eq!(queue.posted(), 0);
}
