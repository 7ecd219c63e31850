//! The virtio-net driver: from a connection to a device to queues that receive into page pools.
//!
//! * [`VirtioNet::probe`] negotiates, lays out memory, and starts the rings of the most queue pairs it may use.
//! * [`VirtioRx`] and [`VirtioTx`] are the queues; they can go to different threads, and stop their rings when dropped.
//! * [`VirtioNet`] stays behind to change how many pairs are in use, and to tell whether the device is there.

mod big;
mod ctrl;
mod ring;
mod rx;
mod stats;
mod tx;

pub use rx::{RxPoll, VirtioRx};
pub use stats::{QueueError, RxStats, TxStats};
pub use tx::VirtioTx;

use crate::net::{OFFLOAD_FRAME, STANDARD_FRAME, VnetHdr, feature};
use crate::ring::SplitLayout;
use crate::vhost_user::{VhostUser, VhostUserError};
use big::BigRing;
use ctrl::ControlQueue;
use netmem_packet::MAX_FRAGS;
use netmem_pool::{
    DmaDomain, MapError, MemoryTable, PAGE_SIZE, PeerShared, PoolError, PoolOptions, Provider, Region, RegionError,
    RegionOptions, RegionProvider, TableEntry,
};
use ring::DriverRing;
use rx::BufferLayout;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use tx::{HEADER_STRIDE, HeaderArray, Reach};

/// How received frames lie in buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A frame in one buffer.
    Small,
    /// A frame in as many buffers as it needs.
    Mergeable,
    /// A frame in one chain of pages, long enough for the longest segment.
    Big,
}

impl Mode {
    /// The longest frame that the mode can receive.
    #[must_use]
    pub fn max_frame(self) -> usize {
        match self {
            Self::Small => STANDARD_FRAME,
            Self::Mergeable | Self::Big => OFFLOAD_FRAME,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Small => "small",
            Self::Mergeable => "mergeable",
            Self::Big => "big",
        })
    }
}

