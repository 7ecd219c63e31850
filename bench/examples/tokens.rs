//! What a fragment of device memory costs a socket: the token at receive, and giving it back. `netmem_bench::tokens` in turns:
//!
//! ```text
//! cargo run --release -p netmem-bench --example tokens [ROUNDS]
//! ```
//!
//! One thread receives 16 fragments at a time; it gives them back itself, or hands them to others that do, each thread on
//! a CPU of its own. `hand_over` is the same with no tokens at all: what the rings between the threads cost.

use netmem_bench::tokens::{
    BATCH, Fragment, HashedCounts, LockedEach, LockedMap, Niovs, Ranges, RcuCounts, Receive, Return, Tokens,
};
use netmem_devmem::{Pages, TokenRange, TokenTable};
use rtrb::RingBuffer;
use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

/// Pages in circulation, of all bindings together.
const PAGES: u32 = 16 * 1024;
/// Fragments out at a time, with one thread and with more.
const WINDOW: usize = 1024;
/// What is counted, and what comes before it.
const FRAGMENTS: usize = 1 << 18;
const WARM: usize = 1 << 16;

#[derive(Clone, Copy)]
struct Setting {
    returners: usize,
    bindings: u32,
    shuffled: bool,
}

/// No tokens.
struct HandOver;
struct Nothing;
#[derive(Clone)]
struct NothingBack;

impl Tokens for HandOver {
    type Receiver = Nothing;
    type Returner = NothingBack;

    fn open(_: &[Arc<Niovs>]) -> (Nothing, NothingBack) {
        (Nothing, NothingBack)
    }
}

impl Receive for Nothing {
    fn receive(&mut self, fragments: &[Fragment], tokens: &mut [u32]) {
        fragments.iter().zip(tokens).for_each(|(fragment, token)| *token = fragment.index);
    }
}

impl Return for NothingBack {
    fn give_back(&self, ranges: &[TokenRange]) -> usize {
        ranges.len()
    }
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    // Where it is not allowed, times are wider apart; nothing else depends on it.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// The order in which pages come: the bindings in turns, pages one after the other; or mixed, and differently each time.
fn fragments(setting: Setting) -> Vec<Fragment> {
    let each = PAGES / setting.bindings;
    let in_order = (0..PAGES).map(|n| Fragment { binding: n % setting.bindings, index: n / setting.bindings % each });
    let mut pages: Vec<Fragment> = in_order.collect();
    if !setting.shuffled {
        return pages;
    }
    let mut random = 0x2545_F491_4F6C_DD1D_u64;
    let mut below = |n: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % n as u64) as usize
    };
    let mut order = Vec::new();
    for _ in 0..FRAGMENTS / pages.len() {
        (1..pages.len()).rev().for_each(|n| pages.swap(n, below(n + 1)));
        order.extend_from_slice(&pages);
    }
    order
}

fn give_back(returner: &impl Return, tokens: &[u32; BATCH]) -> usize {
    returner.give_back(&tokens.map(|start| TokenRange { start, count: 1 }))
}

fn alone<T: Tokens>(bindings: &[Arc<Niovs>], order: &[Fragment]) -> f64 {
    let (mut receiver, returner) = T::open(bindings);
    let mut out = vec![[u32::MAX; BATCH]; WINDOW / BATCH];
    let mut run = |batches: usize| {
        let mut freed = 0;
        for (n, fragments) in order.chunks(BATCH).cycle().take(batches).enumerate() {
            let tokens = &mut out[n % (WINDOW / BATCH)];
            freed += give_back(&returner, tokens);
            receiver.receive(fragments, tokens);
        }
        freed
    };
    run(WARM / BATCH);
    let start = Instant::now();
    let freed = run(FRAGMENTS / BATCH);
    let elapsed = start.elapsed();
    assert_eq!(freed, FRAGMENTS);
    elapsed.as_secs_f64() * 1e9 / FRAGMENTS as f64
}

fn together<T: Tokens>(bindings: &[Arc<Niovs>], order: &[Fragment], returners: usize) -> f64
where
    T::Returner: 'static,
{
    let (mut receiver, returner) = T::open(bindings);
    let freed = Arc::new(AtomicUsize::new(0));
    let mut rings = Vec::new();
    let mut threads = Vec::new();
    for cpu in 1..=returners {
        let (push, mut pop) = RingBuffer::<[u32; BATCH]>::new(WINDOW / BATCH / returners);
        let (returner, freed) = (returner.clone(), freed.clone());
        rings.push(push);
        threads.push(thread::spawn(move || {
            pin(cpu);
            let mut mine = 0;
            loop {
                match pop.pop() {
                    Ok(tokens) => mine += give_back(&returner, &tokens),
                    Err(_) if pop.is_abandoned() && pop.is_empty() => break,
                    Err(_) => spin_loop(),
                }
            }
            freed.fetch_add(mine, Ordering::Relaxed);
        }));
    }
    let mut start = Instant::now();
    let mut tokens = [0; BATCH];
    for (n, fragments) in order.chunks(BATCH).cycle().take((WARM + FRAGMENTS) / BATCH).enumerate() {
        if n == WARM / BATCH {
            start = Instant::now();
        }
        receiver.receive(fragments, &mut tokens);
        while rings[n % returners].push(tokens).is_err() {
            spin_loop();
        }
    }
    drop(rings);
    threads.into_iter().for_each(|thread| thread.join().unwrap_or_default());
    let elapsed = start.elapsed();
    assert_eq!(freed.load(Ordering::Relaxed), WARM + FRAGMENTS);
    elapsed.as_secs_f64() * 1e9 / FRAGMENTS as f64
}

