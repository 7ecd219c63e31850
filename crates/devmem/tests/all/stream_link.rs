//! Two stacks whose streams are in device memory, and a link between them. Everything is on one
//! thread, and the test sets the time, so the same seed gives the same run. The test reads and
//! writes device memory in place of a device, by system calls on the file.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "not every test does everything")]

use crate::memory_common::{Memory, bind, worker};
use netmem_devmem::Binding;
use netmem_devmem::stream::{Bindings, InFlight, OnDevice, StreamRx, StreamTx, Streams};
use netmem_inet::wire::{self, MAX_HEAD, Mac, Network, Transport};
use netmem_inet::{Address, Host, Interface, Stack, StackOptions, Time};
use netmem_netem::{Delivery, Link, LinkOptions, flip};
use netmem_packet::{
    Armed, Checksum, DeviceFrag, DevicePayload, EitherFrame, Gso, Meta, Packet, Reach, Sendable, SplitFrame,
    SplitRxQueue, SplitTxQueue, Sum, TxQueue, Wait,
};
use netmem_pool::{
    Device, DmaDomain, Frag, PAGE_SIZE, PagePool, PeerShared, PoolOptions, RegionOptions, RegionProvider, SharedPool,
    VhostDomain,
};
use rustix::event::{EventfdFlags, eventfd};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// A frame on the link.
#[derive(Clone)]
pub struct OnLink {
    pub bytes: Vec<u8>,
    pub gso: Option<Gso>,
}

/// What a device is like. Tests change it between polls.
pub struct Nic {
    /// Bytes of a frame in host memory; `None`: its headers, and no more.
    pub head: Option<usize>,
    /// The device reports received frames as verified.
    pub verifies: bool,
    /// The device cuts segments; it receives them as they are.
    cuts: bool,
    /// Frames that it has at most.
    pub ring: usize,
    /// It is done with what it has.
    pub completes: bool,
    arrived: VecDeque<OnLink>,
    out: VecDeque<OnLink>,
    /// Frames whose payload was dropped, because there was no page for it.
    pub no_page: u64,
}

type Shared = Rc<RefCell<Nic>>;

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).unwrap()
}

/// Where the headers of a frame end, and whether its transport checksum is right.
fn parse(bytes: &[u8]) -> (usize, bool) {
    let head = &bytes[..bytes.len().min(MAX_HEAD)];
    let Ok((_, Network::Ip(ip))) = wire::parse(head, bytes.len()) else { return (bytes.len(), false) };
    let Ok(transport) = ip.transport(head) else { return (bytes.len(), false) };
    let right = ip.covered(&transport).is_none_or(|covered| {
        let mut sum = Sum::default();
        sum.add(&bytes[covered.range.at..covered.range.end()]);
        covered.holds(sum)
    });
    let end = match transport {
        Transport::Tcp(segment) => segment.payload.at,
        Transport::Udp(datagram) => datagram.payload.at,
        _ => bytes.len(),
    };
    (end, right)
}

pub struct Rx {
    nic: Shared,
    memory: Rc<Memory>,
    pub device: PagePool<Device>,
    host: PagePool<PeerShared>,
    event: OwnedFd,
    /// Called once, in a poll that has a frame, before the frame is taken.
    pub in_poll: Option<Box<dyn FnOnce()>>,
}

impl Rx {
    /// Receives into another binding from now on.
    pub fn attach(&mut self, memory: Rc<Memory>, binding: &Binding) {
        self.device = PoolOptions::new("device").cache(16).build(binding.provider(), None).unwrap();
        self.memory = memory;
    }

