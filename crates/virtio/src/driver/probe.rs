//! From a connection to running queues, in three steps: negotiate, lay out memory, start the rings.
//!
//! The steps are in the order in which a front end sends its messages: the features, then the
//! memory, then the rings. Whatever fails leaves nothing behind, because each step returns the
//! values that the next one needs, and dropping them closes the connection.

use super::buffer_layout::{BufferLayout, HeaderFields};
use super::config_space;
use super::ctrl::ControlQueue;
use super::error::NetError;
use super::modes::RxMode;
use super::options::{self, NetOptions, PageSource};
use super::queue_config::QueueConfig;
use super::queue_epolls::QueueEpolls;
use super::reserve::Reserve;
use super::ring_layout::{RingLayout, RingMemory};
use super::rx::VirtioRx;
use super::state::{Attached, DriverState, LastDisconnect};
use super::stop::Stop;
use super::tx::VirtioTx;
use super::tx_mappings::TxAddressing;
use super::virtio_net::{QueuePair, VirtioNet};
use crate::net::feature;
use crate::vhost_user::{VhostUser, VhostUserError};
use crate::virtqueue::Negotiated;
use netmem_pool::{AddedMemory, DmaDomain, PeerMemory, Region, VhostDomain, VhostRegion};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};

/// What the driver and the device have agreed on.
struct Agreement {
    features: Negotiated,
    /// How received frames lie in pages.
    layout: BufferLayout,
    /// Whether the device serves a control queue that the driver uses.
    with_control: bool,
}

/// The memory that the device has, and the values from which its queues are made.
struct LaidOut<M: PeerMemory> {
    region: Arc<Region<M>>,
    reserve: Option<Arc<Reserve<M>>>,
    /// The memory table as the device has it.
    table: Vec<VhostRegion>,
    rings: RingMemory,
    added: AddedMemory,
    config: QueueConfig<M>,
}

impl<M: PeerMemory> VirtioNet<M> {
    /// Negotiates with the device, sends it the memory table, and starts the rings. All queue pairs
    /// of the [options](NetOptions::pairs) are in use then.
    ///
    /// To a device with a control queue, the driver sends the number of pairs as a command, and
    /// waits for the answer for 3 s. **Another thread must run the device, if it is in this
    /// process.**
    ///
    /// # Errors
    ///
    /// [`NetError`]; nothing is left behind, and the connection is closed.
    /// [`NetError::ControlTimeout`] and [`NetError::ControlRefused`] if the device does not use as
    /// many pairs.
    pub fn probe(mut backend: VhostUser, options: NetOptions<M>) -> Result<(Self, Vec<QueuePair<M>>), NetError> {
        let pairs = options.pairs;
        let agreement = negotiate(&mut backend, &options)?;
        let laid_out = lay_out(&mut backend, options, &agreement)?;
        start(backend, pairs, &agreement, laid_out)
    }
}

/// Checks the options against the device, and negotiates the features that follow from both.
fn negotiate<M: PeerMemory>(backend: &mut VhostUser, options: &NetOptions<M>) -> Result<Agreement, NetError> {
    let layout = options.check(backend.splits())?;
    let pairs = options.pairs;
    if u64::from(pairs) > backend.pairs() {
        return Err(VhostUserError::TooFewQueues { wanted: pairs, has: backend.pairs() }.into());
    }
    let with_control = backend.has_control_queue() && pairs > 1;
    let (need, want) = options.features(with_control);
    let fields = config_space::fields(backend, with_control);
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
    Ok(Agreement { features, layout, with_control })
}

