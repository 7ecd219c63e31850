//! The user's calls: send, receive, settings, statistics (RFC 9293, section 3.9.1).
//!
//! They change the state and send nothing. `poll_transmit` sends what follows from them.

use std::time::Duration;

#[cfg(feature = "record")]
use super::Chunk;
use super::budget::{Budget, Held};
use super::connection::Connection;
use super::sender::SendInfo;
use super::{Carrier, Error, Event, IpFields, KeepAlive, Seq, State};
use crate::time::Time;

/// What [`recv`](Connection::recv) found in the stream.
#[derive(Debug)]
pub enum ReadOutcome<T> {
    /// Payload that is next in order.
    Chunk(Held<T>),
    /// There is no payload now.
    Empty,
    /// There will be no more payload: the peer sent FIN, or the reading side is shut down.
    End,
}

/// A chunk that the connection refused.
#[derive(Clone, Debug)]
pub struct Refusal<T> {
    /// The chunk.
    pub chunk: T,
    /// The reason.
    pub why: Refused,
}

/// The reason why a chunk was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The send buffer is full. [`Event::Writable`] follows when it has room.
    #[error("the send buffer is full")]
    Full,
    /// The sending side is shut down.
    #[error("the sending side is shut down")]
    Shutdown,
    /// The connection is over.
    #[error(transparent)]
    Over(Error),
}

/// Statistics of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    /// Statistics of the sending half.
    pub send: SendInfo,
    /// Bytes of payload that were received in order, modulo 2^32.
    pub received: u32,
    /// The announced MSS.
    pub announced_mss: u16,
    /// The largest payload of a received segment.
    pub received_mss: u32,
    /// The time since the last payload was received, or since the handshake.
    pub idle: Duration,
    /// Bytes that can be read.
    pub readable: u32,
    /// The number of buffers that received payload occupies, including those that the user holds.
    pub buffers: u32,
    /// Bytes in order that were dropped without an acknowledgement, because no buffer was free.
    pub out_of_buffers: u64,
}

impl<C: Carrier> Connection<C> {
    /// Queues `chunk` to be sent. `more` announces that more payload follows soon, so that a
    /// segment can wait until it is full. [`poll_transmit`](Self::poll_transmit) follows.
    ///
    /// # Errors
    /// The chunk is refused. The error contains the chunk and the reason.
    pub fn send(&mut self, chunk: C::Sent, more: bool) -> Result<(), Refusal<C::Sent>> {
        #[cfg(feature = "record")]
        if let Some(recording) = &mut self.recording {
            let joins = self.sender.joins(&chunk);
            recording.add(super::recording::Step::Send { len: chunk.len() as u32, more, joins });
        }
        match self.can_send() {
            Ok(()) => self.sender.send(chunk, more).map_err(|chunk| Refusal { chunk, why: Refused::Full }),
            Err(why) => Err(Refusal { chunk, why }),
        }
    }

    /// Whether [`send`](Self::send) accepts payload when there is room.
    ///
    /// # Errors
    /// [`Refused::Over`], [`Refused::Shutdown`].
    pub fn can_send(&self) -> Result<(), Refused> {
        match self.error {
            Some(error) if self.state == State::Closed => Err(Refused::Over(error)),
            _ if self.send_shutdown => Err(Refused::Shutdown),
            _ if self.state == State::Closed => Err(Refused::Over(Error::Aborted)),
            _ => Ok(()),
        }
    }

    /// Marks the end of the queued payload as the end of urgent data. Segments before it carry the
    /// urgent pointer.
    ///
    /// New applications do not use this (RFC 6093). The receiver reads urgent data in line.
    pub fn mark_urgent(&mut self) {
        record!(self, Step::MarkUrgent);
        self.urgent_sent = Some(self.sender.end());
    }

    /// Whether the data of this end is ECN-capable: both ends agreed on explicit congestion
    /// notification, and none of them sent a SYN without it.
    #[must_use]
    pub fn uses_ecn(&self) -> bool {
        self.sender.uses_ecn()
    }

    /// Fields of the IP headers of the connection's segments.
    #[must_use]
    pub fn ip(&self) -> IpFields {
        self.config.ip
    }

