//! Signals and kicks, with asynchronous I/O and without.

use super::notifier::SignalMethod;
use super::*;
use libc::c_long;
use rustix::event::epoll;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::pipe::{PipeFlags, pipe_with};
use std::os::fd::{AsFd, OwnedFd};

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

/// A descriptor is not signalled when the notifier is made, and a full one does not block.
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

/// A kick is reported once, also one of a counter that was not zero; the counter stays; a dropped
/// kick is not watched.
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

/// More kicks than one call clears are not lost.
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

/// The end of a connection is reported once. A wake-up is reported once for each call, and not
/// read.
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
    // SAFETY: the child makes system calls, allocates a few bytes, and ends without running
    // anything of the parent's.
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
    // SAFETY: the kernel copies the program, whose length is right. It holds for this thread and
    // those that it starts.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

/// Where asynchronous I/O is forbidden, in whole or in part, signals and kicks work, and other
/// files are refused.
#[test]
fn without_asynchronous_io() {
    for forbidden in [[libc::SYS_io_setup, libc::SYS_io_submit], [libc::SYS_io_submit; 2]] {
        let body = move || {
            forbid(forbidden);
            let (peer, fd) = pair(EventfdFlags::empty());
            let notifier = Notifier::new(fd).unwrap();
            assert!(matches!(notifier.0, SignalMethod::Thread(_)));
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

/// The kernel distinguishes an eventfd from other files; `tests/all/hostile_events.rs` has more
/// kinds.
#[test]
fn other_files_are_refused() {
    let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    assert!(matches!(Notifier::new(null()), Err(NotifyError::NotEventfd)));
    assert!(matches!(Kicks::new().unwrap().watch(null()), Err(NotifyError::NotEventfd)));
}
