//! The receive loop, written once for all buffer layouts.
//!
//! A receive queue posts *buffers*, each made of one or more *segments*. What a segment is depends
//! on the layout, which is an implementation of [`Buffers`]:
//!
//! ```text
//!   layout         one buffer                                         modes
//!   PageBuffers    a page, or a part of a page, of the queue's pool   small, mergeable
//!   BigBuffers     a chain of whole pages, from no pool               big-packet
//!   SplitBuffers   a host part, then pages of device memory           header split
//! ```
//!
//! [`Receive::receive`] works in batches of up to 64 used buffers. For each batch it:
//!
//! 1. reads and checks their used entries, and prefetches the cache lines of their buffers;
//! 2. handles the buffers one by one: syncs the memory for the
//!    CPU, reads the header, merges further buffers if the header requires it, validates the
//!    offloads, and delivers the frame to a [`FrameSink`];
//! 3. fills the slots that became free, posts them, and publishes them to the device.
//!
//! The device is woken once, after the last batch.
//!
//! Most batches have nothing in them that needs so much. If no memory is to be synced, a batch is
//! received as a *group* as far as its entries are the next ones in order, with lengths of whole
//! frames, and its headers are plain and alike: each entry and each header is compared once with
//! what it must be. The frames are handed to the handler where they are, in the slots of the queue
//! ([`RxGroup`]), and the slots are filled from the pool's array cache. What is anything else
//! is consumed by no group: the batch above judges it, and reports faults.
//!
//! User code runs in the loop: handlers, providers, DMA domains. If it panics, the queue stays
//! usable: each slot is either posted or free, and the next poll fills and posts what is free.

use super::buffer_layout::{HeaderFields, RX_BATCH};
use super::buffers::{Buffers, CachedFilling, ETHERNET, Filling, FrameSink, Napi, Pools, RawHeader, ReceivedFrame};
use super::handled::Handled;
use super::panics::Panics;
use super::ring::{RingHandle, RingQueue};
use super::state::DriverState;
use super::stats::{DeviceFault, RxStats};
use super::stop::Stopped;
use crate::net::{HeaderFault, Offloads, VnetHdr};
use crate::virtqueue::driver::{
    AnyShapedQueue, BATCH, DriverFormat, RingEnd, SHAPED_LOOK, ShapedQueue, Take, Taken, with_queue,
};
use crate::virtqueue::fours::accepted_by_fours;
use netmem_packet::{Checksum, FrameCounts, MAX_FRAGS, Meta, RxGroup};
use netmem_pool::Page;
use std::ops::ControlFlow;

/// A ring whose slots have buffers of this layout.
pub(super) type RxRing<B> = RingQueue<AnyShapedQueue<<B as Buffers>::Buffer>>;

/// A receive queue without its pools.
pub(super) struct Receive<B: Buffers> {
    ring: RxRing<B>,
    path: ReceivePath<B>,
}

/// Used buffers that are read at a time where groups are received, and the next entry is not part of
/// one: at least the longest frame.
const ALONE: u16 = 32;

/// Bytes of a header.
const HEADER: u32 = VnetHdr::LEN as u32;
/// The least that a device writes for a frame that is delivered.
const SHORTEST: u32 = HEADER + ETHERNET as u32;

/// The part of a receive queue that does not depend on the format of the ring.
struct ReceivePath<B> {
    buffers: B,
    header: HeaderFields,
    offloads: Offloads,
    stats: RxStats,
    /// Whether memory of slots was [collected](Buffers::collect), and that has not
    /// [ended](Buffers::collected). User code that panics leaves it so, for the next refill.
    collecting: bool,
    /// The counters of frames that were delivered in groups, which `stats` does not have.
    groups: FrameCounts,
}

impl<B: Buffers> Receive<B> {
    /// A queue in which nothing is posted yet. [`refill`](Self::refill) posts.
    pub(super) fn new(ring: RingHandle, mut buffers: B, header: HeaderFields, offloads: Offloads) -> Self {
        buffers.started(&ring);
        let ring = RingQueue::shaped(ring, &buffers.segments(), B::TABLES);
        Self { ring, path: ReceivePath::new(buffers, header, offloads) }
    }

