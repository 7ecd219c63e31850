//! A connection in its table: the state machine, and what the stack knows of it besides.
//!
//! Why not all in [`Connection`]: the state machine has no queue, no path and no user. Here stand
//! the path of its segments, its owner, the wakers of its user, and in which lists of the
//! [`Schedule`](crate::stack::transport::schedule::Schedule) it is. Each list is marked by a flag
//! of the entry, so that a connection is at most once in each.

use crate::stack::pages::WrittenPages;
use crate::stack::path::Path;
use crate::stack::payload::Payload;
use crate::stack::transport::handles::ListenerId;
use crate::tcp::{self, Connection, Seq};
use crate::time::{Time, earlier};
use crate::wire::Flow;
use std::mem;
use std::task::Waker;
use std::time::Duration;

/// A connection in its table.
pub(crate) struct ConnectionEntry<P: Payload> {
    pub(crate) connection: Connection<P>,
    pub(crate) flow: Flow,
    pub(crate) path: Path<P>,
    pub(crate) role: Role,
    /// It is in the list of connections that are due.
    pub(crate) due: bool,
    /// It is due for nothing but segments that have arrived in this poll.
    pub(crate) only_arrived: bool,
    /// It is in the queue of connections that wait for the ring.
    pub(crate) in_ring_queue: bool,
    /// It is in the list of connections that wait for a next hop.
    pub(crate) awaits_hop: bool,
    /// It is in the list of connections whose window is limited by the page budget.
    pub(crate) buffer_limited: bool,
    /// It is in the list of connections in TIME-WAIT.
    pub(crate) in_time_wait: bool,
    /// It is in the queue of connections that wait for a page to write.
    pub(crate) awaits_page: bool,
    pub(crate) connected: bool,
    /// The reason why the connection has ended, if it has.
    pub(crate) closed: Option<Option<tcp::Error>>,
    pub(crate) read: Option<Waker>,
    pub(crate) write: Option<Waker>,
    /// The peer has announced urgent data, and the user has not been notified yet.
    pub(crate) urgent: bool,
    pub(crate) max_payload: u16,
    /// Segments that were dropped since the last payload, because the device had not verified their
    /// checksums.
    pub(crate) unverified: u64,
    /// The sequence number that the peer had acknowledged when the next hop was last confirmed.
    pub(crate) una: Seq,
    /// The pages that the user has written, and that are not acknowledged.
    pub(crate) written: WrittenPages<P::Mem>,
    /// When it is to be kept in little memory, if it is still idle then.
    pub(crate) shrink_at: Shrink,
    /// Chunks of payload out of order, as
    /// [`Connections`](crate::stack::transport::connections::Connections) last counted them.
    pub(crate) out_of_order: usize,
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

/// How long a connection has been idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shrink {
    Busy,
    /// It has been idle for less than [`IDLE`]. At this time, its memory shrinks.
    At(Time),
    Done,
}

/// After this time without traffic, a connection is kept in little memory. The next traffic costs
/// some allocations, so that connections which exchange messages keep theirs.
const IDLE: Duration = Duration::from_secs(1);

impl<P: Payload> ConnectionEntry<P> {
    pub(crate) fn new(connection: Connection<P>, flow: Flow, path: Path<P>, role: Role, max_payload: u16) -> Self {
        Self {
            connection,
            flow,
            path,
            role,
            due: false,
            only_arrived: false,
            in_ring_queue: false,
            awaits_hop: false,
            buffer_limited: false,
            in_time_wait: false,
            awaits_page: false,
            connected: false,
            closed: None,
            read: None,
            write: None,
            urgent: false,
            max_payload,
            unverified: 0,
            una: Seq(0),
            written: WrittenPages::new(),
            shrink_at: Shrink::Busy,
            out_of_order: 0,
        }
    }

    /// Whether processing it can wait for the next poll, in which its user has read what has
    /// arrived. True once for what has arrived in a poll. Not if a writer waits, which is woken
    /// when its pages are released.
    #[inline]
    pub(crate) fn can_wait(&mut self) -> bool {
        mem::take(&mut self.only_arrived) && self.write.is_none() && self.connection.only_user_is_next()
    }

    /// Whether it has more or fewer chunks of payload out of order than were counted last.
    #[inline]
    pub(crate) fn has_other_out_of_order(&self) -> bool {
        self.out_of_order != self.connection.out_of_order()
    }

    /// Frees the memory of the connection's lists if it has been idle for long enough. Returns
    /// whether that is now: it can [rest](super::connections::Connections::rest).
    pub(crate) fn shrink_if_idle(&mut self, now: Time) -> bool {
        let before = self.shrink_at;
        self.shrink_at = match self.shrink_at {
            _ if !self.connection.is_idle() => Shrink::Busy,
            Shrink::Busy => Shrink::At(now + IDLE),
            Shrink::At(at) if at <= now => {
                self.connection.shrink();
                Shrink::Done
            }
            waits => waits,
        };
        self.shrink_at == Shrink::Done && before != Shrink::Done
    }

    /// The connection could not rest, because something is under way: it tries again later, unless
    /// it never can. Returns whether it tries again.
    pub(crate) fn shrink_again(&mut self, now: Time) -> bool {
        let later = self.connection.can_be_idle() && self.closed.is_none();
        if later {
            self.shrink_at = Shrink::At(now + IDLE);
        }
        later
    }

    /// When the connection is to be processed, if nothing else happens before.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        let shrink = if let Shrink::At(at) = self.shrink_at { Some(at) } else { None };
        earlier(self.connection.poll_timeout(), shrink)
    }

    /// The wakers of the user, which are to be called because the connection has ended or will be
    /// removed.
    pub(crate) fn wakers(&mut self) -> impl Iterator<Item = Waker> + use<P> {
        self.read.take().into_iter().chain(self.write.take())
    }
}
