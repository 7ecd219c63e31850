//! Compares two builds: this one and another one. Both run in turns, as children with the same
//! arguments, one run at a time.

use super::error::PerfError;
use super::json::Row;
use super::plan::Plan;
use netmem_measure::arguments::BadArgument;
use netmem_measure::output;
use netmem_measure::report::SCHEMA;
use netmem_measure::signals::Interrupted;
use netmem_measure::stats::{Change, Spread};
use netmem_measure::threads::propagate;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The fields of a child's report that are read.
#[derive(Deserialize)]
struct Report {
    /// Builds from before the schema do not report it.
    #[serde(default)]
    schema: u32,
    variants: Vec<Row>,
}

/// One variant in both builds.
#[derive(Debug, Serialize)]
struct Compared {
    name: String,
    alloc: Cow<'static, str>,
    consumer: Cow<'static, str>,
    queues: u16,
    unit: &'static str,
    /// This build.
    #[serde(flatten)]
    rate: Spread,
    runs: usize,
    ns_per_packet: f64,
    other_median: f64,
    other_ns_per_packet: f64,
    /// Packets per second of this build against the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    change: Option<Change>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ns_change: Option<Change>,
}

#[derive(Serialize)]
struct Comparison<'a> {
    schema: u32,
    netmem: &'static str,
    command: &'static str,
    against: &'a Path,
    variants: Vec<Compared>,
}

/// Runs both builds as often as planned, and prints how this one compares.
pub(crate) fn run(other: &Path, plan: &Plan, stop: &AtomicBool) -> anyhow::Result<()> {
    if !other.is_file() {
        let other = other.display();
        return BadArgument::new(format!("--against {other}: there is no such file; give a build of netmem"))?;
    }
    let this = std::env::current_exe()?;
    let arguments = arguments(std::env::args().skip(1));
    let mut pairs = Vec::new();
    // The builds take turns in being first.
    let pair = |run: u32| {
        let forwards = run.is_multiple_of(2);
        let (first, second) = if forwards { (&*this, other) } else { (other, &*this) };
        let reports = (child(first, &arguments, stop)?, child(second, &arguments, stop)?);
        Ok(if forwards { reports } else { (reports.1, reports.0) })
    };
    let mut interrupted = false;
    for run in 0..plan.runs {
        eprintln!("pair {} of {}", run + 1, plan.runs);
        match pair(run) {
            Err(PerfError::Interrupted) => {
                interrupted = true;
                break;
            }
            pair => pairs.push(pair?),
        }
    }
    show(plan, other, &pairs)?;
    if interrupted { Err(Interrupted.into()) } else { Ok(()) }
}

/// Prints how this build compares, in these pairs of runs.
fn show(plan: &Plan, other: &Path, pairs: &[(Report, Report)]) -> anyhow::Result<()> {
    let variants = compare(pairs);
    if plan.json {
        let command = "perf";
        let schema = SCHEMA;
        let comparison = Comparison { schema, netmem: env!("CARGO_PKG_VERSION"), command, against: other, variants };
        return Ok(output::json(&comparison)?);
    }
    output::print(&format!("this build against {}, {} interleaved pairs", other.display(), pairs.len()))?;
    for v in variants {
        let show = |c: Option<Change>| {
            c.map_or("-".into(), |Change { median_pct, interval: [low, high], .. }| {
                format!("{median_pct:+.1} % [{low:+.1}..{high:+.1}]")
            })
        };
        output::print(&format!(
            "{:<15} {:<4} {:<5} x{}  {:6.2} / {:6.2} Mpps {:<24} {:6.1} / {:6.1} ns {}",
            v.name,
            v.alloc,
            v.consumer,
            v.queues,
            v.rate.median / 1e6,
            v.other_median / 1e6,
            show(v.change),
            v.ns_per_packet,
            v.other_ns_per_packet,
            show(v.ns_change),
        ))?;
    }
    Ok(())
}

/// The arguments for a child: those of this command for one run, without the arguments about
/// children.
fn arguments(ours: impl Iterator<Item = String>) -> Vec<String> {
    let mut arguments: Vec<String> = Vec::new();
    let mut skip = false;
    for argument in ours {
        if std::mem::take(&mut skip) {
            continue;
        }
        match argument.as_str() {
            "--against" | "--runs" => skip = true,
            "--json" => {}
            a if a.starts_with("--against=") || a.starts_with("--runs=") => {}
            _ => arguments.push(argument),
        }
    }
    arguments.extend(["--json", "--runs", "1"].map(String::from));
    arguments
}

