//! The in-flight state of packed queues: a batch that was cut off, and regions of any content.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::layout::{PackedWords, VERSION};
use super::{InflightQueue, InflightRegion, PackedInflight};
use crate::guest_memory::dirty_log::DirtyLog;
use crate::guest_memory::mapping::Mapping;
use crate::net::feature;
use crate::virtqueue::Negotiated;
use crate::virtqueue::device::{BASE, DeviceFormat, Logged, MappedRing, PackedDevice, Start};
use crate::virtqueue::{DESC_NEXT, DESC_WRITE, PackedDesc, PackedLayout, PackedRing, Position};

const SIZE: u16 = 16;

/// A packed ring, and an in-flight region for it.
struct RingAndRegion {
    block: Vec<u64>,
    region: InflightRegion,
}

impl RingAndRegion {
    fn new() -> Self {
        let file = rustix::fs::memfd_create(c"netmem-test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        let bytes = InflightRegion::bytes(1, SIZE, true);
        rustix::fs::ftruncate(&file, bytes).unwrap();
        let map = Mapping::new("a test", &file, 0, bytes).unwrap();
        let block = vec![0; PackedLayout::new(SIZE).total / 8 + 16];
        Self { block, region: InflightRegion::new(map, 1, SIZE, true).unwrap() }
    }

    fn ring(&self) -> PackedRing {
        let base = self.block.as_ptr().cast_mut().cast::<u8>();
        let base = base.wrapping_add(base.align_offset(PackedLayout::ALIGN));
        // SAFETY: the block is large enough, aligned, and outlives the rings of the tests.
        unsafe { PackedRing::from_layout(base, SIZE) }
    }

    fn part(&self) -> InflightQueue {
        self.region.queue(0, SIZE, true).unwrap().unwrap()
    }

    fn inflight(&self) -> PackedInflight {
        PackedInflight::new(self.part(), &self.ring(), [Position::START; 2], |_, _| {})
    }

    /// Makes a chain of descriptors available at `at`, of which the first has address `addr`.
    fn post(&self, at: Position, addr: u64, id: u16, descs: u16) {
        for n in (0..descs).rev() {
            let (at, more) = (at.step(n, SIZE), if n + 1 < descs { DESC_NEXT } else { 0 });
            let flags = DESC_WRITE | more | at.available();
            self.ring().set_desc(at.offset(), PackedDesc { addr: addr + u64::from(n), len: 100, id, flags });
        }
    }

    fn marks(&self) -> usize {
        let words = self.part().words::<PackedWords>();
        (0..SIZE).filter(|&e| words.entry(e).inflight.load(Ordering::Relaxed) != 0).count()
    }
}

/// The used descriptor that the device writes at `at`.
fn used(at: Position, id: u16) -> PackedDesc {
    PackedDesc { addr: 0, len: 50, id, flags: at.used() | DESC_WRITE }
}

/// A back end ends at each point of a batch of three chains, anywhere in the ring: the next one
/// resubmits all of them, with the addresses that the driver wrote, or none.
#[test]
fn a_batch_that_was_cut_off_is_rolled_back_or_shown() {
    for start in 0..2 * SIZE {
        for shown in [false, true] {
            let fixture = RingAndRegion::new();
            // Chains of one descriptor each, up to the beginning of the batch.
            let mut at = Position::START;
            let mut inflight = fixture.inflight();
            for _ in 0..start {
                inflight.before_publish(&fixture.ring(), at, at.step(1, SIZE));
                inflight.after_publish();
                at = at.step(1, SIZE);
            }
            let places = [(at, 7, 1), (at.step(1, SIZE), 3, 2), (at.step(3, SIZE), 9, 1)];
            for (at, id, descs) in places {
                fixture.post(at, 1000 * u64::from(id), id, descs);
            }
            for &(at, id, _) in &places[1..] {
                inflight.hold(at, used(at, id));
            }
            let end = at.step(4, SIZE);
            inflight.before_publish(&fixture.ring(), at, end);
            assert_eq!(fixture.marks(), 3);
            if shown {
                fixture.ring().set_used_desc(at.offset(), used(at, 7));
            }
            drop(inflight);
            let next = fixture.inflight();
            if shown {
                assert_eq!((next.start(), next.has_resubmitted(), fixture.marks()), ((end, end), false, 0));
                continue;
            }
            assert_eq!(next.start(), (at, at));
            for (at, id, descs) in places {
                let chain = next.resubmitted(at).unwrap();
                assert_eq!(chain.len(), usize::from(descs));
                assert_eq!((chain[0].addr, chain[chain.len() - 1].id), (1000 * u64::from(id), id));
                let d = fixture.ring().used_desc(at.offset());
                assert!(!d.is_used(at), "the driver would take it for used");
            }
            // They are completed one at a time.
            let mut next = next;
            for (n, (at, _, descs)) in places.into_iter().enumerate() {
                next.before_publish(&fixture.ring(), at, at.step(descs, SIZE));
                next.after_publish();
                assert_eq!((fixture.marks(), next.has_resubmitted()), (2 - n, n < 2));
            }
            drop(next);
            assert_eq!(fixture.inflight().start(), (end, end));
        }
    }
}

/// The positions that are rolled back are marked in the dirty log before the ring is used.
#[test]
fn what_is_rolled_back_is_noted() {
    let fixture = RingAndRegion::new();
    let mut inflight = fixture.inflight();
    let at = Position::START;
    (0..3).for_each(|n| fixture.post(at.step(n, SIZE), 0, n, 1));
    (1..3).for_each(|n| inflight.hold(at.step(n, SIZE), used(at.step(n, SIZE), n)));
    inflight.before_publish(&fixture.ring(), at, at.step(3, SIZE));
    drop(inflight);
    let file = rustix::fs::memfd_create(c"netmem-log", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    let log = Arc::new(DirtyLog::new(Mapping::new("a test", &file, 0, 4096).unwrap(), Arc::default()));
    let start = Start {
        base: BASE,
        negotiated: Negotiated::new(feature::VERSION_1 | feature::RING_PACKED),
        splits: false,
        inflight: Some(fixture.part()),
        logged: Some(Logged { log, used: Some(3 * 4096) }),
    };
    let ring = MappedRing { ring: fixture.ring(), descriptors: 3 * 4096, event: 0 };
    let _side = <PackedDevice as DeviceFormat>::new(ring, start);
    assert!(!fixture.ring().used_desc(1).is_used(at.step(1, SIZE)), "it is rolled back");
    let mut bits = [0];
    rustix::io::pread(&file, &mut bits, 0).unwrap();
    assert_eq!(bits, [1 << 3]);
}

/// Each chain of a region of the largest size is found at its position, and completed once. Linear
/// searches would make this test run for minutes.
#[test]
fn a_region_of_the_largest_size() {
    const LARGEST: u16 = 32768;
    let mut fixture = RingAndRegion::new();
    let file = rustix::fs::memfd_create(c"netmem-test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    let bytes = InflightRegion::bytes(1, LARGEST, true);
    rustix::fs::ftruncate(&file, bytes).unwrap();
    fixture.region = InflightRegion::new(Mapping::new("a test", &file, 0, bytes).unwrap(), 1, LARGEST, true).unwrap();
    fixture.block = vec![0; PackedLayout::new(LARGEST).total / 8 + 16];
    let base = fixture.block.as_ptr().cast_mut().cast::<u8>();
    // SAFETY: as in `RingAndRegion::ring`.
    let ring = unsafe { PackedRing::from_layout(base.add(base.align_offset(PackedLayout::ALIGN)), LARGEST) };
    let part = || fixture.region.queue(0, LARGEST, true).unwrap().unwrap();
    let words = part().words::<PackedWords>();
    for n in 0..LARGEST {
        let entry = words.entry(n);
        entry.inflight.store(1, Ordering::Relaxed);
        entry.num.store(1, Ordering::Relaxed);
        entry.counter.store(n.into(), Ordering::Relaxed);
        entry.id.store(n, Ordering::Relaxed);
    }
    // The free list is empty, and the used positions are the first.
    let header = words.header();
    header.free_head.store(LARGEST, Ordering::Relaxed);
    header.used_wrap_counter.store(1, Ordering::Relaxed);
    header.old_used_wrap_counter.store(1, Ordering::Relaxed);
    header.version.store(VERSION, Ordering::Relaxed);
    let mut inflight = PackedInflight::new(part(), &ring, [Position::START; 2], |_, _| {});
    assert_eq!(inflight.all_resubmitted().len(), LARGEST.into());
    for n in 0..LARGEST {
        let (at, to) = (Position::START.step(n, LARGEST), Position::START.step(n + 1, LARGEST));
        assert_eq!(inflight.resubmitted(at).map(|chain| (chain.len(), chain[0].id)), Some((1, n)));
        assert!(inflight.resubmitted(to).is_some() == (n + 1 < LARGEST));
        inflight.before_publish(&ring, at, to);
        inflight.after_publish();
    }
    assert!(!inflight.has_resubmitted());
}

/// A region of any bytes has chains that the ring can have, and no more.
#[test]
fn a_packed_region_that_lies() {
    let mut word = 0x1234_5678_9abc_def1_u64;
    let mut random = move || {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        word >> 8
    };
    let mut chains = 0;
    for _ in 0..3000 {
        let fixture = RingAndRegion::new();
        let words = fixture.part().words::<PackedWords>();
        for half in words.halves() {
            // Mostly small numbers, so that some are valid.
            let value = if random() % 8 == 0 { random() } else { random() % 4 } as u16;
            half.store(value, Ordering::Relaxed);
        }
        words.header().version.store(VERSION, Ordering::Relaxed);
        let inflight = fixture.inflight();
        let descs: usize = inflight.all_resubmitted().iter().map(|chain| chain.chain.len()).sum();
        assert!(descs <= usize::from(SIZE));
        assert!(inflight.start().0.offset() < SIZE && inflight.start().1.offset() < SIZE);
        chains += inflight.all_resubmitted().len();
    }
    assert!(chains > 100, "{chains}");
}
