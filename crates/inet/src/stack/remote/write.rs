//! The half of a stream that writes.

use crate::stack::error::SocketError;
use crate::stack::page_counts::RemotePages;
use crate::stack::remote::option::StreamOption;
use crate::stack::remote::parts::{Outgoing, PLACES, Source, StreamPort};
use crate::stack::remote::port::{Asked, pending};
use crate::stack::remote::ring::Sender;
use netmem_pool::{Frag, Mapped};
use std::fmt;
use std::io::IoSlice;
use std::sync::Arc;
use std::task::{Context, Poll};

/// From this length on, the fragment of written bytes is searched by their address. For fewer
/// bytes, a copy costs less.
const BY_REFERENCE: usize = 512;

/// The half of a [`TcpStream`](super::TcpStream) that writes. It can be used on another thread than
/// the other half.
///
/// Dropping it [shuts down](Self::shutdown) the sending direction. Bytes that were written still
/// arrive. The connection is closed when both halves are dropped.
pub struct WriteHalf<M: Mapped> {
    port: Arc<StreamPort<M>>,
    sent: Sender<Outgoing<M>, PLACES>,
    pages: Arc<RemotePages<M>>,
    is_shut: bool,
}

impl<M: Mapped> WriteHalf<M> {
    pub(crate) fn new(port: Arc<StreamPort<M>>, sent: Sender<Outgoing<M>, PLACES>, pages: Arc<RemotePages<M>>) -> Self {
        Self { port, sent, pages, is_shut: false }
    }

    pub(crate) fn port(&self) -> &Arc<StreamPort<M>> {
        &self.port
    }

    /// Sends a fragment without a copy. Its page must be in memory that the device reaches: a page
    /// that the host's device has received, or one of its pool. The fragment is held until the peer
    /// has acknowledged it and the device has completed each of its transmissions.
    ///
    /// `more`: more payload follows soon, so a segment that is not full may wait for it.
    ///
    /// Cost: a fence, and the wake-up of the stack's thread if the ring was empty and it sleeps.
    ///
    /// # Errors
    ///
    /// Returns the fragment. [`SocketError::WouldBlock`]: the ring is full.
    /// [`SocketError::ShutDown`], [`SocketError::Closed`], [`SocketError::StackGone`].
    pub fn send(&mut self, fragment: Frag<M>, more: bool) -> Result<(), (SocketError, Frag<M>)> {
        if let Err(error) = self.check() {
            return Err((error, fragment));
        }
        if fragment.len() == 0 {
            return Ok(());
        }
        let payload = Outgoing::Payload { frag: fragment, more, source: Source::User };
        match self.sent.push(payload) {
            Err(Outgoing::Payload { frag, .. }) => return Err((SocketError::WouldBlock, frag)),
            Err(Outgoing::Set(_)) | Ok(()) => self.publish(),
        }
        Ok(())
    }

    /// Copies bytes into pages of the stack's pool and sends them, as many as there is room for.
    /// Returns how many.
    ///
    /// If there are at least 512 bytes, and they belong to a [`Bytes`](bytes::Bytes) that was made
    /// of a fragment, they are not copied, as with
    /// [`TcpStream::write`](crate::TcpStream::write) of the stack's thread.
    ///
    /// # Errors
    ///
    /// As of [`send`](Self::send); [`SocketError::WouldBlock`] also if the connection has its share
    /// of the pool's pages, or the pool has none.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, SocketError> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    /// Writes the slices one after the other, as many bytes as there is room for. Returns how many
    /// bytes were written in total.
    ///
    /// # Errors
    ///
    /// As of [`write`](Self::write), if there is room for none.
    pub fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> Result<usize, SocketError> {
        self.check()?;
        let (mut written, mut any) = (0, false);
        for slice in slices.iter().filter(|slice| !slice.is_empty()) {
            any = true;
            let n = self.push_bytes(slice);
            written += n;
            if n < slice.len() {
                break;
            }
        }
        if written > 0 {
            self.publish();
        }
        if written > 0 || !any { Ok(written) } else { Err(SocketError::WouldBlock) }
    }

    /// Puts bytes into the ring, and does not publish them. Returns how many.
    fn push_bytes(&mut self, bytes: &[u8]) -> usize {
        if bytes.len() >= BY_REFERENCE
            && self.sent.room() > 0
            && let Some(frag) = self.pages.frag_of(bytes)
        {
            let payload = Outgoing::Payload { frag, more: false, source: Source::User };
            return if self.sent.push(payload).is_ok() { bytes.len() } else { 0 };
        }
        let mut written = 0;
        // No other thread takes the room, so what was copied is pushed.
        while written < bytes.len() && self.sent.room() > 0 {
            let Some((frag, fills)) = self.pages.write(&bytes[written..]) else { break };
            written += frag.len();
            let payload = Outgoing::Payload { frag, more: false, source: Source::Copied { fills } };
            let pushed = self.sent.push(payload);
            debug_assert!(pushed.is_ok());
        }
        written
    }

    /// Like [`write`](Self::write); the waker is called when there is room.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize, SocketError>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    /// Like [`write_vectored`](Self::write_vectored); the waker is called when there is room.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_write_vectored(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize, SocketError>> {
        let outcome = self.write_vectored(slices);
        if outcome != Err(SocketError::WouldBlock) {
            return Poll::Ready(outcome);
        }
        self.port.register_writer(cx);
        if self.sent.room() > 0 || !self.sent.wait_for_room() {
            // It is a page that was missing.
            self.port.ask(Asked::PAGE);
        }
        pending(self.write_vectored(slices))
    }

    /// Ready when the ring has room for a fragment, or the connection has ended.
    ///
    /// # Errors
    ///
    /// As of [`send`](Self::send).
    pub fn poll_writable(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        if let Err(error) = self.check() {
            return Poll::Ready(Err(error));
        }
        if self.sent.room() > 0 {
            return Poll::Ready(Ok(()));
        }
        self.port.register_writer(cx);
        let full = self.sent.wait_for_room();
        match self.check() {
            Ok(()) if full => Poll::Pending,
            outcome => Poll::Ready(outcome),
        }
    }

    /// Sets an option. It goes through the ring, behind what was written before.
    ///
    /// # Errors
    ///
    /// As of [`send`](Self::send).
    pub fn set(&mut self, option: StreamOption) -> Result<(), SocketError> {
        self.check()?;
        self.sent.push(Outgoing::Set(option)).map_err(|_| SocketError::WouldBlock)?;
        self.publish();
        Ok(())
    }

    /// Shuts down the sending direction: the peer sees the end of the stream after the bytes that
    /// were sent. Receiving continues. Cannot fail.
    pub fn shutdown(&mut self) {
        self.is_shut = true;
        self.port.ask(Asked::SHUTDOWN);
    }

    /// Resets the connection. Bytes that were sent and not acknowledged are lost. Cannot fail.
    pub fn reset(&mut self) {
        self.port.ask(Asked::RESET);
    }

    fn check(&self) -> Result<(), SocketError> {
        match self.port.failure() {
            Some(error) => Err(error),
            None if self.is_shut => Err(SocketError::ShutDown),
            None => Ok(()),
        }
    }

    fn publish(&mut self) {
        if self.sent.publish() {
            self.port.signal();
        }
    }
}

impl<M: Mapped> Drop for WriteHalf<M> {
    fn drop(&mut self) {
        self.port.ask(Asked::WRITER_GONE.and(Asked::SHUTDOWN));
    }
}

impl<M: Mapped> fmt::Debug for WriteHalf<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WriteHalf")
    }
}
