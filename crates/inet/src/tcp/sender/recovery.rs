//! Loss recovery: the states between the first sign of a loss and its repair, and how a wrong
//! reduction is undone.
//!
//! ```text
//!          SACK, duplicate            RACK or 3 duplicates
//!   Open ───────────────────► Disorder ────────────────────► Recovery ──┐
//!    │ ▲                        │                               │       │ all that was in flight
//!    │ └────────────────────────┴── nothing is missing ◄────────┼───────┤ is acknowledged
//!    │ congestion mark                                          ▼       │
//!    └──────────────────────► Cwr ── (as Recovery, no loss)   Loss ─────┘
//!                                    the retransmission timer expired: slow start
//! ```
//!
//! A recovery is *undone* if it becomes known that nothing was lost. There are three signs. The
//! peer echoes a timestamp from before the retransmission (Eifel, RFC 3522 and 4015). It reports
//! each retransmission as a duplicate (D-SACK, RFC 3708). Or, after a timeout, it acknowledges
//! segments that were not sent again (F-RTO, RFC 5682).

use super::Ack;
use super::ack::AckOutcome;
use super::core::{Purpose, Sender};
use super::prr::{Delivery, Prr};
use super::rack::{DUPLICATES, ReorderingInputs};
use super::recovery_state::{NOTHING, RecoveryState, Undo};
use crate::tcp::Carrier;
use crate::tcp::congestion::{Sample, Window};

impl<C: Carrier> Sender<C> {
    fn has_sack(&self) -> bool {
        self.agreed.is_some_and(|agreed| agreed.sack)
    }

    /// The time that RACK waits for a segment.
    pub(super) fn reordering_window(&self) -> u64 {
        let sure =
            self.recovery.state >= RecoveryState::Recovery || self.scoreboard.sacked() >= self.recovery.reordering;
        self.rack.window(&ReorderingInputs {
            min_rtt: self.rtt.min().unwrap_or(0),
            smoothed: self.rtt.smoothed(),
            reordered: self.recovery.reordered > 0,
            sure,
        })
    }

    /// Processes an acknowledgement that is not only of new data in order.
    pub(super) fn recover(&mut self, ack: &Ack<'_>, outcome: &mut AckOutcome, at: u64) {
        let early = self.recovery.is_early(ack.echo);
        if ack.ece
            && let Some(undo) = &mut self.recovery.undo
        {
            undo.before = NOTHING; // The path is congested, even if nothing was lost.
        }
        if self.recovery.state != RecoveryState::Open
            && self.una >= self.recovery.recovery_point
            && self.is_repaired(outcome, early, ack)
        {
            return;
        }
        match self.recovery.state {
            RecoveryState::Recovery => {
                if outcome.advanced && early && self.recovery.undo.is_some() {
                    // The original of a segment in a hole has arrived. The originals of the others
                    // will arrive, too.
                    if self.scoreboard.retransmitted() == 0 {
                        self.undo();
                        self.settle_state();
                    }
                    return;
                }
                self.count_duplicate(outcome);
                if self.recovery.all_were_duplicates() && !ack.ece {
                    self.undo();
                    self.settle_state();
                }
                self.find_losses(outcome, at);
                return;
            }
            RecoveryState::Loss => {
                self.recover_from_timeout(outcome, early, at);
                return;
            }
            RecoveryState::Open | RecoveryState::Disorder | RecoveryState::Cwr => {}
        }
        self.count_duplicate(outcome);
        if self.recovery.state <= RecoveryState::Disorder && self.recovery.all_were_duplicates() {
            self.undo();
        }
        self.find_losses(outcome, at);
        if self.scoreboard.lost() <= self.scoreboard.retransmitted() {
            if ack.ece {
                self.enter_cwr();
            }
            if self.recovery.state != RecoveryState::Cwr {
                self.settle_state();
            }
        } else if self
            .path
            .probe()
            .is_some_and(|start| self.scoreboard.front().is_some_and(|range| range.start == start && range.lost))
        {
            // The lost segment is the MTU probe: it was too large for the path, and there is no
            // congestion.
            self.path.failed(at);
            self.repeat_at_full_window();
        } else {
            self.enter_recovery(ack.ece);
        }
    }