fn measure<T: Tokens>(setting: Setting) -> f64
where
    T::Returner: 'static,
{
    let bindings: Vec<_> = (0..setting.bindings).map(|_| Niovs::new(PAGES / setting.bindings)).collect();
    let order = fragments(setting);
    if setting.returners == 0 {
        alone::<T>(&bindings, &order)
    } else {
        together::<T>(&bindings, &order, setting.returners)
    }
}

fn spread(samples: &mut [f64]) -> (f64, f64, f64) {
    samples.sort_by(f64::total_cmp);
    (samples[samples.len() / 2], samples[0], samples[samples.len() - 1])
}

/// A device of 80 GB, as far as a table can see.
#[derive(Clone)]
struct Device;

const DEVICE_PAGES: u32 = 20_000_000;

// SAFETY: there is one, of a fixed size, and it is never said to be drained.
unsafe impl Pages for Device {
    fn id(&self) -> u64 {
        0
    }

    fn pages(&self) -> u32 {
        DEVICE_PAGES
    }

    unsafe fn put(&self, _index: u32, _n: u32) {}

    fn drained(&self) -> bool {
        false
    }
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// What 256 sockets cost that have received from the same device: one fragment each, and then from every page of 1 GiB of it.
fn memory() {
    let mut sockets: Vec<_> = (0..256).map(|_| TokenTable::<Device>::new()).collect();
    println!("\nmemory of 256 sockets on a device of {DEVICE_PAGES} pages of 4 KiB, resident");
    let before = resident();
    for (what, indices) in [("one fragment each", 0..1), ("each page of 1 GiB of it", 0..1 << 18)] {
        let start = Instant::now();
        let pages = indices.len() as f64 * sockets.len() as f64;
        for socket in &mut sockets {
            for index in indices.clone() {
                let mut receive = socket.receive();
                assert!(receive.reserve(&Device, index).is_ok(), "no memory");
            }
        }
        let bytes = (resident() - before) as f64;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        println!(
            "  {what:<26} {:>8.1} MiB, {:.2} bytes per page touched, {ms:.0} ms",
            bytes / 1048576.0,
            bytes / pages
        );
    }
}

fn main() {
    let rounds = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(15);
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    pin(0);
    type Variant = (&'static str, fn(Setting) -> f64);
    let variants: [Variant; 6] = [
        ("hand_over", measure::<HandOver>),
        ("locked_each", measure::<LockedEach>),
        ("locked_map", measure::<LockedMap>),
        ("hashed_counts", measure::<HashedCounts>),
        ("rcu_counts", measure::<RcuCounts>),
        ("ranges", measure::<Ranges>),
    ];
    println!("ns per fragment, received and given back; median (range) of {rounds} rounds in turns");
    println!("map, each: locked_map's and locked_each's over this one's in the same round, median");
    let mut counts = vec![0, 1];
    counts.extend((2..cpus).filter(|n| n.is_power_of_two()));
    for returners in counts {
        for (bindings, shuffled) in [(1, false), (8, false), (1, true), (8, true)] {
            let setting = Setting { returners, bindings, shuffled };
            let mut samples = vec![Vec::new(); variants.len()];
            for round in 0..rounds {
                for n in 0..variants.len() {
                    let n = if round % 2 == 0 { n } else { variants.len() - 1 - n };
                    samples[n].push(variants[n].1(setting));
                }
            }
            let order = if shuffled { "mixed" } else { "in order" };
            println!("\n{returners} returners, {bindings} bindings, pages {order}");
            let (each, map) = (samples[1].clone(), samples[2].clone());
            for ((name, _), samples) in variants.iter().zip(&mut samples) {
                let ratio = |of: &[f64]| {
                    let mut ratios: Vec<f64> = of.iter().zip(samples.iter()).map(|(b, s)| b / s).collect();
                    spread(&mut ratios).0
                };
                let (map, each) = (ratio(&map), ratio(&each));
                let (median, min, max) = spread(samples);
                println!("  {name:<14} {median:>7.1} ({min:.1}..{max:.1})  map {map:.2}  each {each:.2}");
            }
        }
    }
    memory();
}
