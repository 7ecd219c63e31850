//! The caches that threads have in front of an allocator, as Linux has per-CPU lists in front of a
//! zone. A thread has one cache for each zone that it uses.

use std::cell::RefCell;
use std::sync::{Arc, Weak};
use std::thread::LocalKey;

/// A thread's cache of one zone. Its drop returns what it holds: when the thread ends, or when the
/// thread next changes to another zone after this zone was dropped.
pub(crate) trait ThreadCache: Sized + 'static {
    /// What the caches of all threads share.
    type Zone;

    /// This thread's caches.
    fn caches() -> &'static LocalKey<RefCell<Vec<Self>>>;

    /// An empty cache.
    fn new(zone: &Arc<Self::Zone>) -> Self;

    /// The zone of this cache.
    fn zone(&self) -> &Weak<Self::Zone>;

    /// Runs `f` with this thread's cache of `zone`. `None` if the thread is ending, because it then
    /// has no cache.
    #[inline]
    fn with<R>(zone: &Arc<Self::Zone>, f: impl FnOnce(&mut Self) -> R) -> Option<R> {
        let found = Self::caches().try_with(|caches| {
            let mut caches = caches.try_borrow_mut().ok()?;
            // The cache that was used last is in front, and usually the only one.
            let cache = match caches.first_mut() {
                Some(cache) if cache.is_of(zone) => cache,
                _ => find(&mut caches, zone),
            };
            Some(f(cache))
        });
        found.ok().flatten()
    }

    /// Whether this is a cache of `zone`. The address of a zone is not used again while a cache
    /// refers to it.
    #[inline]
    fn is_of(&self, zone: &Arc<Self::Zone>) -> bool {
        std::ptr::eq(self.zone().as_ptr(), Arc::as_ptr(zone))
    }
}

/// Moves the zone's cache to the front, and drops caches whose zone was dropped.
#[cold]
fn find<'c, C: ThreadCache>(caches: &'c mut Vec<C>, zone: &Arc<C::Zone>) -> &'c mut C {
    caches.retain(|cache| cache.zone().strong_count() > 0);
    match caches.iter().position(|cache| cache.is_of(zone)) {
        Some(at) => caches.swap(0, at),
        None => caches.insert(0, C::new(zone)),
    }
    &mut caches[0]
}
