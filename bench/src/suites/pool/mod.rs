//! The suite `pool`: what does it cost to allocate a page and to return it, in the poll context and
//! from other CPUs?
//!
//! [`solo`] measures one thread, and what other designs do in its place. In [`pipeline`] one thread
//! allocates pages and others drop them. In [`mod@crowd`] every thread allocates pages and drops
//! them. In [`starved`] a thread needs a page while all pages are elsewhere. [`dpdk`] and
//! [`live_frames`] measure DPDK and the kernel. All of them are [timings](crate::timing) of blocks
//! of 64 operations. [`accounting`] has the pools, and [`goals`] has their goals.

mod crowd;
mod dpdk;
mod goals;
mod live_frames;
mod pipeline;
mod solo;
mod starved;

pub(super) use crate::accounting::Accounting;

use crate::accounting::{CACHE, CountedPool};
use crate::error::BenchError;
use crate::plan::Plan;
use crate::report::{Base, Head, PacketCost, Row, compare};
use crate::rounds::{Benchmark, Skipped};
use crate::timing::Timing;
use crowd::{Crowd, PrivateArray};
use dpdk::Dpdk;
use live_frames::LiveFrames;
use netmem::pool::PoolOptions;
use netmem_bench::baselines::{FairPool, Forward, LockedPool, SpscPool};
use netmem_measure::goals::Goal;
use pipeline::{Bulky, Busy, Dropping, Malloc, Pages, Pipeline, Source};
use solo::Alone;
use starved::Starved;

/// Everything that the suite measures.
pub(super) fn benchmarks(plan: &Plan, accounting: &Accounting) -> Vec<Box<dyn Benchmark>> {
    let dpdk = Dpdk::new(plan.most());
    let mut benchmarks = one_cpu(accounting, &dpdk);
    for threads in plan.threads.iter().copied().filter(|&n| n > 1) {
        benchmarks.extend(other_cpus(accounting, &dpdk, threads));
        benchmarks.extend(every_thread(accounting, &dpdk, threads));
    }
    if plan.most() == 1 {
        // These rows are skipped. Their heads are for two threads, the fewest that they can have.
        let mut heads: Vec<_> =
            other_cpus(accounting, &dpdk, 2).iter().flat_map(|benchmark| benchmark.heads()).collect();
        heads.extend(every_thread(accounting, &dpdk, 2).iter().flat_map(|benchmark| benchmark.heads()));
        let why = "one thread allocates pages and another drops them, each on a CPU of its own".into();
        benchmarks.push(Box::new(Skipped { heads, why }));
    }
    benchmarks.extend(more_of_one_cpu(accounting));
    benchmarks
}

fn head(name: &str, section: &'static str, threads: usize, per: &'static str) -> Head {
    Head { name: name.into(), section, threads, per, unit: "ns", ..Head::default() }
}

/// Work of one thread that needs no pool.
fn plain<F>(name: &'static str, section: &'static str, make: impl FnOnce() -> F + 'static) -> Box<dyn Benchmark>
where
    F: FnMut(u64) -> bool + Send + 'static,
{
    Timing::benchmark(head(name, section, 1, "page"), move |_| Ok(Alone::new(name, make())))
}

/// Work of one thread on a pool.
fn pooled<F>(
    accounting: &Accounting,
    name: &'static str,
    section: &'static str,
    make: impl FnOnce(CountedPool) -> F + 'static,
) -> Box<dyn Benchmark>
where
    F: FnMut(u64) -> bool + Send + 'static,
{
    let accounting = accounting.clone();
    let pool = move || accounting.pool(PoolOptions::new(name).cache(CACHE), 2 * CACHE, 0);
    Timing::benchmark(head(name, section, 1, "page"), move |_| Ok(Alone::new(name, make(pool()?))))
}

/// Allocates and drops a page of this order, with a cache or without one.
fn ordered(accounting: &Accounting, name: &'static str, cache: usize, order: u8) -> Box<dyn Benchmark> {
    let accounting = accounting.clone();
    let head = Head { order: Some(order), ..head(name, "slow path", 1, "page") };
    let pool = move || accounting.pool(PoolOptions::new(name).cache(cache), 64, order);
    Timing::benchmark(head, move |_| Ok(Alone::new(name, solo::lifo(pool()?))))
}

/// Makes something with its own handle of the accounting.
fn on<S>(
    accounting: &Accounting,
    make: fn(&Accounting) -> Result<S, BenchError>,
) -> impl FnOnce() -> Result<S, BenchError> + 'static
where
    S: 'static,
{
    let accounting = accounting.clone();
    move || make(&accounting)
}

/// A stock that this many threads allocate pages from and return pages to.
fn crowd<S: crowd::Stock + 'static>(
    name: &'static str,
    threads: usize,
    stock: impl FnOnce() -> Result<S, BenchError> + 'static,
) -> Box<dyn Benchmark> {
    let section = if threads == 1 { "one CPU" } else { "every thread" };
    Timing::benchmark(head(name, section, threads, "page"), move |_| Ok(Crowd::new(name, stock()?, threads)))
}

