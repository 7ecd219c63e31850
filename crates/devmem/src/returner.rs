//! The handles that give tokens back.

use crate::counts::BLOCK;
use crate::sync::Arc;
use crate::table::{Attached, Range, Shared, Table};
use crate::{Pages, TokenRange, TokenStats, TooManyRanges};
use std::fmt;

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
        let done = self.shared.snapshot.read(|table| Call::run(table, ranges));
        if done.foreign | done.excess > 0 {
            self.shared.ignored(done.foreign, done.excess);
        }
        // Not in the section: what it releases should go now.
        if done.drained {
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
    /// A binding of which something was freed has nothing left.
    drained: bool,
}

/// A call that gives back.
struct Call<'c, B> {
    table: &'c Table<B>,
    done: Done,
}

impl<B: Pages> Call<'_, B> {
    #[inline]
    fn run(table: Option<&Table<B>>, ranges: &[TokenRange]) -> Done {
        let mut left = MAX_FRAGMENTS;
        // What is looked at, of each range.
        let attempts = ranges.iter().map(|range| {
            let count = range.count.min(left);
            left -= count;
            (range.start, count)
        });
        let Some(table) = table else {
            return Done { foreign: attempts.map(|(_, count)| count).sum(), ..Done::default() };
        };
        let mut call = Call { table, done: Done::default() };
        attempts.for_each(|(token, count)| call.give_back(token, count));
        call.done
    }

    /// Gives back `count` tokens from `token` on.
    #[inline]
    fn give_back(&mut self, mut token: u32, mut count: u32) {
        while count > 0 {
            let n = match self.table.find(token) {
                Some(range) => self.in_block(range, token, count),
                None => self.foreign(self.table.outside(token, count)),
            };
            count -= n;
            match token.checked_add(n) {
                Some(next) => token = next,
                // There are no tokens after the last.
                None => {
                    self.foreign(count);
                    return;
                }
            }
        }
    }

    /// Gives back up to `count` tokens from `token` on, those that are in one block of a range; how many those are.
    #[inline]
    fn in_block(&mut self, range: &Range<B>, token: u32, count: u32) -> u32 {
        let Attached { binding, counts } = &*range.attached;
        let (first, at) = (token - range.first, (token - range.first) as usize % BLOCK);
        let n = count.min(range.last - token + 1).min((BLOCK - at) as u32);
        let Some(block) = counts.block(first) else {
            return self.foreign(n);
        };
        let mut freed = 0;
        for index in first..first + n {
            if block.take_one(index as usize % BLOCK) {
                freed += 1;
                // SAFETY: the count said that the table has a reference to this page, and this one is now ours.
                unsafe { binding.put(index, 1) };
            }
        }
        self.done.freed += freed;
        self.done.excess += n - freed;
        self.done.drained |= binding.drained();
        n
    }

    /// Notes that `n` tokens are nobody's.
    #[cold]
    fn foreign(&mut self, n: u32) -> u32 {
        self.done.foreign += n;
        n
    }
}
