//! Transmissions that the device has not completed, in order.
//!
//! Why they are kept: a range must not be sent again while the device still holds its earlier copy,
//! and one connection must not fill the device's ring.

use std::collections::VecDeque;

use crate::tcp::{Seq, Ticket};

/// The number of a transmission. Numbers are not reused.
pub(super) type Id = u64;

/// A transmission of one segment, or of several of the same size.
#[derive(Debug)]
#[cfg_attr(feature = "compare", derive(Clone))]
struct Posted<T> {
    ticket: T,
    /// The number of the first segment, and the bytes of payload in all and in each.
    start: Seq,
    bytes: u32,
    size: u32,
}

impl<T: Ticket> Posted<T> {
    /// Whether the device is done with the segments that have the `len` numbers from `from` on.
    fn is_done_with(&self, from: Seq, len: u32) -> bool {
        if self.bytes <= self.size {
            return self.ticket.is_done();
        }
        // FIN is in the last one.
        let segment = |at: Seq| (at - self.start).min(self.bytes - 1) / self.size;
        (segment(from)..=segment(from + len.saturating_sub(1))).all(|n| self.ticket.is_done_with(n))
    }
}

/// The transmissions of one connection that may still be posted in the device's ring.
///
/// A device nearly always finishes transmissions in order. Only the front is checked, unless a
/// range is to be sent again.
#[derive(Debug)]
#[cfg_attr(feature = "compare", derive(Clone))]
pub(super) struct PostedTransmissions<T> {
    transmissions: VecDeque<Posted<T>>,
    first: Id,
    bytes: usize,
}

impl<T: Ticket> PostedTransmissions<T> {
    pub(super) const fn new() -> Self {
        Self { transmissions: VecDeque::new(), first: 1, bytes: 0 }
    }

    /// Frees memory that is not in use.
    pub(super) fn shrink(&mut self) {
        self.transmissions.shrink_to_fit();
    }

    /// Whether the device was done with all transmissions at the last check.
    pub(super) fn is_empty(&self) -> bool {
        self.transmissions.is_empty()
    }

    /// Adds a transmission of `bytes` of payload from `start` on, in segments of `size` bytes.
    pub(super) fn push(&mut self, ticket: T, start: Seq, bytes: u32, size: u32) -> Id {
        self.transmissions.push_back(Posted { ticket, start, bytes, size });
        self.bytes += bytes as usize;
        self.first + self.transmissions.len() as u64 - 1
    }

    /// Removes the finished transmissions at the front, and returns the number of bytes that are
    /// left.
    pub(super) fn settle(&mut self) -> usize {
        while self.transmissions.front().is_some_and(|posted| posted.ticket.is_done()) {
            self.bytes -= self.transmissions.pop_front().map_or(0, |posted| posted.bytes as usize);
            self.first += 1;
        }
        self.bytes
    }

    /// Forgets all transmissions, because nothing that they carried will be sent again. Their
    /// memory is held by the device alone from now on: an idle connection holds none.
    pub(super) fn forget(&mut self) {
        self.first += self.transmissions.len() as u64;
        self.bytes = 0;
        // Mostly one, that of a message: a loop of pops is shorter than `clear` then.
        while self.transmissions.pop_front().is_some() {}
    }

    /// The first transmission that was not finished at the last check.
    #[cfg(any(feature = "record", test))]
    pub(super) fn first(&self) -> Id {
        self.first
    }

    /// Whether the device is done with the segments of the transmission `id` that have the `len`
    /// numbers from `from` on.
    pub(super) fn is_done_with(&self, id: Id, from: Seq, len: u32) -> bool {
        let Some(place) = id.checked_sub(self.first) else { return true };
        let posted = usize::try_from(place).ok().and_then(|n| self.transmissions.get(n));
        posted.is_none_or(|posted| posted.is_done_with(from, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::testing::Done;

    #[test]
    fn a_transmission_is_done_when_its_ticket_says_so_whatever_the_order() {
        let (one, two) = (Done::pending(), Done::pending());
        let mut ring = PostedTransmissions::new();
        let is_done = |ring: &PostedTransmissions<Done>, id| ring.is_done_with(id, Seq(0), 10);
        let ids = [ring.push(one.clone(), Seq(0), 10, 10), ring.push(two.clone(), Seq(10), 5, 10)];
        assert_eq!((ring.settle(), is_done(&ring, ids[0]), is_done(&ring, ids[1])), (15, false, false));
        two.finish();
        assert_eq!((ring.settle(), is_done(&ring, ids[0]), is_done(&ring, ids[1])), (15, false, true));
        one.finish();
        assert_eq!((ring.settle(), is_done(&ring, ids[0]), is_done(&ring, ids[1])), (0, true, true));
        assert!(is_done(&ring, 0), "a range that was never sent waits for nothing");
        let pending = Done::pending();
        let id = ring.push(pending.clone(), Seq(0), 7, 10);
        ring.forget();
        assert_eq!((ring.settle(), is_done(&ring, id), ring.first()), (0, true, id + 1));
        assert_eq!(ring.push(pending, Seq(0), 7, 10), id + 1);
    }

    /// A unit whose first segment has left the ring.
    #[derive(Debug)]
    struct FirstIsDone;

    impl Ticket for FirstIsDone {
        fn is_done(&self) -> bool {
            false
        }

        fn is_done_with(&self, n: u32) -> bool {
            n == 0
        }
    }

    #[test]
    fn a_segment_of_a_unit_does_not_wait_for_those_behind_it() {
        let mut ring = PostedTransmissions::new();
        let start = Seq(u32::MAX - 5);
        let id = ring.push(FirstIsDone, start, 30, 10);
        assert_eq!(ring.settle(), 30);
        assert_eq!([0, 10, 20].map(|at| ring.is_done_with(id, start + at, 10)), [true, false, false]);
        assert!(ring.is_done_with(id, start + 4, 6) && !ring.is_done_with(id, start + 4, 7), "both are needed");
        assert!(!ring.is_done_with(id, start + 30, 1), "FIN is in the last segment");
        let id = ring.push(FirstIsDone, start + 30, 10, 10);
        assert!(!ring.is_done_with(id, start + 30, 10), "a transmission of one segment is done as a whole");
    }
}
