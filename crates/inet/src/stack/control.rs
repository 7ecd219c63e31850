//! Address resolution and ICMP: the messages that keep a host reachable.
//!
//! These messages, and the answers to segments of no connection, are best effort: without room or a
//! page, they are lost. A peer can cause any number of them, so those that it does not need are
//! limited in their rate ([`icmp`]).

use crate::icmp;
use crate::interface::Cast;
use crate::neighbor::{Event, Sent};
use crate::stack::path::{NextHop, Path};
use crate::stack::payload::Payload;
use crate::stack::resources::Resources;
use crate::stack::shared::host::Host;
use crate::tcp::{Flags, Header, IpFields};
use crate::time::Time;
use crate::wire::{
    Arp, Body, ByteRange, EthernetHeader, Flow, Icmp, IcmpKind, Ip, MAX_HEADERS, Outer, Transport, emit_echo_reply,
    emit_icmp_error, emit_tcp,
};
use netmem_packet::{Packet, TxQueue};
use std::net::IpAddr;

/// Bytes of a frame that an ICMP error makes: headers, and as much of the packet as it quotes.
const ERROR_FRAME: usize = 640;
/// The longest payload of an echo request that is answered.
const MOST_ECHO: usize = 2048;

/// The way back to the station from which a packet came. An answer to a packet of no connection
/// uses it: such an answer needs no entry of a destination or of a neighbour, of which a peer could
/// otherwise make the stack forget others.
#[derive(Clone, Copy)]
pub(crate) struct ReplyPath {
    /// The Ethernet header of the packet.
    pub(crate) header: EthernetHeader,
    /// The packet came from this host.
    pub(crate) loopback: bool,
}

impl ReplyPath {
    /// The target of an answer to `to`, if there is a route to it.
    fn next_hop<P: Payload>(&self, host: &Host<P>, to: IpAddr) -> Option<NextHop> {
        if self.loopback {
            return Some(NextHop::Loopback);
        }
        let (source, destination) = (host.interface().mac, self.header.source);
        let answers = destination.is_unicast() && host.routes().reaches(to);
        answers.then_some(NextHop::Device(EthernetHeader { destination, source }))
    }
}

/// The sender of a stack's own messages.
pub(crate) struct Control<'a, P: Payload, T> {
    pub(crate) resources: &'a mut Resources<P>,
    pub(crate) tx: &'a mut T,
}

