//! Threads that are moved, preempted and interrupted in the middle of sequences, against somebody who closes the gate over and
//! over: every add is in a sum once, every item is found once.
//!
//! `NETMEM_STRESS_OPS` says how many operations at least. One test to a process, for they send signals.

#[path = "../../../tests/disturb.rs"]
mod disturb;
#[path = "../../../tests/stress_ops.rs"]
mod stress_ops;

use disturb::{Disturbed, on_signal, stress_threads};
use netmem_percpu::{Counter, Magazine, Mode, Pushed, Store, aborts, mode};
use std::num::NonZeroUsize;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use stress_ops::stress_ops;

struct Shared {
    counter: Counter,
    /// Where adds go that find the gate closed.
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

/// Uses the counter that it has interrupted.
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

    fn found_all(&self, mut magazine: Box<Magazine>) {
        while let Some(item) = magazine.pop() {
            self.found(item);
        }
    }
}

/// Pushes `item`, then pops one now and then; makes room as it has to. False: the item found no place.
fn exchange_items(store: &Store, items: &Items, n: u64) {
    let item = NonZeroUsize::MIN.saturating_add(n as usize);
    match store.push(item) {
        Ok(Pushed::Done) => items.put(item),
        Ok(Pushed::Missing | Pushed::Full) => {
            if let Ok(Some(full)) = store.exchange_full(Magazine::new(16)) {
                items.found_all(full);
            }
        }
        Err(_) => (),
    }
    if n.is_multiple_of(3)
        && let Some(item) = store.pop()
    {
        items.found(item);
    }
}

#[test]
fn sums_and_items_balance_whatever_happens_to_threads() {
    shared(); // before the first signal, which may interrupt whoever makes it
    on_signal(signalled);
    let (ops, threads) = (stress_ops(10_000_000), stress_threads());
    let (store, items) = (Store::new().unwrap(), Items::default());
    let (disturbed, stop) = (Disturbed::default(), AtomicBool::new(false));
    let (mut sum, mut closes, mut reclaims) = (0, 0_u64, 0_u64);
    let shared_path = AtomicU64::new(0);
    let (done, moves) = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|worker| {
                let (disturbed, store, items, shared_path) = (&disturbed, &store, &items, &shared_path);
                scope.spawn(move || {
                    let work = || {
                        let mut done = 0;
                        // An abort is a matter of chance: as many operations again until there was one, but not for ever.
                        while done < ops / threads || (restarts() && aborts() == 0 && done < 100 * ops) {
                            let mut closed = 0;
                            for _ in 0..1000 {
                                closed += u64::from(add(2)) + u64::from(add(-1));
                            }
                            shared_path.fetch_add(closed, Ordering::Relaxed);
                            for n in 0..100 {
                                exchange_items(store, items, (worker << 32) | (done + n));
                            }
                            done += 2000;
                        }
                        done
                    };
                    disturbed.during(work)
                })
            })
            .collect();
        let mover = scope.spawn(|| {
            disturbed.move_about(&stop, || {
                // Both slow sides, while sequences run.
                sum += shared().counter.close().unwrap().unwrap();
                closes += 1;
                assert!(shared().counter.reopen());
                reclaims += u64::from(store.collect(|magazine| items.found_all(magazine)).unwrap());
            })
        });
        let done: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
        stop.store(true, Ordering::Relaxed);
        println!("{done} adds by {threads} threads");
        (done, mover.join().unwrap())
    });
    sum += shared().counter.close().unwrap().unwrap();
    store.collect(|magazine| items.found_all(magazine)).unwrap();

    let elsewhere = shared().elsewhere.load(Ordering::Relaxed);
    let by_signals = shared().by_signals.load(Ordering::Relaxed);
    println!(
        "{}: {} aborts, {} signals, {moves} moves, {closes} closes, {reclaims} reclaims, {} adds on the shared path",
        mode(),
        aborts(),
        by_signals / 3,
        shared_path.load(Ordering::Relaxed),
    );
    assert_eq!(sum as i64 + elsewhere, done as i64 / 2 + by_signals, "adds were lost, or counted twice");
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    assert_eq!(of(&items.put), of(&items.found), "items were lost, or found twice");
    assert_eq!(of(&items.put_sum), of(&items.found_sum), "items were confused");
    // It was stress.
    assert!(by_signals > 0 && moves > 0 && closes > 0 && reclaims > 0 && of(&items.put) > 0);
    assert!(!restarts() || aborts() > 0, "no sequence was ever restarted");
}

fn restarts() -> bool {
    matches!(mode(), Mode::Rseq(_))
}
