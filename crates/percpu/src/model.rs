//! Loom's models of the races between sequences and the thread that closes a gate. A sequence here
//! is the portable one. Its steps can be interleaved with those of any thread, but a barrier waits
//! for it. `MODELS.md` lists what each model proves, and how to see it fail.

use crate::portable::model::restarts;
use crate::{Counter, Depot, GateClosed, Taker, check, run_on};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread::{self, JoinHandle};
use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;

mod cpu_cache;
mod rings;

fn on<T: 'static>(cpu: usize, body: impl FnOnce() -> T + 'static) -> JoinHandle<T> {
    thread::spawn(move || {
        run_on(cpu);
        body()
    })
}

/// What one thread writes and another reads, with nothing but what is modelled between them.
struct Contents(UnsafeCell<u32>);

// SAFETY: loom checks every access.
unsafe impl Sync for Contents {}
// SAFETY: as above.
unsafe impl Send for Contents {}

impl Contents {
    fn new() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(0)))
    }

    fn write(&self) {
        // SAFETY: loom checks it.
        self.0.with_mut(|at| unsafe { *at += 1 });
    }

    fn read(&self) -> u32 {
        // SAFETY: loom checks it.
        self.0.with(|at| unsafe { *at })
    }
}

fn counter() -> Arc<Counter> {
    Arc::new(Counter::new().unwrap())
}

/// Two adds on one CPU: a restartable sequence is restarted, and never refused; the portable one is
/// refused when it finds the other in the middle. Either way the sum has each add that succeeded,
/// and no other.
#[test]
fn add_against_add_on_one_cpu() {
    let refused = std::sync::Arc::new([false, true].map(|_| std::sync::atomic::AtomicBool::new(false)));
    let seen = refused.clone();
    check(None, move || {
        let counter = counter();
        let adders = [(); 2].map(|()| {
            let counter = counter.clone();
            on(0, move || counter.add(1).is_ok())
        });
        let added = adders.map(|adder| adder.join().unwrap()).into_iter().filter(|&added| added).count();
        seen[usize::from(restarts())].fetch_or(added < 2, Ordering::Relaxed);
        assert_eq!(counter.close().unwrap(), Some(added as isize));
    });
    assert_eq!([0, 1].map(|way: usize| refused[way].load(Ordering::Relaxed)), [true, false]);
}

/// Add against close: the sum has each add that succeeded and no other, and what its thread did
/// before is seen.
#[test]
fn add_against_close() {
    check(None, || {
        let (counter, contents) = (counter(), Contents::new());
        let adder = {
            let (counter, contents) = (counter.clone(), contents.clone());
            on(1, move || {
                contents.write();
                counter.add(1).is_ok()
            })
        };
        let sum = counter.close().unwrap().unwrap();
        if sum == 1 {
            assert_eq!(contents.read(), 1);
        }
        assert_eq!(sum == 1, adder.join().unwrap());
        assert_eq!(counter.add(1), Err(GateClosed));
    });
}

/// A sequence that loaded the old gate, against close and reopen: it is in one of the two sums.
#[test]
fn old_gate_against_reopen() {
    check(None, || {
        let counter = counter();
        let adders = [0, 1].map(|cpu| {
            let counter = counter.clone();
            on(cpu, move || isize::from(counter.add(1).is_ok()))
        });
        let first = counter.close().unwrap().unwrap();
        assert!(counter.reopen());
        let added: isize = adders.into_iter().map(|a| a.join().unwrap()).sum();
        let second = counter.close().unwrap().unwrap();
        assert_eq!(first + second, added);
    });
}

/// A thread that adds after reopening sees what was done before it.
#[test]
fn reopening_is_a_release() {
    check(None, || {
        let (counter, contents) = (counter(), Contents::new());
        assert_eq!(counter.close().unwrap(), Some(0));
        let adder = {
            let (counter, contents) = (counter.clone(), contents.clone());
            on(1, move || {
                if counter.add(1).is_ok() {
                    assert_eq!(contents.read(), 1);
                }
            })
        };
        contents.write();
        assert!(counter.reopen());
        adder.join().unwrap();
    });
}

/// Close against close: one of them has the sum, the other nothing.
#[test]
fn close_against_close() {
    check(None, || {
        let counter = counter();
        counter.add(1).unwrap();
        let other = {
            let counter = counter.clone();
            on(1, move || counter.close().unwrap())
        };
        let sums = [counter.close().unwrap(), other.join().unwrap()];
        assert!(sums == [Some(1), None] || sums == [None, Some(1)], "{sums:?}");
    });
}

