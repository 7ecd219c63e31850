//! Threads that return tokens concurrently.

use crate::common::{Binding, binding, give, received};
use netmem_devmem::TokenTable;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

/// If two threads return the same tokens, exactly one of them frees each. Proves MEM-6.
#[test]
fn two_threads_return_the_same_token() {
    const ROUNDS: u32 = 500;
    const PAGES: u32 = 1024;
    let (binding, mut table) = (binding(PAGES), TokenTable::new());
    let returner = table.returner();
    // The number of rounds that were begun, and of rounds that the other thread has done. Both
    // threads spin on these, to run at the same time.
    let (begun, done) = (AtomicU32::new(0), AtomicU32::new(0));
    let wait = |at: &AtomicU32, round| {
        while at.load(Ordering::Acquire) < round {
            thread::yield_now();
        }
    };
    let (mut freed, mut unbalanced) = (0, 0);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let freed = (1..=ROUNDS).map(|round| {
                wait(&begun, round);
                let freed = give(&returner, 1, PAGES);
                done.store(round, Ordering::Release);
                freed
            });
            freed.sum::<usize>()
        });
        for round in 1..=ROUNDS {
            (0..PAGES).for_each(|index| _ = received(&mut table, &binding, index));
            begun.store(round, Ordering::Release);
            freed += give(&returner, 1, PAGES);
            wait(&done, round);
            unbalanced += u32::from(binding.out() != 0);
        }
        freed += other.join().unwrap();
    });
    assert_eq!((freed, unbalanced), ((PAGES * ROUNDS) as usize, 0));
    assert_eq!(table.stats().excess, u64::from(PAGES * ROUNDS));
}

/// The last handle closes the table, whichever handle it is and on any thread. Proves MEM-7.
#[test]
fn last_handle_on_any_thread() {
    for _ in 0..300 {
        let (binding, mut table) = (binding(100), TokenTable::<Binding>::new());
        (0..100).for_each(|index| assert!(received(&mut table, &binding, index) > 0));
        thread::scope(|scope| {
            for n in 0..2 {
                let returner = table.returner();
                scope.spawn(move || give(&returner, 1 + 30 * n, 50));
            }
            drop(table);
        });
        assert_eq!(binding.out(), 0);
    }
}
