//! The transmit queue: packets are posted to the device, and dropped when it has completed them.
//!
//! The virtio-net header is written into the headroom of the packet's head, if that page may be
//! written. Otherwise the header is in an array next to the ring, as a separate segment. So are the
//! headers of a frame that is sent [behind](TxQueue::send_behind) them, and all of a frame that is
//! [copied](TxQueue::send_copied). Packets of the device's DMA domain take the fast path of
//! [`send`](TxQueue::send); packets of another domain are mapped first.

use super::headers::HeaderArray;
use super::idle::IdleCounter;
use super::panics::Panics;
use super::ring::{RingHandle, RingQueue};
use super::state::DriverState;
use super::stats::{DeviceFault, TxStats, state_name};
use super::tx_mappings::{TxAddressing, TxMappings};
use crate::net::{VnetHdr, feature};
use crate::virtqueue::Negotiated;
use crate::virtqueue::driver::{AnyDriverQueue, DriverFormat, DriverQueue, RingEnd, Segment, Vacant, with_queue};
use netmem_packet::{Checksum, FragLists, GsoKind, HeaderSlots, Meta, Packet, Reach, Sendable, SlotFrame, TxQueue};
use netmem_pool::{Frag, PeerMemory, PeerShared};
use std::fmt;
use std::sync::Arc;

/// A transmit queue. See [`TxQueue`].
///
/// A packet of another DMA domain, for instance a redirected one, is mapped in this device's domain
/// when it is sent, if that domain covers its memory. It is unmapped when the device has completed
/// it.
///
/// Dropping the queue stops the ring, and unmaps and drops the packets that the device still has.
/// If the device does not stop, it may read pages that are in use again, but it does not write to
/// them.
#[must_use = "a queue stops when it is dropped"]
pub struct VirtioTx<M: PeerMemory = PeerShared> {
    /// The packets that the device has. A frame that was copied into its slot has none.
    ring: RingQueue<AnyDriverQueue<Option<Packet<M>>>>,
    path: TxPath<M>,
    pub(super) index: usize,
    idle: IdleCounter,
    pub(super) state: Arc<DriverState<M>>,
}

/// The parts of a transmit queue except its ring.
pub(super) struct TxPath<M: PeerMemory> {
    headers: HeaderArray,
    /// Which entries of `headers` have the headers of a frame, or all of it.
    pub(super) slots: HeaderSlots,
    /// Those of completed packets.
    pub(super) lists: FragLists<M>,
    pub(super) mappings: TxMappings<M>,
    negotiated: Negotiated,
    /// Whether anything was posted since the last flush.
    pub(super) dirty: bool,
    pub(super) stats: TxStats,
}

pub(super) type Queue<F, M> = DriverQueue<F, Option<Packet<M>>>;

impl<M: PeerMemory> VirtioTx<M> {
    pub(super) fn new(
        handle: RingHandle,
        headers: HeaderArray,
        addressing: TxAddressing<M>,
        negotiated: Negotiated,
        index: usize,
        state: Arc<DriverState<M>>,
    ) -> Self {
        let ring = RingQueue::new(handle);
        let count = with_queue!(&ring.queue, queue => queue.size());
        let (mappings, slots) = (TxMappings::new(addressing, count), HeaderSlots::new(count));
        let lists = FragLists::new();
        let path = TxPath { headers, slots, lists, mappings, negotiated, dirty: false, stats: TxStats::default() };
        Self { ring, path, index, idle: IdleCounter::default(), state }
    }

    pub(super) fn handle(&self) -> &RingHandle {
        self.ring.handle()
    }

    pub(super) fn ring_mut(&mut self) -> &mut RingQueue<AnyDriverQueue<Option<Packet<M>>>> {
        &mut self.ring
    }

    /// Slots for packets.
    pub(super) fn slots(&self) -> u16 {
        with_queue!(&self.ring.queue, queue => queue.size())
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> TxStats {
        self.path.stats
    }

    pub(super) fn stats_mut(&mut self) -> &mut TxStats {
        &mut self.path.stats
    }

    /// Packets that the device has.
    #[must_use]
    pub fn posted(&self) -> usize {
        self.ring.queue.posted()
    }

    /// As [`VirtioRx::is_connected`](super::VirtioRx::is_connected); calls of
    /// [`complete`](netmem_packet::TxQueue::complete) count as polls.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.state.is_connected()
    }

