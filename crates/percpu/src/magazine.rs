//! A magazine: an array of items that a CPU fills, and that changes owner as a whole (Bonwick and
//! Adams). Why whole: one atomic operation moves up to 62 items.

use crate::lane::Position;
use crate::prefetch;
use crate::sync::{AtomicU32, AtomicUsize, Ordering};
use std::num::NonZeroUsize;

/// Items in the largest magazine: with its header they fill eight lines. Two in models.
pub const MAGAZINE: usize = if cfg!(loom) { 2 } else { 62 };

/// ```text
///   │ length │ capacity │ next │ index │ item 0 │ item 1 │ ... │ item 61 │      512 bytes
///     u32      u32        u32    u32     word
/// ```
///
/// Invariant (*one holder*): a magazine is at any time with exactly one of: a CPU's word, where
/// sequences of that CPU fill it; a list of its depot; the thread that took it out of either. Only
/// that holder touches `length` and the items below it, and passes them on with a release. Other
/// threads may read `length` and `next` for a guess; the values may be out of date.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Magazine {
    length: AtomicU32,
    capacity: AtomicU32,
    /// Index and 1 of the next magazine on a list; 0 ends it. While the magazine is loaded on a
    /// CPU: in a [`CpuCache`](crate::CpuCache), that of the CPU's previous magazine; in a
    /// [`Depot`](crate::Depot), the CPU's [`Position`].
    pub(crate) next: AtomicU32,
    /// The magazine's index in its depot, plus 1.
    pub(crate) index: u32,
    items: [AtomicUsize; MAGAZINE],
}

/// Where the assembly finds the capacity, and the items.
#[cfg_attr(loom, allow(dead_code, reason = "a model has no assembly"))]
pub(crate) const CAPACITY_AT: usize = 4;
#[cfg_attr(loom, allow(dead_code, reason = "as above"))]
pub(crate) const ITEMS_AT: usize = 16;
/// Where it finds the next magazine and a magazine's own number, and the logarithm of a magazine's
/// size.
#[cfg_attr(loom, allow(dead_code, reason = "as above"))]
pub(crate) const NEXT_AT: usize = 8;
#[cfg_attr(loom, allow(dead_code, reason = "as above"))]
pub(crate) const INDEX_AT: usize = 12;
#[cfg_attr(loom, allow(dead_code, reason = "as above"))]
pub(crate) const SHIFT: usize = 9;
#[cfg(not(loom))]
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Magazine>() == 512 && offset_of!(Magazine, length) == 0);
    assert!(offset_of!(Magazine, capacity) == CAPACITY_AT && offset_of!(Magazine, items) == ITEMS_AT);
    assert!(offset_of!(Magazine, next) == NEXT_AT && offset_of!(Magazine, index) == INDEX_AT);
    assert!(size_of::<Magazine>() == 1 << SHIFT);
};

