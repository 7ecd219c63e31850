//! Frames come in: headers are copied and read once, and the rest follows by reference.

use super::core::Core;
use super::directory::Protocol;
use crate::interface::Cast;
use crate::tcp;
use crate::wire::{self, Covered, Datagram, Flow, IcmpKind, Ip, Link, MAX_HEAD, Network, Segment, Transport};
use netmem_packet::{Checksum, Meta, Packet, TxQueue};
use netmem_pool::Mapped;

/// Where a frame came from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The device's queue.
    Queue,
    /// Another stack, which does not know what to do with it.
    Mailbox,
    /// This stack: it is for an address of its own.
    Here,
}

impl<M: Mapped> Core<M> {
    /// A frame was received.
    pub(super) fn frame<T: TxQueue<Mem = M>>(&mut self, tx: &mut T, packet: Packet<M>, origin: Origin) {
        self.egress.stats.received += 1;
        let mut head = [0; MAX_HEAD];
        let n = packet.len().min(MAX_HEAD);
        let head = &mut head[..n];
        if packet.copy_to(0, head).is_err() {
            return;
        }
        match wire::parse(head, packet.len()) {
            Ok((link, Network::Ip(ip))) => self.ip(tx, link, &ip, head, packet, origin),
            Ok((_, Network::Arp(arp))) => self.arp(tx, &arp),
            Err(_) => self.egress.stats.malformed += 1,
        }
    }

    fn ip<T: TxQueue<Mem = M>>(
        &mut self,
        tx: &mut T,
        link: Link,
        ip: &Ip,
        head: &[u8],
        packet: Packet<M>,
        origin: Origin,
    ) {
        // What is from this host was judged when it was sent, or by the stack that received it.
        let accepted =
            if origin == Origin::Here { Some(Cast::Unicast) } else { self.host.interface().accepts(&link, ip) };
        let Some(cast) = accepted else {
            self.egress.stats.foreign += 1;
            return;
        };
        if ip.fragment.is_some() {
            return self.fragment(tx, link, ip, packet, cast);
        }
        self.whole(tx, link, ip, head, packet, (cast, origin));
    }

    /// A fragment of a datagram.
    #[cold]
    fn fragment<T: TxQueue<Mem = M>>(&mut self, tx: &mut T, link: Link, ip: &Ip, mut packet: Packet<M>, cast: Cast) {
        packet.truncate(ip.content.end());
        if packet.pull(ip.content.at).is_err() {
            return;
        }
        let Some(whole) = self.reassembly.input(ip, packet, self.now) else { return };
        let mut pieces = whole.pieces.into_iter();
        let Some(mut packet) = pieces.next() else { return };
        let mut rest: Vec<Packet<M>> = Vec::new();
        for piece in pieces {
            if rest.is_empty() {
                rest.extend(packet.append(piece).err());
            } else {
                rest.push(piece);
            }
        }
        if !rest.is_empty() {
            // More fragments than a packet has: they are copied.
            let frags: Vec<_> = std::iter::once(&packet).chain(&rest).flat_map(|p| p.fragments().cloned()).collect();
            let Some(copied) = self.egress.copied(&frags) else { return };
            packet = copied;
        }
        // No device has seen it whole.
        packet.meta = Meta::default();
        let mut head = [0; MAX_HEAD];
        let n = packet.len().min(MAX_HEAD);
        let (mut ip, head) = (whole.ip, &mut head[..n]);
        if packet.copy_to(0, head).is_ok() && ip.skip_extensions(head).is_ok() {
            self.whole(tx, link, &ip, head, packet, (cast, Origin::Queue));
        }
    }

