//! The use of the congestion window by a connection.
//!
//! Why: a window that is not used was not tested by the path, and must not grow (RFC 7661).

use crate::tcp::Seq;
use crate::tcp::congestion::Window;

/// The use of the window in the last round trip.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    /// Whether the window held data back.
    limited: bool,
    /// The most segments in flight.
    most: u32,
    /// The number with which the round trip ends.
    end: Seq,
}

impl Usage {
    /// The state at the beginning: the first round trip ends at `iss`.
    pub(super) fn new(iss: Seq) -> Self {
        Self { end: iss, ..Self::default() }
    }

    /// Notes the segments in flight after a transmission, or that the window held data back
    /// (`limited`).
    pub(super) fn note(&mut self, limited: bool, out: u32, una: Seq, nxt: Seq) {
        if una >= self.end || limited || (!self.limited && out > self.most) {
            (self.limited, self.most, self.end) = (limited, out, nxt);
        }
    }

    /// Whether the window may grow: it was fully used, or, in slow start, more than half used.
    pub(super) fn may_grow(&self, window: &Window) -> bool {
        if window.is_slow_start() { window.cwnd < 2 * self.most } else { self.limited }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_that_is_not_used_does_not_grow() {
        let mut window = Window { cwnd: 10, ssthresh: Window::UNKNOWN };
        let mut usage = Usage::default();
        usage.note(false, 5, Seq(0), Seq(5));
        assert!(!usage.may_grow(&window), "half of it is in use");
        usage.note(false, 6, Seq(0), Seq(6));
        assert!(usage.may_grow(&window));
        window.ssthresh = 10;
        assert!(!usage.may_grow(&window), "in congestion avoidance it must be full");
        usage.note(true, 10, Seq(0), Seq(10));
        assert!(usage.may_grow(&window));
        usage.note(false, 1, Seq(9), Seq(11));
        assert!(usage.may_grow(&window), "the round trip in which it was full goes on");
        usage.note(false, 1, Seq(10), Seq(12));
        assert!(!usage.may_grow(&window));
    }
}
