//! A capture file: pcap and pcapng, read and checked as a whole when it is opened.
//!
//! A broken file is an error at the start, with the number of its first wrong record, and not a
//! queue that stops later.

use super::error::CaptureError;
use pcap_file::pcap::PcapParser;
use pcap_file::pcapng::{Block, PcapNgParser};
use pcap_file::{DataLink, PcapError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use std::borrow::Cow;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long the writer of a pipe may write nothing.
const PATIENCE: Duration = Duration::from_secs(10);
/// The shortest frame: an Ethernet header.
const SHORTEST: usize = 14;
/// The longest frame: a maximal IP packet behind an Ethernet header.
const LONGEST: usize = 65535 + 14;

/// How often a capture is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Play {
    /// Once; after that there are no frames.
    Once,
    /// Again and again.
    Loop,
}

#[derive(Debug, Default)]
struct Frames {
    /// All frames, one after the other.
    bytes: Vec<u8>,
    at: Vec<Range<usize>>,
}

impl Frames {
    fn push(&mut self, len: usize, data: &[u8]) -> Result<(), CaptureError> {
        let record = self.at.len() + 1;
        if data.len() < len {
            return Err(CaptureError::Snapped { record, captured: data.len(), len });
        }
        if data.len() < SHORTEST {
            return Err(CaptureError::TooShort { record, len: data.len() });
        }
        if data.len() > LONGEST {
            return Err(CaptureError::TooLong { record, len: data.len(), max: LONGEST });
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(data);
        self.at.push(start..self.bytes.len());
        Ok(())
    }

    fn failed(&self, e: PcapError) -> CaptureError {
        let record = self.at.len() + 1;
        match e {
            PcapError::IncompleteBuffer => CaptureError::CutOff { record },
            source => CaptureError::Malformed { record, source },
        }
    }

    fn pcap(&mut self, file: &[u8]) -> Result<(), CaptureError> {
        let (mut rest, parser) = PcapParser::new(file).map_err(CaptureError::NotACapture)?;
        ethernet(parser.header().datalink)?;
        while !rest.is_empty() {
            let (after, packet) = parser.next_raw_packet(rest).map_err(|e| self.failed(e))?;
            self.push(packet.orig_len as usize, &packet.data)?;
            rest = after;
        }
        Ok(())
    }

    fn pcapng(&mut self, file: &[u8]) -> Result<(), CaptureError> {
        let (mut rest, mut parser) = PcapNgParser::new(file).map_err(CaptureError::NotACapture)?;
        while !rest.is_empty() {
            let (after, block) = parser.next_block(rest).map_err(|e| self.failed(e))?;
            let link = |i: u32| parser.interfaces().get(i as usize).map(|i| i.linktype);
            let (interface, len, data) = match block {
                Block::EnhancedPacket(p) => (p.interface_id, p.original_len as usize, p.data),
                Block::Packet(p) => (u32::from(p.interface_id), p.original_len as usize, p.data),
                // Its data ends with padding, and its length is the frame's, or the interface's
                // limit.
                Block::SimplePacket(p) => {
                    let len = p.original_len as usize;
                    let snap = parser.interfaces().first().map_or(0, |i| i.snaplen as usize);
                    let kept = if snap == 0 { len } else { len.min(snap) };
                    let data = p.data.get(..kept).ok_or_else(|| self.failed(PcapError::IncompleteBuffer))?;
                    (0, len, Cow::Owned(data.to_vec()))
                }
                _ => {
                    rest = after;
                    continue;
                }
            };
            let link = link(interface).ok_or_else(|| self.failed(PcapError::InvalidInterfaceId(interface)))?;
            ethernet(link)?;
            self.push(len, &data)?;
            rest = after;
        }
        Ok(())
    }
}

fn ethernet(link: DataLink) -> Result<(), CaptureError> {
    if link == DataLink::ETHERNET { Ok(()) } else { Err(CaptureError::NotEthernet(link)) }
}

/// Reads all of a file or a pipe. Opening a pipe does not wait for a writer. Each read waits at
/// most [`PATIENCE`].
fn read(path: &Path) -> Result<Vec<u8>, CaptureError> {
    // They have no effect on files.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_fifo() {
        return Err(CaptureError::NotAFile);
    }
    let mut bytes = Vec::new();
    loop {
        match file.read_to_end(&mut bytes) {
            Ok(_) if kind.is_fifo() && bytes.is_empty() => return Err(CaptureError::NoWriter),
            Ok(_) => return Ok(bytes),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => return Err(e.into()),
        }
        let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        match poll(&mut [PollFd::new(&file, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(CaptureError::Stalled { seconds: PATIENCE.as_secs() }),
            Ok(_) => {}
            // A signal has arrived, which may be one that ends the program.
            Err(e) => return Err(CaptureError::Read(e.into())),
        }
    }
}

/// The frames of a capture file, in its order. Clones share them.
#[derive(Clone, Debug)]
pub struct Capture(Arc<Frames>);

impl Capture {
    /// Reads and checks the whole of `path`, pcap or pcapng: a file, or a pipe with a writer, up to
    /// its end. It is in memory then.
    ///
    /// Never waits longer than 10 s for the next bytes of a pipe.
    ///
    /// # Errors
    ///
    /// [`CaptureError`], with the number of the first record that is wrong. A capture without
    /// frames is an error, too.
    pub fn open(path: &Path) -> Result<Self, CaptureError> {
        let file = read(path)?;
        let mut frames = Frames::default();
        // A section header block, in either byte order.
        if file.starts_with(&[0x0a, 0x0d, 0x0d, 0x0a]) {
            frames.pcapng(&file)?
        } else {
            frames.pcap(&file)?
        }
        if frames.at.is_empty() { Err(CaptureError::Empty) } else { Ok(Self(Arc::new(frames))) }
    }

    /// Frames in the file: at least one.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a capture without frames is not opened")]
    pub fn len(&self) -> usize {
        self.0.at.len()
    }

    /// Frame `index` of the file.
    #[inline]
    #[must_use]
    pub fn frame(&self, index: usize) -> Option<&[u8]> {
        self.0.at.get(index).map(|range| &self.0.bytes[range.clone()])
    }
}

/// A place in a capture.
#[derive(Clone, Debug)]
pub(super) struct Position {
    pub(super) capture: Capture,
    next: usize,
    play: Play,
}

impl Position {
    pub(super) fn new(capture: Capture, play: Play) -> Self {
        Self { capture, next: 0, play }
    }

    /// The frame at this place. `None` if all were played.
    pub(super) fn frame(&self) -> Option<&[u8]> {
        self.capture.frame(self.next)
    }

    pub(super) fn advance(&mut self) {
        self.next += 1;
        if self.next == self.capture.len() && self.play == Play::Loop {
            self.next = 0;
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.next == self.capture.len()
    }
}
