//! A receive queue whose frames are those of a capture.

use super::file::{Capture, Play, Position};
use crate::device::{Handler, Poll, RxQueue};
use crate::frags::MAX_FRAGS;
use crate::group::FrameCounts;
use crate::wait::{Armed, Wait};
use crate::xdp::{Verdict, XdpFrame};
use netmem_pool::{Mapped, Napi, PagePool};
use rustix::event::{EventfdFlags, eventfd};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bytes in front of a frame, as AF_XDP leaves them.
const HEADROOM: usize = 256;

/// The counters of a [`PcapRx`]. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PcapRxStats {
    /// The frames that were received, by the verdicts of the handler's program.
    pub counts: FrameCounts,
    /// How often the pool had no page. The frame stays the next one.
    pub out_of_buffers: u64,
    /// Frames that are longer than the pages of the pool can have it: they were dropped.
    pub too_long: u64,
    /// Frames that the handler needs in one buffer, and that did not fit one page, or for which
    /// there was no page: they were dropped.
    pub not_linear: u64,
}

/// A receive queue whose frames are those of a [`Capture`]: copied into pages of a pool, with 256
/// bytes of headroom, one after the other, as fast as they are polled. Recorded times are ignored.
///
/// A frame longer than a page has fragments. Checksums are unknown, as a capture does not report
/// them. A poll makes no system calls and allocates nothing but pages.
///
/// ```
/// use netmem_packet::{Capture, Packet, PcapRx, PcapTx, Play, Poll, RxQueue, TxQueue};
/// use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let file = dir.path().join("a.pcapng");
/// let memory = RegionProvider::new(RegionOptions::new(64).huge_pages(false).build::<Private>()?);
/// let mut pool = PoolOptions::new("frames").build(memory.clone(), None)?;
/// // Written,
/// let mut tx = PcapTx::create(&file)?;
/// let mut page = pool.alloc().expect("a page");
/// page.as_mut_slice()[..60].fill(7);
/// tx.send(Packet::new(page.freeze_range(0..60))).expect("a frame without offloads");
/// tx.close()?;
/// // and read.
/// let mut rx = PcapRx::new(Capture::open(&file)?, Play::Once, pool)?;
/// let mut lengths = Vec::new();
/// rx.poll(|poll| poll.receive(256, &mut |packet: Packet<Private>| lengths.push(packet.len())));
/// assert_eq!(lengths, [60]);
/// assert!(rx.is_done());
/// # Ok(())
/// # }
/// ```
pub struct PcapRx<M: Mapped> {
    pool: PagePool<M>,
    source: Source,
    /// Never readable: a queue with frames does not let its owner sleep.
    fd: OwnedFd,
}

struct Source {
    position: Position,
    stats: PcapRxStats,
}

/// Why a frame is not in pages.
enum NotBuilt {
    NoPage,
    TooLong,
}

impl<M: Mapped> PcapRx<M> {
    /// A queue that receives the frames of `capture` into pages of `pool`.
    ///
    /// # Errors
    ///
    /// The system has no descriptor left, which [`Wait`] needs.
    pub fn new(capture: Capture, play: Play, pool: PagePool<M>) -> io::Result<Self> {
        let source = Source { position: Position::new(capture, play), stats: PcapRxStats::default() };
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { pool, source, fd })
    }

    /// Whether all frames were received ([`Play::Once`]).
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.source.position.is_done()
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> PcapRxStats {
        self.source.stats
    }

    /// Ends the queue, and returns its pool.
    #[must_use]
    pub fn into_pool(self) -> PagePool<M> {
        self.pool
    }
}

impl Source {
    fn receive<M: Mapped, H: Handler<M>>(&mut self, napi: &mut Napi<'_, M>, budget: usize, handler: &mut H) -> usize {
        let mut done = 0;
        while done < budget {
            let Some(bytes) = self.position.frame() else { break };
            let built = build(napi, bytes);
            if matches!(built, Err(NotBuilt::NoPage)) {
                self.stats.out_of_buffers += 1;
                break;
            }
            // Before the handler runs, which may panic.
            self.position.advance();
            done += 1;
            match built {
                Ok(frame) => self.deliver(napi, frame, handler),
                Err(_) => self.stats.too_long += 1,
            }
        }
        handler.flush();
        done
    }

