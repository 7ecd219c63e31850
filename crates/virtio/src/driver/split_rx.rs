//! Header split: a receive queue whose buffers are chains of a host part and a page of device memory (MEM-11). Any device
//! fills a chain in order, and so the first bytes of every frame land where they can be read.
//!
//! ```text
//!   descriptor  2c ──────────────────────► 2c+1                fixed; only the addresses change
//!               host part                  device page
//!               ├ header 12 B │ N bytes ┤  ├ the rest of the frame ... ┤
//!               a 64th of a host page      a page that this process never maps
//! ```
//!
//! A frame that ends in the host part takes that alone; the device page stays with its chain and is posted again.

use super::frame::{BATCH, ETHERNET, meta, prefetch, refused};
use super::panics::Panics;
use super::restart::{Stop, Stopped};
use super::ring::{DriverRing, Moves};
use super::rx::part;
use super::stats::{DeviceFault, RxStats, state};
use super::{Link, NetError, Recipe};
use crate::net::{Offloads, VnetHdr};
use netmem_packet::{SplitFrame, SplitHandler};
use netmem_pool::{Device, Napi, Page, PagePool, PeerMemory, PeerShared, PoolClosed, PoolOptions, PoolStats, Provider};
use std::fmt;
use std::sync::Arc;

/// What a queue of split frames is made of. Start with [`SplitOptions::new`].
#[derive(Clone, Debug)]
pub struct SplitOptions {
    provider: Arc<dyn Provider<Device>>,
    header_bytes: u16,
    cache: usize,
}

impl SplitOptions {
    /// Headers of UDP over IPv4: Ethernet, IPv4 without options, UDP.
    pub const UDP_V4: u16 = 14 + 20 + 8;
    /// Headers of UDP over IPv6: Ethernet, IPv6 without extensions, UDP.
    pub const UDP_V6: u16 = 14 + 40 + 8;
    /// Pages of device memory in a pool's array cache, unless the caller asks for another number.
    pub(super) const CACHE: usize = 512;
    /// The most bytes of headers in a host part.
    const MOST: u16 = 1024 - VnetHdr::LEN as u16;

    /// Payload goes to pages of `provider`; 42 bytes of each frame go to host memory.
    #[must_use]
    pub fn new(provider: Arc<dyn Provider<Device>>) -> Self {
        Self { provider, header_bytes: Self::UDP_V4, cache: Self::CACHE }
    }

    /// How many bytes of each frame go to host memory: as many as the headers have of the frames that are steered to this
    /// queue, so that payload begins with the device page. From 14 to 1012.
    #[must_use]
    pub fn header_bytes(mut self, bytes: u16) -> Self {
        self.header_bytes = bytes;
        self
    }

    /// Pages of device memory in the pool's array cache; 512 unless said otherwise.
    #[must_use]
    pub fn cache(mut self, pages: usize) -> Self {
        self.cache = pages;
        self
    }
}

/// What a queue of split frames receives into.
pub(super) struct SplitPools<M: PeerMemory> {
    host: PagePool<M>,
    device: PagePool<Device>,
    header_bytes: u16,
}

impl<M: PeerMemory> SplitPools<M> {
    /// The pools of queue pair `pair`, with as many pages at hand as the ring takes.
    pub(super) fn new(recipe: &Recipe<M>, pair: usize, o: &SplitOptions) -> Result<Self, NetError> {
        let (min, max) = (ETHERNET as u16, SplitOptions::MOST);
        if !(min..=max).contains(&o.header_bytes) {
            return Err(NetError::HeaderBytes { asked: o.header_bytes, min, max });
        }
        let host = recipe.provider.clone().filter(|_| recipe.split);
        let host = host.ok_or(NetError::NoDeviceMemory)?;
        let chains = usize::from(recipe.ring_size / 2);
        let pages = chains.div_ceil(host.page_size() / stride(o.header_bytes) as usize);
        let pool = PoolOptions::new(format!("rx{pair}-headers")).cache(recipe.cache).prefill(pages);
        let host = pool.build(host, recipe.domain.clone())?;
        let pool = PoolOptions::new(format!("rx{pair}-device")).cache(o.cache).prefill(chains);
        let device = pool.build(o.provider.clone(), recipe.domain.clone())?;
        Ok(Self { host, device, header_bytes: o.header_bytes })
    }
}

/// Bytes between two host parts: whole cache lines, and a page is filled with them.
fn stride(header_bytes: u16) -> u32 {
    (VnetHdr::LEN as u32 + u32::from(header_bytes)).next_power_of_two().max(64)
}

/// A chain's buffers. They may be here and not posted: a frame left the device page, or one of the pools was empty.
struct Slot<M: PeerMemory> {
    part: Option<Page<M>>,
    page: Option<Page<Device>>,
    /// Whether the device has them.
    posted: bool,
}

