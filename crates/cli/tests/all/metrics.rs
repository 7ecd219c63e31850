//! `--metrics`: Prometheus text over HTTP, from each command that has it.

use crate::command::netns::{Namespace, missing, name, printed};
use crate::command::*;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Stdio;

/// The address that the command prints.
pub(crate) fn address(process: &mut Background) -> String {
    let url = process.says("metrics on http://");
    url.strip_suffix("/metrics").unwrap().to_owned()
}

/// Status line and body of an answer.
fn get(at: &str, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

/// The figures, by name and labels.
pub(crate) fn figures(at: &str) -> BTreeMap<String, f64> {
    let (status, text) = get(at, "GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n");
    assert_eq!(status, "HTTP/1.1 200 OK");
    let figures = text.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), value.parse().unwrap())
    });
    figures.collect()
}

/// Has Prometheus' own tool look at names, units and help.
fn promtool_finds_no_fault(at: &str) {
    if let Err(why) = installed(&["promtool"]) {
        return skip(&why);
    }
    let (_, text) = get(at, "GET /metrics HTTP/1.1\r\n\r\n");
    let mut tool = std::process::Command::new("promtool");
    let tool = tool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut tool = tool.spawn().unwrap();
    tool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let checked = tool.wait_with_output().unwrap();
    assert!(checked.status.success() && checked.stderr.is_empty(), "{}\n{text}", errors(&checked));
}

#[test]
fn figures_of_received_frames() {
    let args = "perf --mode small --alloc pool --queues 2 --duration 60 --runs 1 --metrics 127.0.0.1:0";
    let mut perf = background(&args.split(' ').collect::<Vec<_>>());
    let at = address(&mut perf);
    let frames = |queue| figures(&at).get(&format!("netmem_perf_received_frames_total{{queue=\"{queue}\"}}")).copied();
    await_that(|| [0, 1].into_iter().all(|queue| frames(queue) > Some(0.0)));
    let before = frames(0);
    await_that(|| frames(0) > before);
    let now = figures(&at);
    let of = |name: &str| now[&format!("{name}{{queue=\"0\"}}")];
    assert_eq!(of("netmem_perf_received_bytes_total"), 64.0 * of("netmem_perf_received_frames_total"));
    assert!(now["netmem_pool_pages{queue=\"0\",state=\"in_flight\"}"] > 0.0, "{now:?}");
    promtool_finds_no_fault(&at);
    perf.signal(Signal::TERM);
    perf.end();
}

#[test]
fn figures_of_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("device");
    let args = ["device", "--listen", socket.to_str().unwrap(), "--port", "gen", "--metrics", "127.0.0.1:0"];
    let mut device = background(&[&args[..], &["--link", "loss=50%,seed=1"]].concat());
    let at = address(&mut device);
    device.says("listening on");
    let before = figures(&at);
    assert_eq!(before["netmem_device_rx_frames_total"], 0.0);
    let backend = format!("vhost-user:{}", socket.display());
    let args =
        ["--device", &backend, "--mode", "small", "--alloc", "pool", "--duration", "20ms", "--runs", "1", "--json"];
    let report = json(&run(&args));
    let after = figures(&at);
    assert!(after["netmem_device_rx_frames_total"] >= report["variants"][0]["frames"].as_f64().unwrap(), "{after:?}");
    // One pair: its counters are those of the device.
    for what in ["rx_frames", "rx_bytes", "tx_frames"] {
        let pair = after[&format!("netmem_device_pair_{what}_total{{pair=\"0\"}}")];
        assert_eq!(pair, after[&format!("netmem_device_{what}_total")], "{after:?}");
    }
    let link = |event| after[&format!("netmem_link_packets_total{{direction=\"to_driver\",event=\"{event}\"}}")];
    assert!(link("lost") > 0.0 && link("sent") > link("received"), "{after:?}");
    promtool_finds_no_fault(&at);
    let falls = before.iter().find(|(name, value)| name.contains("_total") && after[*name] < **value);
    assert!(falls.is_none() && before.keys().eq(after.keys()), "{falls:?}");

    // A request for another page is answered by 404. A client without a request delays the next
    // client, and no more.
    fails(&["ss", &at], 1, &["the connections of", "no /connections"]);
    let _silent = TcpStream::connect(&at).unwrap();
    assert_eq!(get(&at, "GET / HTTP/1.1\r\n\r\n"), ("HTTP/1.1 404 Not Found".into(), "there is /metrics\n".into()));
    assert_eq!(get(&at, "\0\r\n\r\n").0, "HTTP/1.1 400 Bad Request");
    device.signal(Signal::TERM);
    let (status, _, err) = device.end();
    assert_eq!(status, Some(0), "{err}");
}

