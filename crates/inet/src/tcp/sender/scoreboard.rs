//! What is in flight: ranges in order of their sequence numbers, and for each what is known about it (RFC 2018, 6675).
//!
//! ```text
//!   una                                                        nxt
//!    |  lost, sent again  |  in flight  |  sacked  |  in flight  |
//! ```
//!
//! A transmission is one range, also if a device cuts it into many segments. A range is split at a multiple of its segment size, when
//! a selective acknowledgement or a retransmission concerns a part of it. A peer therefore cannot make more ranges than there are
//! segments. All counts are in segments.

use std::collections::VecDeque;

use super::ring::Id;
use crate::tcp::Seq;

/// Sequence numbers that were sent together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: Seq,
    pub(super) end: Seq,
    /// Payload of a segment.
    pub(super) size: u32,
    /// When it was sent last, in microseconds.
    pub(super) sent: u64,
    /// The last transmission.
    pub(super) id: Id,
    /// The peer has it.
    pub(super) sacked: bool,
    /// It is taken for lost.
    pub(super) lost: bool,
    /// It was sent more than once.
    pub(super) resent: bool,
    /// It was sent again, and that copy is taken to be in flight.
    pub(super) again: bool,
}

impl Range {
    /// What is sent now for the first time.
    pub(super) fn new(start: Seq, end: Seq, size: u32, sent: u64, id: Id) -> Self {
        Self { start, end, size, sent, id, sacked: false, lost: false, resent: false, again: false }
    }

    pub(super) fn len(&self) -> u32 {
        self.end - self.start
    }

    /// Segments.
    pub(super) fn segments(&self) -> u32 {
        self.len().div_ceil(self.size.max(1))
    }
}

/// The ranges in flight, with counts.
#[derive(Debug, Default)]
pub(super) struct Scoreboard {
    ranges: VecDeque<Range>,
    out: u32,
    sacked: u32,
    lost: u32,
    again: u32,
    /// Ranges that are lost and not sent again start here or later.
    first_lost: Seq,
}

impl Scoreboard {
    /// Nothing in flight before `una`.
    pub(super) fn new(una: Seq) -> Self {
        Self { first_lost: una, ..Self::default() }
    }

    /// Segments that are not acknowledged.
    pub(super) fn out(&self) -> u32 {
        self.out
    }

    /// Segments that the peer has behind a hole.
    pub(super) fn sacked(&self) -> u32 {
        self.sacked
    }

    /// Segments that are taken for lost, also those that were sent again.
    pub(super) fn lost(&self) -> u32 {
        self.lost
    }

    /// Segments that were sent again and are taken to be in flight.
    pub(super) fn again(&self) -> u32 {
        self.again
    }

