//! A counted reference.

use super::shared::Shared;
use super::{Count, Dead, Owner};
use crate::{PercpuRef, ResurrectError};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;

/// A reference to an object of an [`Owner`](crate::Owner): cloning is a get, dropping a put.
///
/// Costs a pointer. Dropping the last one releases the object, as `Owner` describes.
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

    /// Gives up the pointer, not the reference.
    #[inline]
    pub(super) fn into_raw(self) -> NonNull<Shared<T, C>> {
        ManuallyDrop::new(self).shared
    }

    /// Another reference, if the object has not been killed: for new work, where `clone` is for work under way. Only
    /// `PercpuRef` remembers being killed.
    ///
    /// # Errors
    ///
    /// The owner is gone.
    #[inline]
    pub fn try_get_live(&self) -> Result<Self, Dead> {
        // SAFETY: our reference keeps it.
        unsafe { Self::got(self.shared, C::try_get_live) }
    }

    /// Whether both are references to the same object.
    pub fn ptr_eq(&self, other: &Self) -> bool {
        self.shared == other.shared
    }
}

impl<T> Ref<T, PercpuRef> {
    /// Whether the object has been killed.
    pub fn is_dying(&self) -> bool {
        // SAFETY: this reference keeps it.
        unsafe { &(*self.shared.as_ptr()).count }.is_dying()
    }

    /// Takes a killed object back to life, with a new owner.
    ///
    /// # Errors
    ///
    /// It is live, and has an owner.
    pub fn resurrect(&self) -> Result<Owner<T, PercpuRef>, ResurrectError> {
        // SAFETY: this reference keeps it.
        unsafe { &(*self.shared.as_ptr()).count }.resurrect()?;
        // SAFETY: the initial reference of the new life.
        Ok(unsafe { Owner::from_raw(self.shared) })
    }
}

impl<T, C: Count> Clone for Ref<T, C> {
    #[inline]
    fn clone(&self) -> Self {
        // SAFETY: our reference keeps it.
        unsafe { &(*self.shared.as_ptr()).count }.hold();
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
