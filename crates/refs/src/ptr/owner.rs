//! The pointer that an object's life hangs on.

use super::shared::Shared;
use super::{Count, Dead, Ref};
use crate::{KillError, PercpuRef, RcuRef};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;

/// The initial reference to a counted object; dropping it kills the object, and the last [`Ref`] releases it.
///
/// One allocation holds the count, on a cache line of its own, and the value.
///
/// **The release** happens once, by whoever puts the last reference, or kills when there is none: with [`RefCount`] and
/// [`PercpuRef`] there and then, like an `Arc`'s, unless the caller is in a critical section; if it is, and always with
/// [`RcuRef`], after a grace period, by whoever leaves the last critical section that was open, right after leaving it; so
/// never in one, the caller's own included. No lock of this crate is held. The value is dropped, or given to a callback; cleanup
/// that may block should be handed to a [`Worker`](crate::Worker) from there. A panic in it reaches the caller, or after a
/// grace period is counted in [`faults`](crate::faults()).
///
/// ```
/// use netmem_refs::{Dead, Owner, RefCount};
///
/// fn send(binding: &Owner<Vec<u8>, RefCount>) -> Result<usize, Dead> {
///     let r = binding.try_get()?;
///     Ok(r.len()) // and the reference is put
/// }
///
/// let binding = Owner::new(vec![0; 64], RefCount::new(1));
/// assert_eq!(send(&binding), Ok(64));
/// ```
///
/// [`RefCount`]: crate::RefCount
pub struct Owner<T, C: Count> {
    shared: NonNull<Shared<T, C>>,
    /// For drop check and variance.
    _owns: PhantomData<Shared<T, C>>,
}

// SAFETY: as for `Arc`: it gives `&T` to any thread that it or its references are sent to, and the last of them drops the
// value. Counts are `Send` and `Sync`.
unsafe impl<T: Send + Sync, C: Count> Send for Owner<T, C> {}
// SAFETY: as above: by reference one can get a `Ref`.
unsafe impl<T: Send + Sync, C: Count> Sync for Owner<T, C> {}

impl<T: Send + 'static, C: Count> Owner<T, C> {
    /// A counted object. `count` is fresh and has one reference, which becomes the owner's. An object with any other is leaked:
    /// used as usual, and never released, which is an error event. Allocates.
    pub fn new(value: T, count: C) -> Self {
        Self { shared: Shared::allocate(value, count, None), _owns: PhantomData }
    }

    /// The same, and at the end of its life the value is given to `release`, once. Allocates twice.
    pub fn with_release(value: T, count: C, release: impl FnOnce(T) + Send + 'static) -> Self {
        Self { shared: Shared::allocate(value, count, Some(Box::new(release))), _owns: PhantomData }
    }
}

impl<T, C: Count> Owner<T, C> {
    /// # Safety
    ///
    /// `shared` has an initial reference, which is the caller's.
    pub(super) unsafe fn from_raw(shared: NonNull<Shared<T, C>>) -> Self {
        Self { shared, _owns: PhantomData }
    }

    /// A reference of one's own.
    ///
    /// # Errors
    ///
    /// None while there is an owner, but of a count that could not be adopted.
    #[inline]
    pub fn try_get(&self) -> Result<Ref<T, C>, Dead> {
        // SAFETY: the owner keeps the memory.
        unsafe { Ref::got(self.shared, C::try_get) }
    }

    /// Drops the initial reference. A count that remembers it refuses [`Ref::try_get_live`] from now on. What dropping the
    /// owner does, with a name.
    pub fn kill(self) {}
}

impl<T> Owner<T, RcuRef> {
    /// The owner as an ordinary reference, for an object that nobody kills, such as one in an [`RcuCell`](crate::RcuCell):
    /// it lives until the last reference is put.
    pub fn into_ref(self) -> Ref<T, RcuRef> {
        // SAFETY: the initial reference, which this count cannot tell from another.
        unsafe { Ref::from_raw(ManuallyDrop::new(self).shared) }
    }
}

impl<T> Owner<T, PercpuRef> {
    /// Kills the object, and calls `confirm` as soon as no [`Ref::try_get_live`] can succeed any more, before the initial
    /// reference goes.
    ///
    /// # Errors
    ///
    /// The kernel refuses the barrier; the owner comes back, and the object is live as before.
    pub fn kill_and_confirm(self, confirm: impl FnOnce()) -> Result<(), (Self, KillError)> {
        let this = ManuallyDrop::new(self);
        // SAFETY: the owner keeps it until the count is killed, and the object is finished if that was told to be the last.
        match unsafe { &(*this.shared.as_ptr()).count }.kill_and_confirm(confirm) {
            // SAFETY: told so.
            Ok(true) => unsafe { Shared::finish(this.shared) },
            Ok(false) => (),
            Err(e) => return Err((ManuallyDrop::into_inner(this), e)),
        }
        Ok(())
    }
}

impl<T, C: Count> Deref for Owner<T, C> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the owner keeps it.
        unsafe { &(*self.shared.as_ptr()).value }
    }
}

impl<T, C: Count> Drop for Owner<T, C> {
    fn drop(&mut self) {
        // SAFETY: ours, and the initial one.
        unsafe { Shared::kill(self.shared) };
    }
}

impl<T: fmt::Debug, C: Count> fmt::Debug for Owner<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owner").field(&**self).finish()
    }
}
