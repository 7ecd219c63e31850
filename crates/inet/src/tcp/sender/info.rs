//! Figures of the sender, for statistics and for tests.

use std::time::Duration;

use super::{Sender, State};
use crate::Time;
use crate::tcp::Carrier;

/// What the sender knows. Counts without another unit are segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendInfo {
    /// What the sender thinks of the path.
    pub state: State,
    /// The congestion window.
    pub cwnd: u32,
    /// The slow-start threshold; 2^31 - 1 before the first loss.
    pub ssthresh: u32,
    /// In flight or lost: not acknowledged.
    pub unacked: u32,
    /// Acknowledged selectively.
    pub sacked: u32,
    /// Taken for lost.
    pub lost: u32,
    /// Sent again, and not acknowledged.
    pub retrans: u32,
    /// By how much segments came too late, and were not lost.
    pub reordering: u32,
    /// How often that was seen.
    pub reordered: u32,
    /// Delivered since the connection began.
    pub delivered: u32,
    /// Duplicates that the peer reported.
    pub duplicates: u32,
    /// Smoothed round-trip time, and its variation.
    pub rtt: Duration,
    /// Variation of the round-trip time.
    pub rttvar: Duration,
    /// The least round-trip time of the last minutes.
    pub min_rtt: Duration,
    /// The retransmission timeout.
    pub rto: Duration,
    /// Timeouts in a row.
    pub backoff: u32,
    /// Unanswered window probes.
    pub probes: u32,
    /// Bytes of payload of a segment.
    pub segment_size: u32,
    /// Bytes of payload and options that the path is said to take.
    pub max_payload: u32,
    /// Bytes that were not sent yet.
    pub unsent: usize,
    /// Time in which something was unsent or unacknowledged.
    pub busy: Duration,
    /// Part of it in which only the peer's window held data back.
    pub window_limited: Duration,
}

/// How long the sender was in which situation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Clocks {
    since: u64,
    is_busy: bool,
    is_limited: bool,
    busy: u64,
    limited: u64,
    delivered: u32,
    pub(super) duplicates: u32,
}

impl Clocks {
    /// The situation from now on.
    pub(super) fn note(&mut self, now: u64, busy: bool, limited: bool) {
        let (busy_time, limited_time) = self.until(now);
        *self =
            Self { since: now, is_busy: busy, is_limited: limited, busy: busy_time, limited: limited_time, ..*self };
    }

    fn until(&self, now: u64) -> (u64, u64) {
        let passed = now.saturating_sub(self.since);
        let time = |counts: bool| if counts { passed } else { 0 };
        (self.busy + time(self.is_busy), self.limited + time(self.is_limited))
    }

    /// Segments arrived.
    pub(super) fn delivered(&mut self, segments: u32) {
        self.delivered = self.delivered.wrapping_add(segments);
    }
}

impl<C: Carrier> Sender<C> {
    /// The figures at this moment.
    #[must_use]
    pub fn info(&self, now: Time) -> SendInfo {
        let (busy, limited) = self.clocks.until(now.micros());
        SendInfo {
            state: self.recovery.state(),
            cwnd: self.window.cwnd,
            ssthresh: self.window.ssthresh,
            unacked: self.board.out(),
            sacked: self.board.sacked() + self.recovery.duplicates,
            lost: self.board.lost(),
            retrans: self.board.again(),
            reordering: self.recovery.reordering(),
            reordered: self.recovery.reordered,
            delivered: self.clocks.delivered,
            duplicates: self.clocks.duplicates,
            rtt: Duration::from_micros(self.rtt.smoothed()),
            rttvar: Duration::from_micros(self.rtt.variation()),
            min_rtt: Duration::from_micros(self.rtt.min().unwrap_or(0)),
            rto: Duration::from_micros(self.rtt.timeout(0)),
            backoff: self.retries,
            probes: self.probes,
            segment_size: self.path.size(),
            max_payload: self.path.path(),
            unsent: self.unsent(),
            busy: Duration::from_micros(busy),
            window_limited: Duration::from_micros(limited),
        }
    }
}
