//! The taker's ends of the lanes: where it takes full magazines, and where it puts empty ones.
//!
//! Why apart from [`Lanes`]: these are the taker's own words, which no giver reads or writes.

use crate::lane::{Lanes, PLACES, Position};

/// The most empty magazines that are put into a ring at once. The four places are on one line.
const LOT: usize = if cfg!(loom) { 1 } else { 4 };

/// One lane's end.
#[derive(Debug)]
struct End {
    /// The next position of the full ring.
    full: Position,
    /// The next position of the empty ring.
    empty: Position,
    /// How many positions the first is behind the second: magazines that the CPU has got and not
    /// handed over. At most [`PLACES`], so that the CPU overwrites no full magazine.
    out: usize,
}

#[derive(Debug)]
pub(super) struct LaneEnds {
    ends: Box<[End]>,
    /// A bit for each lane with magazines out: the others cannot have a full one.
    out: Box<[u64]>,
    /// The lane in which the last full magazine was found.
    at: usize,
    /// The lane that got the last empty magazine of unknown origin.
    turn: usize,
    /// The most magazines that a lane has out: 0 if there are fewer than two for each lane. All
    /// lanes together have half of them at most.
    most_out: usize,
    /// Empty magazines that are not put into their ring yet, all of the lane `held_for`.
    held: [u32; LOT],
    held_count: usize,
    held_for: usize,
    lot: usize,
}

impl LaneEnds {
    pub(super) fn new(lanes: &Lanes, magazines: usize) -> Self {
        let count = lanes.count();
        let most_out = (magazines / (2 * count)).min(PLACES as usize);
        Self {
            ends: lanes.first_positions().map(|position| End { full: position, empty: position, out: 0 }).collect(),
            out: vec![0; count.div_ceil(64)].into(),
            at: 0,
            turn: 0,
            most_out,
            held: [0; LOT],
            held_count: 0,
            held_for: 0,
            lot: (most_out / 2).clamp(1, LOT),
        }
    }

    #[cfg(all(test, loom))]
    pub(super) fn in_rings(&self) -> usize {
        self.held_count + self.ends.iter().map(|end| end.out).sum::<usize>()
    }

    #[cfg(all(test, loom))]
    pub(super) fn sees_full(&self, lanes: &Lanes) -> bool {
        self.ends.iter().any(|end| lanes.full.get(end.full).is_some())
    }

    /// Takes a full magazine out of a ring: the one that the last was in, or else the next.
    #[inline]
    pub(super) fn take_full(&mut self, lanes: &Lanes) -> Option<(u32, usize)> {
        self.take_from(lanes, self.at).or_else(|| self.take_from_another(lanes))
    }

    #[inline]
    fn take_from(&mut self, lanes: &Lanes, lane: usize) -> Option<(u32, usize)> {
        let end = &mut self.ends[lane];
        if end.out == 0 {
            return None;
        }
        let number = lanes.full.get(end.full)?;
        end.full = end.full.next();
        end.out -= 1;
        if end.out == 0 {
            self.out[lane / 64] &= !(1 << (lane % 64));
        }
        self.at = lane;
        Some((number, lane))
    }

    #[cold]
    fn take_from_another(&mut self, lanes: &Lanes) -> Option<(u32, usize)> {
        let found = find_after(
            self.at,
            self.out.len(),
            |word| self.out[word],
            |lane| lanes.full.get(self.ends[lane].full).is_some(),
        )?;
        self.take_from(lanes, found)
    }

    /// The full magazine that is next in the ring that the last was in, if it is there already.
    #[inline]
    pub(super) fn next_full(&self, lanes: &Lanes) -> Option<u32> {
        let end = &self.ends[self.at];
        if end.out == 0 { None } else { lanes.full.get(end.full) }
    }

    /// Puts an empty magazine into the ring of this lane, or, if it is not known, of the next lane
    /// in turn: together with the next few. Returns false if no CPU has the lane, or the ring has
    /// enough.
    #[inline]
    pub(super) fn put_empty(&mut self, lanes: &Lanes, number: u32, lane: Option<usize>) -> bool {
        let Some(lane) = lane.or_else(|| self.next_in_use(lanes)) else { return false };
        if self.held_for != lane {
            self.publish(lanes);
            self.held_for = lane;
        }
        if lanes.is_free(lane) || self.ends[lane].out + self.held_count >= self.most_out {
            return false;
        }
        self.held[self.held_count] = number;
        self.held_count += 1;
        if self.held_count >= self.lot {
            self.publish(lanes);
        }
        true
    }

    #[cold]
    fn next_in_use(&mut self, lanes: &Lanes) -> Option<usize> {
        self.turn = find_after(self.turn, self.out.len(), |word| lanes.in_use(word), |_| true)?;
        Some(self.turn)
    }

