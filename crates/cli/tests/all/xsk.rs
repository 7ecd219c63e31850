//! `netmem perf` and `netmem device` on AF_XDP, as processes: what they leave on an interface, and
//! what they say.

use netmem::net::{Packet, Poll, RxQueue, TxQueue};
use netmem::pool::{KernelShared, RegionOptions};
use netmem::xdp::helper::{HelperError, Refusal};
use netmem::xdp::{Attached, Grant, Interface, QueueOptions, Xsk, XskOptions};
use netmem_testing::namespace::{self, drop_privileges, in_namespace};
use netmem_testing::xsk::{Raw, frame, until, veth};
use netmem_testing::{installed, skip};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use serde_json::Value;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn netmem(words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_netmem"));
    command.args(words.split_whitespace()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn programs(interface: &str) -> Vec<Attached> {
    Interface::by_name(interface).unwrap().programs
}

/// Starts a process and waits until it reports that it is ready. Before that it warns of what the
/// driver is known for.
#[track_caller]
fn start(mut command: Command, ready: &str) -> Child {
    let mut child = command.spawn().unwrap();
    let said = says(&mut child, ready);
    assert!(said.contains(ready), "{said}");
    child
}

/// What a process prints until it is ready, or has ended.
fn says(child: &mut Child, ready: &str) -> String {
    let mut said = String::new();
    let mut stderr = BufReader::new(child.stderr.as_mut().unwrap());
    while !said.contains(ready) && stderr.read_line(&mut said).unwrap() > 0 {}
    said
}

/// A device over an interface, which waits for its front end.
fn device(port: &str, socket: &std::path::Path) -> Child {
    start(netmem(&format!("device --port {port} --listen {}", socket.display())), "port xsk:v0")
}

/// Ends a process as a user does, unless it has ended.
fn end(child: Child) -> Output {
    // It is not waited for yet, and so is there.
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    child.wait_with_output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A process that is killed leaves no program, and its queue can be used again. While it lives, its
/// program is left alone by another one.
#[test]
fn a_killed_process_leaves_nothing() {
    in_namespace(|| {
        veth("v0", "v1", 2, 1500);
        let dir = tempfile::tempdir().unwrap();
        for _ in 0..3 {
            let mut child = device("xsk:v0", &dir.path().join("socket"));
            let there = programs("v0");
            assert_eq!(there.len(), 1);
            let occupied = netmem("perf --device xsk:v0:1 --runs 1 --alloc pool").output().unwrap();
            let says =
                format!("interface v0 has an XDP program already: number {}, named netmem_xsk, in", there[0].program);
            assert!(text(&occupied).contains(&says) && !occupied.status.success(), "{}", text(&occupied));
            assert_eq!(programs("v0"), there);
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(programs("v0"), []);
        }
    });
}

/// A device opens the queues that it was told to open. Frames of the other queues stay with the
/// kernel.
#[test]
fn a_device_takes_its_queues_only() {
    const FLOWS: u8 = 200;
    in_namespace(|| {
        veth("v0", "v1", 2, 1500);
        let dir = tempfile::tempdir().unwrap();
        let mut child = device("xsk:v0:1", &dir.path().join("socket"));
        let (peer, kernel) = (Raw::new("v1"), Raw::new("v0"));
        for port in 0..FLOWS {
            let mut frame = frame(60, 1);
            frame[12..38].copy_from_slice(&[
                8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 198, 18, 7, 3, 198, 18, 7, 2, 9, port, 0, 9,
            ]);
            peer.send(&frame);
        }
        let counter = |name: &str| -> u64 {
            let said = namespace::command("ethtool -S v0");
            let value = said.lines().find_map(|line| line.trim().strip_prefix(&format!("{name}: ")));
            value.unwrap().parse().unwrap()
        };
        let [first, second] = until("all frames", || {
            let queues = [counter("rx_queue_0_xdp_packets"), counter("rx_queue_1_xdp_packets")];
            (queues.iter().sum::<u64>() == u64::from(FLOWS)).then_some(queues)
        });
        assert!(first > 0 && second > 0, "{first} {second}");
        assert_eq!([counter("rx_queue_0_xdp_redirect"), counter("rx_queue_1_xdp_redirect")], [0, second]);
        (0..first).for_each(|_| _ = kernel.receive());
        assert_eq!(kernel.try_receive(), None);
        child.kill().unwrap();
        child.wait().unwrap();
    });
}

/// What the command prints while frames of 64 bytes arrive at v0.
fn under_a_flood(words: &str) -> Output {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (peer, frame) = (Raw::new("v1"), frame(64, 1));
            while !over.load(Ordering::Relaxed) {
                // The kernel may be out of buffers for a moment.
                let _ = peer.try_send(&frame);
                std::thread::yield_now();
            }
        });
        let output = netmem(words).output();
        over.store(true, Ordering::Relaxed);
        output.unwrap()
    })
}

