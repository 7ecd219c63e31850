//! A counted reference.

use super::shared::Shared;
use super::{Count, Dead, Owner};
use crate::{PercpuRef, ResurrectError};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::NonNull;

/// A reference to an object of an [`Owner`](crate::Owner): cloning is a get, which cannot fail, dropping is a put.
///
/// Eight bytes. Dropping the last reference releases the object, as `Owner` describes.
///
/// **Functions instead of methods**, as with an `Arc`: `Ref::try_get_live(&r)`. So each method that is
/// called on a reference is the value's, but for `clone`.
#[must_use = "dropping it puts the reference"]
pub struct Ref<T, C: Count> {
    shared: NonNull<Shared<T, C>>,
    /// For drop check and variance.
    _owns: PhantomData<Shared<T, C>>,
}

// SAFETY: as for `Owner`.
unsafe impl<T: Send + Sync, C: Count> Send for Ref<T, C> {}
// SAFETY: as for `Owner`.
unsafe impl<T: Send + Sync, C: Count> Sync for Ref<T, C> {}

impl<T, C: Count> Ref<T, C> {
    /// # Safety
    ///
    /// `shared` is there.
    #[inline]
    pub(super) unsafe fn got(shared: NonNull<Shared<T, C>>, get: impl FnOnce(&C) -> bool) -> Result<Self, Dead> {
        // SAFETY: it is there.
        if get(unsafe { &(*shared.as_ptr()).count }) {
            // SAFETY: just got.
            return Ok(unsafe { Self::from_raw(shared) });
        }
        Err(Dead)
    }

    /// # Safety
    ///
    /// A reference of `shared` is the caller's, and becomes this one.
    #[inline]
    pub(super) unsafe fn from_raw(shared: NonNull<Shared<T, C>>) -> Self {
        Self { shared, _owns: PhantomData }
    }

    /// Takes another reference, if the object has not been killed: for new work, where `clone` is for work under way. Only
    /// `PercpuRef` remembers that it was killed; with the other counts this cannot fail.
    ///
    /// # Errors
    ///
    /// The object was killed: it has no owner any more.
    #[inline]
    pub fn try_get_live(this: &Self) -> Result<Self, Dead> {
        // SAFETY: the reference keeps it.
        unsafe { Self::got(this.shared, C::try_get_live) }
    }

    /// The number of references, the owner's included, for statistics: it may have changed before the call returns.
    ///
    /// With [`RefCount`](crate::RefCount) and [`RcuRef`](crate::RcuRef), and with a `PercpuRef` that was killed, it was right at
    /// one moment. With a live [`PercpuRef`] see [`PercpuRef::approximate_count`]. A saturated count gives more than 2^31 - 1.
    pub fn approximate_count(this: &Self) -> u64 {
        // SAFETY: the reference keeps it.
        unsafe { &(*this.shared.as_ptr()).count }.approximate_count()
    }

    /// Whether both are references to the same object.
    pub fn ptr_eq(this: &Self, other: &Self) -> bool {
        this.shared == other.shared
    }
}

impl<T> Ref<T, PercpuRef> {
    /// Whether the object has been killed.
    pub fn is_dying(this: &Self) -> bool {
        // SAFETY: the reference keeps it.
        unsafe { &(*this.shared.as_ptr()).count }.is_dying()
    }

    /// Takes a killed object back to life, with a new owner.
    ///
    /// # Errors
    ///
    /// It is live, and has an owner.
    pub fn resurrect(this: &Self) -> Result<Owner<T, PercpuRef>, ResurrectError> {
        // SAFETY: the reference keeps it.
        unsafe { &(*this.shared.as_ptr()).count }.resurrect()?;
        // SAFETY: the initial reference of the new life.
        Ok(unsafe { Owner::from_raw(this.shared) })
    }
}

impl<T, C: Count> Clone for Ref<T, C> {
    #[inline]
    fn clone(&self) -> Self {
        // SAFETY: our reference keeps it.
        unsafe { &(*self.shared.as_ptr()).count }.get();
        // SAFETY: just got.
        unsafe { Self::from_raw(self.shared) }
    }
}

impl<T, C: Count> Deref for Ref<T, C> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: our reference keeps it.
        unsafe { &(*self.shared.as_ptr()).value }
    }
}

impl<T, C: Count> Drop for Ref<T, C> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: ours.
        unsafe { Shared::put(self.shared) };
    }
}

impl<T: fmt::Debug, C: Count> fmt::Debug for Ref<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ref").field(&**self).finish()
    }
}
