//! Prefetches of cache lines, in one place for all crates.
//!
//! Why: a line that another CPU wrote last costs 50 to 100 ns on a server part, and a program that
//! works on many objects in turn can request the next lines while it works on this one. A prefetch
//! is a hint: the thread does not wait for it, and any address is allowed.

/// Bytes that one prefetch covers.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Prefetches the cache line at `at`, for a load.
#[inline(always)]
pub fn to_read<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault, and changes no memory.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Prefetches the cache line at `at`, for a store: other CPUs lose it. A load alone would fetch the
/// line for reading, and a store would wait for it again.
#[inline(always)]
pub fn to_write<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault, and changes no memory. A processor that cannot prefetch
    // for writing ignores the instruction.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Prefetches all lines of `value`, for loads.
#[inline]
pub(crate) fn all_to_read<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..size_of::<T>().div_ceil(LINE) {
        to_read(std::ptr::from_ref(value).cast::<u8>().wrapping_add(line * LINE));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Prefetches all lines of `value`, for stores.
#[inline]
pub(crate) fn all_to_write<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..size_of::<T>().div_ceil(LINE) {
        to_write(std::ptr::from_ref(value).cast::<u8>().wrapping_add(line * LINE));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}
