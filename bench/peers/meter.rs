//! What `bench/peers/xsk.sh` asks of each program: arguments, threads on their CPUs, and the time
//! of polls that found packets. Netmem's programs and those of other crates compile this file.

use quanta::Clock;
use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Packets that are taken from the ring, sent, or handed over at a time.
pub(crate) const BATCH: usize = 64;
/// Entries of each of the four rings.
pub(crate) const RING: u32 = 2048;
/// Frames in the UMEM.
pub(crate) const FRAMES: u32 = 8192;
/// Packets on their way to the second thread.
pub(crate) const CHANNEL: usize = 1024;
/// What is sent: an Ethernet frame of the local experimental type, to an address of nothing.
pub(crate) const FRAME: [u8; 60] = {
    let mut frame = [0; 60];
    (frame[0], frame[6], frame[12], frame[13]) = (2, 2, 0x88, 0xb5);
    frame
};
/// How long the second thread sleeps when it has nothing to do.
const NAP: Duration = Duration::from_micros(20);

/// Traffic that is not counted: caches, page tables, the clock of the CPU.
const WARM: Duration = Duration::from_millis(300);
/// How long the first packet is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// The first thread counts now, and so does the second.
static COUNTING: AtomicBool = AtomicBool::new(false);
/// The first thread is done.
static DONE: AtomicBool = AtomicBool::new(false);

/// What is done with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    /// Nothing: its frame goes back.
    Drop,
    /// It is sent back, its Ethernet addresses exchanged.
    Echo,
    /// It goes to a second thread, which reads 16 bytes of it and returns its frame.
    Thread,
    /// Frames are sent as fast as the kernel takes them, each written when it is sent.
    Transmit,
}

/// The command line: `IFACE drop|echo|thread|transmit MILLISECONDS CPU [CPU OF THE SECOND THREAD]
/// [--busy-poll]`.
pub(crate) struct Arguments {
    pub(crate) interface: String,
    pub(crate) job: Job,
    pub(crate) time: Duration,
    pub(crate) cpu: usize,
    second: Option<usize>,
    /// The driver works in the system calls of the program (`SO_PREFER_BUSY_POLL`).
    pub(crate) busy_poll: bool,
}

impl Arguments {
    pub(crate) fn read() -> Result<Self, Box<dyn Error>> {
        let mut arguments: Vec<String> = std::env::args().skip(1).collect();
        let usage = "usage: IFACE drop|echo|thread|transmit MILLISECONDS CPU [CPU OF THE SECOND THREAD] [--busy-poll]";
        let busy_poll = arguments.pop_if(|last| last == "--busy-poll").is_some();
        let [interface, job, time, cpu, second @ ..] = &arguments[..] else { return Err(usage.into()) };
        let (job, second) = match (&job[..], second) {
            ("drop", []) => (Job::Drop, None),
            ("echo", []) => (Job::Echo, None),
            ("transmit", []) => (Job::Transmit, None),
            ("thread", [cpu]) => (Job::Thread, Some(cpu.parse()?)),
            _ => return Err(usage.into()),
        };
        let time = Duration::from_millis(time.parse()?);
        Ok(Self { interface: interface.clone(), job, time, cpu: cpu.parse()?, second, busy_poll })
    }
}

/// Keeps the calling thread on a CPU.
pub(crate) fn pin(cpu: usize) -> Result<(), Box<dyn Error>> {
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &cpus)?)
}

/// A poll that found nothing and took longer was interrupted: by the kernel, another program or the
/// hypervisor.
const LONG_NS: u64 = 1000;

/// What a thread counts: packets, nanoseconds, nanoseconds in polls that found packets, and
/// nanoseconds in polls that found none and were not interrupted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) packets: u64,
    pub(crate) elapsed: u64,
    pub(crate) busy: u64,
    pub(crate) idle: u64,
    /// `CLOCK_MONOTONIC` when the count began.
    begin: u64,
}

/// Runs `poll`, which returns how many packets it found, while `goes_on` returns true for the
/// nanoseconds since the start.
#[inline(always)]
fn count(clock: &Clock, mut poll: impl FnMut() -> usize, mut goes_on: impl FnMut(u64) -> bool) -> Counts {
    let begin = clock.raw();
    let (mut at, mut ticks, mut idle, mut packets) = (begin, 0, 0, 0);
    // In ticks.
    let long = (LONG_NS << 20) / clock.delta_as_nanos(0, 1 << 20).max(1);
    loop {
        let found = poll();
        let now = clock.raw();
        if found > 0 {
            ticks += now - at;
            packets += found as u64;
        } else if now - at < long {
            idle += now - at;
        }
        at = now;
        let elapsed = clock.delta_as_nanos(begin, now);
        if !goes_on(elapsed) {
            let (busy, idle) = (clock.delta_as_nanos(0, ticks), clock.delta_as_nanos(0, idle));
            return Counts { packets, elapsed, busy, idle, begin: 0 };
        }
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds, by which `perf` stamps its samples.
fn monotonic() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes a value that is there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The first thread: waits for packets, lets the machine get warm, and counts for as long as the
/// caller asked for.
pub(crate) fn measure(clock: &Clock, time: Duration, mut poll: impl FnMut() -> usize) -> Counts {
    eprintln!("ready");
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let begin = clock.raw();
    while poll() == 0 && clock.delta_as_nanos(begin, clock.raw()) < nanoseconds(PATIENCE) {}
    count(clock, &mut poll, |elapsed| elapsed < nanoseconds(WARM));
    COUNTING.store(true, Ordering::Relaxed);
    let begin = monotonic();
    let counts = Counts { begin, ..count(clock, &mut poll, |elapsed| elapsed < nanoseconds(time)) };
    DONE.store(true, Ordering::Relaxed);
    counts
}

/// The second thread, on its CPU: counts while the first does.
///
/// Where there are two CPUs, the sender of the packets is on this one, too. So the second thread
/// has a priority of real time, and sleeps when it finds nothing: its timer preempts the sender
/// between two batches. Shares of the scheduler would be of milliseconds.
pub(crate) fn second(clock: &Clock, arguments: &Arguments, mut poll: impl FnMut() -> usize) -> Result<Counts, String> {
    let Some(cpu) = arguments.second else { return Ok(Counts::default()) };
    pin(cpu).map_err(|e| e.to_string())?;
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: the kernel reads a parameter that is there.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const lowest) } != 0 {
        return Err(format!("SCHED_FIFO: {}", std::io::Error::last_os_error()));
    }
    let (mut ticks, mut packets) = (0, 0);
    while !DONE.load(Ordering::Relaxed) {
        let begin = clock.raw();
        let found = poll();
        if found == 0 {
            std::thread::sleep(NAP);
        } else if COUNTING.load(Ordering::Relaxed) {
            ticks += clock.raw() - begin;
            packets += found as u64;
        }
    }
    Ok(Counts { packets, busy: clock.delta_as_nanos(0, ticks), ..Counts::default() })
}

/// What the script reads: packets, nanoseconds, nanoseconds of work of all threads, nanoseconds in
/// which the first thread found nothing, and when the count began.
pub(crate) fn report(first: Counts, second: Counts) {
    let busy = first.busy + second.busy;
    println!("result {} {} {busy} {} {}", first.packets, first.elapsed, first.idle, first.begin);
}