/// A child that is ended together with this command.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            // The child's own handler of SIGTERM ends it, so that it cleans up too.
            if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
            let _ = self.0.wait();
        }
    }
}

fn child(binary: &Path, arguments: &[String], stop: &AtomicBool) -> Result<Report, PerfError> {
    let failed = |problem: String| PerfError::Child { build: binary.display().to_string(), problem };
    let command = Command::new(binary).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut running = Running(command.map_err(|e| failed(format!("cannot be run: {e}")))?);
    let mut out = running.0.stdout.take().ok_or_else(|| failed("has no standard output".into()))?;
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        out.read_to_string(&mut text).map(|_| text)
    });
    let status = loop {
        if stop.load(Ordering::Relaxed) {
            return Err(PerfError::Interrupted);
        }
        match running.0.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) => std::thread::sleep(Duration::from_millis(10)),
            Err(e) => return Err(failed(format!("cannot be waited for: {e}"))),
        }
    };
    let text = propagate(reader.join());
    let text = text.map_err(|e| failed(format!("cannot be read from: {e}")))?;
    // The signal that ends this command may have ended the child first.
    if stop.load(Ordering::Relaxed) {
        return Err(PerfError::Interrupted);
    }
    if !status.success() {
        return Err(failed(format!("failed ({status}); what it said is above")));
    }
    match serde_json::from_str::<Report>(&text) {
        Ok(report) if report.schema > SCHEMA => {
            Err(failed(format!("prints JSON of schema {}; this build reads up to {SCHEMA}", report.schema)))
        }
        report => report.map_err(|e| failed(format!("does not print netmem's JSON: {e}"))),
    }
}

/// Every variant that was measured by both builds in every pair.
fn compare(pairs: &[(Report, Report)]) -> Vec<Compared> {
    let Some((first, _)) = pairs.first() else { return Vec::new() };
    let compared = first.variants.iter().filter_map(|row| {
        let find = |report: &Report| {
            let key = |r: &Row| (r.name.clone(), r.alloc.clone(), r.consumer.clone(), r.queues);
            let found = report.variants.iter().find(|r| key(r) == key(row))?;
            found.measured.as_ref().map(|m| (m.rate.median, m.ns_per_packet))
        };
        let both = pairs.iter().map(|(new, old)| Some((find(new)?, find(old)?)));
        let both = both.collect::<Option<Vec<_>>>()?;
        Some(Compared {
            name: row.name.clone(),
            alloc: row.alloc.clone(),
            consumer: row.consumer.clone(),
            queues: row.queues,
            unit: "packets/s",
            rate: Spread::of(both.iter().map(|(new, _)| new.0)),
            runs: both.len(),
            ns_per_packet: Spread::of(both.iter().map(|(new, _)| new.1)).median,
            other_median: Spread::of(both.iter().map(|(_, old)| old.0)).median,
            other_ns_per_packet: Spread::of(both.iter().map(|(_, old)| old.1)).median,
            change: Change::of(both.iter().map(|(new, old)| (new.0, old.0))),
            ns_change: Change::of(both.iter().map(|(new, old)| (new.1, old.1))),
        })
    });
    compared.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_get_our_arguments_for_one_run() {
        let ours = ["perf", "--against", "x", "--size", "64", "--runs=9", "--json", "--runs", "3", "--lock"];
        let theirs = arguments(ours.into_iter().map(String::from));
        assert_eq!(theirs, ["perf", "--size", "64", "--lock", "--json", "--runs", "1"]);
    }

    #[test]
    fn only_what_both_have_is_compared() {
        let report = |json: &str| serde_json::from_str::<Report>(json).unwrap();
        // The fields that are read, as builds from before the schema print them.
        let row = |name: &str, pps: f64| {
            let what = format!(r#""name":"{name}","mode":"small","alloc":"pool","consumer":"same","queues":1"#);
            format!(r#"{{{what},"median":{pps},"min":{pps},"max":{pps},"gbps":1.5,"ns_per_packet":2.0}}"#)
        };
        let new = report(&format!(r#"{{"variants":[{},{}]}}"#, row("a", 3.0), row("b", 1.0)));
        let old = report(&format!(
            r#"{{"variants":[{},{{"name":"b","alloc":"pool","consumer":"same","queues":1,"skipped":"x"}}]}}"#,
            row("a", 2.0)
        ));
        let compared = compare(&[(new, old)]);
        assert_eq!(compared.len(), 1);
        assert!((compared[0].change.unwrap().median_pct - 50.0).abs() < 1e-9);
    }
}
