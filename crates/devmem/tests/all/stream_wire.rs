//! A stack whose streams are in device memory, on a device that the test polls, and a peer that the
//! test simulates frame by frame. The test also sets the time.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "not every test does everything")]

use crate::memory_common::{Memory, worker};
use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
use netmem_devmem::stream::{Bindings, InFlight, OnDevice, StreamRx, StreamTx, Streams};
use netmem_devmem::{Binding, Netdev};
use netmem_inet::wire::Mac;
use netmem_inet::{Address, Host, Interface, Stack, StackOptions, Time};
use netmem_pool::{PeerShared, PoolOptions, SharedPool};
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::{ALL_OFFLOADS, Port};
use netmem_virtio::device::{Connection, NetDevice, Options};
use netmem_virtio::driver::{NetOptions, QueueWait, RxMode, VirtioNet, VirtioRxQueues, VirtioSplitTx};
use netmem_virtio::net::VnetHdr;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub type OurStack = Stack<StreamRx<QueueWait>, StreamTx<VirtioSplitTx<InFlight>>>;

const OURS: ([u8; 6], [u8; 4]) = ([2, 0, 0, 0, 0, 2], [10, 79, 0, 2]);
const PEER: ([u8; 6], [u8; 4]) = ([2, 0, 0, 0, 0, 1], [10, 79, 0, 1]);
/// The port that our side listens on.
pub const LISTEN: u16 = 7;

/// Where our side connects to.
pub fn remote() -> SocketAddr {
    (PEER.1, 6001).into()
}

/// Frames towards the driver, and from it, each with its virtio header.
#[derive(Default)]
struct Frames {
    to: VecDeque<Vec<u8>>,
    from: VecDeque<Vec<u8>>,
}

/// The device's port. Clones are on the same wire.
#[derive(Clone, Default)]
pub struct Wire {
    frames: Arc<Mutex<Frames>>,
    shown: Option<Vec<u8>>,
}

impl Wire {
    fn lock(&self) -> MutexGuard<'_, Frames> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device at this wire, and the driver's end of its connection.
    fn device(&self) -> ((NetDevice<Self>, Connection), VhostUser) {
        let device = NetDevice::new(Options::default(), |_| Ok(self.clone())).expect("a device");
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let connection = device.control().serve(theirs).expect("a connection");
        ((device, connection), VhostUser::own_device(ours).expect("the device answers"))
    }
}

impl Port for Wire {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS;

    fn peek(&mut self) -> Option<&[u8]> {
        if self.shown.is_none() {
            let next = self.lock().to.pop_front();
            self.shown = next;
        }
        self.shown.as_deref()
    }

    fn consume(&mut self) {
        self.shown = None;
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        self.lock().from.push_back(wire.to_vec());
        true
    }
}

/// A segment of ours, as the peer sees it.
#[derive(Clone, Debug)]
pub struct Segment {
    pub port: u16,
    pub seq: u32,
    pub ack: u32,
    pub syn: bool,
    pub fin: bool,
    pub rst: bool,
    pub window: u16,
    pub payload: Vec<u8>,
}

/// All objects of a test. They can be dropped in any order.
pub struct Rig {
    pub memory: Memory,
    pub binding: Option<Binding>,
    pub stack: Option<OurStack>,
    pub streams: Option<Streams>,
    pub bindings: Bindings,
    pub net: Option<Netdev<VirtioRxQueues>>,
    pub driver: Option<(VirtioNet, Arc<SharedPool<PeerShared>>)>,
    pub device: Option<(NetDevice<Wire>, Connection)>,
    pub wire: Wire,
    pub now: Time,
}

impl Rig {
    /// `pages` of device memory, of which users may hold `held`.
    pub fn new(pages: usize, held: u32) -> Self {
        Self::with(RxMode::Small, pages, held)
    }