    fn frame(&mut self, nic: &mut Nic, frame: OnLink) -> EitherFrame {
        let OnLink { bytes, gso } = frame;
        let (headers, right) = parse(&bytes);
        let head = nic.head.unwrap_or(headers).min(bytes.len());
        let mut page = self.host.alloc().expect("host pages are always there");
        page.copy_from(64, &bytes[..head]).unwrap();
        let front = page.freeze_range(64..64 + head);
        let checksum = if nic.verifies && right { Checksum::Verified } else { Checksum::Unknown };
        let mut payload = DevicePayload::default();
        let wanted = (bytes.len() - head).div_ceil(PAGE_SIZE);
        let mut pages: Vec<_> = (0..wanted).map_while(|_| self.device.alloc()).collect();
        if pages.len() < wanted {
            nic.no_page += 1;
            let lost = (bytes.len() - head) as u32;
            return EitherFrame::Split(SplitFrame::new(front, None, Meta { checksum, gso }).with_lost(lost));
        }
        // Consecutive pages are used if possible.
        pages.sort_unstable_by_key(netmem_pool::Page::index);
        for (part, page) in bytes[head..].chunks(PAGE_SIZE).zip(pages) {
            self.memory.file.write_all_at(part, u64::from(page.index()) * PAGE_SIZE as u64).unwrap();
            payload.push(page.freeze_range(0..part.len())).expect("so many pages");
        }
        EitherFrame::Split(SplitFrame::new(front, payload, Meta { checksum, gso }))
    }
}

impl SplitRxQueue for Rx {
    type Mem = PeerShared;

    fn poll<R>(&mut self, f: impl FnOnce(&mut dyn FnMut(usize, &mut Vec<EitherFrame>) -> usize) -> R) -> R {
        let has_frames = !self.nic.borrow().arrived.is_empty();
        if let Some(call) = self.in_poll.take_if(|_| has_frames) {
            call();
        }
        f(&mut |budget, frames| {
            let shared = self.nic.clone();
            let mut nic = shared.borrow_mut();
            let before = frames.len();
            for _ in 0..budget {
                let Some(frame) = nic.arrived.pop_front() else { break };
                frames.push(self.frame(&mut nic, frame));
            }
            frames.len() - before
        })
    }
}

pub struct Tx {
    nic: Shared,
    memory: Rc<Memory>,
    base: u64,
    held: VecDeque<(Packet<PeerShared>, Vec<InFlight<netmem_refs::PercpuRef>>)>,
    event: OwnedFd,
}

impl Tx {
    fn leave(&mut self, meta: Meta, mut bytes: Vec<u8>) {
        if let Checksum::Partial { start, offset } = meta.checksum {
            let start = usize::from(start);
            let mut sum = Sum::default();
            sum.add(&bytes[start..]);
            let place = start + usize::from(offset);
            bytes[place..place + 2].copy_from_slice(&sum.checksum().to_be_bytes());
        }
        self.nic.borrow_mut().out.push_back(OnLink { bytes, gso: meta.gso });
    }

    /// Fragments of device memory that the device has.
    pub fn in_flight(&self) -> usize {
        self.held.iter().map(|(_, held)| held.len()).sum()
    }
}

impl TxQueue for Tx {
    type Mem = PeerShared;

    fn send(&mut self, packet: Packet<PeerShared>) -> Result<(), Packet<PeerShared>> {
        if self.sendable(&packet) != Sendable::Now {
            return Err(packet);
        }
        self.leave(packet.meta, packet.to_vec());
        self.held.push_back((packet, Vec::new()));
        Ok(())
    }

    fn sendable(&self, _: &Packet<PeerShared>) -> Sendable {
        if self.held.len() < self.nic.borrow().ring { Sendable::Now } else { Sendable::Later }
    }

    fn supports(&self, meta: Meta) -> bool {
        meta.gso.is_none() || self.nic.borrow().cuts
    }

    fn flush(&mut self) {}

    fn complete(&mut self) -> usize {
        if !self.nic.borrow().completes {
            return 0;
        }
        self.held.drain(..).count()
    }

    fn reach(&self, _: &Frag<PeerShared>) -> Reach {
        Reach::Mapped(0)
    }
}

impl SplitTxQueue<InFlight<netmem_refs::PercpuRef>> for Tx {
    fn send_split(
        &mut self,
        head: Packet<PeerShared>,
        payload: &mut Vec<DeviceFrag<InFlight<netmem_refs::PercpuRef>>>,
    ) -> Result<(), Packet<PeerShared>> {
        if self.sendable(&head) != Sendable::Now {
            return Err(head);
        }
        let mut bytes = head.to_vec();
        for frag in payload.iter() {
            let at = bytes.len();
            bytes.resize(at + frag.len as usize, 0);
            self.memory.file.read_exact_at(&mut bytes[at..], frag.dma - self.base).unwrap();
        }
        self.leave(head.meta, bytes);
        self.held.push_back((head, payload.drain(..).map(|frag| frag.holder).collect()));
        Ok(())
    }

