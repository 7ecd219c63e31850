//! Why a port could not be made, or no longer works.
//!
//! Each kind of port has its own reasons. The device reports them without knowing the port.

use std::io;

#[cfg(feature = "pcap")]
use netmem_packet::CaptureError;

/// The file by which taps are opened.
pub(super) const CONTROL: &str = "/dev/net/tun";

/// Why a port could not be made, or no longer works.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// A frame size out of range.
    #[error("frames of {size} bytes: {min} to {max} are possible")]
    FrameSize {
        /// The size asked for.
        size: usize,
        /// The least.
        min: usize,
        /// The most.
        max: usize,
    },
    /// A capture file that cannot be played. Feature `pcap`.
    #[cfg(feature = "pcap")]
    #[error("{}", path.display())]
    Capture {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        #[source]
        source: CaptureError,
    },
    /// An error of a port of another crate.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// A tap device could not be opened, or is gone.
    #[error("tap {name:?}")]
    Tap {
        /// The interface's name.
        name: String,
        /// Why.
        #[source]
        source: TapError,
    },
}

/// Why a tap device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TapError {
    /// Not a name that an interface can have.
    #[error("not an interface name: 1 to 15 bytes without '/', '%' (':' neither) and white space")]
    Name,
    /// No queues, or more than the kernel has.
    #[error("{asked} queues asked for, 1 to 256 are possible")]
    Queues {
        /// Queues asked for.
        asked: usize,
    },
    /// An interface of this name is in use, or is no tap with as many queues.
    #[error("the name is taken: by a tap that is in use, or by another kind of interface")]
    Taken,
    /// The process lacks the privilege to create interfaces.
    #[error(
        "not permitted: needs CAP_NET_ADMIN, or a tap created for this user (ip tuntap add NAME mode tap user $USER vnet_hdr)"
    )]
    NotPermitted,
    /// The kernel has no tap devices.
    #[error("{CONTROL} is missing: load the kernel module `tun`, or pass the device into this container")]
    Missing,
    /// Another system call failed.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}
