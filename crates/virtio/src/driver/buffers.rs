//! The traits between the receive loop and what it is generic over: a buffer layout, its pools, and
//! the sink of its frames.
//!
//! The loop is in `receive.rs`; the layouts are `page_buffers.rs`, `big_buffers.rs` and
//! `split_buffers.rs`.

use super::buffer_layout::BufferLayout;
use super::panics::Panics;
use super::ring::RingHandle;
use super::stats::RxStats;
use crate::net::VnetHdr;
use crate::virtqueue::driver::{Fill, FillRun, Segments};
use netmem_packet::{Meta, RxGroup};
use netmem_pool::{CachedPages, DataPage, Page, PeerMemory};

/// The shortest frame that is delivered: an Ethernet header.
pub(super) const ETHERNET: usize = 14;

/// A virtio-net header as it was read: a private copy, in two words. As an array it would be in
/// memory, where bytes that are read from a word that was just written stall the processor.
#[derive(Clone, Copy)]
pub(super) struct RawHeader {
    front: u64,
    back: u32,
}

impl RawHeader {
    /// The header of a frame without offloads, in one buffer.
    pub(super) const PLAIN: Self = Self { front: 0, back: 1 << 16 };

    #[inline(always)]
    pub(super) fn new(b: [u8; VnetHdr::LEN]) -> Self {
        let front = u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
        Self { front, back: u32::from_le_bytes([b[8], b[9], b[10], b[11]]) }
    }

    /// The fields.
    pub(super) fn decode(self) -> VnetHdr {
        let mut bytes = [0; VnetHdr::LEN];
        bytes[..8].copy_from_slice(&self.front.to_le_bytes());
        bytes[8..].copy_from_slice(&self.back.to_le_bytes());
        VnetHdr::from_bytes(bytes)
    }

    /// The flags.
    #[inline(always)]
    pub(super) fn flags(self) -> u8 {
        self.front as u8
    }

    /// Whether there is nothing to be done with the frame: it is no segment, and its checksum is in
    /// its place.
    #[inline(always)]
    pub(super) fn is_plain(self) -> bool {
        self.front as u16 & !u16::from(VnetHdr::DATA_VALID) == 0
    }

    /// The flags and the kind of segment, and, with `counted`, the number of buffers. Headers are
    /// compared by one word.
    #[inline(always)]
    pub(super) fn kind(self, counted: bool) -> u32 {
        let buffers = if counted { self.back & 0xffff_0000 } else { 0 };
        u32::from(self.front as u16) | buffers
    }

    /// Bytes of the frame's headers.
    #[inline(always)]
    pub(super) fn header_len(self) -> u16 {
        (self.front >> 16) as u16
    }

    /// Buffers of the frame, in mergeable mode.
    #[inline(always)]
    pub(super) fn buffers(self) -> u16 {
        (self.back >> 16) as u16
    }
}

/// The poll contexts of the pools from which a layout allocates its segments.
pub(super) type Napi<'a, B> = <<B as Buffers>::Pools as Pools>::Napi<'a>;

/// A buffer layout: what a slot of the queue holds, how a slot is filled with segments, and how a
/// slot that the device has used becomes a frame.
pub(super) trait Buffers {
    /// The kind of host memory.
    type Mem: PeerMemory;
    /// The pools that segments come from.
    type Pools: Pools;
    /// The memory of one buffer. A slot keeps its memory while it is not posted: a page that was
    /// dropped and is posted again, or a chain of which some pages are missing.
    type Buffer: Default;
    /// A received frame.
    type Frame: ReceivedFrame;
    /// What identifies the memory in a slot, for [`recycle`](Self::recycle).
    type Identity: Copy + Default;

    /// Whether every buffer is one segment.
    const ONE_SEGMENT: bool = false;
    /// Whether buffers are described in tables, where the ring has some.
    const TABLES: bool = false;
    /// Whether the header has the byte at which a frame is split. In a layout without it, the
    /// header of a usual frame is not kept: a copy in memory, written and read in pieces of
    /// different sizes, stalled the processor and made mergeable mode a third slower.
    const SPLIT: bool = false;

    /// Bytes in each segment of a buffer, in order. All buffers of a queue are alike.
    fn segments(&self) -> Vec<u32>;

    /// Called when the queue begins to use this ring.
    fn started(&mut self, ring: &RingHandle) {
        let _ = ring;
    }

    /// Prefetches the cache lines that [`complete`](Self::complete) and the drop of the frame will
    /// touch.
    fn prefetch(slot: &Self::Buffer);

    /// Completes the memory of a slot and hands it to the device (sync). Sets the address of each
    /// segment whose device address is not the one that it had when the slot was filled last.
    /// Returns false if there is too little memory; the memory found so far stays in the slot. If
    /// user code panics in this call, it stays there, too.
    fn fill(&mut self, slot: &mut Self::Buffer, napi: &mut Napi<'_, Self>, segments: &mut Segments<'_>) -> bool;

