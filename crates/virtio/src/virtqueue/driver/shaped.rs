//! A queue whose buffers all consist of the same writable segments, for receiving.
//!
//! The slots are a ring of their own, in the order in which the driver posts them:
//!
//! ```text
//!     taken          read               posted              taken
//!   ──┴──────────────┴──────────────────┴───────────────────┴──
//!       found: used,   the device has     free: filled and
//!       read, checked  them               posted in this order
//! ```
//!
//! A device usually uses buffers in the order in which they were posted. A used entry is then the
//! next slot's, which is one comparison. If it is another slot's, the two change places, if the
//! device has that slot. So what is between two of the three places is always true of all slots
//! there: no slot needs a flag, no used buffer is written to a list, and no list of free slots
//! exists.
//!
//! If buffers must be used in order, an entry stands for all slots up to the one that it names.

use super::super::fault::DeviceFault;
use super::super::{Armed, Negotiated};
use super::any::RingEnd;
use super::format::{DriverFormat, Expected, UsedEntries};
use super::shape::{Setup, Shape};
use super::tables::Tables;
use std::ops::ControlFlow;

/// The most buffers that one [`refill`](ShapedQueue::refill) step posts.
pub(crate) const BATCH: usize = 64;
/// Used buffers that are read from the ring at a time. This is more than a batch and the longest
/// frame, so that a frame that begins in a batch is read completely.
pub(crate) const LOOK: u16 = 2 * BATCH as u16;

struct Slot {
    /// Bytes that the device claims to have written, if it has used the buffer.
    len: u32,
    /// The number of the slot.
    number: u16,
    /// How many of the addresses, from the first on, may have changed since they were last written
    /// to the ring.
    changed: u16,
}

/// What fills a slot, see [`ShapedQueue::refill`]. It is a trait, because a compiler can be told to
/// inline a method and not a closure.
pub(crate) trait Fill<B> {
    /// Fills `buffer`, and sets the addresses that have changed. Returns false if there is no
    /// memory.
    fn fill(&mut self, buffer: &mut B, segments: &mut Segments<'_>) -> bool;
}

#[cfg(test)]
impl<B, F: FnMut(&mut B, &mut Segments<'_>) -> bool> Fill<B> for F {
    fn fill(&mut self, buffer: &mut B, segments: &mut Segments<'_>) -> bool {
        self(buffer, segments)
    }
}

/// The addresses of the buffer that [`ShapedQueue::refill`] is about to post.
pub(crate) struct Segments<'q> {
    addrs: &'q mut [u64],
    changed: &'q mut u16,
}

impl Segments<'_> {
    /// Sets the address of segment `i`. Must be called for each segment whose address differs from
    /// when its slot was last filled.
    #[inline(always)]
    pub(crate) fn set(&mut self, i: usize, addr: u64) {
        self.addrs[i] = addr;
        // At least the larger of the two, in one instruction.
        *self.changed |= i as u16 + 1;
    }
}

/// Takes the buffer that [`ShapedQueue::take_while`] has passed on with it.
#[must_use = "a buffer that is handled is taken"]
pub(crate) struct Take<'q>(&'q mut u64);

impl Take<'_> {
    /// Takes it, before the first user code that must not run for it twice.
    #[inline(always)]
    pub(crate) fn now(self) {
        *self.0 += 1;
    }
}

/// What [`ShapedQueue::refill_run`] fills slots with.
pub(crate) trait FillRun<B> {
    /// Whether a slot has to be filled.
    fn is_empty(&self, buffer: &B) -> bool;

    /// Fills an empty slot. Returns its address. `None` if there is no memory.
    fn fill(&mut self, buffer: &mut B) -> Option<u64>;

    /// Fills empty slots from the first on, as many as there is memory for, and sets their
    /// addresses. Returns how many. There are as many slots as addresses.
    fn fill_all(&mut self, buffers: &mut [B], addrs: &mut [u64]) -> usize;
}

/// A buffer that [`ShapedQueue::take_while`] has taken, and its caller does not handle there.
pub(crate) struct Taken<R> {
    /// The place of its slot.
    pub(crate) place: usize,
    /// How many bytes the device has written.
    pub(crate) len: u32,
    /// What the caller returned for it.
    pub(crate) other: R,
}

