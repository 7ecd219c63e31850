//! `netmem serve` with clients that others wrote, through a tap: curl, wrk, h2load, nginx, nc and
//! memcslap. None of them reports an error, and what they counted is what the server counted.
//!
//! `NETMEM_CONNECTIONS=100000` is the number of connections that are opened and closed; without it,
//! as many as take a few seconds.

use crate::command::netns::{Namespace, missing, name, printed};
use crate::command::*;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

const V4: &str = "10.83.0.2";
const V6: &str = "fd83::2";
/// As many connections are in TIME-WAIT at most, for a minute.
const TIME_WAIT: u64 = 16384;

/// A server, and the namespace in which its clients are.
struct Server {
    process: Background,
    clients: Namespace,
}

impl Server {
    /// None, and the reason is told, if the clients' programs are not installed or something else
    /// is missing here.
    fn start(service: &str, clients: Result<(), String>) -> Option<Self> {
        if let Err(why) = clients.and_then(|()| missing()) {
            skip(&why);
            return None;
        }
        let (tap, clients) = (name(), Namespace::new().unwrap());
        let port = format!("tap:{tap}");
        let addresses = format!("{V4}/24,{V6}/64");
        let mut process = background(&["serve", service, "--port", &port, "--addr", &addresses]);
        let mut line = String::new();
        BufReader::new(process.0.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("ready: "), "{line}");
        clients.takes(&tap, &["10.83.0.1/24", "fd83::1/64"]);
        Some(Self { process, clients })
    }

    /// A client that must succeed; what it printed.
    #[track_caller]
    fn client(&self, program: &str, args: &str) -> String {
        printed(self.clients.command(program).args(args.split(' ')).spawn().unwrap())
    }

    /// What the server prints at its end. The books of its pages are part of its exit status.
    #[track_caller]
    fn end(mut self) -> Counted {
        self.process.signal(Signal::TERM);
        let (status, out, err) = self.process.end();
        assert_eq!(status, Some(0), "{err}");
        assert!(out.contains("all came back"), "{out}");
        Counted(out)
    }
}

/// What a program printed.
struct Counted(String);

impl Counted {
    /// The number before `what`.
    #[track_caller]
    fn number(&self, what: &str) -> u64 {
        number(&self.0, what)
    }

    /// Connections, none of them broken.
    #[track_caller]
    fn served(&self, connections: u64) {
        let expected = format!("served {connections} connections, 0 of them broken");
        assert!(self.0.starts_with(&expected), "{expected}: {}", self.0);
    }
}

/// The number before `what` in a text.
#[track_caller]
fn number(text: &str, what: &str) -> u64 {
    let at = text.find(what).unwrap_or_else(|| panic!("no `{what}` in: {text}"));
    let digits = text[..at].rsplit(|c: char| !c.is_ascii_digit()).next().unwrap();
    digits.parse().unwrap_or_else(|_| panic!("no number before `{what}` in: {text}"))
}

