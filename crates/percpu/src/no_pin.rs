//! Stands in for the pin where no object with sequences is ever unloaded: in a static program, with
//! a C library that unloads nothing or registers no areas, and where there are no sequences.

use crate::mode::Index;
use std::sync::atomic::{AtomicIsize, Ordering};

/// Where a thread's area is, in bytes from the thread pointer, in a process that distinguishes CPUs
/// by that index. 0 in others. Written once, before the first gate is made.
static MM_CID: AtomicIsize = AtomicIsize::new(0);
static CPU_ID: AtomicIsize = AtomicIsize::new(0);

#[allow(dead_code, reason = "where there are no sequences")]
pub(crate) fn start(area: isize, index: Index) {
    let place = if index == Index::MmCid { &MM_CID } else { &CPU_ID };
    place.store(area, Ordering::Relaxed);
}

#[inline(always)]
#[allow(dead_code, reason = "as above")]
pub(crate) fn by_mm_cid() -> isize {
    MM_CID.load(Ordering::Relaxed)
}

#[inline(always)]
#[allow(dead_code, reason = "as above")]
pub(crate) fn by_cpu_id() -> isize {
    CPU_ID.load(Ordering::Relaxed)
}

pub(crate) fn all_pinned() -> bool {
    true
}

/// No constructor: a comment that has the operand in it, for an operand has to be used.
#[allow(unused_macros, reason = "where there are no sequences")]
macro_rules! constructor {
    () => {
        "/* {pin} */"
    };
}
#[allow(unused_imports, reason = "as above")]
pub(crate) use constructor;

#[allow(dead_code, reason = "as above")]
pub(crate) extern "C" fn pin() {}
