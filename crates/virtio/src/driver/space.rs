//! Which address a transmit queue's device knows a fragment by: of the pages in its DMA domain the one they are mapped at,
//! of others one that they are mapped at for as long as the device has them.
//!
//! ```text
//!   same domain      frag.dma_addr()                            synced
//!   other domain     domain.map(frag) ── sent ── completed ──► domain.unmap
//!                        └── noted by the number of the fragment's descriptor: no allocation per packet
//! ```

use super::panics::Panics;
use netmem_packet::{MAX_FRAGS, Packet, Reach};
use netmem_pool::{Direction, DmaDomain, Frag, MapError, PeerMemory, Region};
use std::ops::Range;
use std::sync::Arc;

/// How a transmit queue's device addresses memory.
pub(super) enum Memory<M: PeerMemory> {
    /// As this domain maps it. Kept so that no other can have its identity.
    Domain(Arc<dyn DmaDomain>),
    /// By this process's addresses, in this region.
    Plain(Arc<Region<M>>),
}

/// A fragment's place in the device's address space.
#[derive(Clone, Copy, Default)]
struct Place {
    dma: u64,
    /// Bytes mapped for this queue alone, 0 if they are mapped anyway.
    mapped: u32,
}

pub(super) struct Space<M: PeerMemory> {
    memory: Memory<M>,
    /// What `memory` comes down to: the identity of its domain, or the addresses of its region.
    domain: usize,
    within: Range<usize>,
    needs_sync: bool,
    /// Where descriptors point, of packets in which something was mapped at send. None until something was.
    places: Box<[Place]>,
    /// How many of them are mapped.
    out: usize,
    descriptors: u16,
}

impl<M: PeerMemory> Space<M> {
    pub(super) fn new(memory: Memory<M>, descriptors: u16) -> Self {
        let (domain, within, needs_sync) = match &memory {
            Memory::Domain(domain) => (Arc::as_ptr(domain).addr(), 0..0, domain.needs_sync()),
            Memory::Plain(region) => {
                let start = region.as_ptr().addr();
                (0, start..start + region.len(), false)
            }
        };
        Self { memory, domain, within, needs_sync, places: Box::default(), out: 0, descriptors }
    }

    /// The address of `frag`, if the device knows it without anything being done.
    #[inline(always)]
    pub(super) fn address(&self, frag: &Frag<M>) -> Option<u64> {
        match &self.memory {
            Memory::Domain(_) => frag.dma_domain() == self.domain,
            Memory::Plain(_) => self.within.contains(&frag.as_ptr().addr()),
        }
        .then(|| self.known(frag))
    }

    /// The address of a fragment that is known to have [one](Self::address).
    #[inline(always)]
    pub(super) fn known(&self, frag: &Frag<M>) -> u64 {
        match &self.memory {
            Memory::Domain(_) => frag.dma_addr(),
            Memory::Plain(_) => frag.as_ptr().addr() as u64,
        }
    }

    #[inline]
    pub(super) fn reach(&self, frag: &Frag<M>) -> Reach {
        match (self.address(frag), &self.memory) {
            (Some(dma), _) => Reach::Mapped(dma),
            (None, Memory::Domain(_)) => Reach::Map,
            (None, Memory::Plain(_)) => Reach::Never,
        }
    }

    /// The CPU is done with the bytes of a packet of this domain, the device is about to read them. Returns a panic of the
    /// domain, which the caller resumes when the packet has left its slot.
    #[inline]
    pub(super) fn sync(&self, packet: &Packet<M>) -> Result<(), Panics> {
        if self.needs_sync { self.sync_all(packet) } else { Ok(()) }
    }

    #[cold]
    fn sync_all(&self, packet: &Packet<M>) -> Result<(), Panics> {
        let Memory::Domain(domain) = &self.memory else { return Ok(()) };
        let sync = |f: &Frag<M>| domain.sync_for_device(f.dma_addr(), f.len(), Direction::ToDevice);
        let mut panics = Panics::default();
        panics.call(|| packet.fragments().filter(|f| f.len() > 0).for_each(sync)).ok_or(panics)
    }

    /// Maps what is of another domain, and syncs all, for a packet whose fragments that are not empty are to have the
    /// descriptors `ids`, in order. They are unmapped again, last first, if one of them cannot be mapped.
    pub(super) fn map(&mut self, packet: &Packet<M>, ids: impl Iterator<Item = u16>) -> Result<(), MapError> {
        if self.places.is_empty() {
            self.places = vec![Place::default(); usize::from(self.descriptors)].into();
        }
        let mut new = Unqueued { space: self, ids: [0; MAX_FRAGS + 1], len: 0 };
        let frags = || packet.fragments().filter(|f| f.len() > 0);
        for (frag, id) in std::iter::zip(frags(), ids) {
            let place = match (new.space.address(frag), &new.space.memory) {
                (Some(dma), _) => Place { dma, mapped: 0 },
                (None, Memory::Domain(domain)) => {
                    let dma = domain.map(frag.as_ptr().cast_mut(), frag.len(), Direction::ToDevice)?;
                    new.space.out += 1;
                    Place { dma, mapped: frag.len() as u32 }
                }
                (None, Memory::Plain(_)) => {
                    return Err(MapError::Outside { addr: frag.as_ptr().addr(), len: frag.len() });
                }
            };
            new.space.places[usize::from(id)] = place;
            new.ids[new.len] = id;
            new.len += 1;
        }
        if let (true, Memory::Domain(domain)) = (new.space.needs_sync, &new.space.memory) {
            for (frag, id) in std::iter::zip(frags(), &new.ids) {
                domain.sync_for_device(new.space.place(*id), frag.len(), Direction::ToDevice);
            }
        }
        // Its packet's from here on.
        new.len = 0;
        Ok(())
    }

    /// The address that descriptor `id` is to point to, as [`map`](Self::map) has found it.
    #[inline]
    pub(super) fn place(&self, id: u16) -> u64 {
        self.places[usize::from(id)].dma
    }

    /// Whether anything is mapped for this queue alone.
    #[inline(always)]
    pub(super) fn has_mapped(&self) -> bool {
        self.out > 0
    }

    /// The device is done with what descriptor `id` points to.
    fn release(&mut self, id: u16) {
        let Memory::Domain(domain) = &self.memory else { return };
        // Before the call to the domain, which may panic: a fragment is unmapped once.
        let place = std::mem::take(&mut self.places[usize::from(id)]);
        if place.mapped > 0 {
            self.out -= 1;
            domain.unmap(place.dma, place.mapped as usize);
        }
    }

    /// The device is done with what these descriptors point to. All of it is unmapped, also if the domain panics over one.
    #[cold]
    pub(super) fn release_chain(&mut self, ids: impl Iterator<Item = u16>) {
        let mut panics = Panics::default();
        ids.for_each(|id| _ = panics.call(|| self.release(id)));
        panics.resume();
    }

    /// The device is done with everything.
    pub(super) fn release_all(&mut self) {
        self.release_chain((0..self.places.len() as u16).rev());
    }
}

/// Descriptors whose packet is not queued yet: what was mapped for it is unmapped if it never is.
struct Unqueued<'s, M: PeerMemory> {
    space: &'s mut Space<M>,
    ids: [u16; MAX_FRAGS + 1],
    len: usize,
}

impl<M: PeerMemory> Drop for Unqueued<'_, M> {
    fn drop(&mut self) {
        self.space.release_chain(self.ids[..self.len].iter().rev().copied());
    }
}
