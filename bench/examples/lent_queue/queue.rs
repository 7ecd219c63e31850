//! A queue for pages that are lent to a borrower which cannot drop them, and which only shows when
//! it is done with a page.
//!
//! ```text
//!   lend ──► [ page, busy? ][ page, busy? ][ page, busy? ] ──► take, while the head is not busy
//!            newest                         the head           busy: nothing, or given up after so many polls
//! ```
//!
//! The queue calls two functions of the user, which may panic: `busy`, which returns whether the
//! borrower still uses the page, and `to`, the receiver of pages that are given up. A page is in
//! the queue until `busy` has returned false or `to` has taken the page. A panic before that leaves
//! the page where it was. So no panic loses a page, and no panic returns a page that is still lent.

use netmem_pool::{Memory, Page};
use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::{fmt, thread};

/// Receives pages that a queue hands over.
type Receiver<M> = dyn FnMut(BusyPage<'_, M>) + Send;

/// What a [`LentQueue`] does with a head that stays busy.
pub(crate) enum BusyHead<M: Memory> {
    /// The queue waits for the head, and therefore for every page behind it.
    Keep,
    /// The queue hands the head over after it was found busy this many times in succession.
    Release {
        /// The number of polls, at least 1. After the last of them the head is handed over.
        after: u32,
        /// Receives the page, which the borrower still uses: to leave it to the borrower for good,
        /// or to [quarantine](netmem_pool::PagePool::quarantine) it.
        to: Box<Receiver<M>>,
    },
}

impl<M: Memory> fmt::Debug for BusyHead<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keep => f.write_str("Keep"),
            Self::Release { after, .. } => write!(f, "Release(after {after} polls)"),
        }
    }
}

/// A page that a [`LentQueue`] hands over while its borrower still uses it, offered to the receiver
/// of [`BusyHead::Release`].
///
/// The receiver claims it with [`into_page`](Self::into_page). Dropping the offer declines it, also
/// in a panic: the page is the queue's head again, and its polls are counted from 0. If the queue
/// is being dropped, a declined page is leaked and never returned.
pub(crate) struct BusyPage<'q, M: Memory>(&'q mut Option<Page<M>>);

impl<M: Memory> BusyPage<'_, M> {
    /// Claims the page. The borrower still uses it: from here on the receiver decides when the page
    /// is returned.
    #[must_use = "a page that is dropped goes home, and its borrower still uses it"]
    pub(crate) fn into_page(self) -> Page<M> {
        let Some(page) = self.0.take() else { unreachable!("it has its page until it is consumed") };
        page
    }
}

impl<M: Memory> fmt::Debug for BusyPage<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BusyPage({:?})", self.0)
    }
}

/// Counters of a [`LentQueue`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LentStats {
    /// Put into the queue.
    pub(crate) lent: u64,
    /// Taken out, no longer busy.
    pub(crate) taken: u64,
    /// Polls that found the head busy.
    pub(crate) busy: u64,
    /// Given up.
    pub(crate) released: u64,
    /// Turned away, because the queue was full.
    pub(crate) full: u64,
}

/// Pages that are lent to a borrower that only polls: hardware that sets a flag, or another process
/// that increments a counter.
///
/// Normally a page returns when it is dropped, and that needs code that drops it. For a borrower
/// without such code, the pool's owner keeps the page here, together with a closure `busy`, which
/// returns whether the borrower still uses the page. When the owner needs a page, it examines the
/// oldest one. Cost: a pop and a push of a bounded queue and one call of `busy` for each page; no
/// atomic operation but those in `busy`. `docs/notes/lent-pages.md` compares this with the normal
/// return.
///
/// When the queue is dropped, each page is looked at once more. A page that is not busy is
/// returned. A busy page goes to the receiver of [`BusyHead::Release`]. With [`BusyHead::Keep`] it
/// is never returned, and shows as in flight. A page whose `busy` panics counts as busy. The first
/// panic is propagated after all pages have been looked at.
pub(crate) struct LentQueue<M: Memory, B: FnMut() -> bool> {
    lent: VecDeque<(Page<M>, B)>,
    capacity: usize,
    head: BusyHead<M>,
    /// How often in succession the head was found busy.
    polls: u32,
    stats: LentStats,
}

impl<M: Memory, B: FnMut() -> bool> LentQueue<M, B> {
    /// A queue for up to `capacity` pages. Allocates their places.
    #[must_use]
    pub(crate) fn new(capacity: usize, head: BusyHead<M>) -> Self {
        let lent = VecDeque::with_capacity(capacity);
        Self { lent, capacity, head, polls: 0, stats: LentStats::default() }
    }

