//! The state of the sender, and the calls of its user.
//!
//! The fields are shared by the files that have the rest of the `impl`: `transmit` chooses, `ack`
//! and `recovery` handle acknowledgements, `timer` expires, `path` sizes segments, `save` restores.

use std::time::Duration;

use super::clocks::Clocks;
use super::options::{Negotiated, SendOptions};
use super::pacing::{Pacing, Rate};
use super::path_size::PathSize;
use super::posted::PostedTransmissions;
use super::queue::{MAX_CHUNK, Queue};
use super::rack::Rack;
use super::recovery_state::{Recovery, RecoveryState};
use super::rtt::Rtt;
use super::sacks::Sacks;
use super::scoreboard::Scoreboard;
use super::usage::Usage;
use crate::tcp::congestion::{Controller, HyStart, Window};
use crate::tcp::{Carrier, Chunk, Seq};
use crate::time::Time;

/// The most bytes of the queue, whatever the options say: numbers are compared modulo 2^32.
const MOST_QUEUED: usize = 1 << 30;

/// The result of the handshake.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Agreed {
    pub(super) sack: bool,
    pub(super) ecn: bool,
}

/// The kind of a probe that is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Probe {
    Tail,
    Window,
}

/// The purpose for which the timer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The peer did not acknowledge in time: segments in flight are marked as lost (RFC 6298).
    Retransmission,
    /// The end of the sent data is not acknowledged (RFC 8985, 7).
    TailProbe,
    /// A segment is missing for longer than reordering explains (RFC 8985, 6).
    Reordering,
    /// Nothing is in flight, and the peer's window or a cork holds the queued data back.
    Persist,
}

/// The timer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timer {
    pub(super) purpose: Purpose,
    pub(super) at: u64,
}

/// The sending half of a connection. See the [module](super).
#[derive(Debug)]
#[cfg_attr(feature = "compare", derive(Clone))]
pub struct Sender<C: Carrier> {
    pub(super) options: SendOptions,
    pub(super) agreed: Option<Agreed>,
    pub(super) iss: Seq,
    /// The first number that is not acknowledged.
    pub(super) una: Seq,
    /// The number after the last number that was sent.
    pub(super) nxt: Seq,
    pub(super) syn_acked: bool,
    /// Whether SYN was repeated. The first window is then one segment.
    pub(super) syn_lost: bool,
    pub(super) fin: bool,
    pub(super) queue: Queue<C::Sent>,
    pub(super) scoreboard: Scoreboard,
    pub(super) posted: PostedTransmissions<C::Ticket>,
    pub(super) scratch: Vec<C::Sent>,
    /// Whether something could be sent, but the ring still holds too much of this connection.
    pub(super) waits_for_ring: bool,

    /// The peer's window, the segment that announced it, and the largest window that was ever
    /// announced.
    pub(super) peer_window: u32,
    pub(super) window_seq: Seq,
    pub(super) window_ack: Seq,
    pub(super) max_window: u32,

    pub(super) path: PathSize,
    pub(super) rtt: Rtt,
    pub(super) rack: Rack,
    pub(super) recovery: Recovery,
    pub(super) sacks: Sacks,
    pub(super) controller: Controller,
    pub(super) window: Window,
    pub(super) hystart: HyStart,
    pub(super) pacing: Pacing,
    pub(super) usage: Usage,
    /// Whether CWR is due.
    pub(super) cwr: bool,

    pub(super) cork: bool,
    pub(super) more_announced: bool,
    /// Bytes before this number are sent even in small segments.
    pub(super) small_until: Seq,
    /// The end of the last small segment (Minshall's variant of Nagle's algorithm).
    pub(super) last_small_end: Seq,

    pub(super) timer: Option<Timer>,
    pub(super) probe: Option<Probe>,
    /// Timeouts in a row (`retries`), and how many of them a peer with a closed window has answered
    /// (`answered_timeouts`).
    pub(super) retries: u32,
    pub(super) answered_timeouts: u32,
    /// Unanswered window probes in a row (`unanswered_probes`), and all probes since the peer
    /// closed its window (`window_probes`). The interval grows with `window_probes`, even if the
    /// peer answers.
    pub(super) unanswered_probes: u32,
    pub(super) window_probes: u32,
    /// The time of the peer's last progress, while something waits for the peer.
    pub(super) waiting_since: Option<u64>,
    pub(super) last_sent: u64,
    pub(super) clocks: Clocks,
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
            scoreboard: Scoreboard::new(iss),
            posted: PostedTransmissions::new(),
            scratch: Vec::new(),
            waits_for_ring: false,
            peer_window: 0,
            window_seq: Seq::default(),
            window_ack: iss,
            max_window: 0,
            path: PathSize::new(max_payload, options.path_floor),
            rtt: Rtt::new(micros(options.rto_min), micros(options.rto_max)),
            rack: Rack::default(),
            recovery: Recovery::new(iss),
            sacks: Sacks::default(),
            controller: Controller::new(options.congestion),
            window: Window { cwnd: 1, ssthresh: Window::UNKNOWN },
            hystart: HyStart::new(iss),
            pacing: Pacing::default(),
            usage: Usage::new(iss),
            cwr: false,
            cork: false,
            more_announced: false,
            small_until: iss,
            last_small_end: iss,
            timer: None,
            probe: None,
            retries: 0,
            answered_timeouts: 0,
            unanswered_probes: 0,
            window_probes: 0,
            waiting_since: None,
            last_sent: 0,
            clocks: Clocks::default(),
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
    pub(super) fn start_at(&mut self, una: Seq) {
        (self.una, self.nxt, self.small_until, self.last_small_end, self.window_ack) = (una, una, una, una, una);
        (self.scoreboard, self.usage, self.queue) = (Scoreboard::new(una), Usage::new(una), Queue::new(una));
        (self.hystart, self.pacing) = (HyStart::new(una), Pacing::default());
    }

