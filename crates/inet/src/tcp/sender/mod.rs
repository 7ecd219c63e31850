//! The sending half of a connection: the choice of what is sent, and what is sent again.
//!
//! ```text
//!   send(chunk) ──► Queue ──► next() ──► the connection adds acknowledgement, window, options ──► sent(ticket)
//!                     ▲         ▲                                                                    │
//!            drop     │         │ lost segments, new data, a probe                                   ▼
//!   ack(..) ──────────┴──► Scoreboard ◄── Rack, Recovery, Congestion, timers ◄───────────────── Ring of tickets
//! ```
//!
//! SYN, data and FIN occupy sequence numbers, and are acknowledged and repeated in the same way.
//! Payload is held until it is acknowledged. Each transmission holds a clone until the device is
//! done with it. A range is not sent again while its last [`Ticket`] is pending: the device could
//! send the earlier copy after the memory was reused, with a valid checksum.
//!
//! An acknowledgement of new data in order causes no allocation, and its cost is constant on
//! average.
//!
//! [`Ticket`]: crate::tcp::Ticket

mod ack;
mod info;
mod options;
mod path;
mod prr;
mod queue;
mod rack;
#[cfg(test)]
mod random;
mod recovery;
mod ring;
mod rtt;
mod save;
mod scoreboard;
#[cfg(test)]
mod tests;
mod timer;
mod usage;

use std::time::Duration;

use path::PathSize;
use queue::Queue;
use rack::Rack;
use recovery::Recovery;
use ring::Ring;
use rtt::Rtt;
use scoreboard::{Range, Scoreboard};
use timer::{Purpose, Timer};
use usage::Usage;

pub use info::SendInfo;
pub use options::{Ack, Acked, Kind, Negotiated, SendOptions, TimedOut, Transmission};
pub use recovery::State;
pub use save::SavedSender;

use super::congestion::{Controller, Window};
use super::{Carrier, Chunk, Seq};
use crate::Time;

/// The largest chunk: sequence numbers further apart than 2^31 cannot be compared.
const MAX_CHUNK: usize = 1 << 30;
/// Bytes of the timestamp option, padded.
const TIMESTAMP_BYTES: u32 = 12;

/// The result of the handshake.
#[derive(Clone, Copy, Debug, Default)]
struct Agreed {
    sack: bool,
    ecn: bool,
}

/// The kind of a probe that is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    Tail,
    Window,
}

/// The sending half of a connection. See the [module](self).
#[derive(Debug)]
pub struct Sender<C: Carrier> {
    options: SendOptions,
    agreed: Option<Agreed>,
    iss: Seq,
    /// The first number that is not acknowledged.
    una: Seq,
    /// The number after the last number that was sent.
    nxt: Seq,
    syn_acked: bool,
    /// Whether SYN was repeated. The first window is then one segment.
    syn_lost: bool,
    fin: bool,
    queue: Queue<C::Sent>,
    board: Scoreboard,
    ring: Ring<C::Ticket>,
    scratch: Vec<C::Sent>,
    /// Whether something could be sent, but the ring still holds too much of this connection.
    waits: bool,

    /// The peer's window, the segment that announced it, and the largest window that was ever
    /// announced.
    peer_window: u32,
    window_seq: Seq,
    window_ack: Seq,
    max_window: u32,

    path: PathSize,
    rtt: Rtt,
    rack: Rack,
    recovery: Recovery,
    sacks: ack::Sacks,
    controller: Controller,
    window: Window,
    usage: Usage,
    /// Whether CWR is due.
    cwr: bool,

    cork: bool,
    more: bool,
    /// Bytes before this number are sent even in small segments.
    release: Seq,
    /// The end of the last small segment (Minshall's variant of Nagle's algorithm).
    small: Seq,

    timer: Option<Timer>,
    probe: Option<Probe>,
    /// Timeouts in a row (`retries`), and how many of them a peer with a closed window has answered
    /// (`answered`).
    retries: u32,
    answered: u32,
    /// Unanswered window probes in a row (`probes`), and all probes since the peer closed its
    /// window (`asked`). The interval grows with `asked`, even if the peer answers.
    probes: u32,
    asked: u32,
    /// The time of the peer's last progress, while something waits for the peer.
    waiting: Option<u64>,
    last_sent: u64,
    clocks: info::Clocks,
}

