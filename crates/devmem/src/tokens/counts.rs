//! Counts of the pages of a binding, in one array. A count says how often its page was delivered
//! and not returned yet.
//!
//! ```text
//!   summary   1 0 0 1 ...                     a bit for 1024 pages: 1 if a count may be above 0
//!             │     └───────────────┐
//!   counts    │ 4 KiB │ - │ - │ 4 KiB │ ...   the kernel's zero page, until a count is written
//! ```
//!
//! Memory becomes resident only when it is written. A return reads a count before it exchanges it,
//! so an invented token makes no memory resident. Bits are set and read relaxed: the reader is the
//! last handle or the end of an area, and it reads after all threads that set bits have finished.

use super::error::DeliverError;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use std::ptr::NonNull;

/// The count of a page: how often the page was delivered and not returned yet.
///
/// # Safety
///
/// A value of zero bytes is valid, and is a count of 0.
pub(crate) unsafe trait Counter: Default + Send + Sync + 'static {
    /// The type that identifies the socket that may take from the count.
    type Holder: Copy;

    /// Takes one from the count. Returns false if this holder has none.
    fn take_one(&self, holder: Self::Holder) -> bool;

    /// The value of the count, for any holder.
    fn held(&self) -> u32;
}

/// How often a page was delivered to the one socket of its table and not returned yet.
#[derive(Default)]
#[repr(transparent)]
pub(crate) struct Count(AtomicU32);

// SAFETY: it is a number.
unsafe impl Counter for Count {
    type Holder = ();

    #[inline]
    fn take_one(&self, (): ()) -> bool {
        // Read the count first: an exchange that fails writes nevertheless, and would make the page
        // of zeros resident.
        let mut held = self.0.load(Ordering::Relaxed);
        while held > 0 {
            // Acquire: everything that the receiver did with the page before it delivered the page
            // happens before the put.
            match self.0.compare_exchange_weak(held, held - 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => held = now,
            }
        }
        false
    }

