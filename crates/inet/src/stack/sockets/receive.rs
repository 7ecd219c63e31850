//! What a stream receives: chunks of payload in any memory, fragments of host memory, or copied
//! bytes.

use crate::stack::core::Core;
use crate::stack::error::SocketError;
use crate::stack::payload::Payload;
use crate::stack::sockets::fragment::Fragment;
use crate::stack::sockets::stream::TcpStream;
use crate::stack::transport::idle::Seen;
use crate::tcp::{Budget, Held, ReadOutcome};
use netmem_pool::{Frag, Mapped};
use std::ops::Range;
use std::task::{Context, Poll};

impl<P: Payload> TcpStream<P> {
    /// Receives the next payload in order, in any kind of memory, if `accepts` returns true for it.
    /// `None` means that the peer sends no more. [`recv`](Self::recv) is for payload in host
    /// memory. `accepts` must not call sockets.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: nothing is there, or it was not accepted.
    /// [`SocketError::Closed`].
    pub fn recv_chunk(
        &mut self,
        accepts: impl FnOnce(&P::Received) -> bool,
    ) -> Result<Option<Held<P::Received>>, SocketError> {
        let mut core = self.core.borrow_mut();
        let now = core.resources.now;
        if let Some(is_at_end) = core.tcp.connections.idle_end(self.id) {
            return if is_at_end { Ok(None) } else { Err(SocketError::WouldBlock) };
        }
        let entry = core.tcp.connections.get_mut(self.id).ok_or(SocketError::StackGone)?;
        if entry.connection.peek().is_some_and(|chunk| !accepts(chunk)) {
            return Err(SocketError::WouldBlock);
        }
        match entry.connection.recv(now) {
            Ok(ReadOutcome::Chunk(held)) => {
                // The window may have opened.
                core.touch(self.id);
                Ok(Some(held))
            }
            Ok(ReadOutcome::Empty) => Err(SocketError::WouldBlock),
            Ok(ReadOutcome::End) => Ok(None),
            Err(error) => Err(SocketError::Closed(error)),
        }
    }

    /// Calls `see` for the queued pieces of payload with the numbers in `which`; piece 0 is the
    /// piece that is received next. Returns how many pieces there were. This is for prefetches.
    /// `see` must not call sockets.
    pub fn peek_queued(&self, which: Range<usize>, see: impl FnMut(&P::Received)) -> usize {
        let core = self.core.borrow();
        let Some(Seen::Working(entry)) = core.tcp.connections.see(self.id) else { return 0 };
        // Most calls of a receiver that polls find nothing.
        if entry.connection.peek().is_none() {
            return 0;
        }
        entry.connection.queued_from(which.start).take(which.len()).map(see).count()
    }

    /// Registers the waker, which is called when there may be payload to receive, or the connection
    /// ends.
    pub fn register_reader(&mut self, cx: &mut Context<'_>) {
        let _: Poll<()> = self.wait_to_read(cx);
    }

    /// The budget in which buffers of received payload count until their user returns them.
    /// `None` if the stack is gone.
    ///
    /// Cost: if the connection is idle, its state is copied into about 1.7 KB that are allocated
    /// for the call.
    #[must_use]
    pub fn budget(&self) -> Option<Budget> {
        let core = self.core.borrow();
        core.tcp.connections.see(self.id).map(|seen| seen.connection().budget().clone())
    }

    /// Segments in the window that were dropped since payload last arrived: the device had not
    /// verified their checksum, and their payload is in memory that this process cannot read. If
    /// this grows, the peer's payload never arrives. A few may just be damaged.
    #[must_use]
    pub fn unverified(&self) -> u64 {
        self.core.borrow().tcp.connections.see(self.id).map_or(0, |seen| seen.unverified())
    }

    /// Bytes that can be received now.
    #[must_use]
    pub fn readable(&self) -> usize {
        let core = self.core.borrow();
        let readable = match core.tcp.connections.see(self.id) {
            Some(Seen::Working(entry)) => entry.connection.readable(),
            _ => 0,
        };
        self.rest.len() + readable
    }

    /// How many bytes from the reading position on are urgent, if any are. They are read in line.
    ///
    /// Cost: if the connection is idle, its state is copied into about 1.7 KB that are allocated
    /// for the call.
    #[must_use]
    pub fn urgent(&self) -> Option<u32> {
        let core = self.core.borrow();
        core.tcp.connections.see(self.id)?.connection().urgent()
    }

    /// Shuts down the reading direction: after the bytes that were received, reads return the end
    /// of the stream. The peer is not notified; what it still sends is acknowledged.
    pub fn shutdown_read(&mut self) {
        self.with(|connection, _| connection.shutdown_read());
    }
}

