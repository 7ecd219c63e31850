//! The parts of a stack that its sockets share with it: connections, listeners, sockets for
//! datagrams, budgets.

use crate::Time;
use crate::reassembly::Reassembly;
use crate::stack::SocketError;
use crate::stack::StackOptions;
use crate::stack::carrier::Part;
use crate::stack::egress::Egress;
use crate::stack::input::Back;
use crate::stack::pages::SendPages;
use crate::stack::path::Path;
use crate::stack::payload::{Payload, Transmit};
use crate::stack::shared::directory::StackId;
use crate::stack::shared::host::Host;
use crate::stack::transport::connections::{ConnectionId, Connections, Role, Slot};
use crate::stack::transport::datagrams::Datagrams;
use crate::stack::transport::listeners::{Begins, Listeners, Reused, headers};
use crate::stack::transport::schedule::Schedule;
use crate::tcp::{self, Budget, Config, Connection, Flags, Header, IpFields, Seq, State, reset_for};
use crate::wire::{Flow, IcmpKind, Ip, Segment};
use netmem_packet::TxQueue;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::task::Waker;

/// After so many segments whose checksum the device has not verified, the user is told. Fewer of
/// them may just be damaged.
const UNVERIFIED: u64 = 3;
/// The most chunks of payload out of order that are dropped for one segment in order.
const MOST_EVICTED: usize = 64;

pub(crate) struct Core<P: Payload> {
    pub(crate) host: Host<P>,
    pub(crate) id: StackId,
    pub(crate) options: StackOptions,
    pub(crate) now: Time,
    pub(crate) egress: Egress<P::Mem>,
    /// The pages of the pool, from which users write.
    pub(crate) pages: SendPages,
    /// Received pages that connections, sockets and users may hold.
    pub(crate) budget: Budget,
    /// How many of these the fragments of datagrams may hold.
    pub(crate) fragments: Budget,
    /// The queue has fewer buffers posted than its reserve: payload is dropped.
    pub(crate) short: bool,
    pub(crate) connections: Connections<P>,
    pub(crate) listeners: Listeners,
    pub(crate) schedule: Schedule,
    pub(crate) udp: Datagrams<P::Mem>,
    pub(crate) reassembly: Reassembly<Part<P::Mem>>,
    /// The number of changes of neighbours that connections have been told of
    /// ([`Host::hop_changes`]).
    hop_changes: u64,
    /// Wakers that are called at the end of the poll, when no table is borrowed.
    pub(crate) wakers: Vec<Waker>,
    /// The task that drives the stack.
    pub(crate) driver: Option<Waker>,
    /// The stack was dropped.
    pub(crate) gone: bool,
}

impl<P: Payload> Core<P> {
    /// `waker` ends the sleep of the stack's thread.
    pub(crate) fn new(
        host: Host<P>,
        id: StackId,
        egress: Egress<P::Mem>,
        options: StackOptions,
        now: Time,
        waker: Waker,
    ) -> Self {
        let budget = Budget::waking(options.pages, waker);
        let fragments = Budget::within(options.pages / 4, Some(&budget));
        Self {
            pages: SendPages::new(egress.pool.limit()),
            egress,
            udp: Datagrams::new(),
            reassembly: Reassembly::new(),
            budget,
            fragments,
            short: false,
            hop_changes: host.hop_changes(),
            host,
            id,
            options,
            now,
            connections: Connections::new(),
            listeners: Listeners::new(),
            schedule: Schedule::new(now),
            wakers: Vec::new(),
            driver: None,
            gone: false,
        }
    }

    /// Whether there is work for the next poll.
    pub(crate) fn has_work(&self) -> bool {
        let hops = self.schedule.waits_for_hops() && self.hop_changes != self.host.hop_changes();
        self.schedule.is_due() || hops || !self.egress.loopback.is_empty() || self.udp.has_work()
    }

    /// Whether a packet or a connection waits for the transmit queue.
    pub(crate) fn is_blocked(&self) -> bool {
        self.schedule.waits_for_ring() || self.udp.is_blocked()
    }

    /// When the first timer fires or moves.
    pub(crate) fn next_timer(&self) -> Option<Time> {
        [self.schedule.next_timer(), self.reassembly.deadline()].into_iter().flatten().min()
    }

    /// Processes connections that wait for a next hop, if a stack of the host has reported a change
    /// of a neighbour.
    pub(crate) fn check_hops(&mut self) {
        let changes = self.host.hop_changes();
        if mem::replace(&mut self.hop_changes, changes) != changes {
            self.hops_changed();
        }
    }

