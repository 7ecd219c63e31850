//! `netmem perf --agent` and `--to`: flows between hosts. Here the hosts are processes on the
//! loopback address, or namespaces.

use crate::command::netns::{Namespace, missing};
use crate::command::*;
use netmem_testing::schema;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// An agent on a free port of the loopback address, and `HOST:PORT`.
fn agent(args: &[&str]) -> (Background, String) {
    let mut agent = background(&[&["perf", "--agent", "127.0.0.1:0"], args].concat());
    let at = agent.says("ready: an agent on ");
    (agent, at)
}

/// The report of a driver, which fits the schema.
#[track_caller]
fn drive(to: &str, args: &str) -> Value {
    let all = format!("perf --to {to} -t 100ms -J {args}");
    let report = json(&run(&all.split_whitespace().collect::<Vec<_>>()));
    schema::fits("crates/cli/schema/perf.json", &report);
    report
}

/// The sum of these counts of a report's parts.
fn sum(report: &Value, what: &str) -> u64 {
    let parts = report["variants"][0]["parts"].as_array().unwrap();
    parts.iter().map(|part| part[what].as_u64().unwrap()).sum()
}

/// A key of a byte, in a file.
fn key(dir: &tempfile::TempDir, digits: &str) -> PathBuf {
    let path = dir.path().join(digits);
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).unwrap();
    writeln!(file, "{}", digits.repeat(32)).unwrap();
    path
}

#[test]
fn flows_between_two_hosts() {
    let (mut agent, at) = agent(&[]);
    for (args, routes) in [
        ("--runs 2 -P 2", &[(0, 1), (0, 1)][..]),
        ("--runs 1 -R", &[(1, 0)]),
        ("--runs 1 --bidir", &[(0, 1), (1, 0)]),
        ("--runs 1 --proto udp --rate 1000", &[(0, 1)]),
        ("--runs 1 --proto udp --rate 1000 --bidir", &[(0, 1), (1, 0)]),
        ("--runs 1 --rr 64,1000 -R -P 2", &[(1, 0), (1, 0)]),
        ("--runs 1 --proto udp --rr 64,64", &[(0, 1)]),
    ] {
        let report = drive(&at, args);
        let variant = &report["variants"][0];
        let pair = |route: &Value| (route["from"].as_u64().unwrap(), route["to"].as_u64().unwrap());
        let measured: Vec<_> = variant["routes"].as_array().unwrap().iter().map(pair).collect();
        assert_eq!(measured, routes, "{args}");
        let flows = variant["flows"].as_array().unwrap();
        assert_eq!(flows.len(), routes.len());
        assert!(flows.iter().all(|flow| flow["bytes"].as_u64() > Some(0)), "{args}: {report}");
        if args.contains("--rr") {
            assert!(variant["latency_ns"]["p50"].as_u64() > Some(0), "{args}: {report}");
        } else if args.contains("udp") {
            let datagrams = ["sent", "arrived"].map(|what| variant["datagrams"][what].as_u64().unwrap());
            assert!(datagrams[0] > 0 && datagrams[0] == datagrams[1], "{args}: {report}");
        } else {
            // Each byte that was sent was received; so much that was counted in the measured time.
            let counted: u64 = flows.iter().map(|flow| flow["bytes"].as_u64().unwrap()).sum();
            assert!(
                sum(&report, "sent") == sum(&report, "received") && counted <= sum(&report, "received"),
                "{report}"
            );
        }
        assert!(report["hosts"].as_array().unwrap().iter().all(|host| host.get("failed").is_none()), "{report}");
    }
    let text = run(&["perf", "--to", &at, "-t", "100ms", "--runs", "1", "-i", "0.04"]);
    let text = String::from_utf8_lossy(&text.stdout);
    assert_eq!(text.lines().filter(|line| line.contains(" s: ") && line.ends_with("b/s")).count(), 2, "{text}");
    assert!(text.contains("2 hosts") && text.contains("all hosts started within"), "{text}");
    agent.signal(Signal::TERM);
    assert_eq!(agent.end().0, Some(0));
}