    fn sendable_split(
        &self,
        head: &Packet<PeerShared>,
        _: &[DeviceFrag<InFlight<netmem_refs::PercpuRef>>],
    ) -> Sendable {
        self.sendable(head)
    }
}

macro_rules! never_wakes {
    ($($queue:ty),*) => {$(
        impl AsFd for $queue {
            fn as_fd(&self) -> BorrowedFd<'_> {
                self.event.as_fd()
            }
        }

        impl Wait for $queue {
            fn arm(&mut self) -> std::io::Result<Armed> {
                Ok(Armed::Waits)
            }

            fn disarm(&mut self) {}

            fn check(&self) -> std::io::Result<()> {
                Ok(())
            }
        }
    )*};
}

never_wakes!(Rx, Tx);

/// One host.
pub struct Side {
    pub host: Host<OnDevice>,
    pub stack: Stack<StreamRx<Rx>, StreamTx<Tx>>,
    pub streams: Streams,
    pub bindings: Bindings,
    pub binding: Option<Binding>,
    pub memory: Rc<Memory>,
    pub nic: Shared,
}

impl Side {
    /// The host 10.0.0.`number`, with a number of pages of device memory, and the number of them
    /// that users may hold. `cuts`: whether its device cuts segments.
    pub fn new(number: u8, pages: usize, held: u32, cuts: bool) -> Self {
        let address = Address { addr: [10, 0, 0, number].into(), prefix_len: 24 };
        let interface = Interface { mac: Mac([2, 0, 0, 0, 0, number]), mtu: 1500, addresses: vec![address] };
        Self::of(&Host::new(interface), pages, held, cuts)
    }

    /// One more queue of a host, with a stack and a binding of its own.
    pub fn of(host: &Host<OnDevice>, pages: usize, held: u32, cuts: bool) -> Self {
        let (memory, binding) = bind(pages, &worker());
        let memory = Rc::new(memory);
        let table = VhostDomain::new::<PeerShared>(&[]).and_device(binding.region().clone());
        let base = table.regions()[0].bus();
        let domain: Arc<dyn DmaDomain> = Arc::new(table);
        let nic = Rc::new(RefCell::new(Nic {
            head: None,
            verifies: true,
            cuts,
            ring: 256,
            completes: true,
            arrived: VecDeque::new(),
            out: VecDeque::new(),
            no_page: 0,
        }));
        let device = PoolOptions::new("device").cache(16).build(binding.provider(), None).unwrap();
        let heads = RegionProvider::new(RegionOptions::new(2048).huge_pages(false).build::<PeerShared>().unwrap());
        let heads = PoolOptions::new("heads").build(heads, None).unwrap();
        let rx = Rx { nic: nic.clone(), memory: memory.clone(), device, host: heads, event: event(), in_poll: None };
        let tx = Tx { nic: nic.clone(), memory: memory.clone(), base, held: VecDeque::new(), event: event() };
        let bindings = Bindings::new();
        bindings.add(&binding);
        let options = StackOptions { pages: held, ..StackOptions::default() };
        let (rx, tx) = (StreamRx::new(rx, &bindings), StreamTx::new(tx, &domain));
        let mut stack = Stack::new(host, rx, tx, headers(), options, Time::ZERO).unwrap();
        let streams = Streams::new(&mut stack);
        Self { host: host.clone(), stack, streams, bindings, binding: Some(binding), memory, nic }
    }

    /// Writes the bytes that are to be sent into the device's memory.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.memory.file.write_all_at(bytes, offset).unwrap();
    }

    pub fn read(&self, offset: u64, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.memory.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }
}

fn headers() -> Arc<SharedPool<PeerShared>> {
    let region = RegionOptions::new(2048).huge_pages(false).build::<PeerShared>().unwrap();
    Arc::new(PoolOptions::new("headers").build_shared(RegionProvider::new(region), None).unwrap())
}

