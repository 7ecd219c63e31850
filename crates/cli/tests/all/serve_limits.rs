//! `netmem serve` with peers that are idle, slow or hostile, through a tap: such a peer costs its
//! own connection, and nothing else.

use crate::command::netns::{Namespace, missing, name, printed};
use crate::command::*;
use std::io::{BufRead, BufReader};

/// A server, and the namespace in which its clients are.
struct Server {
    process: Background,
    clients: Namespace,
}

impl Server {
    /// None, and the reason is reported, if something is missing here.
    fn start(service: &str, args: &str) -> Option<Self> {
        if let Err(why) = missing() {
            skip(&why);
            return None;
        }
        let (tap, clients) = (name(), Namespace::new().unwrap());
        let port = format!("tap:{tap}");
        let base = ["serve", service, "--port", &port, "--addr", "10.79.0.2/24,fd79::2/64"];
        let args: Vec<_> = base.into_iter().chain(args.split_whitespace()).collect();
        let mut process = background(&args);
        let mut line = String::new();
        BufReader::new(process.0.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with(&format!("ready: {service} on 10.79.0.2:")), "{line}");
        clients.takes(&tap, &["10.79.0.1/24", "10.79.0.9/24", "fd79::1/64", "fd79::9/64"]);
        Some(Self { process, clients })
    }

    /// A program in Python that must succeed. Returns what it printed.
    #[track_caller]
    fn client(&self, program: &str) -> String {
        printed(self.clients.python(&[HELP, program].concat(), &[]))
    }

    /// The memory of the process that is not the pages of its pools, in bytes.
    fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.0.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }

    /// What the server prints at its end. The books of its pages are part of its exit status.
    #[track_caller]
    fn end(mut self) -> String {
        self.process.signal(Signal::TERM);
        let (status, out, err) = self.process.end();
        assert_eq!((status, err.as_str()), (Some(0), ""), "{out}");
        assert!(out.contains("all came back"), "{out}");
        out
    }
}

/// A connection, what it receives until the server closes it, and a request of the cache.
const HELP: &str = r#"
import socket
def connect(port, address="10.79.0.2", source=None, buffer=None):
    s = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    s.settimeout(100)
    if buffer:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    if source:
        s.bind((source, 0))
    s.connect((address, port))
    return s
def rest(s):
    got = b""
    while True:
        part = s.recv(1 << 16)
        if not part:
            return got
        got += part
def read(s, end):
    got = b""
    while not got.endswith(end):
        part = s.recv(1 << 16)
        assert part, "it ends after %r" % got[-100:]
        got += part
    return got
def ask(s, request, end=b"\r\n"):
    s.sendall(request)
    return read(s, end)
def store(s, key, value):
    answer = ask(s, b"set %s 0 0 %d\r\n%s\r\n" % (key, len(value), value))
    assert answer == b"STORED\r\n", answer
def is_reset(s):
    try:
        rest(s)
        return False
    except (ConnectionResetError, BrokenPipeError):
        return True
"#;

/// Each of these hides the second request from one reader of the bytes, and not from another one.
/// The server answers one request, and closes.
#[test]
fn http_refuses_a_head_that_can_be_read_in_two_ways() {
    let Some(server) = Server::start("http", "") else { return };
    server.client(
        r#"
begin, next = b"GET /3 HTTP/1.1\r\nHost: a\r\n", b"GET /5 HTTP/1.1\r\nHost: a\r\n\r\n"
def answers(data):
    s = connect(80)
    s.sendall(data)
    s.shutdown(socket.SHUT_WR)
    got = rest(s)
    return [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]], got
assert answers(begin + b"\r\n" + next)[0] == [200, 200]
for fields in [
    b"Content-Length : 31\r\n", b"Content-Length\t: 31\r\n", b"X: a\r\n Content-Length: 31\r\n", b"X: a\r\n\tb\r\n",
    b"X: a\nContent-Length: 31\r\n", b"X: a\rContent-Length: 31\r\n", b"X: a\n\r\n", b"Content-Length: 31\n",
    b"Content-Length: 0\r\nContent-Length: 31\r\n", b"Content-Length: 0, 31\r\n", b"Content-Length: +0\r\n",
    b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n", b"Content\0-Length: 31\r\n", b"no colon\r\n", b"Host: b\r\n",
]:
    for data in [begin + fields + b"\r\n" + next, b"\r\n" + begin + fields + b"\r\n" + next]:
        statuses, got = answers(data)
        assert statuses == [400] and b"Connection: close" in got, (data, got)
# Lines end with CR and LF.
for data in [begin.replace(b"\r", b"") + b"\n" + next, b"\n" + begin + b"\r\n" + next, begin + b"\n" + next]:
    assert answers(data)[0] == [400], data
for fields, status in [(b"Content-Length: 31\r\n", 413), (b"Transfer-Encoding: chunked\r\n", 413), (b"Transfer-Encoding: x\r\n", 501)]:
    assert answers(begin + fields + b"\r\n" + next)[0] == [status], fields
"#,
    );
    server.end();
}

