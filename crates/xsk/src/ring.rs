//! One ring: a producer and a consumer of entries in memory that this process shares with the
//! kernel.
//!
//! ```text
//!   producer ─────────────┐ next place to write      each counts up and wraps at 2^32;
//!   consumer ──┐          ▼ next place to read       entry i is at place i & mask
//!              ▼
//!      [ .. ][ e ][ e ][ e ][    ][    ] ..          producer - consumer entries, at most all
//!
//!   flags      NEED_WAKEUP: the kernel has stopped polling the ring, and needs a system call
//! ```
//!
//! | ring | entry | producer | consumer |
//! | --- | --- | --- | --- |
//! | fill | address of a chunk to receive into | [`Producer`] of `XskRx` | the kernel |
//! | RX | descriptor of a received frame or a part | the kernel | [`Consumer`] of `XskRx` |
//! | TX | descriptor of a frame to send or a part | [`Producer`] of `XskTx` | the kernel |
//! | completion | address of a descriptor that was sent | the kernel | [`Consumer`] of `XskTx` |
//!
//! # Memory ordering
//!
//! Each side writes one index and reads that of the other side. There are three races.
//!
//! **Entry against index.** The consumer must not read a place before the producer has written it.
//!
//! ```text
//!   producer                         consumer
//!   entry[i] = e                     p = producer       acquire
//!   producer = i + 1     release     if p > i: read entry[i]
//! ```
//!
//! **Place against index.** The producer must not overwrite a place before the consumer has read
//! it. The order is kept in the same way with the other index: the consumer stores it with a
//! release after its last read, and the producer loads it with an acquire before it writes.
//!
//! The bytes of frames are ordered by the same two pairs. The bytes of a received frame are written
//! before the RX ring's producer index. The bytes of a sent frame are read by the kernel before it
//! writes the completion ring's producer index.
//!
//! **Index against flag.** A kick must not be lost between a kernel that begins to sleep and a
//! producer that adds an entry.
//!
//! ```text
//!   this process                     kernel
//!   producer = i + 1                 flags = NEED_WAKEUP
//!   full fence                       full fence
//!   if flags: system call            if producer > i: go on
//! ```
//!
//! Each side stores, then loads what the other side stores. Without a full fence on each side, both
//! loads can see the old values: release and acquire do not order a store before a later load. With
//! the fences at least one side sees the store of the other. [`Producer::needs_wakeup`] has the
//! fence of this process. `model.rs` tries all interleavings of the three races. If a driver lacks
//! the kernel's fence, no kick is lost either: [`XskTx::complete`](crate::XskTx) checks the flag
//! again while frames are out.
//!
//! # Invalid values from the kernel
//!
//! An index that the kernel wrote is used only if it leaves at most as many entries as there are
//! places ([`Fault::Index`]). The queue checks the contents of entries. The memory is only accessed
//! by atomics, so no value and no timing of the kernel's is undefined behaviour here.

use crate::fault::Fault;
use crate::if_xdp::{Desc, RING_NEED_WAKEUP};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};
use netmem_pool::prefetch;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// The number of bytes that a CPU transfers from another CPU at a time.
const CACHE_LINE: usize = 64;

/// The addresses of the parts of a ring. See [`Ring::new`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingPointers<S> {
    pub(crate) producer: NonNull<AtomicU32>,
    pub(crate) consumer: NonNull<AtomicU32>,
    pub(crate) flags: NonNull<AtomicU32>,
    pub(crate) entries: NonNull<S>,
}

/// The type of an entry of a ring.
pub(crate) trait RingEntry: Copy {
    /// The type of an entry's place in shared memory.
    type Atomic: std::fmt::Debug;
    fn load(slot: &Self::Atomic) -> Self;
    fn store(self, slot: &Self::Atomic);
}

impl RingEntry for u64 {
    type Atomic = AtomicU64;

    #[inline(always)]
    fn load(slot: &AtomicU64) -> Self {
        slot.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn store(self, slot: &AtomicU64) {
        slot.store(self, Ordering::Relaxed);
    }
}

/// The place of a descriptor.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct AtomicDesc {
    addr: AtomicU64,
    len: AtomicU32,
    options: AtomicU32,
}

impl RingEntry for Desc {
    type Atomic = AtomicDesc;

    #[inline(always)]
    fn load(slot: &AtomicDesc) -> Self {
        let (addr, len) = (slot.addr.load(Ordering::Relaxed), slot.len.load(Ordering::Relaxed));
        Self { addr, len, options: slot.options.load(Ordering::Relaxed) }
    }

    #[inline(always)]
    fn store(self, slot: &AtomicDesc) {
        slot.addr.store(self.addr, Ordering::Relaxed);
        slot.len.store(self.len, Ordering::Relaxed);
        slot.options.store(self.options, Ordering::Relaxed);
    }
}

