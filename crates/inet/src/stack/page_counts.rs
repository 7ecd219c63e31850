//! The counts of the pages that payload to be sent occupies, and the pages that a socket of another
//! thread writes.
//!
//! Why apart from [`pages`](crate::stack::pages): these are read and written by any thread. The
//! stack's thread keeps its own count by plain stores, so that streams of its thread cost no atomic
//! read-modify-write.

use crate::tcp::{Budget, share};
use netmem_pool::{Frag, Mapped, Page, SharedPool};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// How many pages of a stack's pool payload occupies.
pub(crate) struct PageCounts {
    /// The most pages.
    pub(crate) limit: u32,
    /// Pages that the stack's thread has written. Only this thread changes it.
    pub(crate) own: AtomicU32,
    /// Pages that streams of other threads have written.
    remote: AtomicU32,
    /// Pages into which received payload was detached, at most half of the limit.
    pub(crate) packed: Budget,
}

impl PageCounts {
    pub(crate) fn new(limit: u32) -> Self {
        Self { limit, own: AtomicU32::new(0), remote: AtomicU32::new(0), packed: Budget::new(limit / 2) }
    }

    /// Pages that payload can still occupy.
    pub(crate) fn free(&self) -> u32 {
        let used = self.own.load(Ordering::Relaxed).saturating_add(self.remote.load(Ordering::Relaxed));
        self.limit.saturating_sub(used).saturating_sub(self.packed.used())
    }

    /// Whether a page can become free without a poll of the stack, or is free. Received payload is
    /// dropped by its user, and a call of another thread that finds too few pages releases those
    /// that it has counted.
    pub(crate) fn is_silent(&self) -> bool {
        self.free() > 0 || self.packed.used() > 0 || self.remote.load(Ordering::Relaxed) > 0
    }

    /// Whether a holder of `held` pages may hold one more. Several threads can get the last page at
    /// the same time: the limit is then exceeded by one page for each of them.
    pub(crate) fn admits(&self, held: u32) -> bool {
        self.admits_more(held, 1)
    }

    /// Whether a holder of `held` pages may hold `more`, at least one. What is free without the
    /// holder is the same for each of them, and so is the share.
    pub(crate) fn admits_more(&self, held: u32, more: u32) -> bool {
        let free = self.free();
        more <= free && held.saturating_add(more) <= share(free, held, self.limit)
    }

    /// Whether `held` pages are fewer than the share of their holder. Other than
    /// [`admits`](Self::admits), this does not need a free page.
    pub(crate) fn is_within_share(&self, held: u32) -> bool {
        held < share(self.free(), held, self.limit)
    }
}

/// The pages that a stream of another thread writes. The stream allocates and counts them, and the
/// stack ends their counting when their bytes are acknowledged.
pub(crate) struct RemotePages<M: Mapped> {
    counts: Arc<PageCounts>,
    pool: Arc<SharedPool<M>>,
    /// Pages that are counted, with the open one.
    held: AtomicU32,
    /// The page into which the next bytes are written.
    open: Mutex<Option<Page<M>>>,
}

impl<M: Mapped> RemotePages<M> {
    pub(crate) fn new(counts: Arc<PageCounts>, pool: Arc<SharedPool<M>>) -> Self {
        Self { counts, pool, held: AtomicU32::new(0), open: Mutex::new(None) }
    }

    /// Bytes of a page.
    pub(crate) fn page_size(&self) -> usize {
        self.pool.page_size()
    }

    pub(crate) fn held(&self) -> u32 {
        self.held.load(Ordering::Relaxed)
    }

    /// Whether the counts admit a page for a byte that is written now. The pool can still be empty.
    pub(crate) fn has_page(&self) -> bool {
        self.counts.admits(self.held()) || self.has_open_page()
    }

    /// Whether there is a page into which the next byte would be written.
    pub(crate) fn has_open_page(&self) -> bool {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The most pages that it can ever hold: its share if no other page is counted, at least one.
    pub(crate) fn most(&self) -> u32 {
        share(self.counts.limit, 0, self.counts.limit)
    }

    /// Whether the counts admit `more` pages. The pool can still be empty.
    pub(crate) fn admits(&self, more: u32) -> bool {
        self.counts.admits_more(self.held(), more)
    }

    /// The fragment of `bytes`, if they are in the pool's memory.
    pub(crate) fn frag_of(&self, bytes: &[u8]) -> Option<Frag<M>> {
        self.pool.frag_of(bytes)
    }

    /// Copies the first of `bytes` into the open page, or into a new one. Returns the fragment, and
    /// whether its page is full now. `None`: there is no page. Called by the stream's thread.
    pub(crate) fn write(&self, bytes: &[u8]) -> Option<(Frag<M>, bool)> {
        // Only the stack's thread contends, which does not wait.
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.is_none() {
            *open = self.page();
        }
        let page = open.as_mut()?;
        let n = page.len().min(bytes.len());
        page.copy_from(0, &bytes[..n]).ok()?;
        let frag = page.split_to(n).freeze();
        let is_full = page.len() == 0;
        if is_full {
            *open = None;
        }
        Some((frag, is_full))
    }

    /// A page, which is counted until [`release`](Self::release). `None`: there is none.
    pub(crate) fn page(&self) -> Option<Page<M>> {
        let page = if self.counts.admits(self.held()) { self.pool.alloc() } else { None };
        self.count(u32::from(page.is_some()));
        page
    }

    fn count(&self, pages: u32) {
        self.held.fetch_add(pages, Ordering::Relaxed);
        self.counts.remote.fetch_add(pages, Ordering::Relaxed);
    }

    /// Ends the counting of full pages.
    pub(crate) fn release(&self, pages: u32) {
        self.held.fetch_sub(pages, Ordering::Relaxed);
        self.counts.remote.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Everything that the stack was given is acknowledged: drops the open page, because an idle
    /// connection holds none. If the stream is writing into it, it is not idle. Returns whether
    /// there was one.
    pub(crate) fn close(&self) -> bool {
        let page = match self.open.try_lock() {
            Ok(mut open) => open.take(),
            Err(_) => None,
        };
        self.release(u32::from(page.is_some()));
        page.is_some()
    }
}

/// Pages that are still counted are not any more: nothing of them will be sent.
impl<M: Mapped> Drop for RemotePages<M> {
    fn drop(&mut self) {
        self.release(self.held());
    }
}
