//! The general way, on a clone of a connection, where the connection itself may take a short one.

use netmem_inet::Time;
use netmem_inet::tcp::{Accepted, Connection, Full, Header, Outgoing, Output, SegmentMeta};
use netmem_testing::simulated_memory::{Memory, Posted, SharedBytes};

/// A segment that a device has accepted: `len` bytes of its payload.
pub(crate) struct Sent {
    pub(crate) header: Header,
    pub(crate) ticket: Posted,
    pub(crate) len: u32,
}

/// An output with the results of another one, to which the same segments are passed again.
pub(crate) struct Again<'s> {
    pub(crate) offload: usize,
    /// The segments that are not passed yet.
    pub(crate) sent: &'s [Sent],
    /// What the other one returned for the next segment, if it was refused.
    pub(crate) result: Result<(), Full>,
}

impl Output<Memory> for Again<'_> {
    fn max_payload(&self) -> usize {
        self.offload
    }

    fn transmit(&mut self, segment: Outgoing<'_, Memory>) -> Result<Accepted<Posted>, Full> {
        let Some((sent, rest)) = self.sent.split_first() else {
            self.result?;
            panic!("the general way also sends {:?}", segment.header)
        };
        self.sent = rest;
        assert_eq!(*segment.header, sent.header, "the general way");
        Ok(Accepted { ticket: sent.ticket.clone(), len: sent.len })
    }
}

/// Has a connection process a segment. If this `compares`, a clone processes it, too, in the
/// general way. Returns whether that was possible.
pub(crate) fn handle_segment(
    connection: &mut Connection<Memory>,
    compares: bool,
    header: &Header,
    chunks: Vec<SharedBytes>,
    meta: SegmentMeta,
    now: Time,
) -> bool {
    let clone = compares.then(|| connection.cloned(chunks.len() as u32)).flatten();
    let Some(mut clone) = clone else {
        connection.handle_segment(header, chunks, meta, now);
        return false;
    };
    clone.handle_segment_generally(header, chunks.iter().cloned(), meta, now);
    connection.handle_segment(header, chunks, meta, now);
    assert_eq!(connection.values(), clone.values(), "an expected segment");
    true
}
