//! `netmem serve` with peers that are hostile, through a tap: such a peer costs its
//! own connection, and nothing else.
#![allow(clippy::unwrap_used, missing_docs)]

mod command;
#[path = "shared/skip.rs"]
mod skip;

use command::netns::{Namespace, missing, name, printed};
use command::*;
use skip::skip;
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
        let mut process = Background::start(&args);
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
        self.process.signal("-TERM");
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
