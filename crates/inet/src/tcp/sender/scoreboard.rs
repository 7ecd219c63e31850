//! The scoreboard: the ranges in flight, in the order of their sequence numbers, with the state of
//! each one (RFC 2018, 6675).
//!
//! ```text
//!   una                                                        nxt
//!    |  lost, sent again  |  in flight  |  sacked  |  in flight  |
//! ```
//!
//! A transmission is one range, even if a device cuts it into many segments. If a selective
//! acknowledgement or a retransmission concerns a part of a range, the range is split at a multiple
//! of its segment size. A peer therefore cannot create more ranges than there are segments. All
//! counts are in segments.

use std::collections::VecDeque;

use super::posted::Id;
use crate::tcp::Seq;

/// Sequence numbers that were sent together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: Seq,
    pub(super) end: Seq,
    /// Bytes of payload of a segment.
    pub(super) size: u32,
    /// The time at which it was last sent, in microseconds.
    pub(super) sent: u64,
    /// The number of its last transmission.
    pub(super) id: Id,
    /// Whether the peer has received it.
    pub(super) sacked: bool,
    /// Whether it is marked as lost.
    pub(super) lost: bool,
    /// Whether it was sent more than once.
    pub(super) ever_retransmitted: bool,
    /// Whether it was sent again, and that copy counts as in flight.
    pub(super) retransmitted: bool,
}

impl Range {
    /// A range that is sent now for the first time.
    pub(super) fn new(start: Seq, end: Seq, size: u32, sent: u64, id: Id) -> Self {
        Self { start, end, size, sent, id, sacked: false, lost: false, ever_retransmitted: false, retransmitted: false }
    }

    pub(super) fn len(&self) -> u32 {
        self.end - self.start
    }

    /// The number of segments.
    #[inline]
    pub(super) fn segments(&self) -> u32 {
        self.len().div_ceil(self.size.max(1))
    }
}

/// The ranges in flight, with counts.
#[derive(Debug, Default)]
#[cfg_attr(feature = "compare", derive(Clone))]
pub(super) struct Scoreboard {
    ranges: VecDeque<Range>,
    unacked: u32,
    sacked: u32,
    lost: u32,
    retransmitted: u32,
    /// Ranges that are lost and not sent again begin here or later.
    first_lost: Seq,
}

impl Scoreboard {
    /// A scoreboard with no ranges, which begins at `una`.
    pub(super) fn new(una: Seq) -> Self {
        Self { first_lost: una, ..Self::default() }
    }

    /// Frees memory that is not in use.
    pub(super) fn shrink(&mut self) {
        self.ranges.shrink_to_fit();
    }

    /// Segments that are not acknowledged.
    pub(super) fn unacked(&self) -> u32 {
        self.unacked
    }

    /// Segments that the peer has received behind a hole.
    pub(super) fn sacked(&self) -> u32 {
        self.sacked
    }

    /// Segments that are marked as lost, including those that were sent again.
    pub(super) fn lost(&self) -> u32 {
        self.lost
    }

    /// Segments that were sent again and count as in flight.
    pub(super) fn retransmitted(&self) -> u32 {
        self.retransmitted
    }