/// The highest rate is searched for by runs of all hosts.
#[test]
fn the_highest_rate_between_hosts() {
    let (mut agent, at) = agent(&[]);
    // All requests are answered within ten seconds, at any rate.
    for args in ["--rr 64,64 --search 50%=10s -P 2", "--rr 64,64 --search 50%=10s -R --runs 2"] {
        let report = drive(&at, args);
        let [closed, open] = &report["variants"].as_array().unwrap()[..] else { panic!("{report}") };
        assert!(
            closed.get("asked").is_none() && open["asked"] == report["highest"] && report["highest"] != 0,
            "{report}"
        );
        assert_eq!(report["params"]["search"], "50%=10000ms");
    }
    // The rate that was found lost nothing, and was sent.
    let report = drive(&at, "--proto udp --size 100 --search lossless");
    let rows = report["variants"].as_array().unwrap();
    let found = rows.iter().find(|row| row["asked"] == report["highest"]);
    let lost = |row: &Value| row["datagrams"]["arrived"] != row["datagrams"]["sent"];
    assert!(rows.len() > 1 && (report["highest"] == 0 || !lost(found.unwrap())), "{report}");
    let args = ["perf", "--to", &at, "--rr", "1,1", "--search", "100%=1us", "-t", "100ms"];
    let text = run(&args);
    let text = String::from_utf8_lossy(&text.stdout);
    assert!(text.contains("no rate reaches 100%=1us"), "{text}");
    agent.signal(Signal::TERM);
    assert_eq!(agent.end().0, Some(0));
}

/// A host that is lost ends the search: the rates before were of more flows.
#[test]
fn a_search_ends_with_a_host() {
    let agents = [agent(&[]), agent(&[])];
    let to = format!("{},{}", agents[0].1, agents[1].1);
    let args = ["perf", "--to", &to, "--rr", "1,1", "--search", "100%=1us", "-t", "2", "-i", "0.1"];
    let mut driver = background(&args);
    // Its first interval: it measures.
    let mut line = [0; 16];
    driver.0.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    let [_first, (second, dead)] = agents;
    second.signal(Signal::KILL);
    let (status, out, errors) = driver.end();
    assert!(status == Some(1) && errors.contains(&dead) && errors.contains("the search ends"), "{errors}");
    assert!(!out.contains("no rate reaches"), "{out}");
}

/// Incast of three to one, and each to each: the report's sums are those that each host has
/// printed.
#[test]
fn four_hosts() {
    for (args, sent, received) in [("-R --runs 1", [0, 1], [3, 0]), ("--all --runs 1", [3, 3], [3, 3])] {
        let agents: Vec<_> = (0..3).map(|_| agent(&["--one-off"])).collect();
        let to: Vec<&str> = agents.iter().map(|(_, at)| at.as_str()).collect();
        let report = drive(&to.join(","), args);
        assert_eq!(report["hosts"].as_array().unwrap().len(), 4);
        let own = &report["variants"][0]["parts"][0];
        let mut totals = ["sent", "received"].map(|what| own[what].as_u64().unwrap());
        assert!((totals[0] > 0) == (sent[0] > 0) && (totals[1] > 0) == (received[0] > 0), "{report}");
        for (mut agent, _) in agents {
            let (status, _, errors) = agent.end();
            assert_eq!(status, Some(0), "{errors}");
            let flows = format!("{} flow(s) from here, {} to here; bytes in all: ", sent[1], received[1]);
            let line =
                errors.lines().find_map(|line| Some(line.split_once(&flows)?.1)).unwrap_or_else(|| panic!("{errors}"));
            let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
            totals = [totals[0] + numbers[0], totals[1] + numbers[1]];
        }
        assert_eq!(totals, [sum(&report, "sent"), sum(&report, "received")], "{report}");
        assert_eq!(totals[0], totals[1]);
    }
}

/// An agent that dies in a run: it is named, and the figures of the others are there.
#[test]
fn an_agent_that_dies() {
    let agents = [agent(&[]), agent(&[])];
    let to = format!("{},{}", agents[0].1, agents[1].1);
    let args = ["perf", "--to", &to, "-R", "-t", "2", "--runs", "1", "-i", "0.1", "-J"];
    let driver = background(&args);
    let [(first, _), (second, dead)] = agents;
    // All flows have begun when the first run's bytes are there.
    await_that(|| second.0.stderr.is_some() && connections(&dead) > 0);
    std::thread::sleep(std::time::Duration::from_millis(500));
    second.signal(Signal::KILL);
    let mut driver = driver;
    let (status, out, errors) = driver.end();
    assert_eq!(status, Some(1), "{errors}");
    assert!(errors.contains(&dead) && errors.contains("figures are of the other hosts"), "{errors}");
    let report: Value = serde_json::from_str(&out).unwrap();
    schema::fits("crates/cli/schema/perf.json", &report);
    assert!(report["hosts"][2]["failed"].is_string() && report["hosts"][1].get("failed").is_none(), "{report}");
    assert!(report["variants"][0]["flows"][0]["bytes"].as_u64() > Some(0), "{report}");
    drop(first);
}

