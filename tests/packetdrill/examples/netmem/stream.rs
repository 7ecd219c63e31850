//! A connection with the state that its socket keeps.

use super::memory::{Memory, SharedBytes};
use netmem_inet::Time;
use netmem_inet::tcp::sender::RecoveryState;
use netmem_inet::tcp::{
    Chunk, Connection, Error, Flags, Header, Held, IpFields, KeepAlive, ReadOutcome, State, Unreachable,
};
use netmem_inet::wire::Flow;
use netmem_packetdrill::{Errno, Options, Push, Readiness, TcpInfo, ca_state};
use std::collections::VecDeque;
use std::time::Duration;

/// The size of a connection's send buffer. The buffer is never full: `write` applies the limits of
/// the socket.
pub(super) const SEND_BUFFER: usize = 1 << 30;

/// A connection, and the state that the socket keeps for it.
pub(super) struct Stream {
    pub(super) flow: Flow,
    pub(super) connection: Connection<Memory>,
    /// The listener of the connection, while it is half open.
    pub(super) listener: Option<usize>,
    /// Whether the connection has a descriptor, or will get one.
    pub(super) used: bool,
    /// The error that the next call reports.
    pub(super) failure: Option<Errno>,
    pub(super) ended: bool,
    pub(super) options: Options,
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
    pub(super) fn apply(&mut self) {
        self.connection.set_nodelay(self.options.no_delay);
        self.connection.set_cork(self.options.cork);
        let user_timeout = Some(self.options.user_timeout).filter(|timeout| !timeout.is_zero());
        self.connection.set_user_timeout(user_timeout);
        let Options { keep_alive, keep_idle, keep_interval, keep_probes, .. } = self.options;
        let probes = KeepAlive { idle: keep_idle, interval: keep_interval, probes: keep_probes };
        self.connection.set_keep_alive(keep_alive.then_some(probes));
        self.connection.set_ip(ip_fields(&self.options));
    }

    /// Whether the handshake is not complete.
    pub(super) fn is_opening(&self) -> bool {
        matches!(self.connection.state(), State::SynSent | State::SynReceived)
    }

    /// Copies bytes that can be read, and leaves them. Returns their number.
    pub(super) fn peek(&self, bytes: &mut [u8]) -> usize {
        let rest = self.rest.iter().map(|held| &**held);
        let queued = rest.chain(self.connection.queued_from(0)).flat_map(SharedBytes::bytes);
        bytes.iter_mut().zip(queued).map(|(to, from)| *to = *from).count()
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

    pub(super) fn not_sent(&self) -> usize {
        self.connection.info(Time::ZERO).send.unsent
    }

    /// The number of bytes that are not acknowledged.
    pub(super) fn queued(&self) -> usize {
        SEND_BUFFER - self.connection.room()
    }

    /// Whether `POLLOUT` is set: a third of the send buffer is free, and less than half of
    /// `not_sent` is unsent.
    pub(super) fn is_writable(&self, not_sent: usize) -> bool {
        self.ended
            || (self.queued() <= self.options.send_buffer / 3 * 2 && self.not_sent().saturating_mul(2) < not_sent)
    }

    pub(super) fn readable(&self) -> usize {
        self.connection.readable() + self.rest.as_ref().map_or(0, |rest| rest.len())
    }

    /// How long the send buffer has held data back.
    pub(super) fn buffer_limited(&self, now: Time) -> Duration {
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

    /// What `poll` returns. `not_sent` is the limit of `TCP_NOTSENT_LOWAT`.
    pub(super) fn readiness(&self, not_sent: usize) -> Readiness {
        Readiness {
            opening: self.is_opening(),
            readable: self.readable() > 0,
            writable: self.is_writable(not_sent),
            urgent: self.connection.urgent().is_some(),
            end: self.ended || self.end,
            closed: self.ended,
            failed: self.failure.is_some(),
        }
    }

    /// The state of the connection as Linux returns it.
    pub(super) fn info(&self, now: Time) -> TcpInfo {
        let info = self.connection.info(now);
        let send = info.send;
        let micros = |time: Duration| time.as_micros() as u32;
        TcpInfo {
            ca_state: match send.state {
                RecoveryState::Open => ca_state::OPEN,
                RecoveryState::Disorder => ca_state::DISORDER,
                RecoveryState::Cwr => ca_state::CWR,
                RecoveryState::Recovery => ca_state::RECOVERY,
                RecoveryState::Loss => ca_state::LOSS,
            },
            probes: send.probes as u8,
            backoff: send.backoff as u8,
            rto: micros(send.rto),
            snd_mss: send.segment_size,
            rcv_mss: info.received_mss,
            unacked: send.unacked,
            sacked: send.sacked,
            lost: send.lost,
            retrans: send.retrans,
            total_retrans: send.retransmitted,
            last_data_recv: info.idle.as_millis() as u32,
            pmtu: send.max_payload,
            rtt: micros(send.rtt),
            rttvar: micros(send.rttvar),
            snd_ssthresh: send.ssthresh,
            snd_cwnd: send.cwnd,
            advmss: info.announced_mss.into(),
            reordering: send.reordering,
            notsent_bytes: send.unsent as u32,
            min_rtt: micros(send.min_rtt),
            busy_time: send.busy.as_micros() as u64,
            rwnd_limited: send.window_limited.as_micros() as u64,
            sndbuf_limited: self.buffer_limited(now).as_micros() as u64,
            delivered: send.delivered,
            dsack_dups: send.duplicates,
            reord_seen: send.reordered,
            ..TcpInfo::UNKNOWN
        }
    }
}

/// The options of a socket for IP headers.
pub(super) fn ip_fields(options: &Options) -> IpFields {
    IpFields { dscp: options.traffic_class >> 2, hop_limit: options.hop_limit }
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
