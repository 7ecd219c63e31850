//! Statistics of the sender, for users and for tests.

use std::time::Duration;

use super::core::Sender;
use super::recovery_state::RecoveryState;
use crate::tcp::Carrier;
use crate::time::Time;

/// The state of the sender. Counts without another unit are segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendInfo {
    /// The state of loss recovery.
    pub state: RecoveryState,
    /// The congestion window.
    pub cwnd: u32,
    /// The slow-start threshold; 2^31 - 1 before the first loss.
    pub ssthresh: u32,
    /// Segments that are not acknowledged: in flight or lost.
    pub unacked: u32,
    /// Bytes of payload that are acknowledged, modulo 2^32.
    pub acknowledged: u32,
    /// Segments that are acknowledged selectively.
    pub sacked: u32,
    /// Segments that are marked as lost.
    pub lost: u32,
    /// Segments that were sent again, and are not acknowledged.
    pub retrans: u32,
    /// Segments that were sent again since the connection began, or since it was restored.
    pub retransmitted: u32,
    /// The largest reordering that was seen, in segments; 3 before any was seen.
    pub reordering: u32,
    /// How often reordering was seen.
    pub reordered: u32,
    /// Segments that were delivered since the connection began.
    pub delivered: u32,
    /// Duplicates that the peer reported (D-SACK).
    pub duplicates: u32,
    /// The smoothed round-trip time.
    pub rtt: Duration,
    /// The variation of the round-trip time.
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
    /// Bytes of payload and options that fit into the path MTU as it is known.
    pub max_payload: u32,
    /// Bytes that were not sent yet.
    pub unsent: usize,
    /// The time in which payload was unsent or unacknowledged.
    pub busy: Duration,
    /// The part of that time in which only the peer's window held data back.
    pub window_limited: Duration,
}

impl<C: Carrier> Sender<C> {
    /// Bytes of payload that are acknowledged, modulo 2^32.
    pub(super) fn acknowledged(&self) -> u32 {
        let numbers = self.una - self.iss;
        // SYN and FIN have numbers, too. Without the SYN's, nothing is acknowledged.
        if numbers == 0 { 0 } else { numbers.wrapping_sub(1 + u32::from(self.is_fin_acked())) }
    }

    /// The statistics at the time `now`.
    #[must_use]
    pub fn info(&self, now: Time) -> SendInfo {
        let (busy, limited) = self.clocks.until(now.micros());
        SendInfo {
            state: self.recovery.state(),
            cwnd: self.window.cwnd,
            ssthresh: self.window.ssthresh,
            unacked: self.scoreboard.unacked(),
            acknowledged: self.acknowledged(),
            sacked: self.scoreboard.sacked() + self.recovery.duplicates,
            lost: self.scoreboard.lost(),
            retrans: self.scoreboard.retransmitted(),
            retransmitted: self.recovery.retransmitted,
            reordering: self.recovery.reordering(),
            reordered: self.recovery.reordered,
            delivered: self.clocks.delivered,
            duplicates: self.clocks.duplicates,
            rtt: Duration::from_micros(self.rtt.smoothed()),
            rttvar: Duration::from_micros(self.rtt.variation()),
            min_rtt: Duration::from_micros(self.rtt.min().unwrap_or(0)),
            rto: Duration::from_micros(self.rtt.timeout(0)),
            backoff: self.retries,
            probes: self.unanswered_probes,
            segment_size: self.path.size(),
            max_payload: self.path.path(),
            unsent: self.unsent(),
            busy: Duration::from_micros(busy),
            window_limited: Duration::from_micros(limited),
        }
    }
}
