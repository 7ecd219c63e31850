//! The types of the sender's input and output.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::tcp::{Congestion, Seq};

/// Settings of the sender, which the user chooses. The peer's abilities are in [`Negotiated`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SendOptions {
    /// The algorithm of the congestion window.
    pub congestion: Congestion,
    /// The number of unsent and unacknowledged bytes at which [`Sender::room`](super::Sender::room)
    /// is 0.
    pub send_buffer: usize,
    /// The connection is writable while fewer bytes than this are unsent.
    pub low_water: usize,
    /// The limit for bytes in the device's ring. More bytes wait until the device is done with
    /// some, so that one connection does not fill the ring.
    pub ring_bytes: usize,
    /// Whether small segments are sent without waiting for an acknowledgement (no Nagle).
    pub nodelay: bool,
    /// The connection ends when sent data stays unacknowledged, or unsent data cannot be sent, for
    /// this time.
    pub user_timeout: Option<Duration>,
    /// The least time that is added to the smoothed round-trip time for the retransmission timeout.
    pub rto_min: Duration,
    /// The longest retransmission timeout.
    pub rto_max: Duration,
    /// The number of retransmissions of SYN before the connection ends. Seven take more than the
    /// three minutes of RFC 9293, 3.8.3. For SYN-ACK,
    /// [`Config::syn_ack_retries`](crate::tcp::Config::syn_ack_retries) replaces it.
    pub syn_retries: u32,
    /// The number of retransmissions by timeout, or of unanswered window probes, before the
    /// connection ends.
    pub retries: u32,
    /// The first congestion window, in segments.
    pub initial_window: u32,
    /// Whether the congestion window shrinks to the initial one after an idle time (RFC 5681, 4.1).
    pub restart_idle: bool,
    /// Whether tail loss probes are sent (RFC 8985, 7).
    pub tail_probes: bool,
    /// Whether new data is paced: it leaves in units of 1 ms through the round trip, if that takes
    /// at least 1 ms. Not before an initial window has left since nothing was in flight.
    pub pacing: bool,
    /// Whether larger segments than the known path MTU admits are tried (RFC 4821).
    pub mtu_probing: bool,
    /// The lower limit for a segment size that a "packet too big" requests, in bytes of payload:
    /// 512 for IPv4 and 1220 for IPv6.
    pub path_floor: u32,
    /// The offset that is added to the clock of timestamps.
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
            pacing: true,
            mtu_probing: false,
            path_floor: 512,
            timestamp_offset: 0,
        }
    }
}

/// The result of the handshake.
#[derive(Clone, Copy, Debug)]
pub struct Negotiated {
    /// The largest segment that the peer accepts: the value of its option, or the default of 536
    /// (IPv4) or 1220 (IPv6).
    pub mss: u16,
    /// Whether selective acknowledgements are used.
    pub sack: bool,
    /// Whether timestamps are used. Each segment then has 12 bytes of options.
    pub timestamps: bool,
    /// Whether explicit congestion notification is used.
    pub ecn: bool,
    /// The peer's window in bytes.
    pub window: u32,
    /// The sequence number of the segment with that window.
    pub seq: Seq,
}

impl Negotiated {
    /// Bytes of the options of each segment: those of the timestamp option, padded.
    pub(super) const fn option_bytes(timestamps: bool) -> u32 {
        if timestamps { 12 } else { 0 }
    }
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
    /// SACK blocks, as they were received.
    pub sack: &'a [(Seq, Seq)],
    /// The timestamp that the peer echoes.
    pub echo: Option<u32>,
    /// Whether the peer echoes a congestion mark.
    pub ece: bool,
    /// Whether the segment has data, SYN or FIN.
    pub data: bool,
}

/// The effects of an acknowledgement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Acked {
    /// Bytes of payload that were acknowledged and dropped from the queue.
    pub bytes: u32,
    /// Whether this acknowledgement was the first of SYN.
    pub syn: bool,
    /// Whether this acknowledgement was the first of FIN.
    pub fin: bool,
    /// Whether the connection became writable.
    pub writable: bool,
}

/// The reason why a range is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransmissionKind {
    /// New data, which is sent for the first time.
    New,
    /// The range is marked as lost.
    Retransmission,
    /// The last segment is sent again, or new data is sent, to provoke an acknowledgement (tail
    /// loss probe).
    TailProbe,
    /// An empty segment with a number before the window, to provoke an acknowledgement.
    WindowProbe,
    /// One segment that is larger than the known path MTU. It must not be fragmented.
    MtuProbe,
}

/// A transmission that is to be made next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmission {
    /// The number of SYN, of the first byte, or of FIN.
    pub seq: Seq,
    /// Bytes of payload.
    pub len: u32,
    /// Whether it has SYN.
    pub syn: bool,
    /// Whether it has FIN.
    pub fin: bool,
    /// Whether it has PSH.
    pub push: bool,
    /// Whether it has CWR: the congestion window was reduced.
    pub cwr: bool,
    /// Whether the packet may be marked instead of dropped: ECT(0) in the IP header.
    pub ect: bool,
    /// Bytes of payload of a segment. A longer transmission is cut by the device or the output.
    pub segment_size: u32,
    /// The reason for the transmission.
    pub kind: TransmissionKind,
}

impl Transmission {
    /// The first `len` bytes, which are whole segments, or all. FIN, and the end of a write, are
    /// behind them.
    #[must_use]
    pub fn cut(&self, len: u32) -> Self {
        if len < self.len { Self { len, fin: false, push: false, ..*self } } else { *self }
    }
}

/// The peer did not answer in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer did not answer for {0:?}")]
pub struct TimedOut(pub Duration);