/// HTTP by wrk, h2load and curl: kept connections, pipelined requests, and a connection for each
/// request.
#[test]
fn http_clients_and_the_server_count_alike() {
    let Some(server) = Server::start("http", installed(&["wrk", "h2load", "curl"])) else { return };
    // 20 connections in parallel, each asks for the next thing when it has the last one.
    let out = server.client("wrk", &format!("-t 2 -c 20 -d 1s --timeout 20s http://{V4}/1000"));
    assert!(!out.contains("Socket errors") && !out.contains("Non-2xx"), "{out}");
    let asked = number(&out, " requests in");
    assert!(asked > 100, "{out}");
    let counted = server.end();
    let head = format!("GET /1000 HTTP/1.1\r\nHost: {V4}\r\n\r\n").len() as u64;
    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n".len() as u64 + 1000;
    let (received, sent) = (counted.number(" bytes received"), counted.number(" bytes sent"));
    // At its end, wrk leaves without the last answer of each connection, which resets them.
    let came = received / head;
    assert!(received % head == 0 && (asked..=asked + 20).contains(&came), "{out}{}", counted.0);
    assert!(sent >= asked * answer && sent <= came * answer, "{out}{}", counted.0);

    let Some(server) = Server::start("http", Ok(())) else { return };
    let mut bytes = 0;
    // 10 connections with 4 requests in flight on each; then 200 connections for as many requests.
    for (args, requests) in [("-n 2000 -c 10 -m 4", 2000), ("-n 200 -c 200", 200)] {
        for address in [V4, "[fd83::2]"] {
            let out = server.client("h2load", &format!("--h1 {args} http://{address}/3000"));
            let told = format!(
                "{requests} total, {requests} started, {requests} done, {requests} succeeded, 0 failed, 0 errored"
            );
            assert!(out.contains(&told), "{out}");
            let traffic = out.lines().find(|line| line.starts_with("traffic:")).unwrap();
            bytes += number(traffic, ") total");
        }
    }
    // curl uses the same connection again.
    let urls = format!("http://[{V6}]/0 http://[{V6}]/2000000 http://{V4}/70000 http://{V4}/1");
    let format = "%{http_code} %{size_header} %{size_download}\\n";
    let mut curl = server.clients.command("curl");
    curl.args(["-sS", "-m", "20", "-w", format]);
    for url in urls.split(' ') {
        curl.args(["-o", "/dev/null", url]);
    }
    let out = printed(curl.spawn().unwrap());
    for line in out.lines() {
        let fields: Vec<u64> = line.split(' ').map(|field| field.parse().unwrap()).collect();
        assert_eq!(fields[0], 200, "{out}");
        bytes += fields[1] + fields[2];
    }
    let counted = server.end();
    counted.served(2 * (10 + 200) + 2);
    assert_eq!(counted.number(" bytes sent"), bytes, "{}", counted.0);
}

/// nginx requests each page from the server: on connections that it keeps, and by HTTP/1.0 on a
/// connection for each. h2load is its client.
#[test]
fn nginx_passes_on_what_is_served() {
    let Some(server) = Server::start("http", installed(&["nginx", "h2load"])) else { return };
    server.clients.loopback();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("nginx.conf"), nginx_conf()).unwrap();
    let mut command = server.clients.command("nginx");
    command.args(["-e", "stderr", "-c", "nginx.conf", "-p"]).arg(dir.path());
    let mut nginx = Background::start(&mut command);
    // It writes this file when it listens.
    await_that(|| dir.path().join("pid").exists() || nginx.0.try_wait().unwrap().is_some());
    for (path, requests) in [("kept", 1000), ("closed", 300)] {
        let args = format!("--h1 -n {requests} -c 10 http://127.0.0.1:8080/{path}/3000");
        let out = server.client("h2load", &args);
        assert!(out.contains(&format!(" {requests} succeeded, 0 failed, 0 errored")), "{out}");
    }
    nginx.signal(Signal::TERM);
    let (status, _, err) = nginx.end();
    assert!(status == Some(0) && !["[error]", "[crit]", "[alert]"].iter().any(|level| err.contains(level)), "{err}");
    // The status of nginx's answer, and that of the server's.
    let log = std::fs::read_to_string(dir.path().join("access.log")).unwrap();
    assert_eq!((log.lines().count(), log.matches("200 200\n").count()), (1300, 1300), "{log}");
    let counted = server.end();
    let (connections, sent) = (counted.number(" connections,"), counted.number(" bytes sent"));
    // At most ten clients at a time.
    assert!((301..=310).contains(&connections) && counted.0.contains(", 0 of them broken"), "{}", counted.0);
    assert!((1300 * 3000..1300 * 3100).contains(&sent), "{}", counted.0);
}

/// One process, which stays in the foreground.
fn nginx_conf() -> String {
    format!(
        "daemon off; master_process off; pid pid;\n\
         events {{ worker_connections 100; }}\n\
         http {{\n\
           log_format statuses '$status $upstream_status';\n\
           access_log access.log statuses;\n\
           client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;\n\
           upstream netmem {{ server {V4}:80; keepalive 10; keepalive_requests 1000000; }}\n\
           server {{\n\
             listen 127.0.0.1:8080;\n\
             location /kept/ {{ proxy_pass http://netmem/; proxy_http_version 1.1; proxy_set_header Connection ''; }}\n\
             location /closed/ {{ proxy_pass http://{V4}/; proxy_http_version 1.0; }}\n\
           }}\n\
         }}\n"
    )
}

