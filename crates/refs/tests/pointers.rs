//! The smart pointers over each count.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use netmem_refs::{Count, Dead, Owner, PercpuRef, RcuCell, RcuRef, Ref, RefCount, Worker, faults, rcu};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// Counts its drops.
struct Value(Arc<AtomicU32>);

impl Value {
    fn new() -> (Self, Arc<AtomicU32>) {
        let drops = Arc::new(AtomicU32::new(0));
        (Self(drops.clone()), drops)
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Tests run side by side, and a section of another one's puts off what is retired here.
fn eventually(what: impl Fn() -> bool) {
    for _ in 0..5000 {
        if what() {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("still not, after five seconds");
}

fn try_get<T, C: Count>(owner: &Owner<T, C>) -> Result<Ref<T, C>, Dead> {
    let r = owner.try_get()?;
    Ok(r)
}

fn life_of<C: Count>(count: impl Fn() -> C) {
    let (value, drops) = Value::new();
    let owner = Owner::new(value, count());
    let one = try_get(&owner).unwrap();
    let two = one.clone();
    let three = two.try_get_live().unwrap();
    assert!(one.ptr_eq(&three) && Arc::ptr_eq(&owner.0, &drops));
    drop(one);
    owner.kill();
    drop(two);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    thread::spawn(move || drop(three)).join().unwrap();
    eventually(|| drops.load(Ordering::SeqCst) == 1);

    // No references at all, a callback, and a value of no size.
    let (tx, rx) = mpsc::channel();
    drop(Owner::with_release((), count(), move |()| tx.send(()).unwrap()));
    assert_eq!(rx.iter().count(), 1);
}

/// Proves REF-5.
#[test]
fn each_count_releases_once_at_the_last_put() {
    life_of(|| RefCount::new(1));
    life_of(|| PercpuRef::new().unwrap());
    life_of(|| RcuRef::new(1));
}

/// Whatever was done to a count before, an object never goes while somebody has it: it is used as usual, and leaked.
/// Proves REF-5.
#[test]
fn a_count_that_is_not_fresh_leaks() {
    fn leaks<C: Count>(count: C) {
        let (value, drops) = Value::new();
        let owner = Owner::new(value, count);
        let one = owner.try_get().ok();
        let two = one.clone();
        drop(owner);
        assert_eq!(drops.load(Ordering::SeqCst), 0, "released under somebody's hands");
        drop((one, two));
        rcu::flush();
        assert_eq!(drops.load(Ordering::SeqCst), 0);
    }
    leaks(RefCount::new(0));
    leaks(RefCount::new(2));
    leaks(RcuRef::new(0));
    let dead = RcuRef::new(1);
    assert!(dead.put());
    leaks(dead);
    let put = PercpuRef::new().unwrap();
    assert!(!put.put());
    leaks(put);
    let got = PercpuRef::new().unwrap();
    got.get();
    leaks(got);
    let killed = PercpuRef::new().unwrap();
    assert!(killed.kill().unwrap());
    leaks(killed);
}

/// Proves REF-4: no count's release runs in a critical section, the caller's own included.
#[test]
fn no_release_in_a_section() {
    fn waits<C: Count>(count: C) {
        let (value, drops) = Value::new();
        let owner = Owner::new(value, count);
        rcu::read(|_| {
            rcu::read(|_| drop(owner));
            assert_eq!(drops.load(Ordering::SeqCst), 0);
        });
        eventually(|| drops.load(Ordering::SeqCst) == 1);
    }
    waits(RefCount::new(1));
    waits(RcuRef::new(1));
    waits(PercpuRef::new().unwrap());
}

/// Proves REF-4, REF-5: killed with a confirmation, taken back to life by a reference, killed again.
#[test]
fn lives_of_a_pointer() {
    let (value, drops) = Value::new();
    let owner = Owner::new(value, PercpuRef::new().unwrap());
    let r = owner.try_get().unwrap();
    assert!(!r.is_dying() && r.resurrect().is_err());
    let mut confirmed = false;
    owner.kill_and_confirm(|| confirmed = true).map_err(|(_, e)| e).unwrap();
    assert!(confirmed && r.is_dying());
    assert_eq!(r.try_get_live().err(), Some(Dead));
    let owner = r.resurrect().unwrap();
    assert!(r.try_get_live().is_ok());
    drop(r);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    owner.kill_and_confirm(|| ()).map_err(|(_, e)| e).unwrap();
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

/// Not while the caller is in a section, and not in one of its own: what is retired in a callback is released by the time
/// that the section it was retired in ends, which an enclosing one would prevent. Proves REF-3.
#[test]
fn destruction_waits_for_the_callers_section_and_is_in_none() {
    // In a process of its own nothing else would be in a section; here it takes some tries.
    let alone = AtomicBool::new(false);
    eventually(|| {
        let (value, drops) = Value::new();
        let inner_at_once = Arc::new(AtomicBool::new(false));
        let told = inner_at_once.clone();
        let owner = Owner::with_release(value, RcuRef::new(1), move |outer| {
            let (inner, inner_drops) = Value::new();
            drop(Owner::new(inner, RcuRef::new(1)));
            told.store(inner_drops.load(Ordering::SeqCst) == 1, Ordering::SeqCst);
            drop(outer);
        });
        rcu::read(|_| {
            rcu::read(|_| drop(owner));
            assert_eq!(drops.load(Ordering::SeqCst), 0);
        });
        alone.store(drops.load(Ordering::SeqCst) == 1 && inner_at_once.load(Ordering::SeqCst), Ordering::SeqCst);
        alone.load(Ordering::SeqCst)
    });
}

/// What was found stays for the section, though it was taken out, put, and is dead. Proves REF-3.
#[test]
fn what_is_found_outlives_its_last_put() {
    let (value, drops) = Value::new();
    let cell = RcuCell::new(Some(Owner::new(value, RcuRef::new(1)).into_ref()));
    rcu::read(|guard| {
        let found = cell.load(guard).unwrap();
        let kept = found.try_get().unwrap();
        thread::scope(|scope| scope.spawn(|| cell.store(None)).join().unwrap());
        assert!(cell.load(guard).is_none());
        drop(kept);
        assert_eq!(found.try_get().err(), Some(Dead));
        assert!(Arc::ptr_eq(&found.0, &drops));
        drop(cell);
        assert_eq!(found.get().0.load(Ordering::SeqCst), 0);
    });
    eventually(|| drops.load(Ordering::SeqCst) == 1);
}

#[test]
fn a_cell_swaps() {
    let of = |n: u32| Owner::new(n, RcuRef::new(1)).into_ref();
    let cell = RcuCell::default();
    assert!(cell.swap(Some(of(1))).is_none());
    assert_eq!(cell.swap(Some(of(2))).as_deref(), Some(&1));
    assert_eq!(cell.take().as_deref(), Some(&2));
    assert!(cell.take().is_none());
    cell.store(Some(of(3)));
    assert_eq!(rcu::read(|guard| cell.load(guard).map(|n| *n)), Some(3));
}

/// A panic after a grace period is contained, and others' objects are released; at once, it is the caller's.
#[test]
fn panics_in_destructors() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("this panic is part of the test");
        }
    }
    let before = faults().panicked;
    let (value, drops) = Value::new();
    rcu::read(|_| {
        drop(Owner::new(Panics, RcuRef::new(1)));
        drop(Owner::new(value, RcuRef::new(1)));
    });
    eventually(|| faults().panicked == before + 1 && drops.load(Ordering::SeqCst) == 1);
    let owner = Owner::new(Panics, RefCount::new(1));
    assert!(catch_unwind(AssertUnwindSafe(|| drop(owner))).is_err());
}

/// The last put may be in the destructor of a thread local, when the thread's own sections are over.
#[test]
fn a_last_put_while_the_thread_ends() {
    thread_local! {
        static EARLY: RefCell<Option<Ref<Value, RcuRef>>> = const { RefCell::new(None) };
        static LATE: RefCell<Option<Ref<Value, RcuRef>>> = const { RefCell::new(None) };
    }
    let ((a, a_drops), (b, b_drops)) = (Value::new(), Value::new());
    thread::spawn(move || {
        EARLY.with_borrow_mut(|place| *place = Some(Owner::new(a, RcuRef::new(1)).into_ref()));
        rcu::read(|_| ());
        LATE.with_borrow_mut(|place| *place = Some(Owner::new(b, RcuRef::new(1)).into_ref()));
    })
    .join()
    .unwrap();
    eventually(|| a_drops.load(Ordering::SeqCst) + b_drops.load(Ordering::SeqCst) == 2);
}

/// More open sections than a batch has entries by itself do not hold a release up.
#[test]
fn prompt_among_many_sections() {
    let (value, drops) = Value::new();
    let (stop, entered) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        for _ in 0..40 {
            scope.spawn(|| {
                rcu::read(|_| {
                    entered.fetch_add(1, Ordering::SeqCst);
                    while !stop.load(Ordering::SeqCst) {
                        thread::sleep(Duration::from_millis(1));
                    }
                });
            });
        }
        eventually(|| entered.load(Ordering::SeqCst) == 40);
        drop(Owner::new(value, RcuRef::new(1)));
        stop.store(true, Ordering::SeqCst);
    });
    eventually(|| drops.load(Ordering::SeqCst) == 1);
    rcu::flush();
}

#[test]
fn cleanup_on_a_worker() {
    let worker = Arc::new(Worker::new("cleanup").unwrap());
    let to = worker.clone();
    let (tx, rx) = mpsc::channel();
    let release =
        move |name: String| to.defer(move || tx.send((name, thread::current().name().map(str::to_owned))).unwrap());
    drop(Owner::with_release("binding".to_owned(), RcuRef::new(1), release));
    assert_eq!(rx.recv().unwrap(), ("binding".to_owned(), Some("cleanup".to_owned())));
}
