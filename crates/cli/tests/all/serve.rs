//! `netmem serve`: the kernel as peer, through a tap.

use crate::command::netns::{Namespace, missing, name, printed};
use crate::command::*;
use std::io::{BufRead, BufReader};

const V4: &str = "10.79.0.2";
const V6: &str = "fd79::2";

/// A server, and the namespace in which its clients are.
struct Server {
    process: Background,
    clients: Namespace,
}

impl Server {
    /// None, and the reason is told, if something is missing here.
    fn start(service: &str, args: &[&str]) -> Option<Self> {
        if let Err(why) = missing() {
            skip(&why);
            return None;
        }
        let (tap, clients) = (name(), Namespace::new().unwrap());
        let port = format!("tap:{tap}");
        let base = ["serve", service, "--port", &port, "--addr", "10.79.0.2/24,fd79::2/64"];
        let mut process = background(&[&base[..], args].concat());
        let mut line = String::new();
        BufReader::new(process.0.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with(&format!("ready: {service} on 10.79.0.2:")), "{line}");
        clients.takes(&tap, &["10.79.0.1/24", "fd79::1/64"]);
        Some(Self { process, clients })
    }

    /// What the server prints at its end. The books of its pages are part of its exit status.
    #[track_caller]
    fn end(mut self) -> String {
        self.process.signal(Signal::TERM);
        let (status, out, err) = self.process.end();
        assert_eq!(status, Some(0), "{err}");
        assert!(out.contains("all came back"), "{out}");
        out
    }
}

/// ECHO ADDRESS CONNECTIONS BYTES: as many connections at once; all bytes that come back are
/// hashed.
const ECHO: &str = r#"
import hashlib, random, selectors, socket, sys
address, connections, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sel = selectors.DefaultSelector()
for n in range(connections):
    s = socket.create_connection((address, 7), 60)
    s.setblocking(False)
    data = random.Random(n).randbytes(size)
    sel.register(s, selectors.EVENT_READ | selectors.EVENT_WRITE, [data, 0, hashlib.sha256(), n])
left = connections
while left:
    ready = sel.select(60)
    assert ready, "it hangs"
    for key, events in ready:
        s, c = key.fileobj, key.data
        if events & selectors.EVENT_WRITE:
            c[1] += s.send(c[0][c[1]:c[1] + 65536])
            if c[1] == size:
                s.shutdown(socket.SHUT_WR)
                sel.modify(s, selectors.EVENT_READ, c)
        if events & selectors.EVENT_READ:
            got = s.recv(1 << 16)
            if got:
                c[2].update(got)
                continue
            assert c[2].digest() == hashlib.sha256(c[0]).digest(), "the bytes differ"
            sel.unregister(s)
            s.close()
            left -= 1
print(connections * size)
"#;

/// One connection and 500, over IPv4 and IPv6: what comes back is what was sent.
#[test]
fn an_echo_for_many_connections() {
    let Some(server) = Server::start("echo", &[]) else { return };
    for (address, connections, bytes) in [(V4, 1, 5_000_000), (V6, 1, 5_000_000), (V4, 500, 20_000), (V6, 100, 20_000)]
    {
        let args = [address, &connections.to_string(), &bytes.to_string()];
        let echoed = printed(server.clients.python(ECHO, &args));
        assert_eq!(echoed.trim(), (connections * bytes).to_string());
    }
    let out = server.end();
    assert!(out.starts_with("served 602 connections, 0 of them broken: 22000000 bytes received (0 copied)"), "{out}");
}

/// The kernel picks queues by a hash of its own. A connection lives on the queue where its SYN
/// arrived, so all its segments arrive there.
#[test]
fn an_echo_on_several_queues() {
    let Some(server) = Server::start("echo", &["--queues", "3"]) else { return };
    for (address, connections) in [(V4, 400), (V6, 200)] {
        let echoed = printed(server.clients.python(ECHO, &[address, &connections.to_string(), "20000"]));
        assert_eq!(echoed.trim(), (connections * 20_000).to_string());
    }
    let out = server.end();
    assert!(out.starts_with("served 600 connections, 0 of them broken: 12000000 bytes received (0 copied)"), "{out}");
    let queues = out.split_once("queues: connections ").expect(&out).1;
    let (served, rest) = queues.split_once("; ").expect(&out);
    let served: Vec<u32> = served.split(", ").map(|n| n.parse().unwrap()).collect();
    assert!(served.len() == 3 && served.iter().all(|&n| n > 100), "{out}");
    assert!(rest.starts_with("0 frames came by another queue than their connection's, 0 more were dropped"), "{out}");
}

/// The same over a link with every fault. Damaged packets are seen.
#[test]
fn an_echo_over_a_bad_link() {
    let link = "loss=1%,delay=2ms,jitter=1ms,reorder=1%,duplicate=1%,corrupt=1%,seed=7";
    let Some(server) = Server::start("echo", &["--link", link]) else { return };
    for address in [V4, V6] {
        printed(server.clients.python(ECHO, &[address, "10", "100000"]));
    }
    let out = server.end();
    assert!(out.contains("0 of them broken: 2000000 bytes received"), "{out}");
    assert!(out.contains(" packets with a wrong checksum"), "{out}");
    assert!(out.contains("link to the driver: ") && !out.contains(" 0 lost"), "{out}");
}

const SOURCE: &str = r#"
import socket, sys
pattern = bytes((n + 7 * (n >> 8)) & 255 for n in range(65536))
s = socket.create_connection((sys.argv[1], 19), 60)
got = bytearray()
while len(got) < 3000000:
    got += s.recv(1 << 16)
