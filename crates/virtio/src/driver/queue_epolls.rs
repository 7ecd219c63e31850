//! The descriptors that wake threads which wait for queues. See `wait.rs`.
//!
//! Why an epoll set for each queue, and not its eventfd: a restart makes a new eventfd, and a
//! program registers the descriptor of a queue once.

use crate::notify::{Kicks, NotifyError};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The epoll sets of a device's queues, by queue index.
#[derive(Debug)]
pub(super) struct QueueEpolls {
    sets: Box<[Kicks]>,
    /// An eventfd that is never 0 and that no peer has.
    ready: OwnedFd,
}

impl QueueEpolls {
    /// A set for each of `queues` queues.
    pub(super) fn new(queues: usize) -> Result<Self, NotifyError> {
        let failed = |e: rustix::io::Errno| NotifyError::Io { what: "eventfd", source: e.into() };
        let ready = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let set = |_| {
            let set = Kicks::new()?;
            set.watch_ready(ready.as_fd())?;
            Ok(set)
        };
        let sets = (0..queues).map(set).collect::<Result<_, NotifyError>>()?;
        Ok(Self { sets, ready })
    }

    /// The set of a queue.
    pub(super) fn of(&self, queue: usize) -> &Kicks {
        &self.sets[queue]
    }

    /// Wakes the threads that wait for a queue.
    pub(super) fn wake(&self, queue: usize) {
        self.of(queue).wake(self.ready.as_fd());
    }

    /// Wakes the threads that wait for any queue.
    pub(super) fn wake_all(&self) {
        (0..self.sets.len()).for_each(|queue| self.wake(queue));
    }

    /// Wakes the threads when the back end closes the connection `socket`. Ends when `socket` is
    /// closed.
    pub(super) fn watch(&self, socket: BorrowedFd<'_>) -> Result<(), NotifyError> {
        self.sets.iter().try_for_each(|set| set.watch_hang_up(socket))
    }
}
