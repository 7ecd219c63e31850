//! A capture file, replayed to the driver.

use super::error::PortError;
use super::interface::Port;
use crate::net::VnetHdr;
use netmem_packet::{Capture, Play};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

#[derive(Debug)]
struct Frames {
    /// All frames in wire form, one after the other.
    bytes: Vec<u8>,
    at: Vec<Range<usize>>,
}

/// Replays a capture. Drops the driver's frames. Clones share the frames and start at the first.
#[derive(Clone, Debug)]
pub struct Pcap {
    frames: Arc<Frames>,
    next: usize,
    play: Play,
}

impl Pcap {
    /// Reads and checks the whole of `path`: see [`Capture::open`].
    ///
    /// # Errors
    ///
    /// [`PortError::Capture`], with the number of the first record that is wrong.
    pub fn open(path: &Path, play: Play) -> Result<Self, PortError> {
        let capture = Capture::open(path).map_err(|source| PortError::Capture { path: path.into(), source })?;
        let mut frames = Frames { bytes: Vec::new(), at: Vec::with_capacity(capture.len()) };
        for frame in (0..).map_while(|index| capture.frame(index)) {
            let start = frames.bytes.len();
            frames.bytes.extend_from_slice(&VnetHdr::PLAIN.to_bytes());
            frames.bytes.extend_from_slice(frame);
            frames.at.push(start..frames.bytes.len());
        }
        Ok(Self { frames: Arc::new(frames), next: 0, play })
    }

    /// Frames in the file.
    #[must_use]
    pub fn len(&self) -> usize {
        self.frames.at.len()
    }

    /// Always false: a capture without frames is not opened.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Frame `index` of the file, without its virtio header.
    #[must_use]
    pub fn frame(&self, index: usize) -> Option<&[u8]> {
        self.frames.at.get(index).map(|r| &self.frames.bytes[r.start + VnetHdr::LEN..r.end])
    }

    /// Whether all frames were played ([`Play::Once`]).
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.next == self.len()
    }
}

impl Port for Pcap {
    const WANTS_BYTES: bool = false;
    const FEATURES: u64 = 0;

    #[inline]
    fn peek(&mut self) -> Option<&[u8]> {
        self.frames.at.get(self.next).map(|r| &self.frames.bytes[r.clone()])
    }

    #[inline]
    fn consume(&mut self) {
        self.next += 1;
        if self.next == self.frames.at.len() && self.play == Play::Loop {
            self.next = 0;
        }
    }

    fn send(&mut self, _: &[u8]) -> bool {
        true
    }
}
