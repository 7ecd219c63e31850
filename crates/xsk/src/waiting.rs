//! The object on which a thread sleeps until sent frames have completed.
//!
//! In copy mode the socket becomes writable when a frame completes. In zero-copy mode it becomes writable when the driver takes descriptors
//! out of the TX ring, and the kernel wakes no thread when the frames complete. A thread that waits there is woken by a timer.

use crate::options::Mode;
use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// How long a thread sleeps in zero-copy mode before it checks for completions, in nanoseconds.
const LOOK: i64 = 1_000_000;

/// An epoll set that becomes readable when sent frames may have completed.
///
/// The socket is in the set only while a thread waits. The kernel calls every set that a socket is in for each frame that
/// completes, also if no thread waits there.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) set: OwnedFd,
    /// Whether the socket is in the set.
    pub(crate) armed: bool,
    /// For zero-copy mode.
    pub(crate) timer: Option<OwnedFd>,
}

impl Waiting {
    /// Makes a set for a socket in this mode.
    pub(crate) fn new(mode: Mode) -> io::Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let edges = epoll::EventFlags::ET;
        let timer = match mode {
            Mode::Copy => None,
            Mode::ZeroCopy => {
                let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
                epoll::add(&set, &timer, epoll::EventData::new_u64(0), epoll::EventFlags::IN | edges)?;
                Some(timer)
            }
        };
        Ok(Self { set, armed: false, timer })
    }

    /// Puts the socket into the set, clears the events of the set, and starts the timer if frames are `out`. Call this before
    /// the completion ring is checked. Returns false if the socket cannot be put into the set, because then nothing would
    /// wake a thread.
    pub(crate) fn arm(&mut self, socket: BorrowedFd<'_>, out: bool) -> bool {
        if !self.armed {
            let events = epoll::EventFlags::OUT | epoll::EventFlags::ET;
            self.armed = epoll::add(&self.set, socket, epoll::EventData::new_u64(0), events).is_ok();
        }
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let event = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        // There are at most two descriptors in the set.
        let _ = epoll::wait(&self.set, &mut [event; 2], Some(&zero));
        if let (Some(timer), true) = (&self.timer, out) {
            let once = Itimerspec { it_interval: zero, it_value: Timespec { tv_sec: 0, tv_nsec: LOOK } };
            // This cannot fail: the descriptor is a timer.
            let _ = timerfd_settime(timer, TimerfdTimerFlags::empty(), &once);
        }
        self.armed
    }

    /// Takes the socket out of the set.
    pub(crate) fn disarm(&mut self, socket: BorrowedFd<'_>) {
        if self.armed {
            self.armed = epoll::delete(&self.set, socket).is_err();
        }
    }
}

impl AsFd for Waiting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