/// nc sends a file and gets it back; several at a time.
#[test]
fn what_nc_sends_comes_back() {
    let Some(server) = Server::start("echo", installed(&["nc"])) else { return };
    let data: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
    let started: Vec<_> = [V4, V6, V4, V6]
        .into_iter()
        .map(|address| {
            let mut nc = server.clients.command("nc").args(["-N", address, "7"]).stdin(Stdio::piped()).spawn().unwrap();
            let (mut stdin, data) = (nc.stdin.take().unwrap(), data.clone());
            let writer = std::thread::spawn(move || stdin.write_all(&data));
            (nc, writer)
        })
        .collect();
    for (nc, writer) in started {
        let output = nc.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stdout == data, "{} of {} bytes", output.stdout.len(), data.len());
    }
    let counted = server.end();
    counted.served(4);
    let bytes = 4 * data.len() as u64;
    assert_eq!((counted.number(" bytes received"), counted.number(" bytes sent")), (bytes, bytes));
}

/// memcslap of libmemcached stores and reads by the text protocol.
#[test]
fn memcslap_finds_what_it_stored() {
    let Some(server) = Server::start("memcached", installed(&["memcslap"])) else { return };
    for (test, times) in [("set", 500), ("get", 500), ("mget", 5)] {
        let args = format!("--servers={V4}:11211 --concurrency=4 --execute-number={times} --test={test}");
        let out = server.client("memcslap", &args);
        assert!(!out.to_lowercase().contains("error") && !out.to_lowercase().contains("fail"), "{out}");
    }
    let counted = server.end();
    assert!(counted.0.contains(", 0 of them broken"), "{}", counted.0);
    let (gets, hits, sets) = (counted.number(" gets"), counted.number(" hits"), counted.number(" sets"));
    // Four threads: each sets or gets all keys, which memcslap has stored before a test that reads.
    assert_eq!((gets, hits, sets), (4 * (500 + 5), 4 * (500 + 5), 4 * 500 + 500 + 5), "{}", counted.0);
}

/// Connections that are opened, used for a request, and closed by the server: no page is left of
/// them. The memory of the process grows with those in TIME-WAIT, and no more once there are as
/// many as there may be.
#[test]
fn connections_that_are_opened_and_closed_leave_nothing() {
    let Some(server) = Server::start("http", installed(&["wrk"])) else { return };
    let all: u64 = std::env::var("NETMEM_CONNECTIONS").map_or(10_000, |all| all.parse().unwrap());
    let pid = server.process.0.id();
    let resident = || -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let (begin, mut made, mut full) = (resident(), 0, None);
    while made < all {
        let mut wrk = server.clients.command("wrk");
        wrk.args("-t 1 -c 50 -d 1s --timeout 20s -H".split(' '))
            .args(["Connection: close", &format!("http://{V4}/100")]);
        let out = printed(wrk.spawn().unwrap());
        assert!(!out.contains("Socket errors") && !out.contains("Non-2xx"), "{out}");
        made += number(&out, " requests in");
        if made > 2 * TIME_WAIT {
            full.get_or_insert((made, resident()));
        }
    }
    let end = resident();
    let text = format!("{begin} kB at first, {full:?} (connections, kB), {made} connections and {end} kB in the end");
    println!("{text}");
    assert!(end < begin + 4 * TIME_WAIT, "{text}");
    if let Some((before, full)) = full {
        assert!(end.saturating_sub(full) < 2048 + (made - before) / 100, "10 bytes for each connection: {text}");
    }
    let counted = server.end();
    let (served, broken) = (counted.number(" connections,"), counted.number(" of them broken"));
    // Those that wrk had open at the end of each second.
    assert!(served >= made && broken < served / 10, "{text}: {}", counted.0);
}
