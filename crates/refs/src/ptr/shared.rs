//! The allocation that owners and references point to.
//!
//! ```text
//!   0        64
//!   ├────────┼──────────────────┬──────────┬─────────┐   aligned to 64 bytes, or to what the value needs
//!   │ count  │ value            │ callback │ in_cell │
//!   └────────┴──────────────────┴──────────┴─────────┘
//!    every    read after a get   once, at the release
//!    get, put
//! ```
//!
//! # When the object is released
//!
//! The last put decides:
//!
//! | at the last put | the release is |
//! | --- | --- |
//! | the object was never in a cell, the count is not an `RcuRef`, and the putting thread is in no critical section | now, by the putting thread |
//! | else | after every critical section that is open now, by the thread that leaves the last of them |
//!
//! **Readers against the last put.** A reader that finds an object in a cell holds no reference to it. Only its section
//! keeps the object. So an object that was ever in a cell is released after the sections, whatever its count. The reader
//! found the object before it was taken out of the cell, so the reader's section was open at the last put, or had ended.
//!
//! ```text
//!   reader                                     writer
//!   enters a section
//!   loads the object from the cell
//!                                              takes it out, kills it: the last put
//!                                              retires it (not: releases it)
//!   reads the value; try_get is refused
//!   leaves the section: releases the object
//! ```

use super::count::Count;
use crate::faults;
use crate::own_line::{CACHE_LINE, OwnLine};
use crate::percpu_ref::KillError;
use crate::rcu;
use crate::sync::{AtomicBool, Ordering};
use crate::unkilled;
use std::mem::{needs_drop, offset_of};
use std::ptr::NonNull;

/// The release callback, which gets the value if it is not just dropped.
pub(super) type Callback<T> = Box<dyn FnOnce(T) + Send>;

/// The invariant: a holder of a reference may use `count` and `value`. So may a reader that found the object in a cell,
/// until its section ends. The thread whose put was the last releases the object, or defers the release, once.
#[repr(C)]
pub(super) struct Shared<T, C> {
    pub(super) count: OwnLine<C>,
    pub(super) value: T,
    callback: Option<Callback<T>>,
    /// The object is or was in an `RcuCell`. Set by its owner, so before the owner's put; read after the last put.
    in_cell: AtomicBool,
}

impl<T: Send + 'static, C: Count> Shared<T, C> {
    pub(super) fn allocate(count: C, value: T, callback: Option<Callback<T>>) -> NonNull<Self> {
        // The count's line has nothing else on it, here or in a neighbouring allocation.
        const {
            assert!(offset_of!(Self, count) == 0 && align_of::<Self>() >= CACHE_LINE);
            assert!(offset_of!(Self, value) >= CACHE_LINE && offset_of!(Self, value) >= size_of::<C>());
            assert!(size_of::<Self>().is_multiple_of(CACHE_LINE));
        }
        let this = Self { count: OwnLine::new(count), value, callback, in_cell: AtomicBool::new(false) };
        NonNull::from(Box::leak(Box::new(this)))
    }
}

impl<T, C: Count> Shared<T, C> {
    /// Notes that readers can find the object: from now on it is released only after critical sections.
    ///
    /// # Safety
    ///
    /// The caller is the owner.
    pub(super) unsafe fn enters_cell(this: NonNull<Self>) {
        // SAFETY: the owner keeps it.
        unsafe { &(*this.as_ptr()).in_cell }.store(true, Ordering::Relaxed);
    }

    /// Ends a reference.
    ///
    /// # Safety
    ///
    /// It is the caller's, which does not use it after this call.
    #[inline]
    pub(super) unsafe fn put(this: NonNull<Self>) {
        // By pointer to the count alone: with the addition the rest may be gone.
        // SAFETY: the caller has a reference.
        if unsafe { &(*this.as_ptr()).count }.put() {
            // SAFETY: told so.
            unsafe { Self::finish(this) };
        }
    }

    /// Ends the initial reference.
    ///
    /// # Safety
    ///
    /// As for [`put`](Self::put); and it is the initial one.
    pub(super) unsafe fn kill(this: NonNull<Self>) {
        // SAFETY: the caller's.
        if let Err(KillError::Barrier(error)) = unsafe { Self::try_kill(this) } {
            faults::leaked(&error);
            // SAFETY: the initial reference is still held, and no owner has it. The value is `Send` and `'static`, the callback
            // `Send`: `allocate` asked for it.
            unsafe { unkilled::keep(this.cast(), |this| Self::try_kill(this.cast())) };
        }
    }

    /// Ends the initial reference, if the kernel lets it.
    ///
    /// # Safety
    ///
    /// As for [`kill`](Self::kill). If there is an error, the initial reference is still held.
    unsafe fn try_kill(this: NonNull<Self>) -> Result<(), KillError> {
        // SAFETY: as above.
        if unsafe { &(*this.as_ptr()).count }.try_kill()? {
            // SAFETY: told so.
            unsafe { Self::finish(this) };
        }
        Ok(())
    }

    /// Releases the object, now or after the critical sections.
    ///
    /// # Safety
    ///
    /// The caller was told that its put was the last.
    #[cold]
    pub(super) unsafe fn finish(this: NonNull<Self>) {
        // SAFETY: these two fields are not written after the last put.
        let (in_cell, callback) = unsafe { (&(*this.as_ptr()).in_cell, &(*this.as_ptr()).callback) };
        if !(C::LOOKED_AT_IN_SECTIONS || in_cell.load(Ordering::Relaxed) || rcu::in_section()) {
            // SAFETY: the last put, so there is no reference. No reader has found it in a cell.
            return unsafe { Self::release(this) };
        }
        // A release that the program can notice does not wait for other objects.
        let prompt = needs_drop::<T>() || callback.is_some();
        // SAFETY: told once. Every cell that had the object held its owner, so no cell has it any more. The value is `Send`
        // and `'static`, the callback `Send`: `allocate` asked for it.
        rcu::read(|guard| unsafe { guard.retire(this, Self::release_after_sections, prompt) });
    }

    /// Called where a thread leaves a critical section. A panic must not keep other objects from being released.
    unsafe fn release_after_sections(this: *mut Self, _: &rcu::Collector) {
        // SAFETY: never null: it was not when it was retired. All sections in which it can have been found have ended.
        faults::contain(|| unsafe { Self::release(NonNull::new_unchecked(this)) });
    }

    /// # Safety
    ///
    /// Nothing else uses `this`, now or later.
    unsafe fn release(this: NonNull<Self>) {
        // SAFETY: from a box, and nothing else uses it.
        let mut this = unsafe { Box::from_raw(this.as_ptr()) };
        match this.callback.take() {
            None => drop(this),
            Some(callback) => {
                let value = this.value;
                callback(value);
            }
        }
    }
}
