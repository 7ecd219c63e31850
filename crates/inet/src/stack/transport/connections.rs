//! The connections of a stack: which there are, and the flow of each.
//!
//! A connection stays in the table until its [owner](ConnectionEntry::role) releases it, whatever
//! the peer does: a stream until it is dropped, a connection in an accept queue until it is
//! accepted and dropped. So an owner's handle names its connection, or, if the stack is gone,
//! nothing.
//!
//! A flow has at most one connection that receives its segments. A connection that has ended has no
//! flow, although it stays in the table until its owner releases it: the peer can begin a new
//! connection from the same port. A new connection also reuses the flow of one in TIME-WAIT.
//!
//! A connection on which nothing has happened for a while is kept in little memory
//! ([`rest`](Connections::rest)). Each change wakes it ([`get_mut`](Connections::get_mut)). Calls
//! that read its state ([`see`](Connections::see)) or that wait for its payload
//! ([`idle_end`](Connections::idle_end), [`wakers_mut`](Connections::wakers_mut)) do not.

use crate::stack::payload::Payload;
use crate::stack::shrink_map::ShrinkMap;
use crate::stack::table::Table;
use crate::stack::transport::entry::ConnectionEntry;
use crate::stack::transport::handles::{ConnectionId, OfConnections};
use crate::stack::transport::idle::{IdleEntry, Seen, SharedConfigs};
use crate::wire::{Flow, KnownHeaders};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::mem;
use std::task::Waker;

/// The table of connections, and the flows by which segments find them.
pub(crate) struct Connections<P: Payload> {
    table: Table<OfConnections, Place<P>>,
    /// Connections that were woken since the last poll.
    woken: Vec<ConnectionId>,
    configs: SharedConfigs,
    flows: ShrinkMap<Flow, ConnectionId>,
    /// The connection of the last segment, while it has its flow. Most segments are of the same
    /// connection as the one before, and need no keyed hash.
    last: Cell<Option<ConnectionId>>,
    /// The headers of a segment of this connection. They count only while it is the last one.
    known: Option<(ConnectionId, KnownHeaders)>,
    /// The connections with payload out of order, by the number of its chunks, and their places.
    out_of_order: BTreeSet<(usize, u32)>,
}

/// A connection, which works or is idle: one of both is set. Each has memory of its own: a table
/// that grows moves none.
struct Place<P: Payload> {
    working: Option<Box<ConnectionEntry<P>>>,
    idle: Option<Box<IdleEntry<P>>>,
}

impl<P: Payload> Place<P> {
    #[cold]
    fn wake(&mut self) {
        self.working = self.idle.take().map(|idle| Box::new(idle.wake()));
    }

    fn see(&self) -> Option<Seen<'_, P>> {
        let working = self.working.as_deref().map(Seen::Working);
        working.or_else(|| self.idle.as_deref().map(Seen::Idle))
    }
}

impl<P: Payload> Connections<P> {
    pub(crate) fn new() -> Self {
        Self {
            table: Table::new(),
            woken: Vec::new(),
            configs: SharedConfigs::new(),
            flows: ShrinkMap::new(),
            last: Cell::new(None),
            known: None,
            out_of_order: BTreeSet::new(),
        }
    }

    /// Connections, with or without a flow.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// A connection. If it is idle, it is woken, and processed in the next poll: it becomes idle
    /// again when nothing happens.
    #[inline]
    pub(crate) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut ConnectionEntry<P>> {
        let place = self.table.get_mut(id)?;
        if place.working.is_none() {
            place.wake();
            self.woken.push(id);
        }
        place.working.as_deref_mut()
    }

    /// The wakers of a connection's reader and of its writer. If it is idle, it stays so.
    #[inline]
    pub(crate) fn wakers_mut(&mut self, id: ConnectionId) -> Option<[&mut Option<Waker>; 2]> {
        let Place { working, idle } = self.table.get_mut(id)?;
        let working = working.as_deref_mut().map(|entry| [&mut entry.read, &mut entry.write]);
        working.or_else(|| idle.as_deref_mut().map(IdleEntry::wakers_mut))
    }

