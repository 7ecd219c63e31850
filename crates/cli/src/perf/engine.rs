//! One measurement of one variant: a new device, a new driver, and a thread for each CPU in use. At
//! the end the pages are counted: allocations and returns must balance.
//!
//! ```text
//!   CPU device   Device::poll ──── rings ────┐            ┌─► drop                       --consumer same
//!   CPU net                      Driver: rx.poll ─► XDP ──┤
//!   CPU app                                               └─► mailbox ─► drop            --consumer CPU
//! ```
//!
//! If the application shares a CPU with the driver or the device, its work is done in turns on that
//! thread. Two threads that poll busily on one CPU would measure the scheduler.

use super::driver::{Driver, Queues, Until, Virtio};
use super::error::PerfError;
use super::live::Live;
use super::mailbox::{Halt, MAILBOX, Mail, Mailbox, consume, drain, idle, mailbox};
use super::memory::Baseline;
use super::plan::{Consumer as Where, Plan, Variant};
use super::sample::{Counts, DeviceSample, Sample};
use super::xsk::Opened;
use crate::args::{DeviceArg, PortArg, XskArg};
use crate::device::socket::{self, Inherited};
use crate::link::{AskedLink, one_each};
use netmem::device::port::{Gen, Pcap, Play, Port, PortError, Tap};
use netmem::device::{NetDevice, Options, Stats};
use netmem::net::{TxBulk, TxQueue};
use netmem::pool::PoolStats;
use netmem::virtio::socket::Listener;
use netmem::virtio::{NetOptions, QueuePair, RxMode, VhostUser, VhostUserError, VirtioNet};
use netmem_measure::cpus::{pin, take_pinned};
use netmem_measure::threads::{propagate, spawn};
use quanta::Clock;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest time for a back end to connect. Back ends that connect by themselves try about once
/// a second.
const COMES: Duration = Duration::from_secs(60);
/// How often a waiting thread checks for a signal.
const CHECK_EVERY: Duration = Duration::from_millis(100);

/// Measures variants.
pub(crate) struct Engine<'a> {
    plan: &'a Plan,
    stop: &'a AtomicBool,
    clock: Clock,
    capture: Option<Pcap>,
    link: Option<AskedLink>,
    live: Option<&'a Live>,
    /// The listening socket for back ends. It stays for all runs: back ends connect again after
    /// each run.
    listener: Option<Listener>,
}

/// Serves the embedded device until the flag is set, and empties the end of the application's
/// mailbox, if there is one. Returns why it ended early.
type Serve<'a> = dyn FnMut(Option<Mail>, &AtomicBool) -> Option<PortError> + Send + 'a;

/// A driver that has finished its work and is still connected.
struct Driven {
    virtio: Virtio,
    baseline: Option<Baseline>,
    counts: Counts,
    device: DeviceSample,
}

impl<'a> Engine<'a> {
    /// Opens the parts that all runs share.
    pub(crate) fn new(plan: &'a Plan, live: Option<&'a Live>, stop: &'a AtomicBool) -> Result<Self, PerfError> {
        let capture = match &plan.port {
            PortArg::Pcap(path) => Some(Pcap::open(path, Play::Loop)?),
            _ => None,
        };
        let listener = match &plan.device {
            DeviceArg::Listen(socket) => {
                let listener = Listener::bind(socket).map_err(PerfError::Backend)?;
                let (path, most) = (socket.display(), COMES.as_secs());
                eprintln!("listening on {path}: waiting for a back end to connect, for {most} s at most");
                Some(listener)
            }
            _ => None,
        };
        let link = AskedLink::open(plan.link, plan.pcap.as_deref())?;
        Ok(Self { plan, stop, clock: Clock::new(), capture, link, live, listener })
    }

    /// Measures `v` once.
    pub(crate) fn run(&self, v: &Variant) -> Result<Sample, PerfError> {
        drop(take_pinned());
        let sample = self.once(v)?;
        Ok(Sample { cpus: take_pinned(), ..sample })
    }

    fn once(&self, v: &Variant) -> Result<Sample, PerfError> {
        match (&self.plan.device, &self.plan.port, &self.capture) {
            (DeviceArg::VhostUser(_) | DeviceArg::Listen(_) | DeviceArg::Fd(_), ..) => self.foreign(v),
            (DeviceArg::Xsk(xsk), ..) => self.xsk(v, xsk),
            (_, PortArg::Tap(name), _) => self.embedded_over(v, one_each(Tap::open(name, v.queues.into(), true)?)),
            (_, _, Some(capture)) => self.embedded_over(v, |_| Ok(capture.clone())),
            _ => self.embedded_over(v, |_| Gen::new(v.size.unwrap_or(64), None)),
        }
    }

