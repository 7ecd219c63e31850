//! The driver's end of a virtqueue: buffers are posted to the device, and taken back from it, in batches.
//!
//! A queue owns its buffers by *slot*. A buffer stays in its slot while the device has it, and may stay there
//! afterwards: if a buffer is posted again unchanged, the only store that the device must see is the entry that makes
//! it available.
//!
//! There are two kinds of queues:
//!
//! * A [*shaped*](DriverQueue::shaped) one, for receiving: every buffer consists of the same writable segments (one page, a
//!   chain of pages, a host part and device pages). They are a chain of descriptors, or a table in [`Tables`] where the caller
//!   has one for each slot. [`refill`](DriverQueue::refill) posts all free slots that the caller can fill, oldest first.
//! * A [free](DriverQueue::new) one, for sending and for commands: each buffer has its own segments.
//!   [`post`](DriverQueue::post) puts one into the slot that is [`vacant`](DriverQueue::vacant). Several segments become a
//!   chain of descriptors, or a table in [`Tables`] where that was negotiated.
//!
//! Nothing that the driver wrote is read back from the ring: heads, addresses and positions have private copies. The
//! device's words are read once, for a group of buffers at a time, and checked by [`fault`](super::fault). After a
//! fault the caller stops the queue.
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
use std::collections::VecDeque;

/// The most buffers that one [`refill`](DriverQueue::refill) step posts.
const BATCH: usize = 64;
/// The most used buffers that are read from the ring and not taken yet. This is more than a batch and the longest
/// frame, so that a frame that begins in a batch is read completely.
pub(crate) const LOOK: u16 = 2 * BATCH as u16;

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

    /// Writes `segments` into the table of `slot`: their addresses, and the other word of each descriptor, which `rest`
    /// returns for the descriptor's number and whether it is the last. Returns the table's address and length in bytes.
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

    /// Writes the first `n` of a slot's addresses into its table, which was written before. Not inline: queues whose buffers are one segment
    /// have no tables, and their loop stays short.
    #[inline(never)]
    fn set_addrs(&self, slot: u16, addrs: &[u64], n: u16) {
        let first = usize::from(slot) * usize::from(self.per_slot);
        for (n, addr) in addrs.iter().take(self.per_slot.min(n).into()).enumerate() {
            // SAFETY: the type's invariant; `n` is below `per_slot`.
            unsafe { &*self.words.add(2 * (first + n)) }.store(addr.to_le(), Ordering::Relaxed);
        }
    }

    /// The address and the bytes of the table of `slot`, which has `entries`.
    #[inline(always)]
    fn place(&self, slot: u16, entries: usize) -> (u64, u32) {
        let first = usize::from(slot) * usize::from(self.per_slot);
        (self.addr + (first * Self::ENTRY) as u64, (entries * Self::ENTRY) as u32)
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

/// The parameters with which both formats are made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    negotiated: Negotiated,
    /// Descriptors of each slot in the ring of a shaped queue: 1 where it has a table. 0 in a free one.
    per_slot: u16,
}

impl Setup {
    /// The tables, if the queue is to use them.
    fn tables(self, shape: Shape<'_>, tables: Option<Tables>) -> Option<Tables> {
        tables.filter(|_| usize::from(self.per_slot) != shape.lens.len() || self.per_slot == 0)
    }
}

/// The segments of every buffer of a shaped queue, and their addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape<'q> {
    /// The bytes of each segment.
    lens: &'q [u32],
    /// The addresses of all segments, slot by slot.
    addrs: &'q [u64],
}

impl<'q> Shape<'q> {
    #[inline(always)]
    fn addrs(self, slot: u16) -> &'q [u64] {
        let n = self.lens.len();
        let first = usize::from(slot) * n;
        &self.addrs[first..first + n]
    }

    /// The segments of a slot.
    fn segments(self, slot: u16) -> impl Iterator<Item = Segment> {
        self.addrs(slot).iter().zip(self.lens).map(|(&addr, &len)| Segment { addr, len, writable: true })
    }

    /// The flags of segment `i`, without those of a format.
    #[inline(always)]
    fn flags(self, i: usize) -> u16 {
        if i + 1 < self.lens.len() { DESC_WRITE | DESC_NEXT } else { DESC_WRITE }
    }
}

