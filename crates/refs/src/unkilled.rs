//! Objects that have lost their owner and are not killed, because the kernel refused the barrier:
//! usually because of a seccomp filter of the thread that dropped the owner. Such an object is
//! live, and the initial reference is kept here. The next kill that succeeds, of any `PercpuRef`,
//! tries again: the filter may be another thread's, or the kernel was short of memory at that
//! moment.
//!
//! A thread removes an object from the list before it kills it, so that one thread kills it, and no
//! lock is held while user code runs. If the kernel refuses again, the object is put back.
//!
//! **Fork**: if another thread of the parent had the lock, or was trying again, at that moment, the
//! child's kills try nothing again, and an owner that the child drops while the kernel refuses
//! leaks its object.

use crate::percpu_ref::KillError;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

/// Kills an object.
type Kill = unsafe fn(NonNull<()>) -> Result<(), KillError>;

struct Unkilled {
    object: NonNull<()>,
    kill: Kill,
}

// SAFETY: any thread may kill it: `keep` asked for that.
unsafe impl Send for Unkilled {}

static UNKILLED: Mutex<Vec<Unkilled>> = Mutex::new(Vec::new());
/// How many there are, so that a kill reads one word in a process where the kernel never refused.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The list, unless another thread has it.
fn list() -> Option<MutexGuard<'static, Vec<Unkilled>>> {
    match UNKILLED.try_lock() {
        Ok(list) => Some(list),
        // Nothing that the lock guards can be half done.
        Err(TryLockError::Poisoned(list)) => Some(list.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Keeps an object until [`retry`] has killed it.
///
/// # Safety
///
/// `kill` may be called with the object, on any thread, at any later time, until it has succeeded
/// once.
#[cold]
pub(crate) unsafe fn keep(object: NonNull<()>, kill: Kill) {
    put(Unkilled { object, kill });
}

fn put(unkilled: Unkilled) {
    /// Other threads have the lock for a push or a pop. After a fork, a thread that the child does
    /// not have may have it.
    const ATTEMPTS: usize = 10_000;
    for _ in 0..ATTEMPTS {
        if let Some(mut list) = list() {
            list.push(unkilled);
            COUNT.store(list.len(), Ordering::Relaxed);
            return;
        }
        std::thread::yield_now();
    }
}

/// Kills the objects that are kept, until the kernel refuses one. Called after a kill for which the
/// kernel did not. A panic in the release of an object is counted in [`faults`](crate::faults()).
#[inline]
pub(crate) fn retry() {
    if COUNT.load(Ordering::Relaxed) != 0 {
        kill_all();
    }
}

#[cold]
#[inline(never)]
fn kill_all() {
    /// A thread is in this function: the kills that follow are its own, or those of other threads,
    /// which it does the work for.
    static BUSY: AtomicBool = AtomicBool::new(false);
    if BUSY.swap(true, Ordering::Acquire) {
        return;
    }
    let next = || {
        let mut list = list()?;
        let next = list.pop();
        COUNT.store(list.len(), Ordering::Relaxed);
        next
    };
    while let Some(unkilled) = next() {
        let mut killed = Ok(());
        // SAFETY: `keep`'s caller guarantees it, and this thread has taken it off the list.
        crate::faults::contain(|| killed = unsafe { (unkilled.kill)(unkilled.object) });
        if killed.is_err() {
            put(unkilled);
            break;
        }
    }
    BUSY.store(false, Ordering::Release);
}
