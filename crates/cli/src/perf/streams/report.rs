//! The results of flows between two ends: a table like that of kperf, and one JSON object for
//! programs.

use super::pace::{Latencies, Percentiles, ns};
use super::plan::{Between, CpuRow, Plan, Proto, Work};
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

/// The least CPU time of which a part is reported: ten ticks of 10 ms.
const LEAST_CPU_NS: f64 = 1e8;

/// The runs at a rate.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// Messages of all flows in a second; as many as possible without it.
    pub(super) rate: Option<u64>,
    pub(super) samples: Vec<Sample>,
}

/// One run.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// What each flow has received: bytes, or answers.
    pub(super) amounts: Vec<u64>,
    pub(super) elapsed: Duration,
    pub(super) intervals: Vec<Interval>,
    /// Datagrams that were sent in this time.
    pub(super) sent: u64,
    /// Datagrams that were sent before the run ended, and those of them that arrived.
    pub(super) datagrams: [u64; 2],
    pub(super) latencies: Latencies,
    /// CPU time that was used.
    pub(super) cpu_ns: f64,
    pub(super) cpus: Vec<CpuRow>,
}

/// The CPU time that CPUs were used for.
pub(super) fn cpu_ns(cpus: &[CpuRow], elapsed: Duration) -> f64 {
    cpus.iter().map(|row| row.share.busy() / 100.0).sum::<f64>() * elapsed.as_nanos() as f64
}

/// A part of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interval {
    /// Its end, from the beginning of the run.
    pub(super) until: Duration,
    pub(super) took: Duration,
    /// Bytes or answers.
    pub(super) amount: u64,
}

impl Sample {
    fn amount(&self) -> u64 {
        self.amounts.iter().sum()
    }

    /// All flows together, in the unit of the work.
    fn rate(&self, work: &Work) -> f64 {
        work.rate(self.amount(), self.elapsed)
    }

    /// Requests that were answered in a second, or datagrams that were sent.
    pub(super) fn begun_per_s(&self, work: &Work) -> f64 {
        per_s(if work.answer.is_some() { self.amount() } else { self.sent }, self.elapsed)
    }
}

impl Interval {
    /// A line about it, in a row at this rate.
    pub(super) fn show(&self, work: &Work, rate: Option<u64>) -> String {
        let row = rate.map(|rate| format!(" at {rate}/s")).unwrap_or_default();
        let rate = show(work.rate(self.amount, self.took), work.unit());
        let per_s = if work.answer.is_some() { " requests/s" } else { "" };
        format!("{:8.2} s{row}: {rate}{per_s}", self.until.as_secs_f64())
    }
}

fn per_s(amount: u64, time: Duration) -> f64 {
    amount as f64 * 1e9 / time.as_nanos().max(1) as f64
}

impl Work {
    /// The unit of rates.
    fn unit(&self) -> &'static str {
        if self.answer.is_some() { "requests/s" } else { "b/s" }
    }

    /// What a message or a request a second is in this unit.
    pub(super) fn message(&self) -> f64 {
        if self.answer.is_some() { 1.0 } else { 8.0 * self.size as f64 }
    }

    /// A rate in this unit, of bytes or answers in a time.
    fn rate(&self, amount: u64, time: Duration) -> f64 {
        per_s(amount, time) * if self.answer.is_some() { 1.0 } else { 8.0 }
    }

    /// The bytes that are received with such an amount, in both directions.
    fn bytes(&self, amount: u64) -> u64 {
        self.answer.map_or(amount, |answer| amount.saturating_mul((self.size + answer) as u64))
    }
}

/// A flow, for all runs together.
#[derive(Debug, Serialize)]
struct Flow {
    flow: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<u64>,
    bytes: u64,
    elapsed_ns: u64,
    bits_per_s: f64,
}

