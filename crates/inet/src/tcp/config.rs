//! The settings of a connection, and their defaults. A default that an RFC requires has its
//! section.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::acks::QUICK;
use super::sender::SendOptions;

/// How a connection behaves. The values of [`Default`] are for Ethernet and IPv4 without offloads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// The MSS that is announced: the link's MTU without the IP and TCP headers (40 bytes for IPv4,
    /// 60 for IPv6).
    pub mss: u16,
    /// The peer's MSS if it announces none: 536 for IPv4, 1220 for IPv6 (MUST-15).
    pub default_mss: u16,
    /// Bytes of payload of a segment that fit into the route's path MTU, without IP and TCP headers
    /// as above. Options are subtracted from it.
    pub max_payload: u16,
    /// Settings of the sending half.
    pub send: SendOptions,
    /// The number of retransmissions of SYN-ACK before a half-open connection ends. The least time
    /// of RFC 9293, section 3.8.3, is that of an active open, for which there is
    /// [`SendOptions::syn_retries`]. Five take 63 seconds.
    #[serde(default = "syn_ack_retries")]
    pub syn_ack_retries: u32,
    /// The largest receive window, in bytes.
    pub receive_buffer: u32,
    /// Whether the window is as large as the buffer from the beginning. Otherwise it begins at 64
    /// KiB and adapts to the number of bytes that the user reads in a round trip.
    pub fixed_window: bool,
    /// The number of buffers that received payload may occupy, including those that the user holds.
    pub budget: u32,
    /// Whether window scaling is requested and accepted.
    pub window_scaling: bool,
    /// Whether selective acknowledgements are requested and accepted.
    pub sack: bool,
    /// Whether timestamps are requested and accepted.
    pub timestamps: bool,
    /// Explicit congestion notification.
    pub ecn: Ecn,
    /// Fields of the IP headers of the connection's segments.
    #[serde(default)]
    pub ip: IpFields,
    /// The number of segments that one acknowledgement covers.
    pub ack_every: u16,
    /// So many segments are acknowledged at once at the beginning, and after an idle time. The peer
    /// is then in slow start, and delayed acknowledgements would slow it down. With 0, a user that
    /// answers a short request at once saves a segment: the answer acknowledges it.
    #[serde(default = "quick_acks")]
    pub quick_acks: u16,
    /// The longest time that an acknowledgement waits for more segments, or for payload to send.
    /// Values above 500 ms mean 500 ms.
    pub ack_delay: Duration,
    /// Probes of an idle peer. `None`: an idle peer is not probed.
    pub keep_alive: Option<KeepAlive>,
    /// How long a connection that the user closed waits for the peer's FIN. The timer starts in
    /// FIN-WAIT-2.
    pub fin_wait_2: Duration,
    /// How long a connection that the user closed (an orphan) continues although the peer
    /// acknowledges nothing new. After this time it is reset. The limit also counts if the peer
    /// answers each probe with a closed window: without it, such a peer would keep the queued
    /// payload in memory for ever.
    #[serde(default = "orphan")]
    pub orphan: Duration,
    /// Twice the maximum segment lifetime: how long TIME-WAIT lasts.
    pub time_wait: Duration,
    /// The number of calls that are recorded, from the beginning on
    /// ([`Recording`](super::Recording)). 0: none.
    #[cfg(feature = "record")]
    pub record: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mss: 1460,
            default_mss: 536,
            max_payload: 1460,
            send: SendOptions::default(),
            syn_ack_retries: syn_ack_retries(),
            receive_buffer: 6 << 20,
            fixed_window: false,
            budget: 6 << 10,
            window_scaling: true,
            sack: true,
            timestamps: true,
            ecn: Ecn::Accept,
            ip: IpFields::default(),
            ack_every: 2,
            quick_acks: QUICK,
            ack_delay: Duration::from_millis(40),
            keep_alive: None,
            fin_wait_2: Duration::from_secs(60),
            orphan: orphan(),
            time_wait: Duration::from_secs(60),
            #[cfg(feature = "record")]
            record: 0,
        }
    }
}

fn syn_ack_retries() -> u32 {
    5
}

fn quick_acks() -> u16 {
    QUICK
}

fn orphan() -> Duration {
    Duration::from_secs(180)
}

/// Explicit congestion notification (RFC 3168).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ecn {
    /// Not used.
    Off,
    /// Used if the peer requests it.
    Accept,
    /// Requested by the first SYN, and used if the peer accepts. A repeated SYN does not request
    /// it, and then data is not ECN-capable (RFC 3168, section 6.1.1.1).
    Request,
}

/// Fields of the IP headers of a connection's segments that its user chooses (RFC 9293, sections
/// 3.9.1.9 and 3.9.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpFields {
    /// The Differentiated Services code point (RFC 2474), 0 to 63. Higher bits are ignored.
    pub dscp: u8,
    /// How many routers may forward a segment: the time to live of IPv4, the hop limit of IPv6. 0
    /// means 1.
    pub hop_limit: u8,
}

impl Default for IpFields {
    fn default() -> Self {
        // The default that IANA recommends.
        Self { dscp: 0, hop_limit: 64 }
    }
}

/// Probes of an idle connection (RFC 9293, section 3.8.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepAlive {
    /// The idle time before the first probe.
    pub idle: Duration,
    /// The time between two probes.
    pub interval: Duration,
    /// The number of unanswered probes after which the connection ends.
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

    /// Settings that were saved by a version without the newer ones.
    #[test]
    fn settings_that_are_missing_have_their_defaults() {
        for key in ["quick_acks", "syn_ack_retries", "ip", "orphan"] {
            let mut saved = serde_json::to_value(Config::default()).unwrap();
            assert!(saved.as_object_mut().unwrap().remove(key).is_some());
            assert_eq!(serde_json::from_value::<Config>(saved).unwrap(), Config::default(), "{key}");
        }
    }

    #[test]
    fn keep_alive_is_off_and_begins_after_two_hours() {
        assert_eq!(Config::default().keep_alive, None);
        assert!(KeepAlive::default().idle >= Duration::from_secs(7200));
    }
}
