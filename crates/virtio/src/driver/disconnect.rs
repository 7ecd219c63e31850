//! Whether the back end still holds the connection, as a queue sees it.
//!
//! When a back end ends, its rings stay as they are, and a queue that is polled finds nothing in
//! them. A poll makes no system call, so the end of the connection is a word in memory. The thread
//! that notices first writes it:
//!
//! * a thread that waits for a queue: the end of the connection wakes it, and `arm` finds the
//!   event;
//! * a thread that only polls: after every [`POLLS_PER_CHECK`](super::idle::POLLS_PER_CHECK) polls
//!   that found nothing, it polls the socket;
//! * [`VirtioNet::is_connected`](super::VirtioNet::is_connected), which always polls the socket.
//!
//! The word has the number of the connection that has ended. Each reconnect has a new number, so
//! the word need not be reset: if a thread notices the end of an old connection late, that does not
//! concern the new one.

use super::state::{Attached, DriverState};
use netmem_pool::PeerMemory;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, TryLockError};

impl<M: PeerMemory> DriverState<M> {
    /// Whether the connection has not been seen to end. Two loads.
    pub(super) fn is_connected(&self) -> bool {
        !self.last_disconnect.is(self.connection.load(Ordering::Acquire))
    }

    /// Polls the socket of the connection, which the caller has locked, and records its end.
    /// Unlocks it before the end is reported: a subscriber to events is user code.
    pub(super) fn check_connection(&self, at: MutexGuard<'_, Attached>) -> bool {
        let (connected, connection) = (at.backend.is_connected(), at.rings.connection);
        let is_new = !connected && self.last_disconnect.set(connection);
        drop(at);
        if is_new {
            report(connection);
        }
        connected
    }

    /// The same, unless a control thread has the connection locked.
    #[cold]
    pub(super) fn try_check_connection(&self) {
        if let Ok(at) = self.attached.try_lock() {
            self.check_connection(at);
        }
    }

    /// Records that a queue's epoll set has reported the end of a connection. `connection` is the
    /// number of the ring's connection.
    #[cold]
    pub(super) fn hung_up(&self, connection: u32) {
        match self.attached.try_lock() {
            Ok(at) => _ = self.check_connection(at),
            Err(TryLockError::Poisoned(at)) => _ = self.check_connection(at.into_inner()),
            Err(TryLockError::WouldBlock) if self.last_disconnect.set(connection) => report(connection),
            Err(TryLockError::WouldBlock) => {}
        }
    }
}

fn report(connection: u32) {
    netmem_pool::trace::debug!(connection, "the back end has closed the connection");
}
