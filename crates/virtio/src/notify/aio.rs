//! The asynchronous I/O context of the process, by which it signals eventfds.

use super::error::NotifyError;
use libc::c_long;
use rustix::event::Timespec;
use rustix::pipe::{PipeFlags, pipe_with};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicPtr, Ordering};

/// An asynchronous I/O context, and what its requests read.
#[derive(Debug)]
pub(super) struct Context {
    id: libc::c_ulong,
    /// The reading end of a pipe. A read of no bytes completes at once.
    source: OwnedFd,
    /// The process that made it.
    process: rustix::process::Pid,
}

/// `struct iocb` of `linux/aio_abi.h`. Fields without a name are zero here.
#[derive(Default)]
#[repr(C)]
struct Iocb {
    data: u64,
    key_and_rw_flags: [u32; 2],
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

/// `struct io_event` of `linux/aio_abi.h`.
#[derive(Clone, Copy)]
#[repr(C)]
struct IoEvent([u64; 4]);

const PREAD: u16 = 0;
const PWRITE: u16 = 1;
const RESFD: u32 = 1;
/// How often a request is tried before a signal is lost. Before the second attempt, completions are
/// reaped. More attempts are needed only if other threads use the places that were freed.
const ATTEMPTS: usize = 8;

impl Context {
    pub(super) fn of_the_process() -> io::Result<&'static Self> {
        static CONTEXT: AtomicPtr<Context> = AtomicPtr::new(std::ptr::null_mut());
        loop {
            let current = CONTEXT.load(Ordering::Acquire);
            // SAFETY: what the pointer has pointed to is never freed: the parent's context stays in
            // the child as well.
            if let Some(context) = unsafe { current.as_ref() }.filter(|context| context.is_ours()) {
                return Ok(context);
            }
            let new = Box::into_raw(Box::new(Self::new()?));
            if CONTEXT.compare_exchange(current, new, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                // SAFETY: just made here, and no other thread has seen it: another one was faster.
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }

    /// Whether the context is one of this process, and not of the process that this one was forked
    /// from. The process number alone does not decide it: the first process of a PID namespace may
    /// have the number of its parent.
    fn is_ours(&self) -> bool {
        self.exists().is_ok() && self.process == rustix::process::getpid()
    }

    fn exists(&self) -> io::Result<()> {
        let none = std::ptr::null_mut::<*mut Iocb>();
        // SAFETY: the kernel reads none of no requests.
        check(unsafe { libc::syscall(libc::SYS_io_submit, self.id, 0 as c_long, none) })
    }

    fn new() -> io::Result<Self> {
        let (source, _) = pipe_with(PipeFlags::CLOEXEC)?;
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word to `id`.
        check(unsafe { libc::syscall(libc::SYS_io_setup, 1 as c_long, &raw mut id) })?;
        let context = Self { id, source, process: rustix::process::getpid() };
        // A filter may allow the one call and forbid the other.
        context.exists()?;
        Ok(context)
    }

    /// Whether a descriptor is an eventfd. It is not signalled. The answer for a descriptor that
    /// only names a file is wrong.
    pub(super) fn check(&self, fd: BorrowedFd<'_>) -> Result<(), NotifyError> {
        // The kernel checks the eventfd first, then refuses to write to the read end of a pipe.
        match self.retry(PWRITE, fd) {
            Err(e) if e.raw_os_error() == Some(libc::EBADF) => Ok(()),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Err(NotifyError::NotEventfd),
            Err(source) => Err(NotifyError::Aio { source }),
            Ok(()) => Err(NotifyError::Aio { source: io::ErrorKind::Unsupported.into() }),
        }
    }

    pub(super) fn signal(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.retry(PREAD, fd)
    }

    #[inline]
    fn retry(&self, opcode: u16, fd: BorrowedFd<'_>) -> io::Result<()> {
        let mut result = self.submit(opcode, fd);
        for _ in 1..ATTEMPTS {
            match &result {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.reap(),
                _ => break,
            }
            result = self.submit(opcode, fd);
        }
        result
    }

    /// Makes a request of no bytes, whose completion is counted into `fd`.
    #[inline]
    fn submit(&self, opcode: u16, fd: BorrowedFd<'_>) -> io::Result<()> {
        let (source, resfd) = (self.source.as_raw_fd() as u32, fd.as_raw_fd() as u32);
        let mut request = Iocb { opcode, fd: source, flags: RESFD, resfd, ..Iocb::default() };
        let mut requests = [&raw mut request];
        // SAFETY: the kernel reads the one request during the call, and the request has no buffer.
        // Both descriptors are open.
        check(unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1 as c_long, requests.as_mut_ptr()) })
    }

    /// Reaps completions from the context, which holds a bounded number. Does not wait.
    #[cold]
    fn reap(&self) {
        let mut events = [IoEvent([0; 4]); 128];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let (least, most) = (0 as c_long, events.len() as c_long);
        // SAFETY: the kernel writes at most `most` events, and reads the timeout, whose layout is
        // its own.
        let _ = unsafe {
            libc::syscall(libc::SYS_io_getevents, self.id, least, most, events.as_mut_ptr(), &raw const zero)
        };
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is this value's, and no request of it is under way: each completes
        // within its submission.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}

#[inline]
fn check(result: c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
