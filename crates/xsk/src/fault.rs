//! Faults that stop a queue.
//!
//! The kernel writes to the rings, and a defect of it or of a driver could make this process read
//! or return memory that is in use. So each index, address and length is validated, and an invalid
//! one stops the queue by name.

/// The reason why a queue has stopped: the kernel has written an invalid value to a ring, or the
/// socket is not bound any more. A stopped queue receives and sends nothing. Its frames are
/// returned or quarantined when it is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// An index of a ring has an impossible value.
    #[error("a ring's producer is at {producer} and its consumer at {consumer}, which cannot be")]
    Index {
        /// The producer's index.
        producer: u32,
        /// The consumer's index.
        consumer: u32,
    },
    /// The address of an entry is outside of the UMEM, or it is in a chunk that the kernel does not
    /// have.
    #[error("the kernel speaks of address {addr:#x}, where it has no chunk of this queue")]
    Address {
        /// The address.
        addr: u64,
    },
    /// A frame extends beyond its chunk.
    #[error("the kernel speaks of {len} bytes at address {addr:#x}, which reach beyond the chunk")]
    Length {
        /// The address.
        addr: u64,
        /// The length.
        len: u32,
    },
    /// The interface was deleted, or moved to another network namespace: the socket will never
    /// receive or send again.
    #[error("the interface is gone: it was deleted, or moved to another network namespace")]
    Gone,
}

/// A queue that has stopped: what [`Wait::arm`](netmem_packet::Wait::arm) and
/// [`Wait::check`](netmem_packet::Wait::check) of a queue return, inside of an `io::Error`. The
/// kind of that is `NetworkDown` if the interface is gone, else `InvalidData`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("queue {queue} of {interface} has stopped: {fault}")]
#[non_exhaustive]
pub struct QueueStopped {
    /// The interface's name, or its index if the name is unknown.
    pub interface: String,
    /// The number of the queue.
    pub queue: u32,
    /// Why it has stopped.
    pub fault: Fault,
}

impl Fault {
    /// The name of the fault in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Index { .. } => "bad_index",
            Self::Address { .. } => "bad_address",
            Self::Length { .. } => "bad_length",
            Self::Gone => "interface_gone",
        }
    }
}
