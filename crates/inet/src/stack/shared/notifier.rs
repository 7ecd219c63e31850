//! How another thread wakes the thread that drives a stack, at no cost while that thread polls.
//!
//! ```text
//!   the stack's thread (`arm`)               another thread (`notify`)
//!   1  clears the eventfd, if it may be      1  publishes work: a frame, or `notified`
//!      written
//!   2  armed = true                          2  exchanges armed for false
//!   3  checks for work                          it was true: writes the eventfd
//!        some: armed = false, `Work`            it was false: nothing
//!        none: `Waits`, sleeps
//! ```
//!
//! All accesses to `armed`, and those by which work is published and checked for, are sequentially
//! consistent, so at least one side sees the other's. Loom treats such an access as one that is
//! acquire or release only. Its models have a fence in the place of the order (`ordered`).
//!
//! **When is the eventfd cleared?** Each exchange of `armed` for false by another thread is
//! followed by one write, at any later time. `unread` counts these writes, so that a thread whose
//! sleeps end by frames does not read the eventfd each time. A read returns how many writes it has
//! cleared. So a write that is late stays counted, and a later `arm` clears it.

use netmem_packet::Armed;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU64};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Wakes the thread that drives a stack.
pub(crate) struct Notifier {
    armed: AtomicBool,
    /// The stack must be polled, also if its mailbox is empty.
    notified: AtomicBool,
    /// Writes of the eventfd that were not read, and one more while it is armed. Only the stack's
    /// thread uses it.
    unread: AtomicU64,
    event: OwnedFd,
}

/// Orders the accesses before this call before those after it, in a model.
#[inline(always)]
fn ordered() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}

impl Notifier {
    pub(crate) fn new() -> Result<Self, Errno> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (armed, notified, unread) = Default::default();
        Ok(Self { armed, notified, unread, event })
    }

    /// Wakes the stack's thread. The caller has published work before, by a sequentially consistent
    /// access.
    pub(crate) fn notify_published(&self) {
        ordered();
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

    /// Requests a wake-up, unless there is work. Called by the stack's thread. Costs a system call
    /// if another thread has ended a sleep since the last call.
    pub(crate) fn arm(&self, has_work: impl FnOnce() -> bool) -> Armed {
        let mut unread = self.unread.load(Ordering::Relaxed);
        if unread > 0 {
            let mut writes = [0; 8];
            // The read fails if the writes are late.
            if rustix::io::read(&self.event, &mut writes).is_ok() {
                unread = unread.saturating_sub(u64::from_ne_bytes(writes));
            }
        }
        let was_armed = self.armed.swap(true, Ordering::SeqCst);
        self.unread.store(unread + u64::from(!was_armed), Ordering::Relaxed);
        ordered();
        if self.notified.load(Ordering::SeqCst) || has_work() {
            self.disarm();
            return Armed::Work;
        }
        Armed::Waits
    }

    /// Requests no wake-up any more. Called by the stack's thread.
    pub(crate) fn disarm(&self) {
        if self.armed.swap(false, Ordering::SeqCst) {
            // No other thread will write for this request.
            self.unread.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_readable(notifier: &Notifier) -> bool {
        let mut fds = [PollFd::new(notifier, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    }

    fn unread(notifier: &Notifier) -> u64 {
        notifier.unread.load(Ordering::Relaxed)
    }

    #[test]
    fn only_what_was_written_is_read() {
        let notifier = Notifier::new().unwrap();
        notifier.notify_published();
        assert!(!is_readable(&notifier), "it is not armed");
        for _ in 0..3 {
            assert_eq!((notifier.arm(|| false), unread(&notifier)), (Armed::Waits, 1));
            notifier.disarm();
            notifier.disarm();
            assert_eq!((notifier.arm(|| true), unread(&notifier)), (Armed::Work, 0));
        }
        for _ in 0..3 {
            assert!(notifier.arm(|| false).waits() && notifier.arm(|| false).waits() && !is_readable(&notifier));
            notifier.notify_published();
            notifier.notify_published();
            assert!(is_readable(&notifier));
            notifier.disarm();
            assert_eq!(unread(&notifier), 1);
        }
        notifier.notify();
        assert_eq!(notifier.arm(|| false), Armed::Work, "it was notified");
        assert!(notifier.take() && !is_readable(&notifier));
        assert_eq!(unread(&notifier), 0);
    }

    /// A thread exchanges `armed`, and writes only after others have notified and the stack has
    /// read their writes. The late write does not end each further sleep.
    #[test]
    fn a_late_write_is_read_too() {
        let notifier = Notifier::new().unwrap();
        let write = || rustix::io::write(&notifier.event, &1_u64.to_ne_bytes()).unwrap();
        assert!(notifier.arm(|| false).waits());
        assert!(notifier.armed.swap(false, Ordering::SeqCst), "the late thread");
        notifier.disarm();
        assert!(notifier.arm(|| false).waits());
        notifier.notify_published();
        notifier.disarm();
        assert_eq!(unread(&notifier), 2);
        assert!(notifier.arm(|| false).waits() && !is_readable(&notifier));
        write();
        assert!(is_readable(&notifier));
        notifier.disarm();
        assert!(notifier.arm(|| false).waits() && !is_readable(&notifier));
        notifier.disarm();
        assert_eq!(unread(&notifier), 0);
    }
}
