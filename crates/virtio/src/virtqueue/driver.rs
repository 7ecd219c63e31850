//! The driver's end of a virtqueue: buffers are posted to the device in batches and come back in batches.
//!
//! A queue owns its buffers by *slot*. A buffer stays in its slot while the device has it, and may stay there afterwards: a
//! buffer that is posted again unchanged costs no store that the device would have to see, except the entry that makes it
//! available.
//!
//! There are two kinds of queues:
//!
//! * A [*shaped*](DriverQueue::shaped) one, for receiving: every buffer consists of the same writable segments (one page, a
//!   chain of pages, a host part and a device page). [`refill`](DriverQueue::refill) posts all free slots that the caller can
//!   fill, oldest first.
//! * A [free](DriverQueue::new) one, for sending and for commands: each buffer has its own segments.
//!   [`post`](DriverQueue::post) puts one into the slot that is [`vacant`](DriverQueue::vacant). Several segments become a
//!   chain of descriptors, or a table in [`Tables`] where that was negotiated.
//!
//! Nothing that the driver wrote is read back from the ring: heads, addresses and positions have private copies. What the
//! device writes is read once and judged by [`fault`](super::fault); after a fault the caller stops the queue.
//!
//! User code runs between two operations, and may panic. A slot counts as posted only after it was exposed, and an address is
//! written to the ring after the last call of user code in a batch. So a panic leaves no slot exposed twice, and no slot that
//! is exposed with an address of a buffer that it does not have any more.

mod packed;
mod split;
#[cfg(all(test, not(loom)))]
mod tests;

pub(crate) use packed::Packed;
pub(crate) use split::Split;

use super::fault::DeviceFault;
use super::sync::{AtomicU64, Ordering};
use super::{Armed, DESC_NEXT, DESC_WRITE, Negotiated, PackedRing, SplitRing};

/// The most buffers that one [`refill`](DriverQueue::refill) step posts.
const BATCH: usize = 64;
/// Used buffers that [`pending`](DriverQueue::pending) looks for in a shaped queue. More than a batch and the longest frame,
/// so that a frame that begins in a batch is seen whole.
const LOOK: usize = 2 * BATCH;

/// A part of a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    /// Its address, as the device knows it.
    pub(crate) addr: u64,
    /// Bytes, not 0: many devices refuse empty ones.
    pub(crate) len: u32,
    /// Whether the device writes it, or reads it.
    pub(crate) writable: bool,
}

impl Segment {
    /// A segment that the device reads.
    pub(crate) fn read(addr: u64, len: u32) -> Self {
        Self { addr, len, writable: false }
    }
}

/// Memory for one table of descriptors for each slot of a queue, which the device sees.
///
/// Invariant: `words` is valid for reads and writes of `2 * per_slot` words for each slot of the queue, for as long as the
/// value exists.
#[derive(Debug)]
pub(crate) struct Tables {
    words: *const AtomicU64,
    /// The address of the first word, as the device knows it.
    addr: u64,
    /// Descriptors in each table.
    per_slot: u16,
}

// SAFETY: the words are shared by design and touched through atomics alone.
unsafe impl Send for Tables {}

impl Tables {
    /// Bytes of a descriptor in a table.
    pub(crate) const ENTRY: usize = 16;

    /// # Safety
    ///
    /// The caller upholds the invariant, see the type; `base` is aligned to 8 bytes.
    pub(crate) unsafe fn new(base: *mut u8, addr: u64, per_slot: u16) -> Self {
        Self { words: base.cast(), addr, per_slot }
    }

    /// Writes `segments` into the table of `slot`: their addresses, and what `rest` makes of the others words of the
    /// descriptor, given its number and whether it is the last. Returns the table's address and length in bytes.
    fn write(
        &self,
        slot: u16,
        segments: impl Iterator<Item = Segment>,
        rest: impl Fn(u16, Segment, bool) -> u64,
    ) -> (u64, u32) {
        let first = usize::from(slot) * usize::from(self.per_slot);
        let mut segments = segments.take(usize::from(self.per_slot)).peekable();
        let mut n = 0;
        while let Some(segment) = segments.next() {
            let at = 2 * (first + usize::from(n));
            // SAFETY: the type's invariant; `n` is below `per_slot`.
            let [addr, other] = unsafe { [&*self.words.add(at), &*self.words.add(at + 1)] };
            addr.store(segment.addr.to_le(), Ordering::Relaxed);
            other.store(rest(n, segment, segments.peek().is_none()).to_le(), Ordering::Relaxed);
            n += 1;
        }
        (self.addr + (first * Self::ENTRY) as u64, u32::from(n) * Self::ENTRY as u32)
    }
}

