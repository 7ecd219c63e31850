//! The receive side of a socket's token table.
//!
//! A socket has one receiver, so this side needs no lock: it keeps a list of its own of the ranges,
//! with a hint for each binding, and locks the shared table only for a binding that it has not met.
//! A count is incremented last, when the delivery can no longer fail.

use super::counts::{Base, Count, Counter, Counts};
use super::error::DeliverError;
use super::pages::Pages;
use super::returner::Returner;
use super::stats::TokenStats;
use super::table::Shared;
use super::token::Token;
use crate::sync::Arc;
use std::fmt;
use std::ptr::NonNull;

/// The table of a socket's tokens, as its single receiver uses it. It makes [`Returner`]s.
///
/// When the last handle is dropped, this value or a returner, the table is closed: all references
/// that it still holds are dropped. Closing reads 1024 counts for each part of the counts that was
/// ever used, and one word for each 65,536 pages.
pub struct TokenTable<B: Pages + Clone> {
    ranges: Receiver<B>,
    /// The fragments that the current [`Receive`] has reserved. If there is none, those of the last
    /// [`Receive`].
    reserved: Vec<Reserved>,
}

/// The ranges of a table, as its single receiver finds them.
pub(crate) struct Receiver<B: Pages, K: Counter = Count> {
    pub(crate) shared: Arc<Shared<B, K>>,
    /// The known ranges, ordered by the binding's id. The list may contain bindings that were
    /// released; these are not looked up any more.
    known: Vec<Known<K>>,
    /// For each id modulo [`HINTS`], the position in `known` of the binding that was looked up
    /// last.
    hints: [u32; HINTS],
}

const HINTS: usize = 16;

/// A range, as the receiver needs it.
///
/// Invariant: `base` is the address of `counts`, which has a count for each of the `pages`.
pub(crate) struct Known<K = Count> {
    binding: u64,
    pub(crate) first: u32,
    pages: u32,
    pub(crate) base: Base<K>,
    counts: Arc<Counts<K>>,
}

/// The count of a page of a known range. [`Receive::commit`] will add to it.
#[derive(PartialEq)]
struct Reserved(NonNull<Count>);

// SAFETY: the counts are atomics, in memory that the table keeps on any thread.
unsafe impl Send for Reserved {}
// SAFETY: as above; and a shared reference to this value has no methods.
unsafe impl Sync for Reserved {}

impl<B: Pages + Clone> TokenTable<B> {
    /// Makes the table of a new socket. Allocates little: a range and its counts are made for the
    /// first fragment of a binding.
    #[must_use]
    pub fn new() -> Self {
        Self { ranges: Receiver::new(), reserved: Vec::new() }
    }

    /// Returns another handle, which returns tokens.
    #[must_use]
    pub fn returner(&self) -> Returner<B> {
        Returner::new(self.ranges.shared.clone())
    }

    /// Begins a receiving call.
    #[inline]
    pub fn receive(&mut self) -> Receive<'_, B> {
        // Forget the fragments of the last call, whether it was committed or not.
        self.reserved.clear();
        Receive { table: self }
    }

    /// Reserves a token for one fragment in page `index`: the same as a [`Receive`] of one
    /// fragment.
    ///
    /// # Errors
    ///
    /// [`DeliverError`]: there is no room or no memory for the binding's range, or the binding has
    /// no such page.
    #[inline]
    pub fn reserve(&mut self, binding: &B, index: u32) -> Result<ReceiveOne<'_>, DeliverError> {
        self.reserved.clear();
        let known = self.ranges.find(binding, index, true)?;
        // SAFETY: `find` has checked that there is such a page, and `base` is valid (the
        // invariant).
        Ok(ReceiveOne { count: unsafe { known.base.mark(index) }, token: Token(known.first + index) })
    }

    /// Drops the table's handles on bindings that are unbound and whose pages were all returned.
    /// Returns how many there were.
    ///
    /// The table also does this when it receives from a new binding, and when a return is that of
    /// the last page. Call it for a socket that neither receives nor returns tokens.
    pub fn release_drained(&self) -> usize {
        self.ranges.shared.release_drained()
    }

    /// The counters of the table. Locks the list of ranges.
    #[must_use]
    pub fn stats(&self) -> TokenStats {
        self.ranges.shared.stats()
    }
}

impl<B: Pages + Clone, K: Counter> Receiver<B, K> {
    pub(crate) fn new() -> Self {
        Self { shared: Arc::new(Shared::new()), known: Vec::new(), hints: [0; HINTS] }
    }

