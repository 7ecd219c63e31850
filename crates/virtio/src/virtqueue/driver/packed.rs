//! The driver's end of a packed ring.
//!
//! A buffer is as many descriptors in a row as it has segments, or one that points to its table. They go to the ring's next
//! places, wherever the buffer was before, so the queue's private copies of addresses are written out each time. The id is the
//! slot.
//!
//! Descriptors of a batch are written at once except the first, which [`publish`](DriverFormat::publish) writes: the device takes descriptors in
//! order, and so sees the batch when it sees the first one. The device does not take a cache line away that the driver is
//! about to write more to.
//!
//! The device writes one used descriptor for each buffer, at the place of the buffer's first one, and skips the others. Where
//! buffers are used in order, one used descriptor can stand for a batch of them, of which it names the last.

use super::super::event::full_fence;
use super::super::fault::DeviceFault;
use super::super::{
    Armed, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Event, PackedDesc, PackedRing, Position, passed_packed,
};
use super::{DriverFormat, Free, Segment, Setup, Shape, Tables};

pub(crate) struct Packed {
    ring: PackedRing,
    size: u16,
    /// The place of the next descriptor to write.
    avail: Position,
    /// The place of the next used descriptor to look for.
    used: Position,
    /// Descriptors between the two: the device has them, or has used them unseen.
    unseen: u16,
    /// The first descriptor of the batch that is not published yet, and its place.
    held: Option<(u16, PackedDesc)>,
    /// Descriptors made available since the last [`should_notify`](DriverFormat::should_notify), and the place then.
    fresh: u32,
    notified: Position,
    event_idx: bool,
    tables: Option<Tables>,
    /// Descriptors of each slot of a shaped queue; 0 in a free one.
    per_slot: u16,
    /// Descriptors of each buffer that the device has, in a free queue.
    counts: Box<[u16]>,
    /// Descriptors that are not in use, in a free queue.
    room: u16,
    /// Used descriptors that were read and not consumed: id and length.
    found: Found,
    /// Buffers that they stand for.
    ready: u16,
    /// What the device did wrong after them.
    fault: Option<DeviceFault>,
    /// The slots that the device has, where buffers are used in order.
    order: Option<Order>,
}

/// Used descriptors, oldest first.
struct Found {
    entries: Box<[(u16, u32)]>,
    head: u16,
    len: u16,
}

impl Found {
    #[inline(always)]
    fn get(&self, i: u16) -> Option<(u16, u32)> {
        (i < self.len).then(|| self.entries[usize::from(self.head.wrapping_add(i)) & (self.entries.len() - 1)])
    }

    #[inline(always)]
    fn push(&mut self, used: (u16, u32)) {
        let at = usize::from(self.head.wrapping_add(self.len)) & (self.entries.len() - 1);
        self.entries[at] = used;
        self.len += 1;
    }

    #[inline(always)]
    fn pop(&mut self) {
        self.head = self.head.wrapping_add(1);
        self.len -= 1;
    }
}

/// Slots in the order in which they were made available. Positions count up, modulo 2^16.
struct Order {
    slots: Box<[u16]>,
    /// Behind the last slot that was made available.
    end: u16,
    /// Behind the last slot that a used descriptor stands for.
    seen: u16,
    /// The next slot to take.
    next: u16,
}

impl Order {
    #[inline]
    fn at(&self, position: u16) -> u16 {
        self.slots[usize::from(position) & (self.slots.len() - 1)]
    }

    fn push(&mut self, slot: u16) {
        let at = usize::from(self.end) & (self.slots.len() - 1);
        self.slots[at] = slot;
        self.end = self.end.wrapping_add(1);
    }
}

impl Packed {
    /// Writes the descriptor at the next place, or holds it back if it is the first of a batch.
    #[inline(always)]
    fn put(&mut self, d: PackedDesc) {
        let at = self.avail.offset();
        match self.held {
            None => self.held = Some((at, d)),
            Some(_) => self.ring.set_desc(at, d),
        }
        self.avail = self.avail.step(1, self.size);
        self.unseen += 1;
        self.fresh += 1;
    }

