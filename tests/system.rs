//! The command among real peers: the Linux kernel, a Linux guest with its own driver, DPDK on either side of a vhost-user socket,
//! and a user who may do nothing special. The work is in scripts, which can be run by hand as well; `NETMEM` names another binary
//! than the one that cargo built with this test (a release build, for figures that mean something).
//!
//! Performance goals are printed and not asserted, for a test's machine is not a quiet one.
#![allow(clippy::unwrap_used, missing_docs)]

mod skip;

use serde_json::Value;
use skip::skip;
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// Polling peers take whole CPUs, of which there may be two: one such test at a time.
static CPUS: Mutex<()> = Mutex::new(());

fn netmem() -> PathBuf {
    let binary = std::env::var_os("NETMEM").unwrap_or_else(|| OsString::from(env!("CARGO_BIN_EXE_netmem")));
    // A relative NETMEM is relative to where the user is: the top of the tree.
    Path::new(TREE).join(binary)
}

const TREE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Runs a script of the tree, which exits with 0 if it passed or if its output says `skipped:`.
#[track_caller]
fn script(path: &str, args: &[&str]) {
    let _alone = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let output = Command::new(Path::new(TREE).join(path))
        .args(args)
        .env("NETMEM", netmem())
        // Peers are compared once, briefly: whether it works is what is asked here. A slow machine may take its time.
        .envs([("RUNS", "1"), ("SECS", "1"), ("TIMEOUT", "900")])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{path} {args:?}: {}\n{text}{errors}", output.status);
    match text.lines().find(|line| line.starts_with("skipped:")) {
        Some(line) => skip(line.trim_start_matches("skipped:").trim()),
        // Past the runner's capture: what the kernel counted and what the peers reached belongs in a log.
        None => {
            let debug = cfg!(debug_assertions) && std::env::var_os("NETMEM").is_none();
            let note = if debug { " (an unoptimised build: figures mean nothing)" } else { "" };
            let _ = writeln!(std::io::stderr(), "{path} {}{note}\n{}", args.join(" "), text.trim_end());
        }
    }
}

/// The kernel's UDP flood and flood ping into a tap: frames seen and counted drops are what the kernel says it sent.
/// Proves NET-1 and POOL-12 with traffic that is not ours.
#[test]
fn kernel_traffic_is_accounted_for() {
    script("tests/kernel/flood.sh", &[]);
}

/// TCP of the kernel between two namespaces, through two devices and our driver between them, with offloads on either side, both or
/// none: bytes arrive as they were sent. Prints the throughput of each, and the ratio. Proves NET-9.
#[test]
fn forwarding_between_two_taps() {
    // Beside the binary of these tests. NETMEM may be another one.
    let build = ["build", "--quiet", "--offline", "--package", "netmem", "--example", "forward"];
    let built = Command::new(env!("CARGO")).args(build).current_dir(TREE).status().unwrap();
    assert!(built.success());
    script(
        "tests/kernel/forward.sh",
        &[Path::new(env!("CARGO_BIN_EXE_netmem")).with_file_name("examples/forward").to_str().unwrap()],
    );
}

/// Where both guest tests find the guest; what is missing of it is made by the first.
const GUEST: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/guest");

/// A Linux guest's virtio-net driver on our device: pings, and iperf3 for five seconds each way, through a tap.
#[test]
fn a_linux_guest_on_a_tap() {
    script("tests/guest/test.sh", &["netmem", "tap", GUEST]);
}

/// A Linux guest's virtio-net driver on our device: every frame comes back, none twice.
#[test]
fn a_linux_guest_on_an_echo() {
    script("tests/guest/test.sh", &["netmem", "echo", GUEST]);
}

/// Our driver, and DPDK's for comparison, on DPDK's vhost. Proves NET-1, NET-2 (a foreign DMA domain) and POOL-11: packets
/// arrive, maps equal unmaps, and nothing is in flight at the end.
#[test]
fn our_driver_on_dpdk_vhost() {
    script("bench/peers/dpdk-vhost.sh", &[]);
}

/// DPDK's virtio_user, as it comes and vectorised, on our device.
#[test]
fn dpdk_virtio_user_on_our_device() {
    script("bench/peers/netmem-device.sh", &[]);
}

/// Our device and driver in two processes, DPDK's in two others.
#[test]
fn a_pair_of_ours_and_a_pair_of_dpdk() {
    script("bench/peers/pairs.sh", &[]);
}