    pub(super) fn ring(&self) -> &RxRing<B> {
        &self.ring
    }

    pub(super) fn ring_mut(&mut self) -> &mut RxRing<B> {
        &mut self.ring
    }

    pub(super) fn stats(&self) -> RxStats {
        self.path.stats.with(self.path.groups)
    }

    pub(super) fn buffers(&self) -> &B {
        &self.path.buffers
    }

    /// Buffers that the device has.
    pub(super) fn posted(&self) -> usize {
        self.ring.queue.posted()
    }

    /// Whether the device has buffers for a frame of any length.
    pub(super) fn can_receive(&self) -> bool {
        let longest = if self.path.header == HeaderFields::Mergeable { MAX_FRAGS + 1 } else { 1 };
        self.posted() >= longest.min(self.ring.queue.holds())
    }

    /// Switches to a new ring, in which no buffer is posted. The memory that was posted stays in
    /// its slots, and will be posted again.
    #[cold]
    pub(super) fn adopt(&mut self, ring: RingHandle, napi: &mut Napi<'_, B>) {
        self.path.stats.restart(self.ring.queue.unread());
        self.path.buffers.started(&ring);
        self.ring.replace(ring);
        self.refill(napi);
    }

    /// Receives up to `budget` frames, delivers each to `sink`, and posts new buffers. Returns how
    /// many frames there were.
    #[inline]
    pub(super) fn receive(&mut self, napi: &mut Napi<'_, B>, budget: usize, sink: &mut impl FrameSink<B>) -> usize {
        let Self { ring, path } = self;
        let done = with_queue!(&mut ring.queue, queue => path.receive(queue, napi, budget, sink));
        sink.flush();
        ring.notify();
        done
    }

    /// Posts every free slot for which there is memory.
    pub(super) fn refill(&mut self, napi: &mut Napi<'_, B>) {
        let Self { ring, path } = self;
        with_queue!(&mut ring.queue, queue => path.refill(queue, napi, false));
    }

    /// Stops the queue and closes its pools. Posted pages are returned; they are quarantined if the
    /// device does not confirm that it has stopped. `None` if user code has panicked while this
    /// thread unwinds already.
    pub(super) fn stop(
        &mut self,
        mut pools: B::Pools,
        state: &DriverState<B::Mem>,
        queue: usize,
    ) -> Option<Stopped<<B::Pools as Pools>::Closed>> {
        let mut panics = Panics::default();
        let confirmed = state.stop_ring(queue, self.ring.handle());
        if let Err(error) = &confirmed {
            panics.call(
                || netmem_pool::trace::warn!(queue, %error, "posted pages are quarantined: the device may still write them"),
            );
            pools.device_gone(&mut panics);
        }
        let Self { ring, path: ReceivePath { buffers, .. } } = self;
        let unread = ring.queue.unread();
        let lost = |posted: bool| posted && confirmed.is_err();
        pools.poll(|_| {
            // First, so that no part of a page is left here when another part of the page is
            // quarantined.
            panics.call(|| buffers.clear());
            with_queue!(&mut ring.queue, queue => {
                let slots = queue.slots().filter(|&(posted, _)| !lost(posted));
                slots.for_each(|(_, slot)| buffers.recover(slot, &mut panics));
            });
        });
        with_queue!(&mut ring.queue, queue => {
            let slots = queue.slots().filter(|&(posted, _)| lost(posted));
            slots.for_each(|(_, slot)| buffers.quarantine(slot, &mut pools, &mut panics));
        });
        buffers.release_shared(confirmed.is_err(), &mut pools, &mut panics);
        let closed = pools.close(&mut panics);
        panics.resume();
        Some(Stopped { closed: closed?, unread, confirmed })
    }
}

