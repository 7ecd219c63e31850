//! The measurements of two ends: bulk, requests, the cost of a segment and of a byte, connections
//! of HTTP.

use super::end::Idle;
use super::http::Http;
use super::rig::{HEADERS, Link, MTU, Offloads};
use super::run::{Env, Path, Program, Run, Took};
use super::turns::Turns;
use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use std::sync::Arc;
use std::time::Duration;

/// MTUs at which the cost of a segment is measured.
const MTUS: [u16; 4] = [300, 600, 1000, MTU];

fn suffix(idle: Idle) -> &'static str {
    match idle {
        Idle::Sleeps => "sleeping",
        Idle::Polls => "polling",
    }
}

fn head(name: String, section: &'static str, per: &'static str, unit: &'static str) -> Head {
    Head { name, section, threads: 2, per, unit, ..Head::default() }
}

/// A value, and how long its measurement took.
fn sample(value: f64, took: &Took) -> Sample {
    let elapsed_ns = u64::try_from(took.elapsed.as_nanos()).ok();
    let requests = (!took.times.is_empty()).then(|| took.times.len());
    let (bytes, features) = (Some(took.bytes), took.features);
    Sample { value, elapsed_ns, operations: requests, bytes, features, ..Sample::default() }
}

/// The common part of the benchmarks in this module.
#[derive(Clone)]
struct Case {
    env: Arc<Env>,
    path: Path,
    link: Link,
    idle: Idle,
    program: Program,
}

impl Case {
    fn name(&self) -> String {
        format!("{}_{}", self.path.name(), suffix(self.idle))
    }

    fn can_run(&self) -> Result<(), BenchError> {
        let unavailable = |why| BenchError::Unavailable { what: "streams", why };
        self.env.can_run(self.path).map_err(unavailable)?;
        if self.path == Path::Taps && self.idle == Idle::Polls && self.env.cpus.len() < 3 {
            let why = "both ends and the thread that carries frames poll: three CPUs are needed";
            return Err(unavailable(why.into()));
        }
        Ok(())
    }

    fn run(&self, link: Link, ns: u64) -> Result<Took, BenchError> {
        let (env, duration) = (&*self.env, Duration::from_nanos(ns));
        let run = Run { env, path: self.path, program: self.program, link, idle: self.idle, duration };
        run.run().map_err(|source| BenchError::Stream { variant: self.name(), source })
    }

    fn note(&self) -> Option<String> {
        (self.path == Path::Taps)
            .then(|| "a third thread carries frames from tap to tap, and its CPU time is counted".into())
    }
}

/// A sender and a receiver.
struct Bulk(Case);

impl Bulk {
    fn sections(&self) -> [&'static str; 2] {
        match (self.0.link.offloads, self.0.program) {
            (Offloads::None, Program::Stream) => ["bulk, dropped at once: throughput", "bulk, dropped at once: CPU"],
            (Offloads::None, _) => ["bulk: throughput", "bulk: CPU"],
            (Offloads::Checksums, _) => ["bulk with checksum offload: throughput", "bulk with checksum offload: CPU"],
            (Offloads::All, _) => ["bulk with offloads: throughput", "bulk with offloads: CPU"],
        }
    }
}

impl Benchmark for Bulk {
    fn heads(&self) -> Vec<Head> {
        let [throughput, cpu] = self.sections();
        vec![head(self.0.name(), throughput, "connection", "b/s"), head(self.0.name(), cpu, "GB", "ns")]
    }

    fn prepare(&mut self, _harness: &Harness) -> Result<(), BenchError> {
        self.0.can_run()
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let took = self.0.run(self.0.link, harness.duration_ns())?;
        let bytes = took.bytes.max(1) as f64;
        let (rate, cpu_ns) = (bytes * 8.0 / took.elapsed.as_secs_f64(), took.cpu_ns as f64 * 1e9 / bytes);
        Ok(vec![sample(rate, &took), sample(cpu_ns, &took)])
    }

    fn takes(&self, duration: Duration) -> Duration {
        Run::takes(duration)
    }

    fn note(&self) -> Option<String> {
        let more = self.0.note().map(|note| format!("; {note}"));
        Some(self.0.env.memory(self.0.program).note() + &more.unwrap_or_default())
    }
}

/// A client with one request in flight, and a server.
struct Requests(Case);

impl Benchmark for Requests {
    fn heads(&self) -> Vec<Head> {
        ["requests: median", "requests: 99 % are faster"]
            .map(|section| head(self.0.name(), section, "request", "ns"))
            .into()
    }

    fn prepare(&mut self, _harness: &Harness) -> Result<(), BenchError> {
        self.0.can_run()
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let took = self.0.run(self.0.link, harness.duration_ns())?;
        Ok([0.5, 0.99].map(|part| sample(took.times.value_at_quantile(part) as f64, &took)).into())
    }