    /// What can be seen of a connection without waking it.
    #[inline]
    pub(crate) fn see(&self, id: ConnectionId) -> Option<Seen<'_, P>> {
        self.table.get(id)?.see()
    }

    /// If a connection is idle: whether its peer sends no more. If it sends more, nothing is there
    /// to be received yet.
    #[inline]
    pub(crate) fn idle_end(&self, id: ConnectionId) -> Option<bool> {
        if let Some(Seen::Idle(entry)) = self.see(id) { Some(entry.is_at_end()) } else { None }
    }

    /// Keeps a connection in little memory from now on, if nothing is under way. Returns the entry
    /// if something is.
    #[cold]
    pub(crate) fn rest(&mut self, id: ConnectionId) -> Option<&mut ConnectionEntry<P>> {
        let Place { working, idle } = self.table.get_mut(id)?;
        if let Some(connection) = working.as_ref().and_then(|entry| IdleEntry::of(entry, &mut self.configs)) {
            *idle = working.take().map(|entry| Box::new(IdleEntry::new(*entry, connection)));
        }
        working.as_deref_mut()
    }

    /// Whether connections were woken since the last poll.
    pub(crate) fn has_woken(&self) -> bool {
        !self.woken.is_empty()
    }

    /// The next connection that was woken since the last call. It may have been removed.
    pub(crate) fn pop_woken(&mut self) -> Option<ConnectionId> {
        self.woken.pop()
    }

    /// The connection whose timer has this number ([`Id::place`](crate::stack::table::Id::place)).
    pub(crate) fn at(&self, place: u32) -> Option<ConnectionId> {
        self.table.at(place)
    }

    /// The connection that receives the segments of a flow, and its entry.
    #[inline]
    pub(crate) fn find_mut(&mut self, flow: &Flow) -> Option<(ConnectionId, &mut ConnectionEntry<P>)> {
        let id = self.find(flow)?;
        self.get_mut(id).map(|entry| (id, entry))
    }

    /// The connection that receives the segments of a flow.
    #[inline]
    pub(crate) fn find(&self, flow: &Flow) -> Option<ConnectionId> {
        let has_flow = |id: &ConnectionId| {
            let entry = self.table.get(*id).and_then(|place| place.working.as_ref());
            entry.is_some_and(|entry| entry.flow == *flow)
        };
        let last = self.last.get().filter(has_flow);
        if last.is_none() {
            self.last.set(self.flows.get(flow).copied());
            return self.last.get();
        }
        last
    }

    /// The connection of the last segment, if it had one.
    pub(crate) fn last(&self) -> Option<ConnectionId> {
        self.last.get()
    }

    /// The connection of the last segment and the headers of one of its segments, if they are
    /// known.
    #[inline]
    pub(crate) fn known(&self) -> Option<(ConnectionId, &KnownHeaders)> {
        self.known.as_ref().filter(|(id, _)| self.last.get() == Some(*id)).map(|(id, known)| (*id, known))
    }

    /// Notes the headers of a segment of this flow, if the flow has a connection. `head` are the
    /// first bytes of the segment's frame, which was validated.
    pub(crate) fn note_headers(&mut self, flow: &Flow, head: &[u8]) {
        if let (Some(id), Some(known)) = (self.find(flow), KnownHeaders::new(head)) {
            self.known = Some((id, known));
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ConnectionId, Seen<'_, P>)> {
        self.table.iter().filter_map(|(id, place)| Some((id, place.see()?)))
    }

    /// The connections with a property. They are listed first, because what is done with them may
    /// change the table.
    pub(crate) fn ids(&self, which: impl Fn(&Seen<'_, P>) -> bool) -> Vec<ConnectionId> {
        self.iter().filter(|(_, seen)| which(seen)).map(|(id, _)| id).collect()
    }

    /// Inserts a connection. It receives the segments of its flow from now on.
    pub(crate) fn insert(&mut self, entry: ConnectionEntry<P>) -> ConnectionId {
        let flow = entry.flow;
        let id = self.table.insert(Place { working: Some(Box::new(entry)), idle: None });
        self.flows.insert(flow, id);
        self.last.set(None);
        id
    }

    /// Separates a connection from its flow. Returns false if it has none, because a later
    /// connection of the same flow has it.
    pub(crate) fn unlink(&mut self, id: ConnectionId) -> bool {
        let Some(flow) = self.see(id).map(|seen| *seen.flow()).filter(|flow| self.find(flow) == Some(id)) else {
            return false;
        };
        self.last.set(None);
        self.flows.remove(&flow).is_some()
    }

    /// Places of connections for which there is memory. No connection has a place behind them.
    pub(crate) fn room(&self) -> usize {
        self.table.room()
    }

    /// Removes a connection. Returns whether it had its flow, too.
    pub(crate) fn remove(&mut self, id: ConnectionId) -> Option<(Box<ConnectionEntry<P>>, bool)> {
        let linked = self.unlink(id);
        let room = self.table.room();
        let mut place = self.table.remove(id)?;
        if self.table.room() < room {
            self.woken.shrink_to(self.table.room());
        }
        if place.working.is_none() {
            place.wake();
        }
        let entry = place.working?;
        self.out_of_order.remove(&(entry.out_of_order, id.place()));
        Some((entry, linked))
    }

    /// Notes how much payload a connection has out of order. Costs a comparison, unless it has
    /// changed.
    pub(crate) fn note_out_of_order(&mut self, id: ConnectionId) {
        let Some(entry) = self.get_mut(id) else { return };
        let now = entry.connection.out_of_order();
        let before = mem::replace(&mut entry.out_of_order, now);
        if now != before {
            self.out_of_order.remove(&(before, id.place()));
            if now > 0 {
                self.out_of_order.insert((now, id.place()));
            }
        }
    }

    /// Drops a chunk of payload out of order, of the connection that has most. Returns false if
    /// there is none.
    pub(crate) fn evict(&mut self) -> bool {
        while let Some(&(chunks, place)) = self.out_of_order.last() {
            let Some(id) = self.table.at(place) else { return false };
            if self.get_mut(id).is_some_and(|entry| entry.connection.evict()) {
                self.note_out_of_order(id);
                return true;
            }
            // Its payload was dropped meanwhile.
            self.out_of_order.remove(&(chunks, place));
            if let Some(entry) = self.get_mut(id) {
                entry.out_of_order = 0;
            }
        }
        false
    }
}
