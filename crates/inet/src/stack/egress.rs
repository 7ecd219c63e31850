//! Outgoing frames: headers are written into a separate page, and payload is sent by reference.

use crate::Time;
use crate::stack::StackStats;
use crate::stack::carrier::HeaderTicket;
use crate::stack::path::{NextHop, Path};
use crate::stack::payload::{Payload, Transmit, Unsent};
use crate::stack::shared::host::Host;
use crate::tcp::{Full, IpFields, Outgoing, Output};
use crate::wire::{
    Body, Emitted, EthernetHeader, Flow, FragmentHeader, HEADROOM, Ip, MAX_HEADERS, Outer, emit_fragment, emit_tcp,
    emit_udp, protocol,
};
use netmem_packet::{Checksum, MAX_FRAGS, Packet, Sendable, TxQueue};
use netmem_pool::{Frag, Mapped, Page, SharedPool};
use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// The most payload of a segment that the device cuts: an IP packet is at most 65535 bytes long.
const MOST_CUT: usize = 65535 - 40 - 60;
/// Frames to this stack's own address that wait for the next poll.
const LOOPBACK: usize = 1024;

/// The pool for frames' headers, the state of the sender, and the frames for this host.
pub(crate) struct Egress<M: Mapped> {
    pub(crate) pool: Arc<SharedPool<M>>,
    /// Frames for an address of this host.
    pub(crate) loopback: VecDeque<Packet<M>>,
    pub(crate) stats: StackStats,
    /// The offset of headers in their page. It varies, because all pages are aligned alike, and equal offsets would use
    /// only a few sets of the cache.
    colour: usize,
    /// Whether the device cuts segments, of IPv4 and of IPv6.
    cuts: [Cuts; 2],
    /// The identification of the last datagram that was sent in fragments.
    fragment_id: u32,
}

/// The segments that a device can cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cuts {
    None,
    /// Those without congestion marks in their headers.
    WithoutEcn,
    All,
}

impl<M: Mapped> Egress<M> {
    pub(crate) fn new(pool: Arc<SharedPool<M>>, cuts: [Cuts; 2]) -> Self {
        // A random start, so that another process or stack does not use the same numbers.
        let fragment_id = RandomState::new().hash_one(std::process::id()) as u32;
        Self { pool, loopback: VecDeque::new(), stats: StackStats::default(), colour: 0, cuts, fragment_id }
    }

    /// A page of the pool.
    pub(crate) fn page(&mut self) -> Option<Page<M>> {
        let page = self.pool.alloc();
        if page.is_none() {
            self.stats.no_page += 1;
        }
        page
    }

    /// Headers in a page of their own.
    fn head(&mut self, headers: &[u8]) -> Option<Frag<M>> {
        let mut page = self.page()?;
        self.colour = (self.colour + 64) % 2048;
        let at = HEADROOM + self.colour;
        page.copy_from(at, headers).ok()?;
        Some(page.freeze_range(at..at + headers.len()))
    }

    /// Payload in few enough fragments for a packet. If it has more, it is copied.
    fn gather(&mut self, payload: &[Frag<M>], packet: &mut Packet<M>) -> Option<()> {
        if payload.len() <= MAX_FRAGS {
            for frag in payload {
                packet.push(frag.clone()).ok()?;
            }
            return Some(());
        }
        self.copy(payload, packet)
    }

    #[cold]
    fn copy(&mut self, payload: &[Frag<M>], packet: &mut Packet<M>) -> Option<()> {
        let mut bounce = [0; 1024];
        let (mut page, mut used) = (self.page()?, 0);
        for frag in payload {
            let mut at = 0;
            while at < frag.len() {
                if used == page.len() {
                    packet.push(std::mem::replace(&mut page, self.page()?).freeze()).ok()?;
                    used = 0;
                }
                let now = (frag.len() - at).min(page.len() - used).min(bounce.len());
                frag.copy_to(at, &mut bounce[..now]).ok()?;
                page.copy_from(used, &bounce[..now]).ok()?;
                (at, used) = (at + now, used + now);
            }
            self.stats.copied_sent += frag.len() as u64;
        }
        packet.push(page.freeze_range(0..used)).ok()
    }

