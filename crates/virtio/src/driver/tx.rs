//! The transmit queue: packets given to the device, and dropped when it is done with them.
//!
//! A packet's head carries the virtio-net header in its own headroom where it may be written; else the header comes from
//! an array beside the ring, in a descriptor of its own. Packets of the device's DMA domain take the straight line through
//! [`send`](TxQueue::send); those of another are mapped on the way.

use super::Link;
use super::chains::{Chains, HeaderArray};
use super::panics::Panics;
use super::ring::DriverRing;
use super::space::{Memory, Space};
use super::stats::{DeviceFault, TxStats, state};
use crate::net::{VnetHdr, feature};
use crate::virtqueue::Negotiated;
use netmem_packet::{Checksum, GsoKind, Meta, Packet, Reach, Room, TxQueue};
use netmem_pool::{Frag, PeerMemory, PeerShared};
use std::fmt;
use std::sync::Arc;

/// A transmit queue. See [`TxQueue`].
///
/// A packet of another DMA domain, a redirected one for instance, is mapped in this device's when it is sent, if that
/// covers it, and unmapped when the device is done with it.
///
/// Dropping it stops the ring, unmaps and drops what the device still has: a device that does not stop may read pages that
/// are in use again, and writes none.
#[must_use = "a queue stops when it is dropped"]
pub struct VirtioTx<M: PeerMemory = PeerShared> {
    chains: Chains,
    /// What the device has, by head.
    packets: Box<[Option<Packet<M>>]>,
    space: Space<M>,
    features: Negotiated,
    /// Whether anything was exposed since the last flush.
    dirty: bool,
    pub(super) stats: TxStats,
    pub(super) index: usize,
    pub(super) link: Arc<Link<M>>,
}

impl<M: PeerMemory> VirtioTx<M> {
    pub(super) fn new(
        ring: DriverRing,
        headers: HeaderArray,
        memory: Memory<M>,
        features: Negotiated,
        index: usize,
        link: Arc<Link<M>>,
    ) -> Self {
        let size = ring.size();
        Self {
            packets: (0..size).map(|_| None).collect(),
            space: Space::new(memory, size),
            features,
            dirty: false,
            stats: TxStats::default(),
            index,
            link,
            chains: Chains::new(ring, headers),
        }
    }

    pub(super) fn ring(&self) -> &DriverRing {
        &self.chains.ring
    }