    /// Segments on the path.
    pub(super) fn in_flight(&self) -> u32 {
        (self.out + self.again).saturating_sub(self.sacked + self.lost)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn front(&self) -> Option<&Range> {
        self.ranges.front()
    }

    pub(super) fn get(&self, n: usize) -> Option<&Range> {
        self.ranges.get(n)
    }

    /// The last range that the peer did not acknowledge.
    pub(super) fn last(&self) -> Option<&Range> {
        self.ranges.iter().rev().find(|range| !range.sacked)
    }

    /// The first range that ends after `at`.
    pub(super) fn find(&self, at: Seq) -> usize {
        self.ranges.partition_point(|range| range.end <= at)
    }

    /// Adds what was sent for the first time.
    pub(super) fn push(&mut self, range: Range) {
        self.out += range.segments();
        self.ranges.push_back(range);
    }

    /// Applies `change` to range `n`, and keeps the counts.
    pub(super) fn change(&mut self, n: usize, change: impl FnOnce(&mut Range)) {
        let Some(range) = self.ranges.get_mut(n) else { return };
        let before = *range;
        change(range);
        let after = *range;
        self.count(&before, false);
        self.count(&after, true);
        if after.lost && !after.again && after.start < self.first_lost {
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
        apply(&mut self.out, true);
        apply(&mut self.sacked, range.sacked);
        apply(&mut self.lost, range.lost);
        apply(&mut self.again, range.again);
    }

    /// Makes `at` the border between two ranges, if it is inside of one. It should be a multiple of the segment size from its start.
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

    /// Takes off the front what is before `to`. `each` sees what was taken, range by range or a part of one.
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
                // The segment that is acknowledged in part is still counted.
                let whole = (front.segments() - rest.segments()) * front.size;
                if whole > 0 {
                    each(&Range { end: front.start + whole, ..front });
                }
            }
        }
        self.first_lost = self.first_lost.max(to);
    }

    /// Marks what the block `from..to` covers, in whole segments, as received by the peer. `each` sees what was not marked before.
    /// Returns the end of what is covered without a gap from `from` on.
    pub(super) fn sack(&mut self, from: Seq, to: Seq, mut each: impl FnMut(&Range)) -> Seq {
        let (mut n, mut covered) = (self.find(from), from);
        while let Some(range) = self.ranges.get(n).copied().filter(|range| range.start < to) {
            // Whole segments, and the short one at the end of a range.
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
                self.change(n, |range| (range.sacked, range.lost, range.again) = (true, false, false));
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

    /// Forgets all selective acknowledgements: the peer dropped what it had (RFC 2018, 8).
    pub(super) fn forget_sacks(&mut self) {
        for n in 0..self.ranges.len() {
            self.change(n, |range| range.sacked = false);
        }
    }

    /// Takes range `n` for lost, whether or not it was sent again.
    pub(super) fn mark_lost(&mut self, n: usize) {
        self.change(n, |range| {
            if !range.sacked {
                (range.lost, range.again) = (true, false);
            }
        });
    }

    /// Takes ranges for lost that `which` picks.
    pub(super) fn mark_lost_if(&mut self, mut which: impl FnMut(&Range) -> bool) {
        for n in 0..self.ranges.len() {
            if !self.ranges[n].sacked && which(&self.ranges[n]) {
                self.mark_lost(n);
            }
        }
    }

    /// Takes no range for lost any more.
    pub(super) fn forget_losses(&mut self) {
        for n in 0..self.ranges.len() {
            self.change(n, |range| range.lost = false);
        }
    }

    /// The first range that is lost and not sent again.
    pub(super) fn next_lost(&mut self) -> Option<usize> {
        if self.lost <= self.again {
            return None;
        }
        let mut n = self.find(self.first_lost);
        while let Some(range) = self.ranges.get(n) {
            if range.lost && !range.again {
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

    /// Counts again, and looks whether all ranges follow each other.
    pub(super) fn check(&self) {
        let sum = |counts: fn(&Range) -> bool| {
            self.ranges.iter().filter(|range| counts(range)).map(Range::segments).sum::<u32>()
        };
        assert_eq!(self.out, sum(|_| true));
        assert_eq!(self.sacked, sum(|range| range.sacked));
        assert_eq!(self.lost, sum(|range| range.lost));
        assert_eq!(self.again, sum(|range| range.again));
        assert!(
            self.ranges
                .iter()
                .zip(self.ranges.iter().skip(1))
                .all(|(one, two)| one.end == two.start && one.start < one.end)
        );
        assert!(!self.ranges.iter().any(|range| range.lost && !range.again && range.start < self.first_lost));
        assert!(!self.ranges.iter().any(|range| range.sacked && (range.lost || range.again)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn board(ranges: &[(u32, u32)]) -> Scoreboard {
        let mut board = Scoreboard::default();
        for (start, end) in ranges {
            let range = Range::new(Seq(*start), Seq(*end), 100, 0, 0);
            board.push(range);
        }
        board
    }

    fn shape(board: &Scoreboard) -> Vec<(u32, u32, bool)> {
        board.ranges.iter().map(|range| (range.start.0, range.end.0, range.sacked)).collect()
    }

    #[test]
    fn a_block_marks_whole_segments_and_the_short_last_one() {
        let mut board = board(&[(0, 350)]);
        let mut seen = 0;
        board.sack(Seq(50), Seq(250), |range| seen += range.segments());
        assert_eq!(shape(&board), [(0, 100, false), (100, 200, true), (200, 350, false)]);
        board.sack(Seq(349), Seq(350), |range| seen += range.segments());
        assert_eq!(seen, 1, "the last byte of a segment is not the segment");
        board.sack(Seq(300), Seq(350), |range| seen += range.segments());
        assert_eq!(shape(&board)[3], (300, 350, true));
        assert_eq!((board.out(), board.sacked(), board.in_flight(), seen), (4, 2, 2, 2));
    }

    #[test]
    fn a_block_that_was_seen_before_counts_once_and_says_how_far_it_reaches() {
        let mut board = board(&[(0, 100), (100, 200), (200, 300), (300, 400)]);
        assert_eq!(board.sack(Seq(100), Seq(250), |_| ()), Seq(200));
        let mut seen = Vec::new();
        assert_eq!(board.sack(Seq(200), Seq(400), |range| seen.push(range.start)), Seq(400));
        assert_eq!(seen, [Seq(200), Seq(300)]);
        board.sack(Seq(100), Seq(400), |_| panic!("nothing is new"));
    }

    #[test]
    fn an_acknowledgement_takes_ranges_and_whole_segments_off_the_front() {
        let mut board = board(&[(0, 100), (100, 500)]);
        let mut seen = 0;
        board.acknowledge(Seq(250), |range| seen += range.segments());
        assert_eq!((seen, board.out(), shape(&board)), (2, 3, vec![(250, 500, false)]));
    }

    #[test]
    fn lost_ranges_come_in_order_and_once() {
        let mut board = board(&[(0, 100), (100, 200), (200, 300)]);
        board.mark_lost(2);
        board.mark_lost(0);
        assert_eq!((board.lost(), board.in_flight(), board.next_lost()), (2, 1, Some(0)));
        board.change(0, |range| (range.again, range.resent) = (true, true));
        assert_eq!((board.in_flight(), board.next_lost()), (2, Some(2)));
        board.change(2, |range| range.again = true);
        assert_eq!((board.in_flight(), board.next_lost()), (3, None));
        board.mark_lost(0);
        assert_eq!((board.in_flight(), board.next_lost()), (2, Some(0)), "the copy was lost too");
        board.sack(Seq(0), Seq(100), |_| ());
        assert_eq!((board.lost(), board.again(), board.sacked(), board.in_flight()), (1, 1, 1, 2));
    }
}
