//! The options of sockets that a stack can have.

use crate::settings::Settings;
use libc::c_int;
use std::time::Duration;

/// An option that changes what a stack does. Options without an effect on a stack are not here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SocketOption {
    /// `TCP_MAXSEG`.
    MaxSegment,
    /// `TCP_NODELAY`.
    NoDelay,
    /// `TCP_CORK`.
    Cork,
    /// `SO_SNDBUF`.
    SendBuffer,
    /// `TCP_NOTSENT_LOWAT`.
    NotSent,
    /// `TCP_USER_TIMEOUT`.
    UserTimeout,
    /// `TCP_SYNCNT`.
    SynRetries,
    /// `SO_KEEPALIVE`, `TCP_KEEPIDLE`, `TCP_KEEPINTVL` and `TCP_KEEPCNT`.
    KeepAlive,
    /// `SO_LINGER` with a time of 0.
    Linger,
    /// `IP_TOS` and `IPV6_TCLASS`.
    TrafficClass,
    /// `IP_TTL` and `IPV6_UNICAST_HOPS`.
    HopLimit,
    /// `IP_MTU_DISCOVER` and `IPV6_MTU_DISCOVER`.
    PathDiscovery,
    /// `TCP_QUICKACK`.
    QuickAck,
}

/// `TCP_NOTSENT_LOWAT`, which the libc crate does not have (linux/tcp.h).
pub(crate) const TCP_NOTSENT_LOWAT: c_int = 25;

impl SocketOption {
    /// The option with this level and name of `setsockopt`.
    pub(crate) fn named(level: c_int, name: c_int) -> Option<Self> {
        Some(match (level, name) {
            (libc::SOL_TCP, libc::TCP_MAXSEG) => Self::MaxSegment,
            (libc::SOL_TCP, libc::TCP_NODELAY) => Self::NoDelay,
            (libc::SOL_TCP, libc::TCP_CORK) => Self::Cork,
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => Self::SendBuffer,
            (libc::SOL_TCP, TCP_NOTSENT_LOWAT) => Self::NotSent,
            (libc::SOL_TCP, libc::TCP_USER_TIMEOUT) => Self::UserTimeout,
            (libc::SOL_TCP, libc::TCP_SYNCNT) => Self::SynRetries,
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE)
            | (libc::SOL_TCP, libc::TCP_KEEPIDLE | libc::TCP_KEEPINTVL | libc::TCP_KEEPCNT) => Self::KeepAlive,
            (libc::SOL_SOCKET, libc::SO_LINGER) => Self::Linger,
            (libc::SOL_IP, libc::IP_TOS) | (libc::SOL_IPV6, libc::IPV6_TCLASS) => Self::TrafficClass,
            (libc::SOL_IP, libc::IP_TTL) | (libc::SOL_IPV6, libc::IPV6_UNICAST_HOPS) => Self::HopLimit,
            (libc::SOL_IP, libc::IP_MTU_DISCOVER) | (libc::SOL_IPV6, libc::IPV6_MTU_DISCOVER) => Self::PathDiscovery,
            (libc::SOL_TCP, libc::TCP_QUICKACK) => Self::QuickAck,
            _ => return None,
        })
    }
}

/// The options of a socket.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Options {
    /// The value of `TCP_MAXSEG`, or 0 if it is not set.
    pub max_segment: u16,
    /// Whether `TCP_NODELAY` is set.
    pub no_delay: bool,
    /// Whether `TCP_CORK` is set.
    pub cork: bool,
    /// The value of `SO_SNDBUF` as it is returned, in bytes: twice the value that was set, or the
    /// setting of the host.
    pub send_buffer: usize,
    /// The value of `TCP_NOTSENT_LOWAT` in bytes, or 0 if it is not set.
    pub not_sent: usize,
    /// The value of `TCP_USER_TIMEOUT`, or 0 if it is not set.
    pub user_timeout: Duration,
    /// The value of `TCP_SYNCNT`, or 0 if it is not set.
    pub syn_retries: u32,
    /// Whether `SO_KEEPALIVE` is set.
    pub keep_alive: bool,
    /// The value of `TCP_KEEPIDLE`: the idle time before the first probe.
    pub keep_idle: Duration,
    /// The value of `TCP_KEEPINTVL`: the time between two probes.
    pub keep_interval: Duration,
    /// The value of `TCP_KEEPCNT`: the number of unanswered probes that end the connection.
    pub keep_probes: u8,
    /// Whether `close` resets the connection (`SO_LINGER` with a time of 0).
    pub resets: bool,
    /// The value of `IP_TOS`, or of its IPv6 name.
    pub traffic_class: u8,
    /// The value of `IP_TTL`, or of its IPv6 name.
    pub hop_limit: u8,
    /// Whether path MTUs are not followed (`IP_PMTUDISC_DONT`).
    pub ignores_path: bool,
}

impl Options {
    /// The options of a new socket.
    pub(crate) fn new(settings: &Settings) -> Self {
        Self {
            max_segment: 0,
            no_delay: false,
            cork: false,
            send_buffer: settings.nth("tcp_wmem", 1, 16 << 10) as usize,
            not_sent: 0,
            user_timeout: Duration::ZERO,
            syn_retries: 0,
            // As in Linux: tcp(7), ip(7).
            keep_alive: false,
            keep_idle: Duration::from_secs(7200),
            keep_interval: Duration::from_secs(75),
            keep_probes: 9,
            resets: false,
            traffic_class: 0,
            hop_limit: 64,
            ignores_path: false,
        }
    }
}