/// An array of each thread's own.
fn private_array(threads: usize) -> Box<dyn Benchmark> {
    let section = if threads == 1 { "one CPU" } else { "every thread" };
    Timing::benchmark(head("private_array", section, threads, "page"), move |_| Ok(PrivateArray::new(threads)))
}

/// The rows in which every thread allocates pages and returns them.
fn every_thread(accounting: &Accounting, dpdk: &Dpdk, threads: usize) -> Vec<Box<dyn Benchmark>> {
    let dpdk = dpdk.clone();
    vec![
        private_array(threads),
        crowd("shared", threads, on(accounting, crowd::Shared::new)),
        crowd("shared_burst64", threads, on(accounting, crowd::Bursts::new)),
        crowd("array_queue", threads, || Ok(crowd::array_queue())),
        crowd("mutex_vec", threads, || Ok(crowd::mutex_vec())),
        crowd("malloc", threads, || Ok(crowd::Malloc)),
        Timing::benchmark(head("dpdk_mempool", "every thread", threads, "page"), move |harness| {
            dpdk.work(harness, "mempool", threads - 1)
        }),
    ]
}

/// The rows in which one thread allocates a page and returns it.
fn one_cpu(accounting: &Accounting, dpdk: &Dpdk) -> Vec<Box<dyn Benchmark>> {
    let asked = |name: &'static str| {
        let dpdk = dpdk.clone();
        let what = name.trim_start_matches("dpdk_");
        Timing::benchmark(head(name, "one CPU", 1, "page"), move |harness| dpdk.work(harness, what, 0))
    };
    vec![
        plain("limit", "one CPU", || solo::limit(CACHE)),
        pooled(accounting, "in_context", "one CPU", solo::lifo),
        pooled(accounting, "in_context_burst64", "one CPU", solo::burst),
        pooled(accounting, "in_context_fifo", "one CPU", solo::fifo),
        plain("malloc", "one CPU", solo::malloc),
        private_array(1),
        crowd("shared", 1, on(accounting, crowd::Shared::new)),
        crowd("bare_sequences", 1, crowd::bare_sequences),
        crowd("shared_burst64", 1, on(accounting, crowd::Bursts::new)),
        crowd("array_queue", 1, || Ok(crowd::array_queue())),
        crowd("mutex_vec", 1, || Ok(crowd::mutex_vec())),
        asked("dpdk_mempool"),
        asked("dpdk_mbuf"),
        asked("dpdk_mbuf_bulk64"),
        asked("dpdk_mbuf_burst64"),
    ]
}

