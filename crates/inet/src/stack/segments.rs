//! The segments of a connection on their way: to the device, or to this host.
//!
//! Why not in the state machine: it has no path, writes no headers, and knows no queue. It calls
//! this [`Output`] for each segment.

use crate::stack::carrier::HeaderTicket;
use crate::stack::egress::{Egress, Tso};
use crate::stack::path::{NextHop, Path};
use crate::stack::payload::{Payload, Transmit, Unsent};
use crate::stack::shared::host::Host;
use crate::tcp::{Full, IpFields, Outgoing, Output};
use crate::time::Time;
use crate::wire::{Body, EthernetHeader, Flow, Ip, MAX_HEADERS, Outer, emit_tcp};
use netmem_packet::{Packet, TxQueue};
use netmem_pool::Mapped;

/// The most payload of a segment that the device cuts: an IP packet is at most 65535 bytes long.
const MAX_TSO_PAYLOAD: usize = 65535 - 40 - 60;

/// The output of a connection.
pub(crate) struct Segments<'a, P: Payload, T> {
    pub(crate) host: &'a Host<P>,
    pub(crate) egress: &'a mut Egress<P::Mem>,
    pub(crate) tx: &'a mut T,
    pub(crate) flow: &'a Flow,
    pub(crate) path: &'a mut Path<P>,
    pub(crate) now: Time,
    /// The connection uses explicit congestion notification: each segment may have its marks.
    pub(crate) ecn: bool,
    /// Fields of the IP headers.
    pub(crate) ip: IpFields,
}

impl<P: Transmit<T>, T: TxQueue<Mem = P::Mem>> Output<P> for Segments<'_, P, T> {
    fn max_payload(&self) -> usize {
        let offloads = match self.egress.tso[usize::from(self.flow.local.is_ipv6())] {
            Tso::All => true,
            Tso::WithoutEcn => !self.ecn,
            Tso::None => false,
        };
        if offloads || self.path.is_loopback() { MAX_TSO_PAYLOAD } else { 0 }
    }

    fn transmit(&mut self, segment: Outgoing<'_, P>) -> Result<HeaderTicket<P::Mem>, Full> {
        let Outgoing { header, payload, payload_len, segment_size, ect, .. } = segment;
        let Self { host, egress, tx, flow, path, now, ip, .. } = self;
        let (link_header, to_self) = match path.next_hop(host, *now) {
            NextHop::Device(header) => (header, false),
            NextHop::Loopback => (EthernetHeader::default(), true),
            NextHop::Pending => return Err(Full),
        };
        let ecn = if ect { Ip::ECT0 } else { 0 };
        let outer =
            Outer { link: Some(link_header), traffic_class: ip.dscp << 2 | ecn, hop_limit: ip.hop_limit.max(1) };
        // It fits: the path's MTU does.
        let segment_size = (payload_len > segment_size).then_some(segment_size as u16);
        let payload_len = payload_len as usize;
        let mut head = [0; MAX_HEADERS];
        let body = Body { len: payload_len, sum: None, segment_size };
        let emitted = emit_tcp(&mut head, &outer, flow, header, body);
        debug_assert!(emitted.is_ok(), "{emitted:?}");
        let Some(emitted) = emitted.ok() else { return Ok(HeaderTicket::none()) };
        let mut packet = egress.header_frame(&head, emitted).ok_or(Full)?;
        // A segment has so few chunks that they fit.
        let mut rest = payload;
        while let [first, others @ ..] = rest
            && let Some(frag) = P::in_host(first)
        {
            packet.push(frag.clone()).map_err(|_| Full)?;
            rest = others;
        }
        if !rest.is_empty() {
            let ticket = ticket(&packet, payload_len);
            // A packet to this host is received in host memory.
            let sent = if to_self { Err(Unsent::Never) } else { P::transmit(tx, packet, rest) };
            match sent {
                Ok(()) => egress.stats.sent += 1,
                Err(Unsent::Later) => return Err(Full),
                Err(Unsent::Never) => egress.stats.refused += 1,
            }
            return Ok(ticket);
        }
        if to_self {
            let ticket = ticket(&packet, payload_len);
            return egress.send_to_self(packet).map(|()| ticket).map_err(|_| Full);
        }
        let done = match payload_len {
            0 => egress.send(*tx, packet).map(|()| HeaderTicket::none()),
            _ => egress
                .transmit(*tx, packet, T::send_held)
                .map(|head| head.map_or_else(HeaderTicket::none, HeaderTicket::new)),
        };
        done.map_err(|_| Full)
    }
}

/// A packet without payload can be sent again at any time.
fn ticket<M: Mapped>(packet: &Packet<M>, payload: usize) -> HeaderTicket<M> {
    if payload == 0 { HeaderTicket::none() } else { HeaderTicket::new(packet.head().clone()) }
}
