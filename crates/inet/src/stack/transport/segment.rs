//! A received segment: its connection is found, or it reuses the flow of an old connection, or a
//! listener answers it.
//!
//! A peer can send any number of segments that belong to no connection. Unless a connection is
//! made, they are answered without state: no entry of the destination cache, and none of a
//! neighbour, is made or looked up.

use crate::stack::control::{Control, ReplyPath};
use crate::stack::path::Path;
use crate::stack::payload::{Payload, Transmit};
use crate::stack::resources::{Resources, header_len};
use crate::stack::transport::entry::Role;
use crate::stack::transport::handles::ConnectionId;
use crate::stack::transport::idle::Seen;
use crate::stack::transport::tcp::{ReusedFlow, Tcp};
use crate::tcp::{self, Answer, ArrivingSegment, ConnectionTemplate, Flags, Header, IpFields, State, reset_for};
use crate::wire::Flow;
use netmem_packet::TxQueue;

/// The most chunks of payload out of order that are dropped for one segment in order.
const MOST_EVICTED: usize = 64;

/// A received segment, without its payload.
pub(crate) struct ReceivedSegment<'a> {
    pub(crate) flow: Flow,
    pub(crate) header: &'a Header,
    pub(crate) meta: tcp::SegmentMeta,
    pub(crate) reply_path: ReplyPath,
}

/// What processes a segment.
enum Receiver {
    Connection(ConnectionId),
    /// A listener, if there is one: no connection has the flow, or one in TIME-WAIT whose flow the
    /// segment reuses.
    Listener(Option<ReusedFlow>),
}

/// The processing of received segments.
pub(crate) struct SegmentInput<'a, P: Payload, T> {
    pub(crate) tcp: &'a mut Tcp<P>,
    pub(crate) resources: &'a mut Resources<P>,
    pub(crate) tx: &'a mut T,
}

