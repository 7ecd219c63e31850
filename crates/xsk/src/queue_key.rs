//! The identity of an interface's queue: what a closed socket and its successor have in common.

use crate::sys;
use std::os::fd::BorrowedFd;

/// A queue of an interface, in any network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueKey {
    /// The kernel's number of the network namespace. `None` if the kernel does not report it
    /// (before Linux 5.14).
    pub(crate) netns: Option<u64>,
    pub(crate) ifindex: u32,
    pub(crate) queue: u32,
}

impl QueueKey {
    /// A queue of an interface in the network namespace of this socket.
    pub(crate) fn new(socket: BorrowedFd<'_>, ifindex: u32, queue: u32) -> Self {
        Self { netns: sys::netns(socket).ok(), ifindex, queue }
    }
}

/// A queue of an interface, as a socket is bound to it.
pub(crate) struct QueueAddress {
    /// The name of the interface, for errors and reports.
    pub(crate) interface: String,
    /// The index of the interface, in the network namespace of the socket.
    pub(crate) ifindex: u32,
    pub(crate) queue: u32,
}
