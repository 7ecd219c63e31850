//! A slice of a page that any number of holders share.

use crate::bytes::{self, OutOfRange};
use crate::desc::{self, Desc};
use crate::memory::{Mapped, Memory, Readable};
use crate::page::Page;
use crate::span::Span;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::ptr::NonNull;

/// Shared, read-only bytes of one page: what a packet is made of.
///
/// Sixteen bytes, cheap to pass on. Cloning is one atomic addition; dropping is one atomic subtraction, and none for the
/// last holder. Whoever that is, on whichever core, the page goes home from there.
#[repr(C)]
pub struct Frag<M: Memory> {
    desc: NonNull<Desc>,
    span: Span,
    kind: PhantomData<fn() -> M>,
}

// SAFETY: a counted, read-only reference; the count is atomic.
unsafe impl<M: Memory> Send for Frag<M> {}
// SAFETY: as above.
unsafe impl<M: Memory> Sync for Frag<M> {}

impl<M: Memory> Frag<M> {
    #[inline]
    pub(crate) fn from_page(page: Page<M>) -> Self {
        let span = Span::new(page.offset() as u32, page.len() as u32);
        Self { desc: page.into_desc(), span, kind: PhantomData }
    }

    #[inline]
    fn desc(&self) -> &Desc {
        // SAFETY: our count keeps the descriptor.
        unsafe { self.desc.as_ref() }
    }

    /// Bytes.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "an empty fragment is of no interest")]
    pub fn len(&self) -> usize {
        self.span.len() as usize
    }

    /// Where these bytes begin in their page.
    #[inline]
    #[must_use]
    pub fn offset(&self) -> usize {
        self.span.offset() as usize
    }

    /// The page's number in its region.
    #[inline]
    #[must_use]
    pub fn index(&self) -> u32 {
        self.desc().index()
    }

    /// See [`Page::dma_addr`].
    #[inline]
    #[must_use]
    pub fn dma_addr(&self) -> u64 {
        self.desc().dma() + u64::from(self.span.offset())
    }

    /// See [`Page::dma_domain`].
    #[inline]
    #[must_use]
    pub fn dma_domain(&self) -> usize {
        // SAFETY: *home stays* while the page is ours.
        unsafe { (*self.desc().home()).domain() }
    }

    /// Another holder of some of these bytes. One atomic addition.
    ///
    /// # Panics
    ///
    /// If the range reaches beyond the fragment.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {} bytes", self.len());
        self.desc().get();
        let offset = self.span.offset() + range.start as u32;
        Self { desc: self.desc, span: Span::new(offset, (range.end - range.start) as u32), kind: PhantomData }
    }

    /// The bytes as exclusive ones, if nobody else holds the page.
    ///
    /// # Errors
    ///
    /// The fragment itself, if the page is shared.
    pub fn try_into_page(self) -> Result<Page<M>, Self> {
        if !self.desc().is_sole() {
            return Err(self);
        }
        let whole = std::mem::ManuallyDrop::new(self);
        // SAFETY: the only count, which is passed on: nobody else has any byte of the page.
        Ok(unsafe { Page::from_desc(whole.desc, whole.span.offset(), whole.span.len()) })
    }
}

impl<M: Mapped> Frag<M> {
    /// The first byte's address. What may be done there depends on the kind of memory; the safe ways are below.
    #[inline]
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        // SAFETY: the offset lies within the page.
        unsafe { self.desc().addr().add(self.span.offset() as usize) }
    }

    /// A private copy of `N` bytes, each read once.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`].
    #[inline]
    pub fn read_at<const N: usize>(&self, offset: usize) -> Result<[u8; N], OutOfRange> {
        let mut copy = [0; N];
        self.copy_to(offset, &mut copy)?;
        Ok(copy)
    }

    /// Copies bytes from `offset` out, each read once.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`].
    #[inline]
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange> {
        OutOfRange::check(offset, to.len(), self.len())?;
        // SAFETY: just checked; the page is counted.
        unsafe { bytes::copy_out(self.as_ptr().add(offset), to) };
        Ok(())
    }

    /// Puts `header` directly in front of the bytes and makes it part of them, if nobody else holds the page and it has
    /// room there. False, and nothing done, otherwise.
    #[inline]
    #[must_use]
    pub fn prepend(&mut self, header: &[u8]) -> bool {
        if header.len() > self.offset() || !self.desc().is_sole() {
            return false;
        }
        let n = header.len() as u32;
        self.span = Span::new(self.span.offset() - n, self.span.len() + n);
        // SAFETY: the bytes lie in the page, of which we are the only holder, by exclusive reference.
        unsafe { bytes::copy_in(header, self.as_ptr().cast_mut()) };
        true
    }
}

impl<M: Readable> Deref for Frag<M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the page is counted, shared bytes are read only, and `Readable` says that nobody else writes them.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.span.len() as usize) }
    }
}

impl<M: Memory> Clone for Frag<M> {
    #[inline]
    fn clone(&self) -> Self {
        self.desc().get();
        Self { ..*self }
    }
}

impl<M: Memory> Drop for Frag<M> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the count is ours, and we are gone.
        unsafe { desc::put(self.desc) }
    }
}

impl<M: Memory> From<Page<M>> for Frag<M> {
    fn from(page: Page<M>) -> Self {
        page.freeze()
    }
}

impl<M: Memory> fmt::Debug for Frag<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.offset() + self.len();
        write!(f, "Frag<{}>(#{} {}..{end})", M::NAME, self.index(), self.offset())
    }
}
