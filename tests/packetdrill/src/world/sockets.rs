//! Socket calls. Errors are those of Linux.

use super::host::{Listening, Socket, SocketKind, World};
use super::stream::{Options, Push, Stream};
use crate::errno::Errno;
use crate::memory::SharedBytes;
use netmem_inet::tcp::{Chunk, Connection, Header, IpFields, KeepAlive, Listener, ReadOutcome};
use netmem_inet::wire::Flow;
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// The addresses of this host, unless a socket is bound to another one. The scripts are run with
/// `--local_ip` of the first address.
const LOCAL_V4: Ipv4Addr = Ipv4Addr::new(192, 168, 0, 2);
const LOCAL_V6: Ipv6Addr = Ipv6Addr::new(0xfd, 0, 0, 0, 0, 0, 0, 1);

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
            SocketKind::Stream(id) => {
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.options = options;
                    stream.apply();
                }
                self.pump(id);
            }
            SocketKind::Listener(id) => {
                let Some(v4) = self.listeners.get(&id).map(|listening| listening.local.is_ipv4()) else { return };
                let config = self.config(&options, v4);
                if let Some(listening) = self.listeners.get_mut(&id) {
                    (listening.options, listening.config) = (options, config);
                }
            }
            SocketKind::New => (),
        }
    }

    pub(crate) fn socket(&mut self, fd: i32, v4: bool, nonblocking: bool) {
        let options = Options {
            max_segment: 0,
            no_delay: false,
            cork: false,
            send_buffer: self.settings.nth("tcp_wmem", 1, 16 << 10) as usize,
            not_sent: 0,
            user_timeout: Duration::ZERO,
            syn_retries: 0,
            keep_alive: (false, KeepAlive::default()),
            resets: false,
            ignores_path: false,
            ip: IpFields::default(),
        };
        let kind = SocketKind::New;
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
        let socket = self.sockets.get(&fd).ok_or(libc::EBADF)?;
        let (options, local) = (socket.options, socket.local.ok_or(libc::EINVAL)?);
        let listener = Listener::new(backlog + 1, 256);
        let config = self.config(&options, local.is_ipv4());
        let id = self.next;
        self.next += 1;
        self.listeners
            .insert(id, Listening { local, listener, config, options, ready: VecDeque::new(), half_open: Vec::new() });
        self.sockets.get_mut(&fd).ok_or(libc::EBADF)?.kind = SocketKind::Listener(id);
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
        let listening = self.listeners.get_mut(&id)?;
        let Some(stream) = listening.ready.pop_front() else { return nonblocking.then_some(Err(libc::EAGAIN)) };
        listening.listener.accepted();
        let new = descriptor();
        let options = self.streams[&stream].options;
        let kind = SocketKind::Stream(stream);
        self.sockets.insert(new, Socket { kind, nonblocking: false, connecting: false, options, v4, local: None });
        Some(Ok((new, self.streams[&stream].flow.remote)))
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
                self.open(fd, remote)
            }
            SocketKind::Stream(id) if socket.connecting => id,
            _ => return Some(Err(libc::EISCONN)),
        };
        let stream = self.streams.get_mut(&id)?;
        let result = match stream.failure.take() {
            Some(failure) => Err(failure),
            None if stream.is_opening() => return nonblocking.then_some(Err(waits)),
            None => Ok(()),
        };
        self.sockets.entry(fd).and_modify(|socket| socket.connecting = false);
        Some(result)
    }

    /// Opens a connection for a socket.
    fn open(&mut self, fd: i32, remote: SocketAddr) -> usize {
        let host: IpAddr = match remote {
            SocketAddr::V4(_) => LOCAL_V4.into(),
            SocketAddr::V6(_) => LOCAL_V6.into(),
        };
        self.port += 1;
        let socket = &self.sockets[&fd];
        let options = socket.options;
        let local = socket.local.unwrap_or_else(|| SocketAddr::new(host, self.port));
        let flow = Flow { local, remote };
        let config = self.config(&options, remote.is_ipv4());
        let connection = Connection::connect(&config, self.secret.start(&flow, self.now), None, self.now);
        let id = self.insert(Stream::new(flow, connection, options, config.max_payload, None, &Header::default()));
        self.sockets.entry(fd).and_modify(|socket| {
            (socket.kind, socket.connecting) = (SocketKind::Stream(id), true);
        });
        self.pump(id);
        id
    }

    pub(crate) fn stream(&mut self, fd: i32) -> Result<(usize, &mut Stream), Errno> {
        match self.sockets.get(&fd).ok_or(libc::EBADF)?.kind {
            SocketKind::Stream(id) => Ok((id, self.streams.get_mut(&id).ok_or(libc::ENOTCONN)?)),
            _ => Err(libc::ENOTCONN),
        }
    }

    /// Reads received bytes until `bytes` has `len`. Returns `None` while it has to wait.
    pub(crate) fn read(&mut self, fd: i32, how: Reading, bytes: &mut Vec<u8>, len: usize) -> Option<Result<(), Errno>> {
        let now = self.now;
        let nonblocking = how.at_once || self.sockets.get(&fd).is_some_and(|socket| socket.nonblocking);
        let (id, stream) = match self.stream(fd) {
            Ok(found) => found,
            Err(error) => return Some(Err(error)),
        };
        if how.peek {
            *bytes = stream.peek(len);
            let waits = if how.all { bytes.len() < len } else { bytes.is_empty() && len > 0 };
            if !waits || stream.is_at_end() {
                return Some(Ok(()));
            }
            let result = if bytes.is_empty() { Err(libc::EAGAIN) } else { Ok(()) };
            return nonblocking.then_some(result);
        }
        let result = loop {
            if bytes.len() == len {
                break Some(Ok(()));
            }
            match stream.next_chunk(now) {
                Ok(ReadOutcome::Chunk(mut chunk)) => {
                    let take = chunk.len().min(len - bytes.len());
                    bytes.extend_from_slice(&chunk.bytes()[..take]);
                    chunk.advance(take);
                    if !chunk.is_empty() {
                        stream.rest = Some(chunk);
                    }
                }
                Ok(ReadOutcome::Empty) if bytes.is_empty() => break nonblocking.then_some(Err(libc::EAGAIN)),
                Ok(ReadOutcome::Empty) if how.all && !nonblocking => break None,
                Ok(ReadOutcome::Empty | ReadOutcome::End) => break Some(Ok(())),
                Err(_) if !bytes.is_empty() => break Some(Ok(())),
                // The error is reported once. Then the stream is at its end.
                Err(_) => break Some(stream.failure.take().map_or(Ok(()), Err)),
            }
        };
        self.pump(id);
        result
    }

    /// Moves bytes from the front of `rest` to the send buffer. Returns `None` while there is no
    /// room for all of them.
    ///
    /// It has the limits of Linux, because the scripts depend on them. A segment that is not full
    /// is filled up to half of the peer's window, whatever the limits are. A new segment is begun
    /// if less than the send buffer is queued, and less than `TCP_NOTSENT_LOWAT` is unsent. A call
    /// that had to wait continues when a third of the buffer is free.
    pub(crate) fn write(&mut self, fd: i32, rest: &mut Vec<u8>, push: Push, waited: bool) -> Option<Result<(), Errno>> {
        let not_sent = match self.sockets.get(&fd).map_or(0, |socket| socket.options.not_sent) {
            0 => self.settings.number("tcp_notsent_lowat", u64::from(u32::MAX)) as usize,
            set => set,
        };
        let (id, stream) = match self.stream(fd) {
            Ok(found) => found,
            Err(libc::ENOTCONN) => return Some(Err(libc::EPIPE)),
            Err(error) => return Some(Err(error)),
        };
        if let Some(failure) = stream.failure.take() {
            return Some(Err(failure));
        }
        if stream.is_opening() {
            return None;
        }
        if waited && !stream.is_writable(usize::MAX) {
            return None;
        }
        if !stream.records.is_empty() {
            stream.records.push_back((std::mem::take(rest), push));
            return Some(Ok(()));
        }
        loop {
            let stream = self.streams.get_mut(&id)?;
            stream.tail = stream.tail.min(stream.not_sent());
            let room = match stream.tail {
                0 => stream.goal(),
                tail => stream.goal().saturating_sub(tail),
            };
            let room = match room {
                0 => stream.goal(),
                room => room,
            };
            let begins = stream.tail == 0 || stream.tail >= stream.goal();
            let full = stream.queued() >= stream.options.send_buffer || stream.not_sent() >= not_sent;
            if rest.is_empty() {
                return Some(Ok(()));
            }
            stream.writing = begins && full;
            if stream.writing {
                stream.note(self.now);
                return None;
            }
            let take = room.min(rest.len());
            let chunk = SharedBytes::new(&rest[..take]);
            stream.tail = if begins { take } else { stream.tail + take };
            // PSH is set once for each half of the window, at the end of a full segment.
            stream.pushed += take;
            let due = stream.tail >= stream.goal() && stream.pushed > stream.window / 2;
            let more = if take < rest.len() { !due } else { push == Push::More };
            if !more {
                stream.pushed = 0;
            }
            if stream.connection.send(chunk, more).is_err() {
                return Some(Err(stream.failure.take().unwrap_or(libc::EPIPE)));
            }
            rest.drain(..take);
            if push == Push::Urgent && rest.is_empty() {
                stream.connection.mark_urgent();
            }
            if push == Push::Record && rest.is_empty() {
                stream.records.push_back((Vec::new(), Push::Plain));
            }
            self.pump(id);
        }
    }

    /// The events of `poll` that are set.
    pub(crate) fn ready(&self, fd: i32) -> libc::c_short {
        let Some(socket) = self.sockets.get(&fd) else { return libc::POLLNVAL };
        let flag = |is: bool, flag| if is { flag } else { 0 };
        match socket.kind {
            SocketKind::New => libc::POLLOUT | libc::POLLHUP,
            SocketKind::Listener(id) => {
                flag(self.listeners.get(&id).is_some_and(|l| !l.ready.is_empty()), libc::POLLIN)
            }
            SocketKind::Stream(id) => {
                let Some(stream) = self.streams.get(&id) else { return libc::POLLHUP };
                let not_sent = match socket.options.not_sent {
                    0 => self.settings.number("tcp_notsent_lowat", u64::from(u32::MAX)) as usize,
                    set => set,
                };
                flag(stream.readable() > 0 || stream.is_at_end(), libc::POLLIN)
                    | flag(stream.is_writable(not_sent), libc::POLLOUT)
                    | flag(stream.is_urgent(), libc::POLLPRI)
                    | flag(stream.is_at_end(), libc::POLLRDHUP)
                    | flag(stream.failure.is_some(), libc::POLLERR)
                    | flag(stream.ended, libc::POLLHUP)
            }
        }
    }

    pub(crate) fn shutdown(&mut self, fd: i32, how: i32) -> Result<(), Errno> {
        let (id, stream) = self.stream(fd)?;
        if how != libc::SHUT_WR {
            stream.connection.shutdown_read();
        }
        if how != libc::SHUT_RD {
            stream.connection.shutdown();
        }
        self.pump(id);
        Ok(())
    }

    pub(crate) fn close(&mut self, fd: i32) -> Result<(), Errno> {
        match self.sockets.remove(&fd).ok_or(libc::EBADF)?.kind {
            SocketKind::New => (),
            SocketKind::Listener(id) => {
                let gone = self.listeners.remove(&id);
                for id in gone.into_iter().flat_map(|listening| listening.ready.into_iter().chain(listening.half_open))
                {
                    if let Some(stream) = self.streams.get_mut(&id) {
                        (stream.used, stream.listener) = (false, None);
                        stream.connection.abort(self.now);
                    }
                    self.pump(id);
                }
            }
            SocketKind::Stream(id) => {
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.used = false;
                    if stream.options.resets {
                        stream.connection.abort(self.now);
                    } else {
                        stream.connection.close(self.now);
                    }
                }
                self.pump(id);
            }
        }
        Ok(())
    }
}
