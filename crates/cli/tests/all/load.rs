//! Commands under load: their memory, descriptors and threads do not grow, and their books balance.
//!
//! `NETMEM_LOAD_SECS` is how long the load lasts: a few seconds by default, two minutes in CI, an
//! hour before a release.

use crate::command::netns::{Namespace, missing, name, printed};
use crate::command::*;
use crate::metrics::{address, figures};
use std::time::{Duration, Instant};

/// Clients of `serve http`: connections that end in order, and one of eight that is reset with an
/// answer on its way.
const CLIENTS: &str = r#"
import socket, struct, sys, time
end = time.monotonic() + float(sys.argv[1])
done = 0
while time.monotonic() < end or done < 16:
    s = socket.create_connection(("10.77.0.2", 80), 60)
    s.settimeout(60)
    s.sendall(b"GET /20000 HTTP/1.1\r\nHost: a\r\n\r\n")
    if done % 8 == 7:
        s.recv(1000)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        n = 0
        while n < 20000:
            got = s.recv(65536)
            assert got
            n += len(got)
    s.close()
    done += 1
print(done)
"#;

/// What a process has: bytes of memory in RAM, descriptors, threads.
#[derive(Clone, Copy, Debug)]
struct Holdings {
    memory: u64,
    descriptors: usize,
    threads: usize,
}

impl Holdings {
    fn of(process: &Background) -> Self {
        let count = |what: &str| std::fs::read_dir(format!("/proc/{}/{what}", process.0.id())).unwrap().count();
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.0.id())).unwrap();
        let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let memory = memory.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024;
        Self { memory, descriptors: count("fd"), threads: count("task") }
    }
}

/// A command under load, and what it had before and while it ran.
struct Loaded {
    what: &'static str,
    process: Background,
    metrics: String,
    before: Holdings,
    samples: Vec<Holdings>,
}

impl Loaded {
    fn new(what: &'static str, mut process: Background, ready: &str) -> Self {
        let metrics = address(&mut process);
        process.says(ready);
        let before = Holdings::of(&process);
        Self { what, process, metrics, before, samples: Vec::new() }
    }

    fn sample(&mut self) {
        assert!(!figures(&self.metrics).is_empty());
        self.samples.push(Holdings::of(&self.process));
    }

    /// When the load is over: descriptors and threads are those of the beginning, and memory is
    /// flat.
    fn has_not_grown(&self) {
        let Self { what, before, samples, .. } = self;
        await_that(|| Holdings::of(&self.process).descriptors <= before.descriptors);
        assert_eq!(Holdings::of(&self.process).threads, before.threads, "{what}");
        is_flat(what, &samples.iter().map(|sample| sample.memory).collect::<Vec<_>>());
    }

    fn ends(mut self) -> String {
        self.process.signal(Signal::TERM);
        let (status, out, err) = self.process.end();
        assert_eq!(status, Some(0), "{}: {err}", self.what);
        out
    }
}

/// Memory has not grown after the first half of the time, but for what an allocator keeps.
fn is_flat(what: &str, memory: &[u64]) {
    let (first, second) = memory.split_at(memory.len() / 2);
    if let (Some(first), Some(second)) = (first.iter().max(), second.iter().max()) {
        assert!(*second <= first + first / 10 + (4 << 20), "{what}: {memory:?}");
    }
}

#[test]
fn load_leaves_nothing_behind() {
    if let Err(why) = missing() {
        return skip(&why);
    }
    let seconds: f64 = std::env::var("NETMEM_LOAD_SECS").map_or(4.0, |seconds| seconds.parse().unwrap());
    let (begin, time) = (Instant::now(), Duration::from_secs_f64(seconds));

    let (tap, clients) = (name(), Namespace::new().unwrap());
    let port = format!("tap:{tap}");
    let args = ["serve", "http", "--port", &port, "--addr", "10.77.0.2/24", "--metrics", "127.0.0.1:0"];
    let mut server = Loaded::new("serve", background(&args), "ready: http");
    clients.takes(&tap, &["10.77.0.1/24"]);
    let browsers: Vec<_> = (0..2).map(|_| clients.python(CLIENTS, &[&seconds.to_string()])).collect();

    let dir = tempfile::tempdir().unwrap();
    let [socket, statistics] = ["device", "stats"].map(|name| dir.path().join(name));
    let paths = ["--listen", socket.to_str().unwrap(), "--stats", statistics.to_str().unwrap()];
    let args = [&["device"], &paths[..], &["--port", "gen", "--metrics", "127.0.0.1:0"]].concat();
    let mut device = Loaded::new("device", background(&args), "listening on");
    let backend = format!("vhost-user:{}", socket.display());
    let drives = |mode| {
        let args = format!("perf --device {backend} --mode {mode} --alloc pool --duration 100ms --runs 1 --json");
        json(&run(&args.split(' ').collect::<Vec<_>>()))
    };

    // What is made for the first front end stays.
    drives("small");
    await_that(|| figures(&device.metrics)["netmem_device_memory_regions"] == 0.0);
    device.before = Holdings::of(&device.process);

    let args = format!(
        "perf --proto tcp --rr 64,1000 --flows 20 --link loss=1%,seed=4 --runs 1 --json --metrics 127.0.0.1:0 --duration {seconds}"
    );
    let mut requests = background(&args.split(' ').collect::<Vec<_>>());
    let requests_metrics = address(&mut requests);
    let mut of_requests = Vec::new();

    let mut fronts = 1;
    while begin.elapsed() < time || fronts < 5 {
        let report = drives(["small", "mergeable"][fronts % 2]);
        assert!(report["variants"][0]["frames"].as_u64() > Some(0), "{report}");
        fronts += 1;
        server.sample();
        device.sample();
        if requests.0.try_wait().unwrap().is_none() && begin.elapsed() < time {
            assert!(!figures(&requests_metrics).is_empty());
            of_requests.push(Holdings::of(&requests).memory);
        }
    }
    let served: u64 = browsers.into_iter().map(|client| printed(client).trim().parse::<u64>().unwrap()).sum();
    let (status, out, err) = requests.end();
    assert_eq!(status, Some(0), "{err}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(report["pool"]["leaked"] == 0 && report["variants"][0]["latency_ns"]["requests"].as_u64() > Some(0));
    is_flat("perf", &of_requests);

    let connections = figures(&server.metrics)["netmem_serve_connections_total{queue=\"0\"}"];
    assert_eq!(connections, served as f64);
    await_that(|| figures(&server.metrics)["netmem_serve_connections{queue=\"0\"}"] == 0.0);
    server.has_not_grown();
    device.has_not_grown();
    assert!(server.ends().contains("all came back"));
    // The device drops lines that nobody reads, so that its lines are no count of front ends.
    assert_eq!(stats(&statistics)["front_ends"]["served"].as_u64(), Some(fronts as u64));
    device.ends();
    eprintln!(
        "{served} connections, {fronts} front ends, {} requests",
        report["variants"][0]["latency_ns"]["requests"]
    );
}
