//! What a second thread gains: each thread has both ends of a connection and its part of a device.
//!
//! ```text
//!   thread 0:   stack ── driver ── worker 0 of the device ── driver ── stack
//!   thread 1:   stack ── driver ── worker 1 of the device ── driver ── stack
//! ```
//!
//! Each thread does what the one thread of [`turns`](super::turns) does, with segments. The threads
//! share a driver, its memory with the pools' pages, and a device. So the gain shows whether these
//! are divided. It is compared with the gain of `plain`, whose threads share nothing: two CPUs may
//! be threads of one core, or share a frequency.

use super::end::Idle;
use super::memory::Memory;
use super::net::ADDRESSES;
use super::ours::{Ours, Parts};
use super::rig::{Divided, HEADERS, Link, MTU, Offloads};
use super::run::PORT;
use super::turns::{WARM_UP, turns};
use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use anyhow::{Context, ensure};
use netmem::device::Worker;
use netmem::device::port::Cross;
use netmem_measure::cpus::pin;
use netmem_measure::threads::{propagate, spawn};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The section of the rows.
pub(super) const SECTION: &str = "both ends and a part of the device for each thread";
/// Bytes that a thread moves at a time while it waits for threads that are still measured.
const CHUNK: u64 = 64 << 10;
const LINK: Link = Link { mtu: MTU, offloads: Offloads::None };

/// So many threads.
pub(super) struct Threads {
    threads: usize,
    memory: Memory,
}

/// What the threads of a run share.
#[derive(Default)]
struct Meeting {
    warm: AtomicUsize,
    done: AtomicUsize,
    /// Set when a thread has failed, so that the others do not wait for it.
    failed: AtomicBool,
}

impl Meeting {
    /// Waits until all threads have warmed up.
    fn begin(&self, threads: usize) -> anyhow::Result<()> {
        self.warm.fetch_add(1, Ordering::AcqRel);
        let mut spins = 0u32;
        while self.warm.load(Ordering::Acquire) < threads {
            ensure!(!self.failed.load(Ordering::Acquire), "another thread has failed");
            spins += 1;
            // A thread that is not warm may need this CPU before it moves to its own.
            if spins.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        Ok(())
    }

    /// Whether a thread is still measured.
    fn goes_on(&self, threads: usize) -> bool {
        self.done.load(Ordering::Acquire) < threads && !self.failed.load(Ordering::Acquire)
    }
}

/// Sets the flag when it is dropped, also in a panic, unless the work was done.
struct Fails<'a> {
    failed: &'a AtomicBool,
    done: bool,
}

impl Drop for Fails<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.failed.store(true, Ordering::Release);
        }
    }
}

/// The results of a thread: bytes, and the time that they took.
type Moved = (u64, Duration);

impl Threads {
    pub(super) fn new(threads: usize) -> Self {
        Self { threads, memory: Memory::new(Duration::ZERO) }
    }

    /// Moves `bytes` on each thread. Returns what each moved, and the negotiated features.
    fn run(&self, cpus: &[usize], bytes: u64) -> anyhow::Result<(Vec<Moved>, u64)> {
        let Self { threads, memory } = self;
        let Divided { mut workers, net, pairs, connection } =
            Divided::cables(u16::try_from(*threads)?, *threads, LINK, memory)?;
        let mut firsts = Vec::new();
        for (n, pair) in pairs.into_iter().enumerate() {
            firsts.push(Parts::<Cross>::new(&net, pair, n / threads, LINK, Idle::Polls, memory)?);
        }
        let seconds = firsts.split_off(*threads);
        let meeting = Meeting::default();
        let moved = std::thread::scope(|scope| {
            let mut crew = Vec::new();
            for (n, (ends, worker)) in firsts.into_iter().zip(seconds).zip(&mut workers).enumerate() {
                let (meeting, cpu) = (&meeting, cpus[n % cpus.len()]);
                let thread = spawn(scope, format!("netmem-bench-{n}"), move || {
                    pin(cpu);
                    let mut fails = Fails { failed: &meeting.failed, done: false };
                    let moved = self.work(ends, worker, bytes, meeting);
                    fails.done = moved.is_ok();
                    moved
                });
                if thread.is_err() {
                    meeting.failed.store(true, Ordering::Release);
                }
                crew.push(thread);
            }
            let join = |thread: std::io::Result<_>| propagate(std::thread::ScopedJoinHandle::join(thread?));
            // All have ended before an error is returned.
            let ended: Vec<anyhow::Result<Moved>> = crew.into_iter().map(join).collect();
            ended.into_iter().collect::<anyhow::Result<Vec<_>>>()
        });
        let features = net.features();
        drop((net, connection));
        Ok((moved?, features))
    }