/// Allocates the memory of pages and rings, and sends the device its table.
fn lay_out<M: PeerMemory>(
    backend: &mut VhostUser,
    mut options: NetOptions<M>,
    agreement: &Agreement,
) -> Result<LaidOut<M>, NetError> {
    let header = match options.mode {
        RxMode::Mergeable => HeaderFields::Mergeable,
        _ if options.checksums() => HeaderFields::Offloads,
        _ => HeaderFields::Plain,
    };
    let supply = options.page_source()?;
    let region = supply.region();
    let asked = options.tx_pages;
    let reserve = (asked > 0).then(|| Reserve::new(supply.provider(), asked)).transpose();
    let reserve = reserve.map_err(|had| NetError::TxPages { asked, had })?;
    let plan = RingLayout::new(&options, agreement.features, backend);
    let rings = Arc::new(plan.memory()?);
    // The pages' region comes first, so that devices which share it have the same addresses for it,
    // also if their rings differ in size.
    let memory = VhostDomain::new(std::slice::from_ref(&region)).and_shared(rings.clone());
    let memory = options.device_memory.iter().cloned().fold(memory, VhostDomain::and_device);
    let table: Vec<VhostRegion> = if options.premapped {
        memory.regions().to_vec()
    } else {
        vec![VhostRegion::plain(region.clone()), VhostRegion::plain(rings.clone())]
    };
    backend.set_memory(&table)?;
    let rings = RingMemory { region: rings, bus: table[RingMemory::ENTRY].bus(), connection: 0 };
    let added = memory.added();
    let domain: Option<Arc<dyn DmaDomain>> = match (options.premapped, options.domain.take()) {
        (false, _) => None,
        (true, None) => Some(Arc::new(memory)),
        (true, Some(wrap)) => Some(wrap(memory)),
    };
    let config = QueueConfig {
        provider: supply.provider(),
        big: match &supply {
            PageSource::Own(pages) if options.mode == RxMode::Big => Some(pages.clone()),
            _ => None,
        },
        max_frame: options.max_frame,
        domain,
        layout: agreement.layout,
        header,
        offloads: agreement.features.received(),
        cache: options.cache,
        ring_size: options.ring_size,
        plan,
        mtu: options.mtu(),
        split: options.checksums(),
    };
    Ok(LaidOut { region, reserve, table, rings, added, config })
}

/// Makes all queues, and starts their rings.
fn start<M: PeerMemory>(
    backend: VhostUser,
    pairs: u16,
    agreement: &Agreement,
    laid_out: LaidOut<M>,
) -> Result<(VirtioNet<M>, Vec<QueuePair<M>>), NetError> {
    let LaidOut { region, reserve, table, rings, added, config } = laid_out;
    let control_index = backend.control_ring();
    let epolls = QueueEpolls::new(2 * usize::from(pairs))?;
    epolls.watch(backend.socket())?;
    let split = vec![false; 2 * usize::from(pairs)];
    let attached = Mutex::new(Attached { backend, table, rings, ready: Vec::new(), split });
    let (connection, memory) = (AtomicU32::new(0), AtomicU32::new(0));
    let state = Arc::new(DriverState {
        attached,
        connection,
        last_disconnect: LastDisconnect::default(),
        added,
        memory,
        epolls,
        config,
    });
    let pair = |pair| start_pair(&state, pair, agreement.features, &region);
    let queues = (0..usize::from(pairs)).map(pair).collect::<Result<Vec<_>, _>>()?;
    let mut control = agreement.with_control.then(|| start_control(&state, control_index)).transpose()?;
    state.with(VhostUser::ready)?;
    // A device uses one pair until the driver sets a larger number, and ignores the transmit rings
    // of the others until then.
    control.as_mut().map_or(Ok(()), |control| control.set_pairs(pairs))?;
    let features = agreement.features;
    Ok((VirtioNet { state, control, control_index, features, pairs, active: pairs, region, reserve }, queues))
}

/// Makes a queue pair, and starts its rings.
fn start_pair<M: PeerMemory>(
    state: &Arc<DriverState<M>>,
    pair: usize,
    features: Negotiated,
    region: &Arc<Region<M>>,
) -> Result<QueuePair<M>, NetError> {
    let config = &state.config;
    let (rx_index, tx_index) = (2 * pair, 2 * pair + 1);
    let ring = state.lock().rings.queue(&config.plan, rx_index, &state.epolls)?;
    let rx = VirtioRx::new(ring, config.pool(pair, config.provider.clone())?, rx_index, state.clone());
    let headers = state.lock().rings.headers(&config.plan, pair);
    let memory = match &config.domain {
        Some(domain) => TxAddressing::Domain(domain.clone()),
        None => TxAddressing::Plain(region.clone()),
    };
    let ring = state.lock().rings.queue(&config.plan, tx_index, &state.epolls)?;
    let tx = VirtioTx::new(ring, headers, memory, features, tx_index, state.clone());
    state.with(|backend| {
        for (index, ring) in [(rx_index, rx.ring()), (tx_index, tx.handle())] {
            backend.start_ring(index, ring.addresses(), ring.call(), ring.kick())?;
            backend.enable_ring(index, true)?;
        }
        Ok::<_, VhostUserError>(())
    })?;
    Ok(QueuePair { rx, tx })
}

/// Makes the control queue, and starts its ring.
fn start_control<M: PeerMemory>(state: &DriverState<M>, index: usize) -> Result<ControlQueue, NetError> {
    let (ring, buffer) = state.lock().rings.control(&state.config.plan)?;
    state.with(|backend| {
        backend.start_ring(index, ring.addresses(), ring.call(), ring.kick())?;
        backend.enable_ring(index, true)
    })?;
    Ok(ControlQueue::new(ring, buffer))
}