/// What follows the line of a storage command is its value, or nothing more is read from the
/// connection.
#[test]
fn memcached_carries_out_no_value() {
    let Some(server) = Server::start("memcached", "") else { return };
    server.client(
        r#"
other = connect(11211)
store(other, b"k", b"1")
def told(data):
    s = connect(11211)
    s.sendall(data)
    s.shutdown(socket.SHUT_WR)
    return rest(s)
for line, answer in [
    (b"append x 0 0 9", b"NOT_STORED"), (b"prepend x 0 0 9", b"NOT_STORED"), (b"set x y 0 9", b"CLIENT_ERROR"), (b"ms x 9", b"ERROR"),
    (b"set x 0 0 y", b"CLIENT_ERROR"), (b"set x 0 0 -1", b"CLIENT_ERROR"), (b"set x 0 0 1", b"CLIENT_ERROR"), (b"set x 0", b"CLIENT_ERROR"),
]:
    got = told(line + b"\r\nflush_all\r\n")
    assert got.startswith(answer) and got.count(b"\r\n") == 1, (line, got)
    assert ask(other, b"get k\r\n", b"END\r\n") == b"VALUE k 0 1\r\n1\r\nEND\r\n", line
assert told(b"append k 0 0 9\r\nflush_all\r\nget k\r\n") == b"STORED\r\nVALUE k 0 10\r\n1flush_all\r\nEND\r\n"
large = b"y" * 2000000
assert told(b"set k 0 0 2000000 noreply\r\n%s\r\nget k\r\n" % large) == b"END\r\n", "memcached answers nothing, and the old value is gone"
assert told(b"get" + b" absent" * 20000 + b"\r\nquit\r\n") == b"END\r\n"
"#,
    );
    server.end();
}

/// Lines of 8 kB that ask for 4 GB each, from clients that read nothing: queued answers take memory
/// that depends on neither.
#[test]
fn requests_for_much_cost_little_memory() {
    let Some(mut server) = Server::start("memcached", "") else { return };
    let stored = "\
s = connect(11211)
store(s, b'b', b'x' * (1 << 20))
";
    server.client(stored);
    let before = server.memory();
    let program = "\
import sys
clients = [connect(11211, buffer=4096) for _ in range(30)]
for s in clients:
    s.sendall(b'get' + b' b' * 4090 + b'\\r\\nversion\\r\\n')
# The begin of the answers is there, and the server answers others.
for s in clients:
    assert s.recv(7) == b'VALUE b'
assert ask(connect(11211), b'get absent\\r\\n') == b'END\\r\\n'
print('all ask', flush=True)
sys.stdin.readline()
# One reads all of it.
left = 4090 * ((1 << 20) + 19) - 7 if len(sys.argv) > 1 else 40 << 20
while left > 0:
    left -= len(clients[0].recv(min(left, 1 << 20)))
print('done')
";
    let mut command = server.clients.command("python3");
    let mut clients =
        command.args(["-c", &[HELP, program].concat()]).stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut says = BufReader::new(clients.stdout.take().unwrap());
    let mut line = String::new();
    says.read_line(&mut line).unwrap();
    assert_eq!(line, "all ask\n");
    let grown = server.memory().saturating_sub(before);
    assert!(grown < 30 << 20, "{grown} bytes for 30 clients");
    drop(clients.stdin.take());
    printed(clients);
    line.clear();
    says.read_line(&mut line).unwrap();
    assert_eq!(line, "done\n");
    assert!(server.process.0.try_wait().unwrap().is_none());
    server.end();
}

