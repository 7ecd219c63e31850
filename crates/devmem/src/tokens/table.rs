//! The token table of a socket: the ranges of tokens, which all handles of the socket share, and
//! the end of the table.
//!
//! Why not a map of tokens? Linux keeps the fragments of a socket in an xarray under a lock: each
//! delivery inserts, each return removes, and all threads that return take turns. A user returns
//! millions of fragments per second, on many threads. Here a token is an index, so that a return is
//! one exchange of the count of its page.
//!
//! A socket has a 32-bit space of tokens. When the socket receives from a binding for the first
//! time, it assigns the binding a range of this space, with one number for each page. For each page
//! the socket counts how often it has delivered the page. A return decrements the count of its
//! page, and puts one reference to the page.
//!
//! ```text
//!   token      range (first ..= last, binding)    page = token - first    count of the page
//!   1042  ──►  1 ..= 5000, binding 7         ──►  1041               ──►  2: delivered twice more
//!              5001 ..= 9096, binding 9                                   than returned
//! ```
//!
//! The invariant: **if a count is n, the table owns n references to the page.** What can happen to
//! a page of a socket:
//!
//! ```text
//!             reserve            commit: count += n             return: count -= 1, if not 0
//!   unknown ──────────► 0 held ────────────────────► n held ─────────────────────► n - 1 held
//!               ▲         │ drained: the range           the last handle is dropped:
//!               └─────────┘ is removed                   all counted references are put
//! ```
//!
//! | handle | how many | what it may do |
//! | --- | --- | --- |
//! | the receiver, `&mut TokenTable` | one | make ranges, add to counts |
//! | a `Returner`, `Clone + Sync` | any number | decrement counts that are not 0 |
//! | the last handle | alone | everything |
//!
//! There is one receiver, so two receives never race. The end of the table races with nothing,
//! because every returning thread has a handle.
//!
//! # The races
//!
//! **Return against return.** Two threads return a token that was received once. The decrement is a
//! compare-and-swap from a number that is not 0, so only one of the two threads succeeds.
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
//! **Return against receive of the same page.** Each of the two changes the count by one atomic
//! operation, so neither change is lost. If the exchange of the return fails because of the
//! receive, the return reads the count again, and finds a larger one.
//!
//! ```text
//!   return                                  receive
//!   count is 1
//!                                           count += 1            (2)
//!   exchange(1 -> 0) fails: 2
//!   exchange(2 -> 1), puts one reference
//! ```
//!
//! **A guess against the first receive.** A user can guess a token, and return it before the socket
//! has delivered it. Before the addition of the commit, the count is 0 or there is no range, so the
//! return is ignored. After the addition, the table owns the reference, and the user may return it
//! at once.
//!
//! ```text
//!   return                                  receive
//!                                           reserve: range, count 0
//!   count is 0: ignored
//!                                           no error is possible from here on
//!                                           commit: count += 1
//!   exchange(1 -> 0), puts the page
//!                                           delivers the token of a page already returned
//! ```
//!
//! **The last handle against a return.** This race cannot happen: the returning thread has a
//! handle, so a handle that is dropped during the return is not the last one. The counts that the
//! last handle finds do not contain what the return has removed.
//!
//! ```text
//!   drop of the table                       return
//!   handles: 2 -> 1
//!                                           exchange(1 -> 0), puts the page
//!                                           handles: 1 -> 0
//!                                           puts what the other counts contain
//! ```
//!
//! **The last put against the end of the binding.** The put that returns the last page makes the
//! binding drained. Another thread may see this before the put has returned. It then removes the
//! range from the table, and drops the only handle on the binding.
//!
//! ```text
//!   return                                  another thread
//!   section begins, finds the range
//!   exchange(1 -> 0)
//!   put ── the last page is returned
//!                                           drained: removes the range from the table
//!   ── and still uses the binding
//!   section ends
//!                                           the handle is dropped, and with it the binding
//! ```
//! For this reason readers find ranges in a critical section. A table that was replaced is dropped,
//! with its handles, only after all critical sections that were open at the replacement have ended.
//!
//! **An old token against a new range.** If a binding is made again, it is a new binding with a new
//! range. The numbers of a range that was removed are used again only after all other numbers of
//! the 2^32. No page of the old range is held then, because a range is removed only when all pages
//! of its binding are returned for good. A thread may still use the old table after a new one is
//! published. Its tokens are then in ranges of the old table, whose counts are 0, so they are
//! ignored.
//!
//! # Memory ordering
//!
//! The addition of a commit is a release, and the exchange of a return is an acquire. So a thread
//! that puts a page does this after everything that the receiver did with the page. Returns in
//! between do not break the release sequence, because they are read-modify-writes. Counts are zeros
//! before a thread can find them. A range is published, by the replacement of the table, before its
//! first token is delivered; so a thread that has the token finds the range. The last handle reads
//! the counts relaxed, because it follows the drops of all other handles.

use super::counts::{Base, Count, Counter, Counts};
use super::error::DeliverError;
use super::pages::Pages;
use super::space::Space;
use super::stats::TokenStats;
use crate::sync::{Arc, AtomicU64, Mutex, Ordering, Replaced, Snapshot};
use std::mem;
use std::sync::PoisonError;

/// A binding that the socket has met. The only handle on it that the socket has.
pub(crate) struct Attached<B, K = Count> {
    pub(crate) binding: B,
    pub(crate) counts: Arc<Counts<K>>,
}

