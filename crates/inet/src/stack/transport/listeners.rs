//! The listeners of a stack: their addresses, and their accept queues.
//!
//! An accept queue owns its connections: they stay in their table until they are accepted and
//! dropped, also if their peers reset them.

use crate::stack::error::SocketError;
use crate::stack::payload::Payload;
use crate::stack::resources::Resources;
use crate::stack::shared::directory::{Addresses, Protocol};
use crate::stack::shrink_map::ShrinkMap;
use crate::stack::table::Table;
use crate::stack::transport::handles::{ConnectionId, ListenerId, OfListeners};
use crate::tcp::{Config, Listener};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::task::Waker;

/// A listener in its table.
pub(crate) struct ListenerEntry {
    pub(crate) listener: Listener,
    pub(crate) config: Config,
    bound: (Addresses, u16),
    /// The accept queue.
    ready: VecDeque<ConnectionId>,
    /// Connections that were accepted.
    pub(crate) accepted: u64,
    pub(crate) waker: Option<Waker>,
}

/// The table of listeners, and the addresses by which segments find them.
pub(crate) struct Listeners {
    table: Table<OfListeners, ListenerEntry>,
    bound: ShrinkMap<(Addresses, u16), ListenerId>,
}

impl Listeners {
    pub(crate) fn new() -> Self {
        Self { table: Table::new(), bound: ShrinkMap::new() }
    }

    pub(crate) fn get_mut(&mut self, id: ListenerId) -> Option<&mut ListenerEntry> {
        self.table.get_mut(id)
    }

    pub(crate) fn get(&self, id: ListenerId) -> Option<&ListenerEntry> {
        self.table.get(id)
    }

    /// The listener for segments to `local`: the one whose addresses are the fewest.
    pub(crate) fn find(&self, local: SocketAddr) -> Option<ListenerId> {
        let bound = |to| self.bound.get(&(to, local.port())).copied();
        let v6 = || if local.is_ipv6() { bound(Addresses::V6) } else { None };
        bound(Addresses::One(local.ip())).or_else(v6).or_else(|| bound(Addresses::All))
    }

    pub(crate) fn ids(&self) -> Vec<ListenerId> {
        self.table.iter().map(|(id, _)| id).collect()
    }

    /// Listens on an address and a port; port 0 means one that is free. Returns also the port.
    pub(crate) fn listen<P: Payload>(
        &mut self,
        resources: &Resources<P>,
        local: SocketAddr,
        listener: Listener,
        config: Config,
        v6_only: bool,
    ) -> Result<(ListenerId, u16), SocketError> {
        let (host, to) = (&resources.host, Addresses::of(local.ip(), v6_only));
        let port = host.directory().bind_to(Protocol::Tcp, host.ports(), local, (to, resources.id))?;
        let ready = VecDeque::new();
        let entry = ListenerEntry { listener, config, bound: (to, port), ready, accepted: 0, waker: None };
        let id = self.table.insert(entry);
        self.bound.insert((to, port), id);
        Ok((id, port))
    }

    /// Removes a listener. Its connections that were not accepted stay in their table.
    pub(crate) fn remove<P: Payload>(&mut self, resources: &mut Resources<P>, id: ListenerId) -> bool {
        let Some(entry) = self.table.remove(id) else { return false };
        let (to, port) = entry.bound;
        self.bound.remove(&(to, port));
        resources.host.directory().unbind(Protocol::Tcp, port, (to, resources.id));
        resources.wakers.extend(entry.waker);
        true
    }

    /// The next connection of an accept queue. It belongs to the caller from now on.
    pub(crate) fn accept(&mut self, id: ListenerId) -> Option<ConnectionId> {
        let entry = self.table.get_mut(id)?;
        let connection = entry.ready.pop_front()?;
        entry.listener.accepted();
        entry.accepted += 1;
        Some(connection)
    }

    /// Puts a connection whose handshake is complete into its listener's accept queue. Returns the
    /// waker to call.
    pub(crate) fn offer(&mut self, id: ListenerId, connection: ConnectionId) -> Option<Waker> {
        let entry = self.table.get_mut(id)?;
        entry.ready.push_back(connection);
        entry.waker.take()
    }

    /// The handshake of a connection is complete.
    pub(crate) fn handle_connected(&mut self, id: ListenerId) {
        if let Some(entry) = self.table.get_mut(id) {
            entry.listener.connected();
        }
    }

    /// The handshake of a connection has failed.
    pub(crate) fn handle_failed(&mut self, id: ListenerId) {
        if let Some(entry) = self.table.get_mut(id) {
            entry.listener.failed();
        }
    }
}
