//! When a connection is processed: it is due because of an event or a timer, or what it waits for
//! is there.
//!
//! Why lists, and not a scan: a stack has many connections, and few of them do something at a time.
//! The work of a poll is proportional to those.
//!
//! ```text
//!   segment, call, timer ──► due ──► processed ──► timers, segments to send, events, next timer
//!                             ▲          ├──► ring
//!                             │          ├──► hops
//!                             └──────────┴──► buffer_limited
//! ```
//!
//! A connection for which a segment has arrived, and that has nothing to send, is processed in the
//! next poll. Its user is notified in this one, and its answer then leaves in the same processing.
//! While a connection is due, the stack does not sleep.
//!
//! * **ring**: the transmit ring is full. Connections are processed in order, as many as
//!   completions make room for.
//! * **hops**: the next hop is not resolved. Connections are due when a neighbour has changed.
//! * **buffer_limited**: pages are missing to receive. Connections are due when pages are returned.
//!
//! A connection that waits has a deadline, too ([`Connection::poll_transmit`]), so none waits for
//! ever, and none is tried at intervals. The lists have handles; a flag in the connection's
//! [entry](ConnectionEntry) marks each list that it is in.
//!
//! [`Connection::poll_transmit`]: crate::tcp::Connection::poll_transmit

use crate::stack::payload::Payload;
use crate::stack::transport::connections::Connections;
use crate::stack::transport::entry::ConnectionEntry;
use crate::stack::transport::handles::ConnectionId;
use crate::stack::transport::wheel::Wheel;
use crate::tcp::State;
use crate::time::Time;
use std::collections::VecDeque;
use std::mem;

/// The most connections that a poll processes because pages were returned. More connections may
/// wait for pages than there are connections that do something.
const MOST_RELIEVED: usize = 64;

/// The connections that are to be processed, by what they wait for.
pub(crate) struct Schedule {
    /// The timer of a connection has the number of its place.
    wheel: Wheel,
    fired: Vec<u32>,
    /// Connections that are to be processed in this poll, or in the next one.
    due: VecDeque<ConnectionId>,
    /// Connections that wait for the ring, in the order in which they began to wait.
    ring: VecDeque<ConnectionId>,
    /// Connections whose next hop is not resolved.
    hops: Vec<ConnectionId>,
    /// Connections whose window is small because of the page budget. Returned pages wake the stack.
    buffer_limited: VecDeque<ConnectionId>,
    /// How many of them are to be processed, because pages were returned.
    to_relieve: usize,
    /// Connections in TIME-WAIT, in the order in which they entered it.
    time_wait: VecDeque<ConnectionId>,
}

impl Schedule {
    pub(crate) fn new(now: Time) -> Self {
        Self {
            wheel: Wheel::new(now),
            fired: Vec::new(),
            due: VecDeque::new(),
            ring: VecDeque::new(),
            hops: Vec::new(),
            buffer_limited: VecDeque::new(),
            to_relieve: 0,
            time_wait: VecDeque::new(),
        }
    }

    // ---- due

    /// Whether a connection is to be processed before the stack sleeps: in this poll, or in the
    /// next one.
    pub(crate) fn is_due(&self) -> bool {
        !self.due.is_empty() || self.to_relieve > 0
    }

    /// Connections that are due, with those that this poll has [kept](Self::keep_due) for the next
    /// one.
    pub(crate) fn due(&self) -> usize {
        self.due.len()
    }

    /// The connection is processed in this poll, or in the next one.
    #[inline]
    pub(crate) fn enqueue<P: Payload>(&mut self, id: ConnectionId, entry: &mut ConnectionEntry<P>) {
        entry.only_arrived = false;
        if !mem::replace(&mut entry.due, true) {
            self.due.push_back(id);
        }
    }

    /// The same, because a segment has arrived.
    #[inline]
    pub(crate) fn enqueue_arrived<P: Payload>(&mut self, id: ConnectionId, entry: &mut ConnectionEntry<P>) {
        if !mem::replace(&mut entry.due, true) {
            entry.only_arrived = true;
            self.due.push_back(id);
        }
    }