/// The tokens of a binding.
///
/// Invariant: `base` is the address of the attached counts, of which there is one for each token.
pub(crate) struct Range<B, K = Count> {
    pub(crate) first: u32,
    pub(crate) last: u32,
    pub(crate) base: Base<K>,
    pub(crate) attached: Arc<Attached<B, K>>,
}

impl<B, K: Counter> Range<B, K> {
    /// Takes one from the count of page `index`. Returns false if the holder has none. The page
    /// must be in the range.
    #[inline]
    pub(crate) fn take_one(&self, index: u32, holder: K::Holder) -> bool {
        self.count(index).take_one(holder)
    }

    /// The count of page `index`, which must be in the range.
    #[inline]
    pub(crate) fn count(&self, index: u32) -> &K {
        debug_assert!(index <= self.last - self.first);
        // SAFETY: the invariant; the attached counts exist as long as the range.
        unsafe { self.base.at(index) }
    }

    /// The number of tokens from `token` to the end of the range. `token` must be in the range. The
    /// addition does not overflow, because token 0 is in no range.
    #[inline]
    pub(crate) fn rest(&self, token: u32) -> u32 {
        self.last - token + 1
    }

    #[inline]
    fn has(&self, token: u32) -> bool {
        token.wrapping_sub(self.first) <= self.last - self.first
    }
}

impl<B, K> Clone for Range<B, K> {
    fn clone(&self) -> Self {
        Self { first: self.first, last: self.last, base: self.base, attached: self.attached.clone() }
    }
}

/// The number of parts of an index.
const PARTS: usize = 64;

/// The ranges in use, as a thread that looks up a token reads them.
pub(crate) struct Table<B, K = Count> {
    ranges: Vec<Range<B, K>>,
    /// For each part of the space, the range in which the part begins. The space from the first
    /// token to the last is cut into parts of 2^shift tokens. If the ranges are of similar size,
    /// one read of the index finds the range of a token, for any number of bindings.
    index: [u16; PARTS],
    first: u32,
    shift: u32,
}

impl<B, K: Counter> Table<B, K> {
    fn new(ranges: &[Range<B, K>]) -> Self {
        let (first, last) = (ranges.first().map_or(0, |r| r.first), ranges.last().map_or(0, |r| r.last));
        // The parts are so large that the last token is in the last part or before it.
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
    pub(crate) fn find(&self, token: u32) -> Option<&Range<B, K>> {
        let part = (token.wrapping_sub(self.first) >> self.shift) as usize % PARTS;
        match self.ranges.get(self.index[part] as usize) {
            Some(range) if range.has(token) => Some(range),
            _ => self.search(token),
        }
    }

    fn search(&self, token: u32) -> Option<&Range<B, K>> {
        let upto = self.ranges.partition_point(|range| range.first <= token);
        self.ranges.get(upto.wrapping_sub(1)).filter(|range| range.has(token))
    }

    /// Returns how many of the `count` tokens from `token` on are in no range before the next range
    /// begins. `token` itself must be in no range.
    #[cold]
    pub(crate) fn outside(&self, token: u32, count: u32) -> u32 {
        let next = self.ranges.iter().find(|range| range.first > token);
        next.map_or(count, |range| count.min(range.first - token))
    }
}

/// The ranges in use, in order, and the place of the next one.
struct Ranges<B, K> {
    live: Vec<Range<B, K>>,
    space: Space,
}

/// The state that all handles of a token table share.
///
/// Invariant: if a count of a range is n, the table owns n references to the page. A thread that
/// decrements a count owns that reference.
pub(crate) struct Shared<B: Pages, K: Counter = Count> {
    /// The ranges in use, as returning threads read them.
    pub(crate) snapshot: Snapshot<Table<B, K>>,
    /// The same ranges, as threads that change them lock them. No user code runs while the lock is
    /// held.
    ranges: Mutex<Ranges<B, K>>,
    foreign: AtomicU64,
    excess: AtomicU64,
}

impl<B: Pages + Clone, K: Counter> Shared<B, K> {
    pub(crate) fn new() -> Self {
        Self {
            snapshot: Snapshot::new(),
            ranges: Mutex::new(Ranges { live: Vec::new(), space: Space::new() }),
            foreign: AtomicU64::new(0),
            excess: AtomicU64::new(0),
        }
    }

    /// Assigns a range to a binding from which the socket has not received before. The binding must
    /// have pages. Only the receiver calls this; `number` is its number for the binding.
    #[cold]
    pub(crate) fn attach(&self, binding: &B, number: usize) -> Result<(u32, Arc<Counts<K>>), DeliverError> {
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

    /// Drops the handles on drained bindings. Returns how many there were. The calling thread
    /// releases the bindings, or the last thread that leaves a critical section does.
    #[cold]
    pub(crate) fn release_drained(&self) -> usize {
        let mut gone: Vec<Range<B, K>> = Vec::new();
        let replaced: Option<Replaced<Table<B, K>>> = {
            let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
            // There is no reference to a page of a drained binding, and there never will be one, so
            // no count is above 0.
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

/// Closes the table when the last handle is dropped: no other thread receives or returns tokens.
impl<B: Pages, K: Counter> Drop for Shared<B, K> {
    fn drop(&mut self) {
        let live = mem::take(&mut self.ranges.lock().unwrap_or_else(PoisonError::into_inner).live);
        for Attached { binding, counts } in live.iter().map(|r| &*r.attached) {
            // SAFETY: the table owns these references (the invariant) and puts each once; the
            // page is one of the binding's.
            counts.held(|index, n| unsafe { binding.put(index, n) });
        }
    }
}