#[derive(Debug, Serialize)]
struct Params {
    proto: &'static str,
    source: &'static str,
    target: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<String>,
    flows: u16,
    size: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    search: Option<String>,
    duration_s: f64,
    runs: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Row {
    name: String,
    /// Messages or requests a second that were planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    asked: Option<u64>,
    unit: &'static str,
    #[serde(flatten)]
    rate: Spread,
    mean: f64,
    deviation: f64,
    runs: usize,
    /// Of requests, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_ns: Option<Percentiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    datagrams: Option<Datagrams>,
    /// Of a gigabyte of received bytes, or of a request, on all CPUs of the measurement: the mean.
    /// `None` if the kernel's ticks are too coarse for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_ns: Option<CpuTime>,
    flows: Vec<Flow>,
    /// Means of the runs, in percent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cpus: Vec<CpuRow>,
    /// Run by run.
    samples: Vec<Run>,
}

/// CPU time, and what it was used for.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum CpuTime {
    PerGigabyte(f64),
    PerRequest(f64),
}

/// Datagrams, from the first run's beginning to its end and so on.
#[derive(Debug, Serialize)]
struct Datagrams {
    sent: u64,
    arrived: u64,
}

/// One run of a row.
#[derive(Debug, Serialize)]
struct Run {
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<u64>,
    bits_per_s: f64,
    bytes: u64,
    elapsed_ns: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    intervals: Vec<Part>,
}

/// A part of a run.
#[derive(Debug, Serialize)]
struct Part {
    until_ns: u64,
    /// In the unit of the row.
    rate: f64,
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
    /// The result of a search: the highest rate that reached the goal, or 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    highest: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<LinkReport>,
    pool: Pool,
}

/// The table of what CPUs did: the first column, what each is for, and its shares.
pub(super) fn write_shares(
    first: &str,
    rows: impl Iterator<Item = (String, String, Share)>,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    let head = [first, "what", "usr %", "sys %", "idle %", "iowait %", "irq %", "softirq %", "steal %"];
    let rows = rows.map(|(first, what, share)| {
        let Share { usr, sys, idle, iowait, irq, softirq, steal } = share;
        let shares = [usr, sys, idle, iowait, irq, softirq, steal].map(|share| format!("{share:.1}"));
        [&[first, what], &shares[..]].concat()
    });
    writeln!(f, "{}\n", table(&head, rows, |column| column != 1))
}

/// The result of a search, if there was one.
pub(super) fn write_highest(highest: Option<u64>, goal: Option<&str>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match (highest, goal) {
        (Some(0), Some(goal)) => writeln!(f, "no rate reaches {goal}\n"),
        (Some(rate), Some(goal)) => writeln!(f, "highest rate with {goal}: {rate}/s\n"),
        _ => Ok(()),
    }
}

/// The messages of a measurement.
pub(super) fn what(size: usize, answer: Option<usize>) -> String {
    match answer {
        None => format!("messages of {size} bytes"),
        Some(answer) => format!("requests of {size} bytes, answers of {answer}"),
    }
}

/// The mean and the sample standard deviation (0 for one value).
fn mean(values: &[f64]) -> (f64, f64) {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, if values.len() > 1 { (squares / (n - 1.0)).sqrt() } else { 0.0 })
}

