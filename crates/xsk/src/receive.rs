//! The receive path: chunks into which the kernel writes, and the frames that it has written.
//!
//! ```text
//!   pool ─ alloc ─► posted ─ fill ring ─► kernel ─ RX ring ─► frame ─► packet ─ drop ─► pool
//! ```
//!
//! A frame that the handler's program drops stays in the queue: its chunk is posted again at once.
//!
//! # The number of posted chunks
//!
//! The queue keeps a constant number of chunks posted, the *fill level*. After each batch of 64
//! frames, it posts as many chunks as were received. The fill level is at least the size of the
//! device's ring and a quarter more: a driver in zero-copy mode moves entries of the fill ring into
//! the ring of the device, and drops frames when there are none. Some drivers do not send without
//! them either, so the fill ring is also filled for a queue that is only used for sending.
//!
//! The pool chooses the chunks that are posted. Its array cache is a stack, so the pages that were
//! returned last are posted first, and are still in the CPU's cache. The pages in use are then only
//! those of the fill level and those that users hold, and not the whole UMEM.

use crate::accounts::PostedChunks;
use crate::error::XskError;
use crate::fault::Fault;
use crate::if_xdp::{Desc, PKT_CONTD};
use crate::layout::Layout;
use crate::left::LeftChunks;
use crate::queue_key::QueueKey;
use crate::ring::{Consumer, Producer};
use crate::socket::RxRings;
use crate::stats::RxStats;
use crate::umem::Umem;
use crate::umem_memory::UmemMemory;
use netmem_packet::{Handler, Verdict, XdpFrame};
use netmem_pool::{Napi, Page, Region, prefetch};
use std::mem;
use std::sync::Arc;

/// The number of frames that are handled between two publications of new chunks.
const RX_BATCH: u32 = 64;
/// The shortest frame that is delivered: an Ethernet header.
const ETHERNET: usize = 14;
/// The prefetch distance, in frames. Frames begin at the same offset of their pages, so they share
/// the 12 lines of one set of the first-level cache. A whole batch would not fit into this set.
const PREFETCH_DISTANCE: u32 = 8;

/// The queue without its pool.
pub(crate) struct Receive<M: UmemMemory> {
    region: Arc<Region<M>>,
    layout: Layout,
    pub(crate) rx: Consumer<Desc>,
    pub(crate) fill: Producer<u64>,
    pub(crate) posted: PostedChunks,
    pub(crate) level: u32,
    /// Parts of a page that contains several chunks. They are posted next.
    split_chunks: Vec<Page<M>>,
    /// The beginning of a frame whose other parts the kernel has not delivered yet.
    partial: Option<XdpFrame<M>>,
    /// Whether the rest of a frame is being dropped.
    skipping: bool,
    /// The number of polls without a frame since the last check of the interface.
    pub(crate) idle_polls: u32,
    pub(crate) stats: RxStats,
}

impl<M: UmemMemory> Receive<M> {
    pub(crate) fn new(umem: &Umem<M>, rings: RxRings, level: u32) -> Self {
        let RxRings { fill, rx } = rings;
        let layout = *umem.layout();
        let posted = PostedChunks::new(layout.chunks());
        debug_assert!(level <= fill.size());
        Self {
            region: umem.region().clone(),
            layout,
            rx,
            fill,
            posted,
            level,
            split_chunks: Vec::new(),
            partial: None,
            skipping: false,
            idle_polls: 0,
            stats: RxStats::default(),
        }
    }

    /// The error of a queue with fewer chunks than the fill level.
    pub(crate) fn short(&self) -> Option<XskError> {
        let (got, want) = (self.posted.count() as usize, self.level as usize);
        (got < want).then_some(XskError::Pages { want, got })
    }

    /// Claims the page of a chunk that was in the set of posted chunks.
    #[inline(always)]
    fn page(&self, chunk: u32) -> Page<M> {
        // SAFETY: *posted*: the set had a count of the page, and with it the chunk's bytes. Both
        // are ours now.
        unsafe { page_of(&self.region, &self.layout, chunk) }
    }

