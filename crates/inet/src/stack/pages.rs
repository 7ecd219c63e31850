//! The pages from which a stack sends, and their shares.
//!
//! ```text
//!   the stack's pool:  │ payload that users wrote: shares │ reserve │
//!                                                          └─ headers, acknowledgements, resets,
//!                                                             probes, ICMP, ARP
//! ```
//!
//! Why shares: a peer that does not read keeps what was written for it. Without them, some such
//! peers hold all pages, and no other connection can send. Why a reserve: without it, payload
//! that waits for an acknowledgement could keep the acknowledgements of others from leaving.
//!
//! **The share** of a connection follows from what is free: [`share`].
//!
//! **Counting.** A page counts from the moment in which a stream begins to write into it until all
//! bytes that were written into it are acknowledged. Payload that the user sends by reference is
//! the user's, and does not count. All calls are of the stack's thread;
//! [`page_counts`](crate::stack::page_counts) has what other threads read and write.
//!
//! **Waiting.** A user that found no page is woken by a poll of the stack. Acknowledgements and
//! completions, which release pages, are work of polls. But payload that was received can be
//! dropped, pages of the pool can be returned, and another thread can release pages that it has
//! counted for a datagram that needs more, without a poll. So a call that finds no page
//! requests one ([`SendPages::asked`]), and the stack polls every [`RETRY`] while a user waits for
//! such a page.

use crate::stack::page_counts::{PageCounts, RemotePages};
use crate::stack::transport::handles::ConnectionId;
use crate::tcp::{Seq, share};
use crate::time::Time;
use netmem_pool::{Mapped, Page};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// After so long, users that found too few pages try again: other threads return pages, too, and
/// notify no stack.
pub(crate) const RETRY: Duration = Duration::from_millis(1);

/// The most pages of the reserve.
const MOST_RESERVED: usize = 1024;

/// The pages of the pool that payload may occupy.
pub(crate) struct SendPages {
    pub(crate) counts: Arc<PageCounts>,
    /// Connections whose users want to write, in the order in which they found no page.
    waiting: VecDeque<ConnectionId>,
    /// A user found too few pages since the last poll.
    pub(crate) asked: bool,
    /// When connections that wait try again whatever has happened.
    retry: Option<Time>,
}

impl SendPages {
    /// The shares of a pool of `pages` pages. A quarter of them, but no more than 1024, is the
    /// reserve.
    pub(crate) fn new(pages: usize) -> Self {
        let limit = u32::try_from(pages - (pages / 4).min(MOST_RESERVED)).unwrap_or(u32::MAX);
        let (waiting, asked, retry) = Default::default();
        Self { counts: Arc::new(PageCounts::new(limit)), waiting, asked, retry }
    }

    /// Pages that payload can still occupy.
    pub(crate) fn free(&self) -> u32 {
        self.counts.free()
    }

    /// The most pages that a holder can ever have: its share if no other page is counted.
    pub(crate) fn most(&self) -> usize {
        share(self.counts.limit, 0, self.counts.limit) as usize
    }

    /// Whether a holder of `held` pages may hold one more.
    pub(crate) fn admits(&self, held: usize) -> bool {
        self.counts.admits(u32::try_from(held).unwrap_or(u32::MAX))
    }

    /// Whether a holder of `held` pages may hold `more`, at least one.
    pub(crate) fn admits_more(&self, held: usize, more: usize) -> bool {
        let [held, more] = [held, more].map(|pages| u32::try_from(pages).unwrap_or(u32::MAX));
        self.counts.admits_more(held, more)
    }

    /// Whether a holder of `held` pages has fewer than its share, also if no page is free.
    pub(crate) fn is_within_share(&self, held: usize) -> bool {
        self.counts.is_within_share(u32::try_from(held).unwrap_or(u32::MAX))
    }

    /// Counts pages that were allocated.
    pub(crate) fn count(&mut self, pages: usize) {
        self.set_own(|own| own + pages as u32);
    }

    /// Ends the counting of pages.
    pub(crate) fn release(&mut self, pages: usize) {
        self.set_own(|own| {
            debug_assert!(pages <= own as usize);
            own.saturating_sub(pages as u32)
        });
    }

