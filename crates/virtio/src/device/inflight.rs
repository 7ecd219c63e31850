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
pub(super) struct Part {
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

/// The in-flight state of a running queue.
#[derive(Debug)]
pub(super) struct Inflight {
    part: Part,
    /// While chains of the back end before us are still to be given back.
    again: Option<Again>,
}

/// An available ring in private memory: first the chains that are taken again, then what the driver's ring has behind
/// them. The queue reads it in place of the driver's, and so need not know.
#[derive(Debug)]
struct Again {
    avail: Vec<AtomicU16>,
    /// The driver's ring.
    real: SplitRing,
    /// The position behind the last chain that is taken again.
    end: u16,
    /// The position behind the last entry in `avail`.
    filled: u16,
}

impl Again {
    /// The driver's ring with the private available ring in the place of its own.
    fn ring(&self) -> SplitRing {
        // SAFETY: the array has a flags word, an index, `size` entries and an event, and lives as long as the ring is in
        // use: the queue drops or replaces the ring before `Again`.
        unsafe { self.real.with_avail(self.avail.as_ptr()) }
    }

    /// Takes over what the driver has made available since.
    fn follow(&mut self, ring: &SplitRing, next_avail: u16) {
        let to = self.real.avail_idx();
        let size = ring.size();
        if to.wrapping_sub(next_avail) <= size && to.wrapping_sub(self.filled) <= size {
            while self.filled != to {
                ring.set_avail_entry(self.filled, self.real.avail_entry(self.filled));
                self.filled = self.filled.wrapping_add(1);
            }
        }
        // A jump is shown as it is, for the queue to find.
        ring.set_avail_flags(self.real.avail_flags());
        ring.set_used_event(self.real.used_event());
        ring.set_avail_idx(to);
    }
}

impl Inflight {
    /// Takes over `ring`, whose used index is `used`. Returns the ring to read from in its place.
    pub(super) fn new(part: Part, ring: SplitRing, used: u16) -> (Self, SplitRing) {
        let chains = part.recover(ring.size(), used);
        if chains.is_empty() {
            return (Self { part, again: None }, ring);
        }
        tracing::info!("{} chains were in flight, and are taken again", chains.len());
        let end = used.wrapping_add(chains.len() as u16);
        let avail = (0..3 + ring.size()).map(|_| AtomicU16::new(0)).collect();
        let again = Again { avail, real: ring, end, filled: end };
        let ring = again.ring();
        for (n, &head) in chains.iter().enumerate() {
            ring.set_avail_entry(used.wrapping_add(n as u16), head);
        }
        (Self { part, again: Some(again) }, ring)
    }

    /// The ring lies elsewhere now.
    pub(super) fn moved(&mut self, ring: SplitRing) -> SplitRing {
        match &mut self.again {
            Some(again) => {
                again.real = ring;
                again.ring()
            }
            None => ring,
        }
    }

    /// Before the available index is read.
    pub(super) fn refresh(&mut self, ring: &SplitRing, next_avail: u16) {
        if let Some(again) = &mut self.again {
            again.follow(ring, next_avail);
        }
    }

    /// Before the used index goes from `from` to `to`: the chains that go back are linked, so that their marks can be
    /// cleared by the back end that serves the ring next.
    pub(super) fn before(&self, ring: &SplitRing, from: u16, to: u16) {
        if self.again.is_none() {
            return;
        }
        for head in given_back(ring, from, to).filter(|&head| head < self.part.entries) {
            let last = self.part.last_batch_head().load(Ordering::Relaxed);
            self.part.next(head).store(last, Ordering::Relaxed);
            self.part.last_batch_head().store(head, Ordering::Release);
        }
    }

    /// After the used index went from `from` to `to`. Answers the driver's ring once no chain is left to be taken again.
    pub(super) fn after(&mut self, ring: &SplitRing, from: u16, to: u16, next_avail: u16) -> Option<SplitRing> {
        if self.again.is_some() {
            for head in given_back(ring, from, to).filter(|&head| head < self.part.entries) {
                self.part.inflight(head).store(0, Ordering::Relaxed);
            }
        }
        self.part.used_idx().store(to, Ordering::Release);
        let over = |again: &mut Again| next_avail.wrapping_sub(again.end) <= ring.size();
        self.again.take_if(over).map(|again| again.real)
    }
}

/// The heads in the used ring from `from` to `to`.
fn given_back(ring: &SplitRing, from: u16, to: u16) -> impl Iterator<Item = u16> {
    (0..to.wrapping_sub(from)).filter_map(move |n| u16::try_from(ring.used_entry(from.wrapping_add(n)).0).ok())
}
