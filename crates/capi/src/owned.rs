//! Handles that belong to one thread: the first that uses them.
//!
//! With debug assertions, another thread's use is an error. The thread's number is compared before
//! any reference to the value is made: the thread that owns the handle may be using it.

use crate::handle::{self, Kind};
use crate::options::{self, Versioned};
use crate::status::Failure;
use std::sync::atomic::{AtomicU64, Ordering};

/// A kind of handles that belong to one thread.
pub(crate) trait Owned: Kind {}

/// A number that no other thread of the process has or had. Not 0.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static THIS: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    THIS.with(|this| *this)
}

/// The value of a handle that this thread owns from now on.
///
/// # Safety
///
/// As for [`handle::get_mut`]. With debug assertions other threads may call the functions of this
/// file for the handle.
#[inline]
pub(crate) unsafe fn get_mut<'a, K: Owned>(handle: *mut K) -> Result<&'a mut K::Value, Failure> {
    // SAFETY: as the caller promises.
    unsafe {
        own(handle)?;
        handle::get_mut(handle)
    }
}

/// [`get_mut`] for a function that calls another one if there is no value.
///
/// # Safety
///
/// As for [`get_mut`].
#[inline]
pub(crate) unsafe fn try_mut<'a, K: Owned>(handle: *mut K) -> Option<&'a mut K::Value> {
    // SAFETY: as the caller promises.
    unsafe { own(handle).ok().and_then(|()| handle::try_mut(handle)) }
}

/// Makes this thread the owner of the handle.
///
/// # Safety
///
/// As for [`get_mut`].
#[inline]
unsafe fn own<K: Owned>(handle: *mut K) -> Result<(), Failure> {
    if cfg!(debug_assertions) {
        // SAFETY: as the caller promises.
        let owner = unsafe { handle::owner(handle) }?;
        let this = this_thread();
        match owner.compare_exchange(0, this, Ordering::Relaxed, Ordering::Relaxed) {
            Err(other) if other != this => return Err(Failure::Thread(K::NAME)),
            _ => {}
        }
    }
    Ok(())
}

/// The value of a handle that this thread owns, or that no thread has used. It owns it no more
/// than before.
///
/// # Safety
///
/// As for [`handle::get`].
pub(crate) unsafe fn peek<'a, K: Owned>(handle: *const K) -> Result<&'a K::Value, Failure> {
    if cfg!(debug_assertions) {
        // SAFETY: as the caller promises.
        let owner = unsafe { handle::owner(handle) }?.load(Ordering::Relaxed);
        if owner != 0 && owner != this_thread() {
            return Err(Failure::Thread(K::NAME));
        }
    }
    // SAFETY: as the caller promises.
    unsafe { handle::get(handle) }
}

/// Closes a handle that this thread owns, or that no thread has used.
///
/// # Safety
///
/// As for [`handle::close`].
pub(crate) unsafe fn close<K: Owned>(handle: *mut K) -> Result<K::Value, Failure> {
    // SAFETY: as the caller promises.
    unsafe {
        own(handle)?;
        handle::close(handle)
    }
}

/// Closes such a handle, and writes the final counts that `end` returns, unless `stats` is null. If
/// that structure has a wrong size, the handle stays.
///
/// # Safety
///
/// As for [`close`] and [`options::write`].
pub(crate) unsafe fn close_counted<K: Owned, S: Versioned>(
    handle: *mut K,
    stats: *mut S,
    end: impl FnOnce(K::Value) -> S,
) -> Result<(), Failure> {
    if !stats.is_null() {
        // SAFETY: as the caller promises.
        unsafe { options::room(stats) }?;
    }
    // SAFETY: as the caller promises.
    let counts = end(unsafe { close(handle) }?);
    if stats.is_null() {
        return Ok(());
    }
    // SAFETY: as the caller promises.
    unsafe { options::write(stats, &counts) }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::thread;

    struct Number(());

    impl Kind for Number {
        type Value = u64;
        const NAME: &'static str = "number";
        const NUMBER: u64 = 1;
    }

    impl Owned for Number {}

    /// Of two threads that use a handle at once, one owns it, and the other has an error, also
    /// while the value is borrowed.
    #[test]
    fn one_of_two_threads_owns_a_handle() {
        let barrier = Barrier::new(2);
        for _ in 0..2000 {
            let ready = AtomicU64::new(0);
            let made = handle::create::<Number>(0).expose_provenance();
            let turn = || {
                // Closer together than a barrier wakes them.
                ready.fetch_add(1, Ordering::Relaxed);
                while ready.load(Ordering::Relaxed) < 2 {
                    thread::yield_now();
                }
                let handle = std::ptr::with_exposed_provenance_mut::<Number>(made);
                // SAFETY: created above, and closed below.
                match unsafe { get_mut(handle) } {
                    Ok(value) => {
                        *value += 1;
                        barrier.wait();
                        *value += 1;
                        barrier.wait();
                        // SAFETY: the other thread uses it no more.
                        Some(unsafe { close(handle) }.ok())
                    }
                    Err(error) => {
                        assert!(matches!(error, Failure::Thread("number")), "{error}");
                        barrier.wait();
                        // SAFETY: as above; another thread owns it.
                        assert!(unsafe { get_mut(handle).is_err() && peek(handle).is_err() && close(handle).is_err() });
                        barrier.wait();
                        None
                    }
                }
            };
            let (here, there) = thread::scope(|scope| {
                let other = scope.spawn(turn);
                (turn(), other.join().expect("no panic"))
            });
            let owners: Vec<_> = [here, there].into_iter().flatten().collect();
            assert_eq!(owners, [Some(2)]);
        }
    }

    #[test]
    fn a_closed_handle_is_found() {
        let made = handle::create::<Number>(7);
        // SAFETY: created above. With debug assertions its box stays.
        unsafe {
            assert_eq!(close(made).ok(), Some(7));
            assert!(matches!(close(made), Err(Failure::Handle(_))));
            assert!(matches!(get_mut(made), Err(Failure::Handle(_))));
        }
    }
}
