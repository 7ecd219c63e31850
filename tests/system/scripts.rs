//! The command with real peers: the Linux kernel, a Linux guest with its own driver, and DPDK on
//! either side of a vhost-user socket. Some tests run it as a user without privileges. The work is
//! in scripts, which can also be run by hand. By default the tests build the command without
//! optimisation. `NETMEM` names another binary, for example a release build for meaningful figures.
//!
//! Performance goals are printed and not asserted, because a machine that runs tests is not quiet.

use crate::CPUS;
use netmem_testing::namespace;
use netmem_testing::tree::{TREE, build_peers, example, netmem, netmem_with_cuda};
use netmem_testing::{installed, skip};
use serde_json::Value;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::PoisonError;

/// Runs a script of the tree, which exits with 0 if it passed or if its output has `skipped:`.
#[track_caller]
fn script(path: &str, args: &[&str]) {
    script_of(&netmem(), path, args);
}

/// The same for a comparison of drivers that take turns, with the programs it needs.
#[track_caller]
fn comparison(path: &str, args: &[&str]) {
    build_peers();
    script(path, args);
}

/// As `script`, with this command.
#[track_caller]
fn script_of(netmem: &Path, path: &str, args: &[&str]) {
    let _alone = CPUS.write().unwrap_or_else(PoisonError::into_inner);
    run(netmem, path, args);
}

/// The same beside other such scripts, none of which polls or counts losses. Each has namespaces
/// and a folder of its own.
#[track_caller]
fn script_beside(path: &str, args: &[&str]) {
    let netmem = netmem();
    let _beside = CPUS.read().unwrap_or_else(PoisonError::into_inner);
    run(&netmem, path, args);
}

#[track_caller]
fn run(netmem: &Path, path: &str, args: &[&str]) {
    let interpreter = if path.ends_with(".py") { "python3" } else { "bash" };
    if let Err(why) = installed(&[interpreter]) {
        return skip(&why);
    }
    let output = Command::new(Path::new(TREE).join(path))
        .args(args)
        .env("NETMEM", netmem)
        // Peers are compared once, for a short time: the test checks only that the comparison
        // works. A slow machine gets more time.
        .envs([("RUNS", "1"), ("SECS", "1"), ("TIMEOUT", "900")])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{path} {args:?}: {}\n{text}{errors}", output.status);
    match text.lines().find(|line| line.starts_with("skipped:")) {
        Some(line) => skip(line.trim_start_matches("skipped:").trim()),
        // Written past the runner's capture: the log should have the kernel's counters and the
        // peers' figures.
        None => {
            let debug = cfg!(debug_assertions) && std::env::var_os("NETMEM").is_none();
            let note = if debug { " (an unoptimised build: figures mean nothing)" } else { "" };
            let _ = writeln!(std::io::stderr(), "{path} {}{note}\n{}", args.join(" "), text.trim_end());
        }
    }
}

/// The kernel's UDP flood and flood ping into a tap: the frames that are seen and the drops that
/// are counted add up to what the kernel counts as sent. Proves NET-1 and POOL-12 with traffic of
/// another sender.
#[test]
fn kernel_traffic_is_accounted_for() {
    script("tests/kernel/flood.sh", &[]);
}

/// TCP of the kernel between two namespaces, through two devices and our driver between them, with
/// offloads on either side, both or none: bytes arrive as they were sent. Prints the throughput of
/// each, and the ratio. Proves NET-9.
#[test]
fn forwarding_between_two_taps() {
    script("tests/kernel/forward.sh", &[example("forward").to_str().unwrap()]);
}

/// Files from nc into device memory and back, by `examples/loader.rs`. The checksums match those
/// that another process computes from the memory. Proves MEM-9.
#[test]
fn files_into_device_memory_and_back() {
    script("tests/kernel/loader.py", &[example("loader").to_str().unwrap()]);
}

/// The same into the memory of a GPU, on a library that stands in for its driver: the calls of both
/// processes, with a kernel that is computed by the CPU. It proves nothing about a GPU.
#[test]
fn files_into_a_stand_in_for_a_gpu() {
    script_of(&netmem_with_cuda(), "tests/kernel/loader.py", &[example("loader").to_str().unwrap(), "stand-in"]);
}

/// The same into the memory of a GPU, which a kernel checks. `NETMEM_GPU=none` announces that there
/// is none.
#[test]
fn files_into_a_gpu() {
    if std::env::var("NETMEM_GPU").as_deref() == Ok("none") {
        let _ = writeln!(std::io::stderr(), "skipped: files_into_a_gpu: NETMEM_GPU=none");
        return;
    }
    script_of(&netmem_with_cuda(), "tests/kernel/loader.py", &[example("loader").to_str().unwrap(), "gpu"]);
}

/// Where the guest tests find the guest. The first test makes what is missing.
const GUEST: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/guest");

/// A Linux guest's virtio-net driver on our device: pings, and iperf3 for five seconds each way,
/// through a tap.
#[test]
fn a_linux_guest_on_a_tap() {
    script("tests/guest/test.sh", &["netmem", "tap", GUEST]);
}

