//! Errors of opening a socket.

use crate::helper::error::HelperError;
use crate::options::Mode;
use crate::privileges::{MissingPrivilege, of_queues};
use crate::program::error::AttachError;
use netmem_pool::{PoolError, RegionError};
use std::io;

/// The reason why a UMEM or a socket could not be made. Everything that was made before the error
/// is removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XskError {
    /// The kernel does not support chunks of this size.
    #[error(
        "chunks of {chunk} bytes in pages of {page} bytes: the kernel takes chunks of 2048 or 4096 bytes, which are not larger than a \
         page; longer frames are in several chunks"
    )]
    Chunk {
        /// The requested bytes of a chunk.
        chunk: usize,
        /// Bytes in a page.
        page: usize,
    },
    /// The headroom leaves too few bytes of a chunk.
    #[error(
        "a headroom of {headroom} bytes and the kernel's 256 leave less than {least} of a chunk of {chunk} bytes for the frame; \
         ask for less headroom or larger chunks"
    )]
    Headroom {
        /// The requested bytes of headroom.
        headroom: usize,
        /// Bytes in a chunk.
        chunk: usize,
        /// The least number of bytes that must be left.
        least: usize,
    },
    /// The size of a ring is not one that the kernel accepts.
    #[error("a {ring} ring of {size} entries: the size is a power of two between 2 and {max}")]
    RingSize {
        /// The name of the ring.
        ring: &'static str,
        /// The requested number of entries.
        size: u32,
        /// The largest number of entries.
        max: u32,
    },
    /// The provider hands out pages of other memory than that of the UMEM.
    #[error("the provider's pages are not those of the UMEM's region; open the queue with a provider of that region")]
    Provider,
    /// The pool of a receive queue could not be made.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A privilege is missing.
    #[error(transparent)]
    Missing(#[from] MissingPrivilege),
    /// The program could not be attached.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The helper has not put the sockets into the map of its program.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// The helper has granted no socket of this queue, or it was taken before.
    #[error(
        "the helper has granted no socket of queue {queue} of interface {interface}, or it was used before; ask for a grant \
         with this queue"
    )]
    NotGranted {
        /// The interface's name.
        interface: String,
        /// The number of the queue.
        queue: u32,
    },
    /// The memory could not be allocated.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// There are fewer pages than the fill ring must hold.
    #[error("{got} of {want} receive buffers could be posted: make the region larger, or the fill level lower")]
    Pages {
        /// The number of buffers to post.
        want: usize,
        /// The number of buffers that were posted.
        got: usize,
    },
    /// The process may not pin the memory, or the system has no room for that. The kernel counts
    /// the memory of a UMEM until some time after its last socket was closed. If this UMEM has had
    /// a socket, the opening call waits half a second for that.
    #[error(
        "the kernel may not pin {bytes} bytes{} for the UMEM: the limit (RLIMIT_MEMLOCK) is {limit} bytes for all sockets of this \
         user; raise it with `ulimit -l` or `LimitMEMLOCK=`, use less memory, or have CAP_IPC_LOCK",
        of_queues(*bytes as u64, *queues)
    )]
    Memlock {
        /// Bytes of the UMEM.
        bytes: usize,
        /// The number of queues that the memory is for, or 1 if it is unknown.
        queues: usize,
        /// The process's limit.
        limit: u64,
        /// The error of the system call.
        source: io::Error,
    },
    /// The system refused a step because a privilege is missing.
    #[error("cannot {step}; this needs {privilege}")]
    Privilege {
        /// The attempted step.
        step: &'static str,
        /// The missing privilege.
        privilege: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// The interface's queue has another AF_XDP socket, of this process or of another one, and has
    /// had it for half a second at least. The opening call waits this long for a socket that was
    /// closed just before. It does not wait if the socket is the UMEM's first one.
    #[error(
        "queue {queue} of interface {interface} has an AF_XDP socket already; close that socket, or use another queue"
    )]
    Busy {
        /// The interface's name, or its index if the name is unknown.
        interface: String,
        /// The number of the queue.
        queue: u32,
    },
    /// There is no such interface in the network namespace of the socket.
    #[error("there is no interface {interface} in this network namespace")]
    NoInterface {
        /// The interface's name, or its index if the name is unknown.
        interface: String,
    },
    /// The interface has no such queue.
    #[error(
        "interface {interface} has no queue {queue} that takes AF_XDP sockets{}; `netmem info` lists the queues",
        in_use.map_or(String::new(), |n| format!(": the queues in use are those below {n}"))
    )]
    NoQueue {
        /// The interface's name, or its index if the name is unknown.
        interface: String,
        /// The number of the queue.
        queue: u32,
        /// The number of queues in use: of receive queues or of transmit queues, whichever are
        /// more. `None` if the driver does not report it.
        in_use: Option<u32>,
    },
    /// The driver does not support what the options request.
    #[error(
        "the driver of interface {interface} does not support {what} on queue {queue}; leave the option out, or use another \
         interface"
    )]
    Unsupported {
        /// The interface's name, or its index if the name is unknown.
        interface: String,
        /// The number of the queue.
        queue: u32,
        /// The requested feature.
        what: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// The options require another mode than that of the UMEM's other sockets.
    #[error(
        "queue {queue} of interface {interface} cannot be in {mode} mode, because the UMEM's first socket is not, and all have the \
         mode of the first; leave the option out, or use another UMEM of the same region"
    )]
    Mode {
        /// The interface's name, or its index if the name is unknown.
        interface: String,
        /// The number of the queue.
        queue: u32,
        /// The mode that the options require.
        mode: Mode,
    },
    /// The system refused a step.
    #[error("cannot {step}")]
    System {
        /// The attempted step.
        step: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
}

impl XskError {
    /// This error, with the number of queues that the memory is for.
    pub(crate) fn for_queues(mut self, number: usize) -> Self {
        if let Self::Memlock { queues, .. } | Self::Missing(MissingPrivilege::LockedMemory { queues, .. }) = &mut self {
            *queues = number;
        }
        self
    }
}
