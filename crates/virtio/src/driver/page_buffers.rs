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
use crate::virtqueue::driver::Segments;
use netmem_packet::{Meta, XdpFrame};
use netmem_pool::{CachedPages, DataPage, Napi, Page, PageId, PagePool, PeerMemory, PoolClosed};
use std::mem;

/// Bytes of a header.
const HEADER: u32 = VnetHdr::LEN as u32;

/// See the module. A slot has a page whose data is the frame, or will be. The header is in front of
/// it.
///
/// Invariant (*room*): the headroom of a page in a slot has the bytes of a header, and behind it
/// are those of a buffer without its header.
pub(super) struct PageBuffers<M: PeerMemory> {
    layout: BufferLayout,
    needs_sync: bool,
    /// Whether a page that was dropped may stay in its slot. A pool that allocates a new page for
    /// each packet recycles none.
    keeps: bool,
    /// Whether a buffer has a page of its own, which it fits into at each colour.
    whole: bool,
    /// Whether a header and the beginning of its frame are in two cache lines.
    header_apart: bool,
    /// Parts of split pages that are not posted yet.
    split_pages: Vec<Page<M>>,
}

impl<M: PeerMemory> PageBuffers<M> {
    pub(super) fn new(config: &QueueConfig<M>, pool: &PagePool<M>) -> Self {
        let layout = config.layout;
        Self {
            layout,
            needs_sync: pool.needs_sync(),
            keeps: pool.circulates(),
            whole: layout.per_page == 1
                && (layout.first + layout.colour_mask + layout.len) as usize <= pool.page_size(),
            header_apart: layout.first % 64 + HEADER >= 64,
            split_pages: Vec::new(),
        }
    }

    /// Puts a page into an empty slot. Returns the device address of its buffer.
    #[inline(always)]
    fn put(&self, slot: &mut Option<DataPage<M>>, page: Page<M>) -> u64 {
        let start = self.layout.start(&page);
        let at = page.dma_addr() + u64::from(start);
        *slot = Some(DataPage::new(page, (start + HEADER) as usize, (self.layout.len - HEADER) as usize));
        at
    }

    /// Where in its page the buffer of a slot begins.
    #[inline(always)]
    fn buffer_start(page: &DataPage<M>) -> usize {
        page.headroom() - HEADER as usize
    }
}

impl<M: PeerMemory> Buffers for PageBuffers<M> {
    type Mem = M;
    type Pools = PagePool<M>;
    type Buffer = Option<DataPage<M>>;
    type Frame = XdpFrame<M>;
    type Identity = Option<PageId>;
    const ONE_SEGMENT: bool = true;

    fn segments(&self) -> Vec<u32> {
        vec![self.layout.len]
    }

    #[inline(always)]
    fn prefetch(slot: &Option<DataPage<M>>) {
        if let Some(page) = slot {
            // The header, which can have a line of its own.
            page.prefetch(-(HEADER as isize));
            page.prefetch(0);
            page.data().prefetch();
        }
    }

    #[inline(always)]
    fn fill(&mut self, slot: &mut Option<DataPage<M>>, napi: &mut Napi<'_, M>, segments: &mut Segments<'_>) -> bool {
        if slot.is_none() {
            let per_page = self.layout.per_page;
            let page = if per_page == 1 { napi.alloc() } else { split_page(&mut self.split_pages, per_page, napi) };
            let Some(page) = page else { return false };
            segments.set(0, self.put(slot, page));
        }
        if let (true, Some(page)) = (self.needs_sync, slot) {
            let start = Self::buffer_start(page);
            page.with_page(|page| napi.sync_for_device(page, start..start + self.layout.len as usize));
        }
        true
    }

    #[inline(always)]
    fn sync(&self, slot: &Option<DataPage<M>>, len: u32, napi: &Napi<'_, M>) {
        if let (true, Some(page)) = (self.needs_sync, slot) {
            let start = Self::buffer_start(page);
            page.with_page(|page| napi.sync_for_cpu(page, start..start + len as usize));
        }
    }

    #[inline(always)]
    fn header(&self, slot: &Option<DataPage<M>>) -> RawHeader {
        // SAFETY: *room*.
        slot.as_ref().map_or(RawHeader::PLAIN, |page| RawHeader::new(unsafe { page.read_in_front_unchecked() }))
    }

