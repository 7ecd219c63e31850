//! The path on which a helper listens.

use super::error::{HelperError, system};
use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The largest number of connections that wait to be accepted, unless `net.core.somaxconn` is less.
const BACKLOG: i32 = 4096;

/// A listening socket. Its path is removed when it is dropped, unless another file has the path by
/// then.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) socket: OwnedFd,
    path: PathBuf,
    inode: u64,
    /// Whether the last attempt to accept a connection has failed.
    pub(super) failing: bool,
}

impl Listener {
    /// Listens on `path`. A process can connect only after the path has its mode and its group,
    /// because a socket that does not listen yet refuses connections.
    pub(super) fn bind(path: &Path, mode: Option<u32>, group: Option<u32>) -> Result<Self, HelperError> {
        let listener = Self::place(path, mode, group)?;
        let failed = |e: Errno| HelperError::Listen { path: path.to_owned(), source: e.into() };
        rustix::net::listen(&listener.socket, BACKLOG).map_err(failed)?;
        Ok(listener)
    }

    /// A socket at `path` that does not listen yet.
    fn place(path: &Path, mode: Option<u32>, group: Option<u32>) -> Result<Self, HelperError> {
        let failed = |source: io::Error| HelperError::Listen { path: path.to_owned(), source };
        let occupied = |what| HelperError::Occupied { path: path.to_owned(), what };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|e| failed(e.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|e| failed(e.into()))?;
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                if !fs::symlink_metadata(path).map_err(failed)?.file_type().is_socket() {
                    return Err(occupied("a file that is no socket is there"));
                }
                if !is_stale(&address) {
                    return Err(occupied("another process listens there"));
                }
                fs::remove_file(path).map_err(failed)?;
                rustix::net::bind(&socket, &address)
            }
            bound => bound,
        }
        .map_err(|e| failed(e.into()))?;
        // The file is held by a descriptor: if another process replaces it, that file is left as it
        // is.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        let found = rustix::fs::fstat(&file).map_err(|e| failed(e.into()))?;
        let listener = Self { socket, path: path.to_owned(), inode: found.st_ino, failing: false };
        let is_socket = rustix::fs::FileType::from_raw_mode(found.st_mode) == rustix::fs::FileType::Socket;
        if !is_socket || found.st_uid != rustix::process::geteuid().as_raw() {
            return Err(occupied("another process has replaced the socket"));
        }
        if let Some(group) = group {
            rustix::fs::chownat(&file, "", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)
                .map_err(system("setting the group of the helper's socket"))?;
        }
        if let Some(mode) = mode {
            // The mode cannot be changed by a descriptor like this one, but by its path.
            let file = format!("/proc/self/fd/{}", file.as_raw_fd());
            fs::set_permissions(file, Permissions::from_mode(mode))
                .map_err(system("setting the permissions of the helper's socket"))?;
        }
        Ok(listener)
    }
}

/// Whether the socket at a path is left over from a process that has ended. A datagram socket
/// cannot be connected to it, and the error shows whether there is a process. A connection would
/// occupy that process's queue.
fn is_stale(address: &SocketAddrUnix) -> bool {
    let probe = || {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&socket, address)
    };
    probe() == Err(Errno::CONNREFUSED)
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|there| there.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    /// A path has its mode and its group before a process can connect, whatever the umask is.
    #[test]
    fn a_path_has_its_mode_before_it_listens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        // Only root may set a group that the process does not have.
        let own = rustix::process::getegid().as_raw();
        let group = if rustix::process::geteuid().is_root() { 1234 } else { own };
        for mode in [0o600, 0o660, 0o666] {
            let listener = Listener::place(&path, Some(mode), Some(group)).unwrap();
            let there = fs::symlink_metadata(&path).unwrap();
            assert_eq!((there.mode() & 0o7777, there.gid()), (mode, group));
            assert_eq!(UnixStream::connect(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
            // No other helper mistakes it for a socket that is left over.
            assert!(matches!(Listener::bind(&path, None, None), Err(HelperError::Occupied { .. })));
            drop(listener);
            assert!(!path.exists());
        }
        let listener = Listener::bind(&path, Some(0o660), None).unwrap();
        UnixStream::connect(&path).unwrap();
        assert_eq!(fs::symlink_metadata(&path).unwrap().gid(), own);
        drop(listener);
    }

    #[test]
    fn a_socket_that_is_left_over_is_replaced_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        // A child that another test makes has a copy of each descriptor until it runs.
        let listener = std::iter::repeat_with(|| Listener::bind(&path, None, None)).find_map(Result::ok).unwrap();
        assert!(matches!(Listener::bind(&path, None, None), Err(HelperError::Occupied { .. })));
        // Another file at the path is not removed.
        fs::remove_file(&path).unwrap();
        fs::write(&path, "no socket").unwrap();
        drop(listener);
        assert!(matches!(Listener::bind(&path, Some(0o600), None), Err(HelperError::Occupied { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "no socket");
        let missing = dir.path().join("none/s");
        assert!(matches!(Listener::bind(&missing, None, None), Err(HelperError::Listen { .. })));
    }
}
