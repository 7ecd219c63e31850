//! Outgoing frames: headers are written into a slot of the transmit queue or into a separate page,
//! and payload is sent by reference.
//!
//! Why separately: the page of the payload has other holders, such as the user and an earlier
//! transmission, so nothing may be written in front of the payload. A slot costs less than a page.
//! A queue may have none. A frame that fits a slot is copied there as a whole.

use crate::stack::stats::StackStats;
use crate::tcp::Full;
use crate::wire::{
    Body, Emitted, Flow, FragmentHeader, HEADROOM, MAX_HEADERS, Outer, emit_fragment, emit_udp, protocol,
};
use netmem_packet::{
    Checksum, Gso, GsoKind, HeaderSlots, MAX_FRAGS, Meta, Packet, Sendable, SlotCompletions, SlotFrame, TxQueue,
};
use netmem_pool::{Frag, Mapped, Page, SharedPool};
use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// Frames to this stack's own address that wait for the next poll.
const LOOPBACK: usize = 1024;

/// What a frame asks of a device that computes checksums.
const PARTIAL: Meta = Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: None };

/// What a frame of several datagrams asks of a device that cuts it.
const USO: Meta = Meta {
    checksum: Checksum::Partial { start: 34, offset: 6 },
    gso: Some(Gso { kind: GsoKind::UdpSegment, size: 1472, headers: 42, ecn: false }),
};

/// The pool for frames' headers, the state of the sender, and the frames for this host.
pub(crate) struct Egress<M: Mapped> {
    pub(crate) pool: Arc<SharedPool<M>>,
    /// Frames for an address of this host.
    pub(crate) loopback: VecDeque<Packet<M>>,
    pub(crate) stats: StackStats,
    /// The offset of headers in their page. It varies, because all pages are aligned alike, and
    /// equal offsets would use only a few sets of the cache.
    colour: usize,
    /// What the device cuts, of IPv4 and of IPv6.
    pub(crate) tso: [Tso; 2],
    /// Whether the device cuts several datagrams of one size that are sent as one frame.
    pub(crate) uso: bool,
    /// Whether the device computes checksums.
    pub(crate) checksums: bool,
    /// The identification of the last datagram that was sent in fragments.
    fragment_id: u32,
}

/// The large segments that a device cuts (TCP segmentation offload).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tso {
    None,
    /// Those without congestion marks in their headers.
    WithoutEcn,
    All,
}

impl Tso {
    /// What the device of a transmit queue cuts.
    fn of<T: TxQueue>(tx: &T, kind: GsoKind) -> Self {
        let supports = |ecn| {
            let gso = Gso { kind, size: 1460, headers: 54, ecn };
            tx.supports(Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: Some(gso) })
        };
        match (supports(true), supports(false)) {
            (true, _) => Self::All,
            (false, true) => Self::WithoutEcn,
            (false, false) => Self::None,
        }
    }
}

impl<M: Mapped> Egress<M> {
    /// The way out by a transmit queue.
    pub(crate) fn new<T: TxQueue>(pool: Arc<SharedPool<M>>, tx: &T) -> Self {
        // A random start, so that another process or stack does not use the same numbers.
        let fragment_id = RandomState::new().hash_one(std::process::id()) as u32;
        Self {
            pool,
            loopback: VecDeque::new(),
            stats: StackStats::default(),
            colour: 0,
            tso: [GsoKind::TcpV4, GsoKind::TcpV6].map(|kind| Tso::of(tx, kind)),
            uso: tx.supports(USO),
            checksums: tx.supports(PARTIAL),
            fragment_id,
        }
    }

    /// A page of the pool.
    pub(crate) fn page(&mut self) -> Option<Page<M>> {
        let page = self.pool.alloc();
        if page.is_none() {
            self.stats.no_page += 1;
        }
        page
    }

    /// Whether the pool has a page now.
    pub(crate) fn has_page(&self) -> bool {
        self.pool.alloc().is_some()
    }

    /// Whether the pool has so many pages now.
    pub(crate) fn has_pages(&self, pages: usize) -> bool {
        let found: Vec<_> = std::iter::from_fn(|| self.pool.alloc()).take(pages).collect();
        found.len() == pages
    }

    /// Bytes in pages of the pool.
    pub(crate) fn pages_of(&mut self, bytes: &[u8]) -> Option<Vec<Frag<M>>> {
        let page_size = self.pool.page_size();
        let frags = bytes.chunks(page_size).map(|chunk| {
            let mut page = self.page()?;
            page.copy_from(0, chunk).ok()?;
            Some(page.freeze_range(0..chunk.len()))
        });
        frags.collect()
    }