#[test]
fn figures_of_a_measurement() {
    let args = "perf --proto tcp --rr 64,64 --flows 2 --duration 60 --runs 1 --metrics 127.0.0.1:0";
    let mut perf = background(&args.split(' ').collect::<Vec<_>>());
    let at = address(&mut perf);
    let answers =
        |flow| figures(&at).get(&format!("netmem_perf_answers_total{{flow=\"{flow}\"}}")).copied().unwrap_or(0.0);
    await_that(|| answers(0) > 0.0 && answers(1) > 0.0);
    let before = answers(1);
    await_that(|| answers(1) > before);
    promtool_finds_no_fault(&at);
    perf.signal(Signal::INT);
    let (status, _, err) = perf.end();
    assert_eq!(status, Some(130), "{err}");
    fails(&["perf", "--spin", "0", "--metrics", "127.0.0.1:0"], 2, &["--metrics", "--spin"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    fails(&["perf", "--proto", "tcp", "--metrics", &at], 1, &["--metrics", &at, "in use"]);
}

#[test]
fn figures_of_a_server() {
    if let Err(why) = missing() {
        return skip(&why);
    }
    let (tap, clients) = (name(), Namespace::new().unwrap());
    let port = format!("tap:{tap}");
    let args =
        ["serve", "echo", "--port", &port, "--addr", "10.78.0.2/24", "--queues", "2", "--metrics", "127.0.0.1:0"];
    let mut server = background(&args);
    let at = address(&mut server);
    server.says("ready: echo");
    clients.takes(&tap, &["10.78.0.1/24"]);
    let echo = "import socket\ns = socket.create_connection((\"10.78.0.2\", 7), 60)\ns.sendall(b'x' * 1000)\n\
                n = 0\nwhile n < 1000: n += len(s.recv(1000))\ns.close()\n";
    for _ in 0..3 {
        printed(clients.python(echo, &[]));
    }
    promtool_finds_no_fault(&at);

    // Two connections that stay, one of them with bytes.
    let stays = "import socket, sys\na, b = [socket.create_connection((\"10.78.0.2\", 7), 60) for _ in range(2)]\n\
                 a.sendall(b'x' * 1000)\nn = 0\nwhile n < 1000: n += len(a.recv(1000))\n\
                 print(a.getsockname()[1], b.getsockname()[1], flush=True)\nsys.stdin.read()\n";
    let mut client =
        clients.command("python3").args(["-c", stays]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(client.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let ports: Vec<u16> = line.split_whitespace().map(|port| port.parse().unwrap()).collect();
    let report = json(&run(&["ss", &at, "--json", "--interval", "50ms"]));
    assert_eq!((&report["command"], &report["silent_queues"]), (&"ss".into(), &serde_json::json!([])));
    let list = report["connections"].as_array().unwrap();
    for (port, bytes) in [(ports[0], 1000), (ports[1], 0)] {
        let peer = format!("10.78.0.1:{port}");
        let one = list.iter().find(|one| one["peer"] == peer.as_str()).unwrap_or_else(|| panic!("{peer}: {report}"));
        assert_eq!((&one["state"], &one["local"]), (&"Established".into(), &"10.78.0.2:7".into()), "{one}");
        assert_eq!((&one["acknowledged"], &one["received"]), (&bytes.into(), &bytes.into()), "{one}");
        assert_eq!((&one["acknowledged_per_s"], &one["received_per_s"]), (&0.0.into(), &0.0.into()), "{one}");
        assert!(one["cwnd"].as_u64() > Some(0) && one["queue"].as_u64() < Some(2), "{one}");
    }
    let text = run(&["ss", &at, "--interval", "1ms"]);
    let text = String::from_utf8_lossy(&text.stdout);
    assert_eq!(text.lines().filter(|line| line.contains("ESTABLISHED")).count(), 2, "{text}");
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success());
    let figures = figures(&at);
    let sum = |name: &str| -> f64 {
        let of_queues =
            figures.iter().filter(|(figure, _)| figure.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
        of_queues.map(|(_, value)| value).sum()
    };
    assert_eq!(sum("netmem_serve_connections_total"), 5.0, "{figures:?}");
    assert_eq!([sum("netmem_serve_received_bytes_total"), sum("netmem_serve_sent_bytes_total")], [4000.0; 2]);
    assert_eq!(sum("netmem_serve_ended_connections_total"), 0.0, "{figures:?}");
    for queue in ["0", "1"] {
        let posted = &figures[&format!("netmem_pool_pages{{pool=\"receive\",queue=\"{queue}\",state=\"posted\"}}")];
        let in_flight =
            &figures[&format!("netmem_pool_pages{{pool=\"receive\",queue=\"{queue}\",state=\"in_flight\"}}")];
        assert!(*posted > 0.0 && in_flight >= posted, "{figures:?}");
    }
    server.signal(Signal::TERM);
    let (status, out, err) = server.end();
    assert_eq!(status, Some(0), "{err}");
    assert!(out.contains("served 5 connections"), "{out}");
}

/// `netmem top` in a terminal: it shows figures, sorts them when asked, and restores the terminal.
const TERMINAL: &str = r#"
import os, pty, sys
pid, fd = pty.fork()
if pid == 0:
    os.environ["TERM"] = "xterm"
    os.execv(sys.argv[1], [sys.argv[1], "top", sys.argv[2], "--interval", "50ms"])
import fcntl, struct, termios
fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
said = b""
def awaits(what):
    global said
    while what not in said:
        said += os.read(fd, 65536)
awaits(b"netmem_device_polls_total")
# Only what changes is written. The first row by name:
said = b""
os.write(fd, b"n")
awaits(b"announced_total")
os.write(fd, b"q")
awaits(b"\x1b[?1049l")
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"#;

#[test]
fn figures_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("device");
    let args = ["device", "--listen", socket.to_str().unwrap(), "--port", "gen", "--metrics", "127.0.0.1:0"];
    let mut device = background(&args);
    let at = address(&mut device);
    let report = json(&run(&["top", &at, "--once", "--json", "--interval", "0.05", "--sort", "name"]));
    let rows = report["rows"].as_array().unwrap();
    let drops: Vec<_> = rows.iter().filter(|row| row["name"] == "netmem_device_dropped_total").collect();
    assert!(drops.len() == 10 && drops.iter().all(|row| row["labels"]["reason"].is_string() && row["per_s"] == 0.0));
    assert!(rows.iter().map(|row| row["name"].as_str().unwrap()).is_sorted(), "{report}");
    let text = run(&["top", &at, "--once", "--interval", "0.05"]);
    let text = String::from_utf8_lossy(&text.stdout);
    assert!(text.contains("a second") && text.contains("reason=runt"), "{text}");

    // Neither a terminal, nor figures.
    fails(&["top", &at], 2, &["terminal", "--once"]);
    fails(&["top", "9", "--once"], 1, &["the figures of 127.0.0.1:9", "refused"]);
    fails(&["top", "localhost:9", "--once"], 2, &["127.0.0.1:9000"]);
    if let Err(why) = installed(&["python3"]) {
        return skip(&why);
    }
    let output =
        std::process::Command::new("python3").args(["-c", TERMINAL, env!("CARGO_BIN_EXE_netmem"), &at]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", errors(&output));
    device.signal(Signal::TERM);
    assert_eq!(device.end().0, Some(0));
}
