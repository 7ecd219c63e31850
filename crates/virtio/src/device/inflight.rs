//! In-flight state: memory that outlives the device and says which chains it had taken and not given back.
//!
//! The front end asks for the region (`GET_INFLIGHT_FD`), keeps it, and gives it to the back end that follows
//! (`SET_INFLIGHT_FD`). Per queue, with the specification's names:
//!
//! ```text
//!   0  features u64   0
//!   8  version u16    1; 0 in a region that no back end has used
//!  10  desc_num u16   entries that follow
//!  12  last_batch_head u16   head of the chain that was given back last
//!  14  used_idx u16   the used index up to which the entries are right
//!  16  desc_num entries of 16 bytes:  inflight u8 | padding | next u16 (at 6) | counter u64 (at 8)
//! ```
//!
//! Our device takes chains in order and gives them back in order. A chain that it took and did not give back is therefore
//! always one of those that follow the used index in the available ring, and taking the ring up at the used index takes
//! each of them exactly once. So a running queue writes no entry, and only keeps `used_idx` right: one store per
//! publication. Entries matter when the device follows another back end, which may have given chains back out of
//! order: the chains that are marked in flight are taken first, in the order of their counters, and their marks are
//! cleared as the specification says, so that the device may itself be killed meanwhile.
//!
//! The front end can write the region at any time. Every word is read once and checked. A head that is out of range ends
//! a list, and a mark that lies makes the device give back a chain that the driver did not post; the driver's own front
//! end did that to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use super::DeviceError;
use super::mapping::Mapping;
use crate::virtqueue::SplitRing;

const HEADER: usize = 16;
const ENTRY: usize = 16;
/// What a queue's part of the region is aligned to, as other back ends have it.
const ALIGN: usize = 64;
const VERSION: u16 = 1;

/// The in-flight region of a front end: one part per queue.
#[derive(Clone, Debug)]
pub(super) struct InflightRegion {
    map: Arc<Mapping>,
    queues: u16,
    queue_size: u16,
}

/// Bytes of one queue's part.
fn stride(queue_size: u16) -> usize {
    (HEADER + ENTRY * usize::from(queue_size)).next_multiple_of(ALIGN)
}

impl InflightRegion {
    /// Bytes of a region for `queues` queues of `queue_size` entries.
    pub(super) fn bytes(queues: u16, queue_size: u16) -> u64 {
        (stride(queue_size) * usize::from(queues)) as u64
    }

    /// # Errors
    ///
    /// [`DeviceError::InflightShape`]: `map` is too small for the queues.
    pub(super) fn new(map: Mapping, queues: u16, queue_size: u16) -> Result<Self, DeviceError> {
        let bytes = Self::bytes(queues, queue_size);
        if queue_size == 0 || bytes > map.len as u64 || !map.at.addr().is_multiple_of(8) {
            return Err(DeviceError::InflightShape { queues, queue_size, bytes: map.len as u64 });
        }
        Ok(Self { map: Arc::new(map), queues, queue_size })
    }

    /// The part of queue `index`, for a ring of `size` entries; none if the region has none for it.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InflightRing`]: the part does not fit the ring, or is of a version that is not known here.
    pub(super) fn queue(&self, index: usize, size: u16) -> Result<Option<Part>, DeviceError> {
        if index >= usize::from(self.queues) {
            return Ok(None);
        }
        let part =
            Part { map: Arc::clone(&self.map), offset: index * stride(self.queue_size), entries: self.queue_size };
        let version = part.version().load(Ordering::Relaxed);
        if size > self.queue_size || version > VERSION {
            return Err(DeviceError::InflightRing { ring: index, size, entries: self.queue_size, version });
        }
        Ok(Some(part))
    }
}

/// One queue's part of the region.
#[derive(Debug)]
pub(crate) struct Part {
    map: Arc<Mapping>,
    offset: usize,
    entries: u16,
}

impl Part {
    fn at<T>(&self, offset: usize) -> &T {
        debug_assert!(offset + size_of::<T>() <= stride(self.entries));
        // SAFETY: *mapped*; `InflightRegion::new` checked that the mapping holds every part, and that it is aligned to 8
        // bytes; `offset` lies within the part and is a multiple of the size of `T`, which is an atomic.
        unsafe { &*self.map.at.add(self.offset + offset).cast::<T>() }
    }

    fn version(&self) -> &AtomicU16 {
        self.at(8)
    }

    fn desc_num(&self) -> &AtomicU16 {
        self.at(10)
    }

