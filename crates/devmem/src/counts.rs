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

/// The counts of pages in a row, on lines of their own.
#[repr(align(64))]
pub(crate) struct Block([AtomicU32; BLOCK]);

impl Block {
    /// A page is delivered `n` times more.
    #[inline]
    pub(crate) fn give(&self, at: usize, n: u32) {
        // Does not overflow: each is a reference to the page, of which there are fewer. Release: what the receiver did with
        // the page before.
        self.0[at].fetch_add(n, Ordering::Release);
    }

    /// Takes one from the count of a page, unless it is zero.
    #[inline]
    pub(crate) fn take_one(&self, at: usize) -> bool {
        let count = &self.0[at];
        // A guess, for most pages are held once. A load would bring the line here to be read, and the exchange once more.
        let mut held = 1;
        while held > 0 {
            // Acquire: what the receiver did with the page before it delivered it.
            match count.compare_exchange_weak(held, held - 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => held = now,
            }
        }
        false
    }
}

/// The counts of a binding's pages on one socket.
///
/// Invariant: what the directory points to are blocks made by [`touch`](Self::touch), which go with the directory;
/// `touched` lists their places.
pub(crate) struct Counts {
    directory: Directory,
    touched: Mutex<Vec<u32>>,
}

impl Counts {
    pub(crate) fn new(pages: u32) -> Result<Self, DeliverError> {
        let directory = Directory::new((pages as usize).div_ceil(BLOCK))?;
        Ok(Self { directory, touched: Mutex::new(Vec::new()) })
    }

    /// The block that page `index` is in.
    #[inline]
    pub(crate) fn block(&self, index: u32) -> Option<&Block> {
        // Acquire: what is in the block, zeros.
        let block = self.directory.places().get(index as usize / BLOCK)?.load(Ordering::Acquire);
        // SAFETY: a block, which stays as long as this.
        unsafe { block.as_ref() }
    }

    /// The block that page `index`, of those that there are, is in, made if need be. For the receiver alone.
    #[inline]
    pub(crate) fn touch(&self, index: u32) -> Result<&Block, DeliverError> {
        match self.block(index) {
            Some(block) => Ok(block),
            None => self.first_touch(index),
        }
    }

    #[cold]
    fn first_touch(&self, index: u32) -> Result<&Block, DeliverError> {
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
        Ok(unsafe { block.as_ref() })
    }

    /// All that is held: a page and how often, for each. For who is alone with them. Costs a look at each count of each
    /// touched block.
    pub(crate) fn held(&self, mut f: impl FnMut(u32, u32)) {
        for &place in self.touched.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let first = place * BLOCK as u32;
            let Some(block) = self.block(first) else { continue };
            for (at, count) in block.0.iter().enumerate() {
                let n = count.load(Ordering::Relaxed);
                if n > 0 {
                    f(first + at as u32, n);
                }
            }
        }
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
