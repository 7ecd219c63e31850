//! `--against`: each row of this build and of another one.

use crate::args::SuiteArgs;
use netmem_measure::against::{Better, Builds, Measured, PAIRS};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Compares the rows of the chosen suites.
pub(crate) fn run(other: &Path, args: &SuiteArgs, stop: &AtomicBool) -> anyhow::Result<()> {
    let builds = Builds::new(other, stop, rows)?;
    let (pairs, interrupted) = builds.run(args.runs.unwrap_or(PAIRS), &[])?;
    builds.report("bench", &pairs, args.json, interrupted)
}

/// The rows of a report that were measured: of one suite, or of several.
fn rows(report: &Value) -> Vec<Measured> {
    let suites = report["suites"].as_array().map_or_else(|| std::slice::from_ref(report), Vec::as_slice);
    let row = |suite: &Value, row: &Value| {
        let text = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
        let (suite, section, name) = (suite["suite"].as_str().unwrap_or_default(), text("section"), text("name"));
        let (unit, quantity) = (text("unit"), text("per"));
        let better = if matches!(&*unit, "b/s" | "requests") { Better::More } else { Better::Less };
        let row_name = format!("{suite} {section}: {name} x{}", row["threads"]);
        Some(Measured { row: row_name, quantity, unit, better, value: row["median"].as_f64()? })
    };
    let rows = suites.iter().flat_map(|suite| {
        let rows = suite["variants"].as_array().into_iter().flatten();
        rows.filter_map(move |variant| row(suite, variant))
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_of_one_suite_and_of_several() {
        let row = |name: &str, unit: &str| json!({"section": "s", "name": name, "threads": 2, "unit": unit, "per": "page", "median": 5.0});
        let skipped = json!({"section": "s", "name": "c", "threads": 2, "unit": "ns", "per": "page", "skipped": "x"});
        let one = json!({"suite": "pool", "variants": [row("a", "ns"), row("b", "b/s"), skipped]});
        let names =
            |report: &Value| -> Vec<_> { rows(report).into_iter().map(|m| (m.row, m.quantity, m.better)).collect() };
        let both = [("pool s: a x2", Better::Less), ("pool s: b x2", Better::More)];
        let both: Vec<_> = both.iter().map(|(row, better)| (row.to_string(), "page".to_owned(), *better)).collect();
        assert_eq!(names(&one), both);
        assert_eq!(names(&json!({"suites": [one, {"suite": "refs", "variants": []}]})), both);
    }
}
