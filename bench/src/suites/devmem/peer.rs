//! The far end of streams: a port of the device that speaks just enough TCP.
//!
//! ```text
//!   near stack ─► device ─► Peer: one acknowledgement for each flow and turn, of all bytes that came
//!   near stack ◄─ device ◄─ Peer: segments of one length, from each flow in turn, within the window
//! ```
//!
//! The peer connects to the near stack. It keeps nothing but numbers, so it uses little of the CPU
//! that it shares with the device. No frame is lost here, because the device waits for buffers. So
//! the peer never sends a segment again. Every segment has PSH, so the device does not merge
//! segments. The checksums are left to the receiver's device, as between two programs on one host.

use super::directions::MSS;
use super::rig::unavailable;
use crate::error::BenchError;
use netmem::device::port::{ALL_OFFLOADS, Port, PortError};
use netmem::tcp::Mac;
use netmem::virtio::VnetHdr;
use netmem_inet::tcp::{Flags, Header, Seq};
use netmem_inet::wire::{self, Arp, Body, EthernetHeader, Network, Outer, Transport};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The near stack's addresses. It listens on [`PORT`].
pub(super) const OURS: (Mac, Ipv4Addr) = (Mac([2, 0, 0, 0, 0, 1]), Ipv4Addr::new(10, 0, 0, 1));
pub(super) const PORT: u16 = 7;
const THEIRS: (Mac, Ipv4Addr) = (Mac([2, 0, 0, 0, 0, 2]), Ipv4Addr::new(10, 0, 0, 2));
/// The port of the peer's first flow. The other flows have the ports behind it.
pub(super) const FIRST_PORT: u16 = 5000;
/// The offset of the sequence number in a frame over IPv4, with the virtio header. The
/// acknowledgement number follows it.
const SEQ: usize = VnetHdr::LEN + EthernetHeader::LEN + 20 + 4;

/// A connection.
struct Flow {
    /// The segment to send. Its numbers are written each time it is sent.
    segment: Vec<u8>,
    /// The acknowledgement, likewise. Until the connection is there, this is the SYN.
    answer: Vec<u8>,
    port: u16,
    len: u32,
    seq: u32,
    /// The acknowledgement number: what the peer has received of the stream.
    ack: u32,
    /// The end of the near stack's window.
    limit: u32,
    /// By how many bits the near stack's windows are shifted.
    scale: u8,
    /// Whether `answer` is to be sent.
    owes: bool,
    /// Segments that were sent.
    sent: u64,
}

impl Flow {
    fn new(port: u16, len: usize) -> Result<Self, PortError> {
        let segment = frame(port, Flags(Flags::ACK.0 | Flags::PSH.0), len)?;
        let mut syn = Header { seq: Seq(0), window: u16::MAX, flags: Flags::SYN, ..Header::default() };
        (syn.options.mss, syn.options.window_scale) = (Some(MSS as u16), Some(10));
        let (answer, len) = (emit(port, &syn, 0)?, len as u32);
        Ok(Self { segment, answer, port, len, seq: 0, ack: 0, limit: 0, scale: 0, owes: true, sent: 0 })
    }

    /// Receives a segment of the near stack.
    fn take(&mut self, header: &Header, len: u32) -> Result<(), PortError> {
        let (begin, syn) = (header.seq.0, header.flags.has(Flags::SYN));
        let end = begin.wrapping_add(len + u32::from(syn));
        if syn {
            // The near stack's answer to the SYN: its window is not scaled.
            self.scale = header.options.window_scale.unwrap_or(0);
            (self.seq, self.answer) = (1, frame(self.port, Flags::ACK, 0)?);
        }
        let window = u32::from(header.window) << if syn { 0 } else { self.scale };
        let limit = header.ack.0.wrapping_add(window);
        if Seq(limit).distance(Seq(self.limit)) > 0 {
            self.limit = limit;
        }
        // A segment that continues the stream, or a retransmission that has new data behind the
        // old.
        if syn || Seq(self.ack).distance(Seq(begin)) >= 0 && Seq(end).distance(Seq(self.ack)) > 0 {
            self.ack = end;
        }
        self.owes |= end != begin;
        Ok(())
    }

    /// Whether the flow may send a segment, of `due` in all.
    #[inline]
    fn may_send(&self, due: u64) -> bool {
        self.sent < due && Seq(self.limit).distance(Seq(self.seq.wrapping_add(self.len))) >= 0
    }
}

