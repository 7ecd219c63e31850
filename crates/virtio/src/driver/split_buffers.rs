//! Header split: a buffer is a host part and pages of device memory (MEM-11).
//!
//! ```text
//!   Netmem's own   header 12 B │ headers │ unused ┤     ├ payload ...           ┤├ ... ┤├ unused ┤
//!   any other      header 12 B │ the first bytes  ┤     ├ the rest of the frame ┤├ ... ┤├ unused ┤
//!                  host part: a 64th of a host page     pages that this process never maps
//! ```
//!
//! Netmem's own device reports in `hdr_len` how many bytes of the frame are in the host part, and
//! counts the rest of the host part as written. Any other device fills a buffer in order, so the
//! first bytes of every frame are in memory that the driver can read.
//!
//! A frame consumes the host part and the pages that it fills. The others stay in their slot and
//! are posted again. If no page is left, the pages of slots that are not posted are collected into
//! one slot, so that no page waits in a slot that cannot be filled.
//!
//! In small mode there is one page. In big-packet mode there are as many as hold the longest
//! segment. Pages that are allocated together are sorted by address, so that a large segment lies
//! in few extents.

use super::buffers::{Buffers, ETHERNET, Pools, RawHeader, ReceivedFrame, prefetch};
use super::error::NetError;
use super::page_buffers::split_page;
use super::panics::Panics;
use super::queue_config::QueueConfig;
use super::ring::RingHandle;
use super::split_options::{SplitClosed, SplitOptions};
use crate::net::VnetHdr;
use crate::virtqueue::driver::Segments;
use netmem_packet::{DevicePayload, Meta, SplitFrame};
use netmem_pool::{Device, Napi, Page, PagePool, PeerMemory, PoolOptions, PoolStats};

/// The most buffers that are posted without pages of their own, if the device has no others. Each
/// of them loses payload also when there are pages again.
const MAX_DISCARD_BUFFERS: usize = 4;

/// The pools of a queue of split frames.
pub(super) struct SplitPools<M: PeerMemory> {
    host: PagePool<M>,
    device: PagePool<Device>,
    header_bytes: u16,
    keeps_receiving: bool,
}

