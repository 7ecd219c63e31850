//! What packetdrill calls.

use super::host::{Listening, Netmem};
use super::memory::SharedBytes;
use super::stream::Stream;
use netmem_inet::Time;
use netmem_inet::tcp::{Chunk, Connection, Header, Listener, ReadOutcome};
use netmem_inet::wire::Flow;
use netmem_packetdrill::{
    Accepted, ConnectionId, Errno, ListenerId, Options, Push, Readiness, Sizes, SocketOption, Stack, TcpInfo,
};
use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

/// The time of a call.
fn time(now: Duration) -> Time {
    Time::ZERO + now
}

impl Netmem {
    /// The limit of unsent bytes of a socket.
    fn not_sent(&self, options: &Options) -> usize {
        match options.not_sent {
            0 => self.settings.number("tcp_notsent_lowat", u64::from(u32::MAX)) as usize,
            set => set,
        }
    }

    fn stream(&mut self, ConnectionId(id): ConnectionId) -> Result<&mut Stream, Errno> {
        self.streams.get_mut(&id).ok_or(libc::ENOTCONN)
    }
}

impl Stack for Netmem {
    fn connect(
        &mut self,
        now: Duration,
        local: SocketAddr,
        remote: SocketAddr,
        options: &Options,
    ) -> Result<ConnectionId, Errno> {
        self.now = time(now);
        let flow = Flow { local, remote };
        let config = self.config(options, remote.is_ipv4());
        let connection = Connection::connect(&config, self.secret.start(&flow, self.now), None, self.now);
        let id = self.insert(Stream::new(flow, connection, *options, config.max_payload, None, &Header::default()));
        self.pump(id);
        Ok(ConnectionId(id))
    }

    fn listen(&mut self, local: SocketAddr, backlog: usize, options: &Options) -> Result<ListenerId, Errno> {
        let (listener, config) = (Listener::new(backlog + 1, 256), self.config(options, local.is_ipv4()));
        let (id, options) = (self.id(), *options);
        let (ready, half_open) = (VecDeque::new(), Vec::new());
        self.listeners.insert(id, Listening { local, listener, config, options, ready, half_open });
        Ok(ListenerId(id))
    }

    fn accept(&mut self, ListenerId(id): ListenerId) -> Option<Accepted> {
        let listening = self.listeners.get_mut(&id)?;
        let id = listening.ready.pop_front()?;
        listening.listener.accepted();
        let stream = &self.streams[&id];
        Some(Accepted { connection: ConnectionId(id), remote: stream.flow.remote, options: stream.options })
    }

    fn can_accept(&self, ListenerId(id): ListenerId) -> bool {
        self.listeners.get(&id).is_some_and(|listening| !listening.ready.is_empty())
    }

    /// It has the limits of Linux, because the scripts depend on them. A segment that is not full
    /// is filled up to half of the peer's window, whatever the limits are. A new segment is begun
    /// if less than the send buffer is queued, and less than `TCP_NOTSENT_LOWAT` is unsent.
    fn send(&mut self, now: Duration, connection: ConnectionId, bytes: &[u8], push: Push) -> Result<usize, Errno> {
        self.now = time(now);
        let options = self.stream(connection).map_err(|_| libc::EPIPE)?.options;
        let not_sent = self.not_sent(&options);
        let stream = self.stream(connection)?;
        if !stream.records.is_empty() {
            stream.records.push_back((bytes.to_vec(), push));
            return Ok(bytes.len());
        }
        let mut taken = 0;
        while taken < bytes.len() {
            let now = self.now;
            let stream = self.stream(connection)?;
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
            let full = stream.queued() >= options.send_buffer || stream.not_sent() >= not_sent;
            stream.writing = begins && full;
            if stream.writing {
                stream.note(now);
                return if taken > 0 { Ok(taken) } else { Err(libc::EAGAIN) };
            }
            let rest = &bytes[taken..];
            let take = room.min(rest.len());
            stream.tail = if begins { take } else { stream.tail + take };
            // PSH is set once for each half of the window, at the end of a full segment.
            stream.pushed += take;
            let due = stream.tail >= stream.goal() && stream.pushed > stream.window / 2;
            let more = if take < rest.len() { !due } else { push == Push::More };
            if !more {
                stream.pushed = 0;
            }
            if stream.connection.send(SharedBytes::new(&rest[..take]), more).is_err() {
                return Err(libc::EPIPE);
            }
            taken += take;
            if push == Push::Urgent && taken == bytes.len() {
                stream.connection.mark_urgent();
            }
            if push == Push::Record && taken == bytes.len() {
                stream.records.push_back((Vec::new(), Push::Plain));
            }
            self.pump(connection.0);
        }
        Ok(taken)
    }