/// Connections to an address of the loopback interface that are established.
fn connections(at: &str) -> usize {
    let port: u16 = at.rsplit(':').next().unwrap().parse().unwrap();
    let wanted = format!("0100007F:{port:04X} ");
    let text = std::fs::read_to_string("/proc/net/tcp").unwrap();
    text.lines().filter(|line| line.contains(&format!(" {wanted}")) && line.contains(" 01 ")).count()
}

/// A host that is gone before a run starts: the run is made without it.
#[test]
fn a_run_without_the_host_that_is_lost() {
    let (mut agent, at) = agent(&["--one-off"]);
    // It listens, and closes each connection: at once, or after its greeting.
    for greeting in [&b""[..], b"NETMEM\x01\x00\x00"] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let lost = listener.local_addr().unwrap().to_string();
        let closes = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(greeting).unwrap();
            let _ = stream.read(&mut [0; 9]);
        });
        if greeting.is_empty() {
            fails(&["perf", "--to", &lost, "-t", "100ms"], 1, &[&lost, "the connection was closed"]);
        } else {
            let output = run(&["perf", "--to", &format!("{at},{lost}"), "-t", "100ms", "--runs", "2", "-J"]);
            assert_eq!(output.status.code(), Some(1));
            assert!(errors(&output).contains(&lost), "{}", errors(&output));
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(report["variants"][0]["runs"], 2, "{report}");
        }
        closes.join().unwrap();
    }
    assert_eq!(agent.end().0, Some(0));
}

#[test]
fn hosts_that_are_something_else_are_named() {
    let greets = |greeting: &'static [u8]| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap().to_string();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(greeting).unwrap();
            // Until the driver has gone.
            let _ = stream.read_to_end(&mut Vec::new());
        });
        (thread, at)
    };
    for (greeting, says) in [
        (&b"SSH-2.0-OpenSSH_9.2p1"[..], "no netmem is there"),
        (b"NETMEM\x07\x00\x00", "version there is 7"),
        (b"NETMEM\x01\x00\x01", "it wants a key"),
        // It never answers.
        (b"NETMEM\x01\x00\x00", "it has not told its clock in 5 s"),
        (b"NETMEM\x01\x00\x00\xff\xff\xff\xff", "4294967295 bytes"),
        (b"NETMEM\x01\x00\x00\x01\x00\x00\x00\x09", "cannot be read"),
    ] {
        let (thread, at) = greets(greeting);
        fails(&["perf", "--to", &at, "-t", "100ms"], 1, &[&at, says]);
        thread.join().unwrap();
    }
}

/// What a stranger sends ends nothing but its own connection.
#[test]
fn an_agent_among_strangers() {
    let (mut agent, at) = agent(&["--one-off"]);
    for greeting in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"NETMEM\x02\x00\x00", b"NETMEM\x01\x00\x01", b""] {
        let mut stream = TcpStream::connect(&at).unwrap();
        stream.write_all(greeting).unwrap();
        drop(stream);
    }
    // Connections that send nothing delay no driver.
    let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(&at).unwrap()).collect();
    assert!(sum(&drive(&at, "--runs 1"), "received") > 0);
    drop(silent);
    let (status, _, errors) = agent.end();
    assert!(
        status == Some(0) && errors.contains("no netmem is there") && errors.contains("version there is 2"),
        "{errors}"
    );
}

/// A driver while another one measures is refused, and named.
#[test]
fn two_drivers() {
    let (_agent, at) = agent(&[]);
    let mut first = background(&["perf", "--to", &at, "-t", "2", "--runs", "1", "-i", "0.1", "-R"]);
    // Its first interval: it measures.
    let mut line = [0; 16];
    first.0.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    fails(&["perf", "--to", &at, "-t", "100ms"], 1, &[&at, "measures for another driver"]);
    let (status, _, errors) = first.end();
    assert_eq!(status, Some(0), "{errors}");
}

