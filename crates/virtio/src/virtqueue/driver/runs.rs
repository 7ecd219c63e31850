//! Buffers of one segment each, posted and taken back many at a time.
//!
//! A transmit queue usually has packets of one segment, and its device usually uses them in order.
//! Slots are then posted and used in the order of their numbers. A *run* is several consecutive
//! slots: what is kept for each slot is then next to each other in memory, in the driver's arrays
//! and in the ring.
//!
//! A used entry belongs to a run if it names the slot behind the one that the entry before it
//! named, and that slot was posted. This is the complete check of an entry: see
//! [`take_run`](DriverQueue::take_run). Any other entry is read again, and judged, by
//! [`pending`](DriverQueue::pending).
//!
//! If buffers are used in order by negotiation, an entry stands for all buffers up to the one that
//! it names, which is one that the device has. A run is then as much of such batches as is in
//! consecutive slots.

use super::format::{DriverFormat, UsedEntries};
use super::found::Found;
use super::free::Free;
use super::queue::DriverQueue;
use std::slice;

/// The most buffers of a run.
pub(crate) const RUN: u16 = 64;

/// Buffers that were taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TakenRun {
    /// How many.
    pub(crate) buffers: usize,
    /// Whether there can be another used entry: it is no part of the run, or was not read.
    pub(crate) more: bool,
}

impl<F: DriverFormat, B> DriverQueue<F, B> {
    /// Posts up to `most` buffers of one segment each, which the device reads. `fill` puts a buffer
    /// into its slot, or returns false, which ends the run. `segment` returns the address and the
    /// length of a buffer. Neither may panic. Returns how many were posted. The device sees them
    /// after [`publish`](Self::publish).
    ///
    /// All buffers are filled before the first descriptor is written, so that stores to the ring
    /// are next to each other.
    #[inline(always)]
    pub(crate) fn post_run(
        &mut self,
        most: usize,
        mut fill: impl FnMut(&mut B) -> bool,
        segment: impl Fn(&B) -> (u64, u32),
    ) -> usize {
        let most = most.min(RUN.into()) as u16;
        let Some((first, most)) = self.free.run(most.min(self.format.run())) else { return 0 };
        let at = usize::from(first);
        let mut n = 0;
        for buffer in &mut self.buffers[at..at + usize::from(most)] {
            if !fill(buffer) {
                break;
            }
            n += 1;
        }
        if n == 0 {
            return 0;
        }
        self.format.post_run(first, self.buffers[at..at + n].iter().map(segment));
        self.is_posted[at..at + n].fill(true);
        self.free.taken_run(n as u16);
        self.posted += n as u16;
        if let Some(order) = &mut self.order {
            order.slots.extend(first..first + n as u16);
        }
        n
    }

    /// Takes buffers back that the device has used, up to [`RUN`] of one run, and calls `f` with
    /// the slot of each and the buffer, which is not posted any more. If `f` panics, the buffers
    /// behind that one are [pending](Self::pending).
    ///
    /// There are none if buffers are pending, if a fault was found, or while the device has a
    /// buffer of several descriptors.
    #[inline(always)]
    pub(crate) fn take_run(&mut self, mut f: impl FnMut(u16, &mut B)) -> TakenRun {
        let Some((first, n, more)) = self.next_run() else { return TakenRun { buffers: 0, more: true } };
        let Self { format, buffers, is_posted, free, posted, found, .. } = self;
        let at = usize::from(first);
        let run = at..at + usize::from(n);
        let mut taking =
            Taking { format, is_posted: &mut is_posted[run.clone()], free, posted, found, first, taken: 0 };
        for buffer in &mut buffers[run] {
            taking.taken += 1;
            f(first + taking.taken - 1, buffer);
        }
        TakenRun { buffers: n.into(), more }
    }

    /// Consumes the next used entries, as far as they are a run: the first slot, how many there
    /// are, and whether there may be more. `None` if there is no run. Each entry is read once.
    #[inline(always)]
    fn next_run(&mut self) -> Option<(u16, u16, bool)> {
        if self.found.len() > 0 || self.fault.is_some() || !self.format.is_single() {
            return None;
        }
        if self.order.is_some() {
            return self.next_run_in_order();
        }
        let place = self.format.used_place();
        let mut used = self.format.used_ids(self.posted, RUN);
        let first = used.next()?;
        let (_, slots) = self.is_posted.get(first as usize..)?.split_first().filter(|(posted, _)| **posted)?;
        let (mut n, mut other) = (1, false);
        for (posted, id) in slots.iter().zip(used) {
            if id != first + u32::from(n) || !posted {
                other = true;
                break;
            }
            n += 1;
        }
        let behind = usize::from(self.format.size() - place).min(slots.len() + 1);
        let most = RUN.min(self.posted).min(behind as u16);
        self.format.consume(n);
        Some((first as u16, n, other || n == most))
    }

    /// The same for buffers that are used in order by negotiation, each of one descriptor, none of
    /// which is pending.
    ///
    /// It is not inlined, so that its loop has all registers.
    #[inline(never)]
    fn next_run_in_order(&mut self) -> Option<(u16, u16, bool)> {
        let Self { format, order: Some(order), posted, .. } = self else { return None };
        let first = *order.slots.front()?;
        // A fault is found again by the functions that report it.
        let mut used = format.used(0, *posted).ok()?;
        let mut n = 0;
        let more = loop {
            if order.batch == 0 {
                match order.next_batch(format, &used, n) {
                    Ok(Some(buffers)) => order.batch = buffers,
                    other => break other.is_err(),
                }
            }
            let most = usize::from(order.batch).min(usize::from(RUN) - n);
            let slots = order.slots.as_slices().0[n..].iter().zip(first + n as u16..).take(most);
            let run = slots.take_while(|(slot, next)| *slot == next).count();
            used.skip_run(run as u16);
            order.batch -= run as u16;
            n += run;
            if order.batch > 0 || n == usize::from(RUN) {
                break true;
            }
        };
        let end = used.end();
        format.read_to(end);
        order.slots.drain(..n);
        (n > 0).then_some((first, n as u16, more))
    }
}

/// Buffers that are being taken. Its drop, also by a panic, frees the slots of those that were
/// taken, and adds the others to the pending ones.
struct Taking<'q, F: DriverFormat> {
    format: &'q mut F,
    is_posted: &'q mut [bool],
    free: &'q mut Free,
    posted: &'q mut u16,
    found: &'q mut Found,
    first: u16,
    taken: u16,
}

impl<F: DriverFormat> Drop for Taking<'_, F> {
    #[inline(always)]
    fn drop(&mut self) {
        let (taken, rest) = self.is_posted.split_at_mut(usize::from(self.taken));
        taken.fill(false);
        self.format.release_run(self.first, self.taken);
        self.free.push_run(self.first, self.taken);
        *self.posted -= self.taken;
        if !rest.is_empty() {
            Self::leave(self.found, self.first + self.taken, rest.iter());
        }
    }
}

impl<F: DriverFormat> Taking<'_, F> {
    /// User code has panicked.
    #[cold]
    fn leave(found: &mut Found, first: u16, rest: slice::Iter<'_, bool>) {
        let mut adding = found.adding(RUN);
        (first..).zip(rest).for_each(|(slot, _)| adding.push(slot));
        let behind = adding.at;
        found.added(behind);
    }
}