/// The slots (or, in a split ring, descriptors) that the device does not have. Ring buffer of as many places as a power of two;
/// positions count up, modulo 2^16.
#[derive(Debug)]
pub(crate) struct Free {
    ids: Box<[u16]>,
    /// The oldest.
    head: u16,
    /// Behind the one that was freed last.
    tail: u16,
    /// Whether the oldest is taken next, or the one that was freed last, which is in the cache.
    oldest_first: bool,
}

impl Free {
    fn new(count: u16, oldest_first: bool) -> Self {
        let places = count.max(1).next_power_of_two();
        let mut this = Self { ids: vec![0; usize::from(places)].into(), head: 0, tail: 0, oldest_first };
        this.reset(count);
        this
    }

    /// All are free.
    fn reset(&mut self, count: u16) {
        (self.head, self.tail) = (0, 0);
        for id in 0..count {
            self.push(if self.oldest_first { id } else { count - 1 - id });
        }
    }

    #[inline(always)]
    fn len(&self) -> u16 {
        self.tail.wrapping_sub(self.head)
    }

    #[inline(always)]
    fn place(&self, position: u16) -> usize {
        usize::from(position) & (self.ids.len() - 1)
    }

    /// Up to `most` of the oldest, which are next to each other. Empty if none is free.
    #[inline(always)]
    fn oldest(&self, most: usize) -> &[u16] {
        let oldest = &self.ids[self.place(self.head)..];
        &oldest[..most.min(usize::from(self.len())).min(oldest.len())]
    }

    /// Takes the `n` oldest.
    #[inline(always)]
    fn skip(&mut self, n: u16) {
        self.head = self.head.wrapping_add(n);
    }

    /// The next to be taken.
    #[inline(always)]
    fn next(&self) -> Option<u16> {
        if self.head == self.tail {
            return None;
        }
        Some(self.ids[self.place(if self.oldest_first { self.head } else { self.tail.wrapping_sub(1) })])
    }

    /// Takes the [next](Self::next).
    #[inline(always)]
    fn taken(&mut self) {
        if self.oldest_first {
            self.head = self.head.wrapping_add(1);
        } else {
            self.tail = self.tail.wrapping_sub(1);
        }
    }

    #[inline(always)]
    fn pop(&mut self) -> Option<u16> {
        let id = self.next()?;
        self.taken();
        Some(id)
    }

    #[inline(always)]
    fn push(&mut self, id: u16) {
        let at = self.place(self.tail);
        self.ids[at] = id;
        self.tail = self.tail.wrapping_add(1);
    }
}

/// Used buffers that were read from the ring and not taken yet, oldest first: their slots, and their lengths as the device claims
/// them. Positions count up, modulo 2^16.
pub(crate) struct Found {
    entries: Box<[(u16, u32); LOOK as usize]>,
    head: u16,
    tail: u16,
}

impl Found {
    fn new() -> Self {
        Self { entries: Box::new([(0, 0); LOOK as usize]), head: 0, tail: 0 }
    }

    #[inline(always)]
    fn len(&self) -> u16 {
        self.tail.wrapping_sub(self.head)
    }

    #[inline(always)]
    fn get(&self, i: u16) -> (u16, u32) {
        self.entries[usize::from(self.head.wrapping_add(i) % LOOK)]
    }

    /// Adds up to `most` buffers, and no more than there is room for. They count after [`added`](Self::added).
    #[inline(always)]
    fn adding(&mut self, most: u16) -> Adding<'_> {
        let (first, most) = (self.tail, most.min(LOOK - self.len()));
        Adding { entries: &mut self.entries, at: first, end: first.wrapping_add(most) }
    }

    /// The buffers that were added up to this [position](Adding::at) count.
    #[inline(always)]
    fn added(&mut self, at: u16) {
        self.tail = at;
    }

    /// Takes the first. The caller knows that there is one.
    #[inline(always)]
    fn pop(&mut self) -> (u16, u32) {
        debug_assert!(self.len() > 0, "a buffer that is pending is taken");
        let first = self.get(0);
        self.head = self.head.wrapping_add(1);
        first
    }
}

/// The places of buffers that are added to [`Found`]. Its fields are a loop's own, so that a compiler keeps them in registers.
struct Adding<'f> {
    entries: &'f mut [(u16, u32); LOOK as usize],
    /// The position of the next buffer, and the one behind the last for which there is room.
    at: u16,
    end: u16,
}

