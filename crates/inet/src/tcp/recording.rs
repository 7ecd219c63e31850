//! The recording of a connection: its calls, and the segments that it sent.
//!
//! Why: a failure in production becomes a test. `replay` repeats the calls. A recording has
//! headers, lengths and times, and no payload.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Config, DeliveryError, Header, KeepAlive, SegmentMeta, Seq, Start};
use crate::time::Time;

/// A recording of a connection from its beginning: headers, times, calls, and the segments that it
/// sent. Payload is only counted.
///
/// [`replay`](Self::replay) repeats it with payload that occupies no memory. A failure in
/// production becomes a test in this way. The recording can be stored in any format of serde.
///
/// Two things are not part of a recording. First, payload that the user read counts as dropped at
/// once, so a replay differs if a budget was the limit. Second, transmissions count as complete as
/// a whole, in the order in which they were made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recording {
    pub(super) config: Config,
    pub(super) start: Start,
    pub(super) now: Time,
    /// The peer's SYN, if this side answered a SYN.
    pub(super) syn: Option<Header>,
    pub(super) steps: Vec<Step>,
    #[serde(skip)]
    pub(super) sent: Vec<SentSegment>,
}

/// One call of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Step {
    Segment {
        header: Header,
        meta: SegmentMeta,
        chunks: Vec<u32>,
        now: Time,
    },
    DeliveryError {
        error: DeliveryError,
        seq: Option<Seq>,
        now: Time,
    },
    Transmit {
        now: Time,
        offload: usize,
        sent: Vec<SentSegment>,
        done: u64,
        full: bool,
    },
    Timeout(Time),
    /// `joins`: the chunk continued the previous chunk in its memory.
    Send {
        len: u32,
        more: bool,
        joins: bool,
    },
    Recv(Time),
    MarkUrgent,
    Shutdown,
    ShutdownRead,
    Close(Time),
    Abort(Time),
    DeviceGone,
    Supersede,
    Evict,
    Nodelay(bool),
    Cork(bool),
    UserTimeout(Option<Duration>),
    SendBuffer(usize),
    LowWater(usize),
    KeepAlive(Option<KeepAlive>),
    AckEvery(u16),
    QuickAck(bool),
    MaxPayload(u16),
}

/// A segment that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SentSegment {
    pub(super) header: Header,
    /// Bytes of payload that were accepted.
    pub(super) len: u32,
    /// Whether the sender keeps the ticket of its transmission.
    pub(super) tracked: bool,
    /// The first transmission that was not complete when the sender chose this segment.
    pub(super) done: u64,
}

impl Recording {
    pub(super) fn new(config: &Config, start: Start, syn: Option<&Header>, now: Time) -> Self {
        Self { config: *config, start, now, syn: syn.copied(), steps: Vec::new(), sent: Vec::new() }
    }

    /// The number of recorded calls. When it reaches [`Config::record`], the recording stops.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether nothing was recorded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    pub(super) fn add(&mut self, step: Step) {
        if self.steps.len() < self.config.record as usize {
            self.steps.push(step);
        }
    }

    pub(super) fn sent(&mut self, segment: SentSegment) {
        if self.steps.len() < self.config.record as usize {
            self.sent.push(segment);
        }
    }

    pub(super) fn transmitted(&mut self, now: Time, offload: usize, full: bool, done: u64) {
        let sent = std::mem::take(&mut self.sent);
        self.add(Step::Transmit { now, offload, sent, done, full });
    }
}
