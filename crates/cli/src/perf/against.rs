//! `netmem perf --against`: this build and another one.
//!
//! Flows and requests are compared at matched throughput, too: a rate a little below what the
//! slower build reaches. At that rate both do the same work, and their CPU times can be compared.

use super::plan::Plan;
use netmem_measure::against::{Better, Builds, Measured};
use netmem_measure::stats::Spread;
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// The part of the slower build's throughput at which both are compared.
const MATCHED: f64 = 0.9;

/// Compares the rows of received frames.
pub(super) fn frames(other: &Path, plan: &Plan, stop: &AtomicBool) -> anyhow::Result<()> {
    let builds = Builds::new(other, stop, rows_of_frames)?;
    let (pairs, interrupted) = builds.run(plan.runs, &[])?;
    builds.report("perf", &pairs, plan.json, interrupted)
}

/// Compares flows or requests: `runs` pairs as the arguments ask for, and as many at matched
/// throughput, if a message is so many units of it.
pub(super) fn streams(
    other: &Path,
    runs: u32,
    per_message: Option<f64>,
    json: bool,
    stop: &AtomicBool,
) -> anyhow::Result<()> {
    let builds = Builds::new(other, stop, rows_of_streams)?;
    let (mut pairs, mut interrupted) = builds.run(runs, &[])?;
    if let Some(unit) = per_message
        && !interrupted
    {
        let rate = (slower(&pairs) * MATCHED / unit).max(1.0) as u64;
        let (matched, ended) = builds.run(runs, &["--rate".into(), rate.to_string()])?;
        interrupted = ended;
        // A pair has all rows or is not complete.
        pairs.truncate(matched.len());
        for (both, matched) in pairs.iter_mut().flatten().zip(matched.into_iter().flatten()) {
            both.extend(matched);
        }
    }
    builds.report("perf", &pairs, json, interrupted)
}

/// The lower one of the builds' median rates.
fn slower(pairs: &[[Vec<Measured>; 2]]) -> f64 {
    let median = |build: usize| {
        let rates = pairs.iter().flat_map(|pair| pair[build].iter().filter(|m| m.quantity == RATE));
        Spread::of(rates.map(|m| m.value)).median
    };
    median(0).min(median(1))
}

/// The quantity by which throughput is matched.
const RATE: &str = "received";

fn rows(report: &Value) -> impl Iterator<Item = &Value> {
    report["variants"].as_array().into_iter().flatten()
}

fn rows_of_frames(report: &Value) -> Vec<Measured> {
    let row = |row: &Value| {
        let text = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
        let name = format!("{} {} {} x{}", text("name"), text("alloc"), text("consumer"), row["queues"]);
        let measured = |quantity: &str, field: &str, unit: &str, better| {
            let value = row[field].as_f64()?;
            Some(Measured { row: name.clone(), quantity: quantity.into(), unit: unit.into(), better, value })
        };
        let rate = measured(RATE, "median", "packets/s", Better::More);
        [rate, measured("driver", "ns_per_packet", "ns", Better::Less)]
    };
    rows(report).flat_map(row).flatten().collect()
}

fn rows_of_streams(report: &Value) -> Vec<Measured> {
    let row = |row: &Value| {
        let name = row["name"].as_str().unwrap_or_default();
        let name = row["asked"].as_u64().map_or_else(|| name.to_owned(), |rate| format!("{name} at {rate}/s"));
        let measured = |quantity: &str, value: &Value, unit: &str, better| {
            let (row, quantity, unit) = (name.clone(), quantity.into(), unit.into());
            Some(Measured { row, quantity, unit, better, value: value.as_f64()? })
        };
        let (cpu, latency, unit) = (&row["cpu_ns"], &row["latency_ns"], row["unit"].as_str().unwrap_or_default());
        [
            measured(RATE, &row["median"], unit, Better::More),
            measured("CPU a GB", &cpu["per_gigabyte"], "ns", Better::Less),
            measured("CPU a request", &cpu["per_request"], "ns", Better::Less),
            measured("50 %", &latency["p50"], "ns", Better::Less),
            measured("99 %", &latency["p99"], "ns", Better::Less),
        ]
    };
    rows(report).flat_map(row).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_was_skipped_or_is_not_known_is_left_out() {
        let what = |name: &str| json!({"name": name, "alloc": "pool", "consumer": "same", "queues": 1});
        let (mut measured, mut skipped) = (what("a"), what("b"));
        measured["median"] = 3.0.into();
        measured["ns_per_packet"] = 2.0.into();
        skipped["skipped"] = "x".into();
        let rows = rows_of_frames(&json!({"variants": [measured, skipped]}));
        let rows: Vec<_> = rows.iter().map(|m| (m.row.as_str(), m.quantity.as_str(), m.value)).collect();
        assert_eq!(rows, [("a pool same x1", "received", 3.0), ("a pool same x1", "driver", 2.0)]);
        assert!(rows_of_frames(&json!({})).is_empty());
    }

    #[test]
    fn rows_of_streams_have_their_rate() {
        let stream = json!({"name": "tcp-a-b", "unit": "b/s", "median": 8.0, "cpu_ns": {"per_gigabyte": 5.0}});
        let requests = json!({
            "name": "tcp-rr-a-b", "asked": 7, "unit": "requests/s", "median": 6.9, "latency_ns": {"p50": 1, "p99": 2}
        });
        let rows = rows_of_streams(&json!({"variants": [stream, requests]}));
        let rows: Vec<_> = rows.iter().map(|m| (m.row.as_str(), m.quantity.as_str(), m.value, m.better)).collect();
        let rr = "tcp-rr-a-b at 7/s";
        assert_eq!(
            rows,
            [
                ("tcp-a-b", "received", 8.0, Better::More),
                ("tcp-a-b", "CPU a GB", 5.0, Better::Less),
                (rr, "received", 6.9, Better::More),
                (rr, "50 %", 1.0, Better::Less),
                (rr, "99 %", 2.0, Better::Less),
            ]
        );
    }
}