/// Peers that read nothing of values, which are then replaced, and peers that send the half of a
/// value: together they keep more pages than the server has. They lose their connections, and the
/// store keeps its items.
#[test]
fn peers_that_stop_lose_their_connection_before_the_store_loses_items() {
    let Some(server) = Server::start("memcached", "--store 16777216 --queues 2") else { return };
    server.client(
        r#"
s = connect(11211)
items = {b"s%d" % n: b"%d" % n * 1000 for n in range(1000)}
for key, value in items.items():
    store(s, key, value)
big = b"B" * 900000
readers, writers = [], []
for n in range(60):
    store(s, b"big", big)
    reader = connect(11211, buffer=4096)
    reader.sendall(b"get big\r\n" + [b"", b"quit\r\n"][n % 2])
    assert reader.recv(9) == b"VALUE big"
    if n % 3:
        reader.shutdown(socket.SHUT_WR)
    readers.append(reader)
for n in range(60):
    writer = connect(11211)
    writer.sendall(b"set never 0 0 900000\r\n" + big[:800000])
    writers.append(writer)
    store(s, b"big", big)
for key, value in items.items():
    assert ask(s, b"get %s\r\n" % key, b"END\r\n") == b"VALUE %s 0 %d\r\n%s\r\nEND\r\n" % (key, len(value), value)
print(sum(map(is_reset, readers[:30])))
"#,
    );
    let out = server.end();
    assert!(out.contains(" 0 evictions, "), "{out}");
    assert!(!out.contains("; 0 reset because they kept pages"), "{out}");
}

/// Connections that send nothing, the half of a request, or read nothing, are closed.
#[test]
fn idle_connections_and_half_requests_end() {
    let limits = "--idle-timeout 300ms --request-timeout 200ms";
    let Some(server) = Server::start("http", limits) else { return };
    server.client(
        r#"
for address in ["10.79.0.2", "fd79::2"]:
    assert rest(connect(80, address)) == b"", "idle from the beginning"
    s = connect(80, address)
    s.sendall(b"GET /3 HTTP/1.1\r\nHost: a\r\n\r\n")
    assert rest(s).endswith(b"\r\n\r\n\0\1\2"), "idle after a request"
    s = connect(80, address)
    s.sendall(b"GET /3 HTTP/1.1\r\nHo")
    got = rest(s)
    assert got.startswith(b"HTTP/1.1 408 ") and b"Connection: close" in got, got
s = connect(80, buffer=4096)
s.sendall(b"GET /100000000 HTTP/1.1\r\nHost: a\r\n\r\n")
assert s.recv(12) == b"HTTP/1.1 200"
# The server sends a reset, which the client sees before it reads on.
import select
poll = select.poll()
poll.register(s, 0)
assert poll.poll(100000)[0][1] & select.POLLERR
"#,
    );
    let out = server.end();
    assert!(out.contains("; 5 closed as idle, 2 in the middle of a request"), "{out}");
    let Some(server) = Server::start("memcached", limits) else { return };
    server.client(
        r#"
assert rest(connect(11211)) == b""
for half in [b"get a", b"set a 0 0 100\r\nabc", b"set a 0 0 3000000\r\nabc", b"vers"]:
    s = connect(11211)
    s.sendall(half)
    rest(s)
s = connect(11211)
s.sendall(b"version\r\nvers")
assert rest(s).count(b"VERSION") == 1
"#,
    );
    let out = server.end();
    assert!(out.contains("; 1 closed as idle, 5 in the middle of a request"), "{out}");
    // The time before a request is not the request's.
    let Some(server) = Server::start("http", "--idle-timeout 100s --request-timeout 2s") else { return };
    server.client(
        r#"
import time
s = connect(80)
time.sleep(2.2)
s.sendall(b"GET /3 HTTP/1.1\r\nHo")
time.sleep(0.05)
s.sendall(b"st: a\r\nConnection: close\r\n\r\n")
got = rest(s)
assert got.startswith(b"HTTP/1.1 200 "), got
"#,
    );
    server.end();
    for (service, port) in [("echo", 7), ("discard", 9)] {
        let Some(server) = Server::start(service, limits) else { return };
        server.client(&format!("s = connect({port})\ns.sendall(b'abc')\nprint(rest(s))"));
        assert!(server.end().contains("; 1 closed as idle"));
    }
}

