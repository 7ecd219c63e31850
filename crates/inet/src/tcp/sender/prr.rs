//! Proportional rate reduction (RFC 6937): the number of segments that are sent during recovery.
//!
//! Why: if the window were halved at once, nothing would be sent until half of the segments in
//! flight are acknowledged, and then a burst.

/// The segments that were delivered and sent since the window began to shrink.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Prr {
    before: u32,
    delivered: u32,
    out: u32,
}

/// The values of one acknowledgement for [`Prr::window`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Delivery {
    /// Segments that this acknowledgement delivered.
    pub(super) delivered: u32,
    /// Segments in flight after this acknowledgement.
    pub(super) in_flight: u32,
    /// Whether the cumulative acknowledgement advanced, and no further loss was found. If so, the
    /// window may grow by one segment more than was delivered (slow start reduction bound).
    /// Otherwise it may not (conservative reduction bound).
    pub(super) good: bool,
}

impl Prr {
    /// Begins to shrink the window from `cwnd`.
    pub(super) fn begin(cwnd: u32) -> Self {
        Self { before: cwnd, delivered: 0, out: 0 }
    }

    /// Counts segments that were sent.
    pub(super) fn sent(&mut self, segments: u32) {
        self.out += segments;
    }

    /// The window after an acknowledgement, or `None` if it delivered nothing.
    pub(super) fn window(&mut self, delivery: Delivery, ssthresh: u32) -> Option<u32> {
        let Delivery { delivered, in_flight, good } = delivery;
        if delivered == 0 || self.before == 0 {
            return None;
        }
        self.delivered += delivered;
        let may_send = if in_flight > ssthresh {
            let part = (u64::from(self.delivered) * u64::from(ssthresh)).div_ceil(u64::from(self.before));
            u32::try_from(part).unwrap_or(u32::MAX).saturating_sub(self.out)
        } else {
            let limit = self.delivered.saturating_sub(self.out).max(delivered) + u32::from(good);
            limit.min(ssthresh - in_flight)
        };
        // The first acknowledgement sends at least the retransmission for which the window shrinks.
        let may_send = may_send.max(u32::from(self.out == 0));
        Some(in_flight + may_send)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 6937, 4.1: of 20 segments, the first is lost. `ssthresh` is 10. Each of
    /// the other segments causes an acknowledgement.
    #[test]
    fn half_of_what_is_delivered_leaves_while_more_than_ssthresh_is_in_flight() {
        let mut prr = Prr::begin(20);
        let (mut in_flight, mut sent) = (20 - 3, Vec::new());
        for n in 0..17 {
            in_flight -= u32::from(n > 0);
            let cwnd = prr.window(Delivery { delivered: 1, in_flight, good: false }, 10).unwrap();
            let send = cwnd.saturating_sub(in_flight);
            prr.sent(send);
            in_flight += send;
            sent.push(send);
        }
        // At the end, ten segments are in flight, and one is sent for each that is delivered.
        assert_eq!(sent, [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 1]);
        assert_eq!(in_flight, 10);
    }

    #[test]
    fn below_ssthresh_one_more_leaves_than_was_delivered_only_while_the_hole_closes() {
        let begin = Prr { before: 20, delivered: 5, out: 5 };
        let delivery = Delivery { delivered: 1, in_flight: 4, good: true };
        assert_eq!({ begin }.window(delivery, 10), Some(6));
        assert_eq!({ begin }.window(Delivery { good: false, ..delivery }, 10), Some(5));
        assert_eq!({ begin }.window(Delivery { in_flight: 9, ..delivery }, 10), Some(10), "never above ssthresh");
        assert_eq!({ begin }.window(Delivery { delivered: 0, ..delivery }, 10), None);
    }
}
