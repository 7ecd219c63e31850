//! The kernel's end: sockets of this process, behind the tap.

use super::cookie::{Cookie, MAX_UNKNOWN};
use super::flows::LOST_AFTER;
use super::pace::{Latencies, Pace};
use super::plan::{NUMBER, Proto};
use super::watch::{Routes, Source, Watch};
use super::{CHECK_EVERY, PATIENCE};
use anyhow::Context;
use netmem_measure::threads::propagate;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// The longest time of an attempt to connect.
const CONNECT: Duration = Duration::from_secs(3);

/// What the end does.
#[derive(Debug, Default)]
pub(super) struct End {
    /// The sockets that flows come to, and how many come to each.
    pub(super) targets: Vec<(Listening, u16)>,
    pub(super) routes: Routes,
}

/// A target's socket.
#[derive(Debug)]
pub(super) enum Listening {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

impl Listening {
    /// Opens the socket at an address of the kernel, on any free port. Returns the address with the
    /// port.
    pub(super) fn open(proto: Proto, at: SocketAddr) -> anyhow::Result<(Self, SocketAddr)> {
        let (socket, at) = match proto {
            Proto::Tcp => {
                let listener = TcpListener::bind(at).context("a socket of the kernel")?;
                listener.set_nonblocking(true).context("a socket of the kernel")?;
                let at = listener.local_addr();
                (Self::Tcp(listener), at)
            }
            Proto::Udp => {
                let socket = UdpSocket::bind(at).context("a socket of the kernel")?;
                socket.set_read_timeout(Some(CHECK_EVERY)).context("a socket of the kernel")?;
                let at = socket.local_addr();
                (Self::Udp(socket), at)
            }
        };
        Ok((socket, at.context("a socket of the kernel")?))
    }
}

/// Runs one thread for each flow, until the run is over and the flows have ended.
pub(super) fn run(watch: &Watch, end: &End) -> anyhow::Result<()> {
    std::thread::scope(|scope| {
        let (mut threads, mut next) = (Vec::new(), 0);
        for (listening, flows) in &end.targets {
            let numbers = next..next + usize::from(*flows);
            next = numbers.end;
            threads.push(scope.spawn(move || match listening {
                Listening::Tcp(listener) => targets(watch, listener, numbers),
                Listening::Udp(socket) => {
                    let received = datagrams(watch, socket, numbers);
                    watch.target_open.store(false, Ordering::Release);
                    received
                }
            }));
        }
        let routes = loop {
            match end.routes.get() {
                Some(routes) => break &routes[..],
                None if watch.is_over() => break &[],
                None => std::thread::sleep(CHECK_EVERY / 10),
            }
        };
        let to = routes.iter().flat_map(|route| std::iter::repeat_n(route.to, route.flows.into()));
        threads.extend((0..).zip(to).map(|(flow, to)| scope.spawn(move || source(watch, to, flow))));
        // All are joined before an error is returned.
        let ended: Vec<_> = threads.into_iter().map(|thread| propagate(thread.join())).collect();
        ended.into_iter().collect()
    })
}

/// Accepts the flows of a socket, which have these numbers.
fn targets(watch: &Watch, listener: &TcpListener, numbers: Range<usize>) -> anyhow::Result<()> {
    let (end, first) = (numbers.end, AtomicUsize::new(numbers.start));
    let (first, unknown) = (&first, &AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let (mut threads, mut ended) = (Vec::new(), Ok(()));
        while first.load(Ordering::Relaxed) < end && !watch.is_over() {
            match listener.accept() {
                Ok(_) if unknown.load(Ordering::Relaxed) >= MAX_UNKNOWN => {}
                Ok((stream, _)) => {
                    unknown.fetch_add(1, Ordering::Relaxed);
                    threads.push(scope.spawn(move || {
                        let known = is_known(watch, &stream);
                        unknown.fetch_sub(1, Ordering::Relaxed);
                        let flow = known.then(|| first.fetch_add(1, Ordering::Relaxed)).filter(|flow| *flow < end);
                        flow.map_or(Ok(()), |flow| target(watch, flow, stream))
                    }));
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::sleep(CHECK_EVERY / 10),
                Err(e) => return Err(e).context("accepting a flow"),
            }
            while let Some(at) = threads.iter().position(ScopedJoinHandle::is_finished) {
                ended = ended.and(propagate(threads.swap_remove(at).join()));
            }
        }
        threads.into_iter().fold(ended, |ended, thread| ended.and(propagate(thread.join())))
    })
}

/// Whether a connection begins with the cookie. It has [`PATIENCE`] for it.
fn is_known(watch: &Watch, mut stream: &TcpStream) -> bool {
    let (mut cookie, mut read, begin) = ([0; Cookie::LEN], 0, Instant::now());
    if stream.set_nonblocking(false).and_then(|()| set_timeouts(stream)).is_err() {
        return false;
    }
    while read < cookie.len() && begin.elapsed() < PATIENCE && !is_given_up(watch) {
        match stream.read(&mut cookie[read..]) {
            Ok(0) => break,
            Ok(n) => read += n,
            Err(e) if has_to_wait(&e) => {}
            Err(_) => break,
        }
    }
    watch.flows.cookie.is(&cookie[..read])
}

/// Counts the bytes of a stream behind its cookie, or answers its requests.
fn target(watch: &Watch, flow: usize, mut stream: TcpStream) -> anyhow::Result<()> {
    stream.set_nodelay(watch.work.answer.is_some()).context("a flow")?;
    let (mut buffer, mut received) = (vec![0; 256 << 10], 0);
    let answer = watch.work.answer.map(|len| vec![0x5a; len]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => match &answer {
                None => watch.count(flow, n),
                Some(answer) => {
                    received += n;
                    while received >= watch.work.size {
                        received -= watch.work.size;
                        write_all(watch, &mut stream, answer).context("answering a request")?;
                    }
                }
            },
            Err(e) if has_to_wait(&e) => {}
            Err(e) => return Err(e).context("receiving a flow"),
        }
        anyhow::ensure!(!is_given_up(watch), "a flow does not end");
    }
}

