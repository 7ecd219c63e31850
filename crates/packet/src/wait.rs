//! Waiting for a queue: arming it, and a loop that polls for a while and then sleeps.
//!
//! A loop that only polls uses a CPU of its own. A loop that sleeps must not miss work that is
//! published between its last poll and its sleep. [`Wait`] is the protocol that excludes this.
//!
//! ```text
//!   poll ── found work ──► poll again
//!    └── found none ──► arm ── Armed::Work ───► not armed: poll again
//!                           ├─ Armed::Waits ──► sleep until readable ──► disarm, poll again
//!                           └─ an error ──────► not armed: the queue has stopped
//! ```
//!
//! An armed queue has requested a notification of the next work from its peer. The peer publishes
//! work, then checks the request. [`arm`](Wait::arm) requests, then checks whether work was
//! published. Each side executes a full memory fence between its two steps. So at least one of them
//! sees the other's first step, and work that is published while the queue is being armed is never
//! missed.
//!
//! A queue that stops wakes its owner, too: its interface was deleted, its device has broken a
//! rule, or has gone. The next [`arm`](Wait::arm) returns the reason as an error. An owner that
//! only polls calls [`check`](Wait::check).

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// The result of [arming](Wait::arm) a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a queue that has work already does not wake its owner"]
pub enum Armed {
    /// There is work already: poll the queue. It is not armed.
    Work,
    /// The queue's descriptor becomes readable when there is work.
    Waits,
}

impl Armed {
    /// Whether the owner can sleep.
    #[must_use]
    pub fn waits(self) -> bool {
        self == Self::Waits
    }
}

/// A queue that its owner can wait for.
///
/// The descriptor ([`AsFd`]) is for waiting only: poll it for being readable, or register it with
/// epoll, `mio` or `tokio`, level-triggered or edge-triggered. Never read or write it. It stays the
/// same for as long as the queue exists. It can be readable without work, after a late wake-up. So
/// a woken owner polls the queue and then arms it again.
///
/// With an edge-triggered reactor, clear the reactor's readiness before the queue is armed, not
/// after.
pub trait Wait: AsFd {
    /// Clears earlier wake-ups, requests a notification, and checks for work again.
    ///
    /// Cost: a few system calls and a full memory fence.
    ///
    /// # Errors
    ///
    /// The queue has stopped: it neither receives nor sends any more. It is not armed. Each further
    /// call returns the error again, with one exception. A device that has closed its connection
    /// can be replaced by another one, so this error
    /// ([`NotConnected`](io::ErrorKind::NotConnected)) is returned once, and the next call arms the
    /// queue for its new device.
    fn arm(&mut self) -> io::Result<Armed>;

    /// Requests no notifications, because the owner polls from now on. If a queue is polled without
    /// this call, its peer wakes it needlessly, with a system call each time. Cost: a store to
    /// shared memory, or a system call (AF_XDP).
    fn disarm(&mut self);

    /// Whether the queue still works. A loop that polls without sleeping calls this from time to
    /// time, for example after a thousand rounds. Queues notice by themselves while they are polled
    /// or armed that they have stopped. Cost: a few loads.
    ///
    /// # Errors
    ///
    /// The queue has stopped, as in [`arm`](Self::arm); each time, until the device was replaced,
    /// if it can be.
    fn check(&self) -> io::Result<()>;
}

/// Arms these queues. Returns false, and none of them is armed, if one has work.
///
/// # Errors
///
/// As [`Wait::arm`]. None of the queues is armed.
pub fn arm_all(queues: &mut [&mut dyn Wait]) -> io::Result<bool> {
    for at in 0..queues.len() {
        let armed = queues[at].arm();
        if !matches!(armed, Ok(Armed::Waits)) {
            queues[..at].iter_mut().for_each(|queue| queue.disarm());
            return armed.map(Armed::waits);
        }
    }
    Ok(true)
}

/// The counters of a [`PollThenSleep`]. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SleepStats {
    /// How often the thread went to sleep.
    pub sleeps: u64,
    /// Sleeps that a queue has ended.
    pub wakeups: u64,
    /// Sleeps that ended because their time was over, or by a signal.
    pub others: u64,
    /// How often the thread did not go to sleep, because a queue had work when it was armed.
    pub work_found: u64,
}

