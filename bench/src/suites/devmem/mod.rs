//! The suite `devmem`: what CPU time does a gigabyte cost that is received into device memory or
//! sent from it, end to end, with the embedded device?
//!
//! ```text
//!            first CPU, one thread, in turns                          second CPU
//!   receive  Device::poll ─► VirtioSplitRx ─► FlowQueue ─► mailbox ─► Socket: 16 at a time; a message complete: returned
//!   transmit Device::poll ◄─ VirtioSplitTx ◄─ Sender::send_again ◄─── ring ◄─ Sender::message
//! ```
//!
//! There are four flows. A message is 4 MB, sent as a sequence of datagrams of 1472 bytes. A
//! variant is a count for the binding and a kind of tokens for the socket: `refcount+locked_map` is
//! the old way, `percpuref+ranges` the way of today.
//!
//! Everything but `locked_map` is the code of the product: device, driver, header split, flow
//! table, mailboxes, bindings with either count, senders, and with `ranges` the socket. With
//! `locked_map` the socket hands out datagrams without a token. The ids come from
//! [`netmem_bench::baselines::tokens::Locked`], which acquires its lock once for 16 datagrams, as
//! well as such a socket could do it. Pages are returned by the same put. `transmit` uses no
//! tokens: rows that differ only in their tokens do the same work twice, and show the noise of the
//! measurement.
//!
//! Streams are measured with the same variants, also with 4 flows and messages of 4 MB: see
//! [`streams`]. [`segments`] measures what a segment of a stream costs, by its length. Both have
//! the parts in [`lane`] and [`peer`].
//!
//! The embedded device always shares the network's thread, also if there are more CPUs, so that
//! every machine measures the same. The time of its passes counts for throughput, but is left out
//! of all CPU time. CPU time is that of turns in which there was something to do. It is measured at
//! a pace that all variants can keep: see [`benchmark`]. [`rig`] connects the parts, [`receive`]
//! and [`transmit`] are the two directions, [`ways`] the two kinds of tokens, and [`goals`] the
//! goals.

mod benchmark;
mod directions;
mod goals;
mod lane;
mod peer;
mod receive;
mod resident;
mod rig;
mod segments;
mod source;
mod streams;
mod transmit;
mod ways;

use crate::accounting::Accounting;
use crate::error::BenchError;
use crate::plan::Plan;
use crate::report::{Base, Head, Row, compare};
use crate::rounds::{Benchmark, Skipped};
use benchmark::{EndToEnd, Make, Pace, Traffic};
use directions::{AFTER, BEFORE, COUNT_BEFORE, Direction, MAP_AFTER};
use netmem::refs::{PercpuRef, RefCount};
use netmem_measure::goals::Goal;
use receive::Receiving;
use rig::Memory;
use segments::Segments;
use std::sync::Arc;
use streams::StreamBenchmark;
use transmit::Transmitting;
use ways::{LockedMap, Ranges};

/// Everything that the suite measures.
pub(super) fn benchmarks(plan: &Plan, accounting: &Accounting) -> Vec<Box<dyn Benchmark>> {
    let enough = plan.most() > 1;
    let memory = Arc::new(Memory::default());
    let mut benchmarks = Vec::new();
    let mut add = |direction: Direction, pace: &Arc<Pace>, variant, make: Make| {
        let heads = direction.heads(variant);
        if enough {
            benchmarks.push(EndToEnd::benchmark(variant, heads, direction, pace.clone(), make));
        } else {
            benchmarks.push(Box::new(Skipped { heads, why: WHY.to_owned() }) as Box<dyn Benchmark>);
        }
    };
    let pace = Arc::new(Pace::default());
    let rig = || (memory.clone(), accounting.clone());
    add(Direction::Receive, &pace, BEFORE, make(rig(), Receiving::<RefCount, LockedMap<_>>::new));
    add(Direction::Receive, &pace, MAP_AFTER, make(rig(), Receiving::<PercpuRef, LockedMap<_>>::new));
    add(Direction::Receive, &pace, COUNT_BEFORE, make(rig(), Receiving::<RefCount, Ranges<_>>::new));
    add(Direction::Receive, &pace, AFTER, make(rig(), Receiving::<PercpuRef, Ranges<_>>::new));
    let pace = Arc::new(Pace::default());
    add(Direction::Transmit, &pace, BEFORE, make(rig(), Transmitting::<RefCount>::new));
    add(Direction::Transmit, &pace, MAP_AFTER, make(rig(), Transmitting::<PercpuRef>::new));
    add(Direction::Transmit, &pace, COUNT_BEFORE, make(rig(), Transmitting::<RefCount>::new));
    add(Direction::Transmit, &pace, AFTER, make(rig(), Transmitting::<PercpuRef>::new));
    if enough {
        for direction in [Direction::StreamReceive, Direction::StreamTransmit] {
            benchmarks.push(Box::new(StreamBenchmark::new(direction, &memory)));
        }
        for benchmark in Segments::benchmarks(&memory) {
            benchmarks.push(Box::new(benchmark));
        }
    } else {
        let skip = |heads: Vec<Head>| Box::new(Skipped { heads, why: WHY.to_owned() }) as Box<dyn Benchmark>;
        let streams =
            [Direction::StreamReceive, Direction::StreamTransmit].map(|d| StreamBenchmark::new(d, &memory).heads());
        benchmarks.extend(streams.map(skip));
        benchmarks.extend(Segments::benchmarks(&memory).iter().map(|benchmark| skip(benchmark.heads())));
    }
    benchmarks
}

/// Why nothing is measured with one thread.
const WHY: &str = "the network and the application each take a CPU of their own; allow two threads";

fn make<T: Traffic + 'static>(
    (memory, accounting): (Arc<Memory>, Accounting),
    new: impl FnOnce(&Memory, &Accounting) -> Result<T, BenchError> + 'static,
) -> Make {
    Box::new(move || Ok(Box::new(new(&memory, &accounting)?)))
}

/// Compares the rows with each other, and with the goals.
pub(super) fn evaluate(rows: &mut [Row], percpu: &str) -> Vec<Goal> {
    compare(rows, |head| (head.unit == "ns").then_some(Base { name: BEFORE, called: "before" }));
    goals::goals(rows, percpu)
}
