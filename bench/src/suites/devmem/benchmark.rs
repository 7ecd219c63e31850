//! One variant in one direction, measured as fast as it goes and at a pace that all variants can
//! keep.
//!
//! Before the rounds, each variant runs three times as fast as it goes, and the best run counts.
//! The pace is seven tenths of what the slowest variant reached. CPU time is measured at that pace,
//! and datagrams come 64 at a time.

use super::directions::{Direction, FLOWS, MESSAGE};
use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Datagrams that become due together.
pub(super) const STEP: u64 = 64;

/// Connects a variant. Called when the variant is prepared.
pub(super) type Make = Box<dyn FnOnce() -> Result<Box<dyn Traffic>, BenchError>>;

/// What a run took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    /// From the first datagram to the end of the last one.
    pub(super) elapsed_ns: u64,
    /// Datagrams that reached the other end.
    pub(super) arrived: u64,
    pub(super) lost: u64,
    /// CPU time of turns in which there was something to do.
    pub(super) network_ns: u64,
    pub(super) application_ns: u64,
    /// Nanoseconds in which the network's thread did not have its CPU.
    pub(super) lost_ns: u64,
    /// The features that the measured side's driver and its device have negotiated.
    pub(super) features: u64,
}

impl Outcome {
    /// Adds another run of the same variant.
    pub(super) fn add(&mut self, more: &Self) {
        self.elapsed_ns += more.elapsed_ns;
        self.arrived += more.arrived;
        self.lost += more.lost;
        self.network_ns += more.network_ns;
        self.application_ns += more.application_ns;
        self.lost_ns += more.lost_ns;
        self.features = more.features;
    }

    /// The outcome of two lanes that ran at the same time: the CPU time of the second one counts as
    /// the application's.
    pub(super) fn in_parallel_with(&self, second: &Self) -> Self {
        Self {
            elapsed_ns: self.elapsed_ns.max(second.elapsed_ns),
            arrived: self.arrived + second.arrived,
            lost: self.lost + second.lost,
            network_ns: self.network_ns,
            application_ns: second.network_ns,
            lost_ns: self.lost_ns + second.lost_ns,
            features: self.features,
        }
    }

    pub(super) fn bits_per_s(&self, direction: Direction) -> f64 {
        (self.arrived * direction.unit() * 8) as f64 * 1e9 / self.elapsed_ns.max(1) as f64
    }

    /// Nanoseconds of CPU time per gigabyte, for the network and for the application. When
    /// receiving, the network has also handled the lost datagrams.
    pub(super) fn each(&self, direction: Direction) -> [f64; 2] {
        let each = |ns: u64, units: u64| ns as f64 * 1e9 / (units * direction.unit()).max(1) as f64;
        let came = match direction {
            Direction::Transmit => self.arrived + self.lost,
            _ => self.arrived,
        };
        [each(self.network_ns, self.arrived + self.lost), each(self.application_ns, came)]
    }
}

/// The traffic of a variant.
pub(super) trait Traffic {
    /// Moves this many datagrams, from each flow in turn: one datagram every `pace_ns`, or as fast
    /// as it goes.
    fn run(&mut self, harness: &Harness, datagrams: u64, pace_ns: Option<f64>) -> Result<Outcome, BenchError>;
}

/// The pace of all variants in a direction.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Nanoseconds for a datagram of the slowest variant.
    slowest_ns: AtomicU64,
}

impl Pace {
    /// Reports that a variant needs `ns` for a datagram.
    pub(super) fn saw(&self, ns: u64) {
        self.slowest_ns.fetch_max(ns.max(1), Ordering::Relaxed);
    }

    /// Nanoseconds from one datagram to the next.
    pub(super) fn ns(&self) -> f64 {
        self.slowest_ns.load(Ordering::Relaxed) as f64 / 0.7
    }
}

/// The benchmark.
pub(super) struct EndToEnd {
    variant: &'static str,
    heads: Vec<Head>,
    direction: Direction,
    pace: Arc<Pace>,
    make: Option<Make>,
    traffic: Option<Box<dyn Traffic>>,
    datagrams: u64,
}

impl EndToEnd {
    pub(super) fn benchmark(
        variant: &'static str,
        heads: Vec<Head>,
        direction: Direction,
        pace: Arc<Pace>,
        make: Make,
    ) -> Box<dyn Benchmark> {
        let datagrams = MESSAGE * FLOWS as u64;
        Box::new(Self { variant, heads, direction, pace, make: Some(make), traffic: None, datagrams })
    }
}

impl Benchmark for EndToEnd {
    fn heads(&self) -> Vec<Head> {
        self.heads.clone()
    }

