//! Two builds compared: this one and another, run in turns as children with the same arguments, one run at a time.

use super::error::PerfError;
use super::plan::Plan;
use crate::args::BadArgument;
use crate::output;
use crate::stats::{Change, Spread};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What is read of a child's report.
#[derive(Deserialize)]
struct Report {
    variants: Vec<Row>,
}

#[derive(Clone, Deserialize)]
struct Row {
    name: String,
    alloc: String,
    consumer: String,
    queues: u16,
    median: Option<f64>,
    ns_per_packet: Option<f64>,
}

/// One variant in both builds.
#[derive(Debug, Serialize)]
struct Compared {
    name: String,
    alloc: String,
    consumer: String,
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
    change: Option<Change>,
    ns_change: Option<Change>,
}

#[derive(Serialize)]
struct Comparison<'a> {
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
    for run in 0..plan.runs {
        eprintln!("pair {} of {}", run + 1, plan.runs);
        // In turns who is first.
        let pair = if run % 2 == 0 {
            let new = child(&this, &arguments, stop)?;
            (new, child(other, &arguments, stop)?)
        } else {
            let old = child(other, &arguments, stop)?;
            (child(&this, &arguments, stop)?, old)
        };
        pairs.push(pair);
    }
    let variants = compare(&pairs);
    if plan.json {
        let command = "perf";
        let comparison = Comparison { netmem: env!("CARGO_PKG_VERSION"), command, against: other, variants };
        return output::json(&comparison);
    }
    output::print(&format!("this build against {}, {} interleaved pairs", other.display(), plan.runs))?;
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

/// The arguments for a child: ours, without those that are about children, for one run.
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

/// A child that does not outlive us.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            // By its own handler, so that it leaves nothing behind either.
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
    let text = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let text = text.map_err(|e| failed(format!("cannot be read from: {e}")))?;
    if !status.success() {
        return Err(failed(format!("failed ({status}); what it said is above")));
    }
    serde_json::from_str(&text).map_err(|e| failed(format!("does not print netmem's JSON: {e}")))
}

/// Every variant that both builds have measured in every pair.
fn compare(pairs: &[(Report, Report)]) -> Vec<Compared> {
    let Some((first, _)) = pairs.first() else { return Vec::new() };
    let compared = first.variants.iter().filter_map(|row| {
        let find = |report: &Report| {
            let key = |r: &Row| (r.name.clone(), r.alloc.clone(), r.consumer.clone(), r.queues);
            let found = report.variants.iter().find(|r| key(r) == key(row))?;
            Some((found.median?, found.ns_per_packet?))
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
        let row = |name: &str, pps: f64| {
            format!(
                r#"{{"name":"{name}","alloc":"pool","consumer":"same","queues":1,"median":{pps},"ns_per_packet":2.0}}"#
            )
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
