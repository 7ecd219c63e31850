//! The program as a child process, and what all tests expect of its reports.

use netmem_testing::schema;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// After this time, a test that waits is taken for hung.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn bench() -> Command {
    Command::new(env!("CARGO_BIN_EXE_netmem-bench"))
}

pub(crate) fn run(args: &[&str]) -> Output {
    bench().args(args).output().unwrap()
}

pub(crate) fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
pub(crate) fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}: {}", output.status, errors(output));
    serde_json::from_slice(&output.stdout).unwrap()
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

/// Every goal has the verdict that its value says. How many goals have a value.
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

/// The report of a suite, which is as the schema says.
#[track_caller]
pub(crate) fn report(args: &[&str]) -> Value {
    let report: Value = serde_json::from_str(&short(&[args, &["--json"]].concat())).unwrap();
    schema::fits("bench/schema/bench.json", &report);
    report
}

/// A process that ends with the test.
pub(crate) struct Background(Child);

impl Background {
    pub(crate) fn start(args: &[&str]) -> Self {
        Self(bench().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Waits until a signal would no longer end it at once: it has a handler for SIGINT.
    #[track_caller]
    pub(crate) fn awaits_signals(&self) {
        let path = format!("/proc/{}/status", self.0.id());
        await_that(|| {
            let status = std::fs::read_to_string(&path).unwrap();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
            u64::from_str_radix(caught.trim(), 16).unwrap() & 1 << (libc::SIGINT - 1) != 0
        });
    }

    /// Waits for the end: status, standard output, standard error. Both are read meanwhile, because
    /// a report can be larger than a pipe.
    #[track_caller]
    pub(crate) fn end(&mut self) -> (Option<i32>, String, String) {
        fn read(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
            std::thread::spawn(move || {
                let mut text = String::new();
                from.read_to_string(&mut text).unwrap();
                text
            })
        }
        let (out, err) = (read(self.0.stdout.take().unwrap()), read(self.0.stderr.take().unwrap()));
        let begin = Instant::now();
        let status = loop {
            match self.0.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(begin.elapsed() < PATIENCE, "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        (status.code(), out.join().unwrap(), err.join().unwrap())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[track_caller]
pub(crate) fn await_that(mut what: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !what() {
        assert!(begin.elapsed() < PATIENCE, "it does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}
