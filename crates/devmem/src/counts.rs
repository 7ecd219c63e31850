//! How often each page of a binding has been delivered and not come back: a number for each, in one array.
//!
//! ```text
//!   ... 1 0 0 1 │ 4 KiB │ - │ - │ 4 KiB │ ...    counts: zeros of the kernel's, which become memory when they are written
//!   notes       └─ base
//! ```
//!
//! A note is a bit for 1024 pages: their counts may be other than 0. Notes lie below the counts, the first one next to them, so that both are
//! found from one address.

use crate::error::DeliverError;
use crate::sync::{AtomicU32, Ordering};

/// How often a page has been delivered and not come back.
#[derive(Default)]
#[repr(transparent)]
pub(crate) struct Count(AtomicU32);

impl Count {
    /// Has the count's line come here to be written. The other side wrote it last, and atomic operations wait one for the other: so
    /// that the lines of a batch come together, they are asked for before the first of them.
    #[inline]
    pub(crate) fn prefetch(&self) {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        // SAFETY: a hint, and no access; processors without this instruction do nothing in its place.
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) self, options(nostack, preserves_flags, readonly));
        }
    }

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
        // A guess, for most pages are held once. A load would bring the line here to be read, and the exchange once more.
        let mut held = 1;
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

/// Counts that one note is for: 4 KiB.
const PART: usize = 1024;

/// The counts of a binding's pages on one socket.
///
/// Invariant: a count that is not 0 is in a part with a note.
pub(crate) struct Counts(Memory);

impl Counts {
    pub(crate) fn new(pages: u32) -> Result<Self, DeliverError> {
        Memory::new(pages as usize).map(Self)
    }

    /// Where they are.
    #[inline]
    pub(crate) fn base(&self) -> Base {
        self.0.base()
    }

    /// All that is held: a page and how often, for each. Costs a look at 1024 counts for each of them that was ever used, and at
    /// a bit for 1024 others.
    pub(crate) fn held(&self, mut f: impl FnMut(u32, u32)) {
        self.0.each_noted(|part| {
            for (index, count) in self.0.all().iter().enumerate().skip(part * PART).take(PART) {
                let n = count.0.load(Ordering::Relaxed);
                if n > 0 {
                    f(index as u32, n);
                }
            }
        });
    }

    /// Bytes of counts that were ever used, in parts.
    pub(crate) fn bytes(&self) -> usize {
        let mut parts = 0;
        self.0.each_noted(|_| parts += 1);
        parts * PART * size_of::<u32>()
    }
}

#[cfg(not(loom))]
mod memory {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    use std::ptr::{self, NonNull};
    use std::sync::atomic::{AtomicU64, AtomicUsize};

    /// Where counts are, for who knows how many, and that they stay.
    #[derive(Clone, Copy)]
    pub(crate) struct Base(NonNull<Count>);

    // SAFETY: an address of atomics; whoever looks at them says why he may.
    unsafe impl Send for Base {}
    // SAFETY: as above.
    unsafe impl Sync for Base {}

    impl Base {
        /// The count of page `index`.
        ///
        /// # Safety
        ///
        /// There is such a page, and the counts outlive `'c`.
        #[inline]
        pub(crate) unsafe fn at<'c>(self, index: u32) -> &'c Count {
            // SAFETY: the caller's.
            unsafe { self.0.add(index as usize).as_ref() }
        }

