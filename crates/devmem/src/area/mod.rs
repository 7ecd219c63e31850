//! A user's area with a refill ring. Buffers are delivered as offsets in the area, and the user
//! returns them as offsets in a ring, without a call.
//!
//! A user that reads each buffer once, in order, needs no socket and no token. It needs a cheap way
//! to return a buffer from one thread.
//!
//! ```text
//!   network side                                          user
//!   AreaProvider::deliver(fragment) ──► offset, len ────► reads it
//!   take: drains the ring, then pages ◄──── refill ring ◄─── RefillRing::push(offset)
//!                                            full: the user's thread drains it, under its lock
//! ```
//!
//! The interface is that of io_uring's zero-copy receive, as a [`Provider`]. The user is not
//! trusted: if a page was not delivered, or is returned more often than it was delivered, the
//! return is ignored and counted.

mod held;

use crate::tokens::DeliverError;
use held::HeldCounts;
use netmem_pool::{Frag, Memory, Provider, RawPage, Region, RegionProvider};
use rtrb::{Consumer, Producer, PushError, RingBuffer};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// A delivered buffer in an area: `len` bytes from `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// The first byte, counted from the area's first byte. Any offset in the same page returns the
    /// buffer.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// The reason why a fragment was not delivered. Its page was returned to its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AreaError {
    /// The fragment is in a page of another area.
    #[error("the fragment is not of this area; each queue delivers to the area that it receives into")]
    Foreign,
    /// The user has dropped the refill ring.
    #[error("the area's user has gone")]
    Closed,
}

/// Counters of an area.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AreaStats {
    /// Buffers that were delivered.
    pub delivered: u64,
    /// Buffers that the user returned.
    pub returned: u64,
    /// Returned offsets whose page was not delivered, or was returned as often as delivered before.
    /// They were ignored.
    pub invalid: u64,
    /// How often the refill ring was full, so that the user's thread drained it.
    pub ring_full: u64,
}

/// The state that the network side and the user share.
struct Area<M: Memory> {
    supply: Arc<RegionProvider<M>>,
    /// Invariant: if a count is n, the user holds n references to the page.
    held: HeldCounts,
    ring: Mutex<Consumer<u64>>,
    closed: AtomicBool,
    delivered: AtomicU64,
    returned: AtomicU64,
    invalid: AtomicU64,
    ring_full: AtomicU64,
}

impl<M: Memory> Area<M> {
    /// Returns the pages of the buffers that are in the ring.
    fn drain(&self) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        // Only the entries of this moment are drained: the user may fill the ring meanwhile.
        for _ in 0..ring.slots() {
            let Ok(offset) = ring.pop() else { return };
            self.return_buffer(offset);
        }
    }

    fn return_buffer(&self, offset: u64) {
        let index = offset / self.supply.page_size() as u64;
        let index = u32::try_from(index).ok().filter(|&i| i < self.supply.region().pages());
        match index {
            Some(index) if self.take_one(index) => _ = self.returned.fetch_add(1, Ordering::Relaxed),
            _ => _ = self.invalid.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Drops one of the user's references to a page. Returns false if the user holds none. The page
    /// must be in the region.
    fn take_one(&self, index: u32) -> bool {
        let taken = self.held.take_one(index);
        if taken {
            // SAFETY: the count was not 0, so the user held a reference (the invariant), and this
            // thread owns it now.
            unsafe { self.supply.region().put(index, 1) };
        }
        taken
    }

    /// Returns the pages of all buffers that the user holds, when the user's end is dropped.
    fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.drain();
        // Because of the two fences, a delivery either sees `closed` and removes its count itself,
        // or has counted before the loop below reads the counts. If both are true, one of the two
        // removes the count, because the exchange is atomic.
        self.held.each(|index, n| {
            (0..n).for_each(|_| {
                self.take_one(index);
            });
        });
    }

    fn stats(&self) -> AreaStats {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        AreaStats {
            delivered: get(&self.delivered),
            returned: get(&self.returned),
            invalid: get(&self.invalid),
            ring_full: get(&self.ring_full),
        }
    }
}

/// The network side of an area. The pools of its queues allocate their pages from it, and it
/// delivers their fragments to the user.
pub struct AreaProvider<M: Memory> {
    area: Arc<Area<M>>,
}

