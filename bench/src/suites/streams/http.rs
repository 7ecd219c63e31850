//! HTTP, a connection for each request: it is opened, served and closed.
//!
//! ```text
//!   ours          50 clients ── stack ── a part of the device │ the other part ── stack ── server
//!   kernel_veth   50 clients ── epoll, sockets ── veth ── sockets, epoll ── server
//! ```
//!
//! A client connects, sends a request, and reads until the end. The server reads a request, answers
//! with 100 bytes, and closes first. Both programs do the same with either kind of sockets: they
//! are woken for the connections that are ready, read before they wait, and look at no other one.
//!
//! Each end has a thread, which sleeps if it has no work. With our stack the thread of an end also
//! serves the end's part of the device, as `netmem serve` does; the kernel's half of the veth runs
//! in the thread that sends. CPU time is that of everything: see [`account`](super::account).

mod kernel;
mod ours;

use super::end::{Idle, Watch};
use super::net::CONGESTION;
use super::rig::{Link, MTU, Offloads};
use super::run::{Env, Measured, Path, Program, Run};
use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use anyhow::{Context, ensure};
use netmem_measure::cpus::pin;
use netmem_measure::threads::{propagate, spawn};
use std::sync::Arc;
use std::time::Duration;

/// The section of the rows.
pub(super) const SECTION: &str = "HTTP, a connection for each request: CPU";
/// Connections that a client has at once.
const CLIENTS: usize = 50;
/// The port of the server.
const PORT: u16 = 80;
const REQUEST: &[u8] = b"GET /100 HTTP/1.1\r\nHost: 10.77.0.2\r\nConnection: close\r\n\r\n";

/// The answer to each request.
fn answer() -> Vec<u8> {
    let head = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\n";
    [&head[..], &[b'x'; 100]].concat()
}

/// Whether the received bytes are a whole request.
fn is_whole(request: &[u8]) -> anyhow::Result<bool> {
    ensure!(request.len() <= REQUEST.len(), "more than a request arrived");
    Ok(request.ends_with(b"\r\n\r\n"))
}

/// One of the two kinds of sockets.
pub(super) struct Http {
    env: Arc<Env>,
    path: Path,
}

impl Http {
    pub(super) fn new(env: &Arc<Env>, path: Path) -> Self {
        Self { env: Arc::clone(env), path }
    }

    fn run(&self, duration: Duration) -> anyhow::Result<(Measured, u64)> {
        let env = &*self.env;
        let link = Link { mtu: MTU, offloads: Offloads::None };
        let (path, program, idle) = (self.path, Program::Requests, Idle::Sleeps);
        let run = Run { env, path, program, link, idle, duration };
        if self.path == Path::Ours { ours::run(&run) } else { kernel::run(&run).map(|measured| (measured, 0)) }
    }
}

/// Runs a server and its clients on threads of their own, and measures.
fn measured(
    run: &Run<'_>,
    server: impl FnOnce(&Watch) -> anyhow::Result<()> + Send,
    clients: impl FnOnce(&Watch) -> anyhow::Result<()> + Send,
) -> anyhow::Result<Measured> {
    let (watch, cpus) = (&Watch::default(), &run.env.cpus);
    // When the run is over, the end that leaves first closes connections of the other one.
    let end = |ended: anyhow::Result<()>| if watch.is_over() { Ok(()) } else { ended };
    std::thread::scope(|scope| {
        let server = spawn(scope, "netmem-server", move || {
            pin(cpus[1 % cpus.len()]);
            end(server(watch))
        });
        let clients = spawn(scope, "netmem-clients", move || {
            pin(cpus[0]);
            end(clients(watch))
        });
        let ended =
            || [&server, &clients].iter().any(|thread| thread.as_ref().is_ok_and(|thread| thread.is_finished()));
        let measured = run.measure(watch, &ended);
        watch.end();
        // Both have ended before an error is returned.
        let ends = [server, clients].map(|thread| propagate(thread.context("a thread")?.join()));
        ends.into_iter().collect::<anyhow::Result<()>>()?;
        measured
    })
}

impl Benchmark for Http {
    fn heads(&self) -> Vec<Head> {
        let name = format!("{}_sleeping", self.path.name());
        vec![Head { name, section: SECTION, threads: 2, per: "connection", unit: "ns", ..Head::default() }]
    }

    fn prepare(&mut self, _harness: &Harness) -> Result<(), BenchError> {
        self.env.can_run(self.path).map_err(|why| BenchError::Unavailable { what: "streams", why })
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let (measured, features) = self
            .run(Duration::from_nanos(harness.duration_ns()))
            .map_err(|source| BenchError::Stream { variant: format!("HTTP: {}", self.path.name()), source })?;
        let Measured { responses, elapsed, cpu_ns, .. } = measured;
        let value = cpu_ns as f64 / responses.max(1) as f64;
        let elapsed_ns = u64::try_from(elapsed.as_nanos()).ok();
        Ok(vec![Sample { value, elapsed_ns, operations: Some(responses), features, ..Sample::default() }])
    }

    fn takes(&self, duration: Duration) -> Duration {
        Run::takes(duration)
    }

    fn note(&self) -> Option<String> {
        let kernel =
            if self.path == Path::Ours { String::new() } else { format!("; the connections use {CONGESTION}") };
        Some(format!("{CLIENTS} connections at once, 100 bytes in an answer{kernel}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_whole_at_its_end() {
        assert!(is_whole(REQUEST).unwrap() && !is_whole(&REQUEST[..REQUEST.len() - 1]).unwrap());
        assert!(is_whole(&[REQUEST, b"x"].concat()).is_err());
    }

    /// Both kinds of sockets serve connections. Without the right to make networks, the kernel's
    /// are left out.
    #[test]
    fn connections_are_served() {
        let cpus = netmem_measure::cpus::allowed();
        let env = Arc::new(Env::new(Duration::from_millis(5), &cpus));
        for path in [Path::Ours, Path::Veth] {
            if let Err(why) = env.can_run(path) {
                netmem_testing::skip(&format!("{path:?}: {why}"));
                continue;
            }
            let (measured, features) = Http::new(&env, path).run(Duration::from_millis(5)).unwrap();
            assert!(measured.cpu_ns > 0, "{measured:?}");
            assert_eq!(features != 0, path == Path::Ours);
        }
    }
}
