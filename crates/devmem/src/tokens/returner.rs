//! The handles that return tokens.
//!
//! The user of device memory finishes with fragments on other threads than the receiver's, often in
//! another order. So a handle is `Clone + Sync`, and a call returns many ranges. Each number comes
//! from the user and may be invalid: it is ignored and counted.

use super::counts::{BLOCK, Block, Count, Delivered, ReturnLock, position};
use super::error::TooManyRanges;
use super::pages::Pages;
use super::stats::TokenStats;
use super::table::{Range, Shared, Table};
use super::token::{MAX_FRAGMENTS, TokenRange};
use crate::sync::Arc;
use std::fmt;
use std::mem::MaybeUninit;
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
    /// Costs a critical section and, for each 16 fragments, a lock of the socket's returning
    /// threads.
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

impl<B: Pages + Clone, K: Delivered> Shared<B, K> {
    /// Returns tokens for `holder`.
    #[inline]
    pub(crate) fn return_tokens(&self, ranges: &[TokenRange], holder: K::Holder) -> Done {
        let done = self.snapshot.read(|table| {
            let Some(table) = table else { return Done::foreign(ranges) };
            let mut call = Call { table, returns: &self.returns, holder, left: MAX_FRAGMENTS, done: Done::default() };
            call.run(ranges);
            call.done
        });
        if done.foreign | done.excess > 0 {
            self.ignored(done.foreign, done.excess);
        }
        // This is done outside the critical section, so that the bindings are released at once.
        if done.drained {
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
    /// Whether a binding of which a page was put is drained now.
    drained: bool,
}

impl Done {
    /// The result if there are no ranges of tokens.
    #[cold]
    fn foreign(ranges: &[TokenRange]) -> Self {
        let all = ranges.iter().fold(0, |all: u32, range| all.saturating_add(range.count));
        Self { foreign: all.min(MAX_FRAGMENTS), ..Self::default() }
    }
}

/// The number of fragments that are returned under one lock.
const GROUP: usize = 16;

/// A token whose block was found.
struct Found<'c, B, K: Delivered> {
    block: &'c Block<K>,
    range: &'c Range<B, K>,
    /// The position of the token.
    at: u32,
}

/// A call that returns tokens.
///
/// Another CPU was the last writer of the cache lines of `delivered`. So a call works in three
/// steps, for [`GROUP`] fragments at a time: it looks up the tokens and prefetches the lines; it
/// removes the references from the table, under the lock; it puts the references. The cache misses
/// of one step then overlap, and the lock is held for a few nanoseconds.
struct Call<'c, B, K: Delivered = Count> {
    table: &'c Table<B, K>,
    returns: &'c ReturnLock,
    holder: K::Holder,
    /// The number of fragments that the call may still process.
    left: u32,
    done: Done,
}

impl<'c, B: Pages, K: Delivered> Call<'c, B, K> {
    #[inline]
    fn run(&mut self, ranges: &[TokenRange]) {
        for ranges in ranges.chunks(GROUP) {
            if ranges.len() as u32 <= self.left && of_one_token_each(ranges) {
                match ranges {
                    [first, _, ..] if are_consecutive(ranges) => self.several(first.start, ranges.len() as u32),
                    _ => self.single(ranges),
                }
            } else {
                ranges.iter().for_each(|range| self.several(range.start, range.count));
            }
        }
    }

