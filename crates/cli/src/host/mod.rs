//! A stack over the embedded device: the device on a thread of its own, the driver and the stack on the caller's.

pub(crate) mod tasks;

use crate::cpus;
use anyhow::Context;
use netmem::device::port::{Port, PortError};
use netmem::device::{NetDevice, Options, Stats};
use netmem::pool::{PoolClosed, PoolOptions, SharedPool, TrustedPeer};
use netmem::virtio::Spin;
use netmem::{NetOptions, QueuePair, RxMode, VhostUser, VirtioNet, VirtioRx, VirtioTx};
use netmem_inet::wire::Mac;
use netmem_inet::{Address, Host, Interface, Stack, StackOptions, Time};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Builder;
use std::time::Instant;

/// Memory of the embedded device, which is in this process: its bytes are slices.
pub(crate) type Mem = TrustedPeer;
pub(crate) type OwnStack = Stack<VirtioRx<Mem>, VirtioTx<Mem>>;

/// Entries of each ring.
const RING: u16 = 256;
/// Received pages that connections and their users may hold.
const HELD: u32 = 4096;
/// Pages for headers and for what is copied to be sent.
const SENT: usize = 4096;

/// What a host is to be like.
#[derive(Clone, Debug)]
pub(crate) struct HostOptions {
    pub(crate) addresses: Vec<Address>,
    pub(crate) mtu: u16,
    /// Pages that can be sent, beside those for headers and copies.
    pub(crate) pages: usize,
    /// How long the device's thread polls before it sleeps.
    pub(crate) spin: Spin,
    /// Where the device's thread runs.
    pub(crate) device_cpu: Option<usize>,
}

/// The pools that a stack and its user send from.
pub(crate) struct Pools {
    /// For headers and copies.
    sent: Arc<SharedPool<Mem>>,
    /// For the user.
    own: Arc<SharedPool<Mem>>,
}

impl Pools {
    /// Makes them: `pages` for the user.
    pub(crate) fn new(net: &VirtioNet<Mem>, pages: usize) -> anyhow::Result<Self> {
        let pool = |name, pages| anyhow::Ok(Arc::new(net.tx_pool(PoolOptions::new(name).limit(pages))?));
        Ok(Self { sent: pool("sent", SENT)?, own: pool("own", pages)? })
    }
}

/// A stack, and what it runs on, for as long as it runs.
pub(crate) struct Running {
    pub(crate) stack: OwnStack,
    pub(crate) clock: Clock,
    /// Pages to send from, as many as were asked for.
    pub(crate) pool: Arc<SharedPool<Mem>>,
}

/// The time since a moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn now(self) -> Time {
        Time::ZERO + self.0.elapsed()
    }
}

/// Pages at the end: what pools count when all that was lent has come back, or has not.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Books {
    pub(crate) allocated: u64,
    pub(crate) outstanding: u64,
}

impl Books {
    pub(crate) fn add(&mut self, closed: &PoolClosed) {
        self.allocated += closed.stats.allocated();
        self.outstanding += closed.outstanding;
    }
}

/// An Ethernet address that follows from the first IP address, and is no vendor's.
pub(crate) fn mac(addresses: &[Address]) -> [u8; 6] {
    let bytes = match addresses.first().map(|address| address.addr) {
        Some(IpAddr::V4(addr)) => addr.octets(),
        Some(IpAddr::V6(addr)) => addr.octets().last_chunk().copied().unwrap_or_default(),
        None => [0; 4],
    };
    let [a, b, c, d] = bytes;
    [0x02, 0x6e, a, b, c, d]
}

/// What the device of some stacks has done, and the books of their pages.
pub(crate) struct Ended {
    pub(crate) stats: Arc<Stats>,
    pub(crate) books: Books,
}

