//! An allocator that counts the bytes of the heap: a test program names it as its
//! `#[global_allocator]`. Unlike resident memory, the count is exact, and excludes what sanitizers
//! and the allocator itself keep.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

/// The system's allocator, with a count of the bytes that are allocated.
pub struct Counting(AtomicUsize);

impl Counting {
    pub const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Bytes that are allocated now.
    pub fn bytes(&self) -> usize {
        self.0.load(Relaxed)
    }
}

// SAFETY: all calls are passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    // The default writes zeros, which makes large allocations resident.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        self.0.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}
