//! The state that a stack and a handle of another thread share, besides their rings; and the hub,
//! by which a handle notifies the stack.
//!
//! ```text
//!   handle: ring, or Port::ask ──► signal ──► Hub: queue of ports ──► Hub::next ──► the stack
//!   handle ◄── wakers ◄── Port: connected, failed, end of reading ◄────────────────────┘
//! ```
//!
//! **A port is in the queue at most once.** `queued` is true while it is. The thread that exchanges
//! false for true pushes the port. The stack exchanges it for false *before* it polls the port. So
//! the queue has no more entries than there are handles, and needs no bound of its own.
//!
//! **Closing cannot fail.** It is a bit of `asked`, which no ring has to have room for. A bit that is
//! set stays set.
//!
//! **The end of the stack** reaches each handle: a port that the stack knows is failed by it, and
//! those in the queue by [`Hub::close`].
//!
//! # Races
//!
//! **A signal against a poll of the port.** All accesses to `queued` are exchanges. If the handle's
//! exchange returns true, it is before the stack's, so the stack sees what the handle did before it.
//!
//! ```text
//!   handle                                    stack
//!   push payload                              pop port from the queue
//!   queued: true for true, no push            queued: false for true
//!                                             polls the port: pops the payload
//! ```
//!
//! **A signal against the stack that goes to sleep.** The handle pushes, and then reads the
//! notifier's flag. The stack sets the flag, and then reads the queue:
//! [`notifier`](crate::stack::shared::notifier) has the protocol.
//!
//! **A close against payload.** The handle pushes payload, and then sets the bit. The stack reads the
//! bits, and then pops until the ring is empty. So what was pushed before a close is sent before it.
//!
//! ```text
//!   handle                                    stack
//!   push payload                              asked has no SHUTDOWN
//!   asked |= SHUTDOWN, signal                 pops: the payload, or nothing
//!                                             the next poll: asked has SHUTDOWN, pops the rest,
//!                                             then FIN
//! ```
//!
//! **A push against the end of the stack.** A handle that pushes its port after the stack has closed
//! the hub reads `closed`, and ends the ports in the queue itself. A sequentially consistent fence
//! stands between each side's write and its read, so one of the two pops the port. (Loom's stand-in
//! of the queue is a lock, which orders the two without the fences.)
//!
//! ```text
//!   handle                                    stack
//!   push port                                 closed = true
//!   fence                                     fence
//!   closed is true: ends the queue            ends the queue
//! ```
//!
//! **A reader that goes to sleep against the end.** The reader registers its waker, and reads the end.
//! The stack stores the end, and then calls the waker. So the reader sees the end, or is woken.

use crate::stack::error::SocketError;
use crate::stack::remote::sync::{AtomicBool, AtomicU8, AtomicU32, Ordering, Queue, WakerCell, fence};
use crate::stack::shared::notifier::Notifier;
use crate::tcp::{Error, Unreachable};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake};

/// The requests of a handle, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked(u32);

impl Asked {
    /// The sending direction ends after the payload in the ring.
    pub(crate) const SHUTDOWN: Self = Self(1);
    /// The connection is reset.
    pub(crate) const RESET: Self = Self(2);
    /// The half that reads, or the listener, is gone.
    pub(crate) const READER_GONE: Self = Self(4);
    /// The half that writes is gone.
    pub(crate) const WRITER_GONE: Self = Self(8);
    /// The half that reads has left payload that it did not read.
    pub(crate) const UNREAD: Self = Self(16);
    /// The half that writes found no page, and waits for one.
    pub(crate) const PAGE: Self = Self(32);
    /// With `PAGE`: the counts admit it, but the pool is empty.
    pub(crate) const POOL: Self = Self(64);

    pub(crate) fn has(self, bits: Self) -> bool {
        self.0 & bits.0 == bits.0
    }

    pub(crate) fn and(self, bits: Self) -> Self {
        Self(self.0 | bits.0)
    }
}

