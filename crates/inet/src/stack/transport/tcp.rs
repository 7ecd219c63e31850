//! The TCP of a stack: connections come and go.
//!
//! ```text
//!   connect, segment, adopt ──► insert ──► in the table, with its flow ──► remove
//!                                            │ its owner: stream, listener, accept queue
//!                                            └──► orphan: closes, or is reset, without an owner
//! ```
//!
//! [`segment`](super::segment) has what a received segment does, and [`process`](super::process)
//! what a connection does when it is due.

use crate::stack::error::SocketError;
use crate::stack::path::Path;
use crate::stack::payload::Payload;
use crate::stack::resources::{Resources, header_len};
use crate::stack::transport::connections::Connections;
use crate::stack::transport::entry::{ConnectionEntry, Role};
use crate::stack::transport::handles::{ConnectionId, ListenerId};
use crate::stack::transport::idle::Seen;
use crate::stack::transport::listeners::Listeners;
use crate::stack::transport::schedule::Schedule;
use crate::tcp::{Config, Connection, Seq, State};
use crate::time::Time;
use crate::wire::{Flow, IcmpKind, Ip, Segment};
use std::net::SocketAddr;

/// After so many segments whose checksum the device has not verified, the user is notified. Fewer
/// of them may just be damaged.
const UNVERIFIED: u64 = 3;

/// Connections, listeners, and when connections are processed.
pub(crate) struct Tcp<P: Payload> {
    pub(crate) connections: Connections<P>,
    pub(crate) listeners: Listeners,
    pub(crate) schedule: Schedule,
}

impl<P: Payload> Tcp<P> {
    pub(crate) fn new(now: Time) -> Self {
        Self { connections: Connections::new(), listeners: Listeners::new(), schedule: Schedule::new(now) }
    }

    /// The connection is processed in this poll, or in the next one.
    pub(crate) fn enqueue(&mut self, id: ConnectionId) {
        if let Some(entry) = self.connections.get_mut(id) {
            self.schedule.enqueue(id, entry);
        }
    }

    /// The user has called a connection's socket: the connection is processed in the next poll.
    #[inline]
    pub(crate) fn touch(&mut self, resources: &mut Resources<P>, id: ConnectionId) {
        self.enqueue(id);
        resources.wake_driver();
    }

    /// Connections in TIME-WAIT.
    pub(crate) fn count_time_wait(&self) -> usize {
        self.connections.iter().filter(|(_, seen)| seen.state() == State::TimeWait).count()
    }

    // ---- connections come

    /// Whether the stack may have one more connection.
    pub(crate) fn has_room(&self, resources: &Resources<P>) -> bool {
        self.connections.len() < resources.options.connections
    }

    fn check_room(&self, resources: &Resources<P>) -> Result<(), SocketError> {
        match self.has_room(resources) {
            _ if resources.gone => Err(SocketError::StackGone),
            true => Ok(()),
            false => Err(SocketError::TooMany),
        }
    }

    /// Inserts a connection. There are at most `options.connections`.
    pub(crate) fn insert(
        &mut self,
        resources: &Resources<P>,
        connection: Connection<P>,
        flow: Flow,
        path: Path<P>,
        role: Role,
    ) -> ConnectionId {
        let max_payload = resources.max_payload(&path, &flow);
        let id = self.connections.insert(ConnectionEntry::new(connection, flow, path, role, max_payload));
        self.enqueue(id);
        id
    }

    /// Opens a connection, from an address and a port of the user's choice if `local` is set.
    pub(crate) fn connect(
        &mut self,
        resources: &mut Resources<P>,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        config: &Config,
    ) -> Result<(ConnectionId, Flow), SocketError> {
        self.check_room(resources)?;
        let chosen = local.map(|local| local.ip()).filter(|local| !local.is_unspecified());
        if let Some(chosen) = chosen {
            resources.check_local(chosen)?;
        }
        let path = resources.find_path(remote.ip()).ok_or(SocketError::NoRoute)?;
        let source = chosen.unwrap_or_else(|| path.source());
        if source.is_ipv4() != remote.is_ipv4() {
            return Err(SocketError::NoRoute);
        }
        let (host, id) = (&resources.host, resources.id);
        let flow = match local.map_or(0, |local| local.port()) {
            0 => {
                let arrives = |flow: &Flow| host.arrives_at(flow, id);
                let flow = host.directory().claim_port(host.ports(), source, remote, id, arrives);
                flow.ok_or(SocketError::NoPort)?
            }
            port => {
                let flow = Flow { local: SocketAddr::new(source, port), remote };
                host.directory().claim(flow, id).then_some(flow).ok_or(SocketError::InUse)?
            }
        };
        let config = resources.config_on(config, &path, &flow);
        let start = resources.host.secret().start(&flow, resources.now);
        let connection = Connection::connect(&config, start, Some(&resources.budget), resources.now);
        let id = self.insert(resources, connection, flow, path, Role::Stream);
        self.touch(resources, id);
        Ok((id, flow))
    }