    /// The work of a thread, from the handshake on.
    fn work(
        &self,
        (first, second): (Parts<Cross>, Parts<Cross>),
        worker: &mut Worker<Cross>,
        bytes: u64,
        meeting: &Meeting,
    ) -> anyhow::Result<Moved> {
        let Self { threads, memory } = self;
        let mut target = Ours::listen(second, memory, PORT, || ())?;
        let to = SocketAddr::new(IpAddr::V4(ADDRESSES[1]), PORT);
        let mut source = Ours::connect(first, memory, to)?.with_source()?;
        let mut move_bytes = |bytes| turns(&mut source, &mut target, &mut || worker.poll(), bytes);
        move_bytes(WARM_UP)?;
        meeting.begin(*threads)?;
        let begin = Instant::now();
        let moved = move_bytes(bytes)?;
        let elapsed = begin.elapsed();
        meeting.done.fetch_add(1, Ordering::AcqRel);
        while meeting.goes_on(*threads) {
            move_bytes(CHUNK)?;
        }
        Ok((moved, elapsed))
    }
}

impl Benchmark for Threads {
    fn heads(&self) -> Vec<Head> {
        let (name, threads) = ("ours".into(), self.threads);
        vec![Head { name, section: SECTION, threads, per: "segment", unit: "ns", ..Head::default() }]
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let (moved, features) = self
            .run(harness.cpus(self.threads), harness.duration_ns())
            .context("the threads of a device")
            .map_err(|source| BenchError::Stream { variant: "ours".into(), source })?;
        let segments = |bytes: u64| bytes as f64 / f64::from(MTU - HEADERS);
        // The mean of the threads, as in the rows of other suites.
        let times = moved.iter().map(|(bytes, elapsed)| elapsed.as_nanos() as f64 / segments(*bytes));
        let value = times.sum::<f64>() / moved.len().max(1) as f64;
        let bytes: u64 = moved.iter().map(|(bytes, _)| bytes).sum();
        let elapsed_ns = moved.iter().map(|(_, elapsed)| elapsed.as_nanos() as u64).max();
        let operations = Some(segments(bytes) as u64);
        Ok(vec![Sample { value, elapsed_ns, operations, bytes: Some(bytes), features, ..Sample::default() }])
    }

    fn note(&self) -> Option<String> {
        Some(self.memory.note())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_moves_its_bytes() {
        let cpus = netmem_measure::cpus::allowed();
        for threads in [1, 2] {
            let (moved, features) = Threads::new(threads).run(&cpus, 1 << 20).unwrap();
            assert_eq!(moved.len(), threads);
            assert!(moved.iter().all(|(bytes, elapsed)| *bytes >= 1 << 20 && !elapsed.is_zero()), "{moved:?}");
            assert_ne!(features, 0);
        }
    }

    #[test]
    fn a_thread_that_fails_ends_the_wait_of_the_others() {
        let meeting = Meeting::default();
        drop(Fails { failed: &meeting.failed, done: true });
        assert!(meeting.goes_on(2));
        drop(Fails { failed: &meeting.failed, done: false });
        assert!(meeting.begin(2).is_err() && !meeting.goes_on(2));
    }
}
