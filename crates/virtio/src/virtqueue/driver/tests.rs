//! A reference device in both formats, which does what it likes, and the driver's queue against it.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::{
    AnyDriverQueue, AnyRing, AnyShapedQueue, DriverFormat, DriverQueue, LOOK, RingEnd, Segment, Segments, Tables, Take,
    with_queue,
};
use crate::net::feature;
use crate::virtqueue::fault::DeviceFault;
use crate::virtqueue::{
    AVAIL_NO_INTERRUPT, Armed, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Event, Negotiated, PackedDesc, PackedLayout,
    PackedRing, Position, SplitLayout, SplitRing, USED_NO_NOTIFY, passed, passed_packed,
};

mod free;
mod in_order;
mod run_fill;
mod used_ids;

use run_fill::RunFill;

const SIZE: u16 = 16;
const PER_TABLE: u16 = 6;

/// Every combination of ring features.
fn combinations() -> impl Iterator<Item = Negotiated> {
    let bits = [feature::RING_PACKED, feature::EVENT_IDX, feature::INDIRECT_DESC, feature::IN_ORDER];
    (0..16).map(move |n| {
        let of = bits.iter().enumerate().filter(|(i, _)| n >> i & 1 == 1).map(|(_, bit)| bit);
        Negotiated::new(of.sum())
    })
}

/// Memory for a ring of either format and its tables, at addresses that the device uses as they
/// are.
struct Memory {
    _block: Vec<u64>,
    base: *mut u8,
    tables: *mut u8,
}

impl Memory {
    fn new() -> Self {
        let ring = SplitLayout::new(SIZE).total.max(PackedLayout::new(SIZE).total);
        let tables = usize::from(SIZE) * usize::from(PER_TABLE) * Tables::ENTRY;
        let mut block = vec![0u64; (ring + tables) / 8 + 16];
        let base = block.as_mut_ptr().cast::<u8>();
        let base = base.wrapping_add(base.align_offset(SplitLayout::ALIGN));
        Self { _block: block, base, tables: base.wrapping_add(ring) }
    }

    fn ring(&self, negotiated: Negotiated) -> AnyRing {
        // SAFETY: the block is large enough and aligned, and outlives the rings of a test.
        unsafe {
            match negotiated.packed() {
                false => AnyRing::Split(SplitRing::from_layout(self.base, SIZE)),
                true => AnyRing::Packed(PackedRing::from_layout(self.base, SIZE)),
            }
        }
    }

    fn tables(&self, negotiated: Negotiated) -> Option<Tables> {
        // SAFETY: as above.
        let tables = unsafe { Tables::new(self.tables, self.tables.addr() as u64, PER_TABLE) };
        negotiated.indirect().then_some(tables)
    }
}

/// A chain as the device has taken it.
#[derive(Clone, Debug)]
struct Chain {
    id: u16,
    segments: Vec<(u64, u32, bool)>,
    /// Descriptors of the ring that it takes.
    count: u16,
}

/// The device.
struct Device<'m> {
    memory: &'m Memory,
    ring: AnyRing,
    negotiated: Negotiated,
    avail: Position,
    used: Position,
    avail_idx: u16,
    used_idx: u16,
    /// Where the driver was told of used buffers last.
    signalled: (Position, u16),
    taken: Vec<Chain>,
}

impl<'m> Device<'m> {
    fn new(memory: &'m Memory, negotiated: Negotiated) -> Self {
        let ring = memory.ring(negotiated);
        let (avail, used) = (Position::START, Position::START);
        let taken = Vec::new();
        Self { memory, ring, negotiated, avail, used, avail_idx: 0, used_idx: 0, signalled: (used, 0), taken }
    }

    fn table(&self, addr: u64, len: u32) -> Vec<[u64; 2]> {
        assert!(self.negotiated.indirect(), "a table that was not negotiated");
        let offset = addr as usize - self.memory.tables.addr();
        assert!(len.is_multiple_of(16) && offset + len as usize <= usize::from(SIZE * PER_TABLE) * 16);
        let at = self.memory.tables.wrapping_add(offset).cast::<[u64; 2]>();
        // SAFETY: inside of the tables.
        (0..len as usize / 16).map(|i| unsafe { at.add(i).read() }).collect()
    }

