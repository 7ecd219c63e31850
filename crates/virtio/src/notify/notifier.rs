//! Signals to a peer, by its eventfd.

use super::aio::Context;
use super::error::NotifyError;
use super::eventfd::context_for;
use super::writer::Writer;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// An eventfd that signals the peer. A signal never blocks, whatever the peer does to the eventfd.
#[derive(Debug)]
pub(crate) struct Notifier(pub(super) SignalMethod);

/// How an eventfd is signalled.
#[derive(Debug)]
pub(super) enum SignalMethod {
    Aio { fd: OwnedFd, context: &'static Context },
    Thread(Writer),
}

impl Notifier {
    /// Owns a descriptor that a peer shares. This does not signal it, and the flags of the open
    /// file stay unchanged.
    ///
    /// # Errors
    ///
    /// [`NotifyError`]: it is not an eventfd, or there is neither asynchronous I/O nor a thread.
    pub(crate) fn new(fd: OwnedFd) -> Result<Self, NotifyError> {
        Ok(Self(match context_for(fd.as_fd())? {
            Some(context) => SignalMethod::Aio { fd, context },
            None => {
                let failed = |source| NotifyError::Io { what: "starting the thread of an eventfd", source };
                SignalMethod::Thread(Writer::new(fd).map_err(failed)?)
            }
        }))
    }

    /// Adds 1 to the counter and wakes its readers. If the counter is full, it stays full; its
    /// readers are woken.
    ///
    /// Cost: one system call, and a second one for each hundred signals or so. The signal is lost
    /// only if the kernel has no memory for a request; this is logged. Without asynchronous I/O a
    /// thread is woken, which adds 1 for all signals since its last write, and nothing to a full
    /// counter.
    pub(crate) fn signal(&self) {
        match &self.0 {
            SignalMethod::Aio { fd, context } => {
                if let Err(error) = context.signal(fd.as_fd()) {
                    netmem_pool::trace::warn!(%error, "a signal to a peer is lost");
                }
            }
            SignalMethod::Thread(writer) => writer.signal(),
        }
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            SignalMethod::Aio { fd, .. } => fd.as_fd(),
            SignalMethod::Thread(writer) => writer.fd(),
        }
    }
}
