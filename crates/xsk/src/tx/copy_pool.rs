//! Copies of packets that have more descriptors than a frame may have.
//!
//! A driver limits the descriptors of a frame, and a packet may have more fragments. To refuse such
//! a packet would make the limit of a driver the caller's problem, so it is copied into fewer
//! pages.

use crate::umem::Umem;
use crate::umem_memory::UmemMemory;
use netmem_packet::Packet;
use netmem_pool::{PoolOptions, Provider, SharedPool};
use std::sync::Arc;

/// Pages for packets that are in more parts than a frame may have. The pool is made when the first
/// one is copied.
pub(super) struct CopyPool<M: UmemMemory> {
    provider: Arc<dyn Provider<M>>,
    pool: Option<SharedPool<M>>,
}

impl<M: UmemMemory> CopyPool<M> {
    pub(super) fn new(provider: Arc<dyn Provider<M>>) -> Self {
        Self { provider, pool: None }
    }

    /// The same packet in pages of its own, of which each but the last is full. The bytes begin at
    /// `start` of the first page. `None` if there are no pages.
    pub(super) fn copy(&mut self, packet: &Packet<M>, start: usize, umem: &Umem<M>) -> Option<Packet<M>> {
        if self.pool.is_none() {
            // It caches no pages: copies are rare, and slower than the provider's lock.
            let pool = PoolOptions::new("copies of sent packets").cache(0).magazine(0);
            self.pool = pool.build_shared(self.provider.clone(), Some(umem.domain())).ok();
        }
        let pool = self.pool.as_ref()?;
        let (mut copy, mut done, mut start): (Option<Packet<M>>, _, _) = (None, 0, start);
        let mut bounce = [0; 512];
        while done < packet.len() {
            let mut page = pool.alloc()?;
            let end = page.len().min(start + packet.len() - done);
            let mut at = start;
            while at < end {
                let now = &mut bounce[..(end - at).min(512)];
                packet.copy_to(done, now).ok()?;
                page.copy_from(at, now).ok()?;
                at += now.len();
                done += now.len();
            }
            let frag = page.freeze_range(start..end);
            match &mut copy {
                None => copy = Some(Packet::new(frag)),
                Some(copy) => copy.push(frag).ok()?,
            }
            start = 0;
        }
        let mut copy = copy?;
        copy.meta = packet.meta;
        Some(copy)
    }
}
