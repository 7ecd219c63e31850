//! What the variants of the suite have in common: directions with their rows, flows, sizes, and the
//! names of variants.

use crate::report::Head;

/// Flows at the same time.
pub(super) const FLOWS: usize = 4;
/// Bytes of payload in a datagram: all that fits into 1500 of IP.
pub(super) const PAYLOAD: u64 = 1472;
/// Datagrams of a message of 4 MB.
pub(super) const MESSAGE: u64 = 4_000_000u64.div_ceil(PAYLOAD);
/// If a value takes less time than this, the run is only a test: streams move parts of messages,
/// and are hardly warm.
pub(super) const WHOLE_NS: u64 = 5_000_000;

/// The longest segment that is not cut.
pub(super) const MSS: usize = 1448;
/// Bytes of a unit, in which traffic is counted: a segment.
pub(super) const UNIT: u64 = MSS as u64;
/// The variant that the others are compared with.
pub(super) const BEFORE: &str = "refcount+locked_map";
/// The new count with the old tokens, the old count with the new tokens, and both new.
pub(super) const MAP_AFTER: &str = "percpuref+locked_map";
pub(super) const COUNT_BEFORE: &str = "refcount+ranges";
pub(super) const AFTER: &str = "percpuref+ranges";
/// In the order in which they are measured.
pub(super) const VARIANTS: [&str; 4] = [BEFORE, MAP_AFTER, COUNT_BEFORE, AFTER];

/// A direction: its names, and the unit in which it moves data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Receive,
    Transmit,
    StreamReceive,
    StreamTransmit,
}

impl Direction {
    pub(super) fn short(self) -> &'static str {
        match self {
            Self::Receive | Self::StreamReceive => "rx",
            Self::Transmit | Self::StreamTransmit => "tx",
        }
    }

    pub(super) fn is_stream(self) -> bool {
        matches!(self, Self::StreamReceive | Self::StreamTransmit)
    }

    /// Bytes of the unit in which traffic is counted: a datagram, or a part of a stream.
    pub(super) fn unit(self) -> u64 {
        if self.is_stream() { UNIT } else { PAYLOAD }
    }

    /// The sections: throughput, CPU time of the network, of the application and of both, and for
    /// datagrams the loss. Streams are sent on the CPU of their stack, so when sending, two CPUs do
    /// the same work.
    pub(super) fn sections(self) -> &'static [&'static str] {
        match self {
            Self::Receive => {
                &["receive: throughput", "receive: network", "receive: application", "receive: both", "receive: loss"]
            }
            Self::Transmit => &[
                "transmit: throughput",
                "transmit: network",
                "transmit: application",
                "transmit: both",
                "transmit: loss",
            ],
            Self::StreamReceive => &[
                "stream receive: throughput",
                "stream receive: network",
                "stream receive: application",
                "stream receive: both",
            ],
            Self::StreamTransmit => &[
                "stream transmit: throughput",
                "stream transmit: first lane",
                "stream transmit: second lane",
                "stream transmit: both",
            ],
        }
    }

    /// The rows of a variant.
    pub(super) fn heads(self, variant: &str) -> Vec<Head> {
        let units = [("b/s", "4 flows"), ("ns", "GB"), ("ns", "GB"), ("ns", "GB"), ("%", "datagrams")];
        let head = |(&section, (unit, per))| Head {
            name: variant.to_owned(),
            section,
            threads: 2,
            per,
            unit,
            direction: Some(self.short()),
            ..Head::default()
        };
        self.sections().iter().zip(units).map(head).collect()
    }
}
