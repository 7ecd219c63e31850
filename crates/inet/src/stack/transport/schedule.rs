//! When a connection is processed: it is due because of an event or a timer, or what it waits for
//! is there.
//!
//! ```text
//!   segment, call, timer ──► due ──► visit ──► timers, segments to send, events, next timer
//!                             ▲        ├──► ring     the ring is full: in order, as many as completions make room for
//!                             │        ├──► hops     the next hop is not resolved: when a neighbour has changed
//!                             └────────┴──► starved  pages are missing to receive: when pages are returned
//! ```
//!
//! A connection that waits has a deadline, too ([`Connection::transmit`]), so none waits for ever,
//! and none is tried at intervals.
//!
//! [`Connection::transmit`]: crate::tcp::Connection::transmit

use crate::Time;
use crate::stack::core::Core;
use crate::stack::egress::Segments;
use crate::stack::payload::{Payload, Transmit};
use crate::stack::transport::connections::{ConnectionId, Role, Slot};
use crate::stack::transport::listeners::headers;
use crate::stack::transport::wheel::Wheel;
use crate::tcp::{self, Event, State, Unreachable};
use netmem_packet::TxQueue;
use std::collections::VecDeque;
use std::mem;

/// The connections that are to be processed, by what they wait for.
/// The most connections that a poll processes because pages were returned. More of them may want
/// pages than there are connections that do something.
const MOST_FED: usize = 64;

pub(crate) struct Schedule {
    /// The timer of a connection has the number of its place.
    wheel: Wheel,
    fired: Vec<u32>,
    /// Connections that must be processed, because of an event.
    due: VecDeque<ConnectionId>,
    /// Connections that wait for the ring, in the order in which they began to wait.
    ring: VecDeque<ConnectionId>,
    /// Connections whose next hop is not resolved.
    hops: Vec<ConnectionId>,
    /// Connections whose window is small because of the page budget. Returned pages wake the stack.
    starved: VecDeque<ConnectionId>,
    /// How many of them are to be processed, because pages were returned.
    to_feed: usize,
    /// Connections in TIME-WAIT, in the order in which they came there.
    time_wait: VecDeque<ConnectionId>,
}

/// The outcome of a visit.
enum Visit {
    /// The connection has sent what it may send, or waits for something of its own.
    Done,
    /// The ring is full, and the connection has sent something before, or nothing.
    Full { sent: bool },
}

impl Schedule {
    pub(crate) fn new(now: Time) -> Self {
        Self {
            wheel: Wheel::new(now),
            fired: Vec::new(),
            due: VecDeque::new(),
            ring: VecDeque::new(),
            hops: Vec::new(),
            starved: VecDeque::new(),
            to_feed: 0,
            time_wait: VecDeque::new(),
        }
    }

    /// Whether a connection must be processed now.
    pub(crate) fn is_due(&self) -> bool {
        !self.due.is_empty() || self.to_feed > 0
    }

    /// Whether a connection waits for the ring.
    pub(crate) fn waits_for_ring(&self) -> bool {
        !self.ring.is_empty()
    }

    /// Whether a connection waits for a next hop.
    pub(crate) fn waits_for_hops(&self) -> bool {
        !self.hops.is_empty()
    }

    /// When the first timer fires or moves.
    pub(crate) fn next_timer(&self) -> Option<Time> {
        self.wheel.next()
    }

    /// Forgets the timer of a connection that is removed. Lists may still have its handle, which
    /// names nothing then.
    pub(crate) fn forget(&mut self, id: ConnectionId) {
        self.wheel.clear(id.place());
    }
}

impl<P: Payload> Core<P> {
    /// The connection is processed in this poll, or in the next one.
    pub(crate) fn enqueue(&mut self, id: ConnectionId) {
        if let Some(slot) = self.connections.get_mut(id)
            && !mem::replace(&mut slot.due, true)
        {
            self.schedule.due.push_back(id);
        }
    }

