//! The processing of a connection that is due: its timers, the segments that it sends, its events,
//! its next timer.
//!
//! Why not at once, when a segment arrives or a user calls: all segments of a poll are answered
//! together, and what a user sends by several calls leaves in few segments.

use crate::stack::payload::{Payload, Transmit};
use crate::stack::resources::Resources;
use crate::stack::segments::Segments;
use crate::stack::transport::entry::Role;
use crate::stack::transport::handles::ConnectionId;
use crate::stack::transport::tcp::Tcp;
use crate::tcp::{self, Event, Unreachable};
use netmem_packet::TxQueue;
use std::mem;

/// The connections of a stack in a poll.
pub(crate) struct Process<'a, P: Payload, T> {
    pub(crate) tcp: &'a mut Tcp<P>,
    pub(crate) resources: &'a mut Resources<P>,
    pub(crate) tx: &'a mut T,
}

/// What a connection has sent.
enum Sent {
    /// What it may send, or it waits for something of its own.
    All,
    /// The ring is full. `some`: it has sent something before.
    RingFull { some: bool },
}

impl<P: Transmit<T>, T: TxQueue<Mem = P::Mem>> Process<'_, P, T> {
    /// Fires timers, and lets connections that are due send. `completed`: transmissions that the
    /// device has completed in this poll. Returns how many connections were processed, or wait
    /// for the next poll.
    #[inline]
    pub(crate) fn poll(&mut self, completed: usize) -> usize {
        let Tcp { connections, schedule, .. } = &mut *self.tcp;
        schedule.enqueue_others(connections, self.resources.now);
        let mut work = 0;
        if completed > 0 && self.tcp.schedule.waits_for_ring() {
            work += self.drain_ring_queue();
        }
        for _ in 0..self.tcp.schedule.due() {
            let Some(id) = self.tcp.schedule.pop_due() else { break };
            let Some(entry) = self.tcp.connections.get_mut(id) else { continue };
            if entry.can_wait() {
                self.poll_events(id);
                self.tcp.schedule.keep_due(id);
            } else {
                entry.due = false;
                self.process(id);
            }
            work += 1;
        }
        work
    }

    /// Processes connections that wait for the ring, in order, until it is full again.
    fn drain_ring_queue(&mut self) -> usize {
        // Those that have sent something go to the end of the queue, so that none keeps the others
        // waiting.
        let mut waiting = self.tcp.schedule.take_ring();
        let mut work = 0;
        while let Some(id) = waiting.pop_front() {
            let Some(entry) = self.tcp.connections.get_mut(id) else { continue };
            entry.in_ring_queue = false;
            work += 1;
            match self.process(id) {
                Sent::All => {}
                Sent::RingFull { some } => {
                    if !some && self.tcp.schedule.take_last_of_ring(id) {
                        waiting.push_front(id);
                    }
                    break;
                }
            }
        }
        self.tcp.schedule.put_back_ring(waiting);
        work
    }

    /// Processes a connection.
    fn process(&mut self, id: ConnectionId) -> Sent {
        let Self { tcp, resources, .. } = self;
        let now = resources.now;
        let Some(entry) = tcp.connections.get_mut(id) else { return Sent::All };
        let expired = entry.connection.poll_timeout().is_some_and(|at| at <= now);
        if expired {
            entry.connection.handle_timeout(now);
        }
        let una = entry.connection.una();
        if mem::replace(&mut entry.una, una) != una {
            // The peer has received a segment, so the next hop has forwarded it: forward progress
            // confirms a neighbour (RFC 4861, section 7.3.1).
            entry.path.confirm(now);
            if entry.written.handle_acknowledged(una, entry.connection.send_end(), &mut resources.pages) {
                // Its own share may have been used up.
                resources.wakers.extend(entry.write.take());
            }
        }
        let max_payload = resources.max_payload(&entry.path, &entry.flow);
        if mem::replace(&mut entry.max_payload, max_payload) != max_payload {
            entry.connection.set_max_payload(max_payload);
        }
        // If it waits for the ring, it waits for its turn, unless its timer has expired meanwhile.
        let sent = if entry.in_ring_queue && !expired { Sent::All } else { self.transmit(id) };
        self.poll_events(id);
        let Self { tcp, resources, .. } = self;
        let Some(entry) = tcp.connections.get_mut(id) else { return sent };
        tcp.schedule.note_time_wait(id, entry);
        let rests = entry.shrink_if_idle(now);
        tcp.schedule.set_timer(id, entry);
        tcp.schedule.wait_for_buffers(id, entry);
        let is_gone = entry.connection.is_gone();
        if rests
            && let Some(entry) = tcp.connections.rest(id)
            && entry.shrink_again(now)
        {
            tcp.schedule.set_timer(id, entry);
        }
        tcp.limit_time_wait(resources);
        if is_gone {
            tcp.handle_end(resources, id);
        }
        sent
    }

    /// Lets a connection send.
    fn transmit(&mut self, id: ConnectionId) -> Sent {
        let Tcp { connections, schedule, .. } = &mut *self.tcp;
        let Resources { host, egress, now, .. } = &mut *self.resources;
        let now = *now;
        let Some(entry) = connections.get_mut(id) else { return Sent::All };
        let before = egress.stats.sent;
        let (ecn, ip) = (entry.connection.uses_ecn(), entry.connection.ip());
        let mut out =
            Segments { host, egress, tx: &mut *self.tx, flow: &entry.flow, path: &mut entry.path, now, ecn, ip };
        let refused = entry.connection.poll_transmit(now, &mut out).is_err();
        if entry.connected {
            entry.path.touch(now);
        }
        let waits = entry.path.waits();
        if entry.path.take_failure() {
            entry.connection.handle_delivery_error(tcp::DeliveryError::Unreachable(Unreachable::Host), None, now);
        }
        if refused && waits {
            schedule.wait_for_hop(id, entry);
            return Sent::All;
        }
        if refused && entry.path.is_loopback() {
            // No completion is awaited: this stack receives its own packets in the next poll.
            schedule.enqueue(id, entry);
            return Sent::All;
        }
        if refused || entry.connection.waits_for_ring() {
            schedule.wait_for_ring(id, entry);
        }
        if refused { Sent::RingFull { some: self.resources.egress.stats.sent > before } } else { Sent::All }
    }

    /// Processes the events of a connection.
    #[inline]
    fn poll_events(&mut self, id: ConnectionId) {
        while let Some(entry) = self.tcp.connections.get_mut(id)
            && let Some(event) = entry.connection.poll_event()
        {
            let wakers = &mut self.resources.wakers;
            match event {
                Event::Readable | Event::End => wakers.extend(entry.read.take()),
                Event::Writable => wakers.extend(entry.write.take()),
                Event::Urgent => {
                    entry.urgent = true;
                    wakers.extend(entry.read.take());
                }
                Event::Connected => self.handle_connected(id),
                Event::Closed(error) => self.handle_closed(id, error),
            }
        }
    }

    /// The handshake of a connection is complete.
    #[inline(never)]
    fn handle_connected(&mut self, id: ConnectionId) {
        let Self { tcp, resources, .. } = self;
        let Some(entry) = tcp.connections.get_mut(id) else { return };
        entry.connected = true;
        resources.wakers.extend(entry.wakers());
        if let Role::HalfOpen(listener) = entry.role {
            entry.role = Role::Accepted(listener);
            tcp.listeners.handle_connected(listener);
            resources.wakers.extend(tcp.listeners.offer(listener, id));
        }
    }

    /// A connection has ended. It stays in the table until its owner releases it.
    #[inline(never)]
    fn handle_closed(&mut self, id: ConnectionId, error: Option<tcp::Error>) {
        let Self { tcp, resources, .. } = self;
        let Some(entry) = tcp.connections.get_mut(id) else { return };
        entry.closed = Some(error);
        entry.written.clear(&mut resources.pages);
        resources.wakers.extend(entry.wakers());
        match entry.role {
            Role::HalfOpen(listener) => {
                entry.role = Role::Orphan;
                tcp.listeners.handle_failed(listener);
            }
            Role::Accepted(_) => resources.egress.stats.ended_unaccepted += 1,
            Role::Stream | Role::Orphan => {}
        }
    }

    /// Wakes the users of connections that wait for a page to write, in order, as many as there are
    /// pages.
    #[inline(never)]
    pub(crate) fn wake_writers(&mut self) {
        let Self { tcp, resources, .. } = self;
        let mut ready = resources.pages.ready();
        // Without a page in the pool, they would find none, and wait again.
        if ready > 0 && !resources.egress.has_page() {
            ready = 0;
        }
        while ready > 0
            && let Some(id) = resources.pages.next()
        {
            if let Some(entry) = tcp.connections.get_mut(id) {
                entry.awaits_page = false;
                resources.wakers.extend(entry.write.take());
                ready -= 1;
            }
        }
        resources.pages.set_retry(resources.now);
    }
}
