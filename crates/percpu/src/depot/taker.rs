//! The [`Taker`]: it takes full magazines, empties them, and reclaims those that lie on CPUs.
//!
//! Why it is a type: one thread at a time takes, and the magazines that it has taken and not yet
//! emptied are its own. The races with givers are at the head of `depot.rs`.

use super::{CLOSED, Depot};
use crate::error::BarrierError;
use crate::lane::Lanes;
use crate::magazine::{Magazine, at_word};
use crate::sync::{AtomicUsize, Ordering, handover};
use crate::word::clear;
use std::num::NonZeroUsize;

mod lane_ends;

use lane_ends::LaneEnds;

/// Takes the items out of one [`Depot`], and owns the magazines that it has taken and not yet
/// emptied.
///
/// [`Depot::new`] makes the one taker of a depot. It cannot be copied, and its methods need
/// exclusive access: so items are neither lost nor found twice, whichever threads give and take.
/// The taker belongs to its depot: it takes nothing from any other one.
///
/// Items that are pending when the taker is dropped stay in the depot, out of reach.
#[derive(Debug)]
#[must_use = "without its taker, a depot only fills up"]
pub struct Taker {
    /// The depot that it was made with.
    depot: u64,
    /// Index and 1 of the first magazine that was taken and is not empty yet, or 0.
    pending: u32,
    /// The bits of empty magazines that givers cannot have yet, in one word of `empty`.
    emptied: u64,
    /// The index of that word.
    word: usize,
    /// How many bits are set at once: few enough for the givers to have most of the empty
    /// magazines.
    lot: u32,
    /// The taker's ends of the lanes. In a box, because users move the taker.
    ends: Box<LaneEnds>,
    /// What each CPU held when [`reclaim_idle`](Self::reclaim_idle) last looked: the magazine's
    /// address plus its length, or 0.
    seen: Vec<usize>,
}

impl Taker {
    /// The taker of the depot with this id, which has `magazines` and these lanes.
    pub(super) fn new(depot: u64, magazines: u32, lanes: &Lanes) -> Self {
        let (lot, ends) = ((magazines / 16).clamp(1, 8), Box::new(LaneEnds::new(lanes, magazines as usize)));
        Self { depot, pending: 0, emptied: 0, word: 0, lot, ends, seen: Vec::new() }
    }

    /// How many magazines are in rings.
    #[cfg(all(test, loom))]
    pub(crate) fn in_rings(&self) -> usize {
        self.ends.in_rings()
    }

    /// Whether a full magazine is in a ring.
    #[cfg(all(test, loom))]
    pub(crate) fn sees_full(&self, depot: &Depot) -> bool {
        self.ends.sees_full(&depot.lanes)
    }

    /// Whether this is the taker of `depot`.
    fn is_of(&self, depot: &Depot) -> bool {
        self.depot == depot.id
    }

    /// Empties one magazine into `take`: one that is pending, or else one of the shared list, or
    /// else one of a CPU's ring. Returns false if there is none, or if `depot` is another taker's.
    /// One atomic for all magazines that are on the list, and none for those of rings.
    ///
    /// If `take` panics, the items that it has not seen stay pending.
    pub fn refill(&mut self, depot: &Depot, take: impl FnMut(NonZeroUsize)) -> bool {
        if !self.is_of(depot) {
            return false;
        }
        if self.pending == 0 {
            self.take_full(depot);
        }
        let found = self.empty_one(depot, take);
        if !found {
            self.flush(depot);
        } else if self.pending == 0 && !self.take_full(depot) {
            // For the next refill.
            let next = self.ends.next_full(&depot.lanes);
            next.and_then(|number| depot.magazine(number)).into_iter().for_each(Magazine::prefetch);
        }
        found
    }

    /// Takes the whole list of full magazines, when none is pending. Returns false if it is empty
    /// or closed.
    fn take_full(&mut self, depot: &Depot) -> bool {
        if matches!(depot.full.0.load(Ordering::Relaxed), 0 | CLOSED) {
            return false;
        }
        self.pending = depot.full.0.swap(0, Ordering::Acquire);
        handover::acquire(&depot.intake.capacity);
        depot.magazine(self.pending).into_iter().for_each(Magazine::prefetch);
        true
    }

    /// Lets givers have the empty magazines that the taker holds back; if a giver was refused one,
    /// also those in the rings of lanes that no CPU has.
    fn flush(&mut self, depot: &Depot) {
        self.ends.publish(&depot.lanes);
        self.set_bits(depot);
        if depot.is_crowded() {
            self.take_back(depot);
        }
    }

