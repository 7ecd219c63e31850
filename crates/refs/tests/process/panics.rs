//! A panic in user code loses no reference and hangs no thread. User code is: confirmations,
//! destructors, release callbacks, jobs, critical sections, and subscribers of events.

use netmem_refs::{Borrowed, Count, KillError, Owner, PercpuRef, RcuCell, RcuRef, Ref, RefCount, Worker, faults, rcu};
use netmem_testing::{is_emulated, on_event, skip};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

const PART: &str = "this panic is part of the test";

/// A value that counts its drops, and panics in each drop if it is set to.
struct Value {
    drops: Arc<AtomicU32>,
    panics: bool,
}

impl Value {
    fn new(panics: bool) -> (Self, Arc<AtomicU32>) {
        let drops = Arc::new(AtomicU32::new(0));
        (Self { drops: drops.clone(), panics }, drops)
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics, "{PART}, in a drop");
    }
}

fn drops(of: &Arc<AtomicU32>) -> u32 {
    of.load(Ordering::SeqCst)
}

/// The message of the panic with which `f` must end.
fn panic_of<R>(f: impl FnOnce() -> R) -> String {
    let Err(what) = catch_unwind(AssertUnwindSafe(f)) else { panic!("it did not panic") };
    match what.downcast::<String>() {
        Ok(message) => *message,
        Err(what) => what.downcast_ref::<&str>().unwrap().to_string(),
    }
}

fn kill(owner: Owner<Value, PercpuRef>, confirm: impl FnOnce()) {
    let killed: Result<(), KillError> = Owner::kill_and_confirm(owner, confirm).map_err(|(_, e)| e);
    killed.unwrap();
}

/// `confirm` panics: the object is killed, the owner's reference is put, and the last put releases
/// the object.
#[test]
fn confirm_panics() {
    let _alone = crate::alone();
    // The owner's reference is the last one.
    let (value, dropped) = Value::new(false);
    let owner = Owner::try_new(value).unwrap();
    assert_eq!(panic_of(|| kill(owner, || panic!("{PART}"))), PART);
    assert_eq!(drops(&dropped), 1);

    // Another reference is the last one.
    let (value, dropped) = Value::new(false);
    let owner: Owner<_, PercpuRef> = Owner::try_new(value).unwrap();
    let r = Owner::get(&owner);
    assert_eq!(panic_of(|| kill(owner, || panic!("{PART}"))), PART);
    assert!(Ref::is_dying(&r) && drops(&dropped) == 0);
    assert_eq!(Ref::approximate_count(&r), 1);
    drop(r);
    assert_eq!(drops(&dropped), 1);
}

/// `confirm` panics, and so does the release: the first panic is propagated, the second is counted,
/// and the process continues.
#[test]
fn confirm_and_release_panic() {
    let _alone = crate::alone();
    let before = faults().panicked;
    let (value, dropped) = Value::new(true);
    let owner = Owner::try_new(value).unwrap();
    assert_eq!(panic_of(|| kill(owner, || panic!("{PART}"))), PART);
    assert_eq!((drops(&dropped), faults().panicked), (1, before + 1));
}

/// The raw count is killed, and the caller still has to put the initial reference.
#[test]
fn confirm_of_a_count_panics() {
    let count = PercpuRef::new().unwrap();
    assert_eq!(panic_of(|| count.kill_and_confirm(|| panic!("{PART}"))), PART);
    assert!(count.is_dying() && !count.try_get_live());
    assert!(count.put());
}

/// A release that happens at once panics: the panic is propagated to the caller of the last put,
/// and the value is not dropped again.
#[test]
fn release_panics_at_once() {
    fn panics<C: Count>() {
        let (value, dropped) = Value::new(true);
        let owner: Owner<_, C> = Owner::try_new(value).unwrap();
        let r = Owner::get(&owner);
        drop(owner);
        assert_eq!(panic_of(|| drop(r)), format!("{PART}, in a drop"));
        assert_eq!(drops(&dropped), 1);

        let (value, dropped) = Value::new(false);
        let release = |value: Value| {
            assert_eq!(drops(&value.drops), 0);
            panic!("{PART}");
        };
        let owner: Owner<_, C> = Owner::try_with_release(value, release).unwrap();
        assert_eq!(panic_of(|| Owner::kill(owner)), PART);
        assert_eq!(drops(&dropped), 1);
    }
    let _alone = crate::alone();
    panics::<RefCount>();
    panics::<PercpuRef>();
}

