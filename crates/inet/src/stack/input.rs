//! Received frames: headers are copied and read once, and the rest is passed on by reference.
//!
//! ```text
//!   frame ──► wire::parse ──► for this host? ──► fragment? ──► checksum ──► TCP: SegmentInput
//!                   └──► ARP                        └► Fragments ─┘  │    ├─► UDP: Datagrams
//!                                                                    │    └─► ICMP: Control
//!                                              another stack of the host: its mailbox
//! ```
//!
//! Here the headers are validated: a frame that is malformed, for another station, or wrong in its
//! checksum reaches no socket, and is counted.

use crate::interface::Cast;
use crate::stack::control::{Control, ReplyPath};
use crate::stack::fragments::Fragments;
use crate::stack::payload::{Payload, ReceivedFrame, Transmit};
use crate::stack::resources::Resources;
use crate::stack::shared::directory::{NO_STACK, Protocol, StackId};
use crate::stack::transport::datagrams::Datagrams;
use crate::stack::transport::handles::{ConnectionId, UdpId};
use crate::stack::transport::segment::{ReceivedSegment, SegmentInput};
use crate::stack::transport::tcp::Tcp;
use crate::tcp;
use crate::wire::{
    self, Covered, Datagram, EthernetHeader, Flow, Icmp, IcmpError, IcmpKind, Ip, KnownSegment, MAX_HEAD, Network,
    Quoted, QuotedTransport, Segment, Transport,
};
use netmem_packet::{Checksum, Packet, TxQueue};

/// The origin of a frame.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The device's queue.
    Queue,
    /// Another stack, which has no socket for it.
    Mailbox,
    /// This stack: the frame is for an address of this host.
    Loopback,
    /// Fragments from the device's queue.
    Reassembly,
}

/// The destination of the last frame, by which that of the next one is known if it is of the same
/// flow. Users do not change sockets while frames are processed. A connection that is moved to
/// another stack meanwhile is found where it was, as by a frame that is in a mailbox already.
pub(crate) struct LastFlows {
    /// Whether there is a next frame: the flow of a single one is not noted.
    more: bool,
    /// A flow of another stack.
    handed_over: Option<(Protocol, Flow, StackId)>,
    /// A flow of a socket for datagrams.
    datagrams: Option<(Flow, UdpId)>,
}

impl LastFlows {
    /// None, before the first of `frames` frames.
    pub(crate) fn new(frames: usize) -> Self {
        Self { more: frames > 1, handed_over: None, datagrams: None }
    }

    /// There are `frames` more frames.
    pub(crate) fn expect(&mut self, frames: usize) {
        self.more |= frames > 1;
    }
}

/// The way of received frames to the groups that process them.
pub(crate) struct Input<'a, P: Payload, T> {
    pub(crate) resources: &'a mut Resources<P>,
    pub(crate) tcp: &'a mut Tcp<P>,
    pub(crate) datagrams: &'a mut Datagrams<P::Mem>,
    pub(crate) fragments: &'a mut Fragments<P::Mem>,
    pub(crate) tx: &'a mut T,
    /// The queue has fewer buffers posted than its reserve: payload is dropped.
    pub(crate) short: bool,
    /// Empty at the beginning of a poll.
    pub(crate) last: LastFlows,
}

