//! Loom's models of [`ShapedQueue`]: buffers go around between a driver and a device, the ring is
//! stopped, and another one takes its place. Split rings are read entry by entry there, because two
//! of loom's words of 32 bits are no word of 64; packed rings also in groups.
//!
//! What the queue promises, as the models check it:
//!
//! * (*written*) The bytes of a buffer that the driver takes are those that the device has written,
//!   with the length that the device has stated. Neither end touches the bytes while the other has
//!   the buffer: loom checks each access.
//! * (*posted*) The device sees each buffer, at the address that its slot had when it was posted,
//!   and the buffers of a batch at once.
//! * (*no fault*) A device that follows the specification is never reported.
//! * (*close*) When the device has stopped, each buffer that it has used was taken or is counted as
//!   unread, and the memory of each slot is the driver's.
//! * (*handover*) A ring that takes the place of another gets the buffers of all slots, once each.

use super::super::driver::{FillRun, Segments, ShapedQueue};
use super::*;
use loom::cell::UnsafeCell;
use std::ops::ControlFlow;

/// Buffers' memory: twice what the ring holds, so that a slot gets other memory than it had.
const BUFFERS: usize = 2 * SIZE as usize;
/// Bytes of a buffer.
const LEN: u32 = 64;
/// How often each end looks at the ring.
const LOOKS: usize = 2;

/// The memory of all buffers. A buffer's bytes are a number.
struct Bytes([UnsafeCell<u32>; BUFFERS]);

// SAFETY: loom checks each access.
unsafe impl Sync for Bytes {}
// SAFETY: as above.
unsafe impl Send for Bytes {}

/// The address of a buffer's memory.
fn addr(number: u8) -> u64 {
    1 << 20 | u64::from(number) * u64::from(LEN)
}

impl Bytes {
    fn write(&self, addr: u64, value: u32) {
        let number = (addr & ((1 << 20) - 1)) / u64::from(LEN);
        // SAFETY: loom checks that no other thread reads or writes.
        self.0[number as usize].with_mut(|bytes| unsafe { *bytes = value });
    }

    fn read(&self, number: u8) -> u32 {
        // SAFETY: loom checks that no other thread writes.
        self.0[usize::from(number)].with(|bytes| unsafe { *bytes })
    }
}

/// How the device uses buffers.
#[derive(Clone, Copy, PartialEq)]
enum Uses {
    InTurn,
    /// The last of those that it finds first.
    Backwards,
}

/// The device's thread: writes to each buffer how many it has used before, and one.
fn serve<D: Device>(device: &mut D, bytes: &Bytes, uses: Uses) -> u32 {
    let mut used = 0;
    for _ in 0..LOOKS {
        let mut found: Vec<_> = std::iter::from_fn(|| device.take()).collect();
        if uses == Uses::Backwards {
            found.reverse();
        }
        for (id, addr) in found {
            used += 1;
            bytes.write(addr, used);
            device.add_used(id, used);
        }
        thread::yield_now();
    }
    used
}

type Queue<F> = ShapedQueue<<F as Format>::Driver, Option<u8>>;

/// The driver: its memory that is in no slot, and what it has received.
struct Driver {
    bytes: Arc<Bytes>,
    free: Vec<u8>,
    received: Vec<u32>,
}

/// Fills slots with free memory, into which it writes first.
struct Fills<'d>(&'d mut Driver);

impl FillRun<Option<u8>> for Fills<'_> {
    fn is_empty(&self, buffer: &Option<u8>) -> bool {
        buffer.is_none()
    }

    fn fill(&mut self, buffer: &mut Option<u8>) -> Option<u64> {
        let number = self.0.free.pop()?;
        self.0.bytes.write(addr(number), 0);
        *buffer = Some(number);
        Some(addr(number))
    }

    fn fill_all(&mut self, buffers: &mut [Option<u8>], addrs: &mut [u64]) -> usize {
        let filled = buffers.iter_mut().zip(addrs).map_while(|(buffer, addr)| self.fill(buffer).map(|at| *addr = at));
        filled.count()
    }
}

impl Driver {
    fn new() -> Self {
        let bytes = Bytes(std::array::from_fn(|_| UnsafeCell::new(0)));
        Self { bytes: Arc::new(bytes), free: (0..BUFFERS as u8).collect(), received: Vec::new() }
    }

