//! Payload and tickets for tests: a chunk is a place in the sequence space and a length.

use std::cell::Cell;
use std::rc::Rc;

use crate::tcp::{Carrier, Chunk, Ticket};

/// Bytes that are known by the number of the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bytes {
    at: u32,
    len: u32,
}

impl Bytes {
    pub(super) fn new(at: u32, len: u32) -> Self {
        Self { at, len }
    }
}

impl Chunk for Bytes {
    fn len(&self) -> usize {
        self.len as usize
    }

    fn advance(&mut self, n: usize) {
        self.at = self.at.wrapping_add(n as u32);
        self.len -= n as u32;
    }

    fn truncate(&mut self, len: usize) {
        self.len = len as u32;
    }
}

/// A ticket that is done when the test says so.
#[derive(Clone, Debug)]
pub(super) struct Token(Rc<Cell<bool>>);

impl Token {
    pub(super) fn pending() -> Self {
        Self(Rc::new(Cell::new(false)))
    }

    pub(super) fn done() -> Self {
        Self(Rc::new(Cell::new(true)))
    }

    pub(super) fn finish(&self) {
        self.0.set(true);
    }
}

impl Ticket for Token {
    fn is_done(&self) -> bool {
        self.0.get()
    }
}

/// Payload in no memory.
#[derive(Debug)]
pub(super) struct Nothing;

impl Carrier for Nothing {
    type Received = Bytes;
    type Sent = Bytes;
    type Ticket = Token;
}