/// The same on AF_XDP. The guest leaves checksums and segmentation to the device, and the kernel at
/// the other end of a veth pair accepts neither.
#[test]
fn a_linux_guest_on_af_xdp() {
    if !namespace::af_xdp() {
        return;
    }
    script("tests/guest/test.sh", &["netmem", "xsk", GUEST]);
}

/// A Linux guest's virtio-net driver on our device: every frame comes back, none twice.
#[test]
fn a_linux_guest_on_an_echo() {
    script("tests/guest/test.sh", &["netmem", "echo", GUEST]);
}

/// Our driver, and DPDK's for comparison, on DPDK's vhost. Proves NET-1, NET-2 (a foreign DMA
/// domain) and POOL-11: packets arrive, maps equal unmaps, and nothing is in flight at the end.
#[test]
fn our_driver_on_dpdk_vhost() {
    comparison("bench/peers/dpdk-vhost.sh", &["split", "in_order", "packed"]);
}

/// DPDK's virtio_user, 22.11 and 24.11, with default settings and vectorised, on our device.
#[test]
fn dpdk_virtio_user_on_our_device() {
    comparison("bench/peers/netmem-device.sh", &["split", "in_order"]);
}

/// Our device and driver in two processes, DPDK's in two others.
#[test]
fn a_pair_of_ours_and_a_pair_of_dpdk() {
    comparison("bench/peers/pairs.sh", &[]);
}

/// Current peers: the programs of Debian 13, which tests/peers/debian13.sh unpacks next to the
/// system. This is a module, so that a run can exclude these tests by name (`--skip peers::`).
mod peers {
    use super::{TREE, script, script_beside};
    use netmem_testing::namespace::af_xdp;
    use serde_json::Value;
    use std::process::{Command, Stdio};

    /// Where the Debian 13 root is. The first of these tests makes it.
    const DEBIAN13: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/debian13");

    /// packetdrill's scripts for TCP: 65 of the 74 standard ones pass, and this project's own. For
    /// each other one, tests/packetdrill/examples/netmem/expected.txt states why it fails or is not
    /// run. The test fails if that file is wrong. Proves INET-2.
    #[test]
    fn packetdrill_passes_but_for_what_is_listed() {
        script("tests/packetdrill/run.py", &[]);
    }

    /// Another stack, smoltcp, whose object is built in a project outside of the tree. Its own list
    /// is examples/smoltcp/expected.txt.
    #[test]
    fn packetdrill_runs_the_stack_of_another_project() {
        script("tests/packetdrill/outside.sh", &[]);
    }

    /// The device is killed and restarted ten times during a guest's ping and TCP, and the
    /// connection survives. Proves NET-11.
    #[test]
    fn a_guest_outlives_its_device() {
        script_beside("tests/peers/restart.py", &[DEBIAN13]);
    }

    /// The same with QEMU as the listening side, to which the device connects. Proves NET-11.
    #[test]
    fn a_guest_outlives_a_device_that_connects() {
        script_beside("tests/peers/restart.py", &[DEBIAN13, "connect"]);
    }

    /// A guest is reset ten times, and its next driver uses the device each time. Proves NET-11.
    #[test]
    fn a_guest_reboots() {
        script_beside("tests/peers/reboot.py", &[DEBIAN13]);
    }

    /// Memory is plugged into a guest under ping and TCP, used by the device, and taken out; no
    /// ping is lost. Proves NET-11.
    #[test]
    fn a_guest_gets_memory() {
        script("tests/peers/plug.py", &[DEBIAN13]);
    }

    /// A guest migrates from one QEMU and device to another under ping and TCP; pings are lost only
    /// around the move, and counted. Proves NET-11.
    #[test]
    fn a_guest_migrates() {
        script("tests/peers/migrate.py", &[DEBIAN13]);
    }

    /// The same with packed rings: their position and wrap counters move with the guest. Proves
    /// NET-7 and NET-11.
    #[test]
    fn a_guest_with_packed_rings_migrates() {
        script("tests/peers/migrate.py", &[DEBIAN13, "packed"]);
    }

    /// DPDK's virtio_user, 22.11 and 24.11, on each of its paths, with one and two queue pairs, and
    /// listening: what the device sends back is byte for byte what was sent. Proves NET-7.
    #[test]
    fn virtio_user_in_every_format() {
        script("tests/peers/dpdk.py", &[DEBIAN13]);
    }

    /// testpmd's checksum engine, with TSO and LRO, on our device and a tap: sums and sizes of
    /// segments are passed on as they are. Proves NET-9.
    #[test]
    fn checksums_and_segments_of_testpmd() {
        script("tests/peers/csum.py", &[DEBIAN13]);
    }

    /// QEMU and virtio_user with as many queue pairs as the device has, and with one more.
    #[test]
    fn the_most_pairs_and_one_more() {
        script("tests/peers/pairs.py", &[DEBIAN13]);
    }