    /// Queues a packet with more behind it: `payload`'s addresses and lengths. Returns the packet's
    /// slot.
    pub(super) fn send_with(
        &mut self,
        packet: Packet<M>,
        payload: impl ExactSizeIterator<Item = (u64, u32)>,
    ) -> Result<u16, Packet<M>> {
        with_queue!(&mut self.ring.queue, queue => self.path.send_with(queue, packet, payload))
    }

    /// Whether there is room for a packet and `more` fragments of payload.
    pub(super) fn sendable_with(&self, packet: &Packet<M>, more: usize) -> Sendable {
        let TxPath { stats, mappings, .. } = &self.path;
        let n = segments(packet) + more;
        let (ever, now) = with_queue!(&self.ring.queue, queue => (queue.ever_fits(n), queue.fits(n)));
        let never = stats.stopped.is_some()
            || self.path.lacks_offload(packet.meta)
            || !ever
            || packet.fragments().any(|f| mappings.reach(f) == Reach::Never);
        match now {
            _ if never => Sendable::Never,
            false => Sendable::Later,
            true => Sendable::Now,
        }
    }

    /// Whether the device has a new connection. Then [`adopt`](Self::adopt) must be called.
    #[inline(always)]
    pub(super) fn is_replaced(&self) -> bool {
        self.state.has_replaced(self.handle())
    }

    /// Switches to the ring of the device's new connection. Reaps the packets that the old device
    /// had completed, as [`reap`](Self::reap) does, and drops the others. Returns how many frames
    /// were confirmed.
    #[cold]
    pub(super) fn adopt(&mut self, done: impl FnMut(u16)) -> usize {
        let Some((handle, headers)) = self.state.take_tx_ring(self.index) else { return 0 };
        let completed = if self.path.stats.stopped.is_some() { 0 } else { self.reap(done).unwrap_or(0) };
        let TxPath { mappings, slots, stats, .. } = &mut self.path;
        slots.complete_all();
        // A frame that was copied into its slot has no packet.
        stats.unconfirmed += self.ring.queue.posted() as u64;
        let mut panics = Panics::default();
        panics.call(|| mappings.release_all());
        with_queue!(&mut self.ring.queue, queue => {
            queue.buffers().filter_map(Option::take).for_each(|packet| _ = panics.call(|| drop(packet)));
        });
        self.ring.replace(handle);
        (self.path.headers, self.path.dirty) = (headers, false);
        self.path.stats.stopped = None;
        self.path.stats.restarts += 1;
        panics.resume();
        completed
    }

    #[cold]
    pub(super) fn stop(&mut self, error: DeviceFault) -> usize {
        netmem_pool::trace::warn!(%error, "a transmit queue is stopped: its device cannot be trusted");
        self.path.stats.stopped = Some(error);
        0
    }

    /// Reaps completed packets. Calls `done` with each slot before its packet is dropped.
    #[inline(always)]
    pub(super) fn reap(&mut self, done: impl FnMut(u16)) -> Result<usize, DeviceFault> {
        if self.idle.is_due() {
            self.state.try_check_connection();
        }
        let reaped = with_queue!(&mut self.ring.queue, queue => self.path.reap(queue, done))?;
        self.idle.count(reaped);
        Ok(reaped)
    }
}

impl<M: PeerMemory> TxPath<M> {
    /// The device's header for a packet, and room for it in the ring. `None` if the packet is
    /// refused, which is counted. Checked before anything is written, so that a refused packet is
    /// returned unchanged.
    #[inline(always)]
    fn admit<F: DriverFormat>(
        &mut self,
        queue: &mut Queue<F, M>,
        packet: &Packet<M>,
    ) -> Option<([u8; VnetHdr::LEN], Vacant)> {
        if self.stats.stopped.is_some() {
            return None;
        }
        let Some(header) = self.header(packet.meta) else {
            self.stats.no_offload += 1;
            return None;
        };
        let vacant = queue.vacant(segments(packet));
        self.stats.full += u64::from(vacant.is_none());
        Some((header, vacant?))
    }

