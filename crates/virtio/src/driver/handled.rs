//! A group of frames in their slots, while user code handles it.

use super::buffers::Buffers;
use crate::net::VnetHdr;
use crate::virtqueue::driver::Lent;
use netmem_packet::FrameCounts;
use std::slice;

/// Bytes of a header.
const HEADER: u32 = VnetHdr::LEN as u32;

/// A group that user code handles. Afterwards, also after a panic, the frames that were counted are
/// taken, and the others stay in the queue.
pub(super) struct Handled<'q, B: Buffers> {
    pub(super) lent: Lent<'q, B::Buffer>,
    pub(super) counts: &'q mut FrameCounts,
    /// Frames that were counted before.
    pub(super) before: u64,
}

impl<B: Buffers> Handled<'_, B> {
    /// Frames of the group that were counted: fewer than there were if user code has panicked.
    #[inline(always)]
    pub(super) fn counted(&self) -> usize {
        (self.counts.frames - self.before) as usize
    }

    /// Releases the pages of the frames that were counted.
    pub(super) fn release(&mut self) {
        let counted = self.counted();
        B::frames(self.lent.buffers).iter_mut().take(counted).for_each(|page| *page = None);
    }
}

impl<B: Buffers> Drop for Handled<'_, B> {
    #[inline(always)]
    fn drop(&mut self) {
        let len = |slot: &mut B::Buffer| {
            let page = B::frames(slice::from_mut(slot)).first().and_then(Option::as_ref);
            page.map_or(0, |page| page.data().len() as u32)
        };
        self.lent.handled(self.counted(), |slot| len(slot) + HEADER);
    }
}
