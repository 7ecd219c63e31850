//! Stacks over the embedded device. Each stack has a thread; the first stack uses the caller's. The
//! device has its own threads, or each stack's thread drives the part of the device that serves its
//! queue pair ([`DeviceThreads`]).

pub(crate) mod tasks;
pub(crate) mod timers;

use anyhow::Context;
use netmem::device::port::{Port, PortError};
use netmem::device::{Control, DeviceError, InProcess, NetDevice, Options, Stats, Worker};
use netmem::net::Wait;
use netmem::pool::{PoolClosed, PoolOptions, SharedPool};
use netmem::virtio::{NetOptions, QueuePair, RxMode, Spin, VirtioNet};
use netmem_inet::wire::Mac;
use netmem_inet::{Address, Host, Interface, Stack, StackOptions};
use netmem_measure::cpus;
use netmem_measure::endpoint::{Clock, LARGE_FRAME, Mem, OwnStack, mac};
use netmem_measure::threads::{propagate, spawn};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Entries of each ring.
const RING: u16 = 256;
/// Received pages that connections and their users may hold.
const HELD: u32 = 4096;
/// Pages for headers and for what is copied to be sent.
const SENT: usize = 4096;

/// The options of a host.
#[derive(Clone, Debug)]
pub(crate) struct HostOptions {
    pub(crate) addresses: Vec<Address>,
    pub(crate) mtu: u16,
    /// Pages to send from, for the whole device or for one host. Pages for headers and copies come
    /// on top.
    pub(crate) pages: usize,
    /// Additional pages of each queue pair, for the payload of restored connections.
    pub(crate) restored: usize,
    pub(crate) device: DeviceThreads,
}

/// The threads that drive the device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DeviceThreads {
    /// The threads of the stacks: that of each stack drives the part of the device that serves its
    /// queue pair. The device and the driver then need no notifications to each other.
    Stacks,
    /// One thread, which sleeps as soon as it has no work.
    One {
        /// Its CPU.
        cpu: usize,
    },
}

/// A worker of the device, for a thread that drives it together with a stack. See [`Worker`].
pub(crate) trait Drives: Send {
    /// [`Worker::poll`].
    fn poll(&mut self) -> usize;

    /// [`Worker::turn`].
    fn turn(
        &mut self,
        work: usize,
        spin: Spin,
        others: &mut [&mut dyn Wait],
        at_most: Option<Duration>,
    ) -> Result<(), DeviceError>;
}

impl<P: Port> Drives for Worker<P> {
    fn poll(&mut self) -> usize {
        Self::poll(self)
    }

    fn turn(
        &mut self,
        work: usize,
        spin: Spin,
        others: &mut [&mut dyn Wait],
        at_most: Option<Duration>,
    ) -> Result<(), DeviceError> {
        Self::turn(self, work, spin, others, at_most)
    }
}

/// The queue pairs of a device, and the workers that serve them, if the threads of the stacks drive
/// them.
pub(crate) type Pairs = Vec<(QueuePair<Mem>, Option<Box<dyn Drives>>)>;

/// A running stack, with its clock, its host and its pages.
pub(crate) struct Running {
    pub(crate) stack: OwnStack,
    pub(crate) clock: Clock,
    /// The part of the device that this thread drives ([`DeviceThreads::Stacks`]).
    pub(crate) device: Option<Box<dyn Drives>>,
    /// The part that it shares with the other stacks.
    pub(crate) host: Host<Mem>,
    /// Pages to send from, [`HostOptions::pages`] of them.
    pub(crate) pool: Arc<SharedPool<Mem>>,
}

/// Counts of pages at the end: how many the pools allocated, and how many of them were not
/// returned.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Accounting {
    pub(crate) allocated: u64,
    pub(crate) outstanding: u64,
}

impl Accounting {
    pub(crate) fn add(&mut self, closed: &PoolClosed) {
        self.allocated += closed.stats.allocated();
        self.outstanding += closed.outstanding;
    }
}

/// The device's counters and the counts of pages, at the end.
pub(crate) struct Ended {
    pub(crate) stats: Arc<Stats>,
    pub(crate) accounting: Accounting,
}

/// Runs a device of `pairs` queue pairs over ports, and `run` with a driver, on this thread.
///
/// # Errors
///
/// Those of `run`, of the device and of its ports.
pub(crate) fn with_device<P: Port + 'static, T>(
    mut port: impl FnMut(usize) -> Result<P, PortError>,
    pairs: u16,
    options: &HostOptions,
    run: impl FnOnce(&VirtioNet<Mem>, Pairs, &Arc<Stats>) -> anyhow::Result<T>,
) -> anyhow::Result<(T, Arc<Stats>)> {
    let mut value = None;
    let run: Drive<'_> = Box::new(|net, pairs, stats| {
        value = Some(run(net, pairs, stats)?);
        Ok(())
    });
    let stats = start(&mut port, pairs, options, run)?;
    Ok((value.context("the driver has not run")?, stats))
}

