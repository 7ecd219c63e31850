//! The caches that threads have in front of an allocator, as Linux has per-CPU lists in front of a
//! zone. A thread has one cache for each zone that it uses.

use std::cell::RefCell;
use std::sync::{Arc, Weak};
use std::thread::LocalKey;

/// What a thread caches of one zone.
pub(crate) trait ThreadCache: Default + 'static {
    /// What the caches of all threads share.
    type Zone;

    /// This thread's caches.
    fn caches() -> &'static LocalKey<RefCell<Vec<Cached<Self>>>>;

    /// Returns everything to the zone.
    fn drain(&mut self, zone: &Self::Zone);
}

/// A cache with its zone. It ends when the thread ends, or when the thread next changes to another
/// zone after this zone was dropped.
pub(crate) struct Cached<C: ThreadCache> {
    /// The zone's address, which is not used again while `zone` refers to it.
    address: *const C::Zone,
    zone: Weak<C::Zone>,
    cache: C,
}

impl<C: ThreadCache> Cached<C> {
    fn new(zone: &Arc<C::Zone>) -> Self {
        Self { address: Arc::as_ptr(zone), zone: Arc::downgrade(zone), cache: C::default() }
    }
}

impl<C: ThreadCache> Drop for Cached<C> {
    fn drop(&mut self) {
        if let Some(zone) = self.zone.upgrade() {
            self.cache.drain(&zone);
        }
    }
}

/// Runs `f` with this thread's cache of `zone`. `None` if the thread is ending, because it then has
/// no cache.
#[inline]
pub(crate) fn with_cache<C: ThreadCache, R>(zone: &Arc<C::Zone>, f: impl FnOnce(&mut C) -> R) -> Option<R> {
    let found = C::caches().try_with(|caches| {
        let mut caches = caches.try_borrow_mut().ok()?;
        // The cache that was used last is in front, and usually the only one.
        let cached = match caches.first_mut() {
            Some(cached) if std::ptr::eq(cached.address, Arc::as_ptr(zone)) => cached,
            _ => find(&mut caches, zone),
        };
        Some(f(&mut cached.cache))
    });
    found.ok().flatten()
}

/// Moves the zone's cache to the front, and drops caches whose zone was dropped.
#[cold]
fn find<'c, C: ThreadCache>(caches: &'c mut Vec<Cached<C>>, zone: &Arc<C::Zone>) -> &'c mut Cached<C> {
    caches.retain(|cached| cached.zone.strong_count() > 0);
    match caches.iter().position(|cached| std::ptr::eq(cached.address, Arc::as_ptr(zone))) {
        Some(at) => caches.swap(0, at),
        None => caches.insert(0, Cached::new(zone)),
    }
    &mut caches[0]
}
