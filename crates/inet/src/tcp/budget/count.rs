//! A count that one thread changes by plain loads and stores, and all others by atomic operations.
//!
//! Why: nearly all buffers are counted, and returned, by the thread of their stack. Each needed
//! four atomic read-modify-write operations there. Other threads return some of the buffers.
//!
//! ```text
//!          home, the thread of the stack        any other thread
//!   count  own = own + n                        others.fetch_add(n)
//!   end    own = own - n                        others.fetch_sub(n)
//!   sum    own + others
//! ```
//!
//! What is counted at one side may end at the other, so either part can be negative. Only the sum
//! has a meaning. At home it is what is counted. Another thread reads the parts at two moments, and
//! their sum can be more or less than what was counted at either.
//!
//! **The end.** The user of a count frees it when nothing is counted any more. While the count has
//! a home, no thread can know that: one part is not enough. `others` then has [`HOME`] added, so
//! that it is not 0. When home leaves, it moves its part:
//!
//! ```text
//!   home                                        any other thread
//!   1  others.fetch_add(own - HOME)             2  others.fetch_sub(n)
//! ```
//!
//! Both are read-modify-write operations of the same word. The one that makes it 0 is the last, and
//! its thread learns so. After 1, home counts as the other threads do.
//!
//! **A thread that waits.** A holder at home may wait until something ends:
//!
//! ```text
//!   home                                        any other thread
//!   1  awaited = true                           1  others.fetch_sub(n)
//!   2  reads others                             2  reads awaited; if true, swaps it and wakes
//! ```
//!
//! All four accesses are sequentially consistent, so at least one thread sees the other thread's
//! store. What ends at home is seen there without more.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
use std::cell::Cell;
use std::sync::atomic::Ordering;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};

/// In `others` while the count has a home. It is more than anything that is counted.
const HOME: i64 = 1 << 62;

/// The home of a count without one. No thread has this number.
const NOWHERE: u64 = u64::MAX;

#[cfg(not(loom))]
thread_local! {
    /// The number of this thread, or 0 if it has none yet.
    static THREAD: Cell<u64> = const { Cell::new(0) };
}
#[cfg(loom)]
loom::thread_local! {
    static THREAD: Cell<u64> = Cell::new(0);
}

/// The number of this thread. Without one it is 0, and the thread is no count's home.
#[inline]
fn this_thread() -> u64 {
    THREAD.with(Cell::get)
}

/// The same, of a thread that gets a number now if it has none. No two threads have the same one,
/// also if one ends before the other begins.
fn numbered_thread() -> u64 {
    static LAST: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    THREAD.with(|thread| {
        if thread.get() == 0 {
            thread.set(LAST.fetch_add(1, Ordering::Relaxed) + 1);
        }
        thread.get()
    })
}

/// How much is counted.
pub(super) struct Count {
    /// The number of the thread that changes `own`, or [`NOWHERE`]. Only that thread stores it.
    home: AtomicU64,
    own: AtomicI64,
    others: AtomicI64,
    /// A holder waits until something ends.
    awaited: AtomicBool,
}

/// What a thread learns when it ends the counting of something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ended {
    /// Nothing is counted any more, and the count has no home.
    pub(super) all: bool,
    /// A holder waited for this. It waits no more.
    pub(super) awaited: bool,
}

impl Count {
    /// Counts nothing. The calling thread is its home if it is `at_home`.
    pub(super) fn new(at_home: bool) -> Self {
        let (home, others) = if at_home { (numbered_thread(), HOME) } else { (NOWHERE, 0) };
        let (own, awaited) = Default::default();
        Self { home: AtomicU64::new(home), own: AtomicI64::new(own), others: AtomicI64::new(others), awaited }
    }

    /// Whether the calling thread is the count's home.
    #[inline]
    pub(super) fn is_home(&self) -> bool {
        self.home.load(Ordering::Relaxed) == this_thread()
    }

    /// Counts `n` more. Returns whether they are the first ones of a count without a home. Cost: an
    /// atomic addition, if this thread is not the home.
    #[inline]
    pub(super) fn add(&self, n: u32) -> bool {
        if self.is_home() {
            self.set_own(self.own.load(Ordering::Relaxed) + i64::from(n));
            return false;
        }
        self.others.fetch_add(n.into(), Ordering::Relaxed) == 0
    }

    /// Ends the counting of `n`, if this thread is the count's home: then it has no end. Otherwise
    /// `None`, and nothing is changed.
    pub(super) fn remove_at_home(&self, n: u32) -> Option<Ended> {
        self.is_home().then(|| Ended { all: false, awaited: self.remove_own(n) && self.stop_waiting() })
    }

    /// The same. This thread is the count's home. Returns whether a holder waits. It still does.
    #[inline]
    pub(super) fn remove_own(&self, n: u32) -> bool {
        self.set_own(self.own.load(Ordering::Relaxed) - i64::from(n));
        self.awaited.load(Ordering::Relaxed)
    }

    /// The same on a thread that is not the count's home. Cost: an atomic subtraction.
    pub(super) fn remove_elsewhere(&self, n: u32) -> Ended {
        let n = i64::from(n);
        let all = self.others.fetch_sub(n, Ordering::SeqCst) == n;
        Ended { all, awaited: self.stop_waiting() }
    }

    /// The count has no home any more. Called by home. Returns whether nothing is counted.
    pub(super) fn leave(&self) -> bool {
        debug_assert!(self.is_home());
        let moved = self.own.load(Ordering::Relaxed) - HOME;
        let all = self.others.fetch_add(moved, Ordering::SeqCst) + moved == 0;
        // Another thread that reads the sum meanwhile finds what home has counted twice, or not at
        // all.
        self.set_own(0);
        self.home.store(NOWHERE, Ordering::Relaxed);
        all
    }

    /// No other thread changes it, so a load and a store do.
    #[inline]
    fn set_own(&self, own: i64) {
        self.own.store(own, Ordering::Relaxed);
    }

    /// How much is counted. On a thread that is not the home, it may be more or less than that
    /// while others change it.
    #[inline]
    pub(super) fn sum(&self) -> u32 {
        let own = self.own.load(Ordering::Relaxed);
        // Without the bit of `HOME`, with the sign of the rest.
        let others = (self.others.load(Ordering::SeqCst) << 2) >> 2;
        (own + others).clamp(0, u32::MAX.into()) as u32
    }

    /// The next end of a counting is [`Ended::awaited`]. Read the [`sum`](Self::sum) after this.
    pub(super) fn wait(&self) {
        self.awaited.store(true, Ordering::SeqCst);
    }

    /// Whether a holder waited. It waits no more.
    pub(super) fn stop_waiting(&self) -> bool {
        self.awaited.load(Ordering::SeqCst) && self.awaited.swap(false, Ordering::SeqCst)
    }
}
