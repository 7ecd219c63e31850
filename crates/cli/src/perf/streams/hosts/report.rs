//! The report of a measurement between hosts: one table and one JSON object for all of them.

use super::message::{CpuShare, Ended, Host, Measured};
use super::plan::{Drive, Pattern};
use crate::perf::streams::pace::Latencies;
use crate::perf::streams::plan::Proto;
use crate::perf::streams::report::{Measured as Rows, Row, Sample, what, write_highest, write_shares};
use netmem_measure::load::Share;
use netmem_measure::machine::Machine;
use netmem_measure::report::{Done, SCHEMA};
use netmem_measure::table::table;
use netmem_measure::units::show;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

/// How far a host's clock is from the driver's, and the most that this may be wrong.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Clock {
    pub(super) offset_ns: i64,
    pub(super) error_ns: u64,
}

/// A host.
#[derive(Debug, Serialize)]
pub(super) struct HostReport {
    pub(super) name: String,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) host: Option<Host>,
    /// Of netmem's stack there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) address: Option<IpAddr>,
    pub(super) clock: Clock,
    /// Why it took no further part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failed: Option<String>,
}

/// What the hosts have counted in a run.
#[derive(Debug)]
pub(super) struct Run {
    /// From, to.
    pub(super) routes: Vec<(usize, usize)>,
    pub(super) measured: Vec<(usize, Measured)>,
    pub(super) ended: Vec<(usize, Ended)>,
}

#[derive(Debug, Serialize)]
struct Params {
    proto: &'static str,
    pattern: &'static str,
    /// From a host to another one.
    flows: u16,
    size: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    search: Option<String>,
    duration_s: f64,
    runs: u32,
}

/// A flow's hosts.
#[derive(Debug, Serialize)]
struct Route {
    from: usize,
    to: usize,
}

/// A host's part in the runs of a row.
#[derive(Debug, Default, Serialize)]
struct Part {
    host: usize,
    /// Bytes of the streams' messages, from the flows' first to their last.
    sent: u64,
    received: u64,
    /// The mean of the runs.
    cpus: Vec<CpuShare>,
    /// Why flows of it did not end in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    failed: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Variant {
    #[serde(flatten)]
    row: Row,
    /// The flows' hosts, in the order of the flows.
    routes: Vec<Route>,
    parts: Vec<Part>,
    /// The longest time between the starts of two hosts, by the driver's clock, with the error of
    /// the clocks.
    apart_ns: u64,
    /// Runs with other hosts, or in which a host was lost.
    left_out: usize,
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
    hosts: Vec<HostReport>,
    variants: Vec<Variant>,
    /// The result of a search: the highest rate that reached the goal, or 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    highest: Option<u64>,
}

/// The machine of a host, if it is known.
pub(super) fn boot(host: Option<&Host>) -> &str {
    host.map_or("", |host| &host.boot)
}

/// Bytes of streams that were sent, and not received, though no flow has failed.
#[derive(Debug, thiserror::Error)]
#[error("{sent} bytes were sent and {received} received: {name}; this is a bug of netmem, please report it")]
pub(super) struct Lost {
    name: String,
    sent: u64,
    received: u64,
}

impl Pattern {
    fn short(self) -> &'static str {
        match self {
            Self::Out => "out",
            Self::In => "in",
            Self::Both => "both",
            Self::All => "all",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Out => "from host 0",
            Self::In => "to host 0",
            Self::Both => "from host 0 and to it",
            Self::All => "from each host to each other one",
        }
    }
}

impl Run {
    /// As a run of flows in one process: all flows in the order of the routes. A flow whose counter
    /// was lost with its host has 0. `boots` are the machines of the hosts.
    pub(super) fn sample(&self, plan: &Drive, boots: &[&str]) -> Sample {
        let flows = usize::from(plan.flows);
        let mut next: BTreeMap<usize, usize> = BTreeMap::new();
        let mut amounts = Vec::new();
        for &(from, to) in &self.routes {
            let counter = if plan.work.answer.is_some() { from } else { to };
            let first = next.entry(counter).or_default();
            let counted = self.measured.iter().find(|(host, _)| *host == counter);
            let counted = counted.and_then(|(_, measured)| measured.amounts.get(*first..*first + flows));
            amounts.extend_from_slice(counted.unwrap_or(&vec![0; flows]));
            *first += flows;
        }
        let windows =
            self.measured.iter().map(|(_, Measured { window_ns: [since, end], .. })| end.saturating_sub(*since));
        let elapsed = windows.max().map_or(plan.duration, Duration::from_nanos);
        let latencies = self.ended.iter().fold(Latencies::default(), |mut all, (_, ended)| {
            all.add(&ended.latencies);
            all
        });
        let datagrams = self.ended.iter().fold([0; 2], |sum, (_, ended)| [0, 1].map(|n| sum[n] + ended.datagrams[n]));
        // A CPU of a machine that hosts share counts once.
        let mut busy: BTreeMap<(&str, usize, u32), f64> = BTreeMap::new();
        for (host, measured) in &self.measured {
            let boot = boots[*host];
            let of = if boot.is_empty() { *host } else { 0 };
            busy.extend(measured.busy.iter().map(|&(cpu, part)| ((boot, of, cpu), part)));
        }
        let cpu_ns = busy.values().sum::<f64>() * elapsed.as_nanos() as f64;
        Sample {
            amounts,
            elapsed,
            intervals: Vec::new(),
            sent: self.measured.iter().map(|(_, measured)| measured.sent).sum(),
            datagrams,
            latencies,
            cpu_ns,
            cpus: Vec::new(),
        }
    }