    /// Returns a token of each of the ranges, of which there are at most [`GROUP`].
    #[inline]
    fn single(&mut self, ranges: &[TokenRange]) {
        self.left -= ranges.len() as u32;
        let mut found = [const { MaybeUninit::<Found<'c, B, K>>::uninit() }; GROUP];
        let (mut len, table) = (0, self.table);
        for (TokenRange { start: token, .. }, place) in ranges.iter().zip(&mut found) {
            let at = position(*token);
            let Some((block, range)) = table.find(at) else { break };
            block.prefetch(at);
            place.write(Found { block, range, at });
            len += 1;
        }
        // SAFETY: the first `len` were written.
        self.put(unsafe { std::slice::from_raw_parts(found.as_ptr().cast(), len) });
        // The first token that has no block, and those behind it.
        ranges[len..].iter().for_each(|range| {
            self.left += 1;
            self.several(range.start, 1);
        });
    }

    /// Returns as many of `count` tokens from `token` on as the call may still process.
    #[inline]
    fn several(&mut self, token: u32, count: u32) {
        let count = count.min(self.left);
        self.left -= count;
        // There are no tokens after the last number.
        let mut left = count.min((u32::MAX - token).saturating_add(1));
        self.done.foreign += count - left;
        let mut at = position(token);
        while left > 0 {
            let n = left.min(BLOCK - at % BLOCK);
            match self.table.find(at) {
                Some((block, range)) => self.in_block(block, range, at, n),
                None => (0..n).for_each(|n| self.ignore(at.wrapping_add(n))),
            }
            (at, left) = (at.wrapping_add(n), left - n);
        }
    }

    /// Returns `n` tokens from the position `at` on, which must be of the block.
    #[inline]
    fn in_block(&mut self, block: &Block<K>, range: &Range<B, K>, at: u32, n: u32) {
        block.prefetch(at);
        let taken = block.take_each(at, n, self.holder, &self.returns.lock());
        if taken == u32::MAX >> (u32::BITS - n) {
            let first = at - range.base;
            // SAFETY: as in `put`.
            (first..first + n).for_each(|index| unsafe { range.binding.put(index, 1) });
            self.done.freed += n;
            self.done.drained |= range.binding.drained();
        } else {
            self.put_some((0..n).map(|n| (range, at + n)), taken);
        }
    }

    /// Removes the references to the pages of these tokens from the table, and puts them.
    #[inline]
    fn put(&mut self, found: &[Found<'c, B, K>]) {
        if found.is_empty() {
            return;
        }
        // A bit for each token of which the holder had a reference, that of the last one lowest.
        let mut taken = 0u32;
        let locked = self.returns.lock();
        for Found { block, at, .. } in found {
            taken = taken << 1 | u32::from(block.take_one(*at, self.holder, &locked));
        }
        drop(locked);
        let all = u32::MAX >> (u32::BITS - found.len() as u32);
        if taken != all {
            let last_first = found.iter().rev().map(|found| (found.range, found.at));
            return self.put_some(last_first, taken);
        }
        self.done.freed += found.len() as u32;
        let mut last = found[0].range;
        for Found { range, at, .. } in found {
            // SAFETY: the table owned this reference, and this call owns it since it was removed
            // from the table. A page that was delivered is one of the range's.
            unsafe { range.binding.put(*at - range.base, 1) };
            if !ptr::eq(last, *range) {
                self.done.drained |= last.binding.drained();
                last = range;
            }
        }
        self.done.drained |= last.binding.drained();
    }

    /// Puts the references of which `taken` has a bit, and counts the other tokens as ignored. The
    /// lowest bit is that of the first token.
    #[cold]
    fn put_some<'r>(&mut self, tokens: impl Iterator<Item = (&'r Range<B, K>, u32)>, taken: u32)
    where
        B: 'r,
        K: 'r,
    {
        for (n, (range, at)) in tokens.enumerate() {
            if taken >> n & 1 == 0 {
                self.ignore(at);
                continue;
            }
            self.done.freed += 1;
            // SAFETY: as in `put`.
            unsafe { range.binding.put(at - range.base, 1) };
            self.done.drained |= range.binding.drained();
        }
    }

    /// Counts the return of the token at a position as ignored.
    #[cold]
    fn ignore(&mut self, at: u32) {
        if self.table.has(at) {
            self.done.excess += 1;
        } else {
            self.done.foreign += 1;
        }
    }
}

/// Whether each of the ranges has one token.
#[inline]
fn of_one_token_each(ranges: &[TokenRange]) -> bool {
    // Without a branch for each, so that the CPU compares several at a time.
    ranges.iter().fold(0, |differ, range| differ | (range.count ^ 1)) == 0
}

/// Whether the first token of each range is the next after that of the range before.
#[inline]
fn are_consecutive(ranges: &[TokenRange]) -> bool {
    let first = ranges.first().map_or(0, |range| range.start);
    (0..).zip(ranges).fold(0, |differ, (n, range)| differ | (range.start ^ first.wrapping_add(n))) == 0
}
