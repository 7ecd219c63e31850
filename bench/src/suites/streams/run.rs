//! A run: two ends and the path between them, a program on each end, and the measured values of the
//! run.

use super::account::{Group, SoftIrqs};
use super::end::{End, Idle, Watch, client, server, sink, source};
use super::kernel::{self, Kernel};
use super::memory::Memory;
use super::net::{ADDRESSES, Namespace, Outcome, TapNetwork, veth};
use super::ours::{self, Ours};
use super::relay::relay;
use super::rig::{Link, Rig};
use super::smol::{self, Smol};
use anyhow::{Context, ensure};
use hdrhistogram::Histogram;
use netmem::device::port::{Port, Tap};
use netmem::device::{Connection, Control, NetDevice};
use netmem::virtio::{Spin, VirtioNet};
use netmem_measure::cpus::pin;
use netmem_measure::endpoint;
use netmem_measure::threads::{propagate, spawn};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The port of every server.
pub(super) const PORT: u16 = 7000;
/// The smallest number of bytes of a run.
const ENOUGH: u64 = 64 << 10;
/// The longest time until something arrives.
const PATIENCE: Duration = Duration::from_secs(60);

/// The stacks at the ends, and the path between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// Our stack at both ends of our device.
    Ours,
    /// smoltcp at both ends of our device.
    Smoltcp,
    /// The kernel at both ends of a veth.
    Veth,
    /// Our stack sends data or requests, through a tap. The kernel receives them, and answers
    /// requests.
    OursToKernel,
    /// The other direction.
    KernelToOurs,
    /// The kernel at both ends: two taps, and a thread that carries frames from one to the other.
    Taps,
}

impl Path {
    /// Its name in rows.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Smoltcp => "smoltcp",
            Self::Veth => "kernel_veth",
            Self::OursToKernel => "ours_to_kernel",
            Self::KernelToOurs => "kernel_to_ours",
            Self::Taps => "kernel_taps",
        }
    }
}

/// The work of the ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    /// The receiver keeps the last bytes: more than the last-level cache holds.
    Bulk,
    /// The receiver drops what it has read at once, so that memory stays in the caches.
    Stream,
    Requests,
}

/// The measured values of a run.
#[derive(Debug)]
pub(super) struct Took {
    pub(super) bytes: u64,
    pub(super) elapsed: Duration,
    pub(super) cpu_ns: u64,
    /// The times of requests, in nanoseconds.
    pub(super) times: Histogram<u64>,
    /// The features that our driver and our device have negotiated; 0 if the path has neither.
    pub(super) features: u64,
}

/// What was measured between two moments of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    pub(super) bytes: u64,
    pub(super) responses: u64,
    pub(super) elapsed: Duration,
    pub(super) cpu_ns: u64,
}

/// What all runs share. Networks are kept, because the kernel does much work in the background when
/// it removes one.
#[derive(Debug)]
pub(super) struct Env {
    memory: Memory,
    /// The memory of applications that keep nothing.
    small: Memory,
    pub(super) cpus: Vec<usize>,
    softirqs: SoftIrqs,
    group: OnceLock<Outcome<Group>>,
    veths: Cache<[Namespace; 2]>,
    taps: Cache<TapNetwork>,
    pairs: Cache<[TapNetwork; 2]>,
}

type Cache<T> = Mutex<HashMap<Link, Arc<T>>>;

fn cached<T>(cache: &Cache<T>, link: Link, make: impl FnOnce() -> Outcome<T>) -> anyhow::Result<Arc<T>> {
    let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = cache.get(&link) {
        return Ok(found.clone());
    }
    let made = Arc::new(make().map_err(anyhow::Error::msg)?);
    cache.insert(link, made.clone());
    Ok(made)
}

impl Env {
    pub(super) fn new(duration: Duration, cpus: &[usize]) -> Self {
        let (group, veths, taps, pairs) = Default::default();
        Self {
            memory: Memory::new(duration),
            small: Memory::dropped(),
            cpus: cpus.to_vec(),
            softirqs: SoftIrqs::new(),
            group,
            veths,
            taps,
            pairs,
        }
    }

    /// The memory of the applications.
    pub(super) fn memory(&self, program: Program) -> &Memory {
        if program == Program::Stream { &self.small } else { &self.memory }
    }

