//! Acknowledgements: which ranges arrived, and how long they took.
//!
//! Why in three steps: the blocks and the cumulative number are processed first, and collect what
//! has changed in an `AckOutcome`. Recovery, window and timers act on the whole change, because
//! each of them depends on the others' input.

use super::core::{Purpose, Sender};
use super::sacks::Sacks;
use super::scoreboard::Range;
use super::usage::Usage;
use super::{Ack, Acked, RecoveryState};
use crate::tcp::{Carrier, SackBlocks, Seq};
use crate::time::Time;

/// The changes that one acknowledgement caused, for recovery and congestion control. Counts are in
/// segments.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AckOutcome {
    /// Whether the cumulative acknowledgement advanced.
    pub(super) advanced: bool,
    /// Segments whose arrival became known by this acknowledgement.
    pub(super) delivered: u32,
    /// Whether segments were acknowledged selectively.
    pub(super) sacked: bool,
    /// Whether the peer reported a range that it received twice (D-SACK).
    pub(super) dsack: bool,
    /// Whether the acknowledgement is a duplicate: it repeats the previous one and changes nothing.
    pub(super) duplicate: bool,
    /// Whether a segment arrived that was sent only once, before the last timeout.
    pub(super) original: bool,
    /// Segments that were marked as lost before this acknowledgement.
    pub(super) lost: u32,
    /// The time at which the next segment is marked as lost, if reordering does not explain its
    /// absence until then.
    pub(super) due: Option<u64>,
    /// The round-trip time, in microseconds, if this acknowledgement shows it.
    pub(super) rtt: Option<u64>,
    /// Whether the acknowledged range includes a segment that was sent more than once, so that the
    /// round-trip time is not known.
    ever_retransmitted: bool,
    /// The times at which the first and the last acknowledged segment were sent.
    first: Option<u64>,
    last: Option<u64>,
    /// The time at which the first selectively acknowledged segment was sent.
    first_sacked: Option<u64>,
    /// The lowest number of the segments that arrived late, behind segments that had arrived
    /// before.
    low: Option<Seq>,
}

impl AckOutcome {
    fn arrived(&mut self, range: &Range, high: Seq, sacked_before: Seq) {
        if range.ever_retransmitted {
            return;
        }
        self.original |= range.end <= high;
        if range.start < sacked_before {
            self.low = Some(self.low.map_or(range.start, |low| low.min(range.start)));
        }
    }
}

impl<C: Carrier> Sender<C> {
    /// Whether data is ECN-capable.
    #[must_use]
    pub fn uses_ecn(&self) -> bool {
        self.agreed.is_some_and(|agreed| agreed.ecn)
    }

    /// Makes data that is sent from now on not ECN-capable.
    pub fn give_up_ecn(&mut self) {
        if let Some(agreed) = &mut self.agreed {
            (agreed.ecn, self.cwr) = (false, false);
        }
    }

    /// Processes an acknowledgement. The connection has found its segment acceptable. If its number
    /// is before the first unacknowledged number, only its selective acknowledgements are used.
    pub fn handle_ack(&mut self, ack: &Ack<'_>, now: Time) -> Acked {
        let at = now.micros();
        let ack = &Ack { ece: ack.ece && self.uses_ecn(), ..*ack };
        let mut acked = Acked::default();
        if ack.ack > self.nxt {
            return acked;
        }
        let was_writable = self.is_writable();
        let old = ack.ack < self.una;
        let sacked_before = self.sacks.high.filter(|_| self.scoreboard.sacked() > 0).unwrap_or(self.una);
        let mut outcome = AckOutcome { lost: self.scoreboard.lost(), ..AckOutcome::default() };
        let window_changed = !old && self.update_window(ack, at);
        if self.agreed.is_some_and(|agreed| agreed.sack) {
            if !ack.sack.is_empty() {
                self.handle_sacks(ack, &mut outcome, sacked_before, at);
            } else if !old {
                self.sacks.len = 0;
            }
        }
        if !old {
            outcome.duplicate =
                ack.ack == self.una && !ack.data && !window_changed && !self.scoreboard.is_empty() && !outcome.sacked;
            self.handle_cumulative(ack, &mut outcome, sacked_before, &mut acked, at);
        }
        if let Some(low) = outcome.low {
            self.recovery.saw_reordering(low, sacked_before, self.path.size());
        }
        outcome.rtt = self.measure(ack, &outcome, at);
        if !acked.syn {
            self.apply(ack, &mut outcome, at);
        }
        self.settle_ack();
        acked.writable = !was_writable && self.is_writable();
        acked
    }

    /// Whether nothing is missing, and no acknowledgement of a probe is awaited.
    #[inline]
    pub(in crate::tcp) fn is_untroubled(&self) -> bool {
        self.agreed.is_some()
            && self.syn_acked
            && self.recovery.state() == RecoveryState::Open
            && self.recovery.tail_probe.is_none()
            && !self.recovery.shrinks()
            && self.scoreboard.sacked() == 0
    }

