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
pub(super) struct Order {
    pub(super) slots: VecDeque<u16>,
    /// How many of them, from the first on, are of a batch whose used entry was read.
    pub(super) batch: u16,
}

impl Order {
    /// How many buffers, from the `at`th on, the next used entry stands for, if there is one.
    #[inline(always)]
    pub(super) fn next_batch<F: DriverFormat>(
        &self,
        format: &F,
        used: &F::Used<'_>,
        at: usize,
    ) -> Result<Option<u16>, DeviceFault> {
        if used.left() == 0 {
            return used.check_end().map(|()| None);
        }
        let Some((id, _)) = used.entry() else { return Ok(None) };
        let last = format.slot(id)?;
        // Usually slots are posted in the order of their numbers. A slot is in the list once.
        let left = usize::from(used.left());
        let likely = self.slots.get(at).map(|first| usize::from(last.wrapping_sub(*first)));
        let place = likely.filter(|n| *n < left && self.slots.get(at + n) == Some(&last));
        let place = place.or_else(|| self.slots.iter().skip(at).take(left).position(|slot| *slot == last));
        let buffers = place.map(|n| n as u16 + 1);
        DeviceFault::posted(id as u16, buffers.map(Some))
    }
}

/// A queue whose buffers each have their own segments: see the [module](super).
pub(crate) struct DriverQueue<F, B> {
    pub(super) format: F,
    setup: Setup,
    /// The buffer of each slot.
    pub(super) buffers: Box<[B]>,
    /// Whether the device has it.
    pub(super) is_posted: Box<[bool]>,
    pub(super) free: Free,
    /// Buffers that the device has.
    pub(super) posted: u16,
    /// Those of them that it has used, as far as the ring was read.
    pub(super) found: Found,
    /// The fault that was found after them.
    pub(super) fault: Option<DeviceFault>,
    /// Set only if buffers are used in order.
    pub(super) order: Option<Order>,
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
        let format = F::new(ring, setup, Shape::NONE, tables);
        let order = || Order { slots: VecDeque::with_capacity(count.into()), batch: 0 };
        Self {
            format,
            setup,
            buffers: (0..count).map(|_| B::default()).collect(),
            is_posted: vec![false; usize::from(count)].into(),
            free: Free::new(count),
            posted: 0,
            found: Found::new(),
            fault: None,
            order: negotiated.in_order().then(order),
        }
    }
}

impl<F: DriverFormat, B> RingEnd for DriverQueue<F, B> {
    type Words = F::Ring;

    fn replace(&mut self, ring: F::Ring, tables: Option<Tables>) {
        self.format = F::new(ring, self.setup, Shape::NONE, tables);
        self.is_posted.fill(false);
        (self.posted, self.found, self.fault) = (0, Found::new(), None);
        if let Some(order) = &mut self.order {
            order.slots.clear();
            order.batch = 0;
        }
        self.free.reset(self.buffers.len() as u16);
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
        let batch = self.order.as_ref().is_some_and(|order| order.batch > 0);
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
        &mut self.buffers[usize::from(slot)]
    }

    /// The buffers in all slots.
    pub(crate) fn buffers(&mut self) -> impl Iterator<Item = &mut B> {
        self.buffers.iter_mut()
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
        let at = usize::from(slot);
        self.is_posted[at] = true;
        self.posted += 1;
        self.format.post(slot, segments(&self.buffers[at]), &mut self.free);
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

    /// Whether there is nothing for [`take_run`](Self::take_run) and [`pending`](Self::pending): no
    /// buffer that was read from the ring and not taken, no used entry behind it, and no fault.
    #[inline(always)]
    pub(crate) fn is_read(&self) -> bool {
        let in_batch = self.order.as_ref().is_some_and(|order| order.batch > 0);
        self.found.len() == 0 && self.fault.is_none() && !in_batch && !self.format.has_used()
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
            if order.batch == 0 {
                order.batch = match order.next_batch(format, &used, 0) {
                    Ok(Some(buffers)) => buffers,
                    other => break other.map(|_| ()),
                };
            }
            let Some(slot) = order.slots.pop_front() else { break Ok(()) };
            used.skip(format.count(slot).unwrap_or(0));
            order.batch -= 1;
            adding.push(slot);
        };
        let (end, behind) = (used.end(), adding.at);
        found.added(behind);
        format.read_to(end);
        judged
    }

    /// The `i`th pending buffer.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn peek(&self, i: u16) -> &B {
        &self.buffers[usize::from(self.found.get(i))]
    }

    /// Takes the next [pending](Self::pending) buffer back: its slot and the buffer. The slot was
    /// checked, and is then free. Returns `None` after a [fault](Self::outcome).
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Option<(u16, &mut B)> {
        let number = self.found.pop();
        let at = usize::from(number);
        if !self.is_posted[at] {
            self.fault = DeviceFault::posted::<()>(self.format.id(number), None).err();
            return None;
        }
        self.is_posted[at] = false;
        self.posted -= 1;
        self.format.release(number, &mut self.free);
        Some((number, &mut self.buffers[at]))
    }

    /// The fault of the device, if one was found.
    pub(crate) fn outcome(&self) -> Result<(), DeviceFault> {
        self.fault.map_or(Ok(()), Err)
    }
}
