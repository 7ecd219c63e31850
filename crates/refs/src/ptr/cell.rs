//! A place where readers find a counted object without a lock.

use super::shared::Shared;
use super::{Dead, Ref};
use crate::RcuRef;
use crate::rcu::Guard;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

/// An atomic place for an optional reference, which readers look up in a critical section.
///
/// The cell's reference keeps the object alive while it is there. Whoever takes it out may drop it at once: readers that
/// still have the object from the cell keep its memory, and the value in it, by their section, and a
/// [`try_get`](Borrowed::try_get) that comes too late is refused.
///
/// ```
/// use netmem_refs::{Owner, RcuCell, RcuRef, rcu};
///
/// let cell = RcuCell::new(Some(Owner::new(String::from("10.0.0.1"), RcuRef::new(1)).into_ref()));
/// let gateway = rcu::read(|guard| cell.load(guard).and_then(|found| found.try_get().ok()));
/// cell.store(None);
/// assert_eq!(gateway.as_deref(), Some(&String::from("10.0.0.1")));
/// ```
pub struct RcuCell<T> {
    /// Null, or a reference given up by `Ref::into_raw`.
    at: AtomicPtr<Shared<T, RcuRef>>,
    /// It owns, sends and shares what a `Ref` does.
    _owns: PhantomData<Ref<T, RcuRef>>,
}

fn into_raw<T>(reference: Option<Ref<T, RcuRef>>) -> *mut Shared<T, RcuRef> {
    reference.map_or(ptr::null_mut(), |r| r.into_raw().as_ptr())
}

impl<T> RcuCell<T> {
    /// A cell with that reference in it.
    pub fn new(reference: Option<Ref<T, RcuRef>>) -> Self {
        Self { at: AtomicPtr::new(into_raw(reference)), _owns: PhantomData }
    }

    /// What is in the cell, for as long as the critical section lasts. One load.
    #[inline]
    pub fn load<'g>(&self, guard: &'g Guard) -> Option<Borrowed<'g, T>> {
        NonNull::new(guard.protect(&self.at)).map(|shared| Borrowed { shared, _section: PhantomData })
    }

    /// Puts another reference in, and hands out the one that was there. One atomic exchange.
    pub fn swap(&self, reference: Option<Ref<T, RcuRef>>) -> Option<Ref<T, RcuRef>> {
        // Sequentially consistent, for it is part of what the collector orders: who enters after the old one was retired
        // does not find it.
        let old = NonNull::new(self.at.swap(into_raw(reference), Ordering::SeqCst));
        // SAFETY: the cell's, and with the exchange ours.
        old.map(|old| unsafe { Ref::from_raw(old) })
    }

    /// Puts another reference in, and drops the one that was there.
    pub fn store(&self, reference: Option<Ref<T, RcuRef>>) {
        drop(self.swap(reference));
    }

    /// Empties the cell.
    pub fn take(&self) -> Option<Ref<T, RcuRef>> {
        self.swap(None)
    }
}

impl<T> Default for RcuCell<T> {
    fn default() -> Self {
        Self::new(None)
    }
}

impl<T> Drop for RcuCell<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

impl<T> fmt::Debug for RcuCell<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RcuCell").finish_non_exhaustive()
    }
}

/// An object found in an [`RcuCell`], while the critical section lasts. It may be dead already; its value is there.
pub struct Borrowed<'g, T> {
    /// Found in the section of `'g`, so not released before that ends.
    shared: NonNull<Shared<T, RcuRef>>,
    _section: PhantomData<&'g T>,
}

// SAFETY: from it one gets `&T`, and a `Ref`. The section may be another thread's, which outlasts `'g`.
unsafe impl<T: Send + Sync> Send for Borrowed<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Borrowed<'_, T> {}

impl<'g, T> Borrowed<'g, T> {
    /// A reference that outlives the section. One atomic addition.
    ///
    /// # Errors
    ///
    /// The last reference was put meanwhile. Look it up again.
    #[inline]
    pub fn try_get(self) -> Result<Ref<T, RcuRef>, Dead> {
        // SAFETY: released after the section.
        unsafe { Ref::got(self.shared, RcuRef::add) }
    }

    /// The value, for as long as the section.
    #[inline]
    pub fn get(self) -> &'g T {
        // SAFETY: released after the section.
        unsafe { &(*self.shared.as_ptr()).value }
    }
}

impl<T> Clone for Borrowed<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Borrowed<'_, T> {}

impl<T> Deref for Borrowed<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.get()
    }
}

impl<T: fmt::Debug> fmt::Debug for Borrowed<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Borrowed").field(&**self).finish()
    }
}