    /// The control group of this process. The first call moves the process there.
    pub(super) fn group(&self) -> Result<&Group, String> {
        let make = || {
            let group = Group::new("all")?;
            group.add(std::process::id())?;
            Ok(group)
        };
        self.group.get_or_init(make).as_ref().map_err(Clone::clone)
    }

    /// Whether networks can be made here.
    pub(super) fn can_run(&self, path: Path) -> Outcome<()> {
        self.group()?;
        if matches!(path, Path::OursToKernel | Path::KernelToOurs | Path::Taps) {
            std::fs::metadata("/dev/net/tun").map_err(|e| format!("/dev/net/tun: {e}"))?;
        }
        if !matches!(path, Path::Ours | Path::Smoltcp) {
            // It also needs the program `ip`.
            Namespace::new()?.ip("link")?;
        }
        Ok(())
    }

    /// The CPU time of this process, and of softirqs that the kernel put off.
    pub(super) fn cpu_ns(&self) -> anyhow::Result<u64> {
        Ok(self.group().and_then(Group::usage_ns).map_err(anyhow::Error::msg)? + self.softirqs.ns())
    }

    pub(super) fn veth(&self, link: Link) -> anyhow::Result<Arc<[Namespace; 2]>> {
        cached(&self.veths, link, || veth(link))
    }

    pub(super) fn tap(&self, link: Link) -> anyhow::Result<Arc<TapNetwork>> {
        cached(&self.taps, link, || TapNetwork::new(0, link))
    }

    fn taps(&self, link: Link) -> anyhow::Result<Arc<[TapNetwork; 2]>> {
        cached(&self.pairs, link, || Ok([TapNetwork::new(0, link)?, TapNetwork::new(1, link)?]))
    }
}

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run<'e> {
    pub(super) env: &'e Env,
    pub(super) path: Path,
    pub(super) program: Program,
    pub(super) link: Link,
    pub(super) idle: Idle,
    pub(super) duration: Duration,
}

type Work<'e> = Box<dyn FnOnce(&AtomicBool) -> anyhow::Result<()> + Send + 'e>;

/// A thread next to the ends. It works until the flag is set; the function wakes it then.
struct SideThread<'e> {
    work: Work<'e>,
    wake: Box<dyn Fn() + 'e>,
}

/// What must be kept until an end behind a tap has ended.
type Kept = (VirtioNet<endpoint::Mem>, Connection);

fn device<'e, P: Port + 'e>(mut device: NetDevice<P>) -> SideThread<'e> {
    let control: Control = device.control();
    let work = move |stop: &AtomicBool| device.run(stop, Spin::NONE).context("the device");
    SideThread { work: Box::new(work), wake: Box::new(move || control.wake()) }
}

impl<'e> Run<'e> {
    pub(super) fn run(&self) -> anyhow::Result<Took> {
        match self.path {
            Path::Ours => self.ours(),
            Path::Smoltcp => self.smoltcp(),
            Path::Veth => {
                let ends = self.env.veth(self.link)?;
                self.kernels([&ends[0], &ends[1]], None)
            }
            Path::OursToKernel => self.ours_to_kernel(),
            Path::KernelToOurs => self.kernel_to_ours(),
            Path::Taps => {
                let taps = self.env.taps(self.link)?;
                let ports = [taps[0].open(), taps[1].open()];
                let [Ok(a), Ok(b)] = ports else { anyhow::bail!("a tap cannot be opened") };
                let (mut ports, idle, link): ([Tap; 2], _, _) = ([a, b], self.idle, self.link);
                let work = Box::new(move |stop: &AtomicBool| relay(&mut ports, link, idle, stop));
                self.kernels([&taps[0].0, &taps[1].0], Some(SideThread { work, wake: Box::new(|| ()) }))
            }
        }
    }

    fn ours(&self) -> anyhow::Result<Took> {
        let memory = self.env.memory(self.program);
        let Rig { device: own, net, pairs, connection } = Rig::cable(self.link, memory)?;
        let mut parts = Vec::new();
        for (end, pair) in pairs.into_iter().enumerate() {
            parts.push(ours::Parts::new(&net, pair, end, self.link, self.idle, memory)?);
        }
        let (Some(target), Some(mut first)) = (parts.pop(), parts.pop()) else { anyhow::bail!("two queue pairs") };
        let side = self.side(own, &mut first.device);
        let to = SocketAddr::new(IpAddr::V4(ADDRESSES[1]), PORT);
        let took = self.both(
            || self.sends(Ours::connect(first, memory, to)?),
            |ready| Ours::listen(target, memory, PORT, ready),
            side,
        );
        let features = net.features();
        drop((net, connection));
        Ok(Took { features, ..took? })
    }

