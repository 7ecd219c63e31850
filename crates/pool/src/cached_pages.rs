//! Pages from the array cache, many at a time, and where they are until they are taken.

use crate::cache::Cache;
use crate::desc::Desc;
use crate::memory::Memory;
use crate::page::Page;
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::slice;

/// Where the pages are that [`Napi::alloc_cached`](crate::Napi::alloc_cached) allocates: outside of
/// the array cache, so that drops of other pages do not write over them. It is not part of the
/// iterator, which a compiler then keeps in registers.
pub struct PageRoom(pub(crate) [MaybeUninit<NonNull<Desc>>; Self::PAGES]);

impl PageRoom {
    /// The most pages that are allocated at a time.
    pub const PAGES: usize = 64;

    /// An empty one. Writes nothing.
    #[inline(always)]
    #[must_use]
    pub fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; Self::PAGES])
    }
}

impl Default for PageRoom {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for PageRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageRoom")
    }
}

/// Pages from the array cache of a pool: see [`Napi::alloc_cached`](crate::Napi::alloc_cached) and
/// [`Napi::alloc_in_place`](crate::Napi::alloc_in_place).
///
/// Invariant (*places*): `left` pages from `first` on belong to this value. Nothing writes to their
/// places: they are in a [`PageRoom`] that is borrowed, or the caller of `alloc_in_place` promised
/// it.
#[must_use = "pages that are not taken stay with the pool"]
pub struct CachedPages<'n, M: Memory> {
    cache: &'n Cache,
    page_size: u32,
    first: *const NonNull<Desc>,
    left: usize,
    kind: PhantomData<fn() -> M>,
}

impl<M: Memory> Iterator for CachedPages<'_, M> {
    type Item = Page<M>;

    #[inline(always)]
    fn next(&mut self) -> Option<Page<M>> {
        if self.left == 0 {
            return None;
        }
        // SAFETY: *places*: one is left. It leaves this value, and is a whole page, which was
        // popped from the cache.
        let page = unsafe { Page::from_desc(*self.first, 0, self.page_size) };
        self.skip(1);
        Some(page)
    }
}

impl<M: Memory> Drop for CachedPages<'_, M> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.left > 0 {
            self.put_back();
        }
    }
}

impl<'n, M: Memory> CachedPages<'n, M> {
    /// The `left` pages from `first` on, which were popped from `cache`.
    ///
    /// # Safety
    ///
    /// *places*, for as long as the value lives.
    #[inline(always)]
    pub(crate) unsafe fn new(cache: &'n Cache, first: *const NonNull<Desc>, left: usize) -> Self {
        Self { cache, page_size: cache.page_size, first, left, kind: PhantomData }
    }

    /// Pages that were not taken.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> usize {
        self.left
    }

    /// Whether all pages were taken.
    #[inline(always)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Calls `f` for each of the next pages, with an entry of each of two arrays, up to the end of
    /// the shortest of the three, four a step. Returns how many pages it has taken. If `f` panics,
    /// the page that it was called with is taken, and the pages behind are not.
    #[inline(always)]
    pub fn take_with<A, B>(&mut self, a: &mut [A], b: &mut [B], mut f: impl FnMut(&mut A, &mut B, Page<M>)) -> usize {
        let (n, page_size) = (self.left.min(a.len()).min(b.len()), self.page_size);
        // SAFETY: *places*: `n` are left or more, and nothing writes to their places while the
        // slice is read. It is not read any more when `f` panics.
        let pages = unsafe { slice::from_raw_parts(self.first, n) };
        let mut taking = Taking { pages: self, taken: 0 };
        let (pages, pages_rest) = pages.as_chunks::<4>();
        let ((a, a_rest), (b, b_rest)) = (a[..n].as_chunks_mut::<4>(), b[..n].as_chunks_mut::<4>());
        // By value: if `f` panics and drops its page, the cache may write to the page's place.
        let mut take = |desc: NonNull<Desc>, a: &mut A, b: &mut B| {
            taking.taken += 1;
            // SAFETY: *places*: the page leaves this value, also if `f` panics, and is whole.
            f(a, b, unsafe { Page::from_desc(desc, 0, page_size) });
        };
        for (([page0, page1, page2, page3], [a0, a1, a2, a3]), [b0, b1, b2, b3]) in pages.iter().zip(a).zip(b) {
            take(*page0, a0, b0);
            take(*page1, a1, b1);
            take(*page2, a2, b2);
            take(*page3, a3, b3);
        }
        for ((page, a), b) in pages_rest.iter().zip(a_rest).zip(b_rest) {
            take(*page, a, b);
        }
        n
    }

    /// `n` of the pages were taken.
    #[inline(always)]
    fn skip(&mut self, n: usize) {
        // SAFETY: *places*: no more than are left.
        self.first = unsafe { self.first.add(n) };
        self.left -= n;
    }

    #[cold]
    fn put_back(&mut self) {
        while self.left > 0 {
            // SAFETY: *places*: one is left. The cache then writes to its place, or to one in
            // front: no more pages were pushed than were taken. In a `PageRoom`, it writes to none.
            self.cache.unpop(unsafe { *self.first });
            self.skip(1);
        }
    }
}

/// Pages that are being taken. Its drop, also by a panic, leaves those that were not taken.
struct Taking<'t, 'n, M: Memory> {
    pages: &'t mut CachedPages<'n, M>,
    taken: usize,
}

impl<M: Memory> Drop for Taking<'_, '_, M> {
    #[inline(always)]
    fn drop(&mut self) {
        self.pages.skip(self.taken);
    }
}

impl<M: Memory> fmt::Debug for CachedPages<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CachedPages({})", self.left)
    }
}