    /// Handles that everything in flight at the beginning of the state is acknowledged. Returns
    /// whether nothing more is to be done.
    fn is_repaired(&mut self, outcome: &AckOutcome, early: bool, ack: &Ack<'_>) -> bool {
        match self.recovery.state {
            // The peer may repeat the mark until it receives CWR, which is in the segment at
            // `high`.
            RecoveryState::Cwr if self.una > self.recovery.recovery_point => self.end_reduction(),
            RecoveryState::Recovery => {
                self.recovery.duplicates = 0;
                if early || self.recovery.all_were_duplicates() {
                    self.undo();
                } else if !self.has_sack() && self.una == self.recovery.recovery_point {
                    // Duplicates of retransmitted segments must not begin another recovery (RFC
                    // 6582, 3.2).
                    self.forget_first_retransmission();
                    return !ack.ece && !outcome.sacked;
                }
                self.end_reduction();
            }
            RecoveryState::Disorder => self.recovery.state = RecoveryState::Open,
            RecoveryState::Open | RecoveryState::Cwr | RecoveryState::Loss => {}
        }
        false
    }

    fn end_reduction(&mut self) {
        if self.recovery.undo.is_some() || self.recovery.state == RecoveryState::Cwr {
            self.window.cwnd = self.window.ssthresh;
        }
        if self.recovery.state == RecoveryState::Recovery {
            self.rack.recovered();
        }
        self.recovery.undo = None;
        self.forget_first_retransmission();
        self.recovery.state = RecoveryState::Open;
        self.settle_state();
    }

    fn forget_first_retransmission(&mut self) {
        if self.scoreboard.retransmitted() == 0 {
            self.recovery.first_retransmission = None;
        }
    }

    /// Returns to Open, or to Disorder if a segment may be missing.
    fn settle_state(&mut self) {
        let missing = self.scoreboard.sacked()
            + self.scoreboard.lost()
            + self.scoreboard.retransmitted()
            + self.recovery.duplicates
            > 0;
        let state = if missing { RecoveryState::Disorder } else { RecoveryState::Open };
        if state != self.recovery.state {
            (self.recovery.state, self.recovery.recovery_point) = (state, self.nxt);
        }
        self.forget_first_retransmission();
    }

    /// Without selective acknowledgements, each duplicate acknowledgement indicates one segment
    /// that the peer has received.
    fn count_duplicate(&mut self, outcome: &mut AckOutcome) {
        if self.has_sack() {
            return;
        }
        if outcome.advanced {
            // One acknowledged segment filled the hole. The others were already counted by
            // duplicate acknowledgements.
            let filled = outcome.delivered;
            let known = self.recovery.duplicates.min(filled.saturating_sub(1));
            self.recovery.duplicates -= known;
            outcome.delivered -= known;
        } else if outcome.duplicate && self.recovery.duplicates + 1 < self.scoreboard.unacked() {
            self.recovery.duplicates += 1;
            outcome.delivered += 1;
        }
    }

    fn find_losses(&mut self, outcome: &mut AckOutcome, at: u64) {
        if self.has_sack() {
            let window = self.reordering_window();
            outcome.due = self.rack.detect(&mut self.scoreboard, window, at);
            return;
        }
        let three = self.recovery.state < RecoveryState::Recovery && self.recovery.duplicates >= DUPLICATES;
        let partial = self.recovery.state == RecoveryState::Recovery && outcome.advanced;
        if (three || partial) && !self.scoreboard.is_empty() {
            // The first segment is missing. Nothing is known about the others.
            let size = self.scoreboard.front().map_or(1, |range| range.size);
            self.scoreboard.split(self.una + size);
            self.scoreboard.mark_lost(0);
        }
    }