    /// Posts all free slots: in a run, if it can be one.
    fn refill<F: DriverFormat>(&mut self, queue: &mut ShapedQueue<F, Option<u8>>) {
        queue.refill_run(SIZE.into(), false, &mut Fills(self));
        let mut fills = Fills(self);
        let mut fill = |buffer: &mut Option<u8>, segments: &mut Segments<'_>| {
            if buffer.is_none() {
                let Some(addr) = fills.fill(buffer) else { return false };
                segments.set(0, addr);
            }
            true
        };
        while queue.has_free() && queue.refill(true, SIZE.into(), &mut fill) > 0 {}
    }

    /// A buffer was used. Every other one leaves its slot.
    fn handle(&mut self, len: u32, buffer: &mut Option<u8>) {
        let number = buffer.unwrap();
        let value = self.bytes.read(number);
        assert_eq!(len, value, "the length is of other bytes");
        self.received.push(value);
        if value % 2 == 0 {
            self.free.extend(buffer.take());
        }
    }

    /// Takes up to `most` buffers that the device has used, one by one.
    fn receive<F: DriverFormat>(&mut self, queue: &mut ShapedQueue<F, Option<u8>>, most: u16) {
        let mut left = queue.pending(SIZE, |_| ()).expect("the device follows the specification").min(most);
        while left > 0 {
            let (taken, _) = queue.take_while(left, |len, buffer, take| {
                take.now();
                self.handle(len, buffer);
                ControlFlow::<()>::Continue(())
            });
            left -= taken;
        }
    }

    /// Takes what the device has used in order, as a group.
    fn receive_group<F: DriverFormat>(&mut self, queue: &mut ShapedQueue<F, Option<u8>>) {
        let mut lens = Vec::new();
        let (n, _) = queue.read_group(SIZE, 1, |_, more| lens.push(1 + more));
        let mut lent = queue.lend(n);
        lent.buffers.iter_mut().zip(lens).for_each(|(buffer, len)| self.handle(len, buffer));
        lent.handled(n.into(), |_| 0);
    }
}

/// Buffers go around, the device stops, and the ring is replaced.
fn goes_around<F: Format + 'static>(features: u64, uses: Uses, groups: bool) {
    model(move || {
        let negotiated = Negotiated::new(F::BIT | features);
        let ((memory, [ours, theirs]), (next_memory, [next_ours, next_theirs])) = (F::ring(), F::ring());
        let mut queue = Queue::<F>::new(ours, negotiated, &[LEN], None);
        let (mut device, mut driver) = (F::device(theirs, negotiated), Driver::new());
        let bytes = driver.bytes.clone();
        let peer = thread::spawn(move || (serve(&mut device, &bytes, uses), device));
        for look in 0..=LOOKS {
            driver.refill(&mut queue);
            if groups {
                driver.receive_group(&mut queue);
            }
            // Sometimes a buffer stays pending.
            driver.receive(&mut queue, if look == 0 { 1 } else { SIZE });
            thread::yield_now();
        }
        // *close*: the device has confirmed that it has stopped.
        let (used, mut device) = peer.join().unwrap();
        let (taken, unread) = (driver.received.len() as u32, u32::from(queue.unread()));
        assert_eq!(taken + unread, used, "a used buffer is neither taken nor unread");
        if uses == Uses::InTurn {
            assert_eq!(driver.received, (1..=taken).collect::<Vec<_>>());
        }
        let posted = queue.slots().filter(|(posted, _)| *posted).count();
        assert_eq!(posted, queue.posted());
        let unused = std::iter::from_fn(|| device.take()).count();
        assert_eq!(posted, unread as usize + unused, "a posted buffer was not seen");
        let mut all: Vec<_> = queue.slots().filter_map(|(_, buffer)| *buffer).chain(driver.free.clone()).collect();
        all.iter().for_each(|&number| driver.bytes.write(addr(number), 0));
        all.sort_unstable();
        assert_eq!(all, (0..BUFFERS as u8).collect::<Vec<_>>(), "memory is lost, or in two slots");
        // *handover*.
        queue.replace(next_ours, None);
        driver.refill(&mut queue);
        assert_eq!(queue.posted(), SIZE.into());
        let mut device = F::device(next_theirs, negotiated);
        let slots = |queue: &mut Queue<F>| queue.slots().map(|(_, buffer)| addr(buffer.unwrap())).collect();
        for _ in 0..LOOKS {
            let mut slots: Vec<_> = slots(&mut queue);
            let found: Vec<_> = std::iter::from_fn(|| device.take()).collect();
            let mut seen: Vec<_> = found.iter().map(|(_, addr)| *addr).collect();
            seen.sort_unstable();
            slots.sort_unstable();
            assert_eq!(seen, slots);
            driver.received.clear();
            for ((id, addr), value) in found.into_iter().zip(1..) {
                driver.bytes.write(addr, value);
                device.add_used(id, value);
            }
            if groups {
                driver.receive_group(&mut queue);
            }
            driver.receive(&mut queue, SIZE);
            assert_eq!(driver.received, [1, 2]);
            driver.refill(&mut queue);
        }
        drop((memory, next_memory));
    });
}

