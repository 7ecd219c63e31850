//! The program as a child process, and what all tests expect of its reports.

pub(crate) use netmem_testing::process::{Background, errors, json};
use netmem_testing::schema;
use serde_json::Value;
use std::process::{Command, Output};

pub(crate) fn bench() -> Command {
    Command::new(env!("CARGO_BIN_EXE_netmem-bench"))
}

pub(crate) fn run(args: &[&str]) -> Output {
    bench().args(args).output().unwrap()
}

/// As few and as short runs as there can be.
pub(crate) const SHORT: [&str; 4] = ["--duration", "1ms", "--runs", "2"];

#[track_caller]
pub(crate) fn short(args: &[&str]) -> String {
    let output = run(&[args, &SHORT].concat());
    assert!(output.status.success(), "{}: {}", output.status, errors(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
pub(crate) fn figures(row: &Value) -> [f64; 3] {
    ["median", "min", "max"].map(|key| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}")))
}

/// Every goal has the verdict that follows from its value. How many goals have a value.
#[track_caller]
pub(crate) fn verdicts(report: &Value) -> usize {
    let goals = report["goals"].as_array().unwrap();
    let measured = goals.iter().filter(|goal| match goal.get("value") {
        None => {
            assert!(["skipped", "not run"].iter().any(|word| goal["verdict"] == *word), "{goal}");
            assert!(!goal["why"].as_str().unwrap().is_empty(), "{goal}");
            false
        }
        Some(value) => {
            let (median, bound) = (figures(value)[0], goal["bound"].as_f64().unwrap());
            assert_eq!(goal["judged"], "median", "{goal}");
            let slack = bound * goal["margin_pct"].as_f64().unwrap() / 100.0;
            let kept = if goal["at_least"] == true { median >= bound - slack } else { median <= bound + slack };
            assert_eq!(goal["reason"].is_string(), goal["kind"] == "open", "{goal}");
            assert_eq!(goal["verdict"], if kept { "reached" } else { "missed" }, "{goal}");
            true
        }
    });
    measured.count()
}

/// Whether these are the features of rings: each of our devices and drivers agrees on this one.
pub(crate) fn has_rings(features: &Value) -> bool {
    features.as_array().is_some_and(|names| names.iter().any(|name| name == "VIRTIO_F_VERSION_1"))
}

/// The report of a suite, which fits the schema.
#[track_caller]
pub(crate) fn report(args: &[&str]) -> Value {
    let report: Value = serde_json::from_str(&short(&[args, &["--json"]].concat())).unwrap();
    schema::fits("bench/schema/bench.json", &report);
    report
}
