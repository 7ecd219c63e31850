//! Streams of TCP: their state, their options, their end. [`receive`](super::receive) and
//! [`send`](super::send) have the calls for payload.

use crate::stack::core::SharedCore;
use crate::stack::error::SocketError;
use crate::stack::payload::Payload;
use crate::stack::sockets::fragment::Fragment;
use crate::stack::transport::handles::ConnectionId;
use crate::stack::transport::idle::Seen;
use crate::tcp::{Connection, Info, IpFields, KeepAlive, State};
use crate::time::Time;
use crate::wire::Flow;
use std::fmt;
use std::net::SocketAddr;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// A TCP connection.
///
/// Calls do not block. [`SocketError::WouldBlock`] means that a call can do nothing at present; the
/// `poll_` calls then call a waker when that changes. Payload that was received before the
/// connection ended can still be read. After that, calls return the reason of the end:
/// [`SocketError::Closed`].
///
/// Dropping it closes the connection. Bytes that were sent still arrive. But if received data was
/// not read, the peer gets a reset instead.
pub struct TcpStream<P: Payload> {
    pub(crate) core: SharedCore<P>,
    pub(crate) id: ConnectionId,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// What [`read`](Self::read) has not copied yet.
    pub(crate) rest: Fragment<P::Mem>,
}

/// Nothing in it is pinned.
impl<P: Payload> Unpin for TcpStream<P> {}

impl<P: Payload> TcpStream<P> {
    pub(crate) fn new(core: SharedCore<P>, id: ConnectionId, flow: Flow) -> Self {
        Self { core, id, local: flow.local, remote: flow.remote, rest: Fragment::default() }
    }

    /// This end.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The peer.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.remote
    }

    /// Whether the path leads to this host: segments go to no device.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        self.core.borrow().tcp.connections.see(self.id).is_some_and(|seen| seen.path().is_loopback())
    }

    /// Whether the handshake is complete. False while it is under way.
    ///
    /// # Errors
    ///
    /// [`SocketError::Closed`] has the reason why the connection was not made, or has ended.
    /// [`SocketError::ShutDown`]: it was shut down before it was made.
    pub fn is_connected(&self) -> Result<bool, SocketError> {
        let core = self.core.borrow();
        let entry = match core.tcp.connections.see(self.id).ok_or(SocketError::StackGone)? {
            Seen::Working(entry) => entry,
            Seen::Idle(_) => return Ok(true),
        };
        match entry.connection.failure() {
            Some(error) => Err(SocketError::Closed(error)),
            None if !entry.connected && entry.connection.state() == State::Closed => Err(SocketError::ShutDown),
            None => Ok(entry.connected),
        }
    }

    /// Ready when the handshake is complete, or has failed.
    ///
    /// # Errors
    ///
    /// As of [`is_connected`](Self::is_connected).
    pub fn poll_connected(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SocketError>> {
        match self.is_connected() {
            Ok(false) => self.wait_to_write(cx),
            Ok(true) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    /// Resets the connection. Bytes that were sent and not acknowledged are lost.
    pub fn abort(mut self) {
        self.reset();
    }

    /// Like [`abort`](Self::abort), for a stream that is part of another value.
    pub fn reset(&mut self) {
        self.with(|connection, now| connection.abort(now));
    }

    /// If `quick`, the next segments are acknowledged at once, and not after a delay. Otherwise
    /// acknowledgements are delayed from now on.
    pub fn set_quick_ack(&mut self, quick: bool) {
        self.with(|connection, _| connection.set_quick_ack(quick));
    }

    /// Sets whether probes are sent to an idle peer (keepalive).
    pub fn set_keep_alive(&mut self, keep_alive: Option<KeepAlive>) {
        self.with(|connection, _| connection.set_keep_alive(keep_alive));
    }

    /// Sets fields of the IP headers of segments that are sent from now on.
    pub fn set_ip(&mut self, ip: IpFields) {
        self.with(|connection, _| connection.set_ip(ip));
    }

    /// Sets how long sent data may stay unacknowledged.
    pub fn set_user_timeout(&mut self, timeout: Option<Duration>) {
        self.with(|connection, _| connection.set_user_timeout(timeout));
    }

    /// The connection's state in numbers.
    ///
    /// Cost: if the connection is idle, its state is copied into about 1.7 KB that are allocated
    /// for the call.
    #[must_use]
    pub fn info(&self) -> Option<Info> {
        let core = self.core.borrow();
        let now = core.resources.now;
        core.tcp.connections.see(self.id).map(|seen| seen.connection().info(now))
    }

    pub(crate) fn with(&self, f: impl FnOnce(&mut Connection<P>, Time)) {
        let mut core = self.core.borrow_mut();
        let now = core.resources.now;
        if let Some(entry) = core.tcp.connections.get_mut(self.id) {
            f(&mut entry.connection, now);
            core.touch(self.id);
        }
    }

    pub(crate) fn wait_to_read<R>(&self, cx: &mut Context<'_>) -> Poll<R> {
        self.wait(cx, |[read, _]| read)
    }

    pub(crate) fn wait_to_write<R>(&self, cx: &mut Context<'_>) -> Poll<R> {
        self.wait(cx, |[_, write]| write)
    }

    fn wait<R>(
        &self,
        cx: &mut Context<'_>,
        which: impl FnOnce([&mut Option<Waker>; 2]) -> &mut Option<Waker>,
    ) -> Poll<R> {
        let waker = cx.waker().clone();
        let mut core = self.core.borrow_mut();
        let before = core.tcp.connections.wakers_mut(self.id).and_then(|wakers| which(wakers).replace(waker));
        // A waker that is dropped can drop another socket, which borrows the tables.
        drop(core);
        drop(before);
        Poll::Pending
    }
}

impl<P: Payload> Drop for TcpStream<P> {
    fn drop(&mut self) {
        // The rest of a fragment is data that was not read.
        let unread = !self.rest.is_empty();
        self.rest = Fragment::default();
        self.core.borrow_mut().orphan(self.id, unread);
    }
}

impl<P: Payload> fmt::Debug for TcpStream<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpStream({} - {})", self.local, self.remote)
    }
}
