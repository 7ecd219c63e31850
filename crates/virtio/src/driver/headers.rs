//! The headers of transmitted packets that cannot carry their own, and what frames have in a slot
//! of the queue: their headers, or all of them.
//!
//! ```text
//!   header in place    [header | head] ──► frag ──► frag    in the packet's headroom
//!   header apart       header ──► head ──► frag             in an array, an entry for each slot
//!   frame behind slot  [header | headers] ──► head ──► frag in the same array
//!   frame in slot      [header | frame]                     in the same array
//! ```

use crate::net::VnetHdr;
use netmem_packet::HeaderSlots;
use netmem_pool::foreign::copy_in;
use netmem_pool::{PeerShared, Region};
use std::sync::Arc;

/// Bytes between two headers of the array: four cache lines.
pub(super) const HEADER_STRIDE: usize = VnetHdr::LEN + HeaderSlots::ROOM;

/// The headers of packets that have no room for their own: an entry for each slot of the queue, in
/// memory that the device sees. Each has room for a frame's own headers, too, or for a short frame.
/// An entry is written when a frame is posted in its slot, and not again before the device has
/// completed that frame.
pub(super) struct HeaderArray {
    pub(super) region: Arc<Region<PeerShared>>,
    pub(super) offset: usize,
    pub(super) dma: u64,
}

impl HeaderArray {
    /// Writes the header of the packet in `slot`; returns its device address.
    #[inline]
    pub(super) fn write(&self, slot: u16, header: [u8; VnetHdr::LEN]) -> u64 {
        let at = usize::from(slot) * HEADER_STRIDE;
        // SAFETY: the array has a place for every slot, inside of a region that it keeps; the
        // device may read it meanwhile, hence volatile.
        unsafe {
            let to = self.region.as_ptr().add(self.offset + at).cast::<[u8; VnetHdr::LEN]>();
            to.write_volatile(header);
        }
        self.dma + at as u64
    }

    /// The same, and the headers of the frame behind it, or all of the frame. They must fit: see
    /// [`HeaderSlots::ROOM`].
    #[inline]
    pub(super) fn write_all(&self, slot: u16, header: [u8; VnetHdr::LEN], headers: &[u8]) -> u64 {
        assert!(headers.len() <= HeaderSlots::ROOM, "the caller has checked it");
        let dma = self.write(slot, header);
        let at = usize::from(slot) * HEADER_STRIDE + VnetHdr::LEN;
        // SAFETY: as in `write`, and the place has so many bytes behind the header.
        unsafe { copy_in(headers, self.region.as_ptr().add(self.offset + at)) };
        dma
    }
}
