//! The suite `streams`: how do throughput, CPU time and latency of TCP on our stack compare with
//! the kernel's and with smoltcp's?
//!
//! ```text
//!   ours, smoltcp     stack ── driver ── device, its two queue pairs connected ── driver ── stack
//!   kernel_veth       socket ── veth ── socket                     two network namespaces
//!   ours_to_kernel    stack ── driver ── device ── tap ── socket   and kernel_to_ours
//!   kernel_taps       socket ── tap ── a thread ── tap ── socket
//!   memcached         our server behind a tap, Debian's over a veth, and the same load
//!   http              a connection for each request: ours, and kernel_veth
//! ```
//!
//! Applications write what they send and read what they receive: see [`memory`]. Each end has a
//! CPU. `sleeping`: threads sleep when they have no work, and the device has a thread of its own.
//! `polling`: no thread sleeps. The thread of an end polls the device, so that two CPUs are enough.
//! Without offloads the stacks compute all checksums, segments are at most 1500 bytes, and the
//! kernel does not merge received segments. With checksum offload the device computes checksums and
//! cuts nothing. All connections of the kernel use CUBIC, as our stack does: see [`net`]. [`turns`]
//! has all on one thread, and [`threads`] the same on several.
//!
//! [`replies`] is about our stack alone: servers on many threads count one destination entry.
//!
//! CPU time is that of all threads of both ends and of everything between them: see [`account`].

mod account;
mod benchmarks;
mod clients;
mod end;
mod goals;
mod http;
mod kernel;
mod memcached;
mod memory;
mod net;
mod ours;
mod relay;
mod replies;
mod rig;
mod run;
mod smol;
mod threads;
mod turns;

use super::refs;
use crate::plan::Plan;
use crate::report::{Base, Row, compare};
use crate::rounds::Benchmark;
use netmem_measure::goals::Goal;
use run::Env;
use std::sync::Arc;
use threads::Threads;

/// Everything that the suite measures.
pub(super) fn benchmarks(plan: &Plan) -> Vec<Box<dyn Benchmark>> {
    let env = Arc::new(Env::new(plan.duration, &plan.cpus));
    let mut benchmarks = benchmarks::benchmarks(&env);
    benchmarks.extend(memcached::benchmarks(&env));
    benchmarks.extend(gain(&plan.threads));
    benchmarks.extend(replies::benchmarks(&plan.threads, plan.cpus.len()));
    benchmarks
}

/// What a second thread gains, and the most that it can gain here: no thread of `plain` shares
/// anything with another one.
fn gain(threads: &[usize]) -> Vec<Box<dyn Benchmark>> {
    let two = threads.iter().filter(|threads| **threads <= 2);
    let rows = |&threads: &usize| -> [Box<dyn Benchmark>; 2] {
        [Box::new(Threads::new(threads)), refs::plain(threads::SECTION, threads)]
    };
    two.flat_map(rows).collect()
}

/// Compares the rows with each other, and with the goals.
pub(super) fn evaluate(rows: &mut [Row], percpu: &str) -> Vec<Goal> {
    compare(rows, |head| {
        if head.section.starts_with("memcached") {
            return Some(Base { name: "ours", called: "ours" });
        }
        let name = match head.unit {
            "ns" if head.name.ends_with("_polling") => "kernel_veth_polling",
            "ns" if head.name.ends_with("_sleeping") => "kernel_veth_sleeping",
            "ns" => "kernel_veth",
            _ => return None,
        };
        Some(Base { name, called: "kernel_veth" })
    });
    goals::goals(rows, percpu)
}