    /// Fires timers, and lets connections that are due send. Returns how many connections were
    /// processed.
    pub(crate) fn work<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, completed: usize) -> usize
    where
        P: Transmit<T>,
    {
        self.reassembly.timeout(self.now);
        let mut fired = mem::take(&mut self.schedule.fired);
        self.schedule.wheel.advance(self.now, &mut fired);
        for place in fired.drain(..) {
            if let Some(id) = self.connections.at(place) {
                self.enqueue(id);
            }
        }
        self.schedule.fired = fired;
        self.feed_some();
        let mut work = 0;
        if completed > 0 {
            work += self.drain_ring_queue(tx);
        }
        for _ in 0..self.schedule.due.len() {
            let Some(id) = self.schedule.due.pop_front() else { break };
            if let Some(slot) = self.connections.get_mut(id) {
                slot.due = false;
                self.visit(tx, id);
                work += 1;
            }
        }
        work
    }

    /// Processes connections that wait for the ring, in order, until it is full again.
    fn drain_ring_queue<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T) -> usize
    where
        P: Transmit<T>,
    {
        // Those that have sent something go to the end of the queue, so that none keeps the others
        // waiting.
        let mut waiting = mem::take(&mut self.schedule.ring);
        let mut work = 0;
        while let Some(id) = waiting.pop_front() {
            let Some(slot) = self.connections.get_mut(id) else { continue };
            slot.in_ring_queue = false;
            work += 1;
            match self.visit(tx, id) {
                Visit::Done => {}
                Visit::Full { sent } => {
                    if !sent && self.schedule.ring.back() == Some(&id) {
                        self.schedule.ring.pop_back();
                        waiting.push_front(id);
                    }
                    break;
                }
            }
        }
        waiting.append(&mut self.schedule.ring);
        self.schedule.ring = waiting;
        work
    }

    /// Processes a connection: timers, segments to send, events, the next timer.
    fn visit<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, id: ConnectionId) -> Visit
    where
        P: Transmit<T>,
    {
        let now = self.now;
        let Some(slot) = self.connections.get_mut(id) else { return Visit::Done };
        let expired = slot.connection.poll_timeout().is_some_and(|at| at <= now);
        if expired {
            slot.connection.handle_timeout(now);
        }
        let una = slot.connection.una();
        if mem::replace(&mut slot.una, una) != una {
            // The peer has received a segment, so the next hop has forwarded it.
            slot.path.confirm(now);
            let released = slot.written.acknowledged(una, slot.connection.send_end());
            self.pages.release(released);
            if released > 0 {
                // It may have found its own share used up.
                self.wakers.extend(slot.write.take());
            }
        }
        let max_payload = slot.path.mtu(now).saturating_sub(headers(&slot.flow));
        if mem::replace(&mut slot.max_payload, max_payload) != max_payload {
            slot.connection.set_max_payload(max_payload);
        }
        // If it waits for the ring, it waits for its turn, unless its timer has expired meanwhile.
        let outcome = if slot.in_ring_queue && !expired { Visit::Done } else { self.transmit(tx, id) };
        self.events(id);
        let Some(slot) = self.connections.get_mut(id) else { return outcome };
        if slot.connection.state() == State::TimeWait && !mem::replace(&mut slot.in_time_wait, true) {
            self.schedule.time_wait.push_back(id);
        }
        slot.shrink_if_idle(now);
        self.set_timer(id);
        self.starve(id);
        self.limit_time_wait();
        if self.connections.get(id).is_some_and(|slot| slot.connection.is_gone()) {
            self.gone(id);
        }
        outcome
    }

    /// A connection has ended, and has nothing left to send. Its flow is free: the peer can use it
    /// for a new connection, although the user still has a stream.
    fn gone(&mut self, id: ConnectionId) {
        match self.connections.get(id).map(|slot| (slot.role, slot.flow)) {
            Some((Role::Orphan, _)) => self.remove(id),
            Some((_, flow)) if self.connections.unlink(id) => self.host.directory().release(&flow),
            _ => {}
        }
    }

    /// Lets a connection send.
    fn transmit<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, id: ConnectionId) -> Visit
    where
        P: Transmit<T>,
    {
        let now = self.now;
        let Some(slot) = self.connections.get_mut(id) else { return Visit::Done };
        let before = self.egress.stats.sent;
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
        let refused = slot.connection.poll_transmit(now, &mut out).is_err();
        if slot.connected {
            slot.path.touch(now);
        }
        let waits = slot.path.waits();
        if slot.path.take_failure() {
            slot.connection.handle_icmp_error(tcp::IcmpError::Unreachable(Unreachable::Host), None, now);
        }
        if refused && waits {
            if !mem::replace(&mut slot.awaits_hop, true) {
                self.schedule.hops.push(id);
            }
            return Visit::Done;
        }
        if refused && slot.path.is_here() {
            // No completion is awaited: this stack receives its own packets in the next poll.
            self.enqueue(id);
            return Visit::Done;
        }
        if (refused || slot.connection.waits_for_ring()) && !mem::replace(&mut slot.in_ring_queue, true) {
            self.schedule.ring.push_back(id);
        }
        if refused { Visit::Full { sent: self.egress.stats.sent > before } } else { Visit::Done }
    }

    /// A neighbour was resolved, or does not answer: connections that wait for one are processed.
    pub(crate) fn hops_changed(&mut self) {
        for id in mem::take(&mut self.schedule.hops) {
            if let Some(slot) = self.connections.get_mut(id) {
                slot.awaits_hop = false;
                self.enqueue(id);
            }
        }
    }

    /// Pages were returned: connections that need some are processed, some in this poll, and the
    /// others in the next ones.
    pub(crate) fn feed(&mut self) {
        self.schedule.to_feed = self.schedule.starved.len();
    }

    fn feed_some(&mut self) {
        for _ in 0..self.schedule.to_feed.min(MOST_FED) {
            self.schedule.to_feed -= 1;
            let Some(id) = self.schedule.starved.pop_front() else { break };
            if let Some(slot) = self.connections.get_mut(id) {
                slot.starved = false;
                self.enqueue(id);
            }
        }
    }

    /// Calls the users of connections that wait for a page to write, in order, as many as there are
    /// pages.
    pub(crate) fn call_writers(&mut self) {
        let mut ready = self.pages.ready();
        while ready > 0
            && let Some(id) = self.pages.next()
        {
            if let Some(slot) = self.connections.get_mut(id) {
                slot.awaits_page = false;
                self.wakers.extend(slot.write.take());
                ready -= 1;
            }
        }
    }

    /// If a connection's window is small because of the page budget, it is processed when pages are
    /// returned, on any thread.
    fn starve(&mut self, id: ConnectionId) {
        let Some(slot) = self.connections.get_mut(id) else { return };
        if !slot.connection.is_buffer_limited() || slot.starved {
            return;
        }
        slot.connection.budget().wait();
        if slot.connection.is_buffer_limited() {
            slot.starved = true;
            self.schedule.starved.push_back(id);
        } else {
            self.enqueue(id);
        }
    }

    fn set_timer(&mut self, id: ConnectionId) {
        let Some(slot) = self.connections.get(id) else { return };
        let wheel = &mut self.schedule.wheel;
        // A timer may fire too early, and is then set again. This is cheaper than moving it each
        // time.
        if let Some(at) = slot.deadline()
            && wheel.get(id.place()).is_none_or(|armed| at < armed)
        {
            wheel.set(id.place(), at);
        }
    }

    /// Processes the events of a connection.
    fn events(&mut self, id: ConnectionId) {
        while let Some(slot) = self.connections.get_mut(id)
            && let Some(event) = slot.connection.poll_event()
        {
            match event {
                Event::Connected => {
                    slot.connected = true;
                    self.wakers.extend(slot.wakers());
                    if let Role::HalfOpen(listener) = slot.role {
                        slot.role = Role::Accepted(listener);
                        if let Some(listening) = self.listeners.get_mut(listener) {
                            listening.listener.connected();
                        }
                        self.offer(listener, id);
                    }
                }
                Event::Readable | Event::End => self.wakers.extend(slot.read.take()),
                Event::Urgent => {
                    slot.urgent = true;
                    self.wakers.extend(slot.read.take());
                }
                Event::Writable => self.wakers.extend(slot.write.take()),
                Event::Closed(error) => self.closed(id, error),
            }
        }
    }

    /// A connection has ended. It stays in the table until its owner has let it go.
    fn closed(&mut self, id: ConnectionId, error: Option<tcp::Error>) {
        let Some(slot) = self.connections.get_mut(id) else { return };
        slot.closed = Some(error);
        self.pages.release(slot.written.clear());
        self.wakers.extend(slot.wakers());
        match slot.role {
            Role::HalfOpen(listener) => {
                slot.role = Role::Orphan;
                self.half_open_failed(listener);
            }
            Role::Accepted(_) => self.egress.stats.ended_unaccepted += 1,
            Role::Stream | Role::Orphan => {}
        }
    }

    pub(crate) fn count_time_wait(&self) -> usize {
        self.connections.iter().filter(|(_, slot)| slot.connection.state() == State::TimeWait).count()
    }

    /// Removes the oldest connections in TIME-WAIT if there are more than the limit.
    fn limit_time_wait(&mut self) {
        while self.schedule.time_wait.len() > self.options.time_wait {
            let Some(id) = self.schedule.time_wait.pop_front() else { break };
            let ends = |slot: &Slot<P>| slot.connection.state() == State::TimeWait && slot.role == Role::Orphan;
            if self.connections.get(id).is_some_and(ends) {
                self.remove(id);
            }
        }
    }
}