    #[inline(always)]
    fn complete(&mut self, slot: &mut Option<DataPage<M>>, _: RawHeader, len: u32) -> Option<XdpFrame<M>> {
        let mut page = slot.take()?;
        let set = page.set_data(page.headroom(), (len - HEADER) as usize);
        debug_assert!(set.is_ok());
        Some(XdpFrame::from_page(page, Meta::default()))
    }

    fn append(&mut self, slot: &mut Option<DataPage<M>>, len: u32, napi: &Napi<'_, M>, frame: &mut XdpFrame<M>) {
        self.sync(slot, len, napi);
        let Some(page) = slot.take() else { return };
        let start = Self::buffer_start(&page);
        // The caller counts the buffers: there is room for every fragment.
        let pushed = frame.push(page.into_page().freeze_range(start..start + len as usize));
        debug_assert!(pushed.is_ok());
    }

    #[inline(always)]
    fn identity(slot: &Option<DataPage<M>>) -> Option<PageId> {
        slot.as_ref().map(DataPage::id)
    }

    /// The page is posted again as it is: it does not return to the pool, and nothing is written
    /// that the device reads.
    ///
    /// It must be the page of this slot. A program can have left another page in the frame, or a
    /// part of the page.
    #[inline(always)]
    fn recycle(&mut self, slot: &mut Option<DataPage<M>>, posted: Option<PageId>, page: Page<M>) {
        if self.keeps && posted == Some(page.id()) {
            // At the address at which it was.
            _ = self.put(slot, page);
        } else {
            page.release();
        }
    }

    #[inline(always)]
    fn groups(&self) -> bool {
        !self.needs_sync && self.whole
    }

    #[inline(always)]
    fn keeps(&self) -> bool {
        self.keeps
    }

    #[inline(always)]
    fn header_apart(&self) -> bool {
        self.header_apart
    }

    #[inline(always)]
    unsafe fn arrived<const APART: bool>(slot: &mut Option<DataPage<M>>, len: u32) {
        // SAFETY: the caller's: the slot has a page.
        let page = unsafe { slot.as_mut().unwrap_unchecked() };
        // SAFETY: *room*, and the caller's: the buffer has the bytes of the header and the frame.
        unsafe { page.set_len_unchecked(len) };
        page.prefetch(0);
        if APART {
            page.prefetch(-(HEADER as isize));
        }
    }

    #[inline(always)]
    unsafe fn group_header(slot: &Option<DataPage<M>>) -> RawHeader {
        // SAFETY: *room*, and the caller's: the slot has a page.
        RawHeader::new(unsafe { slot.as_ref().unwrap_unchecked().read_in_front_unchecked() })
    }

    #[inline(always)]
    fn is_empty(slot: &Option<DataPage<M>>) -> bool {
        slot.is_none()
    }

    #[inline(always)]
    fn layout(&self) -> BufferLayout {
        self.layout
    }

    #[inline(always)]
    unsafe fn fill_cached(layout: BufferLayout, slot: &mut Option<DataPage<M>>, page: Page<M>) -> u64 {
        let start = layout.start(&page) + HEADER;
        let at = page.dma_addr() + u64::from(start) - u64::from(HEADER);
        // SAFETY: the caller's: the page is a whole one of the pool, into which the buffer fits,
        // else there were no groups.
        let page = unsafe { DataPage::new_unchecked(page, start, 0) };
        debug_assert!(slot.is_none());
        // There is nothing to drop, so that no user code runs.
        mem::forget(slot.replace(page));
        at
    }

    /// A page that is split is not whole, so that parts of it are filled one by one.
    #[inline(always)]
    unsafe fn cached<'n>(napi: &'n mut Napi<'_, M>, most: usize) -> Option<CachedPages<'n, M>> {
        // SAFETY: the caller's.
        Some(unsafe { napi.alloc_in_place(most) })
    }

    #[inline(always)]
    fn frames(slots: &mut [Option<DataPage<M>>]) -> &mut [Option<DataPage<M>>] {
        slots
    }

    fn clear(&mut self) {
        self.split_pages.clear();
    }

    fn quarantine(&mut self, slot: &mut Option<DataPage<M>>, pool: &mut PagePool<M>, panics: &mut Panics) {
        slot.take().into_iter().for_each(|page| _ = panics.call(|| pool.quarantine(page.into_page())));
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
