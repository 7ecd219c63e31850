//! Payload of simulated connections: shared bytes with a count of their holders, so that a test notices a chunk that is
//! never dropped.

use netmem_inet::tcp::{Carrier, Chunk, Ticket};
use std::cell::Cell;
use std::rc::Rc;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
}

/// Allocations of this thread that are not dropped.
pub(crate) fn live() -> usize {
    LIVE.get()
}

#[derive(Debug)]
struct Bytes(Vec<u8>);

impl Drop for Bytes {
    fn drop(&mut self) {
        LIVE.set(LIVE.get() - 1);
    }
}

/// A range of shared bytes.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    bytes: Rc<Bytes>,
    from: usize,
    to: usize,
}

impl Piece {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        LIVE.set(LIVE.get() + 1);
        Self { from: 0, to: bytes.len(), bytes: Rc::new(Bytes(bytes)) }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes.0[self.from..self.to]
    }
}

impl Chunk for Piece {
    fn len(&self) -> usize {
        self.to - self.from
    }

    fn advance(&mut self, n: usize) {
        assert!(n <= self.len());
        self.from += n;
    }

    fn truncate(&mut self, len: usize) {
        assert!(len <= self.len());
        self.to = self.from + len;
    }
}

/// A transmission that the device still holds, until the flag says otherwise.
pub(crate) struct Posted(pub(crate) Rc<Cell<bool>>);

impl Ticket for Posted {
    fn is_done(&self) -> bool {
        self.0.get()
    }
}

#[derive(Debug)]
pub(crate) struct Memory;

impl Carrier for Memory {
    type Received = Piece;
    type Sent = Piece;
    type Ticket = Posted;
}
