//! A program as a child process, whose output a test reads.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// After this time, a test that waits is taken for hung. Nothing here takes long; the machine may
/// have much else to do.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What the process has written on standard error.
pub fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The JSON on standard output of a process that has succeeded.
#[track_caller]
pub fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}: {}", output.status, errors(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Waits until `what` returns true.
#[track_caller]
pub fn await_that(mut what: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !what() {
        assert!(begin.elapsed() < PATIENCE, "it does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process that ends with the test.
pub struct Background(pub Child);

impl Background {
    /// Starts the process, with pipes for its output.
    pub fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Waits until a signal would no longer end it at once: it has a handler for SIGINT.
    #[track_caller]
    pub fn awaits_signals(&self) {
        let path = format!("/proc/{}/status", self.0.id());
        await_that(|| {
            let status = std::fs::read_to_string(&path).unwrap();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
            u64::from_str_radix(caught.trim(), 16).unwrap() & 1 << (libc::SIGINT - 1) != 0
        });
    }

    /// Waits until it writes a line on standard error that begins so, and returns the rest of that
    /// line. What comes behind the line is not read.
    #[track_caller]
    pub fn says(&mut self, begin: &str) -> String {
        let stderr = self.0.stderr.as_mut().unwrap();
        let (mut said, mut byte) = (String::new(), [0]);
        loop {
            assert_eq!(stderr.read(&mut byte).unwrap(), 1, "it has ended and said: {said}");
            said.push(byte[0].into());
            if byte == *b"\n"
                && let Some(rest) = said.lines().last().and_then(|line| line.strip_prefix(begin))
            {
                return rest.to_owned();
            }
        }
    }

    /// Waits for the end: status, standard output, standard error. Both are read meanwhile, because
    /// a report can be larger than a pipe.
    #[track_caller]
    pub fn end(&mut self) -> (Option<i32>, String, String) {
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