/// Runs a device of `pairs` queue pairs over ports, and `run` with a driver, on this thread.
///
/// # Errors
///
/// Those of `run`, of the device and of its ports.
pub(crate) fn with_device<P: Port, T>(
    port: impl FnMut(usize) -> Result<P, PortError>,
    pairs: u16,
    options: &HostOptions,
    run: impl FnOnce(&VirtioNet<Mem>, Vec<QueuePair<Mem>>, &Arc<Stats>) -> anyhow::Result<T>,
) -> anyhow::Result<(T, Arc<Stats>)> {
    let (mac, mtu) = (Some(mac(&options.addresses)), Some(options.mtu));
    let device = Options { mac, mtu, max_pairs: pairs.into(), serve_control: pairs > 1, ..Options::default() };
    let mut device = NetDevice::new(device, port)?;
    let (control, stats) = (device.control(), device.stats());
    let (front, back) = UnixStream::pair().context("a socket pair")?;
    let connection = control.serve(back)?;
    let over = AtomicBool::new(false);
    let value = std::thread::scope(|scope| {
        let serve = || {
            options.device_cpu.into_iter().for_each(cpus::pin);
            device.run(&over, options.spin)
        };
        let server = Builder::new().name("netmem-device".into()).spawn_scoped(scope, serve);
        let server = server.context("cannot start the thread of the device")?;
        let result = drive(front, pairs, options, |net, pairs| run(net, pairs, &stats));
        over.store(true, Ordering::Relaxed);
        control.wake();
        let served = server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        served.context("the device's port")?;
        result
    })?;
    drop(connection);
    Ok((value, stats))
}

fn drive<T>(
    front: UnixStream,
    pairs: u16,
    options: &HostOptions,
    run: impl FnOnce(&VirtioNet<Mem>, Vec<QueuePair<Mem>>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let each = HELD as usize + 2 * usize::from(RING) + 1024;
    // SAFETY: the back end is the device of this process, which writes to posted buffers alone, and the region's file goes to no other.
    let net_options = unsafe { NetOptions::<Mem>::trust_peer(RxMode::Mergeable) };
    let net_options = net_options.pairs(pairs).ring_size(RING).pages(usize::from(pairs) * each);
    let net_options = net_options.tx_pages(usize::from(pairs) * (SENT + options.pages));
    let (mut net, queues) = VirtioNet::probe(VhostUser::own_device(front)?, net_options)?;
    if pairs > 1 {
        net.set_active_pairs(pairs)?;
    }
    let value = run(&net, queues);
    drop(net);
    value
}

/// Runs `run` with a stack over a queue pair, on this thread, and balances the books of its pages.
///
/// # Errors
///
/// Those of `run`; pages that did not come back.
pub(crate) fn with_queues<T>(
    pair: QueuePair<Mem>,
    pools: Pools,
    options: &HostOptions,
    run: impl FnOnce(&mut Running) -> anyhow::Result<T>,
) -> anyhow::Result<(T, Books)> {
    let QueuePair { rx, tx } = pair;
    let Pools { sent, own } = pools;
    let mac = Mac(mac(&options.addresses));
    let host = Host::new(Interface { mac, mtu: options.mtu, addresses: options.addresses.clone() });
    let stack_options = StackOptions { pages: HELD, ..StackOptions::default() };
    let clock = Clock::start();
    let stack = Stack::new(&host, rx, tx, Arc::clone(&sent), stack_options, clock.now())?;
    let mut running = Running { stack, clock, pool: own };
    let value = run(&mut running)?;
    let Running { stack, pool, .. } = running;
    let (rx, tx) = stack.into_queues();
    drop(tx);
    let mut books = Books::default();
    rx.close().iter().for_each(|closed| books.add(closed));
    for pool in [sent, pool] {
        books.add(&Arc::into_inner(pool).context("a pool is still in use; this is a bug of netmem")?.close());
    }
    anyhow::ensure!(books.outstanding == 0, "{} pages did not come back; this is a bug of netmem", books.outstanding);
    Ok((value, books))
}

/// Runs a device over one port, and `run` with a stack over it, on this thread.
///
/// # Errors
///
/// As of [`with_device`] and [`with_queues`].
pub(crate) fn with_stack<P: Port, T>(
    port: impl FnMut(usize) -> Result<P, PortError>,
    options: &HostOptions,
    run: impl FnOnce(&mut Running) -> anyhow::Result<T>,
) -> anyhow::Result<(T, Ended)> {
    let ((value, books), stats) = with_device(port, 1, options, |net, mut pairs, _| {
        let pair = pairs.pop().context("the device has no queues")?;
        with_queues(pair, Pools::new(net, options.pages)?, options, run)
    })?;
    Ok((value, Ended { stats, books }))
}
