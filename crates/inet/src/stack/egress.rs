//! Frames on their way out: headers are written into a page of their own, payload goes by reference.

use super::StackStats;
use super::carrier::{HeaderTicket, HostCarrier};
use super::host::Host;
use super::path::{NextHop, Path};
use crate::Time;
use crate::tcp::{Full, Outgoing, Output};
use crate::wire::{Body, Emitted, Flow, HEADROOM, Ip, Link, MAX_HEADERS, Outer, emit_tcp, emit_udp};
use netmem_packet::{Checksum, MAX_FRAGS, Packet, Room, TxQueue};
use netmem_pool::{Frag, Mapped, Page, SharedPool};
use std::collections::VecDeque;
use std::sync::Arc;

/// The most payload of a segment that the device cuts: an IP packet is at most 65535 bytes long.
const MOST_CUT: usize = 65535 - 40 - 60;
/// Frames to this stack's own address that wait for the next poll.
const LOOPBACK: usize = 1024;

/// What frames are made of, and where they go if not to the device.
pub(super) struct Egress<M: Mapped> {
    pub(super) pool: Arc<SharedPool<M>>,
    /// Frames for an address of this host.
    pub(super) loopback: VecDeque<Packet<M>>,
    pub(super) stats: StackStats,
    /// Where headers begin in their page. Pages are aligned alike, so equal offsets would be in a few sets of the cache.
    colour: usize,
    /// Whether the device cuts segments, of IPv4 and of IPv6.
    cuts: [bool; 2],
}

impl<M: Mapped> Egress<M> {
    pub(super) fn new(pool: Arc<SharedPool<M>>, cuts: [bool; 2]) -> Self {
        Self { pool, loopback: VecDeque::new(), stats: StackStats::default(), colour: 0, cuts }
    }

    /// A page of the pool.
    pub(super) fn page(&mut self) -> Option<Page<M>> {
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

    /// Payload in few enough fragments for a packet: what has more is copied.
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
    pub(super) fn copied(&mut self, payload: &[Frag<M>]) -> Option<Packet<M>> {
        let mut packet = Packet::new(self.page()?.freeze_range(0..0));
        self.copy(payload, &mut packet)?;
        Some(packet)
    }

    /// Gives a frame to the device, or gives it back if there is no room now. A frame that the device never takes is dropped, as if the
    /// link had lost it.
    pub(super) fn send<T: TxQueue<Mem = M>>(&mut self, tx: &mut T, mut packet: Packet<M>) -> Result<(), Packet<M>> {
        if let Checksum::Partial { .. } = packet.meta.checksum
            && !tx.takes(packet.meta)
        {
            // The headers are in a page of their own: no page is needed.
            if packet.complete_checksum(|| None).is_err() {
                self.stats.refused += 1;
                return Ok(());
            }
            self.stats.checksummed_sent += 1;
        }
        match tx.send(packet) {
            Ok(()) => self.stats.sent += 1,
            Err(packet) if tx.room(&packet) == Room::Later => return Err(packet),
            Err(_) => self.stats.refused += 1,
        }
        Ok(())
    }

    /// Gives a frame to this stack's own receiving side, or gives it back if there is no room now.
    pub(super) fn send_to_self(&mut self, mut packet: Packet<M>) -> Result<(), Packet<M>> {
        if self.loopback.len() == LOOPBACK {
            return Err(packet);
        }
        packet.meta.checksum = Checksum::Vouched;
        self.loopback.push_back(packet);
        self.stats.looped += 1;
        Ok(())
    }

    /// A frame that was written whole, with its checksums.
    pub(super) fn whole(&mut self, frame: &[u8]) -> Option<Packet<M>> {
        let mut packet = Packet::new(self.head(frame)?);
        packet.meta.checksum = Checksum::Vouched;
        Some(packet)
    }

    /// A frame of `headers` alone.
    pub(super) fn frame(&mut self, headers: &[u8], emitted: Emitted) -> Option<Packet<M>> {
        let mut packet = Packet::new(self.head(&headers[..emitted.len])?);
        packet.meta = emitted.meta;
        Some(packet)
    }

    /// A datagram: `packet` is its payload. Headers go in front of it in its own page if that has room and no other holder.
    pub(super) fn datagram(&mut self, outer: &Outer, flow: &Flow, mut packet: Packet<M>) -> Option<Packet<M>> {
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

/// Where a connection's segments go.
pub(super) struct Segments<'a, M: Mapped, T> {
    pub(super) host: &'a Host<M>,
    pub(super) egress: &'a mut Egress<M>,
    pub(super) tx: &'a mut T,
    pub(super) flow: &'a Flow,
    pub(super) path: &'a mut Path,
    pub(super) now: Time,
}

impl<M: Mapped, T: TxQueue<Mem = M>> Output<HostCarrier<M>> for Segments<'_, M, T> {
    fn max_payload(&self) -> usize {
        let cuts = self.egress.cuts[usize::from(self.flow.local.is_ipv6())];
        if cuts || self.path.is_here() { MOST_CUT } else { 0 }
    }

    fn segment(&mut self, segment: Outgoing<'_, HostCarrier<M>>) -> Result<HeaderTicket<M>, Full> {
        let Outgoing { header, payload, payload_len, segment_size, ect, .. } = segment;
        let Self { host, egress, tx, flow, path, now } = self;
        let (link, to_self) = match path.next_hop(host, *now) {
            NextHop::Link(link) => (link, false),
            NextHop::Here => (Link::default(), true),
            NextHop::Waits => return Err(Full),
        };
        let traffic_class = if ect { Ip::ECT0 } else { 0 };
        let outer = Outer { traffic_class, ..Outer::new(Some(link)) };
        // It fits: the path's MTU does.
        let segment_size = (payload_len > segment_size).then_some(segment_size as u16);
        let payload_len = payload_len as usize;
        let mut head = [0; MAX_HEADERS];
        let body = Body { len: payload_len, sum: None, segment_size };
        let emitted = emit_tcp(&mut head, &outer, flow, header, body);
        debug_assert!(emitted.is_ok(), "{emitted:?}");
        let Some(emitted) = emitted.ok() else { return Ok(HeaderTicket::none()) };
        let mut packet = egress.frame(&head, emitted).ok_or(Full)?;
        egress.gather(payload, &mut packet).ok_or(Full)?;
        if to_self {
            let ticket = ticket(&packet, payload_len);
            return egress.send_to_self(packet).map(|()| ticket).map_err(|_| Full);
        }
        if !tx.takes(packet.meta) && packet.complete_checksum(|| None).is_ok() {
            // Before another value is on the page.
            egress.stats.checksummed_sent += 1;
        }
        let ticket = ticket(&packet, payload_len);
        egress.send(*tx, packet).map(|()| ticket).map_err(|_| Full)
    }
}

/// A packet without payload can be sent again at any time.
fn ticket<M: Mapped>(packet: &Packet<M>, payload: usize) -> HeaderTicket<M> {
    if payload == 0 { HeaderTicket::none() } else { HeaderTicket::new(packet.head().clone()) }
}
