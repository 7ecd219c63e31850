//! The handles that return tokens.
//!
//! The user of device memory finishes with fragments on other threads than the receiver's, often in
//! another order. So a handle is `Clone + Sync`, and a call returns many ranges. Each number comes
//! from the user and may be invalid: it is ignored and counted.

use super::counts::{Count, Counter};
use super::error::TooManyRanges;
use super::pages::Pages;
use super::stats::TokenStats;
use super::table::{Range, Shared, Table};
use super::token::{MAX_FRAGMENTS, TokenRange};
use crate::sync::Arc;
use std::fmt;
use std::mem::{self, MaybeUninit};
use std::ptr;

/// A handle that returns a socket's tokens. It can be used on any thread, while other threads
/// return tokens and the socket receives.
pub struct Returner<B: Pages + Clone> {
    shared: Arc<Shared<B>>,
}

impl<B: Pages + Clone> Returner<B> {
    pub(crate) fn new(shared: Arc<Shared<B>>) -> Self {
        Self { shared }
    }

    /// Returns tokens, each as often as it is named. Returns how many fragments were freed.
    ///
    /// A call processes at most 1024 fragments ([`MAX_FRAGMENTS`]), valid or not, and ignores the
    /// rest. Tokens that were never received, or were returned as often as received, are ignored
    /// and counted in [`stats`](Self::stats).
    ///
    /// Costs a critical section and, for each fragment, an atomic operation.
    ///
    /// # Errors
    ///
    /// [`TooManyRanges`]: there are more than 128 ranges ([`MAX_RANGES`](crate::MAX_RANGES)).
    /// Nothing was returned.
    #[inline]
    pub fn return_tokens(&self, ranges: &[TokenRange]) -> Result<usize, TooManyRanges> {
        TooManyRanges::check(ranges)?;
        Ok(self.shared.return_tokens(ranges, ()).freed as usize)
    }

    /// See [`TokenTable::release_drained`](crate::TokenTable::release_drained).
    pub fn release_drained(&self) -> usize {
        self.shared.release_drained()
    }

    /// The counters of the table. Locks the list of ranges.
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

impl<B: Pages + Clone, K: Counter> Shared<B, K> {
    /// Returns tokens for `holder`.
    #[inline]
    pub(crate) fn return_tokens(&self, ranges: &[TokenRange], holder: K::Holder) -> Done {
        let (done, drained) = self.snapshot.read(|table| Call::run(table, ranges, holder));
        if done.foreign | done.excess > 0 {
            self.ignored(done.foreign, done.excess);
        }
        // This is done outside the critical section, so that the bindings are released at once.
        if drained {
            self.release_drained();
        }
        done
    }
}

/// How many returned tokens were freed, foreign and in excess.
#[derive(Default)]
pub(crate) struct Done {
    pub(crate) freed: u32,
    pub(crate) foreign: u32,
    pub(crate) excess: u32,
}

/// References that were removed from counts and were not put yet: see [`Call`].
struct PendingPuts<'c, B> {
    pages: [MaybeUninit<(&'c B, u32)>; GROUP],
    len: usize,
    /// Whether a binding is drained now, to whose pages references were put.
    drained: bool,
}

/// The number of ranges that are looked up together, and of references that are put together.
const GROUP: usize = 16;

impl<'c, B: Pages> PendingPuts<'c, B> {
    #[inline]
    fn new() -> Self {
        Self { pages: [const { MaybeUninit::uninit() }; GROUP], len: 0, drained: false }
    }

    /// # Safety
    ///
    /// The caller owns a reference to page `index`, which this value owns from then on.
    #[inline]
    unsafe fn push(&mut self, binding: &'c B, index: u32) {
        self.pages[self.len].write((binding, index));
        self.len += 1;
        if self.len == GROUP {
            self.put();
        }
    }

    #[inline]
    fn put(&mut self) {
        let mut last: Option<&B> = None;
        for page in &self.pages[..mem::take(&mut self.len)] {
            // SAFETY: the first `len` were written.
            let (binding, index) = unsafe { page.assume_init() };
            // SAFETY: the caller of `push` owned this reference.
            unsafe { binding.put(index, 1) };
            if let Some(other) = last.replace(binding).filter(|last| !ptr::eq(*last, binding)) {
                self.drained |= other.drained();
            }
        }
        self.drained |= last.is_some_and(B::drained);
    }
}

/// A call that returns tokens.
///
/// Usually another CPU was the last writer of the cache lines of the counts, and of the lines that
/// a put reads. The CPU executes no later load before an atomic operation has finished. So a call
/// works in three steps: it looks up the tokens and prefetches the lines of their counts; it
/// decrements all counts; it puts all references. The cache misses of one step then overlap.
struct Call<'c, B, K: Counter = Count> {
    table: Option<&'c Table<B, K>>,
    holder: K::Holder,
    /// The number of fragments that the call may still process.
    left: u32,
    taken: PendingPuts<'c, B>,
    done: Done,
}

impl<'c, B: Pages, K: Counter> Call<'c, B, K> {
    /// Runs a call. Returns its result, and whether a binding of which it freed fragments is
    /// drained now.
    #[inline]
    fn run(table: Option<&'c Table<B, K>>, ranges: &[TokenRange], holder: K::Holder) -> (Done, bool) {
        let mut call = Call { table, holder, left: MAX_FRAGMENTS, taken: PendingPuts::new(), done: Done::default() };
        for ranges in ranges.chunks(GROUP) {
            let mut found = [None; GROUP];
            for (TokenRange { start, .. }, found) in ranges.iter().zip(&mut found) {
                *found = table.and_then(|table| table.find(*start));
                if let Some(range) = *found {
                    range.base.prefetch(*start - range.first);
                }
            }
            ranges.iter().zip(found).for_each(|(range, found)| call.return_tokens(*range, found));
        }
        call.taken.put();
        (call.done, call.taken.drained)
    }

    /// Returns as many of the tokens as the call may still process. `found` is the range of the
    /// first token.
    #[inline]
    fn return_tokens(&mut self, tokens: TokenRange, found: Option<&'c Range<B, K>>) {
        let count = tokens.count.min(self.left);
        self.left -= count;
        match found {
            Some(range) if count <= range.rest(tokens.start) => self.in_range(range, tokens.start, count),
            _ => self.beyond(tokens.start, count, found),
        }
    }

    /// The same for tokens that may be in several ranges, or in none.
    #[cold]
    fn beyond(&mut self, mut token: u32, mut count: u32, mut found: Option<&'c Range<B, K>>) {
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
                // There are no tokens after the last number.
                None => {
                    self.done.foreign += count;
                    return;
                }
            }
            found = self.table.and_then(|table| table.find(token));
        }
    }

    /// Returns `count` tokens from `token` on. All of them must be in the range.
    #[inline]
    fn in_range(&mut self, range: &'c Range<B, K>, token: u32, count: u32) {
        let (first, mut freed) = (token - range.first, 0);
        for index in first..first + count {
            if range.take_one(index, self.holder) {
                freed += 1;
                // SAFETY: the count was not 0, so the table owned a reference to this page, and
                // this thread owns it now.
                unsafe { self.taken.push(&range.attached.binding, index) };
            }
        }
        self.done.freed += freed;
        self.done.excess += count - freed;
    }
}