/// The device finds both buffers of a batch or none. `found`: after it has looked.
fn takes_both<D: Device>(mut device: D, found: impl Fn(&mut D, [(u16, u64); 2]) + Send + 'static) {
    let Some(first) = device.take() else { return };
    let second = device.take().expect("the second buffer is seen with the first");
    found(&mut device, [first, second]);
}

/// The buffers of a batch are seen at once: in the first turn of the ring, and in the second, where
/// they are posted in a run.
fn is_seen_at_once<F: Format + 'static>(again: bool) {
    model(move || {
        let negotiated = Negotiated::new(F::BIT);
        let (memory, [ours, theirs]) = F::ring();
        let mut queue = Queue::<F>::new(ours, negotiated, &[LEN], None);
        let (mut device, mut driver) = (F::device(theirs, negotiated), Driver::new());
        let bytes = driver.bytes.clone();
        if again {
            driver.refill(&mut queue);
            assert_eq!(serve(&mut device, &bytes, Uses::InTurn), SIZE.into());
            driver.receive(&mut queue, SIZE);
            assert!(queue.is_steady() && queue.posted() == 0);
        }
        let peer = thread::spawn(move || {
            takes_both(device, move |device, both| {
                for (id, addr) in both {
                    bytes.write(addr, 1);
                    device.add_used(id, 1);
                }
            });
        });
        driver.refill(&mut queue);
        peer.join().unwrap();
        drop(memory);
    });
}

/// The same for a run of buffers that the device reads.
fn sent_run_is_seen_at_once<F: Format + 'static>() {
    model(|| {
        let Ends { memory, mut driver, device } = Ends::<F>::new(0);
        let peer = thread::spawn(move || {
            takes_both(device, |_, both| assert_eq!(both.map(|(_, at)| at), [addr(1), addr(2)]));
        });
        let mut next = 0;
        let fill = |buffer: &mut u8| {
            next += 1;
            *buffer = next;
            true
        };
        assert_eq!(driver.post_run(SIZE.into(), fill, |buffer| (addr(*buffer), LEN)), SIZE.into());
        driver.publish();
        peer.join().unwrap();
        drop(memory);
    });
}

#[test]
fn split_goes_around() {
    goes_around::<SplitFormat>(0, Uses::InTurn, false);
}

#[test]
fn split_goes_around_in_order() {
    goes_around::<SplitFormat>(feature::IN_ORDER, Uses::InTurn, false);
}

#[test]
fn split_goes_around_backwards() {
    goes_around::<SplitFormat>(0, Uses::Backwards, false);
}

#[test]
fn packed_goes_around() {
    goes_around::<PackedFormat>(0, Uses::InTurn, false);
}

#[test]
fn packed_goes_around_in_groups() {
    goes_around::<PackedFormat>(0, Uses::InTurn, true);
}

#[test]
fn packed_goes_around_in_order() {
    goes_around::<PackedFormat>(feature::IN_ORDER, Uses::InTurn, true);
}

#[test]
fn packed_goes_around_backwards() {
    goes_around::<PackedFormat>(0, Uses::Backwards, true);
}

#[test]
fn split_batch_is_seen_at_once() {
    [false, true].into_iter().for_each(is_seen_at_once::<SplitFormat>);
}

#[test]
fn packed_batch_is_seen_at_once() {
    [false, true].into_iter().for_each(is_seen_at_once::<PackedFormat>);
}

#[test]
fn split_sent_run_is_seen_at_once() {
    sent_run_is_seen_at_once::<SplitFormat>();
}

#[test]
fn packed_sent_run_is_seen_at_once() {
    sent_run_is_seen_at_once::<PackedFormat>();
}
