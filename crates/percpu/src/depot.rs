//! The depot: how items go from every CPU to one taker, a magazine at a time (Bonwick and Adams).
//!
//! ```text
//!   CPU 0  word ──► magazine ┐       lane 0: a ring of full magazines ──────►┐
//!                            │               a ring of empty ones ◄──────────┤
//!   CPU 1  word ──► magazine ┼──     lane 1: ...                             ├── the taker empties them
//!   ...                      │                                               │
//!                            └─ no empty one left in the ring?               │
//!                                  list of full magazines, taken whole ─────►┤
//!                                  a bit for each empty magazine ◄───────────┘
//! ```
//!
//! Giving an item is a plain push on this CPU's magazine, in a restartable sequence. Once in
//! `capacity` items the CPU's full magazine is exchanged for an empty one, by the rings of the
//! CPU's lane: plain loads and stores, in two more sequences (`lane.rs`). If the ring of empty
//! magazines has none, the bit of an empty magazine is cleared, and the full magazine is pushed on
//! the shared list, one atomic each. All magazines are made with the depot, and are used again and
//! again. If no empty magazine is left, or the gate is closed, an item is *refused*, and the giver
//! keeps it. If no empty magazine is left, the full one is handed over for *nothing*: the taker
//! gets its items and can empty it, and the CPU has no magazine then. So no magazine stays on a CPU
//! because it is full.
//!
//! **Large machines.** There can be more indices than a depot has magazines for. A CPU has a
//! magazine only together with a lane, and [`Depot::with_lanes`] says how many there are. A giver
//! whose CPU has none is refused then, and notes that CPUs are *crowded*. [`Taker::reclaim_idle`]
//! then looks what the CPUs hold. Those that hold the same as at the look before are idle: the
//! taker takes their magazines, also the empty ones in the rings, and others can have lanes and
//! magazines.
//!
//! **Ownership of an item.** An item is given at one instruction: the commit of a push, or of the
//! exchange that carries it in the new magazine. An item that is not given keeps the depot alive
//! (in a pool: each page keeps the pool, and the depot is a part of the pool). A giver that uses
//! the rings pushes its item after that: the push is the last instruction at which it touches the
//! depot. A giver that uses the list holds a full magazine after its exchange. The items in it keep
//! the depot until they are on the list. The instruction that puts them there is the last touch.
//!
//! **ABA.** The full list is taken whole. A push may therefore link to a head that was taken and
//! pushed again in between: the link is correct again. Empty magazines are on no list. The thread
//! that clears a magazine's bit has the magazine, and a bit that is set again meanwhile is a
//! magazine that is empty again. The places of rings have the position for which they were written.
//!
//! **Lines that move between CPUs.** A magazine of 62 items moves eight lines to the taker and
//! back, and two lines of rings. Each move costs 50 to 100 ns on a server part, unless the line is
//! prefetched:
//!
//! * When a giver takes an empty magazine, it prefetches the lines of the *next* empty one.
//! * A giver that pops an empty magazine does not read its header: it writes length and first item.
//! * While the taker uses the items of one magazine, the lines of the next one are being
//!   prefetched.
//! * The taker puts four empty magazines into a ring at once, and sets a few bits at once. What it
//!   holds back it puts there when it finds no full magazine.
//! * Nothing that a giver reads in the rings shares a line with what the taker writes elsewhere.
//!
//! **Reclaim.** A taker that is short of items first looks at the lengths of the CPUs' magazines
//! ([`Depot::peek`]), which is a guess. To take those items it closes the gate, issues a
//! membarrier, takes each magazine that holds items out of its CPU's word, empties the rings of
//! full magazines, and opens the gate. Givers are refused meanwhile. The magazines that were taken
//! go the same way as those of the full list.
//!
//! **Pending.** The taker keeps the magazines that it has taken and not yet emptied on a list of
//! its own, in [`Taker`]. The taker removes an item from its magazine before it passes the item to
//! user code. If that code panics, the other items stay pending.

use crate::cpus::{areas, cpus};
use crate::decision::mode;
use crate::error::{GateClosed, NoMemory};
use crate::intake::Intake;
use crate::lane::{Lanes, Position};
use crate::line::Line;
use crate::magazine::{Magazine, at_word, numbered};
use crate::mode::{Index, Mode};
use crate::outcome::{Exchanged, Pushed, Rotated};
use crate::prefetch;
use crate::sequence::{self, lane};
use crate::sync::{AtomicU32, AtomicU64, Ordering, handover};
use std::num::NonZeroUsize;

