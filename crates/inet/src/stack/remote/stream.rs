//! Streams for any thread.

use crate::stack::error::SocketError;
use crate::stack::remote::option::StreamOption;
use crate::stack::remote::parts::{HandleParts, StreamPort};
use crate::stack::remote::read::ReadHalf;
use crate::stack::remote::write::WriteHalf;
use crate::stack::sockets::fragment::Fragment;
use netmem_pool::{Frag, Mapped};
use std::fmt;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};

/// A TCP connection that any thread uses, while its stack is on another one.
///
/// It is [`TcpStream`](crate::TcpStream) for other threads: calls do not block, payload that was
/// received before the connection ended can still be read, and dropping it closes the connection.
/// If received data was not read, the peer gets a reset instead. See the [module](super).
pub struct TcpStream<M: Mapped> {
    read: ReadHalf<M>,
    write: WriteHalf<M>,
    remote: SocketAddr,
}

impl<M: Mapped> TcpStream<M> {
    pub(crate) fn new(parts: HandleParts<M>) -> Self {
        let HandleParts { port, received, sent, pages, remote } = parts;
        let read = ReadHalf::new(port.clone(), received);
        Self { read, write: WriteHalf::new(port, sent, pages), remote }
    }

    fn port(&self) -> &Arc<StreamPort<M>> {
        self.write.port()
    }

    /// This end. `None` until the stack has chosen it for a stream that
    /// [connects](super::Sockets::connect).
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.port().local()
    }

    /// The peer.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.remote
    }

    /// Ready when the handshake is complete, or has failed.
    ///
    /// # Errors
    ///
    /// [`SocketError::NoRoute`], [`SocketError::NoPort`], [`SocketError::TooMany`];
    /// [`SocketError::Closed`] has the reason why the connection was not made, or has ended.
    /// [`SocketError::StackGone`].
    pub fn poll_connected(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        let port = self.port();
        port.register_writer(cx);
        match port.failure() {
            Some(error) => Poll::Ready(Err(error)),
            None if port.is_connected() => Poll::Ready(Ok(())),
            None => Poll::Pending,
        }
    }

    /// The halves, which can be used by different threads.
    #[must_use]
    pub fn into_split(self) -> (ReadHalf<M>, WriteHalf<M>) {
        (self.read, self.write)
    }

    /// See [`ReadHalf::recv`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn recv(&mut self, into: &mut [Fragment<M>]) -> Result<usize, SocketError> {
        self.read.recv(into)
    }

    /// See [`ReadHalf::poll_recv`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>, into: &mut [Fragment<M>]) -> Poll<Result<usize, SocketError>> {
        self.read.poll_recv(cx, into)
    }

    /// See [`ReadHalf::read`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, SocketError> {
        self.read.read(into)
    }

    /// See [`ReadHalf::poll_read`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<usize, SocketError>> {
        self.read.poll_read(cx, into)
    }

    /// See [`WriteHalf::send`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn send(&mut self, fragment: Frag<M>, more: bool) -> Result<(), (SocketError, Frag<M>)> {
        self.write.send(fragment, more)
    }

    /// See [`WriteHalf::write`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, SocketError> {
        self.write.write(bytes)
    }

    /// See [`WriteHalf::write_vectored`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> Result<usize, SocketError> {
        self.write.write_vectored(slices)
    }

    /// See [`WriteHalf::poll_write`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize, SocketError>> {
        self.write.poll_write(cx, bytes)
    }

    /// See [`WriteHalf::poll_write_vectored`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_write_vectored(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize, SocketError>> {
        self.write.poll_write_vectored(cx, slices)
    }

    /// See [`WriteHalf::poll_writable`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_writable(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        self.write.poll_writable(cx)
    }

    /// See [`WriteHalf::set`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn set(&mut self, option: StreamOption) -> Result<(), SocketError> {
        self.write.set(option)
    }

    /// See [`WriteHalf::shutdown`].
    pub fn shutdown(&mut self) {
        self.write.shutdown();
    }

    /// Resets the connection. Bytes that were sent and not acknowledged are lost. Cannot fail.
    pub fn reset(&mut self) {
        self.write.reset();
    }
}

impl<M: Mapped> fmt::Debug for TcpStream<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.local_addr() {
            Some(local) => write!(f, "TcpStream({local} - {})", self.remote),
            None => write!(f, "TcpStream({})", self.remote),
        }
    }
}

/// Streams and their halves go to any thread.
const _: () = {
    const fn goes<T: Send>() {}
    goes::<TcpStream<netmem_pool::Private>>();
    goes::<ReadHalf<netmem_pool::Private>>();
    goes::<WriteHalf<netmem_pool::Private>>();
};
