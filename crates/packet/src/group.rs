//! Frames that arrive together: what a driver hands to a handler at a time.
//!
//! Why not a frame at a time: the driver's checks, counters and publications are then paid once for
//! up to 64 frames, and the handler's loop is the program's own. Why not a slice of frames: safe
//! code could exchange two of them, and the driver would post a page at the address of another.
//!
//! ```text
//!   driver   [ RxFrame | RxFrame | RxFrame | ... ]      its own array: a page, or nothing, in each
//!                 ▲
//!   RxGroup ──────┘  lent for one call; frames are read in place, or taken as packets
//!
//!   afterwards       a page that is still there was dropped, and is posted again in its place
//! ```

use crate::device::Handler;
use crate::meta::{Checksum, Meta};
use crate::packet::Packet;
use crate::xdp::{Verdict, XdpFrame};
use netmem_pool::{Mapped, Memory, OutOfRange, Page, prefetch};
use std::{fmt, slice};

/// A place for a received frame in one buffer: its page, or nothing, and where in the page the
/// frame is. It is the driver's side of an [`RxGroup`].
///
/// The page keeps all of its bytes, so that there is headroom in front of the frame.
#[derive(Debug)]
pub struct RxFrame<M: Memory> {
    page: Option<Page<M>>,
    start: u32,
    len: u32,
}

impl<M: Memory> Default for RxFrame<M> {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl<M: Memory> RxFrame<M> {
    /// No frame.
    pub const EMPTY: Self = Self { page: None, start: 0, len: 0 };

    /// A frame that begins at byte `start` of `page`, and whose length is
    /// [set](Self::set_len) when it is known.
    #[inline(always)]
    #[must_use]
    pub fn new(page: Page<M>, start: u32) -> Self {
        Self { page: Some(page), start, len: 0 }
    }

    /// Sets the bytes of the frame. The driver has checked that they lie in the page.
    #[inline(always)]
    pub fn set_len(&mut self, len: u32) {
        debug_assert!(self.page.as_ref().is_none_or(|page| (self.start + len) as usize <= page.len()));
        self.len = len;
    }

    /// Bytes of the frame.
    #[inline(always)]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "an empty frame is of no interest")]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Where in its page the frame begins.
    #[inline(always)]
    #[must_use]
    pub fn start(&self) -> u32 {
        self.start
    }

    /// The page, if the frame was not taken.
    #[inline(always)]
    #[must_use]
    pub fn page(&self) -> Option<&Page<M>> {
        self.page.as_ref()
    }

    /// Removes the page.
    #[inline(always)]
    pub fn take_page(&mut self) -> Option<Page<M>> {
        self.page.take()
    }

    /// Puts another frame here, whose length is set later. A page that is here is dropped.
    #[inline(always)]
    pub fn refill(&mut self, page: Page<M>, start: u32) {
        self.page = Some(page);
        self.start = start;
    }

    /// Puts a page back that was [removed](Self::take_page) from here.
    #[inline(always)]
    pub fn put_page(&mut self, page: Page<M>) {
        self.page = Some(page);
    }

    /// Prefetches the cache line that is `offset` bytes from the beginning of the frame, if there is
    /// one. The thread does not wait for it.
    #[inline(always)]
    pub fn prefetch(&self, offset: isize)
    where
        M: Mapped,
    {
        if let Some(page) = &self.page {
            prefetch::to_read(page.as_ptr().wrapping_add(self.start as usize).wrapping_offset(offset));
        }
    }

    /// Removes the frame, to be run through a program.
    #[inline(always)]
    fn take_xdp(&mut self, meta: Meta) -> Option<XdpFrame<M>> {
        Some(XdpFrame::from_parts(self.page.take()?, self.start, self.len, meta))
    }
}

/// Counters of frames that were delivered in groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FrameCounts {
    /// Frames.
    pub frames: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Frames that were passed, or taken from their group.
    pub passed: u64,
    /// Frames that were dropped, or left in their group.
    pub dropped: u64,
    /// Frames that were to be transmitted.
    pub transmitted: u64,
    /// Frames that were to be redirected.
    pub redirected: u64,
    /// Frames on which the program failed.
    pub aborted: u64,
}

