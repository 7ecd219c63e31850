//! Free queues whose buffers are used in order by negotiation: a used entry stands for a batch.

use super::*;
use crate::virtqueue::driver::runs::RUN;

/// Rings of both formats, with this feature.
fn rings() -> impl Iterator<Item = Negotiated> {
    combinations().filter(|n| n.in_order())
}

/// Posts `n` buffers of one segment each.
fn post<F: DriverFormat>(queue: &mut DriverQueue<F, u8>, n: u16) -> Vec<u16> {
    let slots = (0..n).map(|_| {
        let vacant = queue.vacant(1).expect("there is room");
        let slot = vacant.slot();
        queue.post(vacant, |_| [Segment::read(0x1000, 10)].into_iter());
        slot
    });
    let slots = slots.collect();
    queue.publish();
    slots
}

/// Runs `f` with a queue of each ring, whose device has used all 200 posted buffers as one batch.
/// `f` also gets their slots, and a function by which the device uses others from the first on.
fn with_batch(f: impl Fn(Negotiated, AnyDriverQueue<u8>, &[u16], &dyn Fn(&[u16]))) {
    for negotiated in rings() {
        with_long_ring(negotiated, |ring, uses| {
            let mut queue = AnyDriverQueue::<u8>::new(ring, negotiated, None);
            let slots = with_queue!(&mut queue, queue => post(queue, 200));
            uses(&slots);
            f(negotiated, queue, &slots, uses);
        });
    }
}

/// Of a batch, a part was read. The queue is not armed, and the device cannot take the rest back.
#[test]
fn a_batch_that_was_read_in_part() {
    with_batch(|negotiated, mut queue, slots, uses| {
        with_queue!(&mut queue, queue => {
            assert_eq!(queue.pending(), Ok(LOOK));
            let mut taken: Vec<_> = (0..LOOK).map(|_| queue.take().unwrap().0).collect();
            assert_eq!(queue.arm(), Armed::Work, "{negotiated:?}");
            // In a split ring this moves the index back.
            uses(&slots[..usize::from(LOOK)]);
            while let Ok(n @ 1..) = queue.pending() {
                (0..n).for_each(|_| taken.push(queue.take().unwrap().0));
            }
            assert_eq!(taken, slots, "{negotiated:?}");
            assert_eq!(queue.pending().is_err(), !negotiated.packed(), "{negotiated:?}");
        });
    });
}

/// The same for a batch that is taken in runs.
#[test]
fn a_batch_that_was_taken_in_part() {
    with_batch(|negotiated, mut queue, slots, uses| {
        with_queue!(&mut queue, queue => {
            let mut taken = Vec::new();
            let run = queue.take_run(|slot, _| taken.push(slot));
            assert_eq!((run.buffers, run.more, taken.len()), (RUN.into(), true, RUN.into()), "{negotiated:?}");
            assert_eq!(queue.arm(), Armed::Work, "{negotiated:?}");
            // In a split ring this moves the index back.
            uses(&slots[..usize::from(RUN)]);
            assert!(!queue.is_read(), "{negotiated:?}: the rest of the batch");
            while queue.take_run(|slot, _| taken.push(slot)).buffers > 0 {}
            // An index behind what was taken is a fault.
            let (most, outcome) = match negotiated.packed() {
                true => (200, Ok(0)),
                false => (2 * RUN, Err(DeviceFault::IndexJump { by: u16::MAX - RUN + 1, posted: 72 })),
            };
            assert_eq!((&taken[..], queue.pending()), (&slots[..most.into()], outcome), "{negotiated:?}");
            assert_eq!(queue.is_read(), negotiated.packed(), "{negotiated:?}");
        });
    });
}

/// The rest of a batch that was taken in part does not count in the ring that replaces its own.
#[test]
fn a_batch_ends_with_its_ring() {
    with_batch(|negotiated, queue, _, _| {
        let next = Memory::new();
        // Dropped before the memory of its ring.
        let mut queue = queue;
        with_queue!(&mut queue, queue => assert_eq!(queue.take_run(|_, _| {}).buffers, RUN.into(), "{negotiated:?}"));
        queue.replace(next.ring(negotiated), None);
        with_queue!(&mut queue, queue => {
            post(queue, 3);
            assert_eq!(queue.take_run(|_, _| panic!("nothing was used")).buffers, 0, "{negotiated:?}");
            assert_eq!((queue.pending(), queue.arm()), (Ok(0), Armed::Waits), "{negotiated:?}");
        });
    });
}

/// A batch goes around the end of the slots: two runs. Behind it are batches of one buffer, which
/// are a run together.
#[test]
fn batches_are_runs() {
    for negotiated in rings() {
        let memory = Memory::new();
        let mut device = Device::new(&memory, negotiated);
        let mut queue = AnyDriverQueue::<u8>::new(memory.ring(negotiated), negotiated, None);
        with_queue!(&mut queue, queue => {
            let take = |queue: &mut DriverQueue<_, u8>| {
                let mut taken = Vec::new();
                let run = queue.take_run(|slot, _| taken.push(slot));
                assert_eq!(run.buffers, taken.len());
                (taken, run.more)
            };
            post(queue, 12);
            device.poll();
            device.use_first(12, 0);
            assert_eq!(take(queue).0, (0..12).collect::<Vec<_>>(), "{negotiated:?}");
            post(queue, 12);
            device.poll();
            device.use_first(6, 0);
            (0..6).for_each(|_| device.use_first(1, 0));
            assert_eq!(take(queue), (vec![12, 13, 14, 15], true), "{negotiated:?}");
            assert_eq!(take(queue), ((0..8).collect(), false), "{negotiated:?}");
            assert_eq!((queue.posted(), queue.pending()), (0, Ok(0)));
        });
    }
}

/// An entry that names a buffer that the device does not have, or has not used yet, behind others
/// that it has used. Those are taken, and the entry is judged when they are.
#[test]
fn a_wrong_id_behind_a_run() {
    let faults = [
        (7, DeviceFault::NotPosted { id: 7 }),
        (0, DeviceFault::NotPosted { id: 0 }),
        (u16::MAX, DeviceFault::BadId { id: u16::MAX.into() }),
        (4, DeviceFault::NotPosted { id: 4 }),
    ];
    for (negotiated, (lie, fault)) in rings().flat_map(|n| faults.map(|f| (n, f))) {
        if negotiated.packed() && lie == 4 {
            // A packed ring has no index which says how many buffers were used.
            continue;
        }
        let memory = Memory::new();
        let mut device = Device::new(&memory, negotiated);
        let mut queue = AnyDriverQueue::<u8>::new(memory.ring(negotiated), negotiated, None);
        with_queue!(&mut queue, queue => {
            post(queue, 6);
            device.poll();
            device.use_first(2, 0);
            device.answer(lie.into(), 0, 1, 1);
            let mut taken = Vec::new();
            assert!(queue.take_run(|slot, _| taken.push(slot)).more, "{negotiated:?}");
            assert_eq!(taken, [0, 1], "{negotiated:?}");
            assert_eq!(queue.take_run(|_, _| panic!("nothing was used")).buffers, 0, "{negotiated:?}");
            assert_eq!(queue.pending(), Err(fault), "{negotiated:?}");
            assert_eq!(queue.posted(), 4);
        });
    }
}
