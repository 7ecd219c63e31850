//! The connection: states, and what the user calls. Segments come in by `input`, leave by `transmit`, and `close` ends it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::acks::Acks;
use super::budget::{Budget, Held};
use super::clock::PeerClock;
use super::event::Events;
use super::limit::Limit;
use super::receiver::Receiver;
use super::record::Step;
use super::sender::{Negotiated, SendInfo, SendOptions, Sender};
use super::{
    Carrier, Chunk, Config, Ecn, Error, Event, Flags, Header, KeepAlive, Options, Recording, Seq, Start, Timestamps,
    Unreachable,
};
use crate::Time;

/// The states of RFC 9293, section 3.3.2. LISTEN is a [`Listener`](super::Listener).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // The names are the RFC's.
pub enum State {
    SynSent,
    SynReceived,
    Established,
    FinWait1,
    FinWait2,
    CloseWait,
    Closing,
    LastAck,
    TimeWait,
    Closed,
}

/// One end of a TCP connection, as a value: it does no input or output, reads no clock, and does not know its addresses.
///
/// ```text
///   segment(header, payload, meta, now) ─┐                     ┌─► transmit(now, out): segments
///   send, recv, shutdown, close, abort  ─┼─► Connection ───────┼─► event(): what the user must know
///   error(icmp, now), timeout(now)      ─┘                     └─► deadline(): when timeout is to be called
/// ```
///
/// After any of the calls on the left, call [`transmit`](Self::transmit), then look at events and at the deadline. If
/// [`is_gone`](Self::is_gone), nothing will happen any more.
pub struct Connection<C: Carrier> {
    pub(super) state: State,
    pub(super) config: Config,
    pub(super) sender: Sender<C>,
    pub(super) receiver: Receiver<C::Received>,
    pub(super) acks: Acks,
    /// The number of the peer's SYN.
    pub(super) irs: Seq,
    pub(super) peer_mss: u16,
    /// By how much the peer's windows are shifted.
    pub(super) peer_scale: u8,
    /// Window scale options went both ways.
    pub(super) scaled: bool,
    pub(super) sack: bool,
    pub(super) ecn: bool,
    /// Timestamps are used if there is one.
    pub(super) clock: Option<PeerClock>,
    /// The last number that was acknowledged to the peer.
    pub(super) acknowledged: Seq,
    /// A CE mark was received, and the peer has not reduced its window yet.
    pub(super) echo: bool,
    pub(super) events: Events,
    pub(super) error: Option<Error>,
    /// An ICMP error that did not end the connection. It is the reason if the connection times out.
    pub(super) soft: Option<Unreachable>,
    /// A segment without payload that is to be sent once: a reset, or SYN-ACK again.
    pub(super) reply: Option<Header>,
    pub(super) limit: Limit,
    /// FIN-WAIT-2 or TIME-WAIT ends.
    pub(super) until: Option<Time>,
    /// The user sends no more.
    pub(super) shut: bool,
    /// The user reads no more, but the connection is not closed.
    pub(super) deaf: bool,
    /// The user is gone: nothing is read any more.
    pub(super) closed: bool,
    /// The number after the last urgent byte, received.
    pub(super) urgent: Option<Seq>,
    /// The number after the last urgent byte, sent.
    pub(super) urgent_sent: Option<Seq>,
    pub(super) heard: Time,
    pub(super) probes: u8,
    pub(super) data_at: Time,
    pub(super) largest: u32,
    pub(super) tape: Option<Box<Recording>>,
}

/// What a call of [`recv`](Connection::recv) gave.
#[derive(Debug)]
pub enum Received<T> {
    /// Payload that is next in order.
    Chunk(Held<T>),
    /// Nothing now.
    Empty,
    /// Nothing any more: the peer sent FIN, or the reading side is shut.
    End,
}

/// A chunk that was not taken.
#[derive(Clone, Debug)]
pub struct Refusal<T> {
    /// It.
    pub chunk: T,
    /// Why not.
    pub why: Refused,
}

/// Why a chunk was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The send buffer is full: there will be [`Event::Writable`].
    #[error("the send buffer is full")]
    Full,
    /// The sending side is shut.
    #[error("the sending side is shut")]
    Shut,
    /// The connection is over.
    #[error(transparent)]
    Over(Error),
}