    fn smoltcp(&self) -> anyhow::Result<Took> {
        let memory = self.env.memory(self.program);
        let Rig { device: own, net, pairs, connection } = Rig::cable(self.link, memory)?;
        let mut parts = Vec::new();
        for (end, pair) in pairs.into_iter().enumerate() {
            parts.push(smol::Parts::new(&net, pair, end, self.link, self.idle)?);
        }
        let (Some(target), Some(mut first)) = (parts.pop(), parts.pop()) else { anyhow::bail!("two queue pairs") };
        let side = self.side(own, &mut first.device);
        let took = self.both(
            || Smol::connect(first, memory, 1, PORT),
            |ready| Smol::listen(target, memory, PORT, ready),
            side,
        );
        let features = net.features();
        drop((net, connection));
        Ok(Took { features, ..took? })
    }

    /// The thread that polls the device: a thread of its own, or the sender's thread, which then
    /// owns the device.
    fn side<'a, P: Port + Send + 'a>(
        &self,
        own: NetDevice<P>,
        first: &mut Option<NetDevice<P>>,
    ) -> Option<SideThread<'a>> {
        match self.idle {
            Idle::Sleeps => Some(device(own)),
            Idle::Polls => {
                *first = Some(own);
                None
            }
        }
    }

    fn kernels(&self, ends: [&Namespace; 2], side: Option<SideThread<'_>>) -> anyhow::Result<Took> {
        let memory = self.env.memory(self.program);
        let listener = kernel::listen(ends[1], ADDRESSES[1], PORT).map_err(anyhow::Error::msg)?;
        let to = SocketAddr::from((ADDRESSES[1], PORT));
        let first = || {
            let stream = kernel::connect(ends[0], to).map_err(anyhow::Error::msg)?;
            Kernel::new(stream, self.idle, memory)
        };
        let second = |ready: &dyn Fn()| {
            ready();
            Kernel::new(kernel::accept(&listener)?, self.idle, memory)
        };
        self.both(first, second, side)
    }

    fn ours_to_kernel(&self) -> anyhow::Result<Took> {
        let (memory, tap) = (self.env.memory(self.program), self.env.tap(self.link)?);
        let listener = kernel::listen(&tap.0, ADDRESSES[0], PORT).map_err(anyhow::Error::msg)?;
        let (parts, side, keep) = self.behind(&tap)?;
        let to = SocketAddr::from((ADDRESSES[0], PORT));
        let second = |ready: &dyn Fn()| {
            ready();
            Kernel::new(kernel::accept(&listener)?, self.idle, memory)
        };
        let took = self.both(|| self.sends(Ours::connect(parts, memory, to)?), second, side);
        let features = keep.0.features();
        drop(keep);
        Ok(Took { features, ..took? })
    }

    fn kernel_to_ours(&self) -> anyhow::Result<Took> {
        let (memory, tap) = (self.env.memory(self.program), self.env.tap(self.link)?);
        let (parts, side, keep) = self.behind(&tap)?;
        let to = SocketAddr::from((ADDRESSES[1], PORT));
        let first = || {
            let stream = kernel::connect(&tap.0, to).map_err(anyhow::Error::msg)?;
            Kernel::new(stream, self.idle, memory)
        };
        let took = self.both(first, |ready| Ours::listen(parts, memory, PORT, ready), side);
        let features = keep.0.features();
        drop(keep);
        Ok(Took { features, ..took? })
    }

    /// Our end behind a tap, the thread of its device, and the parts that must be kept alive.
    fn behind(&self, tap: &TapNetwork) -> anyhow::Result<(ours::Parts<Tap>, Option<SideThread<'e>>, Kept)> {
        let Rig { device: own, net, mut pairs, connection } = Rig::tap(tap, self.link, self.env.memory(self.program))?;
        let pair = pairs.pop().context("a queue pair")?;
        let mut parts = ours::Parts::new(&net, pair, 1, self.link, self.idle, self.env.memory(self.program))?;
        let side = self.side(own, &mut parts.device);
        Ok((parts, side, (net, connection)))
    }

    /// Our end, with pages to send from if it sends.
    fn sends<P: Port>(&self, end: Ours<P>) -> anyhow::Result<Ours<P>> {
        if self.program == Program::Requests { Ok(end) } else { end.with_source() }
    }

    /// Runs the program on both ends, and measures.
    fn both<A: End, B: End>(
        &self,
        first: impl FnOnce() -> anyhow::Result<A> + Send,
        second: impl FnOnce(&dyn Fn()) -> anyhow::Result<B> + Send,
        side: Option<SideThread<'_>>,
    ) -> anyhow::Result<Took> {
        let (watch, ready, stop) = (Watch::default(), AtomicBool::new(false), AtomicBool::new(false));
        let cpus = &self.env.cpus;
        std::thread::scope(|scope| {
            let (work, wake) = side.map(|side| (side.work, side.wake)).unzip();
            let (watch, ready, stop) = (&watch, &ready, &stop);
            let side = work.map(|work| spawn(scope, "netmem-side", move || work(stop)));
            let second = spawn(scope, "netmem-second", move || {
                pin(cpus[1 % cpus.len()]);
                let end = second(&|| ready.store(true, Ordering::Release))?;
                match self.program {
                    Program::Bulk | Program::Stream => sink(end, watch),
                    Program::Requests => server(end, watch),
                }
            });
            let first = spawn(scope, "netmem-first", move || {
                pin(cpus[0]);
                let begin = Instant::now();
                while !ready.load(Ordering::Acquire) && begin.elapsed() < PATIENCE {
                    std::thread::sleep(Duration::from_micros(100));
                }
                let end = first()?;
                match self.program {
                    Program::Bulk | Program::Stream => source(end, watch).and_then(|()| Ok(Histogram::new(3)?)),
                    Program::Requests => client(end, watch),
                }
            });
            let ended = || {
                [first.as_ref().is_ok_and(|t| t.is_finished()), second.as_ref().is_ok_and(|t| t.is_finished())]
                    .contains(&true)
            };
            let measured = self.measure(watch, &ended);
            watch.end();
            let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, anyhow::Result<_>>>| {
                propagate(thread.context("a thread")?.join())
            };
            let (first, second) = (propagate(first.context("a thread")?.join()), join(second));
            // The device ends last, because rings are stopped in order.
            stop.store(true, Ordering::Relaxed);
            wake.iter().for_each(|wake| wake());
            side.map(join).transpose()?;
            let (times, ()) = (first?, second?);
            let Measured { bytes, elapsed, cpu_ns, .. } = measured?;
            Ok(Took { bytes, elapsed, cpu_ns, times, features: 0 })
        })
    }

    /// How long a run of this duration takes: a quarter more for the windows to grow, and the ends
    /// are made and removed.
    pub(super) fn takes(duration: Duration) -> Duration {
        duration + duration / 4 + Duration::from_millis(50)
    }

    /// Measures while the ends work: after a warm-up, for the duration of the run.
    pub(super) fn measure(&self, watch: &Watch, ended: &dyn Fn() -> bool) -> anyhow::Result<Measured> {
        let begin = Instant::now();
        while watch.bytes() == 0 && watch.responses() == 0 {
            ensure!(!ended(), "an end has ended before its time");
            ensure!(begin.elapsed() < PATIENCE, "nothing has arrived in {} s", PATIENCE.as_secs());
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(self.duration / 4);
        watch.count_from_now();
        let (since, bytes, responses, cpu) = (Instant::now(), watch.bytes(), watch.responses(), self.env.cpu_ns()?);
        // On a busy machine it takes longer until there are enough bytes or responses to divide by.
        let enough = || watch.bytes() - bytes >= ENOUGH || watch.responses() - responses > 100;
        while since.elapsed() < self.duration || !enough() {
            ensure!(
                since.elapsed() < self.duration + PATIENCE,
                "almost nothing has arrived in {} s",
                PATIENCE.as_secs()
            );
            ensure!(!ended(), "an end has ended before its time");
            std::thread::sleep(self.duration.saturating_sub(since.elapsed()).max(Duration::from_millis(1)));
        }
        let (elapsed, bytes, responses) = (since.elapsed(), watch.bytes() - bytes, watch.responses() - responses);
        let cpu_ns = self.env.cpu_ns()? - cpu;
        ensure!(!ended(), "an end has ended before its time");
        Ok(Measured { bytes, responses, elapsed, cpu_ns })
    }
}