#[test]
fn keys() {
    let dir = tempfile::tempdir().unwrap();
    let [ours, other] = ["5a", "a5"].map(|digits| key(&dir, digits).display().to_string());
    let (mut agent, at) = agent(&["--one-off", "--key", &ours]);
    fails(&["perf", "--to", &at, "-t", "100ms", "--key", &other], 1, &[&at, "is the key of --key the same"]);
    fails(&["perf", "--to", &at, "-t", "100ms"], 1, &[&at, "it wants a key"]);
    let report = drive(&at, &format!("--runs 1 --key {ours}"));
    assert!(sum(&report, "received") > 0 && sum(&report, "sent") == sum(&report, "received"));
    assert_eq!(agent.end().0, Some(0));
    fails(&["perf", "--agent", "0.0.0.0:0"], 2, &["--key", "openssl rand"]);
    std::fs::write(&other, "short").unwrap();
    fails(&["perf", "--agent", "0.0.0.0:0", "--key", &other], 2, &["64 hexadecimal digits"]);
}

#[test]
fn arguments_between_hosts() {
    for (args, says) in [
        ("--to ::1 --search lossless", "--proto udp"),
        ("--to ::1 --rr 1,1 --search 99%=1ms --rate 9", "leave out --rate"),
        ("--to ::1 --against /bin/true", "agents of each build"),
        ("--to ::1 --check", "leave out --check"),
        ("--agent 1 --search 99%=1ms", "for --to"),
        ("--to ::1 --mode small", "--mode"),
        ("--to ::1 --reverse --bidir", "give one"),
        ("--to ::1 --flows 501", "1 to 500"),
        ("--to ::1 --all --flows 251", "1 to 500"),
        ("--to ::1 --port gen", "tap:NAME or xsk:IFACE"),
        ("--to ::1 --port tap:x", "--addr"),
        ("--to ::1 --addr 10.0.0.1/24", "--port"),
        ("--to ::1 --link loss=1%", "--link"),
        ("--to ::1 --key /nonexistent", "--key /nonexistent"),
        ("--to a:b:c", "--to a:b:c"),
        ("--to 192.0.2.1", "needs --key"),
        ("--to ::1 --rate 2000000000", "at most 1000000000"),
        ("--key /nonexistent", "for --agent and --to"),
        ("--agent 1 --flows 1", "for --to"),
        ("--agent 1 --rate 5", "for --to"),
        ("--agent 1 -t 5", "for --to"),
        ("--agent nowhere", "an address"),
    ] {
        let args = format!("perf {args}");
        fails(&args.split(' ').collect::<Vec<_>>(), 2, &[says]);
    }
}

/// Connects to the port of the flows of a stack, again and again, and sends what no flow begins
/// with.
const STRANGERS: &str = r#"
import signal, socket, sys
connected = 0
def end(*_):
    print(connected)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", file=sys.stderr, flush=True)
while True:
    s = socket.socket()
    s.settimeout(0.2)
    try:
        s.connect(("10.82.0.2", 5201))
        s.sendall(b"x" * 4096)
        connected += 1
    except OSError:
        pass
    s.close()
"#;

/// Netmem's stack behind a tap on one side, the kernel's on the other; the agent waits in the tap's
/// namespace. Strangers take no place of a flow.
#[test]
fn a_stack_behind_a_tap() {
    if let Err(why) = missing() {
        return skip(&why);
    }
    let namespace = Namespace::new().unwrap();
    namespace.loopback();
    let tap = format!("tap:{}", namespace.tap("10.82.0.1/24"));
    let dir = tempfile::tempdir().unwrap();
    let key = key(&dir, "0f").display().to_string();
    let netmem = env!("CARGO_BIN_EXE_netmem");
    let mut agent = namespace.command(netmem);
    agent.args([
        "perf",
        "--agent",
        "10.82.0.1:0",
        "--one-off",
        "--key",
        &key,
        "--port",
        &tap,
        "--addr",
        "10.82.0.2/24",
    ]);
    let mut agent = Background::start(&mut agent);
    let at = agent.says("ready: an agent on ");
    let mut strangers = Background::start(namespace.command("python3").args(["-c", STRANGERS]));
    strangers.says("ready");
    let mut driver = namespace.command(netmem);
    driver.args(["perf", "--to", &at, "--key", &key, "-t", "200ms", "--runs", "2", "--bidir", "-J"]);
    let report = json(&driver.output().unwrap());
    strangers.signal(Signal::TERM);
    let (status, connected, errors) = strangers.end();
    assert!(status == Some(0) && connected.trim().parse::<u32>().unwrap() > 0, "{connected} {errors}");
    schema::fits("crates/cli/schema/perf.json", &report);
    assert_eq!(report["hosts"][1]["stack"], format!("netmem on {tap}"));
    assert!(sum(&report, "received") > 0 && sum(&report, "sent") == sum(&report, "received"), "{report}");
    let (status, _, errors) = agent.end();
    assert_eq!(status, Some(0), "{errors}");
}
