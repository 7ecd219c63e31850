//! What all handles of a socket share: the ranges, and the end. And the theory of tokens.
//!
//! A socket gives each binding that it meets a range of its own 32-bit space, one number for each page. What it has delivered
//! it counts, by page; a token that comes back takes one from the count, and with it gives up a reference to the page.
//!
//! ```text
//!   token      range (first ..= last, binding)      page = token - first      count of the page
//!   1042  ──►  1 ..= 5000, binding 7           ──►  1041                 ──►  2: delivered twice more than returned
//!              5001 ..= 9096, binding 9
//! ```
//!
//! The invariant: **a count is so many references to its page, and they are the table's.** What can happen to a page of a socket:
//!
//! ```text
//!             reserve            commit: count += n              return: count -= 1, if it is not 0
//!   unknown ──────────► 0 held ────────────────────► n held ────────────────────────────────────────► n - 1 held
//!               ▲         │ drained: the range goes             the last handle goes: count references are put
//!               └─────────┘
//! ```
//!
//! | who | how many | may |
//! | --- | --- | --- |
//! | receiver, `&mut TokenTable` | one | make ranges, add to counts |
//! | `Returner`, `Clone + Sync` | any | take from counts that are not 0 |
//! | the last handle | alone | all |
//!
//! So a receive has no other receive to race with. The end races with nothing, because every returning thread has a handle.
//!
//! # The races
//!
//! **Return against return** of a token that was received once. Taking is a compare-and-swap from a number that is not 0.
//!
//! ```text
//!   return                                  return
//!   count is 1
//!                                           count is 1
//!                                           exchange(1 -> 0), puts the page
//!   exchange(1 -> 0) fails: 0
//!   in excess, ignored
//! ```
//!
//! **Return against receive of the same page.** Both change the count by one atomic operation; neither's is lost. A return whose
//! exchange fails because of the receive looks again, and finds more.
//!
//! ```text
//!   return                                  receive
//!   count is 1
//!                                           count += 1            (2)
//!   exchange(1 -> 0) fails: 2
//!   exchange(2 -> 1), puts one reference
//! ```
//!
//! **A guess against the first receive.** Tokens can be guessed, and returned before they are told. Until the addition of the
//! commit the count is 0, or there is no range, and the return is ignored. After it the reference is the table's,
//! and giving it up right away is the user's right.
//!
//! ```text
//!   return                                  receive
//!                                           reserve: range, count 0
//!   count is 0: ignored
//!                                           what could fail did not
//!                                           commit: count += 1
//!   exchange(1 -> 0), puts the page
//!                                           tells the token, of a page that is gone
//! ```
//!
//! **The last handle against a return** is none: the return has a handle, so this one is not the last. What it took is not in
//! the counts that the last one finds.
//!
//! ```text
//!   drop of the table                       return
//!   handles: 2 -> 1
//!                                           exchange(1 -> 0), puts the page
//!                                           handles: 1 -> 0
//!                                           puts what the other counts say
//! ```
//!
//! **The last put against the end of the binding.** The put that brings the last page home makes the binding drained, and
//! another thread may see that before the put has returned, take the range out of the table, and drop the only handle.
//!
//! ```text
//!   return                                  another thread
//!   section begins, finds the range
//!   exchange(1 -> 0)
//!   put ── the last page is home
//!                                           drained: takes the range out of the table
//!   ── and still uses the binding
//!   section ends
//!                                           the handle is dropped, and with it the binding
//! ```
//! So readers find ranges in a critical section, and a table that was replaced, with its handles, goes after those that were open.
//!
//! **An old token against a new range.** A binding that is made again is another one, and its range another one, too. The space of
//! a range that went is used again when all the rest of the 2^32 has been, and nothing is held of it then: nothing can be, for
//! it went because all pages of its binding were home for good. Who returns under a table that was replaced since has tokens
//! from before; they are of ranges in that table, with counts of 0.
//!
//! # Memory ordering
//!
//! The addition of a commit is a release, and the exchange that takes an acquire: who puts a page does so after all that the
//! receiver did with it. Returns in between keep the chain, for they are read-modify-writes. Counts are
//! zeros before a thread can find them. A range is published by the table's replacement before its first token is told; who
//! has the token comes after that. Counts that are found by the last handle are read relaxed: it comes after the others' drops.

