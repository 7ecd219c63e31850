//! The listeners of a stack, and how a connection begins: a handshake that is not complete, an
//! accept queue, a stream.

use crate::route::MIN_PATH_MTU_V6;
use crate::stack::SocketError;
use crate::stack::core::Core;
use crate::stack::input::Back;
use crate::stack::path::Path;
use crate::stack::payload::{Payload, Transmit};
use crate::stack::shared::directory::{Addresses, Protocol};
use crate::stack::table::{Id, Table};
use crate::stack::transport::connections::{ConnectionId, InConnections, Role};
use crate::tcp::{self, Answer, ArrivingSegment, Config, ConnectionTemplate, Flags, Header, Listener, Seq};
use crate::wire::Flow;
use netmem_packet::TxQueue;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::task::Waker;

/// The handle of a listener.
pub(crate) type ListenerId = Id<InListeners>;

/// The kind of [`ListenerId`].
#[derive(Debug)]
pub(crate) enum InListeners {}

/// A listener in its table.
pub(crate) struct Listening {
    pub(crate) listener: Listener,
    config: Config,
    bound: (Addresses, u16),
    /// The accept queue. It owns its connections: they stay in their table, also if their peers
    /// reset them.
    ready: VecDeque<Id<InConnections>>,
    /// Connections that were accepted.
    pub(crate) accepted: u64,
    pub(crate) waker: Option<Waker>,
}

/// The table of listeners, and the addresses by which segments find them.
pub(crate) struct Listeners {
    table: Table<InListeners, Listening>,
    bound: HashMap<(Addresses, u16), ListenerId>,
}

impl Listeners {
    pub(crate) fn new() -> Self {
        Self { table: Table::new(), bound: HashMap::new() }
    }

    pub(crate) fn get_mut(&mut self, id: ListenerId) -> Option<&mut Listening> {
        self.table.get_mut(id)
    }

    pub(crate) fn get(&self, id: ListenerId) -> Option<&Listening> {
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
}

/// A connection in TIME-WAIT whose flow a new connection may take over, and the least initial
/// number of the new one.
#[derive(Clone, Copy)]
pub(crate) struct Reused {
    pub(crate) old: ConnectionId,
    pub(crate) after: Seq,
}

/// A segment of a flow that has no connection, or one in TIME-WAIT.
pub(crate) struct Begins<'a> {
    pub(crate) flow: Flow,
    pub(crate) header: &'a Header,
    pub(crate) meta: tcp::Meta,
    pub(crate) back: Back,
    pub(crate) reused: Option<Reused>,
}

impl<P: Payload> Core<P> {
    /// Listens on an address and a port; port 0 means one that is free. Returns also the port.
    pub(crate) fn listen(
        &mut self,
        local: SocketAddr,
        listener: Listener,
        config: Config,
        v6_only: bool,
    ) -> Result<(ListenerId, u16), SocketError> {
        let to = Addresses::of(local.ip(), v6_only);
        let (directory, bound) = (self.host.directory(), (to, self.id));
        let port = match local.port() {
            0 => directory.bind_port(Protocol::Tcp, self.host.ports(), local.ip(), bound).ok_or(SocketError::NoPort)?,
            port if directory.bind(Protocol::Tcp, port, bound) => port,
            _ => return Err(SocketError::InUse),
        };
        let listening =
            Listening { listener, config, bound: (to, port), ready: VecDeque::new(), accepted: 0, waker: None };
        let id = self.listeners.table.insert(listening);
        self.listeners.bound.insert((to, port), id);
        Ok((id, port))
    }

    /// The user has dropped a listener. Connections that were not accepted are reset.
    pub(crate) fn unlisten(&mut self, id: ListenerId) {
        let Some(listening) = self.listeners.table.remove(id) else { return };
        let (to, port) = listening.bound;
        self.listeners.bound.remove(&(to, port));
        self.host.directory().unbind(Protocol::Tcp, port, (to, self.id));
        // A waker that is dropped here could drop another socket, while the tables are borrowed.
        self.wakers.extend(listening.waker);
        for own in self.connections.ids(|slot| [Role::HalfOpen(id), Role::Accepted(id)].contains(&slot.role)) {
            self.let_go(own, true);
        }
    }

    /// The next connection of an accept queue. It belongs to the caller from now on.
    pub(crate) fn accept(&mut self, id: ListenerId) -> Option<(ConnectionId, Flow)> {
        let listening = self.listeners.get_mut(id)?;
        let connection = listening.ready.pop_front()?;
        listening.listener.taken();
        listening.accepted += 1;
        let slot = self.connections.get_mut(connection);
        debug_assert!(slot.is_some(), "the accept queue owns its connections");
        let slot = slot?;
        slot.role = Role::Stream;
        Some((connection, slot.flow))
    }

