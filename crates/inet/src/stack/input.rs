//! Received frames: headers are copied and read once, and the rest is passed on by reference.

use crate::interface::Cast;
use crate::stack::carrier::Part;
use crate::stack::core::Core;
use crate::stack::path::NextHop;
use crate::stack::payload::{Frame, Payload, Transmit};
use crate::stack::shared::directory::{NOBODY, Protocol};
use crate::tcp;
use crate::wire::{
    self, Covered, Datagram, EthernetHeader, Flow, Icmp, IcmpError, IcmpKind, Ip, MAX_HEAD, Network, Quoted,
    QuotedTransport, Segment, Transport,
};
use netmem_packet::{Checksum, Gso, GsoKind, Meta, Packet, TxQueue};
use std::net::IpAddr;

/// The origin of a frame.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The device's queue.
    Queue,
    /// Another stack, which has no socket for it.
    Mailbox,
    /// This stack: the frame is for an address of this host.
    Here,
}

/// The way back to the station from which a packet came. An answer to a packet of no connection
/// takes it: such an answer needs no entry of a destination or of a neighbour, of which a peer
/// could otherwise make the stack forget others.
#[derive(Clone, Copy)]
pub(crate) struct Back {
    /// The link's header of the packet.
    link: EthernetHeader,
    /// The packet came from this host.
    here: bool,
}

impl Back {
    /// The link's header of the packet.
    pub(crate) fn link(&self) -> &EthernetHeader {
        &self.link
    }
}

impl<P: Payload> Core<P> {
    /// The target of an answer to `to`, if there is a route to it.
    pub(crate) fn way_back(&self, back: Back, to: IpAddr) -> Option<NextHop> {
        if back.here {
            return Some(NextHop::Here);
        }
        let (source, destination) = (self.host.interface().mac, back.link.source);
        let answers = destination.is_unicast() && self.host.routes().reaches(to);
        answers.then_some(NextHop::Link(EthernetHeader { destination, source }))
    }

