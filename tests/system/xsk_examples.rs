//! The examples of AF_XDP, with clients of the kernel in another network namespace.

use crate::CPUS;
use netmem_testing::namespace::{command, in_namespace, in_peer_namespace, ip};
use netmem_testing::tree::{TREE, example, example_of_tests, netmem};
use netmem_testing::{installed, skip};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::{PoisonError, mpsc};
use std::time::Duration;

const SERVER: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(198, 18, 9, 1)), IpAddr::V6(Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 1))];
const CLIENT: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(198, 18, 9, 2)), IpAddr::V6(Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 2))];

/// A program that is ended with the test, also if the test panics.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // `timeout` passes SIGTERM on to its child; it could not do that with SIGKILL.
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        }
        let _ = self.0.wait();
    }
}

impl Running {
    /// The output of the program until it ends by itself.
    fn report(&mut self) -> String {
        let mut report = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut report).unwrap();
        assert!(self.0.wait().unwrap().success(), "{report}");
        report
    }
}

/// Starts a program and waits until it prints that it is ready.
fn start(program: &std::path::Path, words: &str, ready: &str) -> Running {
    let mut start = Command::new(program);
    start.args(words.split_whitespace()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = start.spawn().unwrap();
    let mut said = String::new();
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut said).unwrap();
    let child = Running(child);
    assert!(said.contains(ready), "{}: {said}", program.display());
    child
}

fn addresses(interface: &str, addresses: [IpAddr; 2]) {
    for (address, rest) in addresses.iter().zip(["24", "64"]) {
        let nodad = if address.is_ipv6() { "nodad" } else { "" };
        ip(&format!("addr add {address}/{rest} dev {interface} {nodad}"));
    }
    ip(&format!("link set {interface} up"));
}

fn no_offloads(interface: &str) {
    command(&format!("ethtool -K {interface} tx off rx off gso off tso off gro off txvlan off rxvlan off"));
}

/// The echo server answers clients over IPv4 and IPv6, beside the kernel, which answers ARP,
/// neighbour solicitations, pings and other ports.
#[test]
fn the_echo_server_answers_clients_of_the_kernel() {
    let _shared = CPUS.read().unwrap_or_else(PoisonError::into_inner);
    let echo = example("xsk_echo");
    in_namespace(|| {
        if let Err(why) = installed(&["ping"]) {
            return skip(&why);
        }
        ip("link add v0 numrxqueues 2 numtxqueues 2 type veth peer name v1 numrxqueues 2 numtxqueues 2");
        no_offloads("v0");
        no_offloads("v1");
        addresses("v0", SERVER);
        let mut server = start(&echo, "v0 7 2", "ready: UDP port 7, 2 queues");
        // A socket of the server side's kernel, on another port.
        let other = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 8)).unwrap();
        let peer = in_peer_namespace("v1", || {
            addresses("v1", CLIENT);
            for (server, client) in SERVER.into_iter().zip(CLIENT) {
                // Several flows, so that the kernel spreads them over the queues.
                let clients = (0..8_u16).map(|number| {
                    std::thread::spawn(move || {
                        let socket = UdpSocket::bind((client, 4000 + number)).unwrap();
                        socket.connect((server, 7)).unwrap();
                        socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
                        let mut random = fastrand::Rng::with_seed(number.into());
                        for _ in 0..100 {
                            let message: Vec<u8> = (0..random.usize(0..1400)).map(|_| random.u8(..)).collect();
                            let mut answer = [0; 2000];
                            // A datagram may be lost while the neighbour's address is resolved. If
                            // its answer is only late, it is answered twice, and the second answer
                            // comes before that of the next message.
                            let came = (0..20).any(|_| {
                                socket.send(&message).unwrap();
                                std::iter::from_fn(|| socket.recv(&mut answer).ok().map(|len| answer[..len] == message))
                                    .any(|same| same)
                            });
                            assert!(came, "no answer from {server}");
                        }
                    })
                });
                clients.collect::<Vec<_>>().into_iter().for_each(|client| client.join().unwrap());
                let ping = if server.is_ipv6() { "-6" } else { "-4" };
                command(&format!("ping {ping} -c 1 -w 20 {server}"));
            }
            let socket = UdpSocket::bind((CLIENT[0], 0)).unwrap();
            socket.send_to(b"for the kernel", SocketAddr::new(SERVER[0], 8)).unwrap();
        });
        peer.join().unwrap();
        let mut bytes = [0; 100];
        other.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        assert_eq!(other.recv(&mut bytes).unwrap(), 14);
        drop(server.0.stdin.take());
        let report = server.report();
        let answered: u64 =
            report.lines().filter_map(|line| line.split(", ").nth(1)?.split(' ').next()?.parse::<u64>().ok()).sum();
        assert!(answered >= 1600, "{report}");
    });
}