    /// Puts a connection whose handshake is complete into its listener's accept queue.
    pub(crate) fn offer(&mut self, listener: ListenerId, id: ConnectionId) {
        if let Some(listening) = self.listeners.get_mut(listener) {
            listening.ready.push_back(id);
            self.wakers.extend(listening.waker.take());
        }
    }

    /// The initial options of a connection on the link, of which the path's are not known yet.
    pub(crate) fn config(&self, config: &Config, flow: &Flow) -> Config {
        let mss = self.host.interface().mtu.saturating_sub(headers(flow));
        let mut config = Config { mss, max_payload: mss, ..*config };
        if flow.local.is_ipv6() {
            // Each link of IPv6 takes 1280 bytes.
            let least = MIN_PATH_MTU_V6 - headers(flow);
            config.default_mss = config.default_mss.max(least);
            config.send.path_floor = config.send.path_floor.max(least.into());
        }
        config
    }

    /// Processes a segment of a flow that has no connection, or one in TIME-WAIT that a SYN may
    /// follow.
    ///
    /// A peer can send any number of these. Unless a connection is made, they are answered without
    /// state: no entry of the destination cache, and none of a neighbour, is made or looked up.
    pub(crate) fn begin<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        begins: Begins<'_>,
        payload: impl Iterator<Item = P::Received>,
    ) where
        P: Transmit<T>,
    {
        let Begins { flow, header, meta, back, reused } = begins;
        if reused.is_none() && self.host.directory().is_departed(&flow) {
            self.egress.stats.departed += 1;
            return;
        }
        let Some(listener) = self.listeners.find(flow.local) else {
            return self.reset(tx, &flow, header, meta, back);
        };
        let config = match self.listeners.table.get(listener) {
            Some(listening) => self.config(&listening.config, &flow),
            None => return,
        };
        let Some(listening) = self.listeners.table.get_mut(listener) else { return };
        let mut path = None;
        let (host, now, stats) = (&self.host, self.now, &mut self.egress.stats);
        let room = self.connections.len() < self.options.connections;
        let find_path = || {
            stats.lookups += u64::from(room);
            path = if room { Path::find(host, flow.remote.ip(), now) } else { None };
            stats.no_room += u64::from(path.is_none());
            path.as_ref().map(|path| path.mtu(now).saturating_sub(headers(&flow)))
        };
        let after = reused.map(|reused| reused.after);
        let arriving = ArrivingSegment { header, len: meta.len, flow: &flow, after, cookie_at: host.cookie_at() };
        let template = ConnectionTemplate { config: &config, secret: host.secret(), queue: Some(&self.budget) };
        let answer: Answer<P> = listening.listener.handle_segment(arriving, template, now, find_path);
        match (answer, path) {
            (Answer::HalfOpen(connection), Some(path)) => {
                if self.claim(flow, reused) {
                    self.insert(connection, flow, path, Role::HalfOpen(listener));
                } else {
                    self.half_open_failed(listener);
                }
            }
            (Answer::Connected(mut connection), Some(path)) => {
                if self.claim(flow, reused) {
                    connection.handle_segment(header, payload, meta, now);
                    let id = self.insert(connection, flow, path, Role::Accepted(listener));
                    self.offer(listener, id);
                } else if let Some(listening) = self.listeners.get_mut(listener) {
                    listening.listener.taken();
                }
            }
            (Answer::Reply(reply), _) => {
                if let Some(at) = listening.listener.cookie_at().filter(|_| reply.flags.has(Flags::SYN)) {
                    self.host.cookie_sent(at);
                }
                // A reply to a SYN is a cookie: a new connection begins.
                if let Some(Reused { old, .. }) = reused {
                    self.supersede(old);
                    self.host.directory().release(&flow);
                }
                self.reply(tx, &flow, &reply, back, config.ip);
            }
            _ => {}
        }
    }

    /// Assigns a flow to this stack for a new connection. Returns false if another connection has
    /// it.
    fn claim(&mut self, flow: Flow, reused: Option<Reused>) -> bool {
        match reused {
            // The flow is this stack's already.
            Some(Reused { old, .. }) => {
                self.supersede(old);
                true
            }
            None => self.host.directory().claim(flow, self.id),
        }
    }

    /// A new connection takes over the flow of one in TIME-WAIT, which ends. It stays in the table
    /// until its owner lets it go.
    fn supersede(&mut self, old: ConnectionId) {
        self.connections.unlink(old);
        if let Some(slot) = self.connections.get_mut(old) {
            slot.connection.supersede();
        }
        self.enqueue(old);
    }

    /// The handshake of a connection has failed.
    pub(crate) fn half_open_failed(&mut self, listener: ListenerId) {
        if let Some(listening) = self.listeners.get_mut(listener) {
            listening.listener.failed();
        }
    }
}

/// Bytes of IP and TCP headers without options.
pub(crate) fn headers(flow: &Flow) -> u16 {
    if flow.local.is_ipv4() { 40 } else { 60 }
}