/// Releases after critical sections panic: each panic is counted, and the other objects of the
/// batch are released.
#[test]
fn release_panics_after_sections() {
    fn panics<C: Count>() {
        let before = faults().panicked;
        let (first, first_dropped) = Value::new(true);
        let (second, second_dropped) = Value::new(true);
        let (last, last_dropped) = Value::new(false);
        rcu::read(|_| {
            drop(Owner::<_, C>::try_new(first).unwrap());
            drop(Owner::<_, C>::try_with_release(second, drop).unwrap());
            drop(Owner::<_, C>::try_new(last).unwrap());
        });
        assert_eq!([drops(&first_dropped), drops(&second_dropped), drops(&last_dropped)], [1, 1, 1]);
        assert_eq!(faults().panicked, before + 2);
    }
    let _alone = crate::alone();
    panics::<RefCount>();
    panics::<RcuRef>();
    panics::<PercpuRef>();
}

/// A critical section panics, and so does a release that waited for it: the panic of the section is
/// propagated.
#[test]
fn section_and_release_panic() {
    let _alone = crate::alone();
    let before = faults().panicked;
    let (value, dropped) = Value::new(true);
    let section = |_: &rcu::Guard| {
        drop(Owner::<_, RcuRef>::new(value));
        panic!("{PART}");
    };
    assert_eq!(panic_of(|| rcu::read(section)), PART);
    assert_eq!((drops(&dropped), faults().panicked), (1, before + 1));
    // The thread is in no section, so its next release happens at once.
    let (value, dropped) = Value::new(false);
    drop(Owner::<_, RefCount>::new(value));
    assert_eq!(drops(&dropped), 1);
}

/// A value in a cell is replaced, and the old value panics when it is released: the new value is in
/// the cell, and the panic is counted.
#[test]
fn release_of_a_replaced_object_panics() {
    fn panics<C: Count>() {
        let before = faults().panicked;
        let ((old, old_dropped), (new, new_dropped)) = (Value::new(true), Value::new(false));
        let cell: RcuCell<_, C> = RcuCell::new(Some(Owner::try_new(old).unwrap()));
        cell.store(Some(Owner::try_new(new).unwrap()));
        assert_eq!((drops(&old_dropped), drops(&new_dropped), faults().panicked), (1, 0, before + 1));
        assert!(rcu::read(|guard| Borrowed::try_get(cell.load(guard).unwrap()).is_ok()));
        drop(cell);
        assert_eq!(drops(&new_dropped), 1);
    }
    let _alone = crate::alone();
    panics::<RefCount>();
    panics::<RcuRef>();
    panics::<PercpuRef>();
}

/// A panic payload that panics when it is dropped.
struct Payload;

impl Drop for Payload {
    fn drop(&mut self) {
        panic!("{PART}, in a payload");
    }
}

/// Only the first fault of a kind in a process is an event, so this test starts a process of its
/// own. Although the subscriber panics at each event, counts stay correct, and a worker continues.
#[test]
fn subscribers_panic() {
    if is_emulated() {
        return skip("it is emulated, and the kernel does not start its program again");
    }
    const CHILD: &str = "NETMEM_TEST_SUBSCRIBERS_PANIC";
    if std::env::var_os(CHILD).is_none() {
        let this = std::env::current_exe().unwrap();
        let child = std::process::Command::new(this)
            .args(["--exact", "panics::subscribers_panic", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
        return;
    }
    // For all threads of this process.
    let panicking = on_event(tracing::Level::TRACE, |_| panic!("{PART}, in a subscriber"));
    tracing::dispatcher::set_global_default(tracing::Dispatch::new(panicking)).unwrap();

    // An overflow: the get succeeds, and the count is saturated.
    let refs = RefCount::new(i32::MAX.cast_unsigned());
    assert!(refs.try_get() && refs.is_saturated());
    assert_eq!((faults().saturated, faults().panicked), (1, 0));

    // One put too many, which is found when the count is killed. `confirm` is called nevertheless.
    let count = PercpuRef::new().unwrap();
    assert!(!count.put() && !count.put());
    let mut confirmed = false;
    assert!(!count.kill_and_confirm(|| confirmed = true).unwrap());
    assert!(confirmed);
    assert_eq!((faults().imbalanced, faults().panicked), (1, 0));

    // A job panics, and then the event about it panics. The thread runs the next job. The drop of
    // the payload panics, too.
    let worker = Worker::new("test").unwrap();
    let (tx, rx) = mpsc::channel();
    worker.defer(|| std::panic::panic_any(Payload));
    worker.defer(move || tx.send(thread::current().id()).unwrap());
    let ran_on = rx.recv().unwrap();
    assert_ne!(ran_on, thread::current().id(), "the worker's thread has ended");
    drop(worker);
    assert_eq!(faults().panicked, 1);

    // The other objects of the batch are released, too.
    let (first, _) = Value::new(true);
    let (second, dropped) = Value::new(false);
    rcu::read(|_| {
        drop(Owner::<_, RcuRef>::new(first));
        drop(Owner::<_, RcuRef>::new(second));
    });
    assert_eq!((drops(&dropped), faults().panicked), (1, 2));
}
