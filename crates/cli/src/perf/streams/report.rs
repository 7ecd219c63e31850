//! The results of flows between two ends: a table like that of kperf, and one JSON object for
//! programs.

use super::plan::{Between, Plan};
use crate::host::Accounting;
use crate::link::LinkReport;
use netmem_measure::load::Share;
use netmem_measure::machine::Machine;
use netmem_measure::report::{Done, SCHEMA};
use netmem_measure::stats::Spread;
use netmem_measure::table::table;
use netmem_measure::units::{show, show_spread};
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// One run.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// The received bytes of each flow.
    pub(super) bytes: Vec<u64>,
    pub(super) elapsed: Duration,
    pub(super) cpus: Vec<CpuRow>,
}

impl Sample {
    fn bits_per_s(&self, bytes: u64) -> f64 {
        bytes as f64 * 8e9 / self.elapsed.as_nanos().max(1) as f64
    }
}

/// A CPU of the measurement.
#[derive(Clone, Debug, Serialize)]
pub(super) struct CpuRow {
    pub(super) cpu: usize,
    pub(super) roles: Vec<&'static str>,
    #[serde(flatten)]
    pub(super) share: Share,
}

/// A flow, for all runs together.
#[derive(Debug, Serialize)]
struct Flow {
    flow: usize,
    bytes: u64,
    elapsed_ns: u64,
    bits_per_s: f64,
}

#[derive(Debug, Serialize)]
struct Params {
    proto: String,
    source: &'static str,
    target: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<String>,
    flows: u16,
    size: usize,
    duration_s: f64,
    runs: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<String>,
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    unit: &'static str,
    #[serde(flatten)]
    rate: Spread,
    mean: f64,
    deviation: f64,
    runs: usize,
    flows: Vec<Flow>,
    /// Means of the runs, in percent.
    cpus: Vec<CpuRow>,
    /// Run by run.
    samples: Vec<Run>,
}

/// One run of a row.
#[derive(Debug, Serialize)]
struct Run {
    bits_per_s: f64,
    bytes: u64,
    elapsed_ns: u64,
}

#[derive(Debug, Serialize)]
struct Pool {
    allocated: u64,
    leaked: u64,
}

/// The whole report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    schema: u32,
    netmem: &'static str,
    command: &'static str,
    machine: Machine,
    params: Params,
    done: Done,
    variants: Vec<Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<LinkReport>,
    pool: Pool,
}

/// The mean and the sample standard deviation (0 for one value).
fn mean(values: &[f64]) -> (f64, f64) {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, if values.len() > 1 { (squares / (n - 1.0)).sqrt() } else { 0.0 })
}

impl Report {
    pub(super) fn new(
        plan: &Plan,
        samples: &[Sample],
        done: Done,
        link: Option<LinkReport>,
        accounting: Accounting,
    ) -> Self {
        let rates: Vec<f64> = samples.iter().map(|sample| sample.bits_per_s(sample.bytes.iter().sum())).collect();
        let elapsed_ns = samples.iter().map(|sample| sample.elapsed.as_nanos() as u64).sum::<u64>();
        let flow = |flow| {
            let bytes = samples.iter().map(|sample| sample.bytes[flow]).sum::<u64>();
            Flow { flow, bytes, elapsed_ns, bits_per_s: bytes as f64 * 8e9 / elapsed_ns.max(1) as f64 }
        };
        let run = |sample: &Sample| {
            let bytes = sample.bytes.iter().sum();
            Run { bits_per_s: sample.bits_per_s(bytes), bytes, elapsed_ns: sample.elapsed.as_nanos() as u64 }
        };
        let cpus = samples.first().map_or(&[][..], |sample| &sample.cpus).iter().enumerate();
        let cpus = cpus.map(|(n, row)| {
            let shares: Vec<_> = samples.iter().map(|sample| sample.cpus[n].share).collect();
            CpuRow { share: Share::mean(&shares), ..row.clone() }
        });
        let [source, target] = plan.ends();
        let (rate_mean, deviation) = mean(&rates);
        let row = Row {
            name: format!("{}-{source}-{target}", plan.proto),
            unit: "b/s",
            rate: Spread::of(rates.iter().copied()),
            mean: rate_mean,
            deviation,
            runs: samples.len(),
            flows: (0..usize::from(plan.flows)).map(flow).collect(),
            cpus: cpus.collect(),
            samples: samples.iter().map(run).collect(),
        };
        let port = match &plan.between {
            Between::Ours => None,
            Between::Tap { name, .. } => Some(format!("tap:{name}")),
        };
        Self {
            schema: SCHEMA,
            netmem: env!("CARGO_PKG_VERSION"),
            command: "perf",
            machine: Machine::new("unknown".into()),
            params: Params {
                proto: plan.proto.to_string(),
                source,
                target,
                port,
                flows: plan.flows,
                size: plan.size,
                duration_s: plan.duration.as_secs_f64(),
                runs: plan.runs,
                link: plan.link.map(|link| link.to_string()),
            },
            done,
            variants: vec![row],
            link,
            // If pages were not returned, the run was an error, so nothing has leaked here.
            pool: Pool { allocated: accounting.allocated, leaked: 0 },
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (m, p) = (&self.machine, &self.params);
        let port = p.port.as_ref().map(|port| format!(" behind {port}")).unwrap_or_default();
        writeln!(f, "netmem {} · {} CPUs · Linux {} · percpu {}", self.netmem, m.cpus, m.kernel, m.percpu)?;
        writeln!(
            f,
            "{} · {} to {}{port} · {} flow(s), messages of {} bytes · {} run(s) of {} s\n",
            p.proto, p.source, p.target, p.flows, p.size, p.runs, p.duration_s
        )?;
        for row in &self.variants {
            let flows = row.flows.iter().map(|flow| {
                let [time, rate] = [show(flow.elapsed_ns as f64, "ns"), show(flow.bits_per_s, "b/s")];
                vec![flow.flow.to_string(), flow.bytes.to_string(), time, rate]
            });
            writeln!(f, "{}\n", table(&["flow", "bytes", "time", "rate"], flows, |_| true))?;
            writeln!(
                f,
                "all: mean {}, deviation {}; median {} of {} runs\n",
                show(row.mean, "b/s"),
                show(row.deviation, "b/s"),
                show_spread(&row.rate, "b/s"),
                row.runs
            )?;
            let cpus = row.cpus.iter().map(|cpu| {
                let Share { usr, sys, idle, irq, softirq, steal } = cpu.share;
                let shares = [usr, sys, idle, irq, softirq, steal].map(|share| format!("{share:.1}"));
                [&[cpu.cpu.to_string(), cpu.roles.join(", ")], &shares[..]].concat()
            });
            let head = ["CPU", "what", "usr %", "sys %", "idle %", "irq %", "softirq %", "steal %"];
            writeln!(f, "{}", table(&head, cpus, |column| column >= 2))?;
        }
        if let Some(link) = &self.link {
            writeln!(f, "{link}")?;
        }
        writeln!(f, "{}", self.done.lines())?;
        write!(f, "pages: {} lent, {} did not come back", self.pool.allocated, self.pool.leaked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_and_deviations() {
        assert_eq!(mean(&[2.0, 4.0, 4.0, 6.0]).0, 4.0);
        assert!((mean(&[2.0, 4.0, 4.0, 6.0]).1 - (8.0_f64 / 3.0).sqrt()).abs() < 1e-9);
        assert_eq!((mean(&[3.0]), mean(&[])), ((3.0, 0.0), (0.0, 0.0)));
    }
}
