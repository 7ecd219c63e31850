//! `--metrics ADDR`: the figures of a running command as Prometheus text, over HTTP; and of a
//! command that has connections, their list as JSON ([`Connections`]).
//!
//! Names and units follow Prometheus' conventions: `netmem_`, base units, `_total` for what only
//! grows. The server's thread answers one client at a time; a client has [`PATIENCE`] in all, so a
//! slow one delays the others and nothing else.

use crate::ss::Connections;
use anyhow::Context;
use netmem_measure::threads::spawn;
use prometheus::core::Collector;
use prometheus::{Counter, Encoder, Gauge, IntCounter, Opts, Registry, TextEncoder};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// The longest time for a client, from its connection to its last byte.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often the thread checks whether the command is over.
const CHECK_EVERY: Duration = Duration::from_millis(50);
/// The longest request, with its headers.
const REQUEST: usize = 8 << 10;
const TEXT: &str = "text/plain; charset=utf-8";
/// Headers of a request that are read.
const HEADERS: usize = 64;

/// The figures of one answer. Metrics with equal names differ by their labels.
#[derive(Debug, Default)]
pub(crate) struct Page(Registry);

/// Labels: names and values.
pub(crate) type Labels<'a> = &'a [(&'a str, &'a str)];

impl Page {
    /// Adds a counter: what only grows. Its name ends with `_total`.
    pub(crate) fn counter(&self, name: &str, help: &str, labels: Labels<'_>, value: u64) {
        debug_assert!(name.ends_with("_total"), "{name}");
        self.add(name, help, labels, |opts| {
            let counter = IntCounter::with_opts(opts)?;
            counter.inc_by(value);
            Ok(counter)
        });
    }

    /// Adds a counter of time, of a value in nanoseconds. Its name ends with `_seconds_total`.
    pub(crate) fn seconds(&self, name: &str, help: &str, labels: Labels<'_>, ns: u64) {
        debug_assert!(name.ends_with("_seconds_total"), "{name}");
        self.add(name, help, labels, |opts| {
            let counter = Counter::with_opts(opts)?;
            counter.inc_by(ns as f64 / 1e9);
            Ok(counter)
        });
    }

    /// Adds a gauge: what grows and falls.
    pub(crate) fn gauge(&self, name: &str, help: &str, labels: Labels<'_>, value: f64) {
        self.add(name, help, labels, |opts| {
            let gauge = Gauge::with_opts(opts)?;
            gauge.set(value);
            Ok(gauge)
        });
    }

    /// Adds the pages of a pool by their state, and its failed allocations.
    pub(crate) fn pool(&self, labels: Labels<'_>, states: &[(&str, u64)], failed: u64) {
        let help = "Pages of a pool: idle in it, in flight, or posted in a ring. Posted pages are in flight, too.";
        for (state, pages) in states {
            self.gauge("netmem_pool_pages", help, &[labels, &[("state", *state)]].concat(), *pages as f64);
        }
        self.counter("netmem_pool_failed_allocations_total", "Allocations of pages that failed.", labels, failed);
    }

    fn add<C: Collector + 'static>(
        &self,
        name: &str,
        help: &str,
        labels: Labels<'_>,
        make: impl FnOnce(Opts) -> prometheus::Result<C>,
    ) {
        let opts = labels.iter().fold(Opts::new(name, help), |opts, (name, value)| opts.const_label(*name, *value));
        let added = make(opts).and_then(|metric| self.0.register(Box::new(metric)));
        // A name that is not allowed, the same labels twice, or other labels than the last metric
        // of this name has: a mistake in this program.
        debug_assert!(added.is_ok(), "{name}: {added:?}");
    }

    fn text(&self) -> anyhow::Result<Vec<u8>> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.0.gather(), &mut text)?;
        Ok(text)
    }
}

/// What a command answers.
pub(crate) trait Pages {
    /// Fills in the page `/metrics`.
    fn figures(&self, page: &Page);

    /// Whether there is a page `/connections`.
    fn has_connections(&self) -> bool {
        false
    }

    /// The page `/connections`.
    fn connections(&self) -> Connections {
        Connections::default()
    }
}

/// A command that has figures alone.
impl<F: Fn(&Page)> Pages for F {
    fn figures(&self, page: &Page) {
        self(page);
    }
}

/// The server of `--metrics`.
#[derive(Debug)]
pub(crate) struct Server(TcpListener);

impl Server {
    /// Listens on the address, if there is one.
    pub(crate) fn open(at: Option<SocketAddr>) -> anyhow::Result<Option<Self>> {
        let open = |at| {
            let listener = TcpListener::bind(at)?;
            listener.set_nonblocking(true)?;
            eprintln!("metrics on http://{}/metrics", listener.local_addr()?);
            std::io::Result::Ok(Self(listener))
        };
        at.map(|at| open(at).with_context(|| format!("--metrics {at}"))).transpose()
    }