    /// Takes what was made available.
    fn poll(&mut self) {
        loop {
            let chain = match &self.ring {
                AnyRing::Split(ring) if ring.avail_idx() != self.avail_idx => {
                    let head = ring.avail_entry(self.avail_idx);
                    self.avail_idx = self.avail_idx.wrapping_add(1);
                    let mut chain = Chain { id: head, segments: Vec::new(), count: 0 };
                    let mut d = ring.desc(head);
                    if d.flags & DESC_INDIRECT != 0 {
                        assert_eq!(d.flags, DESC_INDIRECT);
                        let table = self.table(d.addr, d.len);
                        let mut i = 0;
                        loop {
                            let [addr, rest] = table[i];
                            let flags = (rest >> 32) as u16;
                            chain.segments.push((addr, rest as u32, flags & DESC_WRITE != 0));
                            if flags & DESC_NEXT == 0 {
                                break;
                            }
                            i = (rest >> 48) as usize;
                        }
                    } else {
                        let mut id = head;
                        loop {
                            chain.count += 1;
                            chain.segments.push((d.addr, d.len, d.flags & DESC_WRITE != 0));
                            if d.flags & DESC_NEXT == 0 {
                                break;
                            }
                            if self.negotiated.in_order() {
                                assert_eq!(d.next, (id + 1) % SIZE, "descriptors are used in the table's order");
                            }
                            id = d.next;
                            d = ring.desc(id);
                        }
                    }
                    chain
                }
                AnyRing::Packed(ring) if ring.desc(self.avail.offset()).is_available(self.avail) => {
                    let mut chain = Chain { id: 0, segments: Vec::new(), count: 0 };
                    loop {
                        let d = ring.desc(self.avail.offset());
                        assert!(d.is_available(self.avail), "a chain becomes available at once");
                        self.avail = self.avail.step(1, SIZE);
                        (chain.id, chain.count) = (d.id, chain.count + 1);
                        if d.flags & DESC_INDIRECT != 0 {
                            for [addr, rest] in self.table(d.addr, d.len) {
                                let flags = (rest >> 48) as u16;
                                chain.segments.push((addr, rest as u32, flags & DESC_WRITE != 0));
                            }
                        } else {
                            chain.segments.push((d.addr, d.len, d.flags & DESC_WRITE != 0));
                        }
                        if d.flags & DESC_NEXT == 0 {
                            break;
                        }
                    }
                    chain
                }
                _ => return,
            };
            self.taken.push(chain);
        }
    }

    /// Uses the first `n` chains that it has taken, with one used entry that names the last.
    fn use_first(&mut self, n: usize, len: u32) {
        let batch: Vec<_> = self.taken.drain(..n).collect();
        self.answer(batch[n - 1].id.into(), len, n as u16, batch.iter().map(|c| c.count).sum());
    }

    /// Uses some of the chains that it has, in an order that is allowed: the first ones if `orderly`.
    /// It goes on with all but one of `of` chances. Returns them, with what was written to each.
    fn use_some(
        &mut self,
        rng: &mut fastrand::Rng,
        of: u8,
        orderly: bool,
        have: u32,
        len: impl Fn(&mut fastrand::Rng) -> u32,
    ) -> Vec<(Chain, u32)> {
        let mut used = Vec::new();
        while !self.taken.is_empty() && rng.u8(..of) > 0 {
            let len = len(rng);
            if self.negotiated.in_order() {
                let n = rng.usize(1..=self.taken.len());
                used.extend(self.taken[..n - 1].iter().map(|chain| (chain.clone(), have)));
                used.push((self.taken[n - 1].clone(), len));
                self.use_first(n, len);
            } else {
                let at = if orderly { 0 } else { rng.usize(..self.taken.len()) };
                used.push((self.taken[at].clone(), len));
                self.use_any(at, len);
            }
        }
        used
    }