/// The buffers of a group, see [`ShapedQueue::lend`]. They count as taken when they were
/// [handled](Self::handled). Those that were not stay pending.
pub(crate) struct Lent<'q, B> {
    slots: &'q mut [Slot],
    pub(crate) buffers: &'q mut [B],
    taken: &'q mut u64,
}

impl<B> Lent<'_, B> {
    /// The first `n` buffers were handled. `len` is the length of each buffer that was not.
    #[inline(always)]
    pub(crate) fn handled(&mut self, n: usize, len: impl Fn(&mut B) -> u32) {
        *self.taken += n as u64;
        if n < self.slots.len() {
            self.leave(n, len);
        }
    }

    #[cold]
    fn leave(&mut self, n: usize, len: impl Fn(&mut B) -> u32) {
        let rest = self.slots.iter_mut().zip(&mut *self.buffers).skip(n);
        rest.for_each(|(slot, buffer)| slot.len = len(buffer));
    }
}

/// See the [module](self).
pub(crate) struct ShapedQueue<F, B> {
    format: F,
    setup: Setup,
    slots: Box<[Slot]>,
    /// The buffer of each slot, by its place.
    buffers: Box<[B]>,
    /// The place of each slot, by its number.
    places: Box<[u16]>,
    /// The bytes of each segment of a buffer.
    lens: Box<[u32]>,
    /// The addresses of all segments, by the numbers of slots.
    addrs: Box<[u64]>,
    /// The bytes of a buffer.
    have: u32,
    /// The next buffer to be taken. A position is a number of buffers since the ring was new.
    taken: u64,
    /// The position behind the last buffer that was found in the ring: the device has used it.
    read: u64,
    /// The position behind the last buffer that was posted.
    posted: u64,
    /// Slots that are not in the place that their number is. A device that uses buffers in another
    /// order displaces them. They return when they are free.
    displaced: u16,
    /// Buffers to be posted until each slot is posted where it was posted a turn before.
    unsteady: u16,
    /// The fault that was found after them.
    fault: Option<DeviceFault>,
}

impl<F: DriverFormat, B: Default> ShapedQueue<F, B> {
    /// A queue on `ring`, which is all zero, whose buffers all consist of writable segments of
    /// these lengths. It has a slot for each buffer that fits into the ring. Buffers of several
    /// segments are described in `tables`, if there are any, and then take one entry of the ring.
    pub(crate) fn new(ring: F::Ring, negotiated: Negotiated, lens: &[u32], tables: Option<Tables>) -> Self {
        let per_slot = if tables.is_some() { 1 } else { lens.len() as u16 };
        let setup = Setup { negotiated, per_slot };
        let count = F::entries(&ring) / per_slot;
        let addrs: Box<[u64]> = vec![0; usize::from(count) * lens.len()].into();
        let shape = Shape { lens, addrs: &addrs };
        let format = F::new(ring, setup, shape, setup.tables(shape, tables));
        let slot = |number| Slot { len: 0, number, changed: 0 };
        Self {
            format,
            setup,
            slots: (0..count).map(slot).collect(),
            buffers: (0..count).map(|_| B::default()).collect(),
            places: (0..count).collect(),
            lens: lens.into(),
            addrs,
            have: lens.iter().sum(),
            taken: 0,
            read: 0,
            posted: 0,
            displaced: 0,
            unsteady: count,
            fault: None,
        }
    }
}

impl<F: DriverFormat, B> RingEnd for ShapedQueue<F, B> {
    type Words = F::Ring;

    /// The next [`refill`](Self::refill) describes the buffers to the device.
    fn replace(&mut self, ring: F::Ring, tables: Option<Tables>) {
        let shape = Shape { lens: &self.lens, addrs: &self.addrs };
        self.format = F::new(ring, self.setup, shape, self.setup.tables(shape, tables));
        // In a ring whose buffers are used in order, slots are posted in the order of their
        // descriptors.
        for number in 0..self.slots.len() {
            let (slots, buffers, places) = (&mut self.slots, &mut self.buffers, &mut self.places);
            swap(slots, buffers, places, number, usize::from(places[number]));
            self.slots[number].changed = self.lens.len() as u16;
        }
        (self.taken, self.read, self.posted) = (0, 0, 0);
        (self.displaced, self.unsteady, self.fault) = (0, self.slots.len() as u16, None);
    }

