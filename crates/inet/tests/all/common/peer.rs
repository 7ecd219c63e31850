//! A peer of a stack that is made of frames: a test writes each segment, and reads each answer.

use super::{Cable, Frame, MemRx, MemTx, host, pair, pool, stack};
use etherparse::{EtherType, Ethernet2Header, PacketBuilder, SlicedPacket, TcpOptionElement, TransportSlice};
use netmem_inet::{Host, Stack, StackOptions, Time};
use netmem_packet::Meta;
use netmem_pool::{Private, SharedPool};
use std::sync::Arc;
use std::time::Duration;

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const PSH: u8 = 8;
pub const ACK: u8 = 16;

/// The stack under test.
pub type Server = Stack<MemRx, MemTx>;

/// A segment on the cable. Ports are those of the peer and of the stack, whatever the direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seg {
    pub peer: u16,
    pub port: u16,
    pub flags: u8,
    pub seq: u32,
    pub ack: u32,
    pub window: u16,
    pub payload: Vec<u8>,
}

impl Seg {
    pub fn has(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }

    /// The number after the segment.
    pub fn end(&self) -> u32 {
        let controls = u32::from(self.has(SYN)) + u32::from(self.has(FIN));
        self.seq.wrapping_add(self.payload.len() as u32 + controls)
    }
}

/// The stack at 10.0.0.2, and the cable to it. The peer has all other addresses of the network.
pub struct Wire {
    pub stack: Server,
    pub host: Host<Private>,
    /// The pages from which the stack sends.
    pub pool: Arc<SharedPool<Private>>,
    pub now: Time,
    there: Cable,
    back: Cable,
    /// Further stacks of the host, each with a queue pair of its own.
    pub others: Vec<Queue>,
    /// Whether the peer answers questions for its Ethernet address.
    pub answers_arp: bool,
    /// The questions for Ethernet addresses that the stack has sent.
    pub questions: usize,
}

/// A stack with a queue pair, and the cable to it.
pub struct Queue {
    pub stack: Server,
    there: Cable,
    back: Cable,
}

impl Queue {
    /// Puts a frame on the cable to the stack.
    pub fn frame(&self, bytes: Vec<u8>) {
        self.there.borrow_mut().push_back(Frame { bytes, meta: Meta::default() });
    }
}

impl Wire {
    pub fn new(options: StackOptions) -> Self {
        let (there, back) = (Cable::default(), Cable::default());
        let (host, pool) = (host(2), pool());
        let (rx, tx) = pair(&there, &back, false);
        let stack = Stack::new(&host, rx, tx, pool.clone(), options, Time::ZERO).unwrap();
        let now = Time::from_micros(1_000_000);
        Self { stack, host, pool, now, there, back, others: Vec::new(), answers_arp: true, questions: 0 }
    }

    /// Adds a stack of the same host, with a queue pair of its own.
    pub fn add_queue(&mut self, options: StackOptions) {
        let (there, back) = (Cable::default(), Cable::default());
        let stack = stack(&self.host, pair(&there, &back, false), options);
        self.others.push(Queue { stack, there, back });
    }

    /// Puts a frame on the cable to the first stack.
    pub fn frame(&self, bytes: Vec<u8>) {
        self.there.borrow_mut().push_back(Frame { bytes, meta: Meta::default() });
    }

    /// Puts a segment from 10.0.0.1 on the cable to the stack.
    pub fn put(&self, seg: &Seg) {
        self.put_from([10, 0, 0, 1], seg);
    }

    /// Puts a segment from an address of the network on the cable.
    pub fn put_from(&self, from: [u8; 4], seg: &Seg) {
        self.frame(frame_of(from, seg));
    }

    /// Polls the stack until it has nothing to do, and returns the segments that it has sent.
    pub fn poll(&mut self) -> Vec<Seg> {
        let mut sent = Vec::new();
        for _ in 0..1000 {
            self.now += Duration::from_micros(1);
            let mut work = self.stack.poll(self.now);
            let mut frames: Vec<Frame> = self.back.borrow_mut().drain(..).collect();
            for Queue { stack, back, .. } in &mut self.others {
                work += stack.poll(self.now);
                frames.extend(back.borrow_mut().drain(..));
            }
            let left =
                self.others.iter().map(|queue| &queue.there).chain([&self.there]).any(|c| !c.borrow().is_empty());
            let idle = frames.is_empty() && work == 0 && !left;
            for Frame { bytes, .. } in frames {
                sent.extend(self.read(&bytes));
            }
            if idle {
                return sent;
            }
        }
        panic!("the stack does not settle: {:?}", self.stack.stats());
    }