/// What runs with a driver. Without its type: a device would be compiled again for each.
type Drive<'a> = Box<dyn FnOnce(&VirtioNet<Mem>, Pairs, &Arc<Stats>) -> anyhow::Result<()> + 'a>;

/// See [`with_device`].
fn start<P: Port + 'static>(
    port: &mut dyn FnMut(usize) -> Result<P, PortError>,
    pairs: u16,
    options: &HostOptions,
    run: Drive<'_>,
) -> anyhow::Result<Arc<Stats>> {
    let (mac, mtu) = (Some(mac(&options.addresses)), Some(options.mtu));
    // The driver waits for the answer of the control queue, which a worker sends. A thread that
    // drives both cannot. Without the queue, the driver enables its pairs by messages, which
    // another thread of the device answers.
    let serve_control = pairs > 1 && matches!(options.device, DeviceThreads::One { .. });
    let device = Options { mac, mtu, max_pairs: pairs.into(), serve_control, ..Options::default() };
    let device = NetDevice::new(device, port)?;
    let (control, stats) = (device.control(), device.stats());
    let (mut servers, mut driven): (Vec<Worker<P>>, Vec<Box<dyn Drives>>) = Default::default();
    match options.device {
        DeviceThreads::One { .. } => servers = device.workers(1)?,
        DeviceThreads::Stacks => {
            for worker in device.workers(pairs.into())? {
                driven.push(Box::new(worker));
            }
        }
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let over = &over;
        let serve = |mut worker: Worker<P>| {
            let run = move || {
                if let DeviceThreads::One { cpu } = options.device {
                    cpus::pin(cpu);
                }
                worker.run(over, Spin::NONE)
            };
            spawn(scope, "netmem-device", run)
        };
        let servers: std::io::Result<Vec<_>> = servers.into_iter().map(serve).collect();
        let servers = servers.context("cannot start a thread of the device")?;
        let result = drive(&control, pairs, options, &stats, driven, run);
        over.store(true, Ordering::Relaxed);
        control.wake();
        for server in servers {
            let served = propagate(server.join());
            served.context("the device's port")?;
        }
        result
    })?;
    Ok(stats)
}

/// Connects a driver to the device, and runs `run` with it.
fn drive(
    control: &Control,
    pairs: u16,
    options: &HostOptions,
    stats: &Arc<Stats>,
    driven: Vec<Box<dyn Drives>>,
    run: Drive<'_>,
) -> anyhow::Result<()> {
    let each = HELD as usize + 2 * usize::from(RING) + 1024;
    let net_options = NetOptions::new(RxMode::Mergeable).reserved_huge_pages(true);
    let net_options = net_options.pairs(pairs).ring_size(RING).pages(usize::from(pairs) * each);
    // Frames of more than 1518 bytes: the driver then accepts large segments, which the device
    // would cut and checksum otherwise.
    let net_options = net_options.max_frame(LARGE_FRAME);
    let net_options = net_options.tx_pages(usize::from(pairs) * (SENT + options.restored) + options.pages);
    // Dropped in reverse order: the connection last.
    let InProcess { connection: _connection, net, pairs } = control.connect(net_options)?;
    let driven = driven.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
    run(&net, pairs.into_iter().zip(driven).collect(), stats)
}

/// The stacks of a host, one for each queue pair. They end together, because one stack may hold a
/// frame that another one received.
pub(crate) struct Stacks {
    host: Host<Mem>,
    clock: Clock,
    queues: Vec<Queues>,
    /// Pages to send from. Pages for headers and copies are separate.
    own: Arc<SharedPool<Mem>>,
}

/// A queue pair, the worker that serves it if this host drives it, and its pages for headers and
/// copies.
struct Queues {
    pair: QueuePair<Mem>,
    device: Option<Box<dyn Drives>>,
    sent: Arc<SharedPool<Mem>>,
}

impl Stacks {
    /// A host over these queue pairs of a device, with `options.pages` pages to send.
    pub(crate) fn new(net: &VirtioNet<Mem>, pairs: Pairs, options: &HostOptions) -> anyhow::Result<Self> {
        let pool = |name, pages| anyhow::Ok(Arc::new(net.tx_pool(PoolOptions::new(name).limit(pages))?));
        let own = pool("own", options.pages)?;
        let queues: anyhow::Result<_> = pairs
            .into_iter()
            .map(|(pair, device)| Ok(Queues { pair, device, sent: pool("sent", SENT + options.restored)? }))
            .collect();
        let mac = Mac(mac(&options.addresses));
        let host = Host::new(Interface { mac, mtu: options.mtu, addresses: options.addresses.clone() });
        Ok(Self { host, clock: Clock::start(), queues: queues?, own })
    }

    /// Pages to send from.
    pub(crate) fn pool(&self) -> &Arc<SharedPool<Mem>> {
        &self.own
    }