/// How a [turn](PollThenSleep::turn) ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The thread did not sleep: poll again.
    Polls,
    /// A queue has woken the thread: poll again.
    Woken,
    /// The sleep was as long as it could be.
    TimedOut,
    /// A signal has ended the sleep.
    Interrupted,
}

/// The policy of a loop over queues: it polls until there was no work for a while, and then sleeps
/// until a queue wakes it.
///
/// If the next work arrives soon, polling for a while saves the cost of a sleep: two system calls,
/// and 5 us or more until the thread runs again. A loop that sleeps costs nothing while it is idle.
/// How long to poll is the caller's choice: zero sleeps at once, and a time of 20 us to 100 us is
/// about what a sleep costs.
///
/// ```no_run
/// use netmem_packet::{Packet, Poll, PollThenSleep, RxQueue, TxQueue, Wait};
/// use std::time::Duration;
///
/// fn serve<R: RxQueue + Wait, T: TxQueue + Wait>(rx: &mut R, tx: &mut T) -> std::io::Result<()> {
///     let mut pause = PollThenSleep::new(Duration::from_micros(50));
///     loop {
///         let mut each = |packet: Packet<R::Mem>| drop(packet);
///         let work = rx.poll(|poll| tx.complete() + poll.receive(256, &mut each));
///         pause.turn(work, &mut [rx, tx], None)?;
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct PollThenSleep {
    poll_for: Duration,
    idle_since: Option<Instant>,
    stats: SleepStats,
}

impl PollThenSleep {
    /// A loop that sleeps when it has found no work for this long.
    #[must_use]
    pub fn new(poll_for: Duration) -> Self {
        Self { poll_for, idle_since: None, stats: SleepStats::default() }
    }

    /// Call this after each round over the queues. `work` is the amount of work in the round: 0 if
    /// there was none. `queues` are those that can wake the thread. A sleep lasts `at_most` this
    /// long; without it, until a queue wakes the thread or a signal is handled.
    ///
    /// Cost: nothing after a round with work, a read of the clock after one without, and two or
    /// three system calls for each queue and sleep.
    ///
    /// # Errors
    ///
    /// A queue has stopped: the error of [`Wait::arm`]. Or the thread cannot wait for the queues,
    /// because the system is short of memory. The queues are not armed. Turns after a round with
    /// work, and turns that do not sleep, do not notice that a queue has stopped.
    pub fn turn(&mut self, work: usize, queues: &mut [&mut dyn Wait], at_most: Option<Duration>) -> io::Result<Turn> {
        if work > 0 {
            self.idle_since = None;
            return Ok(Turn::Polls);
        }
        if !self.poll_for.is_zero() && self.idle_since.get_or_insert_with(Instant::now).elapsed() < self.poll_for {
            std::hint::spin_loop();
            return Ok(Turn::Polls);
        }
        self.idle_since = None;
        self.sleep(queues, at_most)
    }

    #[cold]
    fn sleep(&mut self, queues: &mut [&mut dyn Wait], at_most: Option<Duration>) -> io::Result<Turn> {
        if !arm_all(queues)? {
            self.stats.work_found += 1;
            return Ok(Turn::Polls);
        }
        self.stats.sleeps += 1;
        let mut fds: Vec<_> = queues.iter().map(|q| PollFd::from_borrowed_fd(q.as_fd(), PollFlags::IN)).collect();
        // A time that is too long for the kernel's type means for ever.
        let timeout = at_most.and_then(|time| Timespec::try_from(time).ok());
        let outcome = poll(&mut fds, timeout.as_ref());
        drop(fds);
        queues.iter_mut().for_each(|queue| queue.disarm());
        let turn = match outcome {
            Ok(0) => Turn::TimedOut,
            Ok(_) => Turn::Woken,
            Err(Errno::INTR) => Turn::Interrupted,
            Err(error) => return Err(error.into()),
        };
        let count = if turn == Turn::Woken { &mut self.stats.wakeups } else { &mut self.stats.others };
        *count += 1;
        Ok(turn)
    }

