//! The driver's end of a packed ring.
//!
//! A buffer is as many descriptors in a row as it has segments, or one that points to its table.
//! They are written to the ring's next places, which differ from the buffer's earlier ones. So the
//! queue writes its private copies of the addresses each time. The id is the slot.
//!
//! Descriptors of a batch are written at once except the first, which
//! [`publish`](DriverFormat::publish) writes: the device takes descriptors in order, and so sees
//! the batch when it sees the first one. So the device does not take a cache line away to which the
//! driver is still writing, and that store is the only one of a batch that releases.
//!
//! The device writes one used descriptor for each buffer, at the place of the buffer's first one,
//! and skips the others. Where buffers are used in order, one used descriptor can stand for a batch
//! of them, of which it names the last.

use super::super::event::full_fence;
use super::super::fault::DeviceFault;
use super::super::fours::count_by_fours;
use super::super::packed::{Cursor, UsedDesc};
use super::super::{
    Armed, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Event, PackedDesc, PackedRing, Position, passed_packed,
};
use super::format::{DriverFormat, Expected, NEXT_ID, UsedEntries, opaque};
use super::free::Free;
use super::shape::{Setup, Shape};
use super::tables::{Segment, Tables};

pub(crate) struct Packed {
    ring: PackedRing,
    size: u16,
    /// The place of the next descriptor to write.
    avail: Position,
    /// The place of the next used descriptor to look for.
    used: Position,
    /// The first descriptor of the batch that is not published yet, and its place.
    held: Option<(u16, PackedDesc)>,
    /// Descriptors made available since the last [`should_notify`](DriverFormat::should_notify),
    /// and the place then.
    fresh: u32,
    notified: Position,
    event_idx: bool,
    tables: Option<Tables>,
    names: Names,
    /// Descriptors of each buffer that the device has, in a free queue.
    counts: Box<[u16]>,
    /// Buffers that have several.
    chained: u16,
    /// Descriptors that are not in use, in a free queue.
    room: u16,
}

impl Packed {
    /// Writes the descriptor at `at`, or holds it back if it is the first of a batch.
    #[inline(always)]
    fn put(&mut self, at: Position, d: PackedDesc) {
        match self.held {
            None => self.held = Some((at.offset(), d)),
            Some(_) => self.ring.set_desc_behind(at.offset(), d),
        }
    }
}

fn kind(segment: Segment) -> u16 {
    if segment.writable { DESC_WRITE } else { 0 }
}

/// The word after the address in an entry of a table.
fn table_entry(_: u16, segment: Segment, _: bool) -> u64 {
    u64::from(segment.len) | u64::from(kind(segment)) << 48
}

/// The ids of buffers in the ring: their slots.
#[derive(Clone, Copy)]
struct Names {
    /// Descriptors of each slot of a shaped queue; 0 in a free one.
    per_slot: u16,
    slots: u16,
}

impl Names {
    #[inline(always)]
    fn slot(self, id: u32) -> Result<u16, DeviceFault> {
        DeviceFault::id(id, id, self.slots)
    }

    /// The descriptors of the buffer in `slot`. `counts` has those of a free queue, of the buffers
    /// that the device has.
    #[inline(always)]
    fn count(self, slot: u16, counts: &[u16]) -> Result<u16, DeviceFault> {
        match self.per_slot {
            0 => DeviceFault::posted(slot, Some(counts[usize::from(slot)]).filter(|&n| n > 0)),
            n => Ok(n),
        }
    }
}

/// The used descriptors that were not read.
pub(crate) struct Used<'r> {
    at: Cursor<'r>,
    found: u16,
    posted: u16,
}

impl UsedEntries for Used<'_> {
    type At = Position;

    #[inline(always)]
    fn left(&self) -> u16 {
        self.posted - self.found
    }

    #[inline(always)]
    fn entry(&self) -> Option<(u32, u32)> {
        self.at.used_desc().map(|d| (d.id.into(), d.len))
    }

    #[inline(always)]
    fn skip(&mut self, descriptors: u16) {
        self.at.advance(descriptors);
        self.found += 1;
    }

    #[inline(always)]
    fn skip_run(&mut self, n: u16) {
        self.at.advance(n);
        self.found += n;
    }

    #[inline(always)]
    fn check_end(&self) -> Result<(), DeviceFault> {
        DeviceFault::ahead(self.found + u16::from(self.at.used_desc().is_some()), self.posted).map(|_| ())
    }

    #[inline(always)]
    fn end(self) -> Position {
        self.at.position()
    }
}

impl DriverFormat for Packed {
    type Ring = PackedRing;
    type At = Position;
    type Used<'r> = Used<'r>;

    fn entries(ring: &PackedRing) -> u16 {
        ring.size()
    }

