//! `netmem serve --state`: the kernel's connections outlive the server's process.

use crate::command::netns::{Namespace, missing};
use crate::command::*;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Stdio};
use tempfile::TempDir;

const V4: &str = "10.79.0.2";
const V6: &str = "fd79::2";

/// A server that is started again and again behind the same tap.
struct Server {
    service: &'static str,
    tap: String,
    process: Background,
    clients: Namespace,
    state: PathBuf,
    _folder: TempDir,
}

impl Server {
    /// None, and the reason is told, if something is missing here.
    fn start(service: &'static str, queues: u16) -> Option<Self> {
        if let Err(why) = missing() {
            skip(&why);
            return None;
        }
        let clients = Namespace::new().unwrap();
        let tap = clients.tap_of_queues(&["10.79.0.1/24", "fd79::1/64"]);
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let process = Self::spawn(&clients, service, &tap, &state, queues);
        let mut this = Self { service, tap, process, clients, state, _folder: folder };
        this.ready();
        Some(this)
    }

    fn spawn(clients: &Namespace, service: &str, tap: &str, state: &PathBuf, queues: u16) -> Background {
        let mut command = clients.command(env!("CARGO_BIN_EXE_netmem"));
        command.args(["serve", service, "--port", &format!("tap:{tap}"), "--addr", "10.79.0.2/24,fd79::2/64"]);
        command.args(["--queues", &queues.to_string(), "--state"]).arg(state);
        Background(command.spawn().unwrap())
    }

    fn ready(&mut self) {
        let mut line = String::new();
        BufReader::new(self.process.0.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("ready: "), "{line}");
    }

    /// Ends the server; returns what it prints, and the connections that wait in its file.
    #[track_caller]
    fn end(&mut self) -> (String, u64) {
        self.process.signal(Signal::TERM);
        let (status, out, err) = self.process.end();
        assert_eq!((status, err.as_str()), (Some(0), ""), "{out}");
        assert!(out.contains("all came back") && out.contains(" 0 could not"), "{out}");
        assert_eq!(self.state.metadata().unwrap().permissions().mode() & 0o777, 0o600, "it has sequence numbers");
        let kept = out.split_once(" could not; ").expect(&out).1;
        let kept = kept.split_once(' ').unwrap().0.parse().unwrap();
        (out, kept)
    }

    fn start_again(&mut self, queues: u16) {
        self.process = Self::spawn(&self.clients, self.service, &self.tap, &self.state, queues);
        self.ready();
        assert!(!self.state.exists(), "connections go on once");
    }
}

/// A client, which reports when it is in the middle and waits to be told to go on.
struct Client {
    process: Child,
    says: BufReader<ChildStdout>,
}

impl Client {
    fn start(clients: &Namespace, program: &str, address: &str) -> Self {
        let mut command = clients.command("python3");
        let mut process =
            command.args(["-c", &[HELP, program].concat(), address]).stdin(Stdio::piped()).spawn().unwrap();
        let says = BufReader::new(process.stdout.take().unwrap());
        Self { process, says }
    }

    #[track_caller]
    fn says(&mut self, what: &str) {
        let mut line = String::new();
        self.says.read_line(&mut line).unwrap();
        if line.trim_end() != what {
            let mut errors = String::new();
            let _ = self.process.kill();
            std::io::Read::read_to_string(&mut self.process.stderr.take().unwrap(), &mut errors).unwrap();
            panic!("the client says {line:?} and not {what:?}: {errors}");
        }
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{what}").unwrap();
    }

    #[track_caller]
    fn ends(mut self) {
        self.says("done");
        assert!(self.process.wait().unwrap().success());
    }
}

const HELP: &str = r#"
import os, random, select, selectors, socket, sys, time
def connect(port, address=sys.argv[1]):
    return socket.create_connection((address, port), 60)
def pause():
    print("half", flush=True)
    assert sys.stdin.readline() == "go\n"
def read(s, n):
    got = bytearray()
    while len(got) < n:
        part = s.recv(min(n - len(got), 1 << 16))
        assert part, "it ends after %d of %d" % (len(got), n)
        got += part
    return bytes(got)
"#;

