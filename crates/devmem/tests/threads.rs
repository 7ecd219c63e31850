//! Threads that return beside each other.
#![cfg(not(loom))]

mod common;

use common::{Binding, binding, give, received};
use netmem_devmem::TokenTable;
use std::sync::Barrier;
use std::thread;

/// Of two threads that return the same tokens, exactly one frees each. Proves MEM-6.
#[test]
fn two_threads_return_the_same_token() {
    const ROUNDS: u32 = 2000;
    let (binding, mut table) = (binding(64), TokenTable::new());
    let (returner, barrier) = (table.returner(), Barrier::new(3));
    let mut unbalanced = 0;
    let freed = thread::scope(|scope| {
        let same = || {
            let returner = returner.clone();
            let freed = (0..ROUNDS).map(|_| {
                barrier.wait();
                let freed = give(&returner, 1, 64);
                barrier.wait();
                freed
            });
            freed.sum::<usize>()
        };
        let threads = [scope.spawn(same), scope.spawn(same)];
        for _ in 0..ROUNDS {
            (0..64).for_each(|index| _ = received(&mut table, &binding, index));
            barrier.wait();
            barrier.wait();
            unbalanced += u32::from(binding.out() != 0);
        }
        threads.map(|thread| thread.join().unwrap()).iter().sum::<usize>()
    });
    assert_eq!((freed, unbalanced), (64 * ROUNDS as usize, 0));
    assert_eq!(table.stats().excess, 64 * u64::from(ROUNDS));
}

/// Whatever goes last, on whichever thread, closes. Proves MEM-7.
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