    /// Headers in a page of their own.
    pub(crate) fn header_page(&mut self, headers: &[u8]) -> Option<Frag<M>> {
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

    /// Sends a frame to the device, or returns it if there is no room now. A frame that the device
    /// never accepts is dropped, as if the link had lost it.
    pub(crate) fn send<T: TxQueue<Mem = M>>(&mut self, tx: &mut T, packet: Packet<M>) -> Result<(), Packet<M>> {
        self.transmit(tx, packet, T::send).map(|_| ())
    }

    /// Sends a frame to the device by `send`, whose result is returned: `None` if the frame was
    /// dropped.
    pub(crate) fn transmit<T: TxQueue<Mem = M>, R>(
        &mut self,
        tx: &mut T,
        mut packet: Packet<M>,
        send: impl FnOnce(&mut T, Packet<M>) -> Result<R, Packet<M>>,
    ) -> Result<Option<R>, Packet<M>> {
        let lacks = matches!(packet.meta.checksum, Checksum::Partial { .. }) && !tx.supports(packet.meta);
        // The headers are in a separate page, so no page is needed.
        if lacks && packet.complete_checksum(|| None).is_err() {
            self.stats.refused += 1;
            return Ok(None);
        }
        let sent = self.attempt(tx, packet, send);
        // A frame that is returned has its checksum, and is not counted again when it is sent.
        self.stats.checksummed_sent += u64::from(lacks && !matches!(sent, Ok(None)));
        sent
    }

    /// The header slots of the queue, if frames of this stack's segments may have theirs there. Not
    /// if their checksums were left to a device that was replaced by one that computes none. Cost:
    /// an atomic addition.
    #[inline]
    pub(crate) fn slots<T: TxQueue<Mem = M>>(&self, tx: &T) -> Option<SlotCompletions> {
        tx.header_slots().filter(|_| self.has_slots(tx)).map(HeaderSlots::completions)
    }

    /// Whether there are such [slots](Self::slots).
    #[inline]
    pub(crate) fn has_slots<T: TxQueue<Mem = M>>(&self, tx: &T) -> bool {
        tx.header_slots().is_some() && (!self.checksums || tx.supports(PARTIAL))
    }

    /// Sends a frame whose headers are put into a slot of the queue. `payload.meta` is the frame's.
    /// The result is as that of [`transmit`](Self::transmit).
    #[inline]
    pub(crate) fn send_behind<T: TxQueue<Mem = M>>(
        &mut self,
        tx: &mut T,
        headers: &[u8],
        payload: Packet<M>,
    ) -> Result<Option<SlotFrame>, Packet<M>> {
        self.attempt(tx, payload, |tx, payload| tx.send_behind(headers, payload))
    }

    /// Sends a frame that is copied into a slot of the queue. It has at most
    /// [`HeaderSlots::ROOM`] bytes. `None` if the queue never accepts it as a copy, and an error if
    /// there is no room now.
    #[inline]
    pub(crate) fn send_copied<T: TxQueue<Mem = M>>(
        &mut self,
        tx: &mut T,
        frame: &[u8],
        meta: Meta,
    ) -> Option<Result<SlotFrame, Full>> {
        match tx.send_copied(frame, meta) {
            Ok(sent) => {
                self.stats.sent += 1;
                Some(Ok(sent))
            }
            Err(Sendable::Never) => None,
            Err(_) => Some(Err(Full)),
        }
    }

    /// Sends a frame by `send`, and counts what became of it.
    #[inline]
    fn attempt<T: TxQueue<Mem = M>, R>(
        &mut self,
        tx: &mut T,
        packet: Packet<M>,
        send: impl FnOnce(&mut T, Packet<M>) -> Result<R, Packet<M>>,
    ) -> Result<Option<R>, Packet<M>> {
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

    /// Sends a frame to this stack's own receiving side, or returns it if there is no room now.
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
    pub(crate) fn complete_frame(&mut self, frame: &[u8]) -> Option<Packet<M>> {
        let mut packet = Packet::new(self.header_page(frame)?);
        packet.meta.checksum = Checksum::Verified;
        Some(packet)
    }

    /// A frame of `headers` alone.
    pub(crate) fn header_frame(&mut self, headers: &[u8], emitted: Emitted) -> Option<Packet<M>> {
        let mut packet = Packet::new(self.header_page(&headers[..emitted.len])?);
        packet.meta = emitted.meta;
        Some(packet)
    }

    /// A datagram that is longer than the path's MTU, in fragments: `packet` is its payload, which
    /// is read for its checksum.
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
        let content_frags: Vec<_> =
            std::iter::once(self.header_page(udp)?).chain(packet.fragments().cloned()).collect();
        let mut content = Packet::new(self.page()?.freeze_range(0..0));
        self.gather(&content_frags, &mut content)?;
        // Every path carries packets of 576 bytes.
        let headers = Outer::new(None).len(v4) + if v4 { 0 } else { 8 };
        let most = usize::from(mtu).saturating_sub(headers).max(8) & !7;
        self.fragment_id = self.fragment_id.wrapping_add(1);
        let id = self.fragment_id;
        let addresses = (flow.local.ip(), flow.remote.ip());
        let total = content.len();
        let frames = (0..total).step_by(most).map(|at| {
            let now = most.min(total - at);
            let fragment = FragmentHeader { id, offset: at as u16, more: at + now < total };
            let len = emit_fragment(&mut head, outer, addresses, protocol::UDP, fragment, now).ok()?;
            let mut range = content.clone();
            range.truncate(at + now);
            range.pull(at).ok()?;
            let mut frame = self.complete_frame(&head[..len])?;
            range.fragments().filter(|frag| frag.len() > 0).try_for_each(|frag| frame.push(frag.clone()).ok())?;
            Some(frame)
        });
        frames.collect()
    }

    /// A datagram, or several of `segment_size` bytes each: `packet` is their payload. Headers go
    /// in front of it in its own page if that has room and no other holder.
    pub(crate) fn datagram(
        &mut self,
        outer: &Outer,
        flow: &Flow,
        mut packet: Packet<M>,
        segment_size: Option<u16>,
    ) -> Option<Packet<M>> {
        let mut head = [0; MAX_HEADERS];
        let body = Body { len: packet.len(), sum: None, segment_size };
        let emitted = emit_udp(&mut head, outer, flow, body).ok()?;
        if !packet.prepend(&head[..emitted.len]) {
            let payload: Vec<_> = packet.fragments().cloned().collect();
            packet = Packet::new(self.header_page(&head[..emitted.len])?);
            self.gather(&payload, &mut packet)?;
        }
        packet.meta = emitted.meta;
        Some(packet)
    }
}