/// The words of a ring in either format.
#[derive(Debug)]
pub(crate) enum AnyRing {
    /// A split ring.
    Split(SplitRing),
    /// A packed ring.
    Packed(PackedRing),
}

/// What both formats are made with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    negotiated: Negotiated,
    /// Descriptors of each slot in a shaped queue; 0 in a free one.
    per_slot: u16,
}

/// The segments that every buffer of a shaped queue has, and where they are.
#[derive(Debug, Default)]
pub(crate) struct Shape {
    /// The bytes of each segment.
    lens: Box<[u32]>,
    /// The addresses of all segments, slot by slot.
    addrs: Box<[u64]>,
}

impl Shape {
    #[inline(always)]
    fn addrs(&self, slot: u16) -> &[u64] {
        let n = self.lens.len();
        &self.addrs[usize::from(slot) * n..][..n]
    }

    /// The flags of segment `i`, without those of a format.
    #[inline(always)]
    fn flags(&self, i: usize) -> u16 {
        if i + 1 < self.lens.len() { DESC_WRITE | DESC_NEXT } else { DESC_WRITE }
    }
}

/// The slots (or, in a split ring, descriptors) that the device does not have. Ring buffer of as many places as a power of two.
#[derive(Debug)]
pub(crate) struct Free {
    ids: Box<[u16]>,
    head: u16,
    len: u16,
    /// Whether the oldest is taken next, or the one that was freed last, which is in the cache.
    oldest_first: bool,
}

impl Free {
    fn new(count: u16, oldest_first: bool) -> Self {
        let places = count.max(1).next_power_of_two();
        let mut this = Self { ids: vec![0; usize::from(places)].into(), head: 0, len: 0, oldest_first };
        this.reset(count);
        this
    }

    /// All are free.
    fn reset(&mut self, count: u16) {
        (self.head, self.len) = (0, 0);
        for id in 0..count {
            self.push(if self.oldest_first { id } else { count - 1 - id });
        }
    }

    #[inline(always)]
    fn place(&self, n: u16) -> usize {
        usize::from(self.head.wrapping_add(n)) & (self.ids.len() - 1)
    }

    /// Up to `most` of the oldest, which lie next to each other. None if none is free.
    #[inline(always)]
    fn oldest(&self, most: usize) -> &[u16] {
        let oldest = &self.ids[self.place(0)..];
        &oldest[..most.min(usize::from(self.len)).min(oldest.len())]
    }

    /// Takes the `n` oldest.
    #[inline(always)]
    fn skip(&mut self, n: u16) {
        self.head = self.head.wrapping_add(n);
        self.len -= n;
    }

    /// The next to be taken.
    #[inline(always)]
    fn next(&self) -> Option<u16> {
        let n = if self.oldest_first { 0 } else { self.len.wrapping_sub(1) };
        (self.len > 0).then(|| self.ids[self.place(n)])
    }

    #[inline(always)]
    fn pop(&mut self) -> Option<u16> {
        let id = self.next()?;
        if self.oldest_first {
            self.head = self.head.wrapping_add(1);
        }
        self.len -= 1;
        Some(id)
    }

    #[inline(always)]
    fn push(&mut self, id: u16) {
        let at = self.place(self.len);
        self.ids[at] = id;
        self.len += 1;
    }
}

/// A ring format, seen from the driver: how buffers are described to the device and how used ones are found. Slots are the
/// queue's; what is not judged here is judged there.
pub(crate) trait DriverFormat: Sized {
    /// The words.
    type Ring;

    /// A format on `ring`, which is all zero. It wants no notifications.
    fn new(ring: Self::Ring, setup: Setup, shape: &Shape, tables: Option<Tables>) -> Self;

    /// The ring's entries.
    fn size(&self) -> u16;

    /// Descriptors that are not in use. `free` are the free slots.
    fn room(&self, free: &Free) -> usize;

    /// Descriptors that a buffer of `segments` takes, or None if no buffer can have so many.
    fn takes(&self, segments: usize) -> Option<usize>;

    /// The addresses of `slot` have changed.
    fn point(&mut self, slot: u16, shape: &Shape);

    /// Makes shaped buffers available at the next [`publish`](Self::publish).
    fn expose(&mut self, slots: &[u16], shape: &Shape);

    /// Takes `free`'s next slot, and what else it needs, for a buffer of `segments`, and makes it available at the next
    /// [`publish`](Self::publish). The caller has seen that there is room.
    fn post(&mut self, segments: impl Iterator<Item = Segment>, free: &mut Free) -> Option<u16>;

