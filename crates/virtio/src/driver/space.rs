//! The addresses of fragments for a transmit queue's device. A page in the device's DMA domain has its address already.
//! Any other page is mapped for as long as the device has the packet.
//!
//! ```text
//!   same domain      frag.dma_addr()                            synced
//!   other domain     domain.map(frag) ── sent ── completed ──► domain.unmap
//!                        └── noted by the packet's slot: a slot keeps its allocation
//! ```

use super::panics::Panics;
use netmem_packet::{Packet, Reach};
use netmem_pool::{Direction, DmaDomain, Frag, MapError, PeerMemory, Region};
use std::ops::Range;
use std::sync::Arc;

/// How a transmit queue's device addresses memory.
pub(super) enum Memory<M: PeerMemory> {
    /// As this domain maps it. Kept so that no other can have its identity.
    Domain(Arc<dyn DmaDomain>),
    /// By this process's addresses, within this region.
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
    /// A short form of `memory`, for a fast comparison: the identity of its domain, or the addresses of its region.
    domain: usize,
    within: Range<usize>,
    needs_sync: bool,
    /// Where the fragments of a slot's packet are, if something of it was mapped when it was sent. Empty until something was.
    places: Box<[Vec<Place>]>,
    /// How many of them are mapped for this queue alone.
    out: usize,
    slots: u16,
}

impl<M: PeerMemory> Space<M> {
    pub(super) fn new(memory: Memory<M>, slots: u16) -> Self {
        let (domain, within, needs_sync) = match &memory {
            Memory::Domain(domain) => (Arc::as_ptr(domain).addr(), 0..0, domain.needs_sync()),
            Memory::Plain(region) => {
                let start = region.as_ptr().addr();
                (0, start..start + region.len(), false)
            }
        };
        Self { memory, domain, within, needs_sync, places: Box::default(), out: 0, slots }
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

    /// Syncs the bytes of a packet of this domain for the device, which is about to read them. Returns a panic of the
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

    /// Maps the fragments of other domains and syncs all fragments, for the packet that will be posted in `slot`. If a
    /// fragment cannot be mapped, those that were mapped are unmapped again, the last one first.
    pub(super) fn map(&mut self, packet: &Packet<M>, slot: u16) -> Result<(), MapError> {
        if self.places.is_empty() {
            self.places = (0..self.slots).map(|_| Vec::new()).collect();
        }
        let mut new = Unqueued { space: self, slot, queued: false };
        let frags = || packet.fragments().filter(|f| f.len() > 0);
        for frag in frags() {
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
            new.space.places[usize::from(slot)].push(place);
        }
        if let (true, Memory::Domain(domain)) = (new.space.needs_sync, &new.space.memory) {
            for (frag, place) in std::iter::zip(frags(), &new.space.places[usize::from(slot)]) {
                domain.sync_for_device(place.dma, frag.len(), Direction::ToDevice);
            }
        }
        // From here on the mappings belong to the packet.
        new.queued = true;
        Ok(())
    }

    /// The addresses of the fragments that are not empty of the packet in `slot`, as [`map`](Self::map) has found them.
    #[inline]
    pub(super) fn mapped(&self, slot: u16) -> impl Iterator<Item = u64> {
        self.places[usize::from(slot)].iter().map(|place| place.dma)
    }

    /// Whether anything is mapped for this queue alone.
    #[inline(always)]
    pub(super) fn has_mapped(&self) -> bool {
        self.out > 0
    }

    /// Unmaps the fragments of the packet in `slot`, which the device has completed: the last one first, and all of
    /// them also if the domain panics over one.
    #[cold]
    pub(super) fn release(&mut self, slot: u16) {
        let (Memory::Domain(domain), Some(places)) = (&self.memory, self.places.get_mut(usize::from(slot))) else {
            return;
        };
        let mut panics = Panics::default();
        while let Some(place) = places.pop() {
            if place.mapped > 0 {
                self.out -= 1;
                panics.call(|| domain.unmap(place.dma, place.mapped as usize));
            }
        }
        panics.resume();
    }

    /// Unmaps the fragments of all packets. The device has completed or lost them.
    pub(super) fn release_all(&mut self) {
        let mut panics = Panics::default();
        for slot in 0..self.places.len() as u16 {
            panics.call(|| self.release(slot));
        }
        panics.resume();
    }
}

/// A slot whose packet is not queued yet. If it is never queued, the drop of this value unmaps its fragments.
struct Unqueued<'s, M: PeerMemory> {
    space: &'s mut Space<M>,
    slot: u16,
    queued: bool,
}

impl<M: PeerMemory> Drop for Unqueued<'_, M> {
    fn drop(&mut self) {
        if !self.queued {
            self.space.release(self.slot);
        }
    }
}
