//! The atomics of the counts, in one place, so that loom can take their place.

#[cfg(loom)]
pub(crate) use loom::sync::Mutex;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::Mutex;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

/// Acquires what was released to a count, after an operation on it that did not.
#[inline]
pub(crate) fn acquire(at: &AtomicU32) {
    // The thread sanitizer does not know fences.
    if cfg!(tsan) {
        at.load(Ordering::Acquire);
    } else {
        fence(Ordering::Acquire);
    }
}

/// Puts a count back into the middle of its zone.
///
/// The store comes after the addition that found the count in the zone. An addition of another
/// thread that directly follows that addition comes before the store too, because nothing comes
/// between an addition's load and its store. Loom does not draw this conclusion: it lets such an
/// addition come after the store without having seen it. So a model uses an exchange, which loom
/// keeps in order.
pub(crate) fn put_back(at: &AtomicU32, value: u32) {
    #[cfg(not(loom))]
    at.store(value, Ordering::Relaxed);
    #[cfg(loom)]
    at.swap(value, Ordering::Relaxed);
}