    /// Keeps `page` until `busy` returns false: the borrower is done. Call it before the borrower
    /// is told of the page. `busy` has to acquire what the borrower released when it was done: then
    /// the borrower's last use of the page happened before the answer.
    ///
    /// # Errors
    ///
    /// The page itself, if the queue is full.
    #[inline]
    pub(crate) fn lend(&mut self, page: Page<M>, busy: B) -> Result<(), Page<M>> {
        if self.lent.len() == self.capacity {
            self.stats.full += 1;
            return Err(page);
        }
        self.lent.push_back((page, busy));
        self.stats.lent += 1;
        Ok(())
    }

    /// The oldest page, if its borrower is done: to be used again, or to be dropped. Examines the
    /// head only. The next page is looked at only if the head is given up.
    ///
    /// A panic of `busy`, or of the receiver of a head that is given up, is propagated. It leaves
    /// the page at the head, unless the receiver has taken the page.
    #[inline]
    #[must_use = "a page that is dropped goes home"]
    pub(crate) fn take(&mut self) -> Option<Page<M>> {
        while let Some((_, busy)) = self.lent.front_mut() {
            if !busy() {
                self.polls = 0;
                self.stats.taken += 1;
                return self.lent.pop_front().map(|(page, _)| page);
            }
            self.stats.busy += 1;
            let BusyHead::Release { after, to } = &mut self.head else { return None };
            self.polls += 1;
            if self.polls < *after {
                return None;
            }
            self.polls = 0;
            if !Offer::make(&mut self.lent, to, &mut self.stats.released) {
                return None;
            }
        }
        None
    }

    /// Pages in the queue, busy or not.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.lent.len()
    }

    /// Whether the queue is empty.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.lent.is_empty()
    }

    /// The counters so far.
    #[cfg(test)]
    pub(crate) fn stats(&self) -> LentStats {
        self.stats
    }
}

/// The head, taken off the queue while it is offered to the receiver. If the receiver does not take
/// it, also because of a panic, it becomes the head again.
struct Offer<'q, M: Memory, B> {
    lent: &'q mut VecDeque<(Page<M>, B)>,
    page: Option<Page<M>>,
    busy: Option<B>,
    released: &'q mut u64,
}

impl<'q, M: Memory, B> Offer<'q, M, B> {
    /// Offers the head to its receiver. True if the receiver took it.
    #[cold]
    fn make(lent: &'q mut VecDeque<(Page<M>, B)>, to: &mut Receiver<M>, released: &'q mut u64) -> bool {
        let (page, busy) = lent.pop_front().unzip();
        let mut offer = Self { lent, page, busy, released };
        if offer.page.is_some() {
            to(BusyPage(&mut offer.page));
        }
        offer.page.is_none()
    }
}

impl<M: Memory, B> Drop for Offer<'_, M, B> {
    fn drop(&mut self) {
        let Some(busy) = self.busy.take() else { return };
        match self.page.take() {
            Some(page) => self.lent.push_front((page, busy)),
            None => *self.released += 1,
        }
    }
}

impl<M: Memory, B: FnMut() -> bool> Drop for LentQueue<M, B> {
    fn drop(&mut self) {
        let mut kept = 0;
        let mut panic: Option<Box<dyn Any + Send>> = None;
        // If a panic left the loop, the remaining pages would be returned without a call of `busy`.
        let mut run = |f: &mut dyn FnMut()| {
            if let Err(payload) = catch_unwind(AssertUnwindSafe(f)) {
                panic.get_or_insert(payload);
            }
        };
        while let Some((page, busy)) = self.lent.pop_front() {
            let (mut page, mut ask, mut is_busy) = (Some(page), Some(busy), true);
            run(&mut || is_busy = ask.take().is_none_or(|mut busy| busy()));
            match &mut self.head {
                _ if !is_busy => run(&mut || drop(page.take())),
                BusyHead::Release { to, .. } => run(&mut || to(BusyPage(&mut page))),
                BusyHead::Keep => {}
            }
            if let Some(page) = page {
                kept += 1;
                std::mem::forget(page);
            }
        }
        if kept > 0 {
            eprintln!("{kept} pages are still lent, and are never returned");
        }
        // A second panic while the first unwinds would end the process.
        if let Some(payload) = panic.filter(|_| !thread::panicking()) {
            resume_unwind(payload);
        }
    }
}

impl<M: Memory, B: FnMut() -> bool> fmt::Debug for LentQueue<M, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (lent, most) = (self.lent.len(), self.capacity);
        write!(f, "LentQueue<{}>({lent} of {most}, {:?}, {:?})", M::NAME, self.head, self.stats)
    }
}