    /// No other thread changes the count, so a load and a store do.
    fn set_own(&mut self, to: impl FnOnce(u32) -> u32) {
        let own = &self.counts.own;
        own.store(to(own.load(Ordering::Relaxed)), Ordering::Relaxed);
    }

    /// Whether a page is free, but not for a holder of `held` pages.
    pub(crate) fn limits(&self, held: usize) -> bool {
        self.free() > 0 && !self.admits(held)
    }

    /// Puts a connection that found no page into the queue. It is called once until
    /// [`next`](Self::next) returns it. Returns how many wait.
    pub(crate) fn wait(&mut self, id: ConnectionId) -> usize {
        self.waiting.push_back(id);
        self.waiting.len()
    }

    /// Removes connections that are gone from the queue.
    pub(crate) fn forget(&mut self, is_gone: impl Fn(ConnectionId) -> bool) {
        self.waiting.retain(|id| !is_gone(*id));
    }

    /// The connection that has waited the longest, if a page is free.
    pub(crate) fn next(&mut self) -> Option<ConnectionId> {
        if self.free() > 0 { self.waiting.pop_front() } else { None }
    }

    /// Whether connections wait for a page, or a time to try again is set: [`ready`](Self::ready)
    /// and [`set_retry`](Self::set_retry) would do nothing otherwise.
    #[inline]
    pub(crate) fn is_awaited(&self) -> bool {
        !self.waiting.is_empty() || self.retry.is_some()
    }

    /// How many connections can get a page now.
    pub(crate) fn ready(&self) -> usize {
        self.waiting.len().min(self.free() as usize)
    }

    /// Decides when those that still wait try again. They need no timer if all pages are counted
    /// by the stack's thread: their release is work of polls.
    pub(crate) fn set_retry(&mut self, now: Time) {
        self.retry = (!self.waiting.is_empty() && self.counts.is_silent()).then(|| now + RETRY);
    }

    /// When connections that found no page try again.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.retry
    }
}

/// The pages that a connection holds to send.
pub(crate) struct WrittenPages<M: Mapped> {
    /// The page into which the next bytes are written.
    pub(crate) page: Option<Page<M>>,
    /// For each full page, the number after its last byte.
    ends: VecDeque<Seq>,
    /// Pages are written by another thread. Then `page` is `None`.
    pub(crate) remote: Option<Arc<RemotePages<M>>>,
}

impl<M: Mapped> WrittenPages<M> {
    pub(crate) const fn new() -> Self {
        Self::by(None)
    }

    /// No page yet. If there is a `remote`, another thread writes them.
    pub(crate) const fn by(remote: Option<Arc<RemotePages<M>>>) -> Self {
        Self { page: None, ends: VecDeque::new(), remote }
    }

    /// Whether the stack's thread has written pages that are counted.
    pub(crate) fn has_own(&self) -> bool {
        self.page.is_some() || !self.ends.is_empty()
    }

    /// Pages that are counted.
    pub(crate) fn held(&self) -> usize {
        let own = self.ends.len() + usize::from(self.page.is_some());
        self.remote.as_ref().map_or(own, |remote| remote.held() as usize)
    }

    /// Whether there is a page into which the next byte would be written.
    pub(crate) fn has_open_page(&self) -> bool {
        self.page.is_some() || self.remote.as_ref().is_some_and(|remote| remote.has_open_page())
    }

    /// Whether a byte that is written now would find a page.
    pub(crate) fn has_page(&self, pages: &SendPages) -> bool {
        match &self.remote {
            Some(remote) => remote.has_page(),
            None => self.page.is_some() || pages.admits(self.held()),
        }
    }

    /// The open page is full: its last byte is before `end`.
    pub(crate) fn handle_full(&mut self, end: Seq) {
        if self.page.take().is_some() {
            self.ends.push_back(end);
        }
    }

    /// Counts `pages` full pages, whose last bytes are before `end`.
    pub(crate) fn restore(&mut self, pages: usize, end: Seq) {
        self.ends.extend(std::iter::repeat_n(end, pages));
    }

