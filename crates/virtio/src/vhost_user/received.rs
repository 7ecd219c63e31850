//! A descriptor that a peer has sent, and how it is closed.
//!
//! The peer chooses the file, and closing a file can wait for the peer:
//!
//! * A file of a file system that the peer serves (FUSE): `close` sends a request to it, and waits
//!   for the answer without a limit.
//! * A TCP socket with `SO_LINGER`: the last `close` waits until the other end has acknowledged all
//!   data, or the time is over that the peer has set.
//! * A terminal: the last `close` waits for its output.
//!
//! A thread that waited there would keep the device from its next front end. Therefore a descriptor
//! is sorted before it is closed, by two questions that the kernel answers without the file's own
//! code:
//!
//! ```text
//!   a memory file (F_GET_SEALS), an eventfd ──► closed here, at once
//!   any other file                          ──► closed by a thread of its own
//! ```
//!
//! Such a thread ends when the peer lets it, at the latest when the peer's process ends.
//! [`MAX_CLOSING`] bounds them: while there are that many, no message with a descriptor is
//! received.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use crate::notify::{NotifyError, check_eventfd};

/// The most descriptors that are being closed while messages with further descriptors are received.
/// A message that is being received exceeds it by its own.
pub(crate) const MAX_CLOSING: usize = 64;

/// Descriptors that are being closed by a thread of their own.
static CLOSING: AtomicUsize = AtomicUsize::new(0);

/// How many descriptors of peers this process is closing by threads of their own.
pub(crate) fn closing() -> usize {
    CLOSING.load(Ordering::Relaxed)
}

/// A descriptor that a peer has sent. Dropping it closes it without a wait for the peer.
#[derive(Debug)]
pub(crate) struct Received(Option<OwnedFd>);

impl Received {
    /// The descriptor, which must be an eventfd.
    ///
    /// # Errors
    ///
    /// As [`check_eventfd`].
    pub(crate) fn eventfd(self) -> Result<OwnedFd, NotifyError> {
        check_eventfd(self.as_fd())?;
        Ok(self.into_inner())
    }

    /// The descriptor, for a function that makes a [`Received`] of it again.
    pub(crate) fn into_inner(mut self) -> OwnedFd {
        self.0.take().unwrap_or_else(|| unreachable!("only `drop` and this take the descriptor"))
    }
}

impl From<OwnedFd> for Received {
    fn from(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }
}

impl AsFd for Received {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().map_or_else(|| unreachable!("as in `into_inner`"), AsFd::as_fd)
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        let Some(fd) = self.0.take() else { return };
        if !is_memory(fd.as_fd()) && check_eventfd(fd.as_fd()).is_err() {
            close_on_a_thread(fd);
        }
    }
}

/// Whether a file lies in memory: a memfd, or a file on tmpfs or hugetlbfs. Only these have seals.
/// The kernel answers by itself: it asks no file system.
pub(crate) fn is_memory(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok()
}

#[cold]
fn close_on_a_thread(fd: OwnedFd) {
    CLOSING.fetch_add(1, Ordering::Relaxed);
    let fd = std::mem::ManuallyDrop::new(fd);
    let close = move || {
        drop(std::mem::ManuallyDrop::into_inner(fd));
        CLOSING.fetch_sub(1, Ordering::Relaxed);
    };
    // Without a thread the descriptor stays open, and counts: closing it here could wait.
    if let Err(error) = Builder::new().name("netmem-close".into()).stack_size(64 << 10).spawn(close) {
        netmem_pool::trace::warn!(%error, "no thread to close a descriptor of a peer; it stays open");
    }
}