    /// Sets the bits of the empty magazines that the taker holds back.
    fn set_bits(&mut self, depot: &Depot) {
        let bits = std::mem::take(&mut self.emptied);
        if bits != 0 {
            Depot::touch(depot);
            // Release: the next holders come after the taker's reads.
            depot.empty[self.word].0.fetch_or(bits, Ordering::Release);
        }
    }

    /// Lets givers have an empty magazine, together with the next few: the CPU with the lane from
    /// which it came, or a CPU that has used up its ring, or all.
    #[inline]
    fn put_empty(&mut self, depot: &Depot, magazine: &Magazine, lane: Option<usize>) {
        if !self.ends.put_empty(&depot.lanes, magazine.index, lane) {
            self.put_shared(depot, magazine);
        }
    }

    /// Lets any giver have an empty magazine.
    fn put_shared(&mut self, depot: &Depot, magazine: &Magazine) {
        let at = magazine.index as usize - 1;
        if self.word != at / 64 {
            self.set_bits(depot);
            self.word = at / 64;
        }
        self.emptied |= 1 << (at % 64);
        if self.emptied.count_ones() >= self.lot {
            self.set_bits(depot);
        }
    }

    /// Empties the first magazine that is pending, or else one of a ring. Returns false if there is
    /// none.
    #[inline]
    fn empty_one(&mut self, depot: &Depot, mut take: impl FnMut(NonZeroUsize)) -> bool {
        let mut lane = None;
        let magazine = match depot.magazine(self.pending) {
            Some(magazine) => {
                self.pending = magazine.next.load(Ordering::Relaxed);
                depot.magazine(self.pending).into_iter().for_each(Magazine::prefetch);
                magazine
            }
            None => {
                let Some((number, from)) = self.ends.take_full(&depot.lanes) else { return false };
                handover::acquire(&depot.intake.capacity);
                let Some(magazine) = depot.magazine(number) else { return false };
                lane = Some(from);
                magazine
            }
        };
        let mut emptied = Emptied { depot, taker: self, magazine, lane, taken: 0 };
        for item in magazine.items() {
            emptied.taken += 1;
            NonZeroUsize::new(item).into_iter().for_each(&mut take);
        }
        true
    }

    /// Puts a magazine that only the taker has in front of those that are pending.
    fn add(&mut self, magazine: &Magazine) {
        magazine.next.store(self.pending, Ordering::Relaxed);
        self.pending = magazine.index;
    }

    /// Takes the full magazines of all rings. Returns how many.
    fn take_rings(&mut self, depot: &Depot) -> usize {
        let mut taken = 0;
        while let Some((number, _)) = self.ends.take_full(&depot.lanes) {
            depot.magazine(number).into_iter().for_each(|magazine| self.add(magazine));
            taken += 1;
        }
        taken
    }

    /// Lets all givers have the empty magazines in the rings of lanes that no CPU has.
    fn take_back(&mut self, depot: &Depot) {
        self.ends.take_back(&depot.lanes, |number| {
            depot.magazine(number).into_iter().for_each(|magazine| depot.push_empty(magazine));
        });
    }

    /// Takes a magazine that a CPU has loaded, out of its word. The gate is quiet.
    fn unload(&mut self, depot: &Depot, word: &AtomicUsize, magazine: &Magazine) {
        clear(word);
        depot.lanes.put(magazine.position());
        self.add(magazine);
    }

    /// Takes what the CPUs hold. One membarrier; givers are refused until it is over. Not for
    /// signal handlers. If `take` panics, the items that it has not seen stay pending.
    ///
    /// # Errors
    ///
    /// The barrier failed, and the items are where they were.
    pub fn reclaim(&mut self, depot: &Depot, mut take: impl FnMut(NonZeroUsize)) -> Result<(), BarrierError> {
        if !self.is_of(depot) {
            return Ok(());
        }
        let Some(quiet) = depot.intake.gate.close()? else { return Ok(()) };
        handover::acquire(&depot.intake.capacity);
        let mut taken = 0;
        for word in quiet.words() {
            // SAFETY: the gate is quiet: magazines of ours or null, and the taker's now.
            let Some(magazine) = (unsafe { at_word(word.load(Ordering::Relaxed)) }) else { continue };
            depot.lanes.publish(magazine.position());
            // An empty magazine stays where its CPU will use it.
            if magazine.len() > 0 {
                self.unload(depot, word, magazine);
                taken += 1;
            }
        }
        taken += self.take_rings(depot);
        self.take_back(depot);
        quiet.reopen();
        (0..taken).for_each(|_| {
            self.empty_one(depot, &mut take);
        });
        Ok(())
    }

