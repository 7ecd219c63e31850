//! The receive queue: buffers posted, frames taken, pages kept in circulation.
//!
//! ```text
//!   page   ├─ headroom ─┤─ colour ─┤ header 12 B │ frame ...                          ┤
//!                       0, 64, ... bytes          posted from the header to the buffer's end
//! ```
//!
//! Frames start at different offsets (*colouring*): the headers of page-aligned buffers would all fall into one set of
//! the first-level cache. A poll goes over the ring in batches: prefetch the headers, take the frames, post new buffers.

use super::big::BigRing;
use super::frame::{BATCH, ETHERNET, annotate, deliver, prefetch};
use super::panics::Panics;
use super::restart::{Stop, Stopped};
use super::ring::{DriverRing, Moves};
use super::stats::{DeviceFault, RxStats, state};
use super::{Link, Recipe};
use crate::net::{Offloads, VnetHdr};
use netmem_packet::{Handler, MAX_FRAGS, Poll, RxQueue, XdpFrame};
use netmem_pool::{Napi, Page, PagePool, PeerMemory, PeerShared, PoolClosed, PoolStats};
use std::fmt;
use std::sync::Arc;

/// The header of a frame that takes no offloads and one buffer.
const PLAIN: [u8; VnetHdr::LEN] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// What a received frame's header may speak of, by what was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Header {
    /// Nothing: it is not read.
    Plain,
    /// Checksums.
    Vouches,
    /// The number of buffers, and offloads.
    Counts,
}

/// How buffers lie in pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferLayout {
    /// Where the buffer of the first colour begins. In small mode the header ends a cache line and the frame begins the
    /// next: nothing was negotiated that a header could speak of, and so it is not read, nor its line fetched. Elsewhere
    /// the header begins a line, and shares it with the frame's first bytes.
    pub(crate) first: u32,
    /// Offsets are multiples of 64 up to this, a power of two less one times 64.
    pub(crate) colour_mask: u32,
    /// Bytes posted, header included.
    pub(crate) len: u32,
    /// Bytes at the front that the driver does not look at.
    pub(crate) unread: u32,
    /// Buffers in a page.
    pub(crate) per_page: u32,
}

impl BufferLayout {
    /// Where in `page` its buffer begins.
    #[inline]
    fn start<M: PeerMemory>(&self, page: &Page<M>) -> u32 {
        self.first + ((page.index() << 6) & self.colour_mask)
    }

    /// Whether the buffer that the descriptor of `slot` points to, from `start` of its page, lies in `page`.
    #[inline(always)]
    fn is_posted_in<M: PeerMemory>(&self, page: &Page<M>, start: u32, slot: &Slot<M>) -> bool {
        page.as_ptr().addr() + (start + self.unread) as usize == slot.front && (start + self.len) as usize <= page.len()
    }
}

struct Slot<M: PeerMemory> {
    page: Option<Page<M>>,
    /// Address of what is read first, for the prefetch: the header, or in small mode the frame.
    front: usize,
    /// Where in the page the buffer begins.
    start: u32,
    /// Whether the device has it. A page may be here and not posted: one that stays, see [`RxRing::frame`].
    posted: bool,
}

impl<M: PeerMemory> Default for Slot<M> {
    fn default() -> Self {
        Self { page: None, front: 0, start: 0, posted: false }
    }
}

/// The part of the queue that is not its pool.
struct RxRing<M: PeerMemory> {
    ring: DriverRing,
    /// What the device has, by head.
    slots: Box<[Slot<M>]>,
    /// Heads that the device does not have, oldest first.
    free: Vec<u16>,
    /// Parts of split pages that are not posted yet.
    parts: Vec<Page<M>>,
    layout: BufferLayout,
    header: Header,
    offloads: Offloads,
    needs_sync: bool,
    /// Whether a dropped page may stay where it is.
    keeps: bool,
    stats: RxStats,
}

/// The ring in one of its modes.
enum Ring<M: PeerMemory> {
    /// Small or mergeable: a buffer is a page, or a part of one, from the pool.
    Single(RxRing<M>),
    /// Big-packet: a buffer is a chain of pages from no pool.
    Big(BigRing<M>),
}

