//! The tables of a stack: connections, listeners, timers.

use super::carrier::Part;
use super::directory::{Protocol, StackId};
use super::egress::{Egress, Segments};
use super::host::Host;
use super::path::Path;
use super::payload::{Payload, Transmit};
use super::udp::Datagrams;
use super::wheel::Wheel;
use super::{SocketError, StackOptions};
use crate::Time;
use crate::reassembly::Reassembly;
use crate::route::MIN_PATH_MTU_V6;
use crate::tcp::{
    self, Answer, Arriving, Budget, Config, Connection, Event, Flags, Header, IpFields, Listener, Outgoing, Output,
    Seq, State, Unreachable, reset_for,
};
use crate::wire::{Flow, IcmpKind, Ip, Segment};
use netmem_packet::TxQueue;
use slab::Slab;
use std::collections::VecDeque;
use std::collections::hash_map::{HashMap, RandomState};
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::task::Waker;
use std::time::Duration;

/// After this time, connections that wait for a page or for the ring are tried again.
const RETRY: Duration = Duration::from_millis(1);
/// After so many segments whose checksum the device has not verified, the user is told. Fewer of them may just be
/// damaged.
const UNVOUCHED: u64 = 3;

/// A connection in its table.
pub(super) struct Slot<P: Payload> {
    pub(super) connection: Connection<P>,
    pub(super) flow: Flow,
    pub(super) path: Path<P::Count>,
    pub(super) role: Role,
    /// It is in the list of connections that are due.
    queued: bool,
    /// It is in the list of connections that want pages.
    starved: bool,
    pub(super) connected: bool,
    /// The reason why the connection has ended, if it has.
    pub(super) closed: Option<Option<tcp::Error>>,
    pub(super) read: Option<Waker>,
    pub(super) write: Option<Waker>,
    /// The peer has announced urgent data, and the user was not told yet.
    pub(super) urgent: bool,
    /// It is in the list of connections in TIME-WAIT.
    in_time_wait: bool,
    max_payload: u16,
    /// Segments that were dropped since the last payload, because the device had not verified their checksums.
    pub(super) unvouched: u64,
    /// The sequence number that the peer had acknowledged when the next hop was last confirmed.
    una: Seq,
}

/// The owner of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// A `TcpStream` of the user.
    Stream,
    /// A listener; the handshake is not complete.
    HalfOpen(u32),
    /// A listener's accept queue.
    Accepted(u32),
    /// No owner: the user has closed it.
    Orphan,
}

/// A listener in its table.
pub(super) struct Listening {
    pub(super) listener: Listener,
    pub(super) config: Config,
    pub(super) local: SocketAddr,
    pub(super) ready: VecDeque<u32>,
    pub(super) waker: Option<Waker>,
}

pub(super) struct Core<P: Payload> {
    pub(super) host: Host<P>,
    pub(super) id: StackId,
    pub(super) options: StackOptions,
    pub(super) now: Time,
    pub(super) egress: Egress<P::Mem>,
    /// Received pages that connections, sockets and users may hold.
    pub(super) budget: Budget,
    /// How many of these the fragments of datagrams may hold.
    pub(super) fragments: Budget,
    /// The queue has fewer buffers posted than its reserve: payload is dropped.
    pub(super) short: bool,
    pub(super) slots: Slab<Slot<P>>,
    flows: HashMap<Flow, u32, RandomState>,
    pub(super) listeners: Slab<Listening>,
    listening: HashMap<SocketAddr, u32>,
    pub(super) udp: Datagrams<P::Mem>,
    pub(super) reassembly: Reassembly<Part<P::Mem>>,
    wheel: Wheel,
    fired: Vec<u32>,
    /// Connections that must be processed, because of an event.
    due: VecDeque<u32>,
    /// Connections that wait for the ring, for a page or for their next hop.
    blocked: VecDeque<u32>,
    /// Connections whose window is small because of the page budget. Returned pages wake the stack.
    starved: Vec<u32>,
    /// When they are tried again even if the ring has completed nothing, because pages and next hops wake no thread.
    retry: Option<Time>,
    /// Connections in TIME-WAIT, in the order in which they came there.
    time_wait: VecDeque<(u32, Flow)>,
    /// Wakers that are called at the end of the poll, when no table is borrowed.
    pub(super) wakers: Vec<Waker>,
    /// The task that drives the stack.
    pub(super) driver: Option<Waker>,
    /// The stack was dropped.
    pub(super) gone: bool,
}

