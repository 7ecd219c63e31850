//! The depot: how items go from every CPU to one taker, a magazine at a time (Bonwick and Adams).
//!
//! ```text
//!   CPU 0  word ──► magazine ┐                                        ┌─► full ──► full ──► full    (list, pushed one by one,
//!   CPU 1  word ──► magazine ┼── full: exchanged for an empty one ────┘     │                          taken whole)
//!   ...                      ┘                                              ▼
//!                 ▲                                                      the taker empties them
//!                 └──────── empty ◄── empty ◄──────────────────────────────┘                 (list, pushed and popped)
//! ```
//!
//! Giving an item is a plain push on this CPU's magazine, in a restartable sequence. One in `capacity` pays for the
//! exchange: an empty magazine popped, the full one pushed, a compare-and-swap each. The magazines are made with the depot
//! and circulate; with none left, or the gate closed, an item is *refused* and its giver takes another way.
//!
//! **Who has what.** An item is given at one instruction: the commit of a push, or of the exchange that carries it in the new
//! magazine. What a giver touches after that it may touch because of *other* items: after an exchange it holds a full magazine
//! whose items nobody else has yet, so whatever those items keep alive (a pool, and this depot in it) stays until they are on the
//! list. The instruction that puts them there is the giver's last touch.
//!
//! **ABA.** The full list is taken whole, so a push may link to a head that went and came back: it is right again. From the list of
//! empties single ones are popped, by anybody, which is where ABA lives:
//!
//! ```text
//!   giver A                              others
//!   head = X, next = X.next (Y)
//!                                        pop X, pop Y, push X         X is the head again, Y is in use
//!   head: X -> Y ?                       Y would be handed out twice
//! ```
//! So the head carries a number that every pop counts up: A's exchange fails. It wraps after 2^32 pops, all of which would have to
//! fall between two instructions of A's.
//!
//! **Reclaim.** A taker that is short of items looks at the CPUs' lengths, without any right to them and so without any certainty;
//! if there seems to be something it closes the gate, after a membarrier has all magazines, empties them where they are,
//! and opens the gate. Givers are refused meanwhile.

use crate::barrier::BarrierError;
use crate::gate::{Gate, NoMemory, clear};
use crate::magazine::Magazine;
use crate::sequence::{self, Exchanged, GateClosed, Pushed};
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Ordering, handover};
use std::num::NonZeroUsize;

/// Never a magazine's index: the list of full ones is closed.
const CLOSED: u32 = u32::MAX;

/// On lines of its own: an adjacent one is fetched with it.
#[repr(align(128))]
#[derive(Debug)]
struct Line<T>(T);

/// Items of all CPUs on their way to one taker. See the [crate's page](crate).
///
/// There is one taker: [`refill`](Self::refill), [`reclaim`](Self::reclaim) and [`close`](Self::close) are called by one thread at a
/// time, with one [`Pending`] that is used for no other depot. Otherwise items can be lost, or found twice.
///
/// Items are words that are not zero; what they mean, and who drops what they stand for, is the user's business: a depot that is
/// dropped forgets what is in it.
///
/// ```
/// # use netmem_percpu::{Depot, Pending};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let depot = Depot::new(8, 4)?;
/// let mut pending = Pending::default();
/// for address in 1..=20 {
///     let item = std::num::NonZero::new(address).ok_or("zero")?;
///     // SAFETY: the depot is there.
///     assert!(unsafe { Depot::give(&depot, item, |_| ()) });
/// }
/// let mut found = 0;
/// while depot.refill(&mut pending, |_| found += 1) {} // the full magazines
/// depot.reclaim(|_| found += 1)?; // and what the CPUs hold
/// assert_eq!(found, 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Depot {
    /// The words are magazines, or null.
    gate: Gate,
    magazines: Box<[Magazine]>,
    /// Also the name by which the thread sanitizer is told of hand-overs: that of an atomic would not do, for a store to it (a gate
    /// that reopens) makes the sanitizer forget who has released it.
    capacity: usize,
    /// Index and 1 of the first full magazine, [`CLOSED`], or 0.
    full: Line<AtomicU32>,
    /// Index and 1 of the first empty magazine in the lower half, pops in the upper.
    empty: Line<AtomicU64>,
    /// Read wherever a giver touches the depot, and written by whoever frees it.
    #[cfg(loom)]
    witness: loom::cell::UnsafeCell<()>,
}

