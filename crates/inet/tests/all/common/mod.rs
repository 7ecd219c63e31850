//! A queue pair in memory, and hosts that are connected by a simulated cable.
#![allow(dead_code, reason = "each program uses a part of it")]
#![allow(unreachable_pub, clippy::unwrap_used, reason = "test")]

pub mod peer;

use netmem_inet::tcp::Config;
use netmem_inet::wire::Mac;
use netmem_inet::{Address, Host, Interface, ListenOptions, Stack, StackOptions, TcpStream, Time};
use netmem_packet::{
    Armed, Checksum, Handler, HeaderSlots, Meta, Packet, Poll, Reach, RxQueue, Sendable, SlotFrame, TxQueue, Verdict,
    Wait, XdpFrame,
};
use netmem_pool::{Frag, Napi, PAGE_SIZE, PagePool, PoolOptions, Private, RegionOptions, RegionProvider, SharedPool};
use rustix::event::{EventfdFlags, eventfd};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// A frame on the cable.
#[derive(Clone)]
pub struct Frame {
    pub bytes: Vec<u8>,
    pub meta: Meta,
}

/// One direction of the cable.
pub type Cable = Rc<RefCell<VecDeque<Frame>>>;

pub struct MemRx {
    pub cable: Cable,
    pub pool: PagePool<Private>,
    event: OwnedFd,
    /// The number of frames for which there was no page.
    pub starved: u64,
    /// Whether the queue reports that it has too few buffers.
    pub short: bool,
    /// The kind of error with which the queue has stopped.
    pub stopped: Option<io::ErrorKind>,
}

pub struct MemPoll<'a> {
    cable: &'a Cable,
    napi: Napi<'a, Private>,
    starved: &'a mut u64,
    short: bool,
}

impl RxQueue for MemRx {
    type Mem = Private;
    type Poll<'a> = MemPoll<'a>;

    fn poll<R>(&mut self, f: impl FnOnce(&mut MemPoll<'_>) -> R) -> R {
        let Self { cable, pool, starved, short, .. } = self;
        pool.poll(|napi| f(&mut MemPoll { cable, napi: napi.reborrow(), starved, short: *short }))
    }
}

impl Poll for MemPoll<'_> {
    type Mem = Private;

    fn receive<H: Handler<Private>>(&mut self, budget: usize, handler: &mut H) -> usize {
        let mut frames = 0;
        while frames < budget {
            let Some(frame) = self.cable.borrow_mut().pop_front() else { break };
            frames += 1;
            let (head, rest) = frame.bytes.split_at(frame.bytes.len().min(PAGE_SIZE));
            let Some(mut page) = self.napi.alloc() else {
                *self.starved += 1;
                continue;
            };
            page[..head.len()].copy_from_slice(head);
            let mut xdp = XdpFrame::new(page, 0, head.len());
            for part in rest.chunks(PAGE_SIZE) {
                let mut page = self.napi.alloc().unwrap();
                page[..part.len()].copy_from_slice(part);
                xdp.push(page.freeze_range(0..part.len())).unwrap();
            }
            xdp.meta = frame.meta;
            if handler.run(&mut xdp) == Verdict::Pass {
                handler.pass(xdp.into_packet());
            }
        }
        handler.flush();
        frames
    }

    fn is_short(&self) -> bool {
        self.short
    }

    fn with_napi<R>(&mut self, f: impl FnOnce(&mut Napi<'_, Private>) -> R) -> R {
        f(&mut self.napi)
    }
}

/// A function that decides which frames are lost.
pub type Loses = Box<dyn FnMut(&[u8]) -> bool>;

/// A frame in the device's ring.
struct Posted {
    /// The slot of its headers, and what is there.
    headers: Option<(u16, Vec<u8>)>,
    /// `None` if all of the frame is in its slot.
    packet: Option<Packet<Private>>,
    meta: Meta,
}

pub struct MemTx {
    pub cable: Cable,
    ring: VecDeque<Posted>,
    /// Whether the queue accepts frames at all, and whether it copies them.
    pub accepts: bool,
    pub copies: bool,
    /// So many packets are refused next, as if they could not be mapped for the device.
    pub refusals: usize,
    /// The slots for headers, if the queue has any, and which of them are free.
    pub slots: Option<HeaderSlots>,
    free: Vec<u16>,
    sent: usize,
    pub size: usize,
    /// Whether the device computes checksums and cuts segments. It simulates this by passing them
    /// on.
    pub offloads: bool,
    /// Whether the device also cuts segments with congestion marks.
    pub ecn: bool,
    /// Whether the device is done with packets at the next completion.
    pub completes: Rc<RefCell<bool>>,
    /// The function that decides which frames are lost.
    pub loses: Loses,
    /// A descriptor that becomes readable when the device has finished packets.
    pub event: OwnedFd,
    /// The kind of error with which the queue has stopped.
    pub stopped: Option<io::ErrorKind>,
}

impl TxQueue for MemTx {
    type Mem = Private;

