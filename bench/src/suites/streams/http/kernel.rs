//! HTTP on the kernel's sockets: an event loop for each end.

use super::super::end::{LOOK, Watch};
use super::super::kernel::listen;
use super::super::net::{ADDRESSES, CONGESTION};
use super::super::run::{Measured, Run};
use super::{CLIENTS, PORT, REQUEST, answer, is_whole, measured};
use anyhow::{Context, ensure};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::sockopt::tcp_congestion;
use rustix::net::{AddressFamily, SocketFlags, SocketType, accept_with, connect, socket_with};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;

/// Events of one `epoll_wait`.
const EVENTS: usize = 64;
/// The number of the listening socket in events.
const LISTENER: u64 = u64::MAX;

/// Measures over a veth.
pub(super) fn run(run: &Run<'_>) -> anyhow::Result<Measured> {
    let ends = run.env.veth(run.link)?;
    let listener = listen(&ends[1], ADDRESSES[1], PORT).map_err(anyhow::Error::msg)?;
    // The connections are made on a thread of this namespace.
    let clients = |watch: &Watch| {
        let inside = ends[0].run(|| Ok(clients(watch)));
        inside.map_err(anyhow::Error::msg)?
    };
    measured(run, |watch| server(&listener, watch), clients)
}

/// A connection, and what was received.
struct Exchange {
    stream: TcpStream,
    received: Vec<u8>,
    /// Whether the request was sent.
    asked: bool,
}

impl Exchange {
    fn new(socket: OwnedFd) -> Self {
        Self { stream: socket.into(), received: Vec::new(), asked: false }
    }

    /// Receives what is there. Returns whether that is the end of the stream.
    fn receive(&mut self) -> anyhow::Result<bool> {
        let mut bytes = [0; 1024];
        match self.stream.read(&mut bytes) {
            Ok(0) => Ok(true),
            Ok(n) => {
                self.received.extend_from_slice(&bytes[..n]);
                Ok(false)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error).context("a socket of the kernel"),
        }
    }

    /// Receives, and answers the request if it is whole. Returns whether it was.
    fn serve(&mut self, answer: &[u8]) -> anyhow::Result<bool> {
        ensure!(!self.receive()?, "a client has closed before it was answered");
        if !is_whole(&self.received)? {
            return Ok(false);
        }
        self.stream.write_all(answer)?;
        Ok(true)
    }

    /// Sends the request when the connection is made, and receives. Returns whether the answer is
    /// complete.
    fn ask(&mut self, events: EventFlags, answer: &[u8]) -> anyhow::Result<bool> {
        if !self.asked && events.contains(EventFlags::OUT) {
            if let Some(error) = self.stream.take_error()? {
                return Err(error).context("connecting over a veth");
            }
            self.stream.write_all(REQUEST)?;
            self.asked = true;
        }
        if !events.contains(EventFlags::IN) {
            return Ok(false);
        }
        // The end often comes with the answer.
        while !self.receive()? {
            if self.received.len() < answer.len() {
                return Ok(false);
            }
            if self.received.len() == answer.len() && !events.contains(EventFlags::RDHUP) {
                return Ok(false);
            }
        }
        ensure!(self.received == answer, "the answer is not the right one");
        Ok(true)
    }
}

/// Checks the congestion control of one of the connections.
fn check(exchange: &Exchange) -> anyhow::Result<()> {
    let congestion = tcp_congestion(&exchange.stream)?;
    ensure!(congestion == CONGESTION, "a socket of the kernel uses {congestion}");
    Ok(())
}

/// Waits for events, for a limited time. Returns how many there are.
fn wait(epoll: &OwnedFd, events: &mut [Event; EVENTS]) -> anyhow::Result<usize> {
    let look = Timespec::try_from(LOOK).context("a time")?;
    match epoll::wait(epoll, &mut events[..], Some(&look)) {
        Err(Errno::INTR) => Ok(0),
        found => Ok(found?),
    }
}

fn no_events() -> [Event; EVENTS] {
    [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; EVENTS]
}

/// Accepts and answers until the run is over.
fn server(listener: &TcpListener, watch: &Watch) -> anyhow::Result<()> {
    listener.set_nonblocking(true)?;
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
    let (answer, mut events) = (answer(), no_events());
    let (mut exchanges, mut free, mut checked) = (Vec::<Option<Exchange>>::new(), Vec::new(), false);
    while !watch.is_over() {
        let found = wait(&epoll, &mut events)?;
        for event in &events[..found] {
            if event.data.u64() != LISTENER {
                let place = event.data.u64() as usize;
                let exchange = &mut exchanges[place];
                if exchange.as_mut().context("an event of no connection")?.serve(&answer)? {
                    *exchange = None;
                    free.push(place);
                }
                continue;
            }
            loop {
                let socket = match accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                    Err(Errno::AGAIN) => break,
                    accepted => accepted?,
                };
                let mut exchange = Exchange::new(socket);
                if !checked {
                    check(&exchange)?;
                    checked = true;
                }
                // The request may be there already.
                if exchange.serve(&answer)? {
                    continue;
                }
                let place = free.pop().unwrap_or_else(|| {
                    exchanges.push(None);
                    exchanges.len() - 1
                });
                epoll::add(&epoll, &exchange.stream, EventData::new_u64(place as u64), EventFlags::IN)?;
                exchanges[place] = Some(exchange);
            }
        }
    }
    Ok(())
}

/// Connects and asks until the run is over. Runs on a thread of the clients' namespace.
fn clients(watch: &Watch) -> anyhow::Result<()> {
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    let (answer, mut events, to) = (answer(), no_events(), SocketAddr::from((ADDRESSES[1], PORT)));
    let open = |place: usize| -> anyhow::Result<Exchange> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
        match connect(&socket, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error).context("connecting over a veth"),
        }
        let wanted = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&epoll, &socket, EventData::new_u64(place as u64), wanted)?;
        Ok(Exchange::new(socket))
    };
    let mut exchanges = (0..CLIENTS).map(open).collect::<anyhow::Result<Vec<_>>>()?;
    exchanges.iter().try_for_each(check)?;
    while !watch.is_over() {
        let (found, mut answered) = (wait(&epoll, &mut events)?, 0);
        for event in &events[..found] {
            let place = event.data.u64() as usize;
            if exchanges[place].ask(event.flags, &answer)? {
                exchanges[place] = open(place)?;
                answered += 1;
            }
        }
        watch.add_responses(answered);
    }
    Ok(())
}