use crate::Pages;
use crate::counts::{Base, Counts};
use crate::error::DeliverError;
use crate::space::Space;
use crate::stats::TokenStats;
use crate::sync::{Arc, AtomicU64, Mutex, Ordering, Replaced, Snapshot};
use std::mem;
use std::sync::PoisonError;

/// A binding that the socket has met. The only handle on it that the socket has.
pub(crate) struct Attached<B> {
    pub(crate) binding: B,
    pub(crate) counts: Arc<Counts>,
}

/// The tokens of a binding.
///
/// Invariant: `base` is where the attached counts are, one for each token.
pub(crate) struct Range<B> {
    pub(crate) first: u32,
    pub(crate) last: u32,
    pub(crate) base: Base,
    pub(crate) attached: Arc<Attached<B>>,
}

impl<B> Range<B> {
    /// Takes one from the count of page `index`, of which there is one, unless there is none.
    #[inline]
    pub(crate) fn take_one(&self, index: u32) -> bool {
        debug_assert!(index <= self.last - self.first);
        // SAFETY: the invariant; what is attached stays as long as the range.
        unsafe { self.base.at(index) }.take_one()
    }

    /// How many tokens there are from `token` on, which is one of them. Does not overflow: token 0 is in no range.
    #[inline]
    pub(crate) fn rest(&self, token: u32) -> u32 {
        self.last - token + 1
    }

    #[inline]
    fn has(&self, token: u32) -> bool {
        token.wrapping_sub(self.first) <= self.last - self.first
    }
}

impl<B> Clone for Range<B> {
    fn clone(&self) -> Self {
        Self { first: self.first, last: self.last, base: self.base, attached: self.attached.clone() }
    }
}

/// How many parts an index has.
const PARTS: usize = 64;

/// The ranges in use, for who looks a token up.
pub(crate) struct Table<B> {
    ranges: Vec<Range<B>>,
    /// The space from the first token to the last, in equal parts of 2^shift: which range each begins in. One look finds
    /// the range where ranges are of similar size, however many bindings take turns.
    index: [u16; PARTS],
    first: u32,
    shift: u32,
}

impl<B> Table<B> {
    fn new(ranges: &[Range<B>]) -> Self {
        let (first, last) = (ranges.first().map_or(0, |r| r.first), ranges.last().map_or(0, |r| r.last));
        // So much that the last token is in the last part, or before.
        let shift = (u32::BITS - (last - first).leading_zeros()).saturating_sub(PARTS.ilog2());
        let index = std::array::from_fn(|part| {
            let begin = u64::from(first) + ((part as u64) << shift);
            let upto = ranges.partition_point(|range| u64::from(range.first) <= begin);
            u16::try_from(upto.saturating_sub(1)).unwrap_or(u16::MAX)
        });
        Self { ranges: ranges.to_vec(), index, first, shift }
    }

    /// The range that `token` is in.
    #[inline]
    pub(crate) fn find(&self, token: u32) -> Option<&Range<B>> {
        let part = (token.wrapping_sub(self.first) >> self.shift) as usize % PARTS;
        match self.ranges.get(self.index[part] as usize) {
            Some(range) if range.has(token) => Some(range),
            _ => self.search(token),
        }
    }

    fn search(&self, token: u32) -> Option<&Range<B>> {
        let upto = self.ranges.partition_point(|range| range.first <= token);
        self.ranges.get(upto.wrapping_sub(1)).filter(|range| range.has(token))
    }

    /// How many of `count` tokens from `token` on, which is in no range, are in none.
    #[cold]
    pub(crate) fn outside(&self, token: u32, count: u32) -> u32 {
        let next = self.ranges.iter().find(|range| range.first > token);
        next.map_or(count, |range| count.min(range.first - token))
    }
}

