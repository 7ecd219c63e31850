//! The virtio-net driver: from a connection to a device to queues that receive into page pools.
//!
//! * [`VirtioNet::probe`] negotiates, lays out memory, and starts the rings of all queue pairs.
//! * [`VirtioRx`] and [`VirtioTx`] are the queues; they can go to different threads, and stop their rings when dropped.
//! * A receive queue is restarted with a provider of device memory: then it is a [`VirtioSplitRx`], whose frames have their
//!   headers in host memory. A [`VirtioSplitTx`] sends such frames.
//! * [`VirtioRxQueues`] are the receive queues as one value, whose memory a control thread changes while others poll.
//! * [`VirtioNet`] changes how many pairs are in use, tells what the device says about itself ([`VirtioNet::config`])
//!   and whether it is still connected, and connects to another device: [`VirtioNet::reconnect`].

mod alive;
mod big_buffers;
mod config;
mod ctrl;
mod either;
mod frame;
mod headers;
mod options;
mod page_buffers;
mod panics;
mod queues;
mod receive;
mod reconnect;
mod reserve;
mod restart;
mod ring;
mod rx;
mod space;
mod split_buffers;
mod split_rx;
mod split_tx;
mod stats;
mod tx;
mod wait;

use crate::net::feature;
pub use options::{NetOptions, Offload, RxMode};
pub use queues::{EitherRx, QueuesError, RxClosed, VirtioRxQueues};
pub use restart::{RestartError, Restarted};
pub use rx::{RxPoll, VirtioRx};
pub use split_rx::{SplitClosed, SplitOptions, SplitPoll, VirtioSplitRx};
pub use split_tx::VirtioSplitTx;
pub use stats::{DeviceFault, RxStats, TxStats};
pub use tx::VirtioTx;
pub use wait::{QueueStopped, QueueWait};

use crate::net::Offloads;
use crate::notify::NotifyError;
use crate::vhost_user::{VhostUser, VhostUserError};
use crate::virtqueue::Negotiated;
use crate::virtqueue::driver::Tables;
use alive::Ended;
use ctrl::ControlQueue;
use headers::{HEADER_STRIDE, HeaderArray};
use netmem_pool::{
    AddedMemory, Device, DmaDomain, MapError, PAGE_SIZE, PagePool, PeerMemory, PeerShared, PoolError, PoolOptions,
    Provider, Region, RegionError, RegionOptions, RegionProvider, SharedPool, VhostDomain, VhostRegion,
};
use options::Supply;
use page_buffers::BufferLayout;
use receive::Header;
use reserve::Reserve;
use restart::Stop;
use ring::{Place, RingHandle};
use space::Memory;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use wait::Alarms;