    fn use_any(&mut self, at: usize, len: u32) {
        let chain = self.taken.remove(at);
        self.answer(chain.id.into(), len, 1, chain.count);
    }

    /// Says that `buffers` of `descriptors` were used, the last of them `id`.
    fn answer(&mut self, id: u32, len: u32, buffers: u16, descriptors: u16) {
        match &self.ring {
            AnyRing::Split(ring) => {
                ring.set_used_entry(self.used_idx, id, len);
                self.used_idx = self.used_idx.wrapping_add(buffers);
                ring.set_used_idx(self.used_idx);
            }
            AnyRing::Packed(ring) => {
                let flags = self.used.used();
                ring.set_used_desc(self.used.offset(), PackedDesc { addr: 0, len, id: id as u16, flags });
                self.used = self.used.step(descriptors, SIZE);
            }
        }
    }

    /// Whether the driver wants an interrupt for what was used since the last call.
    fn wants_call(&mut self) -> bool {
        let (packed, split) = std::mem::replace(&mut self.signalled, (self.used, self.used_idx));
        match &self.ring {
            AnyRing::Split(ring) if self.negotiated.event_idx() => passed(ring.used_event(), split, self.used_idx),
            AnyRing::Split(ring) => ring.avail_flags() & AVAIL_NO_INTERRUPT == 0 && split != self.used_idx,
            AnyRing::Packed(ring) => match ring.driver_event() {
                Event { flags: Event::ENABLE, .. } => packed != self.used,
                Event { flags: Event::DISABLE, .. } => false,
                Event { position, flags } => {
                    assert!(flags == Event::AT && self.negotiated.event_idx());
                    passed_packed(Position::from_bits(position), packed, self.used, SIZE)
                }
            },
        }
    }

    /// Wants a notification at the next chain, or none.
    fn want_kicks(&self, wanted: bool) {
        match &self.ring {
            AnyRing::Split(ring) if self.negotiated.event_idx() => {
                ring.set_avail_event(if wanted { self.avail_idx } else { self.avail_idx.wrapping_sub(1) });
            }
            AnyRing::Split(ring) => ring.set_used_flags(if wanted { 0 } else { USED_NO_NOTIFY }),
            AnyRing::Packed(ring) => {
                let (position, flags) = match (wanted, self.negotiated.event_idx()) {
                    (false, _) => (0, Event::DISABLE),
                    (true, false) => (0, Event::ENABLE),
                    (true, true) => (self.avail.bits(), Event::AT),
                };
                ring.set_device_event(Event { position, flags });
            }
        }
    }
}

/// What a caller keeps in a slot: the addresses of its segments, or nothing.
type Pages = Option<Vec<u64>>;

fn fill(next: &mut u64, shape: &[u32], pages: &mut Pages, segments: &mut Segments<'_>) {
    if pages.is_none() {
        let all: Vec<u64> = shape
            .iter()
            .map(|_| {
                *next += 0x1000;
                *next
            })
            .collect();
        all.iter().enumerate().for_each(|(i, &addr)| segments.set(i, addr));
        *pages = Some(all);
    }
}

/// Posts a run of buffers. Returns how many.
fn post_run(queue: &mut AnyShapedQueue<Pages>, next: &mut u64, rng: &mut fastrand::Rng) -> usize {
    let most = rng.usize(..=16);
    with_queue!(queue, queue => {
        let empty = queue.slots().all(|(posted, pages)| posted || pages.is_none());
        queue.refill_run(most, empty, &mut RunFill { next, rng })
    })
}

/// User code panics. The hook is not run, which would print it.
fn panics_if(condition: bool) {
    if condition {
        resume_unwind(Box::new(()));
    }
}

