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

use crate::stack::payload::Payload;
use crate::stack::table::Table;
use crate::stack::transport::entry::ConnectionEntry;
use crate::stack::transport::handles::{ConnectionId, OfConnections};
use crate::wire::{Flow, KnownHeaders};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::collections::hash_map::{HashMap, RandomState};
use std::mem;

/// The table of connections, and the flows by which segments find them.
pub(crate) struct Connections<P: Payload> {
    /// Each entry has memory of its own: a table that grows moves none.
    table: Table<OfConnections, Box<ConnectionEntry<P>>>,
    flows: HashMap<Flow, ConnectionId, RandomState>,
    /// The connection of the last segment, while it has its flow. Most segments are of the same
    /// connection as the one before, and need no keyed hash.
    last: Cell<Option<ConnectionId>>,
    /// The headers of a segment of this connection. They count only while it is the last one.
    known: Option<(ConnectionId, KnownHeaders)>,
    /// The connections with payload out of order, by the number of its chunks, and their places.
    out_of_order: BTreeSet<(usize, u32)>,
}

impl<P: Payload> Connections<P> {
    pub(crate) fn new() -> Self {
        let (flows, last) = Default::default();
        Self { table: Table::new(), flows, last, known: None, out_of_order: BTreeSet::new() }
    }

    /// Connections, with or without a flow.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    #[inline]
    pub(crate) fn get(&self, id: ConnectionId) -> Option<&ConnectionEntry<P>> {
        self.table.get(id).map(|entry| &**entry)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut ConnectionEntry<P>> {
        self.table.get_mut(id).map(|entry| &mut **entry)
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
        let last = self.last.get().filter(|id| self.get(*id).is_some_and(|entry| entry.flow == *flow));
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

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ConnectionId, &ConnectionEntry<P>)> {
        self.table.iter().map(|(id, entry)| (id, &**entry))
    }

    /// The connections with a property. They are listed first, because what is done with them may
    /// change the table.
    pub(crate) fn ids(&self, which: impl Fn(&ConnectionEntry<P>) -> bool) -> Vec<ConnectionId> {
        self.iter().filter(|(_, entry)| which(entry)).map(|(id, _)| id).collect()
    }

    /// Inserts a connection. It receives the segments of its flow from now on.
    pub(crate) fn insert(&mut self, entry: ConnectionEntry<P>) -> ConnectionId {
        let flow = entry.flow;
        let id = self.table.insert(Box::new(entry));
        self.flows.insert(flow, id);
        self.last.set(None);
        id
    }

    /// Separates a connection from its flow. Returns false if it has none, because a later
    /// connection of the same flow has it.
    pub(crate) fn unlink(&mut self, id: ConnectionId) -> bool {
        let Some(flow) = self.get(id).map(|entry| entry.flow).filter(|flow| self.find(flow) == Some(id)) else {
            return false;
        };
        self.last.set(None);
        self.flows.remove(&flow).is_some()
    }

    /// Removes a connection. Returns whether it had its flow, too.
    pub(crate) fn remove(&mut self, id: ConnectionId) -> Option<(Box<ConnectionEntry<P>>, bool)> {
        let linked = self.unlink(id);
        let entry = self.table.remove(id)?;
        self.out_of_order.remove(&(entry.out_of_order, id.place()));
        Some((entry, linked))
    }

    /// Notes how much payload a connection has out of order. Costs a comparison, unless it has
    /// changed.
    pub(crate) fn note_out_of_order(&mut self, id: ConnectionId) {
        let Some(entry) = self.table.get_mut(id) else { return };
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
            if self.table.get_mut(id).is_some_and(|entry| entry.connection.evict()) {
                self.note_out_of_order(id);
                return true;
            }
            // Its payload was dropped meanwhile.
            self.out_of_order.remove(&(chunks, place));
            if let Some(entry) = self.table.get_mut(id) {
                entry.out_of_order = 0;
            }
        }
        false
    }
}