    /// A guest with a card for each ring format: two queue pairs with MSI-X, large frames, offloads
    /// that are on and used, and iperf3 both ways over IPv4 and IPv6; cards without any of these
    /// beside them. Proves NET-7 and NET-9.
    #[test]
    fn a_guest_with_every_card() {
        script_beside("tests/peers/guest.py", &[DEBIAN13]);
    }

    /// The test programs of device memory in a guest whose kernel makes real dma-bufs, by
    /// `/dev/udmabuf` and by the system heap: datagrams, and TCP streams from and to the guest's
    /// kernel. The side that reads the bytes maps them itself, and calls `DMA_BUF_IOCTL_SYNC`.
    /// Proves MEM-1 and MEM-9.
    #[test]
    fn device_memory_of_real_dma_bufs() {
        let programs = test_programs(&["devmem/all"]);
        let words: Vec<&str> = std::iter::once(DEBIAN13).chain(programs.iter().map(String::as_str)).collect();
        script_beside("tests/peers/dmabuf.py", &words);
    }

    /// AF_XDP in zero-copy mode, on a virtio-net card of a guest: the tests of the crate `xsk` that
    /// run on veth pairs in copy mode. Proves XSK-1 and XSK-2 for the mode.
    #[test]
    fn af_xdp_in_zero_copy_mode() {
        let programs = test_programs(&["xsk/all", "xsk/quirks"]);
        let words: Vec<&str> = std::iter::once(DEBIAN13).chain(programs.iter().map(String::as_str)).collect();
        script_beside("tests/peers/xsk.py", &words);
    }

    /// A guest with two queue pairs reaches the wire through two AF_XDP queues. It outlives the
    /// device, which is killed and leaves no program on the interface.
    #[test]
    fn a_guest_with_two_queues_on_af_xdp() {
        if af_xdp() {
            script_beside("tests/peers/xsk_port.py", &[DEBIAN13]);
        }
    }

    /// Test programs of the workspace, as `NAME=PATH`. Each is asked for as `CRATE/NAME`.
    /// They are built in the way of `cargo test --workspace`, so usually they exist already.
    fn test_programs(names: &[&'static str]) -> Vec<String> {
        let mut command = Command::new(env!("CARGO"));
        command.args(["test", "--workspace", "--offline", "--quiet", "--no-run", "--message-format", "json"]);
        let split = |name: &'static str| name.split_once('/').unwrap();
        command
            .args(names.iter().flat_map(|name| ["--test", split(name).1]))
            .current_dir(TREE)
            .stderr(Stdio::inherit());
        let built = command.output().unwrap();
        assert!(built.status.success());
        let messages = str::from_utf8(&built.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap());
        let programs: Vec<Value> = messages.filter(|message: &Value| message["executable"].is_string()).collect();
        let of = |(folder, name): (&str, &str)| {
            let manifest = format!("{folder}/Cargo.toml");
            let is = |message: &&Value| {
                message["target"]["name"] == *name && message["manifest_path"].as_str().unwrap().ends_with(&manifest)
            };
            let program = programs.iter().find(is).unwrap();
            format!("{name}={}", program["executable"].as_str().unwrap())
        };
        names.iter().map(|name| of(split(name))).collect()
    }

    /// iPXE drives the device and loads the kernel. Then the kernel drives the device. Proves
    /// NET-11.
    #[test]
    fn firmware_before_the_kernel() {
        script_beside("tests/peers/ipxe.py", &[DEBIAN13]);
    }
}

/// The page pool and a page per packet, in turns. Proves PERF-1: both are measured in one run.
#[test]
fn page_pool_and_page_per_packet() {
    comparison("bench/peers/pool-vs-page.sh", &[]);
}

/// The same command as a user without root and capabilities. The binary is copied to a place where
/// every user can run it.
struct Nobody {
    dir: tempfile::TempDir,
    prefix: &'static [&'static str],
}

impl Nobody {
    const SETPRIV: &[&str] =
        &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--no-new-privs", "--"];

    /// `None` if this is root and cannot change to another user. If this user is not root, the user
    /// does not change.
    fn new() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        // Another process copies: if this process had the copy open for writing, a child of another
        // test could inherit the descriptor, and running the copy would fail with "text file busy".
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

/// The main job, but shorter and without privileges. It prints the table, and the books balance.
/// Proves POOL-1, POOL-5 and POOL-11 as a new user sees them.
#[test]
fn the_main_job_needs_no_privileges() {
    if let Err(why) = installed(&["setpriv"]) {
        return skip(&why);
    }
    let Some(nobody) = Nobody::new() else { return skip("root here cannot become another user") };
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

/// A capture of thousands of frames with all frame sizes, replayed by the command in every mode.
/// Proves NET-5: by its numbers of frames and bytes, the received traffic is an unbroken piece of
/// the capture played in a loop.
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

/// `mpirun -n 4`, each rank in a network namespace: one report, whose sums are those that each rank
/// prints of itself. Incast of three to one, and each to each.
#[test]
fn ranks_of_mpirun() {
    script_beside("tests/hosts/mpi.py", &[]);
}
