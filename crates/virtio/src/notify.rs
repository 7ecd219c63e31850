//! Event descriptors that a peer shares: signals to the peer and kicks from it, without ever waiting for it.
//!
//! vhost-user passes eventfds: *call* and *err* signal the front end, *kick* signals the back end. Both processes have the
//! same open file, and the peer controls everything about it:
//!
//! * `O_NONBLOCK` belongs to the open file. The peer can clear it at any moment, also between a check and a write.
//! * The peer can fill the counter. A plain `write` to a full eventfd without `O_NONBLOCK` blocks until the peer reads.
//! * The peer can read the counter first. A plain `read` of an empty eventfd without `O_NONBLOCK` blocks as well.
//! * The peer can pass another kind of file: a full pipe, a FIFO, a socket.
//!
//! If a thread that holds the device's state blocked there, the device could not serve another front end and could not
//! end. Therefore the descriptor is neither written nor read here:
//!
//! ```text
//!   Notifier   io_submit: an empty read of our own pipe, completion counted into the peer's eventfd (IOCB_FLAG_RESFD);
//!              where the kernel refuses that, a thread for each eventfd (writer.rs)
//!   Kick       epoll, edge-triggered: the kernel reports each write of the peer once, and the counter stays as it is
//! ```
//!
//! **Signals.** When an asynchronous read completes, the kernel adds 1 to the eventfd that was named with it. This
//! addition never waits: a full counter stays full, and its readers are woken. The kernel refuses every file that is
//! not an eventfd, before it does anything. The flags of the open file are neither read nor changed. The alternatives
//! fail: `pwritev2(RWF_NOWAIT)` is not supported on eventfds, `poll` before `write` is a race, and io_uring (which also
//! has eventfd completions) is disabled in many containers, which allow `io_submit`.
//!
//! The kernel refuses it where all contexts of `fs.aio-max-nr` are taken, and a seccomp filter may forbid it. The eventfd is then
//! told from other files by its name in /proc, and a thread of its own writes it ([`writer`]). A peer may block that thread, and
//! no other.
//!
//! A signal costs 0.40 us, and a `write` 0.17 us (Linux 6.18, one virtual CPU, a million of each). Signals are rare: a ring
//! that is polled suppresses them.
//!
//! **Kicks.** A level-triggered wait reports the eventfd again until it is read. It could not be read safely without
//! `RWF_NOWAIT`, and a peer that shares a full `EFD_SEMAPHORE` eventfd would keep the reader awake for ever, because each
//! read takes 1. An edge-triggered wait costs the peer one `write` for each time that it wakes the device.
//!
//! One asynchronous context serves the whole process. It is made with the first event descriptor and ends with the process,
//! because `io_destroy` waits 30 ms for a grace period of the kernel. It counts as 1 against `fs.aio-max-nr`. A child of a fork
//! has no contexts: it makes one of its own with its first event descriptor, and cannot signal by descriptors of its parent.

mod writer;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Once};

use self::writer::Writer;
use crate::vhost_user::advice;
use libc::c_long;
use rustix::event::{Timespec, epoll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::pipe::{PipeFlags, pipe_with};

/// Why a descriptor cannot be used for events.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotifyError {
    /// The descriptor is of another kind: a pipe, a socket, a file.
    #[error("the descriptor is not an eventfd, and another kind of file could block the thread that signals it")]
    NotEventfd,
    /// The kernel gave no means to signal without blocking.
    #[error(
        "no asynchronous I/O ({source}), which signals to a peer need; see the sysctl fs.aio-max-nr, and seccomp filters"
    )]
    Aio {
        /// What the kernel answered.
        r#source: io::Error,
    },
    /// Another system call failed.
    #[error("{what}: {source}; {hint}", hint = advice(source, "the system may be short of memory"))]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the kernel answered.
        r#source: io::Error,
    },
}

/// An eventfd that signals the peer. A signal never blocks, whatever the peer does to the eventfd.
#[derive(Debug)]
pub(crate) struct Notifier(Way);