impl<B: Buffers> ReceivePath<B> {
    fn new(buffers: B, header: HeaderFields, offloads: Offloads) -> Self {
        Self { buffers, header, offloads, stats: RxStats::default(), collecting: false, groups: FrameCounts::default() }
    }

    #[inline]
    fn receive<F: DriverFormat>(
        &mut self,
        queue: &mut ShapedQueue<F, B::Buffer>,
        napi: &mut Napi<'_, B>,
        budget: usize,
        sink: &mut impl FrameSink<B>,
    ) -> usize {
        let (mut done, groups) = (0, self.buffers.groups());
        while done < budget && self.stats.stopped.is_none() {
            // So ends each call that has received less than its budget, and most find nothing.
            if queue.is_drained() {
                if queue.has_free() {
                    self.refill(queue, napi, false);
                }
                break;
            }
            if groups {
                // SAFETY: it has groups.
                let frames = unsafe { self.group(queue, napi, budget - done, sink) };
                done += frames;
                if frames > 0 {
                    continue;
                }
            }
            let (frames, outcome) = self.batch(queue, napi, budget - done, sink);
            done += frames;
            if let Err(fault) = outcome {
                self.stats.stop(fault);
            }
            if frames == 0 {
                break;
            }
        }
        done
    }

    /// Receives a group: frames in one buffer each, without segments, with checksums that are in
    /// their places and in the same state, in buffers that were used in order. Posts as many
    /// buffers as they used. Returns how many frames there were. If there are none, what is next in
    /// the ring is for [`batch`](Self::batch).
    ///
    /// # Safety
    ///
    /// The layout has [`groups`](Buffers::groups).
    #[inline]
    unsafe fn group<F: DriverFormat>(
        &mut self,
        queue: &mut ShapedQueue<F, B::Buffer>,
        napi: &mut Napi<'_, B>,
        budget: usize,
        sink: &mut impl FrameSink<B>,
    ) -> usize {
        let reads_header = self.header != HeaderFields::Plain;
        let most = RX_BATCH.min(budget.try_into().unwrap_or(RX_BATCH));
        // SAFETY: the caller's.
        let (mut n, ended, mut bytes) = unsafe {
            if reads_header && self.buffers.header_apart() {
                Self::read_group::<F, true>(queue, most)
            } else {
                Self::read_group::<F, false>(queue, most)
            }
        };
        if n == 0 {
            return 0;
        }
        let mut checksum = Checksum::Unknown;
        let read = n;
        if reads_header {
            let slots = queue.group(n);
            // SAFETY: the caller's; the device had these buffers, whose slots have their memory.
            (n, checksum) = unsafe {
                match self.header {
                    HeaderFields::Mergeable => self.plain_frames::<true>(slots),
                    _ => self.plain_frames::<false>(slots),
                }
            };
            if n == 0 {
                return 0;
            }
        }
        let removed = self.groups.removed();
        let mut handled = Handled::<B> { lent: queue.lend(n), before: self.groups.frames, counts: &mut self.groups };
        let frames = B::frames(handled.lent.buffers);
        if n < read {
            bytes = frames.iter().flatten().map(|page| page.data().len() as u64).sum();
        }
        sink.deliver_group(&mut RxGroup::new(frames, bytes, checksum, handled.counts));
        if !self.buffers.keeps() {
            handled.release();
        }
        // A handler can have caught the panic. Frames that were not counted are delivered again.
        let counted = handled.counted();
        drop(handled);
        if ended || n < read {
            // What the next entries name is judged before the buffers of this group are posted
            // again: the device does not have those. If the device claims more than was posted, a
            // split ring has no group. A packed ring has one of at most what was posted, and reads
            // no entry behind that.
            _ = queue.pending(ALONE, B::prefetch);
        }
        let removed = self.groups.removed() - removed;
        self.refill_group(queue, napi, counted, removed as usize);
        counted
    }

