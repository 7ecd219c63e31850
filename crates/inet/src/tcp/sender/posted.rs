//! Transmissions that the device has not completed, in order.
//!
//! Why they are kept: a range must not be sent again while the device still holds its earlier copy,
//! and one connection must not fill the device's ring.

use std::collections::VecDeque;

use crate::tcp::Ticket;

/// The number of a transmission. Numbers are not reused.
pub(super) type Id = u64;

/// The transmissions of one connection that may still be posted in the device's ring.
///
/// A device nearly always finishes transmissions in order. Only the front is checked, unless a
/// range is to be sent again.
#[derive(Debug)]
pub(super) struct PostedTransmissions<T> {
    tickets: VecDeque<(T, usize)>,
    first: Id,
    bytes: usize,
}

impl<T: Ticket> PostedTransmissions<T> {
    pub(super) const fn new() -> Self {
        Self { tickets: VecDeque::new(), first: 1, bytes: 0 }
    }

    /// Frees memory that is not in use.
    pub(super) fn shrink(&mut self) {
        self.tickets.shrink_to_fit();
    }

    /// Adds a transmission of `bytes` of payload.
    pub(super) fn push(&mut self, ticket: T, bytes: usize) -> Id {
        self.tickets.push_back((ticket, bytes));
        self.bytes += bytes;
        self.first + self.tickets.len() as u64 - 1
    }

    /// Removes the finished transmissions at the front, and returns the number of bytes that are
    /// left.
    pub(super) fn settle(&mut self) -> usize {
        while self.tickets.front().is_some_and(|(ticket, _)| ticket.is_done()) {
            self.bytes -= self.tickets.pop_front().map_or(0, |(_, bytes)| bytes);
            self.first += 1;
        }
        self.bytes
    }

    /// Forgets all transmissions, because nothing that they carried will be sent again. Their
    /// memory is held by the device alone from now on: an idle connection holds none.
    pub(super) fn forget(&mut self) {
        self.first += self.tickets.len() as u64;
        self.bytes = 0;
        self.tickets.clear();
    }

    /// The first transmission that was not finished at the last check.
    #[cfg(any(feature = "record", test))]
    pub(super) fn first(&self) -> Id {
        self.first
    }

    /// Whether the device is done with the transmission `id`.
    pub(super) fn is_done(&self, id: Id) -> bool {
        let Some(place) = id.checked_sub(self.first) else { return true };
        usize::try_from(place).ok().and_then(|n| self.tickets.get(n)).is_none_or(|(ticket, _)| ticket.is_done())
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
        let ids = [ring.push(one.clone(), 10), ring.push(two.clone(), 5)];
        assert_eq!((ring.settle(), ring.is_done(ids[0]), ring.is_done(ids[1])), (15, false, false));
        two.finish();
        assert_eq!((ring.settle(), ring.is_done(ids[0]), ring.is_done(ids[1])), (15, false, true));
        one.finish();
        assert_eq!((ring.settle(), ring.is_done(ids[0]), ring.is_done(ids[1])), (0, true, true));
        assert!(ring.is_done(0), "a range that was never sent waits for nothing");
        let pending = Done::pending();
        let id = ring.push(pending.clone(), 7);
        ring.forget();
        assert_eq!((ring.settle(), ring.is_done(id), ring.first()), (0, true, id + 1));
        assert_eq!(ring.push(pending, 7), id + 1);
    }
}
