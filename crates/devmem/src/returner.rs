//! The handles that give tokens back.

use crate::sync::Arc;
use crate::table::{Range, Shared, Table};
use crate::{Pages, TokenRange, TokenStats, TooManyRanges};
use std::fmt;
use std::mem::{self, MaybeUninit};
use std::ptr;

/// The most ranges in a call.
pub const MAX_RANGES: usize = 128;
/// After how many fragments, valid or not, a call stops.
pub const MAX_FRAGMENTS: u32 = 1024;

/// A handle on a socket's tokens that gives them back, on any thread, while others do the same and the socket receives.
pub struct Returner<B: Pages + Clone> {
    shared: Arc<Shared<B>>,
}

impl<B: Pages + Clone> Returner<B> {
    pub(crate) fn new(shared: Arc<Shared<B>>) -> Self {
        Self { shared }
    }

    /// Gives tokens back, each as often as it is named; the answer is how many fragments were freed. At most 1024 are
    /// looked at ([`MAX_FRAGMENTS`]), valid or not; the rest is left as it is. Tokens that were never received, or have been
    /// returned as often as received, are ignored and counted in [`stats`](Self::stats).
    ///
    /// Costs a critical section and, for each fragment, an atomic operation.
    ///
    /// # Errors
    ///
    /// There are more than 128 ranges ([`MAX_RANGES`]). Nothing was given back.
    #[inline]
    pub fn give_back(&self, ranges: &[TokenRange]) -> Result<usize, TooManyRanges> {
        if ranges.len() > MAX_RANGES {
            return Err(TooManyRanges { ranges: ranges.len() });
        }
        let (done, drained) = self.shared.snapshot.read(|table| Call::run(table, ranges));
        if done.foreign | done.excess > 0 {
            self.shared.ignored(done.foreign, done.excess);
        }
        // Not in the section: what it releases should go now.
        if drained {
            self.shared.release_drained();
        }
        Ok(done.freed as usize)
    }

    /// See [`TokenTable::release_drained`](crate::TokenTable::release_drained).
    pub fn release_drained(&self) -> usize {
        self.shared.release_drained()
    }

    /// The table's numbers. Takes the lock that changes of ranges take.
    #[must_use]
    pub fn stats(&self) -> TokenStats {
        self.shared.stats()
    }
}

impl<B: Pages + Clone> Clone for Returner<B> {
    fn clone(&self) -> Self {
        Self::new(self.shared.clone())
    }
}

impl<B: Pages + Clone> fmt::Debug for Returner<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Returner").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Done {
    freed: u32,
    foreign: u32,
    excess: u32,
}

/// References that were taken and are yet to be put: see [`Call`].
struct Batch<'c, B> {
    pages: [MaybeUninit<(&'c B, u32)>; BATCH],
    len: usize,
    /// A binding of which something was put has nothing left.
    drained: bool,
}

/// How many ranges are found together, and how many references put.
const BATCH: usize = 16;

impl<'c, B: Pages> Batch<'c, B> {
    #[inline]
    fn new() -> Self {
        Self { pages: [const { MaybeUninit::uninit() }; BATCH], len: 0, drained: false }
    }

    /// # Safety
    ///
    /// A reference to page `index` is the caller's, who gives it up.
    #[inline]
    unsafe fn push(&mut self, binding: &'c B, index: u32) {
        self.pages[self.len].write((binding, index));
        self.len += 1;
        if self.len == BATCH {
            self.put();
        }
    }

    #[inline]
    fn put(&mut self) {
        let mut last: Option<&B> = None;
        for page in &self.pages[..mem::take(&mut self.len)] {
            // SAFETY: the first `len` were written.
            let (binding, index) = unsafe { page.assume_init() };
            // SAFETY: it was given up to `push`.
            unsafe { binding.put(index, 1) };
            if let Some(other) = last.replace(binding).filter(|last| !ptr::eq(*last, binding)) {
                self.drained |= other.drained();
            }
        }
        self.drained |= last.is_some_and(B::drained);
    }
}

/// A call that gives back.
///
/// The lines of counts, and of what a put looks at, were another CPU's last as a rule, and nothing passes the atomic operation
/// that takes. So tokens are found first, their counts' lines asked for; then all are taken; then all are put: lines come together.
struct Call<'c, B> {
    table: Option<&'c Table<B>>,
    /// Fragments that may yet be looked at.
    left: u32,
    taken: Batch<'c, B>,
    done: Done,
}

impl<'c, B: Pages> Call<'c, B> {
    /// What became of it, and whether a binding of which something was freed has nothing left.
    #[inline]
    fn run(table: Option<&'c Table<B>>, ranges: &[TokenRange]) -> (Done, bool) {
        let mut call = Call { table, left: MAX_FRAGMENTS, taken: Batch::new(), done: Done::default() };
        for ranges in ranges.chunks(BATCH) {
            let mut found = [None; BATCH];
            for (TokenRange { start, .. }, found) in ranges.iter().zip(&mut found) {
                *found = table.and_then(|table| table.find(*start));
                if let Some(range) = *found {
                    range.base.prefetch(*start - range.first);
                }
            }
            ranges.iter().zip(found).for_each(|(range, found)| call.give_back(*range, found));
        }
        call.taken.put();
        (call.done, call.taken.drained)
    }

    /// Gives back tokens of which the first is in `found`, as many as may be looked at.
    #[inline]
    fn give_back(&mut self, tokens: TokenRange, found: Option<&'c Range<B>>) {
        let count = tokens.count.min(self.left);
        self.left -= count;
        match found {
            Some(range) if count <= range.rest(tokens.start) => self.in_range(range, tokens.start, count),
            _ => self.beyond(tokens.start, count, found),
        }
    }

    /// The same where tokens may be in several ranges, or in none.
    #[cold]
    fn beyond(&mut self, mut token: u32, mut count: u32, mut found: Option<&'c Range<B>>) {
        while count > 0 {
            let n = match found {
                Some(range) => count.min(range.rest(token)),
                None => self.table.map_or(count, |table| table.outside(token, count)),
            };
            match found {
                Some(range) => self.in_range(range, token, n),
                None => self.done.foreign += n,
            }
            count -= n;
            match token.checked_add(n) {
                Some(next) => token = next,
                // There are no tokens after the last.
                None => {
                    self.done.foreign += count;
                    return;
                }
            }
            found = self.table.and_then(|table| table.find(token));
        }
    }

    /// Gives back `count` tokens from `token` on, which are in the range.
    #[inline]
    fn in_range(&mut self, range: &'c Range<B>, token: u32, count: u32) {
        let (first, mut freed) = (token - range.first, 0);
        for index in first..first + count {
            if range.take_one(index) {
                freed += 1;
                // SAFETY: the count said that the table has a reference to this page, and this one is now ours.
                unsafe { self.taken.push(&range.attached.binding, index) };
            }
        }
        self.done.freed += freed;
        self.done.excess += count - freed;
    }
}