    /// Lets the device see what was made available.
    fn publish(&mut self);

    /// See [`DriverQueue::should_notify`].
    fn should_notify(&mut self) -> bool;

    /// Buffers that the device has used and that were not consumed. A format that has to walk for it stops at `most`.
    fn pending(&mut self, most: usize, posted: u16) -> Result<u16, DeviceFault>;

    /// The slot of the `i`th of them, or another one if the device lies.
    fn peek(&self, i: u16) -> Option<u32>;

    /// The slot whose buffer the ring calls `id`, if it is the name of one; the number may be too large.
    fn slot(&self, id: u32) -> Option<u32>;

    /// The ring's id and the length of the next one, as the device claims them. A buffer that a batch skips was used
    /// completely: all of its `have` bytes.
    fn front(&mut self, have: u32) -> Result<(u32, u32), DeviceFault>;

    /// The next one, which is the buffer in `slot`, is done with.
    fn consume(&mut self, slot: u16, free: &mut Free);

    /// See [`DriverQueue::arm`].
    fn arm(&mut self) -> Armed;

    /// See [`DriverQueue::disarm`].
    fn disarm(&mut self);
}

struct Slot<B> {
    buffer: B,
    /// Whether the device has it.
    posted: bool,
    /// Whether the addresses have changed since they were last written to the ring.
    changed: bool,
}

/// The addresses of the buffer that [`DriverQueue::refill`] is about to post.
pub(crate) struct Segments<'q> {
    /// Those of all slots.
    addrs: &'q mut [u64],
    /// Where those of this slot begin.
    first: usize,
    changed: &'q mut bool,
}

impl Segments<'_> {
    /// Segment `i` is at `addr`. To be said of each that is elsewhere than when its slot was filled last.
    #[inline(always)]
    pub(crate) fn set(&mut self, i: usize, addr: u64) {
        self.addrs[self.first + i] = addr;
        *self.changed = true;
    }
}

/// See the [module](self).
pub(crate) struct DriverQueue<F, B> {
    format: F,
    setup: Setup,
    slots: Box<[Slot<B>]>,
    free: Free,
    shape: Shape,
    /// Bytes that a buffer of a shaped queue holds; of a free one, whose lengths are not judged, the most that a length can be.
    have: u32,
    /// Buffers that the device has.
    posted: u16,
    /// What [`pending`](Self::pending) looks for at most.
    most: usize,
}

impl<F: DriverFormat, B: Default> DriverQueue<F, B> {
    /// A queue on `ring`, which is all zero, whose buffers all consist of writable segments of these lengths. It has a slot for
    /// each buffer that fits into the ring.
    pub(crate) fn shaped(ring: F::Ring, negotiated: Negotiated, lens: &[u32]) -> Self {
        let shape = Shape { lens: lens.into(), addrs: Box::default() };
        Self::made(ring, Setup { negotiated, per_slot: lens.len() as u16 }, shape, None)
    }

    /// A queue on `ring`, which is all zero, whose buffers each have their own segments. Buffers of several are described in
    /// `tables`, if there are any.
    pub(crate) fn new(ring: F::Ring, negotiated: Negotiated, tables: Option<Tables>) -> Self {
        Self::made(ring, Setup { negotiated, per_slot: 0 }, Shape::default(), tables)
    }

    fn made(ring: F::Ring, setup: Setup, mut shape: Shape, tables: Option<Tables>) -> Self {
        let format = F::new(ring, setup, &shape, tables);
        let size = format.size();
        let count = size / setup.per_slot.max(1);
        let shaped = setup.per_slot > 0;
        // Where completions come in order, a driver of a split ring has to use descriptors in the order of the table.
        let free = Free::new(count, shaped || setup.negotiated.in_order());
        shape.addrs = vec![0; usize::from(count) * shape.lens.len()].into();
        let have = if shaped { shape.lens.iter().sum() } else { u32::MAX };
        let slot = |_| Slot { buffer: B::default(), posted: false, changed: false };
        let slots = (0..count).map(slot).collect();
        let most = if shaped { LOOK } else { usize::from(size) };
        Self { format, setup, slots, free, shape, have, posted: 0, most }
    }
}

impl<F: DriverFormat, B> DriverQueue<F, B> {
    /// Goes on with another ring, which is all zero: that of a new connection, or the old one after it was cleared. Nothing is
    /// posted there. Buffers stay in their slots, and the next [`refill`](Self::refill) describes those of a shaped queue
    /// to the device.
    pub(crate) fn replace(&mut self, ring: F::Ring, tables: Option<Tables>) {
        self.format = F::new(ring, self.setup, &self.shape, tables);
        for slot in &mut self.slots {
            (slot.posted, slot.changed) = (false, true);
        }
        self.posted = 0;
        self.free.reset(self.slots.len() as u16);
    }

