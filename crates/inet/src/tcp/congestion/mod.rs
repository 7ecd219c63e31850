//! Congestion control: how the window grows by acknowledgements and how far it shrinks when a
//! segment is lost. Windows are in segments.
//!
//! The sender decides *when* the window changes: it finds losses, shrinks the window in steps ([RFC
//! 6937](https://www.rfc-editor.org/rfc/rfc6937)), undoes wrong reductions, and does not let the
//! window grow while the connection does not fill it. An algorithm decides *by how much* it
//! changes.

use serde::{Deserialize, Serialize};

mod cubic;
mod hystart;
mod newreno;

pub use cubic::Cubic;
pub(super) use hystart::HyStart;
pub use newreno::NewReno;

/// The congestion window and the slow-start threshold, in segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The number of segments that may be in flight.
    pub cwnd: u32,
    /// Below this threshold, the window grows by slow start. It is [`Window::UNKNOWN`] before the
    /// first loss.
    pub ssthresh: u32,
}

impl Window {
    /// The threshold of a path on which nothing has been lost yet.
    pub const UNKNOWN: u32 = 0x7fff_ffff;

    /// Whether slow start applies.
    #[must_use]
    pub const fn is_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh
    }

    /// Grows by `acked` segments up to the threshold, and returns the number of segments that are
    /// left (RFC 5681, 3.1).
    pub fn slow_start(&mut self, acked: u32) -> u32 {
        let grow = acked.min(self.ssthresh.saturating_sub(self.cwnd));
        self.cwnd += grow;
        acked - grow
    }
}

/// The input of an algorithm from one acknowledgement. Times are in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The number of delivered segments.
    pub acked: u32,
    /// The current time.
    pub now: u64,
    /// The smoothed round-trip time; 0 if it is not known.
    pub rtt: u64,
}

/// A congestion control algorithm. It owns its own state, and the sender owns the [`Window`].
pub trait Control {
    /// Grows the window. The sender calls it for an acknowledgement, if no loss is being repaired
    /// and the window was fully used.
    fn acked(&mut self, window: &mut Window, sample: &Sample);

    /// Returns the threshold after a loss or a congestion mark was seen.
    fn reduced(&mut self, window: &Window) -> u32;

    /// Returns the threshold after the retransmission timer expired.
    fn timed_out(&mut self, window: &Window) -> u32;

    /// Restores the state before the last reduction, which was wrong: nothing had been lost.
    fn undone(&mut self);

    /// Notes that sending begins again after `idle` microseconds with nothing in flight.
    fn idle(&mut self, idle: u64);
}

/// The built-in algorithms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Congestion {
    /// RFC 9438.
    #[default]
    Cubic,
    /// RFC 5681 and 6582.
    NewReno,
}

/// An algorithm with its state. It is an enum and not a box, so that a connection is a plain value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Controller {
    Cubic(Cubic),
    NewReno(NewReno),
}

impl Controller {
    pub(super) fn new(congestion: Congestion) -> Self {
        match congestion {
            Congestion::Cubic => Self::Cubic(Cubic::default()),
            Congestion::NewReno => Self::NewReno(NewReno::default()),
        }
    }

    /// The algorithm.
    pub(super) fn control(&mut self) -> &mut dyn Control {
        match self {
            Self::Cubic(cubic) => cubic,
            Self::NewReno(reno) => reno,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_start_stops_at_the_threshold() {
        let mut window = Window { cwnd: 4, ssthresh: 10 };
        assert_eq!((window.slow_start(4), window.cwnd), (0, 8));
        assert_eq!((window.slow_start(5), window.cwnd), (3, 10));
        assert_eq!((window.slow_start(5), window.cwnd, window.is_slow_start()), (5, 10, false));
    }
}
