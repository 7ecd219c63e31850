//! How another thread wakes the thread that drives a stack, at no cost while that thread polls.
//!
//! ```text
//!   the stack's thread (`arm`)               another thread (`notify`)
//!   1  clears the eventfd                    1  publishes work: a frame, or `notified`
//!   2  armed = true                          2  exchanges armed for false
//!   3  checks for work                          it was true: writes the eventfd
//!        some: armed = false, `Work`            it was false: nothing
//!        none: `Waits`, sleeps
//! ```
//!
//! All accesses to `armed`, and those by which work is published and checked for, are sequentially
//! consistent, so at least one side sees the other's.

use netmem_packet::Armed;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Wakes the thread that drives a stack.
pub(crate) struct Notifier {
    armed: AtomicBool,
    /// The stack must be polled, also if its mailbox is empty.
    notified: AtomicBool,
    event: OwnedFd,
}

impl Notifier {
    pub(crate) fn new() -> Result<Self, Errno> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { armed: AtomicBool::new(false), notified: AtomicBool::new(false), event })
    }

    /// Wakes the stack's thread. The caller has published work before, by a sequentially consistent
    /// access.
    pub(crate) fn notify_published(&self) {
        if self.armed.load(Ordering::SeqCst) && self.armed.swap(false, Ordering::SeqCst) {
            // The write fails if the counter is full. Then the descriptor is readable already.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Wakes the stack's thread, or makes its next sleep end at once.
    pub(crate) fn notify(&self) {
        self.notified.store(true, Ordering::SeqCst);
        self.notify_published();
    }

    /// Clears a [notification](Self::notify), because the stack is polled now. Returns whether
    /// there was one.
    pub(crate) fn take(&self) -> bool {
        self.notified.load(Ordering::Relaxed) && self.notified.swap(false, Ordering::SeqCst)
    }

    pub(crate) fn arm(&self, has_work: impl FnOnce() -> bool) -> Armed {
        // The read fails if the eventfd was not written.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.armed.store(true, Ordering::SeqCst);
        if self.notified.load(Ordering::SeqCst) || has_work() {
            self.disarm();
            return Armed::Work;
        }
        Armed::Waits
    }

    pub(crate) fn disarm(&self) {
        self.armed.store(false, Ordering::SeqCst);
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