    fn receive(&mut self, now: Duration, connection: ConnectionId, bytes: &mut [u8]) -> Result<usize, Errno> {
        self.now = time(now);
        let now = self.now;
        let stream = self.stream(connection)?;
        let mut len = 0;
        let ends = loop {
            if len == bytes.len() {
                break false;
            }
            match stream.next_chunk(now) {
                Ok(ReadOutcome::Chunk(mut chunk)) => {
                    let take = chunk.len().min(bytes.len() - len);
                    bytes[len..len + take].copy_from_slice(&chunk.bytes()[..take]);
                    len += take;
                    chunk.advance(take);
                    if !chunk.is_empty() {
                        stream.rest = Some(chunk);
                    }
                }
                Ok(ReadOutcome::Empty) => break false,
                Ok(ReadOutcome::End) | Err(_) => break true,
            }
        };
        self.pump(connection.0);
        if len == 0 && !bytes.is_empty() && !ends { Err(libc::EAGAIN) } else { Ok(len) }
    }

    fn peek(&mut self, connection: ConnectionId, bytes: &mut [u8]) -> Result<usize, Errno> {
        Ok(self.stream(connection)?.peek(bytes))
    }

    fn shutdown(&mut self, now: Duration, connection: ConnectionId, how: Shutdown) -> Result<(), Errno> {
        self.now = time(now);
        let stream = self.stream(connection)?;
        if how != Shutdown::Write {
            stream.connection.shutdown_read();
        }
        if how != Shutdown::Read {
            stream.connection.shutdown();
        }
        self.pump(connection.0);
        Ok(())
    }

    fn close(&mut self, now: Duration, connection: ConnectionId, reset: bool) {
        self.now = time(now);
        let now = self.now;
        if let Ok(stream) = self.stream(connection) {
            stream.used = false;
            if reset {
                stream.connection.abort(now);
            } else {
                stream.connection.close(now);
            }
        }
        self.pump(connection.0);
    }

    fn close_listener(&mut self, now: Duration, ListenerId(id): ListenerId) {
        self.now = time(now);
        let gone = self.listeners.remove(&id);
        for id in gone.into_iter().flat_map(|listening| listening.ready.into_iter().chain(listening.half_open)) {
            if let Some(stream) = self.streams.get_mut(&id) {
                (stream.used, stream.listener) = (false, None);
                stream.connection.abort(self.now);
            }
            self.pump(id);
        }
    }

    fn readiness(&self, ConnectionId(id): ConnectionId) -> Readiness {
        match self.streams.get(&id) {
            Some(stream) => stream.readiness(self.not_sent(&stream.options)),
            None => Readiness { closed: true, ..Readiness::default() },
        }
    }

    fn take_error(&mut self, connection: ConnectionId) -> Option<Errno> {
        self.stream(connection).ok()?.failure.take()
    }

    fn sizes(&self, ConnectionId(id): ConnectionId) -> Sizes {
        let Some(stream) = self.streams.get(&id) else { return Sizes::default() };
        Sizes {
            readable: Some(stream.readable()),
            unacknowledged: Some(stream.queued()),
            unsent: Some(stream.not_sent()),
            segment: Some(stream.segment()),
        }
    }

    fn info(&self, now: Duration, ConnectionId(id): ConnectionId) -> TcpInfo {
        self.streams.get(&id).map_or(TcpInfo::UNKNOWN, |stream| stream.info(time(now)))
    }

    fn has_option(&self, _: SocketOption) -> bool {
        true
    }

    fn set_options(&mut self, now: Duration, connection: ConnectionId, options: &Options) {
        self.now = time(now);
        if let Ok(stream) = self.stream(connection) {
            stream.options = *options;
            stream.apply();
        }
        self.pump(connection.0);
    }

    fn set_listener_options(&mut self, ListenerId(id): ListenerId, options: &Options) {
        let Some(v4) = self.listeners.get(&id).map(|listening| listening.local.is_ipv4()) else { return };
        let config = self.config(options, v4);
        if let Some(listening) = self.listeners.get_mut(&id) {
            (listening.options, listening.config) = (*options, config);
        }
    }

    fn set_quick_ack(&mut self, connection: ConnectionId, quick: bool) {
        if let Ok(stream) = self.stream(connection) {
            stream.connection.set_quick_ack(quick);
        }
    }

    fn receive_packet(&mut self, now: Duration, packet: &[u8]) {
        self.now = time(now);
        self.arrive(packet);
    }

    fn next_packet(&mut self, _: Duration) -> Option<Vec<u8>> {
        self.sent.pop_front()
    }

    fn deadline(&mut self) -> Option<Duration> {
        let next = self.streams.values().filter_map(|stream| stream.connection.poll_timeout()).min();
        next.map(|at| Duration::from_micros(at.micros()))
    }

    fn handle_timeout(&mut self, now: Duration) {
        self.now = time(now);
        let due = |stream: &Stream| stream.connection.poll_timeout().is_some_and(|at| at <= self.now);
        let due: Vec<usize> = self.streams.iter().filter(|(_, stream)| due(stream)).map(|(id, _)| *id).collect();
        for id in due {
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.connection.handle_timeout(self.now);
            }
            self.pump(id);
        }
    }
}
