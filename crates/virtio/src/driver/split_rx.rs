//! A receive queue of frames whose headers are in host memory and whose payload is in device memory.

use super::Link;
use super::alive::Quiet;
use super::receive::{Header, Pools, Receive, Sink};
use super::restart::{Stop, Stopped};
use super::ring::RingHandle;
use super::split_buffers::{SplitBuffers, SplitNapi, SplitPools};
use super::stats::{RxStats, state};
use crate::net::VnetHdr;
use netmem_packet::{Armed, SplitFrame, SplitHandler, Wait};
use netmem_pool::{Device, Napi, Page, PeerMemory, PeerShared, PoolClosed, PoolStats, Provider};
use std::fmt;
use std::io;
use std::sync::Arc;

/// The options of a queue of split frames. Start with [`SplitOptions::new`].
#[derive(Clone, Debug)]
pub struct SplitOptions {
    pub(super) provider: Arc<dyn Provider<Device>>,
    pub(super) header_bytes: u16,
    pub(super) cache: usize,
    pub(super) keeps_receiving: bool,
}

impl SplitOptions {
    /// Headers of UDP over IPv4: Ethernet, IPv4 without options, UDP.
    pub const UDP_V4: u16 = 14 + 20 + 8;
    /// Headers of UDP over IPv6: Ethernet, IPv6 without extensions, UDP.
    pub const UDP_V6: u16 = 14 + 40 + 8;
    /// Headers of TCP over IPv4 with all options of TCP: Ethernet, IPv4 without options, 60 bytes of TCP.
    pub const TCP_V4: u16 = 14 + 20 + 60;
    /// Headers of TCP over IPv6 with all options of TCP: Ethernet, IPv6 without extensions, 60 bytes of TCP.
    pub const TCP_V6: u16 = 14 + 40 + 60;
    /// Pages of device memory in a pool's array cache, unless the caller asks for another number.
    pub(super) const CACHE: usize = 512;
    /// The most bytes of headers in a host part.
    pub(super) const MOST: u16 = 1024 - VnetHdr::LEN as u16;

    /// Payload goes to pages of `provider`. The host parts have room for 114 bytes of each frame ([`TCP_V6`](Self::TCP_V6)), which is enough
    /// for the headers of TCP and of UDP over both IPs.
    #[must_use]
    pub fn new(provider: Arc<dyn Provider<Device>>) -> Self {
        Self { provider, header_bytes: Self::TCP_V6, cache: Self::CACHE, keeps_receiving: false }
    }

    /// How many bytes of a frame the host parts have room for. Choose the longest headers of the frames that are
    /// steered to this queue. From 14 to 1012; 114 by default. If the headers of a TCP frame are longer, it cannot be
    /// received, because the rest of its headers is in device memory.
    ///
    /// Our own [device](crate::device) splits a TCP or UDP frame behind its headers, if they fit; a frame without
    /// payload, and one of another protocol, goes to the host part as far as there is room. A foreign device does not
    /// parse headers. It fills the host part and then the pages. If headers are shorter than the host part, the first
    /// bytes of payload are in the host part. For a queue that receives only datagrams on such a device, use
    /// [`UDP_V4`](Self::UDP_V4) or [`UDP_V6`](Self::UDP_V6), so that the whole payload is in device memory.
    #[must_use]
    pub fn header_bytes(mut self, bytes: u16) -> Self {
        self.header_bytes = bytes;
        self
    }

    /// Whether frames are received also when no page of device memory is left: their payload is then dropped, and
    /// counted ([`RxStats::payload_dropped`](super::RxStats::payload_dropped), [`SplitFrame::lost`]). Use this for TCP:
    /// acknowledgements and window updates must be received in any case, and the peer sends lost payload again. Up to 4
    /// such buffers are posted while the device has no others; one page is set aside for what is dropped. By default a
    /// queue without pages posts no buffers, and its frames wait in the device or are dropped there.
    #[must_use]
    pub fn keep_receiving(mut self, keep: bool) -> Self {
        self.keeps_receiving = keep;
        self
    }

    /// Pages of device memory in the pool's array cache; 512 by default.
    #[must_use]
    pub fn cache(mut self, pages: usize) -> Self {
        self.cache = pages;
        self
    }
}

/// The final counters of a queue's pools.
#[derive(Clone, Copy, Debug)]
#[must_use]
#[non_exhaustive]
pub struct SplitClosed {
    /// The pool of host parts, in pages of host memory.
    pub host: PoolClosed,
    /// The pool of device memory.
    pub device: PoolClosed,
}

