//! A page with data between headroom and tailroom: what a device writes to, and a program edits.
//!
//! Why it is not a page and two numbers: the numbers would be compared with the page's length each
//! time that bytes are read or the data is passed on. Here they are compared once, when the value
//! is made, and every method keeps what was found. The data is a [`Page`] of its own within it, so
//! that it becomes a fragment without a check.

use crate::error::OutOfRange;
use crate::foreign;
use crate::memory::{Mapped, Memory, Readable};
use crate::page::{Page, PageId};
use crate::span::Span;
use netmem_percpu::prefetch;
use std::mem::ManuallyDrop;

/// The bytes of a [`Page`] as data with headroom in front of it and tailroom behind it.
///
/// ```text
///   Page       ├──────────────── its bytes ────────────────┤
///   DataPage   ├── headroom ──┤■■■■ data ■■■■├── tailroom ──┤
/// ```
///
/// Three words. Moving either end of the data touches no count. Dropping the value drops the page.
///
/// ```
/// # use netmem_pool::{DataPage, PoolOptions, Private, RegionOptions, RegionProvider};
/// # let region = RegionOptions::new(8).huge_pages(false).build::<Private>()?;
/// # let mut pool = PoolOptions::new("rx0").build(RegionProvider::new(region), None)?;
/// let page = pool.alloc().ok_or("no page")?;
/// let mut buffer = DataPage::new(page, 64, 5);
/// buffer.copy_from(0, b"hello")?;
/// assert_eq!((&**buffer.data(), buffer.headroom()), (&b"hello"[..], 64));
/// // The last byte of the headroom becomes the first of the data.
/// buffer.set_data(63, 6)?;
/// assert_eq!((buffer.data().len(), buffer.headroom()), (6, 63));
/// assert_eq!(buffer.into_page().len(), 4096);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Invariant (*within*): the bytes of `data` are among those of `whole`, which are the bytes of the
/// page of which the value was made. No other value has them.
#[derive(Debug)]
pub struct DataPage<M: Memory> {
    data: Page<M>,
    whole: Span,
}

impl<M: Memory> DataPage<M> {
    /// `len` bytes from `start` of `page` as data.
    ///
    /// # Panics
    ///
    /// If they reach beyond the page.
    #[inline]
    #[must_use]
    pub fn new(page: Page<M>, start: usize, len: usize) -> Self {
        assert!(start.checked_add(len).is_some_and(|end| end <= page.len()));
        // SAFETY: just checked.
        unsafe { Self::new_unchecked(page, start as u32, len as u32) }
    }

    /// [`new`](Self::new), without the check.
    ///
    /// # Safety
    ///
    /// The page has `len` bytes from `start`.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new_unchecked(page: Page<M>, start: u32, len: u32) -> Self {
        debug_assert!(start as usize + len as usize <= page.len());
        let whole = page.span();
        // SAFETY: the caller's: they are among the bytes of the page.
        Self { data: unsafe { page.with_span(Span::new(whole.offset() + start, len)) }, whole }
    }

    /// The data.
    #[inline(always)]
    #[must_use]
    pub fn data(&self) -> &Page<M> {
        &self.data
    }

    /// The bytes in front of the data.
    #[inline(always)]
    #[must_use]
    pub fn headroom(&self) -> usize {
        (self.data.offset() as u32 - self.whole.offset()) as usize
    }

    /// All bytes: headroom, data and tailroom.
    #[inline(always)]
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.whole.len() as usize
    }

    /// Which bytes of which page these are, with headroom and tailroom: see [`Page::id`].
    #[inline(always)]
    #[must_use]
    pub fn id(&self) -> PageId {
        self.data.id_of(self.whole)
    }

    /// Makes `len` bytes behind `headroom` the data. Their contents are what they were.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if there are fewer; nothing has changed then.
    #[inline]
    pub fn set_data(&mut self, headroom: usize, len: usize) -> Result<(), OutOfRange> {
        OutOfRange::check(headroom, len, self.capacity())?;
        // SAFETY: just checked: they are among the bytes of the page of which the value was made.
        unsafe { self.data.set_span(Span::new(self.whole.offset() + headroom as u32, len as u32)) };
        Ok(())
    }

    /// Sets the length of the data, which begins where it did, without a check.
    ///
    /// # Safety
    ///
    /// Behind the headroom there are `len` bytes.
    #[inline(always)]
    pub unsafe fn set_len_unchecked(&mut self, len: u32) {
        debug_assert!(self.headroom() + len as usize <= self.capacity());
        // SAFETY: the caller's: they are among the bytes of the page of which the value was made.
        unsafe { self.data.set_span(Span::new(self.data.offset() as u32, len)) };
    }

    /// Calls `f` with the page, with all of its bytes.
    #[inline(always)]
    pub fn with_page<R>(&self, f: impl FnOnce(&Page<M>) -> R) -> R {
        // SAFETY: the count stays with this value, because the copy is not dropped. Both are only
        // read meanwhile. *within*: no value other than these two has bytes of `whole`.
        let whole = ManuallyDrop::new(unsafe { self.data.copy().with_span(self.whole) });
        f(&whole)
    }

    /// The page, with all of its bytes.
    #[inline(always)]
    #[must_use]
    pub fn into_page(self) -> Page<M> {
        // SAFETY: *within*: no other value has bytes of `whole`.
        unsafe { self.data.with_span(self.whole) }
    }

    /// The data alone. The headroom is then again bytes in front of a page, which
    /// [`Page::prepend`] uses if no other value is on the page.
    #[inline(always)]
    #[must_use]
    pub fn into_data(self) -> Page<M> {
        self.data
    }
}

