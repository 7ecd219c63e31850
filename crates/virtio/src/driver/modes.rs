//! The modes in which frames are received, and the offloads that a driver requests.

use crate::net::{OFFLOAD_FRAME, STANDARD_FRAME};
use std::fmt;

/// How received frames lie in buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RxMode {
    /// A frame in one buffer.
    Small,
    /// A frame in as many buffers as it needs.
    Mergeable,
    /// A frame in one chain of pages, long enough for the longest segment.
    Big,
}

impl RxMode {
    /// The longest frame that the mode can receive.
    #[must_use]
    pub fn max_frame(self) -> usize {
        match self {
            Self::Small => STANDARD_FRAME,
            Self::Mergeable | Self::Big => OFFLOAD_FRAME,
        }
    }
}

impl fmt::Display for RxMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Small => "small",
            Self::Mergeable => "mergeable",
            Self::Big => "big",
        })
    }
}

/// Which offloads a driver requests from its device. See
/// [`NetOptions::offloads`](super::NetOptions::offloads).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Offload {
    /// No offloads: in both directions every frame has its checksum, and no frame is a large
    /// segment.
    None,
    /// Checksums: sent frames may have a [partial](netmem_packet::Checksum::Partial) one, and
    /// received frames may too, or a verified one.
    Checksum,
    /// Checksums and segments: TCP over both IPs, with congestion notification, and UDP.
    #[default]
    All,
}