    /// Entries in the ring.
    pub(crate) fn size(&self) -> u16 {
        self.format.size()
    }

    /// Buffers that the device has.
    #[inline]
    pub(crate) fn posted(&self) -> usize {
        usize::from(self.posted)
    }

    /// The buffer in `slot`.
    #[inline(always)]
    pub(crate) fn buffer(&mut self, slot: u16) -> &mut B {
        &mut self.slots[usize::from(slot)].buffer
    }

    /// All buffers, and whether the device has them.
    pub(crate) fn slots(&mut self) -> impl Iterator<Item = (bool, &mut B)> {
        self.slots.iter_mut().map(|slot| (slot.posted, &mut slot.buffer))
    }

    /// Whether there are slots to [`refill`](Self::refill).
    #[inline(always)]
    pub(crate) fn has_free(&self) -> bool {
        self.free.len > 0
    }

    /// Posts up to a batch of buffers of a shaped queue, in the slots that have been free for the longest time. `fill` is given
    /// what is in the slot and says where the segments are that have moved since the slot was last filled. If it has no memory
    /// it answers false, and the step ends. Returns how many buffers were posted; the device sees them after
    /// [`publish`](Self::publish).
    ///
    /// Buffers first, ring after: the stores that wait for the device to let go of a cache line are then next to each other
    /// and wait together.
    ///
    /// If `fill` panics, nothing of the batch is posted, and the next call continues with what is in the slots.
    #[inline(always)]
    pub(crate) fn refill(&mut self, mut fill: impl FnMut(&mut B, &mut Segments<'_>) -> bool) -> usize {
        let Self { format, slots, free, shape, .. } = self;
        let n = shape.lens.len();
        let oldest = free.oldest(BATCH);
        let mut got = 0;
        for &id in oldest {
            let slot = &mut slots[usize::from(id)];
            let (addrs, first, changed) = (&mut shape.addrs[..], usize::from(id) * n, &mut slot.changed);
            if !fill(&mut slot.buffer, &mut Segments { addrs, first, changed }) {
                break;
            }
            got += 1;
        }
        let batch = &oldest[..got];
        for &id in batch {
            let slot = &mut slots[usize::from(id)];
            slot.posted = true;
            if std::mem::take(&mut slot.changed) {
                format.point(id, shape);
            }
        }
        format.expose(batch, shape);
        free.skip(got as u16);
        self.posted += got as u16;
        got
    }

    /// Whether a buffer of so many segments can be posted now.
    #[inline(always)]
    pub(crate) fn fits(&self, segments: usize) -> bool {
        self.format.takes(segments).is_some_and(|n| n <= self.format.room(&self.free))
    }

    /// Whether a buffer of so many segments can be posted at any time.
    pub(crate) fn ever_fits(&self, segments: usize) -> bool {
        self.format.takes(segments).is_some_and(|n| n <= usize::from(self.size()))
    }

    /// The slot of a free queue that is posted next. Its buffer is put there before [`post`](Self::post).
    #[inline(always)]
    pub(crate) fn vacant(&self) -> Option<u16> {
        self.free.next()
    }

    /// Posts the buffer in the [vacant](Self::vacant) slot. `segments` tells its segments, of which there is one at least, and
    /// for which there is [room](Self::fits). The device sees it after [`publish`](Self::publish).
    #[inline(always)]
    pub(crate) fn post<'q, I: Iterator<Item = Segment>>(&'q mut self, segments: impl FnOnce(&'q B) -> I) {
        let Some(vacant) = self.vacant() else { return };
        let slot = &mut self.slots[usize::from(vacant)];
        slot.posted = true;
        self.posted += 1;
        let posted = self.format.post(segments(&slot.buffer), &mut self.free);
        debug_assert_eq!(posted, Some(vacant));
    }

    /// Lets the device see what was posted. A device that polls needs no more; one that sleeps is
    /// [notified](Self::should_notify).
    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        self.format.publish();
    }

    /// Whether the device wants a notification for what was published since the last call: the caller then signals the ring's
    /// kick. To be called once a poll, before a thread waits for what was published: it executes a full fence, see
    /// [`event`](super::event).
    #[inline]
    pub(crate) fn should_notify(&mut self) -> bool {
        self.format.should_notify()
    }

    /// How many buffers the device has used and [`take`](Self::take) has not given back. Of a shaped packed queue it counts
    /// 128 and then stops.
    #[inline(always)]
    pub(crate) fn pending(&mut self) -> Result<u16, DeviceFault> {
        self.format.pending(self.most, self.posted)
    }