    /// Returns the chunk of a descriptor, which the kernel must have, and the offset of the frame
    /// in the chunk.
    #[inline(always)]
    fn check(&self, desc: Desc) -> Result<(u32, usize), Fault> {
        let chunk = self.layout.chunk_of(desc.addr).ok_or(Fault::Address { addr: desc.addr })?;
        let start = desc.addr as usize & (self.layout.chunk - 1);
        if start + desc.len as usize > self.layout.chunk {
            return Err(Fault::Length { addr: desc.addr, len: desc.len });
        }
        if !self.posted.contains(chunk) {
            return Err(Fault::Address { addr: desc.addr });
        }
        Ok((chunk, start))
    }

    /// Returns the page of a descriptor, and the offset of the frame in it.
    fn claim(&mut self, desc: Desc) -> Result<(Page<M>, usize), Fault> {
        let (chunk, start) = self.check(desc)?;
        self.posted.remove(chunk);
        Ok((self.page(chunk), start))
    }

    #[inline]
    pub(crate) fn receive<H: Handler<M>>(&mut self, napi: &mut Napi<'_, M>, budget: usize, handler: &mut H) -> usize {
        let mut done = 0;
        while done < budget && self.stats.stopped.is_none() {
            let budget = u32::try_from(budget - done).unwrap_or(u32::MAX);
            let (taken, frames, outcome) = self.batch(napi, budget, handler);
            done += frames as usize;
            if let Err(fault) = outcome {
                self.stop(fault);
            }
            if taken == 0 {
                break;
            }
        }
        handler.flush();
        done
    }

    /// Consumes up to a batch of descriptors, and posts as many chunks. Returns the number of
    /// descriptors, the number of frames, and the fault that ended the batch, if there was one.
    #[inline]
    fn batch<H: Handler<M>>(
        &mut self,
        napi: &mut Napi<'_, M>,
        budget: u32,
        handler: &mut H,
    ) -> (u32, u32, Result<(), Fault>) {
        let n = match self.rx.available(1) {
            Ok(n) => n.min(RX_BATCH),
            Err(fault) => return (0, 0, Err(fault)),
        };
        self.rx.prefetch(n);
        self.fill.prefetch(n);
        if H::READS {
            (0..n.min(PREFETCH_DISTANCE)).for_each(|ahead| self.prefetch_frame(ahead));
        }
        let (mut taken, mut frames, mut outcome) = (0, 0, Ok(()));
        while taken < n && frames < budget {
            if H::READS && PREFETCH_DISTANCE < n - taken {
                self.prefetch_frame(PREFETCH_DISTANCE);
            }
            let desc = self.rx.consume();
            taken += 1;
            let (chunk, start) = match self.check(desc) {
                Ok(checked) => checked,
                Err(fault) => {
                    outcome = Err(fault);
                    break;
                }
            };
            if desc.options & PKT_CONTD != 0 || self.partial.is_some() || self.skipping {
                self.posted.remove(chunk);
                let page = self.page(chunk);
                frames += u32::from(self.receive_fragment(napi, page, start, desc, handler));
                continue;
            }
            frames += 1;
            let page = self.page(chunk);
            let claim = Claim { posted: &mut self.posted, chunk };
            let mut frame = XdpFrame::new(page, start, desc.len as usize);
            let verdict = run_program(&mut self.stats, napi, &mut frame, handler);
            if !matches!(verdict, Verdict::Drop | Verdict::Aborted) {
                drop(claim);
                deliver(&mut self.stats, verdict, frame, handler);
                continue;
            }
            // The chunk is posted again at once: its page does not pass through the pool, and the
            // page's descriptor is not touched.
            let frag = frame.into_page().freeze();
            let (index, offset) = self.layout.page_of(chunk);
            // The handler may have put another page into the frame.
            let same = self.region.index_of(&frag) == Some(index);
            if same && frag.offset() == offset && frag.len() == self.layout.chunk {
                let _ = frag.into_count();
                mem::forget(claim);
                self.fill.push(self.layout.addr(index, offset));
            }
        }
        self.rx.release();
        if outcome.is_ok() {
            self.refill(napi);
        }
        (taken, frames, outcome)
    }