/// Sockets in the map of a program that Aya has loaded answer the kernel's clients by two queues.
/// The program, its map and its link are Aya's, and leave the interface with the process.
#[test]
fn sockets_in_a_map_of_aya_answer() {
    let _shared = CPUS.read().unwrap_or_else(PoisonError::into_inner);
    if let Err(why) = installed(&["clang"]) {
        return skip(&why);
    }
    if !command("clang -print-targets").contains("bpf") {
        return skip("clang has no target bpf");
    }
    let dir = tempfile::tempdir().unwrap();
    let object = dir.path().join("udp_echo.o").display().to_string();
    command(&format!("clang --target=bpf -O2 -g -c {TREE}/tests/aya/udp_echo.bpf.c -o {object}"));
    let echo = example_of_tests("xsk_aya");
    in_namespace(|| {
        ip("link add v0 numrxqueues 2 numtxqueues 2 type veth peer name v1 numrxqueues 2 numtxqueues 2");
        no_offloads("v0");
        no_offloads("v1");
        addresses("v0", SERVER);
        let mut server = start(&echo, &format!("v0 {object}"), "ready: UDP port 7, 2 queues of v0");
        let programs = || command("ip -details link show v0").contains("prog/xdp");
        assert!(programs());
        let other = UdpSocket::bind((SERVER[0], 8)).unwrap();
        let (end, ended) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let peer = in_peer_namespace("v1", move || {
            addresses("v1", CLIENT);
            // Several flows, so that the kernel spreads them over the queues.
            for number in 0..16_u16 {
                let socket = UdpSocket::bind((CLIENT[0], 4000 + number)).unwrap();
                socket.connect((SERVER[0], 7)).unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
                let message = [number as u8; 1000];
                let mut answer = [0; 2000];
                // One may be lost while the neighbour's address is resolved.
                let came = (0..20).any(|_| {
                    socket.send(&message).unwrap();
                    socket.recv(&mut answer).is_ok_and(|len| answer[..len] == message)
                });
                assert!(came, "no answer to {number}");
            }
            let socket = UdpSocket::bind((CLIENT[0], 0)).unwrap();
            socket.send_to(b"for the kernel", SocketAddr::new(SERVER[0], 8)).unwrap();
            tell.send(()).unwrap();
            // The interface ends with this namespace.
            let _ = ended.recv();
        });
        told.recv().unwrap();
        let mut bytes = [0; 100];
        other.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        assert_eq!(other.recv(&mut bytes).unwrap(), 14);
        drop(server.0.stdin.take());
        let report = server.report();
        let answered: u64 = report.split(' ').next().unwrap().parse().unwrap();
        assert!(answered >= 16 && !programs(), "{report}");
        drop(end);
        peer.join().unwrap();
    });
}

/// A counter of an interface in this thread's network namespace.
fn counter(interface: &str, column: usize) -> u64 {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = table.lines().find_map(|line| line.trim().strip_prefix(&format!("{interface}:"))).unwrap();
    line.split_whitespace().nth(column).unwrap().parse().unwrap()
}

