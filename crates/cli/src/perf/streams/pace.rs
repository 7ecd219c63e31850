//! When messages are due, and how long requests took.
//!
//! Without a rate the loop is closed: a flow sends its next message when the last one is done.
//! With a rate it is open: messages are due at fixed times, whatever happened to those before.
//! A request is measured from the time when it was *due*, so that the wait behind a slow one
//! counts. Requests that were due when the run ended are still sent, for as long as the run took.
//! What then is left counts with the time that it has waited.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The longest time that a histogram distinguishes.
const LONGEST_NS: u64 = 100_000_000_000;

/// Of messages that were due and not sent, so many are recorded one by one; of more, as many at
/// regular distances, each for those behind it.
const MOST_RECORDED: u64 = 1 << 20;
/// The most requests that another host can report.
const MOST_REQUESTS: u64 = 1 << 50;

/// The measured time.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// When it began.
    pub(super) since: OnceLock<Instant>,
    /// When it ended: sources begin nothing more.
    pub(super) end: OnceLock<Instant>,
}

impl Window {
    pub(super) fn is_over(&self) -> bool {
        self.end.get().is_some()
    }

    /// Whether this moment is in the measured time, as far as that is known.
    fn has(&self, at: Instant) -> bool {
        self.since.get().is_some_and(|since| at >= *since) && self.end.get().is_none_or(|end| at < *end)
    }
}

/// The ends of the intervals in a time, from its beginning.
pub(super) fn intervals(every: Option<Duration>, time: Duration) -> impl Iterator<Item = Duration> {
    let ends = every.into_iter().flat_map(|every| (1..).map(move |n| every * n));
    ends.take_while(move |end| *end <= time)
}

/// When the messages of a flow are due.
#[derive(Clone, Debug)]
pub(super) enum Pace {
    /// As soon as the last one is done.
    Closed,
    /// Message `next` is due `next / rate` seconds after `begin`.
    Open { begin: Instant, next: u64, rate: f64 },
}

impl Pace {
    /// The pace of flow `flow` of `flows`, which send `rate` messages a second together, one flow
    /// after the other.
    pub(super) fn new(rate: Option<u64>, flow: u16, flows: u16) -> Self {
        rate.map_or(Self::Closed, |rate| Self::Open {
            begin: Instant::now() + Duration::from_secs_f64(f64::from(flow) / rate as f64),
            next: 0,
            rate: rate as f64 / f64::from(flows),
        })
    }

    /// Whether the next message is still sent: the run is not over; or the message was due before
    /// its end, which was not longer ago than `drain`.
    pub(super) fn goes_on(&self, window: &Window, drain: Duration) -> bool {
        let Some(&end) = window.end.get() else { return true };
        match self {
            Self::Open { .. } if window.since.get().is_some() => self.due() < end && end.elapsed() < drain,
            _ => false,
        }
    }

    /// When the next message is due. A closed loop's is due now.
    pub(super) fn due(&self) -> Instant {
        match self {
            Self::Closed => Instant::now(),
            Self::Open { begin, next, rate } => *begin + Duration::from_secs_f64(*next as f64 / rate),
        }
    }

    /// The message that was due is being sent.
    pub(super) fn sent(&mut self) {
        if let Self::Open { next, .. } = self {
            *next += 1;
        }
    }
}

/// The times of requests that were due in the measured time, in nanoseconds.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(from = "Recorded", into = "Recorded")]
pub(super) struct Latencies {
    histogram: Histogram<u64>,
    /// Requests that were due, and were never sent.
    unsent: u64,
    /// Requests of UDP without an answer.
    lost: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("bounds that are possible");
        Self { histogram, unsent: 0, lost: 0 }
    }
}

/// [`Latencies`] as another host gets them: times, and how many requests had each.
#[derive(Debug, Deserialize, Serialize)]
struct Recorded {
    times: Vec<(u64, u64)>,
    unsent: u64,
    lost: u64,
}

impl From<Latencies> for Recorded {
    fn from(Latencies { histogram, unsent, lost }: Latencies) -> Self {
        let times = histogram.iter_recorded().map(|at| (at.value_iterated_to(), at.count_at_value()));
        Self { times: times.collect(), unsent, lost }
    }
}

impl From<Recorded> for Latencies {
    fn from(Recorded { times, unsent, lost }: Recorded) -> Self {
        let mut latencies =
            Self { unsent: unsent.min(MOST_REQUESTS), lost: lost.min(MOST_REQUESTS), ..Self::default() };
        let mut left = MOST_REQUESTS;
        for (time, count) in times {
            let count = count.min(left);
            latencies.histogram.saturating_record_n(time, count);
            left -= count;
        }
        latencies
    }
}

impl Latencies {
    /// A request that was due at `due` is answered.
    pub(super) fn answered(&mut self, window: &Window, due: Instant) {
        if window.has(due) {
            self.record(due.elapsed());
        }
    }

    /// A datagram that was due at `due`, or its answer, is lost.
    pub(super) fn lost(&mut self, window: &Window, due: Instant) {
        self.lost += u64::from(window.has(due));
    }

