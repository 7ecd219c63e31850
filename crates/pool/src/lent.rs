//! A queue for pages that are lent to somebody who cannot give them back, and only lets it be seen that he is done.
//!
//! ```text
//!   lend ──► [ page, busy? ][ page, busy? ][ page, busy? ] ──► take, while the head is not busy
//!            newest                         the head           busy: nothing, or given up after so many looks
//! ```

use crate::memory::Memory;
use crate::page::Page;
use std::collections::VecDeque;
use std::fmt;

/// What becomes of the head of a [`LentQueue`] that stays busy.
pub enum BusyHead<M: Memory> {
    /// It is waited for, and so is everything behind it.
    Keep,
    /// It is given up, once it was found busy so many times in succession.
    Release {
        /// Looks, at least 1, of which the last gives up.
        after: u32,
        /// Who gets the page, which the borrower still uses: to leave it to him for good, or to
        /// [quarantine](crate::PagePool::quarantine) it.
        to: Box<dyn FnMut(Page<M>) + Send>,
    },
}

impl<M: Memory> fmt::Debug for BusyHead<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keep => f.write_str("Keep"),
            Self::Release { after, .. } => write!(f, "Release(after {after} looks)"),
        }
    }
}

/// What happened to the pages of a [`LentQueue`] so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LentStats {
    /// Put into the queue.
    pub lent: u64,
    /// Taken out, no longer busy.
    pub taken: u64,
    /// Looks that found the head busy.
    pub busy: u64,
    /// Given up.
    pub released: u64,
    /// Turned away, because the queue was full.
    pub full: u64,
}

/// Pages that are out with somebody who only polls: hardware that sets a flag, another process that counts up.
///
/// Dropping a page is the ordinary way home, and needs somebody who drops it. Where nobody can, the pool's owner keeps the
/// page here, together with a question whose answer is whether the borrower still uses it, and looks at the oldest when it
/// needs a page. A pop and a push of a bounded queue and one answer each; no atomic operation but those of the answer.
/// `docs/lent-pages.md` has what it costs beside the ordinary way.
///
/// ```
/// use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider, BusyHead, LentQueue};
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// let region = RegionOptions::new(64).huge_pages(false).build::<Private>()?;
/// let mut pool = PoolOptions::new("tx0").build(RegionProvider::new(region), None)?;
/// let mut waiting = LentQueue::new(32, BusyHead::Keep);
///
/// // A borrower that counts up what it is done with, in order.
/// let done = Arc::new(AtomicU64::new(0));
/// for n in 0..1000 {
///     // Refill: what is back comes first, then the pool.
///     let Some(page) = waiting.take().or_else(|| pool.alloc()) else { continue };
///     let counter = done.clone();
///     waiting.lend(page, move || counter.load(Ordering::Acquire) <= n).expect("at most 16 are lent");
///     // The borrower hears of the page, uses it, and some time later:
///     if n % 16 == 15 {
///         done.store(n + 1, Ordering::Release);
///     }
/// }
/// assert_eq!((waiting.stats().lent, pool.stats().allocated()), (1000, 16));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// When the queue goes, pages that are no longer busy go home. Those that are go where [`BusyHead::Release`] says; with
/// [`BusyHead::Keep`] they stay away for good, and show as in flight.
pub struct LentQueue<M: Memory, B: FnMut() -> bool> {
    lent: VecDeque<(Page<M>, B)>,
    capacity: usize,
    stays: BusyHead<M>,
    /// How often in succession the head was found busy.
    looks: u32,
    stats: LentStats,
}

impl<M: Memory, B: FnMut() -> bool> LentQueue<M, B> {
    /// A queue for up to `capacity` pages.
    #[must_use]
    pub fn new(capacity: usize, stays: BusyHead<M>) -> Self {
        let lent = VecDeque::with_capacity(capacity);
        Self { lent, capacity, stays, looks: 0, stats: LentStats::default() }
    }

    /// Keeps `page` until `busy` says that the borrower is done. To be called before he hears of it. The answer is to
    /// acquire what he released: what he did with the page happened before he was done.
    ///
    /// # Errors
    ///
    /// The page itself, if the queue is full.
    #[inline]
    pub fn lend(&mut self, page: Page<M>, busy: B) -> Result<(), Page<M>> {
        if self.lent.len() == self.capacity {
            self.stats.full += 1;
            return Err(page);
        }
        self.lent.push_back((page, busy));
        self.stats.lent += 1;
        Ok(())
    }

    /// The oldest page, if its borrower is done: to be used again, or to be dropped. Looks at the head only, and behind it
    /// only if it is given up.
    #[inline]
    pub fn take(&mut self) -> Option<Page<M>> {
        while let Some((_, busy)) = self.lent.front_mut() {
            if !busy() {
                self.looks = 0;
                self.stats.taken += 1;
                return self.lent.pop_front().map(|(page, _)| page);
            }
            self.stats.busy += 1;
            let BusyHead::Release { after, to } = &mut self.stays else { return None };
            self.looks += 1;
            if self.looks < *after {
                return None;
            }
            self.looks = 0;
            self.stats.released += 1;
            if let Some((page, _)) = self.lent.pop_front() {
                to(page);
            }
        }
        None
    }

    /// Pages in the queue, busy or not.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lent.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lent.is_empty()
    }

    /// What happened so far.
    #[must_use]
    pub fn stats(&self) -> LentStats {
        self.stats
    }
}

impl<M: Memory, B: FnMut() -> bool> Drop for LentQueue<M, B> {
    fn drop(&mut self) {
        let mut kept = 0;
        for (page, mut busy) in self.lent.drain(..) {
            match &mut self.stays {
                _ if !busy() => drop(page),
                BusyHead::Release { to, .. } => to(page),
                BusyHead::Keep => {
                    kept += 1;
                    std::mem::forget(page);
                }
            }
        }
        if kept > 0 {
            tracing::warn!(pages = kept, "pages are still lent, and kept from home for good");
        }
    }
}

impl<M: Memory, B: FnMut() -> bool> fmt::Debug for LentQueue<M, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (waiting, most) = (self.lent.len(), self.capacity);
        write!(f, "LentQueue<{}>({waiting} of {most}, {:?}, {:?})", M::NAME, self.stays, self.stats)
    }
}
