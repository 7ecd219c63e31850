//! A connection with the state that its socket keeps, and the options of sockets.

use crate::errno::Errno;
use crate::memory::{Memory, SharedBytes};
use netmem_inet::Time;
use netmem_inet::tcp::{
    Chunk, Connection, Error, Flags, Header, Held, IpFields, KeepAlive, ReadOutcome, State, Unreachable,
};
use netmem_inet::wire::Flow;
use std::collections::VecDeque;
use std::time::Duration;

/// The size of a connection's send buffer. The buffer is never full: `write` applies the limits of
/// the socket.
pub(super) const SEND_BUFFER: usize = 1 << 30;

/// The options of a socket. An option that is not here has no effect on this TCP, or `setsockopt`
/// refuses it.
#[derive(Clone, Copy)]
pub(crate) struct Options {
    /// The value of `TCP_MAXSEG`, or 0 if it is not set.
    pub(crate) max_segment: u16,
    pub(crate) no_delay: bool,
    pub(crate) cork: bool,
    /// The value of `SO_SNDBUF` as it is returned: twice the value that was set.
    pub(crate) send_buffer: usize,
    /// The value of `TCP_NOTSENT_LOWAT`, or 0 if it is not set.
    pub(crate) not_sent: usize,
    pub(crate) user_timeout: Duration,
    /// The value of `TCP_SYNCNT`, or 0 if it is not set.
    pub(crate) syn_retries: u32,
    /// Whether `SO_KEEPALIVE` is set, and the values of `TCP_KEEPIDLE`, `TCP_KEEPINTVL` and
    /// `TCP_KEEPCNT`.
    pub(crate) keep_alive: (bool, KeepAlive),
    /// Whether `close` resets the connection (`SO_LINGER` with a time of 0).
    pub(crate) resets: bool,
    /// The values of `IP_TOS` without the bits of ECN, and of `IP_TTL`, or of their IPv6 names.
    pub(crate) ip: IpFields,
    /// Whether path MTUs are not followed (`IP_PMTUDISC_DONT`).
    pub(crate) ignores_path: bool,
}

/// A connection, and the state that the socket keeps for it.
pub(crate) struct Stream {
    pub(super) flow: Flow,
    pub(crate) connection: Connection<Memory>,
    /// The listener of the connection, while it is half open.
    pub(super) listener: Option<usize>,
    /// Whether the connection has a descriptor, or will get one.
    pub(super) used: bool,
    /// The error that the next call reports.
    pub(crate) failure: Option<Errno>,
    pub(super) ended: bool,
    pub(crate) options: Options,
    /// Bytes of payload of a segment that the route admits.
    pub(super) max_payload: u16,
    /// The largest window of the peer, and its scale.
    pub(super) window: usize,
    scale: u8,
    /// The number of bytes in the last segment that is not sent: see `write`.
    pub(super) tail: usize,
    /// The number of bytes since PSH was set last.
    pub(super) pushed: usize,
    /// Records that wait until the record before them is sent: see `write`.
    pub(super) records: VecDeque<(Vec<u8>, Push)>,
    /// Whether a `write` waits for room, and how long such calls waited although everything was
    /// sent.
    pub(super) writing: bool,
    limited: (Option<Time>, Duration),
    /// The rest of a chunk that was read in part.
    pub(super) rest: Option<Held<SharedBytes>>,
    /// Whether the peer has sent FIN.
    pub(super) end: bool,
}

/// The flag that follows the bytes of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Push {
    /// No flag.
    Plain,
    /// `MSG_MORE`.
    More,
    /// `MSG_EOR`.
    Record,
    /// `MSG_OOB`.
    Urgent,
}

impl Stream {
    pub(super) fn new(
        flow: Flow,
        connection: Connection<Memory>,
        options: Options,
        max_payload: u16,
        listener: Option<usize>,
        syn: &Header,
    ) -> Self {
        let mut stream = Self {
            flow,
            connection,
            listener,
            used: true,
            failure: None,
            ended: false,
            options,
            max_payload,
            window: 0,
            scale: 0,
            tail: 0,
            pushed: 0,
            records: VecDeque::new(),
            writing: false,
            limited: (None, Duration::ZERO),
            rest: None,
            end: false,
        };
        stream.apply();
        stream.observe(syn);
        stream
    }

    /// Applies the options of its socket to the connection.
    pub(crate) fn apply(&mut self) {
        self.connection.set_nodelay(self.options.no_delay);
        self.connection.set_cork(self.options.cork);
        let user_timeout = Some(self.options.user_timeout).filter(|timeout| !timeout.is_zero());
        self.connection.set_user_timeout(user_timeout);
        let (probes, keep_alive) = self.options.keep_alive;
        self.connection.set_keep_alive(probes.then_some(keep_alive));
        self.connection.set_ip(self.options.ip);
    }