/// A receive queue of [`SplitFrame`]s: made from a [`VirtioRx`](super::VirtioRx) by a
/// [restart](super::VirtioRx::restart_split).
///
/// Dropping it stops the ring: once the device has confirmed that, posted pages are returned to their pool; if it does
/// not, they are quarantined, also those of device memory, because the back end may still write to them.
#[must_use = "a queue stops when it is dropped"]
pub struct VirtioSplitRx<M: PeerMemory = PeerShared> {
    pools: Option<SplitPools<M>>,
    ring: Receive<SplitBuffers<M>>,
    index: usize,
    quiet: Quiet,
    link: Arc<Link<M>>,
}

impl<M: PeerMemory> VirtioSplitRx<M> {
    pub(super) fn new(ring: RingHandle, pools: SplitPools<M>, index: usize, link: Arc<Link<M>>) -> Self {
        let ring = Receive::new(ring, SplitBuffers::new(&link.recipe, &pools), Header::Offloads, link.recipe.offloads);
        let mut this = Self { pools: Some(pools), ring, index, quiet: Quiet::default(), link };
        // A queue is full before its first poll.
        this.poll(|poll| poll.ring.refill(&mut poll.napi));
        this
    }

    /// Runs `f` in the poll contexts of both pools, on this thread: heads and payload that are dropped inside return to
    /// the pools' caches.
    #[inline]
    pub fn poll<R>(&mut self, f: impl FnOnce(&mut SplitPoll<'_, M>) -> R) -> R {
        if self.link.has_replaced(self.ring()) {
            self.adopt();
        }
        if self.quiet.is_due() {
            self.link.look();
        }
        let Self { pools, ring, quiet, .. } = self;
        let pools = pools.as_mut().expect("the pools are there until the queue is stopped, which consumes it");
        pools.poll(|napi| f(&mut SplitPoll { ring, quiet, napi: napi.reborrow() }))
    }

    /// Takes the ring of the device's new connection.
    #[cold]
    fn adopt(&mut self) {
        let Self { pools: Some(pools), ring, index, link, .. } = self else { return };
        let Some(new) = link.take_ring(*index) else { return };
        pools.poll(|napi| ring.adopt(new, napi));
    }

    /// The queue's counters. Every delivered frame counts as passed. A frame with payload in device memory counts as a
    /// frame of several buffers.
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

    /// Whether the device splits frames behind their headers, as our own does. If not, it fills the host part first.
    #[must_use]
    pub fn splits_headers(&self) -> bool {
        self.ring.ring().handle().splits()
    }

    /// Stops the queue, takes back or quarantines what was posted, and closes the pools.
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

    fn link(&self) -> &Arc<Link<M>> {
        &self.link
    }

    fn ring(&self) -> &RingHandle {
        self.ring.ring().handle()
    }

    fn stop(&mut self) -> Option<Stopped<SplitClosed>> {
        self.ring.stop(self.pools.take()?, &self.link, self.index)
    }
}

impl<M: PeerMemory> Drop for VirtioSplitRx<M> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<M: PeerMemory> fmt::Debug for VirtioSplitRx<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioSplitRx({}, {})", self.index, state(self.stats().stopped))
    }
}

/// See [`Wait`]. A queue that lacks pages for the next frame does not wait.
impl<M: PeerMemory> Wait for VirtioSplitRx<M> {
    fn arm(&mut self) -> io::Result<Armed> {
        self.link.arm_receive(self.index, &mut self.ring)
    }

    fn disarm(&mut self) {
        self.ring.ring_mut().disarm();
    }

    /// The error is a [`QueueStopped`](super::QueueStopped).
    fn check(&self) -> io::Result<()> {
        self.link.check(self.index, self.ring(), self.stats().stopped)
    }
}

/// The inside of a [poll](VirtioSplitRx::poll).
pub struct SplitPoll<'a, M: PeerMemory = PeerShared> {
    ring: &'a mut Receive<SplitBuffers<M>>,
    quiet: &'a mut Quiet,
    napi: SplitNapi<'a, M>,
}

impl<M: PeerMemory> SplitPoll<'_, M> {
    /// Receives up to `budget` frames, gives each to `handler`, and posts new chains. Returns how many frames there were.
    pub fn receive<H: SplitHandler<M>>(&mut self, budget: usize, handler: &mut H) -> usize {
        let frames = self.ring.receive(&mut self.napi, budget, &mut Frames(handler));
        self.quiet.count(frames);
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
struct Frames<'h, H>(&'h mut H);

impl<M: PeerMemory, H: SplitHandler<M>> Sink<SplitBuffers<M>> for Frames<'_, H> {
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
