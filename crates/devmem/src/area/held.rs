//! How often each page of an area was delivered and not returned yet.
//!
//! ```text
//!   summary   1 0 0 1 ...                     a bit for 1024 pages: 1 if a count may be above 0
//!             │     └───────────────┐
//!   counts    │ 4 KiB │ - │ - │ 4 KiB │ ...   the kernel's zero page, until a count is written
//! ```
//!
//! Any queue's thread delivers, so a count is changed by atomic operations. Memory becomes resident
//! only when it is written. A return reads a count before it exchanges it, so an invented offset
//! makes no memory resident. Bits are set and read relaxed: the reader is the end of the area, and
//! either it sees a delivery's bit, or the delivery sees that the area is closed.

use crate::tokens::DeliverError;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The number of counts that share a bit of the summary: 4 KiB of counts.
const PART: usize = 1024;

/// The counts of the pages of an area.
///
/// Invariants: if a count is not 0, the bit of its part is set. `at` is the first of `len` counts,
/// in `bytes` bytes that `new` mapped and `drop` unmaps.
pub(super) struct HeldCounts {
    at: NonNull<AtomicU32>,
    len: usize,
    bytes: usize,
    summary: Box<[AtomicU64]>,
}

// SAFETY: the counts are atomics, in memory that this value owns.
unsafe impl Send for HeldCounts {}
// SAFETY: as above.
unsafe impl Sync for HeldCounts {}

impl HeldCounts {
    /// Maps a count for each of `pages` pages. It is mapped and not allocated, because an allocator
    /// may write zeros to all of it.
    pub(super) fn new(pages: u32) -> Result<Self, DeliverError> {
        let len = pages as usize;
        let bytes = len.max(1) * size_of::<AtomicU32>();
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: maps new memory, at an address that the kernel chooses.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, flags) };
        let at =
            mapped.ok().and_then(|at| NonNull::new(at.cast::<AtomicU32>())).ok_or(DeliverError::NoMemory { bytes })?;
        // With huge pages, writing the first count would make 2 MiB resident. A kernel without huge
        // pages refuses this advice.
        // SAFETY: the memory is our own, and this is only advice.
        let _ = unsafe { madvise(at.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) };
        let words = len.div_ceil(PART).div_ceil(64);
        Ok(Self { at, len, bytes, summary: (0..words).map(|_| AtomicU64::new(0)).collect() })
    }

    fn all(&self) -> &[AtomicU32] {
        // SAFETY: there are `len` counts (the invariant), zero bytes at first.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    /// Adds one to the count of page `index`.
    pub(super) fn add_one(&self, index: u32) {
        let part = index as usize / PART;
        let (word, bit) = (&self.summary[part / 64], 1 << (part % 64));
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        // The addition does not overflow: each unit is a reference to the page, and the page's own
        // count is no wider. Release: publishes what was done with the page before.
        self.all()[index as usize].fetch_add(1, Ordering::Release);
    }

    /// Decrements the count of page `index`. Returns false if the count is 0.
    pub(super) fn take_one(&self, index: u32) -> bool {
        let count = &self.all()[index as usize];
        // The count is read first: an exchange that fails writes nevertheless, and would make the
        // page of zeros resident.
        let mut held = count.load(Ordering::Relaxed);
        while held > 0 {
            // Acquire: everything that was done with the page before it was delivered happens
            // before the put.
            match count.compare_exchange_weak(held, held - 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => held = now,
            }
        }
        false
    }

    /// Calls `f` with the index and the count of each page whose count is above 0. Reads 1024
    /// counts for each part in which a count was ever used, and one word of the summary for each
    /// 65,536 pages.
    pub(super) fn each(&self, mut f: impl FnMut(u32, u32)) {
        for (at, word) in self.summary.iter().enumerate() {
            let mut bits = word.load(Ordering::Relaxed);
            while bits != 0 {
                let first = (64 * at + bits.trailing_zeros() as usize) * PART;
                for (index, count) in self.all().iter().enumerate().skip(first).take(PART) {
                    let n = count.load(Ordering::Relaxed);
                    if n > 0 {
                        f(index as u32, n);
                    }
                }
                bits &= bits - 1;
            }
        }
    }
}

impl Drop for HeldCounts {
    fn drop(&mut self) {
        // SAFETY: `new` mapped this memory, and nothing uses it any more.
        let unmapped = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
