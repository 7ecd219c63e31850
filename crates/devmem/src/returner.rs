//! The handles that give tokens back.

use crate::counts::{BLOCK, Block};
use crate::sync::Arc;
use crate::table::{Range, Shared, Table};
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

/// How many runs are found before they are worked off: their counts come from other cores, and so come all at once.
const RUNS: usize = 16;

/// Tokens in a row, of one block of a range.
struct Run<'c, B> {
    binding: &'c B,
    block: &'c Block,
    /// The first page.
    index: u32,
    n: u32,
}

/// A call that gives back.
struct Call<'c, B> {
    table: &'c Table<B>,
    runs: [Option<Run<'c, B>>; RUNS],
    len: usize,
    done: Done,
}

impl<'c, B: Pages> Call<'c, B> {
    #[inline]
    fn run(table: Option<&'c Table<B>>, ranges: &[TokenRange]) -> Done {
        let mut left = MAX_FRAGMENTS;
        // What is looked at, of each range.
        let attempts = ranges.iter().map_while(|range| {
            let count = range.count.min(left);
            let go_on = left > 0;
            left -= count;
            go_on.then_some((range.start, count))
        });
        let Some(table) = table else {
            return Done { foreign: attempts.map(|(_, count)| count).sum(), ..Done::default() };
        };
        let mut call = Self { table, runs: [const { None }; RUNS], len: 0, done: Done::default() };
        let mut hit = None;
        attempts.for_each(|(token, count)| call.find_runs(token, count, &mut hit));
        call.take();
        call.done
    }

    /// Finds what `count` tokens from `token` on are.
    #[inline]
    fn find_runs(&mut self, mut token: u32, mut count: u32, hit: &mut Option<&'c Range<B>>) {
        while count > 0 {
            let n = match self.table.find(token, hit) {
                Some(range) => self.find_run(range, token, count),
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

    /// Notes up to `count` tokens from `token` on, those that are in one block of a range; how many those are.
    #[inline]
    fn find_run(&mut self, range: &'c Range<B>, token: u32, count: u32) -> u32 {
        let (index, attached) = (token - range.first, &*range.attached);
        let at = index as usize % BLOCK;
        let n = count.min(range.last - token + 1).min((BLOCK - at) as u32);
        let Some(block) = attached.counts.block(index) else {
            return self.foreign(n);
        };
        block.prefetch(at);
        if self.len == RUNS {
            self.take();
        }
        self.runs[self.len] = Some(Run { binding: &attached.binding, block, index, n });
        self.len += 1;
        n
    }

    /// Takes one of each page of the runs that were found, and gives the pages up.
    #[inline]
    fn take(&mut self) {
        for Run { binding, block, index, n } in self.runs[..self.len].iter().flatten() {
            let mut freed = 0;
            for index in *index..index + n {
                if block.take_one(index as usize % BLOCK) {
                    freed += 1;
                    // SAFETY: the counts said that the table has a reference to this page, and this one is now ours.
                    unsafe { binding.put(index, 1) };
                }
            }
            self.done.freed += freed;
            self.done.excess += n - freed;
            self.done.drained |= binding.drained();
        }
        self.len = 0;
    }

    /// Notes that `n` tokens are nobody's.
    #[cold]
    fn foreign(&mut self, n: u32) -> u32 {
        self.done.foreign += n;
        n
    }
}