    /// The link and the capture before the ports, after all runs.
    pub(crate) fn into_link(self) -> Option<AskedLink> {
        self.link
    }

    /// Measures with these ports, or with a bad link before each of them.
    fn embedded_over<P: Port>(
        &self,
        v: &Variant,
        mut port: impl FnMut(usize) -> Result<P, PortError>,
    ) -> Result<Sample, PerfError> {
        match &self.link {
            None => self.embedded(v, port),
            Some(link) => self.embedded(v, |pair| Ok(link.over(port(pair)?, pair))),
        }
    }

    fn embedded<P: Port>(
        &self,
        v: &Variant,
        port: impl FnMut(usize) -> Result<P, PortError>,
    ) -> Result<Sample, PerfError> {
        let cpus = self.plan.cpus;
        let options = Options { max_pairs: v.queues.into(), serve_control: v.queues > 1, ..Options::default() };
        let mut device = NetDevice::new(options, port)?;
        let (front, back) = UnixStream::pair().map_err(PerfError::io("a socket pair"))?;
        let connection = device.control().serve(back)?;
        let stats = device.stats();
        let mut serve = |mail, halt: &AtomicBool| serve(&mut device, mail, halt, cpus.device == cpus.net);
        let driven = self.run_threads(v, Some(&mut serve), |mailbox, over| {
            let backend = VhostUser::own_device(front).map_err(PerfError::Backend)?;
            self.drive(v, backend, mailbox, Some(&stats), over, false)
        })?;
        let mut sample = finish(v, driven, true)?;
        drop(connection);
        let faults: Vec<_> = stats.queue_errors().filter(|&(_, n)| n > 0).map(|(name, _)| name).collect();
        if !faults.is_empty() {
            return Err(PerfError::DriverBroke { variant: v.to_string(), faults });
        }
        if let Some(device) = &mut sample.device {
            device.drops = stats.drops().filter(|&(_, n)| n > 0).collect();
        }
        Ok(sample)
    }

    fn foreign(&self, v: &Variant) -> Result<Sample, PerfError> {
        let driven = self.run_threads(v, None, |mailbox, over| {
            let backend = self.backend()?;
            self.drive(v, backend, mailbox, None, over, true)
        })?;
        finish(v, driven, false)
    }

    /// Measures the queues of an interface, through AF_XDP.
    fn xsk(&self, v: &Variant, arg: &XskArg) -> Result<Sample, PerfError> {
        self.run_threads(v, None, |mailbox, over| {
            pin(self.plan.cpus.net);
            let opened = Opened::new(self.plan, v, arg)?;
            let hint = "is frames' sender told to send to this interface and queue?";
            let mut driver = self.driver(opened, mailbox, false, over, hint);
            self.warm_up(v, &mut driver)?;
            let counts = driver.phase(v, self.plan.duration, Until::Time)?;
            let Driver { queues, mailbox, .. } = driver;
            drop(mailbox);
            Ok((queues, counts))
        })
        .and_then(|(opened, counts)| opened.finish(v, counts))
    }

