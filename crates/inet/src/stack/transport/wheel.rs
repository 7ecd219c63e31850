//! The timers of a stack: a hierarchical wheel of microseconds.
//!
//! Why not a heap: each connection has a timer that is set for almost every segment, and here this
//! costs a few stores, whatever the number of connections.
//!
//! ```text
//!   level 0   64 slots of 1 us       this block of 64 us
//!   level 1   64 slots of 64 us      this block of 4 ms      a slot whose time has come is emptied
//!   ...                                                      into the levels below, or fires
//!   level 6   64 slots of 19 h       all the rest
//! ```
//!
//! A timer's level is the highest group of six bits in which its time and the present time differ.
//! So every timer of a level is earlier than all timers of the levels above, and each level has a
//! word whose bits mark which of its slots are in use: the next slot is found by seven tests.
//! Setting and clearing a timer are a few stores; a timer moves down at most six times.
//!
//! Timers are numbered by their user: connection 7 has timer 7. A slot is a doubly linked list of
//! such numbers.

use crate::time::Time;

const BITS: u32 = 6;
const SLOTS: u64 = 1 << BITS;
const LEVELS: usize = 7;
const NONE: u32 = u32::MAX;
/// The place of a timer that is not set.
const IDLE: u16 = u16::MAX;

/// Timers by number.
pub(crate) struct Wheel {
    now: u64,
    /// No slot is emptied before this time.
    first: u64,
    levels: Box<[Level; LEVELS]>,
    timers: Vec<Timer>,
}

struct Level {
    /// A bit for each slot that is not empty.
    occupied: u64,
    first: [u32; SLOTS as usize],
}

#[derive(Clone, Copy)]
struct Timer {
    at: u64,
    next: u32,
    previous: u32,
    /// Level and slot, or [`IDLE`].
    place: u16,
}

impl Wheel {
    pub(crate) fn new(now: Time) -> Self {
        let levels = std::array::from_fn(|_| Level { occupied: 0, first: [NONE; SLOTS as usize] });
        Self { now: now.micros(), first: 0, levels: Box::new(levels), timers: Vec::new() }
    }

    /// When timer `n` fires, if it is set.
    #[inline]
    pub(crate) fn get(&self, n: u32) -> Option<Time> {
        self.timers.get(n as usize).filter(|timer| timer.place != IDLE).map(|timer| Time::from_micros(timer.at))
    }

    /// Sets timer `n`. A time that is past fires at the next [`advance`](Self::advance).
    pub(crate) fn set(&mut self, n: u32, at: Time) {
        let index = n as usize;
        if index >= self.timers.len() {
            self.timers.resize(index + 1, Timer { at: 0, next: NONE, previous: NONE, place: IDLE });
        }
        self.unlink(n);
        self.timers[index].at = at.micros();
        self.link(n);
        self.first = 0;
    }

    /// Clears timer `n`.
    pub(crate) fn clear(&mut self, n: u32) {
        if (n as usize) < self.timers.len() {
            self.unlink(n);
        }
    }

    /// Releases the memory of timers from number `end` on, which are not set.
    pub(crate) fn shrink(&mut self, end: usize) {
        debug_assert!(self.timers.iter().skip(end).all(|timer| timer.place == IDLE), "they are not set");
        self.timers.truncate(end);
        self.timers.shrink_to(end);
    }

    /// The time of the first timer, or an earlier one at which a timer moves down.
    pub(crate) fn next(&self) -> Option<Time> {
        self.first_slot().map(|(_, _, at)| Time::from_micros(at))
    }

    /// Advances the wheel to `now` if no timer fires or moves until then. Returns whether that is
    /// so; otherwise [`advance`](Self::advance) is to be called. Cost: a comparison.
    #[inline]
    pub(crate) fn rests_until(&mut self, now: Time) -> bool {
        let now = now.micros().max(self.now);
        let rests = now < self.first;
        if rests {
            self.now = now;
        }
        rests
    }

    /// Advances the wheel to `now`, and adds the timers that are due to `fired`. They are cleared.
    pub(crate) fn advance(&mut self, now: Time, fired: &mut Vec<u32>) {
        if !self.rests_until(now) {
            self.empty_slots(now.micros().max(self.now), fired);
        }
    }

    /// Empties the slots whose time has come.
    fn empty_slots(&mut self, now: u64, fired: &mut Vec<u32>) {
        while let Some((level, slot, at)) = self.first_slot().filter(|&(_, _, at)| at <= now) {
            self.now = at;
            let head = &mut self.levels[level];
            head.occupied &= !(1 << slot);
            let mut n = std::mem::replace(&mut head.first[slot], NONE);
            while n != NONE {
                let timer = &mut self.timers[n as usize];
                let next = timer.next;
                timer.place = IDLE;
                if timer.at <= now {
                    fired.push(n)
                } else {
                    self.link(n)
                }
                n = next;
            }
        }
        self.now = now;
        self.first = self.first_slot().map_or(u64::MAX, |(_, _, at)| at);
    }