/// Buffers of one shape go around. Some are posted again as they are, sometimes there is no memory,
/// sometimes user code panics, and sometimes the ring is replaced. Buffers of one segment are also
/// posted in runs. Each chain that the device sees
/// is what is in its slot, and no slot is there twice.
#[test]
fn random_traffic_of_shaped_queues() {
    for (negotiated, shape) in
        combinations().flat_map(|n| [[100].as_slice(), &[64, 4096], &[7, 8, 9, 10, 11]].map(|s| (n, s)))
    {
        let mut memory = Memory::new();
        let have: u32 = shape.iter().sum();
        let mut rng = fastrand::Rng::with_seed(negotiated.bits() ^ shape.len() as u64);
        let mut queue = AnyShapedQueue::<Pages>::new(memory.ring(negotiated), negotiated, shape, None);
        let (mut next, mut frames, mut panics, mut runs) = (0u64, 0, 0, 0);
        for _ in 0..10 {
            let mut device = Device::new(&memory, negotiated);
            for round in 0..200 {
                // Slots are in their places only if buffers come back in order for a while.
                let orderly = round % 100 < 70;
                if shape.len() == 1 && rng.bool() {
                    runs += post_run(&mut queue, &mut next, &mut rng);
                }
                let (most, panic_at) = (rng.usize(..20), rng.usize(..60));
                let mut n = 0;
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    // Several steps: what was posted is seen also if a later one panics.
                    with_queue!(&mut queue, queue => while queue.refill(false, 64, &mut |pages: &mut _, segments: &mut Segments<'_>| {
                        n += 1;
                        panics_if(n == panic_at);
                        // A buffer of one segment is filled, or stays as it was.
                        if shape.len() == 1 && n > most {
                            return false;
                        }
                        fill(&mut next, shape, pages, segments);
                        panics_if(n + 1 == panic_at);
                        n <= most
                    }) > 0 {})
                }));
                panics += usize::from(caught.is_err());
                device.poll();
                assert_eq!(queue.posted(), device.taken.len());
                let mut seen: Vec<_> = device.taken.iter().map(|c| c.id).collect();
                seen.sort_unstable();
                seen.dedup();
                assert_eq!(seen.len(), device.taken.len(), "{negotiated:?}: a slot is posted twice");
                let expect = device.use_some(&mut rng, 8, orderly, have, |rng| rng.u32(0..=have));
                with_queue!(&mut queue, queue => {
                    assert_eq!(usize::from(queue.pending(128, |_| ()).unwrap()), expect.len());
                    assert_eq!(usize::from(queue.unread()), expect.len());
                    for (chain, written) in expect {
                        let (len, pages) = if rng.bool() {
                            let first = queue.take(1);
                            queue.taken(first, 0)
                        } else {
                            let (_, taken) = queue.take_while(1, takes);
                            let taken = taken.unwrap();
                            (taken.len, queue.buffer(taken.place))
                        };
                        assert_eq!(len, written, "{negotiated:?}, round {round}");
                        let of = pages.as_ref().unwrap().iter().zip(shape).map(|(&addr, &len)| (addr, len, true));
                        assert_eq!(chain.segments, of.collect::<Vec<_>>(), "{negotiated:?}, round {round}");
                        if rng.bool() {
                            *pages = None;
                        }
                        frames += 1;
                    }
                });
            }
            let old = queue.posted();
            let kept = with_queue!(&mut queue, queue => queue.slots().filter(|(posted, _)| *posted).count());
            assert_eq!(kept, old);
            drop(device);
            memory = Memory::new();
            queue.replace(memory.ring(negotiated), None);
            assert_eq!(queue.posted(), 0);
        }
        assert!(frames > 2000 && panics > 50, "{negotiated:?}: {frames} frames, {panics} panics");
        assert_eq!(runs > 200, shape.len() == 1, "{negotiated:?}: {runs} buffers in runs");
    }
}

/// Takes a buffer, and handles none.
fn takes<B>(_: u32, _: &mut B, take: Take<'_>) -> ControlFlow<()> {
    take.now();
    ControlFlow::Break(())
}