/// Why a device could not be used, or did not do what it was asked to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// The backend.
    #[error(transparent)]
    Backend(#[from] VhostUserError),
    /// The memory for rings or pages could not be made.
    #[error("no memory for the device's queues")]
    Region(#[from] RegionError),
    /// A queue's pool could not be made.
    #[error("cannot make a queue's page pool")]
    Pool(#[from] PoolError),
    /// The device cannot reach this memory.
    #[error("the device cannot reach the queues' memory")]
    Map(#[from] MapError),
    /// An event descriptor could not be made.
    #[error("cannot make an event descriptor")]
    Event(#[from] NotifyError),
    /// The mode cannot use a ring of this size.
    #[error("a ring of {size} entries: it must be a power of two from {min} to {max}")]
    RingSize {
        /// The size asked for.
        size: u16,
        /// The smallest that the mode can use.
        min: u16,
        /// The largest there is.
        max: u16,
    },
    /// The longest frame is longer than the mode can receive.
    #[error("frames of {asked} bytes: {mode} mode receives up to {max}")]
    FrameSize {
        /// The length asked for.
        asked: usize,
        /// The mode.
        mode: RxMode,
        /// The longest.
        max: usize,
    },
    /// The headroom, or the number of buffers in a page, leaves no room for a frame.
    #[error(
        "{headroom} bytes of headroom and {frame} bytes of a frame do not fit a buffer of {buffer} bytes; ask for less headroom or \
         fewer buffers per page"
    )]
    Room {
        /// Bytes kept free.
        headroom: u32,
        /// Bytes of a frame that must fit: the longest, or in mergeable mode its part.
        frame: usize,
        /// Bytes in a buffer.
        buffer: u32,
    },
    /// A provider was given, but the pages of this mode are from no pool.
    #[error("big-packet mode keeps pages of its own and takes no provider")]
    GivenMemory,
    /// A device in this process shares pages of its own only.
    #[error(
        "the driver of a device in this process makes its own pages, because files of other memory may be elsewhere; leave \
         `NetOptions::memory` out, or use `NetOptions::trust_peer`"
    )]
    InProcessMemory,
    /// This mode cannot have device memory.
    #[error(
        "device memory takes chains of buffers at DMA addresses, and {mode} mode with these options has none; use small or \
         big-packet mode, and premapped buffers"
    )]
    DeviceMemory {
        /// The mode asked for.
        mode: RxMode,
    },
    /// The device was given no device memory.
    #[error(
        "the device was given no device memory; say `NetOptions::device_memory`, or `NetOptions::late_device_memory`, before it \
         is probed"
    )]
    NoDeviceMemory,
    /// The back end accepts no memory while it runs.
    #[error(
        "the backend takes no memory after it was probed (it lacks CONFIGURE_MEM_SLOTS); say `NetOptions::device_memory` \
         before that"
    )]
    NoMemorySlots,
    /// The back end has as many regions as it can have.
    #[error("the backend has {slots} regions of memory, and can have no more; unbind device memory that is not needed")]
    MemorySlots {
        /// The most that it can have.
        slots: u64,
    },
    /// The memory cannot be removed, because it is in use.
    #[error(
        "{mapped} mappings of the device memory are in use; detach its queues, and drop what was received and is sent"
    )]
    MemoryInUse {
        /// Pages in use. If something is being sent from the memory, all of its pages.
        mapped: usize,
    },
    /// There are fewer pages than should be reserved for transmit pools.
    #[error(
        "{asked} pages to send from: the memory has {had}; bring more, or ask for fewer with `NetOptions::tx_pages`"
    )]
    TxPages {
        /// Pages asked for.
        asked: usize,
        /// Pages that the provider had.
        had: usize,
    },
    /// No pages were reserved for transmit pools.
    #[error("no pages were set aside to send from; say `NetOptions::tx_pages` before the device is probed")]
    NoTxPages,
    /// The host part cannot have this size.
    #[error("{asked} bytes of headers: a host part holds between {min} and {max}")]
    HeaderBytes {
        /// Bytes asked for.
        asked: u16,
        /// The fewest: an Ethernet header.
        min: u16,
        /// The most.
        max: u16,
    },
    /// The device cannot have this number of queue pairs.
    #[error("{asked} queue pairs: there must be between 1 and {max}")]
    Pairs {
        /// Pairs asked for.
        asked: u16,
        /// Pairs there can be.
        max: u16,
    },
    /// The options ask for features that are not features of rings.
    #[error("features {extra:#x} are not features of rings")]
    RingFeatures {
        /// The others.
        extra: u64,
    },
    /// The device refused the number of queue pairs on the control queue.
    #[error("the device refused to use {pairs} queue pairs")]
    ControlRefused {
        /// Pairs asked for.
        pairs: u16,
    },
    /// The device refused the message that the program has announced itself.
    #[error("the device refused to hear that the program has announced itself to the network")]
    AnnounceRefused,
    /// The device did not answer on the control queue in time.
    #[error("the device did not answer on the control queue for {seconds} s")]
    ControlTimeout {
        /// How long the driver has waited.
        seconds: u64,
    },
}

