//! `netmem ss`: the connections of a running command that has `--metrics`.
//!
//! The command answers `/connections` with [`Connections`] as JSON. Rates are of two answers. The
//! server may be any program: its answer has numbers, addresses and states, and no other text.

use crate::args::SsArgs;
use crate::fetch::{self, Report};
use anyhow::Context;
use netmem::tcp::{ConnectionInfo, State};
use netmem_measure::output;
use netmem_measure::table::table;
use netmem_measure::units::digits;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The connections of a command.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Connections {
    pub(crate) connections: Vec<Connection>,
    /// Queues whose thread did not answer in time. Their connections are missing.
    pub(crate) silent_queues: Vec<usize>,
}

/// A connection. Fields are added, and are not removed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Connection {
    queue: usize,
    /// A number that no other connection of the queue has, or had.
    id: u64,
    state: State,
    local: SocketAddr,
    peer: SocketAddr,
    /// Bytes that the peer has acknowledged, and bytes that were received in order; modulo 2^32.
    acknowledged: u32,
    received: u32,
    /// The congestion window, and what of it is in flight or lost; all in segments.
    cwnd: u32,
    unacked: u32,
    lost: u32,
    /// Segments that were sent again since the connection began.
    retransmitted: u32,
    segment_size: u32,
    rtt_us: u64,
    rttvar_us: u64,
    min_rtt_us: u64,
    rto_us: u64,
    /// Bytes that were not sent, and bytes that were not read.
    unsent: usize,
    readable: u32,
    /// Pages of payload: written and not acknowledged, and received and not dropped.
    written_pages: usize,
    received_pages: u32,
    /// The time since payload was received.
    idle_ms: u64,
}

impl Connection {
    pub(crate) fn new(queue: usize, info: &ConnectionInfo) -> Self {
        let ConnectionInfo { id, local, peer, state, tcp, written_pages } = *info;
        let send = tcp.send;
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        Self {
            queue,
            id,
            state,
            local,
            peer,
            acknowledged: send.acknowledged,
            received: tcp.received,
            cwnd: send.cwnd,
            unacked: send.unacked,
            lost: send.lost,
            retransmitted: send.retransmitted,
            segment_size: send.segment_size,
            rtt_us: micros(send.rtt),
            rttvar_us: micros(send.rttvar),
            min_rtt_us: micros(send.min_rtt),
            rto_us: micros(send.rto),
            unsent: send.unsent,
            readable: tcp.readable,
            written_pages,
            received_pages: tcp.buffers,
            idle_ms: micros(tcp.idle) / 1000,
        }
    }

    /// The state as RFC 9293 writes it.
    fn state(&self) -> &'static str {
        match self.state {
            State::SynSent => "SYN-SENT",
            State::SynReceived => "SYN-RECEIVED",
            State::Established => "ESTABLISHED",
            State::FinWait1 => "FIN-WAIT-1",
            State::FinWait2 => "FIN-WAIT-2",
            State::CloseWait => "CLOSE-WAIT",
            State::Closing => "CLOSING",
            State::LastAck => "LAST-ACK",
            State::TimeWait => "TIME-WAIT",
            State::Closed => "CLOSED",
        }
    }
}

/// A connection, and its rates in bytes a second, if it was there in both answers.
#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    connection: Connection,
    #[serde(skip_serializing_if = "Option::is_none")]
    acknowledged_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    received_per_s: Option<f64>,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Rows {
    connections: Vec<Row>,
    silent_queues: Vec<usize>,
}

fn ask(at: SocketAddr) -> anyhow::Result<(Instant, Connections)> {
    let text = fetch::get(at, "/connections").with_context(|| format!("the connections of {at}"))?;
    // What serde says can have text of the answer, which could confuse a terminal.
    let wrong = |error: serde_json::Error| anyhow::anyhow!("{}", error.to_string().escape_debug());
    let answer = serde_json::from_str(&text).map_err(wrong);
    Ok((Instant::now(), answer.with_context(|| format!("{at} does not answer with a list of connections"))?))
}