/// The other rows of one thread.
fn more_of_one_cpu(accounting: &Accounting) -> Vec<Box<dyn Benchmark>> {
    let page_per_packet = accounting.clone();
    vec![
        Timing::benchmark(head("kernel_live_frames", "kernel", 1, "frame"), |_| LiveFrames::new()),
        pooled(accounting, "frag_clone", "fragments", |pool| solo::parts(pool, solo::cloned)),
        pooled(accounting, "frag_split", "fragments", |pool| solo::parts(pool, solo::split)),
        pooled(accounting, "failed_redirect_in_context", "failed redirect", |pool| solo::refused(pool, true)),
        pooled(accounting, "failed_redirect_remote", "failed redirect", |pool| solo::refused(pool, false)),
        plain("locked_ring_in_context", "failed redirect", || solo::refused_locked(LockedPool::new(2 * CACHE as u32))),
        ordered(accounting, "slow_path", 0, 0),
        ordered(accounting, "slow_path_order_3", 0, 3),
        ordered(accounting, "slow_path_order_9", 0, 9),
        Timing::benchmark(head("page_per_packet", "slow path", 1, "page"), move |_| {
            Ok(Alone::new("page_per_packet", solo::lifo(page_per_packet.page_per_packet(2 * CACHE)?)))
        }),
        ordered(accounting, "order_0", CACHE, 0),
        ordered(accounting, "order_3", CACHE, 3),
        ordered(accounting, "order_9", CACHE, 9),
    ]
}

/// A pipeline with this number of threads.
fn piped<S: Source + 'static>(
    name: &str,
    section: &'static str,
    threads: usize,
    source: impl FnOnce() -> Result<S, BenchError> + 'static,
) -> Box<dyn Benchmark> {
    piped_as(head(name, section, threads, "page"), source)
}

fn piped_as<S: Source + 'static>(
    head: Head,
    source: impl FnOnce() -> Result<S, BenchError> + 'static,
) -> Box<dyn Benchmark> {
    let droppers = head.threads - 1;
    Timing::benchmark(head, move |_| Ok(Pipeline::new(source()?, droppers)))
}

/// Rows of one thread that allocates pages, and all others that drop them.
fn other_cpus(accounting: &Accounting, dpdk: &Dpdk, threads: usize) -> Vec<Box<dyn Benchmark>> {
    let pages = pipeline::pages(threads - 1);
    let pool = |name: &'static str| {
        let accounting = accounting.clone();
        move || accounting.pool(PoolOptions::new(name).cache(CACHE), pages, 0)
    };
    let (remote, busy, bulk) = (pool("remote"), pool("remote_busy_poll"), pool("remote_bulk"));
    let (clone, split) = (pool("frag_clone"), pool("frag_split"));
    let returning = threads - 1;
    let asked = |name: &'static str, what: &'static str| {
        let dpdk = dpdk.clone();
        Timing::benchmark(head(name, "other CPUs", threads, "page"), move |harness| dpdk.work(harness, what, returning))
    };
    let mut benchmarks = vec![
        piped("remote", "other CPUs", threads, move || Ok(Pages::new(remote()?, solo::whole))),
        piped("remote_busy_poll", "other CPUs", threads, move || Ok(Busy(Pages::new(busy()?, solo::whole)))),
        piped("remote_bulk", "other CPUs", threads, move || Ok(Bulky(Pages::new(bulk()?, solo::whole)))),
        piped("locked_ring", "other CPUs", threads, move || Ok(LockedPool::new(pages as u32))),
        // As many pages as can be in flight, and one more batch.
        piped("floor_forward", "other CPUs", threads, move || Ok(Forward::new((pipeline::RING + 32) * (threads - 1)))),
        piped("floor_spsc", "other CPUs", threads, move || Ok(SpscPool::new(pages))),
        piped("fair", "other CPUs", threads, move || Ok(FairPool::new(pages, returning))),
        piped("fair_drop", "other CPUs", threads, move || Ok(Dropping(FairPool::new(pages, returning)))),
        piped("malloc_remote", "other CPUs", threads, || Ok(Malloc)),
        asked("dpdk_mbuf_remote", "mbuf_remote"),
        asked("dpdk_mbuf_remote_bulk", "mbuf_remote_bulk"),
        piped("frag_clone_remote", "fragments", threads, move || Ok(Pages::new(clone()?, solo::cloned))),
        piped("frag_split_remote", "fragments", threads, move || Ok(Pages::new(split()?, solo::split))),
    ];
    if threads == 2 {
        benchmarks.extend([2, 4].into_iter().flat_map(|droppers| sharing(accounting, droppers)));
        benchmarks.extend(magazines(accounting));
    }
    benchmarks
}

