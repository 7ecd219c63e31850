//! A queue of one format, as the driver's polls use it.

use std::collections::VecDeque;

use super::super::fault::DeviceFault;
use super::super::{Armed, Negotiated};
use super::format::DriverFormat;
use super::found::{BATCH, Found, LOOK};
use super::free::Free;
use super::shape::{Setup, Shape};
use super::tables::{Segment, Tables};

/// For buffers that are used in order: the slots that the device has, in the order in which they were made available.
struct Order {
    slots: VecDeque<u16>,
    /// The last buffer of a batch of which only a part was found yet, and its length.
    batch: Option<(u16, u32)>,
}

pub(super) struct Slot<B> {
    buffer: B,
    /// Whether the device has it.
    posted: bool,
    /// How many of the addresses, from the first on, may have changed since they were last written to the ring.
    changed: u16,
}

/// The addresses of the buffer that [`DriverQueue::refill`] is about to post.
pub(crate) struct Segments<'q> {
    /// Those of all slots.
    addrs: &'q mut [u64],
    /// The index of the first address of this slot.
    first: usize,
    changed: &'q mut u16,
}

impl Segments<'_> {
    /// Sets the address of segment `i`. Must be called for each segment whose address differs from when its slot was
    /// last filled.
    #[inline(always)]
    pub(crate) fn set(&mut self, i: usize, addr: u64) {
        self.addrs[self.first + i] = addr;
        *self.changed = (*self.changed).max(i as u16 + 1);
    }
}

/// See the [module](self).
pub(crate) struct DriverQueue<F, B> {
    format: F,
    setup: Setup,
    pub(super) slots: Box<[Slot<B>]>,
    free: Free,
    /// The bytes of each segment of a buffer of a shaped queue.
    lens: Box<[u32]>,
    /// The addresses of all segments of a shaped queue, slot by slot.
    addrs: Box<[u64]>,
    /// The bytes of a buffer of a shaped queue. In a free queue, whose lengths are not checked, the largest possible
    /// length.
    have: u32,
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
    /// A queue on `ring`, which is all zero, whose buffers all consist of writable segments of these lengths. It has a slot for
    /// each buffer that fits into the ring. Buffers of several segments are described in `tables`, if there are any, and then take one
    /// entry of the ring.
    pub(crate) fn shaped(ring: F::Ring, negotiated: Negotiated, lens: &[u32], tables: Option<Tables>) -> Self {
        let per_slot = if tables.is_some() { 1 } else { lens.len() as u16 };
        Self::made(ring, Setup { negotiated, per_slot }, lens, tables)
    }

    /// A queue on `ring`, which is all zero, whose buffers each have their own segments. Buffers of several are described in
    /// `tables`, if there are any.
    pub(crate) fn new(ring: F::Ring, negotiated: Negotiated, tables: Option<Tables>) -> Self {
        Self::made(ring, Setup { negotiated, per_slot: 0 }, &[], tables)
    }

    fn made(ring: F::Ring, setup: Setup, lens: &[u32], tables: Option<Tables>) -> Self {
        let size = F::entries(&ring);
        let count = size / setup.per_slot.max(1);
        let shaped = setup.per_slot > 0;
        // With in-order use, a driver of a split ring must use descriptors in the order of the table.
        let free = Free::new(count, shaped || setup.negotiated.in_order());
        let addrs: Box<[u64]> = vec![0; usize::from(count) * lens.len()].into();
        let shape = Shape { lens, addrs: &addrs };
        let format = F::new(ring, setup, shape, setup.tables(shape, tables));
        let have = if shaped { lens.iter().sum() } else { u32::MAX };
        let slot = |_| Slot { buffer: B::default(), posted: false, changed: 0 };
        let slots = (0..count).map(slot).collect();
        let order = || Order { slots: VecDeque::with_capacity(count.into()), batch: None };
        let order = setup.negotiated.in_order().then(order);
        let lens = lens.into();
        Self { format, setup, slots, free, lens, addrs, have, posted: 0, found: Found::new(), fault: None, order }
    }
}

impl<F: DriverFormat, B> DriverQueue<F, B> {
    /// Takes another ring, which is all zero: that of a new connection, or the old one after it was cleared. No buffer
    /// is posted there. Buffers stay in their slots, and the next [`refill`](Self::refill) describes those of a shaped
    /// queue to the device.
    pub(crate) fn replace(&mut self, ring: F::Ring, tables: Option<Tables>) {
        let shape = Shape { lens: &self.lens, addrs: &self.addrs };
        self.format = F::new(ring, self.setup, shape, self.setup.tables(shape, tables));
        for slot in &mut self.slots {
            (slot.posted, slot.changed) = (false, self.lens.len() as u16);
        }
        (self.posted, self.found, self.fault) = (0, Found::new(), None);
        if let Some(order) = &mut self.order {
            order.slots.clear();
            order.batch = None;
        }
        self.free.reset(self.slots.len() as u16);
    }

