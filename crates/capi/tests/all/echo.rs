//! The echo server in C and C++, on an end of a veth pair. Its peer is the kernel, in another
//! network namespace.

use crate::build::{C, CPP, build, each_build, libraries, program};
use netmem_testing::namespace::{in_namespace, in_peer_namespace, ip};
use netmem_testing::xsk::{name, until, veth};
use netmem_testing::{installed, skip};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::UdpSocket;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

const REQUESTS: usize = 200;

/// A socket of the kernel's that is connected to the server.
fn connected(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind(if address.contains('[') { "[::]:0" } else { "0.0.0.0:0" }).expect("a socket");
    // As long as `until` tries.
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
    socket.connect(address).expect("a route");
    socket
}

/// Sends datagrams from the kernel's sockets, and compares the answers.
fn ask(address: &str) {
    let socket = connected(address);
    let mut got = [0; 2048];
    for i in 0..REQUESTS {
        let request: Vec<u8> = (0..1 + i * 7 % 1400).map(|byte| (byte + i) as u8).collect();
        socket.send(&request).expect("sent");
        let n = socket.recv(&mut got).unwrap_or_else(|error| panic!("answer {i} of {address}: {error}"));
        assert_eq!(got[..n], request, "answer {i}");
    }
}

/// A server that is ready, and the other end of its veth pair.
struct Server {
    child: Child,
    out: BufReader<ChildStdout>,
    ours: String,
    theirs: String,
}

impl Server {
    /// Runs the echo server, which was built.
    fn start(mut server: Command) -> Self {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 1500);
        ip(&format!("addr add 10.77.0.1/24 dev {ours}"));
        std::fs::write(format!("/proc/sys/net/ipv6/conf/{ours}/disable_ipv6"), "0").expect("IPv6");
        ip(&format!("addr add fd77::1/64 dev {ours} nodad"));
        let mut child = server
            .args([&ours, "7007"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{server:?}: {error}"));
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        out.read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n");
        Self { child, out, ours, theirs }
    }

    /// Runs the peer on the other end.
    fn peer(&self, run: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
        let interface = self.theirs.clone();
        in_peer_namespace(&self.theirs, move || {
            std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "0").expect("IPv6");
            ip(&format!("addr add 10.77.0.2/24 dev {interface}"));
            ip(&format!("addr add fd77::2/64 dev {interface} nodad"));
            ip(&format!("link set {interface} up"));
            run();
        })
    }

    /// Ends the server's standard input, and returns its report.
    fn end(mut self) -> String {
        drop(self.child.stdin.take());
        let mut report = String::new();
        self.out.read_to_string(&mut report).expect("the report");
        assert!(self.child.wait().expect("an end").success(), "{report}");
        report
    }

    /// Sends the server a signal, after which its state is one of these.
    fn signal(&self, signal: &str, states: &str) {
        let pid = self.child.id();
        let sent = Command::new("sh").args(["-c", &format!("kill -{signal} {pid}")]).status().expect("a shell");
        assert!(sent.success());
        until("change of the process", || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
            let state = stat.rsplit_once(") ")?.1.chars().next()?;
            states.contains(state).then_some(())
        });
    }

    /// Bytes that our end has received.
    fn received(&self) -> u64 {
        let all = std::fs::read_to_string("/proc/thread-self/net/dev").expect("interfaces");
        let line = all.lines().find_map(|line| line.trim().strip_prefix(&format!("{}:", self.ours))).expect("ours");
        line.split_whitespace().next().and_then(|bytes| bytes.parse().ok()).expect("a number")
    }
}

fn joined(peer: JoinHandle<()>) {
    if let Err(panic) = peer.join() {
        std::panic::resume_unwind(panic);
    }
}