/// No read or write of a flow waits longer before it is checked whether the flow is given up.
fn set_timeouts(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(CHECK_EVERY))?;
    stream.set_write_timeout(Some(CHECK_EVERY))
}

/// Whether a flow that has not ended is closed: the driver has closed the run, or the run was over
/// too long ago.
fn is_given_up(watch: &Watch) -> bool {
    let late = PATIENCE + watch.work.drain;
    watch.is_closed() || watch.window.end.get().is_some_and(|end| end.elapsed() > late)
}

fn write_all(watch: &Watch, stream: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if has_to_wait(&e) && !is_given_up(watch) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Reads until the buffer is full or the stream has ended. Returns how many bytes.
fn read_all(watch: &Watch, stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match stream.read(&mut buffer[read..]) {
            Ok(0) => break,
            Ok(n) => read += n,
            Err(e) if has_to_wait(&e) && !is_given_up(watch) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(read)
}

fn has_to_wait(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Counts datagrams, or answers requests, until all that will come have come.
fn datagrams(watch: &Watch, socket: &UdpSocket, numbers: Range<usize>) -> anyhow::Result<()> {
    let (mut buffer, mut flows, mut last) = (vec![0; 64 << 10], Vec::new(), Instant::now());
    let mut answer = watch.work.answer.map(|len| vec![0x5a; len]);
    while !(watch.is_over() && watch.has_drained(last.elapsed())) {
        let (n, from) = match socket.recv_from(&mut buffer) {
            Ok(received) => received,
            Err(e) if has_to_wait(&e) => continue,
            Err(e) => return Err(e).context("receiving datagrams"),
        };
        let (is_cookie, mut flow) = (watch.flows.cookie.is(&buffer[..n]), flows.iter().position(|flow| *flow == from));
        if is_cookie && flow.is_none() && flows.len() < numbers.len() {
            flow = Some(flows.len());
            flows.push(from);
        }
        let Some(flow) = flow else { continue };
        last = Instant::now();
        match &mut answer {
            // What cannot be sent is lost.
            Some(_) if is_cookie => _ = send(socket, watch.flows.cookie.bytes(), from),
            Some(answer) if n >= NUMBER => {
                answer[..NUMBER].copy_from_slice(&buffer[..NUMBER]);
                _ = send(socket, answer, from);
            }
            Some(_) => {}
            None if is_cookie => watch.count(numbers.start + flow, 0),
            None => {
                watch.count(numbers.start + flow, n);
                watch.arrived();
            }
        }
    }
    Ok(())
}

/// Sends a datagram. Returns whether there was room for it.
fn send(socket: &UdpSocket, datagram: &[u8], to: SocketAddr) -> anyhow::Result<bool> {
    match socket.send_to(datagram, to) {
        Ok(_) => Ok(true),
        // The tap's queue is full, or the target does not listen yet.
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionRefused) => Ok(false),
        Err(e) => Err(e).context("sending datagrams"),
    }
}

/// The turns of a flow, on its thread. See [`super::flows`].
struct Turns<'w> {
    watch: &'w Watch,
    pace: Pace,
    latencies: Latencies,
    messages: u64,
}

impl<'w> Turns<'w> {
    fn new(watch: &'w Watch, flow: u16) -> Self {
        Self { watch, pace: watch.pace(flow), latencies: Latencies::default(), messages: 0 }
    }

    /// Sleeps until the next message is due, and returns when it was. `None`: the flow ends.
    fn next(&mut self) -> Option<Instant> {
        let due = self.pace.due();
        loop {
            if !self.pace.goes_on(&self.watch.window, self.watch.work.drain) {
                return None;
            }
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(CHECK_EVERY));
        }
        self.pace.sent();
        self.messages += 1;
        Some(due)
    }

    fn answered(&mut self, due: Instant, flow: u16) {
        self.latencies.answered(&self.watch.window, due);
        self.watch.count(flow.into(), 1);
    }
}

