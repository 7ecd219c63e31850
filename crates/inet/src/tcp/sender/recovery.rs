//! Loss recovery: the states between the first sign of a loss and its repair, and how a wrong reduction is undone.
//!
//! ```text
//!              SACK, duplicate                 RACK or 3 duplicates
//!     Open ──────────────────────► Disorder ───────────────────────► Recovery ──┐
//!      │ ▲                            │                                 │        │ all that was in flight
//!      │ └────────────────────────────┴─── nothing is missing ◄─────────┼────────┤ is acknowledged
//!      │ congestion mark                                                ▼        │
//!      └────────────────────────────► Cwr ── (as Recovery, no loss)   Loss ──────┘
//!                                            the retransmission timer expired: slow start
//! ```
//!
//! A recovery is *undone* if it becomes known that nothing was lost. There are three signs. The peer echoes a timestamp
//! from before the retransmission (Eifel, RFC 3522 and 4015). It reports each retransmission as a duplicate (D-SACK,
//! RFC 3708). Or, after a timeout, it acknowledges segments that were not sent again (F-RTO, RFC 5682).

use super::Ack;
use super::ack::News;
use super::core::{Purpose, Sender};
use super::prr::{Delivery, Prr};
use super::rack::{DUPLICATES, Path};
use super::recovery_state::{NOTHING, State, Undo};
use crate::tcp::Carrier;

impl<C: Carrier> Sender<C> {
    fn has_sack(&self) -> bool {
        self.agreed.is_some_and(|agreed| agreed.sack)
    }

    /// The time that RACK waits for a segment.
    pub(super) fn reordering_window(&self) -> u64 {
        let sure = self.recovery.state >= State::Recovery || self.board.sacked() >= self.recovery.reordering;
        self.rack.window(&Path {
            min_rtt: self.rtt.min().unwrap_or(0),
            smoothed: self.rtt.smoothed(),
            reordered: self.recovery.reordered > 0,
            sure,
        })
    }

    /// Processes an acknowledgement that is not only of new data in order.
    pub(super) fn recover(&mut self, ack: &Ack<'_>, news: &mut News, at: u64) {
        let early = self.recovery.is_early(ack.echo);
        if ack.ece
            && let Some(undo) = &mut self.recovery.undo
        {
            undo.before = NOTHING; // The path is congested, even if nothing was lost.
        }
        if self.recovery.state != State::Open && self.una >= self.recovery.high && self.is_repaired(news, early, ack) {
            return;
        }
        match self.recovery.state {
            State::Recovery => {
                if news.advanced && early && self.recovery.undo.is_some() {
                    // The original of a segment in a hole has arrived. The originals of the others will arrive, too.
                    if self.board.again() == 0 {
                        self.undo();
                        self.settle_state();
                    }
                    return;
                }
                self.count_duplicate(news);
                if self.recovery.all_were_duplicates() && !ack.ece {
                    self.undo();
                    self.settle_state();
                }
                self.find_losses(news, at);
                return;
            }
            State::Loss => {
                self.recover_from_timeout(news, early, at);
                return;
            }
            State::Open | State::Disorder | State::Cwr => {}
        }
        self.count_duplicate(news);
        if self.recovery.state <= State::Disorder && self.recovery.all_were_duplicates() {
            self.undo();
        }
        self.find_losses(news, at);
        if self.board.lost() <= self.board.again() {
            if ack.ece {
                self.enter_cwr();
            }
            if self.recovery.state != State::Cwr {
                self.settle_state();
            }
        } else if self
            .path
            .probe()
            .is_some_and(|start| self.board.front().is_some_and(|range| range.start == start && range.lost))
        {
            // The lost segment is the MTU probe: it was too large for the path, and there is no congestion.
            self.path.failed(at);
            self.repeat_at_full_window();
        } else {
            self.enter_recovery(ack.ece);
        }
    }

    /// Handles that everything in flight at the beginning of the state is acknowledged. Returns whether nothing more is
    /// to be done.
    fn is_repaired(&mut self, news: &News, early: bool, ack: &Ack<'_>) -> bool {
        match self.recovery.state {
            // The peer may repeat the mark until it receives CWR, which is in the segment at `high`.
            State::Cwr if self.una > self.recovery.high => self.end_reduction(),
            State::Recovery => {
                self.recovery.duplicates = 0;
                if early || self.recovery.all_were_duplicates() {
                    self.undo();
                } else if !self.has_sack() && self.una == self.recovery.high {
                    // Duplicates of retransmitted segments must not begin another recovery (RFC 6582, 3.2).
                    self.forget_first_again();
                    return !ack.ece && !news.sacked;
                }
                self.end_reduction();
            }
            State::Disorder => self.recovery.state = State::Open,
            State::Open | State::Cwr | State::Loss => {}
        }
        false
    }

