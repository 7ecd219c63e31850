//! The CPU cache: items that any thread pushes and pops, mostly without an atomic operation
//! (Bonwick and Adams). Why not a list with a lock, or a lock-free one: all CPUs would write its
//! head.
//!
//! ```text
//!   CPU 0  word ──► loaded ──► previous ┐                          ┌─► full  ──► full  ──► full
//!   CPU 1  word ──► loaded ──► previous ┼── one for one, when ◄────┤                                the depot: two lists,
//!   ...                                 ┘   both are at the edge   └─► empty ──► empty ──► empty    any thread pushes and pops
//! ```
//!
//! Each CPU has two *magazines*, arrays with a length. A push and a pop are a restartable sequence
//! on the loaded one: a plain store. When the loaded magazine is empty (at a pop) or full (at a
//! push), the previous one takes its place, if that helps. Only if both are empty or both are full,
//! a magazine is exchanged with the depot. After such an exchange one magazine of the CPU is full
//! and one is empty, so at least `capacity` more operations pass before the next exchange, whatever
//! their order: a load at the edge of a magazine does not cause an exchange every time.
//!
//! **The pair in one word.** The CPU's word addresses the loaded magazine, and the loaded magazine
//! holds the number of the previous one. A store to the word therefore exchanges the pair. The
//! sequences are in `rseq/pair.rs`.
//!
//! **Ownership of an item.** An item belongs to the cache from the commit of the push on, and to
//! the popping thread from the commit of the pop on. A thread that pushes may touch the cache after
//! its commit only while it holds other items: it may have a full magazine, on its way to the
//! depot. Those items keep the cache alive. The instruction that puts the magazine on the list is
//! the last one at which the thread touches the cache.
//!
//! **Pop against reclaim.** The thread that reclaims closes the gate, and a membarrier follows. If
//! the commit of a pop came before the barrier, the item belongs to the popping thread, and the
//! reclaiming thread reads the shorter length. If not, the sequence restarts and finds the gate
//! closed:
//!
//! ```text
//!   CPU 0: pop                           CPU 1: reclaim
//!   m = *word, item = m.items[n - 1]
//!                                        gate: open -> closing
//!                                        membarrier ──► interrupts CPU 0
//!   before the commit: restarts, finds the gate closed, takes from the depot
//!   after the commit: has the item       reads m.length = n - 1
//!                                        takes both magazines out of the word
//!                                        reopens the gate, puts the magazines on the depot's lists
//! ```
//!
//! **A closed gate.** A thread that finds the gate closed goes to the depot. A pop there takes a
//! magazine from the full list, takes one item from it, and puts the magazine back. A push is
//! refused, and the caller keeps the item.
//!
//! **Exchange against another thread of this CPU.** A thread that was about to exchange may lose
//! its CPU, and the next thread may do the exchange. The sequence therefore tests again whether
//! both magazines are at the edge. If not, the first thread returns the magazine that it has
//! popped, and tries again.
//!
//! **ABA** on the lists: see `tagged.rs`.

use crate::error::{GateClosed, NewCacheError, NothingFound};
use crate::intake::Intake;
use crate::line::Line;
use crate::magazine::{Magazine, at_word, numbered};
use crate::outcome::{LARGEST_ITEM, Popped, Pushed, Replaced, Swapped};
use crate::sequence::{self, pair};
use crate::sync::{Mutex, Ordering, handover};
use crate::tagged::{self, List};
use std::num::NonZeroUsize;

mod reclaim;

/// Items that any thread puts in and takes out. See the front page of `netmem-percpu`.
///
/// Items are words that are not zero and not one of the three largest numbers: addresses, for
/// example. The user decides what they mean. A cache that is dropped forgets the items that are in
/// it.
///
/// ```
/// # use netmem_percpu::CpuCache;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let cache = CpuCache::new(8, 16)?;
/// for address in 1..=20 {
///     let item = std::num::NonZero::new(address).ok_or("zero")?;
///     // SAFETY: the cache outlives the call.
///     assert!(unsafe { CpuCache::push(&cache, item, |_| ()) });
/// }
/// cache.reclaim()?; // what all CPUs hold goes to the depot, where any thread finds it
/// let mut found = 0;
/// while cache.pop().is_ok() {
///     found += 1;
/// }
/// assert_eq!(found, 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CpuCache {
    /// The words are null or address magazines.
    intake: Intake,
    magazines: Box<[Magazine]>,
    /// Magazines with items. The list is closed with the cache.
    full: Line<List>,
    /// Magazines without.
    empty: Line<List>,
    /// One thread at a time closes the gate.
    close_lock: Mutex<()>,
}

