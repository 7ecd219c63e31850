//! What the device's port sends: the datagrams that are due, from each flow in turn.

use super::directions::{FLOWS, PAYLOAD};
use netmem::device::port::{ALL_OFFLOADS, Gen, Port, PortError};
use netmem::virtio::VnetHdr;
use netmem_devmem::Mac;
use std::net::Ipv4Addr;

/// Bytes of Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 42;
/// Offsets of the destination port and of the checksum in a frame.
const PORT: usize = 36;
const CHECKSUM: usize = 40;

/// The destination of the frames that [`Gen`] makes.
pub(super) const OURS: (Mac, Ipv4Addr) = (Mac([2, 0, 0, 0, 0, 2]), Ipv4Addr::new(198, 18, 0, 2));
/// The port of the first flow. The other flows have the ports behind it.
pub(super) const FIRST_PORT: u16 = 9000;

/// The port. It discards what the driver sends.
pub(super) struct Flows {
    frames: [Box<[u8]>; FLOWS],
    /// Datagrams that were sent, and the number that may be sent.
    pub(super) sent: u64,
    pub(super) due: u64,
}

impl Flows {
    pub(super) fn new() -> Result<Self, PortError> {
        let pattern = Gen::new(HEADERS + PAYLOAD as usize, None)?;
        let frame = |flow: usize| {
            let mut wire = VnetHdr { flags: VnetHdr::DATA_VALID, ..VnetHdr::PLAIN }.to_bytes().to_vec();
            let at = wire.len();
            wire.extend_from_slice(pattern.frame());
            let port = FIRST_PORT + flow as u16;
            wire[at + PORT..at + PORT + 2].copy_from_slice(&port.to_be_bytes());
            // Marked as if the device had verified the checksum.
            wire[at + CHECKSUM..at + CHECKSUM + 2].fill(0);
            wire.into()
        };
        Ok(Self { frames: std::array::from_fn(frame), sent: 0, due: 0 })
    }
}

impl Port for Flows {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = ALL_OFFLOADS;

    #[inline(always)]
    fn peek(&mut self) -> Option<&[u8]> {
        (self.sent < self.due).then(|| &*self.frames[self.sent as usize % FLOWS])
    }

    #[inline(always)]
    fn consume(&mut self) {
        self.sent += 1;
    }

    #[inline(always)]
    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}