impl Adding<'_> {
    #[inline(always)]
    fn has_room(&self) -> bool {
        self.at != self.end
    }

    /// Adds a buffer. The caller has checked that there is room.
    #[inline(always)]
    fn push(&mut self, slot: u16, len: u32) {
        self.entries[usize::from(self.at % LOOK)] = (slot, len);
        self.at = self.at.wrapping_add(1);
    }
}

/// For buffers that are used in order: the slots that the device has, in the order in which they were made available.
struct Order {
    slots: VecDeque<u16>,
    /// The last buffer of a batch of which only a part was found yet, and its length.
    batch: Option<(u16, u32)>,
}

/// A ring format, seen from the driver: how buffers are described to the device and how used ones are found. The queue
/// owns the slots, and checks what the format does not check.
pub(crate) trait DriverFormat: Sized {
    /// The words.
    type Ring;

    /// Entries of a ring.
    fn entries(ring: &Self::Ring) -> u16;

    /// A format on `ring`, which is all zero. It wants no notifications.
    fn new(ring: Self::Ring, setup: Setup, shape: Shape<'_>, tables: Option<Tables>) -> Self;

    /// The ring's entries.
    fn size(&self) -> u16;

    /// Descriptors that are not in use. `free` are the free slots.
    fn room(&self, free: &Free) -> usize;

    /// Descriptors that a buffer of `segments` takes, or None if no buffer can have so many.
    fn takes(&self, segments: usize) -> Option<usize>;

    /// Makes shaped buffers available at the next [`publish`](Self::publish). For each it is given the slot, and how
    /// many of its addresses, from the first on, may have changed since it was last made available.
    fn expose(&mut self, slots: impl ExactSizeIterator<Item = (u16, u16)>, shape: Shape<'_>);

    /// Takes `free`'s next slot, which is `slot`, and what else it needs, for a buffer of `segments`, and makes it
    /// available at the next [`publish`](Self::publish). The caller has checked that there is room.
    fn post(&mut self, slot: u16, segments: impl Iterator<Item = Segment>, free: &mut Free);

    /// Lets the device see what was made available.
    fn publish(&mut self);

    /// See [`DriverQueue::should_notify`].
    fn should_notify(&mut self) -> bool;

    /// Reads used entries, of which each stands for one buffer, until there is no room in `found`, and adds their buffers. The
    /// device has `unread` more buffers than those that were found before. Those before a fault are found. Calls `seen` with the
    /// slot of each buffer that it finds.
    fn look(&mut self, unread: u16, found: &mut Found, seen: impl FnMut(u16)) -> Result<(), DeviceFault>;

    /// For buffers that are used in order: the next used entry, if there is one, and the number of buffers for which it
    /// can stand. The device has `unread` more buffers than those that were found before.
    fn batch(&self, unread: u16) -> Result<Option<(u32, u32, u16)>, DeviceFault>;

    /// Moves the position in the ring behind the buffer in `slot`, which was found in a [`batch`](Self::batch).
    fn skip(&mut self, slot: u16);

    /// The slot of the buffer with this `id` in the ring.
    fn slot(&self, id: u32) -> Result<u16, DeviceFault>;

    /// The id in the ring of the buffer in `slot`.
    fn id(&self, slot: u16) -> u16;

    /// Frees the descriptors of the buffer in `slot`, which the device has used.
    fn release(&mut self, slot: u16, free: &mut Free);

    /// Asks for an interrupt at the next used entry that was not read, and looks whether it is there already.
    fn arm(&mut self) -> Armed;

    /// See [`DriverQueue::disarm`].
    fn disarm(&mut self);
}

struct Slot<B> {
    buffer: B,
    /// Whether the device has it.
    posted: bool,
    /// How many of the addresses, from the first on, may have changed since they were last written to the ring.
    changed: u16,
}

/// The addresses of the buffer that [`DriverQueue::refill`] is about to post.
pub(crate) struct Segments<'q> {
    /// Those of all slots.
    addrs: &'q mut [u64],
    /// The index of the first address of this slot.
    first: usize,
    changed: &'q mut u16,
}

impl Segments<'_> {
    /// Sets the address of segment `i`. Must be called for each segment whose address differs from when its slot was
    /// last filled.
    #[inline(always)]
    pub(crate) fn set(&mut self, i: usize, addr: u64) {
        self.addrs[self.first + i] = addr;
        *self.changed = (*self.changed).max(i as u16 + 1);
    }
}

