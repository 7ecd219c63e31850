//! Threads are moved, preempted and interrupted in the middle of sequences, while another thread
//! closes the gate repeatedly. Every add is in a sum once, and every item is found once.
//!
//! `NETMEM_STRESS_OPS` is the smallest number of operations.

use netmem_percpu::{Counter, Depot, Mode, Taker, aborts, mode};
use netmem_testing::disturb::{Disturbed, on_signal, stress_threads};
use netmem_testing::stress_ops;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

struct Shared {
    counter: Counter,
    /// Adds that found the gate closed.
    elsewhere: AtomicI64,
    /// What the signal handler has added.
    by_signals: AtomicI64,
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| Shared {
        counter: Counter::new().expect("memory"),
        elsewhere: AtomicI64::new(0),
        by_signals: AtomicI64::new(0),
    })
}

fn add(n: isize) -> bool {
    let shared = shared();
    let closed = shared.counter.add(n).is_err();
    if closed {
        shared.elsewhere.fetch_add(n as i64, Ordering::Relaxed);
    }
    closed
}

/// Adds to the counter whose sequence it may have interrupted.
extern "C" fn signalled(_: libc::c_int) {
    add(3);
    shared().by_signals.fetch_add(3, Ordering::Relaxed);
}

/// Items that threads put in and took out.
#[derive(Default)]
struct Items {
    put: AtomicU64,
    put_sum: AtomicU64,
    found: AtomicU64,
    found_sum: AtomicU64,
    refused: AtomicU64,
    refilled: AtomicU64,
}

impl Items {
    fn put(&self, item: NonZeroUsize) {
        self.put.fetch_add(1, Ordering::Relaxed);
        self.put_sum.fetch_add(item.get() as u64, Ordering::Relaxed);
    }

    fn found(&self, item: NonZeroUsize) {
        self.found.fetch_add(1, Ordering::Relaxed);
        self.found_sum.fetch_add(item.get() as u64, Ordering::Relaxed);
    }
}

/// Gives one item, alone or with others. Items that are refused count as found at once.
fn give_items(depot: &Depot, items: &Items, n: u64) {
    let item = |n: u64| NonZeroUsize::MIN.saturating_add(n as usize);
    let several: Vec<_> = (0..if n.is_multiple_of(16) { n / 16 % 40 } else { 0 }).map(|i| item(n + i)).collect();
    several.iter().for_each(|&item| items.put(item));
    // SAFETY: the depot outlives the test's threads.
    let given = unsafe { Depot::give_many(depot, &several) };
    several[given..].iter().for_each(|&item| items.found(item));
    items.put(item(n));
    // SAFETY: as above.
    if !unsafe { Depot::give(depot, item(n), |_| unreachable!("nobody closes it")) } {
        items.found(item(n));
        items.refused.fetch_add(1, Ordering::Relaxed);
    }
}

/// Pops the full magazines, and the items that the CPUs hold.
fn take_items(depot: &Depot, taker: &mut Taker, items: &Items) {
    while taker.refill(depot, |item| {
        items.found(item);
        items.refilled.fetch_add(1, Ordering::Relaxed);
    }) {}
    taker.reclaim(depot, |item| items.found(item)).expect("a barrier");
}

/// A worker's adds and gives: `part.start` of them, and more until `enough` has happened, up to
/// `part.end`. Returns how many adds there were, and how many of them found the gate closed.
fn add_and_give(worker: u64, depot: &Depot, items: &Items, part: Range<u64>, enough: impl Fn() -> bool) -> (u64, u64) {
    let (mut done, mut closed) = (0, 0);
    while done < part.start || (!enough() && done < part.end) {
        for _ in 0..1000 {
            closed += u64::from(add(2)) + u64::from(add(-1));
        }
        for n in 0..100 {
            give_items(depot, items, (worker << 32) | (done + n));
        }
        done += 2000;
    }
    (done, closed)
}

#[test]
fn sums_and_items_balance_whatever_happens_to_threads() {
    let _alone = crate::alone();
    netmem_testing::assert_forced_mode();
    let before = aborts();
    shared(); // before the first signal, which may interrupt the thread that makes it
    on_signal(signalled);
    let (ops, threads) = (stress_ops(10_000_000), stress_threads());
    let ((depot, mut taker), items) = (Depot::new(16, 64).unwrap(), Items::default());
    let (disturbed, stop) = (Disturbed::default(), AtomicBool::new(false));
    // The operations are repeated until everything that the test is about has happened, which is a
    // matter of chance, up to this number.
    let most = 10 * ops.max(10_000_000) / threads;
    let (mut sum, rounds) = (0, AtomicU64::new(0));
    let enough = || {
        let signals = shared().by_signals.load(Ordering::Relaxed) as u64;
        let seen = [&items.refilled, &items.refused, &rounds].map(|n| n.load(Ordering::Relaxed));
        seen.into_iter().chain([signals, disturbed.moves()]).min() > Some(0) && (!restarts() || aborts() > before)
    };
    let (done, shared_path) = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|worker| {
                let (disturbed, depot, items, enough) = (&disturbed, &depot, &items, &enough);
                scope
                    .spawn(move || disturbed.during(|| add_and_give(worker, depot, items, ops / threads..most, enough)))
            })
            .collect();
        let mover = scope.spawn(|| {
            disturbed.move_about(&stop, || {
                // Both slow paths, while sequences run.
                sum += shared().counter.close().unwrap().unwrap();
                assert!(shared().counter.reopen());
                take_items(&depot, &mut taker, &items);
                rounds.fetch_add(1, Ordering::Relaxed);
            })
        });
        let ends = workers.into_iter().map(|worker| worker.join().unwrap());
        let (done, shared_path) = ends.fold((0, 0), |(done, closed), end| (done + end.0, closed + end.1));
        stop.store(true, Ordering::Relaxed);
        println!("{done} adds by {threads} threads");
        mover.join().unwrap();
        (done, shared_path)
    });
    sum += shared().counter.close().unwrap().unwrap();
    taker.close(&depot, |item| items.found(item)).unwrap();

    let elsewhere = shared().elsewhere.load(Ordering::Relaxed);
    let by_signals = shared().by_signals.load(Ordering::Relaxed);
    println!(
        "{}: {} aborts, {} signals, {} moves, {} closes and reclaims, {} adds on the shared path",
        mode(),
        aborts() - before,
        by_signals / 3,
        disturbed.moves(),
        rounds.load(Ordering::Relaxed),
        shared_path,
    );
    assert_eq!(sum as i64 + elsewhere, done as i64 / 2 + by_signals, "adds were lost, or counted twice");
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    assert_eq!(of(&items.put), of(&items.found), "items were lost, or found twice");
    assert_eq!(of(&items.put_sum), of(&items.found_sum), "items were confused");
    println!(
        "items: {} given, {} of them refused, {} in full magazines",
        of(&items.put),
        of(&items.refused),
        of(&items.refilled)
    );
    assert!(enough(), "too little load on the sequences");
}

fn restarts() -> bool {
    matches!(mode(), Mode::Rseq(_))
}