impl<M: Mapped> DataPage<M> {
    /// Prefetches the cache line that is `offset` bytes from the beginning of the data. The thread
    /// does not wait for it.
    #[inline(always)]
    pub fn prefetch(&self, offset: isize) {
        prefetch::to_read(self.data.as_ptr().wrapping_offset(offset));
    }

    /// A private copy of the `N` bytes directly in front of the data, each read once, without a
    /// check.
    ///
    /// # Safety
    ///
    /// The headroom has `N` bytes.
    #[inline(always)]
    pub unsafe fn read_in_front_unchecked<const N: usize>(&self) -> [u8; N] {
        debug_assert!(N <= self.headroom());
        let mut copy = [0; N];
        // SAFETY: the caller's: *within*, and the page is ours.
        unsafe { foreign::copy_out(self.data.as_ptr().sub(N), &mut copy) };
        copy
    }

    /// Copies the bytes directly in front of the data out, each read once.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if the headroom is shorter.
    #[inline(always)]
    pub fn copy_in_front_to(&self, to: &mut [u8]) -> Result<(), OutOfRange> {
        OutOfRange::check(0, to.len(), self.headroom())?;
        // SAFETY: just checked: *within*, and the page is ours.
        unsafe { foreign::copy_out(self.data.as_ptr().sub(to.len()), to) };
        Ok(())
    }

    /// Copies bytes into the data at `offset`.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`]; nothing is written then.
    #[inline]
    pub fn copy_from(&mut self, offset: usize, from: &[u8]) -> Result<(), OutOfRange> {
        self.data.copy_from(offset, from)
    }

    /// The data, to be changed.
    #[inline]
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8]
    where
        M: Readable,
    {
        self.data.as_mut_slice()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{PagePool, PoolOptions, Private, RegionOptions, RegionProvider};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[allow(clippy::unwrap_used)]
    fn pool() -> PagePool<Private> {
        let region = RegionOptions::new(4).huge_pages(false).build::<Private>().unwrap();
        PoolOptions::new("data").build(RegionProvider::new(region), None).unwrap()
    }

    /// In a whole page, and in a part of one: the data never leaves the bytes of the value.
    #[test]
    fn data_stays_within_the_page() {
        let mut pool = pool();
        let mut front = pool.alloc().unwrap();
        let whole = pool.alloc().unwrap();
        let part = front.split_off(1024);
        for (page, capacity) in [(whole, 4096), (part, 3072), (front, 1024)] {
            let (offset, id) = (page.offset(), page.id());
            let mut buffer = DataPage::new(page, 100, 200);
            assert_eq!((buffer.headroom(), buffer.data().len(), buffer.capacity()), (100, 200, capacity));
            assert_eq!((buffer.data().offset(), buffer.id()), (offset + 100, id));
            let moves = [(0, 0), (0, capacity), (capacity, 0), (1, capacity - 1)];
            for (headroom, len) in moves {
                buffer.set_data(headroom, len).unwrap();
                assert_eq!((buffer.headroom(), buffer.data().len(), buffer.id()), (headroom, len, id));
            }
            for (headroom, len) in [(0, capacity + 1), (capacity + 1, 0), (1, capacity), (usize::MAX, 2)] {
                assert!(buffer.set_data(headroom, len).is_err());
                assert_eq!((buffer.headroom(), buffer.data().len()), (1, capacity - 1));
            }
            let whole = buffer.into_page();
            assert_eq!((whole.offset(), whole.len(), whole.id()), (offset, capacity, id));
            let data = DataPage::new(whole, 7, 9).into_data();
            assert_eq!((data.offset(), data.len()), (offset + 7, 9));
        }
        assert_eq!(pool.stats().inflight(), 0);
    }

    #[test]
    fn no_data_beyond_the_page() {
        let mut pool = pool();
        for (start, len) in [(0, 4097), (4097, 0), (4000, 97), (usize::MAX, 2)] {
            let page = pool.alloc().unwrap();
            assert!(catch_unwind(AssertUnwindSafe(|| DataPage::new(page, start, len))).is_err());
        }
        assert_eq!(pool.stats().inflight(), 0);
    }

    #[test]
    fn bytes_in_front_of_the_data() {
        let mut pool = pool();
        let mut page = pool.alloc().unwrap();
        page.copy_from(0, b"0123456789").unwrap();
        let buffer = DataPage::new(page, 4, 6);
        let mut copy = [0; 4];
        buffer.copy_in_front_to(&mut copy[..2]).unwrap();
        assert_eq!(&copy[..2], b"23");
        // SAFETY: the headroom has four bytes.
        assert_eq!(unsafe { buffer.read_in_front_unchecked::<4>() }, *b"0123");
        assert!(buffer.copy_in_front_to(&mut [0; 5]).is_err());
        assert_eq!(buffer.with_page(|page| page.len()), 4096);
        assert_eq!(pool.stats().inflight(), 1, "the page that was lent was not dropped");
        drop(buffer);
        assert_eq!(pool.stats().inflight(), 0);
    }

    /// Pages next to each other have different colours, which are multiples of 64 and stay.
    #[test]
    fn neighbours_have_different_colours() {
        let mut pool = pool();
        let mut pages: Vec<_> = (0..4).map(|_| pool.alloc().unwrap()).collect();
        pages.sort_by_key(Page::index);
        for two in pages.windows(2) {
            assert_eq!(two[1].colour() - two[0].colour(), 64);
            assert_eq!(two[0].colour() % 64, 0);
        }
    }
}