    /// The pools for headers and copies, one for each stack, before the stacks run.
    pub(crate) fn sent_pools(&self) -> Vec<Arc<SharedPool<Mem>>> {
        self.queues.iter().map(|queues| Arc::clone(&queues.sent)).collect()
    }

    /// The part that the stacks share.
    pub(crate) fn host(&self) -> &Host<Mem> {
        &self.host
    }

    /// Calls `run` with each stack and its number, each on its own thread; the first on this
    /// thread. Returns the values that the calls returned.
    ///
    /// # Errors
    ///
    /// The first error of a call. If one call fails, the other calls go on; `run` itself must stop
    /// them.
    pub(crate) fn run<T: Send>(
        &mut self,
        run: impl Fn(usize, &mut Running) -> anyhow::Result<T> + Sync,
    ) -> anyhow::Result<Vec<T>> {
        let Self { host, clock, queues, own } = self;
        // No call begins before all threads are started. Otherwise, if a thread cannot be started,
        // this function would wait for calls that wait for a signal.
        let all_started = Mutex::new(false);
        let each = |n, queues: Queues| {
            if !*all_started.lock().unwrap_or_else(PoisonError::into_inner) {
                anyhow::bail!("not all threads could be started");
            }
            let Queues { pair: QueuePair { rx, tx }, device, sent } = queues;
            let options = StackOptions { pages: HELD, ..StackOptions::default() };
            let stack = Stack::new(host, rx, tx, Arc::clone(&sent), options, clock.now())?;
            let mut running = Running { stack, clock: *clock, device, host: host.clone(), pool: Arc::clone(own) };
            let value = run(n, &mut running)?;
            let Running { stack, device, .. } = running;
            let (rx, tx) = stack.into_queues();
            Ok((value, Queues { pair: QueuePair { rx, tx }, device, sent }))
        };
        let mut waiting = std::mem::take(queues).into_iter().enumerate();
        let first = waiting.next().context("a host without queues")?;
        let ended: anyhow::Result<Vec<_>> = std::thread::scope(|scope| {
            let starting = all_started.lock().unwrap_or_else(PoisonError::into_inner);
            let each = &each;
            let start = |(n, queues)| spawn(scope, format!("netmem-stack{n}"), move || each(n, queues));
            let others: std::io::Result<Vec<_>> = waiting.map(start).collect();
            let others = others.context("cannot start a thread")?;
            let mut starting = starting;
            *starting = true;
            drop(starting);
            let first = each(first.0, first.1);
            let others = others.into_iter();
            let others = others.map(|thread| propagate(thread.join()));
            // All threads are joined before an error is returned.
            let all: Vec<_> = std::iter::once(first).chain(others).collect();
            all.into_iter().collect()
        });
        let (values, back) = ended?.into_iter().unzip();
        *queues = back;
        Ok(values)
    }

    /// Closes all pools, and checks that all pages were returned.
    ///
    /// # Errors
    ///
    /// Pages were not returned, or a pool is still in use.
    pub(crate) fn close(self) -> anyhow::Result<Accounting> {
        let Self { host, queues, own, .. } = self;
        // This also drops the packets that wait for a neighbour's address.
        drop(host);
        let mut accounting = Accounting::default();
        let (receiving, sending): (Vec<_>, Vec<_>) =
            queues.into_iter().map(|Queues { pair: QueuePair { rx, tx }, sent, .. }| (rx, (tx, sent))).unzip();
        // The rings are dropped first, because frames in a ring may have pages of any queue's pool.
        let (rings, pools): (Vec<_>, Vec<_>) = sending.into_iter().unzip();
        drop(rings);
        receiving.into_iter().for_each(|rx| rx.close().iter().for_each(|closed| accounting.add(closed)));
        for pool in pools.into_iter().chain([own]) {
            accounting.add(&Arc::into_inner(pool).context("a pool is still in use; this is a bug of netmem")?.close());
        }
        anyhow::ensure!(
            accounting.outstanding == 0,
            "{} pages did not come back; this is a bug of netmem",
            accounting.outstanding
        );
        Ok(accounting)
    }
}

/// Runs a device of `pairs` queue pairs, and `run` with the stacks of a host over it.
///
/// # Errors
///
/// As of [`with_device`] and [`Stacks::close`].
pub(crate) fn with_stacks<P: Port + 'static, T>(
    port: impl FnMut(usize) -> Result<P, PortError>,
    pairs: u16,
    options: &HostOptions,
    run: impl FnOnce(&mut Stacks) -> anyhow::Result<T>,
) -> anyhow::Result<(T, Ended)> {
    let ((value, accounting), stats) = with_device(port, pairs, options, |net, queues, _| {
        let mut stacks = Stacks::new(net, queues, options)?;
        let value = run(&mut stacks)?;
        Ok((value, stacks.close()?))
    })?;
    Ok((value, Ended { stats, accounting }))
}
