//! Traits for the memory that holds the payload of a connection.
//!
//! Why traits: the state machine trims, joins and holds payload, and never reads it. So payload can
//! be in pages, in device memory that CPUs cannot read, or in no memory at all.

/// A piece of payload: a fragment of a page, or a range of memory that CPUs cannot read.
///
/// A clone is another holder of the same bytes. Dropping the last holder returns the memory.
pub trait Chunk: Clone {
    /// The unused memory behind a chunk, into which small chunks are copied. `()` if chunks are
    /// never copied.
    type Tail;

    /// Separates the unused memory behind this chunk from its buffer. `None` if another value uses
    /// the buffer, too, or if chunks are never copied. The buffer is returned when the chunk, the
    /// tail and all that was copied into it are dropped.
    fn split_tail(&mut self) -> Option<Self::Tail> {
        None
    }

    /// Copies this chunk to the beginning of `tail`, which gets shorter. The copy is directly
    /// behind what was copied before, or behind the chunk from which the tail was separated. `None`
    /// if it has no room.
    fn copy_to_tail(&self, tail: &mut Self::Tail) -> Option<Self> {
        let _ = tail;
        None
    }

    /// Whether there are chunks that one frame cannot carry one behind the other: see
    /// [`precedes`](Self::precedes).
    const MIXED: bool = false;

    /// Whether one frame can carry `next` directly behind this chunk. This is only called if chunks
    /// are [`MIXED`](Self::MIXED).
    fn precedes(&self, next: &Self) -> bool {
        let _ = next;
        true
    }

    /// Whether `next` is directly behind this chunk in the same memory, so that both can be
    /// [joined](Self::join).
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

/// The handle of a transmission that was posted to a device.
pub trait Ticket {
    /// Whether the device is done with the transmission, so that it does not read the payload any
    /// more.
    fn is_done(&self) -> bool;

    /// Whether the device is done with segment `n` of the transmission, counted from 0. A lost
    /// segment is then sent again before the device is done with those behind it.
    fn is_done_with(&self, n: u32) -> bool {
        let _ = n;
        self.is_done()
    }
}

/// The kinds of memory of a connection. Received and sent payload can be in different kinds.
pub trait Carrier: 'static {
    /// The type of received payload.
    type Received: Chunk;
    /// The type of payload to be sent. Each transmission holds a clone, and the connection holds
    /// one until it is acknowledged.
    type Sent: Chunk;
    /// The handle of a transmission.
    type Ticket: Ticket;
}