/// Numbers about a connection.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    /// Of the sending half.
    pub send: SendInfo,
    /// The announced MSS.
    pub announced_mss: u16,
    /// The largest payload of a received segment.
    pub received_mss: u32,
    /// Since the last payload was received, or the handshake.
    pub idle: Duration,
    /// Bytes that can be read.
    pub readable: u32,
    /// Buffers that received payload occupies, with those that the user holds.
    pub buffers: u32,
}

impl<C: Carrier> Connection<C> {
    /// Opens a connection: SYN is sent by the next [`transmit`](Self::transmit).
    ///
    /// Received payload is counted in a budget of [`Config::budget`] buffers inside `queue`, if there is one.
    #[must_use]
    pub fn connect(config: &Config, start: Start, queue: Option<&Budget>, now: Time) -> Self {
        let mut this = Self::begin(State::SynSent, config, start, queue, now);
        this.record(start, None, now);
        this
    }

    fn begin(state: State, config: &Config, start: Start, queue: Option<&Budget>, now: Time) -> Self {
        let send = SendOptions { timestamp_offset: start.timestamp_offset, ..config.send };
        let sender = Sender::new(start.iss, u32::from(config.max_payload), send);
        Self::new(state, config, sender, queue, now)
    }

    /// The calls from the beginning on, if [`Config::record`] asks for them. Connections from cookies and restored ones have none.
    #[must_use]
    pub fn recording(&self) -> Option<&Recording> {
        self.tape.as_deref()
    }

    fn record(&mut self, start: Start, syn: Option<&Header>, now: Time) {
        if self.config.record > 0 {
            self.tape = Some(Box::new(Recording::new(&self.config, start, syn, now)));
        }
    }

    #[inline]
    pub(super) fn note(&mut self, step: impl FnOnce() -> Step) {
        if let Some(tape) = &mut self.tape {
            tape.add(step());
        }
    }

    /// The answer to `syn`: SYN-ACK is sent by the next [`transmit`](Self::transmit).
    pub(super) fn answer(syn: &Header, config: &Config, start: Start, queue: Option<&Budget>, now: Time) -> Self {
        let mut this = Self::begin(State::SynReceived, config, start, queue, now);
        this.record(start, Some(syn), now);
        this.agree(syn, config.ecn != Ecn::Off && syn.flags.has(Flags::ECE.with(Flags::CWR)), now);
        this
    }

    /// A connection whose SYN-ACK was a cookie: `ack` acknowledged it. `options` are those that the peer's SYN had.
    pub(super) fn from_cookie(
        ack: &Header,
        options: Options,
        ecn: bool,
        config: &Config,
        start: Start,
        queue: Option<&Budget>,
        now: Time,
    ) -> Self {
        let send = SendOptions { timestamp_offset: start.timestamp_offset, ..config.send };
        let sender = Sender::established_at(start.iss, u32::from(config.max_payload), send, now);
        let mut this = Self::new(State::SynReceived, config, sender, queue, now);
        this.agree(&Header { seq: ack.seq - 1, options, ..*ack }, ecn, now);
        this.establish(ack.seq, u32::from(ack.window) << this.peer_scale, now);
        this
    }

    pub(super) fn new(state: State, config: &Config, sender: Sender<C>, queue: Option<&Budget>, now: Time) -> Self {
        let budget = Budget::within(config.budget, queue);
        Self {
            state,
            config: *config,
            sender,
            receiver: Receiver::new(config.receive_buffer, config.fixed_window, u32::from(config.mss), budget),
            acks: Acks::new(config.ack_every, config.ack_delay, now),
            irs: Seq(0),
            peer_mss: config.default_mss,
            peer_scale: 0,
            scaled: false,
            sack: false,
            ecn: false,
            clock: None,
            acknowledged: Seq(0),
            echo: false,
            events: Events::default(),
            error: None,
            soft: None,
            reply: None,
            limit: Limit::default(),
            until: None,
            shut: false,
            deaf: false,
            closed: false,
            urgent: None,
            urgent_sent: None,
            heard: now,
            probes: 0,
            data_at: now,
            largest: 0,
            tape: None,
        }
    }

