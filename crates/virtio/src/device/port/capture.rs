//! The capture of a device's links.

use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use netmem_packet::{CaptureDirection, PcapWriter};

use super::linked::Way;
use crate::net::VnetHdr;

/// A pcapng file with the packets of a device's links, as the driver's interface would see them:
/// what goes to the driver is inbound. A packet that was dropped has the reason as a comment,
/// `dropped: too_big`: a name of [`DropReason`](crate::device::DropReason), or what the link did.
///
/// A frame that is longer than any is cut at [`MAX_WIRE`](super::MAX_WIRE). Not written are frames
/// that wait in the inner port when a front end leaves, and those that could not be copied; the
/// device counts them. The queue pairs of a device have the file in common. If the file cannot be
/// written, the device goes on without it, and [`flush`](Self::flush) returns the error.
#[derive(Debug)]
pub struct LinkCapture(Mutex<State>);

#[derive(Debug)]
struct State {
    file: PcapWriter,
    failed: Option<io::Error>,
}

impl LinkCapture {
    /// Makes the file, or replaces it if it is there.
    ///
    /// # Errors
    ///
    /// The file cannot be made or written.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self(Mutex::new(State { file: PcapWriter::create(path)?, failed: None })))
    }

    fn with(&self, f: impl FnOnce(&mut PcapWriter) -> io::Result<()>) -> io::Result<()> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.failed.is_none() {
            state.failed = f(&mut state.file).err();
        }
        match &state.failed {
            None => Ok(()),
            Some(error) => Err(io::Error::new(error.kind(), format!("the capture lacks packets: {error}"))),
        }
    }

    /// Writes a frame in wire form, without its virtio header.
    pub(super) fn write(&self, way: Way, wire: &[u8], dropped: Option<&str>) {
        let direction = match way {
            Way::ToDriver => CaptureDirection::Inbound,
            Way::FromDriver => CaptureDirection::Outbound,
        };
        let comment = dropped.map(|why| format!("dropped: {why}"));
        let frame = wire.get(VnetHdr::LEN..).unwrap_or_default();
        // Kept for `flush`.
        let _ = self.with(|file| file.write(frame, Some(direction), comment.as_deref()));
    }

    /// Writes what is buffered. A link does it itself when there are no more frames.
    ///
    /// # Errors
    ///
    /// The file could not be written, now or earlier.
    pub fn flush(&self) -> io::Result<()> {
        self.with(PcapWriter::flush)
    }
}
