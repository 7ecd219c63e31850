//! `netmem bench` from outside: what it prints and writes, and how it refuses.
#![allow(clippy::unwrap_used, missing_docs)]

use serde_json::Value;
use std::process::{Command, Output};

/// As few and as short runs as there can be.
const SHORT: [&str; 4] = ["--duration", "1ms", "--runs", "2"];

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_netmem")).args(args).output().unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn short(args: &[&str]) -> String {
    let output = run(&[args, &SHORT].concat());
    assert!(output.status.success(), "{}: {}", output.status, errors(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn figures(row: &Value) -> [f64; 3] {
    ["median", "min", "max"].map(|key| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}")))
}

/// Every count with every number of threads, in the mode that the machine has. Proves PERF-1, PERF-3 and REF-7.
#[test]
fn json_has_every_variant() {
    let report: Value = serde_json::from_str(&short(&["bench", "refs", "--json"])).unwrap();
    assert_eq!((&report["command"], &report["suite"]), (&"bench".into(), &"refs".into()));
    assert_eq!(report["params"]["runs"], 2);
    let mode = report["machine"]["percpu"].as_str().unwrap();
    assert!(["rseq", "portable"].contains(&mode), "{mode}");
    let rows = report["variants"].as_array().unwrap();
    let find = |name: &str, threads: u64| {
        let found: Vec<_> = rows.iter().filter(|row| row["name"] == name && row["threads"] == threads).collect();
        assert_eq!(found.len(), 1, "{name} with {threads} threads");
        found[0]
    };
    let threads: Vec<u64> =
        report["params"]["threads"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert_eq!(threads[0], 1);
    assert_eq!(threads.last().copied(), report["machine"]["cpus"].as_u64());
    for &n in &threads {
        for name in ["plain", "arc", "refcount", "rcuref", "rcuref_batched", "percpuref"] {
            for name in [name.to_owned(), format!("{name}_rotating")] {
                let row = find(&name, n);
                assert_eq!((&row["unit"], &row["per"], &row["runs"]), (&"ns".into(), &"get+put".into(), &2.into()));
                figures(&row["vs_refcount"]);
            }
        }
        find("guard", n);
        assert!(n > 1 || figures(find("refcount_retries", n))[2] <= 1.0);
        for others in [1, 64, 4096] {
            find(&format!("kill_{others}"), n);
        }
    }
    for name in ["plain", "arc", "refcount", "rcuref", "rcuref_batched", "percpuref"] {
        find(&format!("final_put_{name}"), 1);
    }
    for row in rows {
        assert_eq!(row["percpu"], mode, "{row}");
        if row["skipped"].is_string() {
            continue;
        }
        let [median, min, max] = figures(row);
        let least = if row["unit"] == "retries" { 0.0 } else { f64::MIN_POSITIVE };
        assert!(least <= min && min <= median && median <= max && max.is_finite(), "{row}");
    }
    for goal in report["goals"].as_array().unwrap() {
        let value = figures(goal)[0];
        let bound = goal["bound"].as_f64().unwrap();
        let kept = if goal["at_least"] == true { value >= bound } else { value <= bound };
        assert_eq!(goal["reached"], kept, "{goal}");
    }
    assert_eq!(report["pool"]["inflight"], 0);
}

/// Both layouts under both counts, or the reason why not. Proves REF-6 as far as measuring goes.
#[test]
fn layouts_need_a_writer_and_a_reader() {
    let report = |threads: &str| -> Value {
        serde_json::from_str(&short(&["bench", "refs", "--json", "--threads", threads])).unwrap()
    };
    let layouts = |report: &Value| -> Vec<Value> {
        let rows = report["variants"].as_array().unwrap();
        rows.iter().filter(|row| row["section"] == "layout").cloned().collect()
    };
    let alone = report("1");
    assert_eq!(layouts(&alone).len(), 8);
    assert!(layouts(&alone).iter().all(|row| row["skipped"].as_str().unwrap().contains("two threads")));
    if alone["machine"]["cpus"].as_u64() > Some(1) {
        let both = report("2");
        for layout in ["beside", "alone"] {
            for count in ["refcount", "rcuref"] {
                for what in ["read", "pair"] {
                    let name = format!("layout_{layout}_{count}_{what}");
                    assert!(layouts(&both).iter().any(|row| row["name"] == *name && row["median"].is_f64()), "{name}");
                }
            }
        }
    }
}

#[test]
fn a_table_and_a_page_that_loads_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("refs.html");
    std::fs::write(&file, "x".repeat(1 << 20)).unwrap();
    let table = short(&["bench", "all", "--threads", "1", "--html", file.to_str().unwrap()]);
    for word in ["suite refs", "percpuref_rotating", "x refcount", "percpu", "skipped: ", "Goals"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    let page = std::fs::read_to_string(&file).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.trim_end().ends_with("</html>"));
    assert!(page.matches("<svg").count() >= 4, "charts");
    // The name of SVG's own language is the only address.
    let addresses = page.matches("://").count() - page.matches("\"http://www.w3.org/2000/svg\"").count();
    assert_eq!(addresses, 0);
    for loads in ["<script", "<link", "src=", "@import"] {
        assert!(!page.contains(loads), "{loads}");
    }
}

#[test]
fn bad_arguments_end_it_before_anything_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none").join("x.html");
    let missing = missing.to_str().unwrap();
    for (args, says) in [
        (&["bench"][..], "SUITE"),
        (&["bench", "pool"], "refs"),
        (&["bench", "refs", "--threads", "0"], "--threads 0"),
        (&["bench", "refs", "--threads", "100000"], "at most"),
        (&["bench", "refs", "--runs", "0"], "--runs 0"),
        (&["bench", "refs", "--duration", "1h"], "suffix `h`"),
        (&["bench", "refs", "--html", missing], missing),
    ] {
        let output = run(args);
        let errors = errors(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {errors}");
        assert!(output.stdout.is_empty() && errors.contains(says), "{args:?} does not say `{says}`: {errors}");
    }
}