/// Connections that send and read all the time, in both families, until they are told to stop; each
/// byte is compared.
const TRAFFIC: &str = r#"
sel = selectors.DefaultSelector()
class Stream:
    def __init__(self, n):
        self.s = connect(7, ["10.79.0.2", "fd79::2"][n % 2])
        self.s.setblocking(False)
        self.out, self.back = random.Random(n), random.Random(n)
        self.queue, self.expected, self.ahead, self.shut = b"", b"", 0, False
    def write(self, stop):
        if not self.queue and not stop:
            self.queue = self.out.randbytes(20000)
        if not self.queue:
            self.s.shutdown(socket.SHUT_WR)
            self.shut = True
            sel.modify(self.s, selectors.EVENT_READ, self)
            return
        n = self.s.send(self.queue)
        self.queue, self.ahead = self.queue[n:], self.ahead + n
    def read(self):
        got = self.s.recv(1 << 16)
        while len(self.expected) < len(got):
            self.expected += self.back.randbytes(20000)
        assert got == self.expected[:len(got)], "the bytes differ"
        self.expected, self.ahead = self.expected[len(got):], self.ahead - len(got)
        if not got:
            assert self.shut and self.ahead == 0, "it ended too early: %d" % self.ahead
            sel.unregister(self.s)
            self.s.close()
        return len(got)
streams = [Stream(n) for n in range(30)]
for stream in streams:
    sel.register(stream.s, selectors.EVENT_READ | selectors.EVENT_WRITE, stream)
total, told, stop = 0, 0, False
while sel.get_map():
    ready = sel.select(60)
    assert ready, "it hangs"
    for key, events in ready:
        if events & selectors.EVENT_WRITE and not key.data.shut:
            key.data.write(stop)
        if events & selectors.EVENT_READ:
            total += key.data.read()
    if total > told + 1500000:
        told = total
        print("more", flush=True)
    if not stop and select.select([sys.stdin], [], [], 0)[0]:
        assert sys.stdin.readline() == "stop\n"
        stop = True
        print("stops", flush=True)
        told = 1 << 60
print("done", flush=True)
"#;

/// Thirty connections echo without pause while the server is restarted, with other numbers of
/// queues. Restored connections may be on other queues than those that the kernel chooses: how many
/// of their segments go from stack to stack is left to chance.
#[test]
fn traffic_goes_on_over_restarts() {
    let Some(mut server) = Server::start("echo", 2) else { return };
    let mut client = Client::start(&server.clients, TRAFFIC, V4);
    for queues in [3, 2] {
        client.says("more");
        client.says("more");
        let (out, kept) = server.end();
        assert!(kept == 30 && out.contains(" 0 of them broken"), "{out}");
        server.start_again(queues);
    }
    client.says("more");
    client.tell("stop");
    loop {
        let mut line = String::new();
        client.says.read_line(&mut line).unwrap();
        match line.trim_end() {
            "more" => {}
            "stops" => break,
            other => panic!("{other}"),
        }
    }
    client.ends();
    let (out, _) = server.end();
    assert!(out.contains("state: 30 connections went on") && out.contains(" 0 of them broken"), "{out}");
}

/// The client goes on after a restart in the middle of its program, where it has one connection.
fn once(service: &'static str, address: &str, program: &str) {
    let Some(mut server) = Server::start(service, 2) else { return };
    let mut client = Client::start(&server.clients, program, address);
    client.says("half");
    let (_, kept) = server.end();
    assert_eq!(kept, 1);
    server.start_again(2);
    client.tell("go");
    client.ends();
    server.end();
}

/// The server has taken and answered everything, and has closed its end: what the client has not
/// read is sent by the next server.
#[test]
fn a_closed_connection_goes_on() {
    once(
        "echo",
        V6,
        r#"
s = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 20000)
s.settimeout(60)
s.connect((sys.argv[1], 7))
data = random.Random(5).randbytes(200000)
s.sendall(data)
s.shutdown(socket.SHUT_WR)
time.sleep(0.3)
pause()
assert read(s, len(data)) == data and s.recv(1) == b""
print("done", flush=True)
"#,
    );
}

#[test]
fn a_source_goes_on() {
    once(
        "source",
        V4,
        r#"
pattern = bytes((n + 7 * (n >> 8)) & 255 for n in range(65536)) * 40
s = connect(19)
got = read(s, 700001)
pause()
got += read(s, 1500000)
assert got == pattern[:len(got)], "the bytes differ"
print("done", flush=True)
"#,
    );
}