    fn send(&mut self, packet: Packet<Private>) -> Result<(), Packet<Private>> {
        if self.refuses(&packet) {
            return Err(packet);
        }
        self.ring.push_back(Posted { headers: None, meta: packet.meta, packet: Some(packet) });
        Ok(())
    }

    fn header_slots(&self) -> Option<&HeaderSlots> {
        self.slots.as_ref()
    }

    fn send_behind(&mut self, headers: &[u8], packet: Packet<Private>) -> Result<SlotFrame, Packet<Private>> {
        assert!(headers.len() <= HeaderSlots::ROOM);
        if self.refuses(&packet) {
            return Err(packet);
        }
        let slot = self.free.pop().unwrap();
        let headers = Some((slot, headers.to_vec()));
        self.ring.push_back(Posted { headers, meta: packet.meta, packet: Some(packet) });
        Ok(self.slots.as_mut().unwrap().post(slot))
    }

    fn send_copied(&mut self, frame: &[u8], meta: Meta) -> Result<SlotFrame, Sendable> {
        assert!(frame.len() <= HeaderSlots::ROOM);
        match self.ring.len() == self.size {
            _ if !self.supports(meta) || self.slots.is_none() || !self.accepts || !self.copies => {
                return Err(Sendable::Never);
            }
            true => return Err(Sendable::Later),
            false => {}
        }
        let slot = self.free.pop().unwrap();
        self.ring.push_back(Posted { headers: Some((slot, frame.to_vec())), packet: None, meta });
        Ok(self.slots.as_mut().unwrap().post(slot))
    }

    fn sendable(&self, packet: &Packet<Private>) -> Sendable {
        match self.ring.len() == self.size {
            _ if !self.supports(packet.meta) || !self.accepts => Sendable::Never,
            true => Sendable::Later,
            false => Sendable::Now,
        }
    }

    fn supports(&self, meta: Meta) -> bool {
        let marked = meta.gso.is_some_and(|gso| gso.ecn);
        self.offloads && (self.ecn || !marked)
            || meta.gso.is_none() && !matches!(meta.checksum, Checksum::Partial { .. })
    }

    fn flush(&mut self) {
        while let Some(Posted { headers, packet, meta }) = self.ring.get(self.sent) {
            let mut bytes = headers.as_ref().map_or_else(Vec::new, |(_, headers)| headers.clone());
            bytes.extend(packet.iter().flat_map(Packet::to_vec));
            let frame = Frame { bytes, meta: *meta };
            // A device without offloads reports nothing about checksums on the other side.
            let meta = if self.offloads { frame.meta } else { Meta::default() };
            if !(self.loses)(&frame.bytes) {
                self.cable.borrow_mut().push_back(Frame { meta, ..frame });
            }
            self.sent += 1;
        }
    }

    fn complete(&mut self) -> usize {
        if !*self.completes.borrow() {
            return 0;
        }
        let done = std::mem::take(&mut self.sent);
        for slot in self.ring.drain(..done).filter_map(|posted| posted.headers).map(|(slot, _)| slot) {
            self.slots.as_mut().unwrap().complete(slot);
            self.free.push(slot);
        }
        done
    }

    fn reach(&self, _: &Frag<Private>) -> Reach {
        Reach::Mapped(0)
    }
}

impl MemTx {
    fn refuses(&mut self, packet: &Packet<Private>) -> bool {
        let refuses = self.refusals > 0;
        self.refusals -= usize::from(refuses);
        refuses || self.sendable(packet) != Sendable::Now
    }
}

macro_rules! waits {
    ($queue:ty) => {
        impl AsFd for $queue {
            fn as_fd(&self) -> BorrowedFd<'_> {
                self.event.as_fd()
            }
        }

        impl Wait for $queue {
            fn arm(&mut self) -> io::Result<Armed> {
                self.check().map(|()| Armed::Waits)
            }
            fn disarm(&mut self) {}
            fn check(&self) -> io::Result<()> {
                self.stopped.map_or(Ok(()), |kind| Err(kind.into()))
            }
        }
    };
}
waits!(MemRx);
waits!(MemTx);

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).unwrap()
}

fn provider(pages: usize) -> Arc<RegionProvider<Private>> {
    RegionProvider::new(RegionOptions::new(pages).huge_pages(false).build::<Private>().unwrap())
}

pub fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

pub fn host(number: u8) -> Host<Private> {
    let addresses = vec![
        Address { addr: IpAddr::from([10, 0, 0, number]), prefix_len: 24 },
        Address { addr: IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, number.into()]), prefix_len: 64 },
    ];
    Host::new(Interface { mac: Mac([2, 0, 0, 0, 0, number]), mtu: 1500, addresses })
}

/// A queue pair that receives from one direction and sends into the other.
pub fn pair(from: &Cable, to: &Cable, offloads: bool) -> (MemRx, MemTx) {
    let pool = PoolOptions::new("rx").build(provider(1024), None).unwrap();
    let rx = MemRx { cable: from.clone(), pool, event: event(), starved: 0, short: false, stopped: None };
    let tx = MemTx {
        cable: to.clone(),
        ring: VecDeque::new(),
        accepts: true,
        copies: true,
        refusals: 0,
        slots: Some(HeaderSlots::new(1024)),
        free: (0..1024).collect(),
        sent: 0,
        size: 256,
        offloads,
        ecn: true,
        completes: Rc::new(RefCell::new(true)),
        loses: Box::new(|_| false),
        event: event(),
        stopped: None,
    };
    (rx, tx)
}

