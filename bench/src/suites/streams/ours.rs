//! An end on our stack.

use super::end::{End, Idle, LOOK};
use super::memory::{self, Memory, SPARE};
use super::rig::{Link, address};
use anyhow::Context;
use netmem::device::NetDevice;
use netmem::device::port::Port;
use netmem::net::PollThenSleep;
use netmem::pool::{Frag, PoolOptions, SharedPool};
use netmem::virtio::{QueuePair, VirtioNet};
use netmem_inet::tcp::Config;
use netmem_inet::wire::Mac;
use netmem_inet::{Fragment, Host, Interface, ListenOptions, SocketError, Stack, StackOptions, TcpListener, TcpStream};
use netmem_measure::endpoint::{self, Clock, OwnStack};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Fragments that are received at once.
const FRAGMENTS: usize = 64;

/// The parts of a stack, which are moved to its thread.
pub(super) struct Parts<P> {
    pub(super) pair: QueuePair<endpoint::Mem>,
    pub(super) headers: SharedPool<endpoint::Mem>,
    pub(super) own: SharedPool<endpoint::Mem>,
    /// Which end it is.
    pub(super) end: usize,
    pub(super) link: Link,
    pub(super) idle: Idle,
    /// How long the stack polls before it sleeps.
    pub(super) spin: Duration,
    /// The device, if this thread is to poll it.
    pub(super) device: Option<NetDevice<P>>,
}

impl<P> Parts<P> {
    pub(super) fn new(
        net: &VirtioNet<endpoint::Mem>,
        pair: QueuePair<endpoint::Mem>,
        end: usize,
        link: Link,
        idle: Idle,
        memory: &Memory,
    ) -> anyhow::Result<Self> {
        let headers = net.tx_pool(PoolOptions::new("headers").limit(SPARE / 4))?;
        let own = net.tx_pool(PoolOptions::new("source").limit(memory.pages()))?;
        Ok(Self { pair, headers, own, end, link, idle, spin: Duration::ZERO, device: None })
    }
}

/// One end. The fields are dropped in their order: those that hold pages come first.
pub(super) struct Ours<P> {
    stream: Option<TcpStream<endpoint::Mem>>,
    listener: Option<TcpListener<endpoint::Mem>>,
    places: [Fragment<endpoint::Mem>; FRAGMENTS],
    /// The last received fragments, the oldest first.
    held: VecDeque<Fragment<endpoint::Mem>>,
    /// Pages to send from. The page that was sent the longest ago is first.
    pages: VecDeque<Frag<endpoint::Mem>>,
    /// A page that was written and not sent yet.
    written: Option<Frag<endpoint::Mem>>,
    stack: OwnStack,
    clock: Clock,
    pause: PollThenSleep,
    idle: Idle,
    device: Option<NetDevice<P>>,
    own: SharedPool<endpoint::Mem>,
    /// Pages of each working set, and those that the receiver keeps.
    limit: usize,
    kept: usize,
}

impl<P: Port> Ours<P> {
    fn new(parts: Parts<P>, memory: &Memory) -> anyhow::Result<Self> {
        let Parts { pair, headers, own, end, link, idle, spin, device } = parts;
        let addresses = vec![address(end)];
        let interface = Interface { mac: Mac(endpoint::mac(&addresses)), mtu: link.mtu, addresses };
        // A connection that is alone promises its peer a quarter of the stack's pages, less those
        // that are kept for others (`tcp::Budget`). The sink holds all of `limit`: with fewer
        // pages, its window would close and never open.
        let pages = 5 * u32::try_from(memory.pages() + SPARE / 2)?;
        let options = StackOptions { pages, ..StackOptions::default() };
        let clock = Clock::start();
        let stack = Stack::new(&Host::new(interface), pair.rx, pair.tx, Arc::new(headers), options, clock.now())?;
        Ok(Self {
            stream: None,
            listener: None,
            places: std::array::from_fn(|_| Fragment::default()),
            held: VecDeque::new(),
            pages: VecDeque::new(),
            written: None,
            stack,
            clock,
            pause: PollThenSleep::new(spin),
            idle,
            device,
            own,
            limit: memory.pages(),
            kept: memory.kept(),
        })
    }

    fn config(&self) -> anyhow::Result<Config> {
        let mut config = Config { budget: u32::try_from(self.limit + SPARE / 2)?, ..Config::default() };
        config.send.nodelay = true;
        Ok(config)
    }