/// In the middle of a body and of the next request; and behind them, the connection still accepts
/// requests.
#[test]
fn http_goes_on() {
    once(
        "http",
        V6,
        r#"
pattern = bytes((n + 7 * (n >> 8)) & 255 for n in range(65536)) * 200
def head():
    got = b""
    while not got.endswith(b"\r\n\r\n"):
        got += read(s, 1)
    assert got.startswith(b"HTTP/1.1 200"), got
s = connect(80)
s.sendall(b"GET /12000000 HTTP/1.1\r\nHost: a\r\n\r\nGET /7")
head()
got = read(s, 500000)
pause()
got += read(s, 11500000)
assert got == pattern[:len(got)], "the bytes differ"
s.sendall(b"0000 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
head()
assert read(s, 70000) == pattern[:70000] and s.recv(1) == b""
print("done", flush=True)
"#,
    );
}

/// In the middle of a value that comes.
#[test]
fn a_value_that_comes_to_memcached_goes_on() {
    once(
        "memcached",
        V4,
        r#"
s = connect(11211)
value = random.Random(1).randbytes(300000)
s.sendall(b"set a 3 0 300000\r\n" + value[:200000])
time.sleep(0.2)
pause()
s.sendall(value[200000:] + b"\r\nget a\r\n")
expected = b"STORED\r\nVALUE a 3 300000\r\n" + value + b"\r\nEND\r\n"
assert read(s, len(expected)) == expected
print("done", flush=True)
"#,
    );
}

/// In the middle of answers for which neither the client's window nor the send buffer has room:
/// answers that have begun go on, and the rest of the line is answered by the next server, where
/// items are gone.
#[test]
fn answers_of_memcached_go_on() {
    once(
        "memcached",
        V6,
        r#"
s = connect(11211)
value = random.Random(1).randbytes(1000000)
s.sendall(b"set a 3 0 1000000\r\n" + value + b"\r\n")
assert read(s, 8) == b"STORED\r\n"
s.sendall(b"get a a a a a a a a a a a a\r\nget a\r\nversi")
time.sleep(0.2)
pause()
values = 0
while read(s, 5) == b"VALUE":
    assert read(s, len(b" a 3 1000000\r\n")) == b" a 3 1000000\r\n" and read(s, 1000002) == value + b"\r\n"
    values += 1
assert read(s, 5) == b"END\r\n", "the next line"
assert 1 <= values < 12, values
s.sendall(b"on\r\n")
assert read(s, 14) == b"VERSION netmem"
while read(s, 1) != b"\n":
    pass
print("done", flush=True)
"#,
    );
}

/// A file that is not a whole state of this service, or that other users can read, is refused and
/// stays; then the connection goes on.
#[test]
fn foreign_and_damaged_files_are_refused() {
    let Some(mut server) = Server::start("echo", 2) else { return };
    let program = r#"
s = connect(7)
s.sendall(b"one")
assert read(s, 3) == b"one"
pause()
s.sendall(b"two")
assert read(s, 3) == b"two"
print("done", flush=True)
"#;
    let mut client = Client::start(&server.clients, program, V4);
    client.says("half");
    assert_eq!(server.end().1, 1);
    let whole = std::fs::read(&server.state).unwrap();
    let refused = |server: &Server, service: &str, says: &str| {
        let mut process = Server::spawn(&server.clients, service, &server.tap, &server.state, 2);
        let (status, out, err) = process.end();
        assert_eq!((status, out.as_str()), (Some(1), ""), "{err}");
        assert!(err.contains(says) && err.contains("--state") && !err.contains("panicked"), "{err}");
        assert!(server.state.symlink_metadata().is_ok(), "the file stays");
    };
    let write = |bytes: &[u8]| std::fs::write(&server.state, bytes).unwrap();
    refused(&server, "discard", "the service echo");
    write(&whole[..whole.len() - 1]);
    refused(&server, "echo", "damaged");
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    write(&flipped);
    refused(&server, "echo", "damaged");
    write(b"#!/bin/sh\n");
    refused(&server, "echo", "not a state of netmem serve");
    write(&whole);
    let mode = |mode| std::fs::set_permissions(&server.state, PermissionsExt::from_mode(mode)).unwrap();
    mode(0o640);
    refused(&server, "echo", "other users");
    mode(0o600);
    let other = server.state.with_extension("other");
    std::fs::rename(&server.state, &other).unwrap();
    symlink(&other, &server.state).unwrap();
    refused(&server, "echo", "symbolic link");
    std::fs::rename(&other, &server.state).unwrap();
    server.start_again(2);
    client.tell("go");
    client.ends();
    server.end();
}