    /// The earliest slot: its level, its number, and its time, which is not past.
    fn first_slot(&self) -> Option<(usize, usize, u64)> {
        self.levels.iter().enumerate().find(|(_, level)| level.occupied != 0).map(|(n, level)| {
            let shift = BITS * n as u32;
            let here = (self.now >> shift) & (SLOTS - 1);
            let ahead = u64::from(level.occupied.rotate_right(here as u32).trailing_zeros());
            let slot = (here + ahead) % SLOTS;
            let at = ((self.now >> shift) + ahead) << shift;
            (n, slot as usize, at.max(self.now))
        })
    }

    fn link(&mut self, n: u32) {
        let timer = &mut self.timers[n as usize];
        let at = timer.at.max(self.now);
        let differs = (at ^ self.now) | 1;
        let level = ((u64::BITS - 1 - differs.leading_zeros()) / BITS) as usize;
        // The last level is circular: a time of its next block is in a slot behind the present one,
        // and what is more than a turn away waits in the last slot of the turn, and is placed again
        // then.
        let level = level.min(LEVELS - 1);
        let shift = BITS * level as u32;
        let ahead = ((at >> shift) - (self.now >> shift)).min(SLOTS - 1);
        let slot = ((self.now >> shift) + ahead) & (SLOTS - 1);
        let head = &mut self.levels[level];
        head.occupied |= 1 << slot;
        let second = std::mem::replace(&mut head.first[slot as usize], n);
        *timer = Timer { at: timer.at, next: second, previous: NONE, place: (level as u16) << BITS | slot as u16 };
        if second != NONE {
            self.timers[second as usize].previous = n;
        }
    }

    fn unlink(&mut self, n: u32) {
        let Timer { next, previous, place, .. } = self.timers[n as usize];
        if place == IDLE {
            return;
        }
        if next != NONE {
            self.timers[next as usize].previous = previous;
        }
        if previous != NONE {
            self.timers[previous as usize].next = next;
        } else {
            let (level, slot) = (usize::from(place >> BITS), usize::from(place) & (SLOTS as usize - 1));
            self.levels[level].first[slot] = next;
            if next == NONE {
                self.levels[level].occupied &= !(1 << slot);
            }
        }
        self.timers[n as usize].place = IDLE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn at(micros: u64) -> Time {
        Time::from_micros(micros)
    }

    /// The wheel against a sorted set: timers fire when their time has come, not before, and once.
    #[test]
    fn timers_fire_as_in_a_sorted_set() {
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..20 {
            let mut now = rng.u64(..1 << 44);
            let (mut wheel, mut model) = (Wheel::new(at(now)), BTreeSet::new());
            let mut times = [None; 50];
            for _ in 0..5000 {
                let n = rng.usize(..50);
                model.remove(&(times[n].take().unwrap_or(0), n as u32));
                if rng.u8(..4) == 0 {
                    wheel.clear(n as u32);
                } else {
                    let bits = rng.u32(..50);
                    let when = now.saturating_add(rng.u64(..1 << bits)).saturating_sub(10);
                    wheel.set(n as u32, at(when));
                    assert_eq!(wheel.get(n as u32), Some(at(when)));
                    times[n] = Some(when);
                    model.insert((when, n as u32));
                }
                if let Some(next) = wheel.next() {
                    assert!(next.micros() <= model.first().map_or(0, |&(when, _)| when.max(now)));
                    assert!(next.micros() >= now);
                } else {
                    assert!(model.is_empty());
                }
                let bits = rng.u32(..40);
                now += rng.u64(..1 << bits);
                let mut fired = Vec::new();
                if !rng.bool() || !wheel.rests_until(at(now)) {
                    wheel.advance(at(now), &mut fired);
                }
                let mut due: Vec<u32> = model.iter().filter(|&&(when, _)| when <= now).map(|&(_, n)| n).collect();
                model.retain(|&(when, _)| when > now);
                due.iter().for_each(|&n| times[n as usize] = None);
                fired.sort_unstable();
                due.sort_unstable();
                assert_eq!(fired, due);
            }
        }
    }

    /// A loop that sleeps until `next` and then advances wakes up at most once for each level of a
    /// timer.
    #[test]
    fn a_timer_costs_a_sleeper_few_wake_ups() {
        let mut wheel = Wheel::new(at(12345));
        wheel.set(3, at(12345 + 7_200_000_000));
        let (mut fired, mut wake_ups) = (Vec::new(), 0);
        while let Some(next) = wheel.next() {
            wheel.advance(next, &mut fired);
            wake_ups += 1;
        }
        assert_eq!(fired, [3]);
        assert!(wake_ups <= LEVELS, "{wake_ups}");
    }
}
