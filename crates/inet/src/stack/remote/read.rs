//! The half of a stream that reads.

use crate::stack::error::SocketError;
use crate::stack::remote::parts::{PLACES, StreamPort};
use crate::stack::remote::port::{Asked, pending};
use crate::stack::remote::ring::Receiver;
use crate::stack::sockets::fragment::Fragment;
use netmem_pool::Mapped;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

/// The half of a [`TcpStream`](super::TcpStream) that reads. It can be used on another thread than
/// the other half.
///
/// Dropping it does not close the connection. What the peer sends is not read then, and its window
/// closes. The connection is closed when both halves are dropped.
pub struct ReadHalf<M: Mapped> {
    port: Arc<StreamPort<M>>,
    received: Receiver<Fragment<M>, PLACES>,
    /// What [`read`](Self::read) has not copied yet.
    rest: Fragment<M>,
}

impl<M: Mapped> ReadHalf<M> {
    pub(crate) fn new(port: Arc<StreamPort<M>>, received: Receiver<Fragment<M>, PLACES>) -> Self {
        Self { port, received, rest: Fragment::default() }
    }

    /// Receives payload without a copy: the next payload in order is stored in the places of
    /// `into`, a fragment each. Returns how many places were filled; 0 means that the peer sends no
    /// more, unless `into` is empty. The pages count in the connection's budget until they are
    /// dropped.
    ///
    /// Cost: a fence, and the wake-up of the stack's thread if the ring was full and it sleeps.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: nothing is there. [`SocketError::Closed`];
    /// [`SocketError::StackGone`].
    pub fn recv(&mut self, into: &mut [Fragment<M>]) -> Result<usize, SocketError> {
        if into.is_empty() {
            return Ok(0);
        }
        // The end is what follows the payload, so it is read before.
        let end = self.port.read_end();
        let rest = (!self.rest.is_empty()).then(|| std::mem::take(&mut self.rest));
        let mut filled = 0;
        let payload = rest.into_iter().chain(std::iter::from_fn(|| self.received.pop()));
        for (place, fragment) in into.iter_mut().zip(payload) {
            *place = fragment;
            filled += 1;
        }
        if filled > 0 {
            self.release();
            return Ok(filled);
        }
        end.map_or(Err(SocketError::WouldBlock), |end| end.map(|()| 0))
    }

    /// Like [`recv`](Self::recv); the waker is called when there is something to receive.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>, into: &mut [Fragment<M>]) -> Poll<Result<usize, SocketError>> {
        self.poll(cx, |half| half.recv(into))
    }

    /// Copies received bytes out. Returns how many; 0 means that the peer sends no more, unless
    /// `into` is empty. They do not count in
    /// [`StackStats::copied_received`](crate::StackStats::copied_received).
    ///
    /// # Errors
    ///
    /// The errors of [`recv`](Self::recv).
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, SocketError> {
        let end = self.port.read_end();
        let mut copied = 0;
        let mut popped = false;
        while copied < into.len() {
            if self.rest.is_empty() {
                let Some(next) = self.received.pop() else { break };
                (self.rest, popped) = (next, true);
            }
            let n = self.rest.len().min(into.len() - copied);
            let out = self.rest.copy_to(0, &mut into[copied..copied + n]);
            debug_assert!(out.is_ok());
            self.rest.advance(n);
            copied += n;
        }
        if popped {
            self.release();
        }
        if copied > 0 || into.is_empty() {
            return Ok(copied);
        }
        end.map_or(Err(SocketError::WouldBlock), |end| end.map(|()| 0))
    }

    /// Like [`read`](Self::read); the waker is called when there is something to read.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<usize, SocketError>> {
        self.poll(cx, |half| half.read(into))
    }

    fn release(&mut self) {
        if self.received.release() {
            self.port.signal();
        }
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        mut call: impl FnMut(&mut Self) -> Result<usize, SocketError>,
    ) -> Poll<Result<usize, SocketError>> {
        let outcome = call(self);
        if outcome != Err(SocketError::WouldBlock) {
            return Poll::Ready(outcome);
        }
        self.port.register_reader(cx);
        self.received.wait_for_items();
        pending(call(self))
    }
}

impl<M: Mapped> Drop for ReadHalf<M> {
    fn drop(&mut self) {
        let unread = !self.rest.is_empty() || !self.received.is_empty();
        let bits = if unread { Asked::READER_GONE.and(Asked::UNREAD) } else { Asked::READER_GONE };
        self.port.ask(bits);
    }
}

impl<M: Mapped> fmt::Debug for ReadHalf<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadHalf")
    }
}
