//! The time of a segment on one thread: the sender's end, the receiver's end and the device between
//! them do their work in turns.
//!
//! Why: with a thread for each end, a difference of the stacks disappears behind the waits of one
//! thread for the other. Here each instruction of both stacks counts, and so can callgrind count
//! them: a run moves one byte for each nanosecond of `--duration`.
//!
//! ```text
//! cargo build --release -p netmem-bench
//! valgrind --tool=callgrind --toggle-collect='*turns*timed*' \
//!     target/release/netmem-bench streams --rows '*in turns*' --runs 1 --duration 16ms
//! ```

use super::benchmarks::{HEADERS, MTU, name};
use super::end::{End, Idle};
use super::memory::Memory;
use super::net::ADDRESSES;
use super::ours::{self, Ours};
use super::rig::{Link, Offloads, Rig};
use super::run::{PORT, Path};
use super::smol::{self, Smol};
use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use anyhow::{Context, ensure};
use netmem::device::NetDevice;
use netmem::device::port::{Cross, Port};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// The section of the rows.
pub(super) const SECTION: &str = "both ends and the device in turns on one thread";
/// Bytes that are moved before the measurement, until the windows have grown to their limit.
const WARM_UP: u64 = 4 << 20;
/// Turns in a row in which nothing arrives, after which the run has failed.
const PATIENCE: u32 = 1 << 24;

/// Bulk by one of the two stacks.
pub(super) struct Turns {
    path: Path,
    /// Fits into the caches, so that a run measures the stacks.
    memory: Memory,
}

impl Turns {
    pub(super) fn new(path: Path) -> Self {
        Self { path, memory: Memory::new(Duration::ZERO) }
    }

    /// Moves this many bytes. Returns how many arrived, in which time, and the negotiated features.
    fn run(&self, bytes: u64) -> anyhow::Result<(u64, Duration, u64)> {
        let (memory, link, idle) = (&self.memory, Link { mtu: MTU, offloads: Offloads::None }, Idle::Polls);
        let Rig { mut device, net, pairs, connection } = Rig::cable(link, memory)?;
        let mut pairs = pairs.into_iter().enumerate();
        let (Some((_, first)), Some((_, second))) = (pairs.next(), pairs.next()) else {
            anyhow::bail!("two queue pairs")
        };
        let (received, elapsed) = if self.path == Path::Ours {
            let parts = |pair, end| ours::Parts::<Cross>::new(&net, pair, end, link, idle, memory);
            let target = Ours::listen(parts(second, 1)?, memory, PORT, || ())?;
            let to = SocketAddr::new(IpAddr::V4(ADDRESSES[1]), PORT);
            bulk(Ours::connect(parts(first, 0)?, memory, to)?.with_source()?, target, &mut device, bytes)?
        } else {
            let parts = |pair, end| smol::Parts::<Cross>::new(&net, pair, end, link, idle);
            let target = Smol::listen(parts(second, 1)?, memory, PORT, || ())?;
            bulk(Smol::connect(parts(first, 0)?, memory, 1, PORT)?, target, &mut device, bytes)?
        };
        let features = net.features();
        drop((net, connection));
        Ok((received, elapsed, features))
    }
}

/// Warms up, and then moves `bytes`.
fn bulk(
    mut first: impl End,
    mut second: impl End,
    device: &mut NetDevice<impl Port>,
    bytes: u64,
) -> anyhow::Result<(u64, Duration)> {
    turns(&mut first, &mut second, device, WARM_UP)?;
    timed(|| turns(&mut first, &mut second, device, bytes))
}

/// callgrind counts what happens in this function.
#[inline(never)]
fn timed(work: impl FnOnce() -> anyhow::Result<u64>) -> anyhow::Result<(u64, Duration)> {
    let begin = Instant::now();
    let received = work()?;
    Ok((received, begin.elapsed()))
}

/// Lets all three work in turns until `bytes` have arrived. Returns how many did.
fn turns(
    first: &mut impl End,
    second: &mut impl End,
    device: &mut NetDevice<impl Port>,
    bytes: u64,
) -> anyhow::Result<u64> {
    let (mut received, mut idle) = (0, 0);
    while received < bytes {
        first.produce()?;
        first.turn(true)?;
        device.poll();
        let arrived = second.consume()?.context("the connection has ended")?;
        second.turn(true)?;
        device.poll();
        received += arrived as u64;
        idle = if arrived > 0 { 0 } else { idle + 1 };
        ensure!(idle < PATIENCE, "nothing arrives");
    }
    Ok(received)
}

impl Benchmark for Turns {
    fn heads(&self) -> Vec<Head> {
        let (name, per) = (name(self.path).into(), "segment");
        vec![Head { name, section: SECTION, threads: 1, per, unit: "ns", ..Head::default() }]
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let bytes = harness.duration_ns();
        let (received, elapsed, features) = harness
            .alone(|| self.run(bytes))?
            .map_err(|source| BenchError::Stream { variant: name(self.path).into(), source })?;
        let segments = received as f64 / f64::from(MTU - HEADERS);
        let elapsed_ns = u64::try_from(elapsed.as_nanos()).ok();
        let value = elapsed.as_nanos() as f64 / segments;
        let operations = Some(segments as u64);
        Ok(vec![Sample { value, elapsed_ns, operations, bytes: Some(received), features, ..Sample::default() }])
    }

    fn note(&self) -> Option<String> {
        Some(self.memory.note())
    }
}
