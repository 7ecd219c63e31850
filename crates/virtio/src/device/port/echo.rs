//! A port that sends every frame back to the driver, with the two MAC addresses exchanged.
//!
//! For tests and measurements of both directions with one driver.

use super::interface::{MAX_WIRE, Port};
use super::store::Store;
use crate::device::options::ALL_OFFLOADS;
use crate::net::VnetHdr;

/// The most frames on their way back.
const FRAMES: usize = 1024;
/// Their bytes: eight of the longest frames.
const BYTES: usize = 8 * MAX_WIRE;

/// Sends frames back to the driver. Holds at most 1024 frames and about 512 KiB. While there is no
/// room for a frame of the longest kind, the driver's next frames wait in its ring. If the driver's
/// receive ring is not served, they are refused instead, and counted by the device as
/// [`crate::device::DropReason::PortRefused`].
#[derive(Debug)]
pub struct Echo {
    queue: Store,
    /// Whether the receive ring is served.
    served: bool,
}

impl Default for Echo {
    fn default() -> Self {
        Self::new()
    }
}

impl Echo {
    /// An echo without frames.
    #[must_use]
    pub fn new() -> Self {
        Self { queue: Store::new(FRAMES, BYTES), served: false }
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
        if frame.len() < 14 {
            return false;
        }
        let header = VnetHdr { num_buffers: 1, ..VnetHdr::from_bytes(*header) };
        let Some(back) = self.queue.push(wire.len()) else { return false };
        let (to_header, to_frame) = back.split_at_mut(VnetHdr::LEN);
        to_header.copy_from_slice(&header.to_bytes());
        to_frame[..6].copy_from_slice(&frame[6..12]);
        to_frame[6..12].copy_from_slice(&frame[..6]);
        to_frame[12..].copy_from_slice(&frame[12..]);
        true
    }

    #[inline]
    fn served(&mut self, served: bool) {
        self.served = served;
    }

    fn drop_waiting(&mut self) -> u64 {
        self.queue.clear()
    }
}