mod taker;

pub use taker::Taker;

/// In place of a magazine's index: the list of full ones is closed.
const CLOSED: u32 = u32::MAX;

/// How often a giver tries again because another thread of its CPU was faster.
const ATTEMPTS: usize = 4;

/// Items of all CPUs on their way to one [`Taker`]. See the front page of `netmem-percpu`.
///
/// Items are words that are not zero. The user decides what they mean. A depot that is dropped
/// forgets the items that are in it.
///
/// ```
/// # use netmem_percpu::Depot;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (depot, mut taker) = Depot::new(8, 4)?;
/// for address in 1..=20 {
///     let item = std::num::NonZero::new(address).ok_or("zero")?;
///     // SAFETY: the depot is there.
///     assert!(unsafe { Depot::give(&depot, item, |_| ()) });
/// }
/// let mut found = 0;
/// while taker.refill(&depot, |_| found += 1) {} // the full magazines
/// taker.reclaim(&depot, |_| found += 1)?; // and what the CPUs hold
/// assert_eq!(found, 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Depot {
    /// The words are magazines, or null.
    intake: Intake,
    /// An id that no other depot of this process has. The depot's taker has the same one.
    id: u64,
    magazines: Box<[Magazine]>,
    /// The index plus 1 of the first full magazine, [`CLOSED`], or 0.
    full: Line<AtomicU32>,
    /// A bit for each magazine, 64 to a word: set while the magazine is empty and any giver may
    /// have it.
    empty: Box<[Line<AtomicU64>]>,
    /// One for each CPU that has a magazine.
    lanes: Lanes,
    /// 1 if a giver was refused a magazine since the taker last looked.
    crowded: Line<AtomicU32>,
}

