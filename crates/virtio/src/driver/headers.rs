//! The headers of transmitted packets that cannot carry their own.
//!
//! ```text
//!   header in place   [header | head] ──► frag ──► frag   in the packet's headroom
//!   header apart      header ──► head ──► frag            in an array with an entry for each slot
//! ```

use crate::net::VnetHdr;
use netmem_pool::{PeerShared, Region};
use std::sync::Arc;

/// Bytes between two headers of the array.
pub(super) const HEADER_STRIDE: usize = 16;

/// The headers of packets that have no room for their own: one for each slot of the queue, in
/// memory that the device sees.
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
}
