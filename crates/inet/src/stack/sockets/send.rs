//! What a stream sends: chunks of payload by reference, or bytes that are copied into pages.

use crate::stack::core::Core;
use crate::stack::error::SocketError;
use crate::stack::payload::Payload;
use crate::stack::sockets::stream::TcpStream;
use crate::stack::transport::write::{can_write, write};
use crate::tcp::Chunk;
use netmem_pool::{Frag, Mapped};
use std::io::IoSlice;
use std::task::{Context, Poll};

/// From this length on, the fragment of written bytes is searched by their address. For fewer
/// bytes, a copy costs less.
const BY_REFERENCE: usize = 512;

/// Payload in host memory.
impl<M: Mapped> TcpStream<M> {
    /// Sends a fragment without a copy. Its page must be in memory that the device reaches: a page
    /// that the host's device has received, or one of its pool. The fragment is held until the peer
    /// has acknowledged it and the device has completed each of its transmissions.
    ///
    /// `more`: more payload follows soon, so a segment that is not full may wait for it.
    ///
    /// # Errors
    ///
    /// Returns the fragment. [`SocketError::WouldBlock`]: the send buffer is full.
    /// [`SocketError::ShutDown`], [`SocketError::Closed`].
    pub fn send(&mut self, fragment: Frag<M>, more: bool) -> Result<(), (SocketError, Frag<M>)> {
        self.send_chunk(fragment, more)
    }
}

impl<P: Payload> TcpStream<P> {
    /// Sends payload in any kind of memory; [`send`](Self::send) is for host memory. A clone of it
    /// is held until the peer has acknowledged it and the device has completed each of its
    /// transmissions.
    ///
    /// `more`: more payload follows soon, so a segment that is not full may wait for it.
    ///
    /// # Errors
    ///
    /// Returns the payload. [`SocketError::WouldBlock`]: the send buffer is full.
    /// [`SocketError::ShutDown`], [`SocketError::Closed`].
    pub fn send_chunk(&mut self, chunk: P::Sent, more: bool) -> Result<(), (SocketError, P::Sent)> {
        let mut core = self.core.borrow_mut();
        let Some(entry) = core.tcp.connections.get_mut(self.id) else { return Err((SocketError::StackGone, chunk)) };
        if chunk.is_empty() {
            return Ok(());
        }
        match entry.connection.send(chunk, more) {
            Ok(()) => {
                core.touch(self.id);
                Ok(())
            }
            Err(refusal) => Err((refusal.why.into(), refusal.chunk)),
        }
    }

    /// Copies bytes into pages of the pool and sends them, as many as there is room for. Returns
    /// how many.
    ///
    /// If there are at least 512 bytes, and they belong to a [`Bytes`](bytes::Bytes) that was made
    /// of a fragment, they are not copied. The fragment is found by their address and sent, if it
    /// is in the memory of the stack's pool
    /// ([`SharedPool::frag_of`](netmem_pool::SharedPool::frag_of)).
    ///
    /// # Errors
    ///
    /// As of [`send`](Self::send); [`SocketError::WouldBlock`] also if the connection has its share
    /// of the pool's pages, or the pool has none.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, SocketError> {
        if bytes.len() >= BY_REFERENCE {
            let found = self.core.borrow().resources.egress.pool.frag_of(bytes);
            if let Some(frag) = found {
                return self.send_chunk(P::from_host(frag), false).map(|()| bytes.len()).map_err(|(error, _)| error);
            }
        }
        let Core { tcp, resources, .. } = &mut *self.core.borrow_mut();
        let written = write(&mut tcp.connections, resources, self.id, bytes)?;
        resources.egress.stats.copied_sent += written as u64;
        if written > 0 {
            tcp.touch(resources, self.id);
        }
        if written > 0 || bytes.is_empty() { Ok(written) } else { Err(SocketError::WouldBlock) }
    }

    /// Writes the slices one after the other, as many bytes as there is room for. Returns how many
    /// bytes were written in total.
    ///
    /// # Errors
    ///
    /// As of [`write`](Self::write), if there is room for none.
    pub fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> Result<usize, SocketError> {
        let mut written = 0;
        for slice in slices {
            match self.write(slice) {
                Ok(n) => {
                    written += n;
                    if n < slice.len() {
                        break;
                    }
                }
                Err(_) if written > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(written)
    }

    /// Like [`write`](Self::write); the waker is called when there is room.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize, SocketError>> {
        match self.write(bytes) {
            Err(SocketError::WouldBlock) => self.wait_to_write(cx),
            outcome => Poll::Ready(outcome),
        }
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
        match self.write_vectored(slices) {
            Err(SocketError::WouldBlock) => self.wait_to_write(cx),
            outcome => Poll::Ready(outcome),
        }
    }

    /// Bytes for which the send buffer has room at present.
    ///
    /// Cost: if the connection is idle, its state is copied into about 1.7 KB that are allocated
    /// for the call.
    #[must_use]
    pub fn room(&self) -> usize {
        self.core.borrow().tcp.connections.see(self.id).map_or(0, |seen| seen.connection().room())
    }

    /// Ready when the send buffer has room and a page can be written, or the connection has ended.
    pub fn poll_writable(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        let mut guard = self.core.borrow_mut();
        let Core { tcp, resources, .. } = &mut *guard;
        let connections = &mut tcp.connections;
        let Some(entry) = connections.get_mut(self.id) else { return Poll::Ready(Err(SocketError::StackGone)) };
        if entry.closed.is_some() {
            return Poll::Ready(entry.connection.failure().map_or(Ok(()), |error| Err(SocketError::Closed(error))));
        }
        let writable = entry.connected && entry.connection.is_writable();
        if writable && can_write(connections, resources, self.id) {
            return Poll::Ready(Ok(()));
        }
        drop(guard);
        self.wait_to_write(cx)
    }

    /// Sets the size of the send buffer, in bytes.
    pub fn set_send_buffer(&mut self, bytes: usize) {
        self.with(|connection, _| connection.set_send_buffer(bytes));
    }

    /// Sets how many unsent bytes make the stream unwritable
    /// ([`poll_writable`](Self::poll_writable)), so that what is written late is not queued behind
    /// much else.
    pub fn set_low_water(&mut self, bytes: usize) {
        self.with(|connection, _| connection.set_low_water(bytes));
    }

    /// Corks the stream, or uncorks it: while corked, only full segments are sent, for at most 200
    /// ms.
    pub fn set_cork(&mut self, cork: bool) {
        self.with(|connection, _| connection.set_cork(cork));
    }

    /// Sets whether small segments are sent at once, or wait until sent bytes are acknowledged
    /// (Nagle).
    pub fn set_nodelay(&mut self, nodelay: bool) {
        self.with(|connection, _| connection.set_nodelay(nodelay));
    }

    /// Marks the end of what was written as the end of urgent data. New protocols do not use it
    /// (RFC 6093).
    pub fn mark_urgent(&mut self) {
        self.with(|connection, _| connection.mark_urgent());
    }

    /// Shuts down the sending direction: the peer sees the end of the stream after the bytes that
    /// were sent. Receiving continues.
    pub fn shutdown(&mut self) {
        self.with(|connection, _| connection.shutdown());
    }
}
