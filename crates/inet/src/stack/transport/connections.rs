//! The connections of a stack: which there are, which flow each has, and which owner.
//!
//! A connection stays in the table until its owner has let it go, whatever the peer does: a
//! [stream](Role::Stream) until it is dropped, one in an [accept queue](Role::Accepted) until it is
//! accepted and dropped. So an owner's handle names its connection, or, if the stack is gone,
//! nothing.
//!
//! A flow has at most one connection that receives its segments. A connection that has ended has no
//! flow, although it stays in the table until its owner lets it go: the peer can begin a new
//! connection from the same port. A new connection also takes over the flow of one in TIME-WAIT.

use crate::Time;
use crate::stack::pages::Written;
use crate::stack::path::Path;
use crate::stack::payload::Payload;
use crate::stack::table::{Id, Table};
use crate::stack::transport::listeners::ListenerId;
use crate::tcp::{self, Connection, Seq};
use crate::wire::Flow;
use std::collections::BTreeSet;
use std::collections::hash_map::{HashMap, RandomState};
use std::mem;
use std::task::Waker;
use std::time::Duration;

/// The handle of a connection.
pub(crate) type ConnectionId = Id<InConnections>;

/// The kind of [`ConnectionId`].
pub(crate) enum InConnections {}

/// A connection in its table.
pub(crate) struct Slot<P: Payload> {
    pub(crate) connection: Connection<P>,
    pub(crate) flow: Flow,
    pub(crate) path: Path<P::Count>,
    pub(crate) role: Role,
    /// It is in the list of connections that are due.
    pub(crate) due: bool,
    /// It is in the queue of connections that wait for the ring.
    pub(crate) in_ring_queue: bool,
    /// It is in the list of connections that wait for a next hop.
    pub(crate) awaits_hop: bool,
    /// It is in the list of connections that want pages to receive.
    pub(crate) starved: bool,
    pub(crate) connected: bool,
    /// The reason why the connection has ended, if it has.
    pub(crate) closed: Option<Option<tcp::Error>>,
    pub(crate) read: Option<Waker>,
    pub(crate) write: Option<Waker>,
    /// The peer has announced urgent data, and the user was not told yet.
    pub(crate) urgent: bool,
    /// It is in the list of connections in TIME-WAIT.
    pub(crate) in_time_wait: bool,
    pub(crate) max_payload: u16,
    /// Segments that were dropped since the last payload, because the device had not verified their
    /// checksums.
    pub(crate) unverified: u64,
    /// The sequence number that the peer had acknowledged when the next hop was last confirmed.
    pub(crate) una: Seq,
    /// The pages that the user has written, and that are not acknowledged.
    pub(crate) written: Written<P::Mem>,
    /// It is in the queue of connections that want a page to write.
    pub(crate) awaits_page: bool,
    /// When its memory is to be freed, if it is still idle then.
    pub(crate) shrink_at: Shrink,
    /// Chunks of payload out of order, as [`Connections`] knows it.
    out_of_order: usize,
}

/// The owner of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// A `TcpStream` of the user.
    Stream,
    /// A listener; the handshake is not complete.
    HalfOpen(ListenerId),
    /// A listener's accept queue.
    Accepted(ListenerId),
    /// No owner: the user has closed it, or its handshake has failed.
    Orphan,
}

/// What is known of a connection's idleness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shrink {
    Busy,
    /// It has been idle since less than [`IDLE`].
    At(Time),
    Done,
}

/// After this time without traffic, the memory of a connection's lists is freed. The next traffic
/// costs some allocations, so that connections which exchange messages keep theirs.
const IDLE: Duration = Duration::from_secs(1);

impl<P: Payload> Slot<P> {
    /// Frees the memory of the connection's lists if it has been idle for long enough.
    pub(crate) fn shrink_if_idle(&mut self, now: Time) {
        self.shrink_at = match self.shrink_at {
            _ if !self.connection.is_idle() => Shrink::Busy,
            Shrink::Busy => Shrink::At(now + IDLE),
            Shrink::At(at) if at <= now => {
                self.connection.shrink();
                Shrink::Done
            }
            waits => waits,
        };
    }

