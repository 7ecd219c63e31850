//! The suite `refs`: what do a get and a put of a reference cost, for one thread and for several
//! threads that share a count?
//!
//! [`counts`] puts every count behind one trait. The suite measures [`pairs`] of a get and a put,
//! [`retries`] of the compare-and-swap loop, the [`last`] put, the [`layout`] of an object with a
//! count, a [`kill`], and [`memory`]. [`goals`] has the goals.

mod counts;
mod goals;
mod kill;
mod last;
mod layout;
mod memory;
mod pairs;
mod retries;

use crate::harness::Harness;
use crate::peer::{self, Peer, Running};
use crate::plan::Plan;
use crate::report::{Base, Head, Row, compare};
use crate::rounds::{Benchmark, Skipped};
use crate::timing::Timing;
use counts::{BATCH, Batched, Count, Guard, Guarded, PerCpu, Plain, Strong, StrongLast, Swapped};
use kill::Kill;
use last::FinalPut;
use layout::{Alone, Beside, Layout};
use netmem_measure::goals::Goal;
use pairs::Pairs;
use retries::Retries;

/// Everything that the suite measures.
pub(super) fn benchmarks(plan: &Plan) -> Vec<Box<dyn Benchmark>> {
    let mut benchmarks = Vec::new();
    for &threads in &plan.threads {
        all_counts::<1>(threads, &mut benchmarks);
        all_counts::<BATCH>(threads, &mut benchmarks);
        if threads == 1 {
            benchmarks.push(c_sequence());
        }
        benchmarks.push(Box::new(Pairs::<Guard, 1>::new("guard", "enter+leave", threads)));
        benchmarks.push(Box::new(Retries::new(threads)));
    }
    benchmarks.extend::<[Box<dyn Benchmark>; 6]>([
        Box::new(FinalPut::<Plain>::new()),
        Box::new(FinalPut::<StrongLast>::new()),
        Box::new(FinalPut::<Swapped>::new()),
        Box::new(FinalPut::<Guarded>::new()),
        Box::new(FinalPut::<Batched>::new()),
        Box::new(FinalPut::<PerCpu>::new()),
    ]);
    let most = plan.most();
    let layouts: [Box<dyn Benchmark>; 4] = [
        Box::new(Layout::<Swapped, Beside<_>>::new(most)),
        Box::new(Layout::<Swapped, Alone<_>>::new(most)),
        Box::new(Layout::<Batched, Beside<_>>::new(most)),
        Box::new(Layout::<Batched, Alone<_>>::new(most)),
    ];
    if most > 1 {
        benchmarks.extend(layouts);
    } else {
        let heads = layouts.iter().flat_map(|benchmark| benchmark.heads()).collect();
        let why = "a writer and a reader need two threads, each on a CPU of its own".into();
        benchmarks.push(Box::new(Skipped { heads, why }));
    }
    for &threads in &plan.threads {
        for others in [1, 64, 4096] {
            benchmarks.push(Box::new(Kill::new(threads, others)));
        }
    }
    benchmarks.extend(memory::all().into_iter().map(|memory| Box::new(memory) as Box<dyn Benchmark>));
    benchmarks
}

/// The limit of all counts, on one counter of each thread: for other suites, which compare what
/// their threads gain with what its threads gain.
pub(super) fn plain(section: &'static str, threads: usize) -> Box<dyn Benchmark> {
    Box::new(Pairs::<Plain, 1>::new(section, "get+put", threads))
}

/// All counts, on `N` counters.
fn all_counts<const N: usize>(threads: usize, benchmarks: &mut Vec<Box<dyn Benchmark>>) {
    fn benchmark<C: Count + 'static, const N: usize>(threads: usize) -> Box<dyn Benchmark> {
        Box::new(Pairs::<C, N>::new("get+put", "get+put", threads))
    }
    benchmarks.extend([
        benchmark::<Plain, N>(threads),
        benchmark::<Strong, N>(threads),
        benchmark::<Swapped, N>(threads),
        benchmark::<Guarded, N>(threads),
        benchmark::<Batched, N>(threads),
        benchmark::<PerCpu, N>(threads),
    ]);
}

/// A counter in C. Its add is a sequence without a gate, which is the lower limit for `percpuref`.
fn c_sequence() -> Box<dyn Benchmark> {
    let head = Head {
        name: "c_sequence".into(),
        section: "get+put",
        threads: 1,
        per: "get+put",
        unit: "ns",
        counters: Some(1),
        ..Head::default()
    };
    let start = |harness: &Harness| {
        let dir = tempfile::tempdir().map_err(|e| format!("a directory: {e}"))?;
        let program = peer::build(dir.path(), netmem_bench::baselines::C_SEQUENCE, "")?;
        let cpu = harness.cpus(1).first().copied().unwrap_or(0);
        Running::start(std::process::Command::new(program).arg(cpu.to_string()), None)
    };
    Timing::benchmark(head, move |harness| {
        Peer::new("a counter in C").work(|| start(harness), |pairs| pairs.to_string())
    })
}

/// Compares the rows with each other, and with the goals.
pub(super) fn evaluate(rows: &mut [Row], percpu: &str) -> Vec<Goal> {
    compare(rows, |head| {
        let name = match (head.section, head.counters) {
            ("get+put", Some(1)) => "refcount",
            ("get+put", _) => "refcount_rotating",
            ("final put", _) => "final_put_refcount",
            _ => return None,
        };
        Some(Base { name, called: "refcount" })
    });
    goals::goals(rows, percpu)
}
