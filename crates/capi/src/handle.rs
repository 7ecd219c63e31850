//! Handles: boxes whose first word says which handle they are.
//!
//! C knows a handle as a pointer to an incomplete type. With debug assertions, a handle that is
//! closed leaves its box behind, without a value, so that each later use is found. That leaks the
//! box. Without them its memory is freed.

use crate::status::Failure;
use std::ptr::NonNull;

/// A handle of the header: a type that is never made, only pointed to.
pub(crate) trait Kind {
    /// What is behind the pointer.
    type Value;
    /// The handle's name in the header.
    const NAME: &'static str;
    /// Not the number of another kind.
    const NUMBER: u64;
}

/// A handle's value, behind the number of its kind.
#[repr(C)]
struct Handle<T> {
    number: u64,
    value: Option<T>,
}

/// A handle that C owns until it is closed.
pub(crate) fn create<K: Kind>(value: K::Value) -> *mut K {
    Box::into_raw(Box::new(Handle { number: K::NUMBER, value: Some(value) })).cast()
}

fn check<K: Kind>(handle: *mut K) -> Result<NonNull<Handle<K::Value>>, Failure> {
    let handle = NonNull::new(handle).ok_or_else(|| Failure::null(K::NAME))?;
    // SAFETY: each handle that was ever created begins with its number, and with debug assertions
    // none is freed.
    if cfg!(debug_assertions) && unsafe { handle.cast::<u64>().read_unaligned() } != K::NUMBER {
        return Err(Failure::Handle(K::NAME));
    }
    Ok(handle.cast())
}

/// # Safety
///
/// Null, or a handle that was created by this library. Without debug assertions: of this kind, and
/// not closed. It is not closed, or borrowed uniquely, during `'a`.
#[inline]
pub(crate) unsafe fn get<'a, K: Kind>(handle: *const K) -> Result<&'a K::Value, Failure> {
    let handle = check(handle.cast_mut())?;
    // SAFETY: as the caller promises.
    unsafe { handle.as_ref() }.value.as_ref().ok_or_else(|| Failure::handle(K::NAME))
}

/// # Safety
///
/// As for [`get`], and nothing else uses the handle during `'a`.
#[inline]
pub(crate) unsafe fn get_mut<'a, K: Kind>(handle: *mut K) -> Result<&'a mut K::Value, Failure> {
    let mut handle = check(handle)?;
    // SAFETY: as the caller promises.
    unsafe { handle.as_mut() }.value.as_mut().ok_or_else(|| Failure::handle(K::NAME))
}

/// Closes a handle, and returns its value.
///
/// # Safety
///
/// As for [`get_mut`]; without debug assertions, no call uses the handle afterwards.
pub(crate) unsafe fn close<K: Kind>(handle: *mut K) -> Result<K::Value, Failure> {
    let mut handle = check(handle)?;
    // SAFETY: as the caller promises.
    let value = unsafe { handle.as_mut() }.value.take().ok_or_else(|| Failure::handle(K::NAME))?;
    if !cfg!(debug_assertions) {
        // SAFETY: it came from a box, and this is its end.
        drop(unsafe { Box::from_raw(handle.as_ptr()) });
    }
    Ok(value)
}