/// A queue with `posted` buffers of 100 bytes, and its device.
fn shaped(memory: &Memory, negotiated: Negotiated, posted: usize) -> (AnyShapedQueue<Pages>, Device<'_>) {
    let mut queue = AnyShapedQueue::<Pages>::new(memory.ring(negotiated), negotiated, &[60, 40], None);
    let (mut n, mut next) = (0, 0);
    with_queue!(&mut queue, queue => {
        queue.refill(false, 64, &mut |pages: &mut _, segments: &mut Segments<'_>| {
            fill(&mut next, &[60, 40], pages, segments);
            n += 1;
            n <= posted
        });
    });
    let mut device = Device::new(memory, negotiated);
    device.poll();
    (queue, device)
}

/// What the driver says to a device that does `lie` after it has used one buffer as it should.
fn caught(negotiated: Negotiated, lie: impl FnOnce(&mut Device<'_>)) -> DeviceFault {
    let memory = Memory::new();
    let (mut queue, mut device) = shaped(&memory, negotiated, 5);
    device.use_first(1, 100);
    lie(&mut device);
    with_queue!(&mut queue, queue => {
        for taken in 0..10 {
            match queue.pending(128, |_| ()) {
                Ok(n) => assert!(n > 0, "{negotiated:?}: nothing was wrong after {taken} buffers"),
                Err(fault) => return fault,
            }
            queue.take(1);
        }
    });
    panic!("{negotiated:?}: nothing was wrong");
}

#[test]
fn a_device_that_lies_is_caught() {
    for negotiated in combinations() {
        // In a split ring the chains of two descriptors begin at even ones.
        let per_slot = if negotiated.packed() { 1 } else { 2 };
        let id = |slot: u16| slot * per_slot;
        let bad = |id: u16| DeviceFault::BadId { id: id.into() };
        for lie in [8 * per_slot, u16::MAX] {
            assert_eq!(caught(negotiated, |d| d.answer(lie.into(), 1, 1, 2)), bad(lie), "{negotiated:?}");
        }
        if !negotiated.packed() {
            let fault = caught(negotiated, |d| d.answer(1 << 16, 1, 1, 2));
            assert_eq!(fault, DeviceFault::BadId { id: 1 << 16 });
            if !negotiated.in_order() {
                assert_eq!(caught(negotiated, |d| d.answer(5, 1, 1, 2)), bad(5), "the middle of a chain");
            }
        }
        // Never posted, and used before.
        for slot in [6, 0] {
            let fault = caught(negotiated, |d| d.answer(id(slot).into(), 1, 1, 2));
            assert_eq!(fault, DeviceFault::NotPosted { id: id(slot) }, "{negotiated:?}");
        }
        let fault = caught(negotiated, |d| {
            let next = d.taken[0].id;
            d.answer(next.into(), 101, 1, 2);
        });
        assert_eq!(fault, DeviceFault::BadLength { len: 101, have: 100 }, "{negotiated:?}");
        let fault = caught(negotiated, |d| {
            let last = d.taken.len();
            (0..last).for_each(|_| d.use_first(1, 0));
            d.answer(0, 0, 1, 2);
        });
        assert_eq!(fault, DeviceFault::IndexJump { by: 6, posted: 5 }, "{negotiated:?}");
    }
}

/// A used descriptor with the wrap counter of the other turn, or one flag only, is not used.
#[test]
fn flags_of_another_turn_are_not_believed() {
    for negotiated in combinations().filter(|n| n.packed()) {
        let memory = Memory::new();
        let (mut queue, device) = shaped(&memory, negotiated, 5);
        let AnyRing::Packed(ring) = &device.ring else { panic!("it is packed") };
        for flags in [0, PackedDesc::AVAIL, PackedDesc::USED] {
            ring.set_used_desc(0, PackedDesc { addr: 0, len: 1, id: 0, flags });
            with_queue!(&mut queue, queue => assert_eq!(queue.pending(128, |_| ()), Ok(0)));
        }
    }
}

/// The slot of the next buffer that is used.
fn next<F: DriverFormat, B>(queue: &mut DriverQueue<F, B>) -> Result<u16, DeviceFault> {
    queue.pending()?;
    match queue.take() {
        Some((slot, ..)) => Ok(slot),
        None => Err(queue.outcome().expect_err("a buffer is refused with a reason")),
    }
}

/// A free queue, too: whose chains have different lengths, so that a wrong id would lead it astray
/// in the ring.
#[test]
fn a_device_that_lies_to_a_free_queue_is_caught() {
    for negotiated in combinations() {
        for (lie, fault) in [
            (9, DeviceFault::NotPosted { id: 9 }),
            (u16::MAX, DeviceFault::BadId { id: u32::from(u16::MAX) }),
            (0, DeviceFault::NotPosted { id: 0 }),
        ] {
            let memory = Memory::new();
            let mut device = Device::new(&memory, negotiated);
            let mut queue = AnyDriverQueue::<u8>::new(memory.ring(negotiated), negotiated, memory.tables(negotiated));
            with_queue!(&mut queue, queue => {
                for n in 1..4 {
                    let vacant = queue.vacant(n as usize).unwrap();
                    queue.post(vacant, |_| (0..n).map(|i| Segment::read(0x1000 * i, 10)));
                }
                queue.publish();
                device.poll();
                device.use_first(1, 0);
                device.answer(lie.into(), 0, 1, 1);
                let mut outcome = next(queue);
                assert_eq!(outcome, Ok(0), "{negotiated:?}: the first was used well");
                outcome = next(queue);
                assert_eq!(outcome.err(), Some(fault), "{negotiated:?}");
            });
        }
    }
}

/// Notifications that are missed by a count that went around: more is published between two looks
/// than the ring holds.
#[test]
fn a_whole_turn_passes_every_event() {
    for negotiated in combinations().filter(|n| n.event_idx()) {
        let memory = Memory::new();
        let mut device = Device::new(&memory, negotiated);
        let mut queue = AnyDriverQueue::<u8>::new(memory.ring(negotiated), negotiated, None);
        device.want_kicks(true);
        // 2 x SIZE packed descriptors lead back to the same place; 65536 entries to the same index.
        let turns = if negotiated.packed() { 2 } else { 65536 / u32::from(SIZE) };
        with_queue!(&mut queue, queue => {
            for _ in 0..turns * u32::from(SIZE) {
                let vacant = queue.vacant(1).unwrap();
                queue.post(vacant, |_| [Segment::read(0x1000, 10)].into_iter());
                queue.publish();
                device.poll();
                device.use_first(1, 0);
                queue.pending().unwrap();
                queue.take().unwrap();
            }
            assert!(queue.should_notify(), "{negotiated:?}");
            assert!(!queue.should_notify(), "once");
        });
    }
}

/// A buffer of many descriptors that is used twice does not take the driver beyond what it has
/// posted.
#[test]
fn a_long_chain_that_is_used_twice() {
    for negotiated in combinations().filter(|n| !n.in_order()) {
        let memory = Memory::new();
        let mut device = Device::new(&memory, negotiated);
        let mut queue = AnyDriverQueue::<u8>::new(memory.ring(negotiated), negotiated, None);
        with_queue!(&mut queue, queue => {
            for n in [1, 5] {
                let vacant = queue.vacant(n as usize).unwrap();
                queue.post(vacant, |_| (0..n).map(|i| Segment::read(0x1000 * i, 10)));
            }
            queue.publish();
            device.poll();
            let long = device.taken[1].id;
            device.use_any(1, 0);
            device.answer(long.into(), 0, 1, 5);
            queue.pending().unwrap();
            let (slot, ..) = queue.take().unwrap();
            let fault = next(queue).unwrap_err();
            assert_eq!(fault, DeviceFault::NotPosted { id: slot }, "{negotiated:?}");
        });
    }
}

const LONG: u16 = 512;
const USED: u16 = 300;

/// Memory of a ring with many entries. `f` is called with the driver's ring and with the device's:
/// a function that uses all of the given slots, which each have a descriptor.
fn with_long_ring(negotiated: Negotiated, f: impl FnOnce(AnyRing, &dyn Fn(&[u16]))) {
    let bytes = SplitLayout::new(LONG).total.max(PackedLayout::new(LONG).total);
    let mut block = vec![0u64; bytes / 8 + 16];
    let base = block.as_mut_ptr().cast::<u8>();
    let base = base.wrapping_add(base.align_offset(SplitLayout::ALIGN));
    // SAFETY: the block is large enough and aligned, and outlives the rings.
    let ring = || unsafe {
        match negotiated.packed() {
            false => AnyRing::Split(SplitRing::from_layout(base, LONG)),
            true => AnyRing::Packed(PackedRing::from_layout(base, LONG)),
        }
    };
    let device = ring();
    f(ring(), &|slots| {
        let batch = [(0, slots[slots.len() - 1])];
        let single: Vec<_> = (0..).zip(slots.iter().copied()).collect();
        for &(at, slot) in if negotiated.in_order() { &batch[..] } else { &single } {
            match &device {
                AnyRing::Split(ring) => ring.set_used_entry(at, slot.into(), 0),
                AnyRing::Packed(ring) => {
                    let flags = Position::START.used();
                    ring.set_used_desc(at, PackedDesc { addr: 0, len: 0, id: slot, flags });
                }
            }
        }
        if let AnyRing::Split(ring) = &device {
            ring.set_used_idx(slots.len() as u16);
        }
    });
}

/// More used buffers than are read at a time come back in their order, also those of one batch.
#[test]
fn more_than_are_read_at_a_time() {
    for negotiated in combinations() {
        with_long_ring(negotiated, |ring, uses| {
            let mut queue = AnyDriverQueue::<u8>::new(ring, negotiated, None);
            let mut slots = Vec::new();
            with_queue!(&mut queue, queue => {
                for _ in 0..USED {
                    let vacant = queue.vacant(1).unwrap();
                    slots.push(vacant.slot());
                    queue.post(vacant, |_| [Segment::read(0x1000, 10)].into_iter());
                }
                queue.publish();
                uses(&slots);
                let mut taken = Vec::new();
                assert_eq!(queue.pending(), Ok(LOOK));
                while queue.pending().unwrap() > 0 {
                    (0..queue.pending().unwrap().min(100)).for_each(|_| taken.push(queue.take().unwrap().0));
                }
                assert_eq!((taken, queue.posted()), (slots, 0), "{negotiated:?}");
            });
        });
    }
}

/// The same for a shaped queue as [above](more_than_are_read_at_a_time). If it stops, all of them
/// are counted.
#[test]
fn more_than_are_read_at_a_time_of_a_shaped_queue() {
    for (negotiated, stops) in combinations().flat_map(|n| [(n, false), (n, true)]) {
        with_long_ring(negotiated, |ring, uses| {
            let mut queue = AnyShapedQueue::<u64>::new(ring, negotiated, &[100], None);
            with_queue!(&mut queue, queue => {
                let mut n = 0;
                while n < u64::from(USED) {
                    queue.refill(true, 64, &mut |buffer: &mut _, segments: &mut Segments<'_>| {
                        n += 1;
                        *buffer = n;
                        segments.set(0, n);
                        n <= u64::from(USED)
                    });
                }
                assert_eq!(queue.posted(), USED.into());
                uses(&(0..USED).collect::<Vec<_>>());
                if stops {
                    assert_eq!(queue.unread(), USED, "{negotiated:?}");
                    return;
                }
                let mut taken = Vec::new();
                while queue.pending(128, |_| ()).unwrap() > 0 {
                    let n = queue.pending(128, |_| ()).unwrap().min(100);
                    let first = queue.take(n);
                    (0..n).for_each(|i| taken.push(*queue.taken(first, i).1));
                }
                assert_eq!((taken, queue.posted()), ((1..=u64::from(USED)).collect(), 0), "{negotiated:?}");
            });
        });
    }
}
