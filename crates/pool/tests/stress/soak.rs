//! Everything at once. Queues allocate, clone, split, forward packets to each other and replace
//! their pools. Consumers stall, and drop packets in any order. Threads are moved and interrupted.
//! At the end the accounting balances to the page.
//!
//! `NETMEM_STRESS_OPS` is the smallest number of packets.

use crate::common::{Counting, counting, provider};
use fastrand::Rng;
use netmem_percpu::{Mode, aborts, cpus, mode};
use netmem_pool::{Bulk, Frag, Page, PagePool, PoolOptions, PoolStats, Private, RegionProvider, lingering};
use netmem_testing::disturb::{Disturbed, on_signal, stress_threads};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread;

const QUEUES: usize = 2;
/// There are so few pages that queues run out of them.
const PAGES: usize = 64;

/// Restarted sequences before the test began.
static ABORTED: AtomicU64 = AtomicU64::new(0);
static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn signalled(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// A packet in flight to a consumer, or to another queue that transmits it.
type Packet = Vec<Frag<Private>>;

/// A pool from its start to its end. At the end its result is checked.
struct Life {
    domain: Arc<Counting>,
    memory: Weak<RegionProvider<Private>>,
    /// Pages in flight when the owner dropped the pool.
    outstanding: u64,
    stats: PoolStats,
}

struct Queue {
    n: usize,
    pool: PagePool<Private>,
    domain: Arc<Counting>,
    memory: Arc<RegionProvider<Private>>,
    lives: Vec<Life>,
    redirects: u64,
    dropped: u64,
}

/// What has happened in the pools that have ended, of all queues.
#[derive(Clone, Debug, Default)]
struct Seen {
    redirects: u64,
    dropped: u64,
    lingered: u64,
    stats: PoolStats,
}

impl Seen {
    /// Whether the test has put enough load on the pools: every event that it is about has
    /// happened. Each of them is a matter of chance.
    fn is_enough(&self, moves: u64) -> bool {
        let sum = &self.stats;
        let of_pools = [
            sum.released,
            sum.alloc_failed,
            sum.alloc_refill,
            sum.recycle_cached,
            sum.recycle_cache_full,
            sum.recycle_ring,
            sum.recycle_ring_full,
            sum.reclaims,
            sum.reclaimed,
        ];
        let others = [self.redirects, self.dropped, self.lingered, SIGNALS.load(Ordering::Relaxed), moves];
        of_pools.into_iter().chain(others).min() > Some(0)
            && (!restarts() || aborts() > ABORTED.load(Ordering::Relaxed))
    }
}

/// Whether a sequence can be restarted in this mode.
fn restarts() -> bool {
    matches!(mode(), Mode::Rseq(_))
}

/// Sets the flag when it is dropped, also in a panic: otherwise the mover would not end.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn build(n: usize, life: usize, memory: &Arc<RegionProvider<Private>>) -> (PagePool<Private>, Arc<Counting>) {
    let domain = counting();
    let cache = [1, 8, 32, 32, 0][life % 5];
    let mut options = PoolOptions::new(format!("soak-{n}-{life}")).cache(cache);
    // With so few pages, a pool on a large machine has magazines only if it is asked to.
    if PAGES < 8 * cpus() {
        options = options.magazine(4);
    }
    (options.build(memory.clone(), Some(domain.clone())).unwrap(), domain)
}

impl Queue {
    fn new(n: usize) -> Self {
        let memory = provider(PAGES);
        let (pool, domain) = build(n, 0, &memory);
        Self { n, pool, domain, memory, lives: Vec::new(), redirects: 0, dropped: 0 }
    }

    /// Restarts a queue: with the old memory or new memory, and with or without a removed device.
    /// Adds what has happened to `seen`.
    fn restart(&mut self, rng: &mut Rng, seen: &Mutex<Seen>) {
        let old = Arc::downgrade(&self.memory);
        if rng.bool() {
            self.memory = provider(PAGES);
        }
        let (pool, domain) = build(self.n, self.lives.len() + 1, &self.memory);
        let mut pool = std::mem::replace(&mut self.pool, pool);
        let domain = std::mem::replace(&mut self.domain, domain);
        if rng.u8(..) < 64 {
            pool.device_gone();
            assert_eq!(domain.maps(), domain.unmaps(), "unmapped at once");
        }
        let closed = pool.close();
        let mut seen = seen.lock().unwrap();
        seen.redirects += std::mem::take(&mut self.redirects);
        seen.dropped += std::mem::take(&mut self.dropped);
        seen.lingered += closed.outstanding;
        seen.stats += closed.stats;
        drop(seen);
        self.lives.push(Life { domain, memory: old, outstanding: closed.outstanding, stats: closed.stats });
    }

    /// One poll: receives packets, and completes packets that other queues gave it to transmit.
    fn poll(
        &mut self,
        rng: &mut Rng,
        consumers: &[SyncSender<Packet>],
        others: &[SyncSender<Packet>],
        tx: &Receiver<Packet>,
    ) -> u64 {
        let (mut done, mut dropped, mut redirects) = (0, 0, 0);
        self.pool.poll(|napi| {
            for _ in 0..rng.usize(..48) {
                let Some(page) = napi.alloc() else { break };
                done += 1;
                let packet = receive(page, rng);
                let to = match rng.u8(..) {
                    0..100 => continue,
                    100..180 => &consumers[rng.usize(..consumers.len())],
                    _ => {
                        redirects += 1;
                        &others[rng.usize(..others.len())]
                    }
                };
                // If the target is full, the packet is dropped here.
                dropped += match to.try_send(packet) {
                    Err(TrySendError::Full(packet) | TrySendError::Disconnected(packet)) => packet.len() as u64,
                    Ok(()) => 0,
                };
            }
            // Transmit completions, mostly of other pools' pages: in bulk, or one by one.
            let mut bulk = Bulk::new();
            for packet in tx.try_iter().take(rng.usize(..64)) {
                check(&packet);
                if rng.bool() {
                    packet.into_iter().for_each(|frag| bulk.add(frag));
                }
            }
        });
        self.dropped += dropped;
        self.redirects += redirects;
        done
    }
}

