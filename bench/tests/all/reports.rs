//! What the program prints and writes, and how it refuses.

use crate::command::{self, Background, SHORT, bench, errors, figures, report, run, short};
use crate::page::well_formed;
use netmem_testing::{installed, schema, skip};
use rustix::process::Signal;
use serde_json::Value;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What is missing is said, and the rest is measured: here no tool is found that could build DPDK's
/// program.
#[test]
fn a_peer_that_is_missing_is_listed_with_the_reason() {
    let output =
        bench().args(["pool", "--json", "--threads", "1"]).args(SHORT).env("PATH", "/nowhere").output().unwrap();
    assert!(output.status.success(), "{}", errors(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["variants"].as_array().unwrap();
    let why = |name: &str| {
        let row = rows.iter().find(|row| row["name"] == name).unwrap();
        row["skipped"].as_str().unwrap_or_else(|| panic!("{row}")).to_owned()
    };
    assert!(why("dpdk_mbuf").contains("libdpdk is not installed"), "{}", why("dpdk_mbuf"));
    assert!(why("remote").contains("a CPU of its own"), "{}", why("remote"));
    assert!(rows.iter().any(|row| row["name"] == "in_context" && row["median"].is_f64()));
}

/// Under valgrind there is no vDSO, which the kernel's auxiliary vector names all the same. Threads
/// are timed and ticks are counted without it.
#[test]
fn a_measurement_ends_under_valgrind() {
    if let Err(why) = installed(&["valgrind"]) {
        return skip(&why);
    }
    let output = Command::new("valgrind")
        .args([
            "--tool=none",
            "--quiet",
            env!("CARGO_BIN_EXE_netmem-bench"),
            "refs",
            "--rows",
            "guard",
            "--threads",
            "1",
            "--json",
        ])
        .args(SHORT)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}: {}", output.status, errors(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["done"]["cpu_time"]["own_s"].is_f64(), "{report}");
    assert!(figures(&report["variants"][0])[0] > 0.0, "{report}");
}

/// Proves PERF-3: whatever is asked for is one object.
#[test]
fn several_suites_are_one_object() {
    let report = report(&["pool", "refs", "--threads", "1"]);
    assert_eq!(report["command"], "bench");
    let suites: Vec<_> = report["suites"].as_array().unwrap().iter().map(|suite| suite["suite"].clone()).collect();
    assert_eq!(suites, ["pool", "refs"]);
}

#[test]
fn bad_arguments_end_it_before_anything_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none").join("x.html");
    let missing = missing.to_str().unwrap();
    for (args, says) in [
        (&[][..] as &[&str], "SUITE"),
        (&["virtio"], "devmem"),
        (&["refs", "--threads", "0"], "--threads 0"),
        (&["refs", "--threads", "100000"], "at most"),
        (&["refs", "--runs", "0"], "--runs 0"),
        (&["refs", "--duration", "1h"], "suffix `h`"),
        (&["refs", "--html", missing], missing),
        (&["refs", "--results", missing], missing),
        (&["render", "--json"], "--json"),
        (&["refs", "--html", dir.path().to_str().unwrap()], "directory"),
        (&["refs", "--rows", "guard,remote"], "--rows remote"),
        (&["refs", "--list", "--json"], "--json"),
    ] {
        let output = run(args);
        let errors = errors(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {errors}");
        assert!(output.stdout.is_empty() && errors.contains(says), "{args:?} does not say `{says}`: {errors}");
    }
}

/// The system's error is in a message once, and the advice with it.
#[test]
fn an_error_of_the_system_is_printed_once() {
    for option in ["--html", "--results"] {
        let output = run(&["refs", option, "/nonexistent/s"]);
        let said = errors(&output);
        assert_eq!(said.matches("(os error 2)").count(), 1, "{option}: {said}");
        assert!(!output.status.success() && said.matches("No such file").count() == 1, "{option}: {said}");
    }
}

/// Each run is in JSON, with what was done: how long it was, what it counted, and where.
#[test]
fn samples_say_what_was_done() {
    let report = report(&["pool", "--rows", "in_context,limit", "--threads", "1"]);
    let rows = report["variants"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["name"].as_str().unwrap()).collect::<Vec<_>>(), ["limit", "in_context"]);
    for row in rows {
        let samples = row["samples"].as_array().unwrap();
        assert_eq!((samples.len() as u64, row["runs"].as_u64()), (2, Some(2)), "{row}");
        let mut values: Vec<f64> = samples.iter().map(|sample| sample["value"].as_f64().unwrap()).collect();
        values.sort_by(f64::total_cmp);
        let [median, min, max] = figures(row);
        assert_eq!((values[0], values[1]), (min, max));
        assert!(((values[0] + values[1]) / 2.0 - median).abs() < 1e-9, "{row}");
        for sample in samples {
            let of = |key: &str| sample[key].as_u64().unwrap_or_else(|| panic!("{key} of {sample}"));
            // The mean over the operations of the time that they took, within the whole of the run.
            assert!(
                (of("elapsed_ns") as f64 / of("operations") as f64 - sample["value"].as_f64().unwrap()).abs() < 1e-6
            );
            assert!(of("elapsed_ns") <= of("run_ns") && of("operations") > 0, "{sample}");
        }
        // One thread, on the first CPU of the plan.
        assert_eq!(row["cpus"], serde_json::json!([report["params"]["cpus"][0]]));
    }
    assert_eq!(report["done"]["cpus"], rows[0]["cpus"]);
    assert_eq!((&report["done"]["interrupted"], &report["schema"]), (&false.into(), &2.into()));
    assert!(report["done"]["elapsed_s"].as_f64() > Some(0.002), "{}", report["done"]);
}

