//! The owning pointer: when it is dropped, the object is killed.

use super::count::InfallibleCount;
use super::shared::Shared;
use super::{Count, Ref};
use crate::{KillError, NoMemory, PercpuRef, faults};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;

/// The initial reference to a counted object. Dropping it kills the object; the last [`Ref`] releases it.
///
/// One allocation holds the count, on a cache line of its own, and the value. The owner makes the count: which one is said
/// by the type. [`new`](Self::new) is for [`RefCount`] and [`RcuRef`], [`try_new`](Self::try_new) for all three, since making
/// a [`PercpuRef`] can fail.
///
/// ```
/// use netmem_refs::{Owner, PercpuRef, RefCount};
///
/// fn send(binding: &Owner<Vec<u8>, PercpuRef>) -> usize {
///     let r = Owner::get(binding); // while there is an owner, the object is alive
///     r.len() // and the reference is put
/// }
///
/// let binding = Owner::try_new(vec![0; 64])?;
/// assert_eq!(send(&binding), 64);
/// let file: Owner<_, RefCount> = Owner::new(String::from("log"));
/// assert_eq!(file.len(), 3);
/// # Ok::<(), netmem_refs::NoMemory>(())
/// ```
///
/// **Functions instead of methods**, as with an `Arc`: `Owner::get(&owner)`, `Owner::kill(owner)`. So
/// each method that is called on an owner is the value's: `owner.get(&key)` looks up in a map.
///
/// **The release** happens once. The thread that puts the last reference does it at once, as with an `Arc`. In three cases it
/// is deferred until every critical section of [`rcu`](crate::rcu) that is open at the last put has ended: if the count is an
/// [`RcuRef`], if the object was ever in an [`RcuCell`](crate::RcuCell), and if the putting thread is in a section itself. Then
/// the thread that leaves the last of these sections does it, right after leaving. So a release never runs in a critical
/// section, and with no lock of this crate held. The value is dropped, or given to a callback; cleanup that may block should
/// be handed to a [`Worker`](crate::Worker) from there.
///
/// **Panics.** If the drop of the value, or the callback, panics, the object's memory is freed nevertheless. The panic reaches
/// the thread that put the last reference; if the release was deferred, it is counted in [`faults`](crate::faults()) instead.
///
/// **After a fork** the child has a copy of the object, whose count is as it was in the parent at that moment. References that
/// the parent's other threads held are never put in the child, so such an object is not released there.
///
/// [`RefCount`]: crate::RefCount
/// [`RcuRef`]: crate::RcuRef
#[must_use = "dropping the owner kills the object"]
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
    /// A counted object, for a count that can always be made. Allocates.
    pub fn new(value: T) -> Self
    where
        C: InfallibleCount,
    {
        // SAFETY: the reference of a new count is the owner's.
        unsafe { Self::from_raw(Shared::allocate(C::one(), value, None)) }
    }

    /// As [`new`](Self::new). When the object is released, the value is given to `release`. Allocates twice.
    pub fn with_release(value: T, release: impl FnOnce(T) + Send + 'static) -> Self
    where
        C: InfallibleCount,
    {
        // SAFETY: the reference of a new count is the owner's.
        unsafe { Self::from_raw(Shared::allocate(C::one(), value, Some(Box::new(release)))) }
    }

    /// A counted object, for any count. Allocates.
    ///
    /// # Errors
    ///
    /// There is no memory for the count. The value is dropped.
    pub fn try_new(value: T) -> Result<Self, NoMemory> {
        let count = C::try_one()?;
        // SAFETY: the reference of a new count is the owner's.
        Ok(unsafe { Self::from_raw(Shared::allocate(count, value, None)) })
    }

    /// As [`try_new`](Self::try_new). When the object is released, the value is given to `release`. Allocates twice.
    ///
    /// # Errors
    ///
    /// There is no memory for the count. The value is dropped, and `release` is not called.
    pub fn try_with_release(value: T, release: impl FnOnce(T) + Send + 'static) -> Result<Self, NoMemory> {
        let count = C::try_one()?;
        // SAFETY: the reference of a new count is the owner's.
        Ok(unsafe { Self::from_raw(Shared::allocate(count, value, Some(Box::new(release)))) })
    }
}

impl<T, C: Count> Owner<T, C> {
    /// # Safety
    ///
    /// `shared` has an initial reference, which is the caller's.
    pub(super) unsafe fn from_raw(shared: NonNull<Shared<T, C>>) -> Self {
        Self { shared, _owns: PhantomData }
    }

    /// Gives up the pointer, not the initial reference.
    pub(super) fn into_raw(this: Self) -> NonNull<Shared<T, C>> {
        ManuallyDrop::new(this).shared
    }

    /// Takes a reference. It cannot fail: an object that has an owner is alive.
    #[inline]
    pub fn get(this: &Self) -> Ref<T, C> {
        // SAFETY: the owner keeps it.
        unsafe { &(*this.shared.as_ptr()).count }.get();
        // SAFETY: just got.
        unsafe { Ref::from_raw(this.shared) }
    }

    /// The number of references, the owner's included, for statistics. See [`Ref::approximate_count`].
    pub fn approximate_count(this: &Self) -> u64 {
        // SAFETY: the owner keeps it.
        unsafe { &(*this.shared.as_ptr()).count }.approximate_count()
    }

    /// Kills the object: puts the initial reference. If the count is a [`PercpuRef`], [`Ref::try_get_live`] fails from now on.
    /// The drop of the owner does the same.
    pub fn kill(this: Self) {
        drop(this);
    }
}

impl<T> Owner<T, PercpuRef> {
    /// Kills the object, and calls `confirm` as soon as no [`Ref::try_get_live`] can succeed any more, before the initial
    /// reference is put.
    ///
    /// If `confirm` panics, the object is killed nevertheless. The initial reference is put, which releases the object if it
    /// was the last; then the panic goes on. If that release panics, too, its panic is counted in
    /// [`faults`](crate::faults()).
    ///
    /// # Errors
    ///
    /// The kernel refuses the barrier. The owner is handed back, and the object is live as before. `confirm` was not called.
    pub fn kill_and_confirm(this: Self, confirm: impl FnOnce()) -> Result<(), (Self, KillError)> {
        let this = ManuallyDrop::new(this);
        let mut confirmed = Ok(());
        // SAFETY: the owner keeps it until the count is killed, and the object is finished if that was told to be the last.
        let killed = unsafe { &(*this.shared.as_ptr()).count }
            .kill_and_confirm(|| confirmed = catch_unwind(AssertUnwindSafe(confirm)));
        // SAFETY: only called if the kill returned that it was the last.
        let finish = || unsafe { Shared::finish(this.shared) };
        match (killed, confirmed) {
            (Ok(true), Ok(())) => finish(),
            (Ok(true), Err(panic)) => {
                faults::contain(finish);
                resume_unwind(panic);
            }
            (Ok(false), Ok(())) => (),
            (Ok(false), Err(panic)) => resume_unwind(panic),
            (Err(e), _) => return Err((ManuallyDrop::into_inner(this), e)),
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
