//! Everything that is sent comes back, with the two MAC addresses exchanged.

use std::collections::VecDeque;

use super::{ALL_OFFLOADS, Port, PortError};
use crate::device::checksum::complete;
use crate::net::{VnetHdr, feature};

/// Frames on their way back.
const SLOTS: usize = 1024;
/// And their bytes in all: a driver that only sends must not make us keep 64 MiB for it.
const BYTES: usize = 4 << 20;

/// Sends frames back to where they came from. Holds at most 1024 frames and 4 MiB; what comes beyond that is refused,
/// and counted by the device as [`crate::device::DropReason::PortRefused`].
#[derive(Debug, Default)]
pub struct Echo {
    queue: VecDeque<Vec<u8>>,
    /// Used buffers: a steady flow allocates nothing.
    spare: Vec<Vec<u8>>,
    bytes: usize,
    features: u64,
}

impl Echo {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the driver accepts a frame with these offloads.
    fn accepted(&self, h: VnetHdr) -> bool {
        let needed = match h.gso_type & !VnetHdr::GSO_ECN {
            // A checksum that it does not want to hear of is computed here.
            VnetHdr::GSO_NONE => return h.gso_type == 0,
            VnetHdr::GSO_TCPV4 => feature::GUEST_TSO4,
            VnetHdr::GSO_TCPV6 => feature::GUEST_TSO6,
            VnetHdr::GSO_UDP => feature::GUEST_UFO,
            _ => return false,
        };
        // Congestion notification in segments has a feature bit of its own, which is not offered.
        h.gso_type & VnetHdr::GSO_ECN == 0 && self.features & needed != 0
    }
}

impl Port for Echo {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS;

    #[inline]
    fn peek(&mut self) -> Option<&[u8]> {
        self.queue.front().map(|wire| &wire[..])
    }

    #[inline]
    fn consume(&mut self) {
        if let Some(mut wire) = self.queue.pop_front() {
            self.bytes -= wire.len();
            wire.clear();
            self.spare.push(wire);
        }
    }

    #[inline]
    fn send(&mut self, wire: &[u8]) -> bool {
        let Some((header, frame)) = wire.split_first_chunk() else { return false };
        let mut header = VnetHdr::from_bytes(*header);
        let full = self.queue.len() == SLOTS || self.bytes + wire.len() > BYTES;
        if full || frame.len() < 14 || !self.accepted(header) {
            return false;
        }
        let sums = header.flags & VnetHdr::NEEDS_CSUM != 0 && self.features & feature::GUEST_CSUM == 0;
        header.flags &= if sums { 0 } else { VnetHdr::NEEDS_CSUM };
        let partial = (header.csum_start, header.csum_offset);
        if sums {
            (header.csum_start, header.csum_offset) = (0, 0);
        }
        header.num_buffers = 1;
        let mut back = self.spare.pop().unwrap_or_default();
        back.extend_from_slice(&header.to_bytes());
        back.extend_from_slice(&frame[6..12]);
        back.extend_from_slice(&frame[..6]);
        back.extend_from_slice(&frame[12..]);
        if sums {
            complete(&mut back[VnetHdr::LEN..], partial.0, partial.1);
        }
        self.bytes += back.len();
        self.queue.push_back(back);
        true
    }

    fn negotiated(&mut self, features: u64) -> Result<(), PortError> {
        self.features = features;
        // What is on its way back may use offloads that are no longer accepted.
        while self.peek().is_some() {
            self.consume();
        }
        Ok(())
    }
}
