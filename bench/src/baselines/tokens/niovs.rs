//! A binding that consists of descriptors only.

use netmem_devmem::Pages;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A page's descriptor, on a cache line of its own, as in the page pool.
#[repr(align(64))]
struct Desc(AtomicU32);

/// Pages of device memory. A put does what a sole owner's put does before the page returns to its
/// pool: it checks the count.
pub struct Niovs {
    id: u64,
    pages: u32,
    descs: Box<[Desc]>,
    /// Counted in tests only: otherwise the shared counter would be what is measured.
    puts: AtomicU64,
}

impl Niovs {
    /// A binding of so many pages.
    #[must_use]
    pub fn new(pages: u32) -> Arc<Self> {
        Self::with_first(pages, pages)
    }

    /// The same with descriptors for the first pages only: no others may be received.
    #[must_use]
    pub fn with_first(pages: u32, first: u32) -> Arc<Self> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let descs = (0..first).map(|_| Desc(AtomicU32::new(1))).collect();
        Arc::new(Self { id: IDS.fetch_add(1, Ordering::Relaxed), pages, descs, puts: AtomicU64::new(0) })
    }

    #[inline]
    pub(super) fn put_one(&self, index: u32) {
        black_box(self.descs[index as usize].0.load(Ordering::Acquire));
        if cfg!(test) {
            self.puts.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[cfg(test)]
    pub(super) fn puts(&self) -> u64 {
        self.puts.load(Ordering::Relaxed)
    }
}

impl std::fmt::Debug for Niovs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Niovs").field("id", &self.id).field("pages", &self.pages).finish_non_exhaustive()
    }
}

// SAFETY: each id is given out once, the number of pages is fixed, and the binding is never
// reported as drained.
unsafe impl Pages for Niovs {
    fn id(&self) -> u64 {
        self.id
    }

    fn pages(&self) -> u32 {
        self.pages
    }

    #[inline]
    unsafe fn put(&self, index: u32, n: u32) {
        (0..n).for_each(|_| self.put_one(index));
    }

    fn drained(&self) -> bool {
        false
    }
}