fn item(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).unwrap()
}

/// A depot of three magazines, each of which `capacity` items fill.
fn depot_of(capacity: usize) -> (Arc<Depot>, Taker) {
    let (depot, taker) = Depot::new(capacity, 3).unwrap();
    (Arc::new(depot), taker)
}

fn depot() -> (Arc<Depot>, Taker) {
    depot_of(1)
}

/// Gives one item. Returns false if it was refused. No other item may be passed to `past`.
fn give(depot: &Depot, n: usize) -> bool {
    // SAFETY: the model keeps the depot.
    unsafe { Depot::give(depot, item(n), |_| unreachable!("no thread has closed it")) }
}

/// What is found on the list and in the CPUs' magazines. Loom does not go elsewhere at a load that
/// decides (whether there is anything); a yield has it do so.
fn take_all(depot: &Depot, taker: &mut Taker, found: &mut Vec<NonZeroUsize>) {
    thread::yield_now();
    while taker.refill(depot, |item| found.push(item)) {}
    taker.reclaim(depot, |item| found.push(item)).unwrap();
}

/// Give against reclaim: an item is found once, with what was written before it was given.
#[test]
fn give_against_reclaim() {
    check(None, || {
        let ((depot, mut taker), contents) = (depot(), Contents::new());
        let giver = {
            let (depot, contents) = (depot.clone(), contents.clone());
            on(1, move || {
                contents.write();
                give(&depot, 7)
            })
        };
        let mut found = Vec::new();
        take_all(&depot, &mut taker, &mut found);
        if !found.is_empty() {
            assert_eq!(contents.read(), 1);
        }
        let given = giver.join().unwrap();
        take_all(&depot, &mut taker, &mut found);
        assert_eq!(found, if given { vec![item(7)] } else { vec![] });
    });
}

/// The hand-over of a full magazine against the taker: each item is found once, with what was
/// written before, also what another thread on the same CPU had given.
#[test]
fn exchange_against_refill() {
    check(None, || {
        let ((depot, mut taker), contents) = (depot(), Contents::new());
        contents.write();
        assert!(give(&depot, 7));
        let giver = {
            let depot = depot.clone();
            on(0, move || give(&depot, 8))
        };
        let mut found = Vec::new();
        thread::yield_now();
        while taker.refill(&depot, |item| found.push(item)) {}
        let early = found.len();
        assert!(early == 0 || found == [item(7)] && contents.read() == 1);
        assert!(giver.join().unwrap());
        take_all(&depot, &mut taker, &mut found);
        assert_eq!(found, [item(7), item(8)]);
    });
}

/// A depot without an empty magazine: the full one is handed over for nothing while the taker takes
/// it, and another thread of the CPU gives. Each item is found once, with what was written before,
/// or it was refused.
#[test]
fn hand_over_for_nothing_against_refill() {
    check(Some(3), || {
        let (depot, mut taker) = Depot::new(1, 1).unwrap();
        let (depot, contents) = (Arc::new(depot), Contents::new());
        contents.write();
        assert!(give(&depot, 7));
        let givers = [8, 9].map(|n| {
            let depot = depot.clone();
            on(0, move || give(&depot, n))
        });
        let mut found = Vec::new();
        thread::yield_now();
        while taker.refill(&depot, |item| found.push(item)) {}
        assert!(!found.contains(&item(7)) || contents.read() == 1);
        let given = givers.map(|giver| giver.join().unwrap());
        take_all(&depot, &mut taker, &mut found);
        found.sort_unstable();
        let given = [(7, true), (8, given[0]), (9, given[1])].into_iter().filter(|(_, given)| *given);
        assert_eq!(found, given.map(|(n, _)| item(n)).collect::<Vec<_>>());
    });
}

/// The same against reclaim: either has the old magazine, and what it holds.
#[test]
fn exchange_against_reclaim() {
    against_reclaim(1);
}

/// Push onto a magazine that holds something, against reclaim.
#[test]
fn push_against_reclaim() {
    against_reclaim(2);
}

fn against_reclaim(capacity: usize) {
    check(None, move || {
        let (depot, mut taker) = depot_of(capacity);
        assert!(give(&depot, 7));
        let giver = {
            let depot = depot.clone();
            on(0, move || give(&depot, 8))
        };
        let mut found = Vec::new();
        taker.reclaim(&depot, |item| found.push(item)).unwrap();
        let given = giver.join().unwrap();
        take_all(&depot, &mut taker, &mut found);
        found.sort();
        assert_eq!(found, if given { vec![item(7), item(8)] } else { vec![item(7)] });
    });
}

