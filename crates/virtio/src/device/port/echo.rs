//! Everything that is sent comes back, with the two MAC addresses exchanged.

use super::store::Store;
use super::{ALL_OFFLOADS, MAX_WIRE, Port, PortError};
use crate::net::{VnetHdr, feature};
use netmem_packet::complete_checksum;

/// Frames on their way back.
const FRAMES: usize = 1024;
/// Their bytes: eight of the longest frames.
const BYTES: usize = 8 * MAX_WIRE;

/// Sends frames back to where they came from. Holds at most 1024 frames and about 512 KiB. The driver's next frames wait
/// in its ring while there is no room for one more of the longest. If the driver's receive ring takes no frames, they are
/// refused instead, and counted by the device as [`crate::device::DropReason::PortRefused`].
#[derive(Debug)]
pub struct Echo {
    queue: Store,
    /// Whether the receive ring takes frames.
    served: bool,
    features: u64,
}

impl Default for Echo {
    fn default() -> Self {
        Self::new()
    }
}

impl Echo {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self { queue: Store::new(FRAMES, BYTES), served: false, features: 0 }
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
        self.queue.front()
    }

    #[inline]
    fn consume(&mut self) {
        self.queue.pop();
    }

    #[inline]
    fn room(&self) -> bool {
        !self.served || self.queue.fits(MAX_WIRE)
    }

    #[inline]
    fn send(&mut self, wire: &[u8]) -> bool {
        let Some((header, frame)) = wire.split_first_chunk() else { return false };
        let mut header = VnetHdr::from_bytes(*header);
        if frame.len() < 14 || !self.accepted(header) {
            return false;
        }
        let sums = header.flags & VnetHdr::NEEDS_CSUM != 0 && self.features & feature::GUEST_CSUM == 0;
        header.flags &= if sums { 0 } else { VnetHdr::NEEDS_CSUM };
        let partial = (header.csum_start, header.csum_offset);
        if sums {
            (header.csum_start, header.csum_offset) = (0, 0);
        }
        header.num_buffers = 1;
        let Some(back) = self.queue.push(wire.len()) else { return false };
        let (to_header, to_frame) = back.split_at_mut(VnetHdr::LEN);
        to_header.copy_from_slice(&header.to_bytes());
        to_frame[..6].copy_from_slice(&frame[6..12]);
        to_frame[6..12].copy_from_slice(&frame[..6]);
        to_frame[12..].copy_from_slice(&frame[12..]);
        if sums {
            // A place outside of the frame was refused before.
            let _ = complete_checksum(to_frame, partial.0, partial.1);
        }
        true
    }

    #[inline]
    fn served(&mut self, served: bool) {
        self.served = served;
    }

    fn left(&mut self) -> u64 {
        self.queue.clear()
    }

    fn negotiated(&mut self, features: u64) -> Result<(), PortError> {
        self.features = features;
        // What is on its way back may use offloads that are no longer accepted.
        self.queue.clear();
        Ok(())
    }
}
