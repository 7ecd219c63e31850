//! Pacing: units of new data leave in steps through the round trip, not all at once.
//!
//! Why: a window that leaves at once arrives at the slowest link of the path at once, and its queue
//! must hold what the link cannot send yet. An acknowledgement that covers many segments would
//! cause such a burst each time.
//!
//! The rate is twice the window in a round trip while the window may still double, and 1.2 of it
//! otherwise: the acknowledgements, not the pace, limit the sender. A unit that leaves late makes
//! the next one earlier, by half of its own time at most. A round trip below 1 ms is not paced,
//! because the timer would cost more than the bursts. When nothing is in flight, an initial window
//! leaves at once (RFC 6928). While something is missing, nothing is paced: proportional rate
//! reduction and limited transmit have a rule for each acknowledgement.

use crate::tcp::congestion::Window;

/// A path with a shorter round-trip time is not paced, in microseconds. It is the least one: a
/// queue in this host makes the smoothed one longer.
const LEAST_RTT: u64 = 1_000;
/// The rate in tenths of the window in a round trip.
const SLOW_START: u64 = 20;
const AVOIDANCE: u64 = 12;
/// The longest duration of a unit, in microseconds; but a unit may have two segments.
const UNIT: u64 = 1_000;

/// The rate at which new data leaves: segments in a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    segments: u64,
    micros: u64,
}

impl Rate {
    /// The rate for a window, of which `out` segments are not acknowledged, and a smoothed
    /// round-trip time, of which `least` is the path's own. `None` if the connection is not paced.
    #[inline]
    pub(super) fn of(window: &Window, out: u32, rtt: u64, least: u64) -> Option<Self> {
        if least < LEAST_RTT {
            return None;
        }
        let gain = if window.cwnd < window.ssthresh / 2 { SLOW_START } else { AVOIDANCE };
        Some(Self { segments: u64::from(window.cwnd.max(out).max(1)) * gain, micros: rtt.max(1).saturating_mul(10) })
    }

    /// The segments of a unit.
    pub(super) fn unit(self) -> u32 {
        u32::try_from(self.segments.saturating_mul(UNIT) / self.micros).unwrap_or(u32::MAX).max(2)
    }

    /// The time of so many segments.
    fn time(self, segments: u32) -> u64 {
        self.micros.saturating_mul(u64::from(segments)) / self.segments
    }
}

/// The pace of a sender. Times are in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pacing {
    /// The time at which the next unit may leave.
    next: u64,
    /// Segments that left since nothing was in flight, up to an initial window.
    train: u32,
    /// Whether new data waits for that time.
    waits: bool,
}

impl Pacing {
    /// Whether a unit must wait at the time `now`. `free`: segments of an initial window.
    pub(super) fn must_wait(&mut self, now: u64, free: u32) -> bool {
        self.waits = self.train >= free && now < self.next;
        self.waits
    }

    /// Forgets that new data waits: what is sent is chosen again.
    pub(super) fn clear(&mut self) {
        self.waits = false;
    }

    /// The time at which to choose again.
    pub(super) fn deadline(&self) -> Option<u64> {
        self.waits.then_some(self.next)
    }

    /// Notes that segments left. `first`: nothing was in flight.
    pub(super) fn sent(&mut self, segments: u32, first: bool, rate: Rate, free: u32, now: u64) {
        if first {
            self.train = 0;
        }
        let (paced, due) = (self.train >= free, self.next);
        self.train = self.train.saturating_add(segments).min(free);
        self.next = now;
        if paced {
            let time = rate.time(segments);
            self.next += time - now.saturating_sub(due).min(time / 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Window = Window { cwnd: 100, ssthresh: 100 };

    #[test]
    fn a_unit_is_a_millisecond_but_two_segments_at_least() {
        // 120 segments in 20 ms are 6 in a millisecond.
        assert_eq!(Rate::of(&WINDOW, 0, 20_000, 20_000).unwrap().unit(), 6);
        assert_eq!(Rate::of(&WINDOW, 0, 200_000, 20_000).unwrap().unit(), 2);
        assert_eq!(Rate::of(&WINDOW, 200, 20_000, 20_000).unwrap().unit(), 12, "in recovery, what is in flight counts");
        assert_eq!(Rate::of(&Window { ssthresh: Window::UNKNOWN, ..WINDOW }, 0, 20_000, 20_000).unwrap().unit(), 10);
        assert!(Rate::of(&WINDOW, 0, 20_000, 999).is_none());
    }

    #[test]
    fn a_unit_that_leaves_late_makes_the_next_one_earlier() {
        let rate = Rate::of(&WINDOW, 0, 20_000, 20_000).unwrap();
        let mut pacing = Pacing::default();
        pacing.sent(10, true, rate, 10, 1_000);
        assert!(!pacing.must_wait(1_000, 10), "an initial window is free, and the next unit is due");
        pacing.sent(6, false, rate, 10, 1_000);
        assert!(pacing.must_wait(1_999, 10));
        assert_eq!(pacing.deadline(), Some(2_000));
        assert!(!pacing.must_wait(2_300, 10) && pacing.deadline().is_none());
        pacing.sent(6, false, rate, 10, 2_300);
        assert!(pacing.must_wait(2_999, 10) && !pacing.must_wait(3_000, 10));
        pacing.sent(6, false, rate, 10, 9_000);
        assert!(pacing.must_wait(9_499, 10) && !pacing.must_wait(9_500, 10), "half of its time at most");
    }
}
