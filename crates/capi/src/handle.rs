//! Handles: boxes whose first word says which handle they are.
//!
//! C knows a handle as a pointer to an incomplete type. With debug assertions, a handle that is
//! closed leaves its box behind, without a value, so that each later use is found. That leaks the
//! box. Without them its memory is freed.
//!
//! With debug assertions, a thread that may not use a handle reads the first two words, which are
//! atomic, while the thread that owns the handle uses the value. So no reference is made to the
//! whole box, and none to the value before the words were checked.

use crate::status::Failure;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// A handle of the header: a type that is never made, only pointed to.
pub(crate) trait Kind {
    /// What is behind the pointer.
    type Value;
    /// The handle's name in the header.
    const NAME: &'static str;
    /// Not the number of another kind, and not [`CLOSED`].
    const NUMBER: u64;
}

/// The number of a handle that was closed.
const CLOSED: u64 = 0;

/// A handle's value, behind the number of its kind, and the number of the thread that owns it.
#[repr(C)]
struct Handle<T> {
    number: AtomicU64,
    /// 0: none.
    owner: AtomicU64,
    /// There until the handle is closed.
    value: ManuallyDrop<T>,
}

/// A handle that C owns until it is closed.
pub(crate) fn create<K: Kind>(value: K::Value) -> *mut K {
    let (number, owner) = (AtomicU64::new(K::NUMBER), AtomicU64::new(0));
    Box::into_raw(Box::new(Handle { number, owner, value: ManuallyDrop::new(value) })).cast()
}

fn check<K: Kind>(handle: *mut K) -> Result<NonNull<Handle<K::Value>>, Failure> {
    let handle = NonNull::new(handle.cast::<Handle<K::Value>>()).ok_or_else(|| Failure::null(K::NAME))?;
    if cfg!(debug_assertions) {
        // SAFETY: each handle that was ever created begins with its number, and with debug
        // assertions none is freed.
        let is_ours = handle.is_aligned() && unsafe { number(handle) }.load(Ordering::Relaxed) == K::NUMBER;
        if !is_ours {
            return Err(Failure::handle(K::NAME));
        }
    }
    Ok(handle)
}

/// # Safety
///
/// A handle that was created by this library, and not freed during `'a`.
unsafe fn number<'a, T>(handle: NonNull<Handle<T>>) -> &'a AtomicU64 {
    // SAFETY: as the caller promises; no unique reference to this word is ever made.
    unsafe { &(*handle.as_ptr()).number }
}

/// The number of the thread that owns the handle, or 0. For builds with debug assertions.
///
/// # Safety
///
/// As for [`get`].
pub(crate) unsafe fn owner<'a, K: Kind>(handle: *const K) -> Result<&'a AtomicU64, Failure> {
    let handle = check(handle.cast_mut())?;
    // SAFETY: it is such a handle; no unique reference to this word is ever made.
    Ok(unsafe { &(*handle.as_ptr()).owner })
}

/// # Safety
///
/// Null, or a handle that was created by this library. Without debug assertions: of this kind, and
/// not closed. It is not closed, or borrowed uniquely, during `'a`.
#[inline]
pub(crate) unsafe fn get<'a, K: Kind>(handle: *const K) -> Result<&'a K::Value, Failure> {
    let handle = check(handle.cast_mut())?;
    // SAFETY: as the caller promises; the value is there until the handle is closed.
    Ok(unsafe { &*(&raw const (*handle.as_ptr()).value).cast() })
}

/// # Safety
///
/// As for [`get`], and nothing else uses the value during `'a`.
#[inline]
pub(crate) unsafe fn get_mut<'a, K: Kind>(handle: *mut K) -> Result<&'a mut K::Value, Failure> {
    let handle = check(handle)?;
    // SAFETY: as the caller promises; the value is there until the handle is closed.
    Ok(unsafe { &mut *(&raw mut (*handle.as_ptr()).value).cast() })
}

/// [`get_mut`] for a function that calls another one if there is no value: it makes no error.
///
/// # Safety
///
/// As for [`get_mut`].
#[inline]
pub(crate) unsafe fn try_mut<'a, K: Kind>(handle: *mut K) -> Option<&'a mut K::Value> {
    if cfg!(debug_assertions) {
        // SAFETY: as the caller promises.
        return unsafe { get_mut(handle) }.ok();
    }
    let handle = NonNull::new(handle.cast::<Handle<K::Value>>())?;
    // SAFETY: as in `get_mut`.
    Some(unsafe { &mut *(&raw mut (*handle.as_ptr()).value).cast() })
}

/// Closes a handle, and returns its value.
///
/// # Safety
///
/// As for [`get_mut`]; without debug assertions, no call uses the handle afterwards.
pub(crate) unsafe fn close<K: Kind>(handle: *mut K) -> Result<K::Value, Failure> {
    let handle = check(handle)?;
    if cfg!(debug_assertions) {
        // SAFETY: it is such a handle.
        let number = unsafe { number(handle) };
        // Of two threads that close it, one has an error.
        if number.compare_exchange(K::NUMBER, CLOSED, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return Err(Failure::handle(K::NAME));
        }
        // SAFETY: the value is there, and the number says from now on that it is not.
        return Ok(unsafe { (&raw const (*handle.as_ptr()).value).cast::<K::Value>().read() });
    }
    // SAFETY: it came from a box, and this is its end.
    let handle = unsafe { Box::from_raw(handle.as_ptr()) };
    Ok(ManuallyDrop::into_inner(handle.value))
}