impl<P: Transmit<T>, T: TxQueue<Mem = P::Mem>> SegmentInput<'_, P, T> {
    /// Processes a received segment. A connection sends what follows from it when it is processed
    /// ([`process`](super::process)); answers without a connection are sent at once.
    #[inline]
    pub(crate) fn handle_segment(&mut self, segment: &ReceivedSegment<'_>, payload: impl Iterator<Item = P::Received>) {
        match self.find(segment) {
            Receiver::Connection(id) => self.deliver(id, segment.header, segment.meta, payload),
            Receiver::Listener(reused) => self.listen(segment, reused, payload),
        }
    }

    /// Finds what processes a segment.
    #[inline]
    fn find(&self, segment: &ReceivedSegment<'_>) -> Receiver {
        let Some(id) = self.tcp.connections.find(&segment.flow) else { return Receiver::Listener(None) };
        if !segment.header.flags.has(Flags::SYN) {
            return Receiver::Connection(id);
        }
        match self.reuse(id, segment) {
            Some(reused) => Receiver::Listener(Some(reused)),
            None => Receiver::Connection(id),
        }
    }

    /// Whether a SYN begins a new connection of the flow of connection `id`. TCP "MAY accept a new
    /// SYN from the remote TCP endpoint to reopen the connection directly from TIME-WAIT state"
    /// (RFC 9293, section 3.6.1).
    #[cold]
    fn reuse(&self, id: ConnectionId, segment: &ReceivedSegment<'_>) -> Option<ReusedFlow> {
        let Seen::Working(entry) = self.tcp.connections.see(id)? else { return None };
        let connection = &entry.connection;
        if connection.state() != State::TimeWait {
            return None;
        }
        let after = connection.reused_by(segment.header)?;
        self.tcp.listeners.find(segment.flow.local)?;
        Some(ReusedFlow { old: id, after })
    }

    /// Passes a segment to its connection.
    #[inline]
    pub(crate) fn deliver(
        &mut self,
        id: ConnectionId,
        header: &Header,
        meta: tcp::SegmentMeta,
        payload: impl Iterator<Item = P::Received>,
    ) {
        let Self { tcp, resources, .. } = self;
        let now = resources.now;
        let Some(mut entry) = tcp.connections.get_mut(id) else { return };
        if let Role::HalfOpen(listener) = entry.role
            && let Some(listening) = tcp.listeners.get_mut(listener)
            && !listening.listener.admits(&entry.connection, header)
        {
            resources.egress.stats.accept_overflows += 1;
            return;
        }
        if meta.len > 0 && (entry.unverified > 0 || entry.connection.lacks_buffer_for(header.seq, meta.len)) {
            prepare(tcp, resources, id, (header, meta.len));
            let Some(prepared) = tcp.connections.get_mut(id) else { return };
            entry = prepared;
        }
        entry.connection.handle_segment(header, payload, meta, now);
        tcp.schedule.enqueue_arrived(id, entry);
        if entry.has_other_out_of_order() {
            tcp.connections.note_out_of_order(id);
        }
    }

    /// Processes a segment of a flow that has no connection, or of one in TIME-WAIT that it reuses.
    fn listen(
        &mut self,
        segment: &ReceivedSegment<'_>,
        reused: Option<ReusedFlow>,
        payload: impl Iterator<Item = P::Received>,
    ) {
        let Self { tcp, resources, tx } = self;
        let ReceivedSegment { flow, header, meta, reply_path } = *segment;
        if reused.is_none() && resources.host.directory().is_departed(&flow) {
            resources.egress.stats.departed += 1;
            return;
        }
        let Some(listener) = tcp.listeners.find(flow.local) else { return self.reset(segment) };
        let room = tcp.has_room(resources);
        let Some(listening) = tcp.listeners.get_mut(listener) else { return };
        let config = resources.config(&listening.config, &flow);
        let mut path = None;
        let (host, now, stats) = (&resources.host, resources.now, &mut resources.egress.stats);
        let find_path = || {
            stats.lookups += u64::from(room);
            path = if room { Path::find(host, flow.remote.ip(), now) } else { None };
            stats.no_room += u64::from(path.is_none());
            path.as_ref().map(|path| path.mtu(now).saturating_sub(header_len(&flow)))
        };
        let after = reused.map(|reused| reused.after);
        let arriving = ArrivingSegment { header, len: meta.len, flow: &flow, after, cookie_at: host.cookie_at() };
        let template = ConnectionTemplate { config: &config, secret: host.secret(), queue: Some(&resources.budget) };
        let answer: Answer<P> = listening.listener.handle_segment(arriving, template, now, find_path);
        match (answer, path) {
            (Answer::HalfOpen(connection), Some(path)) => {
                if tcp.claim(resources, flow, reused) {
                    tcp.insert(resources, connection, flow, path, Role::HalfOpen(listener));
                } else {
                    tcp.listeners.handle_failed(listener);
                }
            }
            (Answer::Connected(mut connection), Some(path)) => {
                if tcp.claim(resources, flow, reused) {
                    connection.handle_segment(header, payload, meta, now);
                    let id = tcp.insert(resources, connection, flow, path, Role::Accepted(listener));
                    resources.wakers.extend(tcp.listeners.offer(listener, id));
                } else if let Some(listening) = tcp.listeners.get_mut(listener) {
                    listening.listener.accepted();
                }
            }
            (Answer::Reply(reply), _) => {
                if let Some(at) = listening.listener.cookie_at().filter(|_| reply.flags.has(Flags::SYN)) {
                    resources.host.cookie_sent(at);
                }
                // A reply to a SYN is a cookie: a new connection begins.
                if let Some(ReusedFlow { old, .. }) = reused {
                    tcp.supersede(old);
                    resources.host.directory().release(&flow);
                }
                Control { resources, tx: *tx }.reply(&flow, &reply, reply_path, config.ip);
            }
            _ => {}
        }
    }

    /// Answers a segment of no connection by a reset (RFC 9293, section 3.10.7.1).
    fn reset(&mut self, segment: &ReceivedSegment<'_>) {
        if let Some(reset) = reset_for(segment.header, segment.meta.len) {
            let Self { resources, tx, .. } = self;
            Control { resources, tx: *tx }.reply(&segment.flow, &reset, segment.reply_path, IpFields::default());
        }
    }
}

/// Prepares a connection for a segment of `len` bytes: segments of it were dropped before, or no
/// buffer is free for its payload.
#[cold]
fn prepare<P: Payload>(
    tcp: &mut Tcp<P>,
    resources: &mut Resources<P>,
    id: ConnectionId,
    (header, len): (&Header, u32),
) {
    let Some(entry) = tcp.connections.get_mut(id) else { return };
    if !entry.connection.accepts(header, len, resources.now) {
        return;
    }
    entry.unverified = 0;
    // Payload that is out of order makes room: that of the connection that has most is dropped
    // first. Its peer sends it again.
    for _ in 0..MOST_EVICTED {
        let entry = tcp.connections.get_mut(id);
        let lacks = entry.is_some_and(|entry| entry.connection.lacks_buffer_for(header.seq, len));
        if !lacks || !tcp.connections.evict() {
            return;
        }
        resources.egress.stats.evicted += 1;
    }
}
