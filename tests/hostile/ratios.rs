//! Figures of `netmem serve` under attack, as ratios of pairs that take turns.
//!
//!     cargo run --release -p netmem-tests --example ratios -- COMMAND [ROW...]
//!
//! | row | what is compared | goal |
//! | --- | --- | --- |
//! | `upload` | an upload, while another connection sends 20,000 single bytes a second with gaps, and while it sends as many to another Ethernet address | at least 0.8 |
//! | `flood` | round trips of an established connection, while 50,000 connection requests a second come from 5,000 stations, and while as many frames go to another Ethernet address | at least 0.8 |
//! | `syn` | CPU time of the server for a connection request, and for one to a closed port, which it resets; all handshakes that it keeps are begun | at most 1.5 |
//! | `idle` | resident memory before and with idle HTTP connections, each answered once; whether a new one is answered | |
//!
//! COMMAND is the command's path, so that builds can be compared. Uploads and round trips are the
//! kernel's TCP. `PAIRS` (7), `SECS` (1, of each half of a pair) and `CONNECTIONS` (20000) are
//! settings. It needs root, and two CPUs that are otherwise idle.
#![allow(clippy::unwrap_used, missing_docs)]

mod generator;

use generator::frame::{self, ACK, PSH, RST, Received};
use generator::link::{Hears, Link};
use generator::namespace::{in_namespace, ip};
use generator::peer::{MAC, Peer, locals, v4};
use generator::server::{Server, Service, TAP, V4};
use generator::witness::{answer, request};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The kernel's own address on the tap.
const KERNEL: &str = "10.0.0.1/8";
/// Frames of the generator in a second.
const RATE: u32 = 50_000;
const STATIONS: u32 = 5000;
/// Single bytes in a second.
const TINY: u32 = 20_000;
/// Frames of each half of the row `syn`, and a number of stations that the server knows as
/// neighbours.
const SATURATING: usize = 200_000;
const NEIGHBORS: u32 = 512;
/// The port on which no service listens.
const CLOSED: u16 = 8;
/// Frames that a tap keeps by default.
const USUAL: usize = 1000;
/// A station that there is not.
const ELSEWHERE: frame::Mac = [0x02, 0xcc, 0, 0, 0, 1];

/// Prints a row of this command.
type Row = fn(&Path);

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name}={value}: a number")))
}

fn secs() -> Duration {
    Duration::from_secs(setting("SECS", 1))
}

fn main() {
    let mut args = std::env::args_os().skip(1);
    let Some(command) = args.next() else {
        eprintln!("usage: ratios COMMAND [upload] [flood] [syn] [idle]");
        std::process::exit(2);
    };
    let rows: Vec<String> = args.map(|row| row.to_string_lossy().into_owned()).collect();
    let all: [(&str, Row); 4] = [("upload", upload), ("flood", flood), ("syn", syn), ("idle", idle)];
    if let Some(row) = rows.iter().find(|row| !all.iter().any(|(name, _)| name == row)) {
        eprintln!("no row {row}: upload, flood, syn, idle");
        std::process::exit(2);
    }
    for (_, run) in all.iter().filter(|(name, _)| rows.is_empty() || rows.iter().any(|row| row == name)) {
        if in_namespace(|| run(Path::new(&command))).is_none() {
            return;
        }
    }
}

/// Runs pairs, whose halves take turns in being the first: `half(true)` is under attack. Prints
/// each pair, and the median of the ratios with the smallest and the largest.
fn pairs(row: &str, unit: &str, goal: &str, mut half: impl FnMut(bool) -> f64) {
    let mut ratios = Vec::new();
    // Neighbours, caches and pages are as they are in a server that has run for a while.
    half(false);
    for pair in 0..setting("PAIRS", 7) {
        let first = half(pair % 2 == 0);
        let second = half(pair % 2 != 0);
        let (attacked, quiet) = if pair % 2 == 0 { (first, second) } else { (second, first) };
        println!("{row}: {attacked:.0} and {quiet:.0} {unit}: {:.3}", attacked / quiet);
        // Nothing comes in a quiet half if the attack before it has outlasted it.
        ratios.push(if quiet > 0.0 { attacked / quiet } else { 0.0 });
    }
    ratios.sort_by(f64::total_cmp);
    let [least, median, most] = [0, ratios.len() / 2, ratios.len() - 1].map(|at| ratios[at]);
    println!("{row}: median {median:.3} ({least:.3} to {most:.3}); goal: {goal}");
}

/// A server whose tap has an address of the kernel's.
fn with_kernel(command: &Path, service: Service) -> Peer {
    let peer = Peer::start(command, service, &[]);
    ip(&format!("address add {KERNEL} dev {TAP}"));
    peer
}

