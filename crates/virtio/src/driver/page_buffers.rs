//! Small and mergeable mode: a buffer is a page of the queue's pool, or a part of one.
//!
//! ```text
//!   page   ├─ headroom ─┤─ colour ─┤ header 12 B │ frame ...                          ┤
//!                       0, 64, ... bytes          posted from the header to the buffer's end
//! ```
//!
//! Frames start at different offsets (*colouring*): the headers of page-aligned buffers would all
//! fall into one set of the first-level cache.

use super::buffer_layout::BufferLayout;
use super::buffers::{Buffers, Pools, RawHeader};
use super::panics::Panics;
use super::queue_config::QueueConfig;
use crate::net::VnetHdr;
use crate::virtqueue::driver::{Filled, Segments};
use netmem_packet::{RxFrame, XdpFrame};
use netmem_pool::{CachedPages, Napi, Page, PageId, PagePool, PageRoom, PeerMemory, PoolClosed};

/// Bytes of a header.
const HEADER: u32 = VnetHdr::LEN as u32;

/// See the module. The slot of a buffer is a place for its frame, which begins behind the header.
pub(super) struct PageBuffers<M: PeerMemory> {
    layout: BufferLayout,
    needs_sync: bool,
    /// Whether a page that was dropped may stay in its slot. A pool that allocates a new page for
    /// each packet recycles none.
    keeps: bool,
    /// Parts of split pages that are not posted yet.
    split_pages: Vec<Page<M>>,
}

impl<M: PeerMemory> PageBuffers<M> {
    pub(super) fn new(config: &QueueConfig<M>, pool: &PagePool<M>) -> Self {
        Self { layout: config.layout, needs_sync: pool.needs_sync(), keeps: pool.circulates(), split_pages: Vec::new() }
    }

    /// Puts a page into an empty slot.
    #[inline(always)]
    fn put(&self, slot: &mut RxFrame<M>, page: Page<M>, segments: &mut Segments<'_>) {
        let start = self.layout.start(&page);
        segments.set(0, page.dma_addr() + u64::from(start));
        *slot = RxFrame::new(page, start + HEADER);
    }

    /// Where in its page the buffer of a slot begins.
    #[inline(always)]
    fn buffer_start(slot: &RxFrame<M>) -> u32 {
        slot.start() - HEADER
    }

    /// The device wrote `len` bytes into the buffer, and the CPU is about to read them.
    #[inline(always)]
    fn sync_page(&self, page: &Page<M>, start: u32, len: u32, napi: &Napi<'_, M>) {
        if self.needs_sync {
            napi.sync_for_cpu(page, start as usize..(start + len) as usize);
        }
    }
}

impl<M: PeerMemory> Buffers for PageBuffers<M> {
    type Mem = M;
    type Pools = PagePool<M>;
    type Buffer = RxFrame<M>;
    type Frame = XdpFrame<M>;
    type Identity = Option<PageId>;
    const ONE_SEGMENT: bool = true;

    fn segments(&self) -> Vec<u32> {
        vec![self.layout.len]
    }

    #[inline(always)]
    fn prefetch(slot: &RxFrame<M>) {
        if let Some(page) = slot.page() {
            // The header, which can have a line of its own.
            slot.prefetch(-(HEADER as isize));
            slot.prefetch(0);
            page.prefetch();
        }
    }

    #[inline(always)]
    fn fill(&mut self, slot: &mut RxFrame<M>, napi: &mut Napi<'_, M>, segments: &mut Segments<'_>) -> bool {
        if slot.page().is_none() {
            if self.layout.per_page == 1 {
                let Some(page) = napi.alloc() else { return false };
                self.put(slot, page, segments);
            } else {
                let page = split_page(&mut self.split_pages, self.layout.per_page, napi);
                let Some(page) = page else { return false };
                self.put(slot, page, segments);
            }
        }
        if let (true, Some(page)) = (self.needs_sync, slot.page()) {
            let start = Self::buffer_start(slot);
            napi.sync_for_device(page, start as usize..(start + self.layout.len) as usize);
        }
        true
    }

    #[inline(always)]
    fn sync(&self, slot: &RxFrame<M>, len: u32, napi: &Napi<'_, M>) {
        if let (true, Some(page)) = (self.needs_sync, slot.page()) {
            self.sync_page(page, Self::buffer_start(slot), len, napi);
        }
    }

