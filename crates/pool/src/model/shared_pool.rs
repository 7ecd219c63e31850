//! The models of a [`SharedPool`]: allocation, return and close from several threads. They run the
//! product code, as the other models do.

use super::*;
use crate::SharedPool;

/// A pool of `limit` pages with magazines of one page.
fn shared(machine: &Machine, limit: usize) -> SharedPool<Private> {
    let options = PoolOptions::new("model").magazine(1).limit(limit);
    options.build_shared(machine.memory.clone(), Some(machine.domain.clone())).unwrap()
}

/// Allocates a page in a thread on `cpu`, writes it and drops it. The thread returns whether it got
/// a page.
fn use_on(machine: &Arc<Machine>, cpu: usize, pool: &Arc<SharedPool<Private>>) -> JoinHandle<bool> {
    let (machine, pool) = (machine.clone(), pool.clone());
    thread::spawn(move || {
        run_on(cpu);
        let page = pool.alloc();
        page.iter().for_each(|page| machine.write(page));
        page.is_some()
    })
}

/// Allocation against allocation and return, on one CPU and on two. A page has one user at a time,
/// and each user sees what the last one wrote.
#[test]
fn shared_alloc_against_alloc() {
    for cpu in [0, 1] {
        model(move || {
            let machine = Machine::new();
            let pool = Arc::new(shared(&machine, 2));
            drop(pool.alloc().unwrap());
            let thread = use_on(&machine, cpu, &pool);
            owners_turn();
            let page = pool.alloc().unwrap();
            machine.write(&page);
            drop(page);
            assert!(thread.join().unwrap(), "there are as many pages as threads");
            let closed = Arc::into_inner(pool).unwrap().close();
            assert_eq!(closed.outstanding, 0);
            machine.check(1, 0);
        });
    }
}

/// A lost race is not "no page": two threads each take one of two pages that another CPU holds.
/// With magazines of two pages, a thread of that CPU pops what the other thread has reclaimed, and
/// the other thread reclaims again.
#[test]
fn shared_alloc_against_reclaim() {
    alloc_against_reclaim(1, 0);
    alloc_against_reclaim(2, 1);
}

fn alloc_against_reclaim(magazine: usize, cpu: usize) {
    model(move || {
        let machine = Machine::new();
        let options = PoolOptions::new("model").magazine(magazine).limit(2);
        let pool = Arc::new(options.build_shared(machine.memory.clone(), Some(machine.domain.clone())).unwrap());
        let pages = [pool.alloc().unwrap(), pool.alloc().unwrap()];
        run_on(1);
        drop(pages);
        run_on(0);
        let thread = {
            let pool = pool.clone();
            thread::spawn(move || {
                run_on(cpu);
                pool.alloc()
            })
        };
        owners_turn();
        let mine = pool.alloc();
        let other = thread.join().unwrap();
        // With magazines of two pages, the second page may be in a magazine on this CPU, and it is
        // too early for the other thread to reclaim again.
        assert!(mine.is_some() && (other.is_some() || magazine == 2), "{mine:?}, {other:?}");
        drop((mine, other));
        assert_eq!(Arc::into_inner(pool).unwrap().close().outstanding, 0);
        machine.check(1, 0);
    });
}

/// A magazine of two pages that is in the hand of a thread is not "no page": two threads, each on
/// its CPU, take a page each, while the magazine goes from the depot to one of the CPUs.
#[test]
fn shared_alloc_against_a_magazine_in_hand() {
    model(|| {
        let machine = Machine::new();
        let options = PoolOptions::new("model").magazine(2).limit(3);
        let pool = Arc::new(options.build_shared(machine.memory.clone(), Some(machine.domain.clone())).unwrap());
        // The other two pages of the provider are in one magazine of the depot now.
        let first = pool.alloc().unwrap();
        let thread = {
            let pool = pool.clone();
            thread::spawn(move || {
                run_on(1);
                pool.alloc()
            })
        };
        owners_turn();
        let mine = pool.alloc();
        let other = thread.join().unwrap();
        assert!(mine.is_some() && other.is_some(), "{mine:?}, {other:?}");
        drop((first, mine, other));
        assert_eq!(Arc::into_inner(pool).unwrap().close().outstanding, 0);
        machine.check(1, 0);
    });
}

/// Return against close: every page is returned once, and one thread frees the pool, after the last
/// access of every other thread.
#[test]
fn shared_return_against_close() {
    model(|| {
        let machine = Machine::new();
        let pool = shared(&machine, 2);
        let pages = [pool.alloc().unwrap(), pool.alloc().unwrap()];
        let mut cpu = 0..;
        let threads = pages.map(|page| machine.drop_on(cpu.next().unwrap(), page));
        owners_turn();
        let closed = pool.close();
        assert_eq!(closed.stats.mapped - closed.stats.unmapped, closed.outstanding);
        threads.into_iter().for_each(|t| t.join().unwrap());
        machine.check(1, 0);
    });
}

