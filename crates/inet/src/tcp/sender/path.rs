//! Changes of the path MTU, and probes for a larger one (RFC 1191, 8201, 4821).
//!
//! A "packet too big" message can be forged, so it never reduces the size below a floor, and it
//! counts only for a number in flight (RFC 5927). Payload that was sent in larger segments is sent
//! again; this is no sign of congestion.

use super::core::Sender;
use super::recovery_state::RecoveryState;
use super::{Transmission, TransmissionKind};
use crate::tcp::{Carrier, Seq};
use crate::time::Time;

/// The number of segments that the congestion window must have for a probe.
const PROBE_WINDOW: u32 = 11;

impl<C: Carrier> Sender<C> {
    /// Applies a change of the route's path MTU: `max_payload` bytes of payload and options fit
    /// into a segment.
    pub fn set_max_payload(&mut self, max_payload: u32) {
        self.path.set_path(max_payload, self.options.mtu_probing || self.path.suspect);
    }

    /// Handles a router's message that the segment with number `seq` was too big, and that
    /// `max_payload` bytes of payload and options would fit. Returns whether the message is used:
    /// the number must be in flight. Payload that was sent in larger segments is sent again, and
    /// the congestion window is not reduced.
    pub fn handle_too_big(&mut self, seq: Seq, max_payload: u32, now: Time) -> bool {
        let max_payload = max_payload.max(self.path.floor);
        let in_flight = self.una <= seq && seq < self.nxt;
        if !in_flight || max_payload >= self.path.size {
            return false;
        }
        self.path.failed(now.micros());
        self.set_max_payload(max_payload);
        let size = self.segment_size();
        self.scoreboard.mark_lost_if(|range| range.len().min(range.size) > size);
        self.repeat_at_full_window();
        true
    }

    /// A probe: a segment that is larger than the others. Its arrival proves that the size works.
    pub(super) fn next_mtu_probe(&mut self, at: u64) -> Option<Transmission> {
        if !(self.options.mtu_probing || self.path.suspect)
            || self.recovery.state() != RecoveryState::Open
            || self.scoreboard.sacked() > 0
        {
            return None;
        }
        if self.unsent() == 0 || self.window.cwnd < PROBE_WINDOW || self.quota() < 2 {
            return None;
        }
        let len = self.path.candidate(at)?;
        // If the probe is lost, the payload behind it must cause enough acknowledgements to detect
        // the loss.
        let needed = len + (self.recovery.reordering() + 1) * self.segment_size();
        let room = i64::from(self.window_end().distance(self.nxt));
        if (self.unsent() as u64) < u64::from(needed) || room < i64::from(needed) || self.queue.fit(self.nxt, len) < len
        {
            return None;
        }
        Some(Transmission { push: false, ..self.new_data(len, len, TransmissionKind::MtuProbe) })
    }
}