    /// A packet with a copy of these bytes.
    pub(crate) fn copied(&mut self, payload: &[Frag<M>]) -> Option<Packet<M>> {
        let mut packet = Packet::new(self.page()?.freeze_range(0..0));
        self.copy(payload, &mut packet)?;
        Some(packet)
    }

    /// Gives a frame to the device, or gives it back if there is no room now. A frame that the device never takes is dropped, as if the
    /// link had lost it.
    pub(crate) fn send<T: TxQueue<Mem = M>>(&mut self, tx: &mut T, packet: Packet<M>) -> Result<(), Packet<M>> {
        self.give(tx, packet, T::send).map(|_| ())
    }

    /// Gives a frame to the device by `send`, whose result is returned: `None` if the frame was dropped.
    fn give<T: TxQueue<Mem = M>, R>(
        &mut self,
        tx: &mut T,
        mut packet: Packet<M>,
        send: impl FnOnce(&mut T, Packet<M>) -> Result<R, Packet<M>>,
    ) -> Result<Option<R>, Packet<M>> {
        if let Checksum::Partial { .. } = packet.meta.checksum
            && !tx.supports(packet.meta)
        {
            // The headers are in a separate page, so no page is needed.
            if packet.complete_checksum(|| None).is_err() {
                self.stats.refused += 1;
                return Ok(None);
            }
            self.stats.checksummed_sent += 1;
        }
        match send(tx, packet) {
            Ok(sent) => {
                self.stats.sent += 1;
                Ok(Some(sent))
            }
            Err(packet) if tx.sendable(&packet) == Sendable::Later => Err(packet),
            Err(_) => {
                self.stats.refused += 1;
                Ok(None)
            }
        }
    }

    /// Gives a frame to this stack's own receiving side, or gives it back if there is no room now.
    pub(crate) fn send_to_self(&mut self, mut packet: Packet<M>) -> Result<(), Packet<M>> {
        if self.loopback.len() == LOOPBACK {
            return Err(packet);
        }
        packet.meta.checksum = Checksum::Verified;
        self.loopback.push_back(packet);
        self.stats.looped += 1;
        Ok(())
    }

    /// A complete frame, with its checksums.
    pub(crate) fn whole(&mut self, frame: &[u8]) -> Option<Packet<M>> {
        let mut packet = Packet::new(self.head(frame)?);
        packet.meta.checksum = Checksum::Verified;
        Some(packet)
    }

    /// A frame of `headers` alone.
    pub(crate) fn frame(&mut self, headers: &[u8], emitted: Emitted) -> Option<Packet<M>> {
        let mut packet = Packet::new(self.head(&headers[..emitted.len])?);
        packet.meta = emitted.meta;
        Some(packet)
    }

    /// A datagram that is longer than the path's MTU, in fragments: `packet` is its payload, which is read for its checksum.
    pub(crate) fn fragments(
        &mut self,
        outer: &Outer,
        flow: &Flow,
        packet: &Packet<M>,
        mtu: u16,
    ) -> Option<Vec<Packet<M>>> {
        let (len, v4) = (packet.len(), flow.local.is_ipv4());
        let mut head = [0; MAX_HEADERS];
        let body = Body { len, sum: Some(packet.sum(0, len).ok()?), segment_size: None };
        let emitted = emit_udp(&mut head, &Outer::new(None), flow, body).ok()?;
        self.stats.checksummed_sent += 1;
        let udp = &head[Outer::new(None).len(v4)..emitted.len];
        let pieces: Vec<_> = std::iter::once(self.head(udp)?).chain(packet.fragments().cloned()).collect();
        let mut content = Packet::new(self.page()?.freeze_range(0..0));
        self.gather(&pieces, &mut content)?;
        // Every path carries packets of 576 bytes.
        let headers = Outer::new(None).len(v4) + if v4 { 0 } else { 8 };
        let most = usize::from(mtu).saturating_sub(headers).max(8) & !7;
        self.fragment_id = self.fragment_id.wrapping_add(1);
        let id = self.fragment_id;
        let addresses = (flow.local.ip(), flow.remote.ip());
        let total = content.len();
        let parts = (0..total).step_by(most).map(|at| {
            let now = most.min(total - at);
            let fragment = FragmentHeader { id, offset: at as u16, more: at + now < total };
            let len = emit_fragment(&mut head, outer, addresses, protocol::UDP, fragment, now).ok()?;
            let mut part = content.clone();
            part.truncate(at + now);
            part.pull(at).ok()?;
            let mut frame = self.whole(&head[..len])?;
            part.fragments().filter(|frag| frag.len() > 0).try_for_each(|frag| frame.push(frag.clone()).ok())?;
            Some(frame)
        });
        parts.collect()
    }

