//! The peer's timestamps, and protection against wrapped sequence numbers (PAWS).
//!
//! Why: at 10 Gbit/s, sequence numbers wrap in less than four seconds. A segment that was delayed
//! for longer would be accepted as new data (RFC 7323, section 5).

use std::time::Duration;

use super::Timestamps;
use crate::time::Time;

/// After this time without a segment, the peer's clock may have wrapped (RFC 7323, section 5.5).
const STALE: Duration = Duration::from_secs(24 * 24 * 3600);

/// The latest timestamp of the peer. This side echoes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerClock {
    recent: u32,
    at: Time,
}

impl PeerClock {
    pub(super) fn new(timestamps: Timestamps, now: Time) -> Self {
        Self { recent: timestamps.value, at: now }
    }

    /// A clock whose latest timestamp is `recent`, which was received `age` ago.
    pub(super) fn aged(recent: u32, age: Duration, now: Time) -> Self {
        Self { recent, at: Time::from_micros(now.since(Time::ZERO + age).as_micros() as u64) }
    }

    /// How long ago the latest timestamp was received.
    pub(super) fn age(&self, now: Time) -> Duration {
        now.since(self.at)
    }

    /// The timestamp to echo.
    pub(super) fn recent(&self) -> u32 {
        self.recent
    }

    /// Whether a segment with the timestamp `value` is older than the latest one (PAWS).
    pub(super) fn is_old(&self, value: u32, now: Time) -> bool {
        (value.wrapping_sub(self.recent) as i32) < 0 && now.since(self.at) < STALE
    }

    /// Stores `value` as the latest timestamp. It is from a segment that is not old, and that
    /// begins at or before the last acknowledged number.
    pub(super) fn advance(&mut self, value: u32, now: Time) {
        *self = Self { recent: value, at: now };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_stood_for_24_days_is_believed_again() {
        let clock = PeerClock::new(Timestamps { value: 5, echo: 0 }, Time::ZERO);
        assert!(clock.is_old(4, Time::ZERO + Duration::from_secs(1)) && !clock.is_old(5, Time::ZERO));
        assert!(clock.is_old(u32::MAX, Time::ZERO), "the comparison wraps");
        assert!(!clock.is_old(4, Time::ZERO + STALE));
    }
}