/// Rows are chosen by name, by section and with stars. Only goals of these rows are in the report;
/// one that needs another row, too, is neither reached nor missed.
#[test]
fn rows_are_listed_and_chosen() {
    let listed = |args: &[&str]| -> Vec<String> {
        let output = run(&[args, &["--list", "--threads", "1"]].concat());
        assert!(output.status.success(), "{}", errors(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    };
    let all = listed(&["all"]);
    assert!(
        ["refs", "pool", "tokens", "devmem", "streams"].iter().all(|suite| all.iter().any(|l| l.starts_with(suite)))
    );
    // Rows that take long have a mark.
    assert!(all.contains(&"streams cost of a segment ours 2 long".to_owned()), "{all:?}");
    assert_eq!(listed(&["all", "--rows", "guard,limit"]), ["refs guard guard 1", "pool one CPU limit 1"]);
    let report = report(&["refs", "pool", "--rows", "final put,lim*", "--threads", "1", "--check"]);
    let suites = report["suites"].as_array().unwrap();
    let names = |suite: &Value| -> Vec<String> {
        suite["variants"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap().to_owned()).collect()
    };
    let chosen = suites.iter().map(names).collect::<Vec<_>>();
    assert!(chosen[0].len() == 6 && chosen[0].iter().all(|name| name.starts_with("final_put_")), "{chosen:?}");
    assert_eq!(chosen[1..], [["limit".to_owned()]]);
    let goals: Vec<_> = suites.iter().flat_map(|suite| suite["goals"].as_array().unwrap()).collect();
    assert!(!goals.is_empty());
    for goal in goals {
        let text = goal["goal"].as_str().unwrap();
        assert!(text.contains("final_put") || text.contains("limit"), "{goal}");
        assert_eq!(goal["verdict"], "not run", "{goal}");
        assert!(goal["why"].as_str().unwrap().contains("was not asked for"), "{goal}");
    }
}

/// `--check` fails if a target is missed. A row that is skipped and a goal that is open are
/// reported, and fail nothing.
#[test]
fn check_fails_for_missed_targets_alone() {
    let bench = |rows: &str, check: &[&str]| {
        let mut command = command::bench();
        command.args(["refs", "--threads", "1", "--rows", rows]).args(check).args(SHORT);
        // Without a compiler the counter in C is skipped.
        let output = command.env("PATH", "/nowhere").output().unwrap();
        let out = String::from_utf8(output.stdout.clone()).unwrap();
        (output.status.code(), errors(&output), out)
    };
    let (status, err, out) = bench("c_sequence,percpuref", &["--check"]);
    assert_eq!(status, Some(0), "{err}");
    assert!(out.contains("skipped 1 thread: percpuref / c_sequence <= 1.15: c_sequence: "), "{out}");
    assert!(out.contains("rows skipped: 1"), "{out}");
    assert_eq!(bench("c_sequence,percpuref", &[]).0, Some(0));
    // Open or reached: the table shows which, and the status does not depend on it.
    let (status, err, out) = bench("plain,percpuref", &["--check"]);
    assert!(
        out.contains("\nopen    1 thread: percpuref / plain") || out.contains("\nreached 1 thread: percpuref / plain"),
        "{out}"
    );
    assert_eq!(status, Some(0), "{err}");
    // Missed or reached: the table shows which, and the status agrees with it.
    let (status, err, out) = bench("percpuref_rotating", &["--check"]);
    let missed = out.contains("\nmissed  1 thread: percpuref_rotating <= 5 ns: ");
    assert!(missed || out.contains("\nreached 1 thread: percpuref_rotating <= 5 ns: "), "{out}");
    assert_eq!((status, err.contains("goals missed: 1;")), (Some(i32::from(missed)), missed), "{err}{out}");
    // The guard has no goal.
    assert_eq!(bench("guard", &["--check"]).0, Some(0));
}

/// The file of results has no samples, and names the date and the machine.
#[test]
fn results_are_a_file_without_samples() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("machine.json");
    short(&["refs", "pool", "--rows", "guard,limit", "--threads", "1", "--results", file.to_str().unwrap()]);
    let results: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let suites = results["suites"].as_array().unwrap();
    assert_eq!(suites.iter().map(|suite| suite["suite"].as_str().unwrap()).collect::<Vec<_>>(), ["refs", "pool"]);
    for suite in suites {
        assert_eq!(suite["date"].as_str().unwrap().len(), "2026-11-25".len());
        assert!(!suite["machine"]["cpu"].as_str().unwrap().is_empty());
        let row = &suite["variants"][0];
        assert!(row["median"].is_f64() && row.get("samples").is_none(), "{row}");
    }
}

/// The documents are as the committed results say: the same check that
/// `netmem-bench render --check` makes.
#[test]
fn the_documents_are_rendered_from_the_results() {
    let output = run(&["render", "--check"]);
    assert!(output.status.success(), "{}", errors(&output));
}

/// A signal ends the measurement: the runs until then are in the report, in JSON and in the page,
/// which are both whole.
#[test]
fn a_signal_ends_it_with_what_was_measured() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.html");
    let mut measured = 0;
    // On a busy machine it can take longer until there is a run.
    for wait in [1, 4, 16] {
        std::fs::write(&file, "old").unwrap();
        let rows = ["refs", "pool", "--rows", "guard,limit", "--runs", "1000000", "--duration", "1ms"];
        let mut running = Background::start(bench().args(rows).args(["--json", "--html", file.to_str().unwrap()]));
        running.awaits_signals();
        std::thread::sleep(Duration::from_secs(wait));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "old", "the file stays until all of it is there");
        running.signal(Signal::INT);
        let (status, out, err) = running.end();
        assert_eq!(status, Some(130), "{err}");
        assert!(err.contains("interrupted"), "{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        schema::fits("bench/schema/bench.json", &report);
        // The second suite was not begun.
        let suites = report["suites"].as_array().unwrap();
        assert_eq!((suites.len(), &suites[0]["suite"]), (1, &"refs".into()));
        assert_eq!(suites[0]["done"]["interrupted"], true);
        let page = std::fs::read_to_string(&file).unwrap();
        well_formed(&page);
        assert!(page.contains("interrupted: the figures are of the runs until then"), "{page}");
        assert!(page.contains("planned and not run: pool."), "{page}");
        assert!(page.contains("fewer runs were made than planned: refs "), "{page}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
        measured = suites[0]["variants"][0]["samples"].as_array().unwrap().len();
        if measured > 0 {
            assert_eq!(suites[0]["variants"][0]["runs"].as_u64(), Some(measured as u64));
            assert!(page.contains(" of 1000000. The fewer"), "{page}");
            break;
        }
    }
    assert!(measured > 0);
}

/// An output that cannot be written is an error, and the others are there: a disk is full.
#[test]
fn an_output_that_fails_leaves_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let [page, results] = ["x.html", "x.json"].map(|name| dir.path().join(name).to_str().unwrap().to_owned());
    let full = "/dev/full".to_owned();
    for (html, results) in [(&full, &results), (&page, &full)] {
        let args = ["refs", "--rows", "guard", "--threads", "1", "--json", "--html", html, "--results", results];
        let output = run(&[&args[..], &SHORT].concat());
        let said = errors(&output);
        assert_eq!((output.status.code(), said.contains("No space left")), (Some(1), true), "{said}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
        assert_eq!(report["suite"], "refs");
    }
    well_formed(&std::fs::read_to_string(&page).unwrap());
    let results: Value = serde_json::from_str(&std::fs::read_to_string(&results).unwrap()).unwrap();
    assert_eq!(results["suites"][0]["suite"], "refs");
}

/// While other programs have the CPUs, the report has a warning.
#[test]
fn a_report_says_that_other_programs_had_the_cpus() {
    let over = AtomicBool::new(false);
    let args = ["pool", "--rows", "limit", "--threads", "1", "--duration", "200ms", "--runs", "3"];
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop()
                }
            });
        }
        let (table, json) = (run(&args), run(&[&args[..], &["--json"]].concat()));
        over.store(true, Ordering::Relaxed);
        let table = String::from_utf8(table.stdout).unwrap();
        assert!(table.contains("\nwarning: other programs had the CPUs"), "{table}");
        let report = command::json(&json);
        schema::fits("bench/schema/bench.json", &report);
        let [own, others] = ["own_s", "others_s"].map(|key| report["done"]["cpu_time"][key].as_f64().unwrap());
        // The loops here had at least half of a CPU for the 600 ms or more.
        assert!(own > 0.0 && others > 0.2, "{}", report["done"]);
    });
}