pub fn pool() -> Arc<SharedPool<Private>> {
    pool_of(2048)
}

fn pool_of(pages: usize) -> Arc<SharedPool<Private>> {
    Arc::new(PoolOptions::new("tx").build_shared(provider(pages), None).unwrap())
}

pub fn stack(host: &Host<Private>, (rx, tx): (MemRx, MemTx), options: StackOptions) -> Stack<MemRx, MemTx> {
    Stack::new(host, rx, tx, pool(), options, Time::ZERO).unwrap()
}

/// Two hosts, 10.0.0.1 and 10.0.0.2, and the current time.
pub struct Link {
    pub near: Stack<MemRx, MemTx>,
    pub far: Stack<MemRx, MemTx>,
    pub now: Time,
    pub hosts: [Host<Private>; 2],
    /// The pool from which the near host sends.
    pub near_pool: Arc<SharedPool<Private>>,
}

impl Link {
    pub fn new(offloads: bool) -> Self {
        Self::with(offloads, StackOptions::default())
    }

    pub fn with(offloads: bool, options: StackOptions) -> Self {
        Self::sending_from(pool(), offloads, options)
    }

    /// The near host sends from a pool of so many pages.
    pub fn with_pages(pages: usize) -> Self {
        Self::sending_from(pool_of(pages), false, StackOptions::default())
    }

    fn sending_from(near_pool: Arc<SharedPool<Private>>, offloads: bool, options: StackOptions) -> Self {
        let (there, back) = (Cable::default(), Cable::default());
        let (rx, tx) = pair(&back, &there, offloads);
        let hosts = [host(1), host(2)];
        let near = Stack::new(&hosts[0], rx, tx, near_pool.clone(), options, Time::ZERO).unwrap();
        let far = stack(&hosts[1], pair(&there, &back, offloads), options);
        Self { near, far, now: Time::from_micros(1_000_000), hosts, near_pool }
    }

    /// Polls both hosts until neither has work.
    pub fn settle(&mut self) {
        for _ in 0..10_000 {
            self.now += Duration::from_micros(1);
            let work = self.near.poll(self.now) + self.far.poll(self.now);
            let due = [&self.near, &self.far].iter().any(|s| s.poll_timeout().is_some_and(|at| at <= self.now));
            if work == 0 && !due {
                return;
            }
        }
        panic!("the stacks do not settle: {:?} {:?}", self.near.stats(), self.far.stats());
    }

    /// Advances the time to the next timer of either host, and settles.
    pub fn step(&mut self) -> bool {
        let next = [self.near.poll_timeout(), self.far.poll_timeout()].into_iter().flatten().min();
        let Some(next) = next else { return false };
        self.now = self.now.max(next);
        self.settle();
        true
    }

    /// Advances the time by `time`.
    pub fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while [self.near.poll_timeout(), self.far.poll_timeout()].into_iter().flatten().min().is_some_and(|t| t < end) {
            self.step();
        }
        self.now = self.now.max(end);
        self.settle();
    }
}

/// Sends the fragments of a datagram from the near host to the far one. Each fragment has `cut`
/// bytes of the UDP datagram.
pub fn fragments(link: &mut Link, id: u16, port: u16, payload: &[u8], cut: usize) {
    let mut whole = Vec::new();
    let udp = etherparse::PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(7, port);
    udp.write(&mut whole, payload).unwrap();
    let content = &whole[20..];
    for (n, part) in content.chunks(cut).enumerate() {
        let at = n * cut;
        let ip = etherparse::Ipv4Header {
            identification: id,
            more_fragments: at + part.len() < content.len(),
            fragment_offset: etherparse::IpFragOffset::try_new((at / 8) as u16).unwrap(),
            ..etherparse::Ipv4Header::new(
                part.len() as u16,
                64,
                etherparse::ip_number::UDP,
                [10, 0, 0, 1],
                [10, 0, 0, 2],
            )
            .unwrap()
        };
        let mut header = ip;
        header.header_checksum = header.calc_header_checksum();
        let ethernet = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        let bytes = [&ethernet[..], &header.to_bytes(), part].concat();
        let meta = netmem_packet::Meta::default();
        link.far.queues().0.cable.borrow_mut().push_back(Frame { bytes, meta });
    }
}

/// A pair of connected streams: the near host's end and the far host's end.
pub fn connected(link: &mut Link) -> (TcpStream<Private>, TcpStream<Private>) {
    let mut listener = link.far.sockets().listen(addr("10.0.0.2:80"), ListenOptions::default()).unwrap();
    let client = link.near.sockets().connect(addr("10.0.0.2:80"), &Config::default()).unwrap();
    link.settle();
    (client, listener.accept().unwrap())
}