    /// Segments that count as in flight.
    pub(super) fn in_flight(&self) -> u32 {
        (self.unacked + self.retransmitted).saturating_sub(self.sacked + self.lost)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether there is one range, which was sent once and is not marked.
    #[inline]
    pub(super) fn is_one_original(&self) -> bool {
        let front = self.ranges.front().filter(|_| self.ranges.len() == 1);
        front.is_some_and(|range| !(range.ever_retransmitted || range.lost || range.sacked))
    }

    /// Removes the only range, which [was sent once](Self::is_one_original). The numbers before
    /// `to` are acknowledged.
    #[inline]
    pub(super) fn pop_all(&mut self, to: Seq) -> Option<Range> {
        debug_assert!(self.is_one_original());
        let range = self.ranges.pop_front()?;
        self.unacked = 0;
        self.first_lost = self.first_lost.max(to);
        Some(range)
    }

    pub(super) fn front(&self) -> Option<&Range> {
        self.ranges.front()
    }

    pub(super) fn get(&self, n: usize) -> Option<&Range> {
        self.ranges.get(n)
    }

    /// The last range that the peer has not received.
    pub(super) fn last(&self) -> Option<&Range> {
        self.ranges.iter().rev().find(|range| !range.sacked)
    }

    /// The first range that ends after `at`.
    pub(super) fn find(&self, at: Seq) -> usize {
        self.ranges.partition_point(|range| range.end <= at)
    }

    /// Adds a range that was sent for the first time.
    pub(super) fn push(&mut self, range: Range) {
        self.unacked += range.segments();
        self.ranges.push_back(range);
    }

    /// Applies `change` to range `n`, and updates the counts.
    pub(super) fn change(&mut self, n: usize, change: impl FnOnce(&mut Range)) {
        let Some(range) = self.ranges.get_mut(n) else { return };
        let before = *range;
        change(range);
        let after = *range;
        self.count(&before, false);
        self.count(&after, true);
        if after.lost && !after.retransmitted && after.start < self.first_lost {
            self.first_lost = after.start;
        }
    }

    fn count(&mut self, range: &Range, add: bool) {
        let segments = range.segments();
        let apply = |count: &mut u32, counts: bool| {
            if counts {
                *count = if add { *count + segments } else { *count - segments };
            }
        };
        apply(&mut self.unacked, true);
        apply(&mut self.sacked, range.sacked);
        apply(&mut self.lost, range.lost);
        apply(&mut self.retransmitted, range.retransmitted);
    }

    /// Splits the range that contains `at`, so that `at` is the border of two ranges. The distance
    /// from its start should be a multiple of the segment size.
    pub(super) fn split(&mut self, at: Seq) {
        let n = self.find(at);
        let Some(range) = self.ranges.get(n).copied().filter(|range| range.start < at) else { return };
        self.count(&range, false);
        let (head, tail) = (Range { end: at, ..range }, Range { start: at, ..range });
        self.count(&head, true);
        self.count(&tail, true);
        self.ranges[n] = head;
        self.ranges.insert(n + 1, tail);
    }

    /// Removes everything before `to` from the front. `each` is called with each removed range, or
    /// removed part of a range.
    pub(super) fn acknowledge(&mut self, to: Seq, mut each: impl FnMut(&Range)) {
        while let Some(front) = self.ranges.front().copied().filter(|front| front.start < to) {
            self.count(&front, false);
            if front.end <= to {
                self.ranges.pop_front();
                each(&front);
            } else {
                let rest = Range { start: to, ..front };
                self.count(&rest, true);
                self.ranges[0] = rest;
                // A segment that is acknowledged in part is still counted.
                let whole = (front.segments() - rest.segments()) * front.size;
                if whole > 0 {
                    each(&Range { end: front.start + whole, ..front });
                }
            }
        }
        self.first_lost = self.first_lost.max(to);
    }

    /// Marks the segments that the block `from..to` covers completely as received by the peer.
    /// `each` is called with each range that was not marked before. Returns the end of the numbers
    /// that are covered without a gap from `from` on.
    pub(super) fn sack(&mut self, from: Seq, to: Seq, mut each: impl FnMut(&Range)) -> Seq {
        let (mut n, mut covered) = (self.find(from), from);
        while let Some(range) = self.ranges.get(n).copied().filter(|range| range.start < to) {
            // Only whole segments are marked, and the short one at the end of a range.
            let skip = from.max(range.start) - range.start;
            let start = range.start + skip.div_ceil(range.size.max(1)) * range.size;
            let end = if range.end <= to {
                range.end
            } else {
                range.start + (to - range.start) / range.size.max(1) * range.size
            };
            if range.sacked {
                covered = range.end;
            } else if start < end {
                self.split(start);
                self.split(end);
                n = self.find(start);
                self.change(n, |range| (range.sacked, range.lost, range.retransmitted) = (true, false, false));
                each(&Range { start, end, ..range });
                covered = end;
            } else if range.end <= to {
                covered = covered.max(range.start);
            } else {
                break;
            }
            n += 1;
        }
        covered
    }

    /// Removes all marks of selective acknowledgements, because the peer dropped the payload (RFC
    /// 2018, 8).
    pub(super) fn forget_sacks(&mut self) {
        for n in 0..self.ranges.len() {
            self.change(n, |range| range.sacked = false);
        }
    }

    /// Marks range `n` as lost, whether or not it was sent again.
    pub(super) fn mark_lost(&mut self, n: usize) {
        self.change(n, |range| {
            if !range.sacked {
                (range.lost, range.retransmitted) = (true, false);
            }
        });
    }

    /// Marks the ranges as lost for which `which` returns true.
    pub(super) fn mark_lost_if(&mut self, mut which: impl FnMut(&Range) -> bool) {
        for n in 0..self.ranges.len() {
            if !self.ranges[n].sacked && which(&self.ranges[n]) {
                self.mark_lost(n);
            }
        }
    }

    /// Removes all marks of losses.
    pub(super) fn forget_losses(&mut self) {
        for n in 0..self.ranges.len() {
            self.change(n, |range| range.lost = false);
        }
    }

    /// The first range that is lost and not sent again.
    #[inline]
    pub(super) fn next_lost(&mut self) -> Option<usize> {
        if self.lost <= self.retransmitted {
            return None;
        }
        let mut n = self.find(self.first_lost);
        while let Some(range) = self.ranges.get(n) {
            if range.lost && !range.retransmitted {
                self.first_lost = range.start;
                return Some(n);
            }
            n += 1;
        }
        None
    }
}

#[cfg(test)]
impl Scoreboard {
    pub(super) fn ranges(&self) -> usize {
        self.ranges.len()
    }

