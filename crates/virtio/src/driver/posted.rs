//! The buffers of a receive ring: which of them the device has, and what their descriptors point to.
//!
//! All buffers of a ring have the same number of segments, K. A buffer has K descriptors in a row, which are chained once, when
//! the ring is made. Only their addresses change later. The number of a buffer is the index of its first descriptor:
//!
//! ```text
//!   descriptor   0 ──► 1 ──► 2    3 ──► 4 ──► 5    6 ──► 7 ──► 8    9        K = 3, a ring of 10
//!   buffer       0                3                6                unused
//! ```

use super::receive::BATCH;
use super::ring::DriverRing;
use crate::virtqueue::fault::DeviceFault;

/// What a ring keeps for a buffer.
pub(super) trait Slot: Default {
    /// Whether the device has the memory. A slot may hold memory and not be posted.
    fn is_posted(&self) -> bool;
    fn set_posted(&mut self, posted: bool);
}

/// See the module.
pub(super) struct Posted<S> {
    ring: DriverRing,
    /// By number of the buffer, and so some are never used if buffers have several segments. A slot is either posted or on
    /// the free list.
    slots: Box<[S]>,
    /// Numbers of the buffers that the device does not have, the oldest first.
    free: Vec<u16>,
    /// Addresses that descriptors are to point to, while [`post`](Self::post) collects them.
    moves: Vec<(u16, u64)>,
    /// Descriptors of a buffer.
    segments: u16,
    /// Bytes in a buffer.
    len: u32,
}

impl<S: Slot> Posted<S> {
    /// As many buffers as the ring has room for, with segments of these lengths. None of them is posted.
    pub(super) fn new(ring: DriverRing, lens: &[u32]) -> Self {
        describe(&ring, lens);
        let segments = lens.len() as u16;
        let mut this = Self {
            slots: (0..ring.size()).map(|_| S::default()).collect(),
            free: Vec::with_capacity(usize::from(ring.size() / segments)),
            moves: Vec::with_capacity(usize::from(BATCH * segments)),
            segments,
            len: lens.iter().sum(),
            ring,
        };
        this.free_all();
        this
    }

    fn free_all(&mut self) {
        self.free.clear();
        self.free.extend((0..self.ring.size() / self.segments).map(|i| i * self.segments));
    }

    /// Goes on with a new ring of the same size, in which nothing is posted. `place` says where the segments of a slot are.
    pub(super) fn adopt<P: Fn(&S, &mut dyn FnMut(u16, u64))>(&mut self, ring: DriverRing, lens: &[u32], place: P) {
        self.ring = ring;
        describe(&self.ring, lens);
        self.free_all();
        for &id in &self.free {
            let slot = &mut self.slots[usize::from(id)];
            slot.set_posted(false);
            place(slot, &mut |segment, addr| self.ring.point(id + segment, addr));
        }
    }

    pub(super) fn ring(&self) -> &DriverRing {
        &self.ring
    }

    pub(super) fn ring_mut(&mut self) -> &mut DriverRing {
        &mut self.ring
    }

    /// Buffers that the ring has room for.
    pub(super) fn room(&self) -> usize {
        usize::from(self.ring.size() / self.segments)
    }

    /// Buffers that the device has.
    pub(super) fn count(&self) -> usize {
        self.room() - self.free.len()
    }

    pub(super) fn slots(&mut self) -> impl Iterator<Item = &mut S> {
        self.slots.iter_mut()
    }

    #[inline]
    pub(super) fn slot(&mut self, id: u16) -> &mut S {
        &mut self.slots[usize::from(id)]
    }

    #[inline]
    pub(super) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Buffers that the device has used and that were not taken yet.
    #[inline]
    pub(super) fn pending(&self) -> Result<u16, DeviceFault> {
        self.ring.pending()
    }

    /// The slot of the `i`th of them, as far as the device's word can be believed: for a prefetch.
    #[inline]
    pub(super) fn peek(&self, i: u16) -> Option<&S> {
        self.slots.get(self.ring.used(i).0 as usize)
    }