/// The errors with which a handle ends. The code of an error is its place, and 1 more.
const ENDS: [SocketError; 17] = [
    SocketError::StackGone,
    SocketError::Closed(Error::Refused),
    SocketError::Closed(Error::Reset),
    SocketError::Closed(Error::TimedOut),
    SocketError::Closed(Error::DeviceGone),
    SocketError::Closed(Error::Aborted),
    SocketError::Closed(Error::Unreachable(Unreachable::Network)),
    SocketError::Closed(Error::Unreachable(Unreachable::Host)),
    SocketError::Closed(Error::Unreachable(Unreachable::Protocol)),
    SocketError::Closed(Error::Unreachable(Unreachable::Port)),
    SocketError::Closed(Error::Unreachable(Unreachable::Prohibited)),
    SocketError::Closed(Error::Unreachable(Unreachable::NotDelivered)),
    SocketError::NoRoute,
    SocketError::NoPort,
    SocketError::TooMany,
    SocketError::InUse,
    SocketError::NotOurs,
];
/// The code of an end that is no error: the peer sends no more.
const FINISHED: u8 = u8::MAX;

fn code(error: SocketError) -> u8 {
    // There are no others. A stack that is gone is what a handle can do least about.
    ENDS.iter().position(|end| *end == error).map_or(1, |place| place as u8 + 1)
}

fn error(code: u8) -> Option<SocketError> {
    ENDS.get(usize::from(code).checked_sub(1)?).copied()
}

/// What a handle and the stack share. `O` is what a new port has for the stack.
pub(crate) struct Port<O> {
    hub: Arc<Hub<O>>,
    /// The port is in the hub's queue.
    queued: AtomicBool,
    asked: AtomicU32,
    connected: AtomicBool,
    /// The code of the error with which the connection, or the listener, has ended.
    failure: AtomicU8,
    /// The code of what follows the payload in the ring.
    read_end: AtomicU8,
    reader: WakerCell,
    writer: WakerCell,
    local: OnceLock<SocketAddr>,
    /// Where the stack has its part of the connection. Only the stack's thread uses it.
    pub(crate) place: AtomicU32,
}

impl<O> Port<O> {
    pub(crate) fn new(hub: Arc<Hub<O>>) -> Self {
        Self {
            hub,
            queued: AtomicBool::new(false),
            asked: AtomicU32::new(0),
            connected: AtomicBool::new(false),
            failure: AtomicU8::new(0),
            read_end: AtomicU8::new(0),
            reader: WakerCell::new(),
            writer: WakerCell::new(),
            local: OnceLock::new(),
            place: AtomicU32::new(u32::MAX),
        }
    }

    // ---- the handle

    /// The stack polls the port in its own next poll. Cannot fail.
    pub(crate) fn signal(self: &Arc<Self>) {
        self.signal_with(None);
    }

    /// The stack learns of the port, and gets `open`.
    pub(crate) fn open(self: &Arc<Self>, open: O) {
        self.signal_with(Some(open));
    }

    fn signal_with(self: &Arc<Self>, open: Option<O>) {
        if !self.queued.swap(true, Ordering::AcqRel) || open.is_some() {
            self.hub.push(Signal { port: self.clone(), open });
        }
    }

    /// Asks for something. Cannot fail.
    pub(crate) fn ask(self: &Arc<Self>, bits: Asked) {
        self.asked.fetch_or(bits.0, Ordering::AcqRel);
        self.signal();
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }

    /// The error with which the connection has ended, if it has.
    pub(crate) fn failure(&self) -> Option<SocketError> {
        error(self.failure.load(Ordering::Acquire))
    }

    /// What follows the payload in the ring, if that is all. It is read before the ring is.
    pub(crate) fn read_end(&self) -> Option<Result<(), SocketError>> {
        match self.read_end.load(Ordering::Acquire) {
            FINISHED => Some(Ok(())),
            code => error(code).map(Err),
        }
    }

    /// This end of the connection, as soon as the stack has chosen it.
    pub(crate) fn local(&self) -> Option<SocketAddr> {
        self.local.get().copied()
    }

    /// Registers the waker of the half that reads, or of a listener. The caller reads the ring and
    /// the end after this call.
    pub(crate) fn register_reader(&self, cx: &mut Context<'_>) {
        self.reader.register(cx.waker());
    }

    /// The same for the half that writes.
    pub(crate) fn register_writer(&self, cx: &mut Context<'_>) {
        self.writer.register(cx.waker());
    }

    // ---- the stack

    /// The requests so far. They are read before the ring is.
    pub(crate) fn asked(&self) -> Asked {
        Asked(self.asked.load(Ordering::Acquire))
    }

