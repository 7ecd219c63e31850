//! A pool's accounting outside of the pool: it outlives the pool, and any thread may read it.

use crate::cache::PolledHeader;
use crate::stats::PoolStats;
use crate::sync::{AtomicI64, Mutex, MutexGuard, Ordering};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};

/// Reads a pool's counters from any thread. It is cheap to clone, and outlives the pool.
///
/// Reading neither interrupts nor delays the thread that polls the pool, and moves no page.
/// Therefore it is not exact. Pages that wait in the CPUs' magazines or on the return stack count
/// as in flight until the owner collects them: up to a magazine for each CPU, and the pages that
/// were returned since the last refill. If counters change while they are read, the result differs
/// by these changes. [`PagePool::stats`](crate::PagePool::stats) picks those pages up first, and is
/// exact.
///
/// After the pool's end the counters do not change any more, except that pages which are returned
/// late count as released.
///
/// ```
/// # use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
/// # let region = RegionOptions::new(8).huge_pages(false).build::<Private>()?;
/// let mut pool = PoolOptions::new("rx0").build(RegionProvider::new(region), None)?;
/// let reader = pool.stats_reader();
/// let page = pool.alloc().ok_or("no page")?;
/// assert_eq!(std::thread::spawn(move || reader.stats().inflight()).join().unwrap(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct StatsReader(Arc<Record>);

impl StatsReader {
    pub(crate) fn new(record: Arc<Record>) -> Self {
        Self(record)
    }

    /// The pool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Whether the pool's owner has left. The pool may still wait for pages: see
    /// [`lingering`](crate::lingering).
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// The counters. Acquires a lock that only other readers and the pool's end acquire, and loads
    /// that miss the cache if the pool is being polled.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.0.stats()
    }
}

impl fmt::Debug for StatsReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StatsReader({}, {:?})", self.name(), self.stats())
    }
}

/// The record of a pool after its end. It outlives the pool, so that it can be read at any time.
#[derive(Debug)]
pub(crate) struct Record {
    name: String,
    /// While the owner exists: minus the number of pages that returning threads took out. After
    /// that: the pages still out.
    pub(crate) outstanding: AtomicI64,
    /// The part of `outstanding` that is no page: 1 while a barrier has to be tried again, else 0.
    pub(crate) unfinished: AtomicI64,
    accounting: Mutex<Accounting>,
}

/// Where a pool's counters are, and what is counted after the owner has stopped counting.
#[derive(Debug, Default)]
pub(crate) struct Accounting {
    /// The pool, while its owner exists.
    pub(crate) pool: Option<NonNull<PolledHeader>>,
    /// The counters as they were when the owner left, without the pages that returning threads took
    /// out.
    pub(crate) stats: PoolStats,
    /// Pages that the owner had taken and that were not returned to it, and what else it has added
    /// to `outstanding`.
    pub(crate) out: u64,
    /// Whether a returning thread that releases a page to the provider also unmaps it.
    pub(crate) unmaps: bool,
    /// Pages in quarantine that returning threads took out.
    pub(crate) quarantined: u64,
}

// SAFETY: the pointer is followed under the lock only, while the owner exists: `Shared::end`
// removes it before the pool can be freed. What is read through it is atomic or never changes.
unsafe impl Send for Accounting {}

impl Record {
    pub(crate) fn new(name: &str) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            outstanding: AtomicI64::new(0),
            unfinished: AtomicI64::new(0),
            accounting: Mutex::default(),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn accounting(&self) -> MutexGuard<'_, Accounting> {
        self.accounting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects the record with its pool: from now on the counters are read from the pool.
    pub(crate) fn open(&self, pool: NonNull<PolledHeader>) {
        self.accounting().pool = Some(pool);
    }

    /// Pages in flight after the owner has left; 0 before.
    pub(crate) fn outstanding(&self) -> u64 {
        let left = self.outstanding.load(Ordering::Relaxed) - self.unfinished.load(Ordering::Relaxed);
        u64::try_from(left).unwrap_or(0)
    }

    /// Whether the owner has left.
    pub(crate) fn is_closed(&self) -> bool {
        self.accounting().pool.is_none()
    }

    /// The counters now, from any thread.
    pub(crate) fn stats(&self) -> PoolStats {
        let accounting = self.accounting();
        // `out` is in both or in neither.
        let direct = accounting.out.wrapping_sub(self.outstanding.load(Ordering::Acquire).cast_unsigned());
        accounting.stats(direct)
    }
}

impl Accounting {
    /// The counters, if returning threads have taken out `direct` pages.
    pub(crate) fn stats(&self, direct: u64) -> PoolStats {
        let released = direct - self.quarantined;
        let mut stats = match self.pool {
            // SAFETY: the owner exists.
            Some(pool) => unsafe { pool.as_ref() }.stats(released),
            None => self.stats.with_released(released, self.unmaps),
        };
        stats.quarantined += self.quarantined;
        stats
    }
}
