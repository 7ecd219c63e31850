//! TCP segments, and a port that has them.

use std::collections::VecDeque;

use etherparse::PacketBuilder;
use netmem_packet::{Headers, SplitFrame, Sum};
use netmem_virtio::device::port::{ALL_OFFLOADS, Port};
use netmem_virtio::driver::VirtioSplitRx;
use netmem_virtio::net::{VnetHdr, feature};

use super::split::{DeviceMemory, take};
use super::{frame, until};

/// Formats of rings, with tables of descriptors and without.
pub const RINGS: [u64; 6] = [
    0,
    feature::INDIRECT_DESC,
    feature::RING_PACKED,
    feature::RING_PACKED | feature::INDIRECT_DESC,
    feature::IN_ORDER | feature::INDIRECT_DESC | feature::EVENT_IDX,
    feature::RING_PACKED | feature::IN_ORDER | feature::INDIRECT_DESC | feature::EVENT_IDX,
];

/// A port with frames in wire form.
pub struct WireFrames(pub VecDeque<Vec<u8>>);

impl WireFrames {
    pub fn new<'f>(header: VnetHdr, frames: impl IntoIterator<Item = &'f Vec<u8>>) -> Self {
        Self(frames.into_iter().map(|frame| [&header.to_bytes()[..], frame].concat()).collect())
    }
}

impl Port for WireFrames {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = ALL_OFFLOADS;

    fn peek(&mut self) -> Option<&[u8]> {
        self.0.front().map(|wire| &wire[..])
    }

    fn consume(&mut self) {
        self.0.pop_front();
    }

    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}

/// A TCP segment of flow `flow`.
pub fn tcp(v6: bool, flow: u8, seq: u32, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
    let ip =
        if v6 { ethernet.ipv6([0xfd; 16], [flow; 16], 64) } else { ethernet.ipv4([10, 0, 0, 1], [10, 0, 1, flow], 64) };
    let tcp = ip.tcp(5000, 80, seq, 1000).ack(77).options_raw(options).unwrap();
    tcp.write(&mut frame, payload).unwrap();
    frame
}

/// Computes the checksums again after a test has changed the headers.
pub fn seal(frame: &mut [u8]) {
    let at = Headers::parse(frame).unwrap();
    if !at.v6 {
        frame[at.l3 + 10..at.l3 + 12].fill(0);
        let mut sum = Sum::default();
        sum.add(&frame[at.l3..at.l4]);
        let sum = (!sum.value()).to_be_bytes();
        frame[at.l3 + 10..at.l3 + 12].copy_from_slice(&sum);
    }
    frame[at.l4 + 16..at.l4 + 18].fill(0);
    let (mut sum, len) = (Sum::default(), at.end(frame) - at.l4);
    sum.add(at.addresses(frame));
    sum.add_word(6);
    sum.add_word(len as u16);
    sum.add(&frame[at.l4..at.l4 + len]);
    frame[at.l4 + 16..at.l4 + 18].copy_from_slice(&sum.checksum().to_be_bytes());
}

/// Bytes of payload to compare.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    frame(seed, len)
}

/// Consecutive segments of a flow, `lens` bytes each, of bytes of `seed`.
pub fn flow(v6: bool, number: u8, seed: u64, lens: &[usize]) -> Vec<Vec<u8>> {
    let (all, mut at) = (frame(seed, lens.iter().sum()), 0);
    let segment = |&len: &usize| {
        let segment = tcp(v6, number, 0xffff_0000_u32.wrapping_add(at as u32), &[1; 12], &all[at..at + len]);
        at += len;
        segment
    };
    lens.iter().map(segment).collect()
}

/// The next `n` frames.
pub fn receive(rx: &mut VirtioSplitRx, n: usize) -> Vec<SplitFrame> {
    let mut frames = Vec::new();
    until(|| {
        frames.extend(take(rx));
        frames.len() >= n
    });
    assert_eq!(frames.len(), n);
    frames
}

/// Bytes of payload.
pub fn payload(memory: &DeviceMemory, frame: &SplitFrame) -> Vec<u8> {
    frame.payload().fragments().flat_map(|frag| memory.read(frag)).collect()
}