impl Drop for Turns<'_> {
    fn drop(&mut self) {
        self.latencies.ended(&self.watch.window, self.pace.clone());
        self.watch.add_latencies(&self.latencies);
        self.watch.add_messages(self.messages);
    }
}

fn source(watch: &Watch, to: SocketAddr, flow: u16) -> anyhow::Result<()> {
    let _open = Source(watch);
    match (watch.work.proto, watch.work.answer) {
        (Proto::Udp, None) => datagram_source(watch, to, flow),
        (Proto::Udp, Some(answer)) => datagram_requests(watch, to, flow, answer),
        (Proto::Tcp, answer) => stream_source(watch, to, flow, answer),
    }
}

fn bind(to: SocketAddr) -> anyhow::Result<UdpSocket> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    UdpSocket::bind(any).context("a socket of the kernel")
}

fn datagram_source(watch: &Watch, to: SocketAddr, flow: u16) -> anyhow::Result<()> {
    let (socket, message) = (bind(to)?, vec![0x5a; watch.work.size]);
    while !watch.has_started() && !watch.is_over() {
        send(&socket, watch.flows.cookie.bytes(), to)?;
        std::thread::sleep(CHECK_EVERY / 10);
    }
    let mut turns = Turns::new(watch, flow);
    while turns.next().is_some() {
        if send(&socket, &message, to)? {
            watch.sent();
        }
    }
    Ok(())
}

