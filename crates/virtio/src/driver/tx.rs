//! The transmit queue: packets given to the device, and dropped when it is done with them.
//!
//! A packet's head carries the virtio-net header in its own headroom where it may be written; else the header comes from
//! an array beside the ring, in a descriptor of its own.

use super::Link;
use super::ring::DriverRing;
use super::stats::{QueueError, TxStats, state};
use crate::net::{VnetHdr, feature};
use netmem_packet::{Checksum, GsoKind, Meta, Packet, TxQueue};
use netmem_pool::{DmaDomain, Frag, PeerShared, Region};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Bytes between two headers of the array.
pub(super) const HEADER_STRIDE: usize = 16;

/// The headers for packets that have no room for their own: one per descriptor, in memory that the device sees.
pub(super) struct HeaderArray {
    pub(super) region: Arc<Region<PeerShared>>,
    pub(super) offset: usize,
    pub(super) dma: u64,
}

impl HeaderArray {
    /// Writes the header of the chain that begins at `id`; returns its device address.
    fn write(&self, id: u16, header: [u8; VnetHdr::LEN]) -> u64 {
        let at = usize::from(id) * HEADER_STRIDE;
        // SAFETY: the array has a place for every descriptor, inside of a region that it keeps; the device may read it
        // meanwhile, hence volatile.
        unsafe {
            let to = self.region.as_ptr().add(self.offset + at).cast::<[u8; VnetHdr::LEN]>();
            to.write_volatile(header);
        }
        self.dma + at as u64
    }
}

/// Which pages the device can be told of.
pub(super) enum Reach {
    /// Those that are mapped in this domain, which is kept so that no other can have its identity.
    Domain(Arc<dyn DmaDomain>),
    /// Those that lie in this memory, by their addresses in this process.
    Memory(Arc<Region<PeerShared>>),
}

impl Reach {
    /// The identity of pages that are within reach, and the addresses between which they must lie.
    fn limits(&self) -> (usize, Range<usize>) {
        match self {
            Self::Domain(domain) => (Arc::as_ptr(domain).addr(), 0..usize::MAX),
            Self::Memory(region) => {
                let start = region.as_ptr().addr();
                (0, start..start + region.len())
            }
        }
    }
}

/// A transmit queue. See [`TxQueue`].
///
/// Dropping it stops the ring and drops what the device still has: a device that does not stop may read pages that are in
/// use again, and writes none.
pub struct VirtioTx {
    ring: DriverRing,
    /// What the device has, by head.
    packets: Box<[Option<Packet<PeerShared>>]>,
    /// The private copy of each descriptor's successor.
    next: Box<[Option<u16>]>,
    free: Vec<u16>,
    headers: HeaderArray,
    reach: Reach,
    /// What `reach` comes down to.
    domain: usize,
    within: Range<usize>,
    needs_sync: bool,
    /// What was negotiated.
    features: u64,
    /// Whether anything was exposed since the last flush.
    dirty: bool,
    stats: TxStats,
    index: usize,
    link: Arc<Link>,
}

impl VirtioTx {
    pub(super) fn new(
        ring: DriverRing,
        headers: HeaderArray,
        reach: Reach,
        features: u64,
        index: usize,
        link: Arc<Link>,
    ) -> Self {
        let size = ring.size();
        let (domain, within) = reach.limits();
        let needs_sync = matches!(&reach, Reach::Domain(d) if d.needs_sync());
        Self {
            packets: (0..size).map(|_| None).collect(),
            next: vec![None; usize::from(size)].into(),
            free: (0..size).rev().collect(),
            headers,
            reach,
            domain,
            within,
            needs_sync,
            features,
            dirty: false,
            stats: TxStats::default(),
            index,
            link,
            ring,
        }
    }

