//! A queue of one format, as the driver's polls use it.

use std::collections::VecDeque;

use super::super::fault::DeviceFault;
use super::super::{Armed, Negotiated};
use super::any::RingEnd;
use super::format::{DriverFormat, UsedEntries};
use super::found::{Found, LOOK};
use super::free::Free;
use super::shape::{Setup, Shape};
use super::tables::{Segment, Tables};

/// For buffers that are used in order: the slots that the device has, in the order in which they
/// were made available.
struct Order {
    slots: VecDeque<u16>,
    /// The last buffer of a batch of which only a part was found yet.
    batch: Option<u16>,
}

struct Slot<B> {
    buffer: B,
    /// Whether the device has it.
    posted: bool,
}

/// A queue whose buffers each have their own segments: see the [module](super).
pub(crate) struct DriverQueue<F, B> {
    format: F,
    setup: Setup,
    slots: Box<[Slot<B>]>,
    free: Free,
    /// Buffers that the device has.
    posted: u16,
    /// Those of them that it has used, as far as the ring was read.
    found: Found,
    /// The fault that was found after them.
    fault: Option<DeviceFault>,
    /// Set only if buffers are used in order.
    order: Option<Order>,
}

/// A slot that is taken next by [`post`](DriverQueue::post), if nothing else is posted before.
pub(crate) struct Vacant(u16);

impl Vacant {
    /// The slot.
    #[inline(always)]
    pub(crate) fn slot(&self) -> u16 {
        self.0
    }
}

impl<F: DriverFormat, B: Default> DriverQueue<F, B> {
    /// A queue on `ring`, which is all zero, whose buffers each have their own segments. Buffers of
    /// several are described in `tables`, if there are any.
    pub(crate) fn new(ring: F::Ring, negotiated: Negotiated, tables: Option<Tables>) -> Self {
        let setup = Setup { negotiated, per_slot: 0 };
        let count = F::entries(&ring);
        // With in-order use, a driver of a split ring must use descriptors in the order of the
        // table.
        let free = Free::new(count, negotiated.in_order());
        let format = F::new(ring, setup, Shape::NONE, tables);
        let slots = (0..count).map(|_| Slot { buffer: B::default(), posted: false }).collect();
        let order = || Order { slots: VecDeque::with_capacity(count.into()), batch: None };
        let order = negotiated.in_order().then(order);
        Self { format, setup, slots, free, posted: 0, found: Found::new(), fault: None, order }
    }
}

impl<F: DriverFormat, B> RingEnd for DriverQueue<F, B> {
    type Words = F::Ring;

    fn replace(&mut self, ring: F::Ring, tables: Option<Tables>) {
        self.format = F::new(ring, self.setup, Shape::NONE, tables);
        self.slots.iter_mut().for_each(|slot| slot.posted = false);
        (self.posted, self.found, self.fault) = (0, Found::new(), None);
        if let Some(order) = &mut self.order {
            order.slots.clear();
            order.batch = None;
        }
        self.free.reset(self.slots.len() as u16);
    }

    #[inline]
    fn posted(&self) -> usize {
        usize::from(self.posted)
    }

    #[inline]
    fn should_notify(&mut self) -> bool {
        self.format.should_notify()
    }

    fn arm(&mut self) -> Armed {
        let batch = self.order.as_ref().is_some_and(|order| order.batch.is_some());
        if batch || self.found.len() > 0 || self.fault.is_some() {
            return Armed::Work;
        }
        self.format.arm()
    }

    fn disarm(&mut self) {
        self.format.disarm();
    }
}

impl<F: DriverFormat, B> DriverQueue<F, B> {
    /// Entries in the ring.
    pub(crate) fn size(&self) -> u16 {
        self.format.size()
    }

    /// The buffer in `slot`.
    #[inline(always)]
    pub(crate) fn buffer(&mut self, slot: u16) -> &mut B {
        &mut self.slots[usize::from(slot)].buffer
    }

    /// The buffers in all slots.
    pub(crate) fn buffers(&mut self) -> impl Iterator<Item = &mut B> {
        self.slots.iter_mut().map(|slot| &mut slot.buffer)
    }

    /// Whether a buffer of so many segments can be posted now.
    #[inline(always)]
    pub(crate) fn fits(&self, segments: usize) -> bool {
        self.format.takes(segments).is_some_and(|n| n <= self.format.room(&self.free))
    }

    /// Whether a buffer of so many segments can be posted at any time.
    pub(crate) fn ever_fits(&self, segments: usize) -> bool {
        self.format.takes(segments).is_some_and(|n| n <= usize::from(self.size()))
    }

    /// The slot of a free queue that is posted next, if a buffer of so many segments can be posted
    /// now. The buffer is put into the slot before [`post`](Self::post).
    #[inline(always)]
    pub(crate) fn vacant(&self, segments: usize) -> Option<Vacant> {
        if self.fits(segments) { self.free.next().map(Vacant) } else { None }
    }