/// Why a device could not be taken into use, or did not do as told.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The backend.
    #[error(transparent)]
    Backend(#[from] VhostUserError),
    /// Memory for rings or pages.
    #[error("no memory for the device's queues")]
    Region(#[from] RegionError),
    /// A queue's pool.
    #[error("cannot make a queue's page pool")]
    Pool(#[from] PoolError),
    /// Memory that the device cannot reach.
    #[error("the device cannot reach the queues' memory")]
    Map(#[from] MapError),
    /// An event descriptor.
    #[error("cannot make an event descriptor: {0}")]
    Event(#[from] io::Error),
    /// A ring's size.
    #[error("a ring of {size} entries: it must be a power of two from {min} to {max}")]
    RingSize {
        /// The size asked for.
        size: u16,
        /// The smallest that the mode can use.
        min: u16,
        /// The largest there is.
        max: u16,
    },
    /// Frames longer than the mode can receive.
    #[error("frames of {asked} bytes: {mode} mode receives up to {max}")]
    FrameSize {
        /// The length asked for.
        asked: usize,
        /// The mode.
        mode: Mode,
        /// The longest.
        max: usize,
    },
    /// Headroom, or a part of a page, that leaves no room for a frame.
    #[error(
        "{headroom} bytes of headroom and a frame of {frame} do not fit a buffer of {buffer} bytes; ask for less headroom or \
         fewer buffers per page"
    )]
    Room {
        /// Bytes kept free.
        headroom: u32,
        /// The longest frame that must fit.
        frame: usize,
        /// Bytes in a buffer.
        buffer: u32,
    },
    /// A provider for a mode whose pages are from no pool.
    #[error("big-packet mode keeps pages of its own and takes no provider")]
    GivenMemory,
    /// No queue pairs, or none of that number.
    #[error("{asked} queue pairs: there must be between 1 and {max}")]
    Pairs {
        /// Pairs asked for.
        asked: u16,
        /// Pairs there can be.
        max: u16,
    },
    /// The device said no on the control queue.
    #[error("the device refused to use {pairs} queue pairs")]
    ControlRefused {
        /// Pairs asked for.
        pairs: u16,
    },
    /// The device says nothing on the control queue.
    #[error("the device did not answer on the control queue for {seconds} s")]
    ControlTimeout {
        /// How long it was given.
        seconds: u64,
    },
}

type GivenMemory = (Arc<Region<PeerShared>>, Arc<dyn Provider<PeerShared>>);
type WrapDomain = Box<dyn FnOnce(MemoryTable) -> Arc<dyn DmaDomain>>;

/// What the driver is to make of a device. Start with [`NetOptions::new`].
pub struct NetOptions {
    mode: Mode,
    pairs: u16,
    ring_size: u16,
    max_frame: usize,
    headroom: u32,
    per_page: Option<u32>,
    pages: Option<usize>,
    lock: bool,
    cache: usize,
    premapped: bool,
    memory: Option<GivenMemory>,
    domain: Option<WrapDomain>,
}

impl NetOptions {
    /// One queue pair, rings of 256, frames up to 1518 bytes (in big-packet mode, up to 65549), premapped buffers, room
    /// for XDP in front of each frame.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self {
            mode,
            pairs: 1,
            ring_size: 256,
            max_frame: if mode == Mode::Big { OFFLOAD_FRAME } else { STANDARD_FRAME },
            headroom: 256,
            per_page: None,
            pages: None,
            lock: false,
            cache: 512,
            premapped: true,
            memory: None,
            domain: None,
        }
    }

    /// The most queue pairs that will be used. All of them are set up; one is in use until
    /// [`VirtioNet::set_active_pairs`] says otherwise.
    #[must_use]
    pub fn pairs(mut self, pairs: u16) -> Self {
        self.pairs = pairs;
        self
    }

    /// Entries in each ring: a power of two.
    #[must_use]
    pub fn ring_size(mut self, entries: u16) -> Self {
        self.ring_size = entries;
        self
    }

    /// The longest frame, in bytes. Beyond 1518 it asks the device for segmentation offload.
    #[must_use]
    pub fn max_frame(mut self, bytes: usize) -> Self {
        self.max_frame = bytes;
        self
    }

    /// Bytes kept free in front of each frame for programs that add headers; 256 unless said otherwise, and none for
    /// frames of more than 1518 bytes, whose buffers have no room to spare. Without headroom and in small mode, buffers share pages as far as the frame size lets them.
    #[must_use]
    pub fn headroom(mut self, bytes: u16) -> Self {
        self.headroom = u32::from(bytes).next_multiple_of(64);
        self
    }

    /// Buffers in a page in small mode, whatever follows from the headroom. In the other modes buffers are whole pages.
    #[must_use]
    pub fn buffers_per_page(mut self, buffers: u16) -> Self {
        self.per_page = Some(u32::from(buffers.max(1)));
        self
    }

    /// Pages for all queues together; four rings' worth each unless said otherwise.
    #[must_use]
    pub fn pages(mut self, pages: usize) -> Self {
        self.pages = Some(pages);
        self
    }

    /// Whether the memory is locked (`RLIMIT_MEMLOCK`).
    #[must_use]
    pub fn lock(mut self, lock: bool) -> Self {
        self.lock = lock;
        self
    }

    /// Pages in each pool's array cache; 0 for a page per packet.
    #[must_use]
    pub fn cache(mut self, pages: usize) -> Self {
        self.cache = pages;
        self
    }

    /// Whether buffers are posted by DMA address (the default), or by this process's addresses, the pool then mapping
    /// nothing.
    #[must_use]
    pub fn premapped(mut self, premapped: bool) -> Self {
        self.premapped = premapped;
        self
    }

    /// Takes receive pages from this provider, whose memory is this region. Not for big-packet mode, whose pages are from
    /// no pool.
    #[must_use]
    pub fn memory(mut self, region: Arc<Region<PeerShared>>, provider: Arc<dyn Provider<PeerShared>>) -> Self {
        self.memory = Some((region, provider));
        self
    }

    /// Makes another DMA domain of the device's memory table.
    #[must_use]
    pub fn domain(mut self, wrap: impl FnOnce(MemoryTable) -> Arc<dyn DmaDomain> + 'static) -> Self {
        self.domain = Some(Box::new(wrap));
        self
    }

    fn check(&self) -> Result<BufferLayout, NetError> {
        let min = if self.mode == Mode::Big { 32 } else { 2 };
        let max = SplitLayout::MAX_SIZE;
        if !self.ring_size.is_power_of_two() || self.ring_size < min || self.ring_size > max {
            return Err(NetError::RingSize { size: self.ring_size, min, max });
        }
        if self.mode == Mode::Big && self.memory.is_some() {
            return Err(NetError::GivenMemory);
        }
        if self.pairs == 0 {
            return Err(NetError::Pairs { asked: 0, max: u16::MAX / 2 });
        }
        if self.max_frame > self.mode.max_frame() {
            let (asked, mode) = (self.max_frame, self.mode);
            return Err(NetError::FrameSize { asked, mode, max: mode.max_frame() });
        }
        let page = PAGE_SIZE as u32;
        let frame = self.max_frame.max(STANDARD_FRAME);
        let need = (VnetHdr::LEN + frame) as u32;
        let headroom = self.headroom;
        // Bytes of a buffer that neither headroom nor frame take.
        let spare = |buffer: u32| {
            let taken = headroom + need;
            buffer.checked_sub(taken).ok_or(NetError::Room { headroom, frame, buffer })
        };
        let layout = match self.mode {
            Mode::Small => {
                let splits = if headroom == 0 { page / need.next_multiple_of(64) } else { 1 };
                let per_page = self.per_page.unwrap_or(splits);
                let spare = spare(page / per_page / 64 * 64)?;
                // As far as there is room, the header ends a cache line.
                let skew = if spare >= 64 { 64 - VnetHdr::LEN as u32 } else { 0 };
                let (first, colour_mask) = (headroom + skew, colours(spare - skew));
                BufferLayout { first, colour_mask, len: need, unread: VnetHdr::LEN as u32, per_page }
            }
            // Segments must fit the fragments of a packet, which leaves little to spare.
            Mode::Mergeable if self.max_frame > STANDARD_FRAME => {
                let len = page - 192;
                debug_assert!(len as usize * (MAX_FRAGS + 1) >= VnetHdr::LEN + OFFLOAD_FRAME);
                BufferLayout { first: 0, colour_mask: 192, len, unread: 0, per_page: 1 }
            }
            Mode::Mergeable => {
                let colour_mask = colours(spare(page)?);
                let len = page - headroom - colour_mask;
                BufferLayout { first: headroom, colour_mask, len, unread: 0, per_page: 1 }
            }
            // Chains of whole pages.
            Mode::Big => BufferLayout { first: 0, colour_mask: 0, len: page, unread: 0, per_page: 1 },
        };
        Ok(layout)
    }

    /// Where receive pages come from.
    fn supply(&mut self) -> Result<Supply, RegionError> {
        if let Some((region, provider)) = self.memory.take() {
            return Ok(Supply::Given(region, provider));
        }
        let per_queue = 4 * usize::from(self.ring_size) + self.cache;
        let pages = self.pages.unwrap_or(usize::from(self.pairs) * per_queue);
        let region = RegionOptions::new(pages).lock(self.lock).build::<PeerShared>()?;
        Ok(Supply::Own(RegionProvider::new(region)))
    }

    /// The features that are needed; those that are taken if they can be had.
    fn features(&self, control: bool) -> (u64, u64) {
        let offload = feature::GUEST_CSUM | feature::GUEST_TSO4 | feature::GUEST_TSO6;
        let mut need = feature::VERSION_1;
        let mut want = feature::CSUM | feature::HOST_TSO4 | feature::HOST_TSO6;
        match self.mode {
            Mode::Small => {}
            Mode::Mergeable => need |= feature::MRG_RXBUF,
            Mode::Big => need |= offload,
        }
        if self.max_frame > STANDARD_FRAME {
            want |= offload | feature::GUEST_UFO;
        }
        if self.pairs > 1 {
            let multi = feature::MQ | feature::CTRL_VQ;
            if control { need |= multi } else { want |= multi }
        }
        (need, want)
    }
}

