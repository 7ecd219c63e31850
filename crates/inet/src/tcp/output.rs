//! The output of a connection: segments, and the trait of their destination.
//!
//! Why a trait and not a list of segments: the destination may refuse a segment because its ring is
//! full. The connection then has not changed, and passes the same segment again.
//!
//! A connection hands out its payload in units of up to 64 KiB, and a unit is cut into segments as
//! late as possible: by the device, or by the output. The cost of choosing, noting and
//! acknowledging is that of a unit.

use super::{Carrier, Header};

/// A segment to be sent, or a unit of several segments.
#[derive(Debug)]
pub struct Outgoing<'a, C: Carrier> {
    /// The header of the segment.
    pub header: &'a Header,
    /// The payload of the segment, in order. The output holds clones of it until the device is
    /// done.
    pub payload: &'a [C::Sent],
    /// Bytes of payload.
    pub payload_len: u32,
    /// Bytes of payload in a segment. If there is more payload than this, the device or the output
    /// cuts it. FIN and PSH of the header are then those of the last segment, and CWR is that of
    /// the first.
    pub segment_size: u32,
    /// Whether the IP header declares an ECN-capable transport: ECT(0).
    pub ect: bool,
    /// Whether the segment probes for a larger path MTU. Such a segment must not be fragmented,
    /// although it is larger than the known path MTU.
    pub probe: bool,
}

/// The part of a segment that an output has accepted.
#[derive(Debug)]
pub struct Accepted<T> {
    /// The transmission.
    pub ticket: T,
    /// Bytes of payload: all, or those of a number of whole segments from the first on. The
    /// connection passes the rest again, as another segment.
    pub len: u32,
}

/// The destination of segments: a transmit ring, or a test.
pub trait Output<C: Carrier> {
    /// Bytes of payload that are accepted at once if they can be cut into segments, or 0 if they
    /// cannot.
    fn max_payload(&self) -> usize;

    /// Sends a segment, or the first part of it.
    ///
    /// # Errors
    /// The ring has no room for a segment. The connection has not changed, and passes the same
    /// segment again later.
    fn transmit(&mut self, segment: Outgoing<'_, C>) -> Result<Accepted<C::Ticket>, Full>;
}

/// The ring has no room. Call [`Connection::poll_transmit`](super::Connection::poll_transmit) again
/// when it has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ring is full")]
pub struct Full;