    fn takes(&self, duration: Duration) -> Duration {
        Run::takes(duration)
    }

    fn note(&self) -> Option<String> {
        self.0.note()
    }
}

/// Bulk with segments of several lengths. Threads sleep when they are idle, so that all CPU time is
/// work.
struct CostLine(Case);

/// The least-squares line through some points: its value at 0, and its slope.
fn line(points: &[(f64, f64)]) -> (f64, f64) {
    let n = points.len().max(1) as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let spread: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
    let slope = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum::<f64>() / spread.max(f64::MIN_POSITIVE);
    (y - slope * x, slope)
}

impl Benchmark for CostLine {
    fn heads(&self) -> Vec<Head> {
        let row = |(section, per)| head(self.0.path.name().into(), section, per, "ns");
        [("cost of a segment", "segment"), ("cost of a byte", "byte")].map(row).into()
    }

    fn prepare(&mut self, _harness: &Harness) -> Result<(), BenchError> {
        self.0.can_run()
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let (mut points, mut elapsed_ns, mut bytes, mut features) = (Vec::new(), 0, 0, 0);
        for mtu in MTUS {
            let took = self.0.run(Link { mtu, ..self.0.link }, harness.duration_ns() / 2)?;
            elapsed_ns += u64::try_from(took.elapsed.as_nanos()).unwrap_or(0);
            bytes += took.bytes;
            features = took.features;
            let payload = f64::from(mtu - HEADERS);
            points.push((payload, took.cpu_ns as f64 * payload / took.bytes.max(1) as f64));
        }
        let (segment, byte) = line(&points);
        let bytes = Some(bytes);
        let sample = |value| Sample { value, elapsed_ns: Some(elapsed_ns), bytes, features, ..Sample::default() };
        Ok(vec![sample(segment), sample(byte)])
    }

    fn takes(&self, duration: Duration) -> Duration {
        MTUS.len() as u32 * Run::takes(duration / 2)
    }

    /// A value is a line through several runs.
    fn is_long(&self) -> bool {
        true
    }
}

/// All measurements of two ends.
pub(super) fn benchmarks(env: &Arc<Env>) -> Vec<Box<dyn Benchmark>> {
    let case = |program, path, offloads, idle| Case {
        env: env.clone(),
        path,
        link: Link { mtu: MTU, offloads },
        idle,
        program,
    };
    let (bulk, stream, requests) = (Program::Bulk, Program::Stream, Program::Requests);
    let mut benchmarks: Vec<Box<dyn Benchmark>> = Vec::new();
    for idle in [Idle::Sleeps, Idle::Polls] {
        for path in [Path::Ours, Path::Veth, Path::Smoltcp, Path::OursToKernel, Path::KernelToOurs, Path::Taps] {
            benchmarks.push(Box::new(Bulk(case(bulk, path, Offloads::None, idle))));
        }
    }
    for idle in [Idle::Sleeps, Idle::Polls] {
        for path in [Path::Ours, Path::Veth, Path::Smoltcp] {
            benchmarks.push(Box::new(Bulk(case(stream, path, Offloads::None, idle))));
            benchmarks.push(Box::new(Bulk(case(bulk, path, Offloads::Checksums, idle))));
        }
    }
    for idle in [Idle::Sleeps, Idle::Polls] {
        for path in [Path::Ours, Path::Veth, Path::OursToKernel, Path::KernelToOurs, Path::Taps] {
            benchmarks.push(Box::new(Bulk(case(bulk, path, Offloads::All, idle))));
        }
    }
    for idle in [Idle::Polls, Idle::Sleeps] {
        for path in [Path::Ours, Path::Veth, Path::Smoltcp, Path::KernelToOurs, Path::Taps] {
            benchmarks.push(Box::new(Requests(case(requests, path, Offloads::None, idle))));
        }
    }
    for path in [Path::Ours, Path::Veth, Path::Smoltcp] {
        benchmarks.push(Box::new(CostLine(case(bulk, path, Offloads::None, Idle::Sleeps))));
    }
    for path in [Path::Ours, Path::Veth] {
        benchmarks.push(Box::new(Http::new(env, path)));
    }
    for program in [bulk, requests] {
        for path in [Path::Ours, Path::Smoltcp] {
            benchmarks.push(Box::new(Turns::new(path, program)));
        }
    }
    benchmarks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_height_and_a_slope() {
        let (height, slope) = line(&[(100.0, 520.0), (500.0, 600.0), (1000.0, 700.0)]);
        assert!((height - 500.0).abs() < 1e-9 && (slope - 0.2).abs() < 1e-9, "{height} {slope}");
    }
}
