//! Address resolution and ICMP: the messages that keep a host reachable.

use crate::icmp;
use crate::interface::Cast;
use crate::neighbor::{Event, Sent};
use crate::stack::core::Core;
use crate::stack::input::Back;
use crate::stack::path::{NextHop, Path};
use crate::stack::payload::Payload;
use crate::tcp::{Flags, Header, IpFields};
use crate::wire::{
    Arp, Body, ByteRange, EthernetHeader, Flow, Icmp, IcmpKind, Ip, MAX_HEADERS, Outer, Transport, emit_echo_reply,
    emit_icmp_error, emit_tcp,
};
use netmem_packet::{Packet, TxQueue};

/// Bytes of a frame that an ICMP error makes: headers, and as much of the packet as it quotes.
const ERROR_FRAME: usize = 640;
/// The longest payload of an echo request that is answered.
const MOST_ECHO: usize = 2048;

impl<P: Payload> Core<P> {
    /// Runs the timers of neighbours, and carries out the events. Returns how many there were.
    pub(crate) fn neighbors<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T) -> usize {
        if self.host.neighbors_due().is_none_or(|at| at > self.now) {
            return 0;
        }
        let host = self.host.clone();
        let mut neighbors = host.neighbors();
        neighbors.timeout(self.now);
        let mut events = Vec::new();
        events.extend(std::iter::from_fn(|| neighbors.event()));
        host.neighbors_changed(&neighbors, false);
        drop(neighbors);
        let (work, mut changed) = (events.len(), false);
        for event in events {
            match event {
                Event::Ask { target, at } => {
                    let mut frame = [0; 128];
                    if let Some(len) = host.interface().ask(target, at, &mut frame) {
                        self.send_control(tx, &frame[..len]);
                    }
                }
                Event::Resolved { mac, packets, .. } => {
                    changed = true;
                    for mut packet in packets {
                        // The page has one holder: this packet was never sent.
                        if packet.write_at(0, &mac.0).is_ok() {
                            let _ = self.egress.send(tx, packet);
                        }
                    }
                }
                Event::Failed { packets, .. } => {
                    changed = true;
                    self.egress.stats.unresolved += packets.len() as u64;
                }
            }
        }
        if changed {
            host.hops_changed(self.id);
        }
        work
    }

    /// Sends a small, complete frame. It is lost if there is no room.
    fn send_control<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, frame: &[u8]) {
        if let Some(packet) = self.egress.whole(frame) {
            let _ = self.egress.send(tx, packet);
        }
    }

    pub(crate) fn arp<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, arp: &Arp) {
        let mut frame = [0; 128];
        if let Some(len) = self.host.interface().answer_arp(arp, &mut frame) {
            self.send_control(tx, &frame[..len]);
        }
        let host = self.host.clone();
        let mut neighbors = host.neighbors();
        neighbors.arp(arp, host.interface(), self.now);
        host.neighbors_changed(&neighbors, true);
    }

    pub(crate) fn icmp<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        (ip, back): (&Ip, Back),
        message: &Icmp,
        cast: Cast,
        packet: Packet<P::Mem>,
    ) {
        match message {
            Icmp::EchoRequest { id, payload } if icmp::may_echo(cast, ip, message) => {
                self.echo(tx, (ip, back), *id, *payload, &packet)
            }
            Icmp::Solicitation(asked) => {
                let mut frame = [0; 128];
                if let Some(len) = self.host.interface().answer_solicitation(back.link(), ip, asked, &mut frame) {
                    self.send_control(tx, &frame[..len]);
                }
                let host = self.host.clone();
                let mut neighbors = host.neighbors();
                neighbors.solicitation(ip, asked, host.interface(), self.now);
                host.neighbors_changed(&neighbors, true);
            }
            Icmp::Advertisement(said) => {
                let host = self.host.clone();
                let mut neighbors = host.neighbors();
                neighbors.advertisement(said, host.interface(), self.now);
                host.neighbors_changed(&neighbors, true);
            }
            _ => {}
        }
    }

    fn echo<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        (ip, back): (&Ip, Back),
        id: [u8; 4],
        payload: ByteRange,
        packet: &Packet<P::Mem>,
    ) {
        if payload.len > MOST_ECHO || !self.host.may_complain(self.now) {
            return;
        }
        let mut frame = [0; MOST_ECHO + 64];
        let Ok(sum) = packet.sum(payload.at, payload.len) else { return };
        let body = Body { len: payload.len, sum: Some(sum), segment_size: None };
        self.answer(tx, (ip, back), |outer| {
            let emitted = emit_echo_reply(&mut frame, outer, ip.destination, ip.source, id, body).ok()?;
            packet.copy_to(payload.at, &mut frame[emitted.len..emitted.len + payload.len]).ok()?;
            Some(frame[..emitted.len + payload.len].to_vec())
        });
    }

    /// Sends a frame back to where a packet came from. It is lost if there is no room for it.
    fn answer<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        (ip, back): (&Ip, Back),
        write: impl FnOnce(&Outer) -> Option<Vec<u8>>,
    ) {
        let Some(hop) = self.way_back(back, ip.source) else { return };
        let link = if let NextHop::Link(link) = hop { link } else { EthernetHeader::default() };
        let Some(frame) = write(&Outer::new(Some(link))) else { return };
        let Some(packet) = self.egress.whole(&frame) else { return };
        self.send_back(tx, hop, packet);
    }

    /// Sends a segment of no connection back to where a segment came from. It is lost if there is
    /// no room for it.
    pub(crate) fn reply<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        flow: &Flow,
        header: &Header,
        back: Back,
        ip: IpFields,
    ) {
        let Some(hop) = self.way_back(back, flow.remote.ip()) else { return };
        let link = if let NextHop::Link(link) = hop { link } else { EthernetHeader::default() };
        let outer = Outer { link: Some(link), traffic_class: ip.dscp << 2, hop_limit: ip.hop_limit.max(1) };
        let mut head = [0; MAX_HEADERS];
        let body = Body { len: 0, sum: None, segment_size: None };
        let Ok(emitted) = emit_tcp(&mut head, &outer, flow, header, body) else { return };
        let Some(packet) = self.egress.frame(&head, emitted) else { return };
        self.egress.stats.resets += u64::from(header.flags.has(Flags::RST));
        self.send_back(tx, hop, packet);
    }

    fn send_back<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, hop: NextHop, packet: Packet<P::Mem>) {
        let _ = match hop {
            NextHop::Here => self.egress.send_to_self(packet),
            NextHop::Link(_) | NextHop::Waits => self.egress.send(tx, packet),
        };
    }

    /// Sends a packet as soon as the address of its next hop is known. The first six bytes are
    /// written then.
    pub(crate) fn await_next_hop<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        path: &Path<P::Count>,
        packet: Packet<P::Mem>,
    ) {
        let Some(hop) = path.dst().hop() else { return };
        let host = self.host.clone();
        let mut neighbors = host.neighbors();
        let sent = neighbors.send(hop, packet, self.now);
        host.neighbors_changed(&neighbors, true);
        drop(neighbors);
        match sent {
            Sent::Now(mac, mut packet) => {
                if packet.write_at(0, &mac.0).is_ok() {
                    let _ = self.egress.send(tx, packet);
                }
            }
            Sent::Queued(None) => {}
            Sent::Queued(Some(_)) | Sent::Failed(_) => self.egress.stats.unresolved += 1,
        }
    }

    /// Sends an ICMP error: no socket has taken a packet. `packet` are its first bytes, from the
    /// link's header on. No error is sent about a datagram that was in fragments.
    pub(crate) fn unreachable<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        (ip, back): (&Ip, Back),
        transport: &Transport,
        cast: Cast,
        kind: IcmpKind,
        packet: &[u8],
    ) {
        let quoted = packet.get(EthernetHeader::LEN..).filter(|_| ip.content.at > EthernetHeader::LEN);
        let Some(quoted) = quoted.filter(|_| icmp::may_answer(cast, ip, transport)) else { return };
        if !self.host.may_complain(self.now) {
            return;
        }
        self.egress.stats.icmp_errors += 1;
        self.answer(tx, (ip, back), |outer| {
            let mut frame = [0; ERROR_FRAME];
            let emitted = emit_icmp_error(&mut frame, outer, ip.destination, ip.source, kind, quoted).ok()?;
            Some(frame[..emitted.len].to_vec())
        });
    }
}
