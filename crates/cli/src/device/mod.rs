//! `netmem device`: be a virtio-net device for front ends, one after another, until a signal comes.

mod fronts;
mod metrics;
mod report;
pub(crate) mod socket;

use crate::args::{DeviceArgs, PortArg, RingArg};
use crate::limits;
use crate::link::{AskedLink, one_each};
use crate::metrics::{Page, Server};
use anyhow::Context;
use fronts::{Fronts, Wake, WakeAtEnd, line};
use netmem::device::import::Importer;
use netmem::device::port::{Echo, Gen, Pcap, Play, Port, PortError, Sink, Tap, TapQueues};
use netmem::device::{MAX_PAIRS, NetDevice, Options, Stats, Worker};
use netmem::virtio::{MIN_FRAME, OFFLOAD_FRAME, Spin};
use netmem::xdp::ProgramOptions;
use netmem_measure::arguments::BadArgument;
use netmem_measure::threads::{propagate, spawn};
use netmem_measure::{cpus, output, signals};
use netmem_virtio::virtqueue::Negotiated;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Serves until a signal comes, or the port fails.
pub(crate) fn run(args: &DeviceArgs) -> anyhow::Result<()> {
    check(args)?;
    let pairs = usize::from(args.queues);
    // A front end needs its connection twice, three descriptors for each ring, and the files of its
    // memory. In addition: for each pair a queue of a tap, sockets, and the descriptors of one
    // message.
    limits::descriptors(2 * 3 * pairs + pairs + 32, &format!("a device with {pairs} queue pair(s)"))?;
    // Reading a capture from a pipe can take long. Until it is read, a signal ends the program at
    // once.
    let capture = match &args.port {
        PortArg::Pcap(path) => Some(Pcap::open(path, Play::Loop)?),
        _ => None,
    };
    let stop = signals::stop_flag()?;
    match (&args.port, capture) {
        (PortArg::Sink, _) => serve_over(args, &stop, None, |_| Ok(Sink)),
        (PortArg::Echo, _) => serve_over(args, &stop, None, |_| Ok(Echo::new())),
        (PortArg::Tap(name), _) => {
            let taps = Tap::open(name, pairs, true)?;
            // Only this process can use a tap with one queue.
            let queues = taps.first().filter(|_| pairs > 1).map(|tap| tap.queues().clone());
            serve_over(args, &stop, queues, one_each(taps))
        }
        (PortArg::Xsk(xsk), _) => {
            serve_over(args, &stop, None, one_each(args.af_xdp.ports(xsk, args.queues, ProgramOptions::default())?))
        }
        (_, Some(capture)) => serve_over(args, &stop, None, |_| Ok(capture.clone())),
        _ => serve_over(args, &stop, None, |_| Gen::new(args.size, None)),
    }
}

fn check(args: &DeviceArgs) -> Result<(), BadArgument> {
    args.af_xdp.check(matches!(args.port, PortArg::Xsk(_)), "give --port xsk:IFACE")?;
    if !(1..=MAX_PAIRS).contains(&usize::from(args.queues)) {
        return BadArgument::new(format!("--queues {}: 1 to {MAX_PAIRS} queue pairs are possible", args.queues));
    }
    if !(MIN_FRAME..=OFFLOAD_FRAME).contains(&args.size) {
        let size = args.size;
        return BadArgument::new(format!("--size {size}: frames of {MIN_FRAME} to {OFFLOAD_FRAME} bytes are possible"));
    }
    if args.cpus.net.or(args.cpus.app).is_some() {
        return BadArgument::new("--cpus: a device has no net and no app; give device=N");
    }
    let (threads, queues) = (args.threads, args.queues);
    if !(1..=queues).contains(&threads) {
        return BadArgument::new(format!(
            "--threads {threads}: 1 to {queues} are possible, a thread for each of the {queues} queue pair(s)"
        ));
    }
    let (online, allowed) = (cpus::online(), cpus::allowed());
    let mut cpus = cpu(args).into_iter().flat_map(|first| first..first.saturating_add(threads.into()));
    cpus.try_for_each(|cpu| cpus::check("--cpu", cpu, &online, &allowed))
}

fn cpu(args: &DeviceArgs) -> Option<usize> {
    args.cpu.or(args.cpus.device)
}

/// The running device, seen by the main thread.
struct Running<'a> {
    args: &'a DeviceArgs,
    stats: &'a Stats,
    /// Set by the first signal.
    stop: &'a AtomicBool,
    /// Set when the data side should end, or when one of its threads has ended.
    over: &'a AtomicBool,
    wake: &'a Wake,
    link: Option<&'a AskedLink>,
    since: Instant,
    /// The queues of a tap that other processes can open too. `None` after the user was warned that
    /// one has.
    tap: Option<TapQueues>,
}