impl Row {
    pub(super) fn new(work: &Work, [source, target]: [&str; 2], measured: &Measured) -> Self {
        let Measured { rate, samples } = measured;
        let rates: Vec<f64> = samples.iter().map(|sample| sample.rate(work)).collect();
        let elapsed = samples.iter().map(|sample| sample.elapsed).sum();
        let is_rr = work.answer.is_some();
        let bits_per_s = |bytes: u64, time| per_s(bytes, time) * 8.0;
        let flow = |flow| {
            let amount = samples.iter().map(|sample| sample.amounts[flow]).sum::<u64>();
            let (bytes, requests) = (work.bytes(amount), is_rr.then_some(amount));
            Flow { flow, requests, bytes, elapsed_ns: ns(elapsed), bits_per_s: bits_per_s(bytes, elapsed) }
        };
        let part = |part: &Interval| Part { until_ns: ns(part.until), rate: work.rate(part.amount, part.took) };
        let run = |sample: &Sample| {
            let bytes = work.bytes(sample.amount());
            Run {
                requests: is_rr.then(|| sample.amount()),
                bits_per_s: bits_per_s(bytes, sample.elapsed),
                bytes,
                elapsed_ns: ns(sample.elapsed),
                intervals: sample.intervals.iter().map(part).collect(),
            }
        };
        let cpus = samples.first().map_or(&[][..], |sample| &sample.cpus).iter().enumerate();
        let cpus = cpus.map(|(n, row)| {
            let shares: Vec<_> = samples.iter().map(|sample| sample.cpus[n].share).collect();
            CpuRow { share: Share::mean(&shares), ..row.clone() }
        });
        let latencies = samples.iter().fold(Latencies::default(), |mut all, sample| {
            all.add(&sample.latencies);
            all
        });
        let datagrams = samples.iter().fold([0; 2], |sum, sample| [0, 1].map(|n| sum[n] + sample.datagrams[n]));
        let [sent, arrived] = datagrams;
        let cpu_ns = samples.iter().map(|sample| sample.cpu_ns).sum::<f64>();
        let amount = samples.iter().map(Sample::amount).sum::<u64>().max(1) as f64;
        let (mean, deviation) = mean(&rates);
        let what = if is_rr { "-rr" } else { "" };
        Self {
            name: format!("{}{what}-{source}-{target}", work.proto.name()),
            asked: *rate,
            unit: work.unit(),
            rate: Spread::of(rates.iter().copied()),
            mean,
            deviation,
            runs: samples.len(),
            latency_ns: is_rr.then(|| Percentiles::from(&latencies)),
            datagrams: (work.proto == Proto::Udp && !is_rr).then_some(Datagrams { sent, arrived }),
            cpu_ns: (cpu_ns >= LEAST_CPU_NS).then(|| match is_rr {
                true => CpuTime::PerRequest(cpu_ns / amount),
                false => CpuTime::PerGigabyte(cpu_ns * 1e9 / amount),
            }),
            flows: (0..samples.first().map_or(0, |sample| sample.amounts.len())).map(flow).collect(),
            cpus: cpus.collect(),
            samples: samples.iter().map(run).collect(),
        }
    }

    /// The rate that was planned.
    fn asked(&self) -> String {
        let unlimited = if self.latency_ns.is_some() { "closed loop" } else { "no limit" };
        self.asked.map_or_else(|| unlimited.into(), |rate| format!("{rate}/s"))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The table of the flows, with two columns more for labels of each, and the mean of the runs.
    pub(super) fn write_flows(
        &self,
        labels: Option<([&str; 2], &[[String; 2]])>,
        f: &mut fmt::Formatter<'_>,
    ) -> fmt::Result {
        let flows = self.flows.iter().enumerate().map(|(n, flow)| {
            let [time, rate] = [show(flow.elapsed_ns as f64, "ns"), show(flow.bits_per_s, "b/s")];
            let mut cells = vec![flow.flow.to_string()];
            cells.extend(labels.iter().filter_map(|(_, labels)| labels.get(n)).flatten().cloned());
            cells.extend([flow.bytes.to_string(), time, rate]);
            cells.extend(flow.requests.map(|requests| requests.to_string()));
            cells
        });
        let mut head = vec!["flow"];
        head.extend(labels.iter().flat_map(|(head, _)| head));
        head.extend(["bytes", "time", "rate"]);
        head.extend(self.latency_ns.is_some().then_some("requests"));
        writeln!(f, "{}\n", table(&head, flows, |_| true))?;
        let [mean, deviation] = [self.mean, self.deviation].map(|value| show(value, self.unit));
        let median = show_spread(&self.rate, self.unit);
        writeln!(f, "all: mean {mean}, deviation {deviation}; median {median} of {} runs\n", self.runs)
    }

    /// The row in the table of rates.
    pub(super) fn cells(&self) -> Vec<String> {
        let mut cells = vec![self.asked(), show_spread(&self.rate, self.unit)];
        if let Some(times) = &self.latency_ns {
            let Percentiles { p50, p90, p99, p99_9, p99_99, max, .. } = *times;
            cells.extend([p50, p90, p99, p99_9, p99_99, max].map(|ns| show(ns as f64, "ns")));
            cells.extend([times.unsent, times.lost].map(|n| n.to_string()));
        }
        if let Some(Datagrams { sent, arrived }) = &self.datagrams {
            cells.extend([sent.to_string(), sent.saturating_sub(*arrived).to_string()]);
        }
        cells.push(
            self.cpu_ns
                .map_or_else(|| "-".into(), |(CpuTime::PerGigabyte(ns) | CpuTime::PerRequest(ns))| show(ns, "ns")),
        );
        cells
    }

    pub(super) fn head(&self) -> Vec<&'static str> {
        let (rate, cpu) =
            if self.latency_ns.is_some() { ("requests/s", "CPU/request") } else { ("received", "CPU/GB") };
        let times = ["50 %", "90 %", "99 %", "99.9 %", "99.99 %", "max", "unsent", "lost"];
        let times = if self.latency_ns.is_some() { &times[..] } else { &[] };
        let datagrams = if self.datagrams.is_some() { &["sent", "lost"][..] } else { &[] };
        [&["rate", rate][..], times, datagrams, &[cpu]].concat()
    }
}

