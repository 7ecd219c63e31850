//! Loom's models of `arm` against `publish`, on the queues that the driver and the device run: both
//! formats, flags and event indices, either end asleep. The theory is in `event.rs`. The models of
//! buffers that go around are in `model/shaped.rs`.
//!
//! One end publishes two entries, and asks after each or after both whether the peer wants to be
//! notified. The other end arms, takes the entries that are there, and arms again. The forbidden
//! state: it waits, there is work, and no notification has arrived since it last began to arm.
//!
//! | change | fails |
//! | --- | --- |
//! | no fence in `arm` of an end | the models in which that end sleeps |
//! | no fence in `should_notify` of an end | the models in which the other end sleeps |
//! | `passed` compares for equality | the models with events, where both entries are published at once |

use super::device::{BASE, DeviceFormat, MappedRing, PackedDevice, SplitDevice, Start};
use super::driver::{DriverFormat, DriverQueue, Packed, RingEnd, Segment, Split};
use super::sync::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use super::{Armed, Negotiated, PackedRing, SplitRing};
use crate::net::feature;
use loom::sync::Arc;
use loom::sync::atomic::AtomicBool;
use loom::thread;

mod shaped;

/// Entries of a ring.
const SIZE: u16 = 2;
/// Entries that are published in a model.
const ENTRIES: u16 = 2;

/// A notification: one end sets it, and the other end clears it before it arms.
struct Bell(AtomicBool);

impl Bell {
    fn new() -> Arc<Self> {
        Arc::new(Self(AtomicBool::new(false)))
    }

    fn ring(&self) {
        self.0.swap(true, Ordering::AcqRel);
    }

    fn forget(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// The differences between the formats: the words of a ring, and its two ends.
trait Format {
    type Driver: DriverFormat;
    type Device: Device;
    /// The memory, and the ring as either end has it.
    fn ring() -> (Memory, [<Self::Driver as DriverFormat>::Ring; 2]);
    fn device(ring: <Self::Driver as DriverFormat>::Ring, negotiated: Negotiated) -> Self::Device;
    const BIT: u64;
}

/// Words of a ring.
struct Memory {
    _long: Box<[AtomicU64]>,
    _words: Box<[AtomicU32]>,
    _half: Box<[AtomicU16]>,
}

fn words<T>(n: usize, word: impl Fn() -> T) -> Box<[T]> {
    std::iter::repeat_with(word).take(n).collect()
}

/// The device's end.
trait Device: 'static {
    /// Uses a buffer, into which `len` bytes were written.
    fn add_used(&mut self, id: u16, len: u32);
    fn should_notify(&mut self) -> bool;
    fn arm(&mut self) -> Armed;
    /// The next buffer: its id and its address.
    fn take(&mut self) -> Option<(u16, u64)>;
}

/// The device's end as the device runs it, and a place in the ring: chains are popped first and
/// completed later.
struct DeviceEnd<S: DeviceFormat> {
    format: S,
    at: S::At,
}

impl<S: DeviceFormat> DeviceEnd<S> {
    fn new(ring: S::Ring, base: u32, negotiated: Negotiated) -> Self {
        let mut format = S::new(ring, Start { base, negotiated, inflight: None, splits: false, logged: None });
        format.disarm();
        Self { at: format.next(), format }
    }
}

impl<S: DeviceFormat + 'static> Device for DeviceEnd<S> {
    fn add_used(&mut self, id: u16, len: u32) {
        self.format.add_used(id, 1, len);
        self.format.publish();
    }

    fn should_notify(&mut self) -> bool {
        self.format.should_notify()
    }

    fn arm(&mut self) -> Armed {
        // As in the device: a chain that the last refresh has found is work.
        let armed = if self.format.refresh().unwrap() { Armed::Work } else { self.format.arm() };
        if armed == Armed::Work {
            self.format.disarm();
        }
        armed
    }

    fn take(&mut self) -> Option<(u16, u64)> {
        self.format.refresh().unwrap();
        let descriptor = self.format.first(self.at).unwrap()?;
        self.at = self.format.behind(self.at, 1);
        Some((self.format.id(&descriptor).unwrap(), descriptor.addr()))
    }
}

struct SplitFormat;

impl Format for SplitFormat {
    type Driver = Split;
    type Device = DeviceEnd<SplitDevice>;
    const BIT: u64 = 0;

    fn ring() -> (Memory, [SplitRing; 2]) {
        let n = usize::from(SIZE);
        let memory = Memory {
            _long: words(2 * n, || AtomicU64::new(0)),
            _words: words(2 * n, || AtomicU32::new(0)),
            _half: words(3 + n + 3, || AtomicU16::new(0)),
        };
        let half = memory._half.as_ptr();
        let ring = || {
            let (used, event) = (half.wrapping_add(3 + n), half.wrapping_add(3 + n + 2));
            // SAFETY: the memory lives as long as the model, and has these words.
            unsafe { SplitRing::from_words(memory._long.as_ptr(), half, used, memory._words.as_ptr(), event, SIZE) }
        };
        let rings = [ring(), ring()];
        (memory, rings)
    }

    fn device(ring: SplitRing, negotiated: Negotiated) -> DeviceEnd<SplitDevice> {
        DeviceEnd::new(ring, 0, negotiated)
    }
}

struct PackedFormat;

impl Format for PackedFormat {
    type Driver = Packed;
    type Device = DeviceEnd<PackedDevice>;
    const BIT: u64 = feature::RING_PACKED;