impl<P: Payload> Core<P> {
    /// `waker` ends the sleep of the stack's thread.
    pub(super) fn new(
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
            egress,
            udp: Datagrams::new(),
            reassembly: Reassembly::new(),
            budget,
            fragments,
            short: false,
            host,
            id,
            options,
            now,
            slots: Slab::new(),
            flows: HashMap::default(),
            listeners: Slab::new(),
            listening: HashMap::new(),
            wheel: Wheel::new(now),
            fired: Vec::new(),
            due: VecDeque::new(),
            blocked: VecDeque::new(),
            starved: Vec::new(),
            retry: None,
            time_wait: VecDeque::new(),
            wakers: Vec::new(),
            driver: None,
            gone: false,
        }
    }

    /// Whether there is work for the next poll.
    pub(super) fn has_work(&self) -> bool {
        !self.due.is_empty() || !self.egress.loopback.is_empty() || self.udp.has_work()
    }

    /// Whether a packet or a connection waits for the transmit queue.
    pub(super) fn is_blocked(&self) -> bool {
        !self.blocked.is_empty() || self.udp.is_blocked()
    }

    /// When the first timer fires or moves, or connections are tried again.
    pub(super) fn next_timer(&self) -> Option<Time> {
        [self.wheel.next(), self.retry, self.reassembly.deadline()].into_iter().flatten().min()
    }

    /// A next hop was resolved, or has failed. Connections that wait for a next hop are tried in this poll.
    pub(super) fn retry_now(&mut self) {
        self.retry = Some(self.now);
    }

    /// The user has called a connection's socket: the connection is processed in the next poll.
    pub(super) fn touch(&mut self, n: u32) {
        self.enqueue(n);
        self.wake_driver();
    }

    /// Wakes the task that polls the stack, if there is one.
    pub(super) fn wake_driver(&mut self) {
        if let Some(driver) = self.driver.take() {
            driver.wake();
        }
    }

    fn enqueue(&mut self, n: u32) {
        if let Some(slot) = self.slots.get_mut(n as usize)
            && !mem::replace(&mut slot.queued, true)
        {
            self.due.push_back(n);
        }
    }

    // ---- connections come and go

    /// The path to `destination`, if there is one.
    pub(super) fn find_path(&mut self, destination: IpAddr) -> Option<Path<P::Count>> {
        self.egress.stats.lookups += 1;
        Path::find(&self.host, destination, self.now)
    }

    pub(super) fn insert(&mut self, connection: Connection<P>, flow: Flow, path: Path<P::Count>, role: Role) -> u32 {
        let slot = Slot {
            connection,
            flow,
            role,
            queued: false,
            starved: false,
            connected: false,
            closed: None,
            read: None,
            write: None,
            urgent: false,
            in_time_wait: false,
            max_payload: path.mtu(self.now).saturating_sub(headers(&flow)),
            unvouched: 0,
            una: Seq(0),
            path,
        };
        // There are at most `options.connections`.
        let n = self.slots.insert(slot) as u32;
        self.flows.insert(flow, n);
        self.enqueue(n);
        n
    }

    /// Removes a connection that has ended and that has no user.
    fn remove(&mut self, n: u32) {
        let slot = self.forget(n);
        self.host.directory().release(&slot.flow);
    }

    /// Takes a connection out of the tables of this stack.
    pub(super) fn forget(&mut self, n: u32) -> Slot<P> {
        let mut slot = self.slots.remove(n as usize);
        self.flows.remove(&slot.flow);
        self.wheel.clear(n);
        self.wakers.extend(slot.read.take().into_iter().chain(slot.write.take()));
        slot
    }

    /// The initial options of a connection on a path.
    pub(super) fn config(&self, config: &Config, path: &Path<P::Count>, flow: &Flow) -> Config {
        let mss = self.host.interface().mtu.saturating_sub(headers(flow));
        let max_payload = path.mtu(self.now).saturating_sub(headers(flow));
        let mut config = Config { mss, max_payload, ..*config };
        if flow.local.is_ipv6() {
            // Each link of IPv6 takes 1280 bytes.
            let least = MIN_PATH_MTU_V6 - headers(flow);
            config.default_mss = config.default_mss.max(least);
            config.send.path_floor = config.send.path_floor.max(least.into());
        }
        config
    }

    pub(super) fn connect(&mut self, remote: SocketAddr, config: &Config) -> Result<u32, SocketError> {
        if self.gone {
            return Err(SocketError::StackGone);
        }
        self.check_room()?;
        let path = self.find_path(remote.ip()).ok_or(SocketError::NoRoute)?;
        let flow = self.host.directory().claim_port(self.host.ports(), path.source(), remote, self.id);
        let flow = flow.ok_or(SocketError::NoPort)?;
        let config = self.config(config, &path, &flow);
        let start = self.host.secret().start(&flow, self.now);
        let connection = Connection::connect(&config, start, Some(&self.budget), self.now);
        let n = self.insert(connection, flow, path, Role::Stream);
        self.touch(n);
        Ok(n)
    }

    /// Whether a socket can be bound to an address.
    pub(super) fn check_local(&self, local: IpAddr) -> Result<(), SocketError> {
        if self.gone {
            return Err(SocketError::StackGone);
        }
        let ours = local.is_unspecified() || self.host.interface().owns(local);
        if ours { Ok(()) } else { Err(SocketError::NotOurs) }
    }

    pub(super) fn check_room(&self) -> Result<(), SocketError> {
        if self.slots.len() < self.options.connections { Ok(()) } else { Err(SocketError::TooMany) }
    }

    // ---- listeners

    pub(super) fn listen(&mut self, local: SocketAddr, listener: Listener, config: Config) -> Result<u32, SocketError> {
        if !self.host.directory().bind(Protocol::Tcp, local, self.id) {
            return Err(SocketError::InUse);
        }
        let listening = Listening { listener, config, local, ready: VecDeque::new(), waker: None };
        let n = self.listeners.insert(listening) as u32;
        self.listening.insert(any(local), n);
        Ok(n)
    }

    /// The user has dropped a listener. Connections that were not accepted are reset.
    pub(super) fn unlisten(&mut self, n: u32) {
        let Some(listening) = self.listeners.try_remove(n as usize) else { return };
        self.listening.remove(&any(listening.local));
        self.host.directory().unbind(Protocol::Tcp, listening.local, self.id);
        let own = |(_, slot): &(usize, &Slot<P>)| [Role::HalfOpen(n), Role::Accepted(n)].contains(&slot.role);
        let connections: Vec<u32> = self.slots.iter().filter(own).map(|(n, _)| n as u32).collect();
        for n in connections {
            self.let_go(n, true);
        }
    }

    pub(super) fn accept(&mut self, n: u32) -> Option<u32> {
        let listening = self.listeners.get_mut(n as usize)?;
        let connection = listening.ready.pop_front()?;
        listening.listener.taken();
        self.slots[connection as usize].role = Role::Stream;
        Some(connection)
    }

    /// The user has dropped a connection.
    pub(super) fn let_go(&mut self, n: u32, abort: bool) {
        let (now, Some(slot)) = (self.now, self.slots.get_mut(n as usize)) else { return };
        slot.role = Role::Orphan;
        // A waker that is dropped here could drop another socket, while the tables are borrowed.
        self.wakers.extend(slot.read.take().into_iter().chain(slot.write.take()));
        if abort {
            slot.connection.abort(now)
        } else {
            slot.connection.close(now)
        }
        self.touch(n);
    }

    fn listener_of(&self, local: SocketAddr) -> Option<u32> {
        self.listening.get(&local).or_else(|| self.listening.get(&everywhere(local.port()))).copied()
    }

    // ---- segments

    /// Processes a received segment.
    pub(super) fn segment<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        flow: Flow,
        header: &Header,
        meta: tcp::Meta,
        payload: impl Iterator<Item = P::Received>,
    ) where
        P: Transmit<T>,
    {
        let now = self.now;
        let mut after = None;
        let listener = self.listener_of(flow.local);
        if let Some(&n) = self.flows.get(&flow) {
            let slot = &mut self.slots[n as usize];
            after = match slot.connection.state() {
                State::TimeWait if header.flags.has(Flags::SYN) => slot.connection.reused_by(header),
                _ => None,
            };
            if after.is_none() || listener.is_none() {
                if let Role::HalfOpen(listener) = slot.role
                    && let Some(listening) = self.listeners.get_mut(listener as usize)
                    && !listening.listener.admits(&slot.connection, header)
                {
                    self.egress.stats.accept_overflows += 1;
                    return;
                }
                if slot.unvouched > 0 && meta.len > 0 && slot.connection.accepts(header, meta.len, now) {
                    slot.unvouched = 0;
                }
                slot.connection.segment(header, payload, meta, now);
                self.enqueue(n);
                return;
            }
            // A new connection takes the place of one in TIME-WAIT.
            self.remove(n);
        }
        if self.host.directory().is_departed(&flow) {
            self.egress.stats.departed += 1;
            return;
        }
        let Some(listener) = listener else {
            self.reset(tx, &flow, header, meta);
            return;
        };
        let Some(path) = self.find_path(flow.remote.ip()).filter(|_| self.check_room().is_ok()) else {
            self.egress.stats.no_room += 1;
            return;
        };
        let config = self.config(&self.listeners[listener as usize].config, &path, &flow);
        let listening = &mut self.listeners[listener as usize];
        let arriving = Arriving { header, len: meta.len, flow: &flow, after };
        match listening.listener.segment(arriving, &config, self.host.secret(), Some(&self.budget), now) {
            Answer::HalfOpen(connection) => {
                if self.host.directory().claim(flow, self.id) {
                    self.insert(connection, flow, path, Role::HalfOpen(listener));
                } else {
                    listening.listener.failed();
                }
            }
            Answer::Connected(mut connection) => {
                if self.host.directory().claim(flow, self.id) {
                    connection.segment(header, payload, meta, now);
                    let n = self.insert(connection, flow, path, Role::Accepted(listener));
                    self.offer(listener, n);
                } else {
                    listening.listener.taken();
                }
            }
            Answer::Reply(reply) => self.reply(tx, &flow, &reply, path, config.ip),
            Answer::Drop => {}
        }
    }

    /// Counts a dropped packet: the device had not verified its checksum, and its memory cannot be
    /// read. `segment` is set if it was one. Only a segment that its connection would have
    /// processed counts for the connection: any host can forge others.
    #[cold]
    pub(super) fn unvouched(&mut self, ip: &Ip, segment: Option<&Segment>) {
        self.egress.stats.unvouched += 1;
        let Some(segment) = segment else { return };
        let flow = ip.flow(segment.source_port, segment.destination_port);
        let Some(&n) = self.flows.get(&flow) else { return };
        let slot = &mut self.slots[n as usize];
        if !slot.connection.accepts(&segment.header, segment.payload.len as u32, self.now) {
            return;
        }
        slot.unvouched += 1;
        if slot.unvouched >= UNVOUCHED {
            self.wakers.extend(slot.read.take());
        }
    }

    /// Whether the connection belongs to this stack.
    pub(super) fn has_connection(&self, flow: &Flow) -> bool {
        self.flows.contains_key(flow)
    }

    fn reset<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, flow: &Flow, header: &Header, meta: tcp::Meta)
    where
        P: Transmit<T>,
    {
        let Some(reset) = reset_for(header, meta.len) else { return };
        if let Some(path) = self.find_path(flow.remote.ip()) {
            self.egress.stats.resets += 1;
            self.reply(tx, flow, &reset, path, IpFields::default());
        }
    }

    /// Sends a segment of no connection. It is lost if there is no room for it.
    fn reply<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        flow: &Flow,
        header: &Header,
        mut path: Path<P::Count>,
        ip: IpFields,
    ) where
        P: Transmit<T>,
    {
        let mut out = Segments {
            host: &self.host,
            egress: &mut self.egress,
            tx,
            flow,
            path: &mut path,
            now: self.now,
            ecn: false,
            ip,
        };
        let segment = Outgoing { header, payload: &[], payload_len: 0, segment_size: 0, ect: false, probe: false };
        let _ = out.segment(segment);
    }

    /// The stack is dropped: everything ends. Returns the wakers to call.
    pub(super) fn end(&mut self) -> Vec<Waker> {
        self.gone = true;
        let numbers: Vec<u32> = self.slots.iter().map(|(n, _)| n as u32).collect();
        for n in numbers {
            self.remove(n);
        }
        let listeners: Vec<u32> = self.listeners.iter().map(|(n, _)| n as u32).collect();
        for n in listeners {
            let waker = self.listeners[n as usize].waker.take();
            self.unlisten(n);
            self.wakers.extend(waker);
        }
        self.egress.loopback.clear();
        self.host.leave(self.id);
        mem::take(&mut self.wakers)
    }

    // ---- what is due

    /// Processes an ICMP error about a segment.
    pub(super) fn connection_error(&mut self, flow: &Flow, kind: IcmpKind, seq: Seq) {
        let Some(&n) = self.flows.get(flow) else { return };
        let slot = &mut self.slots[n as usize];
        let error = kind.for_connection(headers(flow).into());
        if slot.connection.error(error, Some(seq), self.now)
            && let IcmpKind::TooBig { mtu } = kind
        {
            slot.path.too_big(mtu, self.now);
        }
        self.enqueue(n);
    }

    /// Fires timers, and lets connections that are due send.
    pub(super) fn work<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, completed: usize) -> usize
    where
        P: Transmit<T>,
    {
        let now = self.now;
        self.reassembly.timeout(now);
        let mut fired = mem::take(&mut self.fired);
        self.wheel.advance(now, &mut fired);
        for &n in &fired {
            self.enqueue(n);
        }
        let mut work = fired.len();
        fired.clear();
        self.fired = fired;
        // Connections that wait come first, because they have waited longer.
        if completed > 0 || self.retry.is_some_and(|at| at <= now) {
            self.retry = None;
            for n in mem::take(&mut self.blocked).into_iter().rev() {
                self.due.push_front(n);
            }
        }
        work += self.due.len();
        let mut full = false;
        for _ in 0..self.due.len() {
            let Some(n) = self.due.pop_front() else { break };
            full |= self.visit(tx, n, full);
        }
        if !self.blocked.is_empty() && self.retry.is_none() {
            self.retry = Some(now + RETRY);
        }
        work
    }

    /// Processes a connection: timers, segments to send, events, the next timer. Returns whether the ring is full.
    fn visit<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, n: u32, full: bool) -> bool
    where
        P: Transmit<T>,
    {
        let now = self.now;
        let Some(slot) = self.slots.get_mut(n as usize) else { return false };
        slot.queued = false;
        if slot.connection.deadline().is_some_and(|at| at <= now) {
            slot.connection.timeout(now);
        }
        let una = slot.connection.una();
        if mem::replace(&mut slot.una, una) != una {
            // The peer has received a segment, so the next hop has forwarded it.
            slot.path.confirm(now);
        }
        let max_payload = slot.path.mtu(now).saturating_sub(headers(&slot.flow));
        if mem::replace(&mut slot.max_payload, max_payload) != max_payload {
            slot.connection.set_max_payload(max_payload);
        }
        let (ecn, ip) = (slot.connection.uses_ecn(), slot.connection.ip());
        let mut out = Segments {
            host: &self.host,
            egress: &mut self.egress,
            tx,
            flow: &slot.flow,
            path: &mut slot.path,
            now,
            ecn,
            ip,
        };
        let sent = if full { Err(tcp::Full) } else { slot.connection.transmit(now, &mut out) };
        let ring_is_full = sent.is_err() && !slot.path.waits();
        if slot.path.take_failure() {
            slot.connection.error(tcp::IcmpError::Unreachable(Unreachable::Host), None, now);
        }
        if sent.is_err() || slot.connection.waits_for_ring() {
            slot.queued = true;
            self.blocked.push_back(n);
        }
        while let Some(event) = self.slots[n as usize].connection.event() {
            self.event(n, event);
        }
        let slot = &mut self.slots[n as usize];
        if slot.connection.state() == State::TimeWait && !mem::replace(&mut slot.in_time_wait, true) {
            self.time_wait.push_back((n, slot.flow));
        }
        self.set_timer(n);
        self.starve(n);
        self.limit_time_wait();
        let Some(slot) = self.slots.get(n as usize) else { return ring_is_full };
        // A connection stays until its user knows that it has ended.
        if slot.connection.is_gone() && slot.role != Role::Stream {
            self.remove(n);
        }
        ring_is_full
    }

    /// The device is gone: every connection ends.
    pub(super) fn device_gone(&mut self) {
        let numbers: Vec<u32> = self.slots.iter().map(|(n, _)| n as u32).collect();
        for n in numbers {
            self.slots[n as usize].connection.device_gone();
            self.touch(n);
        }
    }

    /// Pages were returned: connections that need some are processed.
    pub(super) fn feed(&mut self) {
        for n in mem::take(&mut self.starved) {
            if let Some(slot) = self.slots.get_mut(n as usize) {
                slot.starved = false;
                self.enqueue(n);
            }
        }
    }

    /// If a connection's window is small because of the page budget, it is processed when pages are returned, on any
    /// thread.
    fn starve(&mut self, n: u32) {
        let Some(slot) = self.slots.get_mut(n as usize) else { return };
        if !slot.connection.is_starved() || slot.starved {
            return;
        }
        slot.connection.budget().wait();
        if slot.connection.is_starved() {
            slot.starved = true;
            self.starved.push(n);
        } else {
            self.enqueue(n);
        }
    }

    fn set_timer(&mut self, n: u32) {
        let slot = &self.slots[n as usize];
        // If a connection waits for the ring or its next hop, it cannot act on its deadline before it is tried again.
        let deadline = slot.connection.deadline().map(|at| if slot.queued { at.max(self.now + RETRY) } else { at });
        let armed = self.wheel.get(n);
        // A timer may fire too early, and is then set again. This is cheaper than moving it each time.
        if let Some(at) = deadline
            && armed.is_none_or(|armed| at < armed)
        {
            self.wheel.set(n, at);
        }
    }

    fn event(&mut self, n: u32, event: Event) {
        let slot = &mut self.slots[n as usize];
        let wakers = &mut self.wakers;
        match event {
            Event::Connected => {
                slot.connected = true;
                wakers.extend(slot.read.take().into_iter().chain(slot.write.take()));
                if let Role::HalfOpen(listener) = slot.role {
                    slot.role = Role::Accepted(listener);
                    if let Some(listening) = self.listeners.get_mut(listener as usize) {
                        listening.listener.connected();
                    }
                    self.offer(listener, n);
                }
            }
            Event::Readable | Event::End => wakers.extend(slot.read.take()),
            Event::Urgent => {
                slot.urgent = true;
                wakers.extend(slot.read.take());
            }
            Event::Writable => wakers.extend(slot.write.take()),
            Event::Closed(error) => {
                slot.closed = Some(error);
                wakers.extend(slot.read.take().into_iter().chain(slot.write.take()));
                match slot.role {
                    Role::HalfOpen(listener) => {
                        if let Some(listening) = self.listeners.get_mut(listener as usize) {
                            listening.listener.failed();
                        }
                        slot.role = Role::Orphan;
                    }
                    // It stays in the accept queue, so that the user can read the received payload and the error.
                    Role::Accepted(_) | Role::Stream | Role::Orphan => {}
                }
            }
        }
    }

    fn offer(&mut self, listener: u32, n: u32) {
        if let Some(listening) = self.listeners.get_mut(listener as usize) {
            listening.ready.push_back(n);
            self.wakers.extend(listening.waker.take());
        }
    }

    pub(super) fn count_time_wait(&self) -> usize {
        self.slots.iter().filter(|(_, slot)| slot.connection.state() == State::TimeWait).count()
    }

    /// Removes the oldest connections in TIME-WAIT if there are more than the limit.
    fn limit_time_wait(&mut self) {
        while self.time_wait.len() > self.options.time_wait {
            let Some((n, flow)) = self.time_wait.pop_front() else { break };
            let slot = self.slots.get(n as usize);
            let is_it = slot.is_some_and(|slot| slot.flow == flow && slot.connection.state() == State::TimeWait);
            if is_it && slot.is_some_and(|slot| slot.role == Role::Orphan) {
                self.remove(n);
            }
        }
    }
}

/// Bytes of IP and TCP headers without options.
fn headers(flow: &Flow) -> u16 {
    if flow.local.is_ipv4() { 40 } else { 60 }
}

/// The key of a listener on all addresses of both families.
pub(super) fn everywhere(port: u16) -> SocketAddr {
    ([0, 0, 0, 0], port).into()
}

/// The key of a listener.
pub(super) fn any(local: SocketAddr) -> SocketAddr {
    if local.ip().is_unspecified() { everywhere(local.port()) } else { local }
}
