//! What leaves a connection.

use super::{Carrier, Header};

/// A segment to be sent.
#[derive(Debug)]
pub struct Outgoing<'a, C: Carrier> {
    /// Its header.
    pub header: &'a Header,
    /// Its payload, in order. The output holds clones of it until the device is done.
    pub payload: &'a [C::Sent],
    /// Bytes of payload.
    pub payload_len: u32,
    /// If there is more payload than this, the device cuts the segment into segments of this size.
    pub segment_size: u32,
    /// The IP header says that the transport is capable of ECN: ECT(0).
    pub ect: bool,
    /// The segment probes for a larger path MTU. It must not be fragmented, although it is larger than the path MTU that is known.
    pub probe: bool,
}

/// Where segments go: a transmit ring, or a test.
pub trait Output<C: Carrier> {
    /// Bytes of payload that one segment may have if the device cuts it; 0 if it cannot.
    fn max_payload(&self) -> usize;

    /// Sends a segment.
    ///
    /// # Errors
    /// The ring is full. The connection has not changed, and gives the same segment again.
    fn segment(&mut self, segment: Outgoing<'_, C>) -> Result<C::Ticket, Full>;
}

/// The ring has no room. [`Connection::transmit`](super::Connection::transmit) is called again when it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ring is full")]
pub struct Full;
