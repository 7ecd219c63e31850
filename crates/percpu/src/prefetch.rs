//! Fetching a line before it is written.

/// Has the cache line at `at` come to this CPU, and to no other, for an atomic operation that will follow: while several are
/// on their way their times overlap, which atomic operations do not. An instruction; does not fault, whatever the address.
#[inline(always)]
pub fn prefetch_write<T>(at: *const T) {
    #[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
    // SAFETY: a hint. Processors without it take it for nothing.
    unsafe {
        std::arch::asm!("prefetchw [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom), not(miri))))]
    let _ = at;
}
