//! The addresses of fragments for a transmit queue's device.
//!
//! A page in the device's DMA domain has its address already. Any other page (one that another
//! device received, for instance) is mapped for as long as the device has the packet, so that it
//! need not be copied.
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
pub(super) enum TxAddressing<M: PeerMemory> {
    /// As this domain maps it. Kept so that no other can have its identity.
    Domain(Arc<dyn DmaDomain>),
    /// By this process's addresses, within this region.
    Plain(Arc<Region<M>>),
}

/// A fragment's address for the device.
#[derive(Clone, Copy, Default)]
struct FragMapping {
    dma: u64,
    /// Bytes mapped for this queue alone, 0 if they are mapped anyway.
    mapped: u32,
}

/// The addresses of the fragments that a transmit queue has posted.
pub(super) struct TxMappings<M: PeerMemory> {
    memory: TxAddressing<M>,
    /// A short form of `memory`, for a fast comparison: the identity of its domain, or the
    /// addresses of its region.
    domain: usize,
    within: Range<usize>,
    needs_sync: bool,
    /// Where the fragments of a slot's packet are, if something of it was mapped when it was sent.
    /// Empty until something was.
    by_slot: Box<[Vec<FragMapping>]>,
    /// How many of them are mapped for this queue alone.
    mapped_count: usize,
    slots: u16,
}

impl<M: PeerMemory> TxMappings<M> {
    pub(super) fn new(memory: TxAddressing<M>, slots: u16) -> Self {
        let (domain, within, needs_sync) = match &memory {
            TxAddressing::Domain(domain) => (Arc::as_ptr(domain).addr(), 0..0, domain.needs_sync()),
            TxAddressing::Plain(region) => {
                let start = region.as_ptr().addr();
                (0, start..start + region.len(), false)
            }
        };
        Self { memory, domain, within, needs_sync, by_slot: Box::default(), mapped_count: 0, slots }
    }

    /// The address of `frag`, if the device knows it without anything being done.
    #[inline(always)]
    pub(super) fn address(&self, frag: &Frag<M>) -> Option<u64> {
        match &self.memory {
            TxAddressing::Domain(_) => frag.dma_domain() == self.domain,
            TxAddressing::Plain(_) => self.within.contains(&frag.as_ptr().addr()),
        }
        .then(|| self.known(frag))
    }

    /// The address of a fragment that is known to have [one](Self::address).
    #[inline(always)]
    pub(super) fn known(&self, frag: &Frag<M>) -> u64 {
        match &self.memory {
            TxAddressing::Domain(_) => frag.dma_addr(),
            TxAddressing::Plain(_) => frag.as_ptr().addr() as u64,
        }
    }

    #[inline]
    pub(super) fn reach(&self, frag: &Frag<M>) -> Reach {
        match (self.address(frag), &self.memory) {
            (Some(dma), _) => Reach::Mapped(dma),
            (None, TxAddressing::Domain(_)) => Reach::Map,
            (None, TxAddressing::Plain(_)) => Reach::Never,
        }
    }

    /// Syncs the bytes of a packet of this domain for the device, which is about to read them.
    /// Returns a panic of the domain, which the caller resumes when the packet has left its slot.
    #[inline]
    pub(super) fn sync(&self, packet: &Packet<M>) -> Result<(), Panics> {
        if self.needs_sync { self.sync_all(packet) } else { Ok(()) }
    }

    #[cold]
    fn sync_all(&self, packet: &Packet<M>) -> Result<(), Panics> {
        let TxAddressing::Domain(domain) = &self.memory else { return Ok(()) };
        let sync = |f: &Frag<M>| domain.sync_for_device(f.dma_addr(), f.len(), Direction::ToDevice);
        let mut panics = Panics::default();
        panics.call(|| packet.fragments().filter(|f| f.len() > 0).for_each(sync)).ok_or(panics)
    }