impl Report {
    pub(super) fn new(
        plan: &Plan,
        rows: &[Measured],
        found: Option<Option<u64>>,
        done: Done,
        link: Option<LinkReport>,
        accounting: Accounting,
    ) -> Self {
        let [source, target] = plan.ends();
        let port = match &plan.between {
            Between::Ours => None,
            Between::Tap { name, .. } => Some(format!("tap:{name}")),
        };
        let rows = rows.iter().filter(|row| !row.samples.is_empty());
        Self {
            schema: SCHEMA,
            netmem: env!("CARGO_PKG_VERSION"),
            command: "perf",
            machine: Machine::new("unknown".into()),
            params: Params {
                proto: plan.work.proto.name(),
                source,
                target,
                port,
                flows: plan.flows,
                size: plan.work.size,
                answer: plan.work.answer,
                search: plan.search.map(|goal| goal.to_string()),
                duration_s: plan.duration.as_secs_f64(),
                runs: plan.runs,
                link: plan.link.map(|link| link.to_string()),
            },
            done,
            variants: rows.map(|row| Row::new(&plan.work, plan.ends(), row)).collect(),
            highest: found.map(Option::unwrap_or_default),
            link,
            // If pages were not returned, the run was an error, so nothing has leaked here.
            pool: Pool { allocated: accounting.allocated, leaked: 0 },
        }
    }

    /// The flows and the CPUs of a row.
    fn details(row: &Row, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        row.write_flows(None, f)?;
        let cpus = row.cpus.iter().map(|cpu| (cpu.cpu.to_string(), cpu.roles.join(", "), cpu.share));
        write_shares("CPU", cpus, f)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (m, p) = (&self.machine, &self.params);
        let port = p.port.as_ref().map(|port| format!(" behind {port}")).unwrap_or_default();
        let what = what(p.size, p.answer);
        writeln!(f, "netmem {} · {} CPUs · Linux {} · percpu {}", self.netmem, m.cpus, m.kernel, m.percpu)?;
        writeln!(
            f,
            "{} · {} to {}{port} · {} flow(s), {what} · {} run(s) of {} s\n",
            p.proto, p.source, p.target, p.flows, p.runs, p.duration_s
        )?;
        // Of more rows, the flows and CPUs are in JSON.
        if let [row] = &self.variants[..] {
            Self::details(row, f)?;
        }
        if let Some(first) = self.variants.first() {
            writeln!(f, "{}\n", table(&first.head(), self.variants.iter().map(Row::cells), |_| true))?;
        }
        write_highest(self.highest, p.search.as_deref(), f)?;
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