/// The connections of `now`, in the order of queues and addresses, and what they did since
/// `before`.
fn rows(before: &[Connection], now: Vec<Connection>, interval: Duration) -> Vec<Row> {
    let before: HashMap<_, _> = before.iter().map(|one| ((one.queue, one.id), one)).collect();
    // Of 4 GiB or more in an interval, the multiples are lost.
    let rate = |old: u32, new: u32| f64::from(new.wrapping_sub(old)) / interval.as_secs_f64().max(1e-9);
    let row = |connection: Connection| {
        let old = before.get(&(connection.queue, connection.id));
        Row {
            acknowledged_per_s: old.map(|old| rate(old.acknowledged, connection.acknowledged)),
            received_per_s: old.map(|old| rate(old.received, connection.received)),
            connection,
        }
    };
    let mut rows: Vec<Row> = now.into_iter().map(row).collect();
    rows.sort_by_key(|Row { connection: one, .. }| (one.queue, one.local, one.peer, one.id));
    rows
}

/// Prints the connections.
pub(crate) fn run(args: &SsArgs) -> anyhow::Result<()> {
    let (begin, before) = ask(args.address)?;
    std::thread::sleep(args.interval);
    let (end, now) = ask(args.address)?;
    let interval = end - begin;
    let silent_queues = now.silent_queues;
    let rows = rows(&before.connections, now.connections, interval);
    if args.json {
        let rows = Rows { connections: rows, silent_queues };
        return Ok(output::json(&Report::new("ss", interval, rows))?);
    }
    if !silent_queues.is_empty() {
        let queues = silent_queues.len();
        eprintln!("warning: the threads of {queues} queues did not answer, so their connections are missing");
    }
    Ok(output::print(&table(&HEAD, rows.iter().map(cells), |column| !matches!(column, 1..=3)))?)
}

const HEAD: [&str; 13] = [
    "queue",
    "state",
    "local",
    "peer",
    "acked/s",
    "received/s",
    "cwnd",
    "unacked",
    "resent",
    "rtt us",
    "unsent",
    "readable",
    "pages",
];

/// A row of the table. The last column: pages of written payload, and of received payload.
fn cells(row: &Row) -> Vec<String> {
    let Row { connection: one, acknowledged_per_s, received_per_s } = row;
    let rate = |rate: &Option<f64>| rate.map(digits).unwrap_or_default();
    vec![
        one.queue.to_string(),
        one.state().to_owned(),
        one.local.to_string(),
        one.peer.to_string(),
        rate(acknowledged_per_s),
        rate(received_per_s),
        one.cwnd.to_string(),
        one.unacked.to_string(),
        one.retransmitted.to_string(),
        format!("{}±{}", one.rtt_us, one.rttvar_us),
        one.unsent.to_string(),
        one.readable.to_string(),
        format!("{}+{}", one.written_pages, one.received_pages),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(queue: usize, id: u64, acknowledged: u32) -> Connection {
        let text = format!(
            r#"{{"queue":{queue},"id":{id},"state":"Established","local":"10.0.0.2:7","peer":"10.0.0.1:9","acknowledged":{acknowledged},
            "received":5,"cwnd":10,"unacked":0,"lost":0,"retransmitted":0,"segment_size":1448,"rtt_us":1,"rttvar_us":1,"min_rtt_us":1,
            "rto_us":1,"unsent":0,"readable":0,"written_pages":0,"received_pages":0,"idle_ms":0,"later":1}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn rates_are_of_two_answers() {
        let before = [connection(0, 1, u32::MAX - 99), connection(1, 2, 0)];
        let now = vec![connection(1, 1, 7), connection(0, 1, 100)];
        let rows = rows(&before, now, Duration::from_secs(2));
        let rates: Vec<_> = rows.iter().map(|row| (row.connection.queue, row.acknowledged_per_s)).collect();
        // The number of bytes has wrapped. The other connection was not there.
        assert_eq!(rates, [(0, Some(100.0)), (1, None)]);
        assert_eq!(rows[0].received_per_s, Some(0.0));
        assert_eq!(cells(&rows[1]).len(), HEAD.len());
    }
}