    /// Handles the expiry of the reordering timer.
    pub(super) fn reordering_expired(&mut self, at: u64) {
        let flight = self.in_flight();
        let window = self.reordering_window();
        let due = self.rack.detect(&mut self.scoreboard, window, at);
        if self.scoreboard.lost() > self.scoreboard.retransmitted() && self.recovery.state < RecoveryState::Recovery {
            self.enter_recovery(false);
        }
        if self.recovery.shrinks() && self.in_flight() < flight {
            // The timer replaces the acknowledgement for which it waited.
            let in_flight = self.in_flight();
            let delivery = Delivery { delivered: 1, in_flight, good: false };
            if let Some(cwnd) = self.recovery.prr.window(delivery, self.window.ssthresh) {
                self.window.cwnd = cwnd;
            }
        }
        match due {
            Some(due) => self.arm(Purpose::Reordering, due),
            None => self.arm_for_the_oldest(at),
        }
    }

    fn remember(&mut self) {
        let open = (self.scoreboard.retransmitted() > 0).then(|| self.scoreboard.retransmitted());
        let probe = self.recovery.tail_probe.filter(|(_, again)| *again).map(|_| 1);
        let open = open.or(probe);
        self.recovery.undo = Some(Undo { from: self.una, before: self.window, open });
    }

    fn reduce(&mut self) {
        self.recovery.recovery_point = self.nxt;
        self.recovery.tail_probe = None;
        self.recovery.prr = Prr::begin(self.window.cwnd);
        self.window.ssthresh = self.controller.control().reduced(&self.window);
        self.cwr = true;
    }

    /// Begins a reduction because of a congestion mark, or because a tail loss probe repaired a
    /// loss. The window shrinks at most once in a round trip.
    pub(super) fn enter_cwr(&mut self) {
        if self.recovery.state < RecoveryState::Cwr {
            self.recovery.undo = None;
            self.reduce();
            self.recovery.state = RecoveryState::Cwr;
        }
    }

    fn enter_recovery(&mut self, marked: bool) {
        let shrinks = self.recovery.shrinks();
        self.remember();
        if marked && let Some(undo) = &mut self.recovery.undo {
            undo.before = NOTHING;
        }
        if shrinks {
            self.recovery.recovery_point = self.nxt;
        } else {
            self.reduce();
        }
        self.recovery.state = RecoveryState::Recovery;
    }

    /// Sends segments that were too large again, in smaller segments. This is no sign of
    /// congestion.
    pub(super) fn repeat_at_full_window(&mut self) {
        self.recovery.duplicates = 0;
        if self.recovery.state != RecoveryState::Loss {
            (self.recovery.recovery_point, self.recovery.undo) = (self.nxt, None);
            self.window.ssthresh = self.window.ssthresh.min(self.window.cwnd.max(2));
            self.recovery.state = RecoveryState::Loss;
            self.recovery.frto = false;
        }
    }

    /// Handles the expiry of the retransmission timer (RFC 5681, 3.1; RFC 8985, 6.3).
    pub(super) fn enter_loss(&mut self, at: u64) {
        let renege = self.scoreboard.front().is_some_and(|range| range.sacked);
        let state = self.recovery.state;
        let new_loss = state <= RecoveryState::Disorder
            || self.una >= self.recovery.recovery_point
            || (state == RecoveryState::Loss && self.retries == 0);
        if renege {
            self.scoreboard.forget_sacks();
            self.sacks.forget();
        }
        self.recovery.duplicates = 0;
        let (window, una, has_sack) = (self.reordering_window(), self.una, self.has_sack());
        let rack = &self.rack;
        self.scoreboard
            .mark_lost_if(|range| range.start == una || renege || !has_sack || rack.is_overdue(range, window, at));
        if new_loss {
            self.remember();
            self.window.ssthresh = self.controller.control().timed_out(&self.window);
        }
        self.window.cwnd = self.in_flight() + 1;
        self.recovery.tail_probe = None;
        self.recovery.state = RecoveryState::Loss;
        self.recovery.recovery_point = self.nxt;
        self.recovery.frto =
            self.has_sack() && (state < RecoveryState::Recovery || self.retries > 0) && self.path.probe().is_none();
        self.recovery.new_only = false;
        self.cwr = true;
    }