    pub(super) fn ring_mut(&mut self) -> &mut DriverRing {
        &mut self.chains.ring
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> TxStats {
        self.stats
    }

    /// Packets that the device has.
    #[must_use]
    pub fn posted(&self) -> usize {
        self.packets.iter().flatten().count()
    }

    /// A packet that is of another DMA domain, at least in part, as the chain that begins at `head`.
    #[cold]
    #[inline(never)]
    fn send_mapped(&mut self, head: u16, packet: Packet<M>) -> Result<(), Packet<M>> {
        let mut packet = packet;
        let header = header(packet.meta).to_bytes();
        let len = packet.len();
        let unposted = Unused { chains: &mut self.chains, head };
        // Before the head is mapped, so that the header is, too.
        let in_place = packet.prepend(&header);
        if let Err(error) = self.space.map(&packet, unposted.chains.next_ids(head, in_place)) {
            tracing::debug!(queue = self.index, %error, "a packet cannot be mapped");
            self.stats.wrong_domain += 1;
            if in_place {
                let undone = packet.pull(header.len());
                debug_assert!(undone.is_ok());
            }
            return Err(packet);
        }
        std::mem::forget(unposted);
        let packet = self.packets[usize::from(head)].insert(packet);
        self.chains.post(head, packet, header, in_place, |id, _| self.space.place(id));
        self.stats.mapped += 1;
        self.count(len);
        Ok(())
    }

    /// Queues a packet with more behind it: `payload`'s addresses and lengths. `held` hears of the descriptor of each.
    pub(super) fn send_with(
        &mut self,
        packet: Packet<M>,
        payload: impl ExactSizeIterator<Item = (u64, u32)>,
        held: impl FnMut(u16),
    ) -> Result<(), Packet<M>> {
        if self.stats.stopped.is_some() {
            return Err(packet);
        }
        if self.lacks_offload(packet.meta) {
            self.stats.no_offload += 1;
            return Err(packet);
        }
        if descriptors(&packet) + payload.len() > self.chains.room() {
            self.stats.full += 1;
            return Err(packet);
        }
        // Headers are written for this device, in memory of its domain.
        if !packet.fragments().all(|f| self.space.address(f).is_some()) {
            self.stats.wrong_domain += 1;
            return Err(packet);
        }
        let Some(head) = self.chains.head() else { return Err(packet) };
        let header = header(packet.meta).to_bytes();
        let len = packet.len();
        let packet = self.packets[usize::from(head)].insert(packet);
        let in_place = packet.prepend(&header);
        if let Err(panic) = self.space.sync(packet) {
            return self.unsent(head, in_place, panic);
        }
        let mut bytes = len;
        let payload = payload.inspect(|&(_, len)| bytes += len as usize);
        self.chains.post_with(head, packet, header, in_place, |frag| self.space.known(frag), payload, held);
        self.count(bytes);
        Ok(())
    }

    /// The domain panicked over the packet in slot `head`, which has no other descriptor yet: empties the slot, frees the
    /// descriptor, and goes on with the panic. Returns the packet if this thread unwinds already.
    #[cold]
    #[inline(never)]
    fn unsent(&mut self, head: u16, in_place: bool, panic: Panics) -> Result<(), Packet<M>> {
        let packet = self.packets[usize::from(head)].take();
        self.chains.free(head);
        panic.resume();
        let Some(mut packet) = packet else { return Ok(()) };
        if in_place {
            let undone = packet.pull(VnetHdr::LEN);
            debug_assert!(undone.is_ok());
        }
        Err(packet)
    }

    /// Whether a frame asks for something that was not negotiated.
    #[inline(always)]
    fn lacks_offload(&self, meta: Meta) -> bool {
        meta != Meta::default() && !self.features.has(needs(meta))
    }

    /// Whether the device was connected anew: then [`adopt`](Self::adopt) is due.
    #[inline(always)]
    pub(super) fn is_replaced(&self) -> bool {
        self.link.has_replaced(self.ring())
    }

    /// Goes on with the ring of the device's new connection. Takes back what the old device had confirmed, as
    /// [`reap`](Self::reap) does, and drops what it had not. Returns how many frames were confirmed.
    #[cold]
    pub(super) fn adopt(&mut self, done: impl FnMut(&Chains, u16)) -> usize {
        let Some((ring, headers)) = self.link.take_tx_ring(self.index) else { return 0 };
        let completed = if self.stats.stopped.is_some() { 0 } else { self.reap(done).unwrap_or(0) };
        let mut panics = Panics::default();
        panics.call(|| self.space.release_all());
        for packet in self.packets.iter_mut().filter_map(Option::take) {
            self.stats.unconfirmed += 1;
            panics.call(|| drop(packet));
        }
        self.chains = Chains::new(ring, headers);
        (self.dirty, self.stats.stopped) = (false, None);
        self.stats.restarts += 1;
        panics.resume();
        completed
    }

    #[cold]
    pub(super) fn stop(&mut self, error: DeviceFault) -> usize {
        tracing::warn!(%error, "a transmit queue is stopped: its device cannot be trusted");
        self.stats.stopped = Some(error);
        0
    }

    #[inline]
    fn count(&mut self, bytes: usize) {
        self.stats.frames += 1;
        self.stats.bytes += bytes as u64;
        self.dirty = true;
    }

    /// Takes back what the device is done with, and tells `done` of each chain before its descriptors are free.
    #[inline(always)]
    pub(super) fn reap(&mut self, mut done: impl FnMut(&Chains, u16)) -> Result<usize, DeviceFault> {
        let pending = self.chains.ring.pending()?;
        for _ in 0..pending {
            let (id, _) = self.chains.ring.used(0);
            let packet = self.packets.get_mut(id as usize).ok_or(DeviceFault::BadId { id })?;
            let id = id as u16;
            if packet.is_none() {
                return Err(DeviceFault::NotPosted { id });
            }
            self.chains.ring.consume(1);
            self.stats.completed += 1;
            let unused = Unused { chains: &mut self.chains, head: id };
            let sent = Sent { packet, unused };
            if self.space.has_mapped() {
                self.space.release_chain(sent.unused.chains.ids(id));
            }
            done(sent.unused.chains, id);
        }
        Ok(usize::from(pending))
    }
}

/// A chain that the device does not have: its descriptors are free when this is dropped, also by a panic of user code (a domain,
/// a provider, a holder's release).
struct Unused<'c> {
    chains: &'c mut Chains,
    head: u16,
}

impl Drop for Unused<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.chains.free(self.head);
    }
}