impl Magazine {
    /// An empty one for `capacity` items: at least 1, at most [`MAGAZINE`].
    pub(crate) fn new(capacity: usize, index: u32) -> Self {
        Self {
            length: AtomicU32::new(0),
            capacity: AtomicU32::new(capacity.clamp(1, MAGAZINE) as u32),
            next: AtomicU32::new(0),
            index,
            items: std::array::from_fn(|_| AtomicUsize::new(0)),
        }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.length.load(Ordering::Relaxed) as usize
    }

    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.length.load(Ordering::Relaxed) >= self.capacity.load(Ordering::Relaxed)
    }

    /// The position of the CPU on which it is loaded.
    #[inline]
    pub(crate) fn position(&self) -> Position {
        Position(self.next.load(Ordering::Relaxed))
    }

    /// Only the holder calls it.
    #[inline]
    pub(crate) fn set_position(&self, position: Position) {
        self.next.store(position.0, Ordering::Relaxed);
    }

    /// Puts an item on it. Only the holder calls it. Returns false if the magazine is full.
    pub(crate) fn push(&self, item: usize) -> bool {
        if self.is_full() {
            return false;
        }
        let length = self.len();
        self.items[length].store(item, Ordering::Relaxed);
        self.length.store(length as u32 + 1, Ordering::Relaxed);
        true
    }

    /// Takes the newest item. Only the holder calls it.
    pub(crate) fn pop(&self) -> Option<NonZeroUsize> {
        let newest = self.len().checked_sub(1)?;
        self.length.store(newest as u32, Ordering::Relaxed);
        NonZeroUsize::new(self.items[newest].load(Ordering::Relaxed))
    }

    /// What a CPU's word holds when this magazine is the CPU's.
    #[inline]
    pub(crate) fn address(&self) -> usize {
        std::ptr::from_ref(self).expose_provenance()
    }

    /// Makes `item` its only item, and forgets all others. Only the holder calls it. Does not read
    /// the header.
    #[inline]
    pub(crate) fn set_only(&self, item: usize) {
        self.items[0].store(item, Ordering::Relaxed);
        self.length.store(1, Ordering::Relaxed);
    }

    /// Forgets its items. Only the holder calls it.
    #[inline]
    pub(crate) fn clear(&self) {
        self.length.store(0, Ordering::Relaxed);
    }

    /// Forgets the first `n` items. Only the holder calls it.
    pub(crate) fn remove_first(&self, n: usize) {
        let kept = self.len().saturating_sub(n);
        for at in 0..kept {
            self.items[at].store(self.items[at + n].load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.length.store(kept as u32, Ordering::Relaxed);
    }

    /// Prefetches all of its lines for reading. The thread does not wait for them.
    #[inline]
    pub(crate) fn prefetch(&self) {
        prefetch::all_to_read(self);
    }

    /// Prefetches all of its lines for writing.
    #[inline]
    pub(crate) fn prefetch_to_write(&self) {
        prefetch::all_to_write(self);
    }

    /// Its items, oldest first. Only the holder calls it.
    pub(crate) fn items(&self) -> impl Iterator<Item = usize> {
        self.items[..self.len().min(MAGAZINE)].iter().map(|item| item.load(Ordering::Relaxed))
    }

    /// Passes the items of a magazine, oldest first, to `refused`. If `refused` panics, it gets the
    /// rest while the panic unwinds.
    ///
    /// The items are passed from a copy: passing any of them may free the magazine, so it is not
    /// touched after the first call of `refused`. The copy is on the stack, because this may be a
    /// signal handler.
    ///
    /// # Safety
    ///
    /// The magazine is the caller's, and lives until the first call of `refused`.
    #[cold]
    pub(crate) unsafe fn refuse_items(this: *const Self, refused: impl FnMut(NonZeroUsize)) {
        let mut items = [0; MAGAZINE];
        // SAFETY: the caller's.
        items.iter_mut().zip(unsafe { (*this).items() }).for_each(|(to, item)| *to = item);
        let mut rest = Rest { items: items.into_iter(), refused };
        rest.pass();
    }
}

/// Items that were copied and not yet passed on. The drop of this value, also by a panic, passes
/// them on.
struct Rest<F: FnMut(NonZeroUsize)> {
    items: std::array::IntoIter<usize, MAGAZINE>,
    refused: F,
}

impl<F: FnMut(NonZeroUsize)> Rest<F> {
    fn pass(&mut self) {
        // The iterator is advanced before the item is passed, so that a panic does not pass an item
        // twice.
        self.items.by_ref().filter_map(NonZeroUsize::new).for_each(&mut self.refused);
    }
}

impl<F: FnMut(NonZeroUsize)> Drop for Rest<F> {
    fn drop(&mut self) {
        self.pass();
    }
}

/// The magazine whose index plus 1 is `index`. `None` if `index` is 0, or there is no such
/// magazine.
pub(crate) fn numbered(magazines: &[Magazine], index: u32) -> Option<&Magazine> {
    magazines.get((index as usize).checked_sub(1)?)
}

/// The magazine that a CPU's word addresses, if it is not null.
///
/// # Safety
///
/// `word` is null or a magazine that lives.
pub(crate) unsafe fn at_word<'m>(word: usize) -> Option<&'m Magazine> {
    // SAFETY: the caller's.
    unsafe { std::ptr::with_exposed_provenance::<Magazine>(word).as_ref() }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A panic over one item loses no other item.
    #[test]
    fn a_panic_over_an_item_passes_the_rest() {
        let magazine = Magazine::new(5, 1);
        (1..=5).for_each(|n| assert!(magazine.push(n)));
        let mut passed = Vec::new();
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let refused = |item: NonZeroUsize| {
                passed.push(item.get());
                assert_ne!(item.get(), 2, "this panic is part of the test");
            };
            // SAFETY: the magazine outlives the call.
            unsafe { Magazine::refuse_items(&magazine, refused) }
        }));
        assert!(ended.is_err());
        assert_eq!(passed, [1, 2, 3, 4, 5]);
    }
}
