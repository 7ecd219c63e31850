//! The owning pointer: when it is dropped, the object is killed.

use super::count::{ExactCount, InfallibleCount};
use super::shared::{Shared, Unsize};
use super::{Count, Ref};
use crate::{KillError, NoMemory, PercpuRef, faults};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;

/// The initial reference to a counted object. Dropping it kills the object; the last [`Ref`]
/// releases it.
///
/// One allocation holds the count, on a cache line of its own, and the value. The owner makes the
/// count: the type names it. [`new`](Self::new) is for [`RefCount`] and [`RcuRef`],
/// [`try_new`](Self::try_new) for all three, since making a [`PercpuRef`] can fail.
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
/// **Functions instead of methods**, as with an `Arc`: `Owner::get(&owner)`, `Owner::kill(owner)`.
/// So each method that is called on an owner is the value's: `owner.get(&key)` searches a map.
///
/// **The release** happens once. The thread that puts the last reference does it at once, as with
/// an `Arc`. In three cases it is deferred until every critical section of [`rcu`](crate::rcu) that
/// is open at the last put has ended: if the count is an [`RcuRef`], if the object was ever in an
/// [`RcuCell`](crate::RcuCell), and if the putting thread is in a section itself. Then the thread
/// that leaves the last of these sections does it, right after leaving. So a release never runs in
/// a critical section, and with no lock of this crate held. The value is dropped, or passed to a
/// callback; cleanup that may block should be handed to a [`Worker`](crate::Worker) from there.
///
/// **Panics.** If the drop of the value, or the callback, panics, the object's memory is freed
/// nevertheless. The panic reaches the thread that put the last reference; if the release was
/// deferred, it is counted in [`faults`](crate::faults()) instead.
///
/// **After a fork** the child has a copy of the object, whose count is as it was in the parent at
/// that moment. References that the parent's other threads held are never put in the child, so such
/// an object is not released there.
///
/// [`RefCount`]: crate::RefCount
/// [`RcuRef`]: crate::RcuRef
#[must_use = "dropping the owner kills the object"]
pub struct Owner<T: ?Sized, C: Count> {
    shared: NonNull<Shared<T, C>>,
    /// Invariant: see `shared.rs`.
    _owns: PhantomData<*mut T>,
}

// SAFETY: as for `Arc`: `&T` can be had on any thread that it or its references are sent to, and
// the last of them drops the value. Counts are `Send` and `Sync`.
unsafe impl<T: ?Sized + Send + Sync, C: Count> Send for Owner<T, C> {}
// SAFETY: as above: by reference one can get a `Ref`.
unsafe impl<T: ?Sized + Send + Sync, C: Count> Sync for Owner<T, C> {}

impl<T: Send + 'static, C: Count> Owner<T, C> {
    /// A counted object, for a count that can always be made. Allocates.
    pub fn new(value: T) -> Self
    where
        C: InfallibleCount,
    {
        // SAFETY: the reference of a new count is the owner's.
        unsafe { Self::from_raw(Shared::allocate(C::one(), value)) }
    }

    /// As [`new`](Self::new). When the object is released, the value is passed to `release`.
    /// Allocates twice.
    pub fn with_release(value: T, release: impl FnOnce(T) + Send + 'static) -> Self
    where
        C: InfallibleCount,
    {
        // SAFETY: the reference of a new count is the owner's.
        unsafe { Self::from_raw(Shared::with_callback(C::one(), value, release)) }
    }

    /// A counted object, for any count. Allocates.
    ///
    /// # Errors
    ///
    /// There is no memory for the count. The value is dropped.
    pub fn try_new(value: T) -> Result<Self, NoMemory> {
        let count = C::try_one()?;
        // SAFETY: the reference of a new count is the owner's.
        Ok(unsafe { Self::from_raw(Shared::allocate(count, value)) })
    }

    /// As [`try_new`](Self::try_new). When the object is released, the value is passed to
    /// `release`. Allocates twice.
    ///
    /// # Errors
    ///
    /// There is no memory for the count. The value is dropped, and `release` is not called.
    pub fn try_with_release(value: T, release: impl FnOnce(T) + Send + 'static) -> Result<Self, NoMemory> {
        let count = C::try_one()?;
        // SAFETY: the reference of a new count is the owner's.
        Ok(unsafe { Self::from_raw(Shared::with_callback(count, value, release)) })
    }
}

impl<T: ?Sized, C: Count> Owner<T, C> {
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