    /// Reads up to `most` used entries that are the next ones in order, sets the lengths of their
    /// frames, and prefetches those. Returns how many there are, whether the next used entry is
    /// anything else, and the bytes in all of them.
    ///
    /// It is not inlined, so that its loop has all registers.
    ///
    /// # Safety
    ///
    /// The layout of the buffers has [`groups`](Buffers::groups).
    #[inline(never)]
    unsafe fn read_group<F: DriverFormat, const APART: bool>(
        queue: &mut ShapedQueue<F, B::Buffer>,
        most: u16,
    ) -> (u16, bool, u64) {
        // 32 bits have the bytes of a batch, as the layout was made, and are summed by one
        // instruction.
        let mut bytes = 0u32;
        let (n, ended) = queue.read_group(most, SHORTEST, |slot, more| {
            let len = more + (SHORTEST - HEADER);
            // SAFETY: the caller's; the queue calls this with buffers that the device had, whose
            // slots keep the memory that was posted, and with at most the bytes of a buffer. A page
            // that a handler left in its place has its headroom: `RxGroup::new`.
            unsafe { B::arrived::<APART>(slot, len) };
            bytes = bytes.wrapping_add(more);
        });
        (n, ended, (bytes + u32::from(n) * (SHORTEST - HEADER)).into())
    }

    /// Posts as many buffers as a group of `n` frames used, `empty` of which need pages, and
    /// whatever else there is memory for.
    #[inline(always)]
    fn refill_group<F: DriverFormat>(
        &mut self,
        queue: &mut ShapedQueue<F, B::Buffer>,
        napi: &mut Napi<'_, B>,
        n: usize,
        empty: usize,
    ) {
        let keeps = self.buffers.keeps();
        if keeps {
            // If they are the only free slots.
            let all = empty == n && queue.posted() + n == queue.holds();
            self.refill_cached(queue, napi, n, empty, all);
        }
        if queue.has_free() {
            // A pool that keeps no page has no array cache.
            self.refill(queue, napi, keeps);
        }
    }

    /// Posts up to `most` buffers in consecutive slots, while those that are empty find pages in
    /// the array cache, which at most `empty` of them do. `all` states that each of these slots
    /// has no page.
    ///
    /// It is not inlined, so that its loop has all registers.
    #[inline(never)]
    fn refill_cached<F: DriverFormat>(
        &mut self,
        queue: &mut ShapedQueue<F, B::Buffer>,
        napi: &mut Napi<'_, B>,
        most: usize,
        empty: usize,
        all: bool,
    ) {
        // SAFETY: a run is filled and posted without user code, and no page of a slot is dropped.
        if let Some(mut filling) = unsafe { CachedFilling::new(&self.buffers, napi, empty) } {
            queue.refill_run(most, all, &mut filling);
        }
    }

    /// How many of these buffers, from the first on, have a frame of one buffer without anything to
    /// be done, and with the same state of its checksum; and that state. Each header is read once.
    /// `COUNTED`: it has the number of buffers.
    ///
    /// It is not inlined, so that its loop has all registers.
    ///
    /// # Safety
    ///
    /// The layout has [`groups`](Buffers::groups), and each slot has memory.
    #[inline(never)]
    unsafe fn plain_frames<const COUNTED: bool>(&self, slots: &[B::Buffer]) -> (u16, Checksum) {
        // SAFETY: the caller's.
        let header = |slot: &B::Buffer| unsafe { B::group_header(slot) };
        let Some((first, others)) = slots.split_first() else { return (0, Checksum::Unknown) };
        let first = header(first);
        if !first.is_plain() || (COUNTED && first.buffers() != 1) {
            return (0, Checksum::Unknown);
        }
        let kind = first.kind(COUNTED);
        let n = 1 + accepted_by_fours(others, |slot| header(slot).kind(COUNTED) == kind);
        let verified = self.offloads.verifies(first.flags());
        (n as u16, if verified { Checksum::Verified } else { Checksum::Unknown })
    }

