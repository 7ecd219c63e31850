//! Header split: a buffer is a host part and a page of device memory (MEM-11). Any device fills a buffer in order, and so
//! the first bytes of every frame land where they can be read.
//!
//! ```text
//!   host part                    device page
//!   ├ header 12 B │ N bytes ┤    ├ the rest of the frame ... ┤
//!   a 64th of a host page        a page that this process never maps
//! ```
//!
//! A frame that ends in the host part takes the host part alone. The device page stays in its slot and is posted again.

use super::NetError;
use super::Recipe;
use super::page_buffers::part;
use super::panics::Panics;
use super::receive::{Buffers, ETHERNET, Frame, PLAIN, Pools, prefetch};
use super::split_rx::{SplitClosed, SplitOptions};
use crate::net::VnetHdr;
use crate::virtqueue::driver::Segments;
use netmem_packet::{Meta, SplitFrame};
use netmem_pool::{Device, Napi, Page, PagePool, PeerMemory, PoolOptions, PoolStats};

/// What a queue of split frames receives into.
pub(super) struct SplitPools<M: PeerMemory> {
    host: PagePool<M>,
    device: PagePool<Device>,
    header_bytes: u16,
}

impl<M: PeerMemory> SplitPools<M> {
    /// The pools of queue pair `pair`, with as many pages at hand as the ring takes.
    pub(super) fn new(recipe: &Recipe<M>, pair: usize, o: &SplitOptions) -> Result<Self, NetError> {
        let (min, max) = (ETHERNET as u16, SplitOptions::MOST);
        if !(min..=max).contains(&o.header_bytes) {
            return Err(NetError::HeaderBytes { asked: o.header_bytes, min, max });
        }
        let host = recipe.provider.clone().filter(|_| recipe.split);
        let host = host.ok_or(NetError::NoDeviceMemory)?;
        let buffers = usize::from(recipe.ring_size / 2);
        let pages = buffers.div_ceil(host.page_size() / stride(o.header_bytes) as usize);
        let pool = PoolOptions::new(format!("rx{pair}-headers")).cache(recipe.cache).prefill(pages);
        let host = pool.build(host, recipe.domain.clone())?;
        let pool = PoolOptions::new(format!("rx{pair}-device")).cache(o.cache).prefill(buffers);
        let device = pool.build(o.provider.clone(), recipe.domain.clone())?;
        Ok(Self { host, device, header_bytes: o.header_bytes })
    }

    pub(super) fn stats(&mut self) -> (PoolStats, PoolStats) {
        (self.host.stats(), self.device.stats())
    }
}

/// The poll contexts of both pools.
pub(super) struct SplitNapi<'a, M: PeerMemory> {
    pub(super) host: Napi<'a, M>,
    pub(super) device: Napi<'a, Device>,
}

impl<M: PeerMemory> SplitNapi<'_, M> {
    pub(super) fn reborrow(&mut self) -> SplitNapi<'_, M> {
        SplitNapi { host: self.host.reborrow(), device: self.device.reborrow() }
    }
}

impl<M: PeerMemory> Pools for SplitPools<M> {
    type Napi<'a> = SplitNapi<'a, M>;
    type Closed = SplitClosed;

    #[inline]
    fn poll<R>(&mut self, f: impl FnOnce(&mut SplitNapi<'_, M>) -> R) -> R {
        // Most programs drop heads here and payload elsewhere: heads have the inner context.
        self.device.poll(|device| {
            self.host.poll(|host| f(&mut SplitNapi { host: host.reborrow(), device: device.reborrow() }))
        })
    }

    fn device_gone(&mut self, panics: &mut Panics) {
        panics.call(|| self.host.device_gone());
        panics.call(|| self.device.device_gone());
    }

    fn close(self, panics: &mut Panics) -> Option<SplitClosed> {
        let (host, device) = (panics.call(|| self.host.close()), panics.call(|| self.device.close()));
        Some(SplitClosed { host: host?, device: device? })
    }
}

/// Bytes between two host parts: whole cache lines, and a page is filled with them.
fn stride(header_bytes: u16) -> u32 {
    (VnetHdr::LEN as u32 + u32::from(header_bytes)).next_power_of_two().max(64)
}

/// The memory of a buffer. It may be here and not posted: a frame left the device page, or one of the pools was empty.
pub(super) struct SplitSlot<M: PeerMemory> {
    part: Option<Page<M>>,
    page: Option<Page<Device>>,
}

impl<M: PeerMemory> Default for SplitSlot<M> {
    fn default() -> Self {
        Self { part: None, page: None }
    }
}

/// See the module.
pub(super) struct SplitBuffers<M: PeerMemory> {
    /// Bytes in a host part.
    head: u32,
    /// Bytes in a device page.
    page: u32,
    /// Host parts in a page.
    per_page: u32,
    needs_sync: bool,
    /// Parts of split pages that are not posted yet.
    parts: Vec<Page<M>>,
}

impl<M: PeerMemory> SplitBuffers<M> {
    pub(super) fn new(pools: &SplitPools<M>) -> Self {
        let SplitPools { host, device, header_bytes } = pools;
        Self {
            head: VnetHdr::LEN as u32 + u32::from(*header_bytes),
            page: device.page_size() as u32,
            per_page: host.page_size() as u32 / stride(*header_bytes),
            needs_sync: host.needs_sync(),
            parts: Vec::new(),
        }
    }

