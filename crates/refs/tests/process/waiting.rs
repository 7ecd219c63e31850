//! What waits for critical sections: objects that are released together, and a reader that stays.
//! The tests run one at a time, because a section of another test would delay the releases here.

use netmem_refs::rcu::{self, Batching};
use netmem_refs::{Count, Owner, RcuCell, RcuRef, RefCount};
use netmem_testing::{fields, on_event};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(1_000_000);

/// Retires an object whose release counts.
fn retire(released: &Arc<AtomicU32>) {
    let to = released.clone();
    drop(Owner::<_, RcuRef>::with_release((), move |()| _ = to.fetch_add(1, Ordering::SeqCst)));
}

fn released(of: &Arc<AtomicU32>) -> u32 {
    of.load(Ordering::SeqCst)
}

/// Proves REF-3. Without being asked, each object is released at once. Batches are released by
/// number, by age, by `flush`, and when the thread ends.
#[test]
fn batches_by_number_and_age() {
    let _alone = crate::alone();
    let n = Arc::new(AtomicU32::new(0));
    retire(&n);
    assert_eq!(released(&n), 1);

    rcu::set_batching(Batching { objects: 4, age: LONG });
    for _ in 0..3 {
        retire(&n);
    }
    assert_eq!(released(&n), 1);
    retire(&n);
    assert_eq!(released(&n), 5);
    retire(&n);
    assert_eq!(released(&n), 5);
    rcu::flush();
    assert_eq!(released(&n), 6);

    // More than fit in a batch.
    rcu::set_batching(Batching { objects: u32::MAX, age: LONG });
    for _ in 0..30 {
        retire(&n);
    }
    assert_eq!(released(&n), 6);
    retire(&n);
    assert_eq!(released(&n), 37);

    // Another setting does not leave an object behind.
    retire(&n);
    rcu::set_batching(Batching { objects: 31, age: Duration::ZERO });
    assert_eq!(released(&n), 38);
    retire(&n);
    assert_eq!(released(&n), 39);

    // It is the thread's own, and the thread's end lets its objects go.
    let of_thread = n.clone();
    thread::spawn(move || {
        retire(&of_thread);
        assert_eq!(released(&of_thread), 40);
        rcu::set_batching(Batching { objects: 31, age: LONG });
        retire(&of_thread);
        assert_eq!(released(&of_thread), 40);
    })
    .join()
    .unwrap();
    assert_eq!(released(&n), 41);
    rcu::set_batching(Batching::default());
}

/// A reader that stays is reported once, by the threads whose objects wait for it. Proves REF-3.
#[test]
fn a_reader_that_stays_is_reported_once() {
    fn replace<C: Count>(times: u32) {
        let cell = RcuCell::<_, C>::empty();
        for n in 0..=times {
            cell.store(Owner::try_new(n.to_string()).ok());
        }
    }
    let _alone = crate::alone();
    // Warnings with an age.
    let warnings = Arc::new(AtomicU32::new(0));
    let counted = warnings.clone();
    let subscriber = on_event(tracing::Level::WARN, move |event| {
        let ages = fields(event).iter().filter(|(name, _)| *name == "age").count();
        counted.fetch_add(u32::try_from(ages).unwrap(), Ordering::SeqCst);
    });
    tracing::dispatcher::set_global_default(tracing::Dispatch::new(subscriber)).unwrap();
    let reported = || warnings.load(Ordering::SeqCst);

    rcu::report_stalls_after(Duration::ZERO);
    replace::<RefCount>(10);
    assert_eq!((reported(), rcu::stalled()), (0, None));

    let ((entered, has_entered), (leave, may_leave)) = (mpsc::channel(), mpsc::channel::<()>());
    let reader = thread::spawn(move || {
        rcu::read(|_| {
            entered.send(()).unwrap();
            may_leave.recv().unwrap();
        });
    });
    has_entered.recv().unwrap();
    rcu::report_stalls_after(LONG);
    replace::<RefCount>(10);
    assert!(rcu::stalled().is_some());
    assert_eq!(reported(), 0);
    rcu::report_stalls_after(Duration::ZERO);
    replace::<RefCount>(10);
    assert_eq!(reported(), 1);
    replace::<RcuRef>(10);
    rcu::flush();
    assert_eq!(reported(), 1);

    leave.send(()).unwrap();
    reader.join().unwrap();
    assert_eq!(rcu::stalled(), None);
}
