//! The notifier of a socket: the delivering thread wakes the receiving thread. A receiver that
//! polls must not cost each delivery a system call, so a delivery notifies only a receiver that has
//! armed the socket.
//!
//! ```text
//!   the thread that receives (`arm`)          a thread that delivers
//!   1  clears earlier notifications           1  pushes the datagram
//!   2  armed = true                           2  reads armed
//!   3  reads the queue                           true: exchanges it for false
//!        a datagram: armed = false, `Work`         it was true still: notifies
//!        none: `Waits`, sleeps                   false: nothing
//! ```
//!
//! The two threads race, and at least one of them sees the other: if the receiver does not see the
//! datagram, the deliverer sees `armed`. Each side writes one word and then reads the word that the
//! other side wrote. All four accesses are sequentially consistent, so they have one order: if the
//! receiver's read of the queue precedes the push, its `armed = true` precedes the deliverer's
//! read.
//!
//! The access inside of the push is crossbeam's: `ArrayQueue::push` moves the queue's tail by a
//! sequentially consistent exchange, and `is_empty` reads the tail so. On x86-64 that exchange is
//! the only expensive instruction, and the push has it anyway: a delivery to a socket that no
//! thread waits for costs one more load, of a line that it reads already.
//!
//! Loom treats a sequentially consistent access as one that is acquire or release only. Its model
//! has a fence in the place of the order (`ordered`): `model_notifier.rs`. It also does not order a
//! store after another thread's exchange, so `armed` is only exchanged; the receiver's exchanges
//! are not on a fast path.
//!
//! Several threads can deliver. The exchange picks one of them to notify.

use crate::sync::{AtomicBool, Ordering};
use netmem_packet::Armed;

pub(crate) struct Notifier<E> {
    armed: AtomicBool,
    event: E,
}

/// An event that wakes a thread.
pub(crate) trait Event {
    /// Wakes the thread that waits. If no thread waits, the next thread that waits is woken at
    /// once.
    fn set(&self);
    /// Clears the event: earlier calls of `set` wake no thread any more.
    fn clear(&self);
}

/// Orders the accesses before this call before those after it, in one order with the accesses of
/// the thread on the other side. See the module.
#[inline(always)]
fn ordered() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}

impl<E: Event> Notifier<E> {
    pub(crate) fn new(event: E) -> Self {
        Self { armed: AtomicBool::new(false), event }
    }

    pub(crate) fn event(&self) -> &E {
        &self.event
    }

    /// Notifies if a thread waits. Call it after a sequentially consistent change of the word that
    /// `has_work` of that thread reads.
    #[inline]
    pub(crate) fn delivered(&self) {
        ordered();
        if self.armed.load(Ordering::SeqCst) {
            self.notify();
        }
    }

    #[cold]
    fn notify(&self) {
        if self.armed.swap(false, Ordering::AcqRel) {
            self.event.set();
        }
    }

    /// Asks to be woken by the next delivery, unless `has_work` returns true. `has_work` reads the
    /// word that a delivery changes.
    pub(crate) fn arm(&self, has_work: impl FnOnce() -> bool) -> Armed {
        self.event.clear();
        self.armed.swap(true, Ordering::SeqCst);
        ordered();
        if has_work() {
            self.disarm();
            return Armed::Work;
        }
        Armed::Waits
    }

    pub(crate) fn disarm(&self) {
        self.armed.swap(false, Ordering::AcqRel);
    }
}

#[cfg(not(loom))]
pub(crate) use eventfd::EventFd;

#[cfg(not(loom))]
mod eventfd {
    use super::Event;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::Errno;
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

    /// An eventfd that only this process has. No peer can change it, so reading and writing it are
    /// safe.
    pub(crate) struct EventFd(OwnedFd);

    impl EventFd {
        pub(crate) fn new() -> Result<Self, Errno> {
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
        }
    }

    impl AsFd for EventFd {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }

    impl Event for EventFd {
        fn set(&self) {
            // The write fails if the counter is full. The event is set then, too.
            let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
        }

        fn clear(&self) {
            // The read fails if the event is not set.
            let _ = rustix::io::read(&self.0, &mut [0; 8]);
        }
    }
}