    /// Runs `drive` on the driver's thread, and next to it `serve` on the embedded device's, if
    /// there is one, and the application on its own.
    fn run_threads<T: Send>(
        &self,
        v: &Variant,
        serve: Option<&mut Serve<'_>>,
        drive: impl FnOnce(Mailbox, &AtomicBool) -> Result<T, PerfError> + Send,
    ) -> Result<T, PerfError> {
        let cpus = self.plan.cpus;
        let (mailbox, mut mail) = mailbox(v, cpus.app == cpus.net);
        let device_mail = if serve.is_some() && cpus.app == cpus.device { mail.take() } else { None };
        let (halt, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let (halt, over) = (&halt, &over);
        std::thread::scope(|scope| {
            let halted = Halt(halt);
            let server = serve.map(|serve| {
                spawn(scope, "netmem-device", move || {
                    pin(cpus.device);
                    let failed = serve(device_mail, halt);
                    over.store(failed.is_some(), Ordering::Relaxed);
                    failed
                })
            });
            let consume = |mail| {
                spawn(scope, "netmem-app", move || {
                    pin(cpus.app);
                    consume(mail, halt, false);
                })
            };
            let thread = PerfError::io("a thread");
            let server = server.transpose().map_err(thread)?;
            let app = mail.map(consume).transpose().map_err(thread)?;
            let driver = spawn(scope, "netmem-driver", || drive(mailbox, over)).map_err(thread)?;
            // A join waits for the destructors of thread-locals, too.
            let driven = propagate(driver.join());
            drop(halted);
            app.into_iter().for_each(|app| propagate(app.join()));
            match server.and_then(|server| propagate(server.join())) {
                Some(failed) => Err(failed.into()),
                None => driven,
            }
        })
    }

    /// A connection to the back end, in the role that the user chose.
    fn backend(&self) -> Result<VhostUser, PerfError> {
        let inherited = |e: anyhow::Error| PerfError::Inherited(format!("{e:#}"));
        let begin = Instant::now();
        loop {
            let backend = match (&self.plan.device, &self.listener) {
                (DeviceArg::Fd(fd), _) => match socket::inherited(*fd).map_err(inherited)? {
                    Inherited::Connected(stream) => VhostUser::from_stream(stream),
                    Inherited::Listening(_) => {
                        let hint = "--fd: the socket listens; give one that is connected to a back end";
                        return Err(PerfError::Inherited(hint.into()));
                    }
                },
                (_, Some(listener)) => VhostUser::accept(listener, CHECK_EVERY),
                (DeviceArg::VhostUser(path) | DeviceArg::Listen(path), None) => VhostUser::connect(path),
                (DeviceArg::Embedded | DeviceArg::Xsk(_), None) => unreachable!("this device is no back end"),
            };
            match backend {
                Err(VhostUserError::NotConnected { .. }) if self.stop.load(Ordering::Relaxed) => {
                    return Err(PerfError::Interrupted);
                }
                Err(VhostUserError::NotConnected { .. }) if begin.elapsed() < COMES => {}
                Err(VhostUserError::NotConnected { path, .. }) => {
                    // Each `accept` has waited for less.
                    let seconds = COMES.as_secs_f64();
                    return Err(PerfError::Backend(VhostUserError::NotConnected { path, seconds }));
                }
                other => return other.map_err(PerfError::Backend),
            }
        }
    }

    /// The driver's thread.
    fn drive(
        &self,
        v: &Variant,
        backend: VhostUser,
        mailbox: Mailbox,
        stats: Option<&Stats>,
        over: &AtomicBool,
        foreign: bool,
    ) -> Result<Driven, PerfError> {
        let plan = self.plan;
        pin(plan.cpus.net);
        let (options, baseline) = self.options(v)?;
        let failed = |source| PerfError::Driver { variant: v.to_string(), source };
        let (net, pairs) = VirtioNet::probe(backend, options).map_err(failed)?;
        let pairs = pairs.into_iter().map(|QueuePair { rx, tx }| (rx, TxBulk::new(tx))).collect();
        let virtio = Virtio { net, pairs, foreign: foreign.then(|| plan.device.clone()) };
        let hint = if foreign { "is the backend told to send?" } else { "the embedded device got no time to run" };
        let yields = !foreign && plan.cpus.net == plan.cpus.device;
        let counted =
            || stats.map_or((0, 0), |s| (s.rx_frames.load(Ordering::Relaxed), s.busy_ns.load(Ordering::Relaxed)));
        let mut driver = self.driver(virtio, mailbox, yields, over, hint);
        self.warm_up(v, &mut driver)?;
        let before = counted();
        let counts = driver.phase(v, plan.duration, Until::Time)?;
        let after = counted();
        let device = DeviceSample { frames: after.0 - before.0, busy_ns: after.1 - before.1, drops: BTreeMap::new() };
        Ok(Driven { virtio: driver.queues, baseline, counts, device })
    }

    fn driver<'d, Q: Queues>(
        &'d self,
        queues: Q,
        mailbox: Mailbox,
        yields: bool,
        over: &'d AtomicBool,
        hint: &'static str,
    ) -> Driver<'d, Q> {
        let plan = self.plan;
        Driver {
            queues,
            mailbox,
            xdp: plan.xdp,
            clock: &self.clock,
            yields: yields || plan.allowed.len() == 1,
            stop: self.stop,
            over,
            live: self.live,
            listens: plan.listens(),
            hint,
        }
    }

    /// Reports that frames can come, or waits until one comes.
    fn warm_up<Q: Queues>(&self, v: &Variant, driver: &mut Driver<'_, Q>) -> Result<(), PerfError> {
        if self.plan.listens() {
            eprintln!("ready");
            return Ok(());
        }
        driver.phase(v, Duration::ZERO, Until::First)?;
        driver.phase(v, self.plan.warmup, Until::Time)?;
        Ok(())
    }

    /// The options for the driver, and the allocator of its pages if the variant has no page pool.
    fn options(&self, v: &Variant) -> Result<(NetOptions, Option<Baseline>), PerfError> {
        let plan = self.plan;
        let longest = self.capture.as_ref().map(|c| (0..c.len()).filter_map(|i| c.frame(i)).map(<[u8]>::len).max());
        let longest = v.size.or(longest.flatten()).unwrap_or(usize::MAX).min(v.mode.max_frame());
        // The rings twice, the caches, and the packets that can be in flight to the application.
        let in_mailbox = if v.consumer == Where::Other { MAILBOX * longest.div_ceil(3900) } else { 0 };
        let pages = usize::from(v.queues) * (2 * usize::from(plan.ring) + 1024) + in_mailbox;
        let options = NetOptions::new(v.mode).pairs(v.queues).ring_size(plan.ring).max_frame(longest);
        let options = options.pages(pages).lock(plan.lock).reserved_huge_pages(true).ring_features(plan.ring_features);
        let baseline = if v.mode == RxMode::Big { None } else { Baseline::new(v.alloc, pages, plan.lock, true)? };
        Ok((baseline.iter().fold(options, |options, baseline| baseline.serve(options)), baseline))
    }
}

