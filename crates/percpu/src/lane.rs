//! Lanes: the way of magazines between one CPU and the [`Taker`](crate::Taker) of a depot, and
//! back, by two rings.
//!
//! ```text
//!              full ring    [m7, s]    [m3, s+1]  ...       written by the CPU, read by the taker
//!   CPU ───────────────────────────────────────────────► taker
//!       ◄───────────────────────────────────────────────
//!              empty ring   [m9, s+1]  [m2, s+2]  ...       written by the taker, read by the CPU
//! ```
//!
//! A *position* counts the exchanges of a lane: it is one in both rings. A CPU whose magazine is
//! full advances to the next position: it loads the empty magazine there, and puts the full one at
//! the same position of the full ring. The taker puts the next empty magazine at a position after
//! it has taken the full one of the lap before. So the full ring never overflows, and neither side
//! reads the other's position: each place holds the position for which it was written, and a reader
//! compares (as in Vyukov's bounded queue).
//!
//! ```text
//!   position = lap (16 bits) | lane (12 bits) | place (4 bits)         advances by place, then by lap
//!   place    = number of a magazine (32 bits) | position (32 bits)     not written in this lap yet: the last lap's
//! ```
//!
//! **A lane belongs to the magazine that is loaded on a CPU.** The magazine's `next`, which links
//! lists elsewhere, is the position at which the CPU's last full magazine was put. A CPU gets a
//! lane with its first magazine. When the magazine is taken from the CPU, the lane is free for
//! another. A free lane may have empty magazines in its ring. If others are short of them, the taker
//! takes the lane as a CPU would, takes them out, and frees the lane: no CPU can look into it
//! meanwhile, so this needs no barrier.
//!
//! **Two steps, each with one commit.** No thread has a magazine in hand, so none can be preempted
//! with one:
//!
//! ```text
//!   rotate:   m = *word, s = the next position after m's     m is full, and what was put at m's is published
//!             full[s].number = m                             its position is the last lap's: not read
//!             e = empty[s], e.position = s
//!             *word = e                                      the commit: e is loaded
//!   publish:  e = *word, s = e.position
//!             full[s].position = s                           the commit: the taker sees m
//! ```
//!
//! A thread that is preempted between the two leaves a magazine that is *unpublished*. The next
//! thread of this CPU publishes it before it rotates. A taker that has closed the gate publishes it
//! for the CPU. A thread that finds itself on another CPU, or its CPU's lock taken, publishes by a
//! compare-and-swap: the place must be as it left it. Both find it: the position of the loaded
//! magazine is not in its place. In one sequence of two stores, an abort between them would look
//! like one before them.
//!
//! **Why the number is stored first.** The place must hold `m` when `m` is in no word any more, and
//! a thread that publishes for another does not know `m`. A sequence that is restarted in between
//! stores the same number again: no other thread writes this half, and the taker compares the
//! other.
//!
//! **Wrap-around.** A place of position `s` was written for the lap before `s`, or for `s`. So one
//! bit of the lap would do, and the lap may wrap. All lanes begin at the end of the last lap.

use crate::line::Line;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Places in a ring: two lines. Two in models.
pub(crate) const PLACES: u32 = if cfg!(loom) { 2 } else { 16 };
/// The most lanes: an index has 16 bits.
pub(crate) const MOST_LANES: usize = (1 << INDEX_BITS) / PLACES as usize;
const INDEX_BITS: u32 = 16;
/// What a position whose place has overflowed into the lane lacks to the first place of the next
/// lap.
#[cfg_attr(loom, allow(dead_code, reason = "a model has no assembly"))]
pub(crate) const NEXT_LAP: u32 = (1 << INDEX_BITS) - PLACES;

/// A position in the rings of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position(pub(crate) u32);

impl Position {
    /// The last position of the last lap: the lane begins at the next one.
    fn before_first(lane: usize) -> Self {
        Self((u32::MAX << INDEX_BITS) | (lane as u32 * PLACES + PLACES - 1))
    }

    pub(crate) fn next(self) -> Self {
        let next = self.0.wrapping_add(1);
        Self(if next.is_multiple_of(PLACES) { next.wrapping_add(NEXT_LAP) } else { next })
    }

    /// The same place, a lap earlier.
    fn lap_before(self) -> Self {
        Self(self.0.wrapping_sub(1 << INDEX_BITS))
    }