    /// The user has called a connection's socket: the connection is processed in the next poll.
    pub(crate) fn touch(&mut self, id: ConnectionId) {
        self.enqueue(id);
        self.wake_driver();
    }

    /// Wakes the task that polls the stack, if there is one.
    pub(crate) fn wake_driver(&mut self) {
        if let Some(driver) = self.driver.take() {
            driver.wake();
        }
    }

    // ---- connections come and go

    /// The path to `destination`, if there is one.
    pub(crate) fn find_path(&mut self, destination: IpAddr) -> Option<Path<P::Count>> {
        self.egress.stats.lookups += 1;
        Path::find(&self.host, destination, self.now)
    }

    pub(crate) fn insert(
        &mut self,
        connection: Connection<P>,
        flow: Flow,
        path: Path<P::Count>,
        role: Role,
    ) -> ConnectionId {
        let max_payload = path.mtu(self.now).saturating_sub(headers(&flow));
        // There are at most `options.connections`.
        let id = self.connections.insert(Slot::new(connection, flow, path, role, max_payload));
        self.enqueue(id);
        id
    }

    /// Removes a connection that has no owner.
    pub(crate) fn remove(&mut self, id: ConnectionId) {
        if let Some((slot, true)) = self.forget(id) {
            self.host.directory().release(&slot.flow);
        }
    }

    /// Takes a connection out of the tables of this stack. Returns also whether it had its flow.
    pub(crate) fn forget(&mut self, id: ConnectionId) -> Option<(Box<Slot<P>>, bool)> {
        let (mut slot, linked) = self.connections.remove(id)?;
        self.schedule.forget(id);
        self.pages.release(slot.written.clear());
        self.wakers.extend(slot.wakers());
        Some((slot, linked))
    }

    /// Opens a connection, from an address and a port of the user's choice if `local` is set.
    pub(crate) fn connect(
        &mut self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        config: &Config,
    ) -> Result<(ConnectionId, Flow), SocketError> {
        if self.gone {
            return Err(SocketError::StackGone);
        }
        self.check_room()?;
        let chosen = local.map(|local| local.ip()).filter(|local| !local.is_unspecified());
        if let Some(chosen) = chosen {
            self.check_local(chosen)?;
        }
        let path = self.find_path(remote.ip()).ok_or(SocketError::NoRoute)?;
        let source = chosen.unwrap_or_else(|| path.source());
        if source.is_ipv4() != remote.is_ipv4() {
            return Err(SocketError::NoRoute);
        }
        let (host, id) = (&self.host, self.id);
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
        let config = self.config_on(config, &path, &flow);
        let start = self.host.secret().start(&flow, self.now);
        let connection = Connection::connect(&config, start, Some(&self.budget), self.now);
        let id = self.insert(connection, flow, path, Role::Stream);
        self.touch(id);
        Ok((id, flow))
    }

    /// The initial options of a connection on a path.
    pub(crate) fn config_on(&self, config: &Config, path: &Path<P::Count>, flow: &Flow) -> Config {
        let max_payload = path.mtu(self.now).saturating_sub(headers(flow));
        Config { max_payload, ..self.config(config, flow) }
    }

    /// Whether a socket can be bound to an address.
    pub(crate) fn check_local(&self, local: IpAddr) -> Result<(), SocketError> {
        if self.gone {
            return Err(SocketError::StackGone);
        }
        let ours = local.is_unspecified() || self.host.interface().owns(local);
        if ours { Ok(()) } else { Err(SocketError::NotOurs) }
    }

    pub(crate) fn check_room(&self) -> Result<(), SocketError> {
        if self.connections.len() < self.options.connections { Ok(()) } else { Err(SocketError::TooMany) }
    }

    /// The owner of a connection has let it go: the connection is closed, or reset.
    pub(crate) fn let_go(&mut self, id: ConnectionId, abort: bool) {
        let (now, Some(slot)) = (self.now, self.connections.get_mut(id)) else { return };
        slot.role = Role::Orphan;
        // A waker that is dropped here could drop another socket, while the tables are borrowed.
        self.wakers.extend(slot.wakers());
        if abort {
            slot.connection.abort(now)
        } else {
            slot.connection.close(now)
        }
        self.touch(id);
    }

    // ---- segments