    /// Reserves the flow of a connection that arrives from another stack or process.
    pub(crate) fn reserve(&mut self, resources: &mut Resources<P>, flow: &Flow) -> Result<Path<P>, SocketError> {
        self.check_room(resources)?;
        let path = resources.find_path(flow.remote.ip()).ok_or(SocketError::NoRoute)?;
        let free = resources.host.directory().arrive(*flow, resources.id);
        if free { Ok(path) } else { Err(SocketError::InUse) }
    }

    /// Inserts a connection whose flow was [reserved](Self::reserve).
    pub(crate) fn adopt(
        &mut self,
        resources: &mut Resources<P>,
        connection: Connection<P>,
        flow: Flow,
        path: Path<P>,
    ) -> ConnectionId {
        let id = self.insert(resources, connection, flow, path, Role::Stream);
        if let Some(entry) = self.connections.get_mut(id) {
            entry.connected = true;
        }
        resources.wake_driver();
        id
    }

    // ---- connections go

    /// Removes a connection that has no owner.
    pub(crate) fn remove(&mut self, resources: &mut Resources<P>, id: ConnectionId) {
        if let Some((entry, true)) = self.detach(resources, id) {
            resources.host.directory().release(&entry.flow);
        }
    }

    /// Removes a connection from the tables of this stack. Returns also whether it had its flow.
    fn detach(&mut self, resources: &mut Resources<P>, id: ConnectionId) -> Option<(Box<ConnectionEntry<P>>, bool)> {
        let room = self.connections.room();
        let (mut entry, linked) = self.connections.remove(id)?;
        self.schedule.remove(id);
        if self.connections.room() < room {
            self.schedule.shrink(self.connections.room());
        }
        entry.written.clear(&mut resources.pages);
        resources.wakers.extend(entry.wakers());
        Some((entry, linked))
    }

    /// Removes a connection from the tables, which continues elsewhere. Its segments are dropped
    /// from now on. `None` if its handshake is not complete, or if it has ended: it has no flow
    /// then.
    pub(crate) fn depart(&mut self, resources: &mut Resources<P>, id: ConnectionId) -> Option<Box<ConnectionEntry<P>>> {
        let seen = self.connections.see(id)?;
        if !seen.is_connected() || self.connections.find(seen.flow()) != Some(id) {
            return None;
        }
        let (entry, _) = self.detach(resources, id)?;
        resources.host.directory().depart(entry.flow);
        Some(entry)
    }

    /// The owner of a connection releases it: the connection is closed, or reset.
    pub(crate) fn orphan(&mut self, resources: &mut Resources<P>, id: ConnectionId, abort: bool) {
        let Some(entry) = self.connections.get_mut(id) else { return };
        entry.role = Role::Orphan;
        resources.wakers.extend(entry.wakers());
        if abort {
            entry.connection.abort(resources.now)
        } else {
            entry.connection.close(resources.now)
        }
        self.touch(resources, id);
    }

    /// A connection has ended, and has nothing left to send. Its flow is free: the peer can use it
    /// for a new connection, although the user still has a stream.
    pub(crate) fn handle_end(&mut self, resources: &mut Resources<P>, id: ConnectionId) {
        match self.connections.see(id).map(|seen| (seen.role(), *seen.flow())) {
            Some((Role::Orphan, _)) => self.remove(resources, id),
            Some((_, flow)) if self.connections.unlink(id) => resources.host.directory().release(&flow),
            _ => {}
        }
    }

    /// Removes the oldest connections in TIME-WAIT if there are more than the limit.
    pub(crate) fn limit_time_wait(&mut self, resources: &mut Resources<P>) {
        while let Some(id) = self.schedule.pop_time_wait(resources.options.time_wait) {
            let ends = |seen: Seen<'_, P>| seen.state() == State::TimeWait && seen.role() == Role::Orphan;
            if self.connections.see(id).is_some_and(ends) {
                self.remove(resources, id);
            }
        }
    }