    #[inline]
    fn posted(&self) -> usize {
        (self.posted - self.taken) as usize
    }

    #[inline]
    fn should_notify(&mut self) -> bool {
        self.format.should_notify()
    }

    fn arm(&mut self) -> Armed {
        if self.found() > 0 || self.fault.is_some() {
            return Armed::Work;
        }
        self.format.arm()
    }

    fn disarm(&mut self) {
        self.format.disarm();
    }
}

impl<F: DriverFormat, B> ShapedQueue<F, B> {
    /// The most buffers that the device can have at a time.
    #[inline]
    pub(crate) fn holds(&self) -> usize {
        self.slots.len()
    }

    /// Buffers that the device has used and that were not taken.
    #[inline(always)]
    pub(crate) fn found(&self) -> u16 {
        (self.read - self.taken) as u16
    }

    /// Whether nothing is to be taken or reported: no buffer that was found, no fault, and no used
    /// entry in the ring.
    #[inline(always)]
    pub(crate) fn is_drained(&self) -> bool {
        self.found() == 0 && self.fault.is_none() && !self.format.has_used()
    }

    /// The place of a position.
    #[inline(always)]
    fn place(&self, position: u64) -> usize {
        (position % self.slots.len() as u64) as usize
    }

    /// The buffer at a place that [`take_while`](Self::take_while) returned, until the next
    /// [`refill`](Self::refill).
    #[inline(always)]
    pub(crate) fn buffer(&mut self, place: usize) -> &mut B {
        &mut self.buffers[place]
    }

    /// All buffers, and whether the device has them.
    pub(crate) fn slots(&mut self) -> impl Iterator<Item = (bool, &mut B)> {
        let (count, taken, posted) = (self.slots.len(), self.place(self.taken), self.posted());
        let of = move |(place, buffer): (usize, _)| ((place + count - taken) % count < posted, buffer);
        self.buffers.iter_mut().enumerate().map(of)
    }

    /// Whether there are slots to [`refill`](Self::refill).
    #[inline(always)]
    pub(crate) fn has_free(&self) -> bool {
        self.posted() < self.slots.len()
    }

    /// Puts slots that are free back into their own places, where those are free, too.
    #[cold]
    #[inline(never)]
    fn settle(&mut self) {
        let (first, count) = (self.place(self.posted), self.slots.len());
        let free = count - self.posted();
        let Self { slots, buffers, places, .. } = self;
        for i in 0..free {
            let place = (first + i) % count;
            // Each exchange puts one slot into its place.
            while usize::from(slots[place].number) != place
                && (usize::from(slots[place].number) + count - first) % count < free
            {
                let own = usize::from(slots[place].number);
                swap(slots, buffers, places, place, own);
                self.unsteady = count as u16;
            }
        }
        self.displaced = displaced_among(&self.slots);
    }