    fn end_reduction(&mut self) {
        if self.recovery.undo.is_some() || self.recovery.state == State::Cwr {
            self.window.cwnd = self.window.ssthresh;
        }
        if self.recovery.state == State::Recovery {
            self.rack.recovered();
        }
        self.recovery.undo = None;
        self.forget_first_again();
        self.recovery.state = State::Open;
        self.settle_state();
    }

    fn forget_first_again(&mut self) {
        if self.board.again() == 0 {
            self.recovery.first_again = None;
        }
    }

    /// Returns to Open, or to Disorder if a segment may be missing.
    fn settle_state(&mut self) {
        let missing = self.board.sacked() + self.board.lost() + self.board.again() + self.recovery.duplicates > 0;
        let state = if missing { State::Disorder } else { State::Open };
        if state != self.recovery.state {
            (self.recovery.state, self.recovery.high) = (state, self.nxt);
        }
        self.forget_first_again();
    }

    /// Without selective acknowledgements, each duplicate acknowledgement indicates one segment that the peer has
    /// received.
    fn count_duplicate(&mut self, news: &mut News) {
        if self.has_sack() {
            return;
        }
        if news.advanced {
            // One acknowledged segment filled the hole. The others were already counted by duplicate acknowledgements.
            let filled = news.delivered;
            let known = self.recovery.duplicates.min(filled.saturating_sub(1));
            self.recovery.duplicates -= known;
            news.delivered -= known;
        } else if news.duplicate && self.recovery.duplicates + 1 < self.board.out() {
            self.recovery.duplicates += 1;
            news.delivered += 1;
        }
    }

    fn find_losses(&mut self, news: &mut News, at: u64) {
        if self.has_sack() {
            let window = self.reordering_window();
            news.due = self.rack.detect(&mut self.board, window, at);
            return;
        }
        let three = self.recovery.state < State::Recovery && self.recovery.duplicates >= DUPLICATES;
        let partial = self.recovery.state == State::Recovery && news.advanced;
        if (three || partial) && !self.board.is_empty() {
            // The first segment is missing. Nothing is known about the others.
            let size = self.board.front().map_or(1, |range| range.size);
            self.board.split(self.una + size);
            self.board.mark_lost(0);
        }
    }

