//! CUBIC (RFC 9438): after a loss, the window quickly approaches the size at which the loss
//! occurred, stays near it, and then probes beyond it. The curve is a function of time, not of
//! round trips.
//!
//! ```text
//!   cwnd ^                                  .
//!  W_max |- - - - - - -.-.-.-.- - - - - - - -      W(t) = C (t - K)^3 + W_max
//!        |         .                               K = cbrt((W_max - cwnd at t = 0) / C)
//!        |     .
//!        |  .
//!        +-------------K------------------> t
//! ```

use super::{Control, Sample, Window};

/// The curve's scale, in segments per second cubed.
const C: f64 = 0.4;
/// The factor by which a loss reduces the window.
const BETA: f64 = 0.7;

/// CUBIC.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cubic {
    /// The window before the last loss, at which the curve is flat. It is less if the window did
    /// not reach the value before the previous loss (fast convergence).
    w_max: f64,
    /// The window before the last loss.
    prior: f64,
    epoch: Option<Epoch>,
    before: Option<(f64, f64)>,
}

/// A time without a loss.
#[derive(Clone, Debug, PartialEq)]
struct Epoch {
    start: u64,
    /// Seconds from the start to the flat part.
    k: f64,
    origin: f64,
    /// The window, including its fraction.
    exact: f64,
    /// The window of a Reno flow on the same path.
    reno: f64,
}

impl Epoch {
    fn curve(&self, micros: u64) -> f64 {
        let t = micros as f64 / 1e6 - self.k;
        C * t * t * t + self.origin
    }
}

impl Cubic {
    fn epoch(&mut self, cwnd: u32, now: u64) -> &mut Epoch {
        let (w_max, cwnd) = (self.w_max, f64::from(cwnd));
        let epoch = self.epoch.get_or_insert_with(|| {
            let (k, origin) = if cwnd < w_max { (((w_max - cwnd) / C).cbrt(), w_max) } else { (0.0, cwnd) };
            Epoch { start: now, k, origin, exact: cwnd, reno: cwnd }
        });
        if epoch.exact.floor() != cwnd {
            epoch.exact = cwnd; // The sender has changed the window.
        }
        epoch
    }

    fn threshold(cwnd: f64) -> u32 {
        ((cwnd * BETA) as u32).max(2)
    }
}

impl Control for Cubic {
    fn acked(&mut self, window: &mut Window, sample: &Sample) {
        let acked = window.slow_start(sample.acked);
        if acked == 0 {
            return;
        }
        let prior = self.prior;
        let epoch = self.epoch(window.cwnd, sample.now);
        let elapsed = sample.now.saturating_sub(epoch.start);
        let (acked, cwnd) = (f64::from(acked), epoch.exact);
        let alpha = if epoch.reno < prior { 3.0 * (1.0 - BETA) / (1.0 + BETA) } else { 1.0 };
        epoch.reno += alpha * acked / cwnd;
        if epoch.curve(elapsed) < epoch.reno {
            epoch.exact = epoch.reno.max(cwnd);
        } else {
            let target = epoch.curve(elapsed + sample.rtt).clamp(cwnd, 1.5 * cwnd);
            epoch.exact += (target - cwnd) / cwnd * acked;
        }
        window.cwnd = epoch.exact as u32;
    }

    /// The threshold is computed from the window, not from the segments in flight, because the
    /// window does not grow while the connection does not fill it (4.6).
    fn reduced(&mut self, window: &Window) -> u32 {
        let cwnd = f64::from(window.cwnd);
        self.before = Some((self.w_max, self.prior));
        self.w_max = if cwnd < self.w_max { cwnd * (1.0 + BETA) / 2.0 } else { cwnd };
        self.prior = cwnd;
        self.epoch = None;
        Self::threshold(cwnd)
    }

    /// The epoch that follows slow start begins at the flat part of the curve (4.8).
    fn timed_out(&mut self, window: &Window) -> u32 {
        let threshold = self.reduced(window);
        self.w_max = 0.0;
        threshold
    }

    fn undone(&mut self) {
        if let Some((w_max, prior)) = self.before.take() {
            (self.w_max, self.prior) = (w_max, prior);
        }
        self.epoch = None;
    }