/// The data that the queues and the device's handle share: the connection, and the values from which a queue is made
/// when it is restarted.
pub(crate) struct Link<M: PeerMemory> {
    attached: Mutex<Attached>,
    /// The number of the connection, as in [`RingMemory::connection`]. Written with `attached` locked.
    connection: AtomicU32,
    ended: Ended,
    /// Device memory that is added and removed while the device runs.
    added: AddedMemory,
    /// Counts the changes of the device memory. Written with `attached` locked.
    memory: AtomicU32,
    /// The descriptors that wake threads which wait for queues.
    alarms: Alarms,
    recipe: Recipe<M>,
}

/// The back end, and the memory and rings that it was given.
struct Attached {
    backend: VhostUser,
    /// The memory table that the back end has.
    table: Vec<VhostRegion>,
    rings: RingMemory,
    /// Rings that the back end has started after a [reconnect](reconnect) and that their queues have not taken yet.
    ready: Vec<Option<RingHandle>>,
    /// Whether each ring belongs to a queue that receives into device memory. A back end that can split frames is asked to do so
    /// on such rings.
    split: Vec<bool>,
}

/// The memory of all rings of a connection.
struct RingMemory {
    region: Arc<Region<PeerShared>>,
    /// The device's address of it.
    bus: u64,
    /// The number of the connection: how often the device was connected anew, modulo 2^32.
    connection: u32,
}

impl RingMemory {
    /// Which entry of the memory table it is.
    const ENTRY: usize = 1;

    /// A new ring of a receive or transmit queue.
    fn queue(&self, plan: &Plan, index: usize, alarms: &Alarms) -> Result<RingHandle, NotifyError> {
        let kicks = Some(alarms.of(index));
        let tables = plan.tables(index).map(|offset| (offset, self.bus + offset as u64));
        let place = Place { offset: plan.ring(index), size: plan.ring_size, tables };
        RingHandle::new(&self.region, place, plan.negotiated, self.connection, kicks)
    }

    /// The place of a transmit queue's headers.
    fn headers(&self, plan: &Plan, pair: usize) -> HeaderArray {
        let offset = plan.headers(pair);
        HeaderArray { region: self.region.clone(), offset, dma: self.bus + offset as u64 }
    }

    /// A new control ring, and the buffer of its commands.
    fn control(&self, plan: &Plan) -> Result<(RingHandle, VnetMemory), NotifyError> {
        let place = Place { offset: plan.control(), size: ctrl::SIZE, tables: None };
        let ring = RingHandle::new(&self.region, place, plan.negotiated, self.connection, None)?;
        let (region, offset) = (self.region.clone(), plan.control_buffer());
        Ok((ring, VnetMemory { region, offset, len: ctrl::BUFFER, bus: self.bus }))
    }
}

/// The values from which a receive queue of host memory is made.
struct Recipe<M: PeerMemory> {
    provider: Arc<dyn Provider<M>>,
    /// In big-packet mode, where chains come from.
    big: Option<Arc<RegionProvider<M>>>,
    /// Bytes of the longest frame that is received.
    max_frame: usize,
    domain: Option<Arc<dyn DmaDomain>>,
    layout: BufferLayout,
    header: Header,
    /// The fields of a received frame's header that are used.
    offloads: Offloads,
    cache: usize,
    ring_size: u16,
    /// Where the rings lie in their memory.
    plan: Plan,
    /// What a back end is told as the longest packet, in bytes.
    mtu: u64,
    /// Whether the device can have device memory.
    split: bool,
}

impl<M: PeerMemory> Recipe<M> {
    /// The pool of a receive queue, with as many pages as its ring takes. In big-packet mode it has none, because the
    /// pool is only for linearising.
    fn pool(&self, pair: usize, provider: Arc<dyn Provider<M>>) -> Result<PagePool<M>, PoolError> {
        let prefill = if self.big.is_some() { 0 } else { usize::from(self.ring_size) };
        let pool = PoolOptions::new(format!("rx{pair}")).cache(self.cache).prefill(prefill);
        pool.build(provider, self.domain.clone())
    }
}