/// The memory of a ring, as one side uses it.
///
/// Invariant (*mapped*): the indices, the flags and `size` entries are mapped for as long as the
/// ring is used, and accessed only by atomics in this process.
#[derive(Debug)]
struct Ring<E: RingEntry> {
    pointers: RingPointers<E::Atomic>,
    mask: u32,
    kind: PhantomData<E>,
}

// SAFETY: *mapped*: the memory is made of atomics, and is not bound to a thread.
unsafe impl<E: RingEntry> Send for Ring<E> {}

impl<E: RingEntry> Ring<E> {
    /// # Safety
    ///
    /// *mapped*, for a power of two of entries.
    unsafe fn new(pointers: RingPointers<E::Atomic>, size: u32) -> Self {
        debug_assert!(size.is_power_of_two());
        Self { pointers, mask: size - 1, kind: PhantomData }
    }

    fn size(&self) -> u32 {
        self.mask + 1
    }

    #[inline(always)]
    fn producer(&self) -> &AtomicU32 {
        // SAFETY: *mapped*.
        unsafe { self.pointers.producer.as_ref() }
    }

    #[inline(always)]
    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: *mapped*.
        unsafe { self.pointers.consumer.as_ref() }
    }

    #[inline(always)]
    fn slot(&self, at: u32) -> &E::Atomic {
        // SAFETY: *mapped*: the mask keeps the place within the entries.
        unsafe { self.pointers.entries.add((at & self.mask) as usize).as_ref() }
    }

    /// Calls `prefetch` for one place in each cache line of the `n` places from `at` on.
    #[inline(always)]
    fn prefetch(&self, at: u32, n: u32, prefetch: impl Fn(*const E::Atomic)) {
        for i in (0..n).step_by(CACHE_LINE / size_of::<E::Atomic>()) {
            prefetch(self.slot(at.wrapping_add(i)));
        }
    }
}

/// The side that writes entries.
#[derive(Debug)]
pub(crate) struct Producer<E: RingEntry> {
    ring: Ring<E>,
    /// The index of the place to write next. The kernel knows the places before `published`.
    next: u32,
    published: u32,
    /// The consumer's index at the last check.
    consumed: u32,
}

impl<E: RingEntry> Producer<E> {
    /// # Safety
    ///
    /// As for the invariant *mapped* of [`Ring`], for `size` entries, a power of two. No other
    /// producer uses the ring.
    pub(crate) unsafe fn new(pointers: RingPointers<E::Atomic>, size: u32) -> Self {
        // SAFETY: the caller's.
        let ring = unsafe { Ring::new(pointers, size) };
        let (next, consumed) = (ring.producer().load(Ordering::Relaxed), ring.consumer().load(Ordering::Acquire));
        Self { ring, next, published: next, consumed }
    }

    pub(crate) fn size(&self) -> u32 {
        self.ring.size()
    }

    /// Returns the number of free places. Reads the consumer's index only if fewer than `want`
    /// places were free at the last check.
    ///
    /// # Errors
    ///
    /// [`Fault::Index`].
    #[inline(always)]
    pub(crate) fn free(&mut self, want: u32) -> Result<u32, Fault> {
        let free = self.known_free();
        if free >= want { Ok(free) } else { self.load_consumer() }
    }

    /// The number of places that were free at the last check of the consumer's index.
    #[inline(always)]
    pub(crate) fn known_free(&self) -> u32 {
        self.ring.size() - self.next.wrapping_sub(self.consumed)
    }

    #[inline(never)]
    fn load_consumer(&mut self) -> Result<u32, Fault> {
        // Acquire: the consumer has read the contents of the places.
        let consumed = self.ring.consumer().load(Ordering::Acquire);
        let used = self.next.wrapping_sub(consumed);
        // The kernel cannot have consumed entries that were not published to it, and its index
        // cannot go back.
        if used > self.next.wrapping_sub(self.consumed) || used < self.next.wrapping_sub(self.published) {
            return Err(Fault::Index { producer: self.next, consumer: consumed });
        }
        self.consumed = consumed;
        Ok(self.ring.size() - used)
    }

    /// The number of entries that the consumer has not consumed, published or not.
    ///
    /// # Errors
    ///
    /// [`Fault::Index`].
    pub(crate) fn pending(&mut self) -> Result<u32, Fault> {
        Ok(self.ring.size() - self.load_consumer()?)
    }

    /// The entries that the consumer has not consumed, published or not.
    ///
    /// # Errors
    ///
    /// [`Fault::Index`].
    pub(crate) fn pending_entries(&mut self) -> Result<impl Iterator<Item = E>, Fault> {
        let pending = self.pending()?;
        let first = self.next.wrapping_sub(pending);
        Ok((0..pending).map(move |i| E::load(self.ring.slot(first.wrapping_add(i)))))
    }