/// Fills a page with a number of its own and makes a packet of it: whole, split or cloned.
fn receive(mut page: Page<Private>, rng: &mut Rng) -> Packet {
    let stamp = rng.u8(..);
    page.as_mut_slice()[..256].fill(stamp);
    match rng.u8(..4) {
        0 => vec![page.freeze_range(0..256)],
        1 => {
            let rest = page.split_off(64);
            vec![page.freeze(), rest.freeze_range(0..64)]
        }
        2 => {
            let frag = page.freeze_range(0..256);
            vec![frag.clone(), frag.slice(10..20), frag]
        }
        _ => {
            let frag = page.freeze_range(0..256);
            drop(frag.clone());
            vec![frag]
        }
    }
}

/// Checks that nothing else writes to the pages of a packet that is held.
fn check(packet: &Packet) {
    for frag in packet {
        assert!(frag.iter().all(|&b| b == frag[0]), "somebody else writes this page");
    }
}

/// Receives packets and drops them in any order. Sometimes it stalls and keeps its packets.
fn consume(packets: &Receiver<Packet>, rng: &mut Rng) {
    let mut held: Vec<Packet> = Vec::new();
    let mut patience = 0;
    while let Ok(packet) = packets.recv() {
        check(&packet);
        held.push(packet);
        if held.len() > patience {
            patience = if rng.u8(..) == 0 { rng.usize(..60) } else { rng.usize(..6) };
            while !held.is_empty() && rng.u8(..) > 8 {
                let packet = held.swap_remove(rng.usize(..held.len()));
                check(&packet);
                for frag in packet {
                    if rng.bool() {
                        drop(frag.try_into_page());
                    }
                }
            }
        }
    }
}

/// Proves POOL-1, POOL-4, POOL-5, POOL-6 and POOL-11.
#[test]
fn everything_balances_to_the_page() {
    let _alone = crate::alone();
    ABORTED.store(aborts(), Ordering::Relaxed);
    netmem_testing::assert_forced_mode();
    on_signal(signalled);
    let ops = netmem_testing::stress_ops(300_000);
    // The packets are repeated until everything that the test is about has happened, up to this
    // number.
    let most = 10 * ops.max(300_000) / QUEUES as u64;
    let seed = std::env::var("NETMEM_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("NETMEM_SEED={seed}");
    let (disturbed, stop) = (Disturbed::default(), AtomicBool::new(false));
    let (txs, rxs): (Vec<_>, Vec<_>) = (0..QUEUES).map(|_| sync_channel::<Packet>(48)).unzip();
    let consumers = stress_threads() as usize;
    let (to, from): (Vec<_>, Vec<_>) = (0..consumers).map(|_| sync_channel::<Packet>(32)).unzip();
    let seen = Mutex::new(Seen::default());
    let lives = thread::scope(|scope| {
        for (n, packets) in from.into_iter().enumerate() {
            let (mut rng, disturbed) = (Rng::with_seed(seed + 100 + n as u64), &disturbed);
            scope.spawn(move || disturbed.during(|| consume(&packets, &mut rng)));
        }
        let mover = scope.spawn(|| disturbed.move_about(&stop, || ()));
        let _ends = Ends(&stop);
        let queues: Vec<_> = rxs
            .into_iter()
            .enumerate()
            .map(|(n, tx)| {
                let (mut rng, to, disturbed, seen) = (Rng::with_seed(seed + n as u64), to.clone(), &disturbed, &seen);
                let others: Vec<_> =
                    txs.iter().enumerate().filter(|(i, _)| *i != n).map(|(_, tx)| tx.clone()).collect();
                scope.spawn(move || {
                    let mut queue = Queue::new(n);
                    let mut run = || {
                        let mut done = 0;
                        while done < ops / QUEUES as u64
                            || (!seen.lock().unwrap().is_enough(disturbed.moves()) && done < most)
                        {
                            done += queue.poll(&mut rng, &to, &others, &tx);
                            if rng.u16(..) < 400 {
                                queue.restart(&mut rng, seen);
                            }
                            thread::yield_now();
                        }
                    };
                    disturbed.during(&mut run);
                    drop((others, to));
                    // Packets in flight to this queue are returned from here, outside of any poll.
                    drop(tx);
                    queue.restart(&mut rng, seen);
                    drop(queue.pool);
                    queue.lives
                })
            })
            .collect();
        drop((txs, to));
        let all: Vec<Life> = queues.into_iter().flat_map(|queue| queue.join().unwrap()).collect();
        stop.store(true, Ordering::Relaxed);
        mover.join().unwrap();
        all
    });
    for life in &lives {
        assert_eq!(life.stats.inflight(), life.outstanding, "{:?}", life.stats);
        assert_eq!(life.domain.maps(), life.domain.unmaps(), "maps and unmaps, late returns included");
        assert!(life.memory.upgrade().is_none(), "a page kept its pool");
    }
    assert!(lingering().iter().all(|pool| !pool.name.starts_with("soak")));
    let seen = seen.into_inner().unwrap();
    let signals = SIGNALS.load(Ordering::Relaxed);
    println!(
        "{} pools, {} aborts, {signals} signals, {seen:?}",
        lives.len(),
        aborts() - ABORTED.load(Ordering::Relaxed)
    );
    assert!(lives.len() > QUEUES && seen.is_enough(disturbed.moves()), "{seen:?}");
}
