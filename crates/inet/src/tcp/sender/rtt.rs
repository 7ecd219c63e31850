//! Round-trip time and the retransmission timeout (RFC 6298), in microseconds.

/// How long a minimum is valid, because paths change.
const MIN_RTT_WINDOW: u64 = 300_000_000;
/// The timeout before the first sample.
const INITIAL_RTO: u64 = 1_000_000;

/// The smoothed round-trip time, its variation, its minimum, and the timeout that is computed from
/// them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rtt {
    /// The smoothed time, times 8, as RFC 6298 advises for exact arithmetic; 0 before the first
    /// sample.
    srtt8: u64,
    /// The variation, times 4.
    var4: u64,
    rto: u64,
    floor: u64,
    ceiling: u64,
    min: u64,
    min_at: u64,
}

impl Rtt {
    /// `floor`: the least time that is added to the smoothed time. `ceiling`: the longest timeout.
    pub(super) fn new(floor: u64, ceiling: u64) -> Self {
        Self { srtt8: 0, var4: 0, rto: INITIAL_RTO.min(ceiling), floor, ceiling, min: u64::MAX, min_at: 0 }
    }

    /// Adds a sample. It must not be of a segment that was sent twice (Karn).
    pub(super) fn sample(&mut self, rtt: u64) {
        let rtt = rtt.clamp(1, self.ceiling);
        if self.srtt8 == 0 {
            self.srtt8 = rtt * 8;
            self.var4 = rtt * 2;
        } else {
            let error = rtt.abs_diff(self.srtt8 / 8);
            self.var4 = self.var4 - self.var4 / 4 + error;
            self.srtt8 = self.srtt8 - self.srtt8 / 8 + rtt;
        }
        self.rto = (self.srtt8 / 8 + self.var4.max(self.floor)).min(self.ceiling);
    }

    /// Adds a sample for the minimum, which is the round-trip time of the path alone.
    pub(super) fn path_sample(&mut self, rtt: u64, now: u64) {
        let rtt = rtt.max(1);
        if rtt <= self.min || now.saturating_sub(self.min_at) > MIN_RTT_WINDOW {
            self.min = rtt;
            self.min_at = now;
        }
    }

    /// Sets the timeout to three seconds if the SYN was lost and there is no sample (RFC 6298,
    /// 5.7).
    pub(super) fn syn_was_lost(&mut self) {
        if self.srtt8 == 0 {
            self.rto = (3 * INITIAL_RTO).min(self.ceiling);
        }
    }

    /// Whether there was a sample.
    pub(super) fn is_known(&self) -> bool {
        self.srtt8 != 0
    }

    /// The smoothed round-trip time.
    pub(super) fn smoothed(&self) -> u64 {
        self.srtt8 / 8
    }

    /// The variation of the round-trip time.
    pub(super) fn variation(&self) -> u64 {
        self.var4 / 4
    }

    /// The least round-trip time in the last minutes, if there was a sample.
    pub(super) fn min(&self) -> Option<u64> {
        (self.min != u64::MAX).then_some(self.min)
    }

    /// The timeout after `backoff` timeouts in a row: it is doubled `backoff` times.
    #[inline]
    pub(super) fn timeout(&self, backoff: u32) -> u64 {
        self.rto.checked_shl(backoff.min(30)).map_or(self.ceiling, |rto| rto.min(self.ceiling))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_follows_rfc_6298() {
        let mut rtt = Rtt::new(1, 120_000_000);
        assert_eq!(rtt.timeout(0), 1_000_000);
        rtt.sample(100_000);
        assert_eq!((rtt.smoothed(), rtt.variation(), rtt.timeout(0)), (100_000, 50_000, 300_000));
        // RTTVAR = 3/4 * 50 + 1/4 * |100 - 180|, SRTT = 7/8 * 100 + 1/8 * 180
        rtt.sample(180_000);
        assert_eq!((rtt.smoothed(), rtt.variation(), rtt.timeout(0)), (110_000, 57_500, 340_000));
    }

    #[test]
    fn the_variation_has_a_floor_and_backoff_a_ceiling() {
        let mut rtt = Rtt::new(200_000, 120_000_000);
        for _ in 0..100 {
            rtt.sample(10_000);
        }
        assert_eq!((rtt.timeout(0), rtt.timeout(1), rtt.timeout(3)), (210_000, 420_000, 1_680_000));
        assert_eq!((rtt.timeout(40), rtt.timeout(u32::MAX)), (120_000_000, 120_000_000));
    }

    #[test]
    fn a_lost_syn_makes_the_first_timeout_three_seconds() {
        let mut rtt = Rtt::new(200_000, 120_000_000);
        rtt.syn_was_lost();
        assert_eq!(rtt.timeout(0), 3_000_000);
        rtt.sample(1000);
        rtt.syn_was_lost();
        assert_eq!(rtt.timeout(0), 201_000);
    }

    #[test]
    fn a_minimum_is_forgotten_after_five_minutes() {
        let mut rtt = Rtt::new(200_000, 120_000_000);
        rtt.path_sample(10, 0);
        rtt.path_sample(20, 300_000_000);
        assert_eq!(rtt.min(), Some(10));
        rtt.path_sample(20, 300_000_001);
        assert_eq!(rtt.min(), Some(20));
    }
}