    /// The curve counts only the time in which the connection was sending (4.2 and 5.8).
    fn idle(&mut self, idle: u64) {
        if let Some(epoch) = &mut self.epoch {
            epoch.start += idle;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: u64 = 100_000;

    /// Acknowledges the whole window once each round trip, `rounds` times.
    fn grow(cubic: &mut Cubic, window: &mut Window, from: u64, rounds: u64) {
        for round in 0..rounds {
            for _ in 0..window.cwnd {
                cubic.acked(window, &Sample { acked: 1, now: from + round * RTT, rtt: RTT });
            }
        }
    }

    fn after_a_loss_at(cwnd: u32) -> (Cubic, Window) {
        let mut cubic = Cubic::default();
        let ssthresh = cubic.reduced(&Window { cwnd, ssthresh: Window::UNKNOWN });
        (cubic, Window { cwnd: ssthresh, ssthresh })
    }

    #[test]
    fn the_window_follows_the_curve_to_the_old_maximum_and_beyond() {
        let (mut cubic, mut window) = after_a_loss_at(1000);
        assert_eq!(window.cwnd, 700);
        // K = cbrt(300 / 0.4) = 9.0856 s. W(t) = 0.4 (t - K)^3 + 1000: W(3) = 909.8, W(9) = 1000.0,
        // W(12) = 1009.9
        let mut expect = [(30, 909.8), (90, 1000.0), (120, 1009.9)].into_iter();
        let (mut round, mut next) = (0, expect.next());
        while let Some((at, w)) = next {
            grow(&mut cubic, &mut window, round * RTT, at - round);
            round = at;
            let off = f64::from(window.cwnd) - w;
            assert!(off.abs() <= 3.0, "after {at} round trips the window is {}, and the curve {w}", window.cwnd);
            next = expect.next();
        }
    }

    #[test]
    fn on_short_paths_the_window_is_that_of_reno() {
        let (mut cubic, mut window) = after_a_loss_at(20);
        assert_eq!(window.cwnd, 14);
        // The curve needs cbrt(6 / 0.4) = 2.47 s to be at 20. Reno grows by 0.529 a round trip: 14
        // + 10 * 0.529 = 19.3
        grow(&mut cubic, &mut window, 0, 10);
        assert_eq!(window.cwnd, 19);
    }

    #[test]
    fn the_window_grows_by_half_a_segment_per_segment_at_most() {
        let (mut cubic, mut window) = after_a_loss_at(50);
        cubic.acked(&mut window, &Sample { acked: 1, now: 0, rtt: RTT });
        let before = window.cwnd;
        cubic.acked(&mut window, &Sample { acked: 10, now: 60_000_000, rtt: RTT });
        assert_eq!(window.cwnd, before + 5);
    }

    #[test]
    fn a_flow_that_did_not_reach_its_maximum_gives_way() {
        let (mut cubic, _) = after_a_loss_at(100);
        assert_eq!(cubic.reduced(&Window { cwnd: 80, ssthresh: 70 }), 56);
        assert!((cubic.w_max - 68.0).abs() < 1e-9, "80 * 1.7 / 2");
        cubic.undone();
        assert!((cubic.w_max - 100.0).abs() < 1e-9);
    }

    #[test]
    fn idle_time_does_not_count() {
        let (mut cubic, mut window) = after_a_loss_at(1000);
        grow(&mut cubic, &mut window, 0, 1);
        let (mut other, mut same) = (cubic.clone(), window);
        grow(&mut cubic, &mut window, RTT, 1);
        other.idle(50_000_000);
        grow(&mut other, &mut same, RTT + 50_000_000, 1);
        assert_eq!(window, same);
    }

    #[test]
    fn after_a_timeout_the_curve_begins_at_its_flat_part() {
        let mut cubic = Cubic::default();
        let ssthresh = cubic.timed_out(&Window { cwnd: 1000, ssthresh: Window::UNKNOWN });
        let mut window = Window { cwnd: ssthresh, ssthresh };
        grow(&mut cubic, &mut window, 0, 10);
        // K = 0 and W_max = 700: W(1) = 700.4; Reno has 700 + 10 * 0.529 = 705.3
        assert_eq!((ssthresh, window.cwnd), (700, 705));
    }
}