    fn ring() -> (Memory, [PackedRing; 2]) {
        let memory = Memory {
            _long: words(2 * usize::from(SIZE), || AtomicU64::new(0)),
            _words: words(2, || AtomicU32::new(0)),
            _half: Box::default(),
        };
        let ring = || {
            let events = memory._words.as_ptr();
            // SAFETY: the memory lives as long as the model, and has these words.
            unsafe { PackedRing::from_words(memory._long.as_ptr(), events, events.wrapping_add(1), SIZE) }
        };
        let rings = [ring(), ring()];
        (memory, rings)
    }

    fn device(ring: PackedRing, negotiated: Negotiated) -> DeviceEnd<PackedDevice> {
        DeviceEnd::new(MappedRing { ring, descriptors: 0, event: 0 }, BASE, negotiated)
    }
}

/// A driver's queue and the device's end of it.
struct Ends<F: Format> {
    memory: Memory,
    driver: DriverQueue<F::Driver, u8>,
    device: F::Device,
}

impl<F: Format> Ends<F> {
    fn new(features: u64) -> Self {
        let negotiated = Negotiated::new(F::BIT | features);
        let (memory, [ours, theirs]) = F::ring();
        Self { memory, driver: DriverQueue::new(ours, negotiated, None), device: F::device(theirs, negotiated) }
    }
}

fn post<F: DriverFormat>(driver: &mut DriverQueue<F, u8>) {
    let vacant = driver.vacant(1).unwrap();
    driver.post(vacant, |_| [Segment::read(1 << 20, 64)].into_iter());
    driver.publish();
}

/// Arms until the end waits or has popped all entries. Returns whether it waits.
fn sleeps(bell: &Bell, mut arm: impl FnMut() -> Armed, mut take: impl FnMut() -> u16) -> bool {
    let mut taken = 0;
    while taken < ENTRIES {
        bell.forget();
        if arm() == Armed::Waits {
            return true;
        }
        let more = take();
        assert!(more > 0, "work that is not there");
        taken += more;
    }
    false
}

/// At most three preemptions: without a bound, the packed device needs minutes. The races are
/// between loads and stores that are reordered, which needs no preemption.
fn model(f: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(3));
    model.check(f);
}

/// The driver sleeps, and the device publishes.
fn driver_sleeps<F: Format + 'static>(features: u64, at_once: bool) {
    model(move || {
        let Ends { memory, mut driver, mut device } = Ends::<F>::new(features);
        (0..ENTRIES).for_each(|_| post(&mut driver));
        let ids: Vec<_> = std::iter::from_fn(|| device.take()).map(|(id, _)| id).collect();
        assert_eq!(ids.len(), usize::from(ENTRIES));
        let bell = Bell::new();
        let call = bell.clone();
        let peer = thread::spawn(move || {
            for id in ids {
                device.add_used(id, 0);
                if !at_once && device.should_notify() {
                    call.ring();
                }
            }
            if at_once && device.should_notify() {
                call.ring();
            }
        });
        let driver = std::cell::RefCell::new(driver);
        let take = || {
            let mut driver = driver.borrow_mut();
            let n = driver.pending().unwrap();
            (0..n).for_each(|_| _ = driver.take().unwrap());
            n
        };
        let waits = sleeps(&bell, || driver.borrow_mut().arm(), take);
        peer.join().unwrap();
        assert!(!waits || bell.is_set(), "the driver sleeps for ever beside a used buffer");
        drop(memory);
    });
}

/// The device sleeps, and the driver publishes.
fn device_sleeps<F: Format + 'static>(features: u64, at_once: bool) {
    model(move || {
        let Ends { memory, mut driver, device } = Ends::<F>::new(features);
        let bell = Bell::new();
        let kick = bell.clone();
        let peer = thread::spawn(move || {
            for _ in 0..ENTRIES {
                post(&mut driver);
                if !at_once && driver.should_notify() {
                    kick.ring();
                }
            }
            if at_once && driver.should_notify() {
                kick.ring();
            }
        });
        let device = std::cell::RefCell::new(device);
        let take = || {
            let mut device = device.borrow_mut();
            let ids = std::iter::from_fn(|| device.take().inspect(|&(id, _)| device.add_used(id, 0)));
            ids.count() as u16
        };
        let waits = sleeps(&bell, || device.borrow_mut().arm(), take);
        peer.join().unwrap();
        assert!(!waits || bell.is_set(), "the device sleeps for ever beside an available buffer");
        drop(memory);
    });
}

#[test]
fn split_driver_sleeps_by_flag() {
    for at_once in [false, true] {
        driver_sleeps::<SplitFormat>(0, at_once);
    }
}

#[test]
fn split_driver_sleeps_by_event() {
    for at_once in [false, true] {
        driver_sleeps::<SplitFormat>(feature::EVENT_IDX, at_once);
    }
}

#[test]
fn split_device_sleeps_by_flag() {
    for at_once in [false, true] {
        device_sleeps::<SplitFormat>(0, at_once);
    }
}

#[test]
fn split_device_sleeps_by_event() {
    for at_once in [false, true] {
        device_sleeps::<SplitFormat>(feature::EVENT_IDX, at_once);
    }
}

#[test]
fn packed_driver_sleeps_by_flag() {
    for at_once in [false, true] {
        driver_sleeps::<PackedFormat>(0, at_once);
    }
}

#[test]
fn packed_driver_sleeps_by_event() {
    for at_once in [false, true] {
        driver_sleeps::<PackedFormat>(feature::EVENT_IDX, at_once);
    }
}

#[test]
fn packed_device_sleeps_by_flag() {
    for at_once in [false, true] {
        device_sleeps::<PackedFormat>(0, at_once);
    }
}

#[test]
fn packed_device_sleeps_by_event() {
    for at_once in [false, true] {
        device_sleeps::<PackedFormat>(feature::EVENT_IDX, at_once);
    }
}
