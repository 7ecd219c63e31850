//! The operations that differ between split and packed rings.

use super::super::Armed;
use super::super::fault::DeviceFault;
use super::found::Found;
use super::free::Free;
use super::shape::{Setup, Shape};
use super::tables::{Segment, Tables};

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