    /// Handles the expiry of the reordering timer.
    pub(super) fn reordering_expired(&mut self, at: u64) {
        let flight = self.in_flight();
        let window = self.reordering_window();
        let due = self.rack.detect(&mut self.board, window, at);
        if self.board.lost() > self.board.again() && self.recovery.state < State::Recovery {
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
        let open = (self.board.again() > 0).then(|| self.board.again());
        let probe = self.recovery.tail.filter(|(_, again)| *again).map(|_| 1);
        let open = open.or(probe);
        self.recovery.undo = Some(Undo { from: self.una, before: self.window, open });
    }

    fn reduce(&mut self) {
        self.recovery.high = self.nxt;
        self.recovery.tail = None;
        self.recovery.prr = Prr::begin(self.window.cwnd);
        self.window.ssthresh = self.controller.control().reduced(&self.window);
        self.cwr = true;
    }

    /// Begins a reduction because of a congestion mark, or because a tail loss probe repaired a loss. The window
    /// shrinks at most once in a round trip.
    pub(super) fn enter_cwr(&mut self) {
        if self.recovery.state < State::Cwr {
            self.recovery.undo = None;
            self.reduce();
            self.recovery.state = State::Cwr;
        }
    }

    fn enter_recovery(&mut self, marked: bool) {
        let shrinks = self.recovery.shrinks();
        self.remember();
        if marked && let Some(undo) = &mut self.recovery.undo {
            undo.before = NOTHING;
        }
        if shrinks {
            self.recovery.high = self.nxt;
        } else {
            self.reduce();
        }
        self.recovery.state = State::Recovery;
    }

    /// Sends segments that were too large again, in smaller segments. This is no sign of congestion.
    pub(super) fn repeat_at_full_window(&mut self) {
        self.recovery.duplicates = 0;
        if self.recovery.state != State::Loss {
            (self.recovery.high, self.recovery.undo) = (self.nxt, None);
            self.window.ssthresh = self.window.ssthresh.min(self.window.cwnd.max(2));
            self.recovery.state = State::Loss;
            self.recovery.frto = false;
        }
    }

    /// Handles the expiry of the retransmission timer (RFC 5681, 3.1; RFC 8985, 6.3).
    pub(super) fn enter_loss(&mut self, at: u64) {
        let renege = self.board.front().is_some_and(|range| range.sacked);
        let state = self.recovery.state;
        let new_loss =
            state <= State::Disorder || self.una >= self.recovery.high || (state == State::Loss && self.retries == 0);
        if renege {
            self.board.forget_sacks();
            self.sacks.forget();
        }
        self.recovery.duplicates = 0;
        let (window, una, has_sack) = (self.reordering_window(), self.una, self.has_sack());
        let rack = &self.rack;
        self.board
            .mark_lost_if(|range| range.start == una || renege || !has_sack || rack.is_overdue(range, window, at));
        if new_loss {
            self.remember();
            self.window.ssthresh = self.controller.control().timed_out(&self.window);
        }
        self.window.cwnd = self.in_flight() + 1;
        self.recovery.tail = None;
        self.recovery.state = State::Loss;
        self.recovery.high = self.nxt;
        self.recovery.frto =
            self.has_sack() && (state < State::Recovery || self.retries > 0) && self.path.probe().is_none();
        self.recovery.new_only = false;
        self.cwr = true;
    }

    fn recover_from_timeout(&mut self, news: &mut News, early: bool, at: u64) {
        let recovered = self.una >= self.recovery.high;
        if (news.advanced || news.dsack)
            && self.recovery.undo.is_some()
            && (early || self.recovery.all_were_duplicates())
        {
            self.undo();
            self.recovery.state = State::Open;
            self.settle_state();
            return;
        }
        if self.recovery.frto {
            if news.original && self.recovery.undo.is_some() {
                self.undo();
                self.recovery.state = State::Open;
                self.settle_state();
                return;
            }
            if self.nxt > self.recovery.high {
                if news.sacked || news.duplicate {
                    self.recovery.frto = false; // The loss was real.
                }
            } else if news.advanced && !recovered {
                let room = self.window_end() > self.nxt;
                if self.unsent() > 0 && room {
                    self.recovery.high = self.nxt;
                    self.recovery.new_only = true;
                    return;
                }
                self.recovery.frto = false;
            }
        }
        if recovered {
            self.recovery.duplicates = 0;
            self.recovery.undo = None;
            self.recovery.state = State::Open;
            self.settle_state();
            return;
        }
        self.count_duplicate(news);
        self.find_losses(news, at);
    }

    /// Undoes the last reduction.
    fn undo(&mut self) {
        self.board.forget_losses();
        if let Some(undo) = self.recovery.undo.take() {
            self.window.cwnd = self.window.cwnd.max(undo.before.cwnd);
            self.window.ssthresh = self.window.ssthresh.max(undo.before.ssthresh);
            self.controller.control().undone();
            self.cwr = false;
        }
        (self.retries, self.answered) = (0, 0);
        self.recovery.new_only = false;
    }

    /// Adapts the window after an acknowledgement.
    pub(super) fn adapt_window(&mut self, news: &News, at: u64) {
        if self.recovery.shrinks() {
            let good = news.advanced && self.board.lost() <= news.lost && self.recovery.state == State::Recovery;
            let delivery = Delivery { delivered: news.delivered, in_flight: self.in_flight(), good };
            if let Some(cwnd) = self.recovery.prr.window(delivery, self.window.ssthresh) {
                self.window.cwnd = cwnd;
            }
            return;
        }
        let forward = news.advanced || (news.sacked && self.recovery.reordering > DUPLICATES);
        if forward && news.delivered > 0 && self.usage.may_grow(&self.window) {
            let sample = crate::tcp::congestion::Sample { acked: news.delivered, now: at, rtt: self.rtt.smoothed() };
            self.controller.control().acked(&mut self.window, &sample);
        }
    }

    /// Handles an acknowledgement of a tail loss probe, or of data behind it (RFC 8985, 7.4).
    pub(super) fn judge_tail_probe(&mut self, ack: &Ack<'_>, news: &News) {
        let Some((high, again)) = self.recovery.tail else { return };
        if ack.ack < high {
            return;
        }
        if !again || news.dsack || (ack.ack == high && news.duplicate && !news.sacked && self.has_sack()) {
            self.recovery.tail = None; // New data was the probe, or the peer had both copies.
        } else if ack.ack > high {
            // The probe repaired a loss that no acknowledgement had indicated.
            self.recovery.tail = None;
            self.enter_cwr();
            self.end_reduction();
        }
    }
}
