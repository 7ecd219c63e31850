//! A slice of a page that any number of holders share.

use crate::desc::Desc;
use crate::error::{OutOfRange, WriteError};
use crate::memory::{Device, Mapped, Memory, PeerShared, Readable, TrustedPeer};
use crate::page::Page;
use std::borrow::Borrow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Deref, RangeBounds};
use std::ptr::NonNull;

/// Shared, read-only bytes of one page: what a packet is made of.
///
/// Sixteen bytes, cheap to pass on. Cloning is one atomic addition. Dropping is one atomic
/// subtraction, and no atomic for the last holder. The drop of the last holder returns the page to
/// its pool, on any thread.
///
/// [`advance`](Self::advance) and [`truncate`](Self::truncate) narrow a fragment in place and touch
/// no count: stripping a header costs no atomic. [`slice`](Self::slice) and
/// [`split_to`](Self::split_to) make another holder.
///
/// ```
/// # use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
/// # let region = RegionOptions::new(8).huge_pages(false).build::<Private>()?;
/// # let mut pool = PoolOptions::new("rx0").build(RegionProvider::new(region), None)?;
/// let mut page = pool.alloc().ok_or("no page")?;
/// page.copy_from(0, b"header payload trailer")?;
/// let mut frag = page.freeze();
/// frag.advance(7);
/// frag.truncate(15);
/// let payload = frag.split_to(7);
/// frag.advance(1);
/// assert_eq!((&payload[..], &frag[..]), (&b"payload"[..], &b"trailer"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Inside it is a [`Page`] that may have other holders, of which only the methods that read are
/// public.
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

    #[inline]
    pub(crate) fn desc(&self) -> &Desc {
        self.0.desc()
    }

    /// The page's descriptor, with the right to pass on the fragment's count.
    #[inline]
    pub(crate) fn desc_ptr(&self) -> NonNull<Desc> {
        self.0.desc_ptr()
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
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        self.clone().0.freeze_range(range)
    }

    /// Removes `n` bytes from the front. Touches no count: no atomic.
    ///
    /// # Panics
    ///
    /// If there are fewer than `n` bytes.
    #[inline]
    pub fn advance(&mut self, n: usize) {
        self.0.advance(n);
    }

    /// Shortens the fragment to its first `len` bytes; does nothing if it has no more. Touches no
    /// count: no atomic.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
    }

    /// Cuts the fragment in two: the first `at` bytes are returned, `self` keeps the rest. One
    /// atomic addition.
    ///
    /// # Panics
    ///
    /// If there are fewer than `at` bytes.
    #[must_use]
    pub fn split_to(&mut self, at: usize) -> Self {
        Self(self.0.split_to(at))
    }

    /// Cuts the fragment in two: `self` keeps the first `at` bytes, the rest is returned. One
    /// atomic addition.
    ///
    /// # Panics
    ///
    /// If there are fewer than `at` bytes.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Self {
        Self(self.0.split_off(at))
    }

    /// See [`Page::split_tail`].
    #[must_use]
    pub fn split_tail(&mut self) -> Option<Page<M>> {
        self.0.split_tail()
    }

    /// Whether `next` begins where this fragment ends, in the same page. No atomic.
    #[inline]
    #[must_use]
    pub fn continues(&self, next: &Self) -> bool {
        self.desc_addr() == next.desc_addr() && self.offset() + self.len() == next.offset()
    }

    /// Joins `next`, which [continues](Self::continues) this fragment, to this fragment. The two
    /// have one count of the page afterwards. One atomic subtraction.
    ///
    /// # Errors
    ///
    /// `next`, if it does not begin where this fragment ends.
    pub fn join(&mut self, next: Self) -> Result<(), Self> {
        if !self.continues(&next) {
            return Err(next);
        }
        self.0.extend(next.0);
        Ok(())
    }

    /// Drops the fragment. The same as `drop`, but always inlined.
    #[inline(always)]
    pub fn release(self) {
        self.0.release();
    }

    /// Gives up the value, but keeps its count of the page. For a holder that keeps counts by
    /// number. Returns the page's number, with which [`Region::put`](crate::Region::put) puts the
    /// count. Until then the page is in flight.
    #[inline]
    #[must_use = "the page does not return to its pool before its count is put"]
    pub fn into_count(self) -> u32 {
        let index = self.index();
        let _ = self.into_desc();
        index
    }

    /// The bytes as exclusive ones, if this is the only value on the page. No atomic
    /// read-modify-write.
    ///
    /// # Errors
    ///
    /// The fragment itself, if another value is on the page, also if that value has other bytes of
    /// the page. For example, a page of which one part is posted to a device is shared.
    pub fn try_into_page(self) -> Result<Page<M>, Self> {
        if self.0.is_sole() { Ok(self.0) } else { Err(self) }
    }

    /// The first byte's address. Which accesses are sound there depends on the kind of memory; the
    /// methods below are the safe ones.
    #[inline]
    #[must_use]
    pub fn as_ptr(&self) -> *const u8
    where
        M: Mapped,
    {
        self.0.as_ptr()
    }

    /// See [`Page::read_at`].
    ///
    /// # Errors
    ///
    /// [`OutOfRange`].
    #[inline]
    pub fn read_at<const N: usize>(&self, offset: usize) -> Result<[u8; N], OutOfRange>
    where
        M: Mapped,
    {
        self.0.read_at(offset)
    }

    /// See [`Page::copy_to`].
    ///
    /// # Errors
    ///
    /// [`OutOfRange`].
    #[inline]
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange>
    where
        M: Mapped,
    {
        self.0.copy_to(offset, to)
    }

    /// Copies bytes in at `offset`, if this is the only value on the page. No atomic
    /// read-modify-write.
    ///
    /// # Errors
    ///
    /// [`WriteError`]; nothing is written then.
    #[inline]
    pub fn write_at(&mut self, offset: usize, from: &[u8]) -> Result<(), WriteError>
    where
        M: Mapped,
    {
        OutOfRange::check(offset, from.len(), self.len())?;
        if !self.is_writable() {
            return Err(WriteError::Shared);
        }
        Ok(self.0.copy_from(offset, from)?)
    }

    /// Whether [`write_at`](Self::write_at) can write: this is the only value on the page.
    #[inline]
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.0.is_sole()
    }

    /// Puts `header` directly in front of the bytes and makes it part of them. Returns false and
    /// does nothing if there are too few bytes in front, if another value is on the page (also if
    /// it has other bytes of it), or if the page is in quarantine. No atomic read-modify-write.
    #[inline]
    #[must_use]
    pub fn prepend(&mut self, header: &[u8]) -> bool
    where
        M: Mapped,
    {
        self.0.prepend(header)
    }

    /// The bytes.
    #[inline]
    #[must_use]
    pub fn as_slice(&self) -> &[u8]
    where
        M: Readable,
    {
        self.0.as_slice()
    }

    /// The bytes, if the memory is of a kind that is [`Readable`]. Code that is generic over all
    /// mapped memory reads them in place by this, and copies the bytes of other kinds out.
    #[inline]
    #[must_use]
    pub fn readable(&self) -> Option<&[u8]>
    where
        M: Mapped,
    {
        self.0.readable()
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

    #[inline]
    fn deref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl<M: Readable> AsRef<[u8]> for Frag<M> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// For maps whose keys are fragments, and are found by bytes.
impl<M: Readable> Borrow<[u8]> for Frag<M> {
    fn borrow(&self) -> &[u8] {
        self
    }
}

/// Compares the bytes, wherever they are.
impl<M: Readable, N: Readable> PartialEq<Frag<N>> for Frag<M> {
    fn eq(&self, other: &Frag<N>) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl<M: Readable> Eq for Frag<M> {}

impl<M: Readable> PartialEq<[u8]> for Frag<M> {
    fn eq(&self, other: &[u8]) -> bool {
        self.as_slice() == other
    }
}

/// As the bytes: see [`Borrow`].
impl<M: Readable> Hash for Frag<M> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_slice().hash(state);
    }
}

impl<M: Memory> Clone for Frag<M> {
    #[inline]
    fn clone(&self) -> Self {
        // SAFETY: a fragment is only read from while it is not the only value on the page.
        Self(unsafe { self.0.alias() })
    }
}

/// The same bytes as memory of a peer that is not trusted, for code that accepts both kinds. Such
/// bytes are copied out before they are read. The conversion is free.
impl From<Frag<TrustedPeer>> for Frag<PeerShared> {
    fn from(frag: Frag<TrustedPeer>) -> Self {
        let (offset, len) = (frag.offset() as u32, frag.len() as u32);
        // SAFETY: the fragment passes on its count, and with it these bytes.
        Self(unsafe { Page::from_desc(frag.into_desc(), offset, len) })
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
