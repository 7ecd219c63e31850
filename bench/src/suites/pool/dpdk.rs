//! DPDK's memory pools: a [peer](crate::peer), built where libdpdk is installed.

use crate::error::BenchError;
use crate::harness::Harness;
use crate::peer::{Asked, Peer, Running, build, tool};
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

#[derive(Clone)]
pub(super) struct Dpdk {
    /// The largest number of threads that is measured.
    threads: usize,
    peer: Peer,
}

impl Dpdk {
    pub(super) fn new(threads: usize) -> Self {
        Self { threads, peer: Peer::new("DPDK") }
    }

    /// Work that measures `what` with this many other threads.
    pub(super) fn work(&self, harness: &Harness, what: &'static str, others: usize) -> Result<Asked, BenchError> {
        let start = || start(harness.cpus(self.threads));
        self.peer.work(start, move |operations| format!("{what} {operations} {others}"))
    }
}

fn start(cpus: &[usize]) -> Result<Running, String> {
    let dir = tempfile::Builder::new().prefix("netmem-dpdk.").tempdir().map_err(|e| format!("a directory: {e}"))?;
    let flags = ["--cflags", "--libs", "libdpdk"].map(OsString::from);
    // The message of pkg-config is replaced, because it has several lines.
    let flags = tool("pkg-config", flags).map_err(|_| "libdpdk is not installed (Debian: libdpdk-dev, pkg-config)")?;
    let program = build(dir.path(), netmem_bench::baselines::DPDK_POOL, &flags)?;
    // Without huge pages DPDK still needs files, unless it is progress to share no memory. The
    // directory of the program is removed when the program runs.
    launch(&program, cpus, true).or_else(|_| launch(&program, cpus, false))
}

fn launch(program: &Path, cpus: &[usize], huge: bool) -> Result<Running, String> {
    // DPDK's threads have the numbers of ours, and run on the same CPUs.
    let lcores: Vec<_> = cpus.iter().enumerate().map(|(thread, cpu)| format!("{thread}@{cpu}")).collect();
    let note = (!huge).then(|| "DPDK found no huge pages, and ran without (vm.nr_hugepages=128)".into());
    let mut command = Command::new(program);
    command
        .args(["--lcores", &lcores.join(","), "--main-lcore", "0", "--no-pci", "--no-telemetry", "-m", "256"])
        .args(if huge { &["--in-memory"][..] } else { &["--no-huge", "--no-shconf"] })
        .arg("--log-level=lib.eal:error");
    Running::start(&mut command, note)
}