    /// The same, in a mode of receive buffers. In big-packet mode, a buffer is a chain of a host
    /// part and 16 pages, and large segments go both ways.
    pub fn with(mode: RxMode, pages: usize, held: u32) -> Self {
        let (worker, memory, wire) = (worker(), Memory::pages(pages), Wire::default());
        let binding = Binding::new(memory.fd(), 0, &worker).expect("it can be bound");
        let (device, backend) = wire.device();
        let options = NetOptions::new(mode).tx_pages(512).device_memory(binding.region().clone());
        let (driver, mut pairs) = VirtioNet::probe(backend, options).expect("a driver");
        let pair = pairs.remove(0);
        let queues = VirtioRxQueues::new([pair.rx]).cache(16);
        let bindings = Bindings::new();
        bindings.add(&binding);
        let rx = StreamRx::new(queues.wait(0).expect("there is one"), &bindings);
        let mut net = Netdev::new(queues);
        net.attach(&binding, &[0]).expect("it is free");
        let tx = StreamTx::new(pair.tx.into_split(), driver.domain().expect("it has one"));
        let headers = Arc::new(driver.tx_pool(PoolOptions::new("headers")).expect("a pool"));
        let addresses = vec![Address { addr: OURS.1.into(), prefix_len: 24 }];
        let host = Host::<OnDevice>::new(Interface { mac: Mac(OURS.0), mtu: 1500, addresses });
        let options = StackOptions { pages: held, ..StackOptions::default() };
        let now = Time::from_micros(1_000_000);
        let mut stack = Stack::new(&host, rx, tx, headers.clone(), options, now).expect("a stack");
        let streams = Streams::new(&mut stack);
        Self {
            memory,
            binding: Some(binding),
            stack: Some(stack),
            streams: Some(streams),
            bindings,
            net: Some(net),
            driver: Some((driver, headers)),
            device: Some(device),
            wire,
            now,
        }
    }

    /// The stack and the device are polled until both have nothing to do. Returns the segments that
    /// left.
    pub fn settle(&mut self) -> Vec<Segment> {
        let mut segments = Vec::new();
        for _ in 0..10_000 {
            self.now += Duration::from_micros(1);
            let mut work = 0;
            if let Some((device, _)) = &mut self.device {
                work += device.poll();
            }
            work += self.stack.as_mut().map_or(0, |stack| stack.poll(self.now));
            let from: Vec<_> = self.wire.lock().from.drain(..).collect();
            let quiet = work == 0 && from.is_empty() && self.wire.lock().to.is_empty();
            from.iter().for_each(|frame| segments.extend(self.seen(frame)));
            if quiet {
                return segments;
            }
        }
        panic!("it does not settle");
    }

    /// Advances the time, and runs the timers that are due.
    pub fn pass(&mut self, time: Duration) -> Vec<Segment> {
        let (end, mut segments) = (self.now + time, self.settle());
        while let Some(due) = self.stack.as_ref().and_then(OurStack::poll_timeout).filter(|due| *due < end) {
            self.now = self.now.max(due);
            segments.extend(self.settle());
        }
        self.now = self.now.max(end);
        segments.extend(self.settle());
        segments
    }

    /// The back end dies with frames that it has not looked at: those that our side sends until
    /// then.
    pub fn kill_device(&mut self) {
        let device = self.device.take();
        self.pass(Duration::from_millis(1500));
        drop(device);
        crate::memory_common::until(|| !self.driver.as_ref().expect("it is there").0.is_connected());
    }

    /// Another back end continues with the queues.
    pub fn connect_device(&mut self) {
        let (device, backend) = self.wire.device();
        self.device = Some(device);
        self.driver.as_mut().expect("it is there").0.reconnect(backend).expect("it is the same");
    }

    /// Frames that the transmit queue has given to a device that has not told that they left.
    pub fn in_flight(&mut self) -> u64 {
        let queue = self.stack.as_mut().expect("it is there").queues().1.queue();
        let stats = queue.stats();
        assert_eq!(stats.frames - stats.completed - stats.unconfirmed, queue.posted() as u64);
        queue.posted() as u64
    }