impl<C: Carrier> Sender<C> {
    /// A sender whose SYN is queued. `max_payload`: bytes of payload and options of a segment that
    /// fit into the path MTU.
    #[must_use]
    pub fn new(iss: Seq, max_payload: u32, options: SendOptions) -> Self {
        let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        Self {
            agreed: None,
            iss,
            una: iss,
            nxt: iss,
            syn_acked: false,
            syn_lost: false,
            fin: false,
            queue: Queue::new(iss + 1),
            board: Scoreboard::new(iss),
            ring: Ring::new(),
            scratch: Vec::new(),
            waits: false,
            peer_window: 0,
            window_seq: Seq::default(),
            window_ack: iss,
            max_window: 0,
            path: PathSize::new(max_payload, options.path_floor),
            rtt: Rtt::new(micros(options.rto_min), micros(options.rto_max)),
            rack: Rack::new(),
            recovery: Recovery::new(iss),
            sacks: ack::Sacks::default(),
            controller: Controller::new(options.congestion),
            window: Window { cwnd: 1, ssthresh: Window::UNKNOWN },
            usage: Usage::new(iss),
            cwr: false,
            cork: false,
            more: false,
            release: iss,
            small: iss,
            timer: None,
            probe: None,
            retries: 0,
            answered: 0,
            probes: 0,
            asked: 0,
            waiting: None,
            last_sent: 0,
            clocks: info::Clocks::default(),
            options,
        }
    }

    /// A sender whose SYN was sent and acknowledged. The connection was made from a cookie.
    #[must_use]
    pub fn established_at(iss: Seq, max_payload: u32, options: SendOptions, now: Time) -> Self {
        let mut sender = Self::new(iss, max_payload, options);
        (sender.syn_acked, sender.last_sent) = (true, now.micros());
        sender.start_at(iss + 1);
        sender
    }

    /// Starts at `una`: everything before it is acknowledged, and nothing is in flight.
    fn start_at(&mut self, una: Seq) {
        (self.una, self.nxt, self.release, self.small, self.window_ack) = (una, una, una, una, una);
        (self.board, self.usage, self.queue) = (Scoreboard::new(una), Usage::new(una), Queue::new(una));
    }

    /// Takes the result of the handshake, when the peer's SYN was received. Before this call, only
    /// SYN is sent.
    pub fn establish(&mut self, negotiated: &Negotiated, now: Time) {
        let Negotiated { mss, sack, timestamps, ecn, window, seq } = *negotiated;
        self.agreed = Some(Agreed { sack, ecn });
        self.path.set_peer(u32::from(mss), if timestamps { TIMESTAMP_BYTES } else { 0 });
        (self.peer_window, self.window_seq, self.max_window) = (window, seq, self.max_window.max(window));
        self.window.cwnd = if self.syn_lost { 1 } else { self.initial_window() };
        self.last_sent = now.micros();
    }

    /// The initial window (RFC 6928), in segments. Large segments do not make it larger in bytes
    /// than it is with segments of Ethernet's size.
    fn initial_window(&self) -> u32 {
        let segments = self.options.initial_window;
        segments.min((segments.saturating_mul(1460) / self.path.size()).max(2)).max(1)
    }

    // The user

    /// Queues `chunk`. `more` announces more payload, so that a small segment waits for it, for 200
    /// ms at most.
    ///
    /// The last chunk may exceed the limit of the send buffer.
    ///
    /// # Errors
    /// The chunk is returned if there is no [room](Self::room), if FIN is queued, or if it has a
    /// gibibyte or more.
    pub fn send(&mut self, chunk: C::Sent, more: bool) -> Result<(), C::Sent> {
        if self.room() == 0 || self.fin || chunk.len() >= MAX_CHUNK {
            return Err(chunk);
        }
        self.more = more;
        self.queue.push(chunk, !more);
        Ok(())
    }

    /// Whether [`send`](Self::send) would join `chunk` with the last queued chunk.
    #[cfg(feature = "record")]
    pub(in crate::tcp) fn joins(&self, chunk: &C::Sent) -> bool {
        self.queue.joins(chunk)
    }

    /// The number of bytes until the send buffer is full.
    #[must_use]
    pub fn room(&self) -> usize {
        self.options.send_buffer.saturating_sub(self.queue.len())
    }