    /// Checks the counts, and that the ranges follow each other without gaps.
    pub(super) fn check(&self) {
        let sum = |counts: fn(&Range) -> bool| {
            self.ranges.iter().filter(|range| counts(range)).map(Range::segments).sum::<u32>()
        };
        assert_eq!(self.unacked, sum(|_| true));
        assert_eq!(self.sacked, sum(|range| range.sacked));
        assert_eq!(self.lost, sum(|range| range.lost));
        assert_eq!(self.retransmitted, sum(|range| range.retransmitted));
        assert!(
            self.ranges
                .iter()
                .zip(self.ranges.iter().skip(1))
                .all(|(one, two)| one.end == two.start && one.start < one.end)
        );
        assert!(!self.ranges.iter().any(|range| range.lost && !range.retransmitted && range.start < self.first_lost));
        assert!(!self.ranges.iter().any(|range| range.sacked && (range.lost || range.retransmitted)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scoreboard(ranges: &[(u32, u32)]) -> Scoreboard {
        let mut scoreboard = Scoreboard::default();
        for (start, end) in ranges {
            let range = Range::new(Seq(*start), Seq(*end), 100, 0, 0);
            scoreboard.push(range);
        }
        scoreboard
    }

    fn shape(scoreboard: &Scoreboard) -> Vec<(u32, u32, bool)> {
        scoreboard.ranges.iter().map(|range| (range.start.0, range.end.0, range.sacked)).collect()
    }

    #[test]
    fn a_block_marks_whole_segments_and_the_short_last_one() {
        let mut scoreboard = scoreboard(&[(0, 350)]);
        let mut seen = 0;
        scoreboard.sack(Seq(50), Seq(250), |range| seen += range.segments());
        assert_eq!(shape(&scoreboard), [(0, 100, false), (100, 200, true), (200, 350, false)]);
        scoreboard.sack(Seq(349), Seq(350), |range| seen += range.segments());
        assert_eq!(seen, 1, "the last byte of a segment is not the segment");
        scoreboard.sack(Seq(300), Seq(350), |range| seen += range.segments());
        assert_eq!(shape(&scoreboard)[3], (300, 350, true));
        assert_eq!((scoreboard.unacked(), scoreboard.sacked(), scoreboard.in_flight(), seen), (4, 2, 2, 2));
    }

    #[test]
    fn a_block_that_was_seen_before_counts_once_and_says_how_far_it_reaches() {
        let mut scoreboard = scoreboard(&[(0, 100), (100, 200), (200, 300), (300, 400)]);
        assert_eq!(scoreboard.sack(Seq(100), Seq(250), |_| ()), Seq(200));
        let mut seen = Vec::new();
        assert_eq!(scoreboard.sack(Seq(200), Seq(400), |range| seen.push(range.start)), Seq(400));
        assert_eq!(seen, [Seq(200), Seq(300)]);
        scoreboard.sack(Seq(100), Seq(400), |_| panic!("nothing is new"));
    }

    #[test]
    fn an_acknowledgement_takes_ranges_and_whole_segments_off_the_front() {
        let mut scoreboard = scoreboard(&[(0, 100), (100, 500)]);
        let mut seen = 0;
        scoreboard.acknowledge(Seq(250), |range| seen += range.segments());
        assert_eq!((seen, scoreboard.unacked(), shape(&scoreboard)), (2, 3, vec![(250, 500, false)]));
    }

    #[test]
    fn one_range_that_was_sent_once_is_removed_at_once() {
        let mut one = scoreboard(&[(0, 350)]);
        assert!(one.is_one_original());
        for change in [
            (|range| range.ever_retransmitted = true) as fn(&mut Range),
            |range| range.lost = true,
            |range| range.sacked = true,
        ] {
            let mut other = scoreboard(&[(0, 350)]);
            other.change(0, change);
            assert!(!other.is_one_original());
        }
        assert!(!scoreboard(&[(0, 100), (100, 200)]).is_one_original() && !scoreboard(&[]).is_one_original());
        assert_eq!(one.pop_all(Seq(350)).map(|range| range.end), Some(Seq(350)));
        one.check();
        assert_eq!((one.is_empty(), one.unacked(), one.first_lost), (true, 0, Seq(350)));
    }

    #[test]
    fn lost_ranges_come_in_order_and_once() {
        let mut scoreboard = scoreboard(&[(0, 100), (100, 200), (200, 300)]);
        scoreboard.mark_lost(2);
        scoreboard.mark_lost(0);
        assert_eq!((scoreboard.lost(), scoreboard.in_flight(), scoreboard.next_lost()), (2, 1, Some(0)));
        scoreboard.change(0, |range| (range.retransmitted, range.ever_retransmitted) = (true, true));
        assert_eq!((scoreboard.in_flight(), scoreboard.next_lost()), (2, Some(2)));
        scoreboard.change(2, |range| range.retransmitted = true);
        assert_eq!((scoreboard.in_flight(), scoreboard.next_lost()), (3, None));
        scoreboard.mark_lost(0);
        assert_eq!((scoreboard.in_flight(), scoreboard.next_lost()), (2, Some(0)), "the copy was lost too");
        scoreboard.sack(Seq(0), Seq(100), |_| ());
        assert_eq!(
            (scoreboard.lost(), scoreboard.retransmitted(), scoreboard.sacked(), scoreboard.in_flight()),
            (1, 1, 1, 2)
        );
    }
}