/// Where receive pages come from.
enum Supply {
    Own(Arc<RegionProvider<PeerShared>>),
    Given(Arc<Region<PeerShared>>, Arc<dyn Provider<PeerShared>>),
}

impl Supply {
    fn region(&self) -> Arc<Region<PeerShared>> {
        match self {
            Self::Own(provider) => provider.region().clone(),
            Self::Given(region, _) => region.clone(),
        }
    }

    fn provider(&self) -> Arc<dyn Provider<PeerShared>> {
        match self {
            Self::Own(provider) => provider.clone(),
            Self::Given(_, provider) => provider.clone(),
        }
    }
}

/// The mask of offsets, multiples of 64 and a power of two in number, that `spare` bytes leave room for; at most 32 of
/// them, half of the sets of a first-level cache.
fn colours(spare: u32) -> u32 {
    let count = spare / 64 + 1;
    ((1 << count.ilog2().min(5)) - 1) * 64
}

/// What queues and device handle share: the connection.
pub(crate) struct Link {
    backend: Mutex<VhostUser>,
}

impl Link {
    fn with<R>(&self, f: impl FnOnce(&mut VhostUser) -> R) -> R {
        f(&mut self.backend.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn stop_ring(&self, index: usize) -> Result<(), VhostUserError> {
        self.with(|b| b.stop_ring(index))
    }
}

/// A piece of the rings' memory.
#[derive(Debug)]
struct VnetMemory {
    region: Arc<Region<PeerShared>>,
    offset: usize,
    len: usize,
    bus: u64,
}

impl VnetMemory {
    fn dma(&self) -> u64 {
        self.bus + self.offset as u64
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        for (i, b) in bytes.iter().enumerate() {
            // SAFETY: just checked; the piece is ours in this process, and the device may read it, hence volatile.
            unsafe { self.region.as_ptr().add(self.offset + at + i).write_volatile(*b) };
        }
    }

    fn read_byte(&self, at: usize) -> u8 {
        assert!(at < self.len);
        // SAFETY: just checked; the device may write it, hence volatile.
        unsafe { self.region.as_ptr().add(self.offset + at).read_volatile() }
    }
}

/// A receive and a transmit queue.
#[derive(Debug)]
pub struct QueuePair {
    /// Receives.
    pub rx: VirtioRx,
    /// Transmits.
    pub tx: VirtioTx,
}

/// A virtio-net device in use.
pub struct VirtioNet {
    link: Arc<Link>,
    control: Option<ControlQueue>,
    control_index: usize,
    features: u64,
    pairs: u16,
    active: u16,
    region: Arc<Region<PeerShared>>,
}

impl VirtioNet {
    /// Negotiates with the device, gives it memory, and starts the rings. One queue pair is in use then.
    ///
    /// # Errors
    ///
    /// [`NetError`]; nothing is left behind, and the connection is closed.
    pub fn probe(mut backend: VhostUser, mut options: NetOptions) -> Result<(Self, Vec<QueuePair>), NetError> {
        let layout = options.check()?;
        let pairs = options.pairs;
        if u64::from(pairs) > backend.pairs() {
            return Err(VhostUserError::TooFewQueues { wanted: pairs, has: backend.pairs() }.into());
        }
        let with_control = backend.has_control_queue() && pairs > 1;
        let (need, want) = options.features(with_control);
        let features = need | (want & backend.offered());
        let why = match options.mode {
            Mode::Small => "small mode needs",
            Mode::Mergeable => "mergeable mode needs",
            Mode::Big => "big-packet mode needs",
        };
        backend.negotiate(features, why)?;

        let supply = options.supply()?;
        let region = supply.region();
        let plan = Plan::new(&options);
        let rings = Arc::new(RegionOptions::new(plan.total.div_ceil(PAGE_SIZE)).build::<PeerShared>()?);
        let regions = [rings.clone(), region.clone()];
        let table = MemoryTable::new(&regions);
        let entries: Vec<TableEntry> = if options.premapped {
            table.entries().to_vec()
        } else {
            regions.iter().map(|r| TableEntry { region: r.clone(), bus: r.as_ptr().addr() as u64 }).collect()
        };
        backend.set_memory(&entries)?;
        let bus = entries[0].bus;
        let domain: Option<Arc<dyn DmaDomain>> = match (options.premapped, options.domain.take()) {
            (false, _) => None,
            (true, None) => Some(Arc::new(table)),
            (true, Some(wrap)) => Some(wrap(table)),
        };

        let control_index = usize::try_from(backend.pairs() * 2).unwrap_or(usize::MAX);
        let link = Arc::new(Link { backend: Mutex::new(backend) });
        let mut queues = Vec::new();
        for pair in 0..usize::from(pairs) {
            let (rx_index, tx_index) = (2 * pair, 2 * pair + 1);
            let ring = DriverRing::new(&rings, plan.ring(rx_index), options.ring_size)?;
            let mut pool = PoolOptions::new(format!("rx{pair}")).cache(options.cache);
            if options.mode != Mode::Big {
                pool = pool.prefill(usize::from(options.ring_size));
            }
            let pool = pool.build(supply.provider(), domain.clone())?;
            let rx = match (&supply, options.mode) {
                (Supply::Own(pages), Mode::Big) => {
                    let big = BigRing::new(ring, pages.clone(), domain.clone(), options.max_frame);
                    VirtioRx::new_big(big, pool, rx_index, link.clone())
                }
                (_, mode) => VirtioRx::new(ring, pool, layout, mode == Mode::Mergeable, rx_index, link.clone()),
            };
            let offset = plan.headers(pair);
            let headers = HeaderArray { region: rings.clone(), offset, dma: bus + offset as u64 };
            let reach = match &domain {
                Some(domain) => Reach::Domain(domain.clone()),
                None => Reach::Memory(region.clone()),
            };
            let ring = DriverRing::new(&rings, plan.ring(tx_index), options.ring_size)?;
            let tx = VirtioTx::new(ring, headers, reach, features, tx_index, link.clone());
            link.with(|b| {
                for (index, ring) in [(rx_index, rx.ring()), (tx_index, tx.ring())] {
                    b.start_ring(index, ring.addresses(), &ring.call, &ring.kick)?;
                    b.enable_ring(index, pair == 0 || with_control)?;
                }
                Ok::<_, VhostUserError>(())
            })?;
            queues.push(QueuePair { rx, tx });
        }
        let control = with_control.then(|| {
            let ring = DriverRing::new(&rings, plan.control(), ctrl::SIZE)?;
            let offset = plan.control_buffer();
            let buffer = VnetMemory { region: rings.clone(), offset, len: ctrl::BUFFER, bus };
            link.with(|b| {
                b.start_ring(control_index, ring.addresses(), &ring.call, &ring.kick)?;
                b.enable_ring(control_index, true)
            })?;
            Ok::<_, NetError>(ControlQueue::new(ring, buffer))
        });
        let control = control.transpose()?;
        Ok((Self { link, control, control_index, features, pairs, active: 1, region }, queues))
    }

    /// Changes how many queue pairs are in use, also under traffic. Frames that were on their way to a pair that is no
    /// longer in use stay in its ring and are received when its queue is polled.
    ///
    /// # Errors
    ///
    /// [`NetError`]; the number in use is as it was, unless the connection broke.
    pub fn set_active_pairs(&mut self, pairs: u16) -> Result<(), NetError> {
        if pairs == 0 || pairs > self.pairs {
            return Err(NetError::Pairs { asked: pairs, max: self.pairs });
        }
        match &mut self.control {
            Some(control) => control.set_pairs(pairs)?,
            None => self.link.with(|b| {
                (0..usize::from(self.pairs) * 2)
                    .try_for_each(|index| b.enable_ring(index, index < usize::from(pairs) * 2))
            })?,
        }
        self.active = pairs;
        Ok(())
    }

    /// How many queue pairs are in use.
    #[must_use]
    pub fn active_pairs(&self) -> u16 {
        self.active
    }

    /// The features that were negotiated.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The memory of the receive pages.
    #[must_use]
    pub fn region(&self) -> &Region<PeerShared> {
        &self.region
    }

    /// Whether the device still holds its end of the connection. One system call.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.link.with(|b| b.is_connected())
    }
}

impl Drop for VirtioNet {
    fn drop(&mut self) {
        if self.control.is_some() {
            // A device that is gone has stopped.
            let _ = self.link.stop_ring(self.control_index);
        }
    }
}

impl fmt::Debug for NetOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NetOptions({}, {} pairs, rings of {})", self.mode, self.pairs, self.ring_size)
    }
}

impl fmt::Debug for VirtioNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioNet({}/{} pairs, features {:#x})", self.active, self.pairs, self.features)
    }
}

/// Where rings, header arrays and the control queue lie in their region.
struct Plan {
    ring: usize,
    header: usize,
    pairs: usize,
    total: usize,
}

impl Plan {
    fn new(o: &NetOptions) -> Self {
        let ring = SplitLayout::new(o.ring_size).total;
        let header = (usize::from(o.ring_size) * HEADER_STRIDE).next_multiple_of(SplitLayout::ALIGN);
        let pairs = usize::from(o.pairs);
        let control = SplitLayout::new(ctrl::SIZE).total + ctrl::BUFFER;
        Self { ring, header, pairs, total: pairs * (2 * ring + header) + control }
    }

    fn ring(&self, index: usize) -> usize {
        index * self.ring
    }

    fn headers(&self, pair: usize) -> usize {
        2 * self.pairs * self.ring + pair * self.header
    }

    fn control(&self) -> usize {
        self.headers(self.pairs)
    }

    fn control_buffer(&self) -> usize {
        self.control() + SplitLayout::new(ctrl::SIZE).total
    }
}