fn connect(service: Service) -> TcpStream {
    let stream = TcpStream::connect((V4, service.port())).unwrap();
    stream.set_nodelay(true).unwrap();
    // A connection that stands still is counted with what it has done.
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    stream
}

/// Repeats `step` for the time of a half. Returns the sum of its results for a second.
fn per_second(mut step: impl FnMut() -> usize) -> f64 {
    let begin = Instant::now();
    let mut sum = 0;
    while begin.elapsed() < secs() {
        sum += step();
    }
    sum as f64 / begin.elapsed().as_secs_f64()
}

// ---- an upload beside single bytes

fn upload(command: &Path) {
    let mut peer = with_kernel(command, Service::Discard);
    let mut port = 1000;
    pairs("upload", "MB/s", "at least 0.8", |attacks| {
        port += 1;
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let upload = scope.spawn(|| {
                let (mut stream, bytes) = (connect(Service::Discard), vec![7; 1 << 16]);
                let rate = per_second(|| stream.write(&bytes).unwrap_or_default());
                over.store(true, Relaxed);
                rate / 1e6
            });
            single_bytes(&mut peer, SocketAddr::new(v4(1), port), attacks, &over);
            upload.join().unwrap()
        })
    });
    drop(peer);
}

/// A connection that sends single bytes at every second number until it is over, to the server or
/// to another Ethernet address.
fn single_bytes(peer: &mut Peer, local: SocketAddr, attacks: bool, over: &AtomicBool) {
    let n = peer.connect(&[local])[0];
    let gaps = u32::from(peer.connection(n).window) / 2;
    let server = peer.to;
    peer.to = if attacks { server } else { ELSEWHERE };
    let (begin, mut sent) = (Instant::now(), 0);
    while !over.load(Relaxed) {
        let due = (begin.elapsed().as_secs_f64() * f64::from(TINY)) as u32;
        while sent < due {
            peer.out_of_order(n, 1 + 2 * (sent % gaps), ACK | PSH, b"x");
            sent += 1;
        }
        peer.pump(Duration::from_millis(1));
    }
    peer.to = server;
    // What the server has kept of it is gone before the next half.
    peer.segment(n, RST, &[]);
    peer.settle();
}

// ---- round trips beside a flood

/// Connection requests to a port, each from another address or port.
fn requests(to: frame::Mac, stations: u32, port: u16, count: u32) -> Vec<Vec<u8>> {
    let link = frame::Link { from: MAC, to };
    let from = |n: u32| SocketAddr::new(v4(n % stations), 1024 + (n / stations) as u16);
    (0..count).map(|n| frame::request(link, from(n), (V4, port).into())).collect()
}

/// Answers questions for the stations' addresses.
fn answers(link: &mut Link, buffer: &mut [u8]) {
    let mut out = Vec::new();
    while let Some(len) = link.receive(buffer) {
        if let Received::Question { target: IpAddr::V4(target), asker: (mac, IpAddr::V4(asker)), .. } =
            frame::read(&buffer[..len])
        {
            out.push(frame::arp(frame::Link { from: MAC, to: mac }, false, (MAC, target), (mac, asker)));
        }
    }
    link.pass(&out).unwrap();
}

fn flood(command: &Path) {
    // The peer's link is closed: nothing reads it here.
    let Peer { server, to, .. } = with_kernel(command, Service::Echo);
    ip(&format!("link set {TAP} txqueuelen {USUAL}"));
    let frames = [ELSEWHERE, to].map(|to| requests(to, STATIONS, Service::Echo.port(), 10 * STATIONS));
    let (mut link, mut slowest) = (Link::open(TAP, Hears::Arp), f64::INFINITY);
    pairs("flood", "round trips a second", "at least 0.8", |attacks| {
        let over = AtomicBool::new(false);
        let frames = &frames[usize::from(attacks)];
        // Established before the flood begins.
        let mut stream = connect(Service::Echo);
        let (rate, reached) = std::thread::scope(|scope| {
            let trips = scope.spawn(|| {
                // One byte is on its way, also if an answer is late.
                let (mut byte, mut owed) = ([0], false);
                let rate = per_second(|| {
                    owed = owed || stream.write(&[1]).is_ok();
                    let came = stream.read(&mut byte).is_ok_and(|n| n == 1);
                    owed &= !came;
                    came.into()
                });
                over.store(true, Relaxed);
                rate
            });
            let reached = generate(&mut link, frames, &over);
            (trips.join().unwrap(), reached)
        });
        slowest = slowest.min(reached);
        rate
    });
    println!("flood: never less than {slowest:.0} frames a second");
    drop(server);
}

