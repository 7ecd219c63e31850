//! Why a program was not attached, or a socket not put into its map.

use super::metadata::NoRxMetadata;
use crate::netlink::{AttachMode, Attached};
use crate::privileges::MissingPrivilege;
use std::io;
use std::path::PathBuf;

/// The reason why a program was not attached, or a socket not put into its map.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// There is no such interface in this network namespace.
    #[error("there is no interface {0} in this network namespace")]
    NoInterface(String),
    /// A privilege is missing.
    #[error(transparent)]
    Privilege(#[from] MissingPrivilege),
    /// Another program is attached. It is left as it is.
    #[error(
        "interface {interface} has an XDP program already: number {}{} in {}. It is left alone: end the process that attached it, or \
         remove it (ip link set {interface} xdp off)",
        attached.program,
        name.as_ref().map_or(String::new(), |name| format!(", named {name},")),
        attached.mode
    )]
    Occupied {
        /// The name of the interface.
        interface: String,
        /// The attached program.
        attached: Attached,
        /// The program's name, if it has one and this process may know it.
        name: Option<String>,
    },
    /// The kernel's verifier has refused the program. The log names the instruction.
    #[error("the kernel refuses the XDP program; its verifier says:\n{log}")]
    Rejected {
        /// The verifier's log.
        log: String,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// The driver refuses programs in this mode, or it refuses this program with the interface's
    /// settings.
    #[error(
        "interface {interface} takes no XDP program in {mode}: the driver lacks it, or lacks it with the present MTU ({mtu}), number of \
         queues or offloads (LRO); the kernel's log may say more"
    )]
    Refused {
        /// The name of the interface.
        interface: String,
        /// The mode.
        mode: AttachMode,
        /// The interface's MTU.
        mtu: u32,
        /// The driver's error.
        #[source]
        source: io::Error,
    },
    /// A program that reads the kernel's metadata functions was required
    /// ([`KernelMetadata::Required`](crate::KernelMetadata::Required)).
    #[error("interface {interface}: no metadata of received frames (KernelMetadata::IfSupported opens it without)")]
    NoMetadata {
        /// The name of the interface.
        interface: String,
        /// What is missing.
        #[source]
        reason: NoRxMetadata,
    },
    /// This crate cannot attach programs in this mode.
    #[error("{0} needs a program that was loaded for the device, which this crate does not do")]
    Mode(AttachMode),
    /// The map has no entry for this queue.
    #[error("queue {queue}: the program's map has entries for {entries} queues")]
    Queue {
        /// The requested queue.
        queue: u32,
        /// The number of entries of the map.
        entries: u32,
    },
    /// A descriptor is not that of a map of AF_XDP sockets.
    #[error(
        "the descriptor is not that of a map of AF_XDP sockets (BPF_MAP_TYPE_XSKMAP){}",
        map_type.map_or(String::new(), |kind| format!(": it is of a map of type {kind}"))
    )]
    NoSocketMap {
        /// The kernel's number of the map's type. `None` if the descriptor is not that of a map.
        map_type: Option<u32>,
    },
    /// The map belongs to a program on another interface. The kernel would drop the frames that it
    /// redirects to a socket of this one.
    #[error(
        "the map of sockets is that of program {program} on interface {other}, and no program on interface {interface} uses it; \
         open the queues of {other}, or attach the program to {interface}"
    )]
    OtherInterface {
        /// The interface of the sockets.
        interface: String,
        /// The interface of the program.
        other: String,
        /// The number of the program.
        program: u32,
    },
    /// The object that is pinned at a path cannot be used here.
    #[error("{}: {what}", path.display())]
    Pinned {
        /// The path.
        path: PathBuf,
        /// The problem with the object.
        what: &'static str,
    },
    /// The system refused a step.
    #[error("{what}")]
    System {
        /// The attempted step.
        what: &'static str,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

pub(super) fn system(what: &'static str) -> impl FnOnce(io::Error) -> AttachError {
    move |source| AttachError::System { what, source }
}