    /// Maps the fragments of other domains and syncs all fragments, for the packet that will be
    /// posted in `slot`. If a fragment cannot be mapped, those that were mapped are unmapped again,
    /// the last one first.
    pub(super) fn map(&mut self, packet: &Packet<M>, slot: u16) -> Result<(), MapError> {
        if self.by_slot.is_empty() {
            self.by_slot = (0..self.slots).map(|_| Vec::new()).collect();
        }
        // Completed packets for which nothing was mapped leave their addresses here.
        self.by_slot[usize::from(slot)].clear();
        let mut new = Unqueued { mappings: self, slot, queued: false };
        let frags = || packet.fragments().filter(|f| f.len() > 0);
        for frag in frags() {
            let mapping = match (new.mappings.address(frag), &new.mappings.memory) {
                (Some(dma), _) => FragMapping { dma, mapped: 0 },
                (None, TxAddressing::Domain(domain)) => {
                    let dma = domain.map(frag.as_ptr().cast_mut(), frag.len(), Direction::ToDevice)?;
                    new.mappings.mapped_count += 1;
                    FragMapping { dma, mapped: frag.len() as u32 }
                }
                (None, TxAddressing::Plain(_)) => {
                    return Err(MapError::Outside { addr: frag.as_ptr().addr(), len: frag.len() });
                }
            };
            new.mappings.by_slot[usize::from(slot)].push(mapping);
        }
        if let (true, TxAddressing::Domain(domain)) = (new.mappings.needs_sync, &new.mappings.memory) {
            for (frag, mapping) in std::iter::zip(frags(), &new.mappings.by_slot[usize::from(slot)]) {
                domain.sync_for_device(mapping.dma, frag.len(), Direction::ToDevice);
            }
        }
        // From here on the mappings belong to the packet.
        new.queued = true;
        Ok(())
    }

    /// The addresses of the fragments that are not empty of the packet in `slot`, as
    /// [`map`](Self::map) has found them.
    #[inline]
    pub(super) fn mapped(&self, slot: u16) -> impl Iterator<Item = u64> {
        self.by_slot[usize::from(slot)].iter().map(|mapping| mapping.dma)
    }

    /// Whether packets must be synced before they are sent.
    #[inline(always)]
    pub(super) fn needs_sync(&self) -> bool {
        self.needs_sync
    }

    /// Whether anything is mapped for this queue alone.
    #[inline(always)]
    pub(super) fn has_mapped(&self) -> bool {
        self.mapped_count > 0
    }

    /// Unmaps the fragments of the packet in `slot`, which the device has completed: the last one
    /// first, and all of them also if the domain panics over one.
    #[cold]
    pub(super) fn release(&mut self, slot: u16) {
        let (TxAddressing::Domain(domain), Some(by_slot)) = (&self.memory, self.by_slot.get_mut(usize::from(slot)))
        else {
            return;
        };
        let mut panics = Panics::default();
        while let Some(mapping) = by_slot.pop() {
            if mapping.mapped > 0 {
                self.mapped_count -= 1;
                panics.call(|| domain.unmap(mapping.dma, mapping.mapped as usize));
            }
        }
        panics.resume();
    }

    /// Unmaps the fragments of all packets. The device has completed or lost them.
    pub(super) fn release_all(&mut self) {
        let mut panics = Panics::default();
        for slot in 0..self.by_slot.len() as u16 {
            panics.call(|| self.release(slot));
        }
        panics.resume();
    }
}

/// A slot whose packet is not queued yet. If it is never queued, the drop of this value unmaps its
/// fragments.
struct Unqueued<'s, M: PeerMemory> {
    mappings: &'s mut TxMappings<M>,
    slot: u16,
    queued: bool,
}

impl<M: PeerMemory> Drop for Unqueued<'_, M> {
    fn drop(&mut self) {
        if !self.queued {
            self.mappings.release(self.slot);
        }
    }
}
