//! An array of items on every CPU.

use crate::barrier::BarrierError;
use crate::gate::{Gate, NoMemory, clear};
use crate::sequence::{self, Closed, Exchanged, Pushed};
use crate::sync::{AtomicUsize, Ordering, handover};
use std::num::NonZeroUsize;

/// Items in the largest magazine: with its length and its capacity they fill eight lines. Two in models.
pub const MAGAZINE: usize = if cfg!(loom) { 2 } else { 62 };

/// An array of items with a length: what a CPU collects, and what is handed on whole.
///
/// ```text
///   │ length │ capacity │ item 0 │ item 1 │ ... │ item 61 │      512 bytes
/// ```
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Magazine {
    length: AtomicUsize,
    capacity: AtomicUsize,
    items: [AtomicUsize; MAGAZINE],
}

impl Magazine {
    /// An empty one for `capacity` items: at least 1, at most [`MAGAZINE`].
    pub fn new(capacity: usize) -> Box<Self> {
        Box::new(Self {
            length: AtomicUsize::new(0),
            capacity: AtomicUsize::new(capacity.clamp(1, MAGAZINE)),
            items: std::array::from_fn(|_| AtomicUsize::new(0)),
        })
    }

    /// Items in it.
    pub fn len(&self) -> usize {
        self.length.load(Ordering::Relaxed)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Items that there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Whether another item finds no room.
    pub fn is_full(&self) -> bool {
        self.len() >= self.capacity()
    }

    /// Puts an item on it. False: it is full.
    pub fn push(&mut self, item: NonZeroUsize) -> bool {
        self.push_shared(item.get())
    }

    /// Takes the newest item.
    pub fn pop(&mut self) -> Option<NonZeroUsize> {
        NonZeroUsize::new(self.pop_shared())
    }

    /// By whoever keeps others away by other means.
    pub(crate) fn push_shared(&self, item: usize) -> bool {
        let length = self.len();
        if length >= self.capacity() {
            return false;
        }
        self.items[length].store(item, Ordering::Relaxed);
        self.length.store(length + 1, Ordering::Relaxed);
        true
    }

    /// As above; 0 if it is empty.
    pub(crate) fn pop_shared(&self) -> usize {
        let Some(length) = self.len().checked_sub(1) else { return 0 };
        self.length.store(length, Ordering::Relaxed);
        self.items[length].load(Ordering::Relaxed)
    }
}

/// A place for a magazine on every CPU, all behind one gate. Threads push items to, and pop them from, the magazine of the CPU
/// that they run on; a magazine that is full, or empty, is exchanged for another.
///
/// ```
/// # use netmem_percpu::{Magazine, Pushed, Store};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = Store::new()?;
/// let item = std::num::NonZero::new(0x1000).ok_or("zero")?; // an address, as a rule
/// if store.push(item)? != Pushed::Done {
///     let old = store.exchange_full(Magazine::new(8)); // a full magazine, or none yet
///     assert!(matches!(old, Ok(None)));
///     assert_eq!(store.push(item)?, Pushed::Done);
/// }
/// let mut found = 0;
/// store.collect(|magazine| found += magazine.len())?; // from all CPUs
/// assert_eq!(found, 1);
/// # Ok(())
/// # }
/// ```
///
/// Items are words that are not zero; what they mean, and who drops what they stand for, is the user's business: a store
/// that is dropped frees its magazines, not what was in them.
#[derive(Debug)]
pub struct Store(Gate);

impl Store {
    /// A store without magazines, open. Takes a lock.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn new() -> Result<Self, NoMemory> {
        Gate::new().map(Self)
    }

    /// Puts `item` on this CPU's magazine. What the thread did before is seen by whoever takes the item out.
    ///
    /// # Errors
    ///
    /// [`Closed`]: somebody is collecting, or this thread has no sequences or, in portable mode, this CPU's lock was taken.
    #[inline(always)]
    pub fn push(&self, item: NonZeroUsize) -> Result<Pushed, Closed> {
        handover::release(self);
        // SAFETY: the gate's word; the slot's words are magazines.
        unsafe { sequence::push(self.0.word(), item.get()) }
    }