    /// A frame of ours. Questions for the peer's Ethernet address are answered.
    fn seen(&mut self, wire: &[u8]) -> Option<Segment> {
        let frame = &wire[VnetHdr::LEN..];
        if frame[12..14] == [8, 6] && frame[20..22] == [0, 1] {
            let mut answer =
                [&OURS.0[..], &PEER.0, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &PEER.0, &PEER.1, &OURS.0, &OURS.1].concat();
            answer.resize(60, 0);
            self.give(&answer, VnetHdr::PLAIN);
            return None;
        }
        let packet = SlicedPacket::from_ethernet(frame).expect("a frame");
        let Some(TransportSlice::Tcp(tcp)) = packet.transport else { return None };
        Some(Segment {
            port: tcp.destination_port(),
            seq: tcp.sequence_number(),
            ack: tcp.acknowledgment_number(),
            syn: tcp.syn(),
            fin: tcp.fin(),
            rst: tcp.rst(),
            window: tcp.window_size(),
            payload: tcp.payload().to_vec(),
        })
    }

    /// The device receives a frame.
    pub fn give(&mut self, frame: &[u8], header: VnetHdr) {
        self.wire.lock().to.push_back([&header.to_bytes()[..], frame].concat());
    }

    /// Buffers that are posted to the device.
    #[track_caller]
    pub fn posted(&mut self) -> usize {
        let net = self.net.as_mut().expect("the queues are there");
        let mut rx = net.queues_mut().get(0).expect("there is one");
        rx.split().expect("it receives into device memory").posted()
    }

    /// Pages of the binding that are neither posted nor in the queue's pool.
    #[track_caller]
    pub fn held(&mut self) -> u64 {
        let net = self.net.as_mut().expect("the queues are there");
        let mut rx = net.queues_mut().get(0).expect("there is one");
        let split = rx.split().expect("it receives into device memory");
        split.pool_stats().1.inflight() - split.posted() as u64
    }

    /// Drops the stack, and the list of bindings that its queue receives into: the list keeps its
    /// bindings.
    pub fn drop_stack(&mut self) {
        drop((self.streams.take(), self.stack.take()));
        self.bindings = Bindings::new();
    }

    /// Drops the remaining objects, in order. Checks that nothing of the memory is left, and that
    /// no page was lost.
    #[track_caller]
    pub fn close(mut self) {
        assert_eq!(self.stack.as_ref().map(OurStack::pages), Some(0));
        let (net, binding) = (self.net.take(), self.binding.take());
        self.drop_stack();
        net.expect("it is there").unbind(binding.expect("it is there")).expect("the device goes on");
        drop((self.driver.take(), self.device.take()));
        self.memory.assert_gone();
    }
}

/// One connection of the peer.
#[derive(Clone, Debug)]
pub struct Peer {
    pub port: u16,
    /// Our side's port.
    pub to: u16,
    /// The next sequence number of the peer's stream, and of ours.
    pub seq: u32,
    pub ack: u32,
}

/// What a segment of the peer is beside its payload.
#[derive(Clone, Default)]
pub struct Odd {
    pub fin: bool,
    pub rst: bool,
    pub syn: bool,
    /// It acknowledges nothing.
    pub no_ack: bool,
    pub window: Option<u16>,
    pub options: Vec<u8>,
    /// The device has not verified its checksum, and the checksum is wrong.
    pub unverified: bool,
}

const VERIFIED: VnetHdr = VnetHdr { flags: VnetHdr::DATA_VALID, ..VnetHdr::PLAIN };

impl Peer {
    /// The peer connects.
    #[track_caller]
    pub fn connect(rig: &mut Rig, port: u16) -> Self {
        let mut peer = Self::open(rig, port);
        peer.give(rig, &[]);
        peer
    }

    /// The peer sends SYN, and our side's answer is on its way: the handshake is not complete.
    #[track_caller]
    pub fn open(rig: &mut Rig, port: u16) -> Self {
        let mut peer = Self { port, to: LISTEN, seq: 1000 * u32::from(port), ack: 0 };
        peer.syn(rig, true);
        let answer = rig.settle().into_iter().find(|segment| segment.syn && segment.port == port);
        let answer = answer.expect("the connection is accepted");
        assert_eq!(answer.ack, peer.seq);
        peer.ack = answer.seq.wrapping_add(1);
        peer
    }

