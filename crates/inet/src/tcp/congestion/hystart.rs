//! HyStart++ (RFC 9406): slow start ends when the round-trip time grows, not at the first loss.
//!
//! Why: slow start doubles the window until a queue on the path overflows. About as many segments
//! as the path holds are then lost at once. Before that the queue fills, and segments take longer.
//!
//! ```text
//!               the least time of a round grew            CSS_ROUNDS rounds
//!   slow start ──────────────────────────────► CSS ───────────────────────────► ended
//!        ▲        (an eighth; 4 to 16 ms)       │      (the threshold is set)
//!        └──────────────────────────────────────┘
//!             it is less than at the beginning of CSS: the growth was jitter
//! ```
//!
//! In conservative slow start (CSS) the window grows a quarter as fast. A round ends when the number
//! that was next at its beginning is acknowledged. A loss ends slow start as before. HyStart++
//! applies only before the first loss, while the threshold is not known (RFC 9406, section 4.3).

use crate::tcp::Seq;

/// The least and the most growth of the round-trip time that counts, in microseconds.
const MIN_THRESH: u32 = 4_000;
const MAX_THRESH: u32 = 16_000;
/// Between them, this part of the previous round's time counts.
const DIVISOR: u32 = 8;
/// Samples that a round needs to be compared with another one.
const SAMPLES: u8 = 8;
/// In CSS, the window grows by one segment for this number of delivered ones.
const CSS_DIVISOR: u32 = 4;
/// Rounds of CSS, the one in which it begins included.
const CSS_ROUNDS: u8 = 5;

/// A round without a sample.
const NONE: u32 = u32::MAX;

/// The state of HyStart++. Times are in microseconds.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct HyStart {
    /// The least round-trip time of the previous and of the current round.
    last: u32,
    current: u32,
    /// The least round-trip time of the round in which CSS began.
    baseline: u32,
    /// The number with which the round ends.
    end: Seq,
    /// Samples of the current round.
    samples: u8,
    /// Rounds of CSS that remain; 0 in slow start.
    css: u8,
    /// Segments that were delivered in CSS, and by which the window did not grow yet.
    rest: u8,
}

impl HyStart {
    /// The state before the first transmission, whose number is `start`.
    pub(in crate::tcp) fn new(start: Seq) -> Self {
        Self { last: NONE, current: NONE, baseline: NONE, end: start, samples: 0, css: 0, rest: 0 }
    }

    /// Processes an acknowledgement during the first slow start: everything before `una` is
    /// acknowledged, and `nxt` is sent next. Returns whether slow start ends: the threshold is then
    /// the window.
    pub(in crate::tcp) fn measured(&mut self, rtt: Option<u64>, una: Seq, nxt: Seq) -> bool {
        if let Some(rtt) = rtt {
            self.current = self.current.min(u32::try_from(rtt).unwrap_or(NONE - 1));
            self.samples = self.samples.saturating_add(1);
        }
        if self.samples >= SAMPLES {
            self.compare();
        }
        if una < self.end {
            return false;
        }
        (self.last, self.current, self.samples, self.end) = (self.current, NONE, 0, nxt);
        if self.css > 0 {
            self.css -= 1;
            return self.css == 0;
        }
        false
    }

    fn compare(&mut self) {
        if self.css > 0 {
            if self.current < self.baseline {
                (self.css, self.rest) = (0, 0);
            }
        } else if self.last != NONE {
            let thresh = (self.last / DIVISOR).clamp(MIN_THRESH, MAX_THRESH);
            if self.current >= self.last.saturating_add(thresh) {
                (self.baseline, self.css) = (self.current, CSS_ROUNDS);
            }
        }
    }

