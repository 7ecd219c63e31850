//! `netmem device`: be a virtio-net device for front ends, one after another, until a signal comes.

use crate::args::{BadArgument, DeviceArgs, PortArg};
use crate::{cpus, output, signals};
use anyhow::Context;
use netmem::device::port::{Echo, Gen, Pcap, Play, Port, PortError, Sink, Tap, TapError};
use netmem::device::{Connection, Control, DeviceError, MAX_PAIRS, NetDevice, Options, Stats};
use netmem::virtio::net::{MIN_FRAME, OFFLOAD_FRAME};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Builder;
use std::time::Duration;

/// How long the socket is waited on before the flags are looked at.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Serves until a signal comes, or the port fails.
pub(crate) fn run(args: &DeviceArgs) -> anyhow::Result<()> {
    check(args)?;
    let stop = signals::stop_flag()?;
    let pairs = usize::from(args.queues);
    match &args.port {
        PortArg::Gen => serve(args, &stop, |_| Gen::new(args.size, None)),
        PortArg::Sink => serve(args, &stop, |_| Ok(Sink)),
        PortArg::Echo => serve(args, &stop, |_| Ok(Echo::new())),
        PortArg::Pcap(path) => {
            let capture = Pcap::open(path, Play::Loop)?;
            serve(args, &stop, |_| Ok(capture.clone()))
        }
        PortArg::Tap(name) => {
            let mut taps = Tap::open(name, pairs, true)?.into_iter();
            let missing = || PortError::Tap { name: name.clone(), source: TapError::Queues { asked: 0 } };
            serve(args, &stop, |_| taps.next().ok_or_else(missing))
        }
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

fn serve<P: Port>(
    args: &DeviceArgs,
    stop: &AtomicBool,
    port: impl FnMut(usize) -> Result<P, PortError>,
) -> anyhow::Result<()> {
    let options = Options { max_pairs: args.queues.into(), ..Options::default() };
    let mut device = NetDevice::new(options, port)?;
    let (control, stats) = (device.control(), device.stats());
    let socket = Socket::listen(&args.listen)?;
    let busy = args.port == PortArg::Gen && cpus::allowed().len() > 1;
    // Whether a front end is there; and whether the data side is to end, or has.
    let (served, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let data = || {
            if let Some(cpu) = cpu(args) {
                cpus::pin(cpu);
            }
            let result = if busy { spin(&mut device, &served, &over) } else { device.run(&over) };
            over.store(true, Ordering::Relaxed);
            result
        };
        let data = Builder::new().name("netmem-device".into()).spawn_scoped(scope, data);
        let data = data.context("cannot start the device's thread")?;
        eprintln!("listening on {}, port {}, {} queue pair(s)", args.listen.display(), args.port, args.queues);
        let accepted =
            accept(&socket, &control, &stats, &served, || stop.load(Ordering::Relaxed) || over.load(Ordering::Relaxed));
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

/// Serves one front end after another. The next one waits in the socket's backlog.
fn accept(
    socket: &Socket,
    control: &Control,
    stats: &Stats,
    served: &AtomicBool,
    over: impl Fn() -> bool,
) -> anyhow::Result<()> {
    let mut current: Option<(Connection, Counters)> = None;
    while !over() {
        if let Some((connection, before)) = current.take_if(|(connection, _)| connection.is_finished()) {
            served.store(false, Ordering::Relaxed);
            left(connection.wait(), &before, stats);
        }
        if current.is_some() {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        let mut fds = [PollFd::new(&socket.listener, PollFlags::IN)];
        match poll(&mut fds, Some(&NAP)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(e) => return Err(std::io::Error::from(e)).context("waiting for front ends"),
        }
        match socket.listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).context("a front end's socket")?;
                current = Some((control.serve(stream)?, Counters::of(stats)));
                served.store(true, Ordering::Relaxed);
            }
            // It has gone again.
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {}
            Err(e) => return Err(e).context("accepting a front end"),
        }
    }
    if let Some((connection, before)) = current {
        drop(connection);
        left(Ok(()), &before, stats);
    }
    Ok(())
}

struct Counters([u64; 5]);

impl Counters {
    fn of(s: &Stats) -> Self {
        let load = |n: &std::sync::atomic::AtomicU64| n.load(Ordering::Relaxed);
        let drops = s.drops().map(|(_, n)| n).sum();
        Self([load(&s.rx_frames), load(&s.rx_bytes), load(&s.tx_frames), load(&s.tx_bytes), drops])
    }
}

/// The line for a front end that left.
fn left(how: Result<(), DeviceError>, before: &Counters, stats: &Stats) {
    let mut now = Counters::of(stats).0;
    now.iter_mut().zip(before.0).for_each(|(now, before)| *now -= before);
    let [frames, bytes, sent, sent_bytes, drops] = now;
    let why = how.map_or_else(|e| format!(" after an error: {:#}", anyhow::Error::from(e)), |()| String::new());
    // Whether anybody reads it is not the device's business.
    let _ = output::print(&format!(
        "front end left{why}: {frames} frames ({bytes} bytes) to it, {sent} frames ({sent_bytes} bytes) from it, \
         {drops} dropped"
    ));
}

/// A listening socket whose path is removed with it, unless somebody else has put another there.
struct Socket {
    listener: UnixListener,
    path: PathBuf,
    inode: u64,
}

impl Socket {
    fn listen(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let listener = match UnixListener::bind(path) {
            Err(e) if e.kind() == ErrorKind::AddrInUse => {
                let kind = std::fs::symlink_metadata(path).map(|m| m.file_type());
                anyhow::ensure!(
                    kind.is_ok_and(|kind| kind.is_socket()),
                    "--listen {shown}: something that is no socket is there; choose another path, or remove it"
                );
                match UnixStream::connect(path) {
                    Err(e) if e.kind() == ErrorKind::ConnectionRefused => {}
                    _ => {
                        anyhow::bail!("--listen {shown}: a live process listens there; end it, or choose another path")
                    }
                }
                // Left over by a process that is gone.
                std::fs::remove_file(path).with_context(|| format!("--listen {shown}: a stale socket"))?;
                UnixListener::bind(path)
            }
            other => other,
        };
        let listener = listener.with_context(|| format!("--listen {shown}: cannot make the socket"))?;
        listener.set_nonblocking(true).context("the socket")?;
        let inode = std::fs::symlink_metadata(path).map(|m| m.ino()).unwrap_or(0);
        Ok(Self { listener, path: path.to_owned(), inode })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if std::fs::symlink_metadata(&self.path).is_ok_and(|m| m.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
