//! Loss detection by time (RFC 8985): a segment is marked as lost if a later one was delivered, and
//! the time that reordering explains has passed.
//!
//! The RFC walks over all segments in the order of transmission. Here, a log holds the
//! transmissions in that order. Only the front of the log can be due, so the walk visits each
//! transmission once.

use std::collections::VecDeque;

use super::scoreboard::{Range, Scoreboard};
use crate::tcp::Seq;

/// The number of duplicate acknowledgements, or of segments that were acknowledged selectively,
/// that indicates a loss if no reordering was ever seen.
pub(super) const DUPLICATES: u32 = 3;
/// After this number of recoveries without a D-SACK, the reordering window is reset to its initial
/// size.
const PERSIST: u32 = 16;

#[derive(Clone, Copy, Debug)]
struct Entry {
    sent: u64,
    start: Seq,
    end: Seq,
}

/// The latest delivered transmission, and a log of transmissions. Times are in microseconds.
#[derive(Debug, Default)]
#[cfg_attr(feature = "compare", derive(Clone))]
pub(super) struct Rack {
    log: VecDeque<Entry>,
    /// The latest transmission among those that were delivered.
    latest: Option<(u64, Seq)>,
    rtt: u64,
    reordering: Reordering,
}

/// The reordering window, as D-SACKs have widened it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reordering {
    /// In quarters of the least round-trip time.
    quarters: u32,
    persist: u32,
    /// The window was already widened for D-SACKs of transmissions before this number.
    widened: Option<Seq>,
}

impl Default for Reordering {
    fn default() -> Self {
        Self { quarters: 1, persist: 0, widened: None }
    }
}

/// The values from which the size of the reordering window is computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReorderingInputs {
    pub(super) min_rtt: u64,
    pub(super) smoothed: u64,
    pub(super) reordered: bool,
    /// Whether recovery is in progress, or so many segments were acknowledged selectively that a
    /// loss is nearly certain.
    pub(super) sure: bool,
}

impl Rack {
    /// What continues where everything before `una` was acknowledged, and nothing is in flight.
    /// `rtt` is the round-trip time of the latest transmission that was delivered. That one is
    /// before all that will be sent, so any time in the past does.
    pub(super) fn of(rtt: Option<u64>, una: Seq, reordering: Reordering) -> Self {
        Self { rtt: rtt.unwrap_or(0), latest: rtt.map(|_| (0, una)), reordering, ..Self::default() }
    }

    /// The round-trip time of the latest transmission that was delivered, if one was.
    pub(super) fn rtt(&self) -> Option<u64> {
        self.latest.map(|_| self.rtt)
    }

    /// The reordering window, as D-SACKs have widened it.
    pub(super) fn reordering(&self) -> Reordering {
        self.reordering
    }

    /// Frees memory that is not in use.
    pub(super) fn shrink(&mut self) {
        self.log.shrink_to_fit();
    }

    /// Adds a transmission to the log.
    pub(super) fn sent(&mut self, start: Seq, end: Seq, sent: u64) {
        self.log.push_back(Entry { sent, start, end });
    }

    /// Removes transmissions of acknowledged numbers from the log.
    pub(super) fn acknowledged(&mut self, una: Seq) {
        while self.log.front().is_some_and(|entry| entry.end <= una) {
            self.log.pop_front();
        }
    }

    /// Removes all transmissions from the log, because all numbers are acknowledged.
    pub(super) fn all_acknowledged(&mut self) {
        self.log.clear();
    }

    /// Notes that `range` was delivered. `early`: its acknowledgement is of a transmission before
    /// the last one.
    pub(super) fn delivered(&mut self, range: &Range, now: u64, min_rtt: u64, early: bool) {
        let rtt = now.saturating_sub(range.sent);
        if range.ever_retransmitted && (early || rtt < min_rtt) {
            return;
        }
        self.rtt = rtt;
        let later = |(sent, end)| sent < range.sent || (sent == range.sent && end < range.end);
        if self.latest.is_none_or(later) {
            self.latest = Some((range.sent, range.end));
        }
    }

