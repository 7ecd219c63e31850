//! Signals where the kernel has no asynchronous I/O for the process: a thread for each eventfd
//! writes it.
//!
//! ```text
//!   signal()   pending: false -> true, then unpark    never waits; pending signals are merged
//!   thread     pending: true -> false, then write 1   parks while none is pending; ends with the
//!                                                     value
//! ```
//!
//! The thread that signals changes a flag and wakes the writer, so it never waits for the peer. No
//! signal is lost: a signal that comes before the thread has cleared the flag is followed by that
//! write, and a later one sets the flag again, and leaves a token that ends the next `park`.
//!
//! A counter that is full is left alone: it is not zero, so its reader is woken or will find it. A
//! peer that fills the counter just then, in an eventfd without `O_NONBLOCK`, blocks the thread in
//! the write. This stops no other signal. When the value is dropped, a signal of the kernel
//! interrupts the write: the highest real-time signal that the program does not use, whose handler
//! does nothing.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::thread::JoinHandleExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, getpid};

/// The writer of one eventfd.
#[derive(Debug)]
pub(super) struct Writer {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
    /// The process whose thread it is: a child of a fork has no such thread.
    process: Pid,
}

#[derive(Debug)]
struct State {
    fd: OwnedFd,
    pending: AtomicBool,
    stop: AtomicBool,
    /// Whether a write would not block at present.
    writable: fn(BorrowedFd<'_>) -> bool,
}

impl Writer {
    /// Starts the thread of an eventfd.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Self> {
        Self::with(fd, writable)
    }

    fn with(fd: OwnedFd, writable: fn(BorrowedFd<'_>) -> bool) -> io::Result<Self> {
        interruption()?;
        let state = Arc::new(State { fd, pending: AtomicBool::new(false), stop: AtomicBool::new(false), writable });
        let body = Arc::clone(&state);
        let thread = thread::Builder::new().name("netmem-signal".into()).spawn(move || body.run())?;
        Ok(Self { state, thread: Some(thread), process: getpid() })
    }

    /// Has the thread add 1 to the counter, unless it is about to do so already.
    pub(super) fn signal(&self) {
        if !self.state.pending.swap(true, Ordering::AcqRel) {
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.state.fd.as_fd()
    }
}

impl Drop for Writer {
    /// Signals that are pending are written, unless the peer blocks the thread.
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Release);
        self.wake();
        let Some(thread) = self.thread.take().filter(|_| self.process == getpid()) else { return };
        // A signal that comes before the write does not interrupt it, so there is one after
        // another.
        for round in 0u32.. {
            if thread.is_finished() {
                break;
            }
            if round < 100 {
                thread::yield_now();
                continue;
            }
            if let Ok(signal) = interruption() {
                // SAFETY: the thread was not joined, so its name is valid; the signal has a
                // handler, which does nothing.
                unsafe { libc::pthread_kill(thread.as_pthread_t() as libc::pthread_t, signal) };
            }
            thread::sleep(Duration::from_micros(50));
        }
        let _ = thread.join();
    }
}

impl State {
    fn run(&self) {
        loop {
            // In this order: what was signalled before the end is written.
            let stop = self.stop.load(Ordering::Acquire);
            if self.pending.swap(false, Ordering::AcqRel) {
                self.write();
            } else if stop {
                return;
            } else {
                thread::park();
            }
        }
    }

    fn write(&self) {
        while (self.writable)(self.fd.as_fd()) {
            match rustix::io::write(&self.fd, &1u64.to_ne_bytes()) {
                Err(rustix::io::Errno::INTR) if !self.stop.load(Ordering::Acquire) => {}
                // `AGAIN`: the counter has become full.
                _ => return,
            }
        }
    }
}

fn writable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

extern "C" fn nothing(_: libc::c_int) {}

/// The signal that interrupts a write. Its handler is installed once in the process.
fn interruption() -> io::Result<libc::c_int> {
    static SIGNAL: OnceLock<Option<libc::c_int>> = OnceLock::new();
    let unused = |&signal: &libc::c_int| {
        // SAFETY: all zero is a valid `sigaction`: the default action, an empty mask and no flags.
        let (mut old, mut new): (libc::sigaction, libc::sigaction) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        new.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: both structures are valid, and the handler does nothing. Without SA_RESTART the
        // write ends.
        unsafe {
            libc::sigaction(signal, std::ptr::null(), &raw mut old) == 0
                && old.sa_sigaction == libc::SIG_DFL
                && libc::sigaction(signal, &raw const new, std::ptr::null_mut()) == 0
        }
    };
    let signal = SIGNAL.get_or_init(|| (libc::SIGRTMIN()..=libc::SIGRTMAX()).rev().find(unused));
    signal.ok_or_else(|| io::Error::other("the program uses every real-time signal"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn pair() -> (OwnedFd, OwnedFd) {
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        (fd.try_clone().unwrap(), fd)
    }

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    /// The peer sleeps in its read until a signal comes: one that was lost would leave it there.
    #[test]
    fn no_signal_is_lost() {
        let (peer, fd) = pair();
        let writer = Writer::new(fd).unwrap();
        for _ in 0..5000 {
            writer.signal();
            assert_eq!(count(&peer), 1);
        }
        writer.signal();
        drop(writer);
        assert_eq!(count(&peer), 1, "what was signalled before the end");
    }

    /// Two threads signal, and each sees that the peer was woken after its signal.
    #[test]
    fn signals_of_several_threads() {
        let (peer, fd) = pair();
        let writer = Writer::new(fd).unwrap();
        let seen = std::sync::atomic::AtomicU64::new(0);
        let asked = std::sync::atomic::AtomicU64::new(0);
        thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    for _ in 0..2000 {
                        let mine = asked.fetch_add(1, Ordering::SeqCst) + 1;
                        writer.signal();
                        while seen.load(Ordering::SeqCst) < mine {
                            thread::yield_now();
                        }
                    }
                });
            }
            while seen.load(Ordering::SeqCst) < 4000 {
                count(&peer);
                seen.store(asked.load(Ordering::SeqCst), Ordering::SeqCst);
            }
        });
    }

    /// A full counter is left as it is, and blocks neither the signals nor the end.
    #[test]
    fn a_full_counter_is_left_alone() {
        let (peer, fd) = pair();
        rustix::io::write(&peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let writer = Writer::new(fd).unwrap();
        (0..1000).for_each(|_| writer.signal());
        drop(writer);
        assert_eq!(count(&peer), u64::MAX - 1);
    }

    /// A peer that fills the counter before each write: the thread is interrupted when the value
    /// goes.
    #[test]
    fn a_blocked_write_is_interrupted() {
        let (peer, fd) = pair();
        rustix::io::write(&peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let writer = Writer::with(fd, |_| true).unwrap();
        (0..1000).for_each(|_| writer.signal());
        drop(writer);
        assert_eq!(count(&peer), u64::MAX - 1);
    }
}