    fn prepare(&mut self, harness: &Harness) -> Result<(), BenchError> {
        let Some(make) = self.make.take() else { return Ok(()) };
        let traffic = self.traffic.insert(make()?);
        // The first run is not measured: it touches pages of memory for the first time.
        traffic.run(harness, self.datagrams, None).map_err(|e| named(e, self.variant))?;
        // Something else may have slowed a run down, so the best of three counts.
        let mut best_ns = u64::MAX;
        for _ in 0..3 {
            let outcome = traffic.run(harness, self.datagrams, None).map_err(|e| named(e, self.variant))?;
            best_ns = best_ns.min(outcome.elapsed_ns / outcome.arrived.max(1));
        }
        self.pace.saw(best_ns);
        // A value needs two runs, and one of them is slower. Each gets about half of the time.
        let more = harness.duration_ns() / (2 * best_ns * self.datagrams).max(1);
        self.datagrams *= more.clamp(1, 64);
        Ok(())
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let Some(traffic) = &mut self.traffic else { return Ok(Vec::new()) };
        let mut run = |pace| traffic.run(harness, self.datagrams, pace).map_err(|e| named(e, self.variant));
        let (fast, paced) = (run(None)?, run(Some(self.pace.ns()))?);
        let (lost, arrived) = (fast.lost + paced.lost, fast.arrived + paced.arrived);
        let loss = lost as f64 / (lost + arrived).max(1) as f64 * 100.0;
        let [network, application] = paced.each(self.direction);
        let sample = |value, of: &[Outcome]| {
            let arrived = of.iter().map(|outcome| outcome.arrived).sum::<u64>();
            Sample {
                value,
                lost_ns: of.iter().map(|outcome| outcome.lost_ns).sum(),
                elapsed_ns: Some(of.iter().map(|outcome| outcome.elapsed_ns).sum()),
                packets: Some(arrived),
                bytes: Some(arrived * self.direction.unit()),
                features: fast.features,
                ..Sample::default()
            }
        };
        let (full, cpu) = (sample(fast.bits_per_s(self.direction), &[fast]), |ns| sample(ns, &[paced]));
        let loss = sample(loss, &[fast, paced]);
        Ok(vec![full, cpu(network), cpu(application), cpu(network + application), loss])
    }

    fn note(&self) -> Option<String> {
        self.traffic.as_ref()?;
        let pace = self.direction.unit() as f64 * 8.0 / self.pace.ns();
        let idle = match self.direction {
            Direction::Transmit => "; no token takes part: rows that differ in tokens alone do the same",
            _ => "",
        };
        Some(format!("CPU time at {pace:.1} Gb/s; the device took turns with the network on its CPU{idle}"))
    }
}

/// The error with the variant's name.
fn named(error: BenchError, variant: &str) -> BenchError {
    match error {
        BenchError::Devmem { sent, arrived, held, freed, .. } => {
            BenchError::Devmem { variant: variant.to_owned(), sent, arrived, held, freed }
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gigabyte_costs_what_its_datagrams_do() {
        let (elapsed_ns, arrived, lost) = (1000, 2, 2);
        let outcome = Outcome { elapsed_ns, arrived, lost, network_ns: 500, application_ns: 300, ..Outcome::default() };
        assert!((outcome.bits_per_s(Direction::Receive) / 1e9 - 2.0 * 1472.0 * 8.0 / 1000.0).abs() < 1e-9);
        // 500 ns are for four datagrams. 300 ns are for two datagrams when receiving, and for four
        // when sending. The result is nanoseconds per gigabyte.
        let check =
            |got: [f64; 2], ns: [f64; 2]| got.iter().zip(ns).all(|(got, ns)| (got * 1.472 - ns * 1e9).abs() < 1.0);
        assert!(check(outcome.each(Direction::Receive), [0.125, 0.15]), "{:?}", outcome.each(Direction::Receive));
        assert!(check(outcome.each(Direction::Transmit), [0.125, 0.075]));
    }

    #[test]
    fn runs_add_up_and_lanes_work_at_the_same_time() {
        let run = |elapsed_ns, network_ns| Outcome { elapsed_ns, arrived: 10, network_ns, ..Outcome::default() };
        let mut both = run(1000, 300).in_parallel_with(&run(900, 500));
        assert_eq!((both.elapsed_ns, both.arrived, both.network_ns, both.application_ns), (1000, 20, 300, 500));
        both.add(&run(500, 200).in_parallel_with(&run(600, 100)));
        assert_eq!((both.elapsed_ns, both.arrived, both.network_ns, both.application_ns), (1600, 40, 500, 600));
        // A gigabyte of a stream: 500 ns and 600 ns for 40 segments of 1448 bytes.
        let [first, second] = both.each(Direction::StreamTransmit);
        assert!((first * 57_920.0 - 500e9).abs() < 1.0 && (second * 57_920.0 - 600e9).abs() < 1.0);
        assert!((both.bits_per_s(Direction::StreamTransmit) / 1e9 - 57_920.0 * 8.0 / 1600.0).abs() < 1e-9);
    }

    #[test]
    fn everybody_can_keep_the_pace_of_all() {
        let pace = Pace::default();
        [350, 700, 500].into_iter().for_each(|ns| pace.saw(ns));
        assert!((pace.ns() - 1000.0).abs() < 1e-9);
    }
}
