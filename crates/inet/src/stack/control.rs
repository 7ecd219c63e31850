//! Address resolution and ICMP: the messages that keep a host reachable.

use super::core::Core;
use super::path::{NextHop, Path};
use super::payload::Payload;
use crate::icmp;
use crate::interface::Cast;
use crate::neighbor::{Event, Sent};
use crate::wire::{
    Arp, Body, Flow, Icmp, IcmpError, IcmpKind, Ip, Link, Outer, Part, Transport, emit_echo_reply, emit_icmp_error,
    protocol,
};
use netmem_packet::{Packet, TxQueue};

/// Bytes of a frame that an ICMP error makes: headers, and as much of the packet as it quotes.
const ERROR_FRAME: usize = 640;
/// The longest payload of an echo request that is answered.
const MOST_ECHO: usize = 2048;

impl<P: Payload> Core<P> {
    /// Runs the timers of neighbours, and carries out the events. Returns how many there were.
    pub(super) fn neighbors<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T) -> usize {
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
        let work = events.len();
        for event in events {
            match event {
                Event::Ask { target, at } => {
                    let mut frame = [0; 128];
                    if let Some(len) = host.interface().ask(target, at, &mut frame) {
                        self.send_control(tx, &frame[..len]);
                    }
                }
                Event::Resolved { mac, packets, .. } => {
                    self.retry_now();
                    for mut packet in packets {
                        // The page has one holder: this packet was never sent.
                        if packet.write_at(0, &mac.0).is_ok() {
                            let _ = self.egress.send(tx, packet);
                        }
                    }
                }
                Event::Failed { packets, .. } => {
                    self.retry_now();
                    self.egress.stats.unresolved += packets.len() as u64;
                }
            }
        }
        work
    }

    /// Sends a small, complete frame. It is lost if there is no room.
    fn send_control<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, frame: &[u8]) {
        if let Some(packet) = self.egress.whole(frame) {
            let _ = self.egress.send(tx, packet);
        }
    }

    pub(super) fn arp<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, arp: &Arp) {
        let mut frame = [0; 128];
        if let Some(len) = self.host.interface().answer_arp(arp, &mut frame) {
            self.send_control(tx, &frame[..len]);
        }
        let host = self.host.clone();
        let mut neighbors = host.neighbors();
        neighbors.arp(arp, host.interface(), self.now);
        host.neighbors_changed(&neighbors, true);
    }

    pub(super) fn icmp<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        (link, ip): (&Link, &Ip),
        message: &Icmp,
        cast: Cast,
        packet: Packet<P::Mem>,
    ) {
        match message {
            Icmp::EchoRequest { id, payload } if icmp::may_echo(cast, ip, message) => {
                self.echo(tx, ip, *id, *payload, &packet)
            }
            Icmp::Error(error) if cast == Cast::Unicast => self.icmp_error(error),
            Icmp::Solicitation(asked) => {
                let mut frame = [0; 128];
                if let Some(len) = self.host.interface().answer_solicitation(link, ip, asked, &mut frame) {
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
        ip: &Ip,
        id: [u8; 4],
        payload: Part,
        packet: &Packet<P::Mem>,
    ) {
        if payload.len > MOST_ECHO || !self.host.may_complain(self.now) {
            return;
        }
        let mut frame = [0; MOST_ECHO + 64];
        let Ok(sum) = packet.sum(payload.at, payload.len) else { return };
        let body = Body { len: payload.len, sum: Some(sum), segment_size: None };
        self.answer(tx, ip, |outer| {
            let emitted = emit_echo_reply(&mut frame, outer, ip.destination, ip.source, id, body).ok()?;
            packet.copy_to(payload.at, &mut frame[emitted.len..emitted.len + payload.len]).ok()?;
            Some(frame[..emitted.len + payload.len].to_vec())
        });
    }

    /// Sends a frame back to where a packet came from.
    fn answer<T: TxQueue<Mem = P::Mem>>(&mut self, tx: &mut T, ip: &Ip, write: impl FnOnce(&Outer) -> Option<Vec<u8>>) {
        let Some(mut path) = self.find_path(ip.source) else { return };
        let hop = path.next_hop(&self.host, self.now);
        let link = if let NextHop::Link(link) = hop { link } else { path.unresolved() };
        let Some(frame) = write(&Outer::new(Some(link))) else { return };
        let Some(packet) = self.egress.whole(&frame) else { return };
        let _ = match hop {
            NextHop::Link(_) => self.egress.send(tx, packet),
            NextHop::Here => self.egress.send_to_self(packet),
            NextHop::Waits => {
                self.await_next_hop(tx, &path, packet);
                Ok(())
            }
        };
    }

    /// Sends a packet as soon as the address of its next hop is known. The first six bytes are written then.
    pub(super) fn await_next_hop<T: TxQueue<Mem = P::Mem>>(
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

    /// Sends an ICMP error: no socket has taken a packet. `packet` are its first bytes, from the link's header on. No
    /// error is sent about a datagram that was in fragments.
    pub(super) fn unreachable<T: TxQueue<Mem = P::Mem>>(
        &mut self,
        tx: &mut T,
        ip: &Ip,
        transport: &Transport,
        cast: Cast,
        kind: IcmpKind,
        packet: &[u8],
    ) {
        let quoted = packet.get(Link::LEN..).filter(|_| ip.content.at > Link::LEN);
        let Some(quoted) = quoted.filter(|_| icmp::may_answer(cast, ip, transport)) else { return };
        if !self.host.may_complain(self.now) {
            return;
        }
        self.egress.stats.icmp_errors += 1;
        self.answer(tx, ip, |outer| {
            let mut frame = [0; ERROR_FRAME];
            let emitted = emit_icmp_error(&mut frame, outer, ip.destination, ip.source, kind, quoted).ok()?;
            Some(frame[..emitted.len].to_vec())
        });
    }

    /// Handles an ICMP error about a packet. It is used only if this host could have sent the packet.
    fn icmp_error(&mut self, error: &IcmpError) {
        let IcmpError { kind, quoted } = error;
        let flow = Flow { local: quoted.flow.local, remote: quoted.flow.remote };
        match (quoted.protocol, quoted.seq) {
            (protocol::TCP, Some(seq)) => self.connection_error(&flow, *kind, seq),
            (protocol::UDP, _) => {
                if let IcmpKind::TooBig { mtu } = kind {
                    if self.udp.find(&flow).is_some()
                        && let Some(path) = self.find_path(flow.remote.ip())
                    {
                        path.too_big(*mtu, self.now);
                    }
                } else if *kind == IcmpKind::PortUnreachable {
                    self.udp.refused(&flow, &mut self.wakers);
                }
            }
            _ => {}
        }
    }
}
