//! The receive queue of host memory, in small, mergeable or big-packet mode.

use super::big_buffers::BigBuffers;
use super::buffer_layout::HeaderFields;
use super::deliver::HandlerSink;
use super::idle::IdleCounter;
use super::page_buffers::PageBuffers;
use super::receive::Receive;
use super::ring::RingHandle;
use super::state::DriverState;
use super::stats::{RxStats, state_name};
use super::stop::{Stop, Stopped};
use netmem_packet::{Armed, Handler, Poll, RxQueue, Wait};
use netmem_pool::{Napi, PagePool, PeerMemory, PeerShared, PoolClosed, PoolStats};
use std::fmt;
use std::io;
use std::sync::Arc;

/// The queue without its pool, by the layout of its buffers.
enum Ring<M: PeerMemory> {
    /// Small or mergeable mode.
    Pages(Receive<PageBuffers<M>>),
    /// Big-packet mode.
    Big(Receive<BigBuffers<M>>),
}

/// Evaluates `$do` for the queue of either layout.
macro_rules! each {
    ($ring:expr, $rx:ident => $do:expr) => {
        match $ring {
            Ring::Pages($rx) => $do,
            Ring::Big($rx) => $do,
        }
    };
}

/// A receive queue. See [`RxQueue::poll`].
///
/// Dropping it stops the ring: once the device has confirmed that, posted pages are returned to
/// their pool; if it does not, they are quarantined.
#[must_use = "a queue stops when it is dropped"]
pub struct VirtioRx<M: PeerMemory = PeerShared> {
    pool: Option<PagePool<M>>,
    ring: Ring<M>,
    index: usize,
    idle: IdleCounter,
    /// The queue is [short](Poll::is_short) if fewer buffers are posted than this: a quarter of
    /// those that were posted at first.
    reserve: usize,
    state: Arc<DriverState<M>>,
}

impl<M: PeerMemory> VirtioRx<M> {
    pub(super) fn new(ring: RingHandle, pool: PagePool<M>, index: usize, state: Arc<DriverState<M>>) -> Self {
        let config = &state.config;
        let ring = match &config.big {
            Some(pages) => {
                let buffers = BigBuffers::new(pages.clone(), config, config.max_frame);
                Ring::Big(Receive::new(ring, buffers, HeaderFields::Offloads, config.offloads))
            }
            None => {
                let buffers = PageBuffers::new(config, &pool);
                Ring::Pages(Receive::new(ring, buffers, config.header, config.offloads))
            }
        };
        Self::filled(ring, pool, index, state)
    }

    /// Buffers are posted before the first poll.
    fn filled(ring: Ring<M>, pool: PagePool<M>, index: usize, state: Arc<DriverState<M>>) -> Self {
        let mut this = Self { pool: Some(pool), ring, index, idle: IdleCounter::default(), reserve: 0, state };
        this.poll(|RxPoll { ring, napi, .. }| each!(ring, rx => rx.refill(napi)));
        this.reserve = each!(&this.ring, rx => rx.posted()).div_ceil(4);
        this
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> RxStats {
        each!(&self.ring, rx => rx.stats())
    }

    /// The counters of the queue's pool.
    pub fn pool_stats(&mut self) -> PoolStats {
        self.pool.as_mut().map(PagePool::stats).unwrap_or_default()
    }

    /// Pages that the device has.
    #[must_use]
    pub fn posted(&self) -> usize {
        match &self.ring {
            Ring::Pages(rx) => rx.posted(),
            Ring::Big(rx) => rx.posted() * rx.buffers().pages(),
        }
    }

    /// Whether the device has not been seen to end. If it has, nothing more is received until
    /// [`VirtioNet::reconnect`](super::VirtioNet::reconnect). Cost: two loads. The connection is
    /// checked once in 65,536 polls that find nothing, and whenever its end wakes a thread that
    /// waits for the queue.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.state.is_connected()
    }