    /// Queues a packet. `held` gets it when the device's header is in front of it.
    #[inline(always)]
    pub(super) fn send<F: DriverFormat, R>(
        &mut self,
        queue: &mut Queue<F, M>,
        packet: Packet<M>,
        held: impl FnOnce(&Packet<M>) -> R,
    ) -> Result<R, Packet<M>> {
        let Some((header, vacant)) = self.admit(queue, &packet) else { return Err(packet) };
        if !packet.fragments().all(|f| self.mappings.address(f).is_some()) {
            return self.send_mapped(queue, vacant, packet, None, held);
        }
        let len = packet.len();
        // The packet is put in its place before its header is written. If it were moved after that,
        // the move would read in large pieces what was just written in small ones, and the
        // processor would stall.
        let slot = vacant.slot();
        let packet = queue.buffer(slot).insert(packet);
        let in_place = packet.prepend(&header);
        let held = held(packet);
        if let Err(panic) = self.mappings.sync(packet) {
            return unsent(queue.buffer(slot), in_place, panic).map(|()| held);
        }
        // The usual packet: one fragment, which has the header, too.
        if in_place && packet.frags().is_empty() {
            queue.post(vacant, |packet| std::iter::once(self.segment(filled(packet).head())));
        } else {
            let apart = self.apart(slot, in_place, header);
            queue.post(vacant, |packet| apart.into_iter().chain(fragments(packet).map(|frag| self.segment(frag))));
        }
        self.count(len);
        Ok(held)
    }

    /// Queues the payload of a frame, behind headers for which its slot has room.
    #[inline(always)]
    fn send_behind<F: DriverFormat>(
        &mut self,
        queue: &mut Queue<F, M>,
        headers: &[u8],
        payload: Packet<M>,
    ) -> Result<SlotFrame, Packet<M>> {
        if headers.len() > HeaderSlots::ROOM {
            return Err(payload);
        }
        let Some((header, vacant)) = self.admit(queue, &payload) else { return Err(payload) };
        let slot = vacant.slot();
        if !payload.fragments().all(|f| self.mappings.address(f).is_some()) {
            self.send_mapped(queue, vacant, payload, Some(headers), |_| ())?;
            return Ok(self.slots.post(slot));
        }
        let len = headers.len() + payload.len();
        let packet = queue.buffer(slot).insert(payload);
        let frame = self.slots.post(slot);
        if let Err(panic) = self.mappings.sync(packet) {
            self.slots.complete(slot);
            return unsent(queue.buffer(slot), false, panic).map(|()| frame);
        }
        let first = self.behind(slot, header, headers);
        queue.post(vacant, |packet| std::iter::once(first).chain(fragments(packet).map(|frag| self.segment(frag))));
        self.count(len);
        Ok(frame)
    }

    /// Queues a frame that is copied into its slot. No packet is in the slot's place.
    #[inline(always)]
    fn send_copied<F: DriverFormat>(
        &mut self,
        queue: &mut Queue<F, M>,
        frame: &[u8],
        meta: Meta,
    ) -> Result<SlotFrame, Sendable> {
        if self.stats.stopped.is_some() || frame.len() > HeaderSlots::ROOM {
            return Err(Sendable::Never);
        }
        let Some(header) = self.header(meta) else {
            self.stats.no_offload += 1;
            return Err(Sendable::Never);
        };
        let Some(vacant) = queue.vacant(1) else {
            self.stats.full += 1;
            return Err(Sendable::Later);
        };
        let slot = vacant.slot();
        debug_assert!(queue.buffer(slot).is_none());
        let posted = self.slots.post(slot);
        let all = self.behind(slot, header, frame);
        queue.post(vacant, |_| std::iter::once(all));
        self.count(frame.len());
        Ok(posted)
    }

    /// Sends a packet that is of another DMA domain, at least in part: behind `headers`, if there
    /// are any.
    #[cold]
    #[inline(never)]
    fn send_mapped<F: DriverFormat, R>(
        &mut self,
        queue: &mut Queue<F, M>,
        vacant: Vacant,
        mut packet: Packet<M>,
        headers: Option<&[u8]>,
        held: impl FnOnce(&Packet<M>) -> R,
    ) -> Result<R, Packet<M>> {
        let slot = vacant.slot();
        let header = VnetHdr::of(packet.meta).to_bytes();
        let len = headers.map_or(0, <[u8]>::len) + packet.len();
        // The header is written before the head is mapped, so that it is mapped, too.
        let in_place = headers.is_none() && packet.prepend(&header);
        if let Err(error) = self.mappings.map(&packet, slot) {
            netmem_pool::trace::debug!(%error, "a packet cannot be mapped");
            self.stats.wrong_domain += 1;
            if in_place {
                let undone = packet.pull(header.len());
                debug_assert!(undone.is_ok());
            }
            return Err(packet);
        }
        let held = held(&packet);
        *queue.buffer(slot) = Some(packet);
        let apart = match headers {
            Some(headers) => Some(self.behind(slot, header, headers)),
            None => self.apart(slot, in_place, header),
        };
        queue.post(vacant, |packet| {
            let frags = fragments(packet).zip(self.mappings.mapped(slot));
            apart.into_iter().chain(frags.map(|(frag, addr)| Segment::read(addr, frag.len() as u32)))
        });
        self.stats.mapped += 1;
        self.count(len);
        Ok(held)
    }

