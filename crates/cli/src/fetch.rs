//! Fetches a page of a running command's `--metrics`. The server may be any program, so the answer
//! is limited in time and in length, and its reader believes nothing in it.

use anyhow::{Context, bail, ensure};
use netmem_measure::report::SCHEMA;
use serde::Serialize;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The longest time for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest answer: a server's list of a hundred thousand connections.
const MOST: usize = 64 << 20;

/// What `--json` of a command that asks twice prints.
#[derive(Serialize)]
pub(crate) struct Report<T> {
    schema: u32,
    netmem: &'static str,
    command: &'static str,
    /// The time between the two answers.
    interval_s: f64,
    #[serde(flatten)]
    content: T,
}

impl<T> Report<T> {
    pub(crate) fn new(command: &'static str, interval: Duration, content: T) -> Self {
        let (netmem, interval_s) = (env!("CARGO_PKG_VERSION"), interval.as_secs_f64());
        Self { schema: SCHEMA, netmem, command, interval_s, content }
    }
}

/// The body of the answer to `GET path`.
pub(crate) fn get(at: SocketAddr, path: &str) -> anyhow::Result<String> {
    let until = Instant::now() + PATIENCE;
    let mut stream = TcpStream::connect_timeout(&at, PATIENCE)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        ensure!(!left.is_zero(), "no complete answer in {} s", PATIENCE.as_secs());
        stream.set_read_timeout(Some(left))?;
        let mut part = [0; 16 << 10];
        match stream.read(&mut part)? {
            0 => break,
            n => answer.extend_from_slice(&part[..n]),
        }
        ensure!(answer.len() <= MOST, "the answer has more than {MOST} bytes");
    }
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut head = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(len) = head.parse(&answer).map_err(|e| anyhow::anyhow!("no answer of HTTP: {e}"))?
    else {
        bail!("the answer ends in its headers");
    };
    match head.code {
        Some(200) => Ok(String::from_utf8(answer.split_off(len)).context("the answer is no text")?),
        Some(404) => bail!("it has no {path}: is it the address of --metrics, and of a command that has this page?"),
        code => bail!("status {}: is it the address of --metrics?", code.unwrap_or_default()),
    }
}