    /// The index of its place in all rings of one kind.
    #[inline]
    pub(crate) fn index(self) -> usize {
        (self.0 & ((1 << INDEX_BITS) - 1)) as usize
    }

    pub(crate) fn lane(self) -> usize {
        self.index() / PLACES as usize
    }
}

/// The content of a place.
#[inline]
pub(crate) fn placed(position: Position, number: u32) -> u64 {
    u64::from(number) << 32 | u64::from(position.0)
}

/// The number of the magazine in a place, if it was written for `position`.
#[inline]
pub(crate) fn number_at(place: u64, position: Position) -> Option<u32> {
    (place as u32 == position.0).then_some((place >> 32) as u32)
}

/// A ring on lines of its own. What the CPU writes and what the taker writes are on different ones.
#[repr(align(128))]
#[derive(Debug)]
struct Ring([AtomicU64; PLACES as usize]);

/// Rings of one kind, for each lane.
#[derive(Debug)]
pub(crate) struct Rings(Box<[Ring]>);

impl Rings {
    fn new(lanes: usize) -> Self {
        let place = |lane: usize, at: usize| {
            let last = Position::before_first(lane);
            AtomicU64::new(placed(Position(last.0 - (PLACES - 1) + at as u32), 0))
        };
        Self((0..lanes).map(|lane| Ring(std::array::from_fn(|at| place(lane, at)))).collect())
    }

    /// All places, for sequences: the one of a position is at its [index](Position::index).
    #[inline]
    #[cfg_attr(any(loom, not(target_arch = "x86_64")), allow(dead_code, reason = "only assembly has it"))]
    pub(crate) fn places(&self) -> *const AtomicU64 {
        self.0.as_ptr().cast()
    }

    #[inline]
    pub(crate) fn place(&self, position: Position) -> &AtomicU64 {
        &self.0[position.lane()].0[position.index() % PLACES as usize]
    }

    /// The magazine at this position, if there is one.
    #[inline]
    pub(crate) fn get(&self, position: Position) -> Option<u32> {
        // Acquire: the magazine's contents come with its place.
        number_at(self.place(position).load(Ordering::Acquire), position)
    }

    /// Puts a magazine at this position.
    pub(crate) fn put(&self, position: Position, number: u32) {
        // Release: as above.
        self.place(position).store(placed(position, number), Ordering::Release);
    }

    /// Makes this position the next one to be written. The caller has the lane, and what was there.
    pub(crate) fn reset(&self, position: Position) {
        self.place(position).store(placed(position.lap_before(), 0), Ordering::Relaxed);
    }
}

/// The lanes of a depot.
#[derive(Debug)]
pub(crate) struct Lanes {
    pub(crate) full: Rings,
    pub(crate) empty: Rings,
    /// The position at which the last full magazine of each free lane was put.
    last: Box<[AtomicU32]>,
    /// A bit for each lane, 64 to a word: set while the lane is free. Givers write it, and the taker
    /// reads it for each empty magazine.
    free: Box<[Line<AtomicU64>]>,
}