impl<M: PeerMemory> Link<M> {
    fn lock(&self) -> MutexGuard<'_, Attached> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the back end a region of device memory. Returns its address; `None` if the back end has the region
    /// already.
    fn add_device_memory(&self, region: &Arc<Region<Device>>) -> Result<Option<u64>, NetError> {
        if !self.recipe.split {
            return Err(NetError::NoDeviceMemory);
        }
        let mut at = self.lock();
        if at.table.iter().any(|entry| entry.is(region)) {
            return Ok(None);
        }
        match at.backend.memory_slots()? {
            0 => return Err(NetError::NoMemorySlots),
            slots if at.table.len() as u64 >= slots => return Err(NetError::MemorySlots { slots }),
            _ => {}
        }
        let entry = self.added.add(region.clone());
        if let Err(refused) = at.backend.add_memory(&entry) {
            let _ = self.added.remove(entry.bus());
            return Err(refused.into());
        }
        let bus = entry.bus();
        at.table.push(entry);
        self.memory.fetch_add(1, Ordering::Release);
        Ok(Some(bus))
    }

    /// Takes the region at `bus` away from the back end, if nothing of it is mapped. False if it was not added.
    fn remove_device_memory(&self, bus: u64) -> Result<bool, NetError> {
        let mut at = self.lock();
        let removed = self.added.remove(bus).map_err(|mapped| NetError::MemoryInUse { mapped })?;
        let Some(place) = at.table.iter().position(|entry| removed && entry.bus() == bus) else { return Ok(false) };
        let entry = at.table.remove(place);
        // No queue sends from it before the back end is told.
        self.memory.fetch_add(1, Ordering::Release);
        at.backend.remove_memory(&entry)?;
        Ok(true)
    }

    /// The addresses of device memory, and the number of their changes.
    #[cold]
    fn device_memory(&self) -> (u32, Vec<Range<u64>>) {
        let at = self.lock();
        let ranges = at.table.iter().filter(|e| e.is_device()).map(|e| e.bus()..e.bus() + e.len() as u64);
        (self.memory.load(Ordering::Relaxed), ranges.collect())
    }

    fn with<R>(&self, f: impl FnOnce(&mut VhostUser) -> R) -> R {
        f(&mut self.lock().backend)
    }

    /// Stops a queue's ring. The back end of an earlier connection has ended.
    fn stop_ring(&self, index: usize, ring: &RingHandle) -> Result<(), VhostUserError> {
        let mut at = self.lock();
        // Any queue can then take a ring of the new connection.
        at.split[index] = false;
        if ring.connection() != at.rings.connection { Ok(()) } else { at.backend.stop_ring(index) }
    }

    /// Whether the back end can split frames behind their headers.
    fn splits(&self) -> bool {
        self.lock().backend.splits()
    }

