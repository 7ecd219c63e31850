//! What a connection is told before it begins.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::sender::SendOptions;

/// How a connection behaves. The values of [`Default`] are for Ethernet and IPv4 without offloads.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Config {
    /// The MSS that is announced: the link's MTU without the IP and TCP headers (40 bytes for IPv4, 60 for IPv6).
    pub mss: u16,
    /// The peer's MSS if it announces none: 536 for IPv4, 1220 for IPv6 (MUST-15).
    pub default_mss: u16,
    /// Payload of a segment that the route's path MTU admits, in the same arithmetic. Options are subtracted from it.
    pub max_payload: u16,
    /// The sending half.
    pub send: SendOptions,
    /// The largest receive window, in bytes.
    pub receive_buffer: u32,
    /// The window is as large as the buffer from the beginning. Otherwise it begins at 64 KiB and follows what the user reads in a
    /// round trip.
    pub fixed_window: bool,
    /// Buffers that received payload may occupy, with those that the user holds.
    pub budget: u32,
    /// Window scale is requested and accepted.
    pub window_scaling: bool,
    /// Selective acknowledgements are requested and accepted.
    pub sack: bool,
    /// Timestamps are requested and accepted.
    pub timestamps: bool,
    /// Explicit congestion notification.
    pub ecn: Ecn,
    /// Segments that one acknowledgement covers.
    pub ack_every: u16,
    /// How long an acknowledgement may wait for more segments, or for payload. More than 500 ms means 500 ms.
    pub ack_delay: Duration,
    /// Whether an idle peer is asked if it is still there.
    pub keep_alive: Option<KeepAlive>,
    /// How long a connection that the user closed waits for the peer's FIN. The timer starts in FIN-WAIT-2.
    pub fin_wait_2: Duration,
    /// Twice the maximum segment lifetime: how long TIME-WAIT lasts.
    pub time_wait: Duration,
    /// So many calls are recorded, from the beginning on ([`Recording`](super::Recording)). 0: none.
    pub record: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mss: 1460,
            default_mss: 536,
            max_payload: 1460,
            send: SendOptions::default(),
            receive_buffer: 6 << 20,
            fixed_window: false,
            budget: 6 << 10,
            window_scaling: true,
            sack: true,
            timestamps: true,
            ecn: Ecn::Accept,
            ack_every: 2,
            ack_delay: Duration::from_millis(40),
            keep_alive: None,
            fin_wait_2: Duration::from_secs(60),
            time_wait: Duration::from_secs(60),
            record: 0,
        }
    }
}

/// Explicit congestion notification (RFC 3168).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ecn {
    /// Not used.
    Off,
    /// Used if the peer requests it.
    Accept,
    /// Requested, and used if the peer accepts.
    Request,
}

/// Probes of an idle connection (RFC 9293, section 3.8.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepAlive {
    /// The connection was idle for this long before the first probe.
    pub idle: Duration,
    /// Between two probes.
    pub interval: Duration,
    /// After so many unanswered probes, the connection is dead.
    pub probes: u8,
}

impl Default for KeepAlive {
    fn default() -> Self {
        Self { idle: Duration::from_secs(7200), interval: Duration::from_secs(75), probes: 9 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keep_alive_is_off_and_begins_after_two_hours() {
        assert_eq!(Config::default().keep_alive, None);
        assert!(KeepAlive::default().idle >= Duration::from_secs(7200));
    }
}