/// How an eventfd is signalled.
#[derive(Debug)]
enum Way {
    Aio { fd: OwnedFd, context: &'static Context },
    Thread(Writer),
}

impl Notifier {
    /// Takes over a descriptor that a peer shares. This does not signal it, and the flags of the open file stay as they
    /// are.
    ///
    /// # Errors
    ///
    /// [`NotifyError`]: it is not an eventfd, or there is neither asynchronous I/O nor a thread.
    pub(crate) fn new(fd: OwnedFd) -> Result<Self, NotifyError> {
        Ok(Self(match context_for(fd.as_fd())? {
            Some(context) => Way::Aio { fd, context },
            None => {
                let failed = |source| NotifyError::Io { what: "starting the thread of an eventfd", source };
                Way::Thread(Writer::new(fd).map_err(failed)?)
            }
        }))
    }

    /// Adds 1 to the counter and wakes its readers. If the counter is full, it stays full; its readers are woken.
    ///
    /// Cost: one system call, and a second one for each hundred signals or so. The signal is lost only if the kernel has no
    /// memory for a request; this is logged. Without asynchronous I/O a thread is woken, which adds 1 for all signals since
    /// its last write, and nothing to a full counter.
    pub(crate) fn signal(&self) {
        match &self.0 {
            Way::Aio { fd, context } => {
                if let Err(error) = context.signal(fd.as_fd()) {
                    tracing::warn!(%error, "a signal to a peer is lost");
                }
            }
            Way::Thread(writer) => writer.signal(),
        }
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Way::Aio { fd, .. } => fd.as_fd(),
            Way::Thread(writer) => writer.fd(),
        }
    }
}

/// Checks that a descriptor is an eventfd, which is not signalled. Its file is asked nothing: the kernel compares what kind
/// of file it is.
///
/// # Errors
///
/// [`NotifyError`]: it is not an eventfd, or there is no way to find out.
pub(crate) fn check_eventfd(fd: BorrowedFd<'_>) -> Result<(), NotifyError> {
    context_for(fd).map(drop)
}

/// The context that signals an eventfd; none if the kernel has no asynchronous I/O for this process.
///
/// # Errors
///
/// As [`check_eventfd`].
fn context_for(fd: BorrowedFd<'_>) -> Result<Option<&'static Context>, NotifyError> {
    // Whatever such a descriptor names, it cannot be used.
    if fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::PATH)) {
        return Err(NotifyError::NotEventfd);
    }
    let source = match Context::of_the_process() {
        Ok(context) => return context.check(fd).map(|()| Some(context)),
        Err(source) => source,
    };
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        tracing::warn!(
            "no asynchronous I/O ({source}; see the sysctl fs.aio-max-nr, and seccomp filters): a thread for each \
             eventfd signals peers instead"
        );
    });
    let failed =
        |e: rustix::io::Errno| NotifyError::Io { what: "reading the name of a descriptor in /proc", source: e.into() };
    let name = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()).map_err(failed)?;
    // Names of other files begin with `/`, or with another kind.
    if name.as_bytes() == b"anon_inode:[eventfd]" { Ok(None) } else { Err(NotifyError::NotEventfd) }
}

/// An epoll descriptor with every [`Kick`], on which a thread sleeps until a peer kicks. Clones are the same
/// descriptor.
#[derive(Clone, Debug)]
pub(crate) struct Kicks(Arc<OwnedFd>);

/// The numbers with which files are added to the epoll descriptor. They say what an event is about.
mod about {
    pub(super) const KICK: u64 = 0;
    pub(super) const HANG_UP: u64 = 1;
    pub(super) const WAKE: u64 = 2;
}

