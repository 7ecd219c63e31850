//! Unix sockets of the device: one that listens on a path, and descriptors that were inherited. No
//! call here waits for another process.

use anyhow::Context;
use netmem::virtio::socket::Listener;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A listening socket.
#[derive(Debug)]
pub(crate) enum Socket {
    /// Bound to a path here. The path is removed when the socket is dropped.
    Bound(Listener),
    /// An inherited socket. If it has a path, the process that made the socket removes the path.
    Inherited(OwnedFd),
}

impl Socket {
    /// Listens on `path`, which `option` gave. A socket there that no process listens on is
    /// replaced.
    pub(super) fn listen(option: &str, path: &Path) -> anyhow::Result<Self> {
        Ok(Self::Bound(Listener::bind(path).with_context(|| option.to_owned())?))
    }

    /// The next connection, or none at present. Never waits.
    pub(super) fn accept(&self) -> io::Result<Option<UnixStream>> {
        match rustix::net::accept_with(self, SocketFlags::CLOEXEC) {
            Ok(stream) => Ok(Some(stream.into())),
            // No connection, or one that ended before it was accepted.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

impl std::fmt::Display for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bound(listener) => listener.path().display().fmt(f),
            Self::Inherited(_) => f.write_str("an inherited socket"),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Bound(listener) => listener.as_fd(),
            Self::Inherited(fd) => fd.as_fd(),
        }
    }
}

/// What an inherited descriptor is.
#[derive(Debug)]
pub(crate) enum Inherited {
    Listening(Socket),
    Connected(UnixStream),
}

/// Takes ownership of descriptor `fd`, which the parent process left open for this one.
pub(crate) fn inherited(fd: i32) -> anyhow::Result<Inherited> {
    anyhow::ensure!(fd >= 0, "--fd {fd}: a descriptor's number is 0 or more");
    // SAFETY: the descriptor is only queried, before this process has opened descriptors of its own
    // that could be closed meanwhile.
    let open = unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    anyhow::ensure!(open, "--fd {fd}: the parent process left no such descriptor open");
    // SAFETY: the descriptor is open, and the parent gave it to this process by its number, to be
    // owned here.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).context("--fd")?;
    let stream =
        sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX) && sockopt::socket_type(&fd) == Ok(SocketType::STREAM);
    anyhow::ensure!(stream, "--fd: the descriptor is not a Unix stream socket");
    if sockopt::socket_acceptconn(&fd).context("--fd")? {
        // The parent shares this flag if it kept the socket. Without the flag, an accept waits if
        // another process that shares the socket has taken the connection.
        rustix::io::ioctl_fionbio(&fd, true).context("--fd")?;
        return Ok(Inherited::Listening(Socket::Inherited(fd)));
    }
    match rustix::net::getpeername(&fd) {
        Ok(_) => Ok(Inherited::Connected(fd.into())),
        Err(Errno::NOTCONN) => anyhow::bail!("--fd: the socket neither listens nor is connected"),
        Err(e) => Err(io::Error::from(e)).context("--fd"),
    }
}