    fn new(ring: PackedRing, setup: Setup, shape: Shape<'_>, tables: Option<Tables>) -> Self {
        let size = ring.size();
        if let (true, Some(tables)) = (setup.per_slot > 0, &tables) {
            (0..size).for_each(|slot| _ = tables.write(slot, shape.segments(slot), table_entry));
        }
        let free = if setup.per_slot == 0 { usize::from(size) } else { 0 };
        let mut this = Self {
            size,
            ring,
            avail: Position::START,
            used: Position::START,
            held: None,
            fresh: 0,
            notified: Position::START,
            event_idx: setup.negotiated.event_idx(),
            tables,
            names: Names { per_slot: setup.per_slot, slots: size / setup.per_slot.max(1) },
            counts: vec![0; free].into(),
            chained: 0,
            room: size,
        };
        this.disarm();
        this
    }

    #[inline]
    fn size(&self) -> u16 {
        self.size
    }

    #[inline(always)]
    fn room(&self, free: &Free) -> usize {
        usize::from(self.room.min(free.len()))
    }

    #[inline(always)]
    fn takes(&self, segments: usize) -> Option<usize> {
        match &self.tables {
            None => Some(segments),
            Some(tables) => (segments <= usize::from(tables.per_slot.min(self.size))).then_some(1),
        }
    }

    /// Each address of a chain is written: the descriptors go to other places than before. In a
    /// table, only the addresses that have changed are written.
    #[inline(always)]
    fn expose(&mut self, slots: impl ExactSizeIterator<Item = (u16, u16)>, shape: Shape<'_>, _: bool) {
        let (mut at, mut held) = (self.ring.available_from(self.avail), self.held);
        if let Some(tables) = &self.tables {
            self.fresh += slots.len() as u32;
            for (slot, changed) in slots {
                let addrs = shape.addrs(slot);
                tables.set_addrs(slot, addrs, changed);
                let (addr, len) = tables.place(slot, addrs.len());
                let d = PackedDesc { addr, len, id: slot, flags: DESC_INDIRECT | at.flags() };
                match held {
                    None => held = Some((at.position().offset(), d)),
                    Some(_) => at.set_desc_behind(d),
                }
                at.advance(1);
            }
            (self.avail, self.held) = (at.position(), held);
            return;
        }
        self.fresh += (slots.len() * shape.lens.len()) as u32;
        for (slot, _) in slots {
            for (i, (&addr, &len)) in shape.addrs(slot).iter().zip(shape.lens).enumerate() {
                let d = PackedDesc { addr, len, id: slot, flags: shape.flags(i) | at.flags() };
                match held {
                    None => held = Some((at.position().offset(), d)),
                    Some(_) => at.set_desc_behind(d),
                }
                at.advance(1);
            }
        }
        self.avail = at.position();
        self.held = held;
    }

    /// Each descriptor is written, because it had the flags of the turn before.
    #[inline(always)]
    fn expose_run(&mut self, first: u16, addrs: &[u64], len: u32, _: u64) {
        debug_assert!(first == self.avail.offset() && self.held.is_none());
        let d = PackedDesc { addr: 0, len, id: first, flags: DESC_WRITE | self.avail.available() };
        let Some((&addr, rest)) = addrs.split_first() else { return };
        self.ring.set_descs_behind(first + 1, rest, d);
        self.held = Some((first, PackedDesc { addr, ..d }));
        self.fresh += addrs.len() as u32;
        self.avail = self.avail.step(addrs.len() as u16, self.size);
    }

    #[inline(always)]
    fn post(&mut self, slot: u16, mut segments: impl Iterator<Item = Segment>, free: &mut Free) {
        let Some(mut last) = segments.next() else { return };
        let mut following = segments.next();
        free.taken();
        let (mut at, mut count) = (self.avail, 1);
        if let (Some(tables), Some(second)) = (&self.tables, following) {
            let all = [last, second].into_iter().chain(segments);
            let (addr, len) = tables.write(slot, all, table_entry);
            self.put(at, PackedDesc { addr, len, id: slot, flags: DESC_INDIRECT | at.available() });
        } else {
            while let Some(segment) = following {
                let flags = kind(last) | DESC_NEXT | at.available();
                self.put(at, PackedDesc { addr: last.addr, len: last.len, id: slot, flags });
                at = at.step(1, self.size);
                last = segment;
                count += 1;
                following = segments.next();
            }
            let flags = kind(last) | at.available();
            self.put(at, PackedDesc { addr: last.addr, len: last.len, id: slot, flags });
        }
        self.avail = at.step(1, self.size);
        self.fresh += u32::from(count);
        self.room -= count;
        self.chained += u16::from(count > 1);
        self.counts[usize::from(slot)] = count;
    }

    #[inline(always)]
    fn run(&self) -> u16 {
        self.room.min(self.size - self.avail.offset())
    }

