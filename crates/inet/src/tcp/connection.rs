//! The connection: its fields, how it begins, and the handshake.
//!
//! Why a value without clock and device: a simulation with a seed, a replay, packetdrill and a
//! production program then run the same code.
//!
//! The fields are shared by the files that have the rest of the `impl`. `user` has the user's
//! calls, `input` handles what arrives, `transmit` sends, `timers` acts when time has passed,
//! `close` ends the connection, `saved` moves it to another process, `idle` keeps it in little
//! memory.

use std::time::Duration;

use super::acks::Acks;
use super::budget::{Budget, LocalBudget};
use super::clock::PeerClock;
use super::cookie::CookieOptions;
use super::event::Events;
use super::limit::Limit;
use super::receiver::Receiver;
#[cfg(feature = "record")]
use super::recording::{Recording, Step};
use super::sender::{Negotiated, SendOptions, Sender};
use super::state::State;
use super::{Carrier, Config, Ecn, Error, Header, Seq, Start, Timestamps, Unreachable, window};
use crate::time::Time;

/// One end of a TCP connection, as a value: it does no input or output, reads no clock, and does
/// not know its addresses.
///
/// ```text
///   handle_segment, handle_delivery_error ─┐                ┌─► 1  poll_transmit: segments
///   handle_timeout, handle_device_gone    ─┼─► Connection ──┼─► 2  poll_event: events for the user
///   send, recv, shutdown, close, abort    ─┘                └─► 3  poll_timeout: the next time
/// ```
///
/// `handle_*` passes on what arrived, `poll_*` asks for what follows from it. After one or several
/// of the calls on the left, call those on the right in their order:
/// [`poll_transmit`](Self::poll_transmit) once, [`poll_event`](Self::poll_event) until it returns
/// `None`, then [`poll_timeout`](Self::poll_timeout). After [`is_gone`](Self::is_gone) returns
/// true, the connection sends nothing more and has no more events.
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
    pub(super) window_scaling: bool,
    pub(super) sack: bool,
    /// Whether both sides agreed on ECN: marks of the peer's data are echoed.
    pub(super) ecn: bool,
    /// Whether this side has sent a SYN without ECN. Its data must not be ECN-capable then, even if
    /// the peer agrees to the ECN of an earlier SYN (RFC 3168, section 6.1.1).
    pub(super) sent_plain_syn: bool,
    /// The peer's clock, if the connection uses timestamps.
    pub(super) peer_clock: Option<PeerClock>,
    /// The last number that was acknowledged to the peer.
    pub(super) last_acknowledged: Seq,
    /// Whether a CE mark was received, and the peer has not yet reported by CWR that it reduced its
    /// window.
    pub(super) ecn_echo: bool,
    pub(super) events: Events,
    pub(super) error: Option<Error>,
    /// An ICMP error that did not end the connection. If the connection times out, this is the
    /// reported reason.
    pub(super) soft_error: Option<Unreachable>,
    /// A segment without payload that is to be sent once: a reset, a repeated SYN-ACK, or a probe
    /// of an idle peer.
    pub(super) reply: Option<Header>,
    pub(super) challenge_limit: Limit,
    /// The time at which FIN-WAIT-2 or TIME-WAIT ends. In earlier states of a connection that the
    /// user has closed (an orphan), the time at which it is reset.
    pub(super) expires_at: Option<Time>,
    /// The number that the peer of an orphan must acknowledge before `expires_at` is extended, and
    /// the step to the next such number: an eighth of what was unacknowledged when the user closed.
    pub(super) orphan_progress: (Seq, u32),
    /// Whether the user has shut the sending side down.
    pub(super) send_shutdown: bool,
    /// Whether the user has shut the reading side down, but has not closed the connection.
    pub(super) recv_shutdown: bool,
    /// Whether the user has closed the connection, so that nothing is read any more.
    pub(super) closed: bool,
    /// The number after the last urgent byte that was received.
    pub(super) urgent: Option<Seq>,
    /// The number after the last urgent byte that was sent.
    pub(super) urgent_sent: Option<Seq>,
    /// Set while a closed window waits for buffers: the time of the next check, and the current
    /// interval between checks.
    pub(super) retry_at: Option<(Time, Duration)>,
    /// When the last acceptable segment was received.
    pub(super) last_received: Time,
    /// The number of unanswered probes of an idle peer, and when the last probe was sent.
    pub(super) keep_alive_probes: u8,
    pub(super) keep_alive_probed_at: Time,
    pub(super) last_data_received: Time,
    /// The largest payload of a received segment.
    pub(super) largest_segment: u32,
    /// Set while the output refuses segments.
    pub(super) stall: Option<Stall>,
    #[cfg(feature = "record")]
    pub(super) recording: Option<Box<Recording>>,
}

