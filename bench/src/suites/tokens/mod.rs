//! The suite `tokens`: what does it cost a socket to receive a fragment of device memory and to
//! have its token returned?
//!
//! ```text
//!   order of pages ──► receiver ── 16 tokens ──► ring of each returner ──► returner      two threads or more
//!                         └──────► 64 batches that are out ──────► itself                one thread
//! ```
//!
//! `netmem_bench::baselines::tokens` has the ways in which a token finds its page. [`hand_over`]
//! has no tokens, and only passes batches from thread to thread. [`circuit`] measures each way over
//! an [`order`] of pages, [`memory`] measures the memory of pages and sockets, and [`goals`] has
//! the goals of netmem's way.

mod circuit;
mod goals;
mod hand_over;
mod memory;
mod order;

use crate::plan::Plan;
use crate::report::{Base, Head, Row, compare};
use crate::rounds::Benchmark;
use crate::timing::Timing;
use circuit::Circuit;
use hand_over::HandOver;
use memory::Memory;
use netmem_bench::baselines::tokens::{HashedCounts, LockedEach, LockedMap, Ranges, RcuCounts, Tokens};
use netmem_measure::goals::Goal;
use order::{Order, Sequence, section};
use std::sync::Arc;

/// Everything that the suite measures.
pub(super) fn benchmarks(plan: &Plan) -> Vec<Box<dyn Benchmark>> {
    let settings = [(Sequence::InOrder, 1), (Sequence::InOrder, 8), (Sequence::Mixed, 1), (Sequence::Mixed, 8)];
    let mut benchmarks = Vec::new();
    for (sequence, bindings) in settings {
        let order = Arc::new(Order::new(sequence, bindings));
        for &threads in &plan.threads {
            benchmarks.extend([
                benchmark::<LockedEach>("locked_each", &order, threads),
                benchmark::<LockedMap>("locked_map", &order, threads),
                benchmark::<HashedCounts>("hashed_counts", &order, threads),
                benchmark::<RcuCounts>("rcu_counts", &order, threads),
                benchmark::<Ranges>("ranges", &order, threads),
                benchmark::<HandOver>("hand_over", &order, threads),
            ]);
        }
    }
    let device = memory::device();
    benchmarks.extend::<[Box<dyn Benchmark>; 4]>([
        Box::new(Memory::<LockedMap>::new("locked_map", &device)),
        Box::new(Memory::<HashedCounts>::new("hashed_counts", &device)),
        Box::new(Memory::<RcuCounts>::new("rcu_counts", &device)),
        Box::new(Memory::<Ranges>::new("ranges", &device)),
    ]);
    benchmarks
}

/// The benchmark of a kind of tokens, with this number of threads.
fn benchmark<T: Tokens + 'static>(way: &'static str, order: &Arc<Order>, threads: usize) -> Box<dyn Benchmark> {
    let order = order.clone();
    let head = Head {
        name: format!("{way}{}", order.sequence.suffix()),
        section: section(order.sequence, order.bindings()),
        threads,
        per: "fragment",
        unit: "ns",
        bindings: Some(order.bindings()),
        sequence: Some(order.sequence.name()),
        ..Head::default()
    };
    Timing::benchmark(head, move |_| Ok(Circuit::<T>::new(way, order, threads - 1)))
}

/// Compares the rows with each other, and with the goals.
pub(super) fn evaluate(rows: &mut [Row], percpu: &str) -> Vec<Goal> {
    compare(rows, |head| {
        let name = match head.sequence? {
            "mixed" => "locked_map_mixed",
            _ => "locked_map",
        };
        Some(Base { name, called: "locked_map" })
    });
    goals::goals(rows, percpu)
}
