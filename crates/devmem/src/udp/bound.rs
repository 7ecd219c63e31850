//! The sockets of a flow table by their local addresses, as receive queues look them up.
//!
//! Receive queues read the list for each frame, without a lock. Sockets are bound and closed
//! seldom, so that a change copies the list.

use super::mailbox::Mailbox;
use crate::binding::BindingCount;
use std::net::IpAddr;
use std::sync::Arc;

/// The addresses of the interface to which a socket is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Addresses {
    /// All of them, of both families.
    All,
    One(IpAddr),
}

impl Addresses {
    #[inline]
    fn has(self, addr: IpAddr) -> bool {
        match self {
            Self::All => true,
            Self::One(own) => own == addr,
        }
    }

    fn overlaps(self, other: Self) -> bool {
        self == Self::All || other == Self::All || self == other
    }
}

/// A socket, and what is delivered to it.
struct Bound<C: BindingCount> {
    port: u16,
    to: Addresses,
    mailbox: Arc<Mailbox<C>>,
}

impl<C: BindingCount> Clone for Bound<C> {
    fn clone(&self) -> Self {
        Self { mailbox: self.mailbox.clone(), ..*self }
    }
}

/// The sockets of a table, ordered by port. A lookup is a binary search: a peer chooses the port of
/// a frame, so a hash would have to be keyed, and would cost more for any usual number of sockets.
///
/// Invariant: two sockets with the same port have no address in common, so a datagram is for one
/// socket at most.
pub(crate) struct Sockets<C: BindingCount>(Vec<Bound<C>>);

impl<C: BindingCount> Sockets<C> {
    /// The sockets on a port.
    #[inline]
    fn on_port(&self, port: u16) -> impl Iterator<Item = &Bound<C>> {
        let from = self.0.partition_point(|bound| bound.port < port);
        self.0[from..].iter().take_while(move |bound| bound.port == port)
    }

    /// The socket for a datagram to an address of the interface, or to a group that the interface
    /// is in.
    #[inline]
    pub(crate) fn find(&self, to: IpAddr, port: u16) -> Option<&Mailbox<C>> {
        self.on_port(port).find(|bound| bound.to.has(to)).map(|bound| &*bound.mailbox)
    }

    /// Whether a socket that is bound there would receive datagrams of another one.
    pub(crate) fn is_taken(&self, to: Addresses, port: u16) -> bool {
        self.on_port(port).any(|bound| bound.to.overlaps(to))
    }

    /// Adds a socket where none [is taken](Self::is_taken).
    pub(crate) fn insert(&mut self, to: Addresses, port: u16, mailbox: Arc<Mailbox<C>>) {
        debug_assert!(!self.is_taken(to, port));
        let at = self.0.partition_point(|bound| bound.port < port);
        self.0.insert(at, Bound { port, to, mailbox });
    }

    /// Removes a socket. Returns what the table held of it.
    pub(crate) fn remove(&mut self, mailbox: &Arc<Mailbox<C>>) -> Option<Arc<Mailbox<C>>> {
        let at = self.0.iter().position(|bound| Arc::ptr_eq(&bound.mailbox, mailbox))?;
        Some(self.0.remove(at).mailbox)
    }
}

impl<C: BindingCount> Clone for Sockets<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C: BindingCount> Default for Sockets<C> {
    fn default() -> Self {
        Self(Vec::new())
    }
}
