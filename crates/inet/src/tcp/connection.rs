//! The connection: its states, and the user's calls. `input` handles received segments, `transmit`
//! sends segments, and `close` ends the connection.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::acks::Acks;
use super::budget::{Budget, Held};
use super::clock::PeerClock;
use super::event::Events;
use super::limit::Limit;
use super::receiver::{self, Receiver};
use super::record::Step;
use super::sender::{Negotiated, SendInfo, SendOptions, Sender};
use super::{
    Carrier, Chunk, Config, Ecn, Error, Event, Header, IpFields, KeepAlive, Options, Recording, Seq, Start, Timestamps,
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

/// One end of a TCP connection, as a value: it does no input or output, reads no clock, and does
/// not know its addresses.
///
/// ```text
///   segment(header, payload, meta, now) ─┐                     ┌─► transmit(now, out): segments
///   send, recv, shutdown, close, abort  ─┼─► Connection ───────┼─► event(): an event for the user
///   error(icmp, now), timeout(now)      ─┘                     └─► deadline(): when timeout is to be called
/// ```
///
/// After any of the calls on the left, call [`poll_transmit`](Self::poll_transmit), then check events and the
/// deadline. After [`is_gone`](Self::is_gone) returns true, the connection sends nothing more and
/// has no more events.
pub struct Connection<C: Carrier> {
    pub(super) state: State,
    pub(super) config: Config,
    pub(super) sender: Sender<C>,
    pub(super) receiver: Receiver<C::Received>,
    pub(super) acks: Acks,
    /// The number of the peer's SYN.
    pub(super) irs: Seq,
    pub(super) peer_mss: u16,
    /// The number of bits by which the peer's windows are shifted.
    pub(super) peer_scale: u8,
    /// Whether both sides sent the window scale option.
    pub(super) scaled: bool,
    pub(super) sack: bool,
    /// Whether both sides agreed on ECN: marks of the peer's data are echoed.
    pub(super) ecn: bool,
    /// Whether this side has sent a SYN without ECN. Its data must not be ECN-capable then, even if
    /// the peer agrees to the ECN of an earlier SYN (RFC 3168, section 6.1.1).
    pub(super) plain_syn: bool,
    /// The peer's clock, if the connection uses timestamps.
    pub(super) clock: Option<PeerClock>,
    /// The last number that was acknowledged to the peer.
    pub(super) acknowledged: Seq,
    /// Whether a CE mark was received, and the peer has not yet reported by CWR that it reduced its
    /// window.
    pub(super) echo: bool,
    pub(super) events: Events,
    pub(super) error: Option<Error>,
    /// An ICMP error that did not end the connection. If the connection times out, this is the
    /// reported reason.
    pub(super) soft: Option<Unreachable>,
    /// A segment without payload that is to be sent once: a reset, a repeated SYN-ACK, or a probe
    /// of an idle peer.
    pub(super) reply: Option<Header>,
    pub(super) limit: Limit,
    /// The time at which FIN-WAIT-2 or TIME-WAIT ends. In earlier states of a connection that the
    /// user has closed: the time at which it is reset unless the peer acknowledges something
    /// before.
    pub(super) until: Option<Time>,
    /// What the peer of an orphan must have acknowledged for its time to begin again, and how much
    /// further it must come then: an eighth of what was left when the user closed.
    pub(super) owed: (Seq, u32),
    /// Whether the user has shut the sending side down.
    pub(super) shut: bool,
    /// Whether the user has shut the reading side down, but has not closed the connection.
    pub(super) deaf: bool,
    /// Whether the user has closed the connection: nothing is read any more.
    pub(super) closed: bool,
    /// The number after the last urgent byte that was received.
    pub(super) urgent: Option<Seq>,
    /// The number after the last urgent byte that was sent.
    pub(super) urgent_sent: Option<Seq>,
    /// Set while no buffer is free: when to check again, and the current interval between checks.
    pub(super) look: Option<(Time, Duration)>,
    pub(super) heard: Time,
    /// The number of unanswered probes of an idle peer, and when the last probe was sent.
    pub(super) probes: u8,
    pub(super) probed: Time,
    pub(super) data_at: Time,
    pub(super) largest: u32,
    /// Set while the output refuses segments.
    pub(super) stall: Option<Stall>,
    pub(super) tape: Option<Box<Recording>>,
}

/// The timer of a connection whose segments the output refuses: its ring is full, or the next hop
/// is not resolved. Nothing has left, so that no other timer may be running.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stall {
    pub(super) at: Time,
    /// How often the timer has expired in a row.
    pub(super) expired: u32,
}

/// The result of [`recv`](Connection::recv).
#[derive(Debug)]
pub enum Received<T> {
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
    /// Opens a connection: SYN is sent by the next [`poll_transmit`](Self::poll_transmit).
    ///
    /// Received payload is counted in a budget of [`Config::budget`] buffers. If `queue` is given,
    /// that budget is a part of it.
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

    /// The recorded calls from the beginning on, if [`Config::record`] asks for them. Connections
    /// that were made from cookies or restored have no recording.
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

