//! The highest rate that reaches a goal: bisection between what is sent without a rate, and nothing
//! (RFC 2544, section 26.1, for datagrams without loss).

use super::plan::{LEAST_EVERY, MAX_RATE, Work, least_rate};
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
/// send at this rate has not, nor one that was too short for a message.
pub(super) fn reaches(goal: SearchArg, rate: u64, sample: &Sample) -> bool {
    match goal {
        SearchArg::Lossless => {
            let [sent, arrived] = sample.datagrams;
            let in_time = sample.elapsed.saturating_sub(LATE.max(sample.elapsed / 100));
            sent > 0 && sent == arrived && sample.sent as f64 >= rate as f64 * in_time.as_secs_f64()
        }
        SearchArg::Within { percent, limit } => {
            let latencies = &sample.latencies;
            !latencies.is_empty() && latencies.losses() == 0 && latencies.percentile(percent) <= limit
        }
    }
}

/// Finds the highest rate at which this many flows reach a goal, by bisection. `run` makes the runs
/// at a rate. More than half of them must reach the goal. It is an error if no rate can be tried,
/// because the flows are slower without a rate than at the lowest one.
pub(super) fn search(
    goal: SearchArg,
    work: &Work,
    flows: u16,
    mut run: impl FnMut(Option<u64>) -> anyhow::Result<Vec<Sample>>,
) -> anyhow::Result<Option<u64>> {
    let most = run(None)?.iter().map(|sample| sample.begun_per_s(work)).fold(0.0, f64::max);
    let (most, least) = ((most as u64).min(MAX_RATE), least_rate(flows));
    anyhow::ensure!(
        most >= least,
        "--search: {flows} flow(s) need at least {least} messages in a second, one for each flow in {} s, and {most} in \
         a second are sent without a rate; give fewer --flows or a longer --duration",
        LEAST_EVERY.as_secs()
    );
    highest(most, least, |rate| {
        let samples = run(Some(rate))?;
        let reached = samples.iter().filter(|sample| reaches(goal, rate, sample)).count();
        Ok(2 * reached > samples.len())
    })
}

/// The highest rate from `least` to `most` for which `passes` holds, if there is one. `least` is
/// not above `most`. `passes` is called once for each rate that is tried.
fn highest<E>(most: u64, least: u64, mut passes: impl FnMut(u64) -> Result<bool, E>) -> Result<Option<u64>, E> {
    if passes(most)? {
        return Ok(Some(most));
    }
    let (mut low, mut high) = (0, most);
    while high - low > (high / NEAR).max(1) && high > (most / LEAST).max(least) {
        let rate = low.midpoint(high).max(least);
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
    use crate::perf::streams::pace::Latencies;
    use crate::perf::streams::plan::Proto;

    fn found(most: u64, limit: u64) -> (Option<u64>, u32) {
        let mut tries = 0;
        let found = highest::<()>(most, 0, |rate| {
            tries += 1;
            Ok(rate <= limit)
        });
        (found.unwrap(), tries)
    }

    /// A run of 20 ms that has sent nothing.
    fn nothing() -> Sample {
        Sample {
            amounts: vec![0],
            elapsed: Duration::from_millis(20),
            intervals: Vec::new(),
            sent: 0,
            datagrams: [0; 2],
            latencies: Latencies::default(),
            cpu_ns: 0.0,
            cpus: Vec::new(),
        }
    }

    /// That no rate reaches the goal is a result only if rates were tried.
    #[test]
    fn flows_that_are_too_slow_for_any_rate_are_an_error() {
        let work = Work { proto: Proto::Udp, size: 100, answer: None, on_way: Duration::ZERO, drain: Duration::ZERO };
        // 500 flows need 50 datagrams a second, 1 in these 20 ms.
        for (sent, flows, says) in [
            (1, 500, None),
            (1, 501, Some("501 flow(s) need at least 51 messages in a second, one for each flow in 10 s, and 50")),
            (0, 1, Some("1 flow(s) need at least 1 messages in a second, one for each flow in 10 s, and 0")),
        ] {
            let mut tried = Vec::new();
            let found = search(SearchArg::Lossless, &work, flows, |rate| {
                tried.push(rate);
                Ok(vec![Sample { sent, ..nothing() }])
            });
            match (found, says) {
                (Ok(found), None) => assert_eq!((found, &tried[..2]), (None, &[None, Some(50)][..])),
                (Err(error), Some(says)) => assert!(error.to_string().contains(says) && tried == [None], "{error}"),
                (found, _) => panic!("{found:?}"),
            }
        }
    }

    #[test]
    fn a_run_without_a_message_reaches_nothing() {
        let sample = nothing();
        let within = SearchArg::Within { percent: 100.0, limit: Duration::from_secs(1) };
        assert!(!reaches(within, 35, &sample) && !reaches(SearchArg::Lossless, 35, &sample));
        assert!(reaches(SearchArg::Lossless, 35, &Sample { datagrams: [1; 2], sent: 1, ..sample }));
    }

    #[test]
    fn the_result_passed_and_is_near_the_limit() {
        for limit in [2_000, 33_333, 500_000, 999_999] {
            let (found, tries) = found(1_000_000, limit);
            let found = found.unwrap();
            assert!(found <= limit && found + found / 50 + 1 >= limit && tries <= 17, "{limit}: {found}, {tries}");
        }
        assert_eq!(found(1_000, 1_000), (Some(1_000), 1));
        let (found, tries) = found(1_000_000, 10);
        assert!(found.is_none() && tries <= 12, "{tries}");
        // Flows do not begin at a lower rate than the least.
        let mut tried = Vec::new();
        let mut fails = |rate| {
            tried.push(rate);
            Ok::<_, ()>(false)
        };
        assert_eq!((highest(100, 30, &mut fails), highest(30, 30, &mut fails)), (Ok(None), Ok(None)));
        assert_eq!(tried, [100, 50, 30, 30]);
        assert_eq!(highest(5, 0, |_| Err("ends")), Err("ends"));
    }
}