    /// Does what [`handle_ack`](Self::handle_ack) does for a segment with payload that acknowledges
    /// nothing new and has no SACK blocks, if the sender [is untroubled](Self::is_untroubled).
    #[inline]
    pub(in crate::tcp) fn handle_window(&mut self, seq: Seq, ack: Seq, window: u32, now: Time) {
        self.update_window(&Ack { seq, ack, window, sack: &[], echo: None, ece: false, data: true }, now.micros());
        self.sacks.len = 0;
        self.recovery.new_only = false;
        self.note_answer();
        self.settle_ack();
    }

    /// Whether `ack` acknowledges all that was sent, and that is one range, which was sent once.
    /// FIN is not queued: the connection is established.
    #[inline]
    pub(in crate::tcp) fn is_answered_by(&self, ack: Seq) -> bool {
        ack == self.nxt && self.scoreboard.is_one_original()
    }

    /// Does what [`handle_ack`](Self::handle_ack) does for a segment with payload that [answers
    /// all](Self::is_answered_by) and has no SACK blocks, if the sender [is
    /// untroubled](Self::is_untroubled). Returns whether it became writable.
    #[inline]
    pub(in crate::tcp) fn handle_answer(&mut self, seq: Seq, ack: Seq, window: u32, now: Time) -> bool {
        let at = now.micros();
        let was_writable = self.is_writable();
        (self.peer_window, self.window_seq, self.window_ack) = (window, seq, ack);
        self.max_window = self.max_window.max(window);
        self.sacks.len = 0;
        let Some(range) = self.scoreboard.pop_all(ack) else { return false };
        let rtt = at.saturating_sub(range.sent);
        self.rack.delivered(&range, at, 0, false);
        self.rack.all_acknowledged();
        self.queue.acknowledge(ack);
        self.una = ack;
        self.path.delivered(ack);
        (self.retries, self.answered_timeouts, self.window_probes) = (0, 0, 0);
        self.waiting_since = None;
        self.rtt.path_sample(rtt, at);
        self.rtt.sample(rtt);
        self.recovery.new_only = false;
        let delivered = range.segments();
        self.clocks.delivered(delivered);
        self.adapt_window(&AckOutcome { advanced: true, delivered, rtt: Some(rtt), ..AckOutcome::default() }, at);
        self.timer = None;
        self.note_answer();
        self.settle_ack();
        !was_writable && self.is_writable()
    }

    /// What each acknowledgement ends with.
    #[inline]
    fn settle_ack(&mut self) {
        self.more_announced = false;
        if self.scoreboard.is_empty() {
            self.posted.forget();
        }
    }

    /// Notes that the peer has answered.
    #[inline]
    fn note_answer(&mut self) {
        if self.peer_window == 0 {
            self.answered_timeouts = self.retries; // A peer that answers with a closed window is alive.
        }
        self.unanswered_probes = 0;
    }

    /// Acts on the changes, when it is known which segments arrived.
    fn apply(&mut self, ack: &Ack<'_>, outcome: &mut AckOutcome, at: u64) {
        self.recovery.new_only = false;
        if self.recovery.tail_probe.is_some() {
            self.classify_tail_probe(ack, outcome);
        }
        let missing = self.scoreboard.sacked() > 0 || outcome.sacked || outcome.duplicate;
        if missing || (ack.ece && outcome.advanced) || self.recovery.state() != RecoveryState::Open {
            self.recover(ack, outcome, at);
        }
        self.clocks.delivered(outcome.delivered);
        self.adapt_window(outcome, at);
        if let Some(due) = outcome.due {
            self.arm(Purpose::Reordering, due);
        } else if outcome.advanced || outcome.sacked {
            self.rearm(at);
        }
        self.note_answer();
    }

    /// Stores the window, if the segment is not older than the last one that announced a window
    /// (RFC 9293, 3.10.7.4). Returns whether the window changed.
    fn update_window(&mut self, ack: &Ack<'_>, at: u64) -> bool {
        let newer = self.window_seq < ack.seq
            || (self.window_seq == ack.seq && self.window_ack <= ack.ack)
            || self.una < ack.ack;
        if !newer || self.agreed.is_none() {
            return false;
        }
        let changed = self.peer_window != ack.window;
        (self.peer_window, self.window_seq, self.window_ack) = (ack.window, ack.seq, ack.ack);
        self.max_window = self.max_window.max(ack.window);
        if changed && self.scoreboard.is_empty() {
            self.window_opened(at);
        }
        changed
    }

    fn handle_sacks(&mut self, ack: &Ack<'_>, outcome: &mut AckOutcome, sacked_before: Seq, at: u64) {
        let blocks = self.handle_dsack(ack, outcome);
        let mut seen = Sacks { high: self.sacks.high, ..Sacks::default() };
        let early = self.is_early(ack);
        for &(from, to) in blocks {
            let from = from.max(self.una);
            if from >= to || to > self.nxt {
                continue;
            }
            let (rest, to) = self.sacks.rest(from, to);
            let (rack, recovery) = (&mut self.rack, &self.recovery);
            let (min_rtt, high) = (self.rtt.min().unwrap_or(0), recovery.recovery_point());
            let mut last = None;
            let covered = self.scoreboard.sack(rest, to, |range| {
                outcome.sacked = true;
                outcome.delivered += range.segments();
                outcome.arrived(range, high, sacked_before);
                if !range.ever_retransmitted {
                    outcome.first_sacked.get_or_insert(range.sent);
                }
                rack.delivered(range, at, min_rtt, range.ever_retransmitted && early(range.sent));
                last = Some(range.end);
            });
            if let Some(last) = last {
                seen.high = Some(seen.high.map_or(last, |high| high.max(last)));
            }
            if seen.len < SackBlocks::MOST {
                seen.blocks[seen.len] = (from, covered);
                seen.len += 1;
            }
        }
        self.sacks = seen;
    }