/// Tables have units in which numbers are short, and JSON has base units.
#[test]
fn units_scale_in_tables() {
    let args = ["tokens", "--rows", "memory_socket_ranges,set_up_ranges", "--threads", "1"];
    let table = short(&args);
    let row = |name: &str| table.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{table}"));
    // Some kilobytes; and the first fragment of an 80 GB device needs more than a microsecond.
    assert!(row("memory_socket_ranges").contains(" kB "), "{table}");
    assert!([" us (", " ms ("].iter().any(|unit| row("set_up_ranges").contains(unit)), "{table}");
    for row in report(&args)["variants"].as_array().unwrap() {
        let unit = if row["name"] == "set_up_ranges" { "ns" } else { "B" };
        assert!(row["unit"] == unit && figures(row)[0] > 1000.0, "{row}");
    }
}

#[test]
fn two_builds_are_compared() {
    let this = env!("CARGO_BIN_EXE_netmem-bench");
    let args = ["refs", "--rows", "guard", "--threads", "1", "--against", this];
    let report = report(&args);
    assert_eq!((&report["command"], &report["pairs"]), (&"bench".into(), &2.into()));
    let rows = report["compared"].as_array().unwrap();
    assert!(!rows.is_empty() && rows.iter().all(|row| row["verdict"] == "no_difference"), "{report}");
    assert!(rows.iter().all(|row| row["name"].as_str().unwrap().starts_with("refs ")), "{report}");
    let text = short(&args);
    assert!(text.contains("too few") && text.contains("Holm"), "{text}");
    let output = run(&[&args[..5], &["--against", "/nowhere/bench"]].concat());
    assert_eq!(output.status.code(), Some(2), "{}", errors(&output));
}
