//! Frames that arrive together: what a driver hands to a handler at a time.
//!
//! Why not a frame at a time: the driver's checks, counters and publications are then paid once for
//! up to 64 frames, and the handler's loop is the program's own. Why not a slice of frames: safe
//! code could exchange two of them, and the driver would post a page at the address of another.
//!
//! ```text
//!   driver   [ page | page |  --  | page | ... ]        its own array: a page, or nothing, in each
//!                 ▲
//!   RxGroup ──────┘  lent for one call; frames are read in place, or taken as packets
//!
//!   afterwards       a page that is still there was dropped, and is posted again in its place
//! ```

use crate::device::Handler;
use crate::meta::{Checksum, Meta};
use crate::packet::Packet;
use crate::xdp::{Verdict, XdpFrame};
use netmem_pool::{DataPage, Mapped, Memory, OutOfRange, Page};
use std::cell::Cell;
use std::{fmt, slice};

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
    /// Frames that were removed from their places. So many places of groups at least are empty
    /// afterwards, also if a handler forgets a group: a frame counts once its place stays empty.
    #[inline(always)]
    #[must_use]
    pub fn removed(&self) -> u64 {
        self.passed + self.transmitted + self.redirected
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
    frames: &'g mut [Option<DataPage<M>>],
    counts: &'g mut FrameCounts,
    meta: Meta,
    /// Frames that were taken.
    taken: Cell<u64>,
    /// Whether the verdicts were counted one by one.
    ran: bool,
}

impl<'g, M: Memory> RxGroup<'g, M> {
    /// A group of frames, each the data of its page, with `bytes` bytes in all. There is a page in
    /// each place. They are counted now, before any code of the handler runs: see
    /// [`run_each`](Self::run_each) for what is taken back. What became of them is counted when the
    /// group is dropped, also by a panic.
    ///
    /// Afterwards each place has no page, or the same bytes of the same page with the same
    /// headroom; only the length of the data may differ. This holds whatever the handler does, also
    /// if it panics, or forgets the group. `unsafe` code of drivers may rely on it. The counters
    /// are only right if the group is dropped, so that no `unsafe` code may rely on them.
    #[inline(always)]
    pub fn new(
        frames: &'g mut [Option<DataPage<M>>],
        bytes: u64,
        checksum: Checksum,
        counts: &'g mut FrameCounts,
    ) -> Self {
        counts.frames += frames.len() as u64;
        counts.bytes += bytes;
        Self { frames, counts, meta: Meta { checksum, gso: None }, taken: Cell::new(0), ran: false }
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
        let Self { frames, meta, taken, .. } = self;
        frames.iter_mut().filter(|frame| frame.is_some()).map(|frame| GroupFrame { frame, meta: *meta, taken })
    }

    /// Takes all frames that were not taken, as packets.
    #[inline]
    pub fn take_all(&mut self) -> impl Iterator<Item = Packet<M>> {
        self.frames().filter_map(|mut frame| frame.take())
    }

    /// Calls [`run`](Handler::run) for each frame that was not taken, and does what it decides:
    /// what the default of [`run_batch`](Handler::run_batch) does.
    ///
    /// If user code panics, the frame that it had is lost. The frames behind it are no longer
    /// counted if none was taken before: a driver delivers them again. A handler that catches the
    /// panic must not use the group any more: the group is at its end.
    #[inline(always)]
    pub fn run_each<H: Handler<M>>(&mut self, handler: &mut H) {
        let Self { frames, counts, meta, taken, ran } = self;
        let all = taken.get() == 0 && !*ran;
        if !std::mem::replace(ran, true) {
            counts.passed += taken.get();
        }
        let mut rest = Rest { row: [].iter_mut(), rows: frames.chunks_mut(ROW), counts, all };
        for row in rest.rows.by_ref() {
            rest.row = row.iter_mut();
            for place in rest.row.by_ref() {
                let Some(page) = place.take() else { continue };
                let (id, headroom) = (page.id(), page.headroom());
                let mut xdp = XdpFrame::from_page(page, *meta);
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
                    let mut page = xdp.into_data_page();
                    // The program can have left another page in the frame, or a part of the page.
                    if page.id() == id && page.set_data(headroom, 0).is_ok() {
                        *place = Some(page);
                    } else {
                        page.into_page().release();
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
    row: slice::IterMut<'r, Option<DataPage<M>>>,
    rows: slice::ChunksMut<'r, Option<DataPage<M>>>,
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
        if !self.all {
            return;
        }
        for page in self.row.by_ref().chain(self.rows.by_ref().flatten()).flatten() {
            self.counts.frames -= 1;
            self.counts.bytes -= page.data().len() as u64;
        }
    }
}

impl<M: Memory> Drop for RxGroup<'_, M> {
    #[inline(always)]
    fn drop(&mut self) {
        if !self.ran {
            self.counts.dropped += self.frames.len() as u64 - self.taken.get();
            self.counts.passed += self.taken.get();
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
    frame: &'f mut Option<DataPage<M>>,
    meta: Meta,
    taken: &'f Cell<u64>,
}

impl<M: Memory> GroupFrame<'_, M> {
    /// Bytes of the frame. 0 if it was taken.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "an empty frame is of no interest")]
    pub fn len(&self) -> usize {
        self.frame.as_ref().map_or(0, |page| page.data().len())
    }

    /// Takes the frame as a packet. `None` if it was taken before.
    #[inline]
    pub fn take(&mut self) -> Option<Packet<M>> {
        let mut packet = Packet::from(self.take_page()?);
        packet.meta = self.meta;
        Some(packet)
    }

    /// Takes the frame's page, with the bytes of the frame. `None` if it was taken before.
    #[inline(always)]
    pub fn take_page(&mut self) -> Option<Page<M>> {
        let page = self.frame.take()?;
        self.taken.set(self.taken.get() + 1);
        Some(page.into_data())
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
        let Some(page) = &*self.frame else { return Err(OutOfRange { offset, len: N, have: 0 }) };
        page.data().read_at(offset)
    }
}

impl<M: Memory> fmt::Debug for GroupFrame<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupFrame({} bytes)", self.len())
    }
}
