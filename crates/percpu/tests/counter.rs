//! Counters in a whole process: many of them, many threads, forks, CPUs that threads are moved between.

use netmem_percpu::{Closed, Counter, Magazine, Mode, Pushed, Store, cpus, mode};
use std::num::NonZeroUsize;

/// A thread on its own may find its CPU's lock taken, in portable mode: the shared path is then part of the contract.
fn add(counter: &Counter, n: isize) -> isize {
    match counter.add(n) {
        Ok(()) => n,
        Err(Closed) => {
            assert!(matches!(mode(), Mode::Portable(_)), "an open gate in {:?}", mode());
            0
        }
    }
}

/// Proves REF-7: the C library's word is believed, and the tunable that turns sequences off turns them off.
#[test]
fn the_mode_follows_the_c_library() {
    let off = std::env::var("GLIBC_TUNABLES").is_ok_and(|tunables| tunables.contains("glibc.pthread.rseq=0"));
    assert!(!off || matches!(mode(), Mode::Portable(_)), "{:?}", mode());
    println!("{} ({:?}), {} CPUs", mode(), mode(), cpus());
}

/// More counters than an area has slots; each keeps its own sum, and slots that come back are empty.
#[test]
fn arenas_grow_and_slots_are_used_again() {
    for round in 0..3 {
        let counters: Vec<_> = (0..1500).map(|_| Counter::new().unwrap()).collect();
        let sums: Vec<_> = counters.iter().zip(1..).map(|(counter, n)| add(counter, n + round)).collect();
        for (counter, sum) in counters.iter().zip(sums).rev() {
            assert_eq!(counter.close().unwrap(), Some(sum));
        }
        // Dropped with something in them.
        counters.iter().for_each(|counter| assert!(counter.reopen() && add(counter, 7) < 8));
    }
}

/// A closed counter says so, and counts from zero when it is reopened.
#[test]
fn close_and_reopen() {
    let counter = Counter::new().unwrap();
    assert!(counter.is_open() && !counter.reopen());
    let sum = add(&counter, 5) + add(&counter, -2);
    assert_eq!(counter.close().unwrap(), Some(sum));
    assert!(!counter.is_open());
    assert_eq!(counter.add(1), Err(Closed));
    assert_eq!(counter.close().unwrap(), None);
    assert!(counter.reopen());
    assert_eq!(counter.close().unwrap(), Some(0));
}

/// Nothing is kept per thread: what thousands of them added is there when they are gone.
#[test]
fn thousands_of_threads() {
    let counter = Counter::new().unwrap();
    let mut sum = 0;
    for _ in 0..40 {
        sum += std::thread::scope(|scope| {
            let threads: Vec<_> = (0..100).map(|_| scope.spawn(|| add(&counter, 1))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<isize>()
        });
    }
    assert_eq!(counter.close().unwrap(), Some(sum));
}

/// A push fills this CPU's magazine and says when it is full; items come back newest first, and all that is left is collected.
#[test]
fn a_store() {
    let store = Store::new().unwrap();
    let item = |n| NonZeroUsize::new(n).unwrap();
    assert_eq!(store.pop(), None);
    let mut full = Vec::new();
    let mut pushed = 0;
    for n in 1..=100 {
        loop {
            match store.push(item(n)) {
                Ok(Pushed::Done) => break pushed += 1,
                Ok(Pushed::Missing | Pushed::Full) => {
                    full.extend(store.exchange_full(Magazine::new(8)).ok().flatten());
                }
                Err(Closed) => assert!(matches!(mode(), Mode::Portable(_))),
            }
        }
    }
    assert!(full.iter().all(|magazine| magazine.is_full() && magazine.len() == 8));
    let refused = store.exchange_empty(Magazine::new(8));
    let popped = store.pop();
    let mut found: Vec<_> = popped.into_iter().collect();
    assert!(store.collect(|mut magazine| found.extend(std::iter::from_fn(|| magazine.pop()))).unwrap());
    // On whatever CPU that was, its magazine had items; if the thread has moved since, it may have had none.
    drop(refused);
    full.iter_mut().for_each(|magazine| found.extend(std::iter::from_fn(|| magazine.pop())));
    found.sort();
    assert_eq!(found, (1..=pushed).map(item).collect::<Vec<_>>());
    assert!(store.collect(|magazine| assert!(magazine.is_empty())).unwrap());
}

/// A store that is dropped frees its magazines; a collector that panics has left the store open.
#[test]
fn a_store_survives_its_users() {
    let store = Store::new().unwrap();
    let fill = || while store.exchange_full(Magazine::new(1)).is_err() {};
    fill();
    let panics = std::panic::AssertUnwindSafe(|| store.collect(|_| panic!("on purpose")));
    assert!(std::panic::catch_unwind(panics).is_err());
    fill();
    assert!(store.collect(|_| ()).unwrap());
    fill();
}