    /// Widens the window, because a D-SACK showed that a retransmission was not needed: segments
    /// arrive later than the window allows.
    pub(super) fn duplicate(&mut self, ack: Seq, nxt: Seq) {
        let Reordering { quarters, persist, widened } = &mut self.reordering;
        if widened.is_none_or(|mark| mark <= ack) {
            *widened = Some(nxt);
            *quarters = (*quarters + 1).min(255);
            *persist = PERSIST;
        }
    }

    /// Notes that a recovery is over.
    pub(super) fn recovered(&mut self) {
        let Reordering { quarters, persist, .. } = &mut self.reordering;
        *persist = persist.saturating_sub(1);
        if *persist == 0 {
            *quarters = 1;
        }
    }

    /// How long to wait for a segment after a later one was delivered.
    pub(super) fn window(&self, path: &ReorderingInputs) -> u64 {
        if !path.reordered && path.sure {
            return 0;
        }
        (path.min_rtt / 4).saturating_mul(u64::from(self.reordering.quarters)).min(path.smoothed)
    }

    /// Marks segments that are due as lost, and returns the time at which the next one will be
    /// due.
    pub(super) fn detect(&mut self, scoreboard: &mut Scoreboard, window: u64, now: u64) -> Option<u64> {
        let (latest, end) = self.latest?;
        while let Some(entry) = self.log.front().copied() {
            let is_open =
                |range: &Range| range.sent == entry.sent && !range.sacked && (!range.lost || range.retransmitted);
            let first = scoreboard.find(entry.start);
            let ranges = (first..)
                .map_while(|n| scoreboard.get(n).filter(|range| range.start < entry.end).map(|range| (n, range)));
            let open = ranges.filter(|(_, range)| is_open(range)).map(|(n, range)| (n, range.end)).next();
            if let Some((first, first_end)) = open {
                // Of two transmissions at the same time, the one with the higher numbers counts as
                // the later one.
                let is_before = |at: Seq| entry.sent < latest || (entry.sent == latest && at < end);
                if !is_before(first_end) {
                    return None;
                }
                let due = entry.sent.saturating_add(self.rtt).saturating_add(window);
                if due > now {
                    return Some(due);
                }
                let mut n = first;
                while let Some(range) = scoreboard.get(n).filter(|range| range.start < entry.end) {
                    if is_open(range) {
                        if !is_before(range.end) {
                            return None;
                        }
                        scoreboard.mark_lost(n);
                    }
                    n += 1;
                }
            }
            self.log.pop_front();
        }
        None
    }

    /// Whether `range` was sent so long ago that it is lost, at the time when the retransmission
    /// timer expires.
    pub(super) fn is_overdue(&self, range: &Range, window: u64, now: u64) -> bool {
        range.sent.saturating_add(self.rtt).saturating_add(window) <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u32, sent: u64) -> Range {
        Range::new(Seq(start), Seq(start + 100), 100, sent, 0)
    }

    fn sent(times: &[u64]) -> (Rack, Scoreboard) {
        let (mut rack, mut scoreboard) = (Rack::default(), Scoreboard::default());
        for (n, time) in times.iter().enumerate() {
            let range = range(n as u32 * 100, *time);
            rack.sent(range.start, range.end, *time);
            scoreboard.push(range);
        }
        (rack, scoreboard)
    }

    fn deliver(rack: &mut Rack, scoreboard: &mut Scoreboard, n: u32, now: u64) {
        let (start, end) = (Seq(n * 100), Seq(n * 100 + 100));
        scoreboard.sack(start, end, |range| rack.delivered(range, now, 0, false));
    }

    #[test]
    fn a_segment_is_lost_when_a_later_one_was_delivered_and_the_window_is_over() {
        let (mut rack, mut scoreboard) = sent(&[0, 10, 20, 30]);
        deliver(&mut rack, &mut scoreboard, 2, 1020);
        // Round trip 1000, window 50: the first is due at 1050, the second at 1060, the last was
        // sent later.
        assert_eq!((rack.detect(&mut scoreboard, 50, 1020), scoreboard.lost()), (Some(1050), 0));
        assert_eq!((rack.detect(&mut scoreboard, 50, 1050), scoreboard.lost()), (Some(1060), 1));
        assert_eq!((rack.detect(&mut scoreboard, 50, 1060), scoreboard.lost()), (None, 2));
    }

