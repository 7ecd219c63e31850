//! The atomics, once: loom's in its models, the standard library's elsewhere.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex,
    atomic::{AtomicU32, AtomicU64, AtomicUsize},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex,
    atomic::{AtomicU32, AtomicU64, AtomicUsize},
};

pub(crate) use std::sync::atomic::Ordering;

/// Declares to the thread sanitizer, which sees neither assembly nor membarrier, which thread comes
/// after which: all that happened before [`handover::release`] of an address happened before a
/// later [`handover::acquire`] of it.
pub(crate) mod handover {
    #[cfg(tsan)]
    unsafe extern "C" {
        fn __tsan_acquire(addr: *mut std::ffi::c_void);
        fn __tsan_release(addr: *mut std::ffi::c_void);
    }

    #[inline(always)]
    pub(crate) fn release<T>(_at: &T) {
        #[cfg(tsan)]
        // SAFETY: takes any address, as a name.
        unsafe {
            __tsan_release(std::ptr::from_ref(_at).cast_mut().cast());
        }
    }

    #[inline(always)]
    pub(crate) fn acquire<T>(_at: &T) {
        #[cfg(tsan)]
        // SAFETY: as above.
        unsafe {
            __tsan_acquire(std::ptr::from_ref(_at).cast_mut().cast());
        }
    }
}