    /// The first host whose flows did not all end in order, and why.
    pub(super) fn failure(&self) -> Option<(usize, &str)> {
        self.ended.iter().find_map(|(host, ended)| Some((*host, ended.failed.as_deref()?)))
    }

    /// Whether each host of its flows has sent its figures.
    fn is_whole(&self) -> bool {
        let has = |host: &usize| self.measured.iter().any(|(other, _)| other == host);
        self.routes.iter().all(|(from, to)| has(from) && has(to))
    }

    fn apart(&self, hosts: &[HostReport]) -> u64 {
        let began = |(host, measured): &(usize, Measured)| {
            i128::from(measured.window_ns[0]) - i128::from(hosts[*host].clock.offset_ns)
        };
        let began: Vec<i128> = self.measured.iter().map(began).collect();
        let apart = began.iter().max().zip(began.iter().min()).map_or(0, |(last, first)| last - first);
        let error = self.measured.iter().map(|(host, _)| hosts[*host].clock.error_ns).max().unwrap_or(0);
        u64::try_from(apart).unwrap_or(u64::MAX).saturating_add(error)
    }
}

impl Variant {
    fn new(plan: &Drive, hosts: &[HostReport], rate: Option<u64>, runs: &[Run]) -> Self {
        // A host that is lost changes the flows: the row is of most runs with the same ones. A run
        // in which a host was lost counts only if there is no other.
        let whole: Vec<&Run> = runs.iter().filter(|run| run.is_whole()).collect();
        let whole = if whole.is_empty() { runs.iter().take(1).collect() } else { whole };
        let same_as = |run: &Run| whole.iter().filter(|other| other.routes == run.routes).count();
        let most = whole.iter().map(|run| same_as(run)).max();
        let routes = whole.iter().find(|run| Some(same_as(run)) == most).map_or(&runs[0].routes, |run| &run.routes);
        let same: Vec<&Run> = whole.iter().copied().filter(|run| run.routes == *routes).collect();
        let left_out = runs.len() - same.len();
        let boots: Vec<&str> = hosts.iter().map(|report| boot(report.host.as_ref())).collect();
        let samples = same.iter().map(|run| run.sample(plan, &boots)).collect();
        let row = Row::new(&plan.work, ["hosts", plan.pattern.short()], &Rows { rate, samples });
        let mut parts: BTreeMap<usize, Part> = BTreeMap::new();
        for run in &same {
            for (host, ended) in &run.ended {
                let part = parts.entry(*host).or_default();
                part.sent += ended.bytes[0];
                part.received += ended.bytes[1];
                part.failed.extend(ended.failed.clone());
            }
        }
        for (host, part) in &mut parts {
            part.host = *host;
            let of_host = same.iter().filter_map(|run| run.measured.iter().find(|(other, _)| other == host));
            let all: Vec<&[CpuShare]> = of_host.map(|(_, measured)| &measured.cpus[..]).collect();
            let first = all.first().copied().unwrap_or_default();
            part.cpus.extend(first.iter().enumerate().map(|(n, cpu)| {
                let shares: Vec<Share> = all.iter().filter_map(|cpus| Some(cpus.get(n)?.share)).collect();
                CpuShare { share: Share::mean(&shares), ..cpu.clone() }
            }));
        }
        let flows = routes.iter().flat_map(|&(from, to)| (0..plan.flows).map(move |_| Route { from, to }));
        let apart_ns = same.iter().map(|run| run.apart(hosts)).max().unwrap_or(0);
        Self { row, routes: flows.collect(), parts: parts.into_values().collect(), apart_ns, left_out }
    }