    /// When the connection is to be processed, if nothing else happens before.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let shrink = if let Shrink::At(at) = self.shrink_at { Some(at) } else { None };
        [self.connection.poll_timeout(), shrink].into_iter().flatten().min()
    }

    pub(crate) fn new(
        connection: Connection<P>,
        flow: Flow,
        path: Path<P::Count>,
        role: Role,
        max_payload: u16,
    ) -> Self {
        Self {
            connection,
            flow,
            path,
            role,
            due: false,
            in_ring_queue: false,
            awaits_hop: false,
            starved: false,
            connected: false,
            closed: None,
            read: None,
            write: None,
            urgent: false,
            in_time_wait: false,
            max_payload,
            unverified: 0,
            una: Seq(0),
            written: Written::new(),
            awaits_page: false,
            shrink_at: Shrink::Busy,
            out_of_order: 0,
        }
    }

    /// The wakers of the user, which are to be called because the connection has ended or will be
    /// removed.
    pub(crate) fn wakers(&mut self) -> impl Iterator<Item = Waker> + use<P> {
        self.read.take().into_iter().chain(self.write.take())
    }
}

/// The table of connections, and the flows by which segments find them.
pub(crate) struct Connections<P: Payload> {
    /// Each entry has memory of its own: a table that grows moves none.
    table: Table<InConnections, Box<Slot<P>>>,
    flows: HashMap<Flow, ConnectionId, RandomState>,
    /// The connections with payload out of order, by the number of its chunks, and their places.
    out_of_order: BTreeSet<(usize, u32)>,
}

impl<P: Payload> Connections<P> {
    pub(crate) fn new() -> Self {
        Self { table: Table::new(), flows: HashMap::default(), out_of_order: BTreeSet::new() }
    }

    /// Connections, with or without a flow.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    #[inline]
    pub(crate) fn get(&self, id: ConnectionId) -> Option<&Slot<P>> {
        self.table.get(id).map(|slot| &**slot)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Slot<P>> {
        self.table.get_mut(id).map(|slot| &mut **slot)
    }

    /// The connection whose timer has this number ([`Id::place`]).
    pub(crate) fn at(&self, place: u32) -> Option<ConnectionId> {
        self.table.at(place)
    }

    /// The connection that receives the segments of a flow, and its entry.
    #[inline]
    pub(crate) fn find_mut(&mut self, flow: &Flow) -> Option<(ConnectionId, &mut Slot<P>)> {
        let id = self.find(flow)?;
        self.get_mut(id).map(|slot| (id, slot))
    }

    /// The connection that receives the segments of a flow.
    #[inline]
    pub(crate) fn find(&self, flow: &Flow) -> Option<ConnectionId> {
        self.flows.get(flow).copied()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ConnectionId, &Slot<P>)> {
        self.table.iter().map(|(id, slot)| (id, &**slot))
    }

    /// The connections with a property. They are listed first, because what is done with them may
    /// change the table.
    pub(crate) fn ids(&self, which: impl Fn(&Slot<P>) -> bool) -> Vec<ConnectionId> {
        self.iter().filter(|(_, slot)| which(slot)).map(|(id, _)| id).collect()
    }

    /// Inserts a connection. It receives the segments of its flow from now on.
    pub(crate) fn insert(&mut self, slot: Slot<P>) -> ConnectionId {
        let flow = slot.flow;
        let id = self.table.insert(Box::new(slot));
        self.flows.insert(flow, id);
        id
    }

    /// Separates a connection from its flow. Returns false if it has none, because a later
    /// connection of the same flow has it.
    pub(crate) fn unlink(&mut self, id: ConnectionId) -> bool {
        let Some(flow) = self.get(id).map(|slot| slot.flow).filter(|flow| self.find(flow) == Some(id)) else {
            return false;
        };
        self.flows.remove(&flow).is_some()
    }

    /// Removes a connection. Returns whether it had its flow, too.
    pub(crate) fn remove(&mut self, id: ConnectionId) -> Option<(Box<Slot<P>>, bool)> {
        let linked = self.unlink(id);
        let slot = self.table.remove(id)?;
        self.out_of_order.remove(&(slot.out_of_order, id.place()));
        Some((slot, linked))
    }

    /// Notes how much payload a connection has out of order. Costs a comparison, unless it has
    /// changed.
    pub(crate) fn note_out_of_order(&mut self, id: ConnectionId) {
        let Some(slot) = self.table.get_mut(id) else { return };
        let now = slot.connection.out_of_order();
        let before = mem::replace(&mut slot.out_of_order, now);
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
            if self.table.get_mut(id).is_some_and(|slot| slot.connection.evict()) {
                self.note_out_of_order(id);
                return true;
            }
            // Its payload was dropped meanwhile.
            self.out_of_order.remove(&(chunks, place));
            if let Some(slot) = self.table.get_mut(id) {
                slot.out_of_order = 0;
            }
        }
        false
    }
}
