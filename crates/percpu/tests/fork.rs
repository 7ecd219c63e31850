//! Fork: one test to a process, so that no other thread holds a lock when it splits.

use netmem_percpu::Counter;

/// The child has a copy of the counts as they were; it counts, closes and makes counters of its own, and the parent does not
/// see it. A child is another address space, of which the barrier has to be asked for again where it is not inherited.
#[test]
fn a_fork_has_its_own_counts() {
    let counter = Counter::new().unwrap();
    counter.add(5).unwrap();
    // SAFETY: the child calls nothing that needs another thread, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let good = counter.add(2).is_ok()
            && counter.close().is_ok_and(|sum| sum == Some(7))
            && Counter::new().is_ok_and(|own| own.add(1).is_ok() && own.close().is_ok_and(|sum| sum == Some(1)));
        // SAFETY: ends the child, without what belongs to the parent.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    assert!(child > 0, "{}", std::io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: our own child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child counted wrongly");
    counter.add(1).unwrap();
    assert_eq!(counter.close().unwrap(), Some(6));
}