/// With busy polling, the kernel may not know what to poll for the socket, as for veth on some
/// kernels. Both forms of the report state which it was.
#[test]
fn perf_says_whether_the_kernel_knows_what_to_poll() {
    in_namespace(|| {
        veth("v0", "v1", 1, 1500);
        let run = |more: &str| {
            let words = format!("perf --device xsk:v0 --runs 1 --duration 0.05 --alloc pool {more}");
            let output = under_a_flood(&words);
            assert!(output.status.success(), "{}", text(&output));
            String::from_utf8(output.stdout).unwrap()
        };
        let report: Value = serde_json::from_str(&run("--busy-poll --json")).unwrap();
        netmem_testing::schema::fits("crates/cli/schema/perf.json", &report);
        let is_known = report["variants"][0]["sockets"][0]["busy_polled"].as_bool().unwrap();
        let known = if is_known { "polls the driver" } else { "does not know what to poll (SO_INCOMING_NAPI_ID is 0)" };
        let says = format!("; busy polling: the kernel {known}");
        let printed = run("--busy-poll");
        assert!(printed.contains(&says), "{printed}");
        let printed = run("");
        assert!(!printed.contains("busy"), "{printed}");
    });
}

/// The main job on AF_XDP: the same table, whose pages balance.
#[test]
fn perf_receives_from_an_interface() {
    in_namespace(|| {
        veth("v0", "v1", 1, 1500);
        let output = under_a_flood("perf --device xsk:v0 --runs 2 --duration 0.05 --json");
        assert!(output.status.success(), "{}", text(&output));
        // Once, although each run of each variant opens the interface.
        assert_eq!(text(&output).matches("WARN").count(), 1, "{}", text(&output));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["params"]["device"], "xsk:v0");
        let rows = report["variants"].as_array().unwrap();
        let names: Vec<_> = rows.iter().map(|row| (&row["name"], &row["alloc"])).collect();
        let name = Value::from("xsk");
        let allocs = ["pool", "page", "frags"].map(Value::from);
        assert_eq!(names, allocs.each_ref().map(|alloc| (&name, alloc)));
        for row in rows {
            let (frames, bytes) = (row["frames"].as_u64().unwrap(), row["bytes"].as_u64().unwrap());
            assert!(frames > 0 && bytes == 64 * frames, "{row}");
        }
        for books in ["pool", "page", "frags"] {
            assert_eq!((&report[books]["inflight"], &report[books]["leaked"]), (&0.into(), &0.into()), "{report}");
        }
        assert_eq!(programs("v0"), []);
    });
}

