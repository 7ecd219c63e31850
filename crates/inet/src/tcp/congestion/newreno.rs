//! NewReno (RFC 5681): the window grows by one segment each round trip, and is halved after a loss.

use super::{Control, Sample, Window};

/// The NewReno algorithm.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewReno {
    /// The number of segments that were acknowledged since the window last grew.
    acked: u32,
}

impl Control for NewReno {
    fn acked(&mut self, window: &mut Window, sample: &Sample) {
        let left = window.slow_start(sample.acked);
        self.acked += left;
        if self.acked >= window.cwnd {
            self.acked -= window.cwnd;
            window.cwnd += 1;
        }
    }

    /// The threshold is half of the window, not of the segments in flight, because the window does
    /// not grow while the connection does not fill it.
    fn reduced(&mut self, window: &Window) -> u32 {
        self.acked = 0;
        (window.cwnd / 2).max(2)
    }

    fn timed_out(&mut self, window: &Window) -> u32 {
        self.reduced(window)
    }

    fn undone(&mut self) {}

    fn idle(&mut self, _idle: u64) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_grows_by_one_segment_per_window_and_halves() {
        let mut reno = NewReno::default();
        let mut window = Window { cwnd: 10, ssthresh: 10 };
        let sample = Sample { acked: 1, now: 0, rtt: 0 };
        let mut seen = Vec::new();
        for _ in 0..21 {
            reno.acked(&mut window, &sample);
            seen.push(window.cwnd);
        }
        assert_eq!((seen[8], seen[9], seen[19], seen[20]), (10, 11, 11, 12));
        assert_eq!(reno.reduced(&window), 6);
        assert_eq!(reno.reduced(&Window { cwnd: 1, ssthresh: 9 }), 2);
    }
}