    fn last_batch_head(&self) -> &AtomicU16 {
        self.at(12)
    }

    fn used_idx(&self) -> &AtomicU16 {
        self.at(14)
    }

    fn inflight(&self, head: u16) -> &AtomicU8 {
        self.at(HEADER + ENTRY * usize::from(head))
    }

    fn next(&self, head: u16) -> &AtomicU16 {
        self.at(HEADER + ENTRY * usize::from(head) + 6)
    }

    fn counter(&self, head: u16) -> &AtomicU64 {
        self.at(HEADER + ENTRY * usize::from(head) + 8)
    }

    /// The chains in flight, in the order in which they were taken, for a ring of `size` entries at used index `used`.
    fn recover(&self, size: u16, used: u16) -> Vec<u16> {
        if self.version().load(Ordering::Relaxed) != VERSION {
            self.desc_num().store(self.entries, Ordering::Relaxed);
            self.used_idx().store(used, Ordering::Relaxed);
            self.version().store(VERSION, Ordering::Release);
            return Vec::new();
        }
        // The back end ended between showing the driver a batch and clearing the marks of its chains.
        let batch = used.wrapping_sub(self.used_idx().load(Ordering::Relaxed));
        if batch <= size {
            let mut head = self.last_batch_head().load(Ordering::Relaxed);
            for _ in 0..batch {
                if head >= self.entries {
                    break;
                }
                self.inflight(head).store(0, Ordering::Relaxed);
                head = self.next(head).load(Ordering::Relaxed);
            }
        }
        self.used_idx().store(used, Ordering::Release);
        let marked = (0..size).filter(|&head| self.inflight(head).load(Ordering::Relaxed) == 1);
        let mut chains: Vec<_> = marked.map(|head| (self.counter(head).load(Ordering::Relaxed), head)).collect();
        chains.sort_unstable();
        chains.into_iter().map(|(_, head)| head).collect()
    }
}

/// The in-flight state of a running split queue.
#[derive(Debug)]
pub(crate) struct SplitInflight {
    part: Part,
    /// The chains of the back end before us that are still to be given back, in their order. They are taken at the positions
    /// from `start` on, in place of what the available ring has there.
    again: Vec<u16>,
    start: u16,
}

impl SplitInflight {
    /// For a ring of `size` entries, whose used index is `used`.
    pub(crate) fn new(part: Part, size: u16, used: u16) -> Self {
        let again = part.recover(size, used);
        if !again.is_empty() {
            tracing::info!("{} chains were in flight, and are taken again", again.len());
        }
        Self { part, again, start: used }
    }

    /// Whether chains are still to be taken again.
    pub(crate) fn has_again(&self) -> bool {
        !self.again.is_empty()
    }

    /// The head of the chain that is taken again at position `at`. It is out of the front end's region, and not checked.
    #[inline]
    pub(crate) fn again(&self, at: u16) -> Option<u16> {
        self.again.get(usize::from(at.wrapping_sub(self.start))).copied()
    }

    /// Before the used index goes from `from` to `to`: the chains that go back are linked, so that their marks can be
    /// cleared by the back end that serves the ring next.
    pub(crate) fn before(&self, ring: &SplitRing, from: u16, to: u16) {
        if !self.has_again() {
            return;
        }
        for head in given_back(ring, from, to).filter(|&head| head < self.part.entries) {
            let last = self.part.last_batch_head().load(Ordering::Relaxed);
            self.part.next(head).store(last, Ordering::Relaxed);
            self.part.last_batch_head().store(head, Ordering::Release);
        }
    }

    /// After the used index went from `from` to `to`; the next chain is at `next`.
    pub(crate) fn after(&mut self, ring: &SplitRing, from: u16, to: u16, next: u16) {
        if self.has_again() {
            for head in given_back(ring, from, to).filter(|&head| head < self.part.entries) {
                self.part.inflight(head).store(0, Ordering::Relaxed);
            }
            if usize::from(next.wrapping_sub(self.start)) >= self.again.len() {
                self.again = Vec::new();
            }
        }
        self.part.used_idx().store(to, Ordering::Release);
    }
}

/// The heads in the used ring from `from` to `to`.
fn given_back(ring: &SplitRing, from: u16, to: u16) -> impl Iterator<Item = u16> {
    (0..to.wrapping_sub(from)).filter_map(move |n| u16::try_from(ring.used_entry(from.wrapping_add(n)).0).ok())
}
