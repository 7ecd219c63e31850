//! The chunks that the kernel had of a receive queue whose socket is closed.
//!
//! The kernel may still write to them, until it lets the queue be bound again: see `held.rs`. A
//! queue that is [opened again](crate::ClosedQueue) returns them to its pool then. A queue that
//! ends quarantines them.

use crate::accounts::PostedChunks;
use crate::held;
use crate::layout::Layout;
use crate::queue_key::QueueKey;
use crate::receive::page_of;
use crate::umem_memory::UmemMemory;
use netmem_pool::{Page, PagePool, PoolClosed, Region};
use std::sync::Arc;

/// Chunks in the invariant *posted* of [`PostedChunks`], without a socket.
pub(crate) struct LeftChunks<M: UmemMemory> {
    region: Arc<Region<M>>,
    layout: Layout,
    posted: PostedChunks,
    /// The queue that the socket was bound to.
    key: QueueKey,
}

impl<M: UmemMemory> LeftChunks<M> {
    pub(crate) fn new(region: Arc<Region<M>>, layout: Layout, posted: PostedChunks, key: QueueKey) -> Self {
        Self { region, layout, posted, key }
    }

    /// The number of chunks.
    pub(crate) fn count(&self) -> u32 {
        self.posted.count()
    }

    /// Removes all chunks. Returns their pages, each with its number.
    fn drain(&mut self) -> impl Iterator<Item = (Page<M>, u32)> {
        self.posted.drain().map(|chunk| {
            // SAFETY: *posted*: the set had a count of the page, and with it the chunk's bytes.
            let page = unsafe { page_of(&self.region, &self.layout, chunk) };
            (page, self.layout.page_of(chunk).0)
        })
    }

    /// Returns the pages to their pool. The kernel is done with them.
    pub(crate) fn release(&mut self, pool: &mut PagePool<M>) {
        pool.poll(|_| self.drain().for_each(drop));
    }

    /// Another socket was bound to the queue `key`. Returns the pages to their pool, if the kernel
    /// is then done with them: it is the same queue, or the old one is gone.
    pub(crate) fn bound(&mut self, key: QueueKey, pool: &mut PagePool<M>) {
        if key == self.key || self.posted.count() > 0 && held::is_gone(self.key) {
            self.release(pool);
        }
    }

    /// Keeps what is left until the kernel is done with the old queue. The pages then return to
    /// their pool.
    pub(crate) fn keep(mut self, umem: u64) {
        if self.posted.count() == 0 {
            return;
        }
        let counts = self.drain().map(|(page, index)| {
            let _ = page.freeze().into_count();
            (index, 1)
        });
        let counts = counts.collect();
        held::keep_sent(self.key, umem, &self.region, counts);
    }

    /// Quarantines the chunks, and closes their pool. Returns the numbers of the pages that are in
    /// no other use.
    pub(crate) fn quarantine(mut self, mut pool: PagePool<M>) -> (PoolClosed, Vec<u32>) {
        let mut pages = Vec::with_capacity(self.posted.count() as usize);
        for (page, index) in self.drain() {
            // Of the chunks in a page, the last one.
            if page.is_sole() {
                pages.push(index);
            }
            pool.quarantine(page);
        }
        (pool.close(), pages)
    }
}
