//! Why a descriptor cannot be used for events.

use crate::advice::advice;
use std::io;

/// Why a descriptor cannot be used for events.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotifyError {
    /// The descriptor is of another kind: a pipe, a socket, a file.
    #[error("the descriptor is not an eventfd, and another kind of file could block the thread that signals it")]
    NotEventfd,
    /// The kernel provides no means to signal without blocking.
    #[error(
        "no asynchronous I/O ({source}), which signals to a peer need; see the sysctl fs.aio-max-nr, and seccomp filters"
    )]
    Aio {
        /// What the kernel answered.
        r#source: io::Error,
    },
    /// Another system call failed.
    #[error("{what}: {source}; {hint}", hint = advice(source, "the system may be short of memory"))]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the kernel answered.
        r#source: io::Error,
    },
}