impl<M: PeerMemory> Default for Slot<M> {
    fn default() -> Self {
        Self { part: None, page: None, posted: false }
    }
}

/// The part of the queue that is not its pools.
struct ChainRing<M: PeerMemory> {
    ring: DriverRing,
    /// By chain.
    slots: Box<[Slot<M>]>,
    /// Chains that the device does not have, oldest first.
    free: Vec<u16>,
    /// Parts of split pages that are in no chain yet.
    parts: Vec<Page<M>>,
    /// Bytes in a host part.
    head: u32,
    /// Bytes in a device page.
    page: u32,
    per_page: u32,
    offloads: Offloads,
    needs_sync: bool,
    stats: RxStats,
}

/// How the pools of a queue stood when it was closed.
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
/// Dropping it stops the ring: once the device has confirmed, posted pages come home; if it does not, they are
/// quarantined, those of the device's memory too: the backend may still write them.
#[must_use = "a queue stops when it is dropped"]
pub struct VirtioSplitRx<M: PeerMemory = PeerShared> {
    pools: Option<(PagePool<M>, PagePool<Device>)>,
    ring: ChainRing<M>,
    index: usize,
    link: Arc<Link<M>>,
}

impl<M: PeerMemory> VirtioSplitRx<M> {
    pub(super) fn new(ring: DriverRing, pools: SplitPools<M>, index: usize, link: Arc<Link<M>>) -> Self {
        let SplitPools { host, device, header_bytes } = pools;
        let ring = ChainRing::new(ring, header_bytes, link.recipe.offloads, &host, &device);
        let mut this = Self { pools: Some((host, device)), ring, index, link };
        // A queue is full before its first poll.
        this.poll(|poll| poll.ring.refill(&mut poll.host, &mut poll.device));
        this
    }

    /// Runs `f` in the poll contexts of both pools, on this thread: what is dropped inside, head or payload, takes the fast way
    /// home.
    #[inline]
    pub fn poll<R>(&mut self, f: impl FnOnce(&mut SplitPoll<'_, M>) -> R) -> R {
        if self.link.has_replaced(&self.ring.ring)
            && let Some(ring) = self.link.take_ring(self.index)
        {
            self.ring.adopt(ring);
        }
        let Self { pools, ring, .. } = self;
        let (host, device) = pools.as_mut().expect("the pools are there until the queue is stopped, which consumes it");
        // Heads are dropped here by most who receive, payload elsewhere: theirs is the inner context.
        device.poll(|device| {
            host.poll(|host| f(&mut SplitPoll { ring, host: host.reborrow(), device: device.reborrow() }))
        })
    }

    /// The queue's counters. Every frame that was handed on counts as passed; one with payload in device memory, as one of
    /// several buffers.
    #[must_use]
    pub fn stats(&self) -> RxStats {
        self.ring.stats
    }

    /// The counters of the two pools: host memory, device memory.
    pub fn pool_stats(&mut self) -> (PoolStats, PoolStats) {
        self.pools.as_mut().map(|(host, device)| (host.stats(), device.stats())).unwrap_or_default()
    }

    /// Chains that the device has: each a host part and a page of device memory.
    #[must_use]
    pub fn posted(&self) -> usize {
        self.ring.slots.iter().filter(|s| s.posted).count()
    }

    /// Bytes of each frame that go to host memory.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        self.ring.head as usize - VnetHdr::LEN
    }

    /// Whether the device has a chain for a frame.
    pub(super) fn can_receive(&self) -> bool {
        self.ring.free.len() < self.ring.slots.len()
    }

    pub(super) fn ring_mut(&mut self) -> &mut DriverRing {
        &mut self.ring.ring
    }

    /// Stops the queue, takes back or quarantines what was posted, and closes the pools.
    pub fn close(mut self) -> Option<SplitClosed> {
        self.stop().map(|stopped| stopped.closed)
    }
}

impl<M: PeerMemory> Stop for VirtioSplitRx<M> {
    type Mem = M;
    type PoolClosed = SplitClosed;

    fn index(&self) -> usize {
        self.index
    }

    fn link(&self) -> &Arc<Link<M>> {
        &self.link
    }

    fn ring(&self) -> &DriverRing {
        &self.ring.ring
    }