    /// Bytes that were sent and received.
    fn bytes(&self) -> [u64; 2] {
        self.parts.iter().fold([0; 2], |[sent, received], part| [sent + part.sent, received + part.received])
    }
}

impl Report {
    pub(super) fn new(
        plan: &Drive,
        hosts: Vec<HostReport>,
        rows: Vec<(Option<u64>, Vec<Run>)>,
        highest: Option<u64>,
        done: Done,
    ) -> Self {
        let rows = rows.iter().filter(|(_, runs)| !runs.is_empty());
        let variants = rows.map(|(rate, runs)| Variant::new(plan, &hosts, *rate, runs)).collect();
        Self {
            schema: SCHEMA,
            netmem: env!("CARGO_PKG_VERSION"),
            command: "perf",
            machine: Machine::new("unknown".into()),
            params: Params {
                proto: plan.work.proto.name(),
                pattern: plan.pattern.name(),
                flows: plan.flows,
                size: plan.work.size,
                answer: plan.work.answer,
                search: plan.search.map(|goal| goal.to_string()),
                duration_s: plan.duration.as_secs_f64(),
                runs: plan.runs,
            },
            done,
            hosts,
            variants,
            highest,
        }
    }

    /// Whether each byte that was sent over a stream was received.
    pub(super) fn verdict(&self) -> Result<(), Lost> {
        let streams = self.params.proto == Proto::Tcp.name() && self.params.answer.is_none();
        let in_order = |variant: &&Variant| variant.parts.iter().all(|part| part.failed.is_empty());
        for variant in self.variants.iter().filter(in_order) {
            let [sent, received] = variant.bytes();
            if streams && sent != received {
                return Err(Lost { name: variant.row.name().into(), sent, received });
            }
        }
        Ok(())
    }

    fn hosts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.hosts.iter().enumerate().map(|(n, HostReport { name, host, clock, failed, .. })| {
            let (stack, kernel, cpus) = host.as_ref().map_or(("-", "-", "-".into()), |host| {
                (host.stack.as_str(), host.kernel.as_str(), host.cpus.to_string())
            });
            let clock = format!("{} ± {}", show(clock.offset_ns as f64, "ns"), show(clock.error_ns as f64, "ns"));
            let failed = failed.clone().unwrap_or_else(|| "in order".into());
            vec![n.to_string(), name.clone(), stack.into(), kernel.into(), cpus, clock, failed]
        });
        let head = ["host", "name", "stack", "Linux", "CPUs", "clock", "ended"];
        writeln!(f, "{}\n", table(&head, rows, |column| column == 0 || column == 4))
    }

    fn parts(variant: &Variant, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let labels: Vec<[String; 2]> =
            variant.routes.iter().map(|route| [route.from.to_string(), route.to.to_string()]).collect();
        variant.row.write_flows(Some((["from", "to"], &labels)), f)?;
        let cpus = variant.parts.iter().flat_map(|part| {
            part.cpus.iter().map(|cpu| {
                let role = if cpu.role == "all" { format!("all {} CPUs", cpu.cpus) } else { cpu.role.clone() };
                (part.host.to_string(), role, cpu.share)
            })
        });
        write_shares("host", cpus, f)?;
        for part in &variant.parts {
            part.failed.iter().try_for_each(|failed| writeln!(f, "host {}: {failed}", part.host))?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (p, hosts) = (&self.params, self.hosts.len());
        let what = what(p.size, p.answer);
        writeln!(
            f,
            "netmem {} · {hosts} hosts · {} · {} · {} flow(s) between two hosts, {what} · {} run(s) of {} s\n",
            self.netmem, p.proto, p.pattern, p.flows, p.runs, p.duration_s
        )?;
        self.hosts(f)?;
        // Of more rows, the flows and CPUs are in JSON.
        if let [variant] = &self.variants[..] {
            Self::parts(variant, f)?;
        }
        if let Some(first) = self.variants.first() {
            writeln!(
                f,
                "{}\n",
                table(&first.row.head(), self.variants.iter().map(|variant| variant.row.cells()), |_| true)
            )?;
        }
        write_highest(self.highest, p.search.as_deref(), f)?;
        for variant in &self.variants {
            let [sent, received] = variant.bytes();
            let bytes = if sent + received > 0 {
                format!("; bytes in all: {sent} sent, {received} received")
            } else {
                String::new()
            };
            writeln!(f, "all hosts started within {}{bytes}", show(variant.apart_ns as f64, "ns"))?;
            if variant.left_out > 0 {
                writeln!(f, "left out: {} run(s) in which a host was lost, or with other hosts", variant.left_out)?;
            }
        }
        write!(f, "{}", self.done.lines())
    }
}