    /// Posts the buffer in the vacant slot. `segments` are its segments: at least one, and at most
    /// as many as there is room for. The device sees it after [`publish`](Self::publish).
    #[inline(always)]
    pub(crate) fn post<'q, I: Iterator<Item = Segment>>(
        &'q mut self,
        Vacant(slot): Vacant,
        segments: impl FnOnce(&'q B) -> I,
    ) {
        let at = &mut self.slots[usize::from(slot)];
        at.posted = true;
        self.posted += 1;
        self.format.post(slot, segments(&at.buffer), &mut self.free);
        if let Some(order) = &mut self.order {
            order.slots.push_back(slot);
        }
    }

    /// Lets the device see the posted buffers. A device that sleeps must also be
    /// [notified](Self::should_notify).
    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        self.format.publish();
    }

    /// How many buffers the device has used and [`take`](Self::take) has not given back; at most
    /// [`LOOK`]. A fault is reported after the buffers before it were taken.
    #[inline(always)]
    pub(crate) fn pending(&mut self) -> Result<u16, DeviceFault> {
        if self.fault.is_none() {
            self.fault = if self.order.is_none() { self.look() } else { self.look_in_order() }.err();
        }
        match self.fault {
            Some(fault) if self.found.len() == 0 => Err(fault),
            _ => Ok(self.found.len()),
        }
    }

    /// Reads used entries.
    #[inline(always)]
    fn look(&mut self) -> Result<(), DeviceFault> {
        let Self { format, found, posted, .. } = self;
        let mut used = format.used(found.len(), *posted)?;
        let mut adding = found.adding(LOOK);
        let judged = loop {
            if !adding.has_room() {
                break Ok(());
            }
            match Self::entry(format, &used) {
                Ok(Some((slot, count))) => {
                    used.skip(count);
                    adding.push(slot);
                }
                other => break other.map(|_| ()),
            }
        };
        let (end, behind) = (used.end(), adding.at);
        found.added(behind);
        format.read_to(end);
        judged
    }

    /// The next used entry: its slot, and how many descriptors that has.
    #[inline(always)]
    fn entry(format: &F, used: &F::Used<'_>) -> Result<Option<(u16, u16)>, DeviceFault> {
        if used.left() == 0 {
            return used.check_end().map(|()| None);
        }
        let Some((id, _)) = used.entry() else { return Ok(None) };
        let slot = format.slot(id)?;
        Ok(Some((slot, format.count(slot)?)))
    }

    /// The same for buffers that are used in order: a used entry stands for all buffers up to the
    /// one that it names.
    #[inline(never)]
    fn look_in_order(&mut self) -> Result<(), DeviceFault> {
        let Self { format, found, order: Some(order), posted, .. } = self else { return Ok(()) };
        let mut used = format.used(found.len(), *posted)?;
        let mut adding = found.adding(LOOK);
        let judged = loop {
            if !adding.has_room() {
                break Ok(());
            }
            let last = match order.batch {
                Some(batch) => batch,
                None => match Self::batch(format, &used, order) {
                    Ok(Some(batch)) => batch,
                    other => break other.map(|_| ()),
                },
            };
            let Some(slot) = order.slots.pop_front() else { break Ok(()) };
            used.skip(format.count(slot).unwrap_or(0));
            order.batch = (slot != last).then_some(last);
            adding.push(slot);
        };
        let (end, behind) = (used.end(), adding.at);
        found.added(behind);
        format.read_to(end);
        judged
    }

    /// The last buffer of the next batch, if there is one.
    fn batch(format: &F, used: &F::Used<'_>, order: &Order) -> Result<Option<u16>, DeviceFault> {
        if used.left() == 0 {
            return used.check_end().map(|()| None);
        }
        let Some((id, _)) = used.entry() else { return Ok(None) };
        let last = format.slot(id)?;
        let named = order.slots.iter().take(used.left().into()).any(|&slot| slot == last);
        DeviceFault::posted(id as u16, named.then_some(Some(last)))
    }

    /// The `i`th pending buffer.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn peek(&self, i: u16) -> &B {
        &self.slots[usize::from(self.found.get(i))].buffer
    }

    /// Takes the next [pending](Self::pending) buffer back: its slot and the buffer. The slot was
    /// checked, and is then free. Returns `None` after a [fault](Self::outcome).
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Option<(u16, &mut B)> {
        let number = self.found.pop();
        let slot = &mut self.slots[usize::from(number)];
        if !slot.posted {
            self.fault = DeviceFault::posted::<()>(self.format.id(number), None).err();
            return None;
        }
        slot.posted = false;
        self.posted -= 1;
        self.format.release(number, &mut self.free);
        Some((number, &mut slot.buffer))
    }

    /// The fault of the device, if one was found.
    pub(crate) fn outcome(&self) -> Result<(), DeviceFault> {
        self.fault.map_or(Ok(()), Err)
    }
}
