//! `netmem perf --proto`: flows and requests between two stacks.

use crate::command::netns::{Namespace, missing};
use crate::command::*;
use netmem_testing::schema;
use serde_json::Value;

/// The contract of `perf --proto --json`.
#[track_caller]
fn measures(report: &Value, name: &str, flows: usize) {
    schema::fits("crates/cli/schema/perf.json", report);
    let row = &report["variants"][0];
    let unit = if name.contains("-rr-") { "requests/s" } else { "b/s" };
    assert_eq!((&report["command"], &row["name"], &row["unit"]), (&"perf".into(), &name.into(), &unit.into()));
    assert!(row["mean"].as_f64() > Some(0.0) && row["deviation"].is_number() && row["runs"] == 2, "{report}");
    let rows = row["flows"].as_array().unwrap();
    assert_eq!(rows.len(), flows);
    assert!(
        rows.iter().all(|flow| flow["bytes"].as_u64() > Some(0) && flow["elapsed_ns"].as_u64() > Some(100_000_000)),
        "{report}"
    );
    let cpus = row["cpus"].as_array().unwrap();
    let roles: Vec<_> = cpus.iter().flat_map(|cpu| cpu["roles"].as_array().unwrap()).collect();
    assert!(["source", "target", "device"].iter().all(|role| roles.contains(&&Value::from(*role))), "{report}");
    for cpu in cpus {
        let all: f64 = ["usr", "sys", "idle", "iowait", "irq", "softirq", "steal"]
            .map(|what| cpu[what].as_f64().unwrap())
            .iter()
            .sum();
        assert!((99.0..101.0).contains(&all), "{cpu}");
    }
    let samples = row["samples"].as_array().unwrap();
    for what in if unit == "b/s" { &["bytes"][..] } else { &["bytes", "requests"] } {
        let sum = |of: &[Value]| of.iter().map(|part| part[what].as_u64().unwrap()).sum::<u64>();
        assert_eq!(sum(rows), sum(samples), "{what}: {report}");
    }
    assert!(report["pool"]["allocated"].as_u64() > Some(0) && report["pool"]["leaked"] == 0);
}

#[test]
fn flows_between_two_stacks() {
    for (proto, more) in [("tcp", &[][..]), ("udp", &[]), ("tcp", &["--link", "loss=1%,delay=1ms,seed=3"])] {
        let args = ["perf", "--proto", proto, "--flows", "3", "--duration", "100ms", "--runs", "2", "--json"];
        let report = json(&run(&[&args[..], more].concat()));
        measures(&report, &format!("{proto}-netmem-netmem"), 3);
        assert_eq!(report["link"]["to_driver"]["sent"].as_u64() > Some(0), !more.is_empty());
    }
    let text = run(&["perf", "--proto", "tcp", "--duration", "100ms", "--runs", "1", "-i", "0.04"]);
    let text = String::from_utf8_lossy(&text.stdout);
    assert!(text.contains("softirq %") && text.contains("all: ") && text.contains("CPU/GB"), "{text}");
    let intervals = text.lines().filter(|line| line.contains(" s: ") && line.ends_with("b/s"));
    assert_eq!(intervals.count(), 2, "{text}");
}

#[test]
fn flows_to_and_from_the_kernel() {
    if let Err(why) = missing() {
        return skip(&why);
    }
    let namespace = Namespace::new().unwrap();
    let port = format!("tap:{}", namespace.tap("10.81.0.1/24"));
    for proto in ["tcp", "udp"] {
        for (more, name) in [
            (&[][..], "netmem-kernel"),
            (&["--reverse"], "kernel-netmem"),
            (&["--rr", "64,1000"], "rr-netmem-kernel"),
            (&["--rr", "64,1000", "--reverse", "--rate", "2000"], "rr-kernel-netmem"),
        ] {
            let args = ["perf", "--proto", proto, "--port", &port, "--addr", "10.81.0.2/24", "--flows", "2", "--json"];
            let mut command = namespace.command(env!("CARGO_BIN_EXE_netmem"));
            let output = command.args(args).args(["--duration", "100ms", "--runs", "2"]).args(more).output().unwrap();
            measures(&json(&output), &format!("{proto}-{name}"), 2);
        }
    }
}

