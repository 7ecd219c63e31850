//! The object on which a thread sleeps: until frames arrive or, at a transmit queue, until sent
//! frames have completed.
//!
//! ```text
//!   epoll set of a queue   the socket, while a thread waits    a frame has arrived or completed
//!                          the timer, in zero-copy mode        sent frames may have completed
//!                          the watch                           the interface is gone
//! ```
//!
//! In copy mode the socket becomes writable when a frame completes. In zero-copy mode it becomes
//! writable when the driver consumes descriptors of the TX ring, and the kernel wakes no thread
//! when the frames complete. A thread that waits there is woken by a timer.

use crate::options::Mode;
use crate::watch::Watch;
use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// How long a thread sleeps in zero-copy mode before it checks for completions, in nanoseconds.
const COMPLETION_POLL: i64 = 1_000_000;
/// The data of events: of the watch, and of the others.
const ENDED: u64 = 1;
const OTHER: u64 = 0;

/// An epoll set that becomes readable when a queue may have work, or has ended.
///
/// The socket is in the set only while a thread waits. The kernel calls every set that a socket is
/// in for each frame, also if no thread waits there.
#[derive(Debug)]
pub(crate) struct WaitSet {
    set: OwnedFd,
    /// The event of the socket that ends a sleep.
    events: epoll::EventFlags,
    /// Whether the socket is in the set.
    armed: bool,
    /// For zero-copy mode.
    timer: Option<OwnedFd>,
    /// In the set for as long as the queue exists. None for a socket of another network namespace
    /// that no helper has made.
    _watch: Option<Arc<Watch>>,
}

impl WaitSet {
    /// Makes the set of a receive queue.
    pub(crate) fn receive(watch: Option<Arc<Watch>>) -> io::Result<Self> {
        Self::new(epoll::EventFlags::IN, None, watch)
    }

    /// Makes the set of a transmit queue, whose mode is not known before its socket is bound.
    pub(crate) fn transmit(watch: Option<Arc<Watch>>) -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        Self::new(epoll::EventFlags::OUT, Some(timer), watch)
    }

    /// In copy mode, the set needs no timer: it is closed, and so leaves the set.
    pub(crate) fn set_mode(&mut self, mode: Mode) {
        if mode == Mode::Copy {
            self.timer = None;
        }
    }

    fn new(events: epoll::EventFlags, timer: Option<OwnedFd>, watch: Option<Arc<Watch>>) -> io::Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        if let Some(timer) = &timer {
            epoll::add(&set, timer, epoll::EventData::new_u64(OTHER), flags)?;
        }
        if let Some(watch) = &watch {
            epoll::add(&set, watch.as_fd(), epoll::EventData::new_u64(ENDED), flags)?;
        }
        Ok(Self { set, events, armed: false, timer, _watch: watch })
    }

    /// Puts the socket into the set, clears the events of the set, and starts the timer if frames
    /// are `out`. Call this before the ring is checked. Returns whether the interface is reported
    /// to be gone.
    ///
    /// # Errors
    ///
    /// The socket cannot be put into the set, so nothing would wake a thread.
    pub(crate) fn arm(&mut self, socket: BorrowedFd<'_>, out: bool) -> io::Result<bool> {
        if !self.armed {
            let flags = self.events | epoll::EventFlags::ET;
            epoll::add(&self.set, socket, epoll::EventData::new_u64(OTHER), flags)?;
            self.armed = true;
        }
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let event = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(OTHER) };
        // There are at most three descriptors in the set.
        let mut events = [event; 3];
        let n = epoll::wait(&self.set, &mut events, Some(&zero)).unwrap_or(0);
        if let (Some(timer), true) = (&self.timer, out) {
            let once = Itimerspec { it_interval: zero, it_value: Timespec { tv_sec: 0, tv_nsec: COMPLETION_POLL } };
            // This cannot fail: the descriptor is a timer.
            let _ = timerfd_settime(timer, TimerfdTimerFlags::empty(), &once);
        }
        Ok(events[..n].iter().any(|event| event.data.u64() == ENDED))
    }

    /// Removes the socket from the set.
    pub(crate) fn disarm(&mut self, socket: BorrowedFd<'_>) {
        if self.armed {
            self.armed = epoll::delete(&self.set, socket).is_err();
        }
    }

    /// For [`crate::fake`]: a set from which nothing wakes a thread.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn fake(set: OwnedFd) -> Self {
        Self { set, events: epoll::EventFlags::OUT, armed: true, timer: None, _watch: None }
    }
}

impl AsFd for WaitSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