    /// Starts a queue's ring again, which was stopped on that connection; `split` if the queue receives into device memory. If there
    /// is another connection since, its back end has started a new ring, which the queue takes, or has taken already.
    fn restart_ring(
        &self,
        index: usize,
        connection: u32,
        ring: &RingHandle,
        split: bool,
    ) -> Result<(), VhostUserError> {
        let mut at = self.lock();
        at.split[index] = split;
        if connection != at.rings.connection {
            return Ok(());
        }
        at.backend.restart_ring(index, ring.addresses(), ring.call(), ring.kick())
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
#[must_use = "a queue stops when it is dropped"]
pub struct QueuePair<M: PeerMemory = PeerShared> {
    /// Receives.
    pub rx: VirtioRx<M>,
    /// Transmits.
    pub tx: VirtioTx<M>,
}

/// A virtio-net device in use.
///
/// `M` is the kind of memory of its receive pages. It follows from the options: [`PeerShared`], whose bytes are copied
/// out before they are read, or [`TrustedPeer`](netmem_pool::TrustedPeer) of a device that the user has declared
/// [trusted](NetOptions::trust_peer), whose bytes are slices. The driver checks what either of them says about its
/// rings.
pub struct VirtioNet<M: PeerMemory = PeerShared> {
    link: Arc<Link<M>>,
    control: Option<ControlQueue>,
    control_index: usize,
    features: Negotiated,
    pairs: u16,
    active: u16,
    region: Arc<Region<M>>,
    /// What transmit pools take their pages from.
    reserve: Option<Arc<Reserve<M>>>,
}

impl<M: PeerMemory> VirtioNet<M> {
    /// Negotiates with the device, gives it memory, and starts the rings. All queue pairs of the
    /// [options](NetOptions::pairs) are in use then.
    ///
    /// A device with a control queue is told of several pairs by a command, and the driver waits
    /// for the answer for 3 s. So another thread must run the device, if it is in this process.
    ///
    /// # Errors
    ///
    /// [`NetError`]; nothing is left behind, and the connection is closed.
    /// [`NetError::ControlTimeout`] and [`NetError::ControlRefused`] if the device does not use as
    /// many pairs.
    pub fn probe(mut backend: VhostUser, mut options: NetOptions<M>) -> Result<(Self, Vec<QueuePair<M>>), NetError> {
        let layout = options.check(backend.splits())?;
        let pairs = options.pairs;
        if u64::from(pairs) > backend.pairs() {
            return Err(VhostUserError::TooFewQueues { wanted: pairs, has: backend.pairs() }.into());
        }
        let with_control = backend.has_control_queue() && pairs > 1;
        let (need, want) = options.features(with_control);
        let fields = config::fields(&backend, with_control);
        let offloads = feature::with_needs(need | want & backend.offered());
        let features = Negotiated::new(need | offloads | fields);
        let why = match options.mode {
            RxMode::Small => "small mode needs",
            RxMode::Mergeable => "mergeable mode needs",
            RxMode::Big => "big-packet mode needs",
        };
        if options.checksums() {
            backend.require(options::CHECKSUMS, "device memory needs, which this process cannot checksum")?;
        }
        backend.require(options.rings, "was asked for")?;
        backend.negotiate(features.bits(), why, options.mtu())?;

        let header = match options.mode {
            RxMode::Mergeable => Header::Mergeable,
            _ if options.checksums() => Header::Offloads,
            _ => Header::Plain,
        };
        let supply = options.supply()?;
        let region = supply.region();
        let asked = options.tx_pages;
        let reserve = (asked > 0).then(|| Reserve::new(supply.provider(), asked)).transpose();
        let reserve = reserve.map_err(|had| NetError::TxPages { asked, had })?;
        let plan = Plan::new(&options, features, &backend);
        let rings = Arc::new(plan.memory()?);
        // The pages' region comes first, so that devices which share it have the same addresses for it, also if their
        // rings differ in size.
        let table = VhostDomain::new(std::slice::from_ref(&region)).and_shared(rings.clone());
        let table = options.device_memory.iter().cloned().fold(table, VhostDomain::and_device);
        let entries: Vec<VhostRegion> = if options.premapped {
            table.regions().to_vec()
        } else {
            vec![VhostRegion::plain(region.clone()), VhostRegion::plain(rings.clone())]
        };
        backend.set_memory(&entries)?;
        let rings = RingMemory { region: rings, bus: entries[RingMemory::ENTRY].bus(), connection: 0 };
        let added = table.added();
        let domain: Option<Arc<dyn DmaDomain>> = match (options.premapped, options.domain.take()) {
            (false, _) => None,
            (true, None) => Some(Arc::new(table)),
            (true, Some(wrap)) => Some(wrap(table)),
        };

        let control_index = control_index(&backend);
        let recipe = Recipe {
            provider: supply.provider(),
            big: match &supply {
                Supply::Own(pages) if options.mode == RxMode::Big => Some(pages.clone()),
                _ => None,
            },
            max_frame: options.max_frame,
            domain: domain.clone(),
            layout,
            header,
            offloads: features.received(),
            cache: options.cache,
            ring_size: options.ring_size,
            plan,
            mtu: options.mtu(),
            split: options.checksums(),
        };
        let alarms = Alarms::new(2 * usize::from(pairs))?;
        alarms.watch(backend.socket())?;
        let split = vec![false; 2 * usize::from(pairs)];
        let attached = Mutex::new(Attached { backend, table: entries, rings, ready: Vec::new(), split });
        let (connection, memory) = (AtomicU32::new(0), AtomicU32::new(0));
        let link = Arc::new(Link { attached, connection, ended: Ended::default(), added, memory, alarms, recipe });
        let plan = &link.recipe.plan;
        let mut queues = Vec::new();
        for pair in 0..usize::from(pairs) {
            let (rx_index, tx_index) = (2 * pair, 2 * pair + 1);
            let ring = link.lock().rings.queue(plan, rx_index, &link.alarms)?;
            let rx = VirtioRx::new(ring, link.recipe.pool(pair, supply.provider())?, rx_index, link.clone());
            let headers = link.lock().rings.headers(plan, pair);
            let memory = match &domain {
                Some(domain) => Memory::Domain(domain.clone()),
                None => Memory::Plain(region.clone()),
            };
            let ring = link.lock().rings.queue(plan, tx_index, &link.alarms)?;
            let tx = VirtioTx::new(ring, headers, memory, features, tx_index, link.clone());
            link.with(|b| {
                for (index, ring) in [(rx_index, rx.ring()), (tx_index, tx.handle())] {
                    b.start_ring(index, ring.addresses(), ring.call(), ring.kick())?;
                    b.enable_ring(index, true)?;
                }
                Ok::<_, VhostUserError>(())
            })?;
            queues.push(QueuePair { rx, tx });
        }
        let control = with_control.then(|| {
            let (ring, buffer) = link.lock().rings.control(plan)?;
            link.with(|b| {
                b.start_ring(control_index, ring.addresses(), ring.call(), ring.kick())?;
                b.enable_ring(control_index, true)
            })?;
            Ok::<_, NetError>(ControlQueue::new(ring, buffer))
        });
        let mut control = control.transpose()?;
        link.with(VhostUser::ready)?;
        // A device uses one pair until it is told of more, and would not see what is sent by the
        // others.
        control.as_mut().map_or(Ok(()), |control| control.set_pairs(pairs))?;
        Ok((Self { link, control, control_index, features, pairs, active: pairs, region, reserve }, queues))
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
        self.features.bits()
    }

    /// The memory of the receive pages.
    #[must_use]
    pub fn region(&self) -> &Region<M> {
        &self.region
    }

    /// The DMA domain of the device: its memory table, or what [`NetOptions::domain`] has made of that. `None` if the
    /// device takes this process's addresses ([`NetOptions::premapped`]).
    #[must_use]
    pub fn domain(&self) -> Option<&Arc<dyn DmaDomain>> {
        self.link.recipe.domain.as_ref()
    }

    /// Makes a pool of pages to send from. Any thread allocates from it, by shared reference. The pages are in the device's
    /// memory table and domain, so a packet made of them is sent without being mapped. All such pools share the pages of
    /// [`NetOptions::tx_pages`].
    ///
    /// # Errors
    ///
    /// [`NetError::NoTxPages`] if none were set aside, [`NetError::Pool`] if there is no memory for the pool itself.
    pub fn tx_pool(&self, options: PoolOptions) -> Result<SharedPool<M>, NetError> {
        let reserve = self.reserve.clone().ok_or(NetError::NoTxPages)?;
        Ok(options.build_shared(reserve, self.domain().cloned())?)
    }

    /// Gives the device a region of device memory while it runs, so that queues can be restarted with it and frames sent
    /// from it. Does nothing if the device has it. [`NetOptions::late_device_memory`] was said before the device was probed. One or
    /// two messages; the rings go on.
    ///
    /// # Errors
    ///
    /// [`NetError::NoDeviceMemory`], [`NetError::NoMemorySlots`], [`NetError::MemorySlots`], [`NetError::Backend`].
    pub fn add_device_memory(&self, region: &Arc<Region<Device>>) -> Result<(), NetError> {
        self.link.add_device_memory(region).map(drop)
    }

    /// Takes a region of device memory away from the device, which was [added](Self::add_device_memory) while it ran. Returns
    /// false if the device has no such region, or has it since it was probed.
    ///
    /// # Errors
    ///
    /// [`NetError::MemoryInUse`]: nothing has changed. [`NetError::Backend`]: the connection has failed, and the region is
    /// removed here.
    pub fn remove_device_memory(&self, region: &Region<Device>) -> Result<bool, NetError> {
        let Some(bus) = self.link.lock().table.iter().find(|entry| entry.is(region)).map(VhostRegion::bus) else {
            return Ok(false);
        };
        self.link.remove_device_memory(bus)
    }

    /// Whether the device still holds its end of the connection. If it does not, [`reconnect`](Self::reconnect) takes another
    /// one. One system call.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.link.look_at(&self.link.lock())
    }
}

impl<M: PeerMemory> Drop for VirtioNet<M> {
    fn drop(&mut self) {
        if self.control.is_some() {
            // A device that is gone has stopped.
            let _ = self.link.with(|b| b.stop_ring(self.control_index));
        }
    }
}

impl<M: PeerMemory> fmt::Debug for VirtioNet<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtioNet({}/{} pairs, features {:#x})", self.active, self.pairs, self.features.bits())
    }
}

/// The number of the control queue's ring.
fn control_index(backend: &VhostUser) -> usize {
    usize::try_from(backend.pairs() * 2).unwrap_or(usize::MAX)
}

/// Where rings, header arrays, tables and the control queue lie in their region.
struct Plan {
    negotiated: Negotiated,
    ring_size: u16,
    ring: usize,
    header: usize,
    /// Bytes of the tables of a ring; 0 if there are none.
    tables: usize,
    /// Whether receive rings have tables, too.
    rx_tables: bool,
    pairs: usize,
    total: usize,
}

impl Plan {
    fn new<M: PeerMemory>(o: &NetOptions<M>, negotiated: Negotiated, backend: &VhostUser) -> Self {
        let size = usize::from(o.ring_size);
        let ring = Place::bytes(negotiated, o.ring_size);
        let header = (size * HEADER_STRIDE).next_multiple_of(Place::ALIGN);
        let table = usize::from(RingHandle::PER_TABLE) * Tables::ENTRY;
        let tables = if negotiated.indirect() { (size * table).next_multiple_of(Place::ALIGN) } else { 0 };
        let pairs = usize::from(o.pairs);
        let control = Place::bytes(negotiated, ctrl::SIZE) + ctrl::BUFFER;
        let rx_tables = o.has_long_chains() && Self::takes_rx_tables(negotiated, backend);
        let total = pairs * (2 * ring + header + if rx_tables { 2 } else { 1 } * tables) + control;
        Self { negotiated, ring_size: o.ring_size, ring, header, tables, rx_tables, pairs, total }
    }