    /// Takes the magazines of the CPUs that are idle, if the depot is [crowded](Depot::is_crowded),
    /// so that other CPUs can have them. A CPU is idle if it holds the same as when this was last
    /// called. Returns whether there were any. Reads a line of each magazine on a CPU; one
    /// membarrier if a CPU is idle. Not for signal handlers. If `take` panics, the items that it
    /// has not seen stay pending.
    ///
    /// # Errors
    ///
    /// The barrier failed, and the items are where they were.
    pub fn reclaim_idle(&mut self, depot: &Depot, mut take: impl FnMut(NonZeroUsize)) -> Result<bool, BarrierError> {
        if !self.is_of(depot) || !depot.is_crowded() {
            return Ok(false);
        }
        depot.crowded.0.store(0, Ordering::Relaxed);
        let now: Vec<usize> = depot.intake.gate.peek().map(held).collect();
        let before = std::mem::replace(&mut self.seen, now);
        let is_idle = |now: usize, before: usize| now != 0 && now == before;
        if !self.seen.iter().zip(&before).any(|(&now, &before)| is_idle(now, before)) {
            return Ok(false);
        }
        self.flush(depot);
        let Some(quiet) = depot.intake.gate.close()? else { return Ok(false) };
        handover::acquire(&depot.intake.capacity);
        let mut idle = 0;
        for (word, &before) in quiet.words().zip(&before) {
            let at = word.load(Ordering::Relaxed);
            // SAFETY: the gate is quiet: magazines of ours or null, and the taker's now.
            let Some(magazine) = (unsafe { at_word(at) }) else { continue };
            depot.lanes.publish(magazine.position());
            if is_idle(held(at), before) {
                // Also an empty one, which goes on to the empty ones when it is emptied.
                self.unload(depot, word, magazine);
                idle += 1;
            }
        }
        let taken = idle + self.take_rings(depot);
        self.take_back(depot);
        quiet.reopen();
        (0..taken).for_each(|_| {
            self.empty_one(depot, &mut take);
        });
        self.flush(depot);
        Ok(idle > 0)
    }

    /// Takes everything, for the last time: from now on every giver is refused. One membarrier. If
    /// `take` panics, the items that it has not seen stay pending, and [`refill`](Self::refill)
    /// takes them.
    ///
    /// # Errors
    ///
    /// The barrier failed. Items on CPUs, and items that were being given at that moment, stay
    /// where they are. All others were taken, and later givers are refused. Another call tries
    /// again to take the items that are on CPUs.
    pub fn close(&mut self, depot: &Depot, mut take: impl FnMut(NonZeroUsize)) -> Result<(), BarrierError> {
        if !self.is_of(depot) {
            return Ok(());
        }
        let closed = depot.intake.gate.close_for_good().map(|quiet| {
            let Some(quiet) = quiet else { return };
            handover::acquire(&depot.intake.capacity);
            for word in quiet.words() {
                // SAFETY: the gate is quiet: magazines of ours or null, and the taker's now.
                let Some(magazine) = (unsafe { at_word(word.load(Ordering::Relaxed)) }) else { continue };
                depot.lanes.publish(magazine.position());
                self.unload(depot, word, magazine);
            }
            quiet.stay_closed();
        });
        // AcqRel: a giver that finds the list closed comes after all that the taker did before.
        let mut full = depot.full.0.swap(CLOSED, Ordering::AcqRel);
        handover::acquire(&depot.intake.capacity);
        // A list that is closed already has no magazine: `CLOSED` is the index of none.
        while let Some(magazine) = depot.magazine(full) {
            full = magazine.next.load(Ordering::Relaxed);
            self.add(magazine);
        }
        while self.empty_one(depot, &mut take) {}
        closed
    }
}

/// A magazine that is being emptied. When the value is dropped, also by a panic, the magazine
/// becomes an empty one of its depot, or stays pending with the items that were not taken.
struct Emptied<'t> {
    depot: &'t Depot,
    taker: &'t mut Taker,
    magazine: &'t Magazine,
    /// The lane from which it came, if it is known.
    lane: Option<usize>,
    /// How many items were taken, from the front.
    taken: usize,
}

impl Drop for Emptied<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.taken == self.magazine.len() {
            self.magazine.clear();
            self.taker.put_empty(self.depot, self.magazine, self.lane);
        } else {
            self.keep_the_rest();
        }
    }
}

impl Emptied<'_> {
    #[cold]
    fn keep_the_rest(&mut self) {
        self.magazine.remove_first(self.taken);
        self.taker.add(self.magazine);
    }
}

/// A number that changes when the CPU whose word this is gets or hands on an item: magazines are
/// further apart than they have items.
fn held(word: usize) -> usize {
    // SAFETY: a magazine of the depot, which is borrowed, or null; its length may be read by any
    // thread.
    word + unsafe { at_word(word) }.map_or(0, Magazine::len)
}
