//! The highest rate that reaches a goal: bisection between what is sent without a rate, and nothing
//! (RFC 2544, section 26.1, for datagrams without loss).

use super::report::Sample;
use crate::args::SearchArg;
use std::time::Duration;

/// The least rate that is tried, as a part of the rate without a limit.
const LEAST: u64 = 1000;
/// If a source is this late when the run ends, it has sent at its rate all the same: other programs
/// may have had its CPU for a moment.
const LATE: Duration = Duration::from_millis(20);
/// The search ends when it is as near to the result as this part of it.
const NEAR: u64 = 50;

/// Whether a run at `rate` messages a second has reached the goal. A run whose source could not
/// send at this rate has not.
pub(super) fn reaches(goal: SearchArg, rate: u64, sample: &Sample) -> bool {
    match goal {
        SearchArg::Lossless => {
            let [sent, arrived] = sample.datagrams;
            let in_time = sample.elapsed.saturating_sub(LATE.max(sample.elapsed / 100));
            sent == arrived && sample.sent as f64 >= rate as f64 * in_time.as_secs_f64()
        }
        SearchArg::Within { percent, limit } => {
            let latencies = &sample.latencies;
            latencies.losses() == 0 && latencies.percentile(percent) <= limit
        }
    }
}

/// The highest rate up to `most` for which `passes` holds, if there is one. `passes` is called once
/// for each rate that is tried.
pub(super) fn highest<E>(most: u64, mut passes: impl FnMut(u64) -> Result<bool, E>) -> Result<Option<u64>, E> {
    if most == 0 || passes(most)? {
        return Ok(Some(most).filter(|most| *most > 0));
    }
    let (mut low, mut high) = (0, most);
    while high - low > (high / NEAR).max(1) && high > most / LEAST {
        let rate = low.midpoint(high);
        if passes(rate)? {
            low = rate;
        } else {
            high = rate;
        }
    }
    Ok(Some(low).filter(|low| *low > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(most: u64, limit: u64) -> (Option<u64>, u32) {
        let mut tries = 0;
        let found = highest::<()>(most, |rate| {
            tries += 1;
            Ok(rate <= limit)
        });
        (found.unwrap(), tries)
    }

    #[test]
    fn the_result_passed_and_is_near_the_limit() {
        for limit in [2_000, 33_333, 500_000, 999_999] {
            let (found, tries) = search(1_000_000, limit);
            let found = found.unwrap();
            assert!(found <= limit && found + found / 50 + 1 >= limit && tries <= 17, "{limit}: {found}, {tries}");
        }
        assert_eq!(search(1_000, 1_000), (Some(1_000), 1));
        assert_eq!(search(0, 5).0, None);
        let (found, tries) = search(1_000_000, 10);
        assert!(found.is_none() && tries <= 12, "{tries}");
        assert_eq!(highest(5, |_| Err("ends")), Err("ends"));
    }
}
