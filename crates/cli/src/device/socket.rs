//! Unix sockets of the device: listening on a path, connecting to one, and descriptors that were inherited.
//!
//! No call here waits for another process: a connect to a socket whose backlog is full would otherwise block for as long
//! as the listener does not accept.

use anyhow::Context;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A listening socket. Its path is removed when it is dropped, unless another file has taken the path since.
#[derive(Debug)]
pub(crate) struct Socket {
    listener: UnixListener,
    /// The path that was bound here, and its inode; none of an inherited socket.
    bound: Option<(PathBuf, u64)>,
}

impl Socket {
    /// Listens on `path`, which `option` gave. A socket there that no process listens on is replaced.
    pub(super) fn listen(option: &str, path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let listener = match UnixListener::bind(path) {
            Err(e) if e.kind() == ErrorKind::AddrInUse => {
                let kind = std::fs::symlink_metadata(path).map(|m| m.file_type());
                anyhow::ensure!(
                    kind.is_ok_and(|kind| kind.is_socket()),
                    "{option} {shown}: something that is no socket is there; choose another path, or remove it"
                );
                // Only a refused connection shows that no process listens. A full backlog (EAGAIN) has a listener.
                anyhow::ensure!(
                    connect(path).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused),
                    "{option} {shown}: a live process listens there; end it, or choose another path"
                );
                std::fs::remove_file(path).with_context(|| format!("{option} {shown}: a stale socket"))?;
                UnixListener::bind(path)
            }
            other => other,
        };
        let listener = listener.with_context(|| format!("{option} {shown}: cannot make the socket"))?;
        listener.set_nonblocking(true).context("the socket")?;
        let inode = std::fs::symlink_metadata(path).map(|m| m.ino()).unwrap_or(0);
        Ok(Self { listener, bound: Some((path.to_owned(), inode)) })
    }

    /// The next connection, or none at present. Never waits.
    pub(super) fn accept(&self) -> io::Result<Option<UnixStream>> {
        match self.listener.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            // The connection ended before it was accepted.
            Err(e) if e.kind() == ErrorKind::ConnectionAborted => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl std::fmt::Display for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.bound {
            Some((path, _)) => path.display().fmt(f),
            None => f.write_str("an inherited socket"),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some((path, inode)) = &self.bound
            && std::fs::symlink_metadata(path).is_ok_and(|m| m.ino() == *inode)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Connects to the socket at `path` without waiting: a full backlog is [`ErrorKind::WouldBlock`].
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// What an inherited descriptor is.
#[derive(Debug)]
pub(crate) enum Inherited {
    Listening(Socket),
    Connected(UnixStream),
}

/// Takes descriptor `fd`, which the parent process left open for this one.
pub(crate) fn inherited(fd: i32) -> anyhow::Result<Inherited> {
    anyhow::ensure!(fd >= 0, "--fd {fd}: a descriptor's number is 0 or more");
    // SAFETY: the descriptor is only looked at, and before any of this process's own that could be closed meanwhile.
    let open = unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    anyhow::ensure!(open, "--fd {fd}: the parent process left no such descriptor open");
    // SAFETY: it is open, and was given to this process by its number in order to be owned here.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).context("--fd")?;
    let stream =
        sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX) && sockopt::socket_type(&fd) == Ok(SocketType::STREAM);
    anyhow::ensure!(stream, "--fd: the descriptor is not a Unix stream socket");
    if sockopt::socket_acceptconn(&fd).context("--fd")? {
        let listener = UnixListener::from(fd);
        // The flag is shared with the parent, if it kept the socket. Without it, an accept waits when another process
        // that shares the socket has taken the connection.
        listener.set_nonblocking(true).context("--fd")?;
        return Ok(Inherited::Listening(Socket { listener, bound: None }));
    }
    match rustix::net::getpeername(&fd) {
        Ok(_) => Ok(Inherited::Connected(fd.into())),
        Err(Errno::NOTCONN) => anyhow::bail!("--fd: the socket neither listens nor is connected"),
        Err(e) => Err(io::Error::from(e)).context("--fd"),
    }
}