    /// Takes the newest item of this CPU's magazine. None: it has none, or as for [`push`](Self::push).
    #[inline(always)]
    pub fn pop(&self) -> Option<NonZeroUsize> {
        // SAFETY: as above.
        let item = NonZeroUsize::new(unsafe { sequence::pop(self.0.word()) });
        handover::acquire(self);
        item
    }

    /// Gives this CPU `new` for its full magazine, which is returned, or for none.
    ///
    /// # Errors
    ///
    /// `new` comes back: this CPU's magazine has room (the thread may be on another CPU than a moment ago), or the store is
    /// [closed](Self::push).
    pub fn exchange_full(&self, new: Box<Magazine>) -> Result<Option<Box<Magazine>>, Box<Magazine>> {
        self.exchange(new, true)
    }

    /// Gives this CPU `new` for its empty magazine, which is returned, or for none.
    ///
    /// # Errors
    ///
    /// `new` comes back: this CPU's magazine has items, or the store is [closed](Self::push).
    pub fn exchange_empty(&self, new: Box<Magazine>) -> Result<Option<Box<Magazine>>, Box<Magazine>> {
        self.exchange(new, false)
    }

    fn exchange(&self, new: Box<Magazine>, full: bool) -> Result<Option<Box<Magazine>>, Box<Magazine>> {
        handover::release(self);
        let new = Box::into_raw(new);
        // SAFETY: the gate's word; the magazine is ours to give.
        match unsafe { sequence::exchange(self.0.word(), new.expose_provenance(), full) } {
            Ok(Exchanged::Old(old)) => {
                handover::acquire(self);
                // SAFETY: a magazine that a word held, and holds no more.
                Ok(unsafe { owned(old) })
            }
            // SAFETY: it was not taken.
            Ok(Exchanged::NotNeeded) | Err(Closed) => Err(unsafe { Box::from_raw(new) }),
        }
    }

    /// Takes the magazines of all CPUs, lets sequences go on, and hands the magazines to `take`. False: somebody else is at it.
    ///
    /// The gate is closed until all are out; whoever pushes or pops meanwhile is told so. One membarrier. If `take` panics, the
    /// magazines that it has not seen are freed, and what was in them is forgotten. Not for signal handlers.
    ///
    /// # Errors
    ///
    /// The barrier failed, and the magazines are where they were.
    pub fn collect(&self, take: impl FnMut(Box<Magazine>)) -> Result<bool, BarrierError> {
        let Some(quiet) = self.0.close()? else { return Ok(false) };
        handover::acquire(self);
        let out = |word: &AtomicUsize| {
            let magazine = word.load(Ordering::Relaxed);
            clear(word);
            // SAFETY: a magazine that the word held, and holds no more.
            unsafe { owned(magazine) }
        };
        let taken: Vec<_> = quiet.words().filter_map(out).collect();
        quiet.reopen();
        // Once all is as it must be: `take` may panic.
        taken.into_iter().for_each(take);
        Ok(true)
    }
}

/// # Safety
///
/// `word` is null or a magazine that `exchange` was given, out of its word since, and named once.
unsafe fn owned(word: usize) -> Option<Box<Magazine>> {
    let magazine = std::ptr::with_exposed_provenance_mut::<Magazine>(word);
    // SAFETY: the caller's.
    (!magazine.is_null()).then(|| unsafe { Box::from_raw(magazine) })
}

impl Drop for Store {
    fn drop(&mut self) {
        handover::acquire(self);
        for word in self.0.words_mut() {
            // SAFETY: a magazine or null; the gate zeroes the word.
            drop(unsafe { owned(word.load(Ordering::Relaxed)) });
        }
    }
}
