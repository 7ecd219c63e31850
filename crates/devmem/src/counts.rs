//! How often each page of a binding has been delivered and not come back: a number for each, in one array.
//!
//! ```text
//!   summary   1 0 0 1 ...                      a bit for 1024 pages: their counts may be other than 0
//!             │     └───────────────┐
//!   counts    │ 4 KiB │ - │ - │ 4 KiB │ ...    zeros of the kernel's, which become memory when they are written
//! ```
//!
//! A return reads a count before it exchanges it, and memory becomes resident only when it is written: a made-up token takes no
//! memory. Bits are set and read relaxed: the reader is the last handle or an area's end, and comes after all that set them.

use crate::error::DeliverError;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use std::ptr::NonNull;

/// How often a page has been delivered and not come back.
#[derive(Default)]
#[repr(transparent)]
pub(crate) struct Count(AtomicU32);

impl Count {
    /// The page is delivered `n` times more.
    #[inline]
    pub(crate) fn give(&self, n: u32) {
        // Does not overflow: each is a reference to the page, of which there are fewer. Release: what the receiver did with
        // the page before.
        self.0.fetch_add(n, Ordering::Release);
    }

    /// Takes one, unless there is none.
    #[inline]
    pub(crate) fn take_one(&self) -> bool {
        // A look first: an exchange that fails writes all the same, and makes memory of zeros.
        let mut held = self.0.load(Ordering::Relaxed);
        while held > 0 {
            // Acquire: what the receiver did with the page before it delivered it.
            match self.0.compare_exchange_weak(held, held - 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => held = now,
            }
        }
        false
    }
}

/// Counts that have a bit in the summary: 4 KiB of them.
const PART: usize = if cfg!(loom) { 1 } else { 1024 };

/// Words of the summary, on a line of their own: they are read all the time, and hardly ever written.
#[repr(align(64))]
struct Line([AtomicU64; 8]);

/// The counts of a binding's pages on one socket.
///
/// Invariant: a count that is not 0 is in a part whose bit is set.
pub(crate) struct Counts {
    memory: Memory,
    summary: Box<[Line]>,
}

impl Counts {
    /// A count for each of so many pages. Those of a socket's bindings should have numbers of their own, modulo 64: else they begin
    /// at the same place of a page, and those of bindings that take turns are in one set of the first-level cache.
    pub(crate) fn new(pages: u32, number: usize) -> Result<Self, DeliverError> {
        let lines = (pages as usize).div_ceil(PART).div_ceil(64 * 8);
        let summary = (0..lines).map(|_| Line(std::array::from_fn(|_| AtomicU64::new(0)))).collect();
        Ok(Self { memory: Memory::new(pages as usize, number % 64)?, summary })
    }

    /// Where they are.
    pub(crate) fn base(&self) -> Base {
        Base { counts: NonNull::from(self.memory.all()).cast(), summary: NonNull::from(&self.summary[..]).cast() }
    }

    /// Calls `f` with the number of each part whose bit is set.
    fn each_part(&self, mut f: impl FnMut(usize)) {
        for (at, word) in self.summary.iter().flat_map(|line| &line.0).enumerate() {
            let mut bits = word.load(Ordering::Relaxed);
            while bits != 0 {
                f(64 * at + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }

    /// All that is held: a page and how often, for each. Costs a look at 1024 counts for each of them that was ever used, and at
    /// a word for 65,536 others.
    pub(crate) fn held(&self, mut f: impl FnMut(u32, u32)) {
        self.each_part(|part| {
            for (index, count) in self.memory.all().iter().enumerate().skip(part * PART).take(PART) {
                let n = count.0.load(Ordering::Relaxed);
                if n > 0 {
                    f(index as u32, n);
                }
            }
        });
    }

    /// Bytes of counts that were ever used, in parts.
    pub(crate) fn bytes(&self) -> usize {
        let parts =
            self.summary.iter().flat_map(|line| &line.0).map(|word| word.load(Ordering::Relaxed).count_ones() as usize);
        parts.sum::<usize>() * PART * size_of::<u32>()
    }
}

/// Where counts are, for who knows how many, and that they stay.
#[derive(Clone, Copy)]
pub(crate) struct Base {
    counts: NonNull<Count>,
    summary: NonNull<Line>,
}

// SAFETY: addresses of atomics; each method that follows them says why they are still valid.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

impl Base {
    /// Has the line of page `index`'s count come here to be written. The other side wrote it last, and atomic operations wait one
    /// for the other: so that the lines of a batch come together, they are asked for before the first of them.
    #[inline]
    pub(crate) fn prefetch(self, index: u32) {
        let count = self.counts.as_ptr().wrapping_add(index as usize);
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        // SAFETY: a hint, and no access; processors without this instruction do nothing in its place.
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) count, options(nostack, preserves_flags, readonly));
        }
        #[cfg(not(all(target_arch = "x86_64", not(loom))))]
        let _ = count;
    }