impl<P: Transmit<T>, T: TxQueue<Mem = P::Mem>> Input<'_, P, T> {
    /// Processes a received frame.
    pub(crate) fn handle_frame(&mut self, frame: P::Frame, origin: Origin) {
        self.resources.egress.stats.received += 1;
        let mut head = [0; MAX_HEAD];
        let n = frame.peek(&mut head);
        let head = &head[..n];
        if origin == Origin::Queue
            && let Some((id, known)) = self.tcp.connections.known()
            && let Some(segment) = known.read(head, frame.len())
            && let Some(right) = self.is_right(&frame, segment.covered, false)
        {
            // So each test compares the two ways.
            debug_assert!(self.is_as_parsed(id, &segment, head, frame.len()), "{segment:?}");
            return self.handle_known(id, &segment, right, frame);
        }
        match wire::parse(head, frame.len()) {
            Ok((header, Network::Ip(ip))) => self.handle_ip(header, &ip, head, frame, origin),
            Ok((_, Network::Arp(arp))) => self.control().handle_arp(&arp),
            Err(why) => self.count_unparsed(&frame, head, why),
        }
    }

    /// Processes a segment of the same connection as the one before, whose headers were known.
    /// `right`: whether its checksum is.
    #[inline]
    fn handle_known(&mut self, id: ConnectionId, segment: &KnownSegment, right: bool, frame: P::Frame) {
        if !right {
            self.resources.egress.stats.wrong_checksum += 1;
            return;
        }
        let KnownSegment { header, payload, ce, .. } = segment;
        let (meta, chunks) = self.admit(&frame, payload.len, *ce, Origin::Queue);
        let Self { tcp, resources, tx, .. } = self;
        let payload = P::received(frame, payload.at, payload.len).take(chunks);
        SegmentInput { tcp, resources, tx: *tx }.deliver(id, header, meta, payload);
    }

    /// Whether a segment whose headers were known is what the parser reads, and is for this host
    /// and for connection `id`.
    fn is_as_parsed(&self, id: ConnectionId, known: &KnownSegment, head: &[u8], len: usize) -> bool {
        let Ok((link, Network::Ip(ip))) = wire::parse(head, len) else { return false };
        let Ok(Transport::Tcp(segment)) = ip.transport(head) else { return false };
        let flow = ip.flow(segment.source_port, segment.destination_port);
        self.resources.host.interface().accepts(&link, &ip) == Some(Cast::Unicast)
            && self.tcp.connections.find(&flow) == Some(id)
            && (segment.header, segment.payload, ip.is_ce()) == (known.header, known.payload, known.ce)
            && ip.covered(&Transport::Tcp(segment)) == Some(known.covered)
    }

    fn control(&mut self) -> Control<'_, P, T> {
        Control { resources: &mut *self.resources, tx: &mut *self.tx }
    }

    /// The headers of a frame were not understood.
    #[cold]
    fn count_unparsed(&mut self, frame: &P::Frame, head: &[u8], why: wire::ParseError) {
        let more = head.len() < frame.len().min(MAX_HEAD);
        match why {
            wire::ParseError::Beyond { .. } if more => self.resources.egress.stats.unreadable += 1,
            _ => self.resources.egress.stats.malformed += 1,
        }
    }

    /// The frame as a packet, cut to the length of the IP packet. If it is in memory that is not
    /// read here, it is dropped.
    #[inline]
    fn packet(&mut self, frame: P::Frame, ip: &Ip) -> Option<Packet<P::Mem>> {
        let packet = frame.into_packet(ip.content.end());
        self.resources.egress.stats.unreadable += u64::from(packet.is_none());
        packet
    }

    fn handle_ip(&mut self, header: EthernetHeader, ip: &Ip, head: &[u8], frame: P::Frame, origin: Origin) {
        // A frame of this host was checked when it was sent, or by the stack that received it.
        let accepted = match origin {
            Origin::Loopback => Some(Cast::Unicast),
            _ => self.resources.host.interface().accepts(&header, ip),
        };
        let Some(cast) = accepted else {
            self.resources.egress.stats.foreign += 1;
            return;
        };
        if ip.fragment.is_some() {
            let Some(packet) = self.packet(frame, ip) else { return };
            return self.handle_fragment(header, ip, packet, cast);
        }
        self.handle_packet(header, ip, head, frame, (cast, origin));
    }

    /// Processes a fragment of a datagram, and the datagram if it is complete.
    #[cold]
    fn handle_fragment(&mut self, header: EthernetHeader, ip: &Ip, mut packet: Packet<P::Mem>, cast: Cast) {
        if packet.pull(ip.content.at).is_err() {
            return;
        }
        if self.short {
            self.resources.egress.stats.short += 1;
            return;
        }
        let Some((mut ip, packet)) = self.fragments.handle_fragment(self.resources, ip, packet) else { return };
        let mut head = [0; MAX_HEAD];
        let n = packet.len().min(MAX_HEAD);
        let head = &mut head[..n];
        if packet.copy_to(0, head).is_ok() && ip.skip_extensions(head).is_ok() {
            self.handle_packet(header, &ip, head, packet.into(), (cast, Origin::Reassembly));
        }
    }

    /// Processes an IP packet that is no fragment.
    fn handle_packet(
        &mut self,
        header: EthernetHeader,
        ip: &Ip,
        head: &[u8],
        frame: P::Frame,
        (cast, origin): (Cast, Origin),
    ) {
        let transport = match ip.transport(head) {
            Ok(transport) => transport,
            Err(why) => return self.count_unparsed(&frame, head, why),
        };
        if let Some(covered) = ip.covered(&transport) {
            match self.is_right(&frame, covered, matches!(transport, Transport::Icmp(_))) {
                Some(true) => {}
                Some(false) => {
                    self.resources.egress.stats.wrong_checksum += 1;
                    return;
                }
                None => {
                    let segment = if let Transport::Tcp(segment) = &transport { Some(segment) } else { None };
                    return self.tcp.handle_unverified(self.resources, ip, segment);
                }
            }
        }
        let reply_path = ReplyPath { header, loopback: origin == Origin::Loopback };
        match &transport {
            Transport::Tcp(segment) if cast == Cast::Unicast => {
                let before = self.tcp.connections.last();
                self.handle_tcp((ip, reply_path), segment, frame, origin);
                // Where connections take turns, nothing is noted for the next one.
                if origin == Origin::Queue && before.is_some() && before == self.tcp.connections.last() {
                    let flow = ip.flow(segment.source_port, segment.destination_port);
                    self.tcp.connections.note_headers(&flow, head);
                }
            }
            Transport::Tcp(_) => {}
            Transport::Udp(datagram) => {
                if !self.handle_udp(ip, datagram, frame, origin) {
                    let kind = IcmpKind::PortUnreachable;
                    self.control().send_unreachable((ip, reply_path), &transport, cast, kind, head);
                }
            }
            Transport::Icmp(Icmp::Error(error)) => {
                if cast == Cast::Unicast {
                    self.handle_icmp_error(error, frame, origin);
                }
            }
            Transport::Icmp(message) => {
                let Some(packet) = self.packet(frame, ip) else { return };
                self.control().handle_icmp((ip, reply_path), message, cast, &packet);
            }
            Transport::Unknown => {
                let kind = IcmpKind::ProtocolUnreachable;
                self.control().send_unreachable((ip, reply_path), &transport, cast, kind, head);
            }
        }
    }

    /// Whether a transport checksum is right. Reads the payload if the device has not verified it;
    /// `None` if the payload cannot be read.
    fn is_right(&mut self, frame: &P::Frame, covered: Covered, icmp: bool) -> Option<bool> {
        match frame.meta().checksum {
            // The frame never was on a wire.
            Checksum::Partial { .. } => return Some(true),
            Checksum::Verified if !icmp => return Some(true),
            _ => {}
        }
        let sum = frame.sum(covered.range.at, covered.range.len)?;
        self.resources.egress.stats.checksummed_received += 1;
        Some(covered.holds(sum))
    }

    // ---- to sockets

    fn handle_tcp(&mut self, (ip, reply_path): (&Ip, ReplyPath), segment: &Segment, frame: P::Frame, origin: Origin) {
        let flow = ip.flow(segment.source_port, segment.destination_port);
        if segment.header.flags.has(tcp::Flags::SYN) {
            // The connection that had the flow may have ended meanwhile.
            self.last.handed_over = None;
        }
        if let Some(stack) = self.other_stack(Protocol::Tcp, &flow, origin) {
            return self.hand_over(stack, frame, segment.payload.len);
        }
        let wire::ByteRange { at, len } = segment.payload;
        let (meta, chunks) = self.admit(&frame, len, ip.is_ce(), origin);
        let segment = ReceivedSegment { flow, header: &segment.header, meta, reply_path };
        let Self { tcp, resources, tx, .. } = self;
        SegmentInput { tcp, resources, tx: *tx }.handle_segment(&segment, P::received(frame, at, len).take(chunks));
    }

    /// What is reported to a connection of a frame with `len` bytes of payload, and how many chunks
    /// of the payload it receives.
    #[inline]
    fn admit(&mut self, frame: &P::Frame, len: usize, ce: bool, origin: Origin) -> (tcp::SegmentMeta, usize) {
        // The meta data of a merged segment, or of one that was never cut, has the size of its
        // parts.
        let segments = match frame.meta().gso {
            Some(gso) if gso.size > 0 => len.div_ceil(gso.size.into()).max(1),
            _ => 1,
        };
        // Missing payload counts as dropped.
        let dropped = self.short && len > 0 && origin != Origin::Loopback;
        self.resources.egress.stats.short += u64::from(dropped);
        let meta = tcp::SegmentMeta { len: len as u32, segments: segments as u16, ce };
        (meta, if dropped { 0 } else { usize::MAX })
    }

    /// Processes a datagram. Returns false if there is no socket for it.
    fn handle_udp(&mut self, ip: &Ip, datagram: &Datagram, frame: P::Frame, origin: Origin) -> bool {
        let flow = ip.flow(datagram.source_port, datagram.destination_port);
        if let Some(stack) = self.other_stack(Protocol::Udp, &flow, origin) {
            self.hand_over(stack, frame, datagram.payload.len);
            return true;
        }
        let Some(socket) = self.find_socket(&flow) else { return false };
        if self.short && origin != Origin::Loopback {
            self.resources.egress.stats.short += 1;
            return true;
        }
        let Some(mut packet) = self.packet(frame, ip) else { return true };
        packet.truncate(datagram.payload.end());
        if packet.pull(datagram.payload.at).is_ok() {
            let ecn = ip.traffic_class & Ip::ECN;
            self.datagrams.handle_datagram(self.resources, socket, (flow, ecn), packet);
        }
        true
    }

    /// The socket for the datagrams of a flow.
    #[inline]
    fn find_socket(&mut self, flow: &Flow) -> Option<UdpId> {
        if let Some((last, id)) = &self.last.datagrams
            && last == flow
        {
            return Some(*id);
        }
        let id = self.datagrams.find(flow)?;
        if self.last.more {
            self.last.datagrams = Some((*flow, id));
        }
        Some(id)
    }

    /// Processes an ICMP error about a packet. It is used only if this host could have sent the
    /// packet. A router's error can arrive by any queue, because its addresses are not those of the
    /// flow.
    fn handle_icmp_error(&mut self, error: &IcmpError, frame: P::Frame, origin: Origin) {
        let IcmpError { kind, quoted: Quoted { flow, transport } } = error;
        let protocol = match transport {
            QuotedTransport::Tcp { .. } => Protocol::Tcp,
            QuotedTransport::Udp { .. } => Protocol::Udp,
        };
        if let Some(stack) = self.other_stack(protocol, flow, origin) {
            let len = frame.len();
            return self.hand_over(stack, frame, len);
        }
        match *transport {
            QuotedTransport::Tcp { seq } => self.tcp.handle_icmp_error(flow, *kind, seq, self.resources.now),
            QuotedTransport::Udp { len } => self.datagrams.handle_icmp_error(self.resources, flow, *kind, len),
        }
    }

    // ---- to other stacks

    /// The other stack of the host that a packet of this flow is for, if there is one.
    #[inline]
    fn other_stack(&mut self, protocol: Protocol, flow: &Flow, origin: Origin) -> Option<StackId> {
        if origin == Origin::Mailbox || !self.resources.host.is_shared() {
            return None;
        }
        if let Some((of, last, stack)) = &self.last.handed_over
            && *of == protocol
            && last == flow
        {
            return Some(*stack);
        }
        let stack = self.find_other_stack(protocol, flow)?;
        if self.last.more {
            self.last.handed_over = Some((protocol, *flow, stack));
        }
        Some(stack)
    }

    fn find_other_stack(&mut self, protocol: Protocol, flow: &Flow) -> Option<StackId> {
        let known = match protocol {
            Protocol::Tcp => self.tcp.connections.find(flow).is_some(),
            Protocol::Udp => self.find_socket(flow).is_some(),
        };
        if known {
            return None;
        }
        let (directory, id) = (self.resources.host.directory(), self.resources.id);
        let owner = match protocol {
            // A connection lives where its SYN arrives, if that stack listens. Its further segments
            // arrive there, too.
            Protocol::Tcp => {
                let listens = || self.tcp.listeners.find(flow.local).map(|_| id);
                directory.owner(flow).or_else(listens)
            }
            Protocol::Udp => None,
        };
        owner.or_else(|| directory.bound(protocol, flow)).filter(|&stack| stack != id)
    }

    /// Hands a frame over to another stack, at the end of the input. Its pages count in this
    /// stack's budget until the other stack has processed its group. A frame without payload is not
    /// limited by the budget.
    fn hand_over(&mut self, stack: StackId, frame: P::Frame, payload: usize) {
        let Resources { host, budget, egress, outbox, .. } = &mut *self.resources;
        let stats = &mut egress.stats;
        if stack == NO_STACK {
            stats.departed += 1;
            return;
        }
        if self.short && payload > 0 {
            stats.short += 1;
            return;
        }
        outbox.add((host, budget), stats, stack, (frame, payload > 0));
    }
}