/// Payload in host memory.
impl<M: Mapped> TcpStream<M> {
    /// Receives payload without a copy: the next payload in order is stored in the places of
    /// `into`, a fragment each. Returns how many places were filled; 0 means that the peer sends no
    /// more.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: nothing is there. [`SocketError::Closed`].
    pub fn recv(&mut self, into: &mut [Fragment<M>]) -> Result<usize, SocketError> {
        let mut places = into.iter_mut();
        let mut filled = 0;
        if !self.rest.is_empty()
            && let Some(place) = places.next()
        {
            *place = std::mem::take(&mut self.rest);
            filled = 1;
        }
        let Core { tcp, resources, .. } = &mut *self.core.borrow_mut();
        let now = resources.now;
        if let Some(is_at_end) = tcp.connections.idle_end(self.id) {
            let is_done = filled > 0 || is_at_end || places.len() == 0;
            return if is_done { Ok(filled) } else { Err(SocketError::WouldBlock) };
        }
        let entry = tcp.connections.get_mut(self.id).ok_or(SocketError::StackGone)?;
        let mut outcome = Ok(());
        for place in places {
            match entry.connection.recv(now) {
                Ok(ReadOutcome::Chunk(held)) => *place = Fragment::new(held),
                Ok(ReadOutcome::Empty) => {
                    outcome = Err(SocketError::WouldBlock);
                    break;
                }
                Ok(ReadOutcome::End) => break,
                Err(error) => {
                    outcome = Err(SocketError::Closed(error));
                    break;
                }
            }
            filled += 1;
        }
        if filled > 0 {
            // The window may have opened.
            tcp.schedule.enqueue(self.id, entry);
            resources.wake_driver();
            return Ok(filled);
        }
        outcome.map(|()| 0)
    }

    /// Like [`recv`](Self::recv); the waker is called when there is something to receive.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>, into: &mut [Fragment<M>]) -> Poll<Result<usize, SocketError>> {
        match self.recv(into) {
            Err(SocketError::WouldBlock) => self.wait_to_read(cx),
            outcome => Poll::Ready(outcome),
        }
    }

    /// Copies received bytes out. Returns how many; 0 means that the peer sends no more, unless
    /// `into` is empty.
    ///
    /// # Errors
    ///
    /// The errors of [`recv`](Self::recv).
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, SocketError> {
        let mut copied = self.read_rest(into);
        while copied < into.len() {
            let left = &mut into[copied..];
            let mut held = match self.recv_to_copy(left.len()) {
                Ok(Some(held)) => held,
                Ok(None) => break,
                Err(_) if copied > 0 => break,
                Err(error) => return Err(error),
            };
            let n = held.len().min(left.len());
            let out = held.copy_to(0, &mut left[..n]);
            debug_assert!(out.is_ok());
            if n < held.len() {
                held.advance(n);
                self.rest = Fragment::new(held);
            }
            copied += n;
        }
        Ok(copied)
    }

    /// Copies what the last call has left.
    fn read_rest(&mut self, into: &mut [u8]) -> usize {
        let n = self.rest.len().min(into.len());
        if n > 0 {
            let out = self.rest.copy_to(0, &mut into[..n]);
            debug_assert!(out.is_ok());
            self.rest.advance(n);
            self.core.borrow_mut().resources.egress.stats.copied_received += n as u64;
        }
        n
    }

    /// The next payload, of which up to `most` bytes are copied out. `None`: the peer sends no
    /// more. The caller drops it after the borrow of the tables has ended, because the payload's
    /// drop may call user code.
    fn recv_to_copy(&self, most: usize) -> Result<Option<Held<Frag<M>>>, SocketError> {
        let Core { tcp, resources, .. } = &mut *self.core.borrow_mut();
        if let Some(is_at_end) = tcp.connections.idle_end(self.id) {
            return if is_at_end { Ok(None) } else { Err(SocketError::WouldBlock) };
        }
        let entry = tcp.connections.get_mut(self.id).ok_or(SocketError::StackGone)?;
        match entry.connection.recv(resources.now) {
            Ok(ReadOutcome::Chunk(held)) => {
                // The window may have opened.
                tcp.schedule.enqueue(self.id, entry);
                resources.egress.stats.copied_received += held.len().min(most) as u64;
                resources.wake_driver();
                Ok(Some(held))
            }
            Ok(ReadOutcome::Empty) => Err(SocketError::WouldBlock),
            Ok(ReadOutcome::End) => Ok(None),
            Err(error) => Err(SocketError::Closed(error)),
        }
    }

    /// Like [`read`](Self::read); the waker is called when there is something to read.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<usize, SocketError>> {
        match self.read(into) {
            Err(SocketError::WouldBlock) => self.wait_to_read(cx),
            outcome => Poll::Ready(outcome),
        }
    }
}