impl Running<'_> {
    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.over.load(Ordering::Relaxed)
    }

    /// Warns if another process uses the tap. More than one process can open a multi-queue tap, and
    /// the kernel spreads the frames over all their queues. The second process is warned when it
    /// opens the tap, and the first process by this function.
    fn look_at_tap(&mut self) {
        let shared = self.tap.take_if(|tap| tap.others().is_some_and(|others| others > 0));
        if let Some(tap) = shared {
            let name = tap.name();
            output::Log.line(&format!("another process has queues of tap {name}, too, and gets a part of the frames"));
        }
    }
}

/// Serves with these ports, or with a bad link before each.
fn serve_over<P: Port>(
    args: &DeviceArgs,
    stop: &AtomicBool,
    tap: Option<TapQueues>,
    mut port: impl FnMut(usize) -> Result<P, PortError>,
) -> anyhow::Result<()> {
    let Some(link) = AskedLink::open(args.link, args.pcap.as_deref())? else {
        return serve(args, stop, tap, port, None);
    };
    let result = serve(args, stop, tap, |pair| Ok(link.over(port(pair)?, pair)), Some(&link));
    link.report().iter().for_each(|report| output::offer(&report.to_string()));
    result.and(link.finish().map_err(Into::into))
}

/// What imports the memory of the GPU that was asked for.
#[cfg(feature = "cuda")]
fn importer(args: &DeviceArgs) -> anyhow::Result<Option<Arc<dyn Importer>>> {
    let Some(number) = args.cuda else { return Ok(None) };
    let gpu = netmem::device::cuda::Gpu::open(number).with_context(|| format!("--cuda {number}"))?;
    Ok(Some(Arc::new(gpu)))
}

#[cfg(not(feature = "cuda"))]
fn importer(_: &DeviceArgs) -> anyhow::Result<Option<Arc<dyn Importer>>> {
    Ok(None)
}

fn serve<P: Port>(
    args: &DeviceArgs,
    stop: &AtomicBool,
    tap: Option<TapQueues>,
    port: impl FnMut(usize) -> Result<P, PortError>,
    link: Option<&AskedLink>,
) -> anyhow::Result<()> {
    let options = Options {
        max_pairs: args.queues.into(),
        mac: args.mac,
        mtu: args.mtu,
        withhold: args.ring_features.as_ref().map_or(0, |list| Negotiated::RING & !RingArg::features(list)),
        require_sealed: args.require_sealed,
        any_memory_file: args.any_memory_file,
        max_memory: args.max_memory,
        importer: importer(args)?,
        ..Options::default()
    };
    let device = NetDevice::new(options, port)?;
    let (control, stats) = (device.control(), device.stats());
    let workers = device.workers(args.threads.into())?;
    let figures = Server::open(args.metrics)?;
    let mut fronts = Fronts::open(args, signals::stop_descriptor()?)?;
    // The generator always has a frame. Its threads would sleep only because buffers are missing,
    // and that does not last.
    let busy = args.port == PortArg::Gen && cpus::allowed().len() > usize::from(args.threads);
    let spin = args.spin.unwrap_or(if busy { Spin::Forever } else { Spin::default() });
    let (over, wake) = (AtomicBool::new(false), Wake::new()?);
    let end = || {
        over.store(true, Ordering::Relaxed);
        control.wake();
    };
    let data = |index: usize, mut worker: Worker<P>| {
        let _end = WakeAtEnd(&wake);
        if let Some(cpu) = cpu(args) {
            cpus::pin(cpu + index);
        }
        let result = worker.run(&over, spin);
        // If the port of one thread has failed, the whole device ends.
        end();
        result
    };
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        let mut started = Ok(());
        for (index, worker) in workers.into_iter().enumerate() {
            let name = format!("netmem-device{index}");
            let data = &data;
            match spawn(scope, name, move || data(index, worker)) {
                Ok(thread) => threads.push(thread),
                Err(e) => started = Err(e).context("cannot start a thread of the device"),
            }
        }
        let (stats, over) = (&stats, &over);
        let served =
            figures.as_ref().map(|server| server.start(scope, over, |page: &Page| metrics::figures(page, stats, link)));
        let started = started.and(served.transpose().map(drop));
        let (line, server) = line();
        let handle = || server.run(&wake, |stream| control.handle(stream));
        let accepted = started.and_then(|()| {
            let server = spawn(scope, "netmem-vhost", handle);
            let server = server.context("cannot start the thread that serves front ends")?;
            eprintln!("{fronts}, port {}, {} queue pair(s)", args.port, args.queues);
            let since = Instant::now();
            let wake = &wake;
            let mut running = Running { args, stats, stop, over, wake, link, since, tap };
            let accepted = fronts.run(line, &mut running);
            propagate(server.join());
            accepted
        });
        end();
        let ended: Vec<_> = threads.into_iter().map(|thread| propagate(thread.join())).collect();
        ended.into_iter().collect::<Result<(), _>>().context("the device's port")?;
        accepted
    })
}
