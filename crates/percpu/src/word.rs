//! The layout of a slot: where a CPU's word is, and which bit of a gate keeps sequences out.
//!
//! Why apart from the gate: the sequences and the arena need the layout, and the gate needs both.

use crate::sync::{AtomicUsize, Ordering};

/// The bit that keeps sequences out.
pub(crate) const CLOSED_BIT: usize = 1;

/// The distance from one CPU's word of a slot to the next CPU's, in bytes. It is a page, so that
/// the words of a CPU are on separate cache lines, and on the NUMA node of the CPU that touches
/// them first.
#[cfg(not(loom))]
pub(crate) const STRIDE: usize = 1 << STRIDE_SHIFT;
/// Its logarithm, for the assembly.
#[cfg_attr(loom, allow(dead_code))]
pub(crate) const STRIDE_SHIFT: usize = 12;
#[cfg(loom)]
pub(crate) const STRIDE: usize = size_of::<AtomicUsize>();

/// `cpu`'s word of `slot`.
///
/// # Safety
///
/// `slot` comes from the arena and is not freed while the reference lives; `cpu` is below
/// [`areas`](crate::cpus::areas).
pub(crate) unsafe fn word<'a>(slot: usize, cpu: usize) -> &'a AtomicUsize {
    // SAFETY: the caller's; the arena has exposed its memory.
    unsafe { &*std::ptr::with_exposed_provenance::<AtomicUsize>(slot + cpu * STRIDE) }
}

/// Makes a word zero, and leaves a page that its CPU never touched untouched.
pub(crate) fn clear(word: &AtomicUsize) {
    if word.load(Ordering::Relaxed) != 0 {
        word.store(0, Ordering::Relaxed);
    }
}
