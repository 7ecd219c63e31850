//! A variant in one direction: as fast as it goes, and at the pace of all.
//!
//! Before the rounds each variant is run as fast as it goes, the best of three. All of them can keep to seven tenths of what the slowest did: that is
//! the pace at which CPU time is taken, datagrams coming 64 at a time.

use super::{Direction, FLOWS, MESSAGE, Make, PAYLOAD};
use crate::bench::error::BenchError;
use crate::bench::lab::Lab;
use crate::bench::report::{Head, Sample};
use crate::bench::rounds::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Datagrams that become due together.
pub(super) const STEP: u64 = 64;

/// What a run took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    /// From the first datagram to the last one's end.
    pub(super) elapsed_ns: u64,
    /// Datagrams that reached the other end.
    pub(super) arrived: u64,
    pub(super) lost: u64,
    /// CPU time of turns in which there was something to do.
    pub(super) network_ns: u64,
    pub(super) application_ns: u64,
    /// How long something else had the network's CPU.
    pub(super) lost_ns: u64,
}

impl Outcome {
    fn gigabits(&self) -> f64 {
        (self.arrived * PAYLOAD * 8) as f64 / self.elapsed_ns.max(1) as f64
    }

    /// Milliseconds that a gigabyte took the network, and the application: what a receiver lost the network had handled.
    fn each(&self, direction: Direction) -> [f64; 2] {
        let each = |ns: u64, datagrams: u64| ns as f64 * 1e3 / (datagrams * PAYLOAD).max(1) as f64;
        let came = match direction {
            Direction::Receive => self.arrived,
            Direction::Transmit => self.arrived + self.lost,
        };
        [each(self.network_ns, self.arrived + self.lost), each(self.application_ns, came)]
    }
}

/// What a variant does.
pub(super) trait Traffic {
    /// Moves so many datagrams, in turns from the flows, a datagram each so many nanoseconds, or as fast as it goes.
    fn run(&mut self, lab: &Lab, datagrams: u64, pace_ns: Option<f64>) -> Result<Outcome, BenchError>;
}

/// The pace of all variants in a direction.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Nanoseconds for a datagram where that takes longest.
    slowest_ns: AtomicU64,
}

impl Pace {
    /// A variant can take so long for a datagram.
    fn saw(&self, ns: u64) {
        self.slowest_ns.fetch_max(ns.max(1), Ordering::Relaxed);
    }

    /// Nanoseconds from one datagram to the next.
    fn ns(&self) -> f64 {
        self.slowest_ns.load(Ordering::Relaxed) as f64 / 0.7
    }
}

/// The cell.
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
    pub(super) fn cell(
        variant: &'static str,
        heads: Vec<Head>,
        direction: Direction,
        pace: Arc<Pace>,
        make: Make,
    ) -> Box<dyn Cell> {
        let datagrams = MESSAGE * FLOWS as u64;
        Box::new(Self { variant, heads, direction, pace, make: Some(make), traffic: None, datagrams })
    }
}

impl Cell for EndToEnd {
    fn heads(&self) -> Vec<Head> {
        self.heads.clone()
    }

    fn prepare(&mut self, lab: &Lab) -> Result<(), BenchError> {
        let Some(make) = self.make.take() else { return Ok(()) };
        let traffic = self.traffic.insert(make()?);
        // Whatever comes first, pages of memory included.
        traffic.run(lab, self.datagrams, None).map_err(|e| named(e, self.variant))?;
        // Something else may have stretched a run.
        let mut best_ns = u64::MAX;
        for _ in 0..3 {
            let outcome = traffic.run(lab, self.datagrams, None).map_err(|e| named(e, self.variant))?;
            best_ns = best_ns.min(outcome.elapsed_ns / outcome.arrived.max(1));
        }
        self.pace.saw(best_ns);
        // A value is of two runs, one of which is slower: about half of the time for each.
        let more = lab.duration_ns() / (2 * best_ns * self.datagrams).max(1);
        self.datagrams *= more.clamp(1, 64);
        Ok(())
    }

    fn measure(&mut self, lab: &Lab) -> Result<Vec<Sample>, BenchError> {
        let Some(traffic) = &mut self.traffic else { return Ok(Vec::new()) };
        let mut run = |pace| traffic.run(lab, self.datagrams, pace).map_err(|e| named(e, self.variant));
        let (fast, paced) = (run(None)?, run(Some(self.pace.ns()))?);
        let (lost, arrived) = (fast.lost + paced.lost, fast.arrived + paced.arrived);
        let loss = lost as f64 / (lost + arrived).max(1) as f64 * 100.0;
        let [network, application] = paced.each(self.direction);
        let values = [fast.gigabits(), network, application, network + application, loss];
        let lost_ns = fast.lost_ns + paced.lost_ns;
        Ok(values.map(|value| Sample { value, tsc: None, lost_ns }).into())
    }

    fn note(&self) -> Option<String> {
        self.traffic.as_ref()?;
        let pace = PAYLOAD as f64 * 8.0 / self.pace.ns();
        let idle = match self.direction {
            Direction::Receive => "",
            Direction::Transmit => "; no token takes part: rows that differ in tokens alone do the same",
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
        let outcome = Outcome { elapsed_ns, arrived, lost, network_ns: 500, application_ns: 300, lost_ns: 0 };
        assert!((outcome.gigabits() - 2.0 * 1472.0 * 8.0 / 1000.0).abs() < 1e-9);
        // 500 ns for four datagrams; 300 ns for two of a receiver, or four of a sender: milliseconds for a gigabyte.
        let check =
            |got: [f64; 2], ns: [f64; 2]| got.iter().zip(ns).all(|(got, ns)| (got * 1.472 - ns * 1e3).abs() < 1e-6);
        assert!(check(outcome.each(Direction::Receive), [0.125, 0.15]), "{:?}", outcome.each(Direction::Receive));
        assert!(check(outcome.each(Direction::Transmit), [0.125, 0.075]));
    }

    #[test]
    fn everybody_can_keep_the_pace_of_all() {
        let pace = Pace::default();
        [350, 700, 500].into_iter().for_each(|ns| pace.saw(ns));
        assert!((pace.ns() - 1000.0).abs() < 1e-9);
    }
}
