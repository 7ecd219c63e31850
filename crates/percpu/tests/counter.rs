//! Counters in a whole process: many of them, many threads, forks, CPUs that threads are moved between.

use netmem_percpu::{Counter, Depot, GateClosed, Mode, Pending, cpus, mode};
use std::num::NonZeroUsize;

/// A thread on its own may find its CPU's lock taken, in portable mode: the shared path is then part of the contract.
fn add(counter: &Counter, n: isize) -> isize {
    match counter.add(n) {
        Ok(()) => n,
        Err(GateClosed) => {
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
    assert_eq!(counter.add(1), Err(GateClosed));
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

/// Items go by full magazines, and what no magazine was filled with is reclaimed; a depot without empty magazines refuses.
#[test]
fn a_depot() {
    let depot = Depot::new(8, 12).unwrap();
    let mut pending = Pending::default();
    let item = |n| NonZeroUsize::new(n).unwrap();
    // SAFETY: the depot outlives the test.
    let give = |n| unsafe { Depot::give(&depot, item(n), |_| unreachable!("it is open")) };
    let refused = (1..=200).filter(|&n| !give(n)).count();
    assert!((200 - 12 * 8..200).contains(&refused), "{refused}");
    let mut found = Vec::new();
    while depot.refill(&mut pending, |item| found.push(item)) {
        assert!(found.len().is_multiple_of(8), "a magazine that was not full");
    }
    assert!(!found.is_empty());
    assert!(depot.peek() <= 8 * cpus());
    depot.reclaim(|item| found.push(item)).unwrap();
    assert_eq!((found.len(), depot.peek()), (200 - refused, 0));
    found.sort();
    found.dedup();
    assert_eq!(found.len(), 200 - refused, "found twice");
}

/// Many at once do not wait on a CPU; a magazine more than there are is refused.
#[test]
fn many_at_once() {
    let depot = Depot::new(4, 3).unwrap();
    let items: Vec<_> = (1..=14).filter_map(NonZeroUsize::new).collect();
    // SAFETY: the depot outlives the test.
    assert_eq!(unsafe { Depot::give_many(&depot, &items) }, 12);
    let (mut found, mut pending) = (Vec::new(), Pending::default());
    assert_eq!(depot.peek(), 0);
    while depot.refill(&mut pending, |item| found.push(item)) {}
    found.sort();
    assert_eq!(found, items[..12]);
}

/// A closed depot has handed out what was in it, and refuses. A taker that panics has lost what it had not seen, no more.
#[test]
fn a_depot_ends() {
    let depot = Depot::new(4, 8).unwrap();
    let mut pending = Pending::default();
    // SAFETY: the depot outlives the test.
    let give =
        |n| unsafe { Depot::give(&depot, NonZeroUsize::MIN.saturating_add(n), |_| unreachable!("nobody is in it")) };
    while depot.peek() == 0 {
        give(1);
    }
    let panics = std::panic::AssertUnwindSafe(|| depot.reclaim(|_| panic!("on purpose")));
    assert!(std::panic::catch_unwind(panics).is_err());
    assert_eq!(depot.peek(), 0);
    let given = (0..10).filter(|&n| give(n)).count();
    let mut found = 0;
    depot.close(&mut pending, |_| found += 1).unwrap();
    assert!(found >= given);
    assert!(!give(1));
    assert!(!depot.refill(&mut pending, |_| unreachable!("all was taken")));
}