    /// Puts the magazines that are held back into their ring.
    pub(super) fn publish(&mut self, lanes: &Lanes) {
        let lane = self.held_for;
        let end = &mut self.ends[lane];
        for &number in &self.held[..std::mem::take(&mut self.held_count)] {
            lanes.empty.put(end.empty, number);
            end.empty = end.empty.next();
            end.out += 1;
            self.out[lane / 64] |= 1 << (lane % 64);
        }
    }

    /// Takes the empty magazines out of the rings of lanes that no CPU has. Two atomics for each
    /// such lane.
    pub(super) fn take_back(&mut self, lanes: &Lanes, mut take: impl FnMut(u32)) {
        for word in 0..self.out.len() {
            let mut bits = self.out[word] & lanes.free(word);
            while bits != 0 {
                let lane = 64 * word + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                // No CPU looks into the lane's rings until it is put back.
                let Some(last) = lanes.take_this(lane) else { continue };
                let end = &mut self.ends[lane];
                // At these positions the next holder would find them.
                let mut position = last.next();
                while position != end.empty {
                    lanes.empty.get(position).into_iter().for_each(&mut take);
                    lanes.empty.reset(position);
                    end.out -= 1;
                    position = position.next();
                }
                end.empty = last.next();
                if end.out == 0 {
                    self.out[word] &= !(1 << (lane % 64));
                }
                lanes.put(last);
            }
        }
    }
}

/// The next lane after `lane` whose bit is set in its word and that `is_right`; `lane` is the last
/// that is asked.
fn find_after(
    lane: usize,
    words: usize,
    word: impl Fn(usize) -> u64,
    is_right: impl Fn(usize) -> bool,
) -> Option<usize> {
    let (first, behind) = (lane / 64, u64::MAX.checked_shl(lane as u32 % 64 + 1).unwrap_or(0));
    let masked = std::iter::once((first, behind))
        .chain((1..words).map(|n| ((first + n) % words, u64::MAX)))
        .chain(std::iter::once((first, !behind)));
    masked.into_iter().find_map(|(at, mask)| {
        let mut bits = word(at) & mask;
        while bits != 0 {
            let lane = at * 64 + bits.trailing_zeros() as usize;
            if is_right(lane) {
                return Some(lane);
            }
            bits &= bits - 1;
        }
        None
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Empty magazines become visible four at a time. A ring has no more than its places, and what
    /// is in it when its lane is free comes back.
    #[test]
    fn empty_magazines_go_into_the_ring_of_a_lane_in_use() {
        let lanes = Lanes::new(1);
        let mut ends = LaneEnds::new(&lanes, 64);
        assert!(!ends.put_empty(&lanes, 1, None) && !ends.put_empty(&lanes, 1, Some(0)), "no CPU has it");
        let first = lanes.take().unwrap().next();
        let positions: Vec<_> = std::iter::successors(Some(first), |position| Some(position.next())).take(17).collect();
        let in_ring = || positions.iter().map_while(|&position| lanes.empty.get(position)).collect::<Vec<_>>();
        assert!((1..=3).all(|number| ends.put_empty(&lanes, number, None)) && in_ring().is_empty());
        assert!(ends.put_empty(&lanes, 4, Some(0)) && ends.put_empty(&lanes, 5, Some(0)));
        assert_eq!(in_ring(), [1, 2, 3, 4]);
        ends.publish(&lanes);
        assert_eq!(in_ring(), [1, 2, 3, 4, 5]);
        assert_eq!((6..=20).filter(|&number| ends.put_empty(&lanes, number, None)).count(), 11);
        ends.publish(&lanes);
        assert_eq!(in_ring(), (1..=16).collect::<Vec<_>>());

        // The CPU has handed over one, which the taker has not taken yet, and gone.
        assert_eq!((ends.next_full(&lanes), ends.take_full(&lanes)), (None, None));
        lanes.full.put(first, 40);
        lanes.put(first);
        let mut back = Vec::new();
        ends.take_back(&lanes, |number| back.push(number));
        assert_eq!(back, (2..=16).collect::<Vec<_>>());
        ends.take_back(&lanes, |_| unreachable!("they were taken"));
        assert_eq!((ends.next_full(&lanes), ends.take_full(&lanes)), (Some(40), Some((40, 0))));
        assert_eq!((lanes.take(), lanes.empty.get(positions[1])), (Some(first), None));
        assert!(ends.put_empty(&lanes, 7, None));
        ends.publish(&lanes);
        assert_eq!(lanes.empty.get(positions[1]), Some(7), "the lane goes on where it was");
    }

    #[test]
    fn lanes_are_found_in_turn() {
        let words = [1 << 3 | 1 << 63, 0, 1 << 1];
        let find = |lane| find_after(lane, 3, |word| words[word], |_| true);
        assert_eq!([0, 3, 62, 63, 128, 129, 190].map(find), [3, 63, 63, 129, 129, 3, 3].map(Some));
        assert_eq!(find_after(3, 3, |word| words[word], |lane| lane == 3), Some(3));
        assert_eq!(find_after(3, 3, |word| words[word], |lane| lane == 4), None);
        assert_eq!(find_after(63, 1, |_| 0, |_| true), None);
    }
}