/// A server on an interface is a host of its own beside the kernel: each has its addresses, and
/// neighbours find both.
#[test]
fn a_server_is_a_host_beside_the_kernel() {
    in_namespace(|| {
        if let Err(why) = installed(&["ping"]) {
            return skip(&why);
        }
        // With a queue of one kind, so that all flows are in it.
        veth("v0", "v1", 1, 1500);
        std::fs::write("/proc/sys/net/ipv6/conf/v0/disable_ipv6", "0").unwrap();
        namespace::ip("addr add 198.18.7.1/24 dev v0");
        namespace::ip("addr add fd00:7::1/64 dev v0 nodad");
        let words = "serve echo --port xsk:v0 --addr 198.18.7.2/24,fd00:7::2/64";
        let server = start(netmem(words), "ready: echo on 198.18.7.2:7 and [fd00:7::2]:7");
        let kernel = std::net::TcpListener::bind("198.18.7.1:7007").unwrap();
        // The pair of interfaces goes with the peer's namespace, and that with the peer's thread.
        let (done, is_done) = std::sync::mpsc::channel();
        let (over, ended) = std::sync::mpsc::channel::<()>();
        let peer = namespace::in_peer_namespace("v1", move || {
            namespace::ip("link set v1 up");
            namespace::ip("addr add 198.18.7.3/24 dev v1");
            namespace::ip("addr add fd00:7::3/64 dev v1 nodad");
            for address in ["198.18.7.2:7", "[fd00:7::2]:7"] {
                let mut stream = TcpStream::connect(address).unwrap();
                let sent: Vec<u8> = (0..500_000_u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
                let (mut writer, bytes) = (stream.try_clone().unwrap(), sent.clone());
                let writing = std::thread::spawn(move || {
                    writer.write_all(&bytes).unwrap();
                    writer.shutdown(Shutdown::Write).unwrap();
                });
                let mut echo = Vec::new();
                stream.read_to_end(&mut echo).unwrap();
                writing.join().unwrap();
                assert!(echo == sent, "{address}: {} bytes", echo.len());
            }
            TcpStream::connect("198.18.7.1:7007").unwrap();
            namespace::command("ping -6 -c 1 -w 20 fd00:7::1");
            done.send(()).unwrap();
            let _ = ended.recv();
        });
        is_done.recv().unwrap();
        kernel.accept().unwrap();
        let output = end(server);
        assert!(
            output.status.success() && text(&output).contains("served 2 connections, 0 of them broken"),
            "{}",
            text(&output)
        );
        assert_eq!(programs("v0"), []);
        drop(over);
        peer.join().unwrap();
    });
}

/// An address that the kernel has is refused: the kernel would answer for it, too.
#[test]
fn a_server_has_no_address_of_the_kernel() {
    in_namespace(|| {
        veth("v0", "v1", 1, 1500);
        std::fs::write("/proc/sys/net/ipv6/conf/v0/disable_ipv6", "0").unwrap();
        namespace::ip("addr add 198.18.7.1/24 dev v0");
        namespace::ip("addr add fd00:7::1/64 dev v0 nodad");
        for address in ["198.18.7.1", "fd00:7::1"] {
            let other = if address.contains(':') { "fd00:7::2/64" } else { "198.18.7.2/24" };
            let words = format!("serve echo --port xsk:v0 --addr {other},{address}/24");
            let mut server = netmem(&words).spawn().unwrap();
            let said = says(&mut server, "ready: echo");
            let output = end(server);
            let refused = format!("--addr {address}: the kernel has this address");
            assert!(output.status.code() == Some(2) && said.contains(&refused), "{words}: {said}");
        }
    });
}

/// In a namespace in which the kernel has no address at all, none is refused.
#[test]
fn a_server_needs_no_address_of_the_kernel() {
    in_namespace(|| {
        // SAFETY: this thread uses nothing of its old namespace but what it is passed.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
        namespace::ip("link add v0 type veth peer name v1");
        namespace::ip("link set v0 up");
        let server = start(netmem("serve echo --port xsk:v0 --addr 198.18.7.2/24"), "ready: echo");
        let output = end(server);
        assert!(output.status.success(), "{}", text(&output));
    });
}

/// A server and a device end with an error when their interface is deleted, although they sleep.
#[test]
fn a_deleted_interface_ends_a_server_and_a_device() {
    in_namespace(|| {
        let dir = tempfile::tempdir().unwrap();
        let device = format!("device --port xsk:v0 --listen {}", dir.path().join("socket").display());
        let server = "serve echo --port xsk:v0 --addr 198.18.7.2/24";
        for (words, ready) in [(server, "ready: echo"), (&device, "port xsk:v0")] {
            veth("v0", "v1", 1, 1500);
            let running = start(netmem(words), ready);
            namespace::ip("link del v0");
            let output = running.wait_with_output().unwrap();
            let says = "queue 0 of v0 has stopped: the interface is gone";
            assert!(output.status.code() == Some(1) && text(&output).contains(says), "{words}: {}", text(&output));
        }
    });
}

/// A worker without privileges, on a thread of its own: it echoes 100 frames on the queues that it
/// is granted. Meanwhile no other worker gets them.
fn granted_worker(ask: &(dyn Fn() -> Result<Grant, HelperError> + Sync)) {
    // SAFETY: this thread uses nothing of its old namespace but what it is passed.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
    drop_privileges();
    // The kernel lets go of a worker's memory some time after the worker's end. So that of both
    // workers is within the usual limit of 8 MiB.
    let memory = RegionOptions::new(1000).huge_pages(false);
    let queue = |_| QueueOptions::new().rx_ring(256).tx_ring(256).fill(256).cache(64);
    let options = XskOptions::granted(ask().unwrap()).memory(memory);
    let mut xsk = Xsk::<KernelShared>::open(options, queue).unwrap();
    assert_eq!(xsk.pairs.len(), 2);
    let mut got = 0;
    until("100 frames", || {
        for (rx, tx) in &mut xsk.pairs {
            rx.poll(|poll| {
                tx.complete();
                poll.receive(64, &mut |packet: Packet<KernelShared>| {
                    got += 1;
                    tx.send(packet).unwrap();
                });
                tx.flush();
            });
        }
        (got >= 100).then_some(())
    });
    let refused = ask().unwrap_err();
    assert!(matches!(&refused, HelperError::Refused { why: Refusal::Busy, .. }), "{refused}");
    let says = "the helper refuses: interface v0 has an XDP program already";
    assert!(refused.to_string().starts_with(says), "{refused}");
}

/// Proves XSK-4: a worker that is another user without any capability, in another network
/// namespace, gets queues and the program from `netmem grant`. While it has them, another worker
/// gets nothing. Its end detaches the program, and the next worker is served. Frames of other hosts
/// stay with the kernel.
#[test]
fn workers_without_privileges_are_granted_queues() {
    const LIMIT: Duration = Duration::from_secs(60);
    in_namespace(|| {
        veth("v0", "v1", 2, 1500);
        let (peer, kernel) = (Raw::new("v1"), Raw::new("v0"));
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("grant.sock");
        let words = format!("grant v0 --listen {} --queues 2 --addr 198.18.7.2", socket.display());
        let mut helper = netmem(&words).spawn().unwrap();
        let said = says(&mut helper, "ready: 2 queue(s) of xsk:v0");
        let page = rustix::param::page_size();
        let memory = format!(
            "{} bytes for each queue by default: its limit (RLIMIT_MEMLOCK) has to be {} bytes",
            8192 * page,
            16384 * page
        );
        assert!(said.contains(&memory) && said.contains("ready:"), "{said}");
        // The workers are another user, whom the mode of the socket admits.
        for (path, mode) in [(dir.path(), 0o755), (&socket, 0o777)] {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        assert_eq!(programs("v0"), []);
        let ask = || Grant::receive(UnixStream::connect(&socket).unwrap(), LIMIT);
        let ipv4 = |to: u8, len: usize| {
            let mut frame = frame(len, to.into());
            frame[12..34]
                .copy_from_slice(&[8, 0, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, 253, 0, 0, 198, 18, 7, 3, 198, 18, 7, to]);
            frame
        };
        for worker in 0..2 {
            std::thread::scope(|scope| {
                let working = scope.spawn(|| granted_worker(&ask));
                // The kernel's network stack has what the program would take until the worker has
                // bound its sockets.
                let mut back = 0;
                until("the worker's end", || {
                    peer.send(&ipv4(2, 60 + worker));
                    peer.send(&ipv4(3, 100));
                    back +=
                        std::iter::from_fn(|| peer.try_receive()).filter(|back| *back == ipv4(2, 60 + worker)).count();
                    working.is_finished().then_some(())
                });
                working.join().unwrap();
                assert!(back > 0);
            });
            assert_eq!(programs("v0"), []);
        }
        // While there was a program, the kernel has seen frames of the other host only.
        let seen: Vec<_> = std::iter::from_fn(|| kernel.try_receive()).collect();
        assert!(seen.iter().any(|frame| *frame == ipv4(3, 100)));
        let output = end(helper);
        let said = text(&output);
        assert!(output.status.success() && said.matches("has 2 queue(s) of xsk:v0").count() == 2, "{said}");
        assert_eq!(said.matches(" gets nothing: interface v0 has an XDP program already").count(), 2, "{said}");
        assert!(!socket.exists());
    });
}

/// Proves XSK-4: a process that connects and does not ask, ends at once, or does not bind keeps no
/// other worker from its queues. When the helper can accept no connection it reports that once, and
/// goes on when it can again.
#[test]
fn workers_that_do_not_proceed_block_no_other_worker() {
    const LIMIT: Duration = Duration::from_secs(60);
    in_namespace(|| {
        veth("v0", "v1", 1, 1500);
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("grant.sock");
        let mut helper =
            start(netmem(&format!("grant v0 --listen {}", socket.display())), "ready: 1 queue(s) of xsk:v0");
        let (pid, connect) = (Pid::from_child(&helper), || UnixStream::connect(&socket).unwrap());
        let work = || {
            let options = XskOptions::granted(Grant::receive(connect(), LIMIT).unwrap()).pages(2048);
            drop(Xsk::<KernelShared>::open(options, |_| QueueOptions::new().cache(64)).unwrap());
        };
        let silent: Vec<_> = (0..50).map(|_| connect()).collect();
        // They have ended when the helper accepts them.
        kill_process(pid, Signal::STOP).unwrap();
        (0..2000).for_each(|_| drop(connect()));
        kill_process(pid, Signal::CONT).unwrap();
        work();
        let maximum = getrlimit(Resource::Nofile).maximum;
        let limit = |current| prlimit(Some(pid), Resource::Nofile, Rlimit { current, maximum }).unwrap().current;
        // It has as many descriptors, so that it cannot have one more. Fewer are too few to wait
        // for.
        let before = limit(Some(silent.len() as u64 + 6));
        let refused = connect();
        let mut said = String::new();
        let mut stderr = BufReader::new(helper.stderr.as_mut().unwrap());
        while !said.contains("no worker can connect") && stderr.read_line(&mut said).unwrap() > 0 {}
        limit(before);
        work();
        drop((silent, refused));
        let output = end(helper);
        said.push_str(&text(&output));
        assert!(output.status.success() && said.matches("has 1 queue(s) of xsk:v0").count() == 2, "{said}");
        assert_eq!(
            (said.matches("no worker can connect").count(), said.matches("gets nothing").count()),
            (1, 0),
            "{said}"
        );
        assert_eq!(programs("v0"), []);
    });
}

/// `--mode` and `--group` are the socket's when the helper is ready, and a user that `--user` does
/// not name is refused, with the reason. Root never is.
#[test]
fn a_helper_chooses_its_workers() {
    const LIMIT: Duration = Duration::from_secs(60);
    in_namespace(|| {
        veth("v0", "v1", 1, 1500);
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let socket = dir.path().join("grant.sock");
        let words = format!("grant v0 --listen {}", socket.display());
        for (bad, says) in [
            ("--user root,nosuch", "--user: there is no user \"nosuch\""),
            ("--group nosuch", "--group: there is no group \"nosuch\""),
            ("--mode 888", "an octal number up to 777"),
            ("--mode 1777", "an octal number up to 777"),
        ] {
            let output = netmem(&format!("{words} {bad}")).output().unwrap();
            assert!(output.status.code() == Some(2) && text(&output).contains(says), "{bad}: {}", text(&output));
        }
        let output = netmem(&format!("{words} --queues 2")).output().unwrap();
        let says = "interface v0 has 1 queue(s), with numbers from 0: there is no queue 1";
        assert!(output.status.code() == Some(1) && text(&output).contains(says), "{}", text(&output));
        assert!(!socket.exists());

        let helper = start(netmem(&format!("{words} --mode 666 --group 4321 --user 7,12345")), "ready: ");
        let there = std::fs::symlink_metadata(&socket).unwrap();
        assert_eq!((there.mode() & 0o7777, there.gid()), (0o666, 4321));
        let ask = || Grant::receive(UnixStream::connect(&socket).unwrap(), LIMIT);
        let refused = || {
            drop_privileges();
            let user = rustix::process::getuid().as_raw();
            (user, ask().unwrap_err())
        };
        let (user, refused) = std::thread::scope(|scope| scope.spawn(refused).join().unwrap());
        let HelperError::Refused { why: Refusal::User, text: says } = &refused else { panic!("{refused}") };
        assert_eq!(*says, format!("user {user} may not have queues of this helper"));
        ask().unwrap();
        let said = text(&end(helper));
        assert!(said.contains(&format!("of user {user} gets nothing: {says}")), "{said}");
    });
}

#[test]
fn info_lists_interfaces() {
    in_namespace(|| {
        veth("v0", "v1", 2, 9000);
        let output = netmem("info --json").output().unwrap();
        let info: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(info["af_xdp"]["possible"], true, "{info}");
        let v0 = info["interfaces"].as_array().unwrap().iter().find(|interface| interface["name"] == "v0").unwrap();
        assert_eq!((&v0["driver"], &v0["rx_queues"], &v0["mtu"]), (&"veth".into(), &2.into(), &9000.into()));
        assert_eq!(v0["modes"], serde_json::json!(["copy, driver mode", "copy, generic mode"]));
        let table = text(&netmem("info").output().unwrap());
        assert!(table.contains("v0: veth, queues 2 rx 2 tx, MTU 9000"), "{table}");
    });
}

/// `netmem info` reports for each step whether this user may do it, and which capability is
/// missing.
#[test]
fn info_says_what_the_user_may_do() {
    if let Err(why) = installed(&["prlimit", "setpriv"]) {
        return skip(&why);
    }
    let info = |capabilities: &str| {
        let mut command = Command::new("prlimit");
        command.args(["--memlock=8388608", "setpriv", "--inh-caps", "-all", "--bounding-set", capabilities]);
        let output = command.arg(env!("CARGO_BIN_EXE_netmem")).arg("info").output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    let says = |capabilities: &str, lines: &[&str]| {
        let said = info(capabilities);
        lines.iter().for_each(|line| assert!(said.contains(line), "{capabilities}: `{line}` is not in {said}"));
    };
    says(
        "-all",
        &[
            "may not open AF_XDP sockets: opening an AF_XDP socket needs CAP_NET_RAW",
            "may not redirect all frames of an interface to them: ",
            "may not redirect the frames of some addresses or ports: ",
            "may not register 32 MiB for an AF_XDP queue: a UMEM of 33554432 bytes",
            "missing: CAP_NET_ADMIN, CAP_NET_RAW, CAP_IPC_LOCK, CAP_SYS_ADMIN, CAP_SYS_NICE, CAP_PERFMON, CAP_BPF",
        ],
    );
    says(
        "-all,+net_raw,+net_admin,+bpf,+ipc_lock",
        &[
            "may open AF_XDP sockets\n",
            "may redirect all frames of an interface to them\n",
            "with a filter needs CAP_PERFMON, which this process lacks",
            "may register 32 MiB for an AF_XDP queue\n",
        ],
    );
}

/// An error names what is missing, before anything is opened.
#[test]
fn without_privileges_the_error_says_which() {
    in_namespace(|| {
        if let Err(why) = installed(&["setpriv"]) {
            return skip(&why);
        }
        veth("v0", "v1", 1, 1500);
        // As root, with an empty set: `setpriv` keeps the user, so that the binary can be read.
        for (drop, says) in [("-all", "needs CAP_NET_RAW"), ("-bpf,-sys_admin", "needs CAP_BPF, which")] {
            let words = format!(
                "--bounding-set {drop} --inh-caps {drop} {} device --port xsk:v0 --listen /nonexistent/s",
                env!("CARGO_BIN_EXE_netmem")
            );
            let output = Command::new("setpriv").args(words.split_whitespace()).output().unwrap();
            assert!(!output.status.success() && text(&output).contains(says), "{}", text(&output));
            assert_eq!(programs("v0"), []);
        }
        until("nothing is left", || programs("v0").is_empty().then_some(()));
    });
}

/// The rows of AF_XDP in docs/reference/packages.md: with exactly the capabilities of its row a
/// subcommand gets ready, and without one of them it ends with an error that names what is missing.
#[test]
fn subcommands_need_the_capabilities_of_their_rows() {
    in_namespace(|| {
        if let Err(why) = installed(&["prlimit", "setpriv"]) {
            return skip(&why);
        }
        veth("v0", "v1", 1, 1500);
        let dir = tempfile::tempdir().unwrap();
        let listen = format!("--listen {}", dir.path().join("socket").display());
        let run = |capabilities: &[&str], words: &str| {
            let set: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
            let mut command = Command::new("prlimit");
            command.args(["--memlock=8388608", "setpriv", "--inh-caps", "-all", "--bounding-set"]);
            command.arg(format!("-all{set}")).arg(env!("CARGO_BIN_EXE_netmem")).args(words.split_whitespace());
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command
        };
        let row = |words: &str, ready: &str, needs: &[&str]| {
            let output = end(start(run(needs, words), ready));
            assert!(output.status.success(), "{words}: {}", text(&output));
            for (at, missing) in needs.iter().enumerate() {
                let mut child = run(&[&needs[..at], &needs[at + 1..]].concat(), words).spawn().unwrap();
                let said = says(&mut child, ready);
                let output = end(child);
                let error = format!("CAP_{}", missing.to_uppercase());
                assert!(!output.status.success() && said.contains(&error), "{words}: {said}");
                assert_eq!(programs("v0"), []);
            }
        };
        let program = ["net_raw", "net_admin", "bpf"];
        let addresses = ["net_raw", "net_admin", "bpf", "perfmon"];
        row(&format!("grant v0 {listen}"), "ready:", &program);
        row(&format!("grant v0 {listen} --addr 198.18.7.2"), "ready:", &addresses);
        row(&format!("device --port xsk:v0 {listen}"), "port xsk:v0", &[&program[..], &["ipc_lock"]].concat());
        let words = "serve echo --port xsk:v0 --addr 198.18.7.2/24";
        row(words, "ready:", &[&addresses[..], &["ipc_lock"]].concat());
    });
}