    /// The number of bytes that [`send`](Self::send) accepts now.
    #[must_use]
    pub fn room(&self) -> usize {
        self.sender.room()
    }

    /// Whether the send buffer has enough room for [`Event::Writable`].
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.sender.is_writable()
    }

    /// The number after the last byte that [`send`](Self::send) has accepted.
    #[must_use]
    pub fn send_end(&self) -> Seq {
        self.sender.end()
    }

    /// Removes and returns the next payload that is in order. Payload that arrived before a reset
    /// can still be read.
    ///
    /// # Errors
    /// The connection is over, and no payload is left to be read.
    pub fn recv(&mut self, now: Time) -> Result<ReadOutcome<C::Received>, Error> {
        record!(self, Step::Recv(now));
        let round_trip = self.sender.round_trip_micros();
        if let Some(chunk) = self.receiver.read(now, round_trip) {
            return Ok(ReadOutcome::Chunk(chunk));
        }
        match self.error {
            _ if self.receiver.finished() || self.recv_shutdown => Ok(ReadOutcome::End),
            Some(error) => Err(error),
            None if self.state == State::Closed => Ok(ReadOutcome::End),
            None => Ok(ReadOutcome::Empty),
        }
    }

    /// The payload that [`recv`](Self::recv) returns next.
    #[must_use]
    pub fn peek(&self) -> Option<&C::Received> {
        self.receiver.peek()
    }

    /// The payload that later calls of [`recv`](Self::recv) return, in order, without the first `n`
    /// chunks.
    pub fn queued_from(&self, n: usize) -> impl Iterator<Item = &C::Received> {
        self.receiver.queued_from(n)
    }

    /// The budget in which the buffers of received payload are counted.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        self.receiver.budget()
    }

    /// Whether only the lack of free buffers keeps the window small. When buffers are returned,
    /// [`poll_transmit`](Self::poll_transmit) may have a window update to send.
    #[must_use]
    pub fn is_buffer_limited(&self) -> bool {
        self.receiver.is_buffer_limited()
    }

    /// The number of chunks of payload that are out of order.
    #[must_use]
    pub fn out_of_order(&self) -> usize {
        self.receiver.out_of_order()
    }

    /// Drops a chunk of payload that is out of order, the one with the highest numbers: the peer
    /// sends it again (RFC 2018, section 8). Returns false if there is none. For an owner of many
    /// connections whose queue is short of buffers.
    pub fn evict(&mut self) -> bool {
        record!(self, Step::Evict);
        self.receiver.evict()
    }

    /// Whether a segment of `len` bytes from `seq` on has bytes that are next in order and within
    /// the window, and the queue has no buffer for them. If the connection's own share or limit is
    /// used up, it does not lack a buffer of the queue.
    #[must_use]
    pub fn lacks_buffer_for(&self, seq: Seq, len: u32) -> bool {
        let nxt = self.receiver.nxt();
        seq <= nxt && nxt < seq + len && self.receiver.is_open() && self.receiver.budget().is_short()
    }

    /// Bytes that can be read.
    #[must_use]
    pub fn readable(&self) -> usize {
        self.receiver.readable() as usize
    }

    /// How many bytes from the reading position on are urgent, if any are.
    #[must_use]
    pub fn urgent(&self) -> Option<u32> {
        let ahead = self.urgent?.distance(self.receiver.read_position());
        u32::try_from(ahead).ok().filter(|ahead| *ahead > 0)
    }

    /// The next event, in the order of [`Event`]'s variants. Each kind waits at most once. Call it
    /// until it returns `None`; [`poll_timeout`](Self::poll_timeout) follows.
    #[inline]
    pub fn poll_event(&mut self) -> Option<Event> {
        if self.events.is_empty() { None } else { self.events.take(self.error) }
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// The first number that the peer has not acknowledged. If it advances, the path works.
    #[must_use]
    pub fn una(&self) -> Seq {
        self.sender.una()
    }

    /// The error that ended the connection, if there was one.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.error
    }

    /// Whether the connection waits for nothing but what its peer or its user may begin: all that
    /// was sent is acknowledged, and all that was received is read.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        (self.sender.is_idle() || self.state == State::Closed) && self.receiver.is_empty()
    }

    /// Frees the memory of lists that are empty. For a connection that is [idle](Self::is_idle) for
    /// a while. The next segments allocate it again.
    pub fn shrink(&mut self) {
        self.sender.shrink();
        self.receiver.shrink();
    }

    /// Whether the connection is over, and nothing is left to be sent.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.state == State::Closed && self.reply.is_none()
    }

    /// Whether something waits for an earlier transmission that the device still holds. If so, call
    /// [`poll_transmit`](Self::poll_transmit) again after the queue's completions.
    #[must_use]
    pub fn waits_for_ring(&self) -> bool {
        self.state != State::Closed && self.sender.waits_for_ring()
    }

    /// If `nodelay`, small segments are sent at once. Otherwise they wait until earlier payload is
    /// acknowledged (Nagle's algorithm).
    pub fn set_nodelay(&mut self, nodelay: bool) {
        record!(self, Step::Nodelay(nodelay));
        self.sender.set_nodelay(nodelay);
    }

    /// While the connection is corked, only full segments are sent.
    pub fn set_cork(&mut self, cork: bool) {
        record!(self, Step::Cork(cork));
        self.sender.set_cork(cork);
    }

    /// Sets how long sent data may stay unacknowledged before the connection ends.
    pub fn set_user_timeout(&mut self, timeout: Option<Duration>) {
        record!(self, Step::UserTimeout(timeout));
        self.sender.set_user_timeout(timeout);
    }

    /// Sets the size of the send buffer, in bytes.
    pub fn set_send_buffer(&mut self, bytes: usize) {
        record!(self, Step::SendBuffer(bytes));
        self.sender.set_send_buffer(bytes);
    }

    /// Sets how many unsent bytes make the connection unwritable.
    pub fn set_low_water(&mut self, bytes: usize) {
        record!(self, Step::LowWater(bytes));
        self.sender.set_low_water(bytes);
    }

    /// Sets whether and how an idle peer is probed. The time since the last segment from the peer
    /// counts as idle time.
    pub fn set_keep_alive(&mut self, keep_alive: Option<KeepAlive>) {
        record!(self, Step::KeepAlive(keep_alive));
        self.config.keep_alive = keep_alive;
        self.keep_alive_probes = 0;
    }

    /// Sets fields of the IP headers of segments that are sent from now on.
    pub fn set_ip(&mut self, ip: IpFields) {
        // Not recorded: no decision depends on it.
        self.config.ip = ip;
    }

    /// Sets the number of segments that one acknowledgement covers.
    pub fn set_ack_every(&mut self, segments: u16) {
        record!(self, Step::AckEvery(segments));
        self.acks.set_every(segments);
    }

    /// If `quick`, the next segments are acknowledged at once. Otherwise acknowledgements are
    /// delayed from now on.
    pub fn set_quick_ack(&mut self, quick: bool) {
        record!(self, Step::QuickAck(quick));
        self.acks.set_quick(quick);
    }

    /// Applies a change of the route's path MTU. `max_payload`: bytes of payload of a segment,
    /// without options.
    pub fn set_max_payload(&mut self, max_payload: u16) {
        record!(self, Step::MaxPayload(max_payload));
        self.config.max_payload = max_payload;
        self.sender.set_max_payload(u32::from(max_payload));
    }

    /// Statistics of the connection.
    #[must_use]
    pub fn info(&self, now: Time) -> Info {
        let numbers = self.receiver.nxt() - self.irs;
        // SYN and FIN have numbers, too. Without a SYN, the peer has sent nothing.
        let received = if numbers == 0 { 0 } else { numbers.wrapping_sub(1 + u32::from(self.receiver.finished())) };
        Info {
            send: self.sender.info(now),
            received,
            announced_mss: self.config.mss,
            received_mss: self.largest_segment,
            idle: now.since(self.last_data_received),
            readable: self.receiver.readable(),
            buffers: self.receiver.buffers(),
            out_of_buffers: self.receiver.out_of_buffers(),
        }
    }
}