/// A receive queue. See [`RxQueue::poll`].
///
/// Dropping it stops the ring: once the device has confirmed, posted pages come home; if it does not, they are
/// quarantined.
#[must_use = "a queue stops when it is dropped"]
pub struct VirtioRx<M: PeerMemory = PeerShared> {
    pool: Option<PagePool<M>>,
    ring: Ring<M>,
    index: usize,
    link: Arc<Link<M>>,
}

impl<M: PeerMemory> VirtioRx<M> {
    pub(super) fn new(ring: DriverRing, pool: PagePool<M>, index: usize, link: Arc<Link<M>>) -> Self {
        let rx = RxRing::new(ring, &link.recipe, &pool);
        let mut this = Self { pool: Some(pool), ring: Ring::Single(rx), index, link };
        // A queue is full before its first poll.
        this.poll(|poll| {
            if let Ring::Single(rx) = poll.ring {
                rx.refill(&mut poll.napi);
            }
        });
        this
    }

    /// In big-packet mode the pool is there for linearising only.
    pub(super) fn new_big(big: BigRing<M>, pool: PagePool<M>, index: usize, link: Arc<Link<M>>) -> Self {
        Self { pool: Some(pool), ring: Ring::Big(big), index, link }
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> RxStats {
        match &self.ring {
            Ring::Single(rx) => rx.stats,
            Ring::Big(big) => big.stats(),
        }
    }

    /// The counters of the queue's pool.
    pub fn pool_stats(&mut self) -> PoolStats {
        self.pool.as_mut().map(PagePool::stats).unwrap_or_default()
    }

    /// Pages that the device has.
    #[must_use]
    pub fn posted(&self) -> usize {
        match &self.ring {
            Ring::Single(rx) => rx.slots.iter().filter(|s| s.page.is_some()).count(),
            Ring::Big(big) => big.posted(),
        }
    }

    /// Whether the device has buffers for a frame of any length.
    pub(super) fn can_receive(&self) -> bool {
        match &self.ring {
            Ring::Single(rx) => rx.can_receive(),
            Ring::Big(big) => big.can_receive(),
        }
    }

    pub(super) fn ring_mut(&mut self) -> &mut DriverRing {
        match &mut self.ring {
            Ring::Single(rx) => &mut rx.ring,
            Ring::Big(big) => big.ring_mut(),
        }
    }

    /// Goes on with the ring of the device's new connection.
    #[cold]
    fn adopt(&mut self) {
        let Self { pool: Some(pool), ring, index, link } = self else { return };
        let Some(new) = link.take_ring(*index) else { return };
        match ring {
            Ring::Single(rx) => pool.poll(|napi| rx.adopt(new, napi)),
            Ring::Big(big) => big.adopt(new),
        }
    }

    /// Stops the queue, takes back or quarantines what was posted, and closes the pool.
    pub fn close(mut self) -> Option<PoolClosed> {
        self.stop().map(|stopped| stopped.closed)
    }
}

impl<M: PeerMemory> Stop for VirtioRx<M> {
    type Mem = M;
    type PoolClosed = PoolClosed;

    fn index(&self) -> usize {
        self.index
    }

    fn link(&self) -> &Arc<Link<M>> {
        &self.link
    }

    fn ring(&self) -> &DriverRing {
        match &self.ring {
            Ring::Single(rx) => &rx.ring,
            Ring::Big(big) => big.ring(),
        }
    }