    /// Posts up to `most` buffers, and up to a batch, in the slots that have been free for the longest time.
    /// `fill` is given what is in the slot and sets the addresses of segments that have moved since
    /// the slot was last filled. If it has no memory it returns false, and the step ends; a buffer
    /// of one segment is then as it was, because a [run](Self::refill_run) can be the next to post
    /// it. Returns how many buffers were posted. A device that sleeps must also be
    /// [notified](RingEnd::should_notify).
    ///
    /// First all buffers are filled, then the ring is written. So the stores that wait until the
    /// device's core gives a cache line up are next to each other, and wait at the same time.
    ///
    /// If `fill` panics, no buffer of the batch is posted, and the next call continues with the
    /// contents of the slots.
    ///
    /// `one`: buffers have one segment. If it is a constant, a compiler makes loops over buffers
    /// that have no loops over segments in them.
    #[inline(always)]
    pub(crate) fn refill(&mut self, one: bool, most: usize, fill: &mut impl Fill<B>) -> usize {
        let n = if one { 1 } else { self.lens.len() };
        debug_assert_eq!(n, self.lens.len());
        if self.displaced > 0 {
            self.settle();
        }
        let (first, free) = (self.place(self.posted), self.slots.len() - self.posted());
        let count = self.slots.len() as u16;
        let Self { format, slots, buffers, lens, addrs, posted, unsteady, .. } = self;
        let (batch, addrs) = (&mut slots[first..], &mut **addrs);
        let most = batch.len().min(free).min(most).min(BATCH);
        let mut got = 0;
        // If `fill` panics, addresses of slots that are not posted have changed.
        let left = std::mem::replace(unsteady, count);
        for (slot, buffer) in batch[..most].iter_mut().zip(&mut buffers[first..]) {
            let first = usize::from(slot.number) * n;
            let addrs = &mut addrs[first..first + n];
            if !fill.fill(buffer, &mut Segments { addrs, changed: &mut slot.changed }) {
                break;
            }
            got += 1;
        }
        let exposed = batch[..got].iter_mut().map(|slot| (slot.number, std::mem::take(&mut slot.changed)));
        format.expose(exposed, Shape { lens: &lens[..n], addrs }, left == 0);
        *posted += got as u64;
        *unsteady = left.saturating_sub(got as u16);
        // Here, so that a later step that panics leaves no buffer that the device does not see.
        format.publish();
        got
    }

    /// Whether each slot is in its own place, and was posted there a turn before: a
    /// [run](Self::refill_run) can be posted.
    #[inline(always)]
    pub(crate) fn is_steady(&self) -> bool {
        self.displaced == 0 && self.unsteady == 0
    }

    /// Posts up to `most` buffers of one segment, and no more than a batch, in the slots that have
    /// been free for the longest time, as far as they are in a row and there is memory. `fill` must
    /// not panic. `empty` states that each of these slots has no buffer. Returns how many buffers
    /// were posted: 0 if slots are not in their own places, or were not posted there a turn before
    /// ([`is_steady`](Self::is_steady)). Then [`refill`](Self::refill) posts.
    ///
    /// As there, all buffers are filled first. Addresses are written by consecutive stores.
    #[inline(always)]
    pub(crate) fn refill_run(&mut self, most: usize, empty: bool, fill: &mut impl FillRun<B>) -> usize {
        debug_assert!(self.setup.per_slot == 1 && self.lens.len() == 1);
        if !self.is_steady() {
            return 0;
        }
        let (first, free) = (self.place(self.posted), self.slots.len() - self.posted());
        let Self { format, buffers, lens, addrs, posted, .. } = self;
        let most = most.min(free).min(BATCH).min(buffers.len() - first);
        let (buffers, addrs) = (&mut buffers[first..][..most], &mut addrs[first..][..most]);
        let (mut changed, mut got) = (0u64, 0);
        if empty {
            got = fill.fill_all(buffers, addrs).min(most);
            changed = u64::MAX.checked_shr((BATCH - got) as u32).unwrap_or(0);
        } else {
            for (buffer, addr) in buffers.iter_mut().zip(&mut *addrs) {
                if fill.is_empty(buffer) {
                    let Some(at) = fill.fill(buffer) else { break };
                    *addr = at;
                    changed |= 1 << got;
                }
                got += 1;
            }
        }
        format.expose_run(first as u16, &addrs[..got], lens[0], changed);
        *posted += got as u64;
        format.publish();
        got
    }

    /// How many buffers the device has used and [`take`](Self::take) has not given back, as far as
    /// they were read. Calls `prefetch` with each buffer that was not pending before. Slots and
    /// lengths were checked. A fault is reported after the buffers before it were taken.
    ///
    /// Reads until `most` are pending.
    #[inline(always)]
    pub(crate) fn pending(&mut self, most: u16, prefetch: impl FnMut(&B)) -> Result<u16, DeviceFault> {
        if self.fault.is_none() {
            self.fault = self.read(most.saturating_sub(self.found()), prefetch).err();
        }
        match self.fault {
            Some(fault) if self.found() == 0 => Err(fault),
            _ => Ok(self.found()),
        }
    }