impl CpuCache {
    /// A cache of `magazines` empty magazines of `capacity` items each, at least 1 and at most
    /// [`MAGAZINE`](crate::MAGAZINE). Each CPU keeps two of them, and a thread in an exchange one;
    /// the rest is for the depot. Takes a lock, and 512 bytes for each magazine.
    ///
    /// # Errors
    ///
    /// There is no memory, or there are more than 8,388,607 magazines.
    pub fn new(capacity: usize, magazines: usize) -> Result<Self, NewCacheError> {
        if magazines > tagged::MOST {
            return Err(NewCacheError::TooMany { magazines, most: tagged::MOST });
        }
        let count = magazines as u32;
        let cache = Self {
            intake: Intake::new(capacity)?,
            magazines: (1..=count).map(|index| Magazine::new(capacity, index)).collect(),
            full: Line(List::new()),
            empty: Line(List::new()),
            close_lock: Mutex::new(()),
        };
        cache.magazines.iter().rev().for_each(|magazine| cache.empty.0.put_back(magazine));
        Ok(cache)
    }

    /// Items in a magazine.
    pub fn capacity(&self) -> usize {
        self.intake.capacity
    }

    /// Magazines, on CPUs and in the depot.
    pub fn magazines(&self) -> usize {
        self.magazines.len()
    }

    /// Tells loom that no thread touches the cache any more. Only in models.
    #[cfg(loom)]
    pub fn witness(&self) {
        self.intake.witness();
    }

    /// Tells loom that a thread touches the cache. Does nothing outside of models.
    #[inline(always)]
    fn touch(this: *const Self) {
        // SAFETY: the cache is alive, or else loom reports it.
        unsafe { Intake::touch(Self::intake(this)) }
    }

    /// The part of the cache that [`Intake::push_at_once`] needs. Reads nothing.
    ///
    /// # Safety
    ///
    /// The cache is alive.
    #[inline(always)]
    pub unsafe fn intake(this: *const Self) -> *const Intake {
        // SAFETY: the caller's.
        unsafe { &raw const (*this).intake }
    }

    /// Takes an item from this CPU's loaded magazine: the fast path of [`pop`](Self::pop). If it
    /// returns `None`, [`pop`](Self::pop) may still find one.
    #[inline(always)]
    pub fn pop_at_once(&self) -> Option<NonZeroUsize> {
        // SAFETY: the gate's word, and the slot's words are magazines.
        let item = unsafe { pair::pop_at_once(self.intake.gate.word()) }?;
        handover::acquire(&self.intake.capacity);
        Some(item)
    }

    /// Takes an item: from this CPU's magazines, or else from the depot. The caller sees what was
    /// done before the item was pushed. Takes no lock. Needs at most two atomics in
    /// [`capacity`](Self::capacity) operations. Never waits: if another thread is faster, the call
    /// tries again.
    ///
    /// # Errors
    ///
    /// See [`NothingFound`].
    pub fn pop(&self) -> Result<NonZeroUsize, NothingFound> {
        let item = self.find()?;
        handover::acquire(&self.intake.capacity);
        Ok(item)
    }

    fn find(&self) -> Result<NonZeroUsize, NothingFound> {
        let gate = self.intake.gate.word();
        loop {
            Self::touch(self);
            // SAFETY: the gate's word, and the slot's words are magazines of ours.
            let turned = unsafe {
                match pair::pop(gate) {
                    Ok(Popped::Item(item)) => return Ok(item),
                    Ok(Popped::Edge) => pair::swap(gate, &self.magazines, 0),
                    Err(GateClosed) => Err(GateClosed),
                }
            };
            match turned {
                Ok(Swapped::Done | Swapped::NotNeeded) => continue,
                Ok(Swapped::Edge) => return self.load().ok_or(NothingFound::Empty),
                Err(GateClosed) => return self.take_from_depot().ok_or(NothingFound::Refused),
            }
        }
    }

