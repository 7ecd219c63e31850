//! Flows of numbered datagrams of random sizes and bytes, over IPv4 and IPv6, as a port of a
//! device. A datagram can be made again from its number, so a test can check that a frame arrived
//! complete.

use etherparse::PacketBuilder;
use netmem_virtio::device::port::{ALL_OFFLOADS, Port};
use netmem_virtio::net::VnetHdr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The UDP port of the first flow. The other flows have the ports behind it.
pub const FIRST_PORT: u16 = 4000;

/// Frames by number, from this many flows in turn. They are sent as fast as they are taken, up to a
/// limit that the test raises.
pub struct Flows {
    flows: u64,
    next: u64,
    limit: Arc<AtomicU64>,
    wire: Vec<u8>,
}

impl Flows {
    pub fn new(flows: u64, limit: Arc<AtomicU64>) -> Self {
        Self { flows, next: 0, limit, wire: Vec::new() }
    }
}

/// The payload of datagram `n`: its number, and bytes that differ from those of other datagrams. It
/// is at most as long as an Ethernet frame allows over IPv6.
pub fn payload(n: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(n);
    let mut payload = vec![0; 8 + rng.usize(..=1500 - 40 - 8 - 8)];
    rng.fill(&mut payload[8..]);
    payload[..8].copy_from_slice(&n.to_le_bytes());
    payload
}

/// Frame `n`: by its number, over IPv4 or IPv6.
pub fn numbered(n: u64, flows: u64) -> Vec<u8> {
    let (ethernet, port) = (PacketBuilder::ethernet2([2; 6], [4; 6]), FIRST_PORT + (n % flows) as u16);
    let mut bytes = Vec::new();
    let written = if n.is_multiple_of(3) {
        ethernet.ipv6([0xfd; 16], [0xfe; 16], 9).udp(5, port).write(&mut bytes, &payload(n))
    } else {
        ethernet.ipv4([10, 1, 2, 3], [10, 9, 8, 7], 9).udp(5, port).write(&mut bytes, &payload(n))
    };
    written.expect("it fits");
    bytes
}

/// The number of a frame. Fails unless the frame is complete.
#[track_caller]
pub fn number(bytes: &[u8], flows: u64) -> u64 {
    let at = if bytes[12] == 8 { 42 } else { 62 };
    let n = u64::from_le_bytes(*bytes[at..].first_chunk().expect("a number"));
    assert!(bytes == numbered(n, flows), "frame {n} is not as it was sent");
    n
}

impl Port for Flows {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = ALL_OFFLOADS;

    fn peek(&mut self) -> Option<&[u8]> {
        if self.next == self.limit.load(Relaxed) {
            return None;
        }
        if self.wire.is_empty() {
            self.wire = [&VnetHdr::PLAIN.to_bytes()[..], &numbered(self.next, self.flows)].concat();
        }
        Some(&self.wire)
    }

    fn consume(&mut self) {
        self.next += 1;
        self.wire.clear();
    }

    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}

/// Sets the flag when it is dropped, also in a panic: another thread checks the flag, and the test
/// waits for that thread.
pub struct Ends<'a>(pub &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}