    /// An end that listens. `ready` is called when it does.
    pub(super) fn listen(parts: Parts<P>, memory: &Memory, port: u16, ready: impl FnOnce()) -> anyhow::Result<Self> {
        let at = SocketAddr::new(address(parts.end).addr, port);
        let mut end = Self::new(parts, memory)?;
        let options = ListenOptions { connection: end.config()?, ..ListenOptions::default() };
        end.listener = Some(end.stack.sockets().listen(at, options)?);
        ready();
        Ok(end)
    }

    /// An end that connects.
    pub(super) fn connect(parts: Parts<P>, memory: &Memory, to: SocketAddr) -> anyhow::Result<Self> {
        let mut end = Self::new(parts, memory)?;
        let config = end.config()?;
        end.stream = Some(end.stack.sockets().connect(to, &config)?);
        Ok(end)
    }

    /// Makes the pages to send from.
    pub(super) fn with_source(mut self) -> anyhow::Result<Self> {
        for _ in 0..self.limit {
            self.pages.push_back(self.own.alloc().context("a page to send from")?.freeze());
        }
        Ok(self)
    }

    fn stream(&mut self) -> Option<&mut TcpStream<endpoint::Mem>> {
        if let Some(listener) = &mut self.listener
            && self.stream.is_none()
        {
            self.stream = listener.accept().ok();
            if let Some(stream) = &mut self.stream {
                stream.set_nodelay(true);
            }
        }
        self.stream.as_mut()
    }
}

/// The number of bytes; 0 if the call would block; `None` at the end.
fn moved(result: Result<usize, SocketError>) -> anyhow::Result<Option<usize>> {
    match result {
        Ok(0) => Ok(None),
        Ok(n) => Ok(Some(n)),
        Err(SocketError::WouldBlock) => Ok(Some(0)),
        Err(e) => Err(e).context("a socket of netmem"),
    }
}

impl<P: Port> End for Ours<P> {
    fn produce(&mut self) -> anyhow::Result<usize> {
        let mut sent = 0;
        if self.stream().is_none() {
            return Ok(0);
        }
        while sent < memory::PIECE {
            if self.written.is_none() {
                let Some(oldest) = self.pages.pop_front() else { break };
                match oldest.try_into_page() {
                    Ok(mut page) => {
                        memory::write(page.as_mut_slice());
                        self.written = Some(page.freeze());
                    }
                    // The oldest page was not acknowledged yet.
                    Err(oldest) => {
                        self.pages.push_front(oldest);
                        break;
                    }
                }
            }
            let (Some(page), Some(stream)) = (self.written.take(), self.stream.as_mut()) else { break };
            match stream.send(page.slice(0..page.len()), true) {
                Ok(()) => {
                    sent += page.len();
                    self.pages.push_back(page);
                }
                Err((SocketError::WouldBlock, _)) => {
                    self.written = Some(page);
                    break;
                }
                Err((e, _)) => return Err(e).context("a socket of netmem"),
            }
        }
        Ok(sent)
    }

    fn consume(&mut self) -> anyhow::Result<Option<usize>> {
        if self.stream().is_none() {
            return Ok(Some(0));
        }
        let Self { stream: Some(stream), places, held, .. } = self else { return Ok(Some(0)) };
        let filled = match moved(stream.recv(places))? {
            Some(filled) => filled,
            None => return Ok(None),
        };
        let mut received = 0;
        for place in &mut places[..filled] {
            let fragment = std::mem::take(place);
            memory::read(&fragment);
            received += fragment.len();
            held.push_back(fragment);
        }
        while held.len() > self.kept {
            held.pop_front();
        }
        Ok(Some(received))
    }

    fn write(&mut self, bytes: &[u8]) -> anyhow::Result<usize> {
        let Some(stream) = self.stream() else { return Ok(0) };
        Ok(moved(stream.write(bytes))?.unwrap_or(0))
    }

    fn read(&mut self, into: &mut [u8]) -> anyhow::Result<Option<usize>> {
        let Some(stream) = self.stream() else { return Ok(Some(0)) };
        moved(stream.read(into))
    }

    fn turn(&mut self, worked: bool) -> anyhow::Result<()> {
        let mut work = usize::from(worked);
        work += self.device.as_mut().map_or(0, NetDevice::poll);
        work += self.stack.poll(self.clock.now());
        if let Some(device) = &mut self.device {
            // The device sends what the stack has just queued.
            work += device.poll();
        }
        if work > 0 || self.idle == Idle::Polls {
            return Ok(());
        }
        let sleep = self.stack.poll_timeout().map_or(LOOK, |at| at.since(self.clock.now()).min(LOOK));
        self.pause.turn(work, &mut [&mut self.stack], Some(sleep))?;
        Ok(())
    }
}
