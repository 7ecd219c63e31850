//! How often each page of a binding has been delivered and not come back: a number per page, in blocks that exist once touched.
//!
//! ```text
//!   directory   │ block │ null │ null │ block │ ...      8 bytes for 1024 pages; zeros of the kernel's until touched
//!                   │                     │
//!                   ▼                     ▼
//!               1024 counts           1024 counts        4 bytes for a page
//! ```
//!
//! Only the receiver makes blocks, so no two are made for one place. They stay until nobody can find the directory.

use crate::error::DeliverError;
use crate::sync::{AtomicPtr, AtomicU32, Mutex, Ordering};
use std::ptr::{self, NonNull};
use std::sync::PoisonError;

/// Pages that share a block. 4 KiB of counts, 4 MiB of pages of 4 KiB.
pub(crate) const BLOCK: usize = if cfg!(loom) { 2 } else { 1024 };

/// On lines of its own.
#[repr(align(64))]
pub(crate) struct Block([AtomicU32; BLOCK]);

/// The counts of a binding's pages on one socket.
///
/// Invariant: what the directory points to are blocks made by [`touch`](Self::touch), which go with the directory;
/// `touched` lists their places.
pub(crate) struct Counts {
    directory: Directory,
    pages: u32,
    touched: Mutex<Vec<u32>>,
}

impl Counts {
    pub(crate) fn new(pages: u32) -> Result<Self, DeliverError> {
        let directory = Directory::new((pages as usize).div_ceil(BLOCK))?;
        Ok(Self { directory, pages, touched: Mutex::new(Vec::new()) })
    }

    #[inline]
    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    /// The counts from page `index` to the end of its block, or how many there would be if the block had been touched.
    #[inline]
    pub(crate) fn from(&self, index: u32) -> Result<&[AtomicU32], u32> {
        let (place, at) = (index as usize / BLOCK, index as usize % BLOCK);
        // Acquire: what is in the block, zeros.
        let block = self.directory.places().get(place).map_or(ptr::null_mut(), |place| place.load(Ordering::Acquire));
        // SAFETY: a block, which stays as long as this.
        match unsafe { block.as_ref() } {
            Some(Block(counts)) => Ok(&counts[at..]),
            None => Err((BLOCK - at) as u32),
        }
    }

    /// The count of page `index`, of those that there are, its block made if need be. For the receiver alone.
    #[inline]
    pub(crate) fn touch(&self, index: u32) -> Result<&AtomicU32, DeliverError> {
        match self.from(index) {
            Ok(counts) => Ok(&counts[0]),
            Err(_) => self.first_touch(index),
        }
    }

    #[cold]
    fn first_touch(&self, index: u32) -> Result<&AtomicU32, DeliverError> {
        let place = index as usize / BLOCK;
        let at = &self.directory.places()[place];
        let no_memory = DeliverError::NoMemory { bytes: size_of::<Block>() };
        let mut touched = self.touched.lock().unwrap_or_else(PoisonError::into_inner);
        touched.try_reserve(1).map_err(|_| no_memory)?;
        let block = Block::allocate().ok_or(no_memory)?;
        // Release: the zeros in it.
        at.store(block.as_ptr(), Ordering::Release);
        touched.push(place as u32);
        // SAFETY: just made; it stays as long as this.
        Ok(unsafe { &(*block.as_ptr()).0[index as usize % BLOCK] })
    }

    /// Each count that there is, and its page.
    fn each(&self, mut f: impl FnMut(u32, &AtomicU32)) {
        for &place in self.touched.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let first = place * BLOCK as u32;
            self.from(first).unwrap_or(&[]).iter().zip(first..).for_each(|(count, index)| f(index, count));
        }
    }

    /// Whether everything that was delivered has come back.
    pub(crate) fn all_zero(&self) -> bool {
        let mut held = 0;
        self.each(|_, count| held |= count.load(Ordering::Relaxed));
        held == 0
    }

    /// Takes all that is held: a page and how often, for each. Costs a look at each count in a touched block.
    pub(crate) fn take_all(&self, mut f: impl FnMut(u32, u32)) {
        self.each(|index, count| {
            if count.load(Ordering::Relaxed) > 0 {
                // Acquire: as in `take_one`.
                f(index, count.swap(0, Ordering::Acquire));
            }
        });
    }

    /// Bytes of counts, without the directory.
    pub(crate) fn bytes(&self) -> usize {
        self.touched.lock().unwrap_or_else(PoisonError::into_inner).len() * size_of::<Block>()
    }
}