    /// The peer has acknowledged everything before `una`, and the user has written everything
    /// before `end`. Returns whether pages are not counted any more.
    pub(crate) fn handle_acknowledged(&mut self, una: Seq, end: Seq, pages: &mut SendPages) -> bool {
        let mut released = 0;
        while self.ends.front().is_some_and(|&end| end <= una) {
            self.ends.pop_front();
            released += 1;
        }
        let mut closed = false;
        if una >= end {
            // An idle connection holds no page.
            closed = self.close_page(pages);
            self.ends.shrink_to(0);
        }
        self.release(released, pages);
        released > 0 || closed
    }

    /// Nothing will be sent any more: no page is counted.
    pub(crate) fn clear(&mut self, pages: &mut SendPages) {
        self.close_page(pages);
        self.release(self.ends.len(), pages);
        self.ends = VecDeque::new();
    }

    /// Drops the page into which the next bytes would be written. Returns whether there was one.
    fn close_page(&mut self, pages: &mut SendPages) -> bool {
        let own = self.page.take().is_some();
        pages.release(usize::from(own));
        own || self.remote.as_ref().is_some_and(|remote| remote.close())
    }

    fn release(&self, full: usize, pages: &mut SendPages) {
        match &self.remote {
            Some(remote) => remote.release(full as u32),
            None => pages.release(full),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stack::table::Table;
    use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};

    /// Connections whose peers never read, one after the other: each writes as much as it may. The
    /// next one is answered.
    #[test]
    fn greedy_holders_leave_a_share_for_the_next_one() {
        let mut pages = SendPages::new(4096);
        for greedy in 0..100 {
            let mut held = 0;
            while pages.admits(held) {
                held += 1;
                pages.count(1);
            }
            assert!(held > 0, "{greedy}");
        }
        assert!(pages.admits(0) && pages.free() > 20);
    }

    #[test]
    fn pages_count_until_their_last_byte_is_acknowledged() {
        let (mut pages, mut written) = (SendPages::new(8), WrittenPages::<Private>::new());
        let (start, free) = (Seq(u32::MAX - 10), pages.free());
        written.restore(2, start + 100);
        written.restore(1, start + 200);
        pages.count(3);
        let mut acknowledged = |una| {
            let released = written.handle_acknowledged(start + una, start + 250, &mut pages);
            (released, written.held(), free - pages.free())
        };
        assert_eq!(acknowledged(99), (false, 3, 3));
        assert_eq!(acknowledged(100), (true, 1, 1));
        assert_eq!(acknowledged(250), (true, 0, 0));
    }

    /// A thread counts pages for a datagram, finds one missing, and releases them without a signal.
    #[test]
    fn those_that_wait_try_again_while_another_thread_has_counted_pages() {
        let region = RegionOptions::new(8).huge_pages(false).build::<Private>().unwrap();
        let pool = Arc::new(PoolOptions::new("tx").build_shared(RegionProvider::new(region), None).unwrap());
        let mut pages = SendPages::new(8);
        _ = pages.wait(Table::new().insert(()));
        pages.count(5);
        let remote = RemotePages::new(pages.counts.clone(), pool);
        let page = remote.page();
        pages.set_retry(Time::ZERO);
        assert_eq!((page.is_some(), pages.free(), pages.poll_timeout()), (true, 0, Some(Time::ZERO + RETRY)));
        remote.release(1);
        pages.count(1);
        pages.set_retry(Time::ZERO);
        assert_eq!((pages.free(), pages.poll_timeout()), (0, None), "the stack's thread releases them");
    }

    #[test]
    fn those_that_wait_are_woken_in_order_and_as_many_as_there_are_pages() {
        let mut table = Table::new();
        let ids = [(); 3].map(|()| table.insert(()));
        let mut pages = SendPages::new(8);
        pages.count(6);
        ids.into_iter().for_each(|id| _ = pages.wait(id));
        assert_eq!((pages.ready(), pages.next()), (0, None));
        pages.release(2);
        assert_eq!((pages.ready(), pages.next(), pages.next()), (2, Some(ids[0]), Some(ids[1])));
    }
}