    /// See [`VirtioTx::send_with`].
    fn send_with<F: DriverFormat>(
        &mut self,
        queue: &mut Queue<F, M>,
        packet: Packet<M>,
        payload: impl ExactSizeIterator<Item = (u64, u32)>,
    ) -> Result<u16, Packet<M>> {
        if self.stats.stopped.is_some() {
            return Err(packet);
        }
        if self.lacks_offload(packet.meta) {
            self.stats.no_offload += 1;
            return Err(packet);
        }
        let Some(vacant) = queue.vacant(segments(&packet) + payload.len()) else {
            self.stats.full += 1;
            return Err(packet);
        };
        // Headers are written for this device, in memory of its domain.
        if !packet.fragments().all(|f| self.mappings.address(f).is_some()) {
            self.stats.wrong_domain += 1;
            return Err(packet);
        }
        let slot = vacant.slot();
        let header = VnetHdr::of(packet.meta).to_bytes();
        let mut bytes = packet.len();
        let packet = queue.buffer(slot).insert(packet);
        let in_place = packet.prepend(&header);
        if let Err(panic) = self.mappings.sync(packet) {
            return unsent(queue.buffer(slot), in_place, panic).map(|()| slot);
        }
        let apart = self.apart(slot, in_place, header);
        let payload = payload.inspect(|&(_, len)| bytes += len as usize).map(|(addr, len)| Segment::read(addr, len));
        queue.post(vacant, |packet| {
            apart.into_iter().chain(fragments(packet).map(|frag| self.segment(frag))).chain(payload)
        });
        self.count(bytes);
        Ok(slot)
    }

    /// The segment of a header that is not in its packet.
    #[inline(always)]
    fn apart(&self, slot: u16, in_place: bool, header: [u8; VnetHdr::LEN]) -> Option<Segment> {
        (!in_place).then(|| Segment::read(self.headers.write(slot, header), VnetHdr::LEN as u32))
    }

    /// The segment of a header, and of the frame's headers behind it.
    #[inline(always)]
    fn behind(&self, slot: u16, header: [u8; VnetHdr::LEN], headers: &[u8]) -> Segment {
        let dma = self.headers.write_all(slot, header, headers);
        Segment::read(dma, (VnetHdr::LEN + headers.len()) as u32)
    }

    /// The segment of a fragment of this domain.
    #[inline(always)]
    fn segment(&self, frag: &Frag<M>) -> Segment {
        Segment::read(self.mappings.known(frag), frag.len() as u32)
    }

    /// The header of a frame. `None` if the frame needs a feature that was not negotiated.
    #[inline(always)]
    fn header(&self, meta: Meta) -> Option<[u8; VnetHdr::LEN]> {
        match needs(meta) {
            0 => Some([0; VnetHdr::LEN]),
            needs => self.negotiated.has(needs).then(|| VnetHdr::of(meta).to_bytes()),
        }
    }

    /// Whether a frame needs a feature that was not negotiated.
    #[inline(always)]
    fn lacks_offload(&self, meta: Meta) -> bool {
        meta != Meta::default() && !self.negotiated.has(needs(meta))
    }

    #[inline]
    fn count(&mut self, bytes: usize) {
        self.stats.frames += 1;
        self.stats.bytes += bytes as u64;
        self.dirty = true;
    }
}

/// The fragments of the packet in a slot that are not empty. Many devices treat a descriptor of no
/// bytes as an error.
#[inline(always)]
fn fragments<M: PeerMemory>(packet: &Option<Packet<M>>) -> impl Iterator<Item = &Frag<M>> {
    filled(packet).fragments().filter(|f| f.len() > 0)
}

/// The packet in a slot.
#[inline(always)]
pub(super) fn filled<M: PeerMemory>(packet: &Option<Packet<M>>) -> &Packet<M> {
    packet.as_ref().expect("the packet was put into its slot before it is posted")
}