    /// The number of segments by which the window grows when `acked` were delivered.
    pub(in crate::tcp) fn growth(&mut self, acked: u32) -> u32 {
        if self.css == 0 {
            return acked;
        }
        let all = acked + u32::from(self.rest);
        self.rest = (all % CSS_DIVISOR) as u8;
        all / CSS_DIVISOR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Window {
        cwnd: u32,
        ended: bool,
    }

    /// A round of as many acknowledgements as the window has segments, `times[n]` after the
    /// transmission of the `n`-th (the last one is repeated).
    fn round(hystart: &mut HyStart, window: &mut Window, una: &mut Seq, times: &[u64]) {
        let begin = *una;
        let flight = window.cwnd;
        for n in 0..flight {
            *una = begin + n + 1;
            let rtt = times.get(n as usize).or(times.last()).copied();
            window.ended |= hystart.measured(rtt, *una, begin + flight + n + 1);
            if !window.ended {
                window.cwnd += hystart.growth(1);
            }
        }
    }

    fn begin() -> (HyStart, Window, Seq) {
        (HyStart::new(Seq(0)), Window { cwnd: 16, ended: false }, Seq(0))
    }

    #[test]
    fn the_window_doubles_while_the_time_stays() {
        let (mut hystart, mut window, mut una) = begin();
        for n in 0..4 {
            round(&mut hystart, &mut window, &mut una, &[50_000 + n * 1_000]);
        }
        assert_eq!((window.cwnd, window.ended), (256, false));
    }

    #[test]
    fn a_longer_time_makes_growth_slow_and_ends_it_after_five_rounds() {
        let (mut hystart, mut window, mut una) = begin();
        round(&mut hystart, &mut window, &mut una, &[80_000]);
        round(&mut hystart, &mut window, &mut una, &[80_000]);
        let before = window.cwnd;
        // An eighth of 80 ms is 10 ms.
        round(&mut hystart, &mut window, &mut una, &[89_999]);
        assert_eq!(window.cwnd, 2 * before);
        round(&mut hystart, &mut window, &mut una, &[101_250]);
        let (at, grown) = (2 * before, window.cwnd);
        // The first acknowledgement ends the previous round, and seven samples are not enough.
        assert_eq!(grown, at + 8 + (at - 8) / 4);
        for _ in 0..4 {
            round(&mut hystart, &mut window, &mut una, &[101_250]);
            assert!(!window.ended);
        }
        assert!(window.cwnd < grown * 3, "five quarters a round");
        round(&mut hystart, &mut window, &mut una, &[101_250]);
        assert!(window.ended);
    }

    #[test]
    fn jitter_does_not_end_slow_start() {
        let (mut hystart, mut window, mut una) = begin();
        round(&mut hystart, &mut window, &mut una, &[40_000]);
        round(&mut hystart, &mut window, &mut una, &[60_000]);
        assert!(hystart.css > 0);
        round(&mut hystart, &mut window, &mut una, &[41_000]);
        assert_eq!((hystart.css, window.ended), (0, false));
        let before = window.cwnd;
        round(&mut hystart, &mut window, &mut una, &[41_000]);
        assert_eq!(window.cwnd, 2 * before);
    }

    #[test]
    fn on_short_paths_four_milliseconds_count_and_on_long_ones_sixteen() {
        for (base, least) in [(1_000, 4_000), (400_000, 16_000)] {
            for (more, slow) in [(least - 1, false), (least, true)] {
                let (mut hystart, mut window, mut una) = begin();
                round(&mut hystart, &mut window, &mut una, &[base]);
                round(&mut hystart, &mut window, &mut una, &[base + more]);
                assert_eq!(hystart.css > 0, slow, "{base} and {more}");
            }
        }
    }

    #[test]
    fn a_round_with_few_samples_is_not_compared() {
        let (mut hystart, mut window, mut una) = begin();
        window.cwnd = 7;
        round(&mut hystart, &mut window, &mut una, &[40_000]);
        window.cwnd = 7;
        round(&mut hystart, &mut window, &mut una, &[90_000]);
        assert_eq!(hystart.css, 0);
    }
}