    fn stop(&mut self) -> Option<Stopped<PoolClosed>> {
        let mut pool = self.pool.take()?;
        let mut panics = Panics::default();
        let confirmed = self.link.stop_ring(self.index, self.ring());
        if let Err(error) = &confirmed {
            let queue = self.index;
            panics.call(
                || tracing::warn!(queue, %error, "posted pages are quarantined: the device may still write them"),
            );
            panics.call(|| pool.device_gone());
        }
        let unread = self.ring().pending().unwrap_or(0);
        let mut lost = 0;
        match &mut self.ring {
            Ring::Big(big) => lost = big.stop(confirmed.is_ok(), &mut panics),
            Ring::Single(rx) => {
                // First, so that of a page no part is left here when another is given up.
                panics.call(|| pool.poll(|_| rx.parts.clear()));
                let posted = rx.slots.iter_mut().filter_map(|s| s.page.take());
                if confirmed.is_ok() {
                    panics.call(|| pool.poll(|_| posted.for_each(drop)));
                } else {
                    posted.for_each(|page| _ = panics.call(|| pool.quarantine(page)));
                }
            }
        }
        let closed = panics.call(|| pool.close());
        panics.resume();
        let mut closed = closed?;
        // Pages from no pool that are lost are accounted for beside the pool's.
        closed.stats.alloc_slow += lost;
        closed.stats.quarantined += lost;
        Some(Stopped { closed, unread, confirmed })
    }
}

impl<M: PeerMemory> Drop for VirtioRx<M> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<M: PeerMemory> fmt::Debug for VirtioRx<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioRx({}, {})", self.index, state(self.stats().stopped))
    }
}

/// The inside of a [poll](RxQueue::poll) of a [`VirtioRx`].
pub struct RxPoll<'a, M: PeerMemory = PeerShared> {
    ring: &'a mut Ring<M>,
    napi: Napi<'a, M>,
}

impl<M: PeerMemory> fmt::Debug for RxPoll<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RxPoll")
    }
}

impl<M: PeerMemory> RxQueue for VirtioRx<M> {
    type Mem = M;
    type Poll<'a> = RxPoll<'a, M>;

    #[inline]
    fn poll<R>(&mut self, f: impl FnOnce(&mut RxPoll<'_, M>) -> R) -> R {
        if self.link.has_replaced(self.ring()) {
            self.adopt();
        }
        let Self { pool, ring, .. } = self;
        let pool = pool.as_mut().expect("the pool is there until the queue is stopped, which consumes it");
        pool.poll(|napi| f(&mut RxPoll { ring, napi: napi.reborrow() }))
    }
}

impl<M: PeerMemory> Poll for RxPoll<'_, M> {
    type Mem = M;

    fn receive<H: Handler<M>>(&mut self, budget: usize, handler: &mut H) -> usize {
        match self.ring {
            Ring::Single(rx) => rx.receive(&mut self.napi, budget, handler),
            Ring::Big(big) => big.receive(&mut self.napi, budget, handler),
        }
    }

    fn with_napi<R>(&mut self, f: impl FnOnce(&mut Napi<'_, M>) -> R) -> R {
        f(&mut self.napi)
    }
}

impl<M: PeerMemory> RxRing<M> {
    fn new(ring: DriverRing, recipe: &Recipe<M>, pool: &PagePool<M>) -> Self {
        let Recipe { layout, header, offloads, .. } = *recipe;
        let size = ring.size();
        describe(&ring, layout);
        Self {
            slots: (0..size).map(|_| Slot::default()).collect(),
            free: (0..size).collect(),
            parts: Vec::new(),
            layout,
            header,
            offloads,
            needs_sync: pool.needs_sync(),
            keeps: pool.circulates(),
            stats: RxStats::default(),
            ring,
        }
    }

    /// Whether the device has buffers for a frame of any length.
    fn can_receive(&self) -> bool {
        let longest = if self.header == Header::Counts { MAX_FRAGS + 1 } else { 1 };
        self.slots.len() - self.free.len() >= longest.min(self.slots.len())
    }

    /// Goes on with a new ring, in which nothing is posted. The pages that were posted stay in their slots, and are posted.
    fn adopt(&mut self, ring: DriverRing, napi: &mut Napi<'_, M>) {
        self.stats.restart(&self.ring);
        self.ring = ring;
        describe(&self.ring, self.layout);
        for (id, slot) in (0..).zip(&mut self.slots) {
            slot.posted = false;
            if let Some(page) = &slot.page {
                self.ring.point(id, page.dma_addr() + u64::from(slot.start));
            }
        }
        self.free = (0..self.ring.size()).collect();
        self.refill(napi);
    }

    fn receive<H: Handler<M>>(&mut self, napi: &mut Napi<'_, M>, budget: usize, handler: &mut H) -> usize {
        let mut done = 0;
        while done < budget && self.stats.stopped.is_none() {
            let (frames, outcome) = self.batch(napi, budget - done, handler);
            done += frames;
            if let Err(error) = outcome {
                self.stats.stop(error);
            }
            if frames == 0 {
                break;
            }
        }
        handler.flush();
        self.ring.notify();
        done
    }