/// Handles a panic of the domain over the packet in a slot, which is not posted yet: empties the
/// slot and resumes the panic. Returns the packet if this thread unwinds already.
#[cold]
#[inline(never)]
fn unsent<M: PeerMemory>(slot: &mut Option<Packet<M>>, in_place: bool, panic: Panics) -> Result<(), Packet<M>> {
    let packet = slot.take();
    panic.resume();
    let Some(mut packet) = packet else { return Ok(()) };
    if in_place {
        let undone = packet.pull(VnetHdr::LEN);
        debug_assert!(undone.is_ok());
    }
    Err(packet)
}

impl<M: PeerMemory> TxQueue for VirtioTx<M> {
    type Mem = M;

    fn send(&mut self, packet: Packet<M>) -> Result<(), Packet<M>> {
        with_queue!(&mut self.ring.queue, queue => self.path.send(queue, packet, |_| ()))
    }

    fn send_group(&mut self, packets: &mut [Option<Packet<M>>]) -> usize {
        with_queue!(&mut self.ring.queue, queue => self.path.send_group(queue, packets))
    }

    fn send_held(&mut self, packet: Packet<M>) -> Result<Frag<M>, Packet<M>> {
        with_queue!(&mut self.ring.queue, queue => self.path.send(queue, packet, |packet| packet.head().clone()))
    }

    fn header_slots(&self) -> Option<&HeaderSlots> {
        Some(&self.path.slots)
    }

    fn send_behind(&mut self, headers: &[u8], payload: Packet<M>) -> Result<SlotFrame, Packet<M>> {
        with_queue!(&mut self.ring.queue, queue => self.path.send_behind(queue, headers, payload))
    }

    fn send_copied(&mut self, frame: &[u8], meta: Meta) -> Result<SlotFrame, Sendable> {
        with_queue!(&mut self.ring.queue, queue => self.path.send_copied(queue, frame, meta))
    }

    #[inline]
    fn lend_list(&mut self, packet: &mut Packet<M>) {
        self.path.lists.lend(packet);
    }

    fn sendable(&self, packet: &Packet<M>) -> Sendable {
        self.sendable_with(packet, 0)
    }

    #[inline]
    fn supports(&self, meta: Meta) -> bool {
        !self.path.lacks_offload(meta)
    }

    fn flush(&mut self) {
        if std::mem::take(&mut self.path.dirty) {
            with_queue!(&mut self.ring.queue, queue => queue.publish());
            self.ring.notify();
        }
    }

    fn complete(&mut self) -> usize {
        if self.is_replaced() {
            return self.adopt(|_| {});
        }
        if self.path.stats.stopped.is_some() {
            return 0;
        }
        match self.reap(|_| {}) {
            Ok(n) => n,
            Err(error) => self.stop(error),
        }
    }

    #[inline]
    fn reach(&self, frag: &Frag<M>) -> Reach {
        self.path.mappings.reach(frag)
    }
}

impl<M: PeerMemory> Drop for VirtioTx<M> {
    fn drop(&mut self) {
        if let Err(error) = self.state.stop_ring(self.index, self.handle()) {
            netmem_pool::trace::warn!(queue = self.index, %error, "a transmit queue did not stop");
        }
        // Done before the packets are dropped, because their pages may be allocated again at once.
        self.path.mappings.release_all();
    }
}

impl<M: PeerMemory> fmt::Debug for VirtioTx<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioTx({}, {})", self.index, state_name(self.path.stats.stopped))
    }
}

/// The most segments of a packet: one for each fragment, and one for a header that is not in the
/// packet.
#[inline(always)]
fn segments<M: PeerMemory>(packet: &Packet<M>) -> usize {
    packet.frags().len() + 2
}

/// The features without which a frame cannot be sent.
#[inline(always)]
pub(super) fn needs(meta: Meta) -> u64 {
    let checksum = if let Checksum::Partial { .. } = meta.checksum { feature::CSUM } else { 0 };
    let gso = meta.gso.map_or(0, |gso| {
        let kind = match gso.kind {
            GsoKind::TcpV4 => feature::HOST_TSO4,
            GsoKind::TcpV6 => feature::HOST_TSO6,
            GsoKind::UdpFragment => feature::HOST_UFO,
            GsoKind::UdpSegment => feature::HOST_USO,
        };
        kind | if gso.ecn { feature::HOST_ECN } else { 0 }
    });
    checksum | gso
}