impl<P: Payload, T: TxQueue<Mem = P::Mem>> Control<'_, P, T> {
    // ---- neighbours

    /// Runs the timers of neighbours, and carries out the events. Returns how many there were.
    #[inline]
    pub(crate) fn poll_neighbors(&mut self) -> usize {
        let now = self.resources.now;
        if self.resources.host.neighbors_due().is_none_or(|at| at > now) { 0 } else { self.run_neighbors(now) }
    }

    #[cold]
    fn run_neighbors(&mut self, now: Time) -> usize {
        let host = self.resources.host.clone();
        let mut neighbors = host.neighbors();
        neighbors.handle_timeout(now);
        let mut events = Vec::new();
        events.extend(std::iter::from_fn(|| neighbors.poll_event()));
        host.neighbors_changed(&neighbors, false);
        drop(neighbors);
        let (work, mut changed) = (events.len(), false);
        for event in events {
            match event {
                Event::Solicit { target, at } => {
                    let mut frame = [0; 128];
                    if let Some(len) = host.interface().solicit(target, at, &mut frame) {
                        self.send_frame(&frame[..len]);
                    }
                }
                Event::Resolved { mac, packets, .. } => {
                    changed = true;
                    for mut packet in packets {
                        // The page has one holder: this packet was never sent.
                        if packet.write_at(0, &mac.0).is_ok() {
                            self.send(packet);
                        }
                    }
                }
                Event::Failed { packets, .. } => {
                    changed = true;
                    self.resources.egress.stats.unresolved += packets.len() as u64;
                }
            }
        }
        if changed {
            host.handle_hop_change(self.resources.id);
        }
        work
    }

    /// Processes a message of ARP.
    pub(crate) fn handle_arp(&mut self, arp: &Arp) {
        let host = self.resources.host.clone();
        let mut frame = [0; 128];
        if let Some(len) = host.interface().answer_arp(arp, &mut frame) {
            self.send_frame(&frame[..len]);
        }
        let mut neighbors = host.neighbors();
        neighbors.handle_arp(arp, host.interface(), self.resources.now);
        host.neighbors_changed(&neighbors, true);
    }

    /// Sends a packet as soon as the address of its next hop is known. The first six bytes are
    /// written then.
    pub(crate) fn await_next_hop(&mut self, path: &Path<P>, packet: Packet<P::Mem>) {
        let Some(hop) = path.dst().hop() else { return };
        let host = self.resources.host.clone();
        let mut neighbors = host.neighbors();
        let sent = neighbors.send(hop, packet, self.resources.now);
        host.neighbors_changed(&neighbors, true);
        drop(neighbors);
        match sent {
            Sent::Now(mac, mut packet) => {
                if packet.write_at(0, &mac.0).is_ok() {
                    self.send(packet);
                }
            }
            Sent::Queued(None) => {}
            Sent::Queued(Some(_)) | Sent::Failed(_) => self.resources.egress.stats.unresolved += 1,
        }
    }

    // ---- ICMP

    /// Processes an ICMP message that is no error.
    pub(crate) fn handle_icmp(
        &mut self,
        (ip, reply_path): (&Ip, ReplyPath),
        message: &Icmp,
        cast: Cast,
        packet: &Packet<P::Mem>,
    ) {
        let host = self.resources.host.clone();
        match message {
            Icmp::EchoRequest { id, payload } if icmp::may_echo(cast, ip, message) => {
                self.echo((ip, reply_path), *id, *payload, packet)
            }
            Icmp::Solicitation(solicitation) => {
                let mut frame = [0; 128];
                let header = &reply_path.header;
                if let Some(len) = host.interface().answer_solicitation(header, ip, solicitation, &mut frame) {
                    self.send_frame(&frame[..len]);
                }
                let mut neighbors = host.neighbors();
                neighbors.handle_solicitation(ip, solicitation, host.interface(), self.resources.now);
                host.neighbors_changed(&neighbors, true);
            }
            Icmp::Advertisement(advertisement) => {
                let mut neighbors = host.neighbors();
                neighbors.handle_advertisement(advertisement, host.interface(), self.resources.now);
                host.neighbors_changed(&neighbors, true);
            }
            _ => {}
        }
    }

    fn echo(&mut self, (ip, reply_path): (&Ip, ReplyPath), id: [u8; 4], payload: ByteRange, packet: &Packet<P::Mem>) {
        if payload.len > MOST_ECHO || !self.resources.host.allows_icmp(self.resources.now) {
            return;
        }
        let mut frame = [0; MOST_ECHO + 64];
        let Ok(sum) = packet.sum(payload.at, payload.len) else { return };
        let body = Body { len: payload.len, sum: Some(sum), segment_size: None };
        self.answer((ip, reply_path), |outer| {
            let emitted = emit_echo_reply(&mut frame, outer, ip.destination, ip.source, id, body).ok()?;
            packet.copy_to(payload.at, &mut frame[emitted.len..emitted.len + payload.len]).ok()?;
            Some(frame[..emitted.len + payload.len].to_vec())
        });
    }

    /// Sends an ICMP error: no socket has received a packet. `packet` are its first bytes, from the
    /// Ethernet header on. No error is sent about a datagram that was in fragments.
    pub(crate) fn send_unreachable(
        &mut self,
        (ip, reply_path): (&Ip, ReplyPath),
        transport: &Transport,
        cast: Cast,
        kind: IcmpKind,
        packet: &[u8],
    ) {
        let quoted = packet.get(EthernetHeader::LEN..).filter(|_| ip.content.at > EthernetHeader::LEN);
        let Some(quoted) = quoted.filter(|_| icmp::may_answer(cast, ip, transport)) else { return };
        if !self.resources.host.allows_icmp(self.resources.now) {
            return;
        }
        self.resources.egress.stats.icmp_errors += 1;
        self.answer((ip, reply_path), |outer| {
            let mut frame = [0; ERROR_FRAME];
            let emitted = emit_icmp_error(&mut frame, outer, ip.destination, ip.source, kind, quoted).ok()?;
            Some(frame[..emitted.len].to_vec())
        });
    }

    // ---- answers

    /// Sends a segment of no connection back to where a segment came from.
    pub(crate) fn reply(&mut self, flow: &Flow, header: &Header, reply_path: ReplyPath, ip: IpFields) {
        let Some(hop) = reply_path.next_hop(&self.resources.host, flow.remote.ip()) else { return };
        let outer =
            Outer { link: Some(ethernet_header(hop)), traffic_class: ip.dscp << 2, hop_limit: ip.hop_limit.max(1) };
        let mut head = [0; MAX_HEADERS];
        let body = Body { len: 0, sum: None, segment_size: None };
        let Ok(emitted) = emit_tcp(&mut head, &outer, flow, header, body) else { return };
        let egress = &mut self.resources.egress;
        let Some(packet) = egress.header_frame(&head, emitted) else { return };
        egress.stats.resets += u64::from(header.flags.has(Flags::RST));
        self.send_to(hop, packet);
    }

    /// Sends a frame back to where a packet came from.
    fn answer(&mut self, (ip, reply_path): (&Ip, ReplyPath), write: impl FnOnce(&Outer) -> Option<Vec<u8>>) {
        let Some(hop) = reply_path.next_hop(&self.resources.host, ip.source) else { return };
        let Some(frame) = write(&Outer::new(Some(ethernet_header(hop)))) else { return };
        let Some(packet) = self.resources.egress.complete_frame(&frame) else { return };
        self.send_to(hop, packet);
    }

    fn send_to(&mut self, hop: NextHop, packet: Packet<P::Mem>) {
        match hop {
            NextHop::Loopback => drop(self.resources.egress.send_to_self(packet)),
            NextHop::Device(_) | NextHop::Pending => self.send(packet),
        }
    }

    /// Sends a small frame, with its checksums.
    fn send_frame(&mut self, frame: &[u8]) {
        if let Some(packet) = self.resources.egress.complete_frame(frame) {
            self.send(packet);
        }
    }

    fn send(&mut self, packet: Packet<P::Mem>) {
        drop(self.resources.egress.send(self.tx, packet));
    }
}

/// The Ethernet header of a frame to `hop`. A frame to this host has an empty one.
fn ethernet_header(hop: NextHop) -> EthernetHeader {
    if let NextHop::Device(header) = hop { header } else { EthernetHeader::default() }
}