/// The ranges in use, in order, and where the next one goes.
struct Ranges<B> {
    live: Vec<Range<B>>,
    space: Space,
}

/// Invariant: a count above zero in a range's counts is that many references to the page, which are the table's. A
/// thread that takes one from a count has that reference.
pub(crate) struct Shared<B: Pages> {
    /// The ranges in use, for those who give back.
    pub(crate) snapshot: Snapshot<Table<B>>,
    /// The same, for those who change them. No user code runs while it is locked.
    ranges: Mutex<Ranges<B>>,
    foreign: AtomicU64,
    excess: AtomicU64,
}

impl<B: Pages + Clone> Shared<B> {
    pub(crate) fn new() -> Self {
        Self {
            snapshot: Snapshot::new(),
            ranges: Mutex::new(Ranges { live: Vec::new(), space: Space::new() }),
            foreign: AtomicU64::new(0),
            excess: AtomicU64::new(0),
        }
    }

    /// Gives a binding that the socket has not met, and that has pages, a range. For the receiver alone, which numbers its
    /// bindings.
    #[cold]
    pub(crate) fn attach(&self, binding: &B, number: usize) -> Result<(u32, Arc<Counts>), DeliverError> {
        self.release_drained();
        let pages = binding.pages();
        let counts = Arc::new(Counts::new(pages, number)?);
        let attached = Arc::new(Attached { binding: binding.clone(), counts: counts.clone() });
        let (first, replaced) = {
            let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
            let Ranges { live, space } = &mut *ranges;
            let Some(first) = space.place(pages, live.iter().map(|r| (r.first, r.last))) else {
                let taken = live.iter().map(|r| u64::from(r.last - r.first) + 1).sum();
                let exhausted = DeliverError::Exhausted { binding: binding.id(), pages, bindings: live.len(), taken };
                drop(ranges);
                return Err(exhausted);
            };
            let at = live.partition_point(|r| r.first < first);
            live.insert(at, Range { first, last: first + (pages - 1), base: counts.base(), attached });
            (first, self.snapshot.replace(Table::new(live)))
        };
        drop(replaced);
        Ok((first, counts))
    }

    /// Lets go of bindings of which nothing is left. What that releases is released by the calling thread, or by the
    /// last thread to leave a section.
    #[cold]
    pub(crate) fn release_drained(&self) -> usize {
        let mut gone: Vec<Range<B>> = Vec::new();
        let replaced: Option<Replaced<Table<B>>> = {
            let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
            // No reference, so nothing is held, and nothing will be.
            gone.extend(ranges.live.extract_if(.., |r| r.attached.binding.drained()));
            if gone.is_empty() { None } else { Some(self.snapshot.replace(Table::new(&ranges.live))) }
        };
        drop(replaced);
        gone.len()
    }

    /// Counts returns that were ignored.
    #[cold]
    pub(crate) fn ignored(&self, foreign: u32, excess: u32) {
        self.foreign.fetch_add(foreign.into(), Ordering::Relaxed);
        self.excess.fetch_add(excess.into(), Ordering::Relaxed);
    }

    pub(crate) fn stats(&self) -> TokenStats {
        let ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        TokenStats {
            foreign: self.foreign.load(Ordering::Relaxed),
            excess: self.excess.load(Ordering::Relaxed),
            bindings: ranges.live.len(),
            bytes: ranges.live.iter().map(|r| r.attached.counts.bytes()).sum(),
        }
    }
}

/// The last handle is gone: no other thread receives or gives back.
impl<B: Pages> Drop for Shared<B> {
    fn drop(&mut self) {
        let live = mem::take(&mut self.ranges.lock().unwrap_or_else(PoisonError::into_inner).live);
        for Attached { binding, counts } in live.iter().map(|r| &*r.attached) {
            // SAFETY: the table's references (the invariant), each given up once; the page is one of the binding's.
            counts.held(|index, n| unsafe { binding.put(index, n) });
        }
    }
}
