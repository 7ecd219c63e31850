//! Threads take items from a CPU cache and put them back. They are moved, preempted and interrupted
//! in the middle of sequences, and another thread reclaims. At any time, each item is with one
//! thread or in the cache.
//!
//! `NETMEM_STRESS_OPS` is the smallest number of operations.

use netmem_percpu::{CpuCache, Mode, NothingFound, aborts, mode};
use netmem_testing::disturb::{Disturbed, on_signal, stress_threads};
use netmem_testing::stress_ops;
use std::num::NonZeroUsize;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// The largest number of items that a thread holds at a time.
const HELD: usize = 40;

struct Shared {
    cache: CpuCache,
    /// For each item, whether a thread has it.
    taken: Box<[AtomicBool]>,
    by_signals: AtomicU64,
    /// Pops and pushes that found the gate closed.
    refused: AtomicU64,
    /// Pops that found no item.
    empty: AtomicU64,
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let items = HELD * 2 * stress_threads() as usize;
        let shared = Shared {
            // Small magazines, so that exchanges are frequent.
            cache: CpuCache::new(8, items / 8 + 4 * netmem_percpu::cpus() + 64).expect("memory"),
            taken: (0..items).map(|_| AtomicBool::new(false)).collect(),
            by_signals: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            empty: AtomicU64::new(0),
        };
        for n in 1..=items {
            let item = NonZeroUsize::new(n).expect("above 0");
            // SAFETY: the cache is never dropped.
            assert!(unsafe { CpuCache::push(&shared.cache, item, |_| unreachable!("never closed")) });
        }
        shared
    })
}

impl Shared {
    fn take(&self) -> Option<NonZeroUsize> {
        match self.cache.pop() {
            Ok(item) => {
                assert!(!self.taken[item.get() - 1].swap(true, Ordering::Relaxed), "two threads have item {item}");
                Some(item)
            }
            Err(NothingFound::Empty) => {
                self.empty.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(NothingFound::Refused) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// Puts an item back. Returns the item if it was refused.
    fn put(&self, item: NonZeroUsize) -> Option<NonZeroUsize> {
        assert!(self.taken[item.get() - 1].swap(false, Ordering::Relaxed), "item {item} was with no thread");
        // SAFETY: the cache is never dropped.
        if unsafe { CpuCache::push(&self.cache, item, |_| unreachable!("never closed")) } {
            return None;
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.taken[item.get() - 1].store(true, Ordering::Relaxed);
        Some(item)
    }
}

/// Items that signal handlers took and have not put back. 0 means no item.
static KEPT: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];

/// A signal handler. It uses the cache whose operation it has interrupted: it pops an item, or puts
/// back one that an earlier handler took.
extern "C" fn signalled(_: libc::c_int) {
    let shared = shared();
    let n = shared.by_signals.fetch_add(1, Ordering::Relaxed);
    let kept = KEPT.iter().filter(|kept| kept.load(Ordering::Relaxed) != 0).count();
    if n.is_multiple_of(2) && kept < KEPT.len() / 2 {
        shared.take().into_iter().for_each(keep);
    } else {
        let item = KEPT.iter().find_map(|kept| NonZeroUsize::new(kept.swap(0, Ordering::Relaxed)));
        item.and_then(|item| shared.put(item)).into_iter().for_each(keep);
    }
}

/// Stores an item in a free place. Handlers take no more items when half of the places are in use.
fn keep(item: NonZeroUsize) {
    let place = |kept: &AtomicUsize| kept.compare_exchange(0, item.get(), Ordering::Relaxed, Ordering::Relaxed).is_ok();
    assert!(KEPT.iter().any(place), "no place for item {item}");
}

#[test]
fn each_item_is_with_one_thread_or_in_the_cache() {
    let _alone = crate::alone();
    netmem_testing::assert_forced_mode();
    let before = aborts();
    let shared = shared(); // before the first signal
    on_signal(signalled);
    let (ops, threads) = (stress_ops(5_000_000), stress_threads());
    let (disturbed, stop) = (Disturbed::default(), AtomicBool::new(false));
    // The operations are repeated until everything that the test is about has happened, which is a
    // matter of chance, up to this number.
    let most = 10 * ops.max(5_000_000) / threads;
    let reclaims = AtomicU64::new(0);
    let enough = || {
        let seen = [&shared.by_signals, &shared.refused, &reclaims].map(|n| n.load(Ordering::Relaxed));
        let magazines = shared.cache.magazines_taken() as u64;
        seen.into_iter().chain([disturbed.moves(), magazines]).min() > Some(0) && (!restarts() || aborts() > before)
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|seed| {
                let (disturbed, enough) = (&disturbed, &enough);
                scope.spawn(move || {
                    disturbed.during(|| {
                        let (mut held, mut done, mut random) = (Vec::with_capacity(HELD), 0, seed + 1);
                        while done < ops / threads || (!enough() && done < most) {
                            // A linear congruential generator decides how many items this thread
                            // holds.
                            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                            let want = (random >> 33) as usize % HELD;
                            while held.len() < want {
                                done += 1;
                                match shared.take() {
                                    Some(item) => held.push(item),
                                    None => break,
                                }
                            }
                            while held.len() > want {
                                done += 1;
                                let item = held.pop().expect("not empty");
                                held.extend(shared.put(item));
                            }
                        }
                        while let Some(item) = held.pop() {
                            held.extend(shared.put(item));
                        }
                    })
                })
            })
            .collect();
        let mover = scope.spawn(|| {
            disturbed.move_about(&stop, || {
                shared.cache.reclaim().expect("a barrier");
                reclaims.fetch_add(1, Ordering::Relaxed);
            })
        });
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        stop.store(true, Ordering::Relaxed);
        mover.join().unwrap()
    });

    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let magazines = shared.cache.magazines_taken();
    println!(
        "{}: {} aborts, {} signals, {} moves, {} reclaims, {} refused, {} times empty, {magazines} magazines",
        mode(),
        aborts() - before,
        of(&shared.by_signals),
        disturbed.moves(),
        of(&reclaims),
        of(&shared.refused),
        of(&shared.empty),
    );
    let with_handlers = KEPT.iter().filter(|kept| kept.load(Ordering::Relaxed) != 0).count();
    let with_threads = shared.taken.iter().filter(|taken| taken.load(Ordering::Relaxed)).count();
    assert_eq!(with_threads, with_handlers);
    shared.cache.close().unwrap();
    let found = std::iter::from_fn(|| shared.take()).count();
    assert_eq!(found + with_handlers, shared.taken.len(), "items were lost");
    assert!(enough(), "too little load on the cache");
}

fn restarts() -> bool {
    matches!(mode(), Mode::Rseq(_))
}
