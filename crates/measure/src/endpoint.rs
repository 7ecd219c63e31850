//! An end of a connection over the embedded device, as the command and the benchmarks build it: its
//! memory, its stack, its clock and its address.

use netmem_inet::{Address, Stack, Time};
use netmem_pool::TrustedPeer;
use netmem_virtio::driver::{VirtioRx, VirtioTx};
use std::net::IpAddr;
use std::time::Instant;

/// Memory of the embedded device, which is in this process: its bytes are slices.
pub type Mem = TrustedPeer;
/// The stack of one queue pair of the driver.
pub type OwnStack = Stack<VirtioRx<Mem>, VirtioTx<Mem>>;

/// The longest frame that is no segment: of a VLAN.
pub const LARGE_FRAME: usize = 1522;
/// A clock that counts from the moment at which it was started.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// The time since the clock was started.
    pub fn now(self) -> Time {
        Time::ZERO + self.0.elapsed()
    }
}

/// A locally administered Ethernet address, made of the first IP address.
pub fn mac(addresses: &[Address]) -> [u8; 6] {
    let bytes = match addresses.first().map(|address| address.addr) {
        Some(IpAddr::V4(addr)) => addr.octets(),
        Some(IpAddr::V6(addr)) => addr.octets().last_chunk().copied().unwrap_or_default(),
        None => [0; 4],
    };
    let [a, b, c, d] = bytes;
    [0x02, 0x6e, a, b, c, d]
}
