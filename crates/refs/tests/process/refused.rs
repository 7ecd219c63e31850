//! The kernel refuses the barrier of a kill, and permits it later. The objects
//! that wait are those of the process.

use netmem_percpu::{Mode, mode};
use netmem_refs::{KillError, Owner, PercpuRef, Ref, faults};
use netmem_testing::without_membarrier;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Proves REF-4: an object whose kill the kernel refused is released by the next kill that it
/// permits.
#[test]
fn a_refused_kill_is_tried_again() {
    if let Mode::Portable(_) = mode() {
        return println!("no barrier of the kernel is used in this mode");
    }
    let _alone = crate::alone();
    let before = faults().leaked;
    let released = Arc::new(AtomicU32::new(0));
    let object = || {
        let released = released.clone();
        Owner::<_, PercpuRef>::try_with_release(7, move |_| {
            released.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap()
    };
    let is_released = || released.load(Ordering::Relaxed);
    let mut many: Vec<_> = (0..100).map(|_| object()).collect();
    let held = object();
    let reference = Owner::get(&held);
    without_membarrier(|| {
        assert_eq!(Owner::into_inner(many.pop().unwrap()), None, "it is not killed");
        drop((many, held));
        // A kill that is refused tries nothing again.
        assert!(matches!(PercpuRef::new().unwrap().kill(), Err(KillError::Barrier(_))));
    });
    assert_eq!((is_released(), faults().leaked - before), (0, 101));
    assert!(Ref::try_get_live(&reference).is_ok(), "it is live");
    assert!(PercpuRef::new().unwrap().kill().unwrap());
    assert_eq!(is_released(), 100);
    assert!(Ref::try_get_live(&reference).is_err(), "it is killed");
    drop(reference);
    assert_eq!(is_released(), 101);
    // Nothing is left to try.
    assert!(PercpuRef::new().unwrap().kill().unwrap());
    assert_eq!((is_released(), faults().leaked - before), (101, 101));
}