    /// The count of page `index`.
    ///
    /// # Safety
    ///
    /// There is such a page, and the counts outlive `'c`.
    #[inline]
    pub(crate) unsafe fn at<'c>(self, index: u32) -> &'c Count {
        // SAFETY: the caller's.
        unsafe { self.counts.add(index as usize).as_ref() }
    }

    /// The count of page `index`, which is going to be [given](Count::give) to.
    ///
    /// # Safety
    ///
    /// As for [`at`](Self::at).
    #[inline]
    pub(crate) unsafe fn mark<'c>(self, index: u32) -> &'c Count {
        let part = index as usize / PART;
        // SAFETY: the caller's: there is a bit for each part.
        let Line(words) = unsafe { self.summary.add(part / 64 / 8).as_ref() };
        let (word, bit) = (&words[part / 64 % 8], 1 << (part % 64));
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        // SAFETY: as above.
        unsafe { self.at(index) }
    }
}

#[cfg(not(loom))]
mod memory {
    use super::*;
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
    use std::ptr;

    /// Mapped, not allocated: an allocator may write zeros to all of it.
    ///
    /// Invariant: from `at` on there are `len` counts, in `bytes` from `mapped` on that `new` mapped and `drop` unmaps.
    pub(super) struct Memory {
        at: NonNull<Count>,
        len: usize,
        mapped: NonNull<u8>,
        bytes: usize,
    }

    // SAFETY: atomics in memory of its own.
    unsafe impl Send for Memory {}
    // SAFETY: as above.
    unsafe impl Sync for Memory {}

    /// Bytes in a line of the cache.
    const LINE: usize = 64;

    impl Memory {
        /// `len` counts, which begin at the given line of what is mapped.
        pub(super) fn new(len: usize, line: usize) -> Result<Self, DeliverError> {
            let bytes = line * LINE + len.max(1) * size_of::<Count>();
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
            // SAFETY: new memory, wherever there is room.
            let mapped = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, flags) };
            let mapped = mapped.ok().and_then(|at| NonNull::new(at.cast::<u8>()));
            let mapped = mapped.ok_or(DeliverError::NoMemory { bytes })?;
            // A huge page would make 2 MiB of the first count. Where there are none, that is refused.
            // SAFETY: our own memory, and advice.
            let _ = unsafe { madvise(mapped.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) };
            // SAFETY: in what was mapped.
            Ok(Self { at: unsafe { mapped.add(line * LINE) }.cast(), len, mapped, bytes })
        }

        pub(super) fn all(&self) -> &[Count] {
            // SAFETY: that many (the invariant), of zeros at first, which are counts.
            unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: mapped by `new`, and not used any more.
            let unmapped = unsafe { munmap(self.mapped.as_ptr().cast(), self.bytes) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

/// The same of loom's atomics, which are no zeros of the kernel's.
#[cfg(loom)]
mod memory {
    use super::*;

    pub(super) struct Memory(Vec<Count>);

    impl Memory {
        pub(super) fn new(len: usize, _: usize) -> Result<Self, DeliverError> {
            Ok(Self(std::iter::repeat_with(Count::default).take(len).collect()))
        }

        pub(super) fn all(&self) -> &[Count] {
            &self.0
        }
    }
}

use memory::Memory;