    /// The connection, which was [popped](Self::pop_due), stays due: it is processed in the next
    /// poll.
    #[inline]
    pub(crate) fn keep_due(&mut self, id: ConnectionId) {
        self.due.push_back(id);
    }

    /// The next connection that is due. It may have been removed.
    #[inline]
    pub(crate) fn pop_due(&mut self) -> Option<ConnectionId> {
        self.due.pop_front()
    }

    // ---- timers

    /// When the first timer fires or moves.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.wheel.next()
    }

    /// Sets the timer of a connection to its deadline. A timer may fire too early, and is then set
    /// again. This is cheaper than moving it each time.
    pub(crate) fn set_timer<P: Payload>(&mut self, id: ConnectionId, entry: &ConnectionEntry<P>) {
        if let Some(at) = entry.poll_timeout()
            && self.wheel.get(id.place()).is_none_or(|armed| at < armed)
        {
            self.wheel.set(id.place(), at);
        }
    }

    /// Clears the timer of a connection that is removed. Lists may still have its handle, which
    /// names nothing then.
    pub(crate) fn remove(&mut self, id: ConnectionId) {
        self.wheel.clear(id.place());
    }

    /// Releases memory: connections have places below `room` from now on.
    #[cold]
    pub(crate) fn shrink(&mut self, room: usize) {
        self.wheel.shrink(room);
        self.fired.shrink_to(room);
        self.hops.shrink_to(room);
        for list in [&mut self.due, &mut self.ring, &mut self.buffer_limited, &mut self.time_wait] {
            list.shrink_to(room);
        }
    }

    /// Enqueues the connections that are due without a segment or a call: their timers fire, pages
    /// were returned, or they were woken. Cost, if there are none: three comparisons.
    #[inline]
    pub(crate) fn enqueue_others<P: Payload>(&mut self, connections: &mut Connections<P>, now: Time) {
        if !self.wheel.rests_until(now) {
            self.handle_timeout(connections, now);
        }
        if self.to_relieve > 0 {
            self.relieve_some(connections);
        }
        if connections.has_woken() {
            self.enqueue_woken(connections);
        }
    }

    /// Fires the timers that are due: their connections are enqueued.
    fn handle_timeout<P: Payload>(&mut self, connections: &mut Connections<P>, now: Time) {
        self.wheel.advance(now, &mut self.fired);
        if !self.fired.is_empty() {
            self.enqueue_fired(connections);
        }
    }

    #[cold]
    fn enqueue_fired<P: Payload>(&mut self, connections: &mut Connections<P>) {
        let mut fired = mem::take(&mut self.fired);
        for place in fired.drain(..) {
            if let Some(id) = connections.at(place) {
                self.enqueue_by_id(connections, id);
            }
        }
        self.fired = fired;
    }

    /// Enqueues the connections that were woken, so that they become idle again when nothing
    /// happens.
    fn enqueue_woken<P: Payload>(&mut self, connections: &mut Connections<P>) {
        while let Some(id) = connections.pop_woken() {
            self.enqueue_by_id(connections, id);
        }
    }

    fn enqueue_by_id<P: Payload>(&mut self, connections: &mut Connections<P>, id: ConnectionId) {
        if let Some(entry) = connections.get_mut(id) {
            self.enqueue(id, entry);
        }
    }

    // ---- the ring

    /// Whether a connection waits for the ring.
    pub(crate) fn waits_for_ring(&self) -> bool {
        !self.ring.is_empty()
    }

    /// The connection waits for the ring, behind those that wait already.
    pub(crate) fn wait_for_ring<P: Payload>(&mut self, id: ConnectionId, entry: &mut ConnectionEntry<P>) {
        if !mem::replace(&mut entry.in_ring_queue, true) {
            self.ring.push_back(id);
        }
    }

    /// Removes the connections that wait for the ring, and returns them. Those that wait again are
    /// behind them, after [`put_back_ring`](Self::put_back_ring).
    pub(crate) fn take_ring(&mut self) -> VecDeque<ConnectionId> {
        mem::take(&mut self.ring)
    }

    /// Puts connections that were removed back, before those that have begun to wait meanwhile.
    pub(crate) fn put_back_ring(&mut self, mut waiting: VecDeque<ConnectionId>) {
        waiting.append(&mut self.ring);
        self.ring = waiting;
    }

    /// If the connection is the last one that has begun to wait for the ring, it is removed.
    /// Returns whether it was. Its flag stays.
    pub(crate) fn take_last_of_ring(&mut self, id: ConnectionId) -> bool {
        let is_last = self.ring.back() == Some(&id);
        if is_last {
            self.ring.pop_back();
        }
        is_last
    }

    // ---- next hops

    /// Whether a connection waits for a next hop.
    pub(crate) fn waits_for_hops(&self) -> bool {
        !self.hops.is_empty()
    }

    /// The connection waits until a neighbour is resolved, or does not answer.
    pub(crate) fn wait_for_hop<P: Payload>(&mut self, id: ConnectionId, entry: &mut ConnectionEntry<P>) {
        if !mem::replace(&mut entry.awaits_hop, true) {
            self.hops.push(id);
        }
    }

    /// A neighbour was resolved, or does not answer: connections that wait for one are enqueued.
    pub(crate) fn handle_hop_change<P: Payload>(&mut self, connections: &mut Connections<P>) {
        for id in mem::take(&mut self.hops) {
            if let Some(entry) = connections.get_mut(id) {
                entry.awaits_hop = false;
                self.enqueue(id, entry);
            }
        }
    }

    // ---- pages to receive

    /// If a connection's window is small because of the page budget, it is processed when pages are
    /// returned, on any thread.
    pub(crate) fn wait_for_buffers<P: Payload>(&mut self, id: ConnectionId, entry: &mut ConnectionEntry<P>) {
        if !entry.connection.is_buffer_limited() || entry.buffer_limited {
            return;
        }
        entry.connection.budget().wait();
        // Pages that were returned before this call have not woken the stack, so they are checked
        // again.
        if entry.connection.is_buffer_limited() {
            entry.buffer_limited = true;
            self.buffer_limited.push_back(id);
        } else {
            self.enqueue(id, entry);
        }
    }

    /// Pages were returned: connections that wait for some are enqueued, some in this poll, and the
    /// others in the next ones.
    pub(crate) fn handle_returned_pages(&mut self) {
        self.to_relieve = self.buffer_limited.len();
    }

    /// Enqueues some of the connections for which pages were returned. Those that are idle are
    /// woken, which costs an allocation for each: they may have a larger window to announce.
    fn relieve_some<P: Payload>(&mut self, connections: &mut Connections<P>) {
        for _ in 0..self.to_relieve.min(MOST_RELIEVED) {
            self.to_relieve -= 1;
            let Some(id) = self.buffer_limited.pop_front() else { break };
            if let Some(entry) = connections.get_mut(id) {
                entry.buffer_limited = false;
                self.enqueue(id, entry);
            }
        }
    }

    // ---- TIME-WAIT

    /// Notes a connection that has entered TIME-WAIT.
    #[inline]
    pub(crate) fn note_time_wait<P: Payload>(&mut self, id: ConnectionId, entry: &mut ConnectionEntry<P>) {
        if entry.connection.state() == State::TimeWait && !mem::replace(&mut entry.in_time_wait, true) {
            self.time_wait.push_back(id);
        }
    }

    /// Removes the oldest connection in TIME-WAIT from the list, if there are more than `limit`.
    #[inline]
    pub(crate) fn pop_time_wait(&mut self, limit: usize) -> Option<ConnectionId> {
        if self.time_wait.len() > limit { self.time_wait.pop_front() } else { None }
    }
}