impl<M: Memory> AreaProvider<M> {
    /// Makes an area of a region that the user provides. Returns its network side and the user's
    /// end of its refill ring, which has room for `entries` buffers.
    ///
    /// # Errors
    ///
    /// [`DeliverError::NoMemory`].
    pub fn new(region: Region<M>, entries: usize) -> Result<(Arc<Self>, RefillRing<M>), DeliverError> {
        let (producer, consumer) = RingBuffer::new(entries.max(1));
        let area = Arc::new(Area {
            held: HeldCounts::new(region.pages())?,
            supply: RegionProvider::new(region),
            ring: Mutex::new(consumer),
            closed: AtomicBool::new(false),
            delivered: AtomicU64::new(0),
            returned: AtomicU64::new(0),
            invalid: AtomicU64::new(0),
            ring_full: AtomicU64::new(0),
        });
        Ok((Arc::new(Self { area: area.clone() }), RefillRing { area, ring: producer }))
    }

    /// The memory, in the form of an entry of a device's memory table.
    #[must_use]
    pub fn region(&self) -> &Arc<Region<M>> {
        self.area.supply.region()
    }

    /// Delivers a fragment of this area to the user. Its page is returned to its pool through the
    /// refill ring, or when the ring is dropped.
    ///
    /// # Errors
    ///
    /// [`AreaError`]. The page of the fragment was returned to its pool.
    pub fn deliver(&self, frag: Frag<M>) -> Result<Buffer, AreaError> {
        let area = &*self.area;
        let index = self.region().index_of(&frag).ok_or(AreaError::Foreign)?;
        let page = u64::from(index) * area.supply.page_size() as u64;
        let buffer = Buffer { offset: page + frag.offset() as u64, len: frag.len() as u32 };
        let _ = frag.into_count();
        area.held.add_one(index);
        fence(Ordering::SeqCst);
        if area.closed.load(Ordering::Relaxed) {
            area.take_one(index);
            return Err(AreaError::Closed);
        }
        area.delivered.fetch_add(1, Ordering::Relaxed);
        Ok(buffer)
    }

    /// The counters of the area.
    #[must_use]
    pub fn stats(&self) -> AreaStats {
        self.area.stats()
    }
}

// SAFETY: pages come from the region's supply, which allocates a page to one holder at a time, and
// return to it. The area keeps the region and the supply.
unsafe impl<M: Memory> Provider<M> for AreaProvider<M> {
    /// Drains the ring first. Pages of the calling pool return to that pool, so fewer pages must be
    /// allocated from the supply.
    fn alloc(&self, pages: &mut [Option<RawPage<M>>]) -> usize {
        self.area.drain();
        self.area.supply.alloc(pages)
    }

    unsafe fn release(&self, page: RawPage<M>) {
        // SAFETY: the caller promises that `alloc` returned the page, and `alloc` allocates from
        // the supply.
        unsafe { self.area.supply.release(page) };
    }

    fn page_size(&self) -> usize {
        self.area.supply.page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<M>)) {
        f(self.region());
    }
}

impl<M: Memory> fmt::Debug for AreaProvider<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AreaProvider")
            .field("region", self.region())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// The user's end of an area. One thread at a time fills the ring. Dropping this value returns all
/// buffers that the user holds.
#[must_use = "the user's end of an area: dropping it returns all buffers that the user holds"]
pub struct RefillRing<M: Memory> {
    area: Arc<Area<M>>,
    ring: Producer<u64>,
}

impl<M: Memory> RefillRing<M> {
    /// Returns the buffer whose page contains `offset`. Costs a store and a release.
    ///
    /// The ring is full if no queue has allocated pages for a long time. Then this thread first
    /// returns all buffers in the ring, and no return is lost. This costs a lock, and two atomic
    /// operations for each buffer.
    #[inline]
    pub fn push(&mut self, offset: u64) {
        if let Err(PushError::Full(offset)) = self.ring.push(offset) {
            self.push_slowly(offset);
        }
    }

    #[cold]
    fn push_slowly(&mut self, offset: u64) {
        self.area.ring_full.fetch_add(1, Ordering::Relaxed);
        self.area.drain();
        self.area.return_buffer(offset);
    }

    /// Returns all buffers in the ring, without waiting until a queue allocates pages.
    pub fn flush(&mut self) {
        self.area.drain();
    }

    /// The counters of the area.
    #[must_use]
    pub fn stats(&self) -> AreaStats {
        self.area.stats()
    }
}

impl<M: Memory> Drop for RefillRing<M> {
    fn drop(&mut self) {
        self.area.close();
    }
}

impl<M: Memory> fmt::Debug for RefillRing<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefillRing")
            .field("slots", &self.ring.slots())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
