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

/// The ranges in use, in order, and where the next one goes.
struct Ranges<B> {
    live: Vec<Range<B>>,
    space: Space,
}

/// Invariant: a count above zero in a range's counts is that many references to the page, which are the table's. Whoever
/// takes one from a count has that reference.
pub(crate) struct Shared<B: Pages> {
    /// The ranges in use, for those who give back.
    pub(crate) snapshot: Snapshot<Range<B>>,
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
            (first, self.snapshot.replace(live.clone()))
        };
        drop(replaced);
        Ok((first, counts))
    }

    /// Lets go of bindings of which nothing is left. What that releases is released by whoever calls, or whoever is the
    /// last to leave a section.
    #[cold]
    pub(crate) fn release_drained(&self) -> usize {
        let mut gone: Vec<Range<B>> = Vec::new();
        let replaced: Option<Replaced<Range<B>>> = {
            let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
            // No reference, so nothing counted, and none that could be counted. The second look is for the reader.
            gone.extend(ranges.live.extract_if(.., |r| r.attached.binding.drained() && r.attached.counts.all_zero()));
            if gone.is_empty() { None } else { Some(self.snapshot.replace(ranges.live.clone())) }
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
            counts.take_all(|index, n| unsafe { binding.put(index, n) });
        }
    }
}