    /// Takes the next used buffer: its number, how many bytes the device has written, and its slot, which is free from then
    /// on.
    #[inline(always)]
    pub(super) fn take(&mut self) -> Result<(u16, u32, &mut S), DeviceFault> {
        let (id, len) = self.ring.used(0);
        let Some(slot) = self.slots.get_mut(id as usize).filter(|slot| slot.is_posted()) else {
            return Err(not_posted(id, self.segments, self.ring.size() / self.segments));
        };
        slot.set_posted(false);
        self.ring.consume(1);
        self.free.push(id as u16);
        Ok((id as u16, DeviceFault::length(len, self.len)?, slot))
    }

    /// Posts up to a batch of buffers, the ones that have been free for longest. `fill` completes the memory of a slot and
    /// says where segments are that have moved; it returns false if there is no memory. Returns how many buffers were posted.
    ///
    /// Memory first, descriptors after: the stores that wait for the device to let go of a cache line are then next to each
    /// other and wait together.
    ///
    /// If `fill` panics, nothing is posted. Descriptors are written nevertheless, so that none keeps the address of a page
    /// that its slot does not have any more.
    #[inline(always)]
    pub(super) fn post(&mut self, mut fill: impl FnMut(&mut S, &mut Place<'_>) -> bool) -> usize {
        let moves = Moves { ring: &self.ring, moves: &mut self.moves };
        let mut n = 0;
        for &id in self.free.iter().take(BATCH.into()) {
            if !fill(&mut self.slots[usize::from(id)], &mut Place { moves: moves.moves, id }) {
                break;
            }
            n += 1;
        }
        drop(moves);
        self.ring.expose_all(&self.free[..n]);
        for &id in &self.free[..n] {
            self.slots[usize::from(id)].set_posted(true);
        }
        // The oldest were posted, so that numbers keep their places in the ring.
        self.free.drain(..n);
        n
    }

    /// Lets the device see what was posted.
    #[inline]
    pub(super) fn publish(&self) {
        self.ring.publish();
    }

    /// Wakes the device if it sleeps.
    #[inline]
    pub(super) fn notify(&mut self) {
        self.ring.notify();
    }
}

/// Takes the addresses of a buffer's segments.
pub(super) struct Place<'m> {
    moves: &'m mut Vec<(u16, u64)>,
    id: u16,
}

impl Place<'_> {
    /// This segment is at `addr`, and was elsewhere when the buffer was posted last.
    #[inline(always)]
    pub(super) fn at(&mut self, segment: u16, addr: u64) {
        self.moves.push((self.id + segment, addr));
    }
}

/// Writes the addresses when it is dropped.
struct Moves<'p> {
    ring: &'p DriverRing,
    moves: &'p mut Vec<(u16, u64)>,
}

impl Drop for Moves<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        for (id, addr) in self.moves.drain(..) {
            self.ring.point(id, addr);
        }
    }
}

/// The device has used buffer `id`, and does not have it. The ring has `buffers` of them, numbered by `stride`.
#[cold]
fn not_posted(id: u32, stride: u16, buffers: u16) -> DeviceFault {
    let exists = id.is_multiple_of(stride.into()) && id / u32::from(stride) < buffers.into();
    let judged = DeviceFault::id(id, if exists { id as usize + 1 } else { 0 });
    let refused = judged.and_then(|id| DeviceFault::posted(id, None::<DeviceFault>));
    refused.unwrap_or_else(|fault| fault)
}

/// Describes as many buffers as the ring has room for, with no memory yet.
fn describe(ring: &DriverRing, lens: &[u32]) {
    let segments = lens.len() as u16;
    for id in 0..ring.size() / segments * segments {
        let next = Some(id + 1).filter(|next| !next.is_multiple_of(segments));
        ring.describe(id, 0, lens[usize::from(id % segments)], true, next);
    }
}
