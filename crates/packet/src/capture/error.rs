//! What is wrong with a capture file. Each error of a record has its number.

use pcap_file::{DataLink, PcapError};
use std::io;

/// What is wrong with a capture file. Records are counted from 1.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// The file cannot be read.
    #[error("cannot be read")]
    Read(#[from] io::Error),
    /// Neither a file nor a pipe.
    #[error("is neither a file nor a pipe")]
    NotAFile,
    /// A pipe without a writer.
    #[error("is a pipe that no process writes to; start the writer first")]
    NoWriter,
    /// A pipe whose writer wrote nothing for a while.
    #[error("is a pipe whose writer wrote nothing for {seconds} s; a capture is read to its end before it is played")]
    Stalled {
        /// How long.
        seconds: u64,
    },
    /// Neither pcap nor pcapng.
    #[error("is neither a pcap nor a pcapng file: {0}")]
    NotACapture(PcapError),
    /// Not frames of Ethernet.
    #[error("holds packets of link type {0:?}; Ethernet is needed")]
    NotEthernet(DataLink),
    /// The file ends in the middle.
    #[error("is cut off in record {record}")]
    CutOff {
        /// Which record.
        record: usize,
    },
    /// The file's structure is broken.
    #[error("record {record} is malformed")]
    Malformed {
        /// Which record.
        record: usize,
        /// How.
        #[source]
        source: PcapError,
    },
    /// No bytes, or fewer than an Ethernet header.
    #[error("record {record} has {len} bytes; an Ethernet frame has at least 14")]
    TooShort {
        /// Which record.
        record: usize,
        /// Its bytes.
        len: usize,
    },
    /// More bytes than any frame.
    #[error("record {record} has {len} bytes; a frame has at most {max}")]
    TooLong {
        /// Which record.
        record: usize,
        /// Its bytes.
        len: usize,
        /// The most.
        max: usize,
    },
    /// Only a part of the frame was captured.
    #[error("record {record} holds {captured} of the frame's {len} bytes; capture whole frames")]
    Snapped {
        /// Which record.
        record: usize,
        /// Its bytes.
        captured: usize,
        /// The frame's.
        len: usize,
    },
    /// There are no frames in it.
    #[error("holds no frames")]
    Empty,
}
