//! HTTP on our stack: a thread for each end, which serves its part of the device, too.

use super::super::end::{LOOK, Watch};
use super::super::net::ADDRESSES;
use super::super::rig::{Divided, address};
use super::super::run::{Measured, Program, Run};
use super::{CLIENTS, PORT, REQUEST, answer, is_whole, measured};
use anyhow::{Context as _, ensure};
use netmem::device::Worker;
use netmem::device::port::Cross;
use netmem::pool::{PoolOptions, SharedPool};
use netmem::virtio::{QueuePair, Spin};
use netmem_inet::tcp::Config;
use netmem_inet::wire::Mac;
use netmem_inet::{Fragment, Host, Interface, ListenOptions, SocketError, Stack, StackOptions, TcpStream};
use netmem_measure::endpoint::{self, Clock, Mem, OwnStack};
use std::mem;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// Pages for headers and answers of an end.
const PAGES: usize = 4096;

/// Measures. Returns the negotiated features, too.
pub(super) fn run(run: &Run<'_>) -> anyhow::Result<(Measured, u64)> {
    let Divided { mut workers, net, pairs, connection } =
        Divided::cables(1, 2, run.link, run.env.memory(Program::Stream))?;
    let mut parts = Vec::new();
    for (pair, worker) in pairs.into_iter().zip(&mut workers) {
        parts.push((pair, net.tx_pool(PoolOptions::new("sent").limit(PAGES))?, worker));
    }
    let (Some(second), Some(first)) = (parts.pop(), parts.pop()) else { anyhow::bail!("two queue pairs") };
    let mtu = run.link.mtu;
    let measured =
        measured(run, |watch| End::new(second, 1, mtu)?.serve(watch), |watch| End::new(first, 0, mtu)?.ask(watch));
    let features = net.features();
    drop((net, connection));
    Ok((measured?, features))
}

/// The connections that are ready, by their places.
#[derive(Debug, Default)]
struct Ready(Mutex<Vec<usize>>);

impl Ready {
    fn add(&self, place: usize) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(place);
    }

    /// Exchanges the list for an empty one.
    fn swap(&self, empty: &mut Vec<usize>) {
        mem::swap(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), empty);
    }
}

/// The waker of the connection at a place.
struct Place {
    ready: Arc<Ready>,
    place: usize,
}

impl Wake for Place {
    fn wake(self: Arc<Self>) {
        self.ready.add(self.place);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.add(self.place);
    }
}

/// A connection, and what was received.
struct Exchange {
    stream: TcpStream<Mem>,
    received: Vec<u8>,
    /// Whether the request was sent.
    asked: bool,
}

impl Exchange {
    fn new(stream: TcpStream<Mem>) -> Self {
        Self { stream, received: Vec::new(), asked: false }
    }

    /// Receives what is there. Returns whether that is the end of the stream.
    fn receive(&mut self, cx: &mut Context<'_>) -> anyhow::Result<bool> {
        let mut places = [Fragment::default()];
        loop {
            match self.stream.poll_recv(cx, &mut places) {
                Poll::Pending => return Ok(false),
                Poll::Ready(Ok(0)) => return Ok(true),
                Poll::Ready(Ok(_)) => self.received.extend_from_slice(&mem::take(&mut places[0])),
                Poll::Ready(Err(error)) => return Err(error).context("a connection of netmem"),
            }
        }
    }

    /// Answers the request, if it is whole. Returns whether it was.
    fn serve(&mut self, cx: &mut Context<'_>, answer: &[u8]) -> anyhow::Result<bool> {
        while !is_whole(&self.received)? {
            let before = self.received.len();
            ensure!(!self.receive(cx)?, "a client has closed before it was answered");
            if self.received.len() == before {
                return Ok(false);
            }
        }
        let written = self.stream.write(answer)?;
        ensure!(written == answer.len(), "a send buffer has no room for an answer");
        Ok(true)
    }

    /// Sends the request when the connection is made, and receives. Returns whether the answer is
    /// complete.
    fn ask(&mut self, cx: &mut Context<'_>, answer: &[u8]) -> anyhow::Result<bool> {
        if !self.asked {
            match self.stream.poll_connected(cx) {
                Poll::Pending => return Ok(false),
                Poll::Ready(connected) => connected?,
            }
            ensure!(self.stream.write(REQUEST)? == REQUEST.len(), "a send buffer has no room for a request");
            self.asked = true;
        }
        let ended = self.receive(cx)?;
        ensure!(!ended || self.received == answer, "the answer is not the right one");
        Ok(ended)
    }
}