    /// Receives up to a batch of frames and posts as many buffers as they used. Returns how many
    /// frames there were, and the fault of the device that ended the batch.
    #[inline(never)]
    fn batch<F: DriverFormat>(
        &mut self,
        queue: &mut ShapedQueue<F, B::Buffer>,
        napi: &mut Napi<'_, B>,
        budget: usize,
        sink: &mut impl FrameSink<B>,
    ) -> (usize, Result<(), DeviceFault>) {
        // The next group begins where nothing is pending.
        let look = match (self.buffers.groups(), queue.found()) {
            (true, 0) => ALONE,
            (true, found) => found,
            (false, _) => SHAPED_LOOK,
        };
        let pending = match queue.pending(look, B::prefetch) {
            Ok(pending) => pending,
            Err(fault) => return (0, Err(fault)),
        };
        let n = pending.min(RX_BATCH).min(budget.try_into().unwrap_or(RX_BATCH));
        let mut frames = 0;
        let mut buffers = 0;
        let outcome = loop {
            if buffers >= n {
                break Ok(());
            }
            let (plain, other) =
                queue.take_while(n - buffers, |len, slot, take| self.plain_frame(slot, len, take, napi, sink));
            buffers += plain;
            frames += usize::from(plain);
            if let Some(other) = other {
                buffers += 1;
                let Some(more) = self.slow_frame(queue, napi, other, pending - buffers, sink) else {
                    break queue.outcome();
                };
                buffers += more;
                frames += 1;
            }
        };
        // Done also if there were no frames, and after a fault. There may be memory now for slots
        // that found none earlier. If nothing is posted, no frame arrives that could cause another
        // attempt.
        if queue.has_free() {
            self.refill(queue, napi, false);
        }
        (frames, outcome)
    }

    /// Receives a frame in one buffer, without segments, and with a checksum that is in its place.
    /// For any other frame it returns the header, and changes nothing.
    #[inline(always)]
    fn plain_frame(
        &mut self,
        slot: &mut B::Buffer,
        len: u32,
        take: Take<'_>,
        napi: &mut Napi<'_, B>,
        sink: &mut impl FrameSink<B>,
    ) -> ControlFlow<RawHeader> {
        if len < SHORTEST {
            // The memory stays in its slot, and is posted again as it is.
            take.now();
            self.stats.short += 1;
            return ControlFlow::Continue(());
        }
        self.buffers.sync(slot, len, napi);
        // Behind the sync, which may panic: it is then made again, because only a buffer that was
        // synced shows whether a frame begins there that has others. Before the handler, which must
        // not have a frame twice.
        take.now();
        let (mut verified, mut kept) = (0, RawHeader::PLAIN);
        if self.header != HeaderFields::Plain {
            let header = self.buffers.header(slot);
            if !header.is_plain() || self.buffers_of(header) != 1 {
                return ControlFlow::Break(header);
            }
            verified = header.flags();
            if B::SPLIT {
                kept = header;
            }
        }
        if self.buffers.frame_len(kept, len).is_none() {
            self.stats.bad_header += 1;
            return ControlFlow::Continue(());
        }
        let posted = B::identity(slot);
        // The memory is there, because the slot was posted.
        let Some(mut frame) = self.buffers.complete(slot, kept, len) else { return ControlFlow::Continue(()) };
        if self.offloads.verifies(verified) {
            frame.meta().checksum = Checksum::Verified;
        }
        if let Some(page) = self.deliver(napi, frame, sink) {
            self.buffers.recycle(slot, posted, page);
        }
        ControlFlow::Continue(())
    }

    /// Buffers of the frame with this header.
    #[inline(always)]
    fn buffers_of(&self, header: RawHeader) -> u16 {
        match self.header {
            HeaderFields::Mergeable => header.buffers(),
            // The number has no meaning, and not every device writes it.
            _ => 1,
        }
    }