impl Kicks {
    pub(crate) fn new() -> Result<Self, NotifyError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        Ok(Self(Arc::new(epoll.map_err(|e| NotifyError::Io { what: "epoll_create", source: e.into() })?)))
    }

    fn add(&self, fd: BorrowedFd<'_>, about: u64, flags: epoll::EventFlags) -> Result<(), NotifyError> {
        let failed = |e: rustix::io::Errno| NotifyError::Io { what: "epoll_ctl", source: e.into() };
        epoll::add(&self.0, fd, epoll::EventData::new_u64(about), flags).map_err(failed)
    }

    /// Watches the connection `socket`: one event is reported when the peer closes it. Ends when `socket` is closed.
    ///
    /// One-shot and not by edges: a peer that shuts the socket down and then closes it makes several.
    pub(crate) fn watch_hang_up(&self, socket: BorrowedFd<'_>) -> Result<(), NotifyError> {
        self.add(socket, about::HANG_UP, epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT)
    }

    /// Takes a descriptor that is always readable, for [`wake`](Self::wake). It is readable once from now on.
    pub(crate) fn watch_ready(&self, ready: BorrowedFd<'_>) -> Result<(), NotifyError> {
        self.add(ready, about::WAKE, epoll::EventFlags::IN | epoll::EventFlags::ONESHOT)
    }

    /// Ends a sleep, now or the next. `ready` is what was given to [`watch_ready`](Self::watch_ready): a one-shot file is
    /// reported once more after it was modified.
    pub(crate) fn wake(&self, ready: BorrowedFd<'_>) {
        let (data, flags) =
            (epoll::EventData::new_u64(about::WAKE), epoll::EventFlags::IN | epoll::EventFlags::ONESHOT);
        if let Err(error) = epoll::modify(&self.0, ready, data, flags) {
            tracing::warn!(%error, "a thread that waits for a queue is not woken");
        }
    }

    /// Takes over a descriptor by which a peer kicks. A peer may pass the same eventfd for several rings.
    ///
    /// # Errors
    ///
    /// [`NotifyError`]: it is not an eventfd, or it cannot be waited for.
    pub(crate) fn watch(&self, fd: OwnedFd) -> Result<Kick, NotifyError> {
        check_eventfd(fd.as_fd())?;
        self.add(fd.as_fd(), about::KICK, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        Ok(Kick { fd, epoll: Some(Arc::clone(&self.0)) })
    }

    /// Forgets the kicks until now. Must be called after a sleep, before the rings are read. Returns whether the peer
    /// has closed a [watched](Self::watch_hang_up) connection since the last call.
    ///
    /// Kicks that one call does not take end the next sleep at once, so none is lost.
    pub(crate) fn clear(&self) -> bool {
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        match epoll::wait(&self.0, &mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok((events, _)) => events.iter().any(|event| event.data.u64() == about::HANG_UP),
            Err(_) => false,
        }
    }
}