    /// Bytes of each frame that go to host memory.
    pub(super) fn header_bytes(&self) -> usize {
        self.head as usize - VnetHdr::LEN
    }
}

impl<M: PeerMemory> Buffers for SplitBuffers<M> {
    type Mem = M;
    type Pools = SplitPools<M>;
    type Slot = SplitSlot<M>;
    type Frame = SplitFrame<M>;

    fn segments(&self) -> Vec<u32> {
        vec![self.head, self.page]
    }

    #[inline(always)]
    fn prefetch(slot: &SplitSlot<M>) {
        if let SplitSlot { part: Some(part), page: Some(page) } = slot {
            prefetch(part.as_ptr().addr());
            page.prefetch();
        }
    }

    #[inline(always)]
    fn fill(&mut self, slot: &mut SplitSlot<M>, napi: &mut SplitNapi<'_, M>, segments: &mut Segments<'_>) -> bool {
        if slot.part.is_none() {
            let Some(part) = part(&mut self.parts, self.per_page, &mut napi.host) else { return false };
            segments.set(0, part.dma_addr());
            slot.part = Some(part);
        }
        if slot.page.is_none() {
            let Some(page) = napi.device.alloc() else { return false };
            segments.set(1, page.dma_addr());
            slot.page = Some(page);
        }
        if let (true, Some(part)) = (self.needs_sync, &slot.part) {
            napi.host.sync_for_device(part, 0..self.head as usize);
        }
        true
    }

    #[inline(always)]
    fn sync(&self, slot: &SplitSlot<M>, len: u32, napi: &SplitNapi<'_, M>) {
        if let (true, Some(part)) = (self.needs_sync, &slot.part) {
            napi.host.sync_for_cpu(part, 0..len.min(self.head) as usize);
        }
    }

    #[inline(always)]
    fn header(&self, slot: &SplitSlot<M>) -> [u8; VnetHdr::LEN] {
        slot.part.as_ref().and_then(|part| part.read_at(0).ok()).unwrap_or(PLAIN)
    }

    #[inline(always)]
    fn complete(&mut self, slot: &mut SplitSlot<M>, len: u32) -> Option<SplitFrame<M>> {
        let part = slot.part.take()?;
        let (in_head, rest) = (len.min(self.head) as usize, len.saturating_sub(self.head) as usize);
        let payload = slot.page.take_if(|_| rest > 0).map(|page| page.freeze_range(0..rest));
        Some(SplitFrame::new(part.freeze_range(VnetHdr::LEN..in_head), payload, Meta::default()))
    }

    fn quarantine(&mut self, slot: &mut SplitSlot<M>, pools: &mut SplitPools<M>, panics: &mut Panics) {
        slot.part.take().into_iter().for_each(|part| _ = panics.call(|| pools.host.quarantine(part)));
        slot.page.take().into_iter().for_each(|page| _ = panics.call(|| pools.device.quarantine(page)));
    }

    fn clear(&mut self) {
        self.parts.clear();
    }
}

impl<M: PeerMemory> Frame for SplitFrame<M> {
    #[inline]
    fn len(&self) -> usize {
        self.len()
    }

    #[inline]
    fn is_multi_buffer(&self) -> bool {
        self.payload().is_some()
    }

    #[inline]
    fn meta(&mut self) -> &mut Meta {
        &mut self.meta
    }
}
