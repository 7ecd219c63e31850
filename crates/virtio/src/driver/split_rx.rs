//! A receive queue of frames whose headers are in host memory and whose payload is in device
//! memory.

use super::buffer_layout::HeaderFields;
use super::buffers::{FrameSink, Pools};
use super::idle::IdleCounter;
use super::receive::Receive;
use super::ring::RingHandle;
use super::split_buffers::{SplitBuffers, SplitNapi, SplitPools};
use super::split_options::SplitClosed;
use super::state::DriverState;
use super::stats::{RxStats, state_name};
use super::stop::{Stop, Stopped};
use netmem_packet::{Armed, SplitFrame, SplitHandler, Wait};
use netmem_pool::{Device, Napi, Page, PeerMemory, PeerShared, PoolStats};
use std::fmt;
use std::io;
use std::sync::Arc;

/// A receive queue of [`SplitFrame`]s: made from a [`VirtioRx`](super::VirtioRx) by a
/// [restart](super::VirtioRx::restart_split).
///
/// Dropping it stops the ring: once the device has confirmed that, posted pages are returned to
/// their pool; if it does not, they are quarantined, also those of device memory, because the back
/// end may still write to them.
#[must_use = "a queue stops when it is dropped"]
pub struct VirtioSplitRx<M: PeerMemory = PeerShared> {
    pools: Option<SplitPools<M>>,
    ring: Receive<SplitBuffers<M>>,
    index: usize,
    idle: IdleCounter,
    state: Arc<DriverState<M>>,
}

impl<M: PeerMemory> VirtioSplitRx<M> {
    pub(super) fn new(ring: RingHandle, pools: SplitPools<M>, index: usize, state: Arc<DriverState<M>>) -> Self {
        let ring =
            Receive::new(ring, SplitBuffers::new(&state.config, &pools), HeaderFields::Offloads, state.config.offloads);
        let mut this = Self { pools: Some(pools), ring, index, idle: IdleCounter::default(), state };
        // A queue is full before its first poll.
        this.poll(|poll| poll.ring.refill(&mut poll.napi));
        this
    }

    /// Runs `f` in the poll contexts of both pools, on this thread: heads and payload that are
    /// dropped inside return to the pools' caches.
    #[inline]
    pub fn poll<R>(&mut self, f: impl FnOnce(&mut SplitPoll<'_, M>) -> R) -> R {
        if self.state.has_replaced(self.ring()) {
            self.adopt();
        }
        if self.idle.is_due() {
            self.state.try_check_connection();
        }
        let Self { pools, ring, idle, .. } = self;
        let pools = pools.as_mut().expect("the pools are there until the queue is stopped, which consumes it");
        pools.poll(|napi| f(&mut SplitPoll { ring, idle, napi: napi.reborrow() }))
    }

    /// Switches to the ring of the device's new connection.
    #[cold]
    fn adopt(&mut self) {
        let Self { pools: Some(pools), ring, index, state, .. } = self else { return };
        let Some(new) = state.take_ring(*index) else { return };
        pools.poll(|napi| ring.adopt(new, napi));
    }

    /// As [`VirtioRx::is_connected`](super::VirtioRx::is_connected).
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.state.is_connected()
    }

    /// The queue's counters. Every delivered frame counts as passed. A frame with payload in device
    /// memory counts as a frame of several buffers.
    #[must_use]
    pub fn stats(&self) -> RxStats {
        self.ring.stats()
    }

    /// The counters of the two pools: host memory, device memory.
    pub fn pool_stats(&mut self) -> (PoolStats, PoolStats) {
        self.pools.as_mut().map(SplitPools::stats).unwrap_or_default()
    }

    /// Chains that the device has: each a host part and pages of device memory.
    #[must_use]
    pub fn posted(&self) -> usize {
        self.ring.posted()
    }

    /// Bytes of a frame that the host parts have room for.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        self.ring.buffers().header_bytes()
    }

    /// Whether the device splits frames behind their headers, as our own does. If not, it fills the
    /// host part first.
    #[must_use]
    pub fn splits_headers(&self) -> bool {
        self.ring.ring().handle().splits()
    }

    /// Stops the queue, recovers or quarantines what was posted, and closes the pools.
    pub fn close(mut self) -> Option<SplitClosed> {
        self.stop().map(|stopped| stopped.closed)
    }
}

impl<M: PeerMemory> Stop for VirtioSplitRx<M> {
    type Mem = M;
    type PoolClosed = SplitClosed;
    const SPLIT: bool = true;

    fn index(&self) -> usize {
        self.index
    }

    fn state(&self) -> &Arc<DriverState<M>> {
        &self.state
    }

    fn ring(&self) -> &RingHandle {
        self.ring.ring().handle()
    }

    fn stop(&mut self) -> Option<Stopped<SplitClosed>> {
        self.ring.stop(self.pools.take()?, &self.state, self.index)
    }
}

impl<M: PeerMemory> Drop for VirtioSplitRx<M> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<M: PeerMemory> fmt::Debug for VirtioSplitRx<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioSplitRx({}, {})", self.index, state_name(self.stats().stopped))
    }
}

/// See [`Wait`]. A queue that lacks pages for the next frame does not wait.
impl<M: PeerMemory> Wait for VirtioSplitRx<M> {
    fn arm(&mut self) -> io::Result<Armed> {
        self.state.arm_receive(self.index, &mut self.ring)
    }

    fn disarm(&mut self) {
        self.ring.ring_mut().disarm();
    }

    /// The error is a [`QueueStopped`](super::QueueStopped).
    fn check(&self) -> io::Result<()> {
        self.state.check(self.index, self.ring(), self.stats().stopped)
    }
}

/// The inside of a [poll](VirtioSplitRx::poll).
pub struct SplitPoll<'a, M: PeerMemory = PeerShared> {
    ring: &'a mut Receive<SplitBuffers<M>>,
    idle: &'a mut IdleCounter,
    napi: SplitNapi<'a, M>,
}

impl<M: PeerMemory> SplitPoll<'_, M> {
    /// Receives up to `budget` frames, passes each to `handler`, and posts new chains. Returns how
    /// many frames there were.
    pub fn receive<H: SplitHandler<M>>(&mut self, budget: usize, handler: &mut H) -> usize {
        let frames = self.ring.receive(&mut self.napi, budget, &mut SplitHandlerSink(handler));
        self.idle.count(frames);
        frames
    }

    /// Runs `f` with the pools' poll contexts, to allocate from them.
    pub fn with_napi<R>(&mut self, f: impl FnOnce(&mut Napi<'_, M>, &mut Napi<'_, Device>) -> R) -> R {
        f(&mut self.napi.host, &mut self.napi.device)
    }
}

impl<M: PeerMemory> fmt::Debug for SplitPoll<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SplitPoll")
    }
}

/// A handler as the sink of a queue.
struct SplitHandlerSink<'h, H>(&'h mut H);

impl<M: PeerMemory, H: SplitHandler<M>> FrameSink<SplitBuffers<M>> for SplitHandlerSink<'_, H> {
    #[inline(always)]
    fn deliver(&mut self, stats: &mut RxStats, _: &mut SplitNapi<'_, M>, frame: SplitFrame<M>) -> Option<Page<M>> {
        stats.frames += 1;
        stats.passed += 1;
        stats.bytes += frame.len() as u64;
        stats.payload_dropped += u64::from(frame.lost() > 0);
        self.0.frame(frame);
        None
    }

    #[inline(always)]
    fn flush(&mut self) {
        self.0.flush();
    }
}