/// The program counts what the kernel sends.
#[test]
fn packets_are_counted() {
    let _shared = CPUS.read().unwrap_or_else(PoisonError::into_inner);
    let count = example("xsk_count");
    in_namespace(|| {
        ip("link add v0 type veth peer name v1");
        no_offloads("v1");
        ip("link set v0 up");
        let mut program = start(&count, "v0", "ready: 1 queues of v0, copy");
        let (tell, told) = mpsc::channel();
        let peer = in_peer_namespace("v1", move || {
            addresses("v1", CLIENT);
            ip(&format!("neigh add {} lladdr 02:00:00:00:00:01 dev v1", SERVER[0]));
            let socket = UdpSocket::bind((CLIENT[0], 0)).unwrap();
            for _ in 0..100 {
                socket.send_to(&[0; 100], SocketAddr::new(SERVER[0], 9)).unwrap();
            }
            // With the messages of IPv6, which the kernel sends by itself.
            tell.send(counter("v1", 9)).unwrap();
        });
        peer.join().unwrap();
        let sent = told.recv().unwrap();
        while counter("v0", 1) < sent {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(program.0.stdin.take());
        let report = program.report();
        assert!(report.contains("IPv4 (0x0800): 100 packets, 14200 bytes"), "{report}");
    });
}

/// The program ends with an error when its interface is deleted, also while it sleeps.
#[test]
fn an_interface_that_is_gone_is_an_error() {
    let _shared = CPUS.read().unwrap_or_else(PoisonError::into_inner);
    let examples = ["xsk_count", "xsk_echo", "xsk_vm"].map(example);
    in_namespace(|| {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("vm.sock");
        let words = ["v0", "v0 7 1", &format!("{} v0", socket.display())];
        for (program, words) in examples.iter().zip(words) {
            ip("link add v0 type veth peer name v1");
            ip("link set v0 up");
            let mut running = start(program, words, "ready:");
            ip("link del v0");
            let mut said = String::new();
            running.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            let status = running.0.wait().unwrap();
            assert_eq!(status.code(), Some(1), "{}: {said}", program.display());
            let gone = "Error: queue 0 of v0 has stopped: the interface is gone";
            assert!(said.contains(gone) && !said.contains("QueueStopped"), "{}: {said}", program.display());
        }
    });
}

/// TCP between a tap and an interface through the bridge, in both directions. The tap's kernel
/// sends large segments, and the other accepts none.
#[test]
fn iperf3_through_the_bridge() {
    let _shared = CPUS.read().unwrap_or_else(PoisonError::into_inner);
    let bridge = example("xsk_bridge");
    in_namespace(|| {
        if let Err(why) = installed(&["iperf3", "timeout"]) {
            return skip(&why);
        }
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("tap.sock");
        let socket = socket.display();
        let words = format!("device --port tap:t0 --listen {socket}");
        let device = start(&netmem(), &words, "port tap:t0");
        addresses("t0", SERVER);
        ip("link add v0 type veth peer name v1");
        no_offloads("v0");
        no_offloads("v1");
        ip("link set v0 up");
        let mut bridge = start(&bridge, &format!("{socket} v0"), "ready:");
        let (end, ended) = mpsc::channel::<()>();
        let peer = in_peer_namespace("v1", move || {
            addresses("v1", CLIENT);
            // The server ends with the test. If the test is killed, `timeout` ends it.
            let server = Command::new("timeout").args(["600", "iperf3", "-s"]).stdout(Stdio::null()).spawn();
            let server = Running(server.unwrap());
            let _ = ended.recv();
            drop(server);
        });
        for address in CLIENT {
            for way in ["", "-R"] {
                // By bytes and not by time, so that some arrive on a machine that is busy.
                let words = format!("-c {address} -n 30M -J {way}");
                let run = || -> serde_json::Value {
                    let output = Command::new("iperf3").args(words.split_whitespace()).output().unwrap();
                    serde_json::from_slice(&output.stdout).unwrap()
                };
                let mut report = run();
                // Repeated until the server listens and has finished with the last client.
                for _ in 0..600 {
                    if report["error"].is_null() {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(100));
                    report = run();
                }
                assert!(report["error"].is_null(), "{words}: {report}");
                let speed = report["end"]["sum_received"]["bits_per_second"].as_f64().unwrap();
                assert!(speed > 0.0, "{report}");
                eprintln!("iperf3 {address} {way}: {:.0} Mbit/s", speed / 1e6);
            }
        }
        drop(end);
        peer.join().unwrap();
        drop(device);
        let report = bridge.report();
        eprintln!("{report}");
        assert!(report.contains("to v0:") && !report.contains(" 0 cut into"), "{report}");
    });
}
