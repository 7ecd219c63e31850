//! The HTTP server in C and C++, on a tap and on AF_XDP. Its clients are the kernel's sockets, and
//! curl.

use crate::build::{C, CPP, build, each_build, libraries, run};
use netmem_testing::namespace::{in_namespace, in_peer_namespace, ip};
use netmem_testing::xsk::{name, until, veth};
use netmem_testing::{installed, skip};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};
use std::time::Duration;

const SERVER: &str = "192.0.2.2:80";

/// Connections at the same time, and the requests of each.
const CLIENTS: usize = 8;
const REQUESTS: usize = 6;

/// The server's time limit, in seconds, that no client of a slow machine reaches.
const LONG: &str = "600";

/// One that slow clients reach, and a pause of a client that keeps to it, also on a slow machine.
const LIMIT: &str = "5";
const PAUSE: Duration = Duration::from_millis(500);

/// A server that is ready.
struct Server {
    child: Child,
    out: BufReader<ChildStdout>,
    errors: JoinHandle<()>,
}

impl Server {
    fn start(mut server: Command, arguments: &[&str]) -> Self {
        server.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = server.spawn().unwrap_or_else(|error| panic!("{server:?}: {error}"));
        let errors = BufReader::new(child.stderr.take().expect("a pipe"));
        // Valgrind writes a line for each read of the tap that is not ready: it does not know the
        // argument.
        let is_error = |line: &String| !line.contains("unhandled io_getevents opcode");
        let errors = thread::spawn(move || {
            errors.lines().map_while(Result::ok).filter(is_error).for_each(|line| eprintln!("{line}"));
        });
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        out.read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n");
        Self { child, out, errors }
    }

    /// Ends the server's standard input, and returns its report.
    fn end(mut self) -> String {
        drop(self.child.stdin.take());
        let mut report = String::new();
        self.out.read_to_string(&mut report).expect("the report");
        self.errors.join().expect("no panic");
        assert!(self.child.wait().expect("an end").success(), "{report}");
        report
    }
}

/// Connects once the server's station answers.
fn connect() -> TcpStream {
    let socket = until("connection", || TcpStream::connect(SERVER).ok());
    // As long as `until` tries.
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
    socket
}

/// Reads an answer with a body of `length` bytes.
fn read_answer(socket: &mut impl BufRead, status: &str, length: usize) {
    let (mut line, mut head) = (String::new(), String::new());
    while line != "\r\n" {
        line.clear();
        assert!(socket.read_line(&mut line).expect("a line") > 0, "the end after {head:?}");
        head += &line;
    }
    assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{head}");
    assert!(head.contains(&format!("Content-Length: {length}\r\n")), "{head}");
    let mut body = vec![0; length];
    socket.read_exact(&mut body).expect("the body");
    for (n, byte) in body.iter().enumerate() {
        let expected = b"on netmem\n".get(n % 4096).copied().unwrap_or(b'.');
        assert_eq!(*byte, expected, "byte {n} of {length}");
    }
}

fn get(path: usize) -> Vec<u8> {
    format!("GET /{path} HTTP/1.1\r\nHost: netmem\r\n\r\n").into_bytes()
}

/// Requests one after the other on a connection, then some at once.
fn client(number: usize) {
    let mut writer = connect();
    let mut reader = BufReader::new(writer.try_clone().expect("a socket"));
    for request in 0..REQUESTS {
        let length = number * 1000 + request * request * 20_000;
        writer.write_all(&get(length)).expect("sent");
        read_answer(&mut reader, "200 OK", length);
    }
    let lengths = [1, 10_000, 0, 4096];
    writer.write_all(&lengths.map(get).concat()).expect("sent");
    lengths.into_iter().for_each(|length| read_answer(&mut reader, "200 OK", length));
    writer.shutdown(Shutdown::Write).expect("a socket");
    assert_eq!(reader.read(&mut [0]).expect("the end"), 0);
}

/// Resets the connection when it is closed.
fn reset(socket: TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let (at, size) = ((&raw const linger).cast(), size_of_val(&linger) as libc::socklen_t);
    // SAFETY: the option is of this size.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, at, size) };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
}

