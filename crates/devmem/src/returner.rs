//! The handles that give tokens back.

use crate::counts::take_one;
use crate::sync::Arc;
use crate::table::{Range, Shared};
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
        let done = self.shared.snapshot.read(|list| {
            let mut call = Call { list, hit: None, left: MAX_FRAGMENTS, done: Done::default() };
            for range in ranges {
                if call.left == 0 {
                    break;
                }
                call.give_back(*range);
            }
            call.leave();
            call.done
        });
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
    list: &'c [Range<B>],
    /// The range that was found last: most calls are about one binding.
    hit: Option<&'c Range<B>>,
    left: u32,
    done: Done,
}

impl<'c, B: Pages> Call<'c, B> {
    #[inline]
    fn give_back(&mut self, range: TokenRange) {
        let mut token = range.start;
        let mut count = range.count.min(self.left);
        self.left -= count;
        while count > 0 {
            let n = match self.find(token) {
                Some(hit) => self.run(hit, token, count),
                None => {
                    let n = self.foreign(token, count);
                    self.done.foreign += n;
                    n
                }
            };
            count -= n;
            match token.checked_add(n) {
                Some(next) => token = next,
                // There are no tokens after the last.
                None => {
                    self.done.foreign += count;
                    return;
                }
            }
        }
    }

    /// The range that `token` is in.
    #[inline]
    fn find(&mut self, token: u32) -> Option<&'c Range<B>> {
        let within = |range: &Range<B>| range.first <= token && token <= range.last;
        if let Some(hit) = self.hit.filter(|hit| within(hit)) {
            return Some(hit);
        }
        let after = self.list.partition_point(|range| range.first <= token);
        let found = self.list.get(after.wrapping_sub(1)).filter(|range| within(range))?;
        self.leave();
        self.hit = Some(found);
        Some(found)
    }

    /// Gives back up to `count` tokens from `token` on that are in one block of a range; how many those were.
    #[inline]
    fn run(&mut self, range: &Range<B>, token: u32, count: u32) -> u32 {
        let (first, attached) = (token - range.first, &range.attached);
        let count = count.min(range.last - token + 1);
        match attached.counts.from(first) {
            Ok(counts) => {
                let mut freed = 0;
                let run = counts.iter().take(count as usize);
                let n = run.len() as u32;
                for (count, index) in run.zip(first..) {
                    if take_one(count) {
                        freed += 1;
                        // SAFETY: the count said that the table has a reference to this page, and this one is now ours.
                        unsafe { attached.binding.put(index, 1) };
                    }
                }
                self.done.freed += freed;
                self.done.excess += n - freed;
                n
            }
            Err(untouched) => {
                let n = untouched.min(count);
                self.done.foreign += n;
                n
            }
        }
    }

    /// How many of `count` tokens from `token` on are before the next range.
    #[cold]
    fn foreign(&self, token: u32, count: u32) -> u32 {
        let next = self.list.iter().find(|range| range.first > token);
        next.map_or(count, |range| count.min(range.first - token))
    }

    /// Asks whether anything is left of the binding that was returned to last.
    #[inline]
    fn leave(&mut self) {
        if let Some(hit) = self.hit {
            self.done.drained |= hit.attached.binding.drained();
        }
    }
}