    /// Prefetches the beginning of the frame that is `ahead` of the next one, and that the kernel's
    /// CPU has written. The prefetch is for writing: the kernel writes the line again before its
    /// CPU reads it, so the kernel's CPU loses nothing, and a handler that changes the frame waits
    /// only once.
    #[inline(always)]
    fn prefetch_frame(&self, ahead: u32) {
        // The address is not checked yet. A prefetch does not fault.
        prefetch::to_write(self.region.as_ptr().wrapping_add(self.rx.peek(ahead).addr as usize));
    }

    /// Handles a descriptor of a frame that has several. Returns true if it is the last one, and
    /// the frame was delivered or dropped.
    #[cold]
    #[inline(never)]
    fn receive_fragment<H: Handler<M>>(
        &mut self,
        napi: &mut Napi<'_, M>,
        page: Page<M>,
        start: usize,
        desc: Desc,
        handler: &mut H,
    ) -> bool {
        let (len, goes_on) = (desc.len as usize, desc.options & PKT_CONTD != 0);
        if self.skipping {
            self.skipping = goes_on;
            return !goes_on;
        }
        let mut frame = match self.partial.take() {
            None => XdpFrame::new(page, start, len),
            Some(mut frame) => {
                if frame.push(page.freeze_range(start..start + len)).is_err() {
                    self.stats.too_many += 1;
                    self.skipping = goes_on;
                    return !goes_on;
                }
                frame
            }
        };
        if goes_on {
            self.partial = Some(frame);
            return false;
        }
        self.stats.multi_buffer += 1;
        let verdict = run_program(&mut self.stats, napi, &mut frame, handler);
        deliver(&mut self.stats, verdict, frame, handler);
        true
    }

    /// The pages of the parts that are posted next, each once for each part.
    pub(crate) fn split_pages(&self) -> impl Iterator<Item = u32> {
        let first = self.region.as_ptr().addr();
        self.split_chunks.iter().map(move |part| self.layout.page_index((part.as_ptr().addr() - first) as u64))
    }

    /// Posts chunks up to the fill level.
    ///
    /// Invariant (*places*): the fill ring has a free place for each chunk below the fill level,
    /// because the kernel has consumed the entry of every chunk that it has delivered. It consumed
    /// the entry before it published the frame, so the entry can be written after the frame was
    /// seen. The ring's consumer index is not read: another CPU writes it, and reading it would
    /// cost a cache miss for each batch.
    #[inline]
    pub(crate) fn refill(&mut self, napi: &mut Napi<'_, M>) {
        for _ in self.posted.count()..self.level {
            let Some(page) = self.alloc_chunk(napi) else {
                self.stats.out_of_buffers += 1;
                break;
            };
            let offset = page.offset();
            let frag = page.freeze();
            // The index is computed from the address, because the page's descriptor may not be in
            // this CPU's cache.
            let Some(index) = self.region.index_of(&frag) else {
                // The page is from another region, by which the provider has grown.
                self.stats.out_of_buffers += 1;
                break;
            };
            let _ = frag.into_count();
            let addr = self.layout.addr(index, offset);
            self.posted.insert((addr >> self.layout.shift) as u32);
            self.fill.push(addr);
        }
        self.fill.publish();
    }

    /// Returns a chunk to post.
    #[inline(always)]
    fn alloc_chunk(&mut self, napi: &mut Napi<'_, M>) -> Option<Page<M>> {
        if self.layout.per_page == 1 { napi.alloc() } else { self.split_page(napi) }
    }

    #[inline(never)]
    fn split_page(&mut self, napi: &mut Napi<'_, M>) -> Option<Page<M>> {
        if let Some(part) = self.split_chunks.pop() {
            return Some(part);
        }
        let mut page = napi.alloc()?;
        for part in (1..self.layout.per_page as usize).rev() {
            self.split_chunks.push(page.split_off(part * self.layout.chunk));
        }
        Some(page)
    }