impl FrameCounts {
    /// Frames that were dropped, so that their pages are in their places, if those are still whole.
    #[inline(always)]
    #[must_use]
    pub fn left(&self) -> u64 {
        self.dropped + self.aborted
    }
}

/// Frames that a driver lends to [`Handler::run_batch`], in the order of their arrival: each in one
/// buffer, no segment to be cut, all with the same state of their checksums.
///
/// A frame is read in place, and taken as a [`Packet`] if it is to be kept. A frame that is left in
/// the group is dropped: its page is posted again as it is, and costs no count and no return.
///
/// ```
/// use netmem_packet::{Handler, Packet, RxGroup};
/// use netmem_pool::Private;
///
/// /// Keeps the frames of one protocol.
/// struct Keep(u16, Vec<Packet<Private>>);
///
/// impl Handler<Private> for Keep {
///     fn run_batch(&mut self, group: &mut RxGroup<'_, Private>) {
///         for mut frame in group.frames() {
///             if frame.read_at(12).is_ok_and(|kind| u16::from_be_bytes(kind) == self.0) {
///                 self.1.extend(frame.take());
///             }
///         }
///     }
///
///     /// A frame of several buffers, or one that its queue delivers alone.
///     fn pass(&mut self, packet: Packet<Private>) {
///         let mut kind = [0; 2];
///         if packet.copy_to(12, &mut kind).is_ok() && u16::from_be_bytes(kind) == self.0 {
///             self.1.push(packet);
///         }
///     }
/// }
/// ```
pub struct RxGroup<'g, M: Memory> {
    frames: &'g mut [RxFrame<M>],
    counts: &'g mut FrameCounts,
    meta: Meta,
    /// Whether a frame can have been taken.
    touched: bool,
    /// Whether the verdicts were counted one by one.
    ran: bool,
}

impl<'g, M: Memory> RxGroup<'g, M> {
    /// A group of frames, none of which was taken, with `bytes` bytes in all. They are counted now,
    /// before any code of the handler runs: see [`run_each`](Self::run_each) for what is taken back.
    /// What became of them is counted when the group is dropped, also by a panic.
    #[inline(always)]
    pub fn new(frames: &'g mut [RxFrame<M>], bytes: u64, checksum: Checksum, counts: &'g mut FrameCounts) -> Self {
        counts.frames += frames.len() as u64;
        counts.bytes += bytes;
        Self { frames, counts, meta: Meta { checksum, gso: None }, touched: false, ran: false }
    }

    /// Frames, with those that were taken.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether there are no frames. A queue lends no such group.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The state of the checksum of each frame.
    #[inline]
    #[must_use]
    pub fn checksum(&self) -> Checksum {
        self.meta.checksum
    }

    /// The frames that were not taken.
    #[inline]
    pub fn frames(&mut self) -> impl Iterator<Item = GroupFrame<'_, M>> {
        let meta = self.meta;
        self.touched = true;
        self.frames.iter_mut().filter(|frame| frame.page.is_some()).map(move |frame| GroupFrame { frame, meta })
    }

    /// Takes all frames that were not taken, as packets.
    #[inline]
    pub fn take_all(&mut self) -> impl Iterator<Item = Packet<M>> {
        let meta = self.meta;
        self.touched = true;
        self.frames.iter_mut().filter_map(move |frame| Some(frame.take_xdp(meta)?.into_packet()))
    }

    /// Calls [`run`](Handler::run) for each frame that was not taken, and does what it decides:
    /// what the default of [`run_batch`](Handler::run_batch) does.
    ///
    /// If user code panics, the frame that it had is lost. The frames behind it are no longer
    /// counted if none was taken before: a driver delivers them again.
    #[inline(always)]
    pub fn run_each<H: Handler<M>>(&mut self, handler: &mut H) {
        let Self { frames, counts, meta, touched, ran } = self;
        let mut rest = Rest { row: [].iter_mut(), rows: frames.chunks_mut(ROW), counts, all: !(*touched || *ran) };
        let counted = std::mem::replace(ran, true);
        for row in rest.rows.by_ref() {
            rest.row = row.iter_mut();
            for frame in rest.row.by_ref() {
                let Some(mut xdp) = frame.take_xdp(*meta) else {
                    rest.counts.passed += u64::from(!counted);
                    continue;
                };
                let id = xdp.page().id();
                // One by one, those whose speed matters most first: see the receive paths.
                let verdict = handler.run(&mut xdp);
                if verdict == Verdict::Pass {
                    rest.counts.passed += 1;
                    handler.pass(xdp.into_packet());
                    continue;
                }
                if verdict == Verdict::Drop || verdict == Verdict::Aborted {
                    let counter =
                        if verdict == Verdict::Drop { &mut rest.counts.dropped } else { &mut rest.counts.aborted };
                    *counter += 1;
                    let page = xdp.into_page();
                    // The program can have left another page in the frame, or a part of the page.
                    if page.id() == id {
                        frame.page = Some(page);
                    } else {
                        page.release();
                    }
                    continue;
                }
                leave(handler, rest.counts, verdict, xdp);
            }
        }
    }
}