impl Drop for Counts {
    fn drop(&mut self) {
        for &place in self.touched.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let block = self.directory.places()[place as usize].load(Ordering::Relaxed);
            // SAFETY: made by `Block::allocate`, and nobody can find it any more.
            unsafe { Block::free(block) };
        }
    }
}

/// A page was delivered `n` times. Release: what the receiver did with it before.
#[inline]
pub(crate) fn give(count: &AtomicU32, n: u32) {
    // Does not overflow: each is a reference to the page, of which there are fewer.
    count.fetch_add(n, Ordering::Release);
}

/// Takes one from a count, unless it is zero.
#[inline]
pub(crate) fn take_one(count: &AtomicU32) -> bool {
    let mut held = count.load(Ordering::Relaxed);
    while held > 0 {
        // Acquire: what the receiver did with the page before it delivered it.
        match count.compare_exchange_weak(held, held - 1, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => held = now,
        }
    }
    false
}

#[cfg(not(loom))]
mod memory {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    impl Block {
        const LAYOUT: Layout = Layout::new::<Self>();

        /// Zeros.
        pub(super) fn allocate() -> Option<NonNull<Self>> {
            // SAFETY: not of size 0.
            NonNull::new(unsafe { alloc_zeroed(Self::LAYOUT) }.cast())
        }

        /// # Safety
        ///
        /// Made by `allocate`, and not used any more.
        pub(super) unsafe fn free(this: *mut Self) {
            // SAFETY: as above.
            unsafe { dealloc(this.cast(), Self::LAYOUT) };
        }
    }

    /// Places for blocks, all null at first. Mapped, not allocated: an allocator may write zeros to all of it.
    ///
    /// Invariant: `at` is the start of `len` places, mapped by `new` and unmapped by `drop`.
    pub(super) struct Directory {
        at: NonNull<AtomicPtr<Block>>,
        len: usize,
    }

    // SAFETY: atomics in memory of its own.
    unsafe impl Send for Directory {}
    // SAFETY: as above.
    unsafe impl Sync for Directory {}

    impl Directory {
        pub(super) fn new(len: usize) -> Result<Self, DeliverError> {
            let bytes = len.max(1) * size_of::<AtomicPtr<Block>>();
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
            // SAFETY: new memory, wherever there is room.
            let at = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, flags) };
            let at = at.ok().and_then(|at| NonNull::new(at.cast())).ok_or(DeliverError::NoMemory { bytes })?;
            Ok(Self { at, len })
        }

        #[inline]
        pub(super) fn places(&self) -> &[AtomicPtr<Block>] {
            // SAFETY: that many, of zeros at first, which are null.
            unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            // SAFETY: mapped by `new`, and nobody uses it any more. The blocks are gone already.
            let unmapped = unsafe { munmap(self.at.as_ptr().cast(), self.len.max(1) * size_of::<AtomicPtr<Block>>()) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

#[cfg(loom)]
mod memory {
    use super::*;

    impl Block {
        pub(super) fn allocate() -> Option<NonNull<Self>> {
            let block = Self(std::array::from_fn(|_| AtomicU32::new(0)));
            Some(NonNull::from(Box::leak(Box::new(block))))
        }

        pub(super) unsafe fn free(this: *mut Self) {
            // SAFETY: made by `allocate`.
            drop(unsafe { Box::from_raw(this) });
        }
    }

    pub(super) struct Directory(Vec<AtomicPtr<Block>>);

    impl Directory {
        pub(super) fn new(len: usize) -> Result<Self, DeliverError> {
            Ok(Self((0..len).map(|_| AtomicPtr::new(ptr::null_mut())).collect()))
        }

        pub(super) fn places(&self) -> &[AtomicPtr<Block>] {
            &self.0
        }
    }
}

use memory::Directory;