    /// Whether a third of the send buffer is free, and the number of unsent bytes is below the
    /// limit.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.room() >= self.queue.len() / 2 && self.room() > 0 && self.unsent() < self.options.low_water && !self.fin
    }

    /// Bytes of payload that were not sent yet.
    #[must_use]
    pub fn unsent(&self) -> usize {
        // The beginning is compared only during the handshake: after 2^31 bytes it is too far away
        // for an order.
        let next = if self.syn_acked { self.nxt } else { self.nxt.max(self.iss + 1) };
        usize::try_from(self.queue.end().distance(next)).unwrap_or(0)
    }

    /// Bytes of payload that are queued, sent or not.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// The number after the last queued byte: FIN's, if there is one.
    #[must_use]
    pub fn end(&self) -> Seq {
        self.queue.end()
    }

    /// Queues FIN behind the data.
    pub fn finish(&mut self) {
        self.fin = true;
    }

    /// Corks or uncorks the connection. While it is corked, small segments wait, for 200 ms at
    /// most.
    pub fn set_cork(&mut self, cork: bool) {
        self.cork = cork;
    }

    /// If `nodelay`, small segments do not wait for acknowledgements. Waiting payload is then sent,
    /// even if the connection is corked.
    pub fn set_nodelay(&mut self, nodelay: bool) {
        self.options.nodelay = nodelay;
        if nodelay {
            self.release = self.queue.end();
        }
    }

    /// Sets or removes the user timeout.
    pub fn set_user_timeout(&mut self, timeout: Option<Duration>) {
        self.options.user_timeout = timeout;
    }

    /// Sets the limit of the send buffer, in bytes.
    pub fn set_send_buffer(&mut self, bytes: usize) {
        self.options.send_buffer = bytes;
    }

    /// Sets how many unsent bytes make the connection unwritable.
    pub fn set_low_water(&mut self, bytes: usize) {
        self.options.low_water = bytes;
    }

    // What the connection asks

    /// The first number that is not acknowledged.
    #[must_use]
    pub fn una(&self) -> Seq {
        self.una
    }

    /// The number after the last number that was sent.
    #[must_use]
    pub fn next_seq(&self) -> Seq {
        self.nxt
    }

    /// The peer's window in bytes.
    #[must_use]
    pub fn window(&self) -> u32 {
        self.peer_window
    }

    /// The largest window that the peer announced, in bytes.
    #[must_use]
    pub fn max_window(&self) -> u32 {
        self.max_window
    }

    /// Whether SYN is acknowledged.
    #[must_use]
    pub fn is_syn_acked(&self) -> bool {
        self.syn_acked
    }

    /// Whether FIN was sent.
    #[must_use]
    pub fn is_fin_sent(&self) -> bool {
        self.fin && self.nxt > self.queue.end()
    }

    /// Whether FIN is acknowledged.
    #[must_use]
    pub fn is_fin_acked(&self) -> bool {
        self.fin && self.una > self.queue.end()
    }

    /// Whether nothing is unsent, and nothing is unacknowledged.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.una == self.nxt && self.syn_acked && self.unsent() == 0 && (!self.fin || self.is_fin_acked())
    }

    /// Whether something is to be sent, but must wait until the device is done with earlier
    /// transmissions. Call [`poll_transmit`](Self::poll_transmit) again then.
    #[must_use]
    pub fn waits_for_ring(&self) -> bool {
        self.waits
    }

    /// The number of the first transmission that was not complete when the ring was last checked.
    /// The first transmission has the number 1.
    #[cfg(feature = "record")]
    pub(in crate::tcp) fn settled(&self) -> u64 {
        self.ring.first()
    }

    /// The value of the timestamp option of a segment that is sent now: milliseconds.
    #[must_use]
    pub fn timestamp(&self, now: Time) -> u32 {
        self.stamp(now.micros())
    }

    fn stamp(&self, at: u64) -> u32 {
        ((at / 1000) as u32).wrapping_add(self.options.timestamp_offset)
    }

    /// The smoothed round-trip time, or 100 ms before it is known.
    #[must_use]
    pub fn round_trip(&self) -> Duration {
        if self.rtt.is_known() { Duration::from_micros(self.rtt.smoothed()) } else { Duration::from_millis(100) }
    }

    /// Frees the memory of lists that are empty. For a connection that is idle for a while.
    pub fn shrink(&mut self) {
        self.queue.shrink();
        self.board.shrink();
        self.ring.shrink();
        self.rack.shrink();
        self.scratch = Vec::new();
    }

    /// Ends the sender: drops all payload, and sends nothing more.
    pub fn clear(&mut self) {
        self.start_at(self.nxt);
        self.ring.forget();
        self.scratch = Vec::new();
        (self.timer, self.waiting, self.agreed, self.syn_acked) = (None, None, None, true);
        self.fin = false;
    }

    // To the peer

    /// Bytes of payload of a segment at this time.
    fn segment_size(&self) -> u32 {
        let size = self.path.size();
        // A segment has at most half of the peer's largest window. A peer whose window is smaller
        // than two segments opens it in steps of half of its buffer, not of whole segments (RFC
        // 9293, 3.8.6.2).
        let half = if self.max_window > 536 { self.max_window / 2 } else { self.max_window };
        if half > 0 && size > half { half.max(48).min(size) } else { size }
    }

    fn in_flight(&self) -> u32 {
        self.board.in_flight().saturating_sub(self.recovery.duplicates)
    }

    fn window_end(&self) -> Seq {
        self.una + self.peer_window
    }

    /// The number of segments that the congestion window admits now.
    fn quota(&self) -> u32 {
        self.window.cwnd.saturating_sub(self.in_flight())
    }

    /// Chooses the next transmission, if there is one: lost segments, new data, or a probe.
    /// `offload`: the bytes of payload that the device can cut into segments, or 0 if it cannot
    /// cut.
    ///
    /// The result is the same until [`handle_sent`](Self::handle_sent) is called for it. Call this until it
    /// returns `None`.
    pub fn poll_transmit(&mut self, now: Time, offload: usize) -> Option<Transmission> {
        let at = now.micros();
        let in_ring = self.ring.settle();
        self.waits = false;
        if !self.syn_acked {
            let syn = self.next_syn();
            self.waiting = self.waiting.or(syn.map(|_| at));
            return syn;
        }
        self.agreed?;
        if in_ring > 0 && in_ring >= self.options.ring_bytes {
            self.waits = true;
            return None;
        }
        let next = self.choose(at, offload);
        self.clocks.note(at, self.is_busy(), next.is_none() && self.is_blocked_by_peer());
        match next {
            None => self.arm_persist(at),
            // The user timeout also runs while the device's ring is full.
            Some(_) => self.waiting = self.waiting.or(Some(at)),
        }
        next
    }

    fn choose(&mut self, at: u64, offload: usize) -> Option<Transmission> {
        if self.recovery.prefers_new() {
            let new = self.next_new(at, offload);
            if new.is_some() || self.nxt > self.recovery.high() {
                return new;
            }
            self.recovery.no_new_data();
        }
        if let Some(lost) = self.next_lost() {
            return Some(lost);
        }
        match self.probe {
            Some(Probe::Tail) => self.next_tail_probe(at),
            Some(Probe::Window) => self.next_new(at, offload).or_else(|| self.next_window_probe()),
            None => self.next_mtu_probe(at).or_else(|| self.next_new(at, offload)),
        }
    }

    fn is_busy(&self) -> bool {
        !self.board.is_empty() || self.unsent() > 0
    }

    fn is_blocked_by_peer(&self) -> bool {
        let unsent = self.unsent() as u32;
        unsent > 0 && self.quota() > 0 && self.window_end().distance(self.nxt) < unsent.min(self.segment_size()) as i32
    }

    fn transmission(&self, seq: Seq, len: u32, kind: Kind) -> Transmission {
        Transmission {
            seq,
            len,
            syn: false,
            fin: false,
            push: false,
            cwr: false,
            ect: false,
            segment_size: self.segment_size(),
            kind,
        }
    }

    fn next_syn(&mut self) -> Option<Transmission> {
        let kind = match self.board.front() {
            None => Kind::New,
            Some(syn) if !syn.lost || syn.again => return None,
            Some(syn) if !self.ring.is_done(syn.id) => {
                self.waits = true;
                return None;
            }
            Some(_) => Kind::Again,
        };
        Some(Transmission { syn: true, ..self.transmission(self.iss, 0, kind) })
    }

    /// Sends `len` bytes of `range` again, and also FIN behind them if the range has one.
    fn again(&mut self, range: &Range, len: u32, kind: Kind) -> Option<Transmission> {
        if !self.ring.is_done(range.id) {
            self.waits = true;
            return None;
        }
        let payload = range.len() - u32::from(range.end > self.queue.end());
        let len = if payload > 0 { self.queue.fit(range.start, len.min(payload)) } else { 0 };
        let fin = len == payload && payload < range.len();
        let push = len > 0 && self.queue.is_pushed_at(range.start + len);
        Some(Transmission { fin, push, ..self.transmission(range.start, len, kind) })
    }

    fn next_lost(&mut self) -> Option<Transmission> {
        let n = self.board.next_lost()?;
        let range = self.board.get(n).copied()?;
        if self.quota() == 0 {
            return None;
        }
        let mut len = self.segment_size();
        if range.start != self.una {
            let room = self.window_end().distance(range.start);
            len = len.min(u32::try_from(room).ok().filter(|room| *room > 0)?);
        }
        self.again(&range, len, Kind::Again)
    }

    fn next_tail_probe(&mut self, at: u64) -> Option<Transmission> {
        // New data is more useful than a repetition, and may exceed the congestion window.
        let size = self.segment_size();
        let unsent = self.unsent() as u32;
        let room = self.window_end().distance(self.nxt);
        let fin = self.fin && !self.is_fin_sent();
        if (unsent > 0 || fin) && i64::from(room) >= i64::from(unsent.min(size).max(1)) {
            let len = if unsent > 0 { self.queue.fit(self.nxt, unsent.min(size)) } else { 0 };
            return Some(self.new_data(len, size, Kind::TailProbe));
        }
        let probe = self.board.last().copied().and_then(|range| {
            let skip = (range.len() - 1) / range.size * range.size;
            let last = Range { start: range.start + skip, ..range };
            self.again(&last, size, Kind::TailProbe)
        });
        if probe.is_none() && !self.waits {
            self.probe = None;
            self.arm_retransmission(at);
        }
        probe
    }

    fn next_window_probe(&mut self) -> Option<Transmission> {
        if !self.board.is_empty() || (self.unsent() == 0 && (!self.fin || self.is_fin_sent())) {
            self.probe = None;
            return None;
        }
        Some(self.transmission(self.una - 1, 0, Kind::WindowProbe))
    }

    /// Chooses new data that the congestion window, the peer's window and Nagle's algorithm admit.
    fn next_new(&mut self, at: u64, offload: usize) -> Option<Transmission> {
        let unsent = self.unsent() as u32;
        let fin = self.fin && !self.is_fin_sent();
        if unsent == 0 && !fin {
            return None;
        }
        let size = self.segment_size();
        let room = u32::try_from(self.window_end().distance(self.nxt)).unwrap_or(0);
        // A part of a segment is sent only if the peer's window stays small for long.
        let released = self.probe == Some(Probe::Window);
        if room == 0 || (room < unsent.min(size) && !released) {
            return None;
        }
        self.restart_after_idle(at);
        // A FIN without payload does not wait for the congestion window.
        let quota = if unsent == 0 { self.quota().max(1) } else { self.quota() };
        if quota == 0 {
            self.usage.note(true, self.board.out(), self.una, self.nxt);
            return None;
        }
        // At most half of the window is sent at once, so that acknowledgements of the first half
        // clock the second half.
        let segments = quota.min((self.window.cwnd / 2).max(1)).min((offload as u32 / size).max(1));
        let most = size.saturating_mul(segments);
        let mut len = unsent.min(most).min(room);
        if len < unsent {
            len = if len > size { len / size * size } else { len };
        } else if !fin && !released && !self.may_send_small(self.nxt + unsent, unsent % size) {
            len -= unsent % size;
        }
        if len == 0 && unsent > 0 {
            return None;
        }
        if len > 0 {
            let fit = self.queue.fit(self.nxt, len);
            len = if fit < len && fit >= size { fit / size * size } else { fit };
        }
        Some(self.new_data(len, size, Kind::New))
    }

    /// Whether a small segment of `small` bytes that ends at `end` may be sent now: Nagle's
    /// algorithm in Minshall's variant, and cork.
    fn may_send_small(&self, end: Seq, small: u32) -> bool {
        let held = self.cork || self.more || (!self.options.nodelay && self.small > self.una);
        small == 0 || !held || end <= self.release
    }

    fn new_data(&mut self, len: u32, size: u32, kind: Kind) -> Transmission {
        let all = len as usize == self.unsent();
        let room = i64::from(self.window_end().distance(self.nxt));
        let fin = self.fin && all && i64::from(len) < room.max(1);
        // PSH is set at the end of a write. On a large transmission it lets the receiver deliver
        // without waiting for more.
        let push =
            len > size || (len > 0 && (self.queue.is_pushed_at(self.nxt + len) || self.probe == Some(Probe::Window)));
        let ecn = len > 0 && self.uses_ecn();
        let cwr = ecn && self.cwr;
        Transmission { fin, push, ect: ecn, cwr, segment_size: size, ..self.transmission(self.nxt, len, kind) }
    }

    /// Shrinks the window after an idle time, because the path may have changed (RFC 5681, 4.1).
    fn restart_after_idle(&mut self, at: u64) {
        let idle = at.saturating_sub(self.last_sent);
        if !self.board.is_empty() || idle == 0 {
            return;
        }
        self.controller.control().idle(idle);
        if self.options.restart_idle && idle > self.rtt.timeout(0) {
            self.window.ssthresh = self.window.ssthresh.max(self.window.cwnd / 4 * 3);
            self.window.cwnd = self.window.cwnd.min(self.initial_window());
        }
        self.last_sent = at;
    }

    /// The payload of a transmission, by reference. It is valid until the next call.
    pub fn payload(&mut self, transmission: &Transmission) -> &[C::Sent] {
        self.scratch.clear();
        if transmission.len > 0 {
            self.queue.copy(transmission.seq, transmission.len, &mut self.scratch);
        }
        &self.scratch
    }

    /// Notes that the transmission that [`poll_transmit`](Self::poll_transmit) returned was given to the device.
    pub fn handle_sent(&mut self, transmission: &Transmission, ticket: C::Ticket, now: Time) {
        let at = now.micros();
        self.scratch.clear();
        let Transmission { seq, len, syn, fin, segment_size: size, kind, .. } = *transmission;
        if kind == Kind::WindowProbe {
            self.probe = None;
            self.window_probe_sent(at);
            return;
        }
        let id = self.ring.push(ticket, len as usize);
        let end = seq + len + u32::from(syn) + u32::from(fin);
        let (was_empty, is_new) = (self.board.is_empty(), seq == self.nxt);
        self.rack.sent(seq, end, at);
        if transmission.cwr {
            self.cwr = false;
        }
        if is_new {
            let range = Range::new(seq, end, size, at, id);
            self.recovery.prr.sent(range.segments());
            self.board.push(range);
            self.nxt = end;
            if len % size != 0 {
                self.small = seq + len;
            }
            let limited = self.quota() == 0;
            self.usage.note(limited, self.board.out(), self.una, self.nxt);
        } else {
            self.sent_again(seq, end, size, at, id);
        }
        self.last_sent = at;
        match kind {
            Kind::TailProbe => self.tail_probe_sent(!is_new, at),
            Kind::Again if seq == self.una => self.arm_retransmission(at),
            Kind::Again => {}
            Kind::New | Kind::MtuProbe | Kind::WindowProbe => {
                self.probe = None;
                if kind == Kind::MtuProbe {
                    self.path.probe_sent(seq, end);
                }
                let pending = self.timer.map(|timer| timer.purpose);
                if was_empty || matches!(pending, None | Some(Purpose::TailProbe | Purpose::Persist)) {
                    self.arm_retransmission(at);
                }
                self.arm_tail_probe(at);
            }
        }
    }

    fn sent_again(&mut self, seq: Seq, end: Seq, size: u32, at: u64, id: ring::Id) {
        self.board.split(seq);
        self.board.split(end);
        let n = self.board.find(seq);
        let mut segments = 0;
        self.board.change(n, |range| {
            (range.sent, range.id, range.size) = (at, id, size);
            (range.resent, range.again) = (true, true);
            segments = range.segments();
        });
        self.recovery.sent_again(segments, self.stamp(at));
        self.recovery.prr.sent(segments);
    }
}