    /// The loop's counters.
    #[must_use]
    pub fn stats(&self) -> SleepStats {
        self.stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::{BorrowedFd, OwnedFd};

    /// Counts calls; `work` is what it finds when it is armed.
    struct Fake {
        fd: OwnedFd,
        work: bool,
        stopped: bool,
        armed: bool,
        arms: u32,
    }

    impl Fake {
        fn new(work: bool) -> Self {
            Self { fd: eventfd(0, EventfdFlags::NONBLOCK).unwrap(), work, stopped: false, armed: false, arms: 0 }
        }
    }

    impl AsFd for Fake {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.fd.as_fd()
        }
    }

    impl Wait for Fake {
        fn arm(&mut self) -> io::Result<Armed> {
            self.arms += 1;
            self.check()?;
            self.armed = !self.work;
            Ok(if self.work { Armed::Work } else { Armed::Waits })
        }

        fn disarm(&mut self) {
            self.armed = false;
        }

        fn check(&self) -> io::Result<()> {
            if self.stopped { Err(io::Error::other("it has stopped")) } else { Ok(()) }
        }
    }

    #[test]
    fn work_is_polled_for_and_a_queue_with_work_disarms_the_others() {
        let (mut a, mut b, mut c) = (Fake::new(false), Fake::new(true), Fake::new(false));
        let mut pause = PollThenSleep::new(Duration::ZERO);
        assert_eq!(pause.turn(1, &mut [&mut a, &mut b, &mut c], None).unwrap(), Turn::Polls);
        assert_eq!((a.arms, pause.stats()), (0, SleepStats::default()));
        assert_eq!(pause.turn(0, &mut [&mut a, &mut b, &mut c], None).unwrap(), Turn::Polls);
        assert_eq!((a.arms, b.arms, c.arms, a.armed), (1, 1, 0, false));
        assert_eq!(pause.stats(), SleepStats { work_found: 1, ..SleepStats::default() });
    }

    /// A loop does not sleep over a queue that has stopped, and does not spin for it either.
    #[test]
    fn a_queue_that_has_stopped_ends_a_turn_with_its_error() {
        let (mut a, mut b, mut c) = (Fake::new(false), Fake::new(false), Fake::new(false));
        b.stopped = true;
        let mut pause = PollThenSleep::new(Duration::ZERO);
        for _ in 0..2 {
            let error = pause.turn(0, &mut [&mut a, &mut b, &mut c], None).unwrap_err();
            assert_eq!(error.to_string(), "it has stopped");
            assert_eq!((a.armed, c.arms, pause.stats()), (false, 0, SleepStats::default()));
        }
    }

    #[test]
    fn a_sleep_ends_by_a_queue_or_by_its_time_and_leaves_nothing_armed() {
        let (mut a, mut b) = (Fake::new(false), Fake::new(false));
        let mut pause = PollThenSleep::new(Duration::ZERO);
        let soon = Some(Duration::from_millis(1));
        assert_eq!(pause.turn(0, &mut [&mut a, &mut b], soon).unwrap(), Turn::TimedOut);
        rustix::io::write(&b.fd, &1u64.to_ne_bytes()).unwrap();
        assert_eq!(pause.turn(0, &mut [&mut a, &mut b], None).unwrap(), Turn::Woken);
        assert!(!a.armed && !b.armed);
        let stats = SleepStats { sleeps: 2, wakeups: 1, others: 1, work_found: 0 };
        assert_eq!(pause.stats(), stats);
    }

    #[test]
    fn it_polls_for_a_while_and_begins_anew_after_work() {
        let mut a = Fake::new(false);
        let mut pause = PollThenSleep::new(Duration::from_secs(3600));
        for work in [0, 0, 1, 0] {
            assert_eq!(pause.turn(work, &mut [&mut a], None).unwrap(), Turn::Polls);
        }
        assert_eq!((a.arms, pause.stats()), (0, SleepStats::default()));
    }
}
