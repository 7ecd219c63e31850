//! The two roles of a vhost-user socket: connect to a path, or listen on a path. Either side of the
//! protocol may have either role. No call waits longer than its limit.

use super::VhostUserError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The pause between two attempts to connect to a listener whose queue is full.
const PAUSE: Duration = Duration::from_millis(10);

/// Connects to the socket at `path`.
///
/// # Errors
///
/// [`VhostUserError::Connect`] if no process listens there; [`VhostUserError::Backlog`] if the
/// listener's queue of connections is full for as long as `limit`.
pub fn connect(path: &Path, limit: Duration) -> Result<UnixStream, VhostUserError> {
    let deadline = Instant::now() + limit;
    loop {
        match try_connect(path) {
            Ok(stream) => return Ok(stream),
            // A blocking connect would wait here without a limit.
            Err(Errno::AGAIN) if Instant::now() < deadline => sleep(PAUSE),
            Err(Errno::AGAIN) => {
                return Err(VhostUserError::Backlog { path: path.to_owned(), seconds: limit.as_secs_f64() });
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(VhostUserError::Connect { path: path.to_owned(), source: e.into() }),
        }
    }
}

/// Connects without waiting: "try again" if the listener's queue is full.
fn try_connect(path: &Path) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(UnixStream::from(socket))
}

/// Whether the socket at `path` is left over from a process that has ended. A connection would show
/// this, but would also occupy the queue of a live listener. So a datagram socket is connected:
/// this always fails, and the error shows whether there is a listener.
fn is_stale(path: &Path) -> bool {
    let probe = || {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
    };
    probe() == Err(Errno::CONNREFUSED)
}

/// A listening socket. Its path is removed when it is dropped, unless another file has the path by
/// then.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
    inode: u64,
}

impl Listener {
    /// Listens on `path`. A socket that no process listens on any more is replaced.
    ///
    /// # Errors
    ///
    /// [`VhostUserError::Occupied`], [`VhostUserError::Listen`].
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, VhostUserError> {
        let path = path.as_ref();
        let failed = |source| VhostUserError::Listen { path: path.to_owned(), source };
        let occupied = |what| VhostUserError::Occupied { path: path.to_owned(), what };
        let listener = match UnixListener::bind(path) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                if !std::fs::symlink_metadata(path).map_err(failed)?.file_type().is_socket() {
                    return Err(occupied("a file that is no socket is there"));
                }
                if !is_stale(path) {
                    return Err(occupied("another process listens there"));
                }
                std::fs::remove_file(path).map_err(failed)?;
                UnixListener::bind(path)
            }
            other => other,
        };
        let listener = listener.map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let inode = std::fs::symlink_metadata(path).map_err(failed)?.ino();
        Ok(Self { listener, path: path.to_owned(), inode })
    }

    /// The path that is listened on.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for a connection, up to `limit`.
    ///
    /// # Errors
    ///
    /// [`VhostUserError::NotConnected`] when the time is over; [`VhostUserError::Listen`].
    pub fn accept(&self, limit: Duration) -> Result<UnixStream, VhostUserError> {
        let failed = |source: io::Error| VhostUserError::Listen { path: self.path.clone(), source };
        let deadline = Instant::now() + limit;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => return Ok(stream),
                Err(e) => match Errno::from_io_error(&e) {
                    // There is no connection yet, or it has ended already.
                    Some(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                    _ => return Err(failed(e)),
                },
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let (path, seconds) = (self.path.clone(), limit.as_secs_f64());
                return Err(VhostUserError::NotConnected { path, seconds });
            }
            let timeout = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(failed(e.into())),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if std::fs::symlink_metadata(&self.path).is_ok_and(|m| m.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_full_queue_of_connections_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("full");
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let first = connect(&path, LONG).unwrap();
        let error = connect(&path, SHORT).unwrap_err();
        assert!(matches!(&error, VhostUserError::Backlog { .. }) && error.to_string().contains("0.05 s"), "{error}");
        // A full queue shows a live process: its socket is not replaced.
        assert!(matches!(Listener::bind(&path), Err(VhostUserError::Occupied { .. })));
        // Once there is room, a connection that is being tried succeeds.
        let tries = std::thread::spawn(move || connect(&path, LONG));
        rustix::net::accept(&socket).unwrap();
        tries.join().unwrap().unwrap();
        drop(first);
    }

    #[test]
    fn listening() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        // A child that another test makes has a copy of each descriptor, until it runs: to it, the
        // socket is not stale.
        let begin = Instant::now();
        let listener = loop {
            match Listener::bind(&path) {
                Ok(listener) => break listener,
                Err(e) => assert!(begin.elapsed() < LONG, "a stale socket is replaced: {e}"),
            }
        };
        assert!(matches!(Listener::bind(&path), Err(VhostUserError::Occupied { .. })));
        let error = listener.accept(SHORT).unwrap_err();
        assert!(matches!(error, VhostUserError::NotConnected { .. }), "{error}");
        for _ in 0..2 {
            let _front = connect(&path, LONG).unwrap();
            listener.accept(LONG).unwrap();
        }
        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "no socket").unwrap();
        assert!(matches!(Listener::bind(&path), Err(VhostUserError::Occupied { .. })));
        assert!(path.exists());
        let missing = dir.path().join("none/socket");
        assert!(matches!(Listener::bind(missing), Err(VhostUserError::Listen { .. })));
    }

    #[test]
    fn a_path_that_another_file_has_taken_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = Listener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let other = UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
        drop(other);
    }
}
