//! What the device reports: a line for each front end that leaves, and the JSON object of
//! `--stats`.

use super::Running;
use crate::link::{AskedLink, LinkReport};
use netmem::device::{DeviceError, Stats};
use netmem_measure::output::{self, chain};
use rustix::net::{SendFlags, sockopt};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// The time between two lines about busy or short. A peer can cause them in a loop, and such lines
/// must not fill a disk.
const QUIET: Duration = Duration::from_secs(1);
/// The number of front ends in such a time that get a line of their own when they leave.
const LINES: u32 = 20;

/// The most bytes of the statistics. The send buffer of a client's connection has room for them.
const MOST_STATISTICS: usize = 64 << 10;

/// What happened to connections.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// Front ends that were handed to the serving thread.
    pub(super) served: u64,
    /// Front ends that were hung up on because another was being served.
    busy: u64,
    /// Connections whose other end was closed before they were served.
    pub(super) dead: u64,
    /// Front ends and clients that were dropped because a descriptor or memory was short.
    short: u64,
    reported: [Option<Instant>; 2],
    lines: Lines,
}

/// How many lines were printed for front ends that left, in the second that began at `since`.
#[derive(Debug)]
struct Lines {
    since: Instant,
    printed: u32,
    unlisted: u64,
}

impl Default for Lines {
    fn default() -> Self {
        Self { since: Instant::now(), printed: 0, unlisted: 0 }
    }
}

impl Events {
    pub(super) fn busy(&mut self) {
        self.busy += 1;
        if due(&mut self.reported[0]) {
            output::Log.line(&format!("busy: {} front end(s) hung up on so far, while another is served", self.busy));
        }
    }

    pub(super) fn short(&mut self, e: &io::Error) {
        self.short += 1;
        if due(&mut self.reported[1]) {
            output::Log.line(&format!("{} connection(s) dropped so far, for lack of a resource: {e}", self.short));
        }
    }

    /// Prints the line for a front end that left, unless there were many in this second.
    pub(super) fn left(&mut self, how: &Result<(), DeviceError>, before: &Left, stats: &Stats) {
        let lines = &mut self.lines;
        if lines.since.elapsed() >= QUIET {
            (lines.since, lines.printed) = (Instant::now(), 0);
        }
        if lines.printed == LINES {
            lines.unlisted += 1;
            return;
        }
        lines.printed += 1;
        let unlisted = match std::mem::take(&mut lines.unlisted) {
            0 => String::new(),
            n => format!(" ({n} more have left before it)"),
        };
        let mut now = Left::of(stats).0;
        now.iter_mut().zip(before.0).for_each(|(now, before)| *now -= before);
        let [frames, bytes, sent, sent_bytes, drops] = now;
        let why = how.as_ref().map_or_else(|e| format!(" after an error: {}", chain(e)), |()| String::new());
        output::offer(&format!(
            "front end left{why}: {frames} frames ({bytes} bytes) to it, {sent} frames ({sent_bytes} bytes) from it, \
             {drops} dropped{unlisted}"
        ));
    }
}

fn due(reported: &mut Option<Instant>) -> bool {
    let due = reported.is_none_or(|reported| reported.elapsed() >= QUIET);
    if due {
        *reported = Some(Instant::now());
    }
    due
}

/// The device's counters when a front end came.
#[derive(Debug)]
pub(super) struct Left([u64; 5]);

impl Left {
    pub(super) fn of(s: &Stats) -> Self {
        let drops = s.drops().map(|(_, n)| n).sum();
        let [frames, bytes, sent, sent_bytes] =
            [&s.rx_frames, &s.rx_bytes, &s.tx_frames, &s.tx_bytes].map(|n| n.load(Relaxed));
        Self([frames, bytes, sent, sent_bytes, drops])
    }
}

