//! A peer: a program in C that is built if `cc` is installed, and that measures when this command
//! asks for it.
//!
//! The program is started once. It prints `ready`, sleeps between two measurements, and ends
//! together with this command. To start a measurement, this command writes a line to the program's
//! standard input. The program answers with a line: nanoseconds and nanoseconds of CPU time. The
//! program's source lists the lines that it understands.

use crate::error::BenchError;
use crate::harness::{Harness, Timed};
use crate::timing::{BATCH, Work};
use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::rc::Rc;

/// A program that is built and started when the first of several rows asks for it. An error is kept
/// for the other rows.
#[derive(Clone)]
pub(crate) struct Peer {
    /// The program's name in errors.
    what: &'static str,
    running: Rc<RefCell<Option<Result<Running, String>>>>,
}

impl Peer {
    pub(crate) fn new(what: &'static str) -> Self {
        Self { what, running: Rc::default() }
    }

    /// Work that the program does. `question` makes the line that asks for so many operations. If
    /// the program does not run yet, `start` starts it.
    pub(crate) fn work(
        &self,
        start: impl FnOnce() -> Result<Running, String>,
        question: impl Fn(u64) -> String + 'static,
    ) -> Result<Asked, BenchError> {
        match self.running.borrow_mut().get_or_insert_with(start) {
            Ok(_) => Ok(Asked { peer: self.clone(), question: Box::new(question) }),
            Err(why) => Err(self.unavailable(why.clone())),
        }
    }

    fn unavailable(&self, why: String) -> BenchError {
        BenchError::Unavailable { what: self.what, why }
    }
}

/// One of the program's measurements.
pub(crate) struct Asked {
    peer: Peer,
    question: Box<dyn Fn(u64) -> String>,
}

impl Work for Asked {
    fn run(&mut self, harness: &Harness, blocks: u64) -> Result<Timed, BenchError> {
        let mut running = self.peer.running.borrow_mut();
        let asked = match &mut *running {
            Some(Ok(program)) => program.ask(&(self.question)(blocks * BATCH)),
            Some(Err(why)) => Err(why.clone()),
            None => Err("it was not started".into()),
        };
        match asked {
            Ok((ns, cpu_ns)) => Ok(harness.timed_elsewhere(ns, cpu_ns)),
            Err(why) => {
                *running = Some(Err(why.clone()));
                Err(self.peer.unavailable(why))
            }
        }
    }

    fn least(&self) -> u64 {
        // A measurement loses a few microseconds for the two messages.
        1024
    }

    fn note(&self) -> Option<String> {
        match &*self.peer.running.borrow() {
            Some(Ok(program)) => program.note.clone(),
            _ => None,
        }
    }
}

/// The program, running.
pub(crate) struct Running {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// The program's standard error.
    errors: File,
    /// A remark on how the program runs, for the report.
    note: Option<String>,
}

impl Running {
    /// Starts the program, and waits until it is ready.
    pub(crate) fn start(command: &mut Command, note: Option<String>) -> Result<Self, String> {
        let errors = tempfile::tempfile().and_then(|errors| Ok((errors.try_clone()?, errors)));
        let (errors, stderr) = errors.map_err(|e| format!("a temporary file: {e}"))?;
        // The program has a process group of its own, because Ctrl-C on a terminal signals the
        // whole group of this command. This command ends the program after it has reported what was
        // measured.
        let mut child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .map_err(|e| format!("the program for it cannot be run: {e}"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("the program for it has no pipes".into());
        };
        let mut program = Self { child, input, output: BufReader::new(output), errors, note };
        // A program that rejects its arguments prints its usage here.
        match program.line()?.as_str() {
            "ready" => Ok(program),
            _ => Err(program.complaint()),
        }
    }

    /// Nanoseconds of a measurement, and the nanoseconds in which the program had its CPU.
    fn ask(&mut self, what: &str) -> Result<(u64, u64), String> {
        // If the program has ended, its standard error has the reason.
        if writeln!(self.input, "{what}").is_err() {
            return Err(self.complaint());
        }
        let line = self.line()?;
        let (ns, cpu_ns) = line.split_once(' ').unwrap_or_default();
        ns.parse().ok().zip(cpu_ns.parse().ok()).ok_or_else(|| format!("`{what}` was answered by `{line}`"))
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(1..) => Ok(line.trim_end().into()),
            _ => Err(self.complaint()),
        }
    }

    /// Asks the program to end, and returns why it ended.
    fn complaint(&mut self) -> String {
        self.end();
        let mut said = Vec::new();
        let _ = self.errors.rewind().and_then(|()| self.errors.read_to_end(&mut said));
        first_line(&said)
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

/// Runs a tool of the system. Returns its output; on failure, the first line of its standard error.
pub(crate) fn tool(what: &str, arguments: impl IntoIterator<Item = OsString>) -> Result<String, String> {
    let done = Command::new(what).args(arguments).stdin(Stdio::null()).output();
    let done = done.map_err(|e| format!("`{what}` cannot be run: {e}"))?;
    match done.status.success() {
        true => Ok(String::from_utf8_lossy(&done.stdout).into_owned()),
        false => Err(first_line(&done.stderr)),
    }
}

fn first_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it said nothing").into()
}

/// Builds a program from its source in a directory, with these flags for the compiler. Returns the
/// path of the program.
pub(crate) fn build(dir: &Path, source: &str, flags: &str) -> Result<PathBuf, String> {
    let (file, program) = (dir.join("peer.c"), dir.join("peer"));
    std::fs::write(&file, source).map_err(|e| format!("{}: {e}", file.display()))?;
    let mut arguments: Vec<OsString> = ["-O3", "-march=native", "-o"].map(OsString::from).into();
    arguments.extend([program.clone().into(), file.into()]);
    arguments.extend(flags.split_whitespace().map(OsString::from));
    tool("cc", arguments).map(|_| program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said_in_a_line() {
        assert_eq!(first_line(b"\n  EAL: no memory\nEAL: really\n"), "EAL: no memory");
        assert_eq!(first_line(b""), "it said nothing");
        let missing = tool("netmem-no-such-tool", []).unwrap_err();
        assert!(missing.contains("netmem-no-such-tool"), "{missing}");
    }
}