    /// Stores the result of the handshake, when the peer's SYN was received. Before this call, only
    /// SYN is sent.
    pub fn establish(&mut self, negotiated: &Negotiated, now: Time) {
        let Negotiated { mss, sack, timestamps, ecn, window, seq } = *negotiated;
        self.agreed = Some(Agreed { sack, ecn });
        self.path.set_peer(u32::from(mss), Negotiated::option_bytes(timestamps));
        (self.peer_window, self.window_seq, self.max_window) = (window, seq, self.max_window.max(window));
        self.window.cwnd = if self.syn_lost { 1 } else { self.initial_window() };
        self.last_sent = now.micros();
    }

    /// The initial window (RFC 6928), in segments. Large segments do not make it larger in bytes
    /// than it is with segments of Ethernet's size.
    pub(super) fn initial_window(&self) -> u32 {
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
        self.more_announced = more;
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
        self.options.send_buffer.min(MOST_QUEUED).saturating_sub(self.queue.len())
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
            self.small_until = self.queue.end();
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
        self.waits_for_ring
    }

    /// The number of the first transmission that was not complete when the ring was last checked.
    /// The first transmission has the number 1.
    #[cfg(feature = "record")]
    pub(in crate::tcp) fn settled(&self) -> u64 {
        self.posted.first()
    }

    /// The value of the timestamp option of a segment that is sent now: milliseconds.
    #[must_use]
    pub fn timestamp(&self, now: Time) -> u32 {
        self.stamp(now.micros())
    }

    pub(super) fn stamp(&self, at: u64) -> u32 {
        ((at / 1000) as u32).wrapping_add(self.options.timestamp_offset)
    }

    /// The smoothed round-trip time, or 100 ms before it is known.
    #[must_use]
    pub fn round_trip(&self) -> Duration {
        Duration::from_micros(self.round_trip_micros())
    }

    /// The same, in microseconds: a `Duration` is made by a division.
    #[inline]
    pub(in crate::tcp) fn round_trip_micros(&self) -> u64 {
        if self.rtt.is_known() { self.rtt.smoothed() } else { 100_000 }
    }

    /// Frees the memory of lists that are empty. For a connection that is idle for a while.
    pub fn shrink(&mut self) {
        self.queue.shrink();
        self.scoreboard.shrink();
        self.posted.shrink();
        self.rack.shrink();
        self.scratch = Vec::new();
    }

    /// Ends the sender: drops all payload, and sends nothing more.
    pub fn clear(&mut self) {
        let acknowledged = self.acknowledged();
        self.start_at(self.nxt);
        // What was acknowledged stays reported. Nothing else needs the first number any more.
        self.iss = self.una - 1 - acknowledged;
        self.posted.forget();
        self.scratch = Vec::new();
        (self.timer, self.waiting_since, self.agreed, self.syn_acked) = (None, None, None, true);
        self.fin = false;
    }

    // To the peer

    /// Bytes of payload of a segment at this time.
    pub(super) fn segment_size(&self) -> u32 {
        let size = self.path.size();
        // A segment has at most half of the peer's largest window. A peer whose window is smaller
        // than two segments opens it in steps of half of its buffer, not of whole segments (RFC
        // 9293, 3.8.6.2).
        let half = if self.max_window > 536 { self.max_window / 2 } else { self.max_window };
        if half > 0 && size > half { half.max(48).min(size) } else { size }
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.scoreboard.in_flight().saturating_sub(self.recovery.duplicates)
    }

    pub(super) fn window_end(&self) -> Seq {
        self.una + self.peer_window
    }

    /// The rate at which new data leaves, if it is paced. While something is missing, recovery
    /// decides when new data leaves.
    pub(super) fn pace(&self) -> Option<Rate> {
        if !self.options.pacing || self.recovery.state() != RecoveryState::Open {
            return None;
        }
        let least = self.rtt.min().unwrap_or(0);
        Rate::of(&self.window, self.scoreboard.unacked(), self.rtt.smoothed(), least)
    }

    /// The number of segments that the congestion window admits now.
    pub(super) fn quota(&self) -> u32 {
        self.window.cwnd.saturating_sub(self.in_flight())
    }
}