    /// Acquires a reference. It cannot fail: an object that has an owner is alive.
    #[inline]
    pub fn get(this: &Self) -> Ref<T, C> {
        // SAFETY: the owner keeps it.
        unsafe { &(*this.shared.as_ptr()).head.count }.get();
        // SAFETY: just got.
        unsafe { Ref::from_raw(this.shared) }
    }

    /// The number of references, the owner's included, for statistics. See
    /// [`Ref::approximate_count`].
    pub fn approximate_count(this: &Self) -> u64 {
        // SAFETY: the owner keeps it.
        unsafe { &(*this.shared.as_ptr()).head.count }.approximate_count()
    }

    /// Kills the object: puts the initial reference. If the count is a [`PercpuRef`],
    /// [`Ref::try_get_live`] fails from now on. The drop of the owner does the same.
    pub fn kill(this: Self) {
        drop(this);
    }
}

impl<T, C: Count> Owner<T, C> {
    /// Kills the object, and returns the value if the owner's reference was the last. A release
    /// callback is then dropped, and not called. Otherwise the last [`Ref`] releases the object, or
    /// moves the value out: [`Ref::into_inner`].
    ///
    /// `None`, and the object is released as ever, also if it was ever in an
    /// [`RcuCell`](crate::RcuCell): readers may still be reading the value.
    pub fn into_inner(this: Self) -> Option<T> {
        let shared = Self::into_raw(this);
        // SAFETY: the owner's reference is put here, once.
        unsafe { Shared::kill_and_take(shared) }
    }
}

impl<T: ?Sized, C: ExactCount> Owner<T, C> {
    /// The value, to write, if there is no other reference. See [`Ref::get_mut`].
    pub fn get_mut(this: &mut Self) -> Option<&mut T> {
        // SAFETY: the owner's reference; the owner is borrowed as long as the value.
        unsafe { Shared::alone(this.shared, C::is_one) }
    }
}

impl<T: ?Sized, C: Count> Unsize for Owner<T, C> {
    type Pointee = T;
    type To<U: ?Sized> = Owner<U, C>;

    unsafe fn unsize<U: ?Sized>(this: Self, coerce: impl FnOnce(*mut T) -> *mut U) -> Owner<U, C> {
        // SAFETY: the caller's promise; the owner's reference goes on as that of the result.
        unsafe { Owner::from_raw(Shared::coerced(Self::into_raw(this), coerce)) }
    }
}

// As for an `Arc`. The pointer lends `&T`, and a value that is `RefUnwindSafe` is whole behind it
// after a panic. The count is: each change of it is one atomic operation, and no user code runs
// under its lock. The callback is reached by its call alone.
impl<T: ?Sized + RefUnwindSafe, C: Count> UnwindSafe for Owner<T, C> {}
impl<T: ?Sized + RefUnwindSafe, C: Count> RefUnwindSafe for Owner<T, C> {}

impl<T: ?Sized> Owner<T, PercpuRef> {
    /// Kills the object, and calls `confirm` as soon as no [`Ref::try_get_live`] can succeed any
    /// more, before the initial reference is put.
    ///
    /// If `confirm` panics, the object is killed nevertheless. The initial reference is put, which
    /// releases the object if it was the last; then the panic goes on. If that release panics, too,
    /// its panic is counted in [`faults`](crate::faults()).
    ///
    /// # Errors
    ///
    /// The kernel refuses the barrier. The owner is handed back, and the object is live as before.
    /// `confirm` was not called.
    pub fn kill_and_confirm(this: Self, confirm: impl FnOnce()) -> Result<(), (Self, KillError)> {
        let this = ManuallyDrop::new(this);
        let mut confirmed = Ok(());
        // SAFETY: the owner keeps it until the count is killed, and the object is finished if that
        // was told to be the last.
        let killed = unsafe { &(*this.shared.as_ptr()).head.count }
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

impl<T: ?Sized, C: Count> Deref for Owner<T, C> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the owner keeps it.
        unsafe { &(*self.shared.as_ptr()).value }
    }
}

impl<T: ?Sized, C: Count> Drop for Owner<T, C> {
    fn drop(&mut self) {
        // SAFETY: ours, and the initial one.
        unsafe { Shared::kill(self.shared) };
    }
}

impl<T: ?Sized + fmt::Debug, C: Count> fmt::Debug for Owner<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owner").field(&&**self).finish()
    }
}