    pub(super) fn ring(&self) -> &DriverRing {
        &self.ring
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

    #[inline]
    fn reaches(&self, frag: &Frag<PeerShared>) -> bool {
        frag.dma_domain() == self.domain && self.within.contains(&frag.as_ptr().addr())
    }

    /// The CPU is done with the packet's bytes, the device is about to read them.
    #[cold]
    fn sync(&self, packet: &Packet<PeerShared>) {
        if let Reach::Domain(domain) = &self.reach {
            packet.fragments().filter(|f| f.len() > 0).for_each(|f| domain.sync_for_device(f.dma_addr(), f.len()));
        }
    }

    fn reap(&mut self) -> Result<usize, QueueError> {
        let pending = self.ring.pending()?;
        for _ in 0..pending {
            let (id, _) = self.ring.used(0);
            let packet = self.packets.get_mut(id as usize).ok_or(QueueError::BadId { id })?;
            drop(packet.take().ok_or(QueueError::NotPosted { id: id as u16 })?);
            self.ring.consume(1);
            let mut at = Some(id as u16);
            while let Some(id) = at {
                self.free.push(id);
                at = self.next[usize::from(id)].take();
            }
            self.stats.completed += 1;
        }
        Ok(usize::from(pending))
    }
}

impl TxQueue for VirtioTx {
    type Mem = PeerShared;

    fn send(&mut self, mut packet: Packet<PeerShared>) -> Result<(), Packet<PeerShared>> {
        if self.stats.stopped.is_some() {
            return Err(packet);
        }
        if !packet.fragments().all(|f| self.reaches(f)) {
            self.stats.wrong_domain += 1;
            return Err(packet);
        }
        if packet.meta != Meta::default() && needs(packet.meta) & !self.features != 0 {
            self.stats.no_offload += 1;
            return Err(packet);
        }
        // Checked before anything is written, for a header of its own: a packet that is refused comes back as it was.
        let needs = packet.frags().len() + 2;
        if needs > self.free.len() {
            self.stats.full += 1;
            return Err(packet);
        }
        let header = header(packet.meta).to_bytes();
        let len = packet.len() as u64;
        let Some(head) = self.free.pop() else { return Err(packet) };
        let in_place = packet.prepend(&header);
        let mut last = if in_place {
            (head, packet.head().dma_addr(), packet.head().len() as u32)
        } else {
            (head, self.headers.write(head, header), VnetHdr::LEN as u32)
        };
        if self.needs_sync {
            self.sync(&packet);
        }
        // A descriptor of no bytes is an error to many devices.
        for frag in packet.fragments().skip(usize::from(in_place)).filter(|f| f.len() > 0) {
            // There are enough: `needs` was checked.
            let Some(id) = self.free.pop() else { break };
            self.next[usize::from(last.0)] = Some(id);
            self.ring.describe(last.0, last.1, last.2, false, Some(id));
            last = (id, frag.dma_addr(), frag.len() as u32);
        }
        self.ring.describe(last.0, last.1, last.2, false, None);
        self.ring.expose(head);
        self.packets[usize::from(head)] = Some(packet);
        self.dirty = true;
        self.stats.frames += 1;
        self.stats.bytes += len;
        Ok(())
    }

    fn flush(&mut self) {
        if std::mem::take(&mut self.dirty) {
            self.ring.publish();
            self.ring.notify();
        }
    }

    fn complete(&mut self) -> usize {
        if self.stats.stopped.is_some() {
            return 0;
        }
        self.reap().unwrap_or_else(|error| {
            tracing::warn!(%error, "a transmit queue is stopped: its device cannot be trusted");
            self.stats.stopped = Some(error);
            0
        })
    }
}

impl Drop for VirtioTx {
    fn drop(&mut self) {
        if let Err(error) = self.link.stop_ring(self.index) {
            tracing::warn!(queue = self.index, %error, "a transmit queue did not stop");
        }
    }
}

impl fmt::Debug for VirtioTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioTx({}, {})", self.index, state(self.stats.stopped))
    }
}

/// The features without which a frame cannot be sent.
fn needs(meta: Meta) -> u64 {
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
