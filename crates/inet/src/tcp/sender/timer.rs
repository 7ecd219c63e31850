//! The sender's single timer, and the actions when it expires.
//!
//! Why one timer: a tail loss probe and the reordering timer expire before the retransmission
//! timeout (RFC 8985, section 7.2), and persist runs only while nothing is in flight. The one that
//! expires first arms the next.

use std::time::Duration;

use super::core::{Probe, Purpose, Sender, Timer};
use super::{RecoveryState, TimedOut};
use crate::tcp::Carrier;
use crate::time::Time;

/// How long the peer may delay an acknowledgement, in microseconds (RFC 8985, 7.2).
const DELAYED_ACK: u64 = 200_000;
/// A tail loss probe is sent after twice the round-trip time and this slack, in microseconds, so
/// that acknowledgements on the way can arrive.
const SLACK: u64 = 2_000;

impl<C: Carrier> Sender<C> {
    /// The time at which [`handle_timeout`](Self::handle_timeout) is to be called, if nothing else
    /// happens before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let timer = self.timer.map_or(u64::MAX, |timer| timer.at);
        let rare = self.user_deadline().unwrap_or(u64::MAX).min(self.pacing.deadline().unwrap_or(u64::MAX));
        Some(Time::from_micros(timer.min(rare))).filter(|at| *at < Time::NEVER)
    }

    fn user_deadline(&self) -> Option<u64> {
        let timeout = self.options.user_timeout?;
        self.waiting_since.map(|since| since.saturating_add(u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX)))
    }

    /// Acts on the timer, if it is due. [`poll_transmit`](Self::poll_transmit) then returns what is
    /// to be sent.
    ///
    /// # Errors
    /// The peer did not answer as many transmissions, or for as long, as the options allow.
    pub fn handle_timeout(&mut self, now: Time) -> Result<(), TimedOut> {
        let at = now.micros();
        if self.pacing.deadline().is_some_and(|deadline| deadline <= at) {
            self.pacing.clear();
        }
        let silence = self.waiting_since.map_or(0, |since| at.saturating_sub(since));
        if self.user_deadline().is_some_and(|deadline| deadline <= at) {
            return Err(TimedOut(Duration::from_micros(silence)));
        }
        let Some(timer) = self.timer.filter(|timer| timer.at <= at) else { return Ok(()) };
        self.timer = None;
        let alive = match timer.purpose {
            Purpose::Reordering => {
                self.reordering_expired(at);
                true
            }
            Purpose::TailProbe => {
                self.probe = Some(Probe::Tail);
                true
            }
            Purpose::Persist => {
                self.probe = Some(Probe::Window);
                self.unanswered_probes <= self.options.retries
            }
            Purpose::Retransmission => self.retransmission_expired(at),
        };
        if alive { Ok(()) } else { Err(TimedOut(Duration::from_micros(silence))) }
    }

    fn retransmission_expired(&mut self, at: u64) -> bool {
        if self.scoreboard.is_empty() {
            return true;
        }
        if self.retries - self.answered_timeouts >= self.most_retries() {
            return false;
        }
        self.probe = None;
        if self.syn_acked {
            self.enter_loss(at);
            self.path.timed_out(self.retries + 1, at);
        } else {
            self.scoreboard.mark_lost(0);
        }
        self.retries += 1;
        self.arm(Purpose::Retransmission, at.saturating_add(self.rtt.timeout(self.retries)));
        true
    }

    /// The retransmission timeout after `expired` expirations in a row.
    pub(in crate::tcp) fn backoff(&self, expired: u32) -> Duration {
        Duration::from_micros(self.rtt.timeout(expired))
    }

    /// After how many retransmissions without an answer the connection ends: R2 of RFC 9293,
    /// section 3.8.3.
    pub(in crate::tcp) fn most_retries(&self) -> u32 {
        if self.syn_acked { self.options.retries } else { self.options.syn_retries }
    }

    pub(super) fn arm(&mut self, purpose: Purpose, at: u64) {
        self.timer = Some(Timer { purpose, at });
    }

    /// Starts the retransmission timer at `at`.
    pub(super) fn arm_retransmission(&mut self, at: u64) {
        self.timer = None;
        if !self.scoreboard.is_empty() {
            self.arm(Purpose::Retransmission, at.saturating_add(self.rtt.timeout(self.retries)));
        }
    }

    /// The end of the retransmission timer, counted from the last transmission of the first
    /// unacknowledged range. It is used if another timer ran instead of this one.
    fn retransmission_deadline(&self, at: u64) -> u64 {
        let sent = self.scoreboard.front().map_or(at, |range| range.sent);
        sent.saturating_add(self.rtt.timeout(self.retries)).max(at + 1)
    }

    /// Starts the retransmission timer as if it had run all the time.
    pub(super) fn arm_for_the_oldest(&mut self, at: u64) {
        self.timer = None;
        if !self.scoreboard.is_empty() {
            self.arm(Purpose::Retransmission, self.retransmission_deadline(at));
        }
    }

    /// Starts the timer for a tail loss probe before the retransmission timer, if a probe is
    /// allowed.
    pub(super) fn arm_tail_probe(&mut self, at: u64) {
        let state = self.recovery.state();
        let allowed = self.options.tail_probes && self.syn_acked && self.agreed.is_some_and(|agreed| agreed.sack);
        if !allowed
            || self.scoreboard.is_empty()
            || self.recovery.tail_probe.is_some()
            || !matches!(state, RecoveryState::Open | RecoveryState::Cwr)
        {
            return;
        }
        let Some(Timer { purpose: Purpose::Retransmission | Purpose::TailProbe, .. }) = self.timer else { return };
        let delay = if self.scoreboard.unacked() == 1 { DELAYED_ACK } else { SLACK };
        let wait = if self.rtt.is_known() { 2 * self.rtt.smoothed() + delay } else { 1_000_000 };
        let at = at.saturating_add(wait).min(self.retransmission_deadline(at));
        self.arm(Purpose::TailProbe, at);
    }

    /// Restarts the timers after progress.
    pub(super) fn rearm(&mut self, at: u64) {
        self.arm_retransmission(at);
        self.arm_tail_probe(at);
    }

    /// Notes that the tail loss probe was sent. `again`: it repeats a segment.
    pub(super) fn tail_probe_sent(&mut self, again: bool, at: u64) {
        self.probe = None;
        self.recovery.tail_probe = Some((self.nxt, again));
        self.arm_retransmission(at);
    }

    /// Starts the timer for window probes if nothing may be sent, and nothing is in flight whose
    /// acknowledgement could open the window.
    pub(super) fn arm_persist(&mut self, at: u64) {
        let wants = self.unsent() > 0 || (self.fin && !self.is_fin_sent());
        if !wants || !self.scoreboard.is_empty() || self.timer.is_some() || self.probe.is_some() || self.waits_for_ring
        {
            return;
        }
        self.waiting_since = self.waiting_since.or(Some(at));
        self.arm(Purpose::Persist, at.saturating_add(self.rtt.timeout(self.window_probes)));
    }

    pub(super) fn window_probe_sent(&mut self, at: u64) {
        (self.unanswered_probes, self.window_probes) =
            (self.unanswered_probes + 1, self.window_probes.saturating_add(1));
        self.arm(Purpose::Persist, at.saturating_add(self.rtt.timeout(self.window_probes)));
    }

    /// Handles that the peer's window changed while nothing was in flight.
    pub(super) fn window_opened(&mut self, at: u64) {
        if self.timer.is_some_and(|timer| timer.purpose == Purpose::Persist) && self.window_end() > self.nxt {
            (self.timer, self.window_probes) = (None, 0);
            self.waiting_since = self.waiting_since.map(|_| at);
        }
    }
}