    /// A frame of several buffers, or with offloads that the header describes. `pending` more used
    /// buffers are in the ring. Returns how many of them the frame had; `None` after a fault.
    #[cold]
    #[inline(never)]
    fn slow_frame<F: DriverFormat>(
        &mut self,
        queue: &mut ShapedQueue<F, B::Buffer>,
        napi: &mut Napi<'_, B>,
        Taken { place, len, other: header }: Taken<RawHeader>,
        pending: u16,
        sink: &mut impl FrameSink<B>,
    ) -> Option<u16> {
        let buffers = self.buffers_of(header);
        if buffers == 1 {
            // Before the memory leaves its slot: if the frame is refused, the memory is posted
            // again as it is.
            let Some(have) = self.buffers.frame_len(header, len) else {
                self.stats.bad_header += 1;
                return Some(0);
            };
            let Some(meta) = self.validate_header(header.decode(), have) else { return Some(0) };
            let Some(mut frame) = self.buffers.complete(queue.buffer(place), header, len) else { return Some(0) };
            *frame.meta() = meta;
            drop(self.deliver(napi, frame, sink));
            return Some(0);
        }
        // The others may not have been read yet.
        let pending =
            if buffers > pending + 1 { queue.pending(SHAPED_LOOK, B::prefetch).unwrap_or(0) } else { pending };
        if let Err(fault) = DeviceFault::buffers(buffers, MAX_FRAGS + 1, pending + 1) {
            queue.refuse(fault);
            return None;
        }
        let Some(mut frame) = self.buffers.complete(queue.buffer(place), header, len) else { return Some(0) };
        // All at once: if a sync panics, the buffers behind it are no frames of their own.
        let first = queue.take(buffers - 1);
        for i in 0..buffers - 1 {
            let (len, slot) = queue.taken(first, i);
            self.buffers.append(slot, len, napi, &mut frame);
        }
        if let Some(meta) = self.validate_header(header.decode(), frame.len()) {
            *frame.meta() = meta;
            drop(self.deliver(napi, frame, sink));
        }
        Some(buffers - 1)
    }

    /// Validates the header of a frame of `len` bytes, and returns its offload information. If the
    /// header is invalid, or uses a feature that was not negotiated, this is counted, and the frame
    /// must be dropped.
    fn validate_header(&mut self, header: VnetHdr, len: usize) -> Option<Meta> {
        match self.offloads.check(header, len) {
            Ok(header) => return Some(header.meta()),
            Err(HeaderFault::NotNegotiated) => self.stats.not_negotiated += 1,
            Err(HeaderFault::Nonsense) => self.stats.bad_header += 1,
        }
        None
    }

    #[inline(always)]
    fn deliver(
        &mut self,
        napi: &mut Napi<'_, B>,
        frame: B::Frame,
        sink: &mut impl FrameSink<B>,
    ) -> Option<Page<B::Mem>> {
        self.stats.multi_buffer += u64::from(frame.is_multi_buffer());
        sink.deliver(&mut self.stats, napi, frame)
    }

    /// Posts every free slot for which there is memory. `cached`: the array cache has no page left,
    /// and is filled by each page that is allocated one by one.
    ///
    /// It is not inlined, so that its loop has all registers, and a slot is filled in it.
    #[inline(never)]
    fn refill<F: DriverFormat>(&mut self, queue: &mut ShapedQueue<F, B::Buffer>, napi: &mut Napi<'_, B>, cached: bool) {
        self.end_collecting();
        while queue.has_free() {
            let cached = cached && queue.is_steady();
            let most = if cached { 1 } else { BATCH };
            if queue.refill(B::ONE_SEGMENT, most, &mut Filling(&mut self.buffers, napi)) == 0 {
                let in_use = queue.posted();
                let free = queue.slots().filter(|&(posted, _)| !posted).map(|(_, slot)| slot);
                if !std::mem::replace(&mut self.collecting, true) && self.buffers.collect(in_use, free) {
                    continue;
                }
                self.stats.out_of_buffers += 1;
                break;
            }
            if cached {
                self.refill_cached(queue, napi, BATCH, BATCH, false);
            }
        }
        self.end_collecting();
    }

    #[inline]
    fn end_collecting(&mut self) {
        if std::mem::take(&mut self.collecting) {
            self.buffers.collected();
        }
    }
}