/// Two threads that push full magazines while the taker takes the list: none is lost, and what was
/// in them is seen.
#[test]
fn hand_overs_against_refill() {
    check(Some(2), || {
        let (depot, mut taker) = depot();
        let givers = [1, 2].map(|n| {
            let depot = depot.clone();
            let contents = Contents::new();
            let written = contents.clone();
            let giver = on(n, move || {
                written.write();
                // SAFETY: the model keeps the depot.
                assert_eq!(unsafe { Depot::give_many(&*depot, &[item(n)]) }, 1);
            });
            (giver, contents)
        });
        let mut found = Vec::new();
        thread::yield_now();
        while taker.refill(&depot, |item| found.push(item)) {}
        for item in &found {
            assert_eq!(givers[item.get() - 1].1.read(), 1);
        }
        givers.into_iter().for_each(|(giver, _)| giver.join().unwrap());
        while taker.refill(&depot, |item| found.push(item)) {}
        found.sort();
        assert_eq!(found, [item(1), item(2)]);
    });
}

/// ABA: a magazine is popped by one thread at a time, also when the head goes and comes back in the
/// middle of a pop.
#[test]
fn pop_against_pop_and_push() {
    check(None, || {
        let (depot, _) = depot();
        let popper = {
            let depot = depot.clone();
            thread::spawn(move || depot.pop_empty().map(|m| m.index))
        };
        let mut mine: Vec<_> = [(); 2].iter().filter_map(|()| depot.pop_empty()).collect();
        depot.push_empty(mine.remove(0));
        let mut all = vec![mine[0].index, popper.join().unwrap().unwrap()];
        all.extend(std::iter::from_fn(|| depot.pop_empty()).map(|m| m.index));
        all.sort();
        assert_eq!(all, [1, 2, 3], "popped twice, or lost");
    });
}

/// A returned magazine is empty for its next user, also if another thread emptied it.
#[test]
fn empties_are_handed_over() {
    check(None, || {
        let (depot, mut taker) = Depot::new(1, 1).unwrap();
        let depot = Arc::new(depot);
        // SAFETY: the model keeps the depot.
        assert_eq!(unsafe { Depot::give_many(&*depot, &[item(7)]) }, 1);
        let giver = {
            let depot = depot.clone();
            // SAFETY: as above.
            on(1, move || unsafe { Depot::give_many(&*depot, &[item(8)]) })
        };
        let mut found = Vec::new();
        thread::yield_now();
        while taker.refill(&depot, |item| found.push(item)) {}
        let given = giver.join().unwrap();
        while taker.refill(&depot, |item| found.push(item)) {}
        assert_eq!(found, if given == 1 { vec![item(7), item(8)] } else { vec![item(7)] });
    });
}

/// Give against the depot's end: each item is the taker's, refused, or handed back. The thread that
/// has them all frees the depot, after the giver's last touch.
#[test]
fn give_against_close() {
    against_close(2);
}

/// The same for a giver that holds a full magazine.
#[test]
fn exchange_against_close() {
    against_close(1);
}

fn against_close(capacity: usize) {
    check(None, move || {
        let ((depot, mut taker), contents) = (depot_of(capacity), Contents::new());
        assert!(give(&depot, 7));
        let giver = {
            let (depot, contents) = (depot.clone(), contents.clone());
            on(0, move || {
                let mut back = Vec::new();
                // SAFETY: the model keeps the memory, and the item stands for the right to touch
                // it.
                if !unsafe { Depot::give(&*depot, item(8), |item| back.push(item)) } {
                    back.push(item(8));
                }
                if !back.is_empty() {
                    assert_eq!(contents.read(), 1, "what was done before closing");
                }
                back
            })
        };
        let mut found = Vec::new();
        contents.write();
        taker.close(&depot, |item| found.push(item)).unwrap();
        if found.len() == 2 {
            // All are here, so no thread has a reason to touch the depot.
            depot.witness();
        }
        found.extend(giver.join().unwrap());
        found.sort();
        assert_eq!(found, [item(7), item(8)]);
        assert!(!give(&depot, 9));
        // SAFETY: the model keeps the depot.
        assert_eq!(unsafe { Depot::give_many(&*depot, &[item(9)]) }, 0);
    });
}