    /// Takes an item from a full magazine of the depot, and loads the rest of it.
    fn load(&self) -> Option<NonZeroUsize> {
        let full = self.full.0.pop(&self.magazines)?;
        handover::acquire(&self.intake.capacity);
        full.prefetch_to_write();
        let item = full.pop();
        if full.len() == 0 {
            self.put_back(full);
            return item;
        }
        handover::release(&self.intake.capacity);
        // SAFETY: the gate's word, and the slot's words are magazines of ours; this one is the
        // caller's.
        match unsafe { pair::replace(self.intake.gate.word(), &raw const *self.magazines, 0, full) } {
            Ok(Replaced::Old(old)) => self.numbered(old).into_iter().for_each(|old| self.empty.0.put_back(old)),
            // Another thread was faster, or this thread is on another CPU now; or the gate has
            // closed.
            Ok(Replaced::NotNeeded) | Err(GateClosed) => self.put_back(full),
        }
        item
    }

    /// Takes an item from a full magazine of the depot, and puts the magazine back. `None` if no
    /// magazine is there.
    ///
    /// Neither reads nor changes what this CPU holds. So after a [`reclaim`](Self::reclaim), all
    /// items can be taken this way, also if the thread is moved meanwhile, or finds its CPU's lock
    /// taken. A [`pop`](Self::pop) would leave the rest of the magazine on the CPU. Costs four
    /// atomics for each item.
    pub fn take_from_depot(&self) -> Option<NonZeroUsize> {
        let full = self.full.0.pop(&self.magazines)?;
        handover::acquire(&self.intake.capacity);
        let item = full.pop();
        self.put_back(full);
        item
    }

    /// Puts a magazine that only the caller has on the list where it belongs, also after the cache
    /// was closed.
    fn put_back(&self, magazine: &Magazine) {
        handover::release(&self.intake.capacity);
        let list = if magazine.len() == 0 { &self.empty } else { &self.full };
        list.0.put_back(magazine);
    }

    fn numbered(&self, index: u32) -> Option<&Magazine> {
        numbered(&self.magazines, index)
    }

    /// Puts `item` in if this CPU's loaded magazine has room: the fast path of
    /// [`push`](Self::push). If it returns false, the item is still the caller's.
    ///
    /// # Safety
    ///
    /// As for [`push`](Self::push).
    #[inline(always)]
    pub unsafe fn push_at_once(this: *const Self, item: NonZeroUsize) -> bool {
        debug_assert!(item.get() <= LARGEST_ITEM, "{item} is reserved");
        // SAFETY: the caller's.
        unsafe { Intake::push_at_once(Self::intake(this), item) }
    }