/// A byte at a time is no progress: the limit is for the whole request.
#[test]
fn a_request_that_trickles_ends() {
    let Some(server) = Server::start("http", "--idle-timeout 100 --request-timeout 500ms") else { return };
    server.client(
        r#"
import select
s = connect(80)
for byte in b"GET /3 HTTP/1.1\r\n" + b"X: y\r\n" * 1000:
    s.sendall(bytes([byte]))
    if select.select([s], [], [], 0.02)[0]:
        break
assert s.recv(12) == b"HTTP/1.1 408"
"#,
    );
    let out = server.end();
    assert!(out.contains("; 0 closed as idle, 1 in the middle of a request"), "{out}");
}

/// A peer has its share of the connections, and all have a total. A connection that ends makes
/// room.
#[test]
fn connections_are_limited() {
    let args = "--max-connections 6 --max-connections-per-peer 3 --queues 2 --tcp-port 7777";
    let Some(server) = Server::start("echo", args) else { return };
    server.client(
        r#"
def echoes(s):
    try:
        s.sendall(b"x")
        return s.recv(1) == b"x"
    except (ConnectionResetError, BrokenPipeError):
        return False
def served(address, source):
    try:
        s = connect(7777, address, source)
    except ConnectionResetError:
        return None
    return s if echoes(s) else None
first = [served("10.79.0.2", "10.79.0.1") for _ in range(5)]
assert [s is not None for s in first] == [True] * 3 + [False] * 2, first
# Both addresses are of one IPv6 network.
second = [served("fd79::2", source) for source in ["fd79::1", "fd79::9", "fd79::1", "fd79::9"]]
assert [s is not None for s in second] == [True] * 3 + [False], second
assert served("10.79.0.2", "10.79.0.9") is None, "the total"
first.pop(0).close()
s = None
while s is None:
    s = served("10.79.0.2", "10.79.0.9")
assert all(map(echoes, first[:2] + second[:3] + [s]))
"#,
    );
    let out = server.end();
    assert!(
        out.starts_with("served 7 connections, 0 of them broken") && !out.contains("limits: 0 connections"),
        "{out}"
    );
}

/// The counters of the stack are in the report, except those that are 0.
#[test]
fn the_report_has_the_counters_of_the_stack() {
    let Some(server) = Server::start("echo", "--queues 2") else { return };
    server.client(
        r#"
for address in ["10.79.0.2", "fd79::2", "10.79.0.2"]:
    try:
        connect(9, address)
        assert False, "nothing listens on this port"
    except ConnectionRefusedError:
        pass
"#,
    );
    let out = server.end();
    assert!(out.contains("\nhandshakes: 3 resets for segments of no connection\n"), "{out}");
    assert!(!out.contains("not sent: ") && !out.contains("a cookie"), "{out}");
}

/// The threads of the queues are on the CPUs that were asked for. More CPUs than there are is an
/// error.
#[test]
fn threads_are_pinned() {
    let cpus = |process: &str| {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
    };
    let mine = cpus("self");
    let last = mine.rsplit(['-', ',']).next().unwrap();
    let Some(server) = Server::start("echo", &format!("--cpus net={last}")) else { return };
    assert_eq!(cpus(&server.process.0.id().to_string()), last);
    server.client("s = connect(7)\nassert ask(s, b'abc\\r\\n') == b'abc\\r\\n'");
    server.end();
}

/// What cannot be done is reported before anything starts.
#[test]
fn bad_limits() {
    for (args, says) in [
        ("http --store 2000000", "only memcached"),
        ("memcached --store 64M", "without a suffix"),
        ("memcached --store 1000", "1048576"),
        ("http --tcp-port 0", "--tcp-port"),
        ("http --tcp-port 65536", "--tcp-port"),
        ("http --max-connections 0", "--max-connections"),
        ("http --max-connections 65537", "65536 connections at most"),
        ("http --max-connections 5 --max-connections-per-peer 6", "a larger --max-connections"),
        ("http --idle-timeout 0", "between 1 ms"),
        ("http --request-timeout 1h", "suffix"),
        ("http --cpus device=0", "net=N"),
        ("http --cpus net=100000", "CPU 100000 does not exist"),
    ] {
        let args: Vec<_> =
            ["serve", "--port", "tap:x", "--addr", "10.0.0.2/24"].into_iter().chain(args.split(' ')).collect();
        fails(&args, 2, &[says]);
    }
}
