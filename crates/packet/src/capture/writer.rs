//! Writes a pcapng file.

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption};
use pcap_file::{DataLink, PcapError};
use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The times of a file are in nanoseconds: the resolution is 10 to the power of minus 9.
const NANOSECONDS: u8 = 9;

/// Which way a frame went, seen from the interface that a capture is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureDirection {
    /// It was received.
    Inbound,
    /// It was sent.
    Outbound,
}

/// A pcapng file of Ethernet frames that is being written, with times in nanoseconds.
///
/// Cost of a frame: a reading of the clock, and a copy; a system call whenever a buffer is full.
pub struct PcapWriter(PcapNgWriter<BufWriter<File>>);

fn to_io(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        error => io::Error::other(error),
    }
}

impl PcapWriter {
    /// Makes the file, or replaces it if it is there.
    ///
    /// # Errors
    ///
    /// The file cannot be made or written.
    pub fn create(path: &Path) -> io::Result<Self> {
        let mut file = PcapNgWriter::new(BufWriter::new(File::create(path)?)).map_err(to_io)?;
        let options = vec![InterfaceDescriptionOption::IfTsResol(NANOSECONDS)];
        let interface = InterfaceDescriptionBlock { linktype: DataLink::ETHERNET, snaplen: 0, options };
        file.write_pcapng_block(interface).map_err(to_io)?;
        Ok(Self(file))
    }

    /// Writes a frame, with the present time, its direction and a comment.
    ///
    /// # Errors
    ///
    /// The file cannot be written. It may end within a frame then.
    pub fn write(
        &mut self,
        frame: &[u8],
        direction: Option<CaptureDirection>,
        comment: Option<&str>,
    ) -> io::Result<()> {
        // A clock before 1970 is wrong in any case.
        let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let original_len = u32::try_from(frame.len()).map_err(io::Error::other)?;
        let comment = comment.map(|text| EnhancedPacketOption::Comment(Cow::Borrowed(text)));
        let direction = direction.map(|direction| EnhancedPacketOption::Flags(direction as u32 + 1));
        let options = comment.into_iter().chain(direction).collect();
        let block =
            EnhancedPacketBlock { interface_id: 0, timestamp, original_len, data: Cow::Borrowed(frame), options };
        self.0.write_pcapng_block(block).map(drop).map_err(to_io)
    }

    /// Writes what is buffered: a system call, if there is anything.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        self.0.get_mut().flush()
    }
}

impl fmt::Debug for PcapWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PcapWriter")
    }
}