/// See the [module](self).
pub(crate) struct DriverQueue<F, B> {
    format: F,
    setup: Setup,
    slots: Box<[Slot<B>]>,
    free: Free,
    /// The bytes of each segment of a buffer of a shaped queue.
    lens: Box<[u32]>,
    /// The addresses of all segments of a shaped queue, slot by slot.
    addrs: Box<[u64]>,
    /// The bytes of a buffer of a shaped queue. In a free queue, whose lengths are not checked, the largest possible
    /// length.
    have: u32,
    /// Buffers that the device has.
    posted: u16,
    /// Those of them that it has used, as far as the ring was read.
    found: Found,
    /// The fault that was found after them.
    fault: Option<DeviceFault>,
    /// Set only if buffers are used in order.
    order: Option<Order>,
}

/// A slot that is taken next by [`post`](DriverQueue::post), if nothing else is posted before.
pub(crate) struct Vacant(u16);

impl Vacant {
    /// The slot.
    #[inline(always)]
    pub(crate) fn slot(&self) -> u16 {
        self.0
    }
}

impl<F: DriverFormat, B: Default> DriverQueue<F, B> {
    /// A queue on `ring`, which is all zero, whose buffers all consist of writable segments of these lengths. It has a slot for
    /// each buffer that fits into the ring. Buffers of several segments are described in `tables`, if there are any, and then take one
    /// entry of the ring.
    pub(crate) fn shaped(ring: F::Ring, negotiated: Negotiated, lens: &[u32], tables: Option<Tables>) -> Self {
        let per_slot = if tables.is_some() { 1 } else { lens.len() as u16 };
        Self::made(ring, Setup { negotiated, per_slot }, lens, tables)
    }

    /// A queue on `ring`, which is all zero, whose buffers each have their own segments. Buffers of several are described in
    /// `tables`, if there are any.
    pub(crate) fn new(ring: F::Ring, negotiated: Negotiated, tables: Option<Tables>) -> Self {
        Self::made(ring, Setup { negotiated, per_slot: 0 }, &[], tables)
    }

    fn made(ring: F::Ring, setup: Setup, lens: &[u32], tables: Option<Tables>) -> Self {
        let size = F::entries(&ring);
        let count = size / setup.per_slot.max(1);
        let shaped = setup.per_slot > 0;
        // With in-order use, a driver of a split ring must use descriptors in the order of the table.
        let free = Free::new(count, shaped || setup.negotiated.in_order());
        let addrs: Box<[u64]> = vec![0; usize::from(count) * lens.len()].into();
        let shape = Shape { lens, addrs: &addrs };
        let format = F::new(ring, setup, shape, setup.tables(shape, tables));
        let have = if shaped { lens.iter().sum() } else { u32::MAX };
        let slot = |_| Slot { buffer: B::default(), posted: false, changed: 0 };
        let slots = (0..count).map(slot).collect();
        let order = || Order { slots: VecDeque::with_capacity(count.into()), batch: None };
        let order = setup.negotiated.in_order().then(order);
        let lens = lens.into();
        Self { format, setup, slots, free, lens, addrs, have, posted: 0, found: Found::new(), fault: None, order }
    }
}

impl<F: DriverFormat, B> DriverQueue<F, B> {
    /// Takes another ring, which is all zero: that of a new connection, or the old one after it was cleared. No buffer
    /// is posted there. Buffers stay in their slots, and the next [`refill`](Self::refill) describes those of a shaped
    /// queue to the device.
    pub(crate) fn replace(&mut self, ring: F::Ring, tables: Option<Tables>) {
        let shape = Shape { lens: &self.lens, addrs: &self.addrs };
        self.format = F::new(ring, self.setup, shape, self.setup.tables(shape, tables));
        for slot in &mut self.slots {
            (slot.posted, slot.changed) = (false, self.lens.len() as u16);
        }
        (self.posted, self.found, self.fault) = (0, Found::new(), None);
        if let Some(order) = &mut self.order {
            order.slots.clear();
            order.batch = None;
        }
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
        self.free.len() > 0
    }