/// A run of flows of this kind, of 100 ms without `--duration`, as JSON that fits the schema.
#[track_caller]
fn perf(args: &str) -> Value {
    let duration = if args.contains("--duration") { "" } else { " --duration 100ms" };
    let all = format!("perf --proto {args}{duration} --json");
    let report = json(&run(&all.split(' ').collect::<Vec<_>>()));
    schema::fits("crates/cli/schema/perf.json", &report);
    report
}

#[test]
fn requests_between_two_stacks() {
    for proto in ["tcp", "udp"] {
        let report = perf(&format!("{proto} --rr 64,1000 --flows 3 --runs 2"));
        measures(&report, &format!("{proto}-rr-netmem-netmem"), 3);
        let row = &report["variants"][0];
        assert_eq!((&report["params"]["size"], &report["params"]["answer"]), (&64.into(), &1000.into()));
        let flow = &row["flows"][0];
        assert_eq!(flow["bytes"].as_u64().unwrap(), flow["requests"].as_u64().unwrap() * 1064);
        let times = ["p50", "p90", "p99", "p99_9", "p99_99", "max"].map(|at| row["latency_ns"][at].as_u64().unwrap());
        assert!(times[0] > 0 && times.is_sorted() && row["latency_ns"]["unsent"] == 0, "{report}");
    }
}

/// At a fixed rate all requests count that were due, answered in time or not; and so does the time
/// that they waited for.
#[test]
fn requests_at_fixed_rates_count_from_when_they_were_due() {
    let report = perf("tcp --rr 64,64 --flows 2 --rate 500,5000000 --runs 1");
    let rows = report["variants"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, asked) in rows.iter().zip([500u64, 5_000_000]) {
        assert_eq!(row["asked"], asked);
        let due = asked as f64 * row["samples"][0]["elapsed_ns"].as_f64().unwrap() / 1e9;
        let counted = row["latency_ns"]["requests"].as_f64().unwrap();
        assert!((counted - due).abs() <= 3.0, "{counted} of {due}: {row}");
    }
    let [_, overload] = &rows[..] else { panic!("{report}") };
    let (answered, times) = (overload["samples"][0]["requests"].as_u64().unwrap(), &overload["latency_ns"]);
    assert!(times["unsent"].as_u64() > Some(0) && answered < times["requests"].as_u64().unwrap(), "{report}");
    // The last requests were due at the end of the run, and waited for as long as the run took.
    assert!(times["p50"].as_u64() >= Some(100_000_000), "{report}");
}

#[test]
fn each_datagram_is_accounted_for() {
    for (more, loses) in [("", false), (" --link loss=20%,seed=3", true)] {
        let report = perf(&format!("udp --flows 2 --rate 2000 --size 100 --runs 1{more}"));
        let [sent, arrived] =
            ["sent", "arrived"].map(|what| report["variants"][0]["datagrams"][what].as_u64().unwrap());
        assert!(sent > 100 && if loses { arrived < sent && arrived > sent / 2 } else { arrived == sent }, "{report}");
    }
}

#[test]
fn the_highest_rate_that_reaches_a_goal() {
    // All requests are answered within ten seconds, at any rate.
    let report = perf("tcp --rr 64,64 --search 50%=10s");
    let [closed, open] = &report["variants"].as_array().unwrap()[..] else { panic!("{report}") };
    assert!(closed.get("asked").is_none() && open["asked"] == report["highest"] && report["highest"] != 0, "{report}");
    // A link that is slower than the source. The rate that was found lost nothing; some rate above
    // it lost something.
    let report = perf("udp --size 100 --search lossless --duration 300ms --link rate=3M");
    let rows = report["variants"].as_array().unwrap();
    let lost = |row: &Value| row["datagrams"]["arrived"] != row["datagrams"]["sent"];
    let found = rows.iter().find(|row| row["asked"] == report["highest"]).unwrap_or_else(|| panic!("{report}"));
    let above = |row: &Value| row["asked"].as_u64() > found["asked"].as_u64();
    assert!(!lost(found) && rows[1..].iter().any(|row| lost(row) && above(row)), "{rows:#?}");
    let text = run(&"perf --proto tcp --rr 1,1 --search 100%=1us --duration 100ms".split(' ').collect::<Vec<_>>());
    let text = String::from_utf8_lossy(&text.stdout);
    assert!(text.contains("no rate reaches 100%=1us"), "{text}");
}
