//! Structures that grow: each begins with its size, as the caller was compiled with it.

use crate::status::Failure;
use std::ffi::{CStr, c_char};

/// A structure of the header that begins with `size_t size`, in which zeros stand for defaults.
///
/// # Safety
///
/// `repr(C)`, its first field is `size: usize`, and each pattern of bits is a value of it.
pub(crate) unsafe trait Versioned: Copy {
    const NAME: &'static str;
    /// The size of the structure's first version.
    const LEAST: usize;
}

/// Reads such a structure. A caller that was compiled with an older version has fewer fields: those
/// that are missing are zero. One that was compiled with a newer version may use no field that this
/// library does not know.
///
/// # Safety
///
/// `from` is null, or points to as many readable bytes as its first word says.
pub(crate) unsafe fn read<T: Versioned>(from: *const T) -> Result<T, Failure> {
    let most = size_of::<T>();
    if from.is_null() {
        return Err(Failure::Null(T::NAME));
    }
    // SAFETY: the first field is there.
    let size = unsafe { from.cast::<usize>().read() };
    // A page is more than any version will have: a size that was never set.
    if size < T::LEAST || size > 4096 {
        return Err(Failure::StructSize { name: T::NAME, size, least: T::LEAST, most });
    }
    // SAFETY: the caller promises `size` bytes.
    let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), size) };
    if let Some(at) = bytes.iter().skip(most).position(|&byte| byte != 0) {
        return Err(Failure::UnknownField { name: T::NAME, at: most + at });
    }
    // SAFETY: zeros are a value of it, as the trait promises.
    let mut options: T = unsafe { std::mem::zeroed() };
    let n = size.min(most);
    // SAFETY: `n` bytes are in both, and each pattern of bits is a value.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut options).cast::<u8>(), n) };
    Ok(options)
}

/// Writes a structure of statistics: as many bytes of it as the caller has room for.
///
/// # Safety
///
/// As for [`read`], and the bytes are writable.
pub(crate) unsafe fn write<T: Versioned>(to: *mut T, value: &T) -> Result<(), Failure> {
    // SAFETY: as the caller promises.
    let size = unsafe { room(to) }?.min(size_of::<T>());
    let at = size_of::<usize>();
    // SAFETY: `size` bytes are in both. The first field stays.
    unsafe {
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(value).cast::<u8>().add(at),
            to.cast::<u8>().add(at),
            size - at,
        )
    };
    Ok(())
}

/// How many bytes the caller has for the structure.
///
/// # Safety
///
/// As for [`write`].
pub(crate) unsafe fn room<T: Versioned>(to: *const T) -> Result<usize, Failure> {
    if to.is_null() {
        return Err(Failure::Null(T::NAME));
    }
    // SAFETY: the first field is there.
    let size = unsafe { to.cast::<usize>().read() };
    if size < T::LEAST || size > 4096 {
        return Err(Failure::StructSize { name: T::NAME, size, least: T::LEAST, most: size_of::<T>() });
    }
    Ok(size)
}

/// A name in the options; `or` if it is null.
///
/// # Safety
///
/// Null, or a string that ends with a zero byte.
pub(crate) unsafe fn name(from: *const c_char, or: &str) -> String {
    if from.is_null() {
        return or.to_owned();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}