/// A packet that the device is done with. It is dropped with this, and then its descriptors are free.
struct Sent<'q, M: PeerMemory> {
    packet: &'q mut Option<Packet<M>>,
    unused: Unused<'q>,
}

impl<M: PeerMemory> Drop for Sent<'_, M> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.packet = None;
    }
}

impl<M: PeerMemory> TxQueue for VirtioTx<M> {
    type Mem = M;

    fn send(&mut self, packet: Packet<M>) -> Result<(), Packet<M>> {
        if self.stats.stopped.is_some() {
            return Err(packet);
        }
        if self.lacks_offload(packet.meta) {
            self.stats.no_offload += 1;
            return Err(packet);
        }
        // Checked before anything is written: a packet that is refused comes back as it was.
        if descriptors(&packet) > self.chains.room() {
            self.stats.full += 1;
            return Err(packet);
        }
        let Some(head) = self.chains.head() else { return Err(packet) };
        if !packet.fragments().all(|f| self.space.address(f).is_some()) {
            return self.send_mapped(head, packet);
        }
        let len = packet.len();
        let header = header(packet.meta).to_bytes();
        // Put in its place first: a packet that has just got its header, in small pieces, is not to be moved, in large ones.
        let packet = self.packets[usize::from(head)].insert(packet);
        let in_place = packet.prepend(&header);
        if let Err(panic) = self.space.sync(packet) {
            return self.unsent(head, in_place, panic);
        }
        self.chains.post(head, packet, header, in_place, |_, frag| self.space.known(frag));
        self.count(len);
        Ok(())
    }

    fn room(&self, packet: &Packet<M>) -> Room {
        let size = usize::from(self.ring().size());
        let never = self.stats.stopped.is_some()
            || self.lacks_offload(packet.meta)
            || descriptors(packet) > size
            || packet.fragments().any(|f| self.space.reach(f) == Reach::Never);
        match descriptors(packet) > self.chains.room() {
            _ if never => Room::Never,
            true => Room::Later,
            false => Room::Now,
        }
    }

    fn flush(&mut self) {
        if std::mem::take(&mut self.dirty) {
            self.chains.ring.publish();
            self.chains.ring.notify();
        }
    }

    fn complete(&mut self) -> usize {
        if self.is_replaced() {
            return self.adopt(|_, _| {});
        }
        if self.stats.stopped.is_some() {
            return 0;
        }
        match self.reap(|_, _| {}) {
            Ok(n) => n,
            Err(error) => self.stop(error),
        }
    }

    #[inline]
    fn reach(&self, frag: &Frag<M>) -> Reach {
        self.space.reach(frag)
    }
}

impl<M: PeerMemory> Drop for VirtioTx<M> {
    fn drop(&mut self) {
        if let Err(error) = self.link.stop_ring(self.index, self.ring()) {
            tracing::warn!(queue = self.index, %error, "a transmit queue did not stop");
        }
        // Before the packets are dropped: their pages may be allocated again at once.
        self.space.release_all();
    }
}

impl<M: PeerMemory> fmt::Debug for VirtioTx<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioTx({}, {})", self.index, state(self.stats.stopped))
    }
}

/// Descriptors that must be free for a packet: one for each fragment, and one for a header that may need a place of its own.
#[inline(always)]
fn descriptors<M: PeerMemory>(packet: &Packet<M>) -> usize {
    packet.frags().len() + 2
}

/// The features without which a frame cannot be sent.
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

/// The header that says what `meta` says.
fn header(meta: Meta) -> VnetHdr {
    let mut h = VnetHdr::PLAIN;
    match meta.checksum {
        // Vouching is for those who receive: a sender must not set the flag.
        Checksum::Unknown | Checksum::Vouched => {}
        Checksum::Partial { start, offset } => {
            h.flags = VnetHdr::NEEDS_CSUM;
            (h.csum_start, h.csum_offset) = (start, offset);
        }
    }
    if let Some(gso) = meta.gso {
        h.gso_type = match gso.kind {
            GsoKind::TcpV4 => VnetHdr::GSO_TCPV4,
            GsoKind::TcpV6 => VnetHdr::GSO_TCPV6,
            GsoKind::UdpFragment => VnetHdr::GSO_UDP,
            GsoKind::UdpSegment => VnetHdr::GSO_UDP_L4,
        } | if gso.ecn { VnetHdr::GSO_ECN } else { 0 };
        (h.gso_size, h.hdr_len) = (gso.size, gso.headers);
    }
    // A transmitted header counts no buffers.
    h.num_buffers = 0;
    h
}