    fn recover_from_timeout(&mut self, outcome: &mut AckOutcome, early: bool, at: u64) {
        let recovered = self.una >= self.recovery.recovery_point;
        if (outcome.advanced || outcome.dsack)
            && self.recovery.undo.is_some()
            && (early || self.recovery.all_were_duplicates())
        {
            self.undo();
            self.recovery.state = RecoveryState::Open;
            self.settle_state();
            return;
        }
        if self.recovery.frto {
            if outcome.original && self.recovery.undo.is_some() {
                self.undo();
                self.recovery.state = RecoveryState::Open;
                self.settle_state();
                return;
            }
            if self.nxt > self.recovery.recovery_point {
                if outcome.sacked || outcome.duplicate {
                    self.recovery.frto = false; // The loss was real.
                }
            } else if outcome.advanced && !recovered {
                let room = self.window_end() > self.nxt;
                if self.unsent() > 0 && room {
                    self.recovery.recovery_point = self.nxt;
                    self.recovery.new_only = true;
                    return;
                }
                self.recovery.frto = false;
            }
        }
        if recovered {
            self.recovery.duplicates = 0;
            self.recovery.undo = None;
            self.recovery.state = RecoveryState::Open;
            self.settle_state();
            return;
        }
        self.count_duplicate(outcome);
        self.find_losses(outcome, at);
    }

    /// Undoes the last reduction.
    fn undo(&mut self) {
        self.scoreboard.forget_losses();
        if let Some(undo) = self.recovery.undo.take() {
            self.window.cwnd = self.window.cwnd.max(undo.before.cwnd);
            self.window.ssthresh = self.window.ssthresh.max(undo.before.ssthresh);
            self.controller.control().undone();
            self.cwr = false;
        }
        (self.retries, self.answered_timeouts) = (0, 0);
        self.recovery.new_only = false;
    }

    /// Adapts the window after an acknowledgement.
    pub(super) fn adapt_window(&mut self, outcome: &AckOutcome, at: u64) {
        if self.recovery.shrinks() {
            let good = outcome.advanced
                && self.scoreboard.lost() <= outcome.lost
                && self.recovery.state == RecoveryState::Recovery;
            let delivery = Delivery { delivered: outcome.delivered, in_flight: self.in_flight(), good };
            if let Some(cwnd) = self.recovery.prr.window(delivery, self.window.ssthresh) {
                self.window.cwnd = cwnd;
            }
            return;
        }
        let is_first_slow_start = self.window.ssthresh == Window::UNKNOWN;
        if is_first_slow_start && outcome.advanced && self.hystart.measured(outcome.rtt, self.una, self.nxt) {
            self.window.ssthresh = self.window.cwnd;
        }
        let forward = outcome.advanced || (outcome.sacked && self.recovery.reordering > DUPLICATES);
        if forward && outcome.delivered > 0 && self.usage.may_grow(&self.window) {
            let growth = if is_first_slow_start { self.hystart.growth(outcome.delivered) } else { outcome.delivered };
            let sample = Sample { acked: growth, now: at, rtt: self.rtt.smoothed() };
            self.controller.control().acked(&mut self.window, &sample);
        }
    }

    /// Handles an acknowledgement of a tail loss probe, or of data behind it (RFC 8985, 7.4).
    pub(super) fn classify_tail_probe(&mut self, ack: &Ack<'_>, outcome: &AckOutcome) {
        let Some((high, again)) = self.recovery.tail_probe else { return };
        if ack.ack < high {
            return;
        }
        if !again || outcome.dsack || (ack.ack == high && outcome.duplicate && !outcome.sacked && self.has_sack()) {
            self.recovery.tail_probe = None; // New data was the probe, or the peer had both copies.
        } else if ack.ack > high {
            // The probe repaired a loss that no acknowledgement had indicated.
            self.recovery.tail_probe = None;
            self.enter_cwr();
            self.end_reduction();
        }
    }
}