/// What a client can do. Returns how many requests are answered, and how many connections end.
fn ask() -> (usize, usize) {
    let clients: Vec<_> = (0..CLIENTS).map(|number| thread::spawn(move || client(number))).collect();
    for client in clients {
        client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
    // More than the server's send buffer has room for.
    let mut large = connect();
    large.write_all(&get(5_000_000)).expect("sent");
    read_answer(&mut BufReader::new(large), "200 OK", 5_000_000);
    // A connection that is reset within a request.
    let mut half = connect();
    half.write_all(b"GET /1").expect("sent");
    reset(half);
    // A client that closes early: the kernel resets the rest of the answer.
    let mut early = connect();
    early.write_all(&get(50_000_000)).expect("sent");
    early.read_exact(&mut [0; 1000]).expect("the beginning");
    drop(early);
    // A request that arrives byte by byte, from a client that sends no more.
    let mut slow = connect();
    slow.set_nodelay(true).expect("a socket");
    get(5000).iter().for_each(|byte| slow.write_all(&[*byte]).expect("sent"));
    slow.shutdown(Shutdown::Write).expect("a socket");
    read_answer(&mut BufReader::new(slow), "200 OK", 5000);
    // What is no request, and what is too long. The server sends the end.
    for (request, status) in [(b"POST / HTTP/1.1\r\n\r\n".to_vec(), "405"), (vec![b'x'; 10_000], "431")] {
        let mut socket = connect();
        socket.write_all(&request).expect("sent");
        let mut reader = BufReader::new(socket);
        read_answer(&mut reader, status, 100);
        assert_eq!(reader.read(&mut [0]).expect("the end"), 0);
    }
    let refused = TcpStream::connect("192.0.2.2:81").expect_err("no listener");
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    (CLIENTS * (REQUESTS + 4) + 5, CLIENTS + 6)
}

/// By a client that is not ours. Returns how many connections end.
fn ask_by_curl() -> usize {
    if let Err(why) = installed(&["curl"]) {
        skip(&why);
        return 0;
    }
    let urls = ["http://192.0.2.2/20", "http://192.0.2.2/hello"];
    let page = run(Command::new("curl").args(["--silent", "--show-error", "--noproxy", "*"]).args(urls));
    assert_eq!(page, format!("on netmem\n{}on netmem\n{}", ".".repeat(10), ".".repeat(90)));
    1
}

/// The server's report after its clients.
fn judge(report: &str, answered: usize, ended: usize) {
    assert_eq!(
        report,
        format!("answered {answered} on {ended} connections that ended; pages: received 0, to send 0\n")
    );
}

fn on_a_tap(server: Command) {
    in_namespace(move || {
        let tap = name("t");
        let server = Server::start(server, &["tap", &tap, "192.0.2.2/24 fd77::2/64", LONG]);
        ip(&format!("addr add 192.0.2.1/24 dev {tap}"));
        std::fs::write(format!("/proc/sys/net/ipv6/conf/{tap}/disable_ipv6"), "0").expect("IPv6");
        ip(&format!("addr add fd77::1/64 dev {tap} nodad"));
        let (answered, ended) = ask();
        let mut v6 = until("connection", || TcpStream::connect("[fd77::2]:80").ok());
        v6.write_all(&get(7)).expect("sent");
        read_answer(&mut BufReader::new(v6), "200 OK", 7);
        let by_curl = ask_by_curl();
        // The server is at this connection when its end begins, and has seen what came before.
        let open = connect();
        let report = server.end();
        judge(&report, answered + 1 + 2 * by_curl, ended + 1 + by_curl);
        drop(open);
    });
}

#[test]
fn the_kernel_gets_pages_from_a_tap_in_c() {
    each_build(C, &["-std=c11"], "c/http_answer.c", on_a_tap);
}

/// Whether the server resets the connection of a client that sends nothing any more.
fn is_reset(socket: &mut TcpStream) -> bool {
    socket.read_to_end(&mut Vec::new()).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
}

/// A silent client is reset, and so is one that sends its request too slowly, and one that does not
/// read its answer. A client that asks for something from time to time stays, for longer.
fn resets_the_slow(server: Command) {
    in_namespace(move || {
        let tap = name("t");
        let server = Server::start(server, &["tap", &tap, "192.0.2.2/24", LIMIT]);
        ip(&format!("addr add 192.0.2.1/24 dev {tap}"));
        let mut steady = connect();
        let (mut silent, mut slow, mut idle) = (connect(), connect(), connect());
        idle.write_all(&get(50_000_000)).expect("sent");
        let slow = thread::spawn(move || {
            // More bytes than fit the time: the request never ends.
            let bytes = std::iter::repeat_n(b'x', 100).take_while(|byte| {
                thread::sleep(PAUSE / 5);
                slow.write_all(&[*byte]).is_ok()
            });
            bytes.count()
        });
        let mut reader = BufReader::new(steady.try_clone().expect("a socket"));
        for _ in 0..12 {
            thread::sleep(PAUSE);
            steady.write_all(&get(100)).expect("sent");
            read_answer(&mut reader, "200 OK", 100);
        }
        assert!(is_reset(&mut silent), "the silent client");
        assert!(slow.join().expect("no panic") < 100, "the slow client");
        assert!(is_reset(&mut idle), "the client that does not read");
        drop((steady, reader));
        // The server is at this connection when its end begins, and has seen what came before.
        let open = connect();
        judge(&server.end(), 13, 4);
        drop(open);
    });
}

#[test]
fn slow_clients_are_reset_in_c() {
    each_build(C, &["-std=c11"], "c/http_answer.c", resets_the_slow);
}

#[test]
fn the_kernel_gets_pages_from_a_tap_in_cpp() {
    each_build(CPP, &["-std=c++17", "-xc++"], "c/http_answer.c", on_a_tap);
}

fn on_an_interface(server: Command) {
    in_namespace(move || {
        let (ours, theirs) = (name("o"), name("t"));
        veth(&ours, &theirs, 1, 1500);
        let server = Server::start(server, &["xsk", &ours, "192.0.2.2/24", LONG]);
        let interface = theirs.clone();
        let (tell, told) = channel();
        let peer = in_peer_namespace(&theirs, move || {
            ip(&format!("addr add 192.0.2.1/24 dev {interface}"));
            ip(&format!("link set {interface} up"));
            tell.send(ask()).expect("a test");
        });
        let asked = peer.join();
        let report = server.end();
        if let Err(panic) = asked {
            std::panic::resume_unwind(panic);
        }
        let (answered, ended) = told.recv().expect("a peer");
        judge(&report, answered, ended);
    });
}

#[test]
fn the_kernel_gets_pages_from_an_interface_in_c() {
    each_build(C, &["-std=c11"], "c/http_answer.c", on_an_interface);
}

#[test]
fn valgrind_finds_no_error_in_the_http_server() {
    if let Err(why) = installed(&["gcc", "valgrind"]) {
        skip(&why);
        return;
    }
    let libraries = libraries();
    let built = build("gcc", &["-std=c11", "-g"], "c/http_answer.c", libraries.path());
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--error-exitcode=9", "--quiet"]).arg(&built).env("LD_LIBRARY_PATH", libraries.path());
    on_a_tap(valgrind);
}