    /// Processes a D-SACK. The first block is a D-SACK if it is before the acknowledgement, or
    /// inside the second block (RFC 2883). Returns the other blocks.
    fn handle_dsack<'a>(&mut self, ack: &Ack<'a>, outcome: &mut AckOutcome) -> &'a [(Seq, Seq)] {
        let Some((&(from, to), others)) = ack.sack.split_first() else { return ack.sack };
        let inside = others.first().is_some_and(|(start, end)| *start <= from && to <= *end);
        if from >= to || !(from < ack.ack || inside) {
            return ack.sack;
        }
        // A block is ignored if its range was never sent, or if it is too old.
        if to <= self.nxt && (self.una - from) as i32 <= self.max_window.max(1 << 16) as i32 {
            outcome.dsack = true;
            self.recovery.duplicate(to, (to - from).div_ceil(self.path.size()));
            self.rack.duplicate(ack.ack, self.nxt);
            self.clocks.duplicates += 1;
        }
        others
    }

    /// Returns a function: whether the peer's timestamp echoes a transmission that was made before
    /// a given time.
    fn is_early(&self, ack: &Ack<'_>) -> impl Fn(u64) -> bool + use<C> {
        let (echo, offset) = (ack.echo, self.options.timestamp_offset);
        move |sent| echo.is_some_and(|echo| Seq(echo) < Seq(((sent / 1000) as u32).wrapping_add(offset)))
    }

    fn handle_cumulative(
        &mut self,
        ack: &Ack<'_>,
        outcome: &mut AckOutcome,
        sacked_before: Seq,
        acked: &mut Acked,
        at: u64,
    ) {
        if ack.ack == self.una {
            return;
        }
        outcome.advanced = true;
        let early = self.is_early(ack);
        let (min_rtt, high) = (self.rtt.min().unwrap_or(0), self.recovery.recovery_point());
        let rack = &mut self.rack;
        self.scoreboard.acknowledge(ack.ack, |range| {
            if range.ever_retransmitted {
                outcome.ever_retransmitted = true;
            } else if !range.sacked {
                outcome.first.get_or_insert(range.sent);
                outcome.last = Some(range.sent);
            }
            if !range.sacked {
                outcome.delivered += range.segments();
                outcome.arrived(range, high, sacked_before);
                rack.delivered(range, at, min_rtt, range.ever_retransmitted && early(range.sent));
            }
        });
        rack.acknowledged(ack.ack);
        let queued = self.queue.len();
        self.queue.acknowledge(ack.ack);
        acked.bytes = (queued - self.queue.len()) as u32;
        acked.fin = self.fin && ack.ack > self.queue.end() && !self.is_fin_acked();
        self.una = ack.ack;
        self.path.delivered(self.una);
        if !self.syn_acked {
            self.syn_acked = true;
            acked.syn = true;
            self.syn_is_acked(outcome.ever_retransmitted);
        }
        (self.retries, self.answered_timeouts, self.window_probes) = (0, 0, 0);
        self.waiting_since = (!self.scoreboard.is_empty()).then_some(at);
    }

    fn syn_is_acked(&mut self, ever_retransmitted: bool) {
        self.timer = None;
        self.usage = Usage::new(self.una);
        (self.small_until, self.last_small_end) = (self.una, self.una);
        if ever_retransmitted {
            self.syn_lost = true;
            self.window.cwnd = 1;
            self.rtt.syn_was_lost();
        }
    }

    /// Samples the round-trip time: from a segment that was sent once (Karn), or from the echoed
    /// timestamp, which belongs to the transmission that arrived (RFC 7323, section 4).
    fn measure(&mut self, ack: &Ack<'_>, outcome: &AckOutcome, at: u64) -> Option<u64> {
        let since = |sent: Option<u64>| sent.map(|sent| at.saturating_sub(sent));
        if let Some(rtt) = since(outcome.last.or(outcome.first_sacked)).filter(|_| !outcome.ever_retransmitted) {
            self.rtt.path_sample(rtt, at);
        }
        let sequence = since(outcome.first).filter(|_| !outcome.ever_retransmitted).or(since(outcome.first_sacked));
        let timestamp = || {
            let echo = ack.echo.filter(|_| outcome.advanced)?;
            let millis = self.stamp(at).wrapping_sub(echo);
            (millis < 1 << 20).then(|| u64::from(millis.max(1)) * 1000)
        };
        let rtt = sequence.or_else(timestamp);
        if let Some(rtt) = rtt {
            self.rtt.sample(rtt);
        }
        rtt
    }
}