/// The frame with the numbers of its flow.
#[inline]
fn numbered(frame: &mut [u8], seq: u32, ack: u32) -> &[u8] {
    frame[SEQ..SEQ + 4].copy_from_slice(&seq.to_be_bytes());
    frame[SEQ + 4..SEQ + 8].copy_from_slice(&ack.to_be_bytes());
    frame
}

/// See the module.
pub(super) struct Peer {
    flows: Vec<Flow>,
    /// The reply to a question for the peer's Ethernet address.
    arp: Option<Vec<u8>>,
    /// The flow that sends the next segment, and the flow whose acknowledgement is looked for
    /// first.
    next: usize,
    /// Whether [`Port::peek`] showed the reply, an acknowledgement of the flow, or a segment of the
    /// flow.
    shown: Shown,
    /// Segments that each flow may have sent in all.
    pub(super) due: u64,
}

#[derive(Clone, Copy)]
enum Shown {
    Nothing,
    Arp,
    Answer(usize),
    Segment(usize),
}

impl Peer {
    /// A peer with this many flows, which sends segments of `len` bytes.
    pub(super) fn new(flows: usize, len: usize) -> Result<Self, BenchError> {
        let flow = |n: usize| Flow::new(FIRST_PORT + n as u16, len).map_err(unavailable);
        let flows = (0..flows).map(flow).collect::<Result<_, _>>()?;
        Ok(Self { flows, arp: None, next: 0, shown: Shown::Nothing, due: 0 })
    }

    /// Receives a frame. A frame that makes no sense here is ignored.
    fn take(&mut self, frame: &[u8]) -> Option<()> {
        let (_, network) = wire::parse(frame, frame.len()).ok()?;
        let ip = match network {
            Network::Arp(_) => {
                let reply = Arp { request: false, mac: THEIRS.0, sender: THEIRS.1, target: OURS.1, target_mac: OURS.0 };
                let mut wire = VnetHdr::PLAIN.to_bytes().to_vec();
                wire.resize(VnetHdr::LEN + 60, 0);
                reply.emit(OURS.0, &mut wire[VnetHdr::LEN..])?;
                self.arp = Some(wire);
                return None;
            }
            Network::Ip(ip) => ip,
        };
        let Ok(Transport::Tcp(segment)) = ip.transport(frame) else { return None };
        let flow = self.flows.get_mut(usize::from(segment.destination_port.checked_sub(FIRST_PORT)?))?;
        flow.take(&segment.header, segment.payload.len as u32).ok()
    }

    fn show(&self) -> Shown {
        if self.arp.is_some() {
            return Shown::Arp;
        }
        let mut flows = (0..self.flows.len()).map(|n| (self.next + n) % self.flows.len());
        if let Some(flow) = flows.clone().find(|&flow| self.flows[flow].owes) {
            return Shown::Answer(flow);
        }
        flows.find(|&flow| self.flows[flow].may_send(self.due)).map_or(Shown::Nothing, Shown::Segment)
    }
}

/// A frame of the peer, with `len` bytes of payload.
fn emit(port: u16, header: &Header, len: usize) -> Result<Vec<u8>, PortError> {
    let flow = wire::Flow {
        local: SocketAddr::new(IpAddr::V4(THEIRS.1), port),
        remote: SocketAddr::new(IpAddr::V4(OURS.1), PORT),
    };
    let mut wire = vec![0x5a; VnetHdr::LEN + 128];
    let outer = Outer::new(Some(EthernetHeader { destination: OURS.0, source: THEIRS.0 }));
    let body = Body { len, sum: None, segment_size: (len > MSS).then_some(MSS as u16) };
    let emitted = wire::emit_tcp(&mut wire[VnetHdr::LEN..], &outer, &flow, header, body);
    let emitted = emitted.map_err(|error| PortError::Other(Box::new(error)))?;
    wire.resize(VnetHdr::LEN + emitted.len + len, 0x5a);
    wire[..VnetHdr::LEN].copy_from_slice(&VnetHdr::of(emitted.meta).to_bytes());
    Ok(wire)
}

fn frame(port: u16, flags: Flags, len: usize) -> Result<Vec<u8>, PortError> {
    emit(port, &Header { flags, window: u16::MAX, ..Header::default() }, len)
}

impl Port for Peer {
    const WANTS_BYTES: bool = true;
    const FEATURES: u64 = ALL_OFFLOADS;