    /// Processes a received segment.
    pub(crate) fn segment<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        (flow, back): (Flow, Back),
        header: &Header,
        meta: tcp::Meta,
        payload: impl Iterator<Item = P::Received>,
    ) where
        P: Transmit<T>,
    {
        let Some((id, slot)) = self.connections.find_mut(&flow) else {
            return self.begin(tx, Begins { flow, header, meta, back, reused: None }, payload);
        };
        if slot.connection.state() == State::TimeWait
            && header.flags.has(Flags::SYN)
            && let Some(after) = slot.connection.reused_by(header)
            && self.listeners.find(flow.local).is_some()
        {
            let reused = Some(Reused { old: id, after });
            return self.begin(tx, Begins { flow, header, meta, back, reused }, payload);
        }
        if let Role::HalfOpen(listener) = slot.role
            && let Some(listening) = self.listeners.get_mut(listener)
            && !listening.listener.admits(&slot.connection, header)
        {
            self.egress.stats.accept_overflows += 1;
            return;
        }
        if slot.unverified > 0 && meta.len > 0 && slot.connection.accepts(header, meta.len, self.now) {
            slot.unverified = 0;
        }
        let lacks = meta.len > 0 && slot.connection.lacks_buffer_for(header.seq, meta.len);
        if lacks && slot.connection.accepts(header, meta.len, self.now) {
            self.relieve(id, header.seq, meta.len);
        }
        let Some(slot) = self.connections.get_mut(id) else { return };
        slot.connection.handle_segment(header, payload, meta, self.now);
        self.connections.note_out_of_order(id);
        self.enqueue(id);
    }

    /// No buffer is free for payload of a connection that is in order. Payload that is out of order
    /// makes room: that of the connection that has most goes first. Its peer sends it again.
    #[cold]
    fn relieve(&mut self, id: ConnectionId, seq: Seq, len: u32) {
        for _ in 0..MOST_EVICTED {
            let lacks = self.connections.get(id).is_some_and(|slot| slot.connection.lacks_buffer_for(seq, len));
            if !lacks || !self.connections.evict() {
                return;
            }
            self.egress.stats.evicted += 1;
        }
    }

    /// Counts a dropped packet: the device had not verified its checksum, and its memory cannot be
    /// read. `segment` is set if it was one. Only a segment that its connection would have
    /// processed counts for the connection: any host can forge others.
    #[cold]
    pub(crate) fn unverified(&mut self, ip: &Ip, segment: Option<&Segment>) {
        self.egress.stats.unverified += 1;
        let Some(segment) = segment else { return };
        let flow = ip.flow(segment.source_port, segment.destination_port);
        let Some((_, slot)) = self.connections.find_mut(&flow) else { return };
        if !slot.connection.accepts(&segment.header, segment.payload.len as u32, self.now) {
            return;
        }
        slot.unverified += 1;
        if slot.unverified >= UNVERIFIED {
            self.wakers.extend(slot.read.take());
        }
    }

    /// Answers a segment of no connection by a reset.
    pub(crate) fn reset<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        flow: &Flow,
        header: &Header,
        meta: tcp::Meta,
        back: Back,
    ) {
        if let Some(reset) = reset_for(header, meta.len) {
            self.reply(tx, flow, &reset, back, IpFields::default());
        }
    }

    /// The stack is dropped: everything ends. Returns the wakers to call.
    pub(crate) fn end(&mut self) -> Vec<Waker> {
        self.gone = true;
        for id in self.connections.ids(|_| true) {
            self.remove(id);
        }
        for id in self.listeners.ids() {
            self.unlisten(id);
        }
        self.egress.loopback.clear();
        self.host.leave(self.id);
        mem::take(&mut self.wakers)
    }

    /// Processes an ICMP error about a segment.
    pub(crate) fn connection_error(&mut self, flow: &Flow, kind: IcmpKind, seq: Seq) {
        let Some((id, slot)) = self.connections.find_mut(flow) else { return };
        let error = kind.for_connection(headers(flow).into());
        if slot.connection.handle_icmp_error(error, Some(seq), self.now)
            && let IcmpKind::TooBig { mtu } = kind
        {
            slot.path.too_big(mtu, self.now);
        }
        self.enqueue(id);
    }

    /// The device is gone: every connection ends.
    pub(crate) fn device_gone(&mut self) {
        for id in self.connections.ids(|_| true) {
            if let Some(slot) = self.connections.get_mut(id) {
                slot.connection.handle_device_gone();
            }
            self.touch(id);
        }
    }
}