/// Rows of one thread that allocates pages, and several threads that drop them, all on the same
/// other CPU. If the return of a page acquires a lock, a thread that is preempted in the middle of
/// a return makes the next thread wait.
fn sharing(accounting: &Accounting, droppers: usize) -> [Box<dyn Benchmark>; 2] {
    let pages = pipeline::pages(droppers);
    let titled = |name: &str| head(&format!("{name}_{droppers}_sharing"), "shared CPUs", 2, "page");
    let accounting = accounting.clone();
    let pool = move || accounting.pool(PoolOptions::new("remote_sharing").cache(CACHE), pages, 0);
    [
        Timing::benchmark(titled("remote"), move |_| Ok(Pipeline::sharing(Pages::new(pool()?, solo::whole), droppers))),
        Timing::benchmark(titled("locked_ring"), move |_| {
            Ok(Pipeline::sharing(LockedPool::new(pages as u32), droppers))
        }),
    ]
}

/// Rows of two threads, by the number of pages in a magazine; 0 means no magazines. The row
/// `remote` has the pool's own choice.
fn magazines(accounting: &Accounting) -> impl Iterator<Item = Box<dyn Benchmark>> {
    let options = |name: &str, magazine| PoolOptions::new(name).cache(CACHE).magazine(magazine);
    let titled = |name: &str, section, magazine| Head {
        name: format!("{name}_magazine_{magazine}"),
        magazine: Some(magazine),
        ..head(name, section, 2, "page")
    };
    let remote = move |accounting: Accounting, magazine: usize| {
        piped_as(titled("remote", "magazines", magazine), move || {
            Ok(Pages::new(accounting.pool(options("remote", magazine), pipeline::pages(1), 0)?, solo::whole))
        })
    };
    // Without magazines, the pool has as few pages as with the smallest magazine.
    let starved = move |accounting: Accounting, magazine: usize| {
        let pages = magazine.max(4) - 1;
        Timing::benchmark(titled("starved", "starved", magazine), move |_| {
            Ok(Starved::new(accounting.pool(options("starved", magazine), pages, 0)?, pages))
        })
    };
    let few = accounting.clone();
    let again_and_again = Timing::benchmark(head("starved_without_pause", "starved", 2, "page"), move |_| {
        Ok(Starved::without_pause(few.pool(options("starved", 4), 3, 0)?, 3))
    });
    let sizes = [0, 4, 8, 16, 32, 62];
    let by_size = sizes.into_iter().flat_map(move |n| [remote(accounting.clone(), n), starved(accounting.clone(), n)]);
    by_size.chain([again_and_again])
}

/// Adds the cost per packet to the rows, and compares the rows with each other and with the goals.
pub(super) fn evaluate(rows: &mut [Row], percpu: &str) -> Vec<Goal> {
    for measured in rows.iter_mut().filter_map(|row| row.measured.as_mut()) {
        measured.packet = Some(PacketCost::of(measured));
    }
    compare(rows, |head| {
        let name = match head.section {
            "one CPU" => "malloc",
            "other CPUs" => "locked_ring",
            "shared CPUs" => {
                let name = if head.name.contains("_2_") { "locked_ring_2_sharing" } else { "locked_ring_4_sharing" };
                return Some(Base { name, called: "locked_ring" });
            }
            "every thread" => "array_queue",
            "failed redirect" => "locked_ring_in_context",
            "slow path" => "slow_path",
            _ => return None,
        };
        Some(Base { name, called: name })
    });
    goals::goals(rows, percpu)
}