/// Sends these frames again and again at the rate until it is over. Returns the rate that was
/// reached.
fn generate(link: &mut Link, frames: &[Vec<u8>], over: &AtomicBool) -> f64 {
    let (begin, mut sent, mut buffer) = (Instant::now(), 0, vec![0; 1 << 17]);
    while !over.load(Relaxed) {
        let due = (begin.elapsed().as_secs_f64() * f64::from(RATE)) as usize;
        while sent < due {
            let at = sent % frames.len();
            let some = &frames[at..(at + 64).min(frames.len()).min(at + due - sent)];
            link.pass(some).unwrap();
            sent += some.len();
        }
        answers(link, &mut buffer);
        std::thread::sleep(Duration::from_micros(500));
    }
    sent as f64 / begin.elapsed().as_secs_f64()
}

// ---- the cost of a connection request

fn syn(command: &Path) {
    for stations in [NEIGHBORS, STATIONS] {
        let mut peer = Peer::start(command, Service::Echo, &[]);
        // Handshakes that the server keeps, so that all further ones are cookies. Their stations
        // are neighbours.
        for locals in (0..1200)
            .map(|n| SocketAddr::new(v4(n % NEIGHBORS), 900 + (n / NEIGHBORS) as u16))
            .collect::<Vec<_>>()
            .chunks(200)
        {
            for &local in locals {
                peer.open(local);
            }
            peer.settle();
        }
        let Peer { server, to, .. } = peer;
        let frames = [CLOSED, Service::Echo.port()].map(|port| requests(to, stations, port, 10 * STATIONS));
        let mut link = Link::open(TAP, Hears::Arp);
        println!("syn: {stations} stations");
        pairs("syn", "ns of CPU time", "at most 1.5", |opens| cost(&server, &mut link, &frames[usize::from(opens)]));
    }
}

/// The server's CPU time for each of these frames, in nanoseconds. It always finds some.
fn cost(server: &Server, link: &mut Link, frames: &[Vec<u8>]) -> f64 {
    let mut buffer = vec![0; 1 << 17];
    let (before, mut sent) = (server.cpu(), 0);
    while sent < SATURATING {
        for frames in frames.chunks(128) {
            link.send(frames).unwrap();
            answers(link, &mut buffer);
        }
        sent += frames.len();
    }
    link.wait(0).unwrap();
    (server.cpu() - before).as_nanos() as f64 / sent as f64
}

// ---- idle connections

fn idle(command: &Path) {
    let count = setting("CONNECTIONS", 20_000) as usize;
    let mut peer = Peer::start(command, Service::Http, &[]);
    let before = peer.server.resident();
    let (mut opened, mut all) = (0, Vec::new());
    for locals in locals(count).chunks(250) {
        let some: Vec<_> = locals.iter().map(|&local| peer.open(local)).collect();
        if !come(&mut peer, &some, |connection| connection.established) {
            break;
        }
        opened += some.len();
        all.extend(some);
    }
    let established = peer.server.resident();
    let expected = answer(10, false).len();
    let mut answered = 0;
    for some in all.chunks(250) {
        some.iter().for_each(|&n| peer.send(n, &request(10, false)));
        let came = come(&mut peer, some, |connection| connection.received.len() >= expected);
        answered += some.iter().filter(|&&n| peer.connection(n).received.len() >= expected).count();
        if !came {
            break;
        }
    }
    let after = peer.server.resident();
    let each = |kib: u64| (kib.saturating_sub(before) * 1024) as f64 / opened.max(1) as f64;
    println!("idle: {opened} of {count} connections were established, and {answered} were answered");
    println!(
        "idle: resident: {before} KiB before, {established} KiB established ({:.0} bytes each), {after} KiB answered ({:.0} bytes each)",
        each(established),
        each(after)
    );
    let new = [peer.open(SocketAddr::new(v4(900), 900))];
    let mut is_answered = come(&mut peer, &new, |connection| connection.established);
    peer.send(new[0], &request(10, false));
    is_answered &= come(&mut peer, &new, |connection| connection.received.len() >= expected);
    let open = all.iter().filter(|&&n| peer.connection(n).is_open()).count();
    println!("idle: a new one is answered: {is_answered}; {open} are still established");
}

/// Whether all of these connections get there. It is given up when nothing has come for two
/// seconds.
fn come(peer: &mut Peer, numbers: &[usize], done: impl Fn(&generator::connection::Connection) -> bool) -> bool {
    let (mut left, mut last) = (numbers.to_vec(), Instant::now());
    loop {
        peer.pump(Duration::from_millis(20));
        let before = left.len();
        left.retain(|&n| !done(peer.connection(n)));
        if left.is_empty() {
            return true;
        }
        if left.len() < before {
            last = Instant::now();
        } else if last.elapsed() > Duration::from_secs(2) {
            return false;
        }
    }
}