    fn peek(&mut self) -> Option<&[u8]> {
        self.shown = self.show();
        match self.shown {
            Shown::Nothing => None,
            Shown::Arp => self.arp.as_deref(),
            Shown::Answer(flow) => {
                let Flow { answer, seq, ack, .. } = &mut self.flows[flow];
                Some(numbered(answer, *seq, *ack))
            }
            Shown::Segment(flow) => {
                let Flow { segment, seq, ack, .. } = &mut self.flows[flow];
                Some(numbered(segment, *seq, *ack))
            }
        }
    }

    fn consume(&mut self) {
        match self.shown {
            Shown::Nothing => {}
            Shown::Arp => self.arp = None,
            Shown::Answer(flow) => self.flows[flow].owes = false,
            Shown::Segment(flow) => {
                let Flow { seq, len, sent, .. } = &mut self.flows[flow];
                (*seq, *sent) = (seq.wrapping_add(*len), *sent + 1);
                self.next = (flow + 1) % self.flows.len();
            }
        }
        self.shown = Shown::Nothing;
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        let _ = self.take(&wire[VnetHdr::LEN..]);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The near stack's segment.
    fn header(seq: u32, ack: u32, window: u16, flags: Flags) -> Header {
        Header { seq: Seq(seq), ack: Seq(ack), window, flags, ..Header::default() }
    }

    /// A flow whose window is 10 segments of 1000 bytes, and scaled by 2 bits.
    fn connected() -> Flow {
        let mut flow = Flow::new(FIRST_PORT, 1000).unwrap();
        let mut answer = header(700, 1, 10_000, Flags(Flags::SYN.0 | Flags::ACK.0));
        answer.options.window_scale = Some(2);
        flow.take(&answer, 0).unwrap();
        flow
    }

    #[test]
    fn a_flow_sends_as_much_as_is_due_and_as_the_window_admits() {
        let mut flow = connected();
        assert!(!flow.may_send(0) && flow.may_send(1));
        (flow.seq, flow.sent) = (9001, 9);
        assert!(flow.may_send(10) && !flow.may_send(9));
        (flow.seq, flow.sent) = (10_001, 10);
        assert!(!flow.may_send(u64::MAX));
        // The window of the SYN was not scaled; this one is: 4000 bytes from 10,001 on.
        flow.take(&header(701, 10_001, 1000, Flags::ACK), 0).unwrap();
        flow.seq = 13_001;
        assert!(flow.may_send(u64::MAX));
        flow.seq = 13_002;
        assert!(!flow.may_send(u64::MAX));
    }

    #[test]
    fn what_came_in_order_is_acknowledged() {
        let mut flow = connected();
        assert_eq!((flow.seq, flow.ack, flow.owes), (1, 701, true));
        flow.owes = false;
        // An acknowledgement is not acknowledged.
        flow.take(&header(701, 1, 10_000, Flags::ACK), 0).unwrap();
        assert!(!flow.owes);
        flow.take(&header(701, 1, 10_000, Flags::ACK), 100).unwrap();
        assert_eq!((flow.ack, flow.owes), (801, true));
        // Bytes behind a hole are not acknowledged; a retransmission with new data behind the old
        // is.
        flow.take(&header(901, 1, 10_000, Flags::ACK), 100).unwrap();
        assert_eq!(flow.ack, 801);
        flow.take(&header(751, 1, 10_000, Flags::ACK), 100).unwrap();
        assert_eq!(flow.ack, 851);
    }

    #[test]
    fn flows_take_turns_and_acknowledge_first() {
        let mut peer = Peer::new(2, 1000).unwrap();
        let ports = |peer: &mut Peer| {
            let at = SEQ - 4;
            let port = peer.peek().map(|wire| u16::from_be_bytes([wire[at], wire[at + 1]]));
            peer.consume();
            port
        };
        // The two SYNs, and nothing else until they are answered.
        peer.due = 2;
        assert_eq!([0; 3].map(|_| ports(&mut peer)), [Some(5000), Some(5001), None]);
        for flow in &mut peer.flows {
            flow.take(&header(700, 1, 10_000, Flags(Flags::SYN.0 | Flags::ACK.0)), 0).unwrap();
        }
        assert_eq!([0; 2].map(|_| ports(&mut peer)), [Some(5000), Some(5001)]);
        let sent = [0; 5].map(|_| ports(&mut peer));
        assert_eq!(sent, [Some(5000), Some(5001), Some(5000), Some(5001), None]);
    }
}