assert bytes(got) == (pattern * (len(got) // 65536 + 1))[:len(got)], "the bytes differ"
"#;

const DISCARD: &str = r#"
import socket, sys
s = socket.create_connection((sys.argv[1], 9), 60)
s.sendall(bytes(3000000))
s.shutdown(socket.SHUT_WR)
assert s.recv(1) == b""
"#;

#[test]
fn a_source_and_a_sink() {
    let Some(source) = Server::start("source", &[]) else { return };
    for address in [V4, V6] {
        printed(source.clients.python(SOURCE, &[address]));
    }
    let out = source.end();
    assert!(out.starts_with("served 2 connections") && out.contains("bytes sent (0 copied)"), "{out}");
    let Some(sink) = Server::start("discard", &[]) else { return };
    for address in [V4, V6] {
        printed(sink.clients.python(DISCARD, &[address]));
    }
    let out = sink.end();
    assert!(out.starts_with("served 2 connections, 0 of them broken: 6000000 bytes received (0 copied)"), "{out}");
}

const HTTP: &str = r#"
import http.client, sys
pattern = bytes((n + 7 * (n >> 8)) & 255 for n in range(65536)) * 40
c = http.client.HTTPConnection(sys.argv[1], 80, timeout=60)
for path, status, body in [
    ("/1000", 200, pattern[:1000]), ("/2000000", 200, pattern[:2000000]), ("/0", 200, b""), ("/x", 404, b""),
    ("/", 200, b"netmem serves: GET /N has N bytes\n"), ("/70000", 200, pattern[:70000]),
]:
    c.request("GET", path)
    r = c.getresponse()
    assert (r.status, r.read()) == (status, body), path
c.request("HEAD", "/123")
r = c.getresponse()
assert (r.status, r.getheader("Content-Length"), r.read()) == (200, "123", b"")
c.request("POST", "/", body=b"x")
r = c.getresponse()
assert r.status == 413 and r.read() == b""
"#;

/// Python's client, and curl if it is there.
#[test]
fn http_is_served() {
    let Some(server) = Server::start("http", &[]) else { return };
    for address in [V4, V6] {
        printed(server.clients.python(HTTP, &[address]));
    }
    let curl =
        ["-sS", "-m", "20", "-o", "/dev/null", "-w", "%{http_code} %{size_download}", "http://[fd79::2]/1234567"];
    let with_curl = installed(&["curl"]).map(|()| {
        let out = printed(server.clients.command("curl").args(curl).spawn().unwrap());
        assert_eq!(out, "200 1234567");
    });
    let out = server.end();
    let connections = 2 + usize::from(with_curl.is_ok());
    assert!(out.starts_with(&format!("served {connections} connections, 0 of them broken")), "{out}");
    if let Err(why) = with_curl {
        skip(&why);
    }
}

const MEMCACHED: &str = r#"
import random, socket, sys
s = socket.create_connection((sys.argv[1], 11211), 60)
f = s.makefile("rwb")
def ask(line, *values):
    f.write(line + b"\r\n" + b"".join(v + b"\r\n" for v in values))
    f.flush()
    return f.readline().strip()
def get(key):
    first = ask(b"get " + key).split()
    if first == [b"END"]:
        return None
    value = f.read(int(first[3]) + 2)[:-2]
    assert f.readline() == b"END\r\n"
    return value
assert ask(b"flush_all") == b"OK"
rng = random.Random(3)
values = {}
for n in range(300):
    key, value = b"k%d" % rng.randrange(50), rng.randbytes(rng.choice([0, 1, 30, 1000, 5000, 100000]))
    if rng.random() < 0.1:
        assert ask(b"delete " + key) == (b"DELETED" if values.pop(key, None) is not None else b"NOT_FOUND")
    else:
        assert ask(b"set %s %d 0 %d" % (key, n, len(value)), value) == b"STORED"
        values[key] = value
    key = b"k%d" % rng.randrange(50)
    assert get(key) == values.get(key), key
assert ask(b"set n 0 0 1", b"9") == b"STORED" and ask(b"incr n 1") == b"10" and get(b"n") == b"10"
assert ask(b"version").startswith(b"VERSION netmem")
assert ask(b"nonsense") == b"ERROR"
f.write(b"quit\r\n")
f.flush()
assert f.read() == b""
"#;

/// Values are kept and sent as they were; what is sent of them is not copied.
#[test]
fn memcached_is_served() {
    let Some(server) = Server::start("memcached", &[]) else { return };
    for address in [V4, V6] {
        printed(server.clients.python(MEMCACHED, &[address]));
    }
    let out = server.end();
    let number = |before: &str, after: &str| -> u64 {
        let at = out.find(before).unwrap_or_else(|| panic!("no `{before}`: {out}")) + before.len();
        out[at..].split(after).next().unwrap().parse().unwrap()
    };
    assert!(out.contains("served 2 connections, 0 of them broken"), "{out}");
    // Text alone.
    assert!(number("bytes sent (", " copied)") < number("copied), ", " bytes sent") / 50, "{out}");
}

/// What cannot be served is told before anything starts.
#[test]
fn bad_arguments_of_a_server() {
    let serve = |args: &str| ["serve"].into_iter().chain(args.split(' ')).map(str::to_owned).collect::<Vec<_>>();
    for (args, says) in [
        ("echo --port gen --addr 10.0.0.2/24", "tap:NAME"),
        ("echo --port tap:x --addr 10.0.0.2", "ADDR/LEN"),
        ("echo --port tap:x --addr 10.0.0.2/33", "32 bits"),
        ("echo --port tap:x", "--addr"),
        ("finger --port tap:x --addr 10.0.0.2/24", "finger"),
        ("echo --port tap:x --addr 10.0.0.2/24 --link loss=2", "percent sign"),
    ] {
        let args = serve(args);
        fails(&args.iter().map(String::as_str).collect::<Vec<_>>(), 2, &[says]);
    }
}
