//! `netmem device`: be a virtio-net device for front ends, one after another, until a signal comes.

mod fronts;
mod report;
pub(crate) mod socket;

use crate::args::{BadArgument, DeviceArgs, PortArg};
use crate::{cpus, limits, output, signals};
use anyhow::Context;
use fronts::{Fronts, Wake, WakeAtEnd, line};
use netmem::device::port::{Echo, Gen, Pcap, Play, Port, PortError, Sink, Tap, TapError};
use netmem::device::{DeviceError, MAX_PAIRS, NetDevice, Options, Stats};
use netmem::virtio::net::{MIN_FRAME, OFFLOAD_FRAME};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, Thread};
use std::time::{Duration, Instant};

/// How often a tap with several queues is looked at.
const TICK: Duration = Duration::from_secs(2);

/// Serves until a signal comes, or the port fails.
pub(crate) fn run(args: &DeviceArgs) -> anyhow::Result<()> {
    check(args)?;
    let pairs = usize::from(args.queues);
    // A front end: its connection twice, three descriptors a ring, and the files of its memory. Beside it: a tap's queue
    // a pair, sockets, and a message's worth of descriptors.
    limits::descriptors(2 * 3 * pairs + pairs + 32, &format!("a device with {pairs} queue pair(s)"))?;
    // A capture that is read from a pipe can take long: until it is read, a signal ends the program at once.
    let capture = match &args.port {
        PortArg::Pcap(path) => Some(Pcap::open(path, Play::Loop)?),
        _ => None,
    };
    let stop = signals::stop_flag()?;
    match (&args.port, capture) {
        (PortArg::Sink, _) => serve(args, &stop, |_| Ok(Sink)),
        (PortArg::Echo, _) => serve(args, &stop, |_| Ok(Echo::new())),
        (PortArg::Tap(name), _) => {
            let mut taps = Tap::open(name, pairs, true)?.into_iter();
            let missing = || PortError::Tap { name: name.clone(), source: TapError::Queues { asked: 0 } };
            serve(args, &stop, |_| taps.next().ok_or_else(missing))
        }
        (_, Some(capture)) => serve(args, &stop, |_| Ok(capture.clone())),
        _ => serve(args, &stop, |_| Gen::new(args.size, None)),
    }
}

fn check(args: &DeviceArgs) -> Result<(), BadArgument> {
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
    cpu(args).map_or(Ok(()), |cpu| cpus::check("--cpu", cpu, &cpus::online(), &cpus::allowed()))
}

fn cpu(args: &DeviceArgs) -> Option<usize> {
    args.cpu.or(args.cpus.device)
}

/// The running device, as the main thread sees it.
struct Running<'a> {
    args: &'a DeviceArgs,
    stats: &'a Stats,
    /// Set by the first signal.
    stop: &'a AtomicBool,
    /// Set when the data side is to end, or has.
    over: &'a AtomicBool,
    /// Whether a front end is there.
    served: &'a AtomicBool,
    wake: &'a Wake,
    /// The thread of the data side.
    data: Thread,
    since: Instant,
    /// Whether the user was told that another process uses the tap.
    shares_tap: bool,
}

impl Running<'_> {
    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.over.load(Ordering::Relaxed)
    }

    /// Looks after what no event tells of; says after which time to do so again. A multi-queue tap can be opened by more
    /// than one process, and the kernel spreads its frames over all their queues. The second one is told when it opens the
    /// tap, and the first one here.
    fn tick(&mut self) -> Option<Duration> {
        let (PortArg::Tap(name), false) = (&self.args.port, self.shares_tap) else { return None };
        let mine = usize::from(self.args.queues);
        if mine == 1 {
            return None;
        }
        if Tap::attached(name).is_some_and(|attached| attached > mine) {
            self.shares_tap = true;
            output::Log.line(&format!("another process has queues of tap {name}, too, and gets a part of the frames"));
            return None;
        }
        Some(TICK)
    }

    /// A front end comes, or has left.
    fn serves(&self, served: bool) {
        self.served.store(served, Ordering::Relaxed);
        self.data.unpark();
    }
}

fn serve<P: Port>(
    args: &DeviceArgs,
    stop: &AtomicBool,
    port: impl FnMut(usize) -> Result<P, PortError>,
) -> anyhow::Result<()> {
    let options = Options {
        max_pairs: args.queues.into(),
        mac: args.mac,
        mtu: args.mtu,
        require_sealed: args.require_sealed,
        max_memory: args.max_memory,
        ..Options::default()
    };
    let mut device = NetDevice::new(options, port)?;
    let (control, stats) = (device.control(), device.stats());
    let mut fronts = Fronts::open(args, signals::stop_descriptor()?)?;
    let busy = args.port == PortArg::Gen && cpus::allowed().len() > 1;
    let (served, over, wake) = (AtomicBool::new(false), AtomicBool::new(false), Wake::new()?);
    std::thread::scope(|scope| {
        let data = || {
            let _end = WakeAtEnd(&wake);
            if let Some(cpu) = cpu(args) {
                cpus::pin(cpu);
            }
            let result = if busy { spin(&mut device, &served, &over) } else { device.run(&over) };
            over.store(true, Ordering::Relaxed);
            result
        };
        let data = Builder::new().name("netmem-device".into()).spawn_scoped(scope, data);
        let data = data.context("cannot start the device's thread")?;
        let (line, server) = line();
        let handle = || server.run(&wake, |stream| control.handle(stream));
        let server = Builder::new().name("netmem-vhost".into()).spawn_scoped(scope, handle);
        let accepted = server.context("cannot start the thread that serves front ends").and_then(|server| {
            eprintln!("{fronts}, port {}, {} queue pair(s)", args.port, args.queues);
            let mut running = Running {
                args,
                stats: &stats,
                stop,
                over: &over,
                served: &served,
                wake: &wake,
                data: data.thread().clone(),
                since: Instant::now(),
                shares_tap: false,
            };
            let accepted = fronts.run(line, &mut running);
            server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            accepted
        });
        over.store(true, Ordering::Relaxed);
        control.wake();
        data.thread().unpark();
        let ended = data.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ended.context("the device's port")?;
        accepted
    })
}

/// The generator always has a frame: sleeping would only ever be for the lack of buffers, and that does not last.
fn spin<P: Port>(device: &mut NetDevice<P>, served: &AtomicBool, over: &AtomicBool) -> Result<(), DeviceError> {
    while !over.load(Ordering::Relaxed) {
        if !served.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(20));
        } else if device.poll() == 0 {
            std::hint::spin_loop();
        }
    }
    Ok(())
}