    /// Entries in the ring.
    pub(crate) fn size(&self) -> u16 {
        self.format.size()
    }

    /// Buffers that the device has.
    #[inline]
    pub(crate) fn posted(&self) -> usize {
        usize::from(self.posted)
    }

    /// The buffer in `slot`.
    #[inline(always)]
    pub(crate) fn buffer(&mut self, slot: u16) -> &mut B {
        &mut self.slots[usize::from(slot)].buffer
    }

    /// All buffers, and whether the device has them.
    pub(crate) fn slots(&mut self) -> impl Iterator<Item = (bool, &mut B)> {
        self.slots.iter_mut().map(|slot| (slot.posted, &mut slot.buffer))
    }

    /// Whether there are slots to [`refill`](Self::refill).
    #[inline(always)]
    pub(crate) fn has_free(&self) -> bool {
        self.free.len() > 0
    }

    /// Posts up to a batch of buffers of a shaped queue, in the slots that have been free for the longest time. `fill`
    /// is given what is in the slot and says where the segments are that have moved since the slot was last filled. If
    /// it has no memory it returns false, and the step ends. Returns how many buffers were posted; the device sees them
    /// after [`publish`](Self::publish).
    ///
    /// First all buffers are filled, then the ring is written. So the stores that wait until the device's core gives a
    /// cache line up are next to each other, and wait at the same time.
    ///
    /// If `fill` panics, no buffer of the batch is posted, and the next call continues with the contents of the slots.
    #[inline(always)]
    pub(crate) fn refill(&mut self, fill: impl FnMut(&mut B, &mut Segments<'_>) -> bool) -> usize {
        // A compiler sees the 1, and so makes loops over buffers that have no loops over segments in them.
        match self.lens.len() {
            1 => self.refill_segments(1, fill),
            n => self.refill_segments(n, fill),
        }
    }

    /// [`refill`](Self::refill) for buffers of `n` segments.
    #[inline(always)]
    fn refill_segments(&mut self, n: usize, mut fill: impl FnMut(&mut B, &mut Segments<'_>) -> bool) -> usize {
        let Self { format, slots, free, lens, addrs, order, .. } = self;
        let (slots, addrs) = (&mut **slots, &mut **addrs);
        let oldest = free.oldest(BATCH);
        let mut got = 0;
        for &id in oldest {
            let slot = &mut slots[usize::from(id)];
            let (first, changed) = (usize::from(id) * n, &mut slot.changed);
            if !fill(&mut slot.buffer, &mut Segments { addrs, first, changed }) {
                break;
            }
            got += 1;
        }
        let batch = &oldest[..got];
        let exposed = batch.iter().map(|&id| {
            let slot = &mut slots[usize::from(id)];
            slot.posted = true;
            (id, std::mem::take(&mut slot.changed))
        });
        format.expose(exposed, Shape { lens: &lens[..n], addrs });
        if let Some(order) = order {
            order.slots.extend(batch);
        }
        free.skip(got as u16);
        self.posted += got as u16;
        got
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

    /// The slot of a free queue that is posted next, if a buffer of so many segments can be posted now. The buffer is put into the
    /// slot before [`post`](Self::post).
    #[inline(always)]
    pub(crate) fn vacant(&self, segments: usize) -> Option<Vacant> {
        if self.fits(segments) { self.free.next().map(Vacant) } else { None }
    }

    /// Posts the buffer in the vacant slot. `segments` are its segments: at least one, and at most as many as there is
    /// room for. The device sees it after [`publish`](Self::publish).
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

    /// Lets the device see the posted buffers. A device that sleeps must also be [notified](Self::should_notify).
    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        self.format.publish();
    }

    /// Whether the device wants a notification for what was published since the last call: the caller then signals the ring's
    /// kick. To be called once a poll, before a thread waits for what was published: it executes a full fence, see
    /// [`event`](super::event).
    #[inline]
    pub(crate) fn should_notify(&mut self) -> bool {
        self.format.should_notify()
    }

    /// How many buffers the device has used and [`take`](Self::take) has not given back; at most [`LOOK`]. A fault is
    /// reported after the buffers before it were taken.
    #[inline(always)]
    pub(crate) fn pending(&mut self) -> Result<u16, DeviceFault> {
        self.pending_with(|_| ())
    }

    /// [`pending`](Self::pending), which calls `prefetch` with each buffer that was not pending before.
    #[inline(always)]
    pub(crate) fn pending_with(&mut self, prefetch: impl FnMut(&B)) -> Result<u16, DeviceFault> {
        self.look(prefetch);
        match self.fault {
            Some(fault) if self.found.len() == 0 => Err(fault),
            _ => Ok(self.found.len()),
        }
    }

    /// Reads used entries, and calls `prefetch` with each buffer that was found.
    #[inline(always)]
    fn look(&mut self, mut prefetch: impl FnMut(&B)) {
        if self.fault.is_some() {
            return;
        }
        let before = self.found.len();
        let Self { format, slots, found, .. } = self;
        let judged = match &self.order {
            None => format.look(self.posted - before, found, |slot| prefetch(&slots[usize::from(slot)].buffer)),
            Some(_) => {
                let judged = self.look_in_order();
                (before..self.found.len()).for_each(|i| prefetch(self.peek(i)));
                judged
            }
        };
        self.fault = judged.err();
    }

    /// The same for buffers that are used in order: a used entry stands for all buffers up to the one that it names.
    /// All of them but the named one were used completely.
    #[inline(never)]
    fn look_in_order(&mut self) -> Result<(), DeviceFault> {
        let Self { format, found, order: Some(order), posted, have, .. } = self else { return Ok(()) };
        let (mut judged, mut known) = (Ok(()), found.len());
        let mut adding = found.adding(LOOK);
        while adding.has_room() {
            let (last, len) = match order.batch {
                Some(batch) => batch,
                None => match Self::batch(format, order, *posted, known) {
                    Ok(Some(batch)) => batch,
                    Ok(None) => break,
                    Err(fault) => {
                        judged = Err(fault);
                        break;
                    }
                },
            };
            let Some(slot) = order.slots.pop_front() else { break };
            format.skip(slot);
            order.batch = (slot != last).then_some((last, len));
            adding.push(slot, if slot == last { len } else { *have });
            known += 1;
        }
        let at = adding.at;
        found.added(at);
        judged
    }

    /// The next batch, if there is one: its last buffer and that one's length. The device has `posted` buffers, of which `found` were
    /// found before.
    fn batch(format: &F, order: &Order, posted: u16, found: u16) -> Result<Option<(u16, u32)>, DeviceFault> {
        let Some((id, len, most)) = format.batch(posted - found)? else { return Ok(None) };
        DeviceFault::ahead(found + 1, posted)?;
        let last = format.slot(id)?;
        let named = order.slots.iter().take(most.into()).any(|&slot| slot == last);
        DeviceFault::posted(id as u16, named.then_some(Some((last, len))))
    }

    /// All buffers that the device has used and [`take`](Self::take) has not given back, for a queue that stops.
    pub(crate) fn unread(&mut self) -> u16 {
        self.look(|_| ());
        let posted = self.posted;
        // Buffers that do not fit are read into a separate list, and are not taken any more.
        let found = std::mem::replace(&mut self.found, Found::new());
        let (mut unread, mut last) = (found.len(), found.len());
        while last == LOOK {
            self.posted = posted - unread;
            self.look(|_| ());
            last = std::mem::replace(&mut self.found, Found::new()).len();
            unread += last;
        }
        (self.posted, self.found) = (posted, found);
        unread
    }

    /// The `i`th pending buffer, for prefetches.
    #[inline(always)]
    pub(crate) fn peek(&self, i: u16) -> &B {
        &self.slots[usize::from(self.found.get(i).0)].buffer
    }

    /// Takes the next [pending](Self::pending) buffer back: its slot, how many bytes the device has written to it, and
    /// the buffer. Slot and length were checked. The slot is then free. Returns `None` after a [fault](Self::outcome).
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Option<(u16, u32, &mut B)> {
        let (number, len) = self.found.pop();
        let slot = &mut self.slots[usize::from(number)];
        if !slot.posted {
            self.fault = DeviceFault::posted::<()>(self.format.id(number), None).err();
            return None;
        }
        slot.posted = false;
        self.posted -= 1;
        self.format.release(number, &mut self.free);
        match DeviceFault::length(len, self.have) {
            Ok(len) => Some((number, len, &mut slot.buffer)),
            Err(fault) => {
                self.fault = Some(fault);
                None
            }
        }
    }

    /// Records a fault that the caller has found in the contents of a buffer. A fault in the ring that was found before
    /// takes precedence.
    #[cold]
    pub(crate) fn refuse(&mut self, fault: DeviceFault) {
        self.fault.get_or_insert(fault);
    }

    /// The fault of the device, if one was found.
    pub(crate) fn outcome(&self) -> Result<(), DeviceFault> {
        self.fault.map_or(Ok(()), Err)
    }

    /// Asks the device for an interrupt at the next used buffer and looks at the ring once more. If there is work, the queue is
    /// disarmed again.
    pub(crate) fn arm(&mut self) -> Armed {
        if self.found.len() > 0 || self.fault.is_some() {
            return Armed::Work;
        }
        self.format.arm()
    }

    /// Asks the device for no interrupts: the driver polls.
    pub(crate) fn disarm(&mut self) {
        self.format.disarm();
    }
}