    /// Takes up to a batch of frames and posts as many buffers as they used. Returns how many frames there were, and what
    /// the device did wrong after them.
    #[inline]
    fn batch<H: Handler<M>>(
        &mut self,
        napi: &mut Napi<'_, M>,
        budget: usize,
        handler: &mut H,
    ) -> (usize, Result<(), DeviceFault>) {
        let pending = match self.ring.pending() {
            Ok(pending) => pending,
            Err(error) => return (0, Err(error)),
        };
        let n = pending.min(BATCH).min(budget.try_into().unwrap_or(BATCH));
        for i in 0..n {
            let (id, _) = self.ring.used(i);
            // A bad id is found below; here it prefetches nothing.
            if let Some(Slot { page: Some(page), front, .. }) = self.slots.get(id as usize) {
                prefetch(*front);
                page.prefetch();
            }
        }
        let mut frames = 0;
        let mut buffers = 0;
        let outcome = loop {
            if buffers >= n {
                break Ok(());
            }
            match self.frame(napi, pending - buffers, handler) {
                Ok(used) => {
                    buffers += used;
                    frames += 1;
                }
                Err(error) => break Err(error),
            }
        };
        // Also on the way out: what was taken is replaced or at least listed as free.
        if !self.free.is_empty() {
            self.refill(napi);
        }
        (frames, outcome)
    }

    /// Takes one frame off the ring; `pending` used buffers are there. Returns how many of them it was made of.
    #[inline(always)]
    fn frame<H: Handler<M>>(
        &mut self,
        napi: &mut Napi<'_, M>,
        pending: u16,
        handler: &mut H,
    ) -> Result<u16, DeviceFault> {
        let (id, page, start, len) = self.take(napi)?;
        let Some(data_len) = (len as usize).checked_sub(VnetHdr::LEN).filter(|&n| n >= ETHERNET) else {
            self.stats.short += 1;
            return Ok(1);
        };
        let mut header = PLAIN;
        if self.header != Header::Plain {
            // The buffer was posted from `start` and holds at least a header.
            let read = page.copy_to(start as usize, &mut header);
            debug_assert!(read.is_ok());
        }
        // Built apart from the frames that need a second look, so that this one never leaves the registers.
        let frame = XdpFrame::new(page, start as usize + VnetHdr::LEN, data_len);
        let buffers = u16::from_le_bytes([header[10], header[11]]);
        if header[0] | header[1] == 0 && buffers == 1 {
            match deliver(&mut self.stats, napi, frame, handler) {
                // The page that was dropped is posted again as it is: no way home and back, and nothing to write that the
                // device reads. A page per packet is one that does go.
                // It must be that page: a program can have left another in the frame, or a part.
                Some(page) if self.keeps && self.layout.is_posted_in(&page, start, &self.slots[usize::from(id)]) => {
                    self.slots[usize::from(id)].page = Some(page);
                }
                Some(page) => page.release(),
                None => {}
            }
            return Ok(1);
        }
        self.unusual(napi, frame, header, pending, handler)
    }

    /// A frame of several buffers, or with offloads.
    #[cold]
    #[inline(never)]
    fn unusual<H: Handler<M>>(
        &mut self,
        napi: &mut Napi<'_, M>,
        mut frame: XdpFrame<M>,
        header: [u8; VnetHdr::LEN],
        pending: u16,
        handler: &mut H,
    ) -> Result<u16, DeviceFault> {
        let header = VnetHdr::from_bytes(header);
        let mut buffers = 1;
        if self.header == Header::Counts && header.num_buffers != 1 {
            buffers = self.merge(napi, &mut frame, header.num_buffers, pending)?;
        }
        if header.is_plain() || annotate(&mut self.stats, &mut frame, header, self.offloads) {
            drop(deliver(&mut self.stats, napi, frame, handler));
        }
        Ok(buffers)
    }