    /// A connection that answers `syn`: SYN-ACK is sent by the next [`poll_transmit`](Self::poll_transmit).
    pub(super) fn answer(syn: &Header, config: &Config, start: Start, queue: Option<&Budget>, now: Time) -> Self {
        let send = SendOptions { syn_retries: config.syn_ack_retries, ..config.send };
        let mut this = Self::begin(State::SynReceived, &Config { send, ..*config }, start, queue, now);
        this.record(start, Some(syn), now);
        this.agree(syn, config.ecn != Ecn::Off && syn.flags.is_ecn_setup(), None, now);
        this
    }

    /// A connection whose SYN-ACK was a cookie. `ack` has acknowledged it. `options` are those of
    /// the peer's SYN.
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
        let promised = receiver::cookie_window(receiver::scale(config.receive_buffer).0);
        this.agree(&Header { seq: ack.seq - 1, options, ..*ack }, ecn, Some(promised), now);
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
            plain_syn: false,
            clock: None,
            acknowledged: Seq(0),
            echo: false,
            events: Events::default(),
            error: None,
            soft: None,
            reply: None,
            limit: Limit::default(),
            until: None,
            owed: (Seq(0), 1),
            shut: false,
            deaf: false,
            closed: false,
            urgent: None,
            urgent_sent: None,
            look: None,
            heard: now,
            probes: 0,
            probed: now,
            data_at: now,
            largest: 0,
            stall: None,
            tape: None,
        }
    }

    /// Takes the options of the peer's SYN that both sides support. `promised` is the window of a
    /// SYN-ACK with a cookie.
    pub(super) fn agree(&mut self, syn: &Header, ecn: bool, promised: Option<u16>, now: Time) {
        let options = &syn.options;
        self.irs = syn.seq;
        self.peer_mss = options.mss.unwrap_or(self.config.default_mss);
        self.acknowledged = syn.seq + 1;
        self.scaled = self.config.window_scaling && options.window_scale.is_some();
        self.peer_scale = if self.scaled { options.window_scale.unwrap_or(0).min(14) } else { 0 };
        self.sack = self.config.sack && options.sack_permitted;
        self.ecn = ecn;
        self.clock = options.timestamps.filter(|_| self.config.timestamps).map(|stamps| PeerClock::new(stamps, now));
        self.receiver.open(syn.seq, self.scaled, promised);
    }

    /// Completes the handshake. The segment `seq` announced `window`, in bytes.
    pub(super) fn establish(&mut self, seq: Seq, window: u32, now: Time) {
        let mss = self.peer_mss;
        let timestamps = self.clock.is_some();
        let ecn = self.ecn && !self.plain_syn;
        self.sender.establish(&Negotiated { mss, sack: self.sack, timestamps, ecn, window, seq }, now);
        self.state = if self.shut { State::FinWait1 } else { State::Established };
        self.data_at = now;
        self.events.add(Events::CONNECTED);
    }

    /// Queues `chunk` to be sent. `more` announces that more payload follows soon, so that a
    /// segment can wait until it is full.
    ///
    /// # Errors
    /// The chunk is refused. The error contains the chunk and the reason.
    pub fn send(&mut self, chunk: C::Sent, more: bool) -> Result<(), Refusal<C::Sent>> {
        if let Some(tape) = &mut self.tape {
            tape.add(Step::Send { len: chunk.len() as u32, more, joins: self.sender.joins(&chunk) });
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
        match self.state {
            State::Closed => Err(Refused::Over(self.error.unwrap_or(Error::Aborted))),
            _ if self.shut => Err(Refused::Shutdown),
            _ => Ok(()),
        }
    }

    /// Marks the end of the queued payload as the end of urgent data. Segments before it carry the
    /// urgent pointer.
    ///
    /// New applications do not use this (RFC 6093). The receiver reads urgent data in line.
    pub fn mark_urgent(&mut self) {
        self.note(|| Step::MarkUrgent);
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

    /// Takes the next payload that is in order. Payload that arrived before a reset can still be
    /// read.
    ///
    /// # Errors
    /// The connection is over, and no payload is left to be read.
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

    /// The payload that [`recv`](Self::recv) takes next.
    #[must_use]
    pub fn peek(&self) -> Option<&C::Received> {
        self.receiver.peek()
    }

    /// The payload that later calls of [`recv`](Self::recv) take, in order, without the first `n`
    /// pieces.
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
        self.note(|| Step::Evict);
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

    /// The next event. Each kind waits at most once.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.take(self.error)
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
        self.note(|| Step::Nodelay(nodelay));
        self.sender.set_nodelay(nodelay);
    }

    /// While the connection is corked, only full segments are sent.
    pub fn set_cork(&mut self, cork: bool) {
        self.note(|| Step::Cork(cork));
        self.sender.set_cork(cork);
    }

    /// Sets how long sent data may stay unacknowledged before the connection ends.
    pub fn set_user_timeout(&mut self, timeout: Option<Duration>) {
        self.note(|| Step::UserTimeout(timeout));
        self.sender.set_user_timeout(timeout);
    }

    /// Sets the size of the send buffer, in bytes.
    pub fn set_send_buffer(&mut self, bytes: usize) {
        self.note(|| Step::SendBuffer(bytes));
        self.sender.set_send_buffer(bytes);
    }

    /// Sets how many unsent bytes make the connection unwritable.
    pub fn set_low_water(&mut self, bytes: usize) {
        self.note(|| Step::LowWater(bytes));
        self.sender.set_low_water(bytes);
    }

    /// Sets whether and how an idle peer is probed. The time since the last segment from the peer
    /// counts as idle time.
    pub fn set_keep_alive(&mut self, keep_alive: Option<KeepAlive>) {
        self.note(|| Step::KeepAlive(keep_alive));
        self.config.keep_alive = keep_alive;
        self.probes = 0;
    }

    /// Sets fields of the IP headers of segments that are sent from now on.
    pub fn set_ip(&mut self, ip: IpFields) {
        // Not recorded: no decision depends on it.
        self.config.ip = ip;
    }

    /// Sets the number of segments that one acknowledgement covers.
    pub fn set_ack_every(&mut self, segments: u16) {
        self.note(|| Step::AckEvery(segments));
        self.acks.set_every(segments);
    }

    /// If `quick`, the next segments are acknowledged at once. Otherwise acknowledgements are
    /// delayed from now on.
    pub fn set_quick_ack(&mut self, quick: bool) {
        self.note(|| Step::QuickAck(quick));
        self.acks.set_quick(quick);
    }

    /// Applies a change of the route's path MTU. `max_payload`: bytes of payload of a segment,
    /// without options.
    pub fn set_max_payload(&mut self, max_payload: u16) {
        self.note(|| Step::MaxPayload(max_payload));
        self.config.max_payload = max_payload;
        self.sender.set_max_payload(u32::from(max_payload));
    }

    /// Statistics of the connection.
    #[must_use]
    pub fn info(&self, now: Time) -> Info {
        Info {
            send: self.sender.info(now),
            announced_mss: self.config.mss,
            received_mss: self.largest,
            idle: now.since(self.data_at),
            readable: self.receiver.readable(),
            buffers: self.receiver.buffers(),
            out_of_buffers: self.receiver.out_of_buffers(),
        }
    }

    /// The timestamp option of a segment that is sent now.
    pub(super) fn timestamps(&self, syn: bool, now: Time) -> Option<Timestamps> {
        let value = self.sender.timestamp(now);
        match &self.clock {
            Some(clock) => Some(Timestamps { value, echo: clock.recent() }),
            // The first SYN offers timestamps.
            None if syn && self.state == State::SynSent && self.config.timestamps => {
                Some(Timestamps { value, echo: 0 })
            }
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Flags;
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
        // The sending half of the other end still works.
        pair.b.tcp.send(stream(500, 20), false).unwrap();
        pair.pass(Duration::from_millis(100));
        pair.a.read(pair.now);
        assert_eq!(pair.a.read, Piece::numbered(0, 520).bytes());
        pair.b.tcp.close(pair.now);
        pair.settle();
        assert_eq!((pair.a.tcp.state(), pair.b.tcp.state()), (State::TimeWait, State::Closed));
        assert!(pair.b.tcp.is_gone() && pair.b.events.last() == Some(&Event::Closed(None)));
        pair.pass(Duration::from_secs(61));
        assert!(pair.a.tcp.is_gone() && pair.a.tcp.poll_timeout().is_none());
    }

    #[test]
    fn a_segment_is_accepted_by_number_acknowledgement_and_timestamp() {
        let pair = Pair::connected(&Config::default(), &Config::default());
        let header = pair.header_of_a(Flags::ACK);
        let stamps = header.options.timestamps.unwrap();
        let accepts = |change: &dyn Fn(&mut Header)| {
            let mut header = header;
            change(&mut header);
            pair.b.tcp.accepts(&header, 10, pair.now)
        };
        assert!(
            accepts(&|_| ()) && accepts(&|header| header.seq += 20) && accepts(&|header| header.seq = header.seq - 5)
        );
        assert!(!accepts(&|header| header.seq = header.seq - 10), "before the window");
        assert!(!accepts(&|header| header.seq += 1 << 24), "behind the window");
        assert!(!accepts(&|header| header.ack += 1), "not sent");
        assert!(!accepts(&|header| header.ack = header.ack - (1 << 24)), "too old");
        assert!(!accepts(&|header| header.flags = Flags::PSH), "no acknowledgement");
        assert!(!accepts(&|header| header.options.timestamps = None));
        let old = Timestamps { value: stamps.value.wrapping_sub(1), ..stamps };
        assert!(!accepts(&|header| header.options.timestamps = Some(old)));
        let plain = Config { timestamps: false, ..Config::default() };
        let pair = Pair::new(&plain, &plain);
        let mut syn_ack = Header { ack: pair.a.tcp.una() + 1, ..pair.header_of_a(Flags::SYN.with(Flags::ACK)) };
        assert!(pair.a.tcp.accepts(&syn_ack, 0, pair.now));
        syn_ack.ack += 1;
        assert!(!pair.a.tcp.accepts(&syn_ack, 0, pair.now));
    }
}
