//! The memory of payload: shared bytes, which no device reads.

use netmem_inet::tcp::{Carrier, Chunk, Ticket};
use std::sync::Arc;

/// A range of shared bytes.
#[derive(Clone, Debug)]
pub(super) struct SharedBytes {
    bytes: Arc<[u8]>,
    from: usize,
    to: usize,
}

impl SharedBytes {
    pub(super) fn new(bytes: &[u8]) -> Self {
        Self { bytes: bytes.into(), from: 0, to: bytes.len() }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.from..self.to]
    }
}

impl Chunk for SharedBytes {
    type Tail = ();

    fn len(&self) -> usize {
        self.to - self.from
    }

    fn advance(&mut self, n: usize) {
        self.from += n;
    }

    fn truncate(&mut self, len: usize) {
        self.to = self.from + len;
    }
}

/// The ticket of a transmission. Each packet is complete at once.
pub(super) struct Done;

impl Ticket for Done {
    fn is_done(&self) -> bool {
        true
    }
}

pub(super) struct Memory;

impl Carrier for Memory {
    type Received = SharedBytes;
    type Sent = SharedBytes;
    type Ticket = Done;
}