    #[inline(always)]
    fn header(&self, slot: &RxFrame<M>) -> RawHeader {
        slot.page()
            .and_then(|page| page.read_at(Self::buffer_start(slot) as usize).ok())
            .map_or(RawHeader::PLAIN, RawHeader::new)
    }

    #[inline(always)]
    fn complete(&mut self, slot: &mut RxFrame<M>, _: RawHeader, len: u32) -> Option<XdpFrame<M>> {
        let page = slot.take_page()?;
        Some(XdpFrame::new(page, slot.start() as usize, len as usize - VnetHdr::LEN))
    }

    fn append(&mut self, slot: &mut RxFrame<M>, len: u32, napi: &Napi<'_, M>, frame: &mut XdpFrame<M>) {
        let Some(page) = slot.take_page() else { return };
        let start = Self::buffer_start(slot);
        self.sync_page(&page, start, len, napi);
        let start = start as usize;
        // The caller counts the buffers: there is room for every fragment.
        let pushed = frame.push(page.freeze_range(start..start + len as usize));
        debug_assert!(pushed.is_ok());
    }

    #[inline(always)]
    fn identity(slot: &RxFrame<M>) -> Option<PageId> {
        slot.page().map(Page::id)
    }

    /// The page is posted again as it is: it does not return to the pool, and nothing is written
    /// that the device reads.
    ///
    /// It must be the page of this slot. A program can have left another page in the frame, or a
    /// part of the page.
    #[inline(always)]
    fn recycle(&mut self, slot: &mut RxFrame<M>, posted: Option<PageId>, page: Page<M>) {
        if self.keeps && posted == Some(page.id()) {
            slot.put_page(page);
        } else {
            page.release();
        }
    }

    #[inline(always)]
    fn groups(&self) -> bool {
        !self.needs_sync && self.layout.per_page == 1
    }

    #[inline(always)]
    fn keeps(&self) -> bool {
        self.keeps
    }

    #[inline(always)]
    fn fill_cached(&self, slot: &mut RxFrame<M>, pages: &mut CachedPages<'_, M>) -> Filled {
        if slot.page().is_some() {
            return Filled::AsBefore;
        }
        let Some(page) = pages.next() else { return Filled::NoMemory };
        let start = self.layout.start(&page);
        let at = page.dma_addr() + u64::from(start);
        slot.refill(page, start + HEADER);
        Filled::At(at)
    }

    /// A page that is split is not whole, so that parts of it are filled one by one.
    #[inline(always)]
    fn cached<'n>(napi: &'n mut Napi<'_, M>, room: &'n mut PageRoom, most: usize) -> Option<CachedPages<'n, M>> {
        Some(napi.alloc_cached(room, most))
    }

    #[inline(always)]
    fn frames(slots: &mut [RxFrame<M>]) -> &mut [RxFrame<M>] {
        slots
    }

    fn clear(&mut self) {
        self.split_pages.clear();
    }

    fn quarantine(&mut self, slot: &mut RxFrame<M>, pool: &mut PagePool<M>, panics: &mut Panics) {
        slot.take_page().into_iter().for_each(|page| _ = panics.call(|| pool.quarantine(page)));
    }
}

impl<M: PeerMemory> Pools for PagePool<M> {
    type Napi<'a> = Napi<'a, M>;
    type Closed = PoolClosed;

    #[inline]
    fn poll<R>(&mut self, f: impl FnOnce(&mut Napi<'_, M>) -> R) -> R {
        self.poll(f)
    }

    fn device_gone(&mut self, panics: &mut Panics) {
        panics.call(|| self.device_gone());
    }

    fn close(self, panics: &mut Panics) -> Option<PoolClosed> {
        panics.call(|| self.close())
    }
}

/// A part of a page that `per_page` buffers share.
#[inline(never)]
pub(super) fn split_page<M: PeerMemory>(
    split_pages: &mut Vec<Page<M>>,
    per_page: u32,
    napi: &mut Napi<'_, M>,
) -> Option<Page<M>> {
    if let Some(part) = split_pages.pop() {
        return Some(part);
    }
    let mut page = napi.alloc()?;
    let size = page.len() / per_page as usize;
    for part in (1..per_page as usize).rev() {
        split_pages.push(page.split_off(part * size));
    }
    Some(page)
}
