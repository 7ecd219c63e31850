//! The tables `kperf`: TCP into device memory and out of it, before and after a change, in the form
//! in which the tool kperf reports such changes: throughput and CPU time of target and source.

use super::record::{Record, Row};
use netmem_measure::stats::Spread;
use netmem_measure::units::show_spread;
use std::fmt::Write;

/// A change: its name, the variants before and after it, and the quantities that it can change.
struct Change {
    what: &'static str,
    before: (&'static str, &'static str),
    after: (&'static str, &'static str),
    quantities: &'static [(&'static str, &'static str)],
}

/// What a reader knows a section by, and its name.
const TARGET: [(&str, &str); 4] = [
    ("target: throughput", "stream receive: throughput"),
    ("target: CPU time of the network", "stream receive: network"),
    ("target: CPU time of the application", "stream receive: application"),
    ("target: CPU time of both", "stream receive: both"),
];
const BOTH: [(&str, &str); 6] = [
    TARGET[0],
    TARGET[1],
    TARGET[2],
    TARGET[3],
    ("source: throughput", "stream transmit: throughput"),
    ("source: CPU time of both CPUs", "stream transmit: both"),
];

const CHANGES: [Change; 2] = [
    Change {
        what: "The count of the binding",
        before: ("`RefCount`", "refcount+ranges"),
        after: ("`PercpuRef`", "percpuref+ranges"),
        quantities: &BOTH,
    },
    Change {
        what: "The tokens of a socket",
        before: ("ids in a locked map", "percpuref+locked_map"),
        after: ("ranges", "percpuref+ranges"),
        quantities: &TARGET,
    },
];

/// The tables of a machine.
pub(super) fn tables(record: &Record) -> String {
    CHANGES.iter().map(|change| table(record, change)).collect()
}

fn table(record: &Record, Change { what, before, after, quantities }: &Change) -> String {
    let rows = quantities.iter().filter_map(|(known, section)| {
        let row = |name| record.row("devmem", section, name, 2);
        line(known, row(before.1)?, row(after.1)?)
    });
    let rows: String = rows.collect();
    if rows.is_empty() {
        return rows;
    }
    format!("{what}:\n\n| | {} | {} | change |\n| --- | ---: | ---: | ---: |\n{rows}\n", before.0, after.0)
}

/// A line of a table. `None` if one of the two was not measured.
fn line(known: &str, before: &Row, after: &Row) -> Option<String> {
    let (old, new) = (before.value?, after.value?);
    let per = if before.unit == "ns" { format!(", per {}", before.per) } else { String::new() };
    let (change, noise) =
        (100.0 * (new.median / old.median - 1.0), if overlap(&old, &new) { ", within the noise" } else { "" });
    let [old, new] = [old, new].map(|value| show_spread(&value, &before.unit));
    let mut line = String::new();
    let _ = writeln!(line, "| {known}{per} | {old} | {new} | {change:+.1} %{noise} |");
    Some(line)
}

/// Whether the ranges of two values have a part in common.
fn overlap(a: &Spread, b: &Spread) -> bool {
    a.min <= b.max && b.min <= a.max
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_shown_with_its_noise() {
        let row = |name: &str, section: &str, unit: &str, [min, median, max]: [f64; 3]| {
            serde_json::json!({
                "name": name, "section": section, "threads": 2, "unit": unit, "per": "GB",
                "median": median, "min": min, "max": max
            })
        };
        let variants = [
            row("refcount+ranges", "stream receive: throughput", "b/s", [9e9, 10e9, 11e9]),
            row("percpuref+ranges", "stream receive: throughput", "b/s", [10e9, 10.5e9, 12e9]),
            row("refcount+ranges", "stream transmit: both", "ns", [99e6, 100e6, 101e6]),
            row("percpuref+ranges", "stream transmit: both", "ns", [79e6, 80e6, 81e6]),
        ];
        let record = serde_json::from_value(serde_json::json!({ "suites": [{
            "suite": "devmem", "date": "2026-11-25", "machine": { "cpu": "A CPU", "cpus": 2, "kernel": "6.18" },
            "variants": variants, "goals": []
        }]}));
        let text = tables(&record.unwrap());
        let target = "| target: throughput | 10.00 Gb/s (9.00..11.00) | 10.50 Gb/s (10.00..12.00) | +5.0 %, within the noise |\n";
        let source =
            "| source: CPU time of both CPUs, per GB | 100.0 ms (99.00..101.0) | 80.00 ms (79.00..81.00) | -20.0 % |\n";
        assert!(text.contains(target) && text.contains(source), "{text}");
        assert_eq!(text.matches("change").count(), 1, "a table without rows is left out: {text}");
    }
}