    /// The peer's SYN, which acknowledges nothing, or our side's SYN.
    pub fn syn(&mut self, rig: &mut Rig, no_ack: bool) {
        // An MSS of 1460 bytes, and a window scale of 7.
        let options = vec![2, 4, 0x05, 0xb4, 3, 3, 7, 0];
        self.give_at(rig, self.seq, &[], &Odd { syn: true, no_ack, options, ..Odd::default() });
        self.seq = self.seq.wrapping_add(1);
    }

    /// The next payload of the stream; none is an acknowledgement. Returns what our side sent then.
    pub fn give(&mut self, rig: &mut Rig, payload: &[u8]) -> Vec<Segment> {
        self.give_at(rig, self.seq, payload, &Odd::default());
        self.seq = self.seq.wrapping_add(payload.len() as u32);
        rig.settle()
    }

    /// The peer closes. Returns what our side sent then.
    pub fn fin(&mut self, rig: &mut Rig) -> Vec<Segment> {
        self.give_at(rig, self.seq, &[], &Odd { fin: true, ..Odd::default() });
        self.seq = self.seq.wrapping_add(1);
        rig.settle()
    }

    /// The next payload of the stream, as one large segment that no device has cut. It is on the
    /// wire, and the device has not looked at it.
    pub fn give_large(&mut self, rig: &mut Rig, payload: &[u8]) {
        let header = VnetHdr {
            flags: VnetHdr::NEEDS_CSUM,
            gso_type: VnetHdr::GSO_TCPV4,
            hdr_len: 54,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
            ..VnetHdr::PLAIN
        };
        let frame = self.frame(self.seq, payload, &Odd::default());
        rig.give(&frame, header);
        self.seq = self.seq.wrapping_add(payload.len() as u32);
    }

    /// A segment with any number. It is on the wire, and the device has not looked at it.
    pub fn give_at(&self, rig: &mut Rig, seq: u32, payload: &[u8], odd: &Odd) {
        let mut frame = self.frame(seq, payload, odd);
        let mut header = VERIFIED;
        if odd.unverified {
            // Behind the ports, the numbers, flags and window.
            frame[14 + 20 + 16] ^= 0x55;
            header = VnetHdr::PLAIN;
        }
        rig.give(&frame, header);
    }

    fn frame(&self, seq: u32, payload: &[u8], odd: &Odd) -> Vec<u8> {
        let mut frame = Vec::new();
        let ethernet = PacketBuilder::ethernet2(PEER.0, OURS.0).ipv4(PEER.1, OURS.1, 64);
        let mut tcp = ethernet.tcp(self.port, self.to, seq, odd.window.unwrap_or(65535));
        if !odd.no_ack {
            tcp = tcp.ack(self.ack);
        }
        if odd.fin {
            tcp = tcp.fin();
        }
        if odd.rst {
            tcp = tcp.rst();
        }
        if odd.syn {
            tcp = tcp.syn();
        }
        tcp.options_raw(&odd.options).expect("they fit").write(&mut frame, payload).expect("it fits");
        frame
    }

    /// Receives what our side has sent, and what it sends when that is acknowledged.
    pub fn take(&mut self, rig: &mut Rig, segments: Vec<Segment>) -> Vec<u8> {
        let (mut bytes, mut next) = (Vec::new(), segments);
        while !next.is_empty() {
            for segment in &next {
                if segment.port == self.port && segment.seq == self.ack {
                    bytes.extend_from_slice(&segment.payload);
                    self.ack = self.ack.wrapping_add(segment.payload.len() as u32 + u32::from(segment.fin));
                }
            }
            let before = self.ack;
            next = self.give(rig, &[]);
            if !next.iter().any(|segment| segment.seq == before && segment.payload.len() + usize::from(segment.fin) > 0)
            {
                break;
            }
        }
        bytes
    }
}