fn datagram_requests(watch: &Watch, to: SocketAddr, flow: u16, answer: usize) -> anyhow::Result<()> {
    let (socket, mut request, mut buffer) = (bind(to)?, vec![0x5a; watch.work.size], vec![0; answer.max(Cookie::LEN)]);
    socket.set_read_timeout(Some(CHECK_EVERY / 10)).context("a socket of the kernel")?;
    let mut is_known = false;
    while !is_known && !watch.is_over() {
        send(&socket, watch.flows.cookie.bytes(), to)?;
        is_known = receive(&socket, &mut buffer)?.is_some_and(|n| watch.flows.cookie.is(&buffer[..n]));
    }
    let mut turns = Turns::new(watch, flow);
    for number in 0u64.. {
        let Some(due) = turns.next() else { break };
        request[..NUMBER].copy_from_slice(&number.to_le_bytes());
        send(&socket, &request, to)?;
        let lost_at = Instant::now() + LOST_AFTER;
        loop {
            let left = lost_at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                turns.latencies.lost(&watch.window, due);
                break;
            }
            socket.set_read_timeout(Some(left)).context("a socket of the kernel")?;
            let received = receive(&socket, &mut buffer)?;
            if received.is_some_and(|n| n >= NUMBER && buffer[..NUMBER] == number.to_le_bytes()) {
                turns.answered(due, flow);
                break;
            }
        }
    }
    Ok(())
}

/// Receives a datagram, and returns how many bytes it has. `None`: none came in the socket's time.
fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> anyhow::Result<Option<usize>> {
    match socket.recv(buffer) {
        Ok(n) => Ok(Some(n)),
        // The target does not listen yet, or no longer.
        Err(e) if has_to_wait(&e) || e.kind() == ErrorKind::ConnectionRefused => Ok(None),
        Err(e) => Err(e).context("receiving an answer"),
    }
}