fn echo(server: Command) {
    in_namespace(move || {
        let server = Server::start(server);
        let peer = server.peer(|| {
            ask("10.77.0.1:7007");
            ask("[fd77::1]:7007");
            // The kernel has the other traffic: it answers that no program has this port.
            let other = UdpSocket::bind("0.0.0.0:0").expect("a socket");
            other.connect("10.77.0.1:7008").expect("a route");
            other.send(b"is this port open?").expect("sent");
            let refused = other.recv(&mut [0; 64]).expect_err("no answer");
            assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        });
        let asked = peer.join();
        let report = server.end();
        if let Err(panic) = asked {
            std::panic::resume_unwind(panic);
        }
        let n = 2 * REQUESTS;
        assert_eq!(
            report,
            format!("received {n}, answered {n}, lost: ring full 0, no buffer 0, bad shape 0; pages held 0\n")
        );
    });
}

#[test]
fn the_kernel_gets_its_datagrams_back_in_c() {
    each_build(C, &["-std=c11"], "c/udp_echo.c", echo);
}

#[test]
fn the_kernel_gets_its_datagrams_back_in_cpp() {
    each_build(CPP, &["-std=c++17", "-xc++"], "c/udp_echo.c", echo);
}

/// Runs a test with the server under valgrind, which makes it slower than its peer.
fn under_valgrind(test: impl FnOnce(Command)) {
    if let Err(why) = installed(&["gcc", "valgrind"]) {
        skip(&why);
        return;
    }
    let libraries = libraries();
    let built = build("gcc", &["-std=c11", "-g"], "c/udp_echo.c", libraries.path());
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--error-exitcode=9", "--quiet"]).arg(&built).env("LD_LIBRARY_PATH", libraries.path());
    test(valgrind);
}

#[test]
fn valgrind_finds_no_error_in_the_echo() {
    under_valgrind(echo);
}

/// An answer that the kernel does not send, because the interface is down, is sent when it is up
/// again, without another request.
#[test]
fn an_answer_that_was_not_sent_is_sent_later() {
    if let Err(why) = installed(&["gcc"]) {
        skip(&why);
        return;
    }
    let libraries = libraries();
    let built = program(&build("gcc", &["-std=c11"], "c/udp_echo.c", libraries.path()));
    in_namespace(move || {
        let mut server = Server::start(built);
        let (to_peer, go) = channel();
        let (to_us, reached) = channel();
        let peer = server.peer(move || {
            // Neighbours are known then.
            ask("10.77.0.1:7007");
            to_us.send(()).expect("a test");
            go.recv().expect("a test");
            let socket = connected("10.77.0.1:7007");
            socket.send(&[7; 1400]).expect("sent");
            to_us.send(()).expect("a test");
            assert_eq!(socket.recv(&mut [0; 2048]).expect("an answer"), 1400);
            to_us.send(()).expect("a test");
            // The interface ends with this namespace.
            let _ = go.recv();
        });
        reached.recv().expect("a peer");
        server.signal("STOP", "T");
        let before = server.received();
        to_peer.send(()).expect("a peer");
        reached.recv().expect("a peer");
        until("a request", || (server.received() >= before + 1400).then_some(()));
        ip(&format!("link set {} down", server.ours));
        // While the interface is down, no frame wakes the server: a byte does. It answers, and
        // sleeps.
        server.child.stdin.as_mut().expect("a pipe").write_all(b"\n").expect("written");
        server.signal("CONT", "S");
        ip(&format!("link set {} up", server.ours));
        reached.recv().expect("a peer with an answer");
        let report = server.end();
        assert!(report.starts_with("received 201, answered 201, "), "{report}");
        drop(to_peer);
        joined(peer);
    });
}

/// The server reads its standard input while requests arrive faster than it answers them.
#[test]
fn the_server_ends_under_load() {
    under_valgrind(|valgrind| {
        in_namespace(move || {
            let server = Server::start(valgrind);
            // More than there is room for in the ring.
            let sent = Arc::new(AtomicU64::new(0));
            let ends = sent.clone();
            let peer = server.peer(move || {
                let socket = connected("10.77.0.1:7007");
                while Arc::strong_count(&ends) > 1 {
                    // Refused when the server has ended.
                    let _ = socket.send(&[7; 64]);
                    ends.fetch_add(1, Ordering::Relaxed);
                }
            });
            until("load", || (sent.load(Ordering::Relaxed) > 10_000).then_some(()));
            let report = server.end();
            drop(sent);
            joined(peer);
            assert!(report.ends_with("; pages held 0\n"), "{report}");
        });
    });
}