    /// Makes `len` bytes of a slot that the device has used readable: at least a header, and at
    /// most the length of a buffer.
    fn sync(&self, slot: &Self::Buffer, len: u32, napi: &Napi<'_, Self>);

    /// The virtio-net header in a slot that was synced, which begins with one.
    fn header(&self, slot: &Self::Buffer) -> RawHeader;

    /// Bytes of the frame in a buffer into which the device has written `len` bytes, at least a
    /// header. `None` if the header cannot be true of it.
    #[inline(always)]
    fn frame_len(&self, header: RawHeader, len: u32) -> Option<usize> {
        let _ = header;
        Some(len as usize - VnetHdr::LEN)
    }

    /// Moves the frame out of a slot that was synced. `header` was validated, also by
    /// [`frame_len`](Self::frame_len).
    fn complete(&mut self, slot: &mut Self::Buffer, header: RawHeader, len: u32) -> Option<Self::Frame>;

    /// Moves the `len` bytes of a further buffer out of its slot and appends them to `frame`. Only
    /// mergeable mode has frames of several buffers; the buffers of other layouts hold whole
    /// frames.
    fn append(&mut self, slot: &mut Self::Buffer, len: u32, napi: &Napi<'_, Self>, frame: &mut Self::Frame) {
        let _ = (slot, len, napi, frame);
    }

    /// What identifies the memory that is in a slot now.
    #[inline(always)]
    fn identity(slot: &Self::Buffer) -> Self::Identity {
        let _ = slot;
        Self::Identity::default()
    }

    /// A frame of this slot was dropped, and `page` is its head; `posted` identifies the memory
    /// that the slot had. The layout may recycle the page into the slot, to be posted again as it
    /// is.
    fn recycle(&mut self, slot: &mut Self::Buffer, posted: Self::Identity, page: Page<Self::Mem>) {
        let _ = (slot, posted);
        drop(page);
    }

    /// Whether frames of one buffer may be delivered in groups: their memory needs no sync. Only if
    /// a buffer is one segment.
    #[inline(always)]
    fn groups(&self) -> bool {
        false
    }

    /// Whether memory that a handler left in a slot is posted again as it is, and not released.
    #[inline(always)]
    fn keeps(&self) -> bool {
        true
    }

    /// Whether a header is in another cache line than the beginning of its frame.
    #[inline(always)]
    fn header_apart(&self) -> bool {
        false
    }

    /// A slot has a frame of `len` bytes. Prefetches its beginning and, with `APART`, its header.
    ///
    /// # Safety
    ///
    /// The layout has [`groups`](Self::groups). The slot has memory, as it was when the buffer was
    /// posted, and `len` is at most the bytes of a buffer without its header.
    #[inline(always)]
    unsafe fn arrived<const APART: bool>(slot: &mut Self::Buffer, len: u32) {
        let _ = (slot, len);
    }

    /// The virtio-net header in a slot of a group, which begins with one.
    ///
    /// # Safety
    ///
    /// The layout has [`groups`](Self::groups), and the slot has memory.
    #[inline(always)]
    unsafe fn group_header(slot: &Self::Buffer) -> RawHeader {
        let _ = slot;
        RawHeader::PLAIN
    }

    /// Whether a slot has no memory.
    #[inline(always)]
    fn is_empty(slot: &Self::Buffer) -> bool {
        let _ = slot;
        true
    }

    /// How buffers lie in pages, in a layout that has [`groups`](Self::groups).
    #[inline(always)]
    fn layout(&self) -> BufferLayout {
        BufferLayout { first: 0, colour_mask: 0, len: 0, per_page: 1 }
    }

    /// Puts a page into an empty slot. Returns the device address of the buffer. Calls no user
    /// code, and drops no page.
    ///
    /// # Safety
    ///
    /// `layout` is that of a layout that has [`groups`](Self::groups), and the page is one of its
    /// [`cached`](Self::cached) ones.
    #[inline(always)]
    unsafe fn fill_cached(layout: BufferLayout, slot: &mut Self::Buffer, page: Page<Self::Mem>) -> u64 {
        let _ = (layout, slot, page);
        0
    }

    /// Pages from which a layout that has [`groups`](Self::groups) fills its slots.
    ///
    /// # Safety
    ///
    /// As for [`alloc_in_place`](netmem_pool::Napi::alloc_in_place).
    #[inline(always)]
    unsafe fn cached<'n>(napi: &'n mut Napi<'_, Self>, most: usize) -> Option<CachedPages<'n, Self::Mem>> {
        let _ = (napi, most);
        None
    }

    /// Slots as places of frames, in a layout that has [`groups`](Self::groups).
    #[inline(always)]
    fn frames(slots: &mut [Self::Buffer]) -> &mut [Option<DataPage<Self::Mem>>] {
        let _ = slots;
        &mut []
    }

    /// [`fill`](Self::fill) found no memory. Collects the memory of the slots that are not posted,
    /// so that the first of them can be filled next. Returns whether [`fill`](Self::fill) should be
    /// tried again. Each refill calls this once. The device has `posted` buffers.
    #[cold]
    fn collect<'s>(&mut self, posted: usize, slots: impl Iterator<Item = &'s mut Self::Buffer>) -> bool
    where
        Self::Buffer: 's,
    {
        let _ = (posted, slots);
        false
    }