    /// Takes the next used buffer: its head, its page, where it begins there, and how much was written. The one place where
    /// a head and a length of the device's are judged.
    #[inline(always)]
    fn take(&mut self, napi: &Napi<'_, M>) -> Result<(u16, Page<M>, u32, u32), DeviceFault> {
        let (id, len) = self.ring.used(0);
        let id = DeviceFault::id(id, self.slots.len())?;
        let slot = &mut self.slots[usize::from(id)];
        let start = slot.start;
        let page = DeviceFault::posted(id, slot.page.take_if(|_| slot.posted))?;
        slot.posted = false;
        self.ring.consume(1);
        self.free.push(id);
        let len = DeviceFault::length(len, self.layout.len)?;
        if self.needs_sync {
            napi.sync_for_cpu(&page, start as usize..(start + len) as usize);
        }
        Ok((id, page, start, len))
    }

    /// Adds the buffers behind the first to a frame that claims to have `buffers`.
    fn merge(
        &mut self,
        napi: &Napi<'_, M>,
        frame: &mut XdpFrame<M>,
        buffers: u16,
        pending: u16,
    ) -> Result<u16, DeviceFault> {
        let buffers = DeviceFault::buffers(buffers, MAX_FRAGS + 1, pending)?;
        for _ in 1..buffers {
            let (_, page, start, len) = self.take(napi)?;
            let start = start as usize;
            // `take` checked the length, the count of buffers leaves room for every fragment.
            let pushed = frame.push(page.freeze_range(start..start + len as usize));
            debug_assert!(pushed.is_ok());
        }
        self.stats.multi_buffer += 1;
        Ok(buffers)
    }

    /// Posts a buffer for every free head, as far as there are pages.
    fn refill(&mut self, napi: &mut Napi<'_, M>) {
        let mut posted = false;
        while !self.free.is_empty() {
            if self.refill_batch(napi) == 0 {
                self.stats.starved += 1;
                break;
            }
            posted = true;
        }
        if posted {
            self.ring.publish();
        }
    }

    /// Posts up to a batch of buffers for the oldest free heads. Pages first, descriptors after: the stores that wait for the
    /// device to let go of a cache line are then next to each other and wait together.
    ///
    /// User code may panic in it: a provider or a domain. A page that has a slot by then is posted by the next call, and no
    /// head is exposed twice.
    #[inline(always)]
    fn refill_batch(&mut self, napi: &mut Napi<'_, M>) -> usize {
        let mut moves = Moves::<{ BATCH as usize }>::new(&self.ring);
        let mut got = 0;
        for &id in self.free.iter().take(BATCH as usize) {
            // A page that stayed is where its descriptor points.
            if self.slots[usize::from(id)].page.is_none() {
                let page = if self.layout.per_page == 1 {
                    napi.alloc()
                } else {
                    part(&mut self.parts, self.layout.per_page, napi)
                };
                let Some(page) = page else { break };
                let start = self.layout.start(&page);
                moves.push(id, page.dma_addr() + u64::from(start));
                let front = page.as_ptr().addr() + (start + self.layout.unread) as usize;
                self.slots[usize::from(id)] = Slot { page: Some(page), front, start, posted: false };
            }
            let slot = &mut self.slots[usize::from(id)];
            slot.posted = true;
            if let (true, Some(page)) = (self.needs_sync, &slot.page) {
                napi.sync_for_device(page, slot.start as usize..(slot.start + self.layout.len) as usize);
            }
            got += 1;
        }
        drop(moves);
        self.ring.expose_all(&self.free[..got]);
        // Oldest first, so that heads keep their places in the ring.
        self.free.drain(..got);
        got
    }
}

/// Describes a buffer in every descriptor, in no page yet.
fn describe(ring: &DriverRing, layout: BufferLayout) {
    (0..ring.size()).for_each(|id| ring.describe(id, 0, layout.len, true, None));
}

/// A part of a page that `per_page` buffers share.
#[inline(never)]
pub(super) fn part<M: PeerMemory>(parts: &mut Vec<Page<M>>, per_page: u32, napi: &mut Napi<'_, M>) -> Option<Page<M>> {
    if let Some(part) = parts.pop() {
        return Some(part);
    }
    let mut page = napi.alloc()?;
    let size = page.len() / per_page as usize;
    for part in (1..per_page as usize).rev() {
        parts.push(page.split_off(part * size));
    }
    Some(page)
}
