//! Prefetches, in one place.

use crate::desc::Desc;
use std::ptr::NonNull;

/// Prefetches a page's descriptor. The thread does not wait for it.
#[inline(always)]
pub(crate) fn descriptor(desc: NonNull<Desc>) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(desc.as_ptr().cast_const().cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = desc;
}