/// The timer of a connection whose segments the output refuses: its ring is full, or the next hop
/// is not resolved. Nothing has left, so that no other timer may be running.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stall {
    pub(super) at: Time,
    /// How often the timer has expired in a row.
    pub(super) expired: u32,
}

impl<C: Carrier> Connection<C> {
    /// Opens a connection: SYN is sent by the next [`poll_transmit`](Self::poll_transmit).
    ///
    /// Received payload is counted in a budget of [`Config::budget`] buffers. If there is a
    /// `queue`, that budget is a part of it.
    #[must_use]
    pub fn connect(config: &Config, start: Start, queue: Option<&Budget>, now: Time) -> Self {
        let this = Self::begin(State::SynSent, config, start, queue, now);
        #[cfg(feature = "record")]
        let this = this.recorded(start, None, now);
        this
    }

    fn begin(state: State, config: &Config, start: Start, queue: Option<&Budget>, now: Time) -> Self {
        let send = SendOptions { timestamp_offset: start.timestamp_offset, ..config.send };
        let sender = Sender::new(start.iss, u32::from(config.max_payload), send);
        Self::new(state, config, sender, queue, now)
    }

    /// A connection that answers `syn`: SYN-ACK is sent by the next
    /// [`poll_transmit`](Self::poll_transmit).
    pub(super) fn answer(syn: &Header, config: &Config, start: Start, queue: Option<&Budget>, now: Time) -> Self {
        let send = SendOptions { syn_retries: config.syn_ack_retries, ..config.send };
        let this = Self::begin(State::SynReceived, &Config { send, ..*config }, start, queue, now);
        #[cfg(feature = "record")]
        let this = this.recorded(start, Some(syn), now);
        let mut this = this;
        this.negotiate(syn, config.ecn != Ecn::Off && syn.flags.is_ecn_setup(), None, now);
        this
    }

    /// A connection whose SYN-ACK was a cookie. `ack` has acknowledged it. `syn` is what the cookie
    /// kept of the peer's SYN.
    pub(super) fn from_cookie(
        ack: &Header,
        syn: CookieOptions,
        config: &Config,
        start: Start,
        queue: Option<&Budget>,
        now: Time,
    ) -> Self {
        let send = SendOptions { timestamp_offset: start.timestamp_offset, ..config.send };
        let sender = Sender::established_at(start.iss, u32::from(config.max_payload), send, now);
        let mut this = Self::new(State::SynReceived, config, sender, queue, now);
        let promised = window::cookie_window(window::scale(config.receive_buffer).0);
        let options = syn.options;
        this.negotiate(&Header { seq: ack.seq - 1, options, ..*ack }, syn.ecn, Some(promised), now);
        this.establish(ack.seq, u32::from(ack.window) << this.peer_scale, now);
        this
    }