    #[inline(always)]
    fn post_run(&mut self, first: u16, segments: impl ExactSizeIterator<Item = (u64, u32)>) {
        let (n, slot) = (segments.len() as u16, usize::from(first));
        let (mut at, mut held) = (self.ring.available_from(self.avail), self.held);
        for (id, (addr, len)) in (first..).zip(segments) {
            let d = PackedDesc { addr, len, id, flags: at.flags() };
            match held {
                None => held = Some((at.position().offset(), d)),
                Some(_) => at.set_desc_behind(d),
            }
            at.advance(1);
        }
        (self.avail, self.held) = (at.position(), held);
        self.counts[slot..slot + usize::from(n)].fill(1);
        self.fresh += u32::from(n);
        self.room -= n;
    }

    #[inline(always)]
    fn publish(&mut self) {
        if let Some((at, d)) = self.held.take() {
            self.ring.set_desc(at, d);
        }
    }

    #[inline]
    fn should_notify(&mut self) -> bool {
        let fresh = std::mem::take(&mut self.fresh);
        if fresh == 0 {
            return false;
        }
        let old = std::mem::replace(&mut self.notified, self.avail);
        full_fence();
        let event = self.ring.device_event();
        match event.kind() {
            Event::DISABLE => false,
            // After a turn of the ring each place was passed.
            Event::AT if self.event_idx && fresh < u32::from(self.size) => {
                passed_packed(Position::from_bits(event.position), old, self.avail, self.size)
            }
            _ => true,
        }
    }

    #[inline(always)]
    fn used(&self, found: u16, posted: u16) -> Result<Used<'_>, DeviceFault> {
        Ok(Used { at: self.ring.used_from(self.used), found, posted })
    }

    #[inline(always)]
    fn read_to(&mut self, at: Position) {
        self.used = at;
    }

    #[inline(always)]
    fn read_run<B>(&self, expected: Expected, buffers: &mut [B], mut seen: impl FnMut(&mut B, u32)) -> (u16, bool) {
        debug_assert_eq!(expected.first, self.used_place());
        let n = buffers.len().min(expected.posted.into());
        let descs = self.ring.used_words(self.used, n);
        let turn = u64::from(self.used.used()) << 48;
        let (mut next, span) = (turn | expected.word(expected.first.into()), u64::from(expected.span));
        let mut other = false;
        let accepted = count_by_fours(buffers, descs, |buffer, desc| {
            let word = desc.read() & UsedDesc::MASK;
            let more = word.wrapping_sub(next);
            if more > span {
                other = word & UsedDesc::TURN == turn;
                return false;
            }
            seen(buffer, more as u32);
            next = opaque(next + NEXT_ID);
            true
        });
        (accepted as u16, other)
    }

    #[inline(always)]
    fn used_ids(&self, posted: u16, most: u16) -> impl Iterator<Item = u32> {
        let turn = u64::from(self.used.used()) << 48;
        let descs = self.ring.used_words(self.used, posted.min(most).into()).iter();
        let used = descs.map(UsedDesc::read).take_while(move |word| word & UsedDesc::TURN == turn);
        used.map(|word| u32::from((word >> 32) as u16))
    }

    #[inline(always)]
    fn has_used(&self) -> bool {
        self.ring.used_from(self.used).used_desc().is_some()
    }

    #[inline(always)]
    fn used_place(&self) -> u16 {
        self.used.offset()
    }

    #[inline(always)]
    fn is_single(&self) -> bool {
        self.chained == 0
    }

    #[inline(always)]
    fn consume(&mut self, n: u16) {
        self.used = self.used.step(n, self.size);
    }

    #[inline(always)]
    fn count(&self, slot: u16) -> Result<u16, DeviceFault> {
        self.names.count(slot, &self.counts)
    }

    #[inline(always)]
    fn slot(&self, id: u32) -> Result<u16, DeviceFault> {
        self.names.slot(id)
    }

    #[inline(always)]
    fn id(&self, slot: u16) -> u16 {
        slot
    }

    #[inline(always)]
    fn release(&mut self, slot: u16, free: &mut Free) {
        free.push(slot);
        let count = std::mem::take(&mut self.counts[usize::from(slot)]);
        self.room += count;
        self.chained -= u16::from(count > 1);
    }

    #[inline(always)]
    fn release_run(&mut self, first: u16, n: u16) {
        self.counts[usize::from(first)..][..usize::from(n)].fill(0);
        self.room += n;
    }

    fn arm(&mut self) -> Armed {
        let flags = if self.event_idx { Event::AT } else { Event::ENABLE };
        self.ring.set_driver_event(Event { position: self.used.bits(), flags });
        full_fence();
        if !self.has_used() {
            return Armed::Waits;
        }
        self.disarm();
        Armed::Work
    }

    fn disarm(&mut self) {
        self.ring.set_driver_event(Event { position: 0, flags: Event::DISABLE });
    }
}