    /// A used descriptor names buffer `id`: how many buffers and descriptors it stands for.
    #[inline(always)]
    fn stands_for(&mut self, id: u16) -> Result<(u16, u16), DeviceFault> {
        match &self.order {
            None if self.per_slot > 0 => Ok((1, self.per_slot)),
            None => Ok((1, self.count(id)?)),
            Some(_) => self.batch(id),
        }
    }

    /// The descriptors of buffer `id`, which the device has.
    #[inline(always)]
    fn count(&self, id: u16) -> Result<u16, DeviceFault> {
        if self.per_slot > 0 {
            return Ok(self.per_slot);
        }
        let slot = DeviceFault::id(id.into(), self.counts.len())?;
        // A buffer that the device claims to have used twice has fewer descriptors left than it had.
        let count = self.counts[usize::from(slot)];
        DeviceFault::posted(id, Some(count).filter(|n| (1..=self.unseen).contains(n)))
    }

    /// The buffers from the next one to `id`, where buffers are used in order.
    #[inline(never)]
    fn batch(&mut self, id: u16) -> Result<(u16, u16), DeviceFault> {
        let mut descriptors = 0;
        if let Some(order) = &self.order {
            for n in 0..order.end.wrapping_sub(order.seen) {
                let slot = order.at(order.seen.wrapping_add(n));
                descriptors += self.count(slot)?;
                if slot == id {
                    if let Some(order) = &mut self.order {
                        order.seen = order.seen.wrapping_add(n + 1);
                    }
                    return Ok((n + 1, descriptors));
                }
            }
        }
        let slots = self.size / self.per_slot.max(1);
        Err(DeviceFault::id(id.into(), slots.into()).map_or_else(|bad| bad, |id| DeviceFault::NotPosted { id }))
    }

    /// Reads used descriptors until `most` are at hand.
    #[inline(always)]
    fn look(&mut self, most: usize) {
        while usize::from(self.found.len) < most.min(self.found.entries.len()) && self.fault.is_none() {
            let d = self.ring.used_desc(self.used.offset());
            if !d.is_used(self.used) {
                break;
            }
            if self.unseen == 0 {
                self.fault = DeviceFault::ahead(self.ready + 1, self.ready).err();
                break;
            }
            match self.stands_for(d.id) {
                Ok((buffers, descriptors)) => {
                    self.found.push((d.id, d.len));
                    self.ready += buffers;
                    self.unseen -= descriptors;
                    self.used = self.used.step(descriptors, self.size);
                }
                Err(fault) => self.fault = Some(fault),
            }
        }
    }
}

impl DriverFormat for Packed {
    type Ring = PackedRing;