    /// Switches to the ring of the device's new connection.
    #[cold]
    fn adopt(&mut self) {
        let Self { pool: Some(pool), ring, index, state, .. } = self else { return };
        let Some(new) = state.take_ring(*index) else { return };
        pool.poll(|napi| each!(ring, rx => rx.adopt(new, napi)));
    }

    /// Stops the queue, recovers or quarantines what was posted, and closes the pool.
    pub fn close(mut self) -> Option<PoolClosed> {
        self.stop().map(|stopped| stopped.closed)
    }

    /// As [`close`](Self::close), with the final counters: frames that were not polled are among
    /// [`RxStats::unread`].
    #[must_use]
    pub fn close_counted(mut self) -> (RxStats, Option<PoolClosed>) {
        let stopped = self.stop();
        let mut stats = self.stats();
        stats.unread += stopped.as_ref().map_or(0, |stopped| stopped.unread.into());
        (stats, stopped.map(|stopped| stopped.closed))
    }
}

impl<M: PeerMemory> Stop for VirtioRx<M> {
    type Mem = M;
    type PoolClosed = PoolClosed;
    const SPLIT: bool = false;

    fn index(&self) -> usize {
        self.index
    }

    fn state(&self) -> &Arc<DriverState<M>> {
        &self.state
    }

    fn ring(&self) -> &RingHandle {
        each!(&self.ring, rx => rx.ring().handle())
    }

    fn stop(&mut self) -> Option<Stopped<PoolClosed>> {
        let pool = self.pool.take()?;
        let mut stopped = each!(&mut self.ring, rx => rx.stop(pool, &self.state, self.index))?;
        if let Ring::Big(rx) = &self.ring {
            // Quarantined pages from no pool are counted in addition to those of the pool.
            stopped.closed.stats.alloc_slow += rx.buffers().lost();
            stopped.closed.stats.quarantined += rx.buffers().lost();
        }
        Some(stopped)
    }
}

impl<M: PeerMemory> Drop for VirtioRx<M> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<M: PeerMemory> fmt::Debug for VirtioRx<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioRx({}, {})", self.index, state_name(self.stats().stopped))
    }
}

/// See [`Wait`]. A queue that lacks pages for the next frame does not wait.
impl<M: PeerMemory> Wait for VirtioRx<M> {
    fn arm(&mut self) -> io::Result<Armed> {
        each!(&mut self.ring, rx => self.state.arm_receive(self.index, rx))
    }

    fn disarm(&mut self) {
        each!(&mut self.ring, rx => rx.ring_mut().disarm());
    }

    /// The error is a [`QueueStopped`](super::QueueStopped).
    fn check(&self) -> io::Result<()> {
        self.state.check(self.index, self.ring(), self.stats().stopped)
    }
}

/// The inside of a [poll](RxQueue::poll) of a [`VirtioRx`].
pub struct RxPoll<'a, M: PeerMemory = PeerShared> {
    ring: &'a mut Ring<M>,
    idle: &'a mut IdleCounter,
    reserve: usize,
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
        if self.state.has_replaced(self.ring()) {
            self.adopt();
        }
        if self.idle.is_due() {
            self.state.try_check_connection();
        }
        let Self { pool, ring, idle, reserve, .. } = self;
        let pool = pool.as_mut().expect("the pool is there until the queue is stopped, which consumes it");
        pool.poll(|napi| f(&mut RxPoll { ring, idle, reserve: *reserve, napi: napi.reborrow() }))
    }
}

impl<M: PeerMemory> Poll for RxPoll<'_, M> {
    type Mem = M;

    fn receive<H: Handler<M>>(&mut self, budget: usize, handler: &mut H) -> usize {
        let frames = each!(self.ring, rx => rx.receive(&mut self.napi, budget, &mut HandlerSink(handler)));
        self.idle.count(frames);
        frames
    }

    #[inline]
    fn is_short(&self) -> bool {
        each!(&*self.ring, rx => rx.posted()) < self.reserve
    }

    fn with_napi<R>(&mut self, f: impl FnOnce(&mut Napi<'_, M>) -> R) -> R {
        f(&mut self.napi)
    }
}
