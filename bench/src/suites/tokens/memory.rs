//! The memory of pages and sockets, and the time until a socket has its first fragment.
//!
//! The memory is the increase of the process's memory as the kernel counts it. It includes the
//! rounding of allocators. It does not include tables that are mapped and were never touched.

use crate::error::BenchError;
use crate::harness::Harness;
use crate::report::{Head, Sample};
use crate::rounds::Benchmark;
use netmem_bench::baselines::tokens::{BATCH, Fragment, Niovs, Receive, Tokens};
use std::marker::PhantomData;
use std::sync::Arc;

/// Pages of a device of 80 GB, 4 KiB each. The old kinds of tokens number only the first 2^24, and
/// no other pages are received.
const DEVICE: u32 = 20_000_000;
/// Sockets that receive from the device.
const SOCKETS: usize = 256;
/// Pages of the device that are all received: 1 GiB.
const PART: u32 = 1 << 18;

/// The memory that all variants receive from.
pub(super) fn device() -> Arc<Niovs> {
    Niovs::with_first(DEVICE, PART)
}

/// The memory of a variant.
pub(super) struct Memory<T> {
    way: &'static str,
    device: Arc<Niovs>,
    page: f64,
    socket: f64,
    of: PhantomData<T>,
}

impl<T: Tokens> Memory<T> {
    pub(super) fn new(way: &'static str, device: &Arc<Niovs>) -> Self {
        Self { way, device: device.clone(), page: 0.0, socket: 0.0, of: PhantomData }
    }
}

impl<T: Tokens> Benchmark for Memory<T> {
    fn heads(&self) -> Vec<Head> {
        let head = |what: &str, section, per, unit| {
            let name = format!("{what}_{}", self.way);
            Head { name, section, threads: 1, per, unit, ..Head::default() }
        };
        vec![
            head("set_up", "token set-up", "socket", "ns"),
            head("memory_page", "token memory", "page", "B"),
            head("memory_socket", "token memory", "socket", "B"),
        ]
    }

    fn prepare(&mut self, _harness: &Harness) -> Result<(), BenchError> {
        let bindings = [self.device.clone()];
        self.page = taken(|| all_pages::<T>(&bindings))? / f64::from(PART);
        self.socket = taken(|| sockets::<T>(&bindings))? / SOCKETS as f64;
        Ok(())
    }

    fn measure(&mut self, harness: &Harness) -> Result<Vec<Sample>, BenchError> {
        let bindings = [self.device.clone()];
        let timed = harness.alone(|| harness.time(|| sockets::<T>(&bindings)).0)?;
        let of = Sample::of;
        let each = |n: u64| n as f64 / SOCKETS as f64;
        let tsc = harness.tsc.then(|| each(timed.ticks));
        let (value, elapsed_ns, operations) = (each(timed.ns), Some(timed.ns), Some(SOCKETS as u64));
        let set_up = Sample { value, tsc, lost_ns: timed.lost_ns, elapsed_ns, operations, ..Sample::default() };
        Ok(vec![set_up, of(self.page), of(self.socket)])
    }
}

/// A socket that has received each page of a part of the device.
fn all_pages<T: Tokens>(bindings: &[Arc<Niovs>]) -> (T::Receiver, T::Returner) {
    let (mut receiver, returner) = T::open(bindings);
    let mut tokens = [0; BATCH];
    for first in (0..PART).step_by(BATCH) {
        let fragments: [Fragment; BATCH] = std::array::from_fn(|n| Fragment { binding: 0, index: first + n as u32 });
        receiver.receive(&fragments, &mut tokens);
    }
    (receiver, returner)
}

/// Sockets that have received one fragment each.
fn sockets<T: Tokens>(bindings: &[Arc<Niovs>]) -> Vec<(T::Receiver, T::Returner)> {
    let socket = |n| {
        let (mut receiver, returner) = T::open(bindings);
        receiver.receive(&[Fragment { binding: 0, index: n }], &mut [0]);
        (receiver, returner)
    };
    (0..SOCKETS as u32).map(socket).collect()
}

/// The number of bytes that the value of `make` uses.
fn taken<M>(make: impl FnOnce() -> M) -> Result<f64, BenchError> {
    // Memory that was freed before would be used again, and would not be counted.
    netmem_refs::rcu::flush();
    #[cfg(target_env = "gnu")]
    // SAFETY: the call returns free memory to the system, and does nothing else.
    unsafe {
        libc::malloc_trim(0);
    }
    let before = anonymous()?;
    let made = make();
    let bytes = anonymous()?.saturating_sub(before) as f64;
    drop(made);
    Ok(bytes)
}

/// Bytes of this process that are in memory and belong to no file. The kernel counts them at the
/// time of the call; `statm` would be late.
fn anonymous() -> Result<u64, BenchError> {
    const FILE: &str = "/proc/self/smaps_rollup";
    let unavailable = |why: String| BenchError::Unavailable { what: "memory", why };
    let text = std::fs::read_to_string(FILE).map_err(|error| unavailable(format!("{FILE}: {error}")))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Anonymous:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| unavailable(format!("{FILE} does not say how much is anonymous")))
}