    fn new(ring: PackedRing, setup: Setup, _: &Shape, tables: Option<Tables>) -> Self {
        let size = ring.size();
        let places = usize::from(size).next_power_of_two();
        let free = if setup.per_slot == 0 { usize::from(size) } else { 0 };
        let order = Order { slots: vec![0; places].into(), end: 0, seen: 0, next: 0 };
        let mut this = Self {
            size,
            ring,
            avail: Position::START,
            used: Position::START,
            unseen: 0,
            held: None,
            fresh: 0,
            notified: Position::START,
            event_idx: setup.negotiated.event_idx(),
            tables,
            per_slot: setup.per_slot,
            counts: vec![0; free].into(),
            room: size,
            found: Found { entries: vec![(0, 0); places].into(), head: 0, len: 0 },
            ready: 0,
            fault: None,
            order: setup.negotiated.in_order().then_some(order),
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
        usize::from(self.room.min(free.len))
    }

    #[inline(always)]
    fn takes(&self, segments: usize) -> Option<usize> {
        match &self.tables {
            None => Some(segments),
            Some(tables) => (segments <= usize::from(tables.per_slot.min(self.size))).then_some(1),
        }
    }

    #[inline(always)]
    fn point(&mut self, _: u16, _: &Shape) {}

    #[inline(always)]
    fn expose(&mut self, slots: &[u16], shape: &Shape) {
        for &slot in slots {
            for (i, (&addr, &len)) in shape.addrs(slot).iter().zip(&shape.lens).enumerate() {
                self.put(PackedDesc { addr, len, id: slot, flags: shape.flags(i) | self.avail.available() });
            }
            if let Some(order) = &mut self.order {
                order.push(slot);
            }
        }
    }

    #[inline(always)]
    fn post(&mut self, mut segments: impl Iterator<Item = Segment>, free: &mut Free) -> Option<u16> {
        let mut at = segments.next()?;
        let mut following = segments.next();
        let slot = free.pop()?;
        let kind = |segment: Segment| if segment.writable { DESC_WRITE } else { 0 };
        let mut count = 1;
        if let (Some(tables), Some(second)) = (&self.tables, following) {
            let all = [at, second].into_iter().chain(segments);
            let (addr, len) =
                tables.write(slot, all, |_, segment, _| u64::from(segment.len) | u64::from(kind(segment)) << 48);
            self.put(PackedDesc { addr, len, id: slot, flags: DESC_INDIRECT | self.avail.available() });
        } else {
            while let Some(segment) = following {
                let flags = kind(at) | DESC_NEXT | self.avail.available();
                self.put(PackedDesc { addr: at.addr, len: at.len, id: slot, flags });
                at = segment;
                count += 1;
                following = segments.next();
            }
            let flags = kind(at) | self.avail.available();
            self.put(PackedDesc { addr: at.addr, len: at.len, id: slot, flags });
        }
        self.room -= count;
        self.counts[usize::from(slot)] = count;
        if let Some(order) = &mut self.order {
            order.push(slot);
        }
        Some(slot)
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
    fn pending(&mut self, most: usize, _: u16) -> Result<u16, DeviceFault> {
        self.look(most);
        match self.fault {
            Some(fault) if self.ready == 0 => Err(fault),
            _ => Ok(self.ready),
        }
    }

    #[inline(always)]
    fn peek(&self, i: u16) -> Option<u32> {
        match &self.order {
            None => self.found.get(i).map(|(id, _)| id.into()),
            Some(order) => Some(order.at(order.next.wrapping_add(i)).into()),
        }
    }

    #[inline(always)]
    fn slot(&self, id: u32) -> Option<u32> {
        Some(id)
    }

    #[inline(always)]
    fn front(&mut self, have: u32) -> Result<(u32, u32), DeviceFault> {
        let Some((id, len)) = self.found.get(0) else {
            return Err(self.fault.unwrap_or(DeviceFault::IndexJump { by: 0, posted: 0 }));
        };
        if let Some(order) = &self.order {
            let slot = order.at(order.next);
            if slot != id {
                return Ok((u32::from(slot), have));
            }
        }
        Ok((u32::from(id), len))
    }

    #[inline(always)]
    fn consume(&mut self, slot: u16, free: &mut Free) {
        match &mut self.order {
            None => self.found.pop(),
            Some(order) => {
                order.next = order.next.wrapping_add(1);
                if self.found.get(0).is_some_and(|(id, _)| id == slot) {
                    self.found.pop();
                }
            }
        }
        self.ready -= 1;
        free.push(slot);
        if self.per_slot == 0 {
            self.room += std::mem::take(&mut self.counts[usize::from(slot)]);
        }
    }

    fn arm(&mut self) -> Armed {
        let flags = if self.event_idx { Event::AT } else { Event::ENABLE };
        self.ring.set_driver_event(Event { position: self.used.bits(), flags });
        full_fence();
        if self.ready == 0 && !self.ring.used_desc(self.used.offset()).is_used(self.used) {
            return Armed::Waits;
        }
        self.disarm();
        Armed::Work
    }

    fn disarm(&mut self) {
        self.ring.set_driver_event(Event { position: 0, flags: Event::DISABLE });
    }
}
