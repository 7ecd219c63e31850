//! The header slots of a transmit queue: memory for the first bytes of a frame, or for all of a
//! short one. Each of the queue's descriptors has a slot.
//!
//! ```text
//!   a page for headers    [headroom | headers] ──► payload      allocated, counted and freed
//!   a slot                [headers]            ──► payload      of the descriptor
//!                         [frame]                               a short frame, as a copy
//!
//!   count of a slot       0 ── posted ──► 1 ── completed ──► 2 ── posted ──► 3 ...    odd: in use
//! ```
//!
//! Why: the headers of a segment are written once, and read once by the device. A page for them
//! costs more than they do: an allocation, two atomic counts, and a list for the payload behind it.
//!
//! **A slot is reused exactly when its descriptor is.** Each slot has a count, which the queue
//! increments when a frame is posted and when the device has completed it. A [`SlotFrame`] keeps
//! the count that its frame was posted with. The queue's thread alone writes counts, so that no
//! atomic read-modify-write is needed; any thread reads them.
//!
//! **Wrap-around.** A count has 32 bits. If a frame is not asked about for exactly 2^31 uses of its
//! slot, and the slot is in use then, it is reported as pending until that use has ended, and no
//! harm follows.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The counts of a queue's header slots, as the queue has them. See
/// [`TxQueue::header_slots`](crate::TxQueue::header_slots).
pub struct HeaderSlots {
    counts: Arc<[AtomicU32]>,
    /// Slots in use.
    used: usize,
}

/// A frame whose headers are in a slot of a transmit queue, or all of which is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotFrame {
    slot: u16,
    count: NonZeroU32,
}

/// Whether a queue has completed frames: a reader of the counts of its slots, for any thread. It
/// may outlive the queue, which completes all frames when it is dropped.
#[derive(Clone)]
pub struct SlotCompletions(Arc<[AtomicU32]>);

impl HeaderSlots {
    /// The most bytes in a slot. With the 12 bytes of virtio-net's own header, that is four cache
    /// lines: enough for the headers of a short message and the message.
    pub const ROOM: usize = 244;

    /// The counts of the slots 0 to `slots` - 1, none of which is in use.
    #[must_use]
    pub fn new(slots: u16) -> Self {
        Self { counts: (0..slots).map(|_| AtomicU32::new(0)).collect(), used: 0 }
    }

    /// A frame was posted whose headers are in this slot, or all of which is there. The slot was
    /// not in use. A queue calls it. Cost: a store.
    #[inline]
    pub fn post(&mut self, slot: u16) -> SlotFrame {
        let place = &self.counts[usize::from(slot)];
        let count = place.load(Ordering::Relaxed);
        debug_assert!(count.is_multiple_of(2), "the device has the frame in slot {slot}");
        let count = NonZeroU32::MIN | count;
        place.store(count.get(), Ordering::Relaxed);
        self.used += 1;
        SlotFrame { slot, count }
    }

    /// The descriptor of this slot has been completed. A queue calls it for every descriptor,
    /// whether its slot is in use or not. Cost: a comparison while no slot is in use.
    #[inline(always)]
    pub fn complete(&mut self, slot: u16) {
        if self.used > 0 {
            self.complete_used(slot);
        }
    }

    #[inline]
    fn complete_used(&mut self, slot: u16) {
        let place = &self.counts[usize::from(slot)];
        let count = place.load(Ordering::Relaxed);
        if !count.is_multiple_of(2) {
            place.store(count.wrapping_add(1), Ordering::Release);
            self.used -= 1;
        }
    }

    /// No device has any of the queue's frames any more.
    pub fn complete_all(&mut self) {
        for slot in 0..self.counts.len() {
            self.complete(slot as u16);
        }
    }

    /// A reader of the counts. Cost: an atomic increment.
    #[inline]
    #[must_use]
    pub fn completions(&self) -> SlotCompletions {
        SlotCompletions(self.counts.clone())
    }
}

/// No frame of a queue that is gone is with its device.
impl Drop for HeaderSlots {
    fn drop(&mut self) {
        self.complete_all();
    }
}

impl SlotCompletions {
    /// Whether the device has completed `frame`, which is one of this queue. Cost: a load.
    #[inline]
    #[must_use]
    pub fn is_completed(&self, frame: SlotFrame) -> bool {
        let count = self.0.get(usize::from(frame.slot)).map(|count| count.load(Ordering::Acquire));
        count != Some(frame.count.get())
    }
}

impl fmt::Debug for HeaderSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeaderSlots({} of {} in use)", self.used, self.counts.len())
    }
}

impl fmt::Debug for SlotCompletions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlotCompletions({} slots)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_completed_with_its_descriptor_and_not_with_a_later_one() {
        let mut slots = HeaderSlots::new(4);
        let completions = slots.completions();
        let (first, other) = (slots.post(2), slots.post(3));
        assert!(!completions.is_completed(first) && !completions.is_completed(other));
        // A descriptor whose slot has no headers.
        slots.complete(1);
        slots.complete(2);
        assert!(completions.is_completed(first) && !completions.is_completed(other));
        let second = slots.post(2);
        assert!(completions.is_completed(first) && !completions.is_completed(second));
        assert_ne!(first, second);
        slots.complete_all();
        assert!(completions.is_completed(second) && completions.is_completed(other));
    }

    #[test]
    fn counts_begin_again() {
        let mut slots = HeaderSlots::new(1);
        slots.counts[0].store(u32::MAX - 1, Ordering::Relaxed);
        let last = slots.post(0);
        slots.complete(0);
        let next = slots.post(0);
        let completions = slots.completions();
        assert!(completions.is_completed(last) && !completions.is_completed(next));
    }

    #[test]
    fn a_queue_that_is_gone_has_no_frames() {
        let mut slots = HeaderSlots::new(2);
        let (frame, completions) = (slots.post(0), slots.completions());
        drop(slots);
        assert!(completions.is_completed(frame));
    }
}
