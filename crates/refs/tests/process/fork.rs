//! How the child of a fork may use each type. Each test forks while the process has other threads.

use netmem_refs::{Borrowed, Owner, PercpuRef, RcuCell, RcuRef, Ref, RefCount, Worker, rcu};
use netmem_testing::is_emulated;
use netmem_testing::skip;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

/// Runs `child` in a child process. Returns how the child ended: 0, 1 for a panic, or a signal. If
/// the child hangs, the alarm ends it.
fn in_child(child: impl FnOnce()) -> Result<i32, i32> {
    // SAFETY: the C library makes its own locks usable in the child; the test names which of Rust's
    // are held.
    match unsafe { libc::fork() } {
        -1 => panic!("no child: {}", std::io::Error::last_os_error()),
        0 => {
            // SAFETY: takes a number.
            unsafe { libc::alarm(60) };
            let ended = catch_unwind(AssertUnwindSafe(child));
            // SAFETY: ends the process, without the destructors that are the parent's.
            unsafe { libc::_exit(i32::from(ended.is_err())) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: `status` is ours.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            if libc::WIFEXITED(status) { Ok(libc::WEXITSTATUS(status)) } else { Err(libc::WTERMSIG(status)) }
        }
    }
}

/// QEMU 7.2 ends such a child with a failed assertion.
const NO_THREADS: &str = "it is emulated, and a forked child cannot start threads there";

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

fn drops(of: &Arc<AtomicU32>) -> u32 {
    of.load(Ordering::SeqCst)
}

/// Runs `enter` on another thread. `enter` calls its argument, which waits until this thread has
/// run `then`.
fn beside<R>(enter: impl FnOnce(&dyn Fn()) + Send, then: impl FnOnce() -> R) -> R {
    thread::scope(|scope| {
        let ((ready, is_ready), (end, ended)) = (mpsc::channel(), mpsc::channel::<()>());
        scope.spawn(move || {
            enter(&|| {
                ready.send(()).unwrap();
                ended.recv().unwrap_err();
            });
        });
        is_ready.recv().unwrap();
        let result = then();
        drop(end);
        result
    })
}

/// The child gets, puts, kills and resurrects its copy. A reference that another thread of the
/// parent held is never put there.
#[test]
fn percpu_ref() {
    let _alone = crate::alone();
    let ((mine, mine_dropped), (theirs, theirs_dropped)) = (Value::new(), Value::new());
    let mine: Owner<_, PercpuRef> = Owner::try_new(mine).unwrap();
    let theirs: Owner<_, PercpuRef> = Owner::try_new(theirs).unwrap();
    let r = Owner::get(&mine);
    let held = Owner::get(&theirs);
    let (mine, theirs, r) = (Mutex::new(Some(mine)), Mutex::new(Some(theirs)), Mutex::new(Some(r)));
    let of_parent = |wait: &dyn Fn()| {
        let _held: Ref<_, _> = held;
        wait();
    };
    let ended = beside(of_parent, || {
        in_child(|| {
            let (mine, r) = (mine.lock().unwrap().take().unwrap(), r.lock().unwrap().take().unwrap());
            let other = Owner::get(&mine);
            assert_eq!(Ref::approximate_count(&r), 3);
            Owner::kill(mine);
            assert!(Ref::try_get_live(&r).is_err());
            let again = Ref::resurrect(&r).unwrap();
            assert!(Ref::try_get_live(&r).is_ok());
            drop((other, again));
            assert_eq!(drops(&mine_dropped), 0);
            drop(r);
            assert_eq!(drops(&mine_dropped), 1);

            let theirs = theirs.lock().unwrap().take().unwrap();
            assert_eq!(Owner::approximate_count(&theirs), 2);
            drop(theirs);
            assert_eq!(drops(&theirs_dropped), 0);
            // The child also makes an object of its own.
            let (own, dropped) = Value::new();
            drop(Owner::<_, PercpuRef>::try_new(own).unwrap());
            assert_eq!(drops(&dropped), 1);
        })
    });
    assert_eq!(ended, Ok(0));
    // The parent's objects have not changed.
    assert_eq!((drops(&mine_dropped), drops(&theirs_dropped)), (0, 0));
    drop((mine, r, theirs));
    assert_eq!((drops(&mine_dropped), drops(&theirs_dropped)), (1, 1));
}

/// The child enters sections, and releases objects whose references it puts, if no other thread of
/// the parent was in a section.
#[test]
fn rcu_ref_and_cell() {
    if is_emulated() {
        return skip(NO_THREADS);
    }
    let _alone = crate::alone();
    let (value, dropped) = Value::new();
    let cell: RcuCell<_, RcuRef> = RcuCell::new(Some(Owner::new(value)));
    // This thread has entered a section before, and is in none now.
    let of_parent = |wait: &dyn Fn()| {
        rcu::read(|_| ());
        wait();
    };
    let ended = beside(of_parent, || {
        in_child(|| {
            let found = rcu::read(|guard| Borrowed::try_get(cell.load(guard).unwrap()).unwrap());
            let (new, new_dropped) = Value::new();
            cell.store(Some(Owner::new(new)));
            drop(found);
            assert_eq!((drops(&dropped), drops(&new_dropped)), (1, 0));
            cell.store(None);
            assert_eq!(drops(&new_dropped), 1);
            // A thread of the child.
            thread::scope(|scope| {
                scope.spawn(|| rcu::read(|guard| assert!(cell.load(guard).is_none()))).join().unwrap()
            });
        })
    });
    assert_eq!(ended, Ok(0));
    assert_eq!(drops(&dropped), 0);
}

/// A section that another thread had open at the fork stays open in the child: no deferred release
/// happens there, and nothing hangs. An immediate release happens at once.
#[test]
fn a_section_that_is_open_at_the_fork() {
    let _alone = crate::alone();
    let of_parent = |wait: &dyn Fn()| rcu::read(|_| wait());
    let ended = beside(of_parent, || {
        in_child(|| {
            let ((value, dropped), (at_once, at_once_dropped)) = (Value::new(), Value::new());
            let cell: RcuCell<_, RcuRef> = RcuCell::new(Some(Owner::new(value)));
            cell.store(None);
            rcu::flush();
            assert_eq!(drops(&dropped), 0);
            drop(Owner::<_, RefCount>::new(at_once));
            assert_eq!(drops(&at_once_dropped), 1);
        })
    });
    assert_eq!(ended, Ok(0));
}

/// The fork is inside a section, which continues in the child.
#[test]
fn a_section_around_the_fork() {
    if is_emulated() {
        return skip(NO_THREADS);
    }
    let _alone = crate::alone();
    let (value, dropped) = Value::new();
    let cell: RcuCell<_, PercpuRef> = RcuCell::new(Some(Owner::try_new(value).unwrap()));
    let ended = rcu::read(|guard| {
        let found = cell.load(guard).unwrap();
        in_child(|| {
            thread::scope(|scope| scope.spawn(|| cell.store(None)).join().unwrap());
            assert_eq!(drops(&dropped), 0, "the section is open here, too");
            assert_eq!(drops(&Borrowed::value(found).0), 0);
        })
    });
    assert_eq!(ended, Ok(0));
}

/// The worker's thread exists only in the parent, and so do its queued jobs. The child runs its
/// jobs itself, and dropping the worker does not wait.
#[test]
fn worker() {
    if is_emulated() {
        return skip(NO_THREADS);
    }
    let _alone = crate::alone();
    let worker = Mutex::new(Some(Worker::new("test").unwrap()));
    let (go, wait) = mpsc::channel::<()>();
    let queued = Arc::new(AtomicU32::new(0));
    if let Some(worker) = &*worker.lock().unwrap() {
        worker.defer(move || wait.recv().unwrap());
        let queued = queued.clone();
        worker.defer(move || _ = queued.fetch_add(1, Ordering::SeqCst));
    }
    let ended = in_child(|| {
        let worker = worker.lock().unwrap().take().unwrap();
        let (ran, on) = (Arc::new(AtomicU32::new(0)), thread::current().id());
        let told = ran.clone();
        worker.defer(move || {
            assert_eq!(thread::current().id(), on);
            told.fetch_add(1, Ordering::SeqCst);
        });
        worker.defer(|| panic!("this panic is part of the test"));
        assert_eq!(drops(&ran), 1);
        drop(worker);
        assert_eq!(drops(&queued), 0);
        // A worker of the child.
        let own = Worker::new("child").unwrap();
        let told = ran.clone();
        own.defer(move || {
            assert_ne!(thread::current().id(), on);
            told.fetch_add(1, Ordering::SeqCst);
        });
        drop(own);
        assert_eq!(drops(&ran), 2);
        // The same in a child of the child.
        let own = Worker::new("child").unwrap();
        assert_eq!(in_child(|| drop(own)), Ok(0));
    });
    assert_eq!(ended, Ok(0));
    go.send(()).unwrap();
    drop(worker);
    assert_eq!(drops(&queued), 1);
}
