//! The directory of a token table: which block has the numbers of a token's page.
//!
//! ```text
//!   token ──► number of its block: (token - 1) / 16
//!
//!   entries   │ 8 │ - │ - │ 3 │ - │ 5 │ - │ - │      at `number % 8`: one look for each token
//!               24 ──────────────► │ 24 │            taken by 8: further, from a hash of the number
//! ```
//!
//! A range of tokens begins with a block, so a block has tokens of one binding only. A directory
//! has at least twice as many entries as blocks. So consecutive blocks, of any number of bindings
//! with consecutive ranges, are all at their first place.
//!
//! Entries are added while other threads read. An entry does not change until the directory is
//! dropped. To remove entries, and to have more of them, the table makes another directory.

use super::counts::{BLOCK, Block, Delivered};
use crate::sync::{AtomicPtr, AtomicU32, Ordering};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// A block, and what it belongs to.
///
/// Invariant: if `number` is not [`NONE`], the other fields are set.
pub(crate) struct Entry<K, A> {
    number: AtomicU32,
    block: AtomicPtr<Block<K>>,
    of: AtomicPtr<A>,
}

/// The number of no block: there are fewer than 2^28 with 16 tokens each.
const NONE: u32 = u32::MAX;

impl<K, A> Entry<K, A> {
    /// The address of the block of an entry that has a number.
    #[inline]
    pub(crate) fn block(&self) -> NonNull<Block<K>> {
        // SAFETY: the field is set (the invariant).
        unsafe { NonNull::new_unchecked(self.block.load(Ordering::Relaxed)) }
    }

    /// The address of what the block belongs to, of an entry that has a number.
    #[inline]
    pub(crate) fn of(&self) -> NonNull<A> {
        // SAFETY: the field is set (the invariant).
        unsafe { NonNull::new_unchecked(self.of.load(Ordering::Relaxed)) }
    }
}

/// The blocks of a table by the numbers of their tokens. The addresses are not followed here.
///
/// Invariant: `entries` has a power of two of entries, of which at most half have a number.
pub(crate) struct Directory<K, A> {
    entries: Arc<[Entry<K, A>]>,
    mask: u32,
}

impl<K, A> Clone for Directory<K, A> {
    fn clone(&self) -> Self {
        Self { entries: self.entries.clone(), mask: self.mask }
    }
}

impl<K: Delivered, A> Directory<K, A> {
    /// An empty directory with room for this number of blocks.
    pub(crate) fn with_room(blocks: usize) -> Self {
        let empty = || Entry {
            number: AtomicU32::new(NONE),
            block: AtomicPtr::new(ptr::null_mut()),
            of: AtomicPtr::new(ptr::null_mut()),
        };
        let entries: Arc<[_]> = (0..(2 * blocks).next_power_of_two()).map(|_| empty()).collect();
        let mask = (entries.len() - 1) as u32;
        Self { entries, mask }
    }

    /// The most blocks for which there is room.
    pub(crate) fn room(&self) -> usize {
        self.entries.len() / 2
    }

    /// The entry of the block that has this number of a token. The entry has a number.
    #[inline]
    pub(crate) fn find(&self, at: u32) -> Option<&Entry<K, A>> {
        let number = at / BLOCK;
        // SAFETY: there is a power of two of entries (the invariant).
        let entry = unsafe { self.entries.get_unchecked((number & self.mask) as usize) };
        // Acquire: the other fields, and the zeros of the block, were written before.
        if entry.number.load(Ordering::Acquire) == number { Some(entry) } else { self.search(number) }
    }

    /// The same for a block that is not at its first place.
    #[cold]
    fn search(&self, number: u32) -> Option<&Entry<K, A>> {
        for entry in self.places(number) {
            match entry.number.load(Ordering::Acquire) {
                NONE => return None,
                found if found == number => return Some(entry),
                _ => {}
            }
        }
        None
    }

    /// Adds a block, which the directory must not have, and for which it must have room.
    pub(crate) fn add(&self, at: u32, block: NonNull<Block<K>>, of: NonNull<A>) {
        let number = at / BLOCK;
        let free = self.places(number).find(|entry| entry.number.load(Ordering::Relaxed) == NONE);
        if let Some(entry) = free {
            entry.block.store(block.as_ptr(), Ordering::Relaxed);
            entry.of.store(of.as_ptr(), Ordering::Relaxed);
            // Release: publishes the two, and the zeros of the block.
            entry.number.store(number, Ordering::Release);
        }
    }

    /// The places at which the block of this number can be, the first one first.
    fn places(&self, number: u32) -> impl Iterator<Item = &Entry<K, A>> {
        let mask = self.entries.len() - 1;
        let hash = number.wrapping_mul(0x9E37_79B9).rotate_left(16) as usize;
        let further = (0..self.entries.len()).map(move |n| hash.wrapping_add(n));
        std::iter::once(number as usize).chain(further).map(move |at| &self.entries[at & mask])
    }
}
