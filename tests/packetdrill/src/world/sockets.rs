//! Socket calls. Errors are those of Linux.

use super::host::{Socket, SocketKind, World};
use crate::errno::Errno;
use crate::options::Options;
use crate::stack::{ConnectionId, Push};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr};

/// The IPv4 address of the host, unless a socket is bound to another one. The scripts are run with
/// `--local_ip` of it.
pub const LOCAL_V4: Ipv4Addr = Ipv4Addr::new(192, 168, 0, 2);
/// The IPv6 address of the host, like [`LOCAL_V4`].
pub const LOCAL_V6: Ipv6Addr = Ipv6Addr::new(0xfd, 0, 0, 0, 0, 0, 0, 1);

/// The largest number of bytes that the stack is asked for at once.
const MOST: usize = 16 << 20;

/// How a call reads.
#[derive(Clone, Copy)]
pub(crate) struct Reading {
    /// It does not wait (`MSG_DONTWAIT`).
    pub(crate) at_once: bool,
    /// The bytes stay (`MSG_PEEK`).
    pub(crate) peek: bool,
    /// It waits until it has all bytes (`MSG_WAITALL`).
    pub(crate) all: bool,
}

impl World {
    pub(crate) fn options(&self, fd: i32) -> Result<Options, Errno> {
        Ok(self.sockets.get(&fd).ok_or(libc::EBADF)?.options)
    }

    pub(crate) fn set_options(&mut self, fd: i32, options: Options) {
        let Some(socket) = self.sockets.get_mut(&fd) else { return };
        socket.options = options;
        match socket.kind {
            SocketKind::Connection(id) => self.stack.set_options(self.now, id, &options),
            SocketKind::Listener(id) => self.stack.set_listener_options(id, &options),
            SocketKind::New => (),
        }
    }

    pub(crate) fn socket(&mut self, fd: i32, v4: bool, nonblocking: bool) {
        let (kind, options) = (SocketKind::New, Options::new(&self.settings));
        self.sockets.insert(fd, Socket { kind, nonblocking, connecting: false, options, v4, local: None });
    }

    pub(crate) fn bind(&mut self, fd: i32, local: SocketAddr) -> Result<(), Errno> {
        let socket = self.sockets.get_mut(&fd).ok_or(libc::EBADF)?;
        // A socket of IPv4 has no addresses of IPv6. The other way round, they are mapped.
        if socket.v4 && local.is_ipv6() {
            return Err(libc::EAFNOSUPPORT);
        }
        socket.local = Some(local);
        Ok(())
    }

    pub(crate) fn listen(&mut self, fd: i32, backlog: usize) -> Result<(), Errno> {
        let socket = self.sockets.get_mut(&fd).ok_or(libc::EBADF)?;
        let local = socket.local.ok_or(libc::EINVAL)?;
        socket.kind = SocketKind::Listener(self.stack.listen(local, backlog, &socket.options)?);
        Ok(())
    }

    /// Makes the next connection of a listener a socket, with the descriptor that `descriptor`
    /// makes.
    pub(crate) fn accept(
        &mut self,
        fd: i32,
        descriptor: impl FnOnce() -> i32,
    ) -> Option<Result<(i32, SocketAddr), Errno>> {
        let Some(socket) = self.sockets.get(&fd) else { return Some(Err(libc::EBADF)) };
        let (SocketKind::Listener(id), v4, nonblocking) = (socket.kind, socket.v4, socket.nonblocking) else {
            return Some(Err(libc::EINVAL));
        };
        let Some(accepted) = self.stack.accept(id) else { return nonblocking.then_some(Err(libc::EAGAIN)) };
        let new = descriptor();
        let (kind, options) = (SocketKind::Connection(accepted.connection), accepted.options);
        self.sockets.insert(new, Socket { kind, nonblocking: false, connecting: false, options, v4, local: None });
        Some(Ok((new, accepted.remote)))
    }

    /// Begins to connect, or continues with an attempt whose result was not returned. Returns the
    /// result: `None` while it is not known. A first call that does not wait returns
    /// `EINPROGRESS`, and later ones `EALREADY`.
    pub(crate) fn connect(&mut self, fd: i32, remote: SocketAddr) -> Option<Result<(), Errno>> {
        let socket = match self.sockets.get(&fd) {
            None => return Some(Err(libc::EBADF)),
            Some(socket) if socket.v4 && remote.is_ipv6() => return Some(Err(libc::EAFNOSUPPORT)),
            Some(socket) => socket,
        };
        let (nonblocking, mut waits) = (socket.nonblocking, libc::EALREADY);
        let id = match socket.kind {
            SocketKind::New => {
                waits = libc::EINPROGRESS;
                match self.open(fd, remote) {
                    Ok(id) => id,
                    Err(error) => return Some(Err(error)),
                }
            }
            SocketKind::Connection(id) if socket.connecting => id,
            _ => return Some(Err(libc::EISCONN)),
        };
        let result = match self.stack.take_error(id) {
            Some(error) => Err(error),
            None if self.stack.readiness(id).opening => return nonblocking.then_some(Err(waits)),
            None => Ok(()),
        };
        self.sockets.entry(fd).and_modify(|socket| socket.connecting = false);
        Some(result)
    }

    /// Opens a connection for a socket.
    fn open(&mut self, fd: i32, remote: SocketAddr) -> Result<ConnectionId, Errno> {
        let host: IpAddr = match remote {
            SocketAddr::V4(_) => LOCAL_V4.into(),
            SocketAddr::V6(_) => LOCAL_V6.into(),
        };
        self.port += 1;
        let socket = self.sockets.get_mut(&fd).ok_or(libc::EBADF)?;
        let local = socket.local.unwrap_or_else(|| SocketAddr::new(host, self.port));
        let id = self.stack.connect(self.now, local, remote, &socket.options)?;
        (socket.kind, socket.connecting) = (SocketKind::Connection(id), true);
        Ok(id)
    }