        /// The same, of a page that is going to be [given](Count::give) to.
        ///
        /// # Safety
        ///
        /// As for [`at`](Self::at).
        #[inline]
        pub(crate) unsafe fn note<'c>(self, index: u32) -> &'c Count {
            let part = index as usize / PART;
            // SAFETY: there is a note for each page, below the counts.
            let (word, bit) = unsafe { (self.0.cast::<AtomicU64>().sub(1 + part / 64).as_ref(), 1 << (part % 64)) };
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
            }
            // SAFETY: the caller's.
            unsafe { self.at(index) }
        }
    }

    /// Mapped, not allocated: an allocator may write zeros to all of it. The counts begin at another line of 4 KiB each time: else
    /// those of bindings that take turns would be in one set of the first-level cache.
    ///
    /// Invariant: from `base` on there are `len` counts, and below it a note for each part of them, in `bytes` from `mapped` on that
    /// `new` mapped and `drop` unmaps.
    pub(super) struct Memory {
        base: Base,
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
        pub(super) fn new(len: usize) -> Result<Self, DeliverError> {
            static NEXT: AtomicUsize = AtomicUsize::new(0);
            let line = NEXT.fetch_add(1, Ordering::Relaxed) % (4096 / LINE);
            let notes = len.div_ceil(PART).div_ceil(64) * size_of::<u64>();
            let below = notes.next_multiple_of(LINE) + line * LINE;
            let bytes = below + len * size_of::<Count>();
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
            // SAFETY: new memory, wherever there is room.
            let mapped = unsafe { mmap_anonymous(ptr::null_mut(), bytes.max(1), access, flags) };
            let mapped = mapped.ok().and_then(|at| NonNull::new(at.cast::<u8>()));
            let mapped = mapped.ok_or(DeliverError::NoMemory { bytes })?;
            // SAFETY: in what was mapped, or its end.
            let base = Base(unsafe { mapped.add(below) }.cast());
            Ok(Self { base, len, mapped, bytes })
        }

        pub(super) fn base(&self) -> Base {
            self.base
        }

        pub(super) fn all(&self) -> &[Count] {
            // SAFETY: that many (the invariant), of zeros at first, which are counts.
            unsafe { std::slice::from_raw_parts(self.base.0.as_ptr(), self.len) }
        }

        /// Calls `f` with the number of each part with a note.
        pub(super) fn each_noted(&self, mut f: impl FnMut(usize)) {
            for word in 0..self.len.div_ceil(PART).div_ceil(64) {
                // SAFETY: the invariant.
                let notes = unsafe { self.base.0.cast::<AtomicU64>().sub(1 + word).as_ref() }.load(Ordering::Relaxed);
                (0..64).filter(|bit| notes & (1 << bit) != 0).for_each(|bit| f(64 * word + bit));
            }
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: mapped by `new`, and nobody uses it any more.
            let unmapped = unsafe { munmap(self.mapped.as_ptr().cast(), self.bytes.max(1)) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

/// The same of loom's atomics, which are no zeros of the kernel's; all of it is noted.
#[cfg(loom)]
mod memory {
    use super::*;
    use std::ptr::NonNull;

    #[derive(Clone, Copy)]
    pub(crate) struct Base(NonNull<Count>);

    // SAFETY: an address of atomics.
    unsafe impl Send for Base {}
    // SAFETY: as above.
    unsafe impl Sync for Base {}

    impl Base {
        pub(crate) unsafe fn at<'c>(self, index: u32) -> &'c Count {
            // SAFETY: the caller's.
            unsafe { self.0.add(index as usize).as_ref() }
        }

        pub(crate) unsafe fn note<'c>(self, index: u32) -> &'c Count {
            // SAFETY: the caller's.
            unsafe { self.at(index) }
        }
    }

    pub(super) struct Memory(Vec<Count>);

    impl Memory {
        pub(super) fn new(len: usize) -> Result<Self, DeliverError> {
            Ok(Self(std::iter::repeat_with(Count::default).take(len).collect()))
        }

        pub(super) fn base(&self) -> Base {
            Base(NonNull::from(&self.0[..]).cast())
        }

        pub(super) fn all(&self) -> &[Count] {
            &self.0
        }

        pub(super) fn each_noted(&self, f: impl FnMut(usize)) {
            (0..self.0.len().div_ceil(PART)).for_each(f);
        }
    }
}

pub(crate) use memory::Base;
use memory::Memory;