    fn stop(&mut self) -> Option<Stopped<SplitClosed>> {
        let (mut host, mut device) = self.pools.take()?;
        let mut panics = Panics::default();
        let confirmed = self.link.stop_ring(self.index, self.ring());
        if let Err(error) = &confirmed {
            let queue = self.index;
            panics.call(
                || tracing::warn!(queue, %error, "posted pages are quarantined: the device may still write them"),
            );
            panics.call(|| host.device_gone());
            panics.call(|| device.device_gone());
        }
        let ring = &mut self.ring;
        let unread = ring.ring.pending().unwrap_or(0);
        // Of what is in chains, the device has only what is posted.
        let lost = |slot: &Slot<M>| slot.posted && confirmed.is_err();
        device.poll(|_| {
            host.poll(|_| {
                // First, so that of a page no part is left here when another is given up.
                panics.call(|| ring.parts.clear());
                let slots = ring.slots.iter_mut().filter(|slot| !lost(slot));
                slots.for_each(|slot| _ = panics.call(|| drop(std::mem::take(slot))));
            });
        });
        for slot in &mut ring.slots {
            slot.part.take().into_iter().for_each(|part| _ = panics.call(|| host.quarantine(part)));
            slot.page.take().into_iter().for_each(|page| _ = panics.call(|| device.quarantine(page)));
        }
        let (host, device) = (panics.call(|| host.close()), panics.call(|| device.close()));
        panics.resume();
        let closed = SplitClosed { host: host?, device: device? };
        Some(Stopped { closed, unread, confirmed })
    }
}

impl<M: PeerMemory> Drop for VirtioSplitRx<M> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<M: PeerMemory> fmt::Debug for VirtioSplitRx<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioSplitRx({}, {})", self.index, state(self.ring.stats.stopped))
    }
}

/// The inside of a [poll](VirtioSplitRx::poll).
pub struct SplitPoll<'a, M: PeerMemory = PeerShared> {
    ring: &'a mut ChainRing<M>,
    host: Napi<'a, M>,
    device: Napi<'a, Device>,
}

impl<M: PeerMemory> SplitPoll<'_, M> {
    /// Receives up to `budget` frames, gives each to `handler`, and posts new chains. Returns how many frames there were.
    pub fn receive<H: SplitHandler<M>>(&mut self, budget: usize, handler: &mut H) -> usize {
        self.ring.receive(&mut self.host, &mut self.device, budget, handler)
    }

    /// Runs `f` with the pools' poll contexts, to allocate from them.
    pub fn with_napi<R>(&mut self, f: impl FnOnce(&mut Napi<'_, M>, &mut Napi<'_, Device>) -> R) -> R {
        f(&mut self.host, &mut self.device)
    }
}

impl<M: PeerMemory> fmt::Debug for SplitPoll<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SplitPoll")
    }
}

impl<M: PeerMemory> ChainRing<M> {
    fn new(
        ring: DriverRing,
        header_bytes: u16,
        offloads: Offloads,
        host: &PagePool<M>,
        device: &PagePool<Device>,
    ) -> Self {
        let (chains, head, page) =
            (ring.size() / 2, VnetHdr::LEN as u32 + u32::from(header_bytes), device.page_size() as u32);
        describe(&ring, head, page);
        Self {
            slots: (0..chains).map(|_| Slot::default()).collect(),
            free: (0..chains).collect(),
            parts: Vec::new(),
            head,
            page,
            per_page: host.page_size() as u32 / stride(header_bytes),
            offloads,
            needs_sync: host.needs_sync(),
            stats: RxStats::default(),
            ring,
        }
    }

    /// Goes on with a new ring, in which nothing is posted. What was posted stays in its slots, and the next poll posts it.
    #[cold]
    fn adopt(&mut self, ring: DriverRing) {
        self.stats.restart(&self.ring);
        self.ring = ring;
        describe(&self.ring, self.head, self.page);
        for (chain, slot) in (0..).zip(&mut self.slots) {
            slot.posted = false;
            if let Some(part) = &slot.part {
                self.ring.point(2 * chain, part.dma_addr());
            }
            if let Some(page) = &slot.page {
                self.ring.point(2 * chain + 1, page.dma_addr());
            }
        }
        self.free = (0..self.slots.len() as u16).collect();
    }

    fn receive<H: SplitHandler<M>>(
        &mut self,
        host: &mut Napi<'_, M>,
        device: &mut Napi<'_, Device>,
        budget: usize,
        handler: &mut H,
    ) -> usize {
        let mut done = 0;
        while done < budget && self.stats.stopped.is_none() {
            let pending = match self.ring.pending() {
                Ok(pending) => pending.min(BATCH).min((budget - done).try_into().unwrap_or(BATCH)),
                Err(error) => {
                    self.stats.stop(error);
                    break;
                }
            };
            self.prefetch(pending);
            for _ in 0..pending {
                if let Err(error) = self.frame(host, handler) {
                    self.stats.stop(error);
                    break;
                }
                done += 1;
            }
            // Also without frames: chains that had no pages may have some now, and without them nothing comes that would tell.
            if !self.free.is_empty() {
                self.refill(host, device);
            }
            if pending == 0 {
                break;
            }
        }
        handler.flush();
        self.ring.notify();
        done
    }