    pub(crate) fn connection(&self, fd: i32) -> Result<ConnectionId, Errno> {
        match self.sockets.get(&fd).ok_or(libc::EBADF)?.kind {
            SocketKind::Connection(id) => Ok(id),
            _ => Err(libc::ENOTCONN),
        }
    }

    /// Reads received bytes until `bytes` has `len`. Returns `None` while it has to wait.
    pub(crate) fn read(&mut self, fd: i32, how: Reading, bytes: &mut Vec<u8>, len: usize) -> Option<Result<(), Errno>> {
        let nonblocking = how.at_once || self.sockets.get(&fd).is_some_and(|socket| socket.nonblocking);
        let id = match self.connection(fd) {
            Ok(id) => id,
            Err(error) => return Some(Err(error)),
        };
        if how.peek {
            return self.peek(id, how.all, nonblocking, bytes, len);
        }
        while bytes.len() < len {
            let from = bytes.len();
            let room = (len - from).min(MOST);
            bytes.resize(from + room, 0);
            let received = self.stack.receive(self.now, id, &mut bytes[from..]);
            bytes.truncate(from + received.unwrap_or(0));
            match received {
                // The error is reported once. Then the stream is at its end.
                Ok(0) if bytes.is_empty() => return Some(self.stack.take_error(id).map_or(Ok(()), Err)),
                Ok(0) => break,
                // The stack has no more now.
                Ok(n) if n < room && !how.all => break,
                Ok(_) => (),
                Err(libc::EAGAIN) if nonblocking && !bytes.is_empty() => break,
                Err(libc::EAGAIN) if nonblocking => return Some(Err(libc::EAGAIN)),
                Err(libc::EAGAIN) if bytes.is_empty() || how.all => return None,
                Err(_) if !bytes.is_empty() => break,
                Err(error) => return Some(Err(error)),
            }
        }
        Some(Ok(()))
    }

    /// Copies up to `len` received bytes, and leaves them.
    fn peek(
        &mut self,
        id: ConnectionId,
        all: bool,
        nonblocking: bool,
        bytes: &mut Vec<u8>,
        len: usize,
    ) -> Option<Result<(), Errno>> {
        bytes.resize(len.min(MOST), 0);
        match self.stack.peek(id, bytes) {
            Ok(n) => bytes.truncate(n),
            Err(error) => return Some(Err(error)),
        }
        let waits = if all { bytes.len() < len } else { bytes.is_empty() && len > 0 };
        let ready = self.stack.readiness(id);
        if !waits || ready.end || ready.closed {
            return Some(Ok(()));
        }
        let result = if bytes.is_empty() { Err(libc::EAGAIN) } else { Ok(()) };
        nonblocking.then_some(result)
    }

    /// Moves bytes from the front of `rest` to the stack. Returns `None` while it has no room for
    /// all of them. A call that had to wait continues when the connection is writable.
    pub(crate) fn write(&mut self, fd: i32, rest: &mut Vec<u8>, push: Push, waited: bool) -> Option<Result<(), Errno>> {
        let id = match self.connection(fd) {
            Ok(id) => id,
            Err(libc::ENOTCONN) => return Some(Err(libc::EPIPE)),
            Err(error) => return Some(Err(error)),
        };
        if let Some(error) = self.stack.take_error(id) {
            return Some(Err(error));
        }
        let ready = self.stack.readiness(id);
        if ready.opening || (waited && !ready.writable && !ready.closed) {
            return None;
        }
        loop {
            match self.stack.send(self.now, id, rest, push) {
                Ok(n) => {
                    rest.drain(..n.min(rest.len()));
                    if rest.is_empty() {
                        return Some(Ok(()));
                    }
                    if n == 0 {
                        return None;
                    }
                }
                Err(libc::EAGAIN) => return None,
                Err(error) => return Some(Err(self.stack.take_error(id).unwrap_or(error))),
            }
        }
    }

    /// The events of `poll` that are set.
    pub(crate) fn ready(&self, fd: i32) -> libc::c_short {
        let Some(socket) = self.sockets.get(&fd) else { return libc::POLLNVAL };
        let flag = |is: bool, flag| if is { flag } else { 0 };
        match socket.kind {
            SocketKind::New => libc::POLLOUT | libc::POLLHUP,
            SocketKind::Listener(id) => flag(self.stack.can_accept(id), libc::POLLIN),
            SocketKind::Connection(id) => {
                let ready = self.stack.readiness(id);
                let end = ready.end || ready.closed;
                flag(ready.readable || end, libc::POLLIN)
                    | flag(ready.writable || ready.closed, libc::POLLOUT)
                    | flag(ready.urgent, libc::POLLPRI)
                    | flag(end, libc::POLLRDHUP)
                    | flag(ready.failed, libc::POLLERR)
                    | flag(ready.closed, libc::POLLHUP)
            }
        }
    }

    pub(crate) fn shutdown(&mut self, fd: i32, how: Shutdown) -> Result<(), Errno> {
        let id = self.connection(fd)?;
        self.stack.shutdown(self.now, id, how)
    }

    pub(crate) fn close(&mut self, fd: i32) -> Result<(), Errno> {
        let socket = self.sockets.remove(&fd).ok_or(libc::EBADF)?;
        match socket.kind {
            SocketKind::New => (),
            SocketKind::Listener(id) => self.stack.close_listener(self.now, id),
            SocketKind::Connection(id) => self.stack.close(self.now, id, socket.options.resets),
        }
        Ok(())
    }
}
