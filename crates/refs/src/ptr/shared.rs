//! The allocation that owners and references point to.
//!
//! ```text
//!   0        64                              
//!   ├────────┼──────────────────┬─────────┐   aligned to 64 bytes, or to what the value needs
//!   │ count  │ value            │ release │
//!   └────────┴──────────────────┴─────────┘
//!    every    read after a get   once, by
//!    get, put                    the last
//! ```

use super::count::{Count, Release};
use crate::own_line::{CACHE_LINE, OwnLine};
use std::mem::{needs_drop, offset_of};
use std::ptr::NonNull;

/// What becomes of the value, if it is not just dropped.
pub(super) type Callback<T> = Box<dyn FnOnce(T) + Send>;

/// The invariant: whoever has one of the count's references may use `count` and `value`; for an `RcuRef` also whoever
/// found this in a critical section, until that ends. Whoever puts the last one has it released, once.
#[repr(C)]
pub(super) struct Shared<T, C> {
    pub(super) count: OwnLine<C>,
    pub(super) value: T,
    callback: Option<Callback<T>>,
}

impl<T: Send + 'static, C: Count> Shared<T, C> {
    pub(super) fn allocate(value: T, mut count: C, callback: Option<Callback<T>>) -> NonNull<Self> {
        // The count's line has nothing else on it, here or in a neighbouring allocation.
        const {
            assert!(offset_of!(Self, count) == 0 && align_of::<Self>() >= CACHE_LINE);
            assert!(offset_of!(Self, value) >= CACHE_LINE && offset_of!(Self, value) >= size_of::<C>());
            assert!(size_of::<Self>().is_multiple_of(CACHE_LINE));
        }
        if !count.adopt() {
            tracing::error!("an object was given a count that was in use before: it will not be released");
        }
        NonNull::from(Box::leak(Box::new(Self { count: OwnLine::new(count), value, callback })))
    }
}

impl<T, C: Count> Shared<T, C> {
    /// Ends a reference.
    ///
    /// # Safety
    ///
    /// It is the caller's, who uses it no more.
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
        // SAFETY: as above.
        if unsafe { &(*this.as_ptr()).count }.kill() {
            // SAFETY: told so.
            unsafe { Self::finish(this) };
        }
    }

    /// # Safety
    ///
    /// The caller was told that its put was the last.
    #[cold]
    pub(super) unsafe fn finish(this: NonNull<Self>) {
        // SAFETY: nobody else writes it, ever.
        let prompt = needs_drop::<T>() || unsafe { &(*this.as_ptr()).callback }.is_some();
        // SAFETY: told once. Every cell that knew it had a reference, so none does any more. The value is `Send` and
        // `'static`, the callback `Send`: `allocate` asked for it.
        unsafe { C::release(this, prompt) };
    }
}

impl<T, C: Count> Release for Shared<T, C> {
    unsafe fn release(at: NonNull<Self>) {
        // SAFETY: from a box, and nobody else's.
        let mut this = unsafe { Box::from_raw(at.as_ptr()) };
        match this.callback.take() {
            None => drop(this),
            Some(callback) => {
                let value = this.value;
                callback(value);
            }
        }
    }
}
