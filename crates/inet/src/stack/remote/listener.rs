//! Listeners for any thread.

use crate::stack::error::SocketError;
use crate::stack::remote::parts::{ACCEPTED, StreamPort, Unaccepted};
use crate::stack::remote::port::{Asked, pending};
use crate::stack::remote::ring::Receiver;
use crate::stack::remote::stream::TcpStream;
use netmem_pool::Mapped;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};

/// A socket that accepts connections on any thread.
///
/// A ring of 32 places carries connections to it; others wait in the stack's accept queue. Dropping
/// it resets connections that wait to be accepted.
pub struct TcpListener<M: Mapped> {
    port: Arc<StreamPort<M>>,
    accepted: Receiver<Unaccepted<M>, ACCEPTED>,
}

impl<M: Mapped> TcpListener<M> {
    pub(crate) fn new(port: Arc<StreamPort<M>>, accepted: Receiver<Unaccepted<M>, ACCEPTED>) -> Self {
        Self { port, accepted }
    }

    /// Ready when the stack listens, or has refused. Returns the address and the port.
    ///
    /// # Errors
    ///
    /// [`SocketError::NotOurs`], [`SocketError::InUse`], [`SocketError::NoPort`];
    /// [`SocketError::StackGone`].
    pub fn poll_listening(&mut self, cx: &mut Context<'_>) -> Poll<Result<SocketAddr, SocketError>> {
        self.port.register_writer(cx);
        match (self.port.failure(), self.port.local()) {
            (Some(error), _) => Poll::Ready(Err(error)),
            (None, Some(local)) => Poll::Ready(Ok(local)),
            (None, None) => Poll::Pending,
        }
    }

    /// The next connection. It may have ended already.
    ///
    /// # Errors
    ///
    /// [`SocketError::WouldBlock`]: none waits. Those of
    /// [`poll_listening`](Self::poll_listening).
    pub fn accept(&mut self) -> Result<TcpStream<M>, SocketError> {
        // The end follows the connections, so it is read before.
        let end = self.port.read_end();
        let Some(accepted) = self.accepted.pop() else {
            return Err(end.and_then(Result::err).unwrap_or(SocketError::WouldBlock));
        };
        if self.accepted.release() {
            self.port.signal();
        }
        accepted.accept().map(TcpStream::new).ok_or(SocketError::StackGone)
    }

    /// Like [`accept`](Self::accept); the waker is called when a connection waits.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Result<TcpStream<M>, SocketError>> {
        match self.accept() {
            Err(SocketError::WouldBlock) => {}
            outcome => return Poll::Ready(outcome),
        }
        self.port.register_reader(cx);
        self.accepted.wait_for_items();
        pending(self.accept())
    }

    /// The address and the port that it listens on. `None` until the stack listens.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.port.local()
    }
}

impl<M: Mapped> Drop for TcpListener<M> {
    fn drop(&mut self) {
        self.port.ask(Asked::READER_GONE);
    }
}

impl<M: Mapped> fmt::Debug for TcpListener<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.local_addr() {
            Some(local) => write!(f, "TcpListener({local})"),
            None => f.write_str("TcpListener"),
        }
    }
}

/// A listener goes to any thread.
const _: () = {
    const fn goes<T: Send>() {}
    goes::<TcpListener<netmem_pool::Private>>();
};
