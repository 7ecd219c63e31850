//! The output of a connection: segments, and the trait of their destination.
//!
//! Why a trait and not a list of segments: the destination may refuse a segment because its ring is
//! full. The connection then has not changed, and passes the same segment again.

use super::{Carrier, Header};

/// A segment to be sent.
#[derive(Debug)]
pub struct Outgoing<'a, C: Carrier> {
    /// The header of the segment.
    pub header: &'a Header,
    /// The payload of the segment, in order. The output holds clones of it until the device is
    /// done.
    pub payload: &'a [C::Sent],
    /// Bytes of payload.
    pub payload_len: u32,
    /// Bytes of payload in each segment that the device cuts. If there is more payload than this,
    /// the device cuts the segment.
    pub segment_size: u32,
    /// Whether the IP header declares an ECN-capable transport: ECT(0).
    pub ect: bool,
    /// Whether the segment probes for a larger path MTU. Such a segment must not be fragmented,
    /// although it is larger than the known path MTU.
    pub probe: bool,
}

/// The destination of segments: a transmit ring, or a test.
pub trait Output<C: Carrier> {
    /// Bytes of payload that one segment may have if the device can cut it, or 0 if the device
    /// cannot.
    fn max_payload(&self) -> usize;

    /// Sends a segment.
    ///
    /// # Errors
    /// The ring is full. The connection has not changed, and passes the same segment again later.
    fn transmit(&mut self, segment: Outgoing<'_, C>) -> Result<C::Ticket, Full>;
}

/// The ring has no room. Call [`Connection::poll_transmit`](super::Connection::poll_transmit) again
/// when it has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ring is full")]
pub struct Full;