    /// Removes bits that are asked for more than once. Returns whether they were there.
    pub(crate) fn take(&self, bits: Asked) -> bool {
        self.asked().has(bits) && Asked(self.asked.fetch_and(!bits.0, Ordering::AcqRel)).has(bits)
    }

    pub(crate) fn set_local(&self, local: SocketAddr) {
        let _ = self.local.set(local);
    }

    /// The handshake is complete; or a listener listens.
    pub(crate) fn set_connected(&self) {
        if !self.is_connected() {
            self.connected.store(true, Ordering::Release);
            self.wake_writer();
        }
    }

    /// The connection, or the listener, has ended with an error. The first one counts.
    pub(crate) fn fail(&self, error: SocketError) {
        if self.failure.compare_exchange(0, code(error), Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.wake_writer();
        }
    }

    /// What is in the ring is all, and `end` follows it. The first one counts.
    pub(crate) fn finish_reading(&self, end: Result<(), SocketError>) {
        let end = end.map_or_else(code, |()| FINISHED);
        if self.read_end.compare_exchange(0, end, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.wake_reader();
        }
    }

    pub(crate) fn wake_reader(&self) {
        self.reader.wake();
    }

    pub(crate) fn wake_writer(&self) {
        self.writer.wake();
    }

    /// The stack has ended.
    pub(crate) fn end(&self) {
        self.fail(SocketError::StackGone);
        self.finish_reading(Err(SocketError::StackGone));
    }
}

/// A call that can do nothing at present is pending.
pub(crate) fn pending<T>(outcome: Result<T, SocketError>) -> Poll<Result<T, SocketError>> {
    match outcome {
        Err(SocketError::WouldBlock) => Poll::Pending,
        outcome => Poll::Ready(outcome),
    }
}

/// The stack polls the port of a connection that has payload, room or an end for it.
impl<O: Send + 'static> Wake for Port<O> {
    fn wake(self: Arc<Self>) {
        self.signal();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.signal();
    }
}

/// A port that the stack is to poll.
pub(crate) struct Signal<O> {
    pub(crate) port: Arc<Port<O>>,
    /// What a new port has for the stack.
    pub(crate) open: Option<O>,
}

/// The ports that a stack is to poll, and the stack's end.
pub(crate) struct Hub<O> {
    queue: Queue<Signal<O>>,
    closed: AtomicBool,
    notifier: Arc<Notifier>,
}

impl<O> Hub<O> {
    pub(crate) fn new(notifier: Arc<Notifier>) -> Self {
        Self { queue: Queue::new(), closed: AtomicBool::new(false), notifier }
    }

    fn push(&self, signal: Signal<O>) {
        self.queue.push(signal);
        fence(Ordering::SeqCst);
        if self.closed.load(Ordering::Relaxed) {
            self.clear();
        }
        self.notifier.notify_published();
    }

    // ---- the stack

    pub(crate) fn has_work(&self) -> bool {
        !self.queue.is_empty()
    }

    /// How many ports wait.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// The next port. It can be signalled again from now on.
    pub(crate) fn next(&self) -> Option<Signal<O>> {
        let signal = self.queue.pop()?;
        signal.port.queued.swap(false, Ordering::AcqRel);
        Some(signal)
    }

    /// The stack has ended: ends the ports that wait, and those that are signalled later.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.clear();
    }

    fn clear(&self) {
        while let Some(signal) = self.next() {
            signal.port.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An error that a connection can end with, and that is added, is added to the table.
    #[test]
    fn each_error_has_a_code() {
        let reasons = [
            Unreachable::Network,
            Unreachable::Host,
            Unreachable::Protocol,
            Unreachable::Port,
            Unreachable::Prohibited,
            Unreachable::NotDelivered,
        ];
        let known = |reason| match reason {
            Error::Refused | Error::Reset | Error::TimedOut | Error::DeviceGone | Error::Aborted => true,
            Error::Unreachable(reason) => reasons.contains(&reason),
        };
        assert!(ENDS.iter().all(|end| if let SocketError::Closed(reason) = end { known(*reason) } else { true }));
        assert!(reasons.iter().all(|reason| ENDS.contains(&SocketError::Closed(Error::Unreachable(*reason)))));
        for (place, &end) in ENDS.iter().enumerate() {
            assert_eq!((code(end), error(code(end))), (place as u8 + 1, Some(end)));
        }
        assert_eq!((error(0), error(FINISHED)), (None, None));
    }
}
