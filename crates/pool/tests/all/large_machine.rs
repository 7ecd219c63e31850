//! Pools on machines with many CPUs: 64 threads return pages by magazines, in each mode of per-CPU
//! data that the machine has, and in the mode that pretends to have 256 CPUs.

use crate::common::{close_balanced, counting, pool, provider, remote_frees};
use netmem_percpu::{Mode, Why, forced_mode, mode};
use netmem_pool::{Page, PoolOptions, Private};
use std::process::Command;
use std::sync::{Barrier, mpsc};
use std::thread;

const THREADS: usize = 64;
const PAGES: usize = 1024;

/// Runs a test of this file in a process of each mode.
fn in_each_mode(test: &str) {
    for mode in ["mm_cid", "cpu_id", "portable", "portable_256"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.env("NETMEM_PERCPU", mode).args(["--exact", test, "--ignored", "--nocapture"]);
        let output = child.output().unwrap();
        println!("{mode}: {}", String::from_utf8_lossy(&output.stdout));
        assert!(output.status.success(), "{mode}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// False if the machine does not have the mode.
fn is_available() -> bool {
    let forced = forced_mode();
    println!("{:?}", forced.as_ref().map(|_| mode()));
    forced.is_ok()
}

fn pretends() -> bool {
    mode() == Mode::Portable(Why::Forced256)
}

/// Proves POOL-4: each of many threads returns its pages, mostly by magazines; what lies on CPUs is
/// a quarter of the pages at most.
#[test]
fn threads_return_by_magazines() {
    in_each_mode("large_machine::return_by_magazines");
}

#[test]
#[ignore = "the test above runs it in each mode"]
fn return_by_magazines() {
    if !is_available() {
        return;
    }
    // CPUs are never asked, so that what they hold is out of reach.
    let (mut pool, domain) = pool(PoolOptions::new("many").interrupt_cpus(false), PAGES);
    let done = Barrier::new(THREADS + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let (send, receive) = mpsc::channel::<Vec<Page<Private>>>();
                let done = &done;
                scope.spawn(move || {
                    receive.iter().for_each(|pages| {
                        drop(pages);
                        done.wait();
                    });
                });
                send
            })
            .collect();
        for _ in 0..20 {
            let mut pages: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
            assert!(pages.len() >= PAGES - PAGES / 4, "{} are in reach", pages.len());
            let each = pages.len() / THREADS;
            threads.iter().for_each(|thread| thread.send(pages.split_off(pages.len() - each)).unwrap());
            done.wait();
        }
    });
    let stats = close_balanced(pool, &domain);
    let by_magazines = stats.recycle_ring as f64 / remote_frees(stats) as f64;
    println!("{by_magazines:.2} by magazines: {stats:?}");
    // There each thread has an index of its own. Elsewhere, in portable mode, 64 threads meet at
    // the locks of few CPUs.
    assert!(!pretends() || by_magazines > 0.9, "{by_magazines}");
}

/// Proves POOL-4: threads with other indices than those before them return all pages, and the pool
/// has them again.
#[test]
fn indices_come_and_go() {
    in_each_mode("large_machine::come_and_go");
}

#[test]
#[ignore = "the test above runs it in each mode"]
fn come_and_go() {
    if !is_available() {
        return;
    }
    let (mut pool, domain) = pool(PoolOptions::new("come and go"), PAGES);
    for _ in 0..20 {
        let mut pages: Vec<_> = (0..PAGES).map(|_| pool.alloc().unwrap()).collect();
        let each = PAGES / THREADS;
        thread::scope(|scope| {
            for _ in 0..THREADS {
                let mine = pages.split_off(pages.len() - each);
                scope.spawn(move || drop(mine));
            }
        });
    }
    let stats = close_balanced(pool, &domain);
    println!("{stats:?}");
    assert!(stats.recycle_ring > 0);
}

/// Proves POOL-4: many threads allocate and return; each gets pages, and the accounting balances.
#[test]
fn threads_share_a_pool() {
    in_each_mode("large_machine::share_a_pool");
}

#[test]
#[ignore = "the test above runs it in each mode"]
fn share_a_pool() {
    if !is_available() {
        return;
    }
    let domain = counting();
    let pool = PoolOptions::new("shared").build_shared(provider::<Private>(PAGES), Some(domain.clone())).unwrap();
    let begin = Barrier::new(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                begin.wait();
                for _ in 0..200 {
                    let pages: Vec<_> = (0..8).filter_map(|_| pool.alloc()).collect();
                    assert!(!pages.is_empty());
                }
            });
        }
    });
    let stats = pool.stats();
    println!("{stats:?}");
    assert!(stats.inflight <= stats.recycle_ring_full, "the rest is on the return stack: {stats:?}");
    assert!(!pretends() || stats.magazines > 0);
    let closed = pool.close();
    assert_eq!((closed.outstanding, domain.maps()), (0, domain.unmaps()));
}