    /// Finds the range of a binding that has a page `index`, or makes it. `idle` means that the
    /// caller does not use any count that an earlier call found. Ranges that were removed can then
    /// be dropped from the list.
    #[inline]
    pub(crate) fn find(&mut self, binding: &B, index: u32, idle: bool) -> Result<&Known<K>, DeliverError> {
        let id = binding.id();
        let mut at = self.hints[id as usize % HINTS] as usize;
        if self.known.get(at).is_none_or(|known| known.binding != id) {
            at = match self.known.binary_search_by_key(&id, |known| known.binding) {
                Ok(at) => at,
                Err(at) => self.meet(binding, index, at, idle)?,
            };
            self.hints[id as usize % HINTS] = at as u32;
        }
        let known = &self.known[at];
        if index < known.pages {
            return Ok(known);
        }
        Err(DeliverError::NoSuchPage { binding: id, index, pages: known.pages })
    }

    /// Prefetches the cache line of the count of page `index`, if the hint of the binding's id
    /// leads to its range. Does nothing otherwise.
    #[inline]
    pub(crate) fn prefetch(&self, binding: &B, index: u32) {
        let id = binding.id();
        let known = self.known.get(self.hints[id as usize % HINTS] as usize);
        if let Some(known) = known.filter(|known| known.binding == id) {
            known.base.prefetch(index);
        }
    }

    #[cold]
    fn meet(&mut self, binding: &B, index: u32, mut at: usize, idle: bool) -> Result<usize, DeliverError> {
        let pages = binding.pages();
        if index >= pages {
            return Err(DeliverError::NoSuchPage { binding: binding.id(), index, pages });
        }
        let (first, counts) = self.shared.attach(binding, self.known.len())?;
        if idle {
            // If this list is the only holder of the counts, their range was removed.
            self.known.retain(|known| Arc::strong_count(&known.counts) > 1);
            at = self.known.partition_point(|known| known.binding < binding.id());
        }
        self.known.insert(at, Known { binding: binding.id(), first, pages, base: counts.base(), counts });
        Ok(at)
    }
}

impl<B: Pages + Clone> Default for TokenTable<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B: Pages + Clone> fmt::Debug for TokenTable<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenTable").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// One fragment that was reserved alone. If it is dropped without [`commit`](Self::commit), nothing
/// changes.
pub struct ReceiveOne<'t> {
    count: &'t Count,
    token: Token,
}

impl ReceiveOne<'_> {
    /// Counts the fragment, and returns its token, which can be returned from now on. Costs an
    /// atomic addition.
    ///
    /// # Safety
    ///
    /// The caller owns a reference to the page, which the table owns from then on.
    #[inline]
    pub unsafe fn commit(self) -> Token {
        self.count.give(1);
        self.token
    }
}

impl fmt::Debug for ReceiveOne<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveOne").field("token", &self.token).finish_non_exhaustive()
    }
}

/// A call that receives several fragments. It reserves them one after the other. When no error is
/// possible any more, it counts all of them together.
///
/// If it is dropped without [`commit`](Self::commit), nothing changes: the tokens that it returned
/// are not valid, and the caller still owns the references.
pub struct Receive<'t, B: Pages + Clone> {
    table: &'t mut TokenTable<B>,
}

impl<B: Pages + Clone> Receive<'_, B> {
    /// Reserves a fragment in page `index`, and returns the token that it will have. Changes no
    /// count.
    ///
    /// # Errors
    ///
    /// [`DeliverError`]: there is no room or no memory for the binding's range, or the binding has
    /// no such page. The fragments that were reserved before can still be committed.
    #[inline]
    pub fn reserve(&mut self, binding: &B, index: u32) -> Result<Token, DeliverError> {
        let TokenTable { ranges, reserved } = &mut *self.table;
        let known = ranges.find(binding, index, reserved.is_empty())?;
        // SAFETY: `find` has checked that there is such a page, and `base` is valid (the
        // invariant).
        let (count, token) = (unsafe { known.base.mark(index) }, Token(known.first + index));
        known.base.prefetch(index);
        reserved.push(Reserved(NonNull::from(count)));
        Ok(token)
    }

    /// Counts all reserved fragments. From then on each token can be returned as often as it was
    /// received. Costs one atomic addition for each fragment. Consecutive fragments of one page
    /// share one addition.
    ///
    /// # Safety
    ///
    /// For each reserved fragment, the caller owns a reference to its page, which the table owns
    /// from then on.
    #[inline]
    pub unsafe fn commit(self) {
        for same in self.table.reserved.chunk_by(Reserved::eq) {
            // SAFETY: the table knows these counts. It forgets counts only while nothing is
            // reserved.
            unsafe { same[0].0.as_ref() }.give(same.len() as u32);
        }
    }
}

impl<B: Pages + Clone> fmt::Debug for Receive<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receive").field("reserved", &self.table.reserved.len()).finish_non_exhaustive()
    }
}