/// Not inlined, because it is rare.
#[inline(never)]
fn leave<M: Memory, H: Handler<M>>(handler: &mut H, counts: &mut FrameCounts, verdict: Verdict, frame: XdpFrame<M>) {
    if verdict == Verdict::Tx {
        counts.transmitted += 1;
        handler.tx(frame.into_packet());
    } else {
        counts.redirected += 1;
        handler.redirect(frame.into_packet());
    }
}

/// Frames in an inner loop of [`RxGroup::run_each`]. There are two loops, because a compiler takes
/// the inner one for hot, and inlines the drop of a packet there.
const ROW: usize = 16;

/// The frames for which the program was not run yet.
struct Rest<'r, M: Memory> {
    row: slice::IterMut<'r, RxFrame<M>>,
    rows: slice::ChunksMut<'r, RxFrame<M>>,
    counts: &'r mut FrameCounts,
    /// Whether all of them are there.
    all: bool,
}

impl<M: Memory> Drop for Rest<'_, M> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.row.len() + self.rows.len() > 0 {
            self.uncount();
        }
    }
}

impl<M: Memory> Rest<'_, M> {
    /// User code has panicked.
    #[cold]
    fn uncount(&mut self) {
        for frame in self.row.by_ref().chain(self.rows.by_ref().flatten()) {
            if self.all {
                self.counts.frames -= 1;
                self.counts.bytes -= u64::from(frame.len);
            } else if frame.page.is_none() {
                self.counts.passed += 1;
            }
        }
    }
}

impl<M: Memory> Drop for RxGroup<'_, M> {
    #[inline(always)]
    fn drop(&mut self) {
        if !self.ran {
            let left = self.frames.iter().filter(|frame| frame.page.is_some()).count();
            self.counts.dropped += left as u64;
            self.counts.passed += (self.frames.len() - left) as u64;
        }
    }
}

impl<M: Memory> fmt::Debug for RxGroup<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RxGroup({} frames, {:?})", self.len(), self.checksum())
    }
}

/// A frame in its place in an [`RxGroup`].
pub struct GroupFrame<'f, M: Memory> {
    frame: &'f mut RxFrame<M>,
    meta: Meta,
}

impl<M: Memory> GroupFrame<'_, M> {
    /// Bytes of the frame.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "an empty frame is of no interest")]
    pub fn len(&self) -> usize {
        self.frame.len()
    }

    /// Takes the frame as a packet. `None` if it was taken before.
    #[inline]
    pub fn take(&mut self) -> Option<Packet<M>> {
        Some(self.frame.take_xdp(self.meta)?.into_packet())
    }

    /// Takes the frame's page, with the bytes of the frame. `None` if it was taken before.
    #[inline]
    pub fn take_page(&mut self) -> Option<Page<M>> {
        let mut page = self.frame.page.take()?;
        page.advance(self.frame.start as usize);
        page.truncate(self.frame.len as usize);
        Some(page)
    }
}

impl<M: Mapped> GroupFrame<'_, M> {
    /// A private copy of `N` bytes of the frame, each read once.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if the frame is shorter, or was taken.
    #[inline]
    pub fn read_at<const N: usize>(&self, offset: usize) -> Result<[u8; N], OutOfRange> {
        OutOfRange::check(offset, N, self.len())?;
        let Some(page) = &self.frame.page else { return Err(OutOfRange { offset, len: N, have: 0 }) };
        page.read_at(self.frame.start as usize + offset)
    }
}

impl<M: Memory> fmt::Debug for GroupFrame<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupFrame({} bytes)", self.len())
    }
}
