//! The receive side of a socket.

use crate::counts::{Base, Count, Counts};
use crate::sync::Arc;
use crate::table::Shared;
use crate::{DeliverError, Pages, Returner, Token, TokenStats};
use std::fmt;
use std::ptr::NonNull;

/// A socket's tokens: its one receiver, from which [`Returner`]s are made.
///
/// The last handle that goes, this one or a returner, closes the table: all pages that are still held are given back, at a
/// cost of a look at those counts, 1024 at a time, of which one was ever used, and at a word for 65,536 others.
pub struct TokenTable<B: Pages + Clone> {
    shared: Arc<Shared<B>>,
    /// What is known of ranges, by the binding's id. It may list bindings that are gone; these are not looked up any more.
    known: Vec<Known>,
    /// Where in `known` a binding was when one with the same id modulo [`HINTS`] was asked for last.
    hints: [u32; HINTS],
    /// See [`Receive`]; without one, what the last had.
    reserved: Vec<Reserved>,
}

const HINTS: usize = 16;

/// A range, as the receiver needs it.
///
/// Invariant: `base` is where `counts` are, one for each of `pages`.
struct Known {
    binding: u64,
    first: u32,
    pages: u32,
    base: Base,
    counts: Arc<Counts>,
}

/// The count of a page of something known, to which one is to be given.
#[derive(PartialEq)]
struct Reserved(NonNull<Count>);

// SAFETY: atomics in memory that the table keeps, on whatever thread it is.
unsafe impl Send for Reserved {}
// SAFETY: as above, and by reference nothing can be done with it.
unsafe impl Sync for Reserved {}

impl<B: Pages + Clone> TokenTable<B> {
    /// The table of a new socket. Allocates little: ranges and counts come with the first fragment of a binding.
    #[must_use]
    pub fn new() -> Self {
        Self { shared: Arc::new(Shared::new()), known: Vec::new(), hints: [0; HINTS], reserved: Vec::new() }
    }

    /// Another handle, which gives tokens back.
    #[must_use]
    pub fn returner(&self) -> Returner<B> {
        Returner::new(self.shared.clone())
    }

    /// Begins a call that receives.
    #[inline]
    pub fn receive(&mut self) -> Receive<'_, B> {
        // Of the last one, committed or not.
        self.reserved.clear();
        Receive { table: self }
    }

    /// Reserves for one fragment, in page `index`, alone: a [`Receive`] of one.
    ///
    /// # Errors
    ///
    /// There is no room or memory for it, or no such page.
    #[inline]
    pub fn reserve(&mut self, binding: &B, index: u32) -> Result<ReceiveOne<'_>, DeliverError> {
        self.reserved.clear();
        let known = self.find(binding, index)?;
        // SAFETY: `find` says that there is such a page; the invariant.
        Ok(ReceiveOne { count: unsafe { known.base.mark(index) }, token: Token(known.first + index) })
    }

    /// Lets go of bindings that have been unbound and whose pages are all home. Also done when a binding is met, and by a
    /// return that brings the last page home; this is for a socket that does neither. The answer is how many there were.
    pub fn release_drained(&self) -> usize {
        self.shared.release_drained()
    }

    /// The table's numbers. Takes the lock that changes of ranges take.
    #[must_use]
    pub fn stats(&self) -> TokenStats {
        self.shared.stats()
    }

    /// What is known of a binding that has a page `index`.
    #[inline]
    fn find(&mut self, binding: &B, index: u32) -> Result<&Known, DeliverError> {
        let id = binding.id();
        let mut at = self.hints[id as usize % HINTS] as usize;
        if self.known.get(at).is_none_or(|known| known.binding != id) {
            at = match self.known.binary_search_by_key(&id, |known| known.binding) {
                Ok(at) => at,
                Err(at) => self.meet(binding, index, at)?,
            };
            self.hints[id as usize % HINTS] = at as u32;
        }
        let known = &self.known[at];
        if index < known.pages {
            return Ok(known);
        }
        Err(DeliverError::NoSuchPage { binding: id, index, pages: known.pages })
    }

    #[cold]
    fn meet(&mut self, binding: &B, index: u32, mut at: usize) -> Result<usize, DeliverError> {
        let pages = binding.pages();
        if index >= pages {
            return Err(DeliverError::NoSuchPage { binding: binding.id(), index, pages });
        }
        let (first, counts) = self.shared.attach(binding, self.known.len())?;
        if self.reserved.is_empty() {
            // If this list alone has the counts, their range is gone.
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

/// A fragment that was reserved alone. Dropped without [`commit`](Self::commit) it leaves nothing behind.
pub struct ReceiveOne<'t> {
    count: &'t Count,
    token: Token,
}

impl ReceiveOne<'_> {
    /// Counts it, and tells the token, which can be given back from now on. An atomic addition.
    ///
    /// # Safety
    ///
    /// A reference to the page is the caller's, and becomes the table's.
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

/// A call that receives: fragments are reserved one after the other, and counted all at once when nothing can fail any more.
///
/// Dropped without [`commit`](Self::commit) it leaves nothing behind: tokens that were told are not valid, and the
/// references are the caller's as before.
pub struct Receive<'t, B: Pages + Clone> {
    table: &'t mut TokenTable<B>,
}

impl<B: Pages + Clone> Receive<'_, B> {
    /// The token that a fragment in page `index` will have. Touches no count.
    ///
    /// # Errors
    ///
    /// There is no room or memory for it, or no such page. What was reserved before can be committed all the same.
    #[inline]
    pub fn reserve(&mut self, binding: &B, index: u32) -> Result<Token, DeliverError> {
        let known = self.table.find(binding, index)?;
        // SAFETY: `find` says that there is such a page; the invariant.
        let (count, token) = (unsafe { known.base.mark(index) }, Token(known.first + index));
        known.base.prefetch(index);
        self.table.reserved.push(Reserved(NonNull::from(count)));
        Ok(token)
    }

    /// Counts all that was reserved: from now on each token can be given back, as often as it was told. One atomic
    /// addition for each page, or less where fragments of one page came in a row.
    ///
    /// # Safety
    ///
    /// For each fragment that was reserved a reference to its page is the caller's, and becomes the table's.
    #[inline]
    pub unsafe fn commit(self) {
        for same in self.table.reserved.chunk_by(Reserved::eq) {
            // SAFETY: of counts that the table knows and has not let go of since: that happens only with nothing reserved.
            unsafe { same[0].0.as_ref() }.give(same.len() as u32);
        }
    }
}

impl<B: Pages + Clone> fmt::Debug for Receive<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receive").field("reserved", &self.table.reserved.len()).finish_non_exhaustive()
    }
}