    #[cold]
    pub(crate) fn stop(&mut self, fault: Fault) {
        netmem_pool::trace::warn!(%fault, "a receive queue is stopped");
        self.stats.stopped = Some(fault);
    }

    /// Returns all chunks to the pool, because the socket was never bound.
    pub(crate) fn unpost(&mut self) {
        self.split_chunks.clear();
        for chunk in self.posted.drain() {
            drop(self.page(chunk));
        }
    }

    /// Ends the use of the rings: returns the received frames that were not polled, and counts
    /// them. Returns the chunks that the kernel has. In the pool's poll context.
    pub(crate) fn leave(&mut self, key: QueueKey) -> LeftChunks<M> {
        let mut begun = self.partial.take().is_some();
        while self.rx.available(1).is_ok_and(|n| n > 0) {
            let desc = self.rx.consume();
            let Ok((page, _)) = self.claim(desc) else { break };
            drop(page);
            let goes_on = desc.options & PKT_CONTD != 0;
            // The rest of a frame that is being dropped was counted.
            self.stats.unpolled += u64::from(!goes_on && !self.skipping);
            begun = goes_on && !self.skipping;
            self.skipping &= goes_on;
        }
        // The kernel has not delivered its end.
        self.stats.unpolled += u64::from(begun);
        self.abandon(key)
    }

    /// Returns the chunks that the kernel has, without a look at the rings. In the pool's poll
    /// context.
    pub(crate) fn abandon(&mut self, key: QueueKey) -> LeftChunks<M> {
        // No part of a page may be left here when another part of the page is quarantined.
        self.split_chunks.clear();
        LeftChunks::new(self.region.clone(), self.layout, mem::replace(&mut self.posted, PostedChunks::new(0)), key)
    }
}

/// The page of a chunk.
///
/// # Safety
///
/// The caller owns a count of the page for the chunk, and uses it no more. No other value has the
/// chunk's bytes.
#[inline(always)]
pub(crate) unsafe fn page_of<M: UmemMemory>(region: &Region<M>, layout: &Layout, chunk: u32) -> Page<M> {
    let (index, offset) = layout.page_of(chunk);
    // SAFETY: the caller's. A chunk lies in its page.
    unsafe { region.page(index, offset..offset + layout.chunk) }
}

/// A chunk whose page the queue owns again. When this is dropped, also by a panic of the handler,
/// the chunk is removed from the set.
struct Claim<'a> {
    pub(crate) posted: &'a mut PostedChunks,
    chunk: u32,
}

impl Drop for Claim<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.posted.remove(self.chunk);
    }
}

/// Runs the handler's program on a frame.
#[inline(always)]
fn run_program<M: UmemMemory, H: Handler<M>>(
    stats: &mut RxStats,
    napi: &mut Napi<'_, M>,
    frame: &mut XdpFrame<M>,
    handler: &mut H,
) -> Verdict {
    if frame.len() < ETHERNET {
        stats.short += 1;
        return Verdict::Drop;
    }
    if H::LINEAR && frame.linearise(napi).is_err() {
        stats.not_linear += 1;
        return Verdict::Drop;
    }
    stats.frames += 1;
    stats.bytes += frame.len() as u64;
    let verdict = handler.run(frame);
    if verdict == Verdict::Drop {
        stats.dropped += 1;
    } else if verdict == Verdict::Aborted {
        stats.aborted += 1;
    }
    verdict
}

/// Applies the verdict of the program.
#[inline(always)]
fn deliver<M: UmemMemory, H: Handler<M>>(stats: &mut RxStats, verdict: Verdict, frame: XdpFrame<M>, handler: &mut H) {
    if verdict == Verdict::Pass {
        stats.passed += 1;
        handler.pass(frame.into_packet());
    } else if verdict == Verdict::Tx {
        stats.transmitted += 1;
        handler.tx(frame.into_packet());
    } else if verdict == Verdict::Redirect {
        stats.redirected += 1;
        handler.redirect(frame.into_packet());
    }
}
