//! The descriptors of a transmit ring as chains: which are free, which follows which, and the headers that have no room in
//! their packet.
//!
//! ```text
//!   header in place     head ──► frag ──► frag           the head's descriptor begins with the header
//!   header apart        header ──► head ──► frag         in an array beside the ring, a place per descriptor
//! ```

use super::ring::DriverRing;
use crate::net::VnetHdr;
use netmem_packet::Packet;
use netmem_pool::{Frag, PeerMemory, PeerShared, Region};
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

/// See the module.
pub(super) struct Chains {
    pub(super) ring: DriverRing,
    /// The private copy of each descriptor's successor.
    next: Box<[Option<u16>]>,
    free: Vec<u16>,
    headers: HeaderArray,
}

impl Chains {
    pub(super) fn new(ring: DriverRing, headers: HeaderArray) -> Self {
        let size = ring.size();
        Self { next: vec![None; usize::from(size)].into(), free: (0..size).rev().collect(), headers, ring }
    }

    /// Descriptors that are free.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// A descriptor for the head of a chain.
    #[inline]
    pub(super) fn head(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Describes a packet to the device as the chain that begins at `head`, and exposes it. `place` says where a fragment
    /// is for the device, given its descriptor. That there is [room](Self::room) was seen before.
    #[inline(always)]
    pub(super) fn post<M: PeerMemory>(
        &mut self,
        head: u16,
        packet: &Packet<M>,
        header: [u8; VnetHdr::LEN],
        in_place: bool,
        mut place: impl FnMut(u16, &Frag<M>) -> u64,
    ) {
        let mut last = if in_place {
            (head, place(head, packet.head()), packet.head().len() as u32)
        } else {
            (head, self.headers.write(head, header), VnetHdr::LEN as u32)
        };
        // A descriptor of no bytes is an error to many devices.
        for frag in packet.fragments().skip(usize::from(in_place)).filter(|f| f.len() > 0) {
            let Some(id) = self.free.pop() else { break };
            self.next[usize::from(last.0)] = Some(id);
            self.ring.describe(last.0, last.1, last.2, false, Some(id));
            last = (id, place(id, frag), frag.len() as u32);
        }
        self.ring.describe(last.0, last.1, last.2, false, None);
        self.ring.expose(head);
    }

    /// [`post`](Self::post), with more behind the packet: addresses and lengths of `payload`, none of them empty, and `held`
    /// hears of the descriptor of each. All fragments of the packet are where `place` says.
    #[allow(clippy::too_many_arguments, reason = "the parts of one chain")]
    pub(super) fn post_with<M: PeerMemory>(
        &mut self,
        head: u16,
        packet: &Packet<M>,
        header: [u8; VnetHdr::LEN],
        in_place: bool,
        place: impl Fn(&Frag<M>) -> u64,
        payload: impl Iterator<Item = (u64, u32)>,
        mut held: impl FnMut(u16),
    ) {
        let mut last = if in_place {
            (head, place(packet.head()), packet.head().len() as u32)
        } else {
            (head, self.headers.write(head, header), VnetHdr::LEN as u32)
        };
        let frags = packet.fragments().skip(usize::from(in_place)).filter(|f| f.len() > 0);
        let frags = frags.map(|f| (place(f), f.len() as u32, false));
        for (dma, len, device) in frags.chain(payload.map(|(dma, len)| (dma, len, true))) {
            let Some(id) = self.free.pop() else { break };
            self.next[usize::from(last.0)] = Some(id);
            self.ring.describe(last.0, last.1, last.2, false, Some(id));
            last = (id, dma, len);
            if device {
                held(id);
            }
        }
        self.ring.describe(last.0, last.1, last.2, false, None);
        self.ring.expose(head);
    }

    /// The descriptors that [`post`](Self::post) would give to fragments, in order.
    pub(super) fn next_ids(&self, head: u16, in_place: bool) -> impl Iterator<Item = u16> {
        std::iter::once(head).chain(self.free.iter().rev().copied()).skip(usize::from(!in_place))
    }

    /// The descriptors of the chain that begins at `head`.
    pub(super) fn ids(&self, head: u16) -> impl Iterator<Item = u16> {
        std::iter::successors(Some(head), |&id| self.next[usize::from(id)])
    }

    /// The device is done with the chain that begins at `head`.
    #[inline]
    pub(super) fn free(&mut self, head: u16) {
        let mut at = Some(head);
        while let Some(id) = at {
            self.free.push(id);
            at = self.next[usize::from(id)].take();
        }
    }
}
