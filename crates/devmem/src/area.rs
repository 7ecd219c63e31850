//! A user's area with a refill ring: buffers are delivered as places, and come back as numbers in a ring, without a call.
//!
//! ```text
//!   network side                                          user
//!   AreaProvider::deliver(fragment) ──► offset, len ────► reads it
//!   take: pages, after what the ring has ◄── refill ring ◄── RefillRing::push(offset)
//!                                            full: the user empties it himself, under the ring's lock
//! ```
//!
//! The shape of io_uring's zero-copy receive, as a [`Provider`]. The user is not believed: a place that was not delivered, or
//! not as often as it comes back, is ignored and counted.

use crate::DeliverError;
use crate::counts::Counts;
use netmem_pool::{Frag, Memory, Provider, RawPage, Region, RegionProvider};
use rtrb::{Consumer, Producer, PushError, RingBuffer};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// A place in an area that was delivered: `len` bytes from `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// From the area's first byte. Any place in the same page gives it back.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// Why a fragment was not delivered: it has gone home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AreaError {
    /// It is in another area's page.
    #[error("the fragment is not of this area; each queue delivers to the area that it receives into")]
    Foreign,
    /// The user has gone.
    #[error("the area's user has gone")]
    Closed,
}

/// An area's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AreaStats {
    /// Buffers delivered.
    pub delivered: u64,
    /// Buffers that came back.
    pub returned: u64,
    /// Places that came back and were not delivered, or not so often. Ignored.
    pub invalid: u64,
    /// How often the refill ring was full and its user emptied it.
    pub ring_full: u64,
}

/// What the two sides share.
struct Area<M: Memory> {
    supply: Arc<RegionProvider<M>>,
    /// Invariant: a count is so many counts of the page, which are the user's.
    held: Counts,
    ring: Mutex<Consumer<u64>>,
    closed: AtomicBool,
    delivered: AtomicU64,
    returned: AtomicU64,
    invalid: AtomicU64,
    ring_full: AtomicU64,
}

impl<M: Memory> Area<M> {
    /// Takes back what is in the ring.
    fn drain(&self) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        // No more than there are now: the user may go on filling it.
        for _ in 0..ring.slots() {
            let Ok(offset) = ring.pop() else { return };
            self.give_back(offset);
        }
    }

    fn give_back(&self, offset: u64) {
        let index = offset / self.supply.page_size() as u64;
        let index = u32::try_from(index).ok().filter(|&i| i < self.supply.region().pages());
        match index {
            Some(index) if self.take_one(index) => _ = self.returned.fetch_add(1, Ordering::Relaxed),
            _ => _ = self.invalid.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Puts one of the user's counts of a page, if there is one.
    fn take_one(&self, index: u32) -> bool {
        // SAFETY: there is such a page, say the callers; the counts are our own.
        let taken = unsafe { self.held.base().at(index) }.take_one();
        if taken {
            // SAFETY: the count said that there is one (the invariant), and it is now ours.
            unsafe { self.supply.region().put(index, 1) };
        }
        taken
    }

    /// The user has gone: gives back all that he had.
    fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.drain();
        // A delivery that sees it takes its count back itself, and one that does not has counted before this looks: the two
        // fences. Either may be who finds it.
        self.held.held(|index, n| {
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

/// The network side of an area: where its queues' pools take their pages, and by whom their fragments are delivered.
pub struct AreaProvider<M: Memory> {
    area: Arc<Area<M>>,
}

impl<M: Memory> AreaProvider<M> {
    /// An area of a region that the user provides, and the user's end of a refill ring with room for `entries`.
    ///
    /// # Errors
    ///
    /// [`DeliverError::NoMemory`].
    pub fn new(region: Region<M>, entries: usize) -> Result<(Arc<Self>, RefillRing<M>), DeliverError> {
        let (producer, consumer) = RingBuffer::new(entries.max(1));
        let area = Arc::new(Area {
            held: Counts::new(region.pages(), 0)?,
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

    /// The memory, as a device's memory table wants it.
    #[must_use]
    pub fn region(&self) -> &Arc<Region<M>> {
        self.area.supply.region()
    }

    /// Gives the user a fragment of this area. It comes back by the refill ring, or when the user goes.
    ///
    /// # Errors
    ///
    /// [`AreaError`]; the fragment has gone home.
    pub fn deliver(&self, frag: Frag<M>) -> Result<Buffer, AreaError> {
        let area = &*self.area;
        let index = self.region().index_of(&frag).ok_or(AreaError::Foreign)?;
        let page = u64::from(index) * area.supply.page_size() as u64;
        let buffer = Buffer { offset: page + frag.offset() as u64, len: frag.len() as u32 };
        let _ = frag.into_count();
        // SAFETY: a page of the region, which has a count each; they are the area's.
        unsafe { area.held.base().mark(index) }.give(1);
        fence(Ordering::SeqCst);
        if area.closed.load(Ordering::Relaxed) {
            area.take_one(index);
            return Err(AreaError::Closed);
        }
        area.delivered.fetch_add(1, Ordering::Relaxed);
        Ok(buffer)
    }

    /// The area's numbers.
    #[must_use]
    pub fn stats(&self) -> AreaStats {
        self.area.stats()
    }
}

// SAFETY: pages come from the supply of the region, which gives them to one holder at a time, and go there; the area keeps both.
unsafe impl<M: Memory> Provider<M> for AreaProvider<M> {
    /// First takes back what the ring has: pages that circulate in the calling pool go there, and need not be taken.
    fn take(&self, pages: &mut [Option<RawPage<M>>]) -> usize {
        self.area.drain();
        self.area.supply.take(pages)
    }

    unsafe fn give(&self, page: RawPage<M>) {
        // SAFETY: it came out of `take`, says the caller, and so from the supply.
        unsafe { self.area.supply.give(page) };
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

/// The user's end of an area. One thread fills it at a time. Dropping it gives back all buffers that are out.
#[must_use = "the user's end of an area: what is out comes home when it is dropped"]
pub struct RefillRing<M: Memory> {
    area: Arc<Area<M>>,
    ring: Producer<u64>,
}

impl<M: Memory> RefillRing<M> {
    /// Gives back the buffer at `offset`, or at any other place of the same page. A store and a release; if the ring is full, which means that
    /// no queue has needed pages for long, all that is in it goes home first, by this thread: it costs a lock and two atomic
    /// operations for each, and nothing is lost.
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
        self.area.give_back(offset);
    }

    /// Gives home all that is in the ring, without waiting for a queue to need it.
    pub fn flush(&mut self) {
        self.area.drain();
    }

    /// The area's numbers.
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