    /// A datagram: `packet` is its payload. Headers go in front of it in its own page if that has room and no other holder.
    pub(crate) fn datagram(&mut self, outer: &Outer, flow: &Flow, mut packet: Packet<M>) -> Option<Packet<M>> {
        let mut head = [0; MAX_HEADERS];
        let body = Body { len: packet.len(), sum: None, segment_size: None };
        let emitted = emit_udp(&mut head, outer, flow, body).ok()?;
        if !packet.prepend(&head[..emitted.len]) {
            let payload: Vec<_> = packet.fragments().cloned().collect();
            packet = Packet::new(self.head(&head[..emitted.len])?);
            self.gather(&payload, &mut packet)?;
        }
        packet.meta = emitted.meta;
        Some(packet)
    }
}

/// The way of a connection's segments to the device or to this host.
pub(crate) struct Segments<'a, P: Payload, T> {
    pub(crate) host: &'a Host<P>,
    pub(crate) egress: &'a mut Egress<P::Mem>,
    pub(crate) tx: &'a mut T,
    pub(crate) flow: &'a Flow,
    pub(crate) path: &'a mut Path<P::Count>,
    pub(crate) now: Time,
    /// The connection uses explicit congestion notification: each segment may have its marks.
    pub(crate) ecn: bool,
    /// Fields of the IP headers.
    pub(crate) ip: IpFields,
}

impl<P: Transmit<T>, T: TxQueue<Mem = P::Mem>> Output<P> for Segments<'_, P, T> {
    fn max_payload(&self) -> usize {
        let cuts = match self.egress.cuts[usize::from(self.flow.local.is_ipv6())] {
            Cuts::All => true,
            Cuts::WithoutEcn => !self.ecn,
            Cuts::None => false,
        };
        if cuts || self.path.is_here() { MOST_CUT } else { 0 }
    }

    fn transmit(&mut self, segment: Outgoing<'_, P>) -> Result<HeaderTicket<P::Mem>, Full> {
        let Outgoing { header, payload, payload_len, segment_size, ect, .. } = segment;
        let Self { host, egress, tx, flow, path, now, ip, .. } = self;
        let (link, to_self) = match path.next_hop(host, *now) {
            NextHop::Link(link) => (link, false),
            NextHop::Here => (EthernetHeader::default(), true),
            NextHop::Waits => return Err(Full),
        };
        let ecn = if ect { Ip::ECT0 } else { 0 };
        let outer = Outer { link: Some(link), traffic_class: ip.dscp << 2 | ecn, hop_limit: ip.hop_limit.max(1) };
        // It fits: the path's MTU does.
        let segment_size = (payload_len > segment_size).then_some(segment_size as u16);
        let payload_len = payload_len as usize;
        let mut head = [0; MAX_HEADERS];
        let body = Body { len: payload_len, sum: None, segment_size };
        let emitted = emit_tcp(&mut head, &outer, flow, header, body);
        debug_assert!(emitted.is_ok(), "{emitted:?}");
        let Some(emitted) = emitted.ok() else { return Ok(HeaderTicket::none()) };
        let mut packet = egress.frame(&head, emitted).ok_or(Full)?;
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
                .give(*tx, packet, T::send_held)
                .map(|head| head.map_or_else(HeaderTicket::none, HeaderTicket::new)),
        };
        done.map_err(|_| Full)
    }
}

/// A packet without payload can be sent again at any time.
fn ticket<M: Mapped>(packet: &Packet<M>, payload: usize) -> HeaderTicket<M> {
    if payload == 0 { HeaderTicket::none() } else { HeaderTicket::new(packet.head().clone()) }
}