impl<M: PeerMemory> SplitPools<M> {
    /// The pools of queue pair `pair`, prefilled with as many pages as the ring can post.
    pub(super) fn new(config: &QueueConfig<M>, pair: usize, o: &SplitOptions) -> Result<Self, NetError> {
        let (min, max) = (ETHERNET as u16, SplitOptions::MAX_HEADER_BYTES);
        if !(min..=max).contains(&o.header_bytes) {
            return Err(NetError::HeaderBytes { asked: o.header_bytes, min, max });
        }
        if !config.split {
            return Err(NetError::NoDeviceMemory);
        }
        let per_buffer = pages(config, o.header_bytes, o.provider.page_size());
        let in_ring = if config.plan.rx_tables() { 1 } else { 1 + per_buffer };
        let buffers = usize::from(config.ring_size) / in_ring;
        let (host, most) = (config.provider.clone(), stride(o.header_bytes) as usize);
        let prefill = buffers.div_ceil(host.page_size() / most);
        let pool = PoolOptions::new(format!("rx{pair}-headers")).cache(config.cache).prefill(prefill);
        let host = pool.build(host, config.domain.clone())?;
        // A queue with long buffers needs at least one of them. Its ring holds more pages than most
        // device memories have.
        let prefill = if config.big.is_some() { per_buffer } else { buffers };
        let pool = PoolOptions::new(format!("rx{pair}-device")).cache(o.cache).prefill(prefill);
        let device = pool.build(o.provider.clone(), config.domain.clone())?;
        Ok(Self { host, device, header_bytes: o.header_bytes, keeps_receiving: o.keeps_receiving })
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
        // The pool of heads has the inner context, because most programs drop heads here and
        // payload elsewhere.
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

/// Pages of `page` bytes in a buffer: the longest frame, and its header, fit them and the host
/// part. A device that splits behind the headers may use less of the host part; what it then puts
/// into the pages is payload of an IP packet, which fits 64 KiB as well.
fn pages<M: PeerMemory>(config: &QueueConfig<M>, header_bytes: u16, page: usize) -> usize {
    let most = config.max_frame.saturating_sub(usize::from(header_bytes));
    // Headers of TCP and IP have 40 bytes at least.
    let payload = config.max_frame.saturating_sub(ETHERNET + 40);
    most.max(payload).div_ceil(page).max(1)
}

/// The memory of a buffer. A slot that is not posted may have a part of it: a frame has left pages,
/// or one of the pools was empty.
pub(super) struct SplitBuffer<M: PeerMemory> {
    host_part: Option<Page<M>>,
    /// The first page of the buffer.
    page: Option<Page<Device>>,
    /// The other pages, the last one first.
    more: Vec<Page<Device>>,
    /// Whether the buffer is posted with the page for dropped payload. It then has no other pages.
    discards: bool,
}

impl<M: PeerMemory> Default for SplitBuffer<M> {
    fn default() -> Self {
        Self { host_part: None, page: None, more: Vec::new(), discards: false }
    }
}

/// The buffers of a queue with header split: a host part for the headers and device pages for the
/// payload.
pub(super) struct SplitBuffers<M: PeerMemory> {
    /// Bytes in a host part.
    head: u32,
    /// Bytes in a device page.
    page: u32,
    /// Device pages in a buffer.
    pages: usize,
    /// Host parts in a page.
    per_page: u32,
    needs_sync: bool,
    /// Whether the device splits frames behind their headers.
    splits: bool,
    /// Parts of split pages that are not posted yet.
    host_pages: Vec<Page<M>>,
    /// Pages that were collected from slots. Empty except during a refill.
    spare: Vec<Page<Device>>,
    /// Whether buffers may be posted without pages of their own. This is so if no slot has pages to
    /// collect, and the device has no buffer with pages.
    posts_discarding: bool,
    keeps_receiving: bool,
    /// The page into which payload is received that is then dropped.
    discard_page: Option<Page<Device>>,
    /// Buffers that are posted without pages of their own.
    discarding: usize,
}

impl<M: PeerMemory> SplitBuffers<M> {
    pub(super) fn new(config: &QueueConfig<M>, pools: &SplitPools<M>) -> Self {
        let SplitPools { host, device, header_bytes, keeps_receiving } = pools;
        Self {
            head: VnetHdr::LEN as u32 + u32::from(*header_bytes),
            page: device.page_size() as u32,
            pages: pages(config, *header_bytes, device.page_size()),
            per_page: host.page_size() as u32 / stride(*header_bytes),
            needs_sync: host.needs_sync(),
            splits: false,
            host_pages: Vec::new(),
            spare: Vec::new(),
            posts_discarding: false,
            keeps_receiving: *keeps_receiving,
            discard_page: None,
            discarding: 0,
        }
    }

    /// Bytes of a frame that the host part has room for.
    pub(super) fn header_bytes(&self) -> usize {
        self.head as usize - VnetHdr::LEN
    }

    /// How many bytes of a frame are in the host part, and how many in the pages, of a buffer into
    /// which the device has written `len`.
    #[inline(always)]
    fn split_at(&self, header: RawHeader, len: u32) -> Option<(u32, u32)> {
        let (written, rest) = (len.min(self.head) - VnetHdr::LEN as u32, len.saturating_sub(self.head));
        if !self.splits {
            return Some((written, rest));
        }
        let head = u32::from(header.header_len());
        // Without payload, all that was written is the frame.
        let possible = head >= ETHERNET as u32 && (if rest > 0 { head <= written } else { head == written });
        possible.then_some((head, rest))
    }

    /// Fills the first segment of the pages, or several. False if there are too few pages; those
    /// that were found stay in the slot.
    #[inline(always)]
    fn fill_pages(
        &mut self,
        slot: &mut SplitBuffer<M>,
        napi: &mut Napi<'_, Device>,
        segments: &mut Segments<'_>,
    ) -> bool {
        if slot.more.len() + 1 == self.pages && self.spare.is_empty() {
            // The usual case: a small frame has consumed the first page, or there is no other.
            let Some(page) = napi.alloc() else { return false };
            segments.set(1, page.dma_addr());
            slot.page = Some(page);
            return true;
        }
        self.fill_several(slot, napi, segments)
    }

    fn fill_several(
        &mut self,
        slot: &mut SplitBuffer<M>,
        napi: &mut Napi<'_, Device>,
        segments: &mut Segments<'_>,
    ) -> bool {
        let SplitBuffer { more, .. } = slot;
        more.reserve_exact(self.pages - more.len());
        let old = more.len();
        while more.len() < self.pages {
            let Some(page) = self.spare.pop().or_else(|| napi.alloc()) else { return false };
            segments.set(self.pages - more.len(), page.dma_addr());
            more.push(page);
        }
        // The pages are often in order, because a pool hands out the pages that were returned first
        // last.
        let new = &mut more[old..];
        if !new.is_sorted_by(|a, b| a.dma_addr() > b.dma_addr()) {
            new.sort_unstable_by_key(|page| std::cmp::Reverse(page.dma_addr()));
            for (page, n) in new.iter().zip((1..=self.pages - old).rev()) {
                segments.set(n, page.dma_addr());
            }
        }
        slot.page = more.pop();
        true
    }

    /// Posts a buffer without pages of its own.
    #[cold]
    fn fill_discarding(&mut self, slot: &mut SplitBuffer<M>, segments: &mut Segments<'_>) -> bool {
        let (Some(page), true) = (&self.discard_page, self.posts_discarding && self.discarding < MAX_DISCARD_BUFFERS)
        else {
            return false;
        };
        (1..=self.pages).for_each(|n| segments.set(n, page.dma_addr()));
        self.spare.append(&mut slot.more);
        slot.discards = true;
        self.discarding += 1;
        true
    }
}

impl<M: PeerMemory> Buffers for SplitBuffers<M> {
    type Mem = M;
    type Pools = SplitPools<M>;
    type Buffer = SplitBuffer<M>;
    type Frame = SplitFrame<M>;
    type Identity = ();
    const TABLES: bool = true;
    const SPLIT: bool = true;

    fn segments(&self) -> Vec<u32> {
        std::iter::once(self.head).chain(std::iter::repeat_n(self.page, self.pages)).collect()
    }

    fn started(&mut self, ring: &RingHandle) {
        self.splits = ring.splits();
    }

    #[inline(always)]
    fn prefetch(slot: &SplitBuffer<M>) {
        if let SplitBuffer { host_part: Some(part), page: Some(page), .. } = slot {
            prefetch(part.as_ptr().addr());
            page.prefetch();
        }
    }

    #[inline(always)]
    fn fill(&mut self, slot: &mut SplitBuffer<M>, napi: &mut SplitNapi<'_, M>, segments: &mut Segments<'_>) -> bool {
        if self.keeps_receiving && self.discard_page.is_none() {
            self.discard_page = napi.device.alloc();
        }
        if slot.host_part.is_none() {
            let Some(part) = split_page(&mut self.host_pages, self.per_page, &mut napi.host) else { return false };
            segments.set(0, part.dma_addr());
            slot.host_part = Some(part);
        }
        if slot.page.is_none()
            && !slot.discards
            && !self.fill_pages(slot, &mut napi.device, segments)
            && !self.fill_discarding(slot, segments)
        {
            return false;
        }
        if let (true, Some(part)) = (self.needs_sync, &slot.host_part) {
            napi.host.sync_for_device(part, 0..self.head as usize);
        }
        true
    }

    #[inline(always)]
    fn sync(&self, slot: &SplitBuffer<M>, len: u32, napi: &SplitNapi<'_, M>) {
        if let (true, Some(part)) = (self.needs_sync, &slot.host_part) {
            napi.host.sync_for_cpu(part, 0..len.min(self.head) as usize);
        }
    }

    #[inline(always)]
    fn header(&self, slot: &SplitBuffer<M>) -> RawHeader {
        slot.host_part.as_ref().and_then(|part| part.read_at(0).ok()).map_or(RawHeader::PLAIN, RawHeader::new)
    }

    #[inline(always)]
    fn frame_len(&self, header: RawHeader, len: u32) -> Option<usize> {
        self.split_at(header, len).map(|(head, rest)| (head + rest) as usize)
    }

    #[inline(always)]
    fn complete(&mut self, slot: &mut SplitBuffer<M>, header: RawHeader, len: u32) -> Option<SplitFrame<M>> {
        let (head, rest) = self.split_at(header, len)?;
        let part = slot.host_part.take()?;
        let (first, mut left) = (rest.min(self.page) as usize, rest.saturating_sub(self.page) as usize);
        if slot.discards {
            slot.discards = false;
            self.discarding -= 1;
            let head = part.freeze_range(VnetHdr::LEN..VnetHdr::LEN + head as usize);
            return Some(SplitFrame::new(head, None, Meta::default()).with_lost(rest));
        }
        let page = slot.page.take_if(|_| rest > 0).map(|page| page.freeze_range(0..first));
        let mut payload = DevicePayload::from(page);
        while left > 0 {
            let n = left.min(self.page as usize);
            // There are as many pages as the length needs, which was checked, and at most as many
            // as a payload can have.
            let pushed = payload.push(slot.more.pop()?.freeze_range(0..n));
            debug_assert!(pushed.is_ok());
            left -= n;
        }
        let head = part.freeze_range(VnetHdr::LEN..VnetHdr::LEN + head as usize);
        Some(SplitFrame::new(head, payload, Meta::default()))
    }

    fn collect<'s>(&mut self, posted: usize, slots: impl Iterator<Item = &'s mut SplitBuffer<M>>) -> bool
    where
        SplitBuffer<M>: 's,
    {
        for slot in slots {
            self.spare.extend(slot.page.take().into_iter().chain(slot.more.drain(..)));
        }
        // There is one after a buffer was made of the collected pages.
        self.posts_discarding =
            self.discard_page.is_some() && posted == self.discarding && self.spare.len() < self.pages;
        !self.spare.is_empty() || self.posts_discarding
    }

    fn collected(&mut self) {
        self.posts_discarding = false;
        // Pages that are too few for a buffer are returned to the pool, where other queues find
        // them.
        self.spare.clear();
    }

    fn recover(&mut self, slot: &mut SplitBuffer<M>, panics: &mut Panics) {
        let SplitBuffer { host_part: part, page, more, .. } = std::mem::take(slot);
        panics.call(|| drop(part));
        page.into_iter().chain(more).for_each(|page| panics.call(|| drop(page)).unwrap_or(()));
    }

    fn quarantine(&mut self, slot: &mut SplitBuffer<M>, pools: &mut SplitPools<M>, panics: &mut Panics) {
        let SplitBuffer { host_part: part, page, more, .. } = std::mem::take(slot);
        part.into_iter().for_each(|part| _ = panics.call(|| pools.host.quarantine(part)));
        page.into_iter().chain(more).for_each(|page| _ = panics.call(|| pools.device.quarantine(page)));
    }

    fn clear(&mut self) {
        self.host_pages.clear();
        self.spare.clear();
    }

    fn release_shared(&mut self, lost: bool, pools: &mut SplitPools<M>, panics: &mut Panics) {
        let Some(page) = self.discard_page.take() else { return };
        panics.call(|| if lost { pools.device.quarantine(page) } else { drop(page) });
    }
}

impl<M: PeerMemory> ReceivedFrame for SplitFrame<M> {
    #[inline]
    fn len(&self) -> usize {
        self.len()
    }

    #[inline]
    fn is_multi_buffer(&self) -> bool {
        !self.payload().is_empty() || self.lost() > 0
    }

    #[inline]
    fn meta(&mut self) -> &mut Meta {
        &mut self.meta
    }
}