    #[inline]
    fn held(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Count {
    /// Adds `n` to the count, because the page is delivered `n` times more.
    #[inline]
    pub(crate) fn give(&self, n: u32) {
        // The addition does not overflow: each unit is a reference to the page, and the page's own
        // count is no wider. Release: publishes what the receiver did with the page before.
        self.0.fetch_add(n, Ordering::Release);
    }
}

/// The number of counts that share a bit of the summary: 4 KiB of counts.
const PART: usize = if cfg!(loom) { 1 } else { 1024 };

/// Words of the summary, on a cache line of their own, because they are read often and hardly ever
/// written.
#[repr(align(64))]
struct Line([AtomicU64; 8]);

/// The counts of a binding's pages on one socket.
///
/// Invariant: if a count is not 0, the bit of its part is set.
pub(crate) struct Counts<K = Count> {
    memory: Memory<K>,
    summary: Box<[Line]>,
}

impl<K: Counter> Counts<K> {
    /// Makes counts for `pages` pages. The counts of each binding of a socket should have their own
    /// `number`, modulo 64. If two bindings have the same number, their counts begin at the same
    /// offset of a page. If such bindings take turns, their counts compete for one set of the
    /// first-level cache.
    pub(crate) fn new(pages: u32, number: usize) -> Result<Self, DeliverError> {
        let lines = (pages as usize).div_ceil(PART).div_ceil(64 * 8);
        let summary = (0..lines).map(|_| Line(std::array::from_fn(|_| AtomicU64::new(0)))).collect();
        Ok(Self { memory: Memory::new(pages as usize, number % 64)?, summary })
    }

    /// The addresses of the counts and of the summary.
    pub(crate) fn base(&self) -> Base<K> {
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

    /// Calls `f` with the index and the count of each page whose count is above 0. Reads 1024
    /// counts for each part in which a count was ever used, and one word of the summary for each
    /// 65,536 pages.
    pub(crate) fn held(&self, mut f: impl FnMut(u32, u32)) {
        self.each_part(|part| {
            for (index, count) in self.memory.all().iter().enumerate().skip(part * PART).take(PART) {
                let n = count.held();
                if n > 0 {
                    f(index as u32, n);
                }
            }
        });
    }

    /// Bytes of those parts in which a count was ever used.
    pub(crate) fn bytes(&self) -> usize {
        let parts =
            self.summary.iter().flat_map(|line| &line.0).map(|word| word.load(Ordering::Relaxed).count_ones() as usize);
        parts.sum::<usize>() * PART * size_of::<K>()
    }
}

/// The addresses of counts. The code that follows them must know how many counts there are, and
/// that they still exist.
pub(crate) struct Base<K = Count> {
    counts: NonNull<K>,
    summary: NonNull<Line>,
}

impl<K> Clone for Base<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Base<K> {}

// SAFETY: these are addresses of atomics. Each method that follows them says why they are still
// valid.
unsafe impl<K: Counter> Send for Base<K> {}
// SAFETY: as above.
unsafe impl<K: Counter> Sync for Base<K> {}

impl<K: Counter> Base<K> {
    /// Prefetches the cache line of the count of page `index` for writing. The other side wrote
    /// this line last. Each atomic operation waits for the one before it, so the lines of a batch
    /// are prefetched together, before its first atomic operation.
    #[inline]
    pub(crate) fn prefetch(self, index: u32) {
        netmem_pool::prefetch::to_write(self.counts.as_ptr().wrapping_add(index as usize));
    }

    /// The count of page `index`.
    ///
    /// # Safety
    ///
    /// The binding has a page `index`, and the counts outlive `'c`.
    #[inline]
    pub(crate) unsafe fn at<'c>(self, index: u32) -> &'c K {
        // SAFETY: the caller's.
        unsafe { self.counts.add(index as usize).as_ref() }
    }

    /// The count of page `index`, before one is added to it: sets the bit of its part in the
    /// summary.
    ///
    /// # Safety
    ///
    /// As for [`at`](Self::at).
    #[inline]
    pub(crate) unsafe fn mark<'c>(self, index: u32) -> &'c K {
        let part = index as usize / PART;
        // SAFETY: the caller's promise; the summary has a bit for each part.
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

    /// The memory of counts. It is mapped and not allocated, because an allocator may write zeros
    /// to all of it.
    ///
    /// Invariant: `at` is the first of `len` counts. They are in the `bytes` from `mapped` on,
    /// which `new` mapped and `drop` unmaps.
    pub(super) struct Memory<K> {
        at: NonNull<K>,
        len: usize,
        mapped: NonNull<u8>,
        bytes: usize,
    }

    // SAFETY: the counts are atomics, in memory that this value owns.
    unsafe impl<K: Counter> Send for Memory<K> {}
    // SAFETY: as above.
    unsafe impl<K: Counter> Sync for Memory<K> {}

    /// Bytes in a cache line.
    const LINE: usize = 64;

    impl<K: Counter> Memory<K> {
        /// Maps `len` counts. They begin at the cache line `line` of the mapping.
        pub(super) fn new(len: usize, line: usize) -> Result<Self, DeliverError> {
            let bytes = line * LINE + len.max(1) * size_of::<K>();
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
            // SAFETY: maps new memory, at an address that the kernel chooses.
            let mapped = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, flags) };
            let mapped = mapped.ok().and_then(|at| NonNull::new(at.cast::<u8>()));
            let mapped = mapped.ok_or(DeliverError::NoMemory { bytes })?;
            // With huge pages, writing the first count would make 2 MiB resident. A kernel without
            // huge pages refuses this advice.
            // SAFETY: the memory is our own, and this is only advice.
            let _ = unsafe { madvise(mapped.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) };
            // SAFETY: the address is inside the mapping.
            Ok(Self { at: unsafe { mapped.add(line * LINE) }.cast(), len, mapped, bytes })
        }

        pub(super) fn all(&self) -> &[K] {
            // SAFETY: there are `len` counts (the invariant). They are zero bytes at first, which
            // are valid counts (the trait).
            unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
        }
    }

    impl<K> Drop for Memory<K> {
        fn drop(&mut self) {
            // SAFETY: `new` mapped this memory, and nothing uses it any more.
            let unmapped = unsafe { munmap(self.mapped.as_ptr().cast(), self.bytes) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

/// The same memory made of loom's atomics, which are not valid as zero bytes.
#[cfg(loom)]
mod memory {
    use super::*;

    pub(super) struct Memory<K>(Vec<K>);

    impl<K: Counter> Memory<K> {
        pub(super) fn new(len: usize, _: usize) -> Result<Self, DeliverError> {
            Ok(Self(std::iter::repeat_with(K::default).take(len).collect()))
        }

        pub(super) fn all(&self) -> &[K] {
            &self.0
        }
    }
}

use memory::Memory;
