//! What goes into the sender and what comes out.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::tcp::{Congestion, Seq};

/// How a connection sends. The user's choice; what the peer can do is in [`Negotiated`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SendOptions {
    /// The algorithm of the congestion window.
    pub congestion: Congestion,
    /// Bytes that are held, unsent or unacknowledged, before [`Sender::room`](super::Sender::room) is 0.
    pub send_buffer: usize,
    /// The connection is writable while fewer bytes are unsent.
    pub low_water: usize,
    /// Bytes in the device's ring. More wait until the device is done with some, so that one connection does not fill the ring.
    pub ring_bytes: usize,
    /// Small segments do not wait for an acknowledgement (no Nagle).
    pub nodelay: bool,
    /// The connection ends when sent data stays unacknowledged, or unsent data cannot be sent, for so long.
    pub user_timeout: Option<Duration>,
    /// The least that is added to the smoothed round-trip time for the retransmission timeout.
    pub rto_min: Duration,
    /// The longest retransmission timeout.
    pub rto_max: Duration,
    /// Retransmissions of SYN before the connection ends. Seven take more than the three minutes of RFC 9293, 3.8.3.
    pub syn_retries: u32,
    /// Retransmissions by timeout, or unanswered window probes, before the connection ends.
    pub retries: u32,
    /// The first congestion window, in segments.
    pub initial_window: u32,
    /// After an idle time, the congestion window shrinks to the initial one (RFC 5681, 4.1).
    pub restart_idle: bool,
    /// Tail loss probes (RFC 8985, 7).
    pub tail_probes: bool,
    /// Larger segments than the path is known to take are tried (RFC 4821).
    pub mtu_probing: bool,
    /// The smallest largest segment that a "packet too big" can ask for, in bytes of payload: 512 for IPv4 and 1220 for IPv6.
    pub path_floor: u32,
    /// Added to the clock of timestamps.
    pub timestamp_offset: u32,
}

impl Default for SendOptions {
    fn default() -> Self {
        Self {
            congestion: Congestion::Cubic,
            send_buffer: 1 << 20,
            low_water: usize::MAX,
            ring_bytes: 256 << 10,
            nodelay: false,
            user_timeout: None,
            rto_min: Duration::from_millis(200),
            rto_max: Duration::from_secs(120),
            syn_retries: 7,
            retries: 15,
            initial_window: 10,
            restart_idle: true,
            tail_probes: true,
            mtu_probing: false,
            path_floor: 512,
            timestamp_offset: 0,
        }
    }
}

/// What the handshake agreed on.
#[derive(Clone, Copy, Debug)]
pub struct Negotiated {
    /// The largest segment that the peer accepts: its option, or 536 (IPv4) or 1220 (IPv6).
    pub mss: u16,
    /// Selective acknowledgements.
    pub sack: bool,
    /// Timestamps: each segment has 12 bytes of options.
    pub timestamps: bool,
    /// Explicit congestion notification.
    pub ecn: bool,
    /// The peer's window in bytes.
    pub window: u32,
    /// The sequence number of the segment with that window.
    pub seq: Seq,
}

/// An acknowledgement that the connection accepted.
#[derive(Clone, Copy, Debug)]
pub struct Ack<'a> {
    /// The segment's sequence number.
    pub seq: Seq,
    /// The next byte that the peer expects.
    pub ack: Seq,
    /// The peer's window in bytes.
    pub window: u32,
    /// Selective acknowledgements, as they came.
    pub sack: &'a [(Seq, Seq)],
    /// The timestamp that the peer echoes.
    pub echo: Option<u32>,
    /// The peer echoes a congestion mark.
    pub ece: bool,
    /// The segment has data, SYN or FIN.
    pub data: bool,
}

/// What an acknowledgement brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Acked {
    /// Bytes of payload that the queue dropped.
    pub bytes: u32,
    /// SYN is acknowledged now.
    pub syn: bool,
    /// FIN is acknowledged now.
    pub fin: bool,
    /// The connection became writable.
    pub writable: bool,
}

/// Why a range is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// For the first time.
    New,
    /// It is taken for lost.
    Again,
    /// The last segment once more, to draw an acknowledgement (tail loss probe).
    TailProbe,
    /// An empty segment before the window, to draw an acknowledgement.
    WindowProbe,
    /// One segment that is larger than the path is known to take. It must not be fragmented.
    MtuProbe,
}

/// What is to be sent next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmission {
    /// The number of SYN, of the first byte, or of FIN.
    pub seq: Seq,
    /// Bytes of payload.
    pub len: u32,
    /// With SYN.
    pub syn: bool,
    /// With FIN.
    pub fin: bool,
    /// With PSH.
    pub push: bool,
    /// With CWR: the congestion window was reduced.
    pub cwr: bool,
    /// The packet may be marked instead of dropped: ECT(0) in the IP header.
    pub ect: bool,
    /// Payload of a segment. A longer transmission is to be cut.
    pub segment_size: u32,
    /// Why.
    pub kind: Kind,
}

/// The peer did not answer for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer did not answer for {0:?}")]
pub struct TimedOut(pub Duration);
