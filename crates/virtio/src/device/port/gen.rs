//! A generator: one frame, which is built once and sent as fast as the driver posts buffers.
//!
//! For measurements of receive: the port costs nothing, so that what is measured is the device and
//! the driver.

use etherparse::PacketBuilder;

use super::error::PortError;
use super::interface::Port;
use crate::net::{MIN_FRAME, OFFLOAD_FRAME, VnetHdr};

/// Sends a valid UDP datagram over IPv4 over Ethernet, again and again. Drops the driver's frames.
#[derive(Clone, Debug)]
pub struct Gen {
    wire: Box<[u8]>,
    left: u64,
}

impl Gen {
    /// Frames of `size` bytes (60 to 65549, without frame check sequence), at most `limit` of them.
    ///
    /// # Errors
    ///
    /// [`PortError::FrameSize`].
    pub fn new(size: usize, limit: Option<u64>) -> Result<Self, PortError> {
        let wrong = || PortError::FrameSize { size, min: MIN_FRAME, max: OFFLOAD_FRAME };
        if !(MIN_FRAME..=OFFLOAD_FRAME).contains(&size) {
            return Err(wrong());
        }
        // Locally administered addresses, and the network that is reserved for benchmarks (RFC
        // 2544).
        let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
            .ipv4([198, 18, 0, 1], [198, 18, 0, 2], 64)
            .udp(9, 9);
        let payload: Vec<u8> = (0..size - builder.size(0)).map(|i| i as u8).collect();
        let mut wire = VnetHdr::PLAIN.to_bytes().to_vec();
        builder.write(&mut wire, &payload).map_err(|_| wrong())?;
        Ok(Self { wire: wire.into(), left: limit.unwrap_or(u64::MAX) })
    }

    /// The frame, without its virtio header.
    #[must_use]
    pub fn frame(&self) -> &[u8] {
        &self.wire[VnetHdr::LEN..]
    }
}

impl Port for Gen {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = 0;

    #[inline(always)]
    fn peek(&mut self) -> Option<&[u8]> {
        (self.left > 0).then_some(&*self.wire)
    }

    #[inline(always)]
    fn consume(&mut self) {
        self.left -= 1;
    }

    #[inline(always)]
    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}
