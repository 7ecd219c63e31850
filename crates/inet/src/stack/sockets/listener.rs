//! Sockets of TCP that accept connections.

use crate::stack::core::{Core, SharedCore};
use crate::stack::error::SocketError;
use crate::stack::payload::Payload;
use crate::stack::sockets::stream::TcpStream;
use crate::stack::transport::handles::ListenerId;
use crate::tcp::Config;
use std::fmt;
use std::net::SocketAddr;
use std::task::{Context, Poll};

/// The options of a listener.
#[derive(Clone, Copy, Debug)]
pub struct ListenOptions {
    /// Connections that wait to be accepted. When so many wait, acknowledgements that would
    /// complete another handshake are dropped.
    pub backlog: usize,
    /// Handshakes that are not complete. When there are so many, further ones are answered by
    /// cookies, which need no memory.
    pub half_open: usize,
    /// Whether the address `[::]` means the addresses of IPv6 only, and not those of IPv4, too.
    pub v6_only: bool,
    /// The options of accepted connections. MSS and path MTU follow from the route.
    pub connection: Config,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self { backlog: 1024, half_open: 1024, v6_only: false, connection: Config::default() }
    }
}

/// The counters of a listener.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerStats {
    /// Handshakes that are not complete now.
    pub half_open: usize,
    /// Connections that wait to be accepted now.
    pub waiting: usize,
    /// Connections that were accepted.
    pub accepted: u64,
    /// SYNs and acknowledgements that were dropped because the accept queue was full.
    pub overflows: u64,
    /// SYNs that were answered by a cookie, because there were too many handshakes.
    pub cookies: u64,
}

/// A socket that accepts connections.
///
/// Dropping it resets connections that wait to be accepted.
pub struct TcpListener<P: Payload> {
    core: SharedCore<P>,
    id: ListenerId,
    local: SocketAddr,
}

impl<P: Payload> TcpListener<P> {
    pub(crate) fn new(core: SharedCore<P>, id: ListenerId, local: SocketAddr) -> Self {
        Self { core, id, local }
    }

    /// The next connection. It may have ended already: a connection that its peer has reset stays
    /// in the accept queue. What was received before can be read, then the error.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: none waits.
    pub fn accept(&mut self) -> Result<TcpStream<P>, SocketError> {
        let Core { tcp, resources, .. } = &mut *self.core.borrow_mut();
        // The stack was closed: nothing will come.
        if resources.gone || tcp.listeners.get(self.id).is_none() {
            return Err(SocketError::StackGone);
        }
        let (id, flow) = tcp.accept(self.id).ok_or(SocketError::WouldBlock)?;
        Ok(TcpStream::new(self.core.clone(), id, flow))
    }

    /// Like [`accept`](Self::accept); the waker is called when a connection waits.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Result<TcpStream<P>, SocketError>> {
        match self.accept() {
            Err(SocketError::WouldBlock) => {
                let waker = cx.waker().clone();
                let mut core = self.core.borrow_mut();
                let entry = core.tcp.listeners.get_mut(self.id);
                let before = entry.and_then(|entry| entry.waker.replace(waker));
                drop(core);
                drop(before);
                Poll::Pending
            }
            outcome => Poll::Ready(outcome),
        }
    }

    /// The address and the port that it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The listener's counters. `None` if the stack is gone.
    #[must_use]
    pub fn stats(&self) -> Option<ListenerStats> {
        let core = self.core.borrow();
        let entry = core.tcp.listeners.get(self.id)?;
        let listener = &entry.listener;
        Some(ListenerStats {
            half_open: listener.half_open(),
            waiting: listener.waiting(),
            accepted: entry.accepted,
            overflows: listener.dropped(),
            cookies: listener.cookies(),
        })
    }
}

impl<P: Payload> Drop for TcpListener<P> {
    fn drop(&mut self) {
        self.core.borrow_mut().unlisten(self.id);
    }
}

impl<P: Payload> fmt::Debug for TcpListener<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpListener({})", self.local)
    }
}
