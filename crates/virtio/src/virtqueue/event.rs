//! Notifications: when one must be sent, and why none is lost.
//!
//! A side that polls needs no notifications. Before it sleeps, it asks for one in the ring: by a
//! flag or, with `VIRTIO_F_EVENT_IDX`, by the position at which it wants to be woken. The peer
//! reads that after it has published. The two sides race:
//!
//! ```text
//!   the side that sleeps (`arm`)              the side that publishes
//!   1  writes flag or event                   1  writes descriptors, then index or flags    (release)
//!   2  full fence                             2  full fence
//!   3  reads the peer's index or flags        3  reads flag or event
//!      work already: does not sleep              wanted: signals
//!      else: sleeps
//! ```
//!
//! Each side stores and then loads what the other stores. Both fences are sequentially consistent,
//! so one of them comes first in their total order, and the load behind the second fence sees the
//! store before the first one. So at least one side sees the other's store: the sleeping side finds
//! the work, or the publishing side finds the request. If one of the fences is missing, both loads
//! may be done before both stores are visible, and the wake-up is lost.
//!
//! One fence serves a whole poll. The side that publishes executes it when it is about to leave the
//! ring, not for every frame. The comparison of [`passed`] is over a range, so it covers everything
//! that was published before the fence.
//!
//! Many entries are published at once, so the index may jump over an event. Therefore the
//! comparison is never for equality.

use super::Position;
use super::sync::{Ordering, fence};

/// The full fence of both sides: see the module. It empties the store buffer, which costs tens of
/// cycles.
#[inline]
pub(crate) fn full_fence() {
    fence(Ordering::SeqCst);
}

/// Whether a split ring's index went past `event` on its way from `old` to `new`: whether `old <=
/// event < new`, modulo 2^16. An event names the entry whose publication is awaited, so an index of
/// `event + 1` is the first to include it.
#[inline]
#[must_use]
pub fn passed(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// The same for a packed ring of `size` entries. The peer wrote `event`. If its offset is beyond
/// the ring, it counts as passed: this may cost a signal, but loses none.
#[inline]
#[must_use]
pub fn passed_packed(event: Position, old: Position, new: Position, size: u16) -> bool {
    event.offset() >= size || event.since(old, size) < new.since(old, size)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_passed_once_around_the_clock() {
        for event in [0, 1, 5, 0x7fff, 0x8000, 0xfffe, 0xffff_u16] {
            for before in 0..4u16 {
                let old = event.wrapping_sub(before);
                assert!(!passed(event, old, old), "nothing was published");
                assert!(!passed(event, old, event), "up to the entry, without it");
                assert!(passed(event, old, event.wrapping_add(1)));
                assert!(passed(event, old, event.wrapping_add(100)), "jumped over");
            }
            assert!(!passed(event, event.wrapping_add(1), event.wrapping_add(200)), "it was passed before");
        }
    }

    #[test]
    fn an_event_of_a_packed_ring_is_passed_once_a_turn() {
        for size in [1, 2, 5, 256, 32768u16] {
            let places = [0, 1, 2, size - 1, size, size + size / 2].map(|n| {
                if n >= size {
                    Position::START.step(size, size).step(n % size, size)
                } else {
                    Position::START.step(n, size)
                }
            });
            for event in places {
                let behind = event.step(1, size);
                assert!(!passed_packed(event, event, event, size));
                assert!(passed_packed(event, event, behind, size));
                assert!(passed_packed(event, event, event.step(size, size), size), "jumped over by a whole turn");
                assert!(!passed_packed(event, behind, behind.step(size - 1, size), size), "it was passed before");
            }
        }
        let beyond = Position::from_bits(256);
        assert!(passed_packed(beyond, Position::START, Position::START, 256), "an offset that the ring does not have");
    }
}