    /// Whether the handshake is not complete.
    pub(super) fn is_opening(&self) -> bool {
        matches!(self.connection.state(), State::SynSent | State::SynReceived)
    }

    /// Whether urgent data is announced that was not read yet.
    pub(super) fn is_urgent(&self) -> bool {
        self.connection.urgent().is_some()
    }

    /// Copies up to `len` bytes that can be read, and leaves them.
    pub(super) fn peek(&self, len: usize) -> Vec<u8> {
        let rest = self.rest.iter().map(|held| &**held);
        rest.chain(self.connection.queued_from(0)).flat_map(SharedBytes::bytes).take(len).copied().collect()
    }

    /// Records the peer's largest window.
    pub(super) fn observe(&mut self, header: &Header) {
        if header.flags.has(Flags::SYN) {
            self.scale = header.options.window_scale.unwrap_or(0).min(14);
            self.window = usize::from(header.window);
        } else {
            self.window = self.window.max(usize::from(header.window) << self.scale);
        }
    }

    /// The number of bytes up to which `write` fills a segment: half of the peer's largest window,
    /// in whole segments.
    pub(super) fn goal(&self) -> usize {
        let mss = self.segment();
        let most = (self.window / 2).min(65_216);
        (most / mss * mss).max(mss)
    }

    /// Bytes of payload of a segment.
    pub(super) fn segment(&self) -> usize {
        (self.connection.info(Time::ZERO).send.segment_size as usize).max(1)
    }

    pub(crate) fn not_sent(&self) -> usize {
        self.connection.info(Time::ZERO).send.unsent
    }

    /// The number of bytes that are not acknowledged.
    pub(crate) fn queued(&self) -> usize {
        SEND_BUFFER - self.connection.room()
    }

    /// Whether `POLLOUT` is set: a third of the send buffer is free, and less than half of
    /// `not_sent` is unsent.
    pub(super) fn is_writable(&self, not_sent: usize) -> bool {
        self.ended
            || (self.queued() <= self.options.send_buffer / 3 * 2 && self.not_sent().saturating_mul(2) < not_sent)
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.ended || self.end
    }

    pub(crate) fn readable(&self) -> usize {
        self.connection.readable() + self.rest.as_ref().map_or(0, |rest| rest.len())
    }

    /// How long the send buffer has held data back.
    pub(crate) fn buffer_limited(&self, now: Time) -> Duration {
        let (since, before) = self.limited;
        before + since.map_or(Duration::ZERO, |since| now - since)
    }

    /// Notes whether the send buffer holds data back from now on.
    pub(super) fn note(&mut self, now: Time) {
        let limited = self.writing && self.not_sent() == 0;
        if limited != self.limited.0.is_some() {
            self.limited = (limited.then_some(now), self.buffer_limited(now));
        }
    }

    pub(super) fn next_chunk(&mut self, now: Time) -> Result<ReadOutcome<SharedBytes>, Error> {
        match self.rest.take() {
            Some(chunk) => Ok(ReadOutcome::Chunk(chunk)),
            None => self.connection.recv(now),
        }
    }

    /// Passes the queued records to the connection, up to the end of the next record.
    pub(super) fn flush_records(&mut self) {
        while let Some((bytes, push)) = self.records.pop_front() {
            let more = push == Push::More;
            if !bytes.is_empty() && self.connection.send(SharedBytes::new(&bytes), more).is_err() {
                self.records.clear();
            }
            if push == Push::Urgent {
                self.connection.mark_urgent();
            }
            if push == Push::Record {
                self.records.push_front((Vec::new(), Push::Plain));
                return;
            }
        }
    }
}

/// The error number that a socket call reports for an error of a connection.
pub(super) fn errno(error: Error) -> Errno {
    match error {
        Error::Refused => libc::ECONNREFUSED,
        Error::Reset => libc::ECONNRESET,
        Error::TimedOut => libc::ETIMEDOUT,
        Error::Unreachable(Unreachable::Network) => libc::ENETUNREACH,
        Error::Unreachable(Unreachable::Port) => libc::ECONNREFUSED,
        Error::Unreachable(Unreachable::Protocol) => libc::ENOPROTOOPT,
        Error::Unreachable(_) => libc::EHOSTUNREACH,
        Error::DeviceGone => libc::ENETDOWN,
        Error::Aborted => libc::ECONNABORTED,
    }
}