    /// A datagram that is no fragment.
    fn whole<T: TxQueue<Mem = M>>(
        &mut self,
        tx: &mut T,
        link: Link,
        ip: &Ip,
        head: &[u8],
        packet: Packet<M>,
        (cast, origin): (Cast, Origin),
    ) {
        let Ok(transport) = ip.transport(head) else {
            self.egress.stats.malformed += 1;
            return;
        };
        if let Some(covered) = ip.covered(&transport)
            && !self.is_right(&packet, covered, matches!(transport, Transport::Icmp(_)))
        {
            self.egress.stats.wrong_checksum += 1;
            return;
        }
        match &transport {
            Transport::Tcp(segment) if cast == Cast::Unicast => self.tcp(tx, ip, segment, packet, origin),
            Transport::Tcp(_) => {}
            Transport::Udp(datagram) => {
                if !self.datagram(ip, datagram, packet, origin) {
                    self.unreachable(tx, ip, &transport, cast, IcmpKind::PortUnreachable, head);
                }
            }
            Transport::Icmp(message) => self.icmp(tx, (&link, ip), message, cast, packet),
            Transport::Unknown => self.unreachable(tx, ip, &transport, cast, IcmpKind::ProtocolUnreachable, head),
        }
    }

    /// Whether a transport checksum is right. Reads the payload if the device has not vouched for it.
    fn is_right(&mut self, packet: &Packet<M>, covered: Covered, icmp: bool) -> bool {
        match packet.meta.checksum {
            // The frame never was on a wire.
            Checksum::Partial { .. } => return true,
            Checksum::Vouched if !icmp => return true,
            _ => {}
        }
        self.egress.stats.checksummed_received += 1;
        packet.sum(covered.part.at, covered.part.len).is_ok_and(|sum| covered.holds(sum))
    }

    fn tcp<T: TxQueue<Mem = M>>(
        &mut self,
        tx: &mut T,
        ip: &Ip,
        segment: &Segment,
        mut packet: Packet<M>,
        origin: Origin,
    ) {
        let flow = ip.flow(segment.source_port, segment.destination_port);
        if origin != Origin::Mailbox && self.host.is_shared() {
            match self.elsewhere(Protocol::Tcp, &flow) {
                None => {}
                Some(stack) => return self.hand_over(stack, packet),
            }
        }
        let len = segment.payload.len;
        // A segment that was merged, or never cut, says how large its parts were.
        let segments = match packet.meta.gso {
            Some(gso) if gso.size > 0 => len.div_ceil(gso.size.into()).max(1),
            _ => 1,
        };
        let meta = tcp::Meta { len: len as u32, segments: segments as u16, ce: ip.is_ce() };
        packet.truncate(segment.payload.end());
        if packet.pull(segment.payload.at).is_err() {
            return;
        }
        self.segment(tx, flow, &segment.header, meta, packet);
    }

    /// The other stack that a packet of this flow is for, if there is one.
    pub(super) fn elsewhere(&self, protocol: Protocol, flow: &Flow) -> Option<u32> {
        let known = match protocol {
            Protocol::Tcp => self.has_connection(flow),
            Protocol::Udp => self.udp.find(flow).is_some(),
        };
        if known {
            return None;
        }
        let directory = self.host.directory();
        let owner = if protocol == Protocol::Tcp { directory.owner(flow) } else { None };
        owner.or_else(|| directory.bound(protocol, flow)).filter(|&stack| stack != self.id)
    }

    fn hand_over(&mut self, stack: u32, packet: Packet<M>) {
        if self.host.deliver(stack, packet) {
            self.egress.stats.handed_over += 1;
        } else {
            self.egress.stats.mailbox_full += 1;
        }
    }

    /// A datagram. False if no socket is there for it.
    fn datagram(&mut self, ip: &Ip, datagram: &Datagram, mut packet: Packet<M>, origin: Origin) -> bool {
        let flow = ip.flow(datagram.source_port, datagram.destination_port);
        if origin != Origin::Mailbox
            && self.host.is_shared()
            && let Some(stack) = self.elsewhere(Protocol::Udp, &flow)
        {
            self.hand_over(stack, packet);
            return true;
        }
        let Some(socket) = self.udp.find(&flow) else { return false };
        packet.truncate(datagram.payload.end());
        if packet.pull(datagram.payload.at).is_ok() {
            let queued = self.udp.deliver(socket, flow, packet, &mut self.wakers);
            self.egress.stats.datagrams_dropped += u64::from(!queued);
        }
        true
    }
}