/// The JSON object of `--stats`.
#[derive(Serialize)]
struct Report<'a> {
    netmem: &'static str,
    command: &'static str,
    port: String,
    queues: u16,
    uptime_seconds: f64,
    front_ends: FrontEnds,
    counters: BTreeMap<&'a str, u64>,
    /// Of each queue pair, its part of the counters and of all drops.
    pairs: Vec<BTreeMap<&'a str, u64>>,
    drops: BTreeMap<&'a str, u64>,
    queue_errors: BTreeMap<&'a str, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<LinkReport>,
}

/// Sends the statistics to a new client, without a wait: the client finds the text when it reads.
/// The send buffer is as the text needs it where `net.core.wmem_max` permits, whatever a new socket
/// has by `net.core.wmem_default`.
pub(super) fn send(stream: &UnixStream, text: &str) {
    let _ = sockopt::set_socket_send_buffer_size(stream, MOST_STATISTICS);
    let _ = rustix::net::send(stream, text.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

#[derive(Serialize)]
struct FrontEnds {
    connected: bool,
    served: u64,
    busy: u64,
    dead: u64,
    short: u64,
}

impl Running<'_> {
    /// The statistics as one JSON object of at most [`MOST_STATISTICS`] bytes.
    pub(super) fn report(&self, events: &Events, connected: bool) -> String {
        let Events { served, busy, dead, short, .. } = *events;
        let report = Report {
            netmem: env!("CARGO_PKG_VERSION"),
            command: "device",
            port: self.args.port.to_string(),
            queues: self.args.queues,
            uptime_seconds: self.since.elapsed().as_secs_f64(),
            front_ends: FrontEnds { connected, served, busy, dead, short },
            counters: self.stats.counters().collect(),
            pairs: self.stats.pairs().map(BTreeMap::from).collect(),
            drops: self.stats.drops().collect(),
            queue_errors: self.stats.queue_errors().collect(),
            link: self.link.and_then(AskedLink::report),
        };
        report.text()
    }
}

impl Report<'_> {
    fn text(&self) -> String {
        serde_json::to_string_pretty(self).map_or_else(|e| format!("{{ \"error\": \"{e}\" }}\n"), |json| json + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem::device::{MAX_PAIRS, NetDevice, Options, port::Gen};
    use netmem_netem::LinkOptions;
    use std::io::Read;

    /// Of the most queue pairs, behind the longest path, with the longest numbers.
    #[test]
    fn the_longest_statistics_are_sent_without_a_wait() {
        let device = NetDevice::new(Options::default(), |_| Gen::new(64, None)).unwrap();
        let stats = device.stats();
        let pair = stats.pairs().next().unwrap().map(|(name, _)| (name, u64::MAX));
        let most = |(name, _)| (name, u64::MAX);
        let most_events =
            FrontEnds { connected: false, served: u64::MAX, busy: u64::MAX, dead: u64::MAX, short: u64::MAX };
        let link = AskedLink::open(Some(LinkOptions::default()), None).unwrap().unwrap();
        let report = Report {
            netmem: env!("CARGO_PKG_VERSION"),
            command: "device",
            // Six bytes of JSON each.
            port: "\u{1}".repeat(libc::PATH_MAX as usize),
            queues: MAX_PAIRS as u16,
            uptime_seconds: f64::MAX,
            front_ends: most_events,
            counters: stats.counters().map(most).collect(),
            pairs: vec![BTreeMap::from(pair); MAX_PAIRS],
            drops: stats.drops().map(most).collect(),
            queue_errors: stats.queue_errors().map(most).collect(),
            link: link.report(),
        };
        let text = report.text();
        assert!(text.len() <= MOST_STATISTICS, "{}", text.len());
        let full = text.clone() + &" ".repeat(MOST_STATISTICS - text.len());
        for text in [text, full] {
            let (device, mut client) = UnixStream::pair().unwrap();
            sockopt::set_socket_send_buffer_size(&device, 0).unwrap();
            send(&device, &text);
            drop(device);
            let mut read = String::new();
            client.read_to_string(&mut read).unwrap();
            assert!(read == text, "{} of {} bytes", read.len(), text.len());
        }
    }
}