    fn deliver<M: Mapped, H: Handler<M>>(&mut self, napi: &mut Napi<'_, M>, mut frame: XdpFrame<M>, handler: &mut H) {
        if H::LINEAR && frame.linearise(napi).is_err() {
            self.stats.not_linear += 1;
            return;
        }
        let counts = &mut self.stats.counts;
        counts.frames += 1;
        counts.bytes += frame.len() as u64;
        match handler.run(&mut frame) {
            Verdict::Pass => {
                counts.passed += 1;
                handler.pass(frame.into_packet());
            }
            Verdict::Tx => {
                counts.transmitted += 1;
                handler.tx(frame.into_packet());
            }
            Verdict::Redirect => {
                counts.redirected += 1;
                handler.redirect(frame.into_packet());
            }
            Verdict::Drop => counts.dropped += 1,
            Verdict::Aborted => counts.aborted += 1,
        }
    }
}

/// Copies a frame into pages.
fn build<M: Mapped>(napi: &mut Napi<'_, M>, bytes: &[u8]) -> Result<XdpFrame<M>, NotBuilt> {
    let mut page = napi.alloc().ok_or(NotBuilt::NoPage)?;
    let start = HEADROOM.min(page.len() / 2);
    let (head, mut rest) = bytes.split_at(bytes.len().min(page.len() - start));
    if rest.len().div_ceil(page.len()) > MAX_FRAGS {
        return Err(NotBuilt::TooLong);
    }
    let fits = "a part of a frame is no longer than its page";
    page.copy_from(start, head).expect(fits);
    let mut frame = XdpFrame::new(page, start, head.len());
    while !rest.is_empty() {
        let mut page = napi.alloc().ok_or(NotBuilt::NoPage)?;
        let (part, behind) = rest.split_at(rest.len().min(page.len()));
        page.copy_from(0, part).expect(fits);
        frame.push(page.freeze_range(0..part.len())).map_err(|_| NotBuilt::TooLong)?;
        rest = behind;
    }
    Ok(frame)
}

impl<M: Mapped> fmt::Debug for PcapRx<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PcapRx").field("stats", &self.source.stats).finish_non_exhaustive()
    }
}

/// The inside of a [poll](RxQueue::poll) of a [`PcapRx`].
pub struct PcapPoll<'a, M: Mapped> {
    source: &'a mut Source,
    napi: Napi<'a, M>,
}

impl<M: Mapped> fmt::Debug for PcapPoll<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PcapPoll")
    }
}

impl<M: Mapped> RxQueue for PcapRx<M> {
    type Mem = M;
    type Poll<'a>
        = PcapPoll<'a, M>
    where
        Self: 'a;

    fn poll<R>(&mut self, f: impl FnOnce(&mut PcapPoll<'_, M>) -> R) -> R {
        let Self { pool, source, .. } = self;
        pool.poll(|napi| f(&mut PcapPoll { source, napi: napi.reborrow() }))
    }
}

impl<M: Mapped> Poll for PcapPoll<'_, M> {
    type Mem = M;

    fn receive<H: Handler<M>>(&mut self, budget: usize, handler: &mut H) -> usize {
        self.source.receive(&mut self.napi, budget, handler)
    }

    fn with_napi<R>(&mut self, f: impl FnOnce(&mut Napi<'_, M>) -> R) -> R {
        f(&mut self.napi)
    }
}

impl<M: Mapped> AsFd for PcapRx<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// There is work until all frames were received. Then the queue has stopped:
/// [`UnexpectedEof`](io::ErrorKind::UnexpectedEof).
impl<M: Mapped> Wait for PcapRx<M> {
    fn arm(&mut self) -> io::Result<Armed> {
        self.check().map(|()| Armed::Work)
    }

    fn disarm(&mut self) {}

    fn check(&self) -> io::Result<()> {
        let ended = || io::Error::new(io::ErrorKind::UnexpectedEof, "all frames of the capture were received");
        if self.is_done() { Err(ended()) } else { Ok(()) }
    }
}
