//! What the device's port sends: datagrams of each flow in turn, as many as are due.

use super::{FLOWS, PAYLOAD};
use netmem::device::port::{ALL_OFFLOADS, Gen, Port, PortError};
use netmem::virtio::net::VnetHdr;

/// Bytes of Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 42;
/// Where the destination port is in a frame, and the checksum.
const PORT: usize = 36;
const CHECKSUM: usize = 40;

/// The port of the first flow; the others have the next.
pub(super) const FIRST_PORT: u16 = 9000;

/// The port: it swallows what the driver sends.
pub(super) struct Flows {
    frames: [Box<[u8]>; FLOWS],
    /// Datagrams sent, and how many may be.
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
            // Vouched for by the device, as if it had summed it.
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
