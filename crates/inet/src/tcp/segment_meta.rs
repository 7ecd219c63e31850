//! The properties of a received segment besides its header.

use serde::{Deserialize, Serialize};

/// The properties of a segment besides its header and its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentMeta {
    /// Bytes of payload according to the headers. If the payload is shorter, a part of it was
    /// dropped because buffers were scarce. The header is processed nevertheless.
    pub len: u32,
    /// The number of segments that were merged into this one.
    pub segments: u16,
    /// Whether the IP header has the mark "congestion experienced".
    pub ce: bool,
}

impl SegmentMeta {
    /// The properties of one segment with `len` bytes and without a mark.
    #[must_use]
    pub fn of(len: u32) -> Self {
        Self { len, segments: 1, ce: false }
    }
}