    /// Polls the first stack once, and returns the segments that it has sent.
    pub fn poll_once(&mut self) -> Vec<Seg> {
        self.now += Duration::from_micros(1);
        self.stack.poll(self.now);
        let frames: Vec<Frame> = self.back.borrow_mut().drain(..).collect();
        frames.iter().filter_map(|frame| self.read(&frame.bytes)).collect()
    }

    /// Puts a segment on the cable, and returns the answers to it.
    pub fn exchange(&mut self, seg: Seg) -> Vec<Seg> {
        self.put(&seg);
        self.poll()
    }

    /// Advances the time by `time`, with all timers on the way. Returns the segments that the stack
    /// has sent, and how often it was woken by a timer.
    pub fn pass(&mut self, time: Duration) -> (Vec<Seg>, usize) {
        let end = self.now + time;
        let (mut sent, mut wakes) = (Vec::new(), 0);
        while let Some(at) = self.poll_timeout().filter(|&at| at < end) {
            self.now = self.now.max(at);
            wakes += 1;
            sent.extend(self.poll());
        }
        self.now = self.now.max(end);
        sent.extend(self.poll());
        (sent, wakes)
    }

    fn poll_timeout(&self) -> Option<Time> {
        let stacks = self.others.iter().map(|queue| &queue.stack).chain([&self.stack]);
        stacks.filter_map(Stack::poll_timeout).min()
    }

    /// Opens a connection from `peer` to `port`. Returns the next sequence numbers of the peer and
    /// of the stack.
    pub fn open(&mut self, peer: u16, port: u16, iss: u32) -> (u32, u32) {
        let syn = Seg { peer, port, flags: SYN, seq: iss, window: u16::MAX, ..Seg::default() };
        let answer = self.exchange(syn).pop().expect("SYN-ACK");
        assert!(answer.has(SYN | ACK) && answer.ack == iss.wrapping_add(1), "{answer:?}");
        let (seq, ack) = (iss.wrapping_add(1), answer.seq.wrapping_add(1));
        self.exchange(Seg { peer, port, flags: ACK, seq, ack, window: u16::MAX, ..Seg::default() });
        (seq, ack)
    }

    fn read(&mut self, bytes: &[u8]) -> Option<Seg> {
        let (ethernet, rest) = Ethernet2Header::from_slice(bytes).unwrap();
        if ethernet.ether_type == EtherType::ARP {
            self.questions += 1;
            if self.answers_arp {
                let (sender, target) = (&rest[8..18], <[u8; 4]>::try_from(&rest[24..28]).unwrap());
                let answer = [
                    &ethernet.source[..],
                    &mac_of(target),
                    &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2],
                    &mac_of(target),
                    &target,
                    sender,
                ];
                self.frame(answer.concat());
            }
            return None;
        }
        let packet = SlicedPacket::from_ethernet(bytes).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = packet.transport else { return None };
        let flags = [(tcp.fin(), FIN), (tcp.syn(), SYN), (tcp.rst(), RST), (tcp.psh(), PSH), (tcp.ack(), ACK)];
        Some(Seg {
            peer: tcp.destination_port(),
            port: tcp.source_port(),
            flags: flags.iter().map(|&(set, flag)| if set { flag } else { 0 }).sum(),
            seq: tcp.sequence_number(),
            ack: tcp.acknowledgment_number(),
            window: tcp.window_size(),
            payload: tcp.payload().to_vec(),
        })
    }
}

/// The frame of a segment from an address of the network.
pub fn frame_of(from: [u8; 4], seg: &Seg) -> Vec<u8> {
    let mut tcp = PacketBuilder::ethernet2(mac_of(from), [2, 0, 0, 0, 0, 2])
        .ipv4(from, [10, 0, 0, 2], 64)
        .tcp(seg.peer, seg.port, seg.seq, seg.window);
    if seg.has(FIN) {
        tcp = tcp.fin();
    }
    if seg.has(SYN) {
        tcp = tcp.syn().options(&[TcpOptionElement::MaximumSegmentSize(1460)]).unwrap();
    }
    if seg.has(RST) {
        tcp = tcp.rst();
    }
    if seg.has(PSH) {
        tcp = tcp.psh();
    }
    if seg.has(ACK) {
        tcp = tcp.ack(seg.ack);
    }
    let mut bytes = Vec::new();
    tcp.write(&mut bytes, &seg.payload).unwrap();
    bytes
}

/// The Ethernet address of the station with an IP address.
fn mac_of(ip: [u8; 4]) -> [u8; 6] {
    let [a, b, c, d] = ip;
    [2, 1, a, b, c, d]
}