    /// Processes a received frame.
    pub(crate) fn frame<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, frame: P::Frame, origin: Origin)
    where
        P: Transmit<T>,
    {
        self.egress.stats.received += 1;
        let mut head = [0; MAX_HEAD];
        let n = frame.peek(&mut head);
        let head = &head[..n];
        match wire::parse(head, frame.len()) {
            Ok((link, Network::Ip(ip))) => self.ip(tx, link, &ip, head, frame, origin),
            Ok((_, Network::Arp(arp))) => self.arp(tx, &arp),
            Err(why) => self.not_read(&frame, head, why),
        }
    }

    /// The headers of a frame were not understood.
    #[cold]
    fn not_read(&mut self, frame: &P::Frame, head: &[u8], why: wire::ParseError) {
        let more = head.len() < frame.len().min(MAX_HEAD);
        match why {
            wire::ParseError::Beyond { .. } if more => self.egress.stats.unreadable += 1,
            _ => self.egress.stats.malformed += 1,
        }
    }

    /// The frame as a packet, cut to the length of the IP packet. If it is in memory that is not
    /// read here, it is dropped.
    #[inline]
    fn packet(&mut self, frame: P::Frame, ip: &Ip) -> Option<Packet<P::Mem>> {
        let packet = frame.into_packet(ip.content.end());
        self.egress.stats.unreadable += u64::from(packet.is_none());
        packet
    }

    fn ip<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        link: EthernetHeader,
        ip: &Ip,
        head: &[u8],
        frame: P::Frame,
        origin: Origin,
    ) where
        P: Transmit<T>,
    {
        // A frame of this host was checked when it was sent, or by the stack that received it.
        let accepted =
            if origin == Origin::Here { Some(Cast::Unicast) } else { self.host.interface().accepts(&link, ip) };
        let Some(cast) = accepted else {
            self.egress.stats.foreign += 1;
            return;
        };
        if ip.fragment.is_some() {
            let Some(packet) = self.packet(frame, ip) else { return };
            return self.fragment(tx, link, ip, packet, cast);
        }
        self.whole(tx, link, ip, head, frame, (cast, origin));
    }

    /// A fragment of a datagram.
    #[cold]
    fn fragment<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        link: EthernetHeader,
        ip: &Ip,
        mut packet: Packet<P::Mem>,
        cast: Cast,
    ) where
        P: Transmit<T>,
    {
        if packet.pull(ip.content.at).is_err() {
            return;
        }
        if self.short {
            self.egress.stats.short += 1;
            return;
        }
        self.reassembly.timeout(self.now);
        let charges = loop {
            match self.fragments.try_charge_many(packet.pages()) {
                Some(charges) => break charges,
                // The oldest datagram makes room.
                None if self.reassembly.give_up_oldest() => {}
                None => {
                    self.egress.stats.over_budget += 1;
                    return;
                }
            }
        };
        let Some(whole) = self.reassembly.input(ip, Part::new(packet, charges), self.now) else { return };
        let mut pieces = whole.pieces.into_iter().map(|part| part.packet);
        let Some(mut packet) = pieces.next() else { return };
        let mut rest: Vec<Packet<P::Mem>> = Vec::new();
        for piece in pieces {
            if rest.is_empty() {
                rest.extend(packet.append(piece).err());
            } else {
                rest.push(piece);
            }
        }
        if !rest.is_empty() {
            // There are more fragments than a packet can have, so they are copied.
            let frags: Vec<_> = std::iter::once(&packet).chain(&rest).flat_map(|p| p.fragments().cloned()).collect();
            let Some(copied) = self.egress.copied(&frags) else { return };
            packet = copied;
        }
        // No device has seen the complete datagram.
        packet.meta = Meta::default();
        let mut head = [0; MAX_HEAD];
        let n = packet.len().min(MAX_HEAD);
        let (mut ip, head) = (whole.ip, &mut head[..n]);
        if packet.copy_to(0, head).is_ok() && ip.skip_extensions(head).is_ok() {
            self.whole(tx, link, &ip, head, packet.into(), (cast, Origin::Queue));
        }
    }

    /// A datagram that is no fragment.
    fn whole<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        link: EthernetHeader,
        ip: &Ip,
        head: &[u8],
        frame: P::Frame,
        (cast, origin): (Cast, Origin),
    ) where
        P: Transmit<T>,
    {
        let transport = match ip.transport(head) {
            Ok(transport) => transport,
            Err(why) => return self.not_read(&frame, head, why),
        };
        if let Some(covered) = ip.covered(&transport) {
            match self.is_right(&frame, covered, matches!(transport, Transport::Icmp(_))) {
                Some(true) => {}
                Some(false) => {
                    self.egress.stats.wrong_checksum += 1;
                    return;
                }
                None => {
                    let segment = match &transport {
                        Transport::Tcp(segment) => Some(segment),
                        _ => None,
                    };
                    return self.unverified(ip, segment);
                }
            }
        }
        let back = Back { link, here: origin == Origin::Here };
        match &transport {
            Transport::Tcp(segment) if cast == Cast::Unicast => self.tcp(tx, (ip, back), segment, frame, origin),
            Transport::Tcp(_) => {}
            Transport::Udp(datagram) => {
                if !self.datagram(ip, datagram, frame, origin) {
                    self.unreachable(tx, (ip, back), &transport, cast, IcmpKind::PortUnreachable, head);
                }
            }
            Transport::Icmp(Icmp::Error(error)) => {
                if cast == Cast::Unicast {
                    self.icmp_error(error, frame, origin);
                }
            }
            Transport::Icmp(message) => {
                let Some(packet) = self.packet(frame, ip) else { return };
                self.icmp(tx, (ip, back), message, cast, packet);
            }
            Transport::Unknown => {
                self.unreachable(tx, (ip, back), &transport, cast, IcmpKind::ProtocolUnreachable, head)
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
        self.egress.stats.checksummed_received += 1;
        Some(covered.holds(sum))
    }

    fn tcp<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        (ip, back): (&Ip, Back),
        segment: &Segment,
        frame: P::Frame,
        origin: Origin,
    ) where
        P: Transmit<T>,
    {
        let flow = ip.flow(segment.source_port, segment.destination_port);
        if origin != Origin::Mailbox && self.host.is_shared() {
            match self.elsewhere(Protocol::Tcp, &flow) {
                None => {}
                Some(stack) => return self.hand_over(stack, frame, segment.payload.len),
            }
        }
        let wire::ByteRange { at, len } = segment.payload;
        // The header of a merged segment, or of one that was never cut, says how large its parts
        // are.
        let segments = match frame.meta().gso {
            Some(gso) if gso.size > 0 => len.div_ceil(gso.size.into()).max(1),
            _ => 1,
        };
        let meta = tcp::Meta { len: len as u32, segments: segments as u16, ce: ip.is_ce() };
        // Missing payload counts as dropped.
        let dropped = self.short && len > 0 && origin != Origin::Here;
        self.egress.stats.short += u64::from(dropped);
        let pieces = if dropped { 0 } else { usize::MAX };
        self.segment(tx, (flow, back), &segment.header, meta, P::received(frame, at, len).take(pieces));
    }

    /// The other stack that a packet of this flow is for, if there is one.
    pub(crate) fn elsewhere(&self, protocol: Protocol, flow: &Flow) -> Option<u32> {
        let known = match protocol {
            Protocol::Tcp => self.connections.find(flow).is_some(),
            Protocol::Udp => self.udp.find(flow).is_some(),
        };
        if known {
            return None;
        }
        let directory = self.host.directory();
        let owner = match protocol {
            // A connection lives where its SYN arrives, if that stack listens. Its further segments
            // arrive there, too.
            Protocol::Tcp => {
                let listens = || self.listeners.find(flow.local).map(|_| self.id);
                directory.owner(flow).or_else(listens)
            }
            Protocol::Udp => None,
        };
        owner.or_else(|| directory.bound(protocol, flow)).filter(|&stack| stack != self.id)
    }

    /// Gives a frame to another stack. Its pages count in this stack's budget until the other stack
    /// takes it. A frame without payload is not limited by the budget.
    fn hand_over(&mut self, stack: u32, frame: P::Frame, payload: usize) {
        let stats = &mut self.egress.stats;
        if stack == NOBODY {
            stats.departed += 1;
            return;
        }
        if self.short && payload > 0 {
            stats.short += 1;
            return;
        }
        let pages = frame.pages();
        let charges =
            if payload > 0 { self.budget.try_charge_many(pages) } else { Some(self.budget.charge_many(pages)) };
        let Some(charges) = charges else {
            stats.over_budget += 1;
            return;
        };
        if self.host.deliver(stack, (frame, charges)) {
            stats.handed_over += 1;
        } else {
            stats.mailbox_full += 1;
        }
    }

    /// Processes an ICMP error about a packet. It is used only if this host could have sent the
    /// packet. A router's error can arrive by any queue, because its addresses are not those of the
    /// flow.
    fn icmp_error(&mut self, error: &IcmpError, frame: P::Frame, origin: Origin) {
        let IcmpError { kind, quoted: Quoted { flow, transport } } = error;
        let protocol = match transport {
            QuotedTransport::Tcp { .. } => Protocol::Tcp,
            QuotedTransport::Udp { .. } => Protocol::Udp,
        };
        if origin != Origin::Mailbox
            && self.host.is_shared()
            && let Some(stack) = self.elsewhere(protocol, flow)
        {
            let len = frame.len();
            return self.hand_over(stack, frame, len);
        }
        match *transport {
            QuotedTransport::Tcp { seq } => self.connection_error(flow, *kind, seq),
            QuotedTransport::Udp { len } => self.datagram_error(flow, *kind, len),
        }
    }

    /// Delivers a datagram. Returns false if there is no socket for it.
    fn datagram(&mut self, ip: &Ip, datagram: &Datagram, frame: P::Frame, origin: Origin) -> bool {
        let flow = ip.flow(datagram.source_port, datagram.destination_port);
        if origin != Origin::Mailbox
            && self.host.is_shared()
            && let Some(stack) = self.elsewhere(Protocol::Udp, &flow)
        {
            self.hand_over(stack, frame, datagram.payload.len);
            return true;
        }
        let Some(socket) = self.udp.find(&flow) else { return false };
        if self.short && origin != Origin::Here {
            self.egress.stats.short += 1;
            return true;
        }
        let Some(mut packet) = self.packet(frame, ip) else { return true };
        packet.truncate(datagram.payload.end());
        if packet.pull(datagram.payload.at).is_err() {
            return true;
        }
        // Several datagrams in one frame: the sender's kernel has not cut them, or the device has
        // merged them.
        let size = match packet.meta.gso {
            Some(Gso { kind: GsoKind::UdpSegment, size, .. }) if size > 0 => usize::from(size),
            _ => usize::MAX,
        };
        loop {
            let rest = (packet.len() > size).then(|| packet.clone());
            packet.truncate(size);
            let queued = self.udp.deliver(socket, flow, packet, &mut self.wakers);
            self.egress.stats.datagrams_dropped += u64::from(!queued);
            let Some(mut next) = rest else { return true };
            if next.pull(size).is_err() {
                return true;
            }
            packet = next;
        }
    }
}