/// A full magazine on its way to the depot against close: its pages keep the pool, and are returned
/// one by one if the magazine is too late.
#[test]
fn shared_magazine_against_close() {
    model(|| {
        let machine = Machine::new();
        let pool = shared(&machine, 3);
        let [first, second, third] = [(); 3].map(|()| pool.alloc().unwrap());
        // Both magazines of this CPU are full, so the next return hands one over.
        drop((first, second));
        let thread = machine.drop_on(0, third);
        owners_turn();
        let closed = pool.close();
        thread.join().unwrap();
        assert!(closed.outstanding <= 2);
        machine.check(1, 0);
    });
}

/// Allocation against `device_gone`: a magazine of two pages that another thread has in hand
/// meanwhile is put back. No thread that begins to allocate afterwards gets a page, and none is
/// left in the depot.
#[test]
fn shared_alloc_against_device_gone() {
    model(|| {
        let machine = Machine::new();
        let options = PoolOptions::new("model").magazine(2).limit(3);
        let pool = Arc::new(options.build_shared(machine.memory.clone(), Some(machine.domain.clone())).unwrap());
        // The other two pages of the provider are in one magazine of the depot now.
        let first = pool.alloc().unwrap();
        let is_over = Arc::new(loom::sync::atomic::AtomicBool::new(false));
        let thread = {
            let (pool, is_over) = (pool.clone(), is_over.clone());
            thread::spawn(move || {
                run_on(1);
                let late = is_over.load(Ordering::Acquire);
                let page = pool.alloc();
                assert!(page.is_none() || !late, "a page after its device had gone");
                page.is_some()
            })
        };
        owners_turn();
        pool.device_gone();
        assert_eq!(machine.domain.mapped(), 0);
        is_over.store(true, Ordering::Release);
        assert!(pool.alloc().is_none(), "a page whose address was unmapped");
        thread.join().unwrap();
        pool.reclaim();
        assert_eq!((pool.held(), pool.stats().idle), (1, 0));
        drop(first);
        assert_eq!(Arc::into_inner(pool).unwrap().close().outstanding, 0);
        machine.check(1, 0);
    });
}

/// Wait against return: a thread waits for the only page, which another thread drops: on this CPU
/// or on another, in a pool with magazines and in one without. A lost wakeup would be a deadlock.
#[test]
fn shared_wait_against_return() {
    for (magazine, cpu) in [(0, 0), (1, 0), (1, 1)] {
        model(move || {
            let machine = Machine::new();
            let options = PoolOptions::new("model").magazine(magazine).limit(1);
            let pool = options.build_shared(machine.memory.clone(), Some(machine.domain.clone())).unwrap();
            let page = pool.alloc().unwrap();
            let thread = machine.drop_on(cpu, page);
            owners_turn();
            let page = pool.alloc_blocking().unwrap();
            machine.write(&page);
            // The thread that passed the page on may still be at it.
            drop(page);
            assert_eq!(pool.close().outstanding, 0);
            thread.join().unwrap();
            machine.check(1, 0);
        });
    }
}

/// Wait against a magazine in hand: of two pages in one magazine, another thread pops one. The
/// thread that waits gets the other, which is put back.
#[test]
fn shared_wait_against_a_magazine_in_hand() {
    model(|| {
        let machine = Machine::new();
        let options = PoolOptions::new("model").magazine(2).limit(3);
        let pool = Arc::new(options.build_shared(machine.memory.clone(), Some(machine.domain.clone())).unwrap());
        let first = pool.alloc().unwrap();
        let thread = {
            let pool = pool.clone();
            thread::spawn(move || {
                run_on(1);
                pool.alloc()
            })
        };
        owners_turn();
        let mine = pool.alloc_blocking().unwrap();
        let other = thread.join().unwrap();
        drop((first, mine, other));
        assert_eq!(Arc::into_inner(pool).unwrap().close().outstanding, 0);
        machine.check(1, 0);
    });
}

/// Wait against cancel: the first waiter is dropped while the page is returned. The second gets it.
#[test]
fn shared_wait_against_cancel() {
    model(|| {
        let machine = Machine::new();
        let pool = shared(&machine, 1);
        let page = pool.alloc().unwrap();
        let (first, second) = (pool.alloc_async(), pool.alloc_async());
        let thread = machine.drop_on(0, page);
        let canceller = thread::spawn(move || drop(first));
        owners_turn();
        machine.write(&second.block().unwrap());
        canceller.join().unwrap();
        thread.join().unwrap();
        assert_eq!(pool.close().outstanding, 0);
        machine.check(1, 0);
    });
}

/// Wait against the end: a waiter gets the page or the reason, when the device goes and when the
/// pool is closed.
#[test]
fn shared_wait_against_end() {
    for closes in [false, true] {
        model(move || {
            let machine = Machine::new();
            let pool = shared(&machine, 1);
            let page = pool.alloc().unwrap();
            let future = pool.alloc_async();
            let thread = machine.drop_on(0, page);
            let waiter = thread::spawn(move || _ = future.block());
            owners_turn();
            if closes {
                let _ = pool.close();
            } else {
                pool.device_gone();
                assert!(pool.alloc().is_none() && pool.alloc_blocking().is_err());
                let _ = pool.close();
            }
            waiter.join().unwrap();
            thread.join().unwrap();
            machine.check(1, 0);
        });
    }
}