    /// All buffers that the device has used and [`take`](Self::take) has not given back, for a queue that stops.
    pub(crate) fn unread(&mut self) -> u16 {
        self.format.pending(usize::from(self.size()), self.posted).unwrap_or(0)
    }

    /// The buffer of the `i`th pending one, or another one if the device lies: for prefetches.
    #[inline(always)]
    pub(crate) fn peek(&self, i: u16) -> Option<&B> {
        self.slots.get(self.format.peek(i)? as usize).map(|slot| &slot.buffer)
    }

    /// Takes the next pending buffer back: its slot, how many bytes the device has written to it, both judged, and the buffer. The
    /// slot is free then.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Result<(u16, u32, &mut B), DeviceFault> {
        let (id, len) = self.format.front(self.have)?;
        let number = self.format.slot(id).filter(|&n| (n as usize) < self.slots.len());
        let number = number.ok_or(DeviceFault::BadId { id })?;
        let slot = &mut self.slots[number as usize];
        if !slot.posted {
            return DeviceFault::posted(id as u16, None);
        }
        slot.posted = false;
        self.posted -= 1;
        self.format.consume(number as u16, &mut self.free);
        Ok((number as u16, DeviceFault::length(len, self.have)?, &mut slot.buffer))
    }

    /// Asks the device for an interrupt at the next used buffer and looks at the ring once more. If there is work, the queue is
    /// disarmed again.
    pub(crate) fn arm(&mut self) -> Armed {
        self.format.arm()
    }

    /// Asks the device for no interrupts: the driver polls.
    pub(crate) fn disarm(&mut self) {
        self.format.disarm();
    }
}

/// A queue in the format that was negotiated. A caller looks once a poll which it is.
pub(crate) enum AnyDriverQueue<B> {
    /// On a split ring.
    Split(DriverQueue<Split, B>),
    /// On a packed ring.
    Packed(DriverQueue<Packed, B>),
}

/// Evaluates an expression on the queue, whichever format it has.
macro_rules! with_queue {
    ($any:expr, $queue:ident => $e:expr) => {
        match $any {
            $crate::virtqueue::driver::AnyDriverQueue::Split($queue) => $e,
            $crate::virtqueue::driver::AnyDriverQueue::Packed($queue) => $e,
        }
    };
}
pub(crate) use with_queue;

impl<B: Default> AnyDriverQueue<B> {
    /// See [`DriverQueue::shaped`].
    pub(crate) fn shaped(ring: AnyRing, negotiated: Negotiated, lens: &[u32]) -> Self {
        match ring {
            AnyRing::Split(ring) => Self::Split(DriverQueue::shaped(ring, negotiated, lens)),
            AnyRing::Packed(ring) => Self::Packed(DriverQueue::shaped(ring, negotiated, lens)),
        }
    }

    /// See [`DriverQueue::new`].
    pub(crate) fn new(ring: AnyRing, negotiated: Negotiated, tables: Option<Tables>) -> Self {
        match ring {
            AnyRing::Split(ring) => Self::Split(DriverQueue::new(ring, negotiated, tables)),
            AnyRing::Packed(ring) => Self::Packed(DriverQueue::new(ring, negotiated, tables)),
        }
    }
}

impl<B> AnyDriverQueue<B> {
    /// See [`DriverQueue::replace`]. The ring is of the same format, because a device is connected anew with the same features.
    pub(crate) fn replace(&mut self, ring: AnyRing, tables: Option<Tables>) {
        match (self, ring) {
            (Self::Split(queue), AnyRing::Split(ring)) => queue.replace(ring, tables),
            (Self::Packed(queue), AnyRing::Packed(ring)) => queue.replace(ring, tables),
            _ => unreachable!("the format is one of the features, which stay"),
        }
    }

    /// See [`DriverQueue::posted`].
    pub(crate) fn posted(&self) -> usize {
        with_queue!(self, queue => queue.posted())
    }

    /// The most buffers that the device can have at a time.
    pub(crate) fn holds(&self) -> usize {
        with_queue!(self, queue => queue.slots.len())
    }

    /// See [`DriverQueue::unread`].
    pub(crate) fn unread(&mut self) -> u16 {
        with_queue!(self, queue => queue.unread())
    }

    /// See [`DriverQueue::arm`].
    pub(crate) fn arm(&mut self) -> Armed {
        with_queue!(self, queue => queue.arm())
    }

    /// See [`DriverQueue::disarm`].
    pub(crate) fn disarm(&mut self) {
        with_queue!(self, queue => queue.disarm());
    }
}