    /// Answers clients on a thread until `over`.
    pub(crate) fn start<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        over: &'s AtomicBool,
        pages: impl Pages + Send + 's,
    ) -> anyhow::Result<ScopedJoinHandle<'s, ()>> {
        let run = move || {
            while !over.load(Ordering::Relaxed) {
                self.turn(&pages);
            }
        };
        spawn(scope, "netmem-metrics", run).context("cannot start the thread of --metrics")
    }

    /// Waits for a client, for a while, and answers it.
    fn turn(&self, pages: &impl Pages) {
        let wait = Timespec { tv_sec: 0, tv_nsec: CHECK_EVERY.subsec_nanos().into() };
        let _ = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&wait));
        match self.0.accept() {
            // The client has gone, or is too slow: no one would read an error.
            Ok((client, _)) => drop(answer(client, pages)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            // Without descriptors, `accept` fails at once, again and again.
            Err(_) => std::thread::sleep(CHECK_EVERY),
        }
    }
}

fn answer(mut client: TcpStream, pages: &impl Pages) -> anyhow::Result<()> {
    client.set_nonblocking(false)?;
    let until = Instant::now() + PATIENCE;
    let (mut request, mut len) = ([0; REQUEST], 0);
    let (status, kind, body) = loop {
        match page_of(&request[..len]) {
            Asked::More if len < REQUEST => {
                client.set_read_timeout(Some(left(until)?))?;
                match client.read(&mut request[len..])? {
                    0 => anyhow::bail!("closed"),
                    n => len += n,
                }
            }
            Asked::Metrics => {
                let page = Page::default();
                pages.figures(&page);
                break ("200 OK", prometheus::TEXT_FORMAT, page.text()?);
            }
            Asked::Connections if pages.has_connections() => {
                break ("200 OK", "application/json", serde_json::to_vec(&pages.connections())?);
            }
            Asked::Connections | Asked::Other => {
                let there = if pages.has_connections() { "are /metrics and /connections" } else { "is /metrics" };
                break ("404 Not Found", TEXT, format!("there {there}\n").into_bytes());
            }
            Asked::More | Asked::Wrong => {
                break ("400 Bad Request", TEXT, b"not a request of HTTP: GET /metrics\n".to_vec());
            }
        }
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let answer = [head.as_bytes(), &body].concat();
    let mut rest = &answer[..];
    while !rest.is_empty() {
        client.set_write_timeout(Some(left(until)?))?;
        match client.write(rest)? {
            0 => anyhow::bail!("closed"),
            n => rest = &rest[n..],
        }
    }
    Ok(())
}

/// The rest of a client's time.
fn left(until: Instant) -> anyhow::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    anyhow::ensure!(!left.is_zero(), "too slow");
    Ok(left)
}

/// What a client asks for.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    /// The request is not complete.
    More,
    Metrics,
    Connections,
    Other,
    Wrong,
}

fn page_of(request: &[u8]) -> Asked {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut parsed = httparse::Request::new(&mut headers);
    match parsed.parse(request) {
        Err(_) => Asked::Wrong,
        Ok(httparse::Status::Partial) => Asked::More,
        Ok(httparse::Status::Complete(_)) => {
            let path = parsed.path.map(|path| path.split('?').next().unwrap_or_default());
            match (parsed.method, path) {
                (Some("GET"), Some("/metrics")) => Asked::Metrics,
                (Some("GET"), Some("/connections")) => Asked::Connections,
                _ => Asked::Other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests() {
        assert_eq!(page_of(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), Asked::Metrics);
        assert_eq!(page_of(b"GET /metrics?a=b HTTP/1.1\r\n\r\n"), Asked::Metrics);
        assert_eq!(page_of(b"GET /metrics HTTP/1.1\r\nHost"), Asked::More);
        assert_eq!(page_of(b"GET / HTTP/1.1\r\n\r\n"), Asked::Other);
        assert_eq!(page_of(b"POST /metrics HTTP/1.1\r\n\r\n"), Asked::Other);
        assert_eq!(page_of(b"\x16\x03\x01"), Asked::Wrong);
    }

    #[test]
    fn text() {
        let page = Page::default();
        page.counter("netmem_a_total", "As.", &[("queue", "0")], 5);
        page.counter("netmem_a_total", "As.", &[("queue", "1\"")], 6);
        page.gauge("netmem_b_bytes", "Bs.", &[], 1.5);
        let text = String::from_utf8(page.text().unwrap()).unwrap();
        assert_eq!(
            text,
            "# HELP netmem_a_total As.\n# TYPE netmem_a_total counter\nnetmem_a_total{queue=\"0\"} 5\n\
             netmem_a_total{queue=\"1\\\"\"} 6\n# HELP netmem_b_bytes Bs.\n# TYPE netmem_b_bytes gauge\nnetmem_b_bytes 1.5\n"
        );
    }
}