/// Two hosts, and the link between them.
pub struct Pair {
    pub near: Side,
    pub far: Side,
    /// The far host's other queue, if it has one, which frames are steered to.
    pub other: Option<Side>,
    pub steered: bool,
    links: [Link<OnLink>; 2],
    pub now: Duration,
}

pub const SERVER: ([u8; 4], u16) = ([10, 0, 0, 2], 7);

impl Pair {
    pub fn new(pages: usize, held: u32, link: &str) -> Self {
        Self::with(pages, held, link, false)
    }

    pub fn with(pages: usize, held: u32, link: &str, cuts: bool) -> Self {
        let options: LinkOptions = if link.is_empty() { LinkOptions::default() } else { link.parse().unwrap() };
        let (near, far) = (Side::new(1, pages, held, cuts), Side::new(2, pages, held, cuts));
        Self {
            near,
            far,
            other: None,
            steered: false,
            links: [Link::new(options, 0), Link::new(options, 1)],
            now: Duration::from_secs(1),
        }
    }

    /// Polls both hosts and moves frames once. Returns whether anything happened.
    pub fn turn(&mut self) -> bool {
        let now = Time::ZERO + self.now;
        let mut work = self.near.stack.poll(now) + self.far.stack.poll(now);
        work += self.other.as_mut().map_or(0, |other| other.stack.poll(now));
        let Self { near, far, other, steered, links: [there, back], now } = self;
        let far: &Side = far;
        let queue = if *steered { other.as_ref().unwrap_or(far) } else { far };
        for (from, link, to) in [(&*near, there, queue), (far, back, &*near)] {
            let others = other.as_ref().filter(|_| std::ptr::eq(from, far));
            for side in [from].into_iter().chain(others) {
                for frame in side.nic.borrow_mut().out.drain(..) {
                    let len = frame.bytes.len();
                    link.send(frame, len, *now);
                }
            }
            while let Some(Delivery { mut packet, corrupt }) = link.receive(*now) {
                if let Some(draw) = corrupt {
                    flip(&mut packet.bytes, draw);
                }
                to.nic.borrow_mut().arrived.push_back(packet);
                work += 1;
            }
        }
        work > 0
    }

    /// Advances the time to the next event, at most by a millisecond.
    pub fn step(&mut self) {
        if self.turn() {
            self.now += Duration::from_micros(1);
            return;
        }
        let since = |at: Time| at.since(Time::ZERO);
        let sides = [&self.near, &self.far].into_iter().chain(&self.other);
        let timers = sides.map(|side| side.stack.poll_timeout().map(since));
        let next = timers.chain(self.links.iter().map(Link::deadline)).flatten().min();
        let most = self.now + Duration::from_millis(1);
        self.now = next.map_or(most, |at| at.clamp(self.now + Duration::from_micros(1), most));
    }

    /// Runs until the condition is true.
    #[track_caller]
    pub fn until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        for _ in 0..2_000_000 {
            if done(self) {
                return;
            }
            self.step();
        }
        panic!("it never happened: {:?} {:?}", self.near.stack.stats(), self.far.stack.stats());
    }

    /// Frames from near to far that were lost.
    pub fn lost(&self) -> u64 {
        self.links[0].counts().lost
    }

    pub fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.step();
        }
    }

    /// A connection from near to far.
    #[track_caller]
    pub fn connect(
        &mut self,
        near: &netmem_inet::tcp::Config,
        far: &netmem_inet::tcp::Config,
    ) -> (netmem_devmem::stream::DeviceStream, netmem_devmem::stream::DeviceStream) {
        let server = SocketAddr::from(SERVER);
        let options = netmem_inet::ListenOptions { connection: *far, ..Default::default() };
        let mut listener = self.far.streams.listen(server, options).unwrap();
        let client = self.near.streams.connect(server, near).unwrap();
        let mut accepted = None;
        self.until(|_| {
            accepted = accepted.take().or_else(|| listener.accept().ok());
            accepted.is_some() && client.tcp().is_connected() == Ok(true)
        });
        (client, accepted.unwrap())
    }
}