#[cfg(loom)]
// SAFETY: loom checks who reads and who writes the witness.
unsafe impl Sync for Depot {}
#[cfg(loom)]
// SAFETY: as above.
unsafe impl Send for Depot {}

/// Full magazines that a taker has and has not emptied.
#[derive(Debug, Default)]
#[must_use = "what is in it is lost"]
pub struct Pending(u32);

impl Depot {
    /// A depot of `magazines` empty magazines of `capacity` items each, at least 1 and at most [`MAGAZINE`](crate::MAGAZINE). Takes a
    /// lock, and 512 bytes for each.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn new(capacity: usize, magazines: usize) -> Result<Self, NoMemory> {
        let count = u32::try_from(magazines).unwrap_or(CLOSED).min(CLOSED - 1);
        let depot = Self {
            gate: Gate::new()?,
            magazines: (1..=count).map(|index| Magazine::new(capacity, index)).collect(),
            capacity: capacity.clamp(1, crate::MAGAZINE),
            full: Line(AtomicU32::new(0)),
            empty: Line(AtomicU64::new(0)),
            #[cfg(loom)]
            witness: loom::cell::UnsafeCell::new(()),
        };
        depot.magazines.iter().rev().for_each(|magazine| depot.push_empty(magazine));
        Ok(depot)
    }

    /// Items in a magazine.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// For models: says that nobody touches the depot any more.
    #[cfg(loom)]
    pub fn witness(&self) {
        self.witness.with_mut(|_| ());
    }

    /// In a model, says that a giver is here.
    #[inline(always)]
    fn touch(_this: *const Self) {
        #[cfg(loom)]
        // SAFETY: the depot is alive, or else loom says so.
        unsafe {
            (*_this).witness.with(|_| ());
        }
    }

    /// Gives `item` to the taker if this CPU's magazine has room: the straight line of [`give`](Self::give), for callers who have
    /// something to do in between. False: the item is the caller's.
    ///
    /// # Safety
    ///
    /// As for [`give`](Self::give).
    #[inline(always)]
    pub unsafe fn give_at_once(this: *const Self, item: NonZeroUsize) -> bool {
        // By pointer: a reference to the whole would have to be good until the return, and the depot need not be.
        // SAFETY: the caller's; the gate's word, and the slot's words are magazines.
        unsafe {
            Self::touch(this);
            handover::release(&(*this).capacity);
            sequence::push_at_once((*this).gate.word(), item.get())
        }
    }

    /// Gives `item` to the taker. False: it was refused, and is the caller's. No lock, and no atomic but for one item in
    /// [`capacity`](Self::capacity); can be called by signal handlers.
    ///
    /// `past` gets items that others gave and that nobody will take any more, because the depot was closed while this call had
    /// them in hand. They are the caller's then. The depot is not touched after the last of them.
    ///
    /// # Safety
    ///
    /// `this` lives until `item` is given, and whatever is given keeps it until it is taken.
    pub unsafe fn give(this: *const Self, item: NonZeroUsize, past: impl FnMut(NonZeroUsize)) -> bool {
        // SAFETY: as above.
        unsafe {
            Self::touch(this);
            handover::release(&(*this).capacity);
            match sequence::push((*this).gate.word(), item.get()) {
                Ok(Pushed::Done) => true,
                Ok(Pushed::Full | Pushed::Missing) => Self::exchange(this, item, past),
                Err(GateClosed) => false,
            }
        }
    }

    /// Gives `item` in a new magazine for this CPU, and hands on the old one.
    unsafe fn exchange(this: *const Self, item: NonZeroUsize, past: impl FnMut(NonZeroUsize)) -> bool {
        // SAFETY: the item keeps the depot until the exchange has succeeded.
        unsafe {
            let Some(new) = (*this).pop_empty() else { return false };
            new.prefetch_to_write();
            let _ = new.push(item.get());
            let address = std::ptr::from_ref(new).expose_provenance();
            match sequence::exchange((*this).gate.word(), address) {
                Ok(Exchanged::Old(0)) => true,
                Ok(Exchanged::Old(old)) => {
                    handover::acquire(&(*this).capacity);
                    let old = std::ptr::with_exposed_provenance::<Magazine>(old);
                    // The old one's items keep it now.
                    if !Self::push_full(this, old) {
                        // A copy, for nothing of the depot is touched from here on: it may end with any of these. On the stack, for
                        // this may be a signal handler.
                        let mut items = [0; crate::MAGAZINE];
                        items.iter_mut().zip((*old).items()).for_each(|(to, item)| *to = item);
                        items.into_iter().filter_map(NonZeroUsize::new).for_each(past);
                    }
                    true
                }
                refused => {
                    new.clear();
                    (*this).push_empty(new);
                    // Another thread was faster, or this one is on another CPU now: there is room, unless that filled up meanwhile.
                    matches!(refused, Ok(Exchanged::NotNeeded))
                        && matches!(sequence::push((*this).gate.word(), item.get()), Ok(Pushed::Done))
                }
            }
        }
    }

    /// Gives many at once, in magazines of their own: two atomics for each that is filled, and the items do not wait on any CPU.
    /// Returns how many, from the front, were given; the others were refused, and are the caller's.
    ///
    /// # Safety
    ///
    /// As for [`give`](Self::give).
    pub unsafe fn give_many(this: *const Self, items: &[NonZeroUsize]) -> usize {
        let mut given = 0;
        while given < items.len() {
            // SAFETY: an item that is not given yet keeps the depot; after the last one nothing of it is touched.
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

    /// Puts a magazine that nobody else has on the list of full ones; false if that is closed. The last touch of the depot.
    unsafe fn push_full(this: *const Self, magazine: *const Magazine) -> bool {
        // SAFETY: the magazine's items keep the depot until they are on the list.
        unsafe {
            handover::release(&(*this).capacity);
            let full = &raw const (*this).full.0;
            // Acquire: whoever finds the list closed comes after all that the taker did.
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
        self.magazines.get((index as usize).checked_sub(1)?)
    }

    pub(crate) fn push_empty(&self, magazine: &Magazine) {
        let mut head = self.empty.0.load(Ordering::Relaxed);
        loop {
            Self::touch(self);
            magazine.next.store(head as u32, Ordering::Relaxed);
            let new = head & !u64::from(u32::MAX) | u64::from(magazine.index);
            // Release: who uses it next comes after its last user's reads.
            match self.empty.0.compare_exchange_weak(head, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    pub(crate) fn pop_empty(&self) -> Option<&Magazine> {
        let mut head = self.empty.0.load(Ordering::Acquire);
        loop {
            Self::touch(self);
            let magazine = self.magazine(head as u32)?;
            // Somebody else's by now, perhaps: then the exchange fails, for its pop has counted.
            let next = magazine.next.load(Ordering::Relaxed);
            let new = (head >> 32).wrapping_add(1) << 32 | u64::from(next);
            match self.empty.0.compare_exchange_weak(head, new, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(magazine),
                Err(now) => head = now,
            }
        }
    }

    /// Empties one full magazine into `take`. False: there is none. One atomic for a magazine, and one for all that have come since
    /// the last time there was none.
    pub fn refill(&self, pending: &mut Pending, mut take: impl FnMut(NonZeroUsize)) -> bool {
        if pending.0 == 0 {
            if matches!(self.full.0.load(Ordering::Relaxed), 0 | CLOSED) {
                return false;
            }
            pending.0 = self.full.0.swap(0, Ordering::Acquire);
            handover::acquire(&self.capacity);
            self.magazine(pending.0).into_iter().for_each(Magazine::prefetch);
        }
        let Some(magazine) = self.magazine(pending.0) else { return false };
        pending.0 = magazine.next.load(Ordering::Relaxed);
        self.magazine(pending.0).into_iter().for_each(Magazine::prefetch);
        magazine.items().filter_map(NonZeroUsize::new).for_each(&mut take);
        magazine.clear();
        self.push_empty(magazine);
        true
    }

    /// How many items the CPUs seem to hold. A guess: they are being given all the while.
    pub fn peek(&self) -> usize {
        // SAFETY: a magazine of ours or null; its length may be read by anybody.
        self.gate.peek().filter_map(|word| unsafe { magazine(word) }).map(Magazine::len).sum()
    }

    /// Takes what the CPUs hold. One membarrier; givers are refused meanwhile. Not for signal handlers. If `take` panics, items
    /// that it has not seen are forgotten.
    ///
    /// # Errors
    ///
    /// The barrier failed, and the items are where they were.
    pub fn reclaim(&self, mut take: impl FnMut(NonZeroUsize)) -> Result<(), BarrierError> {
        // As much as there can be: nobody waits for memory while the gate is closed.
        let mut items = Vec::with_capacity(self.capacity * crate::cpus());
        let Some(quiet) = self.gate.close()? else { return Ok(()) };
        handover::acquire(&self.capacity);
        // SAFETY: the gate is quiet: magazines of ours or null, and nobody's but ours.
        for magazine in quiet.words().filter_map(|word| unsafe { magazine(word.load(Ordering::Relaxed)) }) {
            items.extend(magazine.items().filter_map(NonZeroUsize::new));
            magazine.clear();
        }
        quiet.reopen();
        // Once all is as it must be: `take` may panic.
        items.into_iter().for_each(&mut take);
        Ok(())
    }

    /// Takes everything, for the last time: from now on every giver is refused. One membarrier.
    ///
    /// # Errors
    ///
    /// The barrier failed: what the CPUs hold stays where it is, and what was being given at that moment. The rest was taken, and
    /// later givers are refused.
    pub fn close(&self, pending: &mut Pending, mut take: impl FnMut(NonZeroUsize)) -> Result<(), BarrierError> {
        let closed = self.gate.close().map(|quiet| {
            let Some(quiet) = quiet else { return };
            handover::acquire(&self.capacity);
            let out = |word: &AtomicUsize| {
                let was = word.load(Ordering::Relaxed);
                clear(word);
                was
            };
            let held: Vec<_> = quiet.words().map(out).collect();
            quiet.stay_closed();
            // SAFETY: magazines of ours or null, out of their words since.
            for magazine in held.into_iter().filter_map(|word| unsafe { magazine(word) }) {
                magazine.items().filter_map(NonZeroUsize::new).for_each(&mut take);
            }
        });
        if closed.is_err() {
            self.gate.shut();
        }
        // What was pending first, then what has come since. AcqRel: closing tells those who find it closed what came before.
        let came = self.full.0.swap(CLOSED, Ordering::AcqRel);
        handover::acquire(&self.capacity);
        for first in [std::mem::take(&mut pending.0), came] {
            let mut at = if first == CLOSED { 0 } else { first };
            while let Some(magazine) = self.magazine(at) {
                at = magazine.next.load(Ordering::Relaxed);
                magazine.items().filter_map(NonZeroUsize::new).for_each(&mut take);
            }
        }
        closed
    }
}

/// # Safety
///
/// `word` is null or a magazine that lives.
unsafe fn magazine<'d>(word: usize) -> Option<&'d Magazine> {
    // SAFETY: the caller's.
    unsafe { std::ptr::with_exposed_provenance::<Magazine>(word).as_ref() }
}