    /// Reads used entries until `most` buffers were found, and the last of a batch. Calls `seen`
    /// with each buffer that it finds.
    ///
    /// It is not inlined, so that its loop has all registers.
    #[inline(never)]
    fn read(&mut self, most: u16, mut seen: impl FnMut(&B)) -> Result<(), DeviceFault> {
        let (first, found, posted) = (self.place(self.read), self.found(), self.posted() as u16);
        let Self { format, setup, slots, buffers, places, have, read, displaced, unsteady, .. } = self;
        let (have, per_slot, step, count) = (*have, setup.per_slot, u32::from(format.id(1)), slots.len());
        let mut used = format.used(found, posted)?;
        let all = used.left();
        let judged = 'all: loop {
            let (left, done) = (used.left(), all - used.left());
            let n = left.min(most.saturating_sub(done));
            if n == 0 {
                break used.check_end();
            }
            let at = (first + usize::from(done)) % count;
            let mut other = None;
            for (slot, buffer) in slots[at..count.min(at + usize::from(n))].iter_mut().zip(&buffers[at..]) {
                let Some((id, len)) = used.entry() else { break 'all Ok(()) };
                if id != u32::from(slot.number) * step || len > have {
                    other = Some((id, len));
                    break;
                }
                slot.len = len;
                seen(buffer);
                used.skip(per_slot);
            }
            let Some((id, len)) = other else { continue };
            // Not the next buffer, or too long.
            let (left, done) = (used.left(), all - used.left());
            let at = (first + usize::from(done)) % count;
            let in_order = setup.negotiated.in_order();
            // An entry can name any buffer that the device has, or in order the last of a batch.
            let left = if in_order { left } else { posted - found - done };
            let named = format.slot(id).and_then(|slot| {
                let ahead = DeviceFault::posted(id as u16, ahead(places, at, slot, left))?;
                DeviceFault::length(len, have).map(|_| ahead)
            });
            let ahead = match named {
                Ok(ahead) => ahead,
                Err(fault) => break Err(fault),
            };
            let before = if in_order { ahead } else { 0 };
            if before < ahead {
                swap(slots, buffers, places, at, (at + ahead) % count);
                *displaced = displaced_among(slots);
                *unsteady = count as u16;
            }
            // In order, the device has used the buffers before it completely.
            for i in 0..=before {
                let place = (at + i) % count;
                slots[place].len = if i < before { have } else { len };
                seen(&buffers[place]);
                used.skip(per_slot);
            }
        };
        *read += u64::from(all - used.left());
        let end = used.end();
        format.read_to(end);
        judged
    }

    /// Reads a group: used buffers that are the next ones in order, at most `most`, at consecutive
    /// places, into each of which the device has written `shortest` bytes or more. For buffers of
    /// one segment without a table. Nothing is consumed before [`lend`](Self::lend). Calls `seen`
    /// with each buffer and how many bytes more than `shortest` it has. Returns how many there are,
    /// and whether an entry behind them is used that is not part of the group.
    ///
    /// The first entry that is anything else ends the group, and is not judged here. Nor is there a
    /// group while buffers that [`pending`](Self::pending) has found were not taken, or slots are
    /// not in their own places. All that is for the functions above.
    #[inline(always)]
    pub(crate) fn read_group(&mut self, most: u16, shortest: u32, seen: impl FnMut(&mut B, u32)) -> (u16, bool) {
        debug_assert!(self.setup.per_slot == 1 && self.lens.len() == 1);
        if self.found() > 0 || self.displaced > 0 || self.fault.is_some() || self.have < shortest {
            return (0, false);
        }
        let (first, posted) = (self.place(self.read), self.posted() as u16);
        let expected = Expected { first: first as u16, posted, shortest, span: self.have - shortest };
        let end = self.buffers.len().min(first + usize::from(most));
        self.format.read_run(expected, &mut self.buffers[first..end], seen)
    }

    /// The `n` buffers of a group that was [read](Self::read_group).
    #[inline(always)]
    pub(crate) fn group(&self, n: u16) -> &[B] {
        &self.buffers[self.place(self.read)..][..usize::from(n)]
    }

