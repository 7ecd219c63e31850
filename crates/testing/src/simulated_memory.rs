//! Payload of simulated connections: shared bytes with a count of their holders, so that a test
//! notices a chunk that is never dropped.

use netmem_inet::tcp::{Carrier, Chunk, Ticket};
use std::cell::{Cell, Ref, RefCell};
use std::fmt;
use std::rc::Rc;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
}

/// Allocations of this thread that are not dropped.
pub fn live() -> usize {
    LIVE.get()
}

/// Bytes of a buffer.
const BUFFER: usize = 4096;

#[derive(Debug)]
struct Bytes(RefCell<Vec<u8>>);

impl Drop for Bytes {
    fn drop(&mut self) {
        LIVE.set(LIVE.get() - 1);
    }
}

/// A range of shared bytes.
#[derive(Clone)]
pub struct SharedBytes {
    bytes: Rc<Bytes>,
    from: usize,
    to: usize,
}

/// Which range of which bytes it is: two values that print the same are equal.
impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}[{}..{}]", Rc::as_ptr(&self.bytes), self.from, self.to)
    }
}

/// The unused bytes of a buffer.
#[derive(Debug)]
pub struct Tail {
    bytes: Rc<Bytes>,
    from: usize,
}

impl SharedBytes {
    pub fn new(bytes: Vec<u8>) -> Self {
        LIVE.set(LIVE.get() + 1);
        Self { from: 0, to: bytes.len(), bytes: Rc::new(Bytes(RefCell::new(bytes))) }
    }

    pub fn bytes(&self) -> Ref<'_, [u8]> {
        Ref::map(self.bytes.0.borrow(), |bytes| &bytes[self.from..self.to])
    }
}

impl Chunk for SharedBytes {
    type Tail = Tail;

    fn split_tail(&mut self) -> Option<Tail> {
        let sole = Rc::strong_count(&self.bytes) == 1 && self.to < BUFFER;
        sole.then(|| Tail { bytes: self.bytes.clone(), from: self.to })
    }

    fn copy_to_tail(&self, tail: &mut Tail) -> Option<Self> {
        let (from, to) = (tail.from, tail.from + self.len());
        if to > BUFFER {
            return None;
        }
        let copy = self.bytes().to_vec();
        let mut bytes = tail.bytes.0.borrow_mut();
        bytes.truncate(from);
        bytes.extend(copy);
        drop(bytes);
        tail.from = to;
        Some(Self { bytes: tail.bytes.clone(), from, to })
    }

    fn continues(&self, next: &Self) -> bool {
        Rc::ptr_eq(&self.bytes, &next.bytes) && self.to == next.from
    }

    fn join(&mut self, next: Self) {
        self.to = next.to;
    }

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

/// A transmission that the device still holds, until the flags are set: one for all of it, or one
/// for each of its segments.
#[derive(Clone, Debug)]
pub struct Posted(pub Vec<Rc<Cell<bool>>>);

impl Ticket for Posted {
    fn is_done(&self) -> bool {
        self.0.iter().all(|done| done.get())
    }

    fn is_done_with(&self, n: u32) -> bool {
        self.0.get(n as usize).or(self.0.last()).is_none_or(|done| done.get())
    }
}

#[derive(Clone, Debug)]
pub struct Memory;

impl Carrier for Memory {
    type Received = SharedBytes;
    type Sent = SharedBytes;
    type Ticket = Posted;
}