/// Sends messages, or requests of which each waits for the answer to the one before.
fn stream_source(watch: &Watch, to: SocketAddr, flow: u16, answer: Option<usize>) -> anyhow::Result<()> {
    let (message, mut buffer) = (vec![0x5a; watch.work.size], vec![0; answer.unwrap_or(1)]);
    let until = Instant::now() + PATIENCE;
    let mut stream = loop {
        match TcpStream::connect_timeout(&to, CONNECT) {
            Ok(stream) => break stream,
            // The target does not listen yet.
            Err(_) if Instant::now() < until && !watch.is_over() => std::thread::sleep(CHECK_EVERY),
            Err(e) => return Err(e).context("connecting to the target"),
        }
    };
    set_timeouts(&stream).context("a flow")?;
    stream.set_nodelay(answer.is_some()).context("a flow")?;
    write_all(watch, &mut stream, watch.flows.cookie.bytes()).context("beginning a flow")?;
    let mut turns = Turns::new(watch, flow);
    while let Some(due) = turns.next() {
        write_all(watch, &mut stream, &message).context("sending a flow")?;
        if answer.is_some() {
            let read = read_all(watch, &mut stream, &mut buffer).context("receiving an answer")?;
            anyhow::ensure!(read == buffer.len(), "the target has closed a flow");
            turns.answered(due, flow);
        }
    }
    drop(turns);
    stream.shutdown(Shutdown::Write).context("ending a flow")?;
    read_all(watch, &mut stream, &mut [0]).context("ending a flow")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::streams::plan::Work;
    use crate::perf::streams::watch::{Closing, Flows};
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    /// A target of the kernel, while `stations` runs: `flows` flows, of which 1 is the run's.
    fn with_target(work: Work, flows: u16, stations: impl FnOnce(SocketAddr, &Watch)) -> anyhow::Result<Vec<u64>> {
        let cookie = Cookie::random().unwrap();
        let watch =
            Watch::new(work, Flows { counted: flows, sent: 0, all: flows, are_local: false, cookie }, None, true);
        let (listening, at) = Listening::open(work.proto, SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let end = End { targets: vec![(listening, flows)], routes: Arc::new(Vec::new().into()) };
        let ended = std::thread::scope(|scope| {
            let closing = Closing(&watch);
            let ended = scope.spawn(|| run(&watch, &end));
            stations(at, &watch);
            drop(closing);
            propagate(ended.join())
        });
        ended.map(|()| watch.totals())
    }

    /// Connections that do not begin with the cookie take no place of a flow, and are not counted.
    #[test]
    fn strangers_among_streams() {
        let work = Work { size: 64, ..Work::default() };
        let totals = with_target(work, 1, |at, watch| {
            let cookie = watch.flows.cookie.bytes();
            let connect = |bytes: &[u8]| {
                let mut stream = TcpStream::connect(at).unwrap();
                stream.write_all(bytes).unwrap();
                stream
            };
            let strangers = [&[0x5a; 64][..], &[&cookie[..15], b"x"].concat(), &cookie[..15], b""].map(connect);
            let _flow = connect(&[cookie, &[1; 64]].concat());
            while !watch.have_begun() {
                std::thread::yield_now();
            }
            drop(strangers);
        });
        assert_eq!(totals.unwrap(), [64]);
    }

    /// Datagrams from stations that have not sent the cookie are neither counted nor answered.
    #[test]
    fn strangers_among_datagrams() {
        let work = |answer| Work { proto: Proto::Udp, size: 64, answer, ..Work::default() };
        let socket = || {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let totals = with_target(work(None), 2, |at, watch| {
            let (stranger, flow) = (socket(), socket());
            for (from, bytes) in [
                (&stranger, &[1; 64][..]),
                (&flow, watch.flows.cookie.bytes()),
                (&flow, &[1; 64]),
                (&stranger, &[1; 16]),
            ] {
                from.send_to(bytes, at).unwrap();
            }
            while watch.datagrams()[1] == 0 {
                std::thread::yield_now();
            }
        });
        assert_eq!(totals.unwrap(), [64, 0]);
        with_target(work(Some(1000)), 2, |at, watch| {
            let (stranger, flow, mut buffer) = (socket(), socket(), [0; 1000]);
            let mut awaits = |from: &UdpSocket, bytes: &[u8]| loop {
                from.send_to(bytes, at).unwrap();
                if let Ok(n) = from.recv(&mut buffer) {
                    break buffer[..n].to_vec();
                }
            };
            stranger.send_to(&[7; 64], at).unwrap();
            assert_eq!(awaits(&flow, watch.flows.cookie.bytes()), watch.flows.cookie.bytes());
            let answer = loop {
                let answer = awaits(&flow, &[7; 64]);
                if answer != watch.flows.cookie.bytes() {
                    break answer;
                }
            };
            assert_eq!((answer.len(), &answer[..NUMBER]), (1000, &[7; NUMBER][..]));
            assert!(stranger.recv(&mut buffer).is_err());
        })
        .unwrap();
    }

    /// A source that sends requests and reads no answer: its target ends when the run is closed.
    #[test]
    fn a_source_that_reads_nothing() {
        let work = Work { size: 64, answer: Some(1 << 20), ..Work::default() };
        let cookie = Cookie::random().unwrap();
        let watch = Watch::new(work, Flows { counted: 0, sent: 0, all: 1, are_local: false, cookie }, None, true);
        let (listening, at) = Listening::open(work.proto, SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let end = End { targets: vec![(listening, 1)], routes: Arc::new(Vec::new().into()) };
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| run(&watch, &end));
            let mut source = TcpStream::connect(at).unwrap();
            source.write_all(&[cookie.bytes(), &[0; 64 * 100]].concat()).unwrap();
            // The first answer has begun, so the target writes.
            source.read_exact(&mut [0]).unwrap();
            watch.window.end.set(Instant::now()).unwrap();
            watch.target_open.store(false, Ordering::Release);
            assert!(format!("{:#}", ended.join().unwrap().unwrap_err()).contains("answering a request"));
        });
    }
}
