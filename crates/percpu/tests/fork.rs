//! Fork: how a child may use the values that its parent made. Each test has a process of its own,
//! so that the test knows all threads that exist when it forks.

use netmem_percpu::{Counter, CpuCache, Depot, Taker, mode};
use netmem_testing::is_emulated;
use netmem_testing::skip;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Runs `body` in a child, which never returns. Returns whether `body` returned true there. If the
/// child hangs, the alarm ends it.
fn in_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child uses what this crate's front page permits, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: takes a number.
        unsafe { libc::alarm(60) };
        let good = body();
        // SAFETY: ends the child, without what belongs to the parent.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    assert!(child > 0, "{}", std::io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: our own child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status == 0
}

fn give(depot: &Depot, n: usize) -> bool {
    // SAFETY: the depot is borrowed.
    unsafe { Depot::give(depot, NonZeroUsize::MIN.saturating_add(n), |_| unreachable!("no giver is in it")) }
}

fn take(depot: &Depot, taker: &mut Taker) -> Vec<usize> {
    let mut found = Vec::new();
    while taker.refill(depot, |item| found.push(item.get() - 1)) {}
    taker.reclaim(depot, |item| found.push(item.get() - 1)).expect("a barrier");
    found.sort();
    found
}

#[test]
fn a_child_has_its_own_copy() {
    netmem_testing::assert_forced_mode();
    if is_emulated() {
        return skip("it is emulated, and a child that is forked beside other threads may hang there");
    }
    // This is done in children, because a process has only one first use.
    for _ in 0..20 {
        assert!(in_child(during_the_first_use));
    }
    counters();
    depots();
    caches();
    beside_other_threads();
}

/// Another thread decides the mode and makes the first counters of the process while this thread
/// forks. The child does not have that thread, so it does both itself. Another library's fork
/// handler runs meanwhile, as that of the address sanitizer does. So everything that the thread
/// does at its first use happens after the fork has begun.
fn during_the_first_use() -> bool {
    static COUNTERS: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn of_another_library() {
        while COUNTERS.load(Ordering::Relaxed) < 1000 {
            std::thread::yield_now();
        }
    }
    // SAFETY: a function that stays.
    assert_eq!(unsafe { libc::pthread_atfork(Some(of_another_library), None, None) }, 0);
    std::thread::spawn(|| {
        loop {
            // The counters are kept for a while, so that free slots are taken from the lock's list,
            // returned, and used up.
            let some: Vec<_> = (0..600).map_while(|_| Counter::new().ok()).collect();
            COUNTERS.fetch_add(some.len(), Ordering::Relaxed);
        }
    });
    in_child(|| Counter::new().is_ok_and(|own| own.add(1).is_ok() && own.close().is_ok_and(|sum| sum == Some(1))))
}

/// The child has a copy of the counts at the time of the fork. It counts, closes and makes counters
/// of its own, and the parent is not affected. A child has another address space, in which the
/// barrier must be registered again if the registration is not inherited.
fn counters() {
    let counter = Counter::new().expect("memory");
    counter.add(5).expect("open");
    assert!(in_child(|| {
        counter.add(2).is_ok()
            && counter.approximate() == 7
            && counter.close().is_ok_and(|sum| sum == Some(7))
            && counter.reopen()
            && Counter::new().is_ok_and(|own| own.add(1).is_ok() && own.close().is_ok_and(|sum| sum == Some(1)))
    }));
    counter.add(1).expect("open");
    assert_eq!(counter.close().expect("a barrier"), Some(6));
}

/// Parent and child each have all items: in full magazines, on the CPUs, and pending. Both continue
/// to give and take, and each sees only its own changes.
fn depots() {
    let (depot, mut taker) = Depot::new(4, 16).expect("memory");
    assert!((0..10).all(|n| give(&depot, n)));
    // One magazine is taken, and its first item. The other items of it are pending.
    let mut first = None;
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        taker.refill(&depot, |item| {
            first = Some(item.get() - 1);
            panic!("on purpose");
        })
    }));
    assert!(panicked.is_err());
    let rest = |more: usize| (0..10).filter(|&n| Some(n) != first).chain([more]).collect::<Vec<_>>();
    assert!(in_child(|| {
        let mut found = Vec::new();
        give(&depot, 20)
            && take(&depot, &mut taker) == rest(20)
            && give(&depot, 21)
            && taker.close(&depot, |item| found.push(item.get() - 1)).is_ok()
            && found == [21]
            && !give(&depot, 22)
    }));
    assert!(give(&depot, 30));
    assert_eq!(take(&depot, &mut taker), rest(30));
}

/// The same for items that any thread may take.
fn caches() {
    let cache = CpuCache::new(4, 64).expect("memory");
    // SAFETY: the cache outlives the calls.
    let push =
        |n| unsafe { CpuCache::push(&cache, NonZeroUsize::MIN.saturating_add(n), |_| unreachable!("it is open")) };
    let all = || {
        let mut found: Vec<_> = std::iter::from_fn(|| cache.pop().ok()).map(|item| item.get() - 1).collect();
        found.sort();
        found
    };
    assert!((0..10).all(push));
    assert!(in_child(|| {
        push(20)
            && cache.reclaim().is_ok_and(|items| items <= 11)
            && all() == (0..10).chain([20]).collect::<Vec<_>>()
            && push(21)
            && cache.close().is_ok()
            && all() == [21]
            && !push(22)
    }));
    assert!(push(30) && cache.reclaim().is_ok());
    assert_eq!(all(), (0..10).chain([30]).collect::<Vec<_>>());
}

/// A child is forked while other threads make, use and drop counters. It waits for none of their
/// locks, and has the adds that were made before the fork.
fn beside_other_threads() {
    let (counter, stop) = (Counter::new().expect("memory"), AtomicBool::new(false));
    let good = std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    (0..100).filter(|_| counter.add(1).is_ok()).count();
                    let _ = (0..100).try_for_each(|_| Counter::new().map(drop));
                }
            });
        }
        let mut good = true;
        for _ in 0..200 {
            // The sums only grow.
            let before = counter.approximate();
            good &= in_child(|| {
                let own = || {
                    let own = Counter::new()?;
                    Ok::<_, Box<dyn std::error::Error>>((own.add(1)?, own.close()?))
                };
                counter.close().is_ok_and(|sum| sum >= Some(before))
                    && counter.reopen()
                    && counter.add(1).is_ok()
                    && own().is_ok_and(|(_, sum)| sum == Some(1))
            });
        }
        stop.store(true, Ordering::Relaxed);
        good
    });
    assert!(good, "{:?}", mode());
}