    // ---- listeners

    /// The next connection of an accept queue. It belongs to the caller from now on.
    pub(crate) fn accept(&mut self, id: ListenerId) -> Option<(ConnectionId, Flow)> {
        let connection = self.listeners.accept(id)?;
        let entry = self.connections.get_mut(connection);
        debug_assert!(entry.is_some(), "the accept queue owns its connections");
        let entry = entry?;
        entry.role = Role::Stream;
        Some((connection, entry.flow))
    }

    /// The user has dropped a listener. Connections that were not accepted are reset.
    pub(crate) fn unlisten(&mut self, resources: &mut Resources<P>, id: ListenerId) {
        if !self.listeners.remove(resources, id) {
            return;
        }
        for own in self.connections.ids(|seen| [Role::HalfOpen(id), Role::Accepted(id)].contains(&seen.role())) {
            self.orphan(resources, own, true);
        }
    }

    // ---- a new connection of a flow in TIME-WAIT

    /// Assigns a flow to this stack for a new connection. Returns false if another connection has
    /// it.
    pub(crate) fn claim(&mut self, resources: &Resources<P>, flow: Flow, reused: Option<ReusedFlow>) -> bool {
        match reused {
            // The flow is this stack's already.
            Some(ReusedFlow { old, .. }) => {
                self.supersede(old);
                true
            }
            None => resources.host.directory().claim(flow, resources.id),
        }
    }

    /// A new connection reuses the flow of one in TIME-WAIT, which ends. It stays in the table
    /// until its owner releases it.
    pub(crate) fn supersede(&mut self, old: ConnectionId) {
        self.connections.unlink(old);
        if let Some(entry) = self.connections.get_mut(old) {
            entry.connection.supersede();
        }
        self.enqueue(old);
    }

    // ---- errors

    /// Processes an ICMP error about a segment.
    pub(crate) fn handle_icmp_error(&mut self, flow: &Flow, kind: IcmpKind, seq: Seq, now: Time) {
        let Some((id, entry)) = self.connections.find_mut(flow) else { return };
        let error = kind.for_connection(header_len(flow).into());
        if entry.connection.handle_delivery_error(error, Some(seq), now)
            && let IcmpKind::TooBig { mtu } = kind
        {
            entry.path.handle_too_big(mtu, now);
        }
        self.schedule.enqueue(id, entry);
    }

    /// Counts a dropped packet: the device had not verified its checksum, and its memory cannot be
    /// read. `segment` is set if it was one. Only a segment that its connection would have
    /// processed counts for the connection: any host can forge others.
    #[cold]
    pub(crate) fn handle_unverified(&mut self, resources: &mut Resources<P>, ip: &Ip, segment: Option<&Segment>) {
        resources.egress.stats.unverified += 1;
        let Some(segment) = segment else { return };
        let flow = ip.flow(segment.source_port, segment.destination_port);
        let Some((_, entry)) = self.connections.find_mut(&flow) else { return };
        if !entry.connection.accepts(&segment.header, segment.payload.len as u32, resources.now) {
            return;
        }
        entry.unverified += 1;
        if entry.unverified >= UNVERIFIED {
            resources.wakers.extend(entry.read.take());
        }
    }

    /// The device is gone: every connection ends.
    pub(crate) fn handle_device_gone(&mut self, resources: &mut Resources<P>) {
        for id in self.connections.ids(|_| true) {
            if let Some(entry) = self.connections.get_mut(id) {
                entry.connection.handle_device_gone();
            }
            self.touch(resources, id);
        }
    }

    /// The stack is dropped: everything ends, and nothing is sent.
    pub(crate) fn end(&mut self, resources: &mut Resources<P>) {
        for id in self.connections.ids(|_| true) {
            self.remove(resources, id);
        }
        for id in self.listeners.ids() {
            self.unlisten(resources, id);
        }
    }
}

/// A connection in TIME-WAIT whose flow a new connection may reuse, and the least initial
/// number of the new one.
#[derive(Clone, Copy)]
pub(crate) struct ReusedFlow {
    pub(crate) old: ConnectionId,
    pub(crate) after: Seq,
}