/// Today's peers: the programs of Debian 13, which tests/peers/debian13.sh unpacks beside the system. A module, so that a run can leave
/// them out by its name (`--skip peers::`).
mod peers {
    use super::script;

    /// Where the Debian 13 root is; the first of these tests makes it.
    const DEBIAN13: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/debian13");

    /// packetdrill's scripts for TCP: 59 of the 73 that are standard pass. tests/peers/packetdrill.txt says of each other one
    /// why it fails or is not run, and the test fails where that is not so. Proves INET-2.
    #[test]
    fn packetdrill_passes_but_for_what_is_listed() {
        script("tests/peers/packetdrill.py", &[]);
    }

    /// The device is killed and restarted ten times under a guest's ping and TCP, and the connection lives on. Proves NET-11.
    #[test]
    fn a_guest_outlives_its_device() {
        script("tests/peers/restart.py", &[DEBIAN13]);
    }

    /// The same where QEMU listens, and the device connects to it. Proves NET-11.
    #[test]
    fn a_guest_outlives_a_device_that_connects() {
        script("tests/peers/restart.py", &[DEBIAN13, "connect"]);
    }

    /// A guest is reset ten times, and its next driver uses the device each time. Proves NET-11.
    #[test]
    fn a_guest_reboots() {
        script("tests/peers/reboot.py", &[DEBIAN13]);
    }

    /// Memory is plugged into a guest under ping and TCP, used by the device, and taken out; no ping is lost. Proves NET-11.
    #[test]
    fn a_guest_gets_memory() {
        script("tests/peers/plug.py", &[DEBIAN13]);
    }

    /// A guest migrates from one QEMU and device to another under ping and TCP; pings are lost only around the move, and counted.
    /// Proves NET-11.
    #[test]
    fn a_guest_migrates() {
        script("tests/peers/migrate.py", &[DEBIAN13]);
    }

    /// The same with packed rings, whose position and wrap counters move with the guest. Proves NET-7 and NET-11.
    #[test]
    fn a_guest_with_packed_rings_migrates() {
        script("tests/peers/migrate.py", &[DEBIAN13, "packed"]);
    }

    /// DPDK's virtio_user, 22.11 and 24.11, on each of its paths, with one and two queue pairs, and listening: what the device sends
    /// back is byte for byte what was sent. Proves NET-7.
    #[test]
    fn virtio_user_in_every_format() {
        script("tests/peers/dpdk.py", &[DEBIAN13]);
    }

    /// testpmd's checksum engine, with TSO and LRO, on our device and a tap: sums and sizes of segments are passed on as they are.
    /// Proves NET-9.
    #[test]
    fn checksums_and_segments_of_testpmd() {
        script("tests/peers/csum.py", &[DEBIAN13]);
    }

    /// A guest with a card for each ring format: two queue pairs with MSI-X, large frames, offloads that are on and used, and iperf3
    /// both ways over IPv4 and IPv6; cards without any of these beside them. Proves NET-7 and NET-9.
    #[test]
    fn a_guest_with_every_card() {
        script("tests/peers/guest.py", &[DEBIAN13]);
    }

    /// iPXE drives the device and loads the kernel, which drives the device after it. Proves NET-11.
    #[test]
    fn firmware_before_the_kernel() {
        script("tests/peers/ipxe.py", &[DEBIAN13]);
    }
}

/// The page pool and a page per packet by turns. Proves PERF-1: before and after in one run.
#[test]
fn page_pool_and_page_per_packet() {
    script("bench/peers/pool-vs-page.sh", &[]);
}

/// The same command as somebody who may do nothing: no root, no capabilities. The binary is copied to where anybody can run it.
struct Nobody {
    dir: tempfile::TempDir,
    prefix: &'static [&'static str],
}

impl Nobody {
    const SETPRIV: &[&str] =
        &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--no-new-privs", "--"];

