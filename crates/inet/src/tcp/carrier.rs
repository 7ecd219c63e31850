//! Traits for the memory that holds the payload of a connection.

/// A piece of payload: a fragment of a page, or a range of memory that CPUs cannot read.
///
/// A clone is another holder of the same bytes. Dropping the last holder returns the memory.
pub trait Chunk: Clone {
    /// Whether there are chunks that one frame cannot carry one behind the other: see [`precedes`](Self::precedes).
    const MIXED: bool = false;

    /// Whether one frame can carry `next` directly behind this chunk. This is only called if chunks are
    /// [`MIXED`](Self::MIXED).
    fn precedes(&self, next: &Self) -> bool {
        let _ = next;
        true
    }

    /// Whether `next` is directly behind this chunk in the same memory, so that both can be [joined](Self::join).
    fn continues(&self, next: &Self) -> bool {
        let _ = next;
        false
    }

    /// Extends this chunk by `next`, which [continues](Self::continues) it.
    fn join(&mut self, next: Self) {
        let _ = next;
    }

    /// The length in bytes.
    fn len(&self) -> usize;

    /// Whether the chunk has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops the first `n` bytes. `n` is at most the length.
    fn advance(&mut self, n: usize);

    /// Drops all but the first `len` bytes. `len` is at most the length.
    fn truncate(&mut self, len: usize);
}

/// The handle of a transmission that was given to a device.
pub trait Ticket {
    /// Whether the device is done with the transmission, so that it does not read the payload any more.
    fn is_done(&self) -> bool;
}

/// The kinds of memory of a connection. Received and sent payload can be in different kinds.
pub trait Carrier: 'static {
    /// The type of received payload.
    type Received: Chunk;
    /// The type of payload to be sent. Each transmission holds a clone, and the connection holds one until it is
    /// acknowledged.
    type Sent: Chunk;
    /// The handle of a transmission.
    type Ticket: Ticket;
}
