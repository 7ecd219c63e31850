//! Counters in a whole process: many counters, many threads, forks, and threads that move between
//! CPUs.

use netmem_percpu::{Counter, Depot, GateClosed, Mode, Taker, cpus, mode};
use std::num::NonZeroUsize;

/// In portable mode, even a single thread may find the lock of its CPU taken, and then uses the
/// shared path.
fn add(counter: &Counter, n: isize) -> isize {
    match counter.add(n) {
        Ok(()) => n,
        Err(GateClosed) => {
            assert!(matches!(mode(), Mode::Portable(_)), "an open gate in {:?}", mode());
            0
        }
    }
}

#[test]
fn the_mode_is_the_one_that_was_asked_for() {
    netmem_testing::assert_forced_mode();
}

/// Proves REF-7: the flag of the C library is used, and the tunable that turns sequences off turns
/// them off.
#[test]
fn the_mode_follows_the_c_library() {
    let off = std::env::var("GLIBC_TUNABLES").is_ok_and(|tunables| tunables.contains("glibc.pthread.rseq=0"));
    assert!(!off || matches!(mode(), Mode::Portable(_)), "{:?}", mode());
    println!("{} ({:?}), {} CPUs", mode(), mode(), cpus());
}

/// There are more counters than an area has slots. Each keeps its own sum, and returned slots are
/// empty.
#[test]
fn arenas_grow_and_slots_are_used_again() {
    for round in 0..3 {
        let counters: Vec<_> = (0..1500).map(|_| Counter::new().unwrap()).collect();
        let sums: Vec<_> = counters.iter().zip(1..).map(|(counter, n)| add(counter, n + round)).collect();
        for (counter, sum) in counters.iter().zip(sums).rev() {
            assert_eq!(counter.close().unwrap(), Some(sum));
        }
        // The counters are dropped with a sum that is not 0.
        counters.iter().for_each(|counter| assert!(counter.reopen() && add(counter, 7) < 8));
    }
}

/// A closed counter reports that it is closed, and counts from zero when it is reopened.
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

/// No count is kept per thread: the adds of thousands of threads are in the sum after the threads
/// have ended.
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

/// Items are passed on in full magazines, and the items in magazines that are not full are
/// reclaimed. A depot without empty magazines refuses items.
#[test]
fn a_depot() {
    let (depot, mut taker) = Depot::new(8, 12).unwrap();
    (1..=60).for_each(|n| put(&depot, n));
    let refused = (61..=200).filter(|&n| !give(&depot, n)).count();
    assert!((200 - 12 * 8..=140).contains(&refused), "{refused}");
    let mut found = Vec::new();
    while taker.refill(&depot, |item| found.push(item)) {
        assert!(found.len().is_multiple_of(8), "a magazine that was not full");
    }
    assert!(!found.is_empty());
    // The rest is on CPUs, with as many indices as this thread had.
    assert_eq!(found.len() + depot.peek(), 200 - refused);
    taker.reclaim(&depot, |item| found.push(item)).unwrap();
    assert_eq!((found.len(), depot.peek()), (200 - refused, 0));
    found.sort();
    found.dedup();
    assert_eq!(found.len(), 200 - refused, "found twice");
}

/// If many items are given at once, none waits on a CPU. If there are too few magazines, the rest
/// is refused.
#[test]
fn many_at_once() {
    let (depot, mut taker) = Depot::new(4, 3).unwrap();
    let items: Vec<_> = (1..=14).filter_map(NonZeroUsize::new).collect();
    // SAFETY: the depot outlives the test.
    assert_eq!(unsafe { Depot::give_many(&depot, &items) }, 12);
    let mut found = Vec::new();
    assert_eq!(depot.peek(), 0);
    while taker.refill(&depot, |item| found.push(item)) {}
    found.sort();
    assert_eq!(found, items[..12]);
}

/// A closed depot has handed out its items, and refuses new ones.
#[test]
fn a_depot_ends() {
    let (depot, mut taker) = Depot::new(4, 8).unwrap();
    let given = (1..=10).filter(|&n| give(&depot, n)).count();
    let mut found = 0;
    taker.close(&depot, |_| found += 1).unwrap();
    assert_eq!(found, given);
    assert!(!give(&depot, 1));
    assert!(!taker.refill(&depot, |_| unreachable!("all was taken")));
}

/// Gives one item. Returns false if it was refused.
fn give(depot: &Depot, n: usize) -> bool {
    // SAFETY: the depot is borrowed.
    unsafe { Depot::give(depot, NonZeroUsize::MIN.saturating_add(n), |_| unreachable!("no giver is in it")) }
}

/// Gives one item to a depot that has room for it. In portable mode the locks of CPUs are those of
/// the process: a thread of another test may have that of this CPU, and the item is refused.
fn put(depot: &Depot, n: usize) {
    while !give(depot, n) {
        assert!(matches!(mode(), Mode::Portable(_)), "{n} was refused");
        std::thread::yield_now();
    }
}

/// If user code panics over an item, only that item is lost. The taker gets the others, in each way
/// of taking them.
#[test]
fn a_panic_over_one_item_leaves_the_others_pending() {
    type Take = fn(&mut Taker, &Depot, &mut dyn FnMut(NonZeroUsize));
    let ways: [Take; 3] = [
        |taker, depot, take| while taker.refill(depot, &mut *take) {},
        |taker, depot, take| taker.reclaim(depot, take).unwrap(),
        |taker, depot, take| taker.close(depot, take).unwrap(),
    ];
    for way in ways {
        let (depot, mut taker) = Depot::new(4, 40).unwrap();
        (1..=51).for_each(|n| put(&depot, n));
        let mut found = Vec::new();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            way(&mut taker, &depot, &mut |item| {
                found.push(item.get());
                panic!("on purpose");
            });
        }));
        assert!(panicked.is_err() && found.len() == 1);
        while taker.refill(&depot, |item| found.push(item.get())) {}
        taker.reclaim(&depot, |item| found.push(item.get())).unwrap();
        found.sort();
        assert_eq!(found, (2..=52).collect::<Vec<_>>());
    }
}

/// A taker removes nothing from a depot for which it was not made, and does not close it.
#[test]
fn a_taker_belongs_to_its_depot() {
    let (mine, mut my_taker) = Depot::new(1, 8).unwrap();
    let (other, mut other_taker) = Depot::new(1, 8).unwrap();
    let given = [&mine, &other].map(|depot| (1..=4).filter(|&n| give(depot, n)).count());
    let mut found = [0, 0];
    assert!(!my_taker.refill(&other, |_| unreachable!("not its depot")));
    my_taker.reclaim(&other, |_| unreachable!("not its depot")).unwrap();
    my_taker.close(&other, |_| unreachable!("not its depot")).unwrap();
    my_taker.close(&mine, |_| found[0] += 1).unwrap();
    other_taker.close(&other, |_| found[1] += 1).unwrap();
    assert_eq!(found, given);
}