    /// `None` if this is root and cannot become anybody else; a user who is not root stays who he is.
    fn new() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        // By another process: a descriptor open for writing, inherited by a child of another test, would make it "text file busy".
        let copied = Command::new("install").args(["-m", "755"]).arg(netmem()).arg(dir.path().join("netmem")).status();
        assert!(copied.unwrap().success());
        let id = Command::new("id").arg("-u").output().unwrap();
        let root = String::from_utf8_lossy(&id.stdout).trim() == "0";
        let nobody = Self { dir, prefix: if root { Self::SETPRIV } else { &["env", "--"] } };
        let who = nobody.command("id").arg("-u").output().ok()?;
        (who.status.success() && who.stdout != b"0\n").then_some(nobody)
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(self.prefix[0]);
        command.args(&self.prefix[1..]).arg(program).current_dir("/");
        command
    }

    #[track_caller]
    fn netmem(&self, args: &[&str]) -> Output {
        let output = self.command(self.dir.path().join("netmem")).args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        output
    }
}

#[track_caller]
fn balances(report: &Value) {
    let pools: Vec<_> =
        ["pool", "page"].into_iter().map(|pool| &report[pool]).filter(|pool| pool.is_object()).collect();
    assert!(!pools.is_empty());
    for pool in pools {
        assert!(pool["allocated"].as_u64() > Some(0), "{pool}");
        assert_eq!(pool["allocated"], pool["returned"], "{pool}");
        assert_eq!(pool["mapped"], pool["unmapped"], "{pool}");
        assert_eq!((&pool["inflight"], &pool["leaked"]), (&0.into(), &0.into()), "{pool}");
    }
}

/// The main job, only shorter, without privileges: it ends in the table and the books balance. Proves POOL-1, POOL-5 and
/// POOL-11 as a new user sees them.
#[test]
fn the_main_job_needs_no_privileges() {
    let Some(nobody) = Nobody::new() else { return skip("root here cannot become anybody else (setpriv)") };
    let table = String::from_utf8(nobody.netmem(&["--duration", "50ms", "--runs", "1"]).stdout).unwrap();
    for words in [
        "small-64",
        "mergeable-64",
        "mergeable-1500",
        "other",
        "page pool: ",
        "page per packet: ",
        "in flight 0, leaked 0",
    ] {
        assert!(table.contains(words), "no `{words}` in:\n{table}");
    }
    let report = nobody.netmem(&["perf", "--duration", "50ms", "--runs", "1", "--json"]).stdout;
    balances(&serde_json::from_slice(&report).unwrap());
}

/// A capture of thousands of frames of as many sizes as there are, replayed by the command in every mode. Proves NET-5: what was
/// received is, by its number of frames and of bytes, an unbroken piece of the capture played in a loop.
#[test]
fn a_capture_is_replayed_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mixed.pcap");
    // 60 to 1514 bytes in an order without a pattern; 1009 is prime to the number of sizes.
    let sizes: Vec<u64> = (0..1455 * 3).map(|i| 60 + i * 1009 % 1455).collect();
    let mut file = [0xa1b2_c3d4u32, 4 << 16 | 2, 0, 0, 1 << 20, 1].map(u32::to_le_bytes).concat();
    for &size in &sizes {
        file.extend([0, 0, size as u32, size as u32].map(u32::to_le_bytes).concat());
        file.resize(file.len() + size as usize, 0x5a);
    }
    std::fs::write(&path, file).unwrap();

    let port = format!("pcap:{}", path.display());
    let args = ["perf", "--port", &port, "--mode", "all", "--duration", "100ms", "--runs", "1", "--json"];
    let output = Command::new(netmem()).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    balances(&report);
    let rows = report["variants"].as_array().unwrap();
    for mode in ["small-pcap", "mergeable-pcap", "big-pcap"] {
        assert!(rows.iter().any(|row| row["name"] == mode && row["frames"].as_u64() > Some(0)), "{mode}: {rows:?}");
    }
    for row in rows.iter().filter(|row| row["skipped"].is_null()) {
        let (frames, bytes) = (row["frames"].as_u64().unwrap(), row["bytes"].as_u64().unwrap());
        assert_eq!(row["dropped"], 0, "{row}");
        let (rounds, rest) = (frames / sizes.len() as u64, frames as usize % sizes.len());
        let rest_bytes = bytes.checked_sub(rounds * sizes.iter().sum::<u64>());
        let twice: Vec<u64> = sizes.iter().chain(&sizes).copied().collect();
        let piece = (0..sizes.len()).any(|at| Some(twice[at..at + rest].iter().sum()) == rest_bytes);
        assert!(piece, "{frames} frames of {bytes} bytes are no piece of the capture: {row}");
    }
}