    /// Puts `item` in. If it returns false, the item was refused and is still the caller's: the
    /// gate is closed, or no empty magazine is left, or, in portable mode, another thread holds the
    /// lock of this CPU. Takes no lock. Needs at most two atomics in [`capacity`](Self::capacity)
    /// operations. Can be called by signal handlers.
    ///
    /// If the cache is closed while this call holds a full magazine, `refused` is called with each
    /// item in it. Other threads have put these items in; now they are the caller's. The cache is
    /// not touched after the first call of `refused`. If `refused` panics, it gets the rest of the
    /// items while the panic unwinds; a second panic aborts the process, as in a destructor.
    ///
    /// # Safety
    ///
    /// `this` lives until `item` is in, and each item that is in keeps it alive until it is taken.
    /// `item` is not one of the three largest numbers: a pop would take it for an answer of a
    /// sequence.
    pub unsafe fn push(this: *const Self, item: NonZeroUsize, refused: impl FnMut(NonZeroUsize)) -> bool {
        debug_assert!(item.get() <= LARGEST_ITEM, "{item} is reserved");
        // SAFETY: the caller's. The item keeps the cache until the commit of the push or of the
        // replacement.
        unsafe {
            let gate = (*this).intake.gate.word();
            let limit = (*this).intake.capacity as u32;
            loop {
                Self::touch(this);
                handover::release(&(*this).intake.capacity);
                match sequence::push(gate, item.get()) {
                    Ok(Pushed::Done) => return true,
                    Ok(Pushed::Full | Pushed::Missing) => {}
                    Err(GateClosed) => return false,
                }
                match pair::swap(gate, &(*this).magazines, limit) {
                    Ok(Swapped::Done | Swapped::NotNeeded) => continue,
                    Ok(Swapped::Edge) => {}
                    Err(GateClosed) => return false,
                }
                let Some(new) = (*this).empty.0.pop(&(*this).magazines) else { return false };
                new.prefetch_to_write();
                let _ = new.push(item.get());
                // Once more: this thread has popped a magazine since the push that found no room.
                handover::release(&(*this).intake.capacity);
                match pair::replace(gate, &raw const *(*this).magazines, limit, new) {
                    Ok(Replaced::Old(0)) => return true,
                    Ok(Replaced::Old(old)) => {
                        // The items of the old magazine keep the cache now.
                        Self::hand_over(this, old, refused);
                        return true;
                    }
                    // Another thread was faster, or this thread is on another CPU now; or the gate
                    // has closed.
                    refused => {
                        new.clear();
                        (*this).empty.0.put_back(new);
                        if refused.is_err() {
                            return false;
                        }
                    }
                }
            }
        }
    }

    /// Puts a full magazine on the depot's list. If the cache was closed, its items are passed to
    /// `refused`.
    ///
    /// # Safety
    ///
    /// The magazine is the caller's, and its items keep the cache.
    unsafe fn hand_over(this: *const Self, magazine: u32, refused: impl FnMut(NonZeroUsize)) {
        // SAFETY: the caller's.
        unsafe {
            handover::acquire(&(*this).intake.capacity);
            let Some(magazine) = numbered(&(*this).magazines, magazine) else { return };
            let magazine = std::ptr::from_ref(magazine);
            if !Self::push_full(this, magazine) {
                Magazine::refuse_items(magazine, refused);
            }
        }
    }

    /// Puts a magazine with items on the depot's list. Returns false if the list is closed; the
    /// magazine is then still the caller's.
    ///
    /// # Safety
    ///
    /// The magazine is the caller's, and its items keep the cache.
    unsafe fn push_full(this: *const Self, magazine: *const Magazine) -> bool {
        // SAFETY: the caller's.
        unsafe {
            Self::touch(this);
            handover::release(&(*this).intake.capacity);
            List::push(&raw const (*this).full.0, magazine)
        }
    }

    /// Puts many items in at once, in magazines of their own: two atomics for each magazine, and
    /// the items do not wait on any CPU. Returns how many, from the front, are in; the others were
    /// refused, and are the caller's.
    ///
    /// # Safety
    ///
    /// As for [`push`](Self::push).
    pub unsafe fn push_many(this: *const Self, items: &[NonZeroUsize]) -> usize {
        debug_assert!(items.iter().all(|item| item.get() <= LARGEST_ITEM), "a reserved number");
        let mut done = 0;
        while done < items.len() {
            // SAFETY: an item that is not in yet keeps the cache; after the last one nothing of it
            // is touched.
            unsafe {
                let Some(new) = (*this).empty.0.pop(&(*this).magazines) else { break };
                let filled = items[done..].iter().take_while(|item| new.push(item.get())).count();
                if !Self::push_full(this, new) {
                    new.clear();
                    (*this).empty.0.put_back(new);
                    break;
                }
                done += filled;
            }
        }
        done
    }

    /// Whether the depot seems to have no empty magazine, so that [`push_many`](Self::push_many)
    /// puts in nothing. A guess.
    pub fn is_full(&self) -> bool {
        self.empty.0.is_empty()
    }

    /// How many items the CPUs seem to hold. A guess: other threads may change it at any time.
    /// Reads the lines of every CPU.
    pub fn on_cpus(&self) -> usize {
        let loaded = self.intake.gate.peek().filter_map(|word| {
            // SAFETY: a magazine of ours or null; its length and number may be read by any thread.
            unsafe { at_word(word) }
        });
        loaded.map(|m| m.len() + self.numbered(m.next.load(Ordering::Relaxed)).map_or(0, Magazine::len)).sum()
    }

