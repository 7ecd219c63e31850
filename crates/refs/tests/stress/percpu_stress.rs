//! `PercpuRef` with threads that are moved, preempted and interrupted in the middle of sequences,
//! while it is killed and resurrected repeatedly. Gets and puts balance, and the last put is
//! reported once.
//!
//! `NETMEM_STRESS_OPS` is the smallest number of gets and puts.

use netmem_percpu::{Mode, aborts, mode};
use netmem_refs::{PercpuRef, faults};
use netmem_testing::disturb::{Disturbed, on_signal, stress_threads};
use netmem_testing::stress_ops;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static SIGNALS: AtomicU64 = AtomicU64::new(0);
static LASTS: AtomicU64 = AtomicU64::new(0);

fn count() -> &'static PercpuRef {
    static COUNT: OnceLock<PercpuRef> = OnceLock::new();
    COUNT.get_or_init(|| PercpuRef::new().expect("memory"))
}

fn put(n: u32) {
    LASTS.fetch_add(u64::from(count().put_many(n)), Ordering::Relaxed);
}

/// A signal handler. It uses the count that it has interrupted. The interrupted thread holds a
/// reference.
extern "C" fn signalled(_: libc::c_int) {
    assert!(count().try_get());
    put(1);
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// A worker's gets and puts: `part.start` of them, and more until `enough` has happened, up to
/// `part.end`. Returns how many there were.
fn get_and_put(worker: u64, part: Range<u64>, enough: impl Fn() -> bool, refused: &AtomicU64) -> u64 {
    let mut done = 0;
    while done < part.start || (!enough() && done < part.end) {
        for _ in 0..1000 {
            count().get();
            put(1);
        }
        // The reference is held for a while, and put on the CPU on which the thread is by then.
        let live = count().try_get_live();
        count().get_many(3);
        for n in 0..worker % 3 + 1 {
            count().get();
            put(u32::from(n == 0) + 1);
        }
        put(2);
        if live {
            put(1);
        } else {
            refused.fetch_add(1, Ordering::Relaxed);
        }
        done += 2000;
    }
    done
}

/// Proves REF-4.
#[test]
fn gets_and_puts_balance_through_many_lives() {
    let _alone = crate::alone();
    let aborted = aborts();
    netmem_testing::assert_forced_mode();
    let before = faults();
    count().get(); // the killer's, so that there is always something to resurrect
    on_signal(signalled);
    let (ops, threads) = (stress_ops(10_000_000), stress_threads());
    let (disturbed, stop) = (Disturbed::default(), AtomicBool::new(false));
    let (refused, kills) = (AtomicU64::new(0), AtomicU64::new(0));
    // The operations are repeated until everything that the test is about has happened, which is a
    // matter of chance, up to this number.
    let most = 10 * ops.max(10_000_000) / threads;
    let restarts = matches!(mode(), Mode::Rseq(_));
    let enough = || {
        let seen = [&SIGNALS, &kills].map(|n| n.load(Ordering::Relaxed));
        seen.into_iter().chain([disturbed.moves()]).min() > Some(0) && (!restarts || aborts() > aborted)
    };
    let done = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|worker| {
                count().get(); // the worker's own
                let (disturbed, refused, enough) = (&disturbed, &refused, &enough);
                scope.spawn(move || {
                    let work = || get_and_put(worker, ops / threads..most, enough, refused);
                    let done = disturbed.during(work);
                    put(1);
                    done
                })
            })
            .collect();
        let mover = scope.spawn(|| {
            disturbed.move_about(&stop, || {
                assert!(!count().kill().unwrap());
                kills.fetch_add(1, Ordering::Relaxed);
                std::thread::yield_now();
                count().resurrect().unwrap();
            })
        });
        let done: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
        stop.store(true, Ordering::Relaxed);
        mover.join().unwrap();
        done
    });
    let [of_kills, refused, signals] = [&kills, &refused, &SIGNALS].map(|n| n.load(Ordering::Relaxed));
    println!(
        "{}: {done} gets and puts by {threads} threads, {} aborts, {signals} signals, {} moves, {of_kills} kills, {refused} \
         gets refused",
        mode(),
        aborts() - aborted,
        disturbed.moves(),
    );
    // The count is live and not in use: the approximate count is exact, with gets and puts on any
    // CPUs.
    assert_eq!(count().approximate_count(), 2);
    assert!(!count().kill().unwrap());
    assert_eq!(LASTS.load(Ordering::Relaxed), 0, "released while the killer held a reference");
    put(1);
    assert_eq!(LASTS.load(Ordering::Relaxed), 1, "the last put was not told so");
    assert!(count().is_zero());
    assert_eq!(faults(), before);
    assert!(enough(), "too little load on the count");
}
