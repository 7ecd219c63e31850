//! DPDK's memory pools: a program of its own, built where libdpdk is installed, which measures when it is told to.
//!
//! It is started once, sleeps between two measurements, and dies with this command. What it is told and what it answers is said
//! in its source.

use super::BATCH;
use crate::bench::error::BenchError;
use crate::bench::lab::{Lab, Timed};
use crate::bench::timing::Work;
use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::rc::Rc;

/// The program, which is built and started when the first of several asks for it. An error is kept for the others.
#[derive(Clone)]
pub(super) struct Dpdk {
    /// The most threads that anything is measured with.
    threads: usize,
    peer: Rc<RefCell<Option<Result<Peer, String>>>>,
}

impl Dpdk {
    pub(super) fn new(threads: usize) -> Self {
        Self { threads, peer: Rc::default() }
    }

    /// Has `what` measured, with as many other threads as there are to be.
    pub(super) fn work(&self, lab: &Lab, what: &'static str, others: usize) -> Result<Asked, BenchError> {
        let mut peer = self.peer.borrow_mut();
        match peer.get_or_insert_with(|| Peer::start(lab.cpus(self.threads))) {
            Ok(_) => Ok(Asked { dpdk: self.clone(), what, others }),
            Err(why) => Err(unavailable(why.clone())),
        }
    }
}

fn unavailable(why: String) -> BenchError {
    BenchError::Unavailable { what: "DPDK", why }
}

/// One of the program's measurements.
pub(super) struct Asked {
    dpdk: Dpdk,
    what: &'static str,
    others: usize,
}

impl Work for Asked {
    fn run(&mut self, lab: &Lab, blocks: u64) -> Result<Timed, BenchError> {
        let mut peer = self.dpdk.peer.borrow_mut();
        let asked = match &mut *peer {
            Some(Ok(peer)) => peer.ask(&format!("{} {} {}", self.what, blocks * BATCH, self.others)),
            Some(Err(why)) => Err(why.clone()),
            None => Err("it was not started".into()),
        };
        match asked {
            Ok((ns, cpu_ns)) => Ok(lab.timed_elsewhere(ns, cpu_ns)),
            Err(why) => {
                *peer = Some(Err(why.clone()));
                Err(unavailable(why))
            }
        }
    }

    fn least(&self) -> u64 {
        // A few microseconds are lost on the way into and out of it.
        1024
    }

    fn note(&self) -> Option<String> {
        match &*self.dpdk.peer.borrow() {
            Some(Ok(peer)) if !peer.huge => {
                Some("DPDK found no huge pages, and ran without (vm.nr_hugepages=128)".into())
            }
            _ => None,
        }
    }
}

/// The program, running.
struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// What it complains of.
    errors: File,
    huge: bool,
}

impl Peer {
    fn start(cpus: &[usize]) -> Result<Self, String> {
        let dir = tempfile::Builder::new().prefix("netmem-dpdk.").tempdir().map_err(|e| format!("a directory: {e}"))?;
        let program = build(dir.path())?;
        // Without huge pages DPDK refuses to do without files, unless it is told to share none. When it runs, its directory goes.
        Self::launch(&program, cpus, true).or_else(|_| Self::launch(&program, cpus, false))
    }

    fn launch(program: &Path, cpus: &[usize], huge: bool) -> Result<Self, String> {
        // Their threads are numbered as ours are, wherever they run.
        let lcores: Vec<_> = cpus.iter().enumerate().map(|(thread, cpu)| format!("{thread}@{cpu}")).collect();
        let errors = tempfile::tempfile().and_then(|errors| Ok((errors.try_clone()?, errors)));
        let (errors, stderr) = errors.map_err(|e| format!("a temporary file: {e}"))?;
        let mut child = Command::new(program)
            .args(["--lcores", &lcores.join(","), "--main-lcore", "0", "--no-pci", "--no-telemetry", "-m", "256"])
            .args(if huge { &["--in-memory"][..] } else { &["--no-huge", "--no-shconf"] })
            .arg("--log-level=lib.eal:error")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .map_err(|e| format!("the program for it cannot be run: {e}"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("the program for it has no pipes".into());
        };
        let mut peer = Self { child, input, output: BufReader::new(output), errors, huge };
        // What comes first is its usage, where it does not like its arguments.
        match peer.line()?.as_str() {
            "ready" => Ok(peer),
            _ => Err(peer.complaint()),
        }
    }

    /// Nanoseconds, and how many of them the program had its CPU.
    fn ask(&mut self, what: &str) -> Result<(u64, u64), String> {
        // A program that has died says why in its errors.
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

    /// Why the program ended, or is about to: it is told to.
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

impl Drop for Peer {
    fn drop(&mut self) {
        self.end();
    }
}

/// Runs a tool of the system. What it prints, or the first line of its complaint.
fn tool(what: &str, arguments: impl IntoIterator<Item = OsString>) -> Result<String, String> {
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

/// Builds the program in a directory; says where it is.
fn build(dir: &Path) -> Result<PathBuf, String> {
    let flags = ["--cflags", "--libs", "libdpdk"].map(OsString::from);
    // Not its own words, which go over several lines.
    let flags = tool("pkg-config", flags).map_err(|_| "libdpdk is not installed (Debian: libdpdk-dev, pkg-config)")?;
    let (source, program) = (dir.join("dpdk.c"), dir.join("dpdk"));
    std::fs::write(&source, netmem_bench::DPDK_POOL).map_err(|e| format!("{}: {e}", source.display()))?;
    let mut arguments: Vec<OsString> = ["-O3", "-march=native", "-o"].map(OsString::from).into();
    arguments.extend([program.clone().into(), source.into()]);
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