    /// How many items the cache seems to hold, on CPUs and in the depot. A guess. Reads a line of
    /// every magazine.
    pub fn items(&self) -> usize {
        self.magazines.iter().map(Magazine::len).sum()
    }

    /// Whether the cache seems to hold items that are on no CPU: in the depot, or in a magazine
    /// that a thread holds in the middle of a pop, a push or a reclaim. A guess. Reads the lines of
    /// every CPU, and a line of every magazine.
    ///
    /// For a thread that has found nothing: such items get back to a CPU or to the depot when the
    /// other thread goes on.
    pub fn is_on_the_way(&self) -> bool {
        // In this order: an item that is put on a CPU in between seems to be on the way, and costs
        // a search. In the other order, such items would hide others.
        let on_cpus = self.on_cpus();
        self.items() > on_cpus
    }

    /// Full magazines that threads have taken from the depot so far, modulo 2^32. If the number is
    /// the same before and after a search that found nothing, no other thread has taken a magazine
    /// during the search. A thread that took one before the search may still hold it: see
    /// [`is_on_the_way`](Self::is_on_the_way).
    pub fn magazines_taken(&self) -> u32 {
        self.full.0.pops()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn push(cache: &CpuCache, n: usize) -> bool {
        // SAFETY: the cache outlives the call.
        unsafe { CpuCache::push(cache, NonZeroUsize::new(n).expect("not 0"), |_| unreachable!()) }
    }

    /// Puts an item into a cache that has room for it. In portable mode the locks of CPUs are those
    /// of the process, so that another test can have this CPU's, and the push is refused.
    fn put(cache: &CpuCache, n: usize) {
        while !push(cache, n) {
            assert!(matches!(crate::mode(), crate::Mode::Portable(_)), "{n} was refused");
            std::thread::yield_now();
        }
    }

    #[test]
    fn items_come_back_from_cpus_and_depot() {
        let cache = CpuCache::new(4, 64).unwrap();
        let mut items: Vec<_> = (1..=50).collect();
        items.iter().for_each(|&n| put(&cache, n));
        assert_eq!(cache.items(), 50);
        cache.reclaim().unwrap();
        assert_eq!((cache.items(), cache.on_cpus()), (50, 0));
        let mut found = Vec::new();
        while cache.items() > 0 {
            found.extend(std::iter::from_fn(|| cache.pop().ok()).map(usize::from));
            // If the thread was moved, the rest of a magazine is on the CPU where it was before.
            cache.reclaim().unwrap();
        }
        found.sort_unstable();
        assert_eq!(found, items);
        assert_ne!(cache.magazines_taken(), 0);

        // Without an empty magazine, and after the end.
        let small = CpuCache::new(1, 1).unwrap();
        items.truncate(1);
        put(&small, 7);
        assert!(!push(&small, 8));
        small.close().unwrap();
        assert!(!push(&small, 9));
        assert_eq!(small.pop().map(usize::from), Ok(7));
        assert_eq!(small.pop(), Err(NothingFound::Refused));
    }

    /// A program that takes and puts one item again and again, at the edge of a magazine, exchanges
    /// nothing with the depot.
    #[test]
    fn the_edge_of_a_magazine_is_no_exchange() {
        // More items than the CPUs hold, so that some are in the depot, and four times the room: an
        // index of a CPU that the thread leaves keeps its magazines, full or not, and there may be
        // many such indices.
        let items = 16 * crate::cpus();
        let cache = CpuCache::new(4, items).unwrap();
        for n in 1..=items {
            put(&cache, n);
        }
        let before = cache.magazines_taken();
        let mut held = Vec::new();
        for _ in 0..1000 {
            held.extend(cache.pop());
            held.extend(cache.pop());
            held.drain(..).for_each(|item| put(&cache, item.get()));
        }
        // The thread may be moved to other CPUs, each of which exchanges a few times.
        let exchanges = cache.magazines_taken().wrapping_sub(before);
        assert!(exchanges < 100, "{exchanges} exchanges in 1000 rounds");
    }
}