    /// A flow has ended: what was due is not sent any more.
    pub(super) fn ended(&mut self, window: &Window, pace: Pace) {
        let (now, Some(&since), Some(&end)) = (Instant::now(), window.since.get(), window.end.get()) else { return };
        let Pace::Open { begin, next, rate } = pace else { return };
        // The numbers of the messages that were due from `since` on and before `end`.
        let number = |at: Instant| (at.saturating_duration_since(begin).as_secs_f64() * rate).ceil() as u64;
        let (first, last) = (number(since).max(next), number(end));
        let step = (last.saturating_sub(first) / MOST_RECORDED).max(1);
        let mut at = first;
        while at < last {
            let count = step.min(last - at);
            let due = begin + Duration::from_secs_f64(at as f64 / rate);
            self.histogram.saturating_record_n(ns(now.saturating_duration_since(due)), count);
            self.unsent += count;
            at += count;
        }
    }

    fn record(&mut self, time: Duration) {
        self.histogram.saturating_record(ns(time));
    }

    /// Adds what another thread or run has recorded.
    pub(super) fn add(&mut self, other: &Self) {
        self.histogram += &other.histogram;
        self.unsent += other.unsent;
        self.lost += other.lost;
    }

    /// The time within which `percent` of the requests were answered.
    pub(super) fn percentile(&self, percent: f64) -> Duration {
        Duration::from_nanos(self.histogram.value_at_percentile(percent))
    }

    /// Whether no request was counted.
    pub(super) fn is_empty(&self) -> bool {
        self.histogram.is_empty()
    }

    /// Requests that were lost.
    pub(super) fn losses(&self) -> u64 {
        self.lost
    }
}

/// A time in nanoseconds.
pub(super) fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Percentiles of the times of requests, for reports.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Percentiles {
    pub(super) requests: u64,
    pub(super) unsent: u64,
    pub(super) lost: u64,
    pub(super) mean: f64,
    pub(super) p50: u64,
    pub(super) p90: u64,
    pub(super) p99: u64,
    pub(super) p99_9: u64,
    pub(super) p99_99: u64,
    pub(super) max: u64,
}

impl From<&Latencies> for Percentiles {
    fn from(latencies: &Latencies) -> Self {
        let Latencies { histogram, unsent, lost } = latencies;
        let at = |percent| histogram.value_at_percentile(percent);
        Self {
            requests: histogram.len(),
            unsent: *unsent,
            lost: *lost,
            mean: histogram.mean(),
            p50: at(50.0),
            p90: at(90.0),
            p99: at(99.0),
            p99_9: at(99.9),
            p99_99: at(99.99),
            max: histogram.max(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_were_due_are_sent_after_the_end() {
        let long = Duration::from_secs(1000);
        let (late, window) = (open(Instant::now() - long, 1.0), Window::default());
        assert!(late.goes_on(&window, long) && Pace::Closed.goes_on(&window, long));
        window.since.set(Instant::now()).unwrap();
        window.end.set(Instant::now()).unwrap();
        assert!(late.goes_on(&window, long) && !Pace::Closed.goes_on(&window, long));
        // Not due before the end, or too late.
        assert!(!open(Instant::now() + long, 1.0).goes_on(&window, long) && !late.goes_on(&window, Duration::ZERO));
    }

    #[test]
    fn times_from_another_host_are_the_same() {
        let mut latencies = Latencies { unsent: 3, lost: 4, ..Latencies::default() };
        for ns in [0, 1, 999, 1_000_000, 123_456_789, u64::MAX] {
            latencies.record(Duration::from_nanos(ns));
        }
        let bytes = postcard::to_stdvec(&latencies).unwrap();
        let back: Latencies = postcard::from_bytes(&bytes).unwrap();
        assert_eq!((back.histogram, back.unsent, back.lost), (latencies.histogram, 3, 4));
    }

    fn open(begin: Instant, rate: f64) -> Pace {
        Pace::Open { begin, next: 0, rate }
    }

    #[test]
    fn flows_take_turns_and_are_due_at_fixed_times() {
        let flows = [0, 1].map(|flow| Pace::new(Some(10), flow, 2));
        let apart = flows[1].due() - flows[0].due();
        assert!(apart >= Duration::from_millis(100), "{apart:?}");
        let mut pace = open(Instant::now(), 5.0);
        let first = pace.due();
        pace.sent();
        assert_eq!(pace.due() - first, Duration::from_millis(200));
        let mut closed = Pace::new(None, 0, 1);
        closed.sent();
        assert!(closed.due() <= Instant::now());
    }

    /// A flow that could not send for the last second of a run at 1,000 requests a second.
    #[test]
    fn what_was_due_and_not_sent_counts_with_its_wait() {
        let end = Instant::now() - Duration::from_millis(100);
        let (window, mut latencies) = (Window::default(), Latencies::default());
        // What was due before the measured time does not count.
        window.since.set(end - Duration::from_millis(1000)).unwrap();
        window.end.set(end).unwrap();
        latencies.ended(&window, open(end - Duration::from_millis(1500), 1000.0));
        let report = Percentiles::from(&latencies);
        assert_eq!((report.requests, report.unsent, report.lost), (1000, 1000, 0));
        assert!((599_000_000..650_000_000).contains(&report.p50), "{report:?}");
        assert!((1_099_000_000..1_200_000_000).contains(&report.max), "{report:?}");
        latencies.ended(&window, Pace::Closed);
        latencies.answered(&window, end);
        assert_eq!(Percentiles::from(&latencies).requests, 1000);
        latencies.lost(&window, end - Duration::from_millis(1));
        latencies.add(&latencies.clone());
        let report = Percentiles::from(&latencies);
        assert_eq!((report.requests, report.unsent, report.lost), (2000, 2000, 2));
    }
}
