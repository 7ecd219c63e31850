//! Many threads use few objects. `NETMEM_STRESS_OPS` is the smallest number of operations.

use netmem_refs::{Borrowed, Count, Faults, Owner, PercpuRef, RcuCell, RcuRef, RefCount, faults, rcu};
use netmem_testing::stress_ops;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const THREADS: u64 = 4;

fn operations() -> u64 {
    stress_ops(2_000_000)
}

#[derive(Default)]
struct Made {
    made: AtomicU64,
    dropped: AtomicU64,
}

/// An object that checks its own contents, and that it is dropped once.
struct Object {
    made: Arc<Made>,
    alive: AtomicBool,
}

impl Object {
    fn new(made: &Arc<Made>) -> Self {
        made.made.fetch_add(1, Ordering::Relaxed);
        Self { made: made.clone(), alive: AtomicBool::new(true) }
    }

    fn look(&self) {
        assert!(self.alive.load(Ordering::Relaxed));
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        assert!(self.alive.swap(false, Ordering::Relaxed), "destroyed twice");
        self.made.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

fn settled(made: &Made) {
    for _ in 0..120_000 {
        if made.dropped.load(Ordering::Relaxed) == made.made.load(Ordering::Relaxed) {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("made {:?}, dropped {:?}", made.made, made.dropped);
}

fn balanced(before: Faults) {
    let now = faults();
    assert_eq!((now.saturated, now.imbalanced, now.panicked), (before.saturated, before.imbalanced, before.panicked));
}

/// Readers find objects while writers replace them. Every reader that gets a reference has the
/// object, and each object is destroyed once. Gets that come too late, and puts at the same time,
/// cause no fault. A get of the cell is never too late.
fn lookups_against_replacement<C: Count>(made: Arc<Made>) -> u64 {
    let before = faults();
    let owner = || Owner::try_new(Object::new(&made)).ok();
    let cells: Vec<RcuCell<_, C>> = (0..2).map(|_| RcuCell::new(owner())).collect();
    let late = AtomicU64::new(0);
    thread::scope(|scope| {
        for seed in 0..THREADS {
            let (cells, late, owner) = (&cells, &late, &owner);
            scope.spawn(move || {
                let mut held = Vec::new();
                for n in 0..operations() / THREADS {
                    let cell = &cells[((n ^ seed) & 1) as usize];
                    if n % 64 == seed {
                        cell.store(owner());
                    }
                    rcu::read(|guard| {
                        let Some(found) = cell.load(guard) else { panic!("never empty") };
                        found.look();
                        if n % 1024 == 0 {
                            thread::yield_now();
                        }
                        let got = if n % 2 == 0 { Borrowed::try_get(found) } else { Borrowed::try_get_live(found) };
                        match got {
                            Ok(r) => held.push(r),
                            Err(_) => _ = late.fetch_add(1, Ordering::Relaxed),
                        }
                        found.look();
                    });
                    if n % 4 == seed {
                        held.push(cell.get().expect("never empty"));
                    }
                    if held.len() > 3 {
                        held.swap_remove((n % 4) as usize).look();
                    }
                }
            });
        }
    });
    drop(cells);
    settled(&made);
    balanced(before);
    assert!(made.made.load(Ordering::Relaxed) > operations() / 100);
    late.into_inner()
}

/// Proves REF-2, REF-3.
#[test]
fn rcuref_lookups_against_replacement() {
    let _alone = crate::alone();
    let late = lookups_against_replacement::<RcuRef>(Arc::default());
    if operations() >= 1_000_000 {
        assert!(late > 0, "no get came too late: the race was not run");
    }
}

/// Proves REF-1, REF-3.
#[test]
fn refcount_lookups_against_replacement() {
    let _alone = crate::alone();
    lookups_against_replacement::<RefCount>(Arc::default());
}

/// Proves REF-3, REF-4.
#[test]
fn percpuref_lookups_against_replacement() {
    let _alone = crate::alone();
    lookups_against_replacement::<PercpuRef>(Arc::default());
}

fn clones_against_kill<C: Count>() {
    let (before, made) = (faults(), Arc::new(Made::default()));
    for _ in 0..operations() / 2000 {
        let owner: Owner<_, C> = Owner::try_new(Object::new(&made)).unwrap();
        thread::scope(|scope| {
            for _ in 0..2 {
                let mine = Owner::get(&owner);
                scope.spawn(move || {
                    for _ in 0..20 {
                        mine.clone().look();
                    }
                });
            }
            Owner::kill(owner);
        });
    }
    settled(&made);
    balanced(before);
}

/// Proves REF-4, REF-5.
#[test]
fn percpuref_clones_against_kill() {
    let _alone = crate::alone();
    clones_against_kill::<PercpuRef>();
}

/// Any thread may put the last reference. The release happens once. Proves REF-1, REF-5.
#[test]
fn refcount_clones_against_kill() {
    let _alone = crate::alone();
    clones_against_kill::<RefCount>();
}

/// Proves REF-2, REF-5.
#[test]
fn rcuref_clones_against_kill() {
    let _alone = crate::alone();
    clones_against_kill::<RcuRef>();
}