    /// Ends a refill in which memory was [collected](Self::collect).
    fn collected(&mut self) {}

    /// Returns memory that is in no slot. Called before the pools are closed.
    fn clear(&mut self) {}

    /// Releases memory that several slots share, after those were recovered or quarantined. With
    /// `lost`, the device may write to it for ever, so it is quarantined.
    fn release_shared(&mut self, lost: bool, pools: &mut Self::Pools, panics: &mut Panics) {
        let _ = (lost, pools, panics);
    }

    /// The device has stopped, and does not have the memory of this slot: returns it to the pools.
    fn recover(&mut self, slot: &mut Self::Buffer, panics: &mut Panics) {
        panics.call(|| drop(std::mem::take(slot)));
    }

    /// The device did not confirm that it has stopped, and may write to the memory of this slot for
    /// ever: quarantines the memory.
    fn quarantine(&mut self, slot: &mut Self::Buffer, pools: &mut Self::Pools, panics: &mut Panics);
}

/// Fills slots of a layout from its pools.
pub(super) struct Filling<'f, 'n, B: Buffers>(pub(super) &'f mut B, pub(super) &'f mut Napi<'n, B>);

impl<B: Buffers> Fill<B::Buffer> for Filling<'_, '_, B> {
    #[inline(always)]
    fn fill(&mut self, slot: &mut B::Buffer, segments: &mut Segments<'_>) -> bool {
        self.0.fill(slot, self.1, segments)
    }
}

/// Fills slots with pages of the array cache.
///
/// Invariant (*cached*): the layout has [`groups`](Buffers::groups), and the pages are its
/// [`cached`](Buffers::cached) ones.
pub(super) struct CachedFilling<'n, B: Buffers> {
    /// A copy, which a loop that writes to slots need not load again.
    layout: BufferLayout,
    pages: CachedPages<'n, B::Mem>,
}

impl<'n, B: Buffers> CachedFilling<'n, B> {
    /// With up to `most` pages. `None` if the layout has no groups.
    ///
    /// # Safety
    ///
    /// Before the value is dropped, this thread drops no page.
    #[inline(always)]
    pub(super) unsafe fn new(buffers: &B, napi: &'n mut Napi<'_, B>, most: usize) -> Option<Self> {
        if !buffers.groups() {
            return None;
        }
        // SAFETY: the caller's.
        Some(Self { layout: buffers.layout(), pages: unsafe { B::cached(napi, most)? } })
    }
}

impl<B: Buffers> FillRun<B::Buffer> for CachedFilling<'_, B> {
    #[inline(always)]
    fn is_empty(&self, slot: &B::Buffer) -> bool {
        B::is_empty(slot)
    }

    #[inline(always)]
    fn fill(&mut self, slot: &mut B::Buffer) -> Option<u64> {
        // SAFETY: *cached*.
        Some(unsafe { B::fill_cached(self.layout, slot, self.pages.next()?) })
    }

    #[inline(always)]
    fn fill_all(&mut self, slots: &mut [B::Buffer], addrs: &mut [u64]) -> usize {
        let layout = self.layout;
        // SAFETY: *cached*.
        self.pages.take_with(slots, addrs, |slot, addr, page| *addr = unsafe { B::fill_cached(layout, slot, page) })
    }
}

/// The pools of a receive queue.
pub(super) trait Pools {
    /// Their poll contexts.
    type Napi<'a>;
    /// Their final counters.
    type Closed;

    fn poll<R>(&mut self, f: impl FnOnce(&mut Self::Napi<'_>) -> R) -> R;
    /// The device may write to their pages for ever.
    fn device_gone(&mut self, panics: &mut Panics);
    /// `None` if user code has panicked.
    fn close(self, panics: &mut Panics) -> Option<Self::Closed>;
}

/// A received frame.
pub(super) trait ReceivedFrame {
    /// Bytes, from the Ethernet header on.
    fn len(&self) -> usize;
    /// Whether the frame has more than a head.
    fn is_multi_buffer(&self) -> bool;
    fn meta(&mut self) -> &mut Meta;
}

/// Receives the frames of a queue.
pub(super) trait FrameSink<B: Buffers> {
    /// Handles a group of frames.
    #[inline(always)]
    fn deliver_group(&mut self, group: &mut RxGroup<'_, B::Mem>) {
        let _ = group;
    }

    /// Handles a frame and counts the result. Returns the head's page if the frame was dropped.
    fn deliver(&mut self, stats: &mut RxStats, napi: &mut Napi<'_, B>, frame: B::Frame) -> Option<Page<B::Mem>>;
    /// Called at the end of each receive.
    fn flush(&mut self);
}

/// Prefetches the cache line at `addr`. This is no access, so any address is allowed.
#[inline]
pub(super) fn prefetch(addr: usize) {
    netmem_pool::prefetch::to_read(std::ptr::without_provenance::<u8>(addr));
}