    /// The peer's SYN says what both understand.
    pub(super) fn agree(&mut self, syn: &Header, ecn: bool, now: Time) {
        let options = &syn.options;
        self.irs = syn.seq;
        self.peer_mss = options.mss.unwrap_or(self.config.default_mss);
        self.acknowledged = syn.seq + 1;
        self.scaled = self.config.window_scaling && options.window_scale.is_some();
        self.peer_scale = if self.scaled { options.window_scale.unwrap_or(0).min(14) } else { 0 };
        self.sack = self.config.sack && options.sack_permitted;
        self.ecn = ecn;
        self.clock = options.timestamps.filter(|_| self.config.timestamps).map(|stamps| PeerClock::new(stamps, now));
        self.receiver.open(syn.seq, self.scaled);
    }

    /// The handshake is complete. The segment `seq` had `window`, in bytes.
    pub(super) fn establish(&mut self, seq: Seq, window: u32, now: Time) {
        let mss = self.peer_mss;
        let timestamps = self.clock.is_some();
        self.sender.established(&Negotiated { mss, sack: self.sack, timestamps, ecn: self.ecn, window, seq }, now);
        self.state = if self.shut { State::FinWait1 } else { State::Established };
        self.data_at = now;
        self.events.add(Events::CONNECTED);
    }

    /// Queues `chunk` to be sent. `more` says that more follows soon, so that a segment need not leave before it is full.
    ///
    /// # Errors
    /// The chunk is given back, with the reason.
    pub fn send(&mut self, chunk: C::Sent, more: bool) -> Result<(), Refusal<C::Sent>> {
        self.note(|| Step::Send { len: chunk.len() as u32, more });
        let why = match self.state {
            State::Closed => Refused::Over(self.error.unwrap_or(Error::Aborted)),
            _ if self.shut => Refused::Shut,
            _ => match self.sender.send(chunk, more) {
                Ok(()) => return Ok(()),
                Err(chunk) => return Err(Refusal { chunk, why: Refused::Full }),
            },
        };
        Err(Refusal { chunk, why })
    }

    /// What is queued now ends with urgent data: segments before its end carry the urgent pointer.
    ///
    /// New applications do not use this (RFC 6093). The receiver reads urgent data in line.
    pub fn mark_urgent(&mut self) {
        self.note(|| Step::MarkUrgent);
        self.urgent_sent = Some(self.sender.end());
    }

    /// Bytes that [`send`](Self::send) takes now.
    #[must_use]
    pub fn room(&self) -> usize {
        self.sender.room()
    }

