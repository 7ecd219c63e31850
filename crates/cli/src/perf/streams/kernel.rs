//! The kernel's end: sockets of this process, behind the tap.

use super::plan::Proto;
use super::{CHECK_EVERY, PATIENCE, Watch};
use anyhow::Context;
use netmem_measure::threads::propagate;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Instant;

/// The end: source or target.
#[derive(Debug)]
pub(super) enum End {
    Source(SocketAddr),
    Target(Listening),
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
pub(super) fn run(watch: &Watch, flows: u16, end: End) -> anyhow::Result<()> {
    match end {
        End::Target(Listening::Tcp(listener)) => targets(watch, flows, &listener),
        End::Target(Listening::Udp(socket)) => datagrams(watch, &socket),
        End::Source(to) => std::thread::scope(|scope| {
            let sources: Vec<_> = (0..flows).map(|_| scope.spawn(|| source(watch, to))).collect();
            sources.into_iter().try_for_each(|thread| propagate(thread.join()))
        }),
    }
}

fn targets(watch: &Watch, flows: u16, listener: &TcpListener) -> anyhow::Result<()> {
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        while threads.len() < flows.into() && !watch.is_over() {
            match listener.accept() {
                Ok((stream, _)) => {
                    let flow = threads.len();
                    threads.push(scope.spawn(move || target(watch, flow, stream)));
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::sleep(CHECK_EVERY / 10),
                Err(e) => return Err(e).context("accepting a flow"),
            }
        }
        threads.into_iter().try_for_each(|thread| propagate(thread.join()))
    })
}

fn target(watch: &Watch, flow: usize, mut stream: TcpStream) -> anyhow::Result<()> {
    stream.set_nonblocking(false).context("a flow")?;
    stream.set_read_timeout(Some(CHECK_EVERY)).context("a flow")?;
    let (mut buffer, mut ends) = (vec![0; 256 << 10], None);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => watch.count(flow, n),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
            Err(e) => return Err(e).context("receiving a flow"),
        }
        if watch.is_over() && Instant::now() > *ends.get_or_insert_with(|| Instant::now() + PATIENCE) {
            anyhow::bail!("a flow does not end");
        }
    }
}

fn datagrams(watch: &Watch, socket: &UdpSocket) -> anyhow::Result<()> {
    let (mut buffer, mut flows) = (vec![0; 64 << 10], Vec::new());
    while !watch.is_over() {
        match socket.recv_from(&mut buffer) {
            Ok((n, from)) => {
                let flow = flows.iter().position(|flow| *flow == from).unwrap_or_else(|| {
                    flows.push(from);
                    flows.len() - 1
                });
                watch.count(flow, n);
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
            Err(e) => return Err(e).context("receiving datagrams"),
        }
    }
    Ok(())
}

fn source(watch: &Watch, to: SocketAddr) -> anyhow::Result<()> {
    let message = vec![0x5a; watch.size];
    if watch.proto == Proto::Udp {
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any).context("a socket of the kernel")?;
        while !watch.is_over() {
            match socket.send_to(&message, to) {
                Ok(_) => {}
                // The tap's queue is full, or the target does not listen yet.
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionRefused) => {}
                Err(e) => return Err(e).context("sending datagrams"),
            }
        }
        return Ok(());
    }
    let until = Instant::now() + PATIENCE;
    let mut stream = loop {
        match TcpStream::connect_timeout(&to, PATIENCE) {
            Ok(stream) => break stream,
            // The target does not listen yet.
            Err(_) if Instant::now() < until && !watch.is_over() => std::thread::sleep(CHECK_EVERY),
            Err(e) => return Err(e).context("connecting to the target"),
        }
    };
    stream.set_write_timeout(Some(PATIENCE)).context("a flow")?;
    while !watch.is_over() {
        stream.write_all(&message).context("sending a flow")?;
    }
    stream.shutdown(Shutdown::Write).context("ending a flow")?;
    stream.set_read_timeout(Some(PATIENCE)).context("ending a flow")?;
    stream.read(&mut [0]).context("ending a flow")?;
    Ok(())
}
