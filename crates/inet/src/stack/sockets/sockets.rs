//! The opening of sockets.

use crate::stack::address::canonical;
use crate::stack::core::{Core, SharedCore};
use crate::stack::error::SocketError;
use crate::stack::payload::Payload;
use crate::stack::resources::Resources;
use crate::stack::sockets::fragment::Packer;
use crate::stack::sockets::listener::{ListenOptions, TcpListener};
use crate::stack::sockets::stream::TcpStream;
use crate::stack::sockets::udp::UdpSocket;
use crate::stack::stats::StackStats;
use crate::tcp::{Budget, Config, Listener};
use std::fmt;
use std::net::SocketAddr;

/// Opens the sockets of a [`Stack`](crate::stack::Stack). Stays on its thread, as they do;
/// fragments go anywhere.
///
/// Calls of sockets take effect at the next [`poll`](crate::stack::Stack::poll) of the stack, which
/// sends the segments. The time of a call is that of the last poll.
pub struct Sockets<P: Payload> {
    pub(crate) core: SharedCore<P>,
}

impl<P: Payload> Clone for Sockets<P> {
    fn clone(&self) -> Self {
        Self { core: self.core.clone() }
    }
}

impl<P: Payload> fmt::Debug for Sockets<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sockets")
    }
}

impl<P: Payload> Sockets<P> {
    /// Listens on `local`. The unspecified address means all addresses of the host, of both
    /// families; port 0 means one that is free ([`TcpListener::local_addr`]).
    ///
    /// Several stacks of a host can listen on the same port. A connection then lives on the stack
    /// at whose queue its first segment arrives.
    ///
    /// # Errors
    ///
    /// [`SocketError::NotOurs`], [`SocketError::InUse`], [`SocketError::NoPort`].
    pub fn listen(&self, local: SocketAddr, options: ListenOptions) -> Result<TcpListener<P>, SocketError> {
        let Core { tcp, resources, .. } = &mut *self.core.borrow_mut();
        let local = canonical(local);
        resources.check_local(local.ip())?;
        let listener = Listener::new(options.backlog, options.half_open);
        let (id, port) = tcp.listeners.listen(resources, local, listener, options.connection, options.v6_only)?;
        Ok(TcpListener::new(self.core.clone(), id, SocketAddr::new(local.ip(), port)))
    }

    /// Begins to connect to `remote`, from a port that the stack chooses. Returns at once: the
    /// stream is writable when it is connected.
    ///
    /// # Errors
    ///
    /// [`SocketError::NoRoute`], [`SocketError::NoPort`], [`SocketError::TooMany`].
    pub fn connect(&self, remote: SocketAddr, options: &Config) -> Result<TcpStream<P>, SocketError> {
        self.open(None, remote, options)
    }

    /// Like [`connect`](Self::connect), from an address and a port of the user's choice. The
    /// unspecified address means the one that the route has; port 0 means any.
    ///
    /// # Errors
    ///
    /// As there, and [`SocketError::NotOurs`], [`SocketError::InUse`]: another connection to
    /// `remote` has the port.
    pub fn connect_from(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        options: &Config,
    ) -> Result<TcpStream<P>, SocketError> {
        self.open(Some(canonical(local)), remote, options)
    }

    fn open(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: &Config,
    ) -> Result<TcpStream<P>, SocketError> {
        let Core { tcp, resources, .. } = &mut *self.core.borrow_mut();
        let (id, flow) = tcp.connect(resources, local, canonical(remote), options)?;
        Ok(TcpStream::new(self.core.clone(), id, flow))
    }

    /// Opens a socket on `local`. The unspecified address means all addresses of the host; port 0
    /// means any port.
    ///
    /// # Errors
    ///
    /// [`SocketError::NotOurs`], [`SocketError::InUse`], [`SocketError::NoPort`].
    pub fn bind(&self, local: SocketAddr) -> Result<UdpSocket<P>, SocketError> {
        let Core { datagrams, resources, .. } = &mut *self.core.borrow_mut();
        let local = canonical(local);
        resources.check_local(local.ip())?;
        let (id, port) = datagrams.bind(resources, local)?;
        Ok(UdpSocket { core: self.core.clone(), id, local: SocketAddr::new(local.ip(), port), wanted: 1 })
    }

    /// The counters of the stack, also after its end. As
    /// [`Stack::stats`](crate::stack::Stack::stats).
    #[must_use]
    pub fn stats(&self) -> StackStats {
        self.core.borrow().resources.egress.stats
    }

    /// Pages into which received payload can be detached. See
    /// [`Fragment::detach`](crate::Fragment::detach).
    pub fn packer(&self) -> Packer<P::Mem> {
        let Resources { egress, budget, pages, .. } = &self.core.borrow().resources;
        Packer::new(egress.pool.clone(), Budget::clone(budget), pages.counts.packed.clone())
    }
}