    /// Whether the send buffer has so much room that [`Event::Writable`] would be due.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.sender.is_writable()
    }

    /// Takes the next payload that is in order. What arrived before a reset can still be read.
    ///
    /// # Errors
    /// The connection is over, and there is nothing left to read.
    pub fn recv(&mut self, now: Time) -> Result<Received<C::Received>, Error> {
        self.note(|| Step::Recv(now));
        let round_trip = self.sender.round_trip();
        if let Some(chunk) = self.receiver.read(now, round_trip) {
            return Ok(Received::Chunk(chunk));
        }
        match self.error {
            _ if self.receiver.finished() || self.deaf => Ok(Received::End),
            Some(error) => Err(error),
            None if self.state == State::Closed => Ok(Received::End),
            None => Ok(Received::Empty),
        }
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

    /// The next event. Each kind waits at most once.
    pub fn event(&mut self) -> Option<Event> {
        self.events.take(self.error)
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// The first number that the peer has not acknowledged. When it moves, the path works.
    #[must_use]
    pub fn una(&self) -> Seq {
        self.sender.una()
    }

    /// Why the connection is over, if an error ended it.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.error
    }

    /// The connection is over, and nothing is left to be sent.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.state == State::Closed && self.reply.is_none()
    }

    /// Something waits for an earlier transmission that the device still holds: call [`transmit`](Self::transmit) again after
    /// the queue's completions.
    #[must_use]
    pub fn waits_for_ring(&self) -> bool {
        self.state != State::Closed && self.sender.waits_for_ring()
    }

    /// Small segments leave at once, or wait until what was sent is acknowledged (Nagle's algorithm).
    pub fn set_nodelay(&mut self, nodelay: bool) {
        self.note(|| Step::Nodelay(nodelay));
        self.sender.set_nodelay(nodelay);
    }

    /// While corked, only full segments leave.
    pub fn set_cork(&mut self, cork: bool) {
        self.note(|| Step::Cork(cork));
        self.sender.set_cork(cork);
    }

    /// How long sent data may stay unacknowledged.
    pub fn set_user_timeout(&mut self, timeout: Option<Duration>) {
        self.note(|| Step::UserTimeout(timeout));
        self.sender.set_user_timeout(timeout);
    }

    /// Bytes of the send buffer.
    pub fn set_send_buffer(&mut self, bytes: usize) {
        self.note(|| Step::SendBuffer(bytes));
        self.sender.set_send_buffer(bytes);
    }

    /// Whether an idle peer is asked if it is still there. The time since the peer was heard counts.
    pub fn set_keep_alive(&mut self, keep_alive: Option<KeepAlive>) {
        self.note(|| Step::KeepAlive(keep_alive));
        self.config.keep_alive = keep_alive;
        self.probes = 0;
    }

    /// Segments that one acknowledgement covers.
    pub fn set_ack_every(&mut self, segments: u16) {
        self.note(|| Step::AckEvery(segments));
        self.acks.set_every(segments);
    }

    /// The next segments are acknowledged at once, or delayed from now on.
    pub fn set_quick_ack(&mut self, quick: bool) {
        self.note(|| Step::QuickAck(quick));
        self.acks.set_quick(quick);
    }

    /// The route's path MTU changed: payload of a segment, without options.
    pub fn set_max_payload(&mut self, max_payload: u16) {
        self.note(|| Step::MaxPayload(max_payload));
        self.config.max_payload = max_payload;
        self.sender.set_max_payload(u32::from(max_payload));
    }

    /// Numbers about the connection.
    #[must_use]
    pub fn info(&self, now: Time) -> Info {
        Info {
            send: self.sender.info(now),
            announced_mss: self.config.mss,
            received_mss: self.largest,
            idle: now.since(self.data_at),
            readable: self.receiver.readable(),
            buffers: self.receiver.buffers(),
        }
    }

    /// The timestamp option of a segment that is sent now.
    pub(super) fn timestamps(&self, syn: bool, now: Time) -> Option<Timestamps> {
        let value = self.sender.timestamp(now);
        match &self.clock {
            Some(clock) => Some(Timestamps { value, echo: clock.recent() }),
            // The first SYN offers them.
            None if syn && self.state == State::SynSent && self.config.timestamps => {
                Some(Timestamps { value, echo: 0 })
            }
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Pair, Piece, stream};
    use super::*;

    #[test]
    fn a_stream_goes_both_ways_and_closes() {
        let mut pair = Pair::connected(&Config::default(), &Config::default());
        for n in 0..50 {
            pair.a.tcp.send(stream(n * 3000, 3000), false).unwrap();
            pair.b.tcp.send(stream(n * 10, 10), false).unwrap();
        }
        pair.a.tcp.shutdown();
        for _ in 0..200 {
            pair.pass(Duration::from_millis(5));
            pair.a.read(pair.now);
            pair.b.read(pair.now);
        }
        assert_eq!(pair.b.read, Piece::numbered(0, 150_000).bytes());
        assert_eq!(pair.a.read, Piece::numbered(0, 500).bytes());
        assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::FinWait2, State::CloseWait));
        assert!(matches!(pair.b.tcp.recv(pair.now), Ok(Received::End)));
        assert_eq!(pair.b.tcp.info(pair.now).buffers, 0);
        // The other half still works.
        pair.b.tcp.send(stream(500, 20), false).unwrap();
        pair.pass(Duration::from_millis(100));
        pair.a.read(pair.now);
        assert_eq!(pair.a.read, Piece::numbered(0, 520).bytes());
        pair.b.tcp.close(pair.now);
        pair.settle();
        assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::TimeWait, State::Closed));
        assert!(pair.b.tcp.is_gone() && pair.b.events.last() == Some(&Event::Closed(None)));
        pair.pass(Duration::from_secs(61));
        assert!(pair.a.tcp.is_gone() && pair.a.tcp.deadline().is_none());
    }
}