impl Lanes {
    /// `count` lanes, at least 1 and at most [`MOST_LANES`], with empty rings.
    pub(crate) fn new(count: usize) -> Self {
        let count = count.clamp(1, MOST_LANES);
        let bits = |first: usize| u64::MAX >> (64 - (count - first).min(64));
        Self {
            full: Rings::new(count),
            empty: Rings::new(count),
            last: (0..count).map(|lane| AtomicU32::new(Position::before_first(lane).0)).collect(),
            free: (0..count).step_by(64).map(|first| Line(AtomicU64::new(bits(first)))).collect(),
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.last.len()
    }

    /// Takes a free lane. Returns its last position. One atomic.
    pub(crate) fn take(&self) -> Option<Position> {
        for (word, first) in self.free.iter().zip((0_usize..).step_by(64)) {
            let mut left = word.0.load(Ordering::Relaxed);
            while left != 0 {
                let bit = left & left.wrapping_neg();
                // Acquire: the lane's last position comes with it.
                left = word.0.fetch_and(!bit, Ordering::Acquire);
                if left & bit != 0 {
                    return Some(self.last(first + bit.trailing_zeros() as usize));
                }
            }
        }
        None
    }

    /// Takes this lane, if it is free. Returns its last position. One atomic.
    pub(crate) fn take_this(&self, lane: usize) -> Option<Position> {
        let bit = 1 << (lane % 64);
        // Acquire: as above.
        let free = self.free[lane / 64].0.fetch_and(!bit, Ordering::Acquire);
        (free & bit != 0).then(|| self.last(lane))
    }

    /// The last position of a lane that the caller has.
    fn last(&self, lane: usize) -> Position {
        Position(self.last[lane].load(Ordering::Relaxed))
    }

    /// Frees the lane of this position, which is its last one. The caller has the lane, and
    /// everything up to the position is published.
    pub(crate) fn put(&self, last: Position) {
        let lane = last.lane();
        self.last[lane].store(last.0, Ordering::Relaxed);
        // Release: as above.
        self.free[lane / 64].0.fetch_or(1 << (lane % 64), Ordering::Release);
    }

    /// The position at which each lane begins.
    pub(crate) fn first_positions(&self) -> impl Iterator<Item = Position> {
        (0..self.count()).map(|lane| Position::before_first(lane).next())
    }

    /// A bit for each of 64 lanes that is free.
    pub(crate) fn free(&self, word: usize) -> u64 {
        self.free[word].0.load(Ordering::Relaxed)
    }

    /// A bit for each of 64 lanes that is not free.
    pub(crate) fn in_use(&self, word: usize) -> u64 {
        let lanes = (self.count() - 64 * word).min(64);
        !self.free(word) & u64::MAX >> (64 - lanes)
    }

    pub(crate) fn is_free(&self, lane: usize) -> bool {
        self.free(lane / 64) & 1 << (lane % 64) != 0
    }

    /// Publishes the magazine that the CPU with this position has replaced, if no thread has done
    /// so. The gate is quiet.
    pub(crate) fn publish(&self, position: Position) {
        if let Some(number) = self.unpublished(position) {
            self.full.place(position).store(placed(position, number), Ordering::Relaxed);
        }
    }

    /// Publishes the magazine that this thread has put at this position, if no thread has done so:
    /// for a thread that may be on another CPU by now. A load, and an atomic read-modify-write if
    /// it is needed, because the CPU or the taker may do so at the same time.
    #[inline]
    pub(crate) fn publish_left_behind(&self, position: Position) {
        let place = self.full.place(position);
        let left = place.load(Ordering::Relaxed);
        if let Some(number) = number_at(left, position.lap_before()) {
            // Release: the magazine's contents come with its place.
            let _ = place.compare_exchange(left, placed(position, number), Ordering::Release, Ordering::Relaxed);
        }
    }

    /// The number of the magazine that the CPU with this position has replaced and not published. A
    /// guess, unless a sequence of the CPU asks, or the gate is quiet. For a guess, the position
    /// may be one of no lane.
    pub(crate) fn unpublished(&self, position: Position) -> Option<u32> {
        if position.lane() >= self.count() {
            return None;
        }
        let place = self.full.place(position).load(Ordering::Relaxed);
        (place as u32 != position.0).then_some((place >> 32) as u32)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Every place is used in turn, the lane stays, and the lap wraps.
    #[test]
    fn positions_go_round_their_lane() {
        for lane in [0, 1, 255, MOST_LANES - 1] {
            let mut position = Position::before_first(lane);
            for at in 0..(PLACES << INDEX_BITS) {
                let last = position;
                position = position.next();
                assert_eq!((position.lane(), position.0 % PLACES), (lane, at % PLACES));
                assert_ne!(position.0 >> INDEX_BITS, if at % PLACES == 0 { last.0 >> INDEX_BITS } else { u32::MAX });
            }
            assert_eq!(position, Position::before_first(lane), "after all laps");
        }
    }

    /// A lane has one holder, who learns where the last one was.
    #[test]
    fn lanes_are_taken_once() {
        let lanes = Lanes::new(70);
        let taken: Vec<_> = std::iter::from_fn(|| lanes.take()).collect();
        assert_eq!(taken.iter().map(|position| position.lane()).collect::<Vec<_>>(), (0..70).collect::<Vec<_>>());
        assert!((0..70).all(|lane| !lanes.is_free(lane)));
        let position = taken[66].next().next();
        lanes.put(position);
        assert!(lanes.is_free(66));
        assert_eq!((lanes.take(), lanes.take()), (Some(position), None));
    }
}
