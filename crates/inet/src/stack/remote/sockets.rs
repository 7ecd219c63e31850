//! The opening of sockets by any thread.

use crate::stack::page_counts::{PageCounts, RemotePages};
use crate::stack::remote::listener::TcpListener;
use crate::stack::remote::parts::{HandleParts, Opening, StackParts, StreamHub, StreamPort, parts};
use crate::stack::remote::port::Port;
use crate::stack::remote::ring::ring;
use crate::stack::remote::stream::TcpStream;
use crate::stack::remote::udp::UdpSocket;
use crate::stack::sockets::listener::ListenOptions;
use crate::tcp::Config;
use netmem_pool::{Mapped, SharedPool};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

/// Opens sockets of a stack from any thread. A clone opens sockets of the same stack. From
/// [`Stack::remote`](crate::Stack::remote).
///
/// Calls return at once. The stack opens the socket when it is polled, and an error of that is the
/// first that the socket returns.
pub struct Sockets<M: Mapped> {
    hub: Arc<StreamHub<M>>,
    counts: Arc<PageCounts>,
    pool: Arc<SharedPool<M>>,
    /// The device cuts frames of UDP.
    cuts: bool,
}

impl<M: Mapped> Sockets<M> {
    pub(crate) fn new(hub: Arc<StreamHub<M>>, counts: Arc<PageCounts>, pool: Arc<SharedPool<M>>, cuts: bool) -> Self {
        Self { hub, counts, pool, cuts }
    }

    /// Listens on `local`, as [`Sockets::listen`](crate::Sockets::listen) of the stack's thread
    /// does. [`TcpListener::poll_listening`] returns the address, or why it cannot.
    pub fn listen(&self, local: SocketAddr, options: ListenOptions) -> TcpListener<M> {
        let port = self.port();
        let (sender, receiver) = ring();
        port.open(Opening::Listen { local, options: Box::new(options), accepted: sender });
        TcpListener::new(port, receiver)
    }

    /// Opens a socket for datagrams on `local`, as [`Sockets::bind`](crate::Sockets::bind) of the
    /// stack's thread does. [`UdpSocket::poll_bound`] returns the address, or why it cannot.
    pub fn bind(&self, local: SocketAddr) -> UdpSocket<M> {
        let port = self.port();
        let pages = RemotePages::new(self.counts.clone(), self.pool.clone());
        let (socket, parts) = UdpSocket::new(port.clone(), pages, self.cuts);
        port.open(Opening::Bind { local, parts });
        socket
    }

    /// Begins to connect to `remote`, from a port that the stack chooses.
    /// [`TcpStream::poll_connected`] is ready when it is connected, or has failed. What is written
    /// before is sent then.
    pub fn connect(&self, remote: SocketAddr, options: &Config) -> TcpStream<M> {
        self.open(None, remote, options)
    }

    /// Like [`connect`](Self::connect), from an address and a port of the user's choice. The
    /// unspecified address means the one that the route has; port 0 means any.
    pub fn connect_from(&self, local: SocketAddr, remote: SocketAddr, options: &Config) -> TcpStream<M> {
        self.open(Some(local), remote, options)
    }

    fn open(&self, local: Option<SocketAddr>, remote: SocketAddr, options: &Config) -> TcpStream<M> {
        let port = self.port();
        let (handle, parts) = self.parts(port.clone(), remote);
        port.open(Opening::Connect { local, remote, options: Box::new(*options), parts });
        TcpStream::new(handle)
    }

    fn port(&self) -> Arc<StreamPort<M>> {
        Arc::new(Port::new(self.hub.clone()))
    }

    fn parts(&self, port: Arc<StreamPort<M>>, remote: SocketAddr) -> (HandleParts<M>, StackParts<M>) {
        parts(port, RemotePages::new(self.counts.clone(), self.pool.clone()), remote)
    }

    /// A stream for a connection that was accepted, and the stack's parts of it.
    pub(crate) fn accepted(&self, local: SocketAddr, remote: SocketAddr) -> (HandleParts<M>, StackParts<M>) {
        let port = self.port();
        port.set_local(local);
        port.set_connected();
        self.parts(port, remote)
    }
}

impl<M: Mapped> Clone for Sockets<M> {
    fn clone(&self) -> Self {
        Self { hub: self.hub.clone(), counts: self.counts.clone(), pool: self.pool.clone(), cuts: self.cuts }
    }
}

impl<M: Mapped> fmt::Debug for Sockets<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sockets")
    }
}

/// They go to any thread, and several threads use the same.
const _: () = {
    const fn goes<T: Send + Sync>() {}
    goes::<Sockets<netmem_pool::Private>>();
};