    /// Whether a back end follows tables in a receive ring. DPDK's vhost takes the table itself for a buffer, in a packed ring.
    fn takes_rx_tables(negotiated: Negotiated, backend: &VhostUser) -> bool {
        !negotiated.packed() || backend.splits()
    }

    /// Memory for all of it.
    fn memory(&self) -> Result<Region<PeerShared>, RegionError> {
        RegionOptions::new(self.total.div_ceil(PAGE_SIZE)).build()
    }

    fn ring(&self, index: usize) -> usize {
        index * self.ring
    }

    fn headers(&self, pair: usize) -> usize {
        2 * self.pairs * self.ring + pair * self.header
    }

    /// Whether receive rings have tables.
    fn rx_tables(&self) -> bool {
        self.tables > 0 && self.rx_tables
    }

    /// The tables of ring `index`, if it has any. Those of transmit rings come first.
    fn tables(&self, index: usize) -> Option<usize> {
        let (pair, receives) = (index / 2, index.is_multiple_of(2));
        let before = if receives { self.pairs + pair } else { pair };
        (if receives { self.rx_tables() } else { self.tables > 0 })
            .then(|| self.headers(self.pairs) + before * self.tables)
    }

    fn control(&self) -> usize {
        self.headers(self.pairs) + self.pairs * if self.rx_tables { 2 } else { 1 } * self.tables
    }

    fn control_buffer(&self) -> usize {
        self.control() + Place::bytes(self.negotiated, ctrl::SIZE)
    }
}
