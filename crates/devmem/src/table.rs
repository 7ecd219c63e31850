//! What all handles of a socket share: the ranges, and the end.

use crate::Pages;
use crate::counts::Counts;
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
pub(crate) struct Range<B> {
    pub(crate) first: u32,
    pub(crate) last: u32,
    pub(crate) attached: Arc<Attached<B>>,
}

impl<B> Clone for Range<B> {
    fn clone(&self) -> Self {
        Self { first: self.first, last: self.last, attached: self.attached.clone() }
    }
}

/// How many ranges are compared at once.
const FEW: usize = 8;

/// The ranges in use, for who looks a token up.
pub(crate) struct Table<B> {
    /// The first token of each range, if there are not many. Looking at all of them is what it costs to look at one.
    firsts: [u32; FEW],
    ranges: Vec<Range<B>>,
}

impl<B> Table<B> {
    fn new(ranges: &[Range<B>]) -> Self {
        let firsts = std::array::from_fn(|n| ranges.get(n).map_or(u32::MAX, |range| range.first));
        Self { firsts, ranges: ranges.to_vec() }
    }

    /// The range that `token` is in. `hit` is the one that was found last: with many bindings, most calls are about one.
    #[inline]
    pub(crate) fn find<'t>(&'t self, token: u32, hit: &mut Option<&'t Range<B>>) -> Option<&'t Range<B>> {
        let within = |range: &&Range<B>| range.first <= token && token <= range.last;
        let upto = if self.ranges.len() <= FEW {
            // Without a branch: all are compared in two instructions.
            let upto: u32 = self.firsts.iter().map(|first| u32::from(*first <= token)).sum();
            (upto as usize).min(self.ranges.len())
        } else {
            if hit.as_ref().is_some_and(within) {
                return *hit;
            }
            self.ranges.partition_point(|range| range.first <= token)
        };
        let found = self.ranges.get(upto.wrapping_sub(1)).filter(within)?;
        *hit = Some(found);
        Some(found)
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

/// Invariant: a count above zero in a range's counts is that many references to the page, which are the table's. Whoever
/// takes one from a count has that reference.
pub(crate) struct Shared<B: Pages> {
    /// The ranges in use, for those who give back.
    pub(crate) snapshot: Snapshot<Table<B>>,
    /// The same, for those who change them. Nobody's code runs with it.
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

    /// Gives a binding that the socket has not met, and that has pages, a range. For the receiver alone.
    #[cold]
    pub(crate) fn attach(&self, binding: &B) -> Result<(u32, Arc<Counts>), DeliverError> {
        self.release_drained();
        let pages = binding.pages();
        let counts = Arc::new(Counts::new(pages)?);
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
            live.insert(at, Range { first, last: first + (pages - 1), attached });
            (first, self.snapshot.replace(Table::new(live)))
        };
        drop(replaced);
        Ok((first, counts))
    }

    /// Lets go of bindings of which nothing is left. What that releases is released by whoever calls, or whoever is the
    /// last to leave a section.
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

/// The last handle is gone: nobody else receives or gives back.
impl<B: Pages> Drop for Shared<B> {
    fn drop(&mut self) {
        let live = mem::take(&mut self.ranges.lock().unwrap_or_else(PoisonError::into_inner).live);
        for Attached { binding, counts } in live.iter().map(|r| &*r.attached) {
            // SAFETY: the table's references (the invariant), each given up once; the page is one of the binding's.
            counts.held(|index, n| unsafe { binding.put(index, n) });
        }
    }
}