/// The device's thread: it polls the device's rings and, in turns, does the application's work on
/// this CPU. Returns why it ended early.
fn serve<P: Port>(
    device: &mut NetDevice<P>,
    mut mail: Option<Mail>,
    halt: &AtomicBool,
    yields: bool,
) -> Option<PortError> {
    loop {
        let halted = halt.load(Ordering::Acquire);
        let moved = device.poll();
        let drained = mail.as_mut().map_or(0, drain);
        if halted && drained == 0 {
            return None;
        }
        if moved + drained == 0 {
            if let Some(error) = device.take_error() {
                return Some(error);
            }
            idle(yields);
        }
    }
}

/// Stops the queues, closes the pools and checks that all pages were returned. All other workers
/// have ended.
///
/// A ring may have broken since it was last used. It may also have been broken from the start:
/// without transmitted frames, the transmit ring is read here for the first time. Values that were
/// measured with a broken ring are no result.
fn finish(v: &Variant, driven: Driven, embedded: bool) -> Result<Sample, PerfError> {
    let Driven { virtio: Virtio { net, pairs, .. }, baseline, counts, device } = driven;
    let (mut pool, mut leaked) = (PoolStats::default(), 0);
    let (mut errors, mut broken) = (BTreeMap::new(), None);
    let mut count = |name, n| {
        if n > 0 {
            *errors.entry(name).or_default() += n;
        }
    };
    let (backing, features) = (net.region().backing(), net.features());
    for (mut rx, tx) in pairs {
        let mut tx = tx.into_target();
        rx.stats().errors().for_each(|(name, n)| count(name, n));
        tx.complete();
        let sent = tx.stats();
        broken = broken.or(rx.stats().stopped).or(sent.stopped);
        count("tx_full", sent.full);
        count("tx_wrong_domain", sent.wrong_domain);
        count("tx_no_offload", sent.no_offload);
        // Its packets return to their pool before the pool is closed.
        drop(tx);
        count("alloc_failed", rx.pool_stats().alloc_failed);
        if let Some(closed) = rx.close() {
            pool += closed.stats;
            leaked += closed.outstanding;
        }
    }
    drop(net);
    let variant = || v.to_string();
    if let Some(source) = broken {
        return Err(PerfError::Broken { variant: variant(), source });
    }
    if pool.quarantined > 0 {
        return Err(PerfError::NotStopped { variant: variant(), pages: pool.quarantined });
    }
    if let Some(baseline) = baseline {
        leaked = leaked.max(baseline.out());
        let (mapped, unmapped) = baseline.maps();
        pool.mapped += mapped;
        pool.unmapped += unmapped;
    }
    let (device, cpus) = (embedded.then_some(device), BTreeSet::new());
    Ok(Sample { counts, device, pool, leaked, errors, backing, features, sockets: Vec::new(), cpus })
}