    pub(super) fn new(state: State, config: &Config, sender: Sender<C>, queue: Option<&Budget>, now: Time) -> Self {
        let budget = LocalBudget::within(config.budget, queue);
        Self {
            state,
            config: *config,
            sender,
            receiver: Receiver::new(config.receive_buffer, config.fixed_window, u32::from(config.mss), budget),
            acks: Acks::new(config.ack_every, config.ack_delay, config.quick_acks, now),
            irs: Seq(0),
            peer_mss: config.default_mss,
            peer_scale: 0,
            window_scaling: false,
            sack: false,
            ecn: false,
            sent_plain_syn: false,
            peer_clock: None,
            last_acknowledged: Seq(0),
            ecn_echo: false,
            events: Events::default(),
            error: None,
            soft_error: None,
            reply: None,
            challenge_limit: Limit::default(),
            expires_at: None,
            orphan_progress: (Seq(0), 1),
            send_shutdown: false,
            recv_shutdown: false,
            closed: false,
            urgent: None,
            urgent_sent: None,
            retry_at: None,
            last_received: now,
            keep_alive_probes: 0,
            keep_alive_probed_at: now,
            last_data_received: now,
            largest_segment: 0,
            stall: None,
            #[cfg(feature = "record")]
            recording: None,
        }
    }

    /// Negotiates: stores the options of the peer's SYN that both sides support. `promised` is the
    /// window of a SYN-ACK with a cookie.
    pub(super) fn negotiate(&mut self, syn: &Header, ecn: bool, promised: Option<u16>, now: Time) {
        let options = &syn.options;
        self.irs = syn.seq;
        self.peer_mss = options.mss.unwrap_or(self.config.default_mss);
        self.last_acknowledged = syn.seq + 1;
        self.window_scaling = self.config.window_scaling && options.window_scale.is_some();
        self.peer_scale = if self.window_scaling { options.window_scale.unwrap_or(0).min(14) } else { 0 };
        self.sack = self.config.sack && options.sack_permitted;
        self.ecn = ecn;
        self.peer_clock =
            options.timestamps.filter(|_| self.config.timestamps).map(|stamps| PeerClock::new(stamps, now));
        self.receiver.open(syn.seq, self.window_scaling, promised);
    }

    /// Completes the handshake. The segment `seq` announced `window`, in bytes.
    pub(super) fn establish(&mut self, seq: Seq, window: u32, now: Time) {
        let mss = self.peer_mss;
        let timestamps = self.peer_clock.is_some();
        let ecn = self.ecn && !self.sent_plain_syn;
        self.sender.establish(&Negotiated { mss, sack: self.sack, timestamps, ecn, window, seq }, now);
        self.state = if self.send_shutdown { State::FinWait1 } else { State::Established };
        self.last_data_received = now;
        self.events.add(Events::CONNECTED);
    }

    /// The timestamp option of a segment that is sent now.
    pub(super) fn timestamps(&self, syn: bool, now: Time) -> Option<Timestamps> {
        let value = self.sender.timestamp(now);
        match &self.peer_clock {
            Some(clock) => Some(Timestamps { value, echo: clock.recent() }),
            // The first SYN offers timestamps.
            None if syn && self.state == State::SynSent && self.config.timestamps => {
                Some(Timestamps { value, echo: 0 })
            }
            None => None,
        }
    }
}

#[cfg(feature = "record")]
impl<C: Carrier> Connection<C> {
    /// The recorded calls from the beginning on, if [`Config::record`] asks for them. Connections
    /// that were made from cookies or restored have no recording.
    #[must_use]
    pub fn recording(&self) -> Option<&Recording> {
        self.recording.as_deref()
    }

    /// The connection, with a recording if [`Config::record`] asks for one.
    fn recorded(mut self, start: Start, syn: Option<&Header>, now: Time) -> Self {
        if self.config.record > 0 {
            self.recording = Some(Box::new(Recording::new(&self.config, start, syn, now)));
        }
        self
    }

    /// Adds a call to the recording, if there is one.
    #[inline]
    pub(super) fn note(&mut self, step: impl FnOnce() -> Step) {
        if let Some(recording) = &mut self.recording {
            recording.add(step());
        }
    }
}

#[cfg(test)]
mod tests;