    /// Consumes the first `n` buffers of the group that was [read](Self::read_group), and lends
    /// them until they were handled.
    #[inline(always)]
    pub(crate) fn lend(&mut self, n: u16) -> Lent<'_, B> {
        let first = self.place(self.read);
        self.format.consume(n);
        self.read += u64::from(n);
        let (slots, buffers) = (&mut self.slots[first..], &mut self.buffers[first..]);
        Lent { slots: &mut slots[..usize::from(n)], buffers: &mut buffers[..usize::from(n)], taken: &mut self.taken }
    }

    /// All buffers that the device has used and [`take`](Self::take) has not given back, for a
    /// queue that stops.
    pub(crate) fn unread(&mut self) -> u16 {
        if self.fault.is_none() {
            self.fault = self.read(u16::MAX, |_| ()).err();
        }
        self.found()
    }

    /// Takes up to `most` [pending](Self::pending) buffers, up to the first that `f` does not
    /// handle. `f` is given how many bytes the device has written to a buffer, and the buffer,
    /// whose slot is free then. Returns how many were handled, and the one that was taken and not
    /// handled. Also returns if it is at the last place.
    ///
    /// `f` must also [take](Take::now) the buffer. If it panics earlier, the buffer stays pending.
    #[inline(always)]
    pub(crate) fn take_while<R>(
        &mut self,
        most: u16,
        mut f: impl FnMut(u32, &mut B, Take<'_>) -> ControlFlow<R>,
    ) -> (u16, Option<Taken<R>>) {
        let (first, most) = (self.place(self.taken), most.min(self.found()));
        let end = self.slots.len().min(first + usize::from(most));
        let Self { slots, buffers, taken, .. } = self;
        for (n, (slot, buffer)) in (0..).zip(slots[first..end].iter_mut().zip(&mut buffers[first..])) {
            if let ControlFlow::Break(other) = f(slot.len, buffer, Take(taken)) {
                return (n, Some(Taken { place: first + usize::from(n), len: slot.len, other }));
            }
        }
        ((end - first) as u16, None)
    }

    /// Takes the next `n` [pending](Self::pending) buffers. Their slots are then free. Returns the
    /// position of the first, for [`taken`](Self::taken).
    pub(crate) fn take(&mut self, n: u16) -> u64 {
        debug_assert!(self.found() >= n, "buffers that are pending are taken");
        let first = self.taken;
        self.taken += u64::from(n);
        first
    }

    /// The `i`th buffer from a position that [`take`](Self::take) returned, until the next
    /// [`refill`](Self::refill): how many bytes the device has written to it, and the buffer.
    pub(crate) fn taken(&mut self, first: u64, i: u16) -> (u32, &mut B) {
        let place = self.place(first + u64::from(i));
        (self.slots[place].len, &mut self.buffers[place])
    }

    /// Records a fault that the caller has found in the contents of a buffer. A fault in the ring
    /// that was found before takes precedence.
    #[cold]
    pub(crate) fn refuse(&mut self, fault: DeviceFault) {
        self.fault.get_or_insert(fault);
    }

    /// The fault of the device, if one was found.
    pub(crate) fn outcome(&self) -> Result<(), DeviceFault> {
        self.fault.map_or(Ok(()), Err)
    }
}

/// How many slots are not in the place that their number is.
fn displaced_among(slots: &[Slot]) -> u16 {
    (0..).zip(slots).filter(|(place, slot)| slot.number != *place).count() as u16
}

/// How many slots are between the place `at`, where the next used buffer is expected, and the slot
/// that the device names. `None` if that is not one of the `left` slots that the device can have
/// used.
fn ahead(places: &[u16], at: usize, slot: u16, left: u16) -> Option<usize> {
    let count = places.len();
    let ahead = (usize::from(places[usize::from(slot)]) + count - at) % count;
    (ahead < usize::from(left)).then_some(ahead)
}

/// Exchanges the slots of two places.
fn swap<B>(slots: &mut [Slot], buffers: &mut [B], places: &mut [u16], a: usize, b: usize) {
    slots.swap(a, b);
    buffers.swap(a, b);
    places[usize::from(slots[a].number)] = a as u16;
    places[usize::from(slots[b].number)] = b as u16;
}