    /// Prefetches the next `n` places for writing, because the kernel's CPU has read them.
    #[inline(always)]
    pub(crate) fn prefetch(&self, n: u32) {
        self.ring.prefetch(self.next, n, prefetch::to_write);
    }

    /// Writes an entry. There must be a free place.
    #[inline(always)]
    pub(crate) fn push(&mut self, entry: E) {
        entry.store(self.ring.slot(self.next));
        self.next = self.next.wrapping_add(1);
    }

    /// Writes entries one after the other: the index of the next place is read and stored once.
    #[inline(always)]
    pub(crate) fn writer(&mut self) -> Writer<'_, E> {
        Writer { next: self.next, producer: self }
    }

    /// Publishes the written entries to the consumer. Returns false if there were none.
    #[inline(always)]
    pub(crate) fn publish(&mut self) -> bool {
        if self.published == self.next {
            return false;
        }
        // Release: the entries were written before.
        self.ring.producer().store(self.next, Ordering::Release);
        self.published = self.next;
        true
    }

    /// Whether the kernel needs a system call to notice the published entries. Costs a full fence.
    #[inline]
    pub(crate) fn needs_wakeup(&self) -> bool {
        fence(Ordering::SeqCst);
        // SAFETY: *mapped*.
        unsafe { self.ring.pointers.flags.as_ref() }.load(Ordering::Relaxed) & RING_NEED_WAKEUP != 0
    }
}

/// Entries that are being written. They are part of the ring when this value is dropped.
pub(crate) struct Writer<'a, E: RingEntry> {
    producer: &'a mut Producer<E>,
    next: u32,
}

impl<E: RingEntry> Writer<'_, E> {
    /// See [`Producer::push`].
    #[inline(always)]
    pub(crate) fn push(&mut self, entry: E) {
        entry.store(self.producer.ring.slot(self.next));
        self.next = self.next.wrapping_add(1);
    }
}

impl<E: RingEntry> Drop for Writer<'_, E> {
    #[inline(always)]
    fn drop(&mut self) {
        self.producer.next = self.next;
    }
}

/// The side that reads entries.
#[derive(Debug)]
pub(crate) struct Consumer<E: RingEntry> {
    ring: Ring<E>,
    /// The index of the place to read next. The kernel may write the places before `released`.
    next: u32,
    released: u32,
    /// The producer's index at the last check.
    produced: u32,
}

impl<E: RingEntry> Consumer<E> {
    /// # Safety
    ///
    /// As for [`Producer::new`], with no other consumer.
    pub(crate) unsafe fn new(pointers: RingPointers<E::Atomic>, size: u32) -> Self {
        // SAFETY: the caller's.
        let ring = unsafe { Ring::new(pointers, size) };
        let next = ring.consumer().load(Ordering::Relaxed);
        Self { ring, next, released: next, produced: next }
    }

    /// Returns the number of entries that can be consumed. Reads the producer's index if fewer than
    /// `want` entries are known.
    ///
    /// # Errors
    ///
    /// [`Fault::Index`].
    #[inline(always)]
    pub(crate) fn available(&mut self, want: u32) -> Result<u32, Fault> {
        let available = self.produced.wrapping_sub(self.next);
        if available >= want { Ok(available) } else { self.load_producer() }
    }

    #[inline(always)]
    fn load_producer(&mut self) -> Result<u32, Fault> {
        // Acquire: the producer has written the entries, and the frames that they describe.
        let produced = self.ring.producer().load(Ordering::Acquire);
        // The kernel cannot overwrite places that were not released to it, and its index cannot go
        // back.
        let (held, before) = (produced.wrapping_sub(self.released), self.produced.wrapping_sub(self.released));
        if held > self.ring.size() || held < before {
            return Err(Fault::Index { producer: produced, consumer: self.released });
        }
        self.produced = produced;
        Ok(produced.wrapping_sub(self.next))
    }

    /// The entry `ahead` places after the next one. It must be available.
    #[inline(always)]
    pub(crate) fn peek(&self, ahead: u32) -> E {
        E::load(self.ring.slot(self.next.wrapping_add(ahead)))
    }

    /// Prefetches the next `n` entries, which the kernel's CPU has written.
    #[inline(always)]
    pub(crate) fn prefetch(&self, n: u32) {
        self.ring.prefetch(self.next, n, prefetch::to_read);
    }

    /// Consumes the next entry, which must be available.
    #[inline(always)]
    pub(crate) fn consume(&mut self) -> E {
        debug_assert!(self.next != self.produced);
        let entry = self.peek(0);
        self.next = self.next.wrapping_add(1);
        entry
    }

    /// Releases the consumed entries to the producer.
    #[inline(always)]
    pub(crate) fn release(&mut self) {
        if self.released != self.next {
            // Release: the entries were read before.
            self.ring.consumer().store(self.next, Ordering::Release);
            self.released = self.next;
        }
    }
}
