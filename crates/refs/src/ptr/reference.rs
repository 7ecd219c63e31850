//! A counted reference.

use super::count::ExactCount;
use super::shared::{Shared, Unsize};
use super::{Count, Dead, Owner};
use crate::{PercpuRef, ResurrectError};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::{self, NonNull};

/// A reference to an object of an [`Owner`](crate::Owner): cloning is a get, which cannot fail,
/// dropping is a put.
///
/// Eight bytes, sixteen if `T` is unsized ([`unsize!`](crate::unsize)). Dropping the last reference
/// releases the object, as `Owner` describes.
///
/// **Functions instead of methods**, as with an `Arc`: `Ref::try_get_live(&r)`. So each method that
/// is called on a reference is the value's, but for `clone`.
#[must_use = "dropping it puts the reference"]
pub struct Ref<T: ?Sized, C: Count> {
    shared: NonNull<Shared<T, C>>,
    /// Invariant: see `shared.rs`.
    _owns: PhantomData<*mut T>,
}

// SAFETY: as for `Owner`.
unsafe impl<T: ?Sized + Send + Sync, C: Count> Send for Ref<T, C> {}
// SAFETY: as for `Owner`.
unsafe impl<T: ?Sized + Send + Sync, C: Count> Sync for Ref<T, C> {}

impl<T: ?Sized, C: Count> Ref<T, C> {
    /// # Safety
    ///
    /// `shared` is there.
    #[inline]
    pub(super) unsafe fn got(shared: NonNull<Shared<T, C>>, get: impl FnOnce(&C) -> bool) -> Result<Self, Dead> {
        // SAFETY: it is there.
        if get(unsafe { &(*shared.as_ptr()).head.count }) {
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

    /// Acquires another reference, if the object has not been killed: for new work, where `clone`
    /// is for work under way. Only `PercpuRef` remembers that it was killed; with the other counts
    /// this cannot fail.
    ///
    /// # Errors
    ///
    /// The object was killed: it has no owner any more.
    #[inline]
    pub fn try_get_live(this: &Self) -> Result<Self, Dead> {
        // SAFETY: the reference keeps it.
        unsafe { Self::got(this.shared, C::try_get_live) }
    }

    /// The number of references, the owner's included, for statistics: it may have changed before
    /// the call returns.
    ///
    /// With [`RefCount`](crate::RefCount) and [`RcuRef`](crate::RcuRef), and with a `PercpuRef`
    /// that was killed, it was right at one moment. With a live [`PercpuRef`] see
    /// [`PercpuRef::approximate_count`]. A saturated count returns more than 2^31 - 1.
    pub fn approximate_count(this: &Self) -> u64 {
        // SAFETY: the reference keeps it.
        unsafe { &(*this.shared.as_ptr()).head.count }.approximate_count()
    }

    /// Whether both are references to the same object.
    pub fn ptr_eq(this: &Self, other: &Self) -> bool {
        ptr::addr_eq(this.shared.as_ptr(), other.shared.as_ptr())
    }
}

impl<T, C: Count> Ref<T, C> {
    /// Puts the reference, and returns the value if it was the last. A release callback is then
    /// dropped, and not called. Of threads that each put a reference so, one gets the value.
    ///
    /// `None`, and the object is released as ever, also if it was ever in an
    /// [`RcuCell`](crate::RcuCell): readers may still be reading the value.
    pub fn into_inner(this: Self) -> Option<T> {
        let shared = ManuallyDrop::new(this).shared;
        // SAFETY: the reference is put here, once; and the value is taken if that put was
        // the last.
        unsafe {
            let last = (*shared.as_ptr()).head.count.put();
            if last { Shared::take(shared) } else { None }
        }
    }
}

impl<T: ?Sized, C: ExactCount> Ref<T, C> {
    /// The value, to write, if there is no other reference, the owner's included. One load. `None`
    /// also if the object was ever in an [`RcuCell`](crate::RcuCell): readers may still be reading
    /// the value.
    ///
    /// Not with a [`PercpuRef`]: while it is live, the number of its references is not known.
    pub fn get_mut(this: &mut Self) -> Option<&mut T> {
        // SAFETY: the reference is borrowed as long as the value.
        unsafe { Shared::alone(this.shared, C::is_one) }
    }
}

impl<T: ?Sized, C: Count> Unsize for Ref<T, C> {
    type Pointee = T;
    type To<U: ?Sized> = Ref<U, C>;

    unsafe fn unsize<U: ?Sized>(this: Self, coerce: impl FnOnce(*mut T) -> *mut U) -> Ref<U, C> {
        // SAFETY: the caller's promise; the reference goes on as the result.
        unsafe { Ref::from_raw(Shared::coerced(ManuallyDrop::new(this).shared, coerce)) }
    }
}

// As for `Owner`.
impl<T: ?Sized + RefUnwindSafe, C: Count> UnwindSafe for Ref<T, C> {}
impl<T: ?Sized + RefUnwindSafe, C: Count> RefUnwindSafe for Ref<T, C> {}

impl<T: ?Sized> Ref<T, PercpuRef> {
    /// Whether the object has been killed.
    pub fn is_dying(this: &Self) -> bool {
        // SAFETY: the reference keeps it.
        unsafe { &(*this.shared.as_ptr()).head.count }.is_dying()
    }

    /// Revives a killed object, with a new owner.
    ///
    /// # Errors
    ///
    /// It is live, and has an owner.
    pub fn resurrect(this: &Self) -> Result<Owner<T, PercpuRef>, ResurrectError> {
        // SAFETY: the reference keeps it.
        unsafe { &(*this.shared.as_ptr()).head.count }.resurrect()?;
        // SAFETY: the initial reference of the new life.
        Ok(unsafe { Owner::from_raw(this.shared) })
    }
}

impl<T: ?Sized, C: Count> Clone for Ref<T, C> {
    #[inline]
    fn clone(&self) -> Self {
        // SAFETY: our reference keeps it.
        unsafe { &(*self.shared.as_ptr()).head.count }.get();
        // SAFETY: just got.
        unsafe { Self::from_raw(self.shared) }
    }
}

impl<T: ?Sized, C: Count> Deref for Ref<T, C> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: our reference keeps it.
        unsafe { &(*self.shared.as_ptr()).value }
    }
}

impl<T: ?Sized, C: Count> Drop for Ref<T, C> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: ours.
        unsafe { Shared::put(self.shared) };
    }
}

impl<T: ?Sized + fmt::Debug, C: Count> fmt::Debug for Ref<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ref").field(&&**self).finish()
    }
}