impl Depot {
    /// A depot and its taker. The depot has `magazines` empty magazines of `capacity` items each,
    /// at least 1 and at most [`MAGAZINE`](crate::MAGAZINE), and each CPU can have one. Takes a
    /// lock, 512 bytes for each magazine, and 264 for each lane: as many as magazines or CPUs. With
    /// fewer than two magazines for each lane, full ones go by the list only: an empty one that
    /// waits in the ring of its CPU would be one that no other CPU can have.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn new(capacity: usize, magazines: usize) -> Result<(Self, Taker), NoMemory> {
        Self::with_lanes(capacity, magazines, cpus().min(areas()).min(magazines))
    }

    /// The same, for a depot of which at most `lanes` magazines lie on CPUs at a time, at least 1.
    /// A giver on a CPU without a magazine is refused while there are so many.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn with_lanes(capacity: usize, magazines: usize, lanes: usize) -> Result<(Self, Taker), NoMemory> {
        /// Of the standard library in a model, too: no model depends on the order of ids.
        static NEXT_ID: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let count = u32::try_from(magazines).unwrap_or(CLOSED).min(CLOSED - 1);
        let depot = Self {
            intake: Intake::new(capacity)?,
            id,
            magazines: (1..=count).map(|index| Magazine::new(capacity, index)).collect(),
            full: Line(AtomicU32::new(0)),
            empty: (0..count.div_ceil(64)).map(|_| Line(AtomicU64::new(0))).collect(),
            lanes: Lanes::new(lanes),
            crowded: Line(AtomicU32::new(0)),
        };
        depot.magazines.iter().for_each(|magazine| depot.push_empty(magazine));
        let taker = Taker::new(id, count, &depot.lanes);
        Ok((depot, taker))
    }

    /// Whether a giver was refused a magazine since the taker last looked for idle ones. A load.
    pub fn is_crowded(&self) -> bool {
        self.crowded.0.load(Ordering::Relaxed) != 0
    }

    /// Notes that a giver was refused a magazine.
    #[cold]
    pub(crate) fn crowd(&self) {
        if !self.is_crowded() {
            self.crowded.0.store(1, Ordering::Relaxed);
        }
    }

    /// Items in a magazine.
    pub fn capacity(&self) -> usize {
        self.intake.capacity
    }

    /// How many CPUs have a magazine.
    #[cfg(test)]
    pub(crate) fn loaded(&self) -> usize {
        self.intake.gate.peek().filter(|word| *word != 0).count()
    }

    /// Tells loom that no thread touches the depot any more. Only in models.
    #[cfg(loom)]
    pub fn witness(&self) {
        self.intake.witness();
    }

    /// Tells loom that a giver touches the depot. Does nothing outside of models.
    #[inline(always)]
    fn touch(this: *const Self) {
        // SAFETY: the depot is alive, or else loom says so.
        unsafe { Intake::touch(Self::intake(this)) }
    }

    /// The part of the depot that [`Intake::push_at_once`] needs. Reads nothing.
    ///
    /// # Safety
    ///
    /// The depot is alive.
    #[inline(always)]
    pub unsafe fn intake(this: *const Self) -> *const Intake {
        // SAFETY: the caller's.
        unsafe { &raw const (*this).intake }
    }

    /// Gives `item` to the taker if this CPU's magazine has room: the fast path of
    /// [`give`](Self::give), for callers that do something else before the slow path. If it returns
    /// false, the item is still the caller's.
    ///
    /// # Safety
    ///
    /// As for [`give`](Self::give).
    #[inline(always)]
    pub unsafe fn give_at_once(this: *const Self, item: NonZeroUsize) -> bool {
        // SAFETY: the caller's.
        unsafe { Intake::push_at_once(Self::intake(this), item) }
    }

    /// Gives `item` to the taker. If it returns false, the item was refused and is still the
    /// caller's. Takes no lock. Needs atomics only once in [`capacity`](Self::capacity) items. Can
    /// be called by signal handlers.
    ///
    /// If the depot is closed while this call holds a full magazine, the taker cannot take its
    /// items any more. Then `past` is called with each of them. Other threads had given these
    /// items; now they are the caller's. The depot is not touched after the first call of `past`.
    /// If `past` panics, it gets the rest of the items while the panic unwinds; a second panic
    /// aborts the process, as in a destructor.
    ///
    /// # Safety
    ///
    /// `this` lives until `item` is given, and each given item keeps it alive until the item is
    /// taken.
    pub unsafe fn give(this: *const Self, item: NonZeroUsize, past: impl FnMut(NonZeroUsize)) -> bool {
        // SAFETY: as above.
        unsafe {
            Self::touch(this);
            handover::release(&(*this).intake.capacity);
            match sequence::push((*this).intake.gate.word(), item.get()) {
                Ok(Pushed::Done) => true,
                Ok(Pushed::Full | Pushed::Missing) => Self::rotate_and_give(this, item, past),
                Err(GateClosed) => false,
            }
        }
    }

    /// [`give`](Self::give) for an item that [`give_at_once`](Self::give_at_once) has refused: this
    /// CPU's magazine is probably full. Gets the CPU another one first. Where
    /// [`give_at_once`](Self::give_at_once) has no sequence to run, the magazine probably has room,
    /// and this is [`give`](Self::give).
    ///
    /// # Safety
    ///
    /// As for [`give`](Self::give).
    pub unsafe fn give_on_another(this: *const Self, item: NonZeroUsize, past: impl FnMut(NonZeroUsize)) -> bool {
        // SAFETY: the caller's.
        unsafe {
            match mode() {
                Mode::Rseq(Index::MmCid) => Self::rotate_and_give(this, item, past),
                Mode::Rseq(Index::CpuId) | Mode::Portable(_) => Self::give(this, item, past),
            }
        }
    }

    /// Gives `item` after this CPU has got another magazine, if its own is full.
    ///
    /// # Safety
    ///
    /// As for [`give`](Self::give).
    unsafe fn rotate_and_give(this: *const Self, item: NonZeroUsize, past: impl FnMut(NonZeroUsize)) -> bool {
        // SAFETY: the item keeps the depot until it is given.
        unsafe {
            for _ in 0..ATTEMPTS {
                Self::touch(this);
                let (gate, lanes) = ((*this).intake.gate.word(), &(*this).lanes);
                match lane::rotate(gate, lanes, &(*this).magazines) {
                    Ok(Rotated::Done(position)) => {
                        (*this).publish(position);
                        let next = lanes.empty.get(position.next()).and_then(|number| (*this).magazine(number));
                        next.into_iter().for_each(Magazine::prefetch_to_write);
                    }
                    Ok(Rotated::Unpublished) => {
                        let _ = lane::publish(gate, lanes);
                        continue;
                    }
                    Ok(Rotated::NotNeeded) => {}
                    Ok(Rotated::NoEmpty) => return Self::exchange(this, item, past),
                    Ok(Rotated::Missing) => return Self::begin(this, item),
                    Err(GateClosed) => return false,
                }
                // Once more: others have used the magazine since.
                handover::release(&(*this).intake.capacity);
                match sequence::push(gate, item.get()) {
                    Ok(Pushed::Done) => return true,
                    Ok(Pushed::Full | Pushed::Missing) => {}
                    Err(GateClosed) => return false,
                }
            }
        }
        false
    }

    /// Publishes the full magazine that this thread has put at this position of its lane.
    pub(crate) fn publish(&self, position: Position) {
        // SAFETY: the gate's word, and the slot's words are magazines of ours.
        let _ = unsafe { lane::publish(self.intake.gate.word(), &self.lanes) };
        // This thread may be on another CPU now, or have found the lock of its CPU taken. The CPU
        // it has left may give no more.
        self.lanes.publish_left_behind(position);
    }

    /// The first step of an exchange alone.
    #[cfg(test)]
    pub(crate) fn rotate(&self) -> Option<Position> {
        // SAFETY: as above.
        match unsafe { lane::rotate(self.intake.gate.word(), &self.lanes, &self.magazines) } {
            Ok(Rotated::Done(position)) => Some(position),
            _ => None,
        }
    }

    /// This CPU hands on its full magazine, and has none then: what a thread does that finds no
    /// empty one.
    #[cfg(all(test, loom))]
    pub(crate) fn leave(&self, item: NonZeroUsize) {
        // SAFETY: the depot is there.
        assert!(!unsafe { Self::hand_over_for_nothing(self, item, |_| ()) });
    }

    /// Gives `item` in the first magazine of this CPU.
    #[cold]
    #[inline(never)]
    unsafe fn begin(this: *const Self, item: NonZeroUsize) -> bool {
        // SAFETY: the item keeps the depot until it is given.
        unsafe {
            // A load: without an empty magazine, no returned page writes the lanes' line.
            let Some(last) = (*this).has_empty().then(|| (*this).lanes.take()).flatten() else {
                (*this).crowd();
                return false;
            };
            let Some(new) = (*this).pop_empty() else {
                (*this).lanes.put(last);
                (*this).crowd();
                return false;
            };
            new.set_only(item.get());
            new.set_position(last);
            handover::release(&(*this).intake.capacity);
            let placed = lane::place((*this).intake.gate.word(), new);
            if placed == Ok(true) {
                return true;
            }
            (*this).lanes.put(last);
            Self::give_in_place(this, item, new, placed.is_ok())
        }
    }

    /// Gives `item` in a new magazine for this CPU, and hands on the old one by the list.
    #[cold]
    #[inline(never)]
    unsafe fn exchange(this: *const Self, item: NonZeroUsize, past: impl FnMut(NonZeroUsize)) -> bool {
        // SAFETY: the item keeps the depot until the exchange has succeeded.
        unsafe {
            prefetch::all_to_write(&(*this).full.0);
            let Some(new) = (*this).pop_empty() else {
                (*this).crowd();
                return Self::hand_over_for_nothing(this, item, past);
            };
            new.set_only(item.get());
            // Once more: this thread has popped a magazine since the push that found no room.
            handover::release(&(*this).intake.capacity);
            match lane::exchange((*this).intake.gate.word(), &raw const (*this).lanes, new) {
                Ok(Exchanged::Old(old)) => {
                    // The old one's items keep it now.
                    Self::hand_over(this, old, past);
                    true
                }
                refused => Self::give_in_place(this, item, new, refused.is_ok()),
            }
        }
    }

    /// Gives `item` in the magazine that this CPU has by now, if the gate is open. `new`, which was
    /// to be another, is empty again.
    unsafe fn give_in_place(this: *const Self, item: NonZeroUsize, new: &Magazine, is_open: bool) -> bool {
        // SAFETY: the item keeps the depot until it is given.
        unsafe {
            new.clear();
            (*this).push_empty(new);
            handover::release(&(*this).intake.capacity);
            // Another thread was faster, or this one is on another CPU now: there is room, unless
            // that filled up meanwhile.
            is_open && matches!(sequence::push((*this).intake.gate.word(), item.get()), Ok(Pushed::Done))
        }
    }

    /// Hands on this CPU's full magazine, and leaves the CPU without one. `item` is refused, unless
    /// there is room after all.
    #[cold]
    #[inline(never)]
    unsafe fn hand_over_for_nothing(this: *const Self, item: NonZeroUsize, past: impl FnMut(NonZeroUsize)) -> bool {
        // SAFETY: the item keeps the depot, for it is not given.
        unsafe {
            match lane::exchange((*this).intake.gate.word(), &raw const (*this).lanes, std::ptr::null()) {
                Err(GateClosed) => false,
                Ok(Exchanged::Old(old)) => {
                    at_word(old).map(Magazine::position).into_iter().for_each(|last| (*this).lanes.put(last));
                    Self::hand_over(this, old, past);
                    false
                }
                Ok(Exchanged::NotNeeded) => {
                    handover::release(&(*this).intake.capacity);
                    matches!(sequence::push((*this).intake.gate.word(), item.get()), Ok(Pushed::Done))
                }
            }
        }
    }

    /// Puts a full magazine, which came out of a CPU's word, on the list. If that is closed, its
    /// items are passed to `past`.
    unsafe fn hand_over(this: *const Self, old: usize, past: impl FnMut(NonZeroUsize)) {
        // SAFETY: the magazine is the caller's, and its items keep the depot.
        unsafe {
            handover::acquire(&(*this).intake.capacity);
            let old = std::ptr::with_exposed_provenance::<Magazine>(old);
            if !Self::push_full(this, old) {
                Magazine::refuse_items(old, past);
            }
        }
    }

    /// Gives many items at once, in separate magazines: two atomics for each magazine. The items do
    /// not wait in a magazine of a CPU. Returns how many, from the front, were given; the others
    /// were refused, and are the caller's.
    ///
    /// # Safety
    ///
    /// As for [`give`](Self::give).
    pub unsafe fn give_many(this: *const Self, items: &[NonZeroUsize]) -> usize {
        let mut given = 0;
        while given < items.len() {
            // SAFETY: an item that is not given yet keeps the depot; after the last one nothing of
            // it is touched.
            unsafe {
                let Some(new) = (*this).pop_empty() else { break };
                let filled = items[given..].iter().take_while(|item| new.push(item.get())).count();
                if !Self::push_full(this, new) {
                    break;
                }
                given += filled;
            }
        }
        given
    }

    /// Puts a magazine that only the caller has on the list of full ones. Returns false if the list
    /// is closed. This is the last access to the depot.
    unsafe fn push_full(this: *const Self, magazine: *const Magazine) -> bool {
        // SAFETY: the magazine's items keep the depot until they are on the list.
        unsafe {
            handover::release(&(*this).intake.capacity);
            let full = &raw const (*this).full.0;
            // Acquire: a giver that finds the list closed comes after all that the taker did.
            let mut head = (*full).load(Ordering::Acquire);
            while head != CLOSED {
                Self::touch(this);
                (*magazine).next.store(head, Ordering::Relaxed);
                let index = (*magazine).index;
                match (*full).compare_exchange_weak(head, index, Ordering::Release, Ordering::Acquire) {
                    Ok(_) => return true,
                    Err(now) => head = now,
                }
            }
        }
        false
    }

    fn magazine(&self, index: u32) -> Option<&Magazine> {
        numbered(&self.magazines, index)
    }

    /// Lets givers have an empty magazine.
    pub(crate) fn push_empty(&self, magazine: &Magazine) {
        Self::touch(self);
        let at = magazine.index as usize - 1;
        // Release: the next holder comes after the last one's reads.
        self.empty[at / 64].0.fetch_or(1 << (at % 64), Ordering::Release);
    }

    /// Whether there seems to be an empty magazine.
    fn has_empty(&self) -> bool {
        self.empty.iter().any(|word| word.0.load(Ordering::Relaxed) != 0)
    }

    /// Takes the first empty magazine, and asks for the lines of the next one.
    pub(crate) fn pop_empty(&self) -> Option<&Magazine> {
        for (word, first) in self.empty.iter().zip((0_usize..).step_by(64)) {
            let mut left = word.0.load(Ordering::Relaxed);
            while left != 0 {
                Self::touch(self);
                let bit = left & left.wrapping_neg();
                // Acquire: as above. Another thread may clear the bit first: then this one has not
                // got the magazine.
                left = word.0.fetch_and(!bit, Ordering::Acquire);
                if left & bit != 0 {
                    let at = |bit: u64| self.magazines.get(first + bit.trailing_zeros() as usize);
                    at(left & !bit).into_iter().for_each(Magazine::prefetch_to_write);
                    return at(bit);
                }
            }
        }
        None
    }

    /// How many items the CPUs seem to hold. A guess: givers may change it at any time.
    pub fn peek(&self) -> usize {
        // SAFETY: a magazine of ours or null; its length and position may be read by any thread.
        let loaded = self.intake.gate.peek().filter_map(|word| unsafe { at_word(word) });
        // A magazine on a list has no position: its number may be that of no lane.
        let unpublished = |m: &Magazine| self.lanes.unpublished(m.position()).and_then(|number| self.magazine(number));
        loaded.map(|m| m.len() + unpublished(m).map_or(0, Magazine::len)).sum()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
