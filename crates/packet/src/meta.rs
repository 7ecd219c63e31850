//! What a device says about a frame beside its bytes.

/// What is known of a frame's transport checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// Nothing: whoever cares computes it.
    #[default]
    Unknown,
    /// The sender or the device vouches for it.
    Vouched,
    /// It is still to be computed from byte `start` to the frame's end, and stored at `start + offset`.
    Partial {
        /// Where the sum begins, in bytes from the frame's first.
        start: u16,
        /// Where it is stored, in bytes from `start`.
        offset: u16,
    },
}

/// The kind of a segment that was never cut to the MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GsoKind {
    /// TCP over IPv4.
    TcpV4,
    /// TCP over IPv6.
    TcpV6,
    /// A UDP datagram to be fragmented.
    UdpFragment,
    /// UDP datagrams of equal size.
    UdpSegment,
}

/// How to cut a frame that is larger than the MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gso {
    /// What it is.
    pub kind: GsoKind,
    /// Bytes of payload per segment.
    pub size: u16,
    /// Bytes of headers in front of the payload; a hint.
    pub headers: u16,
    /// The segment carries explicit congestion notification.
    pub ecn: bool,
}

/// Offload information of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// The transport checksum.
    pub checksum: Checksum,
    /// Set if the frame is a segment to be cut.
    pub gso: Option<Gso>,
}
