//! A slice of a page that any number of holders share.

use crate::bytes::OutOfRange;
use crate::desc::Desc;
use crate::memory::{Device, Mapped, Memory, Readable};
use crate::page::Page;
use std::fmt;
use std::ops::{Deref, Range};
use std::ptr::NonNull;

/// Shared, read-only bytes of one page: what a packet is made of.
///
/// Sixteen bytes, cheap to pass on. Cloning is one atomic addition; dropping is one atomic subtraction, and none for the
/// last holder. Whoever that is, on whichever core, the page goes home from there.
///
/// Inside it is a [`Page`] that is not alone on its bytes, of which only what reads is let out.
#[repr(transparent)]
pub struct Frag<M: Memory>(Page<M>);

impl<M: Memory> Frag<M> {
    #[inline]
    pub(crate) fn from_page(page: Page<M>) -> Self {
        Self(page)
    }

    /// Gives up the value without dropping the count.
    #[inline]
    pub(crate) fn into_desc(self) -> NonNull<Desc> {
        self.0.into_desc()
    }

    /// Where the page's descriptor is.
    #[inline]
    pub(crate) fn desc_addr(&self) -> usize {
        std::ptr::from_ref(self.0.desc()).addr()
    }

    /// Bytes.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "an empty fragment is of no interest")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Where these bytes begin in their page.
    #[inline]
    #[must_use]
    pub fn offset(&self) -> usize {
        self.0.offset()
    }

    /// The page's number in its region.
    #[inline]
    #[must_use]
    pub fn index(&self) -> u32 {
        self.0.index()
    }

    /// See [`Page::dma_addr`].
    #[inline]
    #[must_use]
    pub fn dma_addr(&self) -> u64 {
        self.0.dma_addr()
    }

    /// See [`Page::dma_domain`].
    #[inline]
    #[must_use]
    pub fn dma_domain(&self) -> usize {
        self.0.dma_domain()
    }

    /// Another holder of some of these bytes. One atomic addition.
    ///
    /// # Panics
    ///
    /// If the range reaches beyond the fragment.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        self.clone().0.freeze_range(range)
    }

    /// Gives up the value and keeps its count of the page: for who keeps counts by number. The count is given back by
    /// [`Region::put`](crate::Region::put), with the page's number, which is the answer; until then the page is out.
    #[inline]
    #[must_use = "the page does not come home before its count is put"]
    pub fn into_count(self) -> u32 {
        let index = self.index();
        let _ = self.into_desc();
        index
    }

    /// The bytes as exclusive ones, if nobody else holds the page.
    ///
    /// # Errors
    ///
    /// The fragment itself, if the page is shared.
    pub fn try_into_page(self) -> Result<Page<M>, Self> {
        if self.0.desc().is_sole() { Ok(self.0) } else { Err(self) }
    }
}

impl<M: Mapped> Frag<M> {
    /// The first byte's address. What may be done there depends on the kind of memory; the safe ways are below.
    #[inline]
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    /// See [`Page::read_at`].
    ///
    /// # Errors
    ///
    /// [`OutOfRange`].
    #[inline]
    pub fn read_at<const N: usize>(&self, offset: usize) -> Result<[u8; N], OutOfRange> {
        self.0.read_at(offset)
    }

    /// See [`Page::copy_to`].
    ///
    /// # Errors
    ///
    /// [`OutOfRange`].
    #[inline]
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange> {
        self.0.copy_to(offset, to)
    }

    /// Puts `header` directly in front of the bytes and makes it part of them, if nobody else holds the page and it has
    /// room there. False, and nothing done, otherwise.
    #[inline]
    #[must_use]
    pub fn prepend(&mut self, header: &[u8]) -> bool {
        self.0.desc().is_sole() && self.0.prepend(header)
    }
}

impl Frag<Device> {
    /// See [`Page::file_offset`].
    #[inline]
    #[must_use]
    pub fn file_offset(&self) -> u64 {
        self.0.file_offset()
    }
}

impl<M: Readable> Deref for Frag<M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

impl<M: Readable> AsRef<[u8]> for Frag<M> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// Without copying: the `Bytes` and its slices and clones hold the fragment, and with the last of them, on whichever
/// thread, the page goes home. One allocation, of what the clones share.
///
/// ```
/// # use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
/// # let region = RegionOptions::new(8).huge_pages(false).build::<Private>()?;
/// # let mut pool = PoolOptions::new("rx0").build(RegionProvider::new(region), None)?;
/// let mut page = pool.alloc().expect("a new pool has pages");
/// page.copy_from(0, b"GET / HTTP/1.1")?;
/// let bytes = bytes::Bytes::from(page.freeze_range(0..14));
/// let path = bytes.slice(4..5);
/// drop(bytes);
/// assert_eq!((&path[..], pool.stats().inflight()), (&b"/"[..], 1));
/// drop(path);
/// assert_eq!(pool.stats().inflight(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl<M: Readable> From<Frag<M>> for ::bytes::Bytes {
    fn from(frag: Frag<M>) -> Self {
        Self::from_owner(frag)
    }
}

impl<M: Memory> Clone for Frag<M> {
    #[inline]
    fn clone(&self) -> Self {
        // SAFETY: as a fragment the second page is only read from, like the first.
        Self(unsafe { self.0.alias() })
    }
}

impl<M: Memory> From<Page<M>> for Frag<M> {
    fn from(page: Page<M>) -> Self {
        page.freeze()
    }
}

impl<M: Memory> fmt::Debug for Frag<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frag<{}>(#{} {}..{})", M::NAME, self.index(), self.offset(), self.offset() + self.len())
    }
}