/// One end. The streams are dropped before the stack.
struct End<'d> {
    exchanges: Vec<Option<Exchange>>,
    wakers: Vec<Waker>,
    ready: Arc<Ready>,
    /// The list that was exchanged last, for the next one.
    list: Vec<usize>,
    stack: OwnStack,
    clock: Clock,
    worker: &'d mut Worker<Cross>,
}

impl<'d> End<'d> {
    fn new(
        (pair, pool, worker): (QueuePair<Mem>, SharedPool<Mem>, &'d mut Worker<Cross>),
        end: usize,
        mtu: u16,
    ) -> anyhow::Result<Self> {
        let addresses = vec![address(end)];
        let interface = Interface { mac: Mac(endpoint::mac(&addresses)), mtu, addresses };
        let clock = Clock::start();
        let options = StackOptions::default();
        let stack = Stack::new(&Host::new(interface), pair.rx, pair.tx, Arc::new(pool), options, clock.now())?;
        let (exchanges, wakers, ready, list) = Default::default();
        Ok(Self { exchanges, wakers, ready, list, stack, clock, worker })
    }

    /// Puts a connection into a place, which is a new one or that of a connection that has ended.
    fn put(&mut self, place: usize, stream: TcpStream<Mem>) {
        if place == self.exchanges.len() {
            self.exchanges.push(None);
            self.wakers.push(Arc::new(Place { ready: Arc::clone(&self.ready), place }).into());
        }
        self.exchanges[place] = Some(Exchange::new(stream));
        self.ready.add(place);
    }

    /// Calls `work` for each connection that is ready, until it has ended. Returns how many calls
    /// there were, and adds the places of those that have ended to `ended`.
    fn each_ready(
        &mut self,
        ended: &mut Vec<usize>,
        mut work: impl FnMut(&mut Exchange, &mut Context<'_>) -> anyhow::Result<bool>,
    ) -> anyhow::Result<usize> {
        self.list.clear();
        self.ready.swap(&mut self.list);
        for &place in &self.list {
            // A connection that was woken twice may have ended.
            let Some(exchange) = &mut self.exchanges[place] else { continue };
            if work(exchange, &mut Context::from_waker(&self.wakers[place]))? {
                self.exchanges[place] = None;
                ended.push(place);
            }
        }
        Ok(self.list.len())
    }

    /// Accepts and answers until the run is over.
    fn serve(mut self, watch: &Watch) -> anyhow::Result<()> {
        let at = SocketAddr::new(address(1).addr, PORT);
        // As `netmem serve http` does: the answer acknowledges the request.
        let options =
            ListenOptions { connection: Config { quick_acks: 0, ..Config::default() }, ..ListenOptions::default() };
        let mut listener = self.stack.sockets().listen(at, options)?;
        let (answer, mut free) = (answer(), Vec::new());
        while !watch.is_over() {
            let mut work = self.worker.poll() + self.stack.poll(self.clock.now());
            loop {
                match listener.accept() {
                    Ok(stream) => self.put(free.pop().unwrap_or(self.exchanges.len()), stream),
                    Err(SocketError::WouldBlock) => break,
                    Err(error) => return Err(error.into()),
                }
                work += 1;
            }
            work += self.each_ready(&mut free, |exchange, cx| exchange.serve(cx, &answer))?;
            self.rest(work)?;
        }
        Ok(())
    }

    /// Connects and asks until the run is over.
    fn ask(mut self, watch: &Watch) -> anyhow::Result<()> {
        let (to, config) = (SocketAddr::from((ADDRESSES[1], PORT)), Config::default());
        let (answer, mut free) = (answer(), (0..CLIENTS).rev().collect::<Vec<_>>());
        while !watch.is_over() {
            while let Some(place) = free.pop() {
                let stream = self.stack.sockets().connect(to, &config)?;
                self.put(place, stream);
            }
            let mut work = self.worker.poll() + self.stack.poll(self.clock.now());
            work += self.each_ready(&mut free, |exchange, cx| exchange.ask(cx, &answer))?;
            watch.add_responses(free.len());
            self.rest(work)?;
        }
        Ok(())
    }

    /// Sends what was written, or sleeps if there was no work.
    fn rest(&mut self, work: usize) -> anyhow::Result<()> {
        if work > 0 {
            self.stack.poll(self.clock.now());
        }
        let sleep = self.stack.poll_timeout().map_or(LOOK, |at| at.since(self.clock.now()).min(LOOK));
        self.worker.turn(work, Spin::NONE, &mut [&mut self.stack], Some(sleep))?;
        Ok(())
    }
}
