//! How received frames lie in buffers, as the options and the negotiated features decide it.
//!
//! Why it is computed once: the offsets decide which cache lines a frame touches, and the receive
//! loop must not compute them for each frame.

use netmem_pool::{Page, PeerMemory};

/// Used buffers that are handled between two publications of new buffers.
pub(super) const RX_BATCH: u16 = 64;

/// How buffers lie in pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferLayout {
    /// Where the buffer of the first colour begins, which is where its header is.
    ///
    /// In small mode without offloads the header ends a cache line and the frame begins the next:
    /// the header has no meaning then, so that it is not read, and its line is not fetched. In
    /// mergeable mode with a foreign back end it ends a line, too: DPDK's vhost writes a header
    /// only if it differs from what is there. So neither side writes that line, both keep it in
    /// their caches, and a short frame is one line, not two. Our own device writes each header.
    /// With it, and in small mode with offloads, the header begins a line, and shares it with the
    /// frame's first bytes.
    pub(crate) first: u32,
    /// Offsets are multiples of 64 up to this, a power of two less one times 64.
    pub(crate) colour_mask: u32,
    /// Bytes posted, header included.
    pub(crate) len: u32,
    /// Buffers in a page.
    pub(crate) per_page: u32,
}

impl BufferLayout {
    /// Where in `page` its buffer begins.
    #[inline]
    pub(super) fn start<M: PeerMemory>(&self, page: &Page<M>) -> u32 {
        (page.colour() & self.colour_mask) + self.first
    }
}

/// Which fields of a received frame's header have a meaning, by what was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderFields {
    /// No field. The header is not read.
    Plain,
    /// The offloads.
    Offloads,
    /// The offloads and the number of buffers (mergeable mode).
    Mergeable,
}
