//! The operations that differ between split and packed rings.

use super::super::Armed;
use super::super::fault::DeviceFault;
use super::free::Free;
use super::shape::{Setup, Shape};
use super::tables::{Segment, Tables};

/// The used entries of a ring, from the oldest that was not read. Everything that a loop over them
/// needs is in the value's own fields, so that a compiler keeps it in registers.
pub(crate) trait UsedEntries: Sized {
    /// A position in the ring.
    type At;

    /// The most buffers for which further entries can stand.
    fn left(&self) -> u16;

    /// The next used entry, if there is one: an id and the bytes that the device has written. Some
    /// are [left](Self::left).
    fn entry(&self) -> Option<(u32, u32)>;

    /// Moves on by one buffer, which has so many descriptors.
    fn skip(&mut self, descriptors: u16);

    /// Moves on by `n` buffers of one descriptor each.
    fn skip_run(&mut self, n: u16);

    /// Checks that the device has used no more buffers than it had. To be called when none is
    /// [left](Self::left).
    fn check_end(&self) -> Result<(), DeviceFault>;

    /// Where the next used entry is.
    fn end(self) -> Self::At;
}

/// What [`read_run`](DriverFormat::read_run) reads.
#[derive(Clone, Copy)]
pub(crate) struct Expected {
    /// The id of the first entry, which is also its place in the ring. Each next one has the next
    /// id.
    pub(crate) first: u16,
    /// Buffers that the device has.
    pub(crate) posted: u16,
    /// The least bytes that the device must have written.
    pub(crate) shortest: u32,
    /// How many more they may be.
    pub(crate) span: u32,
}

impl Expected {
    /// An entry of an id and the least length, as a word. If the difference of another word from it
    /// is at most [`span`](Self::span), that has the same id, and a length that is allowed.
    #[inline(always)]
    pub(super) fn word(self, id: u32) -> u64 {
        opaque(u64::from(id) << 32 | u64::from(self.shortest))
    }

    /// Whether a length is allowed.
    #[inline(always)]
    pub(super) fn allows(self, len: u32) -> bool {
        len.wrapping_sub(self.shortest) <= self.span
    }
}

/// The difference between the words of two ids that follow each other.
pub(super) const NEXT_ID: u64 = 1 << 32;

/// Returns its argument, and hides from the compiler how it was computed. In a loop that adds a
/// constant to a word four times a step, a compiler would else make that many constants, of ten
/// bytes each, and compute each word from the first one.
#[inline(always)]
pub(super) fn opaque(number: u64) -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let mut number = number;
        // SAFETY: no instruction.
        unsafe { std::arch::asm!("/* {0} */", inout(reg) number, options(pure, nomem, nostack, preserves_flags)) };
        number
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    number
}

/// A ring format, seen from the driver: how buffers are described to the device and how used ones
/// are found. The queue owns the slots, and checks what the format does not check.
pub(crate) trait DriverFormat: Sized {
    /// The words.
    type Ring;
    /// A position among the used entries.
    type At;
    /// See [`used`](Self::used).
    type Used<'r>: UsedEntries<At = Self::At>
    where
        Self: 'r;

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

    /// Makes shaped buffers available at the next [`publish`](Self::publish). For each it is given
    /// the slot, and how many of its addresses, from the first on, may have changed since it was
    /// last made available. `steady`: these slots were made available in this order as many buffers
    /// ago as there are slots.
    fn expose(&mut self, slots: impl ExactSizeIterator<Item = (u16, u16)>, shape: Shape<'_>, steady: bool);

    /// Makes shaped buffers of one segment of `len` bytes available at the next
    /// [`publish`](Self::publish): those of the slots from `first` on, at these addresses, at most
    /// 64, not around the end of the ring. Each slot is in its own place of the ring, where it was
    /// made available as many buffers ago as there are slots. Bit `i` of `changed`: the address of
    /// slot `first + i` may have changed since.
    fn expose_run(&mut self, first: u16, addrs: &[u64], len: u32, changed: u64);

    /// Takes `free`'s next slot, which is `slot`, and what else it needs, for a buffer of
    /// `segments`, and makes it available at the next [`publish`](Self::publish). The caller has
    /// checked that there is room.
    fn post(&mut self, slot: u16, segments: impl Iterator<Item = Segment>, free: &mut Free);

    /// The most buffers that [`post_run`](Self::post_run) can make available now.
    fn run(&self) -> u16;

    /// Makes buffers of one segment each, which the device reads, available at the next
    /// [`publish`](Self::publish): those of the slots from `first` on, with these addresses and
    /// lengths. There are no more than [`run`](Self::run).
    fn post_run(&mut self, first: u16, segments: impl ExactSizeIterator<Item = (u64, u32)>);

    /// Lets the device see what was made available.
    fn publish(&mut self);

    /// See [`DriverQueue::should_notify`].
    fn should_notify(&mut self) -> bool;

    /// The used entries that were not read. The device has `posted` buffers, of which `found` were
    /// read before.
    fn used(&self, found: u16, posted: u16) -> Result<Self::Used<'_>, DeviceFault>;

    /// Whether the next used entry is there. It is not read.
    fn has_used(&self) -> bool;

    /// The used entries in front of this position were read.
    fn read_to(&mut self, at: Self::At);

    /// Reads used entries from the next one on, where each buffer is one entry of the ring, as long
    /// as each is what is `expected`. Calls `seen` with the buffer of each, and how many bytes more
    /// than the shortest it has. `buffers` are those from the next one on, not around the end of
    /// the ring: not more are read. Returns how many entries were as expected, and whether another
    /// one is used behind them. If the device claims more than were posted, a split ring returns
    /// none, and a packed ring at most as many as were posted.
    fn read_run<B>(&self, expected: Expected, buffers: &mut [B], seen: impl FnMut(&mut B, u32)) -> (u16, bool);

    /// The ids of the used entries from the next one on, up to the end of the ring, where each
    /// buffer is one entry of the ring, at most `most`: none of them is checked. The device has
    /// `posted` buffers. An entry is read when the iterator gets there, once. If the device claims
    /// more than were posted, a split ring returns none, and a packed ring at most `posted`.
    fn used_ids(&self, posted: u16, most: u16) -> impl Iterator<Item = u32>;

    /// The place of the next used entry in the ring.
    fn used_place(&self) -> u16;

    /// Whether each buffer that the device has is one descriptor.
    fn is_single(&self) -> bool;

    /// The next `n` used entries were read by [`read_run`](Self::read_run) or
    /// [`used_ids`](Self::used_ids).
    fn consume(&mut self, n: u16);

    /// Descriptors of the buffer in `slot`, which the device has used.
    fn count(&self, slot: u16) -> Result<u16, DeviceFault>;

    /// The slot of the buffer with this `id` in the ring.
    fn slot(&self, id: u32) -> Result<u16, DeviceFault>;

    /// The id in the ring of the buffer in `slot`.
    fn id(&self, slot: u16) -> u16;

    /// Frees the descriptors of the buffer in `slot`, which the device has used.
    fn release(&mut self, slot: u16, free: &mut Free);

    /// The same for `n` buffers of one entry each, in the slots from `first` on. The caller frees
    /// the slots.
    fn release_run(&mut self, first: u16, n: u16);

    /// Asks for an interrupt at the next used entry that was not read, and looks whether it is
    /// there already.
    fn arm(&mut self) -> Armed;

    /// See [`DriverQueue::disarm`].
    fn disarm(&mut self);
}
