//! No lock stays taken in a forked child by a thread that the child does not have.
//!
//! ```text
//!   fork       before: takes the arena's lock     parent: leaves it     child: leaves it, and makes new locks for the portable version
//! ```
//! The portable version's locks are not taken before the fork: that would be a lock for each CPU. A thread that is missing in the
//! child has left its word as it was before its store or after it, as with a sequence, so that a new lock is as good.
//!
//! The handlers are registered without a lock, which a child would wait for as well. Two threads may therefore both register them:
//! the second call of each handler does nothing.

use crate::{arena, portable};
use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    /// The arena's lock, while this thread forks. Without a destructor: a thread may also fork while it ends.
    static TAKEN: Cell<Option<ManuallyDrop<arena::Lock>>> = const { Cell::new(None) };
}

/// Registers the handlers. Called before the first gate opens.
pub(crate) fn prepare() {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if REGISTERED.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: three functions of this object, which stays loaded, or is waited for by the C library.
    let failed = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    // Short of memory: a child may then hang over a lock, as it would without this.
    debug_assert_eq!(failed, 0);
    REGISTERED.store(true, Ordering::Relaxed);
}

extern "C" fn before() {
    let lock = TAKEN.take().unwrap_or_else(|| ManuallyDrop::new(arena::lock()));
    TAKEN.set(Some(lock));
}

extern "C" fn in_parent() {
    TAKEN.take().map(ManuallyDrop::into_inner);
}

extern "C" fn in_child() {
    if let Some(lock) = TAKEN.take() {
        drop(ManuallyDrop::into_inner(lock));
        portable::renew();
    }
}