    #[test]
    fn what_was_sent_together_is_lost_together() {
        let (mut rack, mut scoreboard) = sent(&[0, 0, 0, 0]);
        deliver(&mut rack, &mut scoreboard, 2, 1000);
        assert_eq!(
            (rack.detect(&mut scoreboard, 0, 1000), scoreboard.lost()),
            (None, 2),
            "the fourth has a later number"
        );
    }

    #[test]
    fn of_a_large_transmission_what_is_before_the_delivered_part_is_lost() {
        let (mut rack, mut scoreboard) = (Rack::default(), Scoreboard::default());
        rack.sent(Seq(0), Seq(500), 0);
        scoreboard.push(Range::new(Seq(0), Seq(500), 100, 0, 0));
        deliver(&mut rack, &mut scoreboard, 2, 1000);
        assert_eq!((rack.detect(&mut scoreboard, 0, 1000), scoreboard.lost()), (None, 2));
        deliver(&mut rack, &mut scoreboard, 4, 1000);
        assert_eq!((rack.detect(&mut scoreboard, 0, 1000), scoreboard.lost()), (None, 3));
    }

    #[test]
    fn a_retransmission_is_lost_too() {
        let (mut rack, mut scoreboard) = sent(&[0, 10, 20]);
        deliver(&mut rack, &mut scoreboard, 1, 1010);
        assert_eq!((rack.detect(&mut scoreboard, 0, 1010), scoreboard.lost()), (None, 1));
        scoreboard.change(0, |range| (range.sent, range.retransmitted, range.ever_retransmitted) = (1010, true, true));
        rack.sent(Seq(0), Seq(100), 1010);
        let late = range(300, 1020);
        rack.sent(late.start, late.end, late.sent);
        scoreboard.push(late);
        deliver(&mut rack, &mut scoreboard, 3, 2020);
        assert_eq!(
            (rack.detect(&mut scoreboard, 0, 2020), scoreboard.lost(), scoreboard.retransmitted()),
            (None, 2, 0)
        );
    }

    #[test]
    fn the_acknowledgement_of_an_earlier_transmission_says_nothing() {
        let (mut rack, mut scoreboard) = sent(&[0, 10]);
        let again = Range { ever_retransmitted: true, sent: 900, ..range(100, 900) };
        rack.delivered(&again, 950, 100, false);
        assert!(rack.latest.is_none(), "faster than the path");
        rack.delivered(&again, 1900, 100, true);
        assert!(rack.latest.is_none(), "its timestamp is older");
        rack.delivered(&again, 1900, 100, false);
        assert_eq!((rack.detect(&mut scoreboard, 0, 1900), scoreboard.lost()), (None, 2));
    }

    #[test]
    fn the_window_is_a_quarter_of_the_round_trip_and_grows_by_d_sacks() {
        let mut rack = Rack::default();
        let path = ReorderingInputs { min_rtt: 400, smoothed: 450, reordered: true, sure: true };
        assert_eq!(rack.window(&path), 100);
        assert_eq!(rack.window(&ReorderingInputs { reordered: false, ..path }), 0);
        assert_eq!(rack.window(&ReorderingInputs { reordered: false, sure: false, ..path }), 100);
        rack.duplicate(Seq(10), Seq(100));
        rack.duplicate(Seq(20), Seq(110));
        assert_eq!(rack.window(&path), 200, "once in a round trip");
        rack.duplicate(Seq(100), Seq(210));
        for _ in 0..9 {
            rack.duplicate(Seq(1000), Seq(1000));
        }
        assert_eq!(rack.window(&path), 450, "never more than a round trip");
        for _ in 0..PERSIST {
            rack.recovered();
        }
        assert_eq!(rack.window(&path), 100);
    }
}
