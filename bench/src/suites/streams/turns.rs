//! The time of a segment, and of a request and its answer, on one thread: the two ends and the
//! device between them do their work in turns.
//!
//! Why: with a thread for each end, a difference of the stacks disappears behind the waits of one
//! thread for the other. Here each instruction of both stacks counts, and so can callgrind count
//! them: a run of segments moves one byte for each nanosecond of `--duration`, and one of requests
//! has one for each microsecond.
//!
//! ```text
//! cargo build --release -p netmem-bench
//! valgrind --tool=callgrind --toggle-collect='*turns*timed*' \
//!     target/release/netmem-bench streams --rows '*in turns*' --runs 1 --duration 16ms
//! ```

use super::end::{End, Idle, MESSAGE};
use super::memory::Memory;
use super::net::ADDRESSES;
use super::ours::{self, Ours};
use super::rig::{HEADERS, Link, MTU, Offloads, Rig};
use super::run::{PORT, Path, Program};
use super::smol::{self, Smol};
use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use anyhow::{Context, ensure};
use netmem::device::port::Cross;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// The section of the rows of segments.
pub(super) const SECTION: &str = "both ends and the device in turns on one thread";
/// The section of the rows of requests.
pub(super) const REQUESTS: &str = "requests: both ends and the device in turns on one thread";
/// Bytes that are moved before the measurement, until the windows have grown to their limit.
pub(super) const WARM_UP: u64 = 4 << 20;
/// Requests before the measurement: more than are acknowledged at once.
const FIRST_REQUESTS: u64 = 1000;
/// Turns in a row in which nothing arrives, after which the run has failed.
const PATIENCE: u32 = 1 << 24;

/// Bulk or requests by one of the two stacks.
pub(super) struct Turns {
    path: Path,
    program: Program,
    /// Fits into the caches, so that a run measures the stacks.
    memory: Memory,
}

impl Turns {
    pub(super) fn new(path: Path, program: Program) -> Self {
        Self { path, program, memory: Memory::new(Duration::ZERO) }
    }

    /// Moves this many bytes, or has this many requests answered. Returns how many there were, in
    /// which time, and the negotiated features.
    fn run(&self, amount: u64) -> anyhow::Result<(u64, Duration, u64)> {
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
            let source = Ours::connect(parts(first, 0)?, memory, to)?.with_source()?;
            self.measured(source, target, &mut || device.poll(), amount)?
        } else {
            let parts = |pair, end| smol::Parts::<Cross>::new(&net, pair, end, link, idle);
            let target = Smol::listen(parts(second, 1)?, memory, PORT, || ())?;
            let source = Smol::connect(parts(first, 0)?, memory, 1, PORT)?;
            self.measured(source, target, &mut || device.poll(), amount)?
        };
        let features = net.features();
        drop((net, connection));
        Ok((received, elapsed, features))
    }

    /// Warms up, and then does `amount`.
    fn measured(
        &self,
        mut first: impl End,
        mut second: impl End,
        device: &mut impl FnMut() -> usize,
        amount: u64,
    ) -> anyhow::Result<(u64, Duration)> {
        if self.program == Program::Requests {
            requests(&mut first, &mut second, device, FIRST_REQUESTS)?;
            return timed(|| requests(&mut first, &mut second, device, amount));
        }
        turns(&mut first, &mut second, device, WARM_UP)?;
        timed(|| turns(&mut first, &mut second, device, amount))
    }
}

/// callgrind counts what happens in this function.
#[inline(never)]
fn timed(work: impl FnOnce() -> anyhow::Result<u64>) -> anyhow::Result<(u64, Duration)> {
    let begin = Instant::now();
    let received = work()?;
    Ok((received, begin.elapsed()))
}

/// Lets all three work in turns until `bytes` have arrived. `device` polls the device. Returns the
/// number of bytes that arrived.
pub(super) fn turns(
    first: &mut impl End,
    second: &mut impl End,
    device: &mut impl FnMut() -> usize,
    bytes: u64,
) -> anyhow::Result<u64> {
    let (mut received, mut idle) = (0, 0);
    while received < bytes {
        first.produce()?;
        first.turn(true)?;
        device();
        let arrived = second.consume()?.context("the connection has ended")?;
        second.turn(true)?;
        device();
        received += arrived as u64;
        idle = if arrived > 0 { 0 } else { idle + 1 };
        ensure!(idle < PATIENCE, "nothing arrives");
    }
    Ok(received)
}

/// The same, until `count` requests of [`MESSAGE`] bytes were answered by as many. There is one at
/// a time. Each end works twice for a request: to receive, and to send. Returns how many there
/// were.
fn requests(
    first: &mut impl End,
    second: &mut impl End,
    device: &mut impl FnMut() -> usize,
    count: u64,
) -> anyhow::Result<u64> {
    let (request, mut asked, mut answer) = ([0x5a; MESSAGE], [0; MESSAGE], [0; MESSAGE]);
    let ended = "the connection has ended";
    for _ in 0..count {
        let (mut sent, mut arrived, mut replied, mut received, mut turns) = (0, 0, 0, 0, 0);
        while received < MESSAGE {
            if sent < MESSAGE {
                sent += first.write(&request[sent..])?;
                first.turn(true)?;
                device();
            }
            second.turn(false)?;
            if arrived < MESSAGE {
                arrived += second.read(&mut asked[arrived..])?.context(ended)?;
            }
            if replied < arrived {
                replied += second.write(&asked[replied..arrived])?;
                second.turn(true)?;
            }
            device();
            first.turn(false)?;
            received += first.read(&mut answer[received..])?.context(ended)?;
            turns += 1;
            ensure!(turns < PATIENCE, "nothing arrives");
        }
        std::hint::black_box(&answer);
    }
    Ok(count)
}

impl Benchmark for Turns {
    fn heads(&self) -> Vec<Head> {
        let (section, per) =
            if self.program == Program::Requests { (REQUESTS, "request") } else { (SECTION, "segment") };
        vec![Head { name: self.path.name().into(), section, threads: 1, per, unit: "ns", ..Head::default() }]
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let requests = self.program == Program::Requests;
        let amount = if requests { harness.duration_ns() / 1000 } else { harness.duration_ns() };
        let (done, elapsed, features) = harness
            .alone(|| self.run(amount))?
            .map_err(|source| BenchError::Stream { variant: self.path.name().into(), source })?;
        let (count, bytes) = if requests {
            (done as f64, done * 2 * MESSAGE as u64)
        } else {
            (done as f64 / f64::from(MTU - HEADERS), done)
        };
        let elapsed_ns = u64::try_from(elapsed.as_nanos()).ok();
        let value = elapsed.as_nanos() as f64 / count;
        let operations = Some(count as u64);
        Ok(vec![Sample { value, elapsed_ns, operations, bytes: Some(bytes), features, ..Sample::default() }])
    }

    fn note(&self) -> Option<String> {
        Some(self.memory.note())
    }
}
