//! What holds the payload of a connection.

/// A piece of payload: a fragment of a page, or a range of memory that no CPU reads.
///
/// A clone is another holder of the same bytes. Dropping the last one gives the memory back.
pub trait Chunk: Clone {
    /// Bytes.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops the first `n` bytes, of which there are so many.
    fn advance(&mut self, n: usize);

    /// Drops all but the first `len` bytes, of which there are so many.
    fn truncate(&mut self, len: usize);
}

/// A transmission that was given to a device.
pub trait Ticket {
    /// Whether the device is done with it: it does not read the payload any more.
    fn is_done(&self) -> bool;
}

/// The kinds of memory of a connection. What is received and what is sent can be in different memory.
pub trait Carrier: 'static {
    /// Payload that was received.
    type Received: Chunk;
    /// Payload to be sent. Each transmission holds a clone, and the connection holds one until it is acknowledged.
    type Sent: Chunk;
    /// What the device was given.
    type Ticket: Ticket;
}