impl AsFd for Kicks {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// An eventfd by which a peer kicks. It is watched until it is dropped.
#[derive(Debug)]
pub(crate) struct Kick {
    fd: OwnedFd,
    epoll: Option<Arc<OwnedFd>>,
}

impl Kick {
    /// An eventfd that is not watched: its ring is only polled.
    pub(crate) fn unwatched(fd: OwnedFd) -> Self {
        Self { fd, epoll: None }
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Kick {
    fn drop(&mut self) {
        // The peer has the open file, too, so it would stay in the epoll set after this descriptor is closed.
        let _ = self.epoll.as_ref().map(|epoll| epoll::delete(epoll, &self.fd));
    }
}

/// An asynchronous I/O context, and what its requests read.
#[derive(Debug)]
struct Context {
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
/// How often a request is tried before a signal is lost. Before the second attempt, completions are reaped. More
/// attempts are needed only if other threads use the places that were freed.
const ATTEMPTS: usize = 8;

impl Context {
    fn of_the_process() -> io::Result<&'static Self> {
        static CONTEXT: AtomicPtr<Context> = AtomicPtr::new(std::ptr::null_mut());
        loop {
            let current = CONTEXT.load(Ordering::Acquire);
            // SAFETY: what the pointer has pointed to is never freed: the parent's context stays in the child as well.
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

    /// Whether the context is one of this process, and not of the process that this one was forked from. The number of the
    /// process alone does not tell: the first process of a PID namespace may have its parent's.
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

    /// Whether a descriptor is an eventfd. It is not signalled. The answer for a descriptor that only names a file is wrong.
    fn check(&self, fd: BorrowedFd<'_>) -> Result<(), NotifyError> {
        // The kernel looks at the eventfd first, then refuses to write to the end of a pipe that is for reading.
        match self.retry(PWRITE, fd) {
            Err(e) if e.raw_os_error() == Some(libc::EBADF) => Ok(()),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Err(NotifyError::NotEventfd),
            Err(source) => Err(NotifyError::Aio { source }),
            Ok(()) => Err(NotifyError::Aio { source: io::ErrorKind::Unsupported.into() }),
        }
    }

    fn signal(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
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
        // SAFETY: the kernel reads the one request during the call, and the request has no buffer. Both descriptors are open.
        check(unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1 as c_long, requests.as_mut_ptr()) })
    }

    /// Takes completions out of the context, which has room for a bounded number. Does not wait.
    #[cold]
    fn reap(&self) {
        let mut events = [IoEvent([0; 4]); 128];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let (least, most) = (0 as c_long, events.len() as c_long);
        // SAFETY: the kernel writes at most `most` events, and reads the timeout, whose layout is its own.
        let _ = unsafe {
            libc::syscall(libc::SYS_io_getevents, self.id, least, most, events.as_mut_ptr(), &raw const zero)
        };
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is this value's, and no request of it is under way: each completes within its submission.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}

#[inline]
fn check(result: c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

    fn count(fd: &impl AsFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    fn pair(flags: EventfdFlags) -> (OwnedFd, OwnedFd) {
        let fd = eventfd(0, flags).unwrap();
        (fd.try_clone().unwrap(), fd)
    }

    /// Each signal counts, also when the context is full of completions, and those of several threads.
    #[test]
    fn signals_are_counted() {
        let (peer, fd) = pair(EventfdFlags::empty());
        let notifier = Notifier::new(fd).unwrap();
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| (0..5000).for_each(|_| notifier.signal()));
            }
        });
        assert_eq!(count(&peer), 20_000);
        assert!(!fcntl_getfl(&peer).unwrap().contains(OFlags::NONBLOCK), "the peer's flags are as they were");
    }

    /// A descriptor is not signalled when it is taken over, and a full one does not block.
    #[test]
    fn a_full_counter() {
        let (peer, fd) = pair(EventfdFlags::empty());
        rustix::io::write(&peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let notifier = Notifier::new(fd).unwrap();
        assert_eq!(count(&peer), u64::MAX - 1);
        rustix::io::write(&peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        (0..1000).for_each(|_| notifier.signal());
        assert_eq!(count(&peer), u64::MAX);
    }

    fn ready(kicks: &Kicks) -> bool {
        let mut fds = [PollFd::new(kicks, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    }

    /// A kick is reported once, also one of a counter that was not zero; the counter stays; a dropped kick is not watched.
    #[test]
    fn kicks_are_edges() {
        let kicks = Kicks::new().unwrap();
        let (peer, fd) = pair(EventfdFlags::SEMAPHORE);
        let again = kicks.watch(peer.try_clone().unwrap()).unwrap();
        let kick = kicks.watch(fd).unwrap();
        for n in 1..200u64 {
            assert!(!ready(&kicks), "kick {n}");
            rustix::io::write(&peer, &n.to_ne_bytes()).unwrap();
            assert!(ready(&kicks), "kick {n}");
            kicks.clear();
        }
        drop(kick);
        rustix::io::write(&peer, &1u64.to_ne_bytes()).unwrap();
        assert!(ready(&kicks), "the other ring's kick is watched still");
        kicks.clear();
        drop(again);
        rustix::io::write(&peer, &1u64.to_ne_bytes()).unwrap();
        assert!(!ready(&kicks));
        assert_eq!(count(&peer), 1, "a semaphore gives 1 at a time: nothing was read");
    }

    /// More kicks than one call takes are not lost.
    #[test]
    fn many_kicks() {
        let kicks = Kicks::new().unwrap();
        let (peers, all): (Vec<_>, Vec<_>) = (0..200).map(|_| pair(EventfdFlags::empty())).unzip();
        let all: Vec<_> = all.into_iter().map(|fd| kicks.watch(fd).unwrap()).collect();
        peers.iter().for_each(|peer| _ = rustix::io::write(peer, &1u64.to_ne_bytes()).unwrap());
        let rounds = (0..10).take_while(|_| ready(&kicks).then(|| kicks.clear()) == Some(false)).count();
        assert_eq!(rounds, 4);
        drop(all);
    }

    /// The end of a connection is reported once. A wake-up is reported once for each call, and not read.
    #[test]
    fn hang_ups_and_wake_ups() {
        let kicks = Kicks::new().unwrap();
        let always = eventfd(1, EventfdFlags::empty()).unwrap();
        kicks.watch_ready(always.as_fd()).unwrap();
        assert!(ready(&kicks) && !kicks.clear() && !ready(&kicks));
        for _ in 0..3 {
            kicks.wake(always.as_fd());
            assert!(ready(&kicks) && !kicks.clear() && !ready(&kicks));
        }
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        kicks.watch_hang_up(ours.as_fd()).unwrap();
        std::io::Write::write_all(&mut &theirs, b"bytes").unwrap();
        assert!(!ready(&kicks), "bytes are no hang-up");
        theirs.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(ready(&kicks) && kicks.clear() && !kicks.clear() && !ready(&kicks));
        drop(theirs);
        assert!(!ready(&kicks), "once");
    }

    /// A child does not have the contexts of its parent.
    #[test]
    fn a_child_of_a_fork_makes_its_own_context() {
        let (peer, fd) = pair(EventfdFlags::empty());
        let notifier = Notifier::new(fd).unwrap();
        // SAFETY: the child makes system calls, allocates a few bytes, and ends without running anything of the parent's.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let signalled = Notifier::new(peer.try_clone().unwrap()).map(|own| own.signal()).is_ok();
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!signalled)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        notifier.signal();
        assert_eq!(count(&peer), 2, "one of each process");
    }

    /// Forbids system calls to the thread: they fail with EPERM.
    fn forbid(calls: [c_long; 2]) {
        const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
        const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
        let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut filter = [
            op(LOAD, 0, 0, 0),
            op(EQUAL, 2, 0, calls[0] as u32),
            op(EQUAL, 1, 0, calls[1] as u32),
            op(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
            op(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the kernel copies the program, whose length is right. It holds for this thread and those that it starts.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
        }
    }

    /// Where asynchronous I/O is forbidden, in whole or in part, signals and kicks work, and other files are refused.
    #[test]
    fn without_asynchronous_io() {
        for forbidden in [[libc::SYS_io_setup, libc::SYS_io_submit], [libc::SYS_io_submit; 2]] {
            let body = move || {
                forbid(forbidden);
                let (peer, fd) = pair(EventfdFlags::empty());
                let notifier = Notifier::new(fd).unwrap();
                assert!(matches!(notifier.0, Way::Thread(_)));
                for _ in 0..1000 {
                    notifier.signal();
                    assert_eq!(count(&peer), 1);
                }
                let kicks = Kicks::new().unwrap();
                let kick = kicks.watch(peer.try_clone().unwrap()).unwrap();
                rustix::io::write(&peer, &1u64.to_ne_bytes()).unwrap();
                assert!(ready(&kicks));
                drop(kick);
                let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
                let path = rustix::fs::open("/proc/self/fd", OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
                let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
                let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
                let null = std::fs::File::open("/dev/null").unwrap();
                for other in [reader, writer, path, socket.into(), epoll, null.into()] {
                    assert!(matches!(Notifier::new(other), Err(NotifyError::NotEventfd)));
                }
            };
            std::thread::spawn(body).join().unwrap();
        }
    }

    /// The kernel tells an eventfd from other files; `tests/hostile_events.rs` has more kinds.
    #[test]
    fn other_files_are_refused() {
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(matches!(Notifier::new(null()), Err(NotifyError::NotEventfd)));
        assert!(matches!(Kicks::new().unwrap().watch(null()), Err(NotifyError::NotEventfd)));
    }
}