    /// Asks for the host parts of the next `n` frames, and for the descriptors of their pages.
    #[inline]
    fn prefetch(&self, n: u16) {
        for i in 0..n {
            // A bad id is found later; here it prefetches nothing.
            if let Some(Slot { part: Some(part), page: Some(page), .. }) =
                self.slots.get(self.ring.used(i).0 as usize / 2)
            {
                prefetch(part.as_ptr().addr());
                page.prefetch();
            }
        }
    }

    /// Takes one frame off the ring. The one place where a head, a length and a header of the device's are judged.
    #[inline(always)]
    fn frame<H: SplitHandler<M>>(&mut self, host: &Napi<'_, M>, handler: &mut H) -> Result<(), DeviceFault> {
        let (id, len) = self.ring.used(0);
        let chain = id as usize / 2;
        let slot = self.slots.get_mut(chain).filter(|_| id.is_multiple_of(2)).ok_or(DeviceFault::BadId { id })?;
        if !slot.posted {
            return Err(DeviceFault::NotPosted { id: id as u16 });
        }
        slot.posted = false;
        self.ring.consume(1);
        self.free.push(chain as u16);
        let have = self.head + self.page;
        if len > have {
            return Err(DeviceFault::BadLength { len, have });
        }
        if (len as usize) < VnetHdr::LEN + ETHERNET {
            self.stats.short += 1;
            return Ok(());
        }
        // Posted, hence there.
        let Some(part) = slot.part.take() else { return Ok(()) };
        let (in_head, rest) = (len.min(self.head), len.saturating_sub(self.head));
        if self.needs_sync {
            host.sync_for_cpu(&part, 0..in_head as usize);
        }
        let header = VnetHdr::from_bytes(part.read_at(0).unwrap_or_default());
        let header = match self.offloads.check(header, len as usize - VnetHdr::LEN) {
            Ok(header) => header,
            Err(fault) => {
                refused(&mut self.stats, fault);
                slot.part = Some(part);
                return Ok(());
            }
        };
        let head = part.freeze_range(VnetHdr::LEN..in_head as usize);
        // A page without payload stays with its chain.
        let payload = slot.page.take_if(|_| rest > 0).map(|page| page.freeze_range(0..rest as usize));
        self.stats.frames += 1;
        self.stats.passed += 1;
        self.stats.bytes += u64::from(len) - VnetHdr::LEN as u64;
        self.stats.multi_buffer += u64::from(payload.is_some());
        handler.frame(SplitFrame::new(head, payload, meta(header)));
        Ok(())
    }

    /// Fills and posts every chain that the device does not have, as far as there are pages of both kinds.
    fn refill(&mut self, host: &mut Napi<'_, M>, device: &mut Napi<'_, Device>) {
        let mut posted = false;
        while !self.free.is_empty() {
            if self.refill_batch(host, device) == 0 {
                self.stats.starved += 1;
                break;
            }
            posted = true;
        }
        if posted {
            self.ring.publish();
        }
    }

    /// Posts up to a batch of the oldest free chains. Pages first, descriptors after: the stores that wait for the device to
    /// let go of a cache line are then next to each other and wait together.
    ///
    /// User code may panic in it: a provider or a domain. What is in a slot by then is posted by the next call, and no chain is
    /// exposed twice.
    #[inline(always)]
    fn refill_batch(&mut self, host: &mut Napi<'_, M>, device: &mut Napi<'_, Device>) -> usize {
        let mut moves = Moves::<{ 2 * BATCH as usize }>::new(&self.ring);
        let mut heads = [0; BATCH as usize];
        let mut got = 0;
        for &chain in self.free.iter().take(BATCH as usize) {
            let slot = &mut self.slots[usize::from(chain)];
            // What stayed is where its descriptor points.
            if slot.part.is_none() {
                let Some(part) = part(&mut self.parts, self.per_page, host) else { break };
                moves.push(2 * chain, part.dma_addr());
                slot.part = Some(part);
            }
            if slot.page.is_none() {
                let Some(page) = device.alloc() else { break };
                moves.push(2 * chain + 1, page.dma_addr());
                slot.page = Some(page);
            }
            if let (true, Some(part)) = (self.needs_sync, &slot.part) {
                host.sync_for_device(part, 0..self.head as usize);
            }
            slot.posted = true;
            heads[got] = 2 * chain;
            got += 1;
        }
        drop(moves);
        self.ring.expose_all(&heads[..got]);
        // Oldest first, so that heads keep their places in the ring.
        self.free.drain(..got);
        got
    }
}

/// Describes a chain of a host part and a device page in every two descriptors, with no memory yet.
fn describe(ring: &DriverRing, head: u32, page: u32) {
    for chain in 0..ring.size() / 2 {
        ring.describe(2 * chain, 0, head, true, Some(2 * chain + 1));
        ring.describe(2 * chain + 1, 0, page, true, None);
    }
}