    /// Posts up to a batch of buffers of a shaped queue, in the slots that have been free for the longest time. `fill`
    /// is given what is in the slot and says where the segments are that have moved since the slot was last filled. If
    /// it has no memory it returns false, and the step ends. Returns how many buffers were posted; the device sees them
    /// after [`publish`](Self::publish).
    ///
    /// First all buffers are filled, then the ring is written. So the stores that wait until the device's core gives a
    /// cache line up are next to each other, and wait at the same time.
    ///
    /// If `fill` panics, no buffer of the batch is posted, and the next call continues with the contents of the slots.
    #[inline(always)]
    pub(crate) fn refill(&mut self, fill: impl FnMut(&mut B, &mut Segments<'_>) -> bool) -> usize {
        // A compiler sees the 1, and so makes loops over buffers that have no loops over segments in them.
        match self.lens.len() {
            1 => self.refill_segments(1, fill),
            n => self.refill_segments(n, fill),
        }
    }

    /// [`refill`](Self::refill) for buffers of `n` segments.
    #[inline(always)]
    fn refill_segments(&mut self, n: usize, mut fill: impl FnMut(&mut B, &mut Segments<'_>) -> bool) -> usize {
        let Self { format, slots, free, lens, addrs, order, .. } = self;
        let (slots, addrs) = (&mut **slots, &mut **addrs);
        let oldest = free.oldest(BATCH);
        let mut got = 0;
        for &id in oldest {
            let slot = &mut slots[usize::from(id)];
            let (first, changed) = (usize::from(id) * n, &mut slot.changed);
            if !fill(&mut slot.buffer, &mut Segments { addrs, first, changed }) {
                break;
            }
            got += 1;
        }
        let batch = &oldest[..got];
        let exposed = batch.iter().map(|&id| {
            let slot = &mut slots[usize::from(id)];
            slot.posted = true;
            (id, std::mem::take(&mut slot.changed))
        });
        format.expose(exposed, Shape { lens: &lens[..n], addrs });
        if let Some(order) = order {
            order.slots.extend(batch);
        }
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

    /// The slot of a free queue that is posted next, if a buffer of so many segments can be posted now. The buffer is put into the
    /// slot before [`post`](Self::post).
    #[inline(always)]
    pub(crate) fn vacant(&self, segments: usize) -> Option<Vacant> {
        if self.fits(segments) { self.free.next().map(Vacant) } else { None }
    }

    /// Posts the buffer in the vacant slot. `segments` are its segments: at least one, and at most as many as there is
    /// room for. The device sees it after [`publish`](Self::publish).
    #[inline(always)]
    pub(crate) fn post<'q, I: Iterator<Item = Segment>>(
        &'q mut self,
        Vacant(slot): Vacant,
        segments: impl FnOnce(&'q B) -> I,
    ) {
        let at = &mut self.slots[usize::from(slot)];
        at.posted = true;
        self.posted += 1;
        self.format.post(slot, segments(&at.buffer), &mut self.free);
        if let Some(order) = &mut self.order {
            order.slots.push_back(slot);
        }
    }

    /// Lets the device see the posted buffers. A device that sleeps must also be [notified](Self::should_notify).
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

    /// How many buffers the device has used and [`take`](Self::take) has not given back; at most [`LOOK`]. A fault is
    /// reported after the buffers before it were taken.
    #[inline(always)]
    pub(crate) fn pending(&mut self) -> Result<u16, DeviceFault> {
        self.pending_with(|_| ())
    }

    /// [`pending`](Self::pending), which calls `prefetch` with each buffer that was not pending before.
    #[inline(always)]
    pub(crate) fn pending_with(&mut self, prefetch: impl FnMut(&B)) -> Result<u16, DeviceFault> {
        self.look(prefetch);
        match self.fault {
            Some(fault) if self.found.len() == 0 => Err(fault),
            _ => Ok(self.found.len()),
        }
    }

    /// Reads used entries, and calls `prefetch` with each buffer that was found.
    #[inline(always)]
    fn look(&mut self, mut prefetch: impl FnMut(&B)) {
        if self.fault.is_some() {
            return;
        }
        let before = self.found.len();
        let Self { format, slots, found, .. } = self;
        let judged = match &self.order {
            None => format.look(self.posted - before, found, |slot| prefetch(&slots[usize::from(slot)].buffer)),
            Some(_) => {
                let judged = self.look_in_order();
                (before..self.found.len()).for_each(|i| prefetch(self.peek(i)));
                judged
            }
        };
        self.fault = judged.err();
    }

    /// The same for buffers that are used in order: a used entry stands for all buffers up to the one that it names.
    /// All of them but the named one were used completely.
    #[inline(never)]
    fn look_in_order(&mut self) -> Result<(), DeviceFault> {
        let Self { format, found, order: Some(order), posted, have, .. } = self else { return Ok(()) };
        let (mut judged, mut known) = (Ok(()), found.len());
        let mut adding = found.adding(LOOK);
        while adding.has_room() {
            let (last, len) = match order.batch {
                Some(batch) => batch,
                None => match Self::batch(format, order, *posted, known) {
                    Ok(Some(batch)) => batch,
                    Ok(None) => break,
                    Err(fault) => {
                        judged = Err(fault);
                        break;
                    }
                },
            };
            let Some(slot) = order.slots.pop_front() else { break };
            format.skip(slot);
            order.batch = (slot != last).then_some((last, len));
            adding.push(slot, if slot == last { len } else { *have });
            known += 1;
        }
        let at = adding.at;
        found.added(at);
        judged
    }

    /// The next batch, if there is one: its last buffer and that one's length. The device has `posted` buffers, of which `found` were
    /// found before.
    fn batch(format: &F, order: &Order, posted: u16, found: u16) -> Result<Option<(u16, u32)>, DeviceFault> {
        let Some((id, len, most)) = format.batch(posted - found)? else { return Ok(None) };
        DeviceFault::ahead(found + 1, posted)?;
        let last = format.slot(id)?;
        let named = order.slots.iter().take(most.into()).any(|&slot| slot == last);
        DeviceFault::posted(id as u16, named.then_some(Some((last, len))))
    }

    /// All buffers that the device has used and [`take`](Self::take) has not given back, for a queue that stops.
    pub(crate) fn unread(&mut self) -> u16 {
        self.look(|_| ());
        let posted = self.posted;
        // Buffers that do not fit are read into a separate list, and are not taken any more.
        let found = std::mem::replace(&mut self.found, Found::new());
        let (mut unread, mut last) = (found.len(), found.len());
        while last == LOOK {
            self.posted = posted - unread;
            self.look(|_| ());
            last = std::mem::replace(&mut self.found, Found::new()).len();
            unread += last;
        }
        (self.posted, self.found) = (posted, found);
        unread
    }

    /// The `i`th pending buffer, for prefetches.
    #[inline(always)]
    pub(crate) fn peek(&self, i: u16) -> &B {
        &self.slots[usize::from(self.found.get(i).0)].buffer
    }

    /// Takes the next [pending](Self::pending) buffer back: its slot, how many bytes the device has written to it, and
    /// the buffer. Slot and length were checked. The slot is then free. Returns `None` after a [fault](Self::outcome).
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Option<(u16, u32, &mut B)> {
        let (number, len) = self.found.pop();
        let slot = &mut self.slots[usize::from(number)];
        if !slot.posted {
            self.fault = DeviceFault::posted::<()>(self.format.id(number), None).err();
            return None;
        }
        slot.posted = false;
        self.posted -= 1;
        self.format.release(number, &mut self.free);
        match DeviceFault::length(len, self.have) {
            Ok(len) => Some((number, len, &mut slot.buffer)),
            Err(fault) => {
                self.fault = Some(fault);
                None
            }
        }
    }

    /// Records a fault that the caller has found in the contents of a buffer. A fault in the ring that was found before
    /// takes precedence.
    #[cold]
    pub(crate) fn refuse(&mut self, fault: DeviceFault) {
        self.fault.get_or_insert(fault);
    }

    /// The fault of the device, if one was found.
    pub(crate) fn outcome(&self) -> Result<(), DeviceFault> {
        self.fault.map_or(Ok(()), Err)
    }

    /// Asks the device for an interrupt at the next used buffer and looks at the ring once more. If there is work, the queue is
    /// disarmed again.
    pub(crate) fn arm(&mut self) -> Armed {
        if self.found.len() > 0 || self.fault.is_some() {
            return Armed::Work;
        }
        self.format.arm()
    }

    /// Asks the device for no interrupts: the driver polls.
    pub(crate) fn disarm(&mut self) {
        self.format.disarm();
    }
}

/// A queue in the negotiated format. A caller checks the format once a poll.
pub(crate) enum AnyDriverQueue<B> {
    /// On a split ring.
    Split(DriverQueue<Split, B>),
    /// On a packed ring.
    Packed(DriverQueue<Packed, B>),
}

/// Evaluates an expression on the queue of either format.
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
    pub(crate) fn shaped(ring: AnyRing, negotiated: Negotiated, lens: &[u32], tables: Option<Tables>) -> Self {
        match ring {
            AnyRing::Split(ring) => Self::Split(DriverQueue::shaped(ring, negotiated, lens, tables)),
            AnyRing::Packed(ring) => Self::Packed(DriverQueue::shaped(ring, negotiated, lens, tables)),
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
