//! A page, or a part of one, that has one owner.

use crate::desc::Desc;
use crate::error::OutOfRange;
use crate::foreign;
use crate::frag::Frag;
use crate::memory::{Device, Mapped, Memory, PAGE_SIZE, Readable};
use crate::recycle;
use crate::span::Span;
use netmem_percpu::prefetch;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Bound, Deref, DerefMut, Range, RangeBounds};
use std::ptr::NonNull;

/// Which bytes of which page a [`Page`] is: see [`Page::id`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageId {
    desc: usize,
    span: Span,
}

/// Exclusive, writable bytes of one page; the unique counterpart of [`Frag`].
///
/// ```text
///   page   ├──────────────────────────────────────────┤   one descriptor, one count for each value
///   Page         ├─────────────────┤                      offset, len: no other value has these
/// ```
///
/// As allocated it is the whole page. [`split_off`](Self::split_off) and
/// [`split_to`](Self::split_to) make two of it, which share the page and not a byte.
/// [`advance`](Self::advance) and [`truncate`](Self::truncate) narrow it without touching the
/// count.
///
/// If the value is the only one on the page, dropping it returns the page to its pool. In the
/// pool's own poll context that costs two loads, two comparisons and a push; elsewhere a push on
/// this CPU's magazine. A page cannot be dropped twice. If it is forgotten ([`std::mem::forget`]),
/// it shows as in flight.
///
/// A page of memory that is [`Readable`] is a slice of bytes:
///
/// ```
/// # use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
/// # let region = RegionOptions::new(8).huge_pages(false).build::<Private>()?;
/// # let mut pool = PoolOptions::new("tx0").build(RegionProvider::new(region), None)?;
/// let mut page = pool.alloc().ok_or("no page")?;
/// page[64..69].copy_from_slice(b"hello");
/// page.advance(64);
/// page.truncate(5);
/// assert_eq!((&*page, page.offset()), (&b"hello"[..], 64));
/// // The bytes in front still belong to no other value.
/// assert!(page.prepend(b"> "));
/// assert_eq!((&*page, page.offset()), (&b"> hello"[..], 62));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[repr(C)]
pub struct Page<M: Memory> {
    desc: NonNull<Desc>,
    span: Span,
    kind: PhantomData<fn() -> M>,
}

// SAFETY: an exclusive owner of bytes; the descriptor is made for being shared between threads.
unsafe impl<M: Memory> Send for Page<M> {}
// SAFETY: by shared reference the bytes can be read only.
unsafe impl<M: Memory> Sync for Page<M> {}

impl<M: Memory> Page<M> {
    /// # Safety
    ///
    /// The caller passes on a count of this page, and with it `len` bytes from `offset`, which no
    /// other value has.
    #[inline]
    pub(crate) unsafe fn from_desc(desc: NonNull<Desc>, offset: u32, len: u32) -> Self {
        Self { desc, span: Span::new(offset, len), kind: PhantomData }
    }

    #[inline]
    pub(crate) fn desc(&self) -> &Desc {
        // SAFETY: our count keeps the descriptor.
        unsafe { self.desc.as_ref() }
    }

    #[inline]
    pub(crate) fn desc_ptr(&self) -> NonNull<Desc> {
        self.desc
    }

    /// One more count of the same bytes.
    ///
    /// # Safety
    ///
    /// From now on neither value is used to write them, until one of them is the only value on the
    /// page.
    #[inline]
    pub(crate) unsafe fn alias(&self) -> Self {
        self.desc().get();
        Self { ..*self }
    }

    /// The same value again.
    ///
    /// # Safety
    ///
    /// One of the two is not dropped, and the bytes are not written while there are two.
    #[inline(always)]
    pub(crate) unsafe fn copy(&self) -> Self {
        Self { ..*self }
    }

    /// Appends the bytes of `next`, which are those behind these in the same page.
    #[inline]
    pub(crate) fn extend(&mut self, next: Self) {
        debug_assert!(self.desc == next.desc && self.offset() + self.len() == next.offset());
        self.span = Span::new(self.span.offset(), self.span.len() + next.span.len());
    }

    /// Which bytes of the page they are.
    #[inline(always)]
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// Makes other bytes of the page those of the value, by one store of the whole word. A compiler
    /// would store a length alone, which a processor does not forward to a load of the word.
    ///
    /// # Safety
    ///
    /// They are in the page, and no other value has them.
    #[inline(always)]
    pub(crate) unsafe fn set_span(&mut self, span: Span) {
        // SAFETY: an exclusive reference; a volatile store is not made narrower.
        unsafe { (&raw mut self.span).write_volatile(span) };
    }

    /// The same, by value and with the same contract.
    #[inline(always)]
    pub(crate) unsafe fn with_span(self, span: Span) -> Self {
        // SAFETY: the count is passed on; the bytes are the caller's.
        unsafe { Self::from_desc(self.into_desc(), span.offset(), span.len()) }
    }

    /// Gives up the value without dropping the count.
    #[inline]
    pub(crate) fn into_desc(self) -> NonNull<Desc> {
        ManuallyDrop::new(self).desc
    }

    /// Gives up the value, but keeps its count of the page and the exclusive right to its bytes.
    /// For a holder that keeps pages by number. Returns the page's number. With it
    /// [`Region::page`](crate::Region::page) makes a page again, and
    /// [`Region::put`](crate::Region::put) puts the count. Until then the page is in flight.
    #[inline]
    #[must_use = "the page does not return to its pool before its count is put"]
    pub fn into_count(self) -> u32 {
        let index = self.index();
        let _ = self.into_desc();
        index
    }

    /// Bytes.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a page that is empty is of no interest")]
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

    /// A multiple of 64 that differs between neighbouring pages of a region, for buffers that are
    /// to begin at different offsets: else their first bytes would share a set of the cache. It
    /// does not change. Touches no memory.
    #[inline(always)]
    #[must_use]
    pub fn colour(&self) -> u32 {
        // A descriptor has 64 bytes, which is asserted where `Desc` is defined.
        self.desc.as_ptr().addr() as u32 & !63
    }

    /// Which bytes of which page these are. While a page is in use, two values with the same number
    /// are the same value: bytes have one owner. For a holder that lends a page and gets one back.
    #[inline(always)]
    #[must_use]
    pub fn id(&self) -> PageId {
        self.id_of(self.span)
    }

    /// The same for other bytes of the page.
    #[inline(always)]
    pub(crate) fn id_of(&self, span: Span) -> PageId {
        PageId { desc: self.desc.as_ptr().addr(), span }
    }

    /// The device's address of the first byte, if the pool maps pages for a
    /// [domain](crate::DmaDomain); else the address of [`as_ptr`](Self::as_ptr) or, where nothing
    /// is mapped, the [`file_offset`](Page::file_offset). Meaningless for pages from no pool.
    #[inline]
    #[must_use]
    pub fn dma_addr(&self) -> u64 {
        self.desc().dma() + u64::from(self.span.offset())
    }

    /// Prefetches the page's descriptor, which the drop of the page will touch. The thread does not
    /// wait for it.
    #[inline]
    pub fn prefetch(&self) {
        prefetch::to_read(self.desc.as_ptr());
    }

    /// Identity of the domain in which devices may read the page at [`dma_addr`](Self::dma_addr). 0
    /// if there is none: the pool has no domain, or maps
    /// [`FromDevice`](crate::Direction::FromDevice), or its device is gone and the mapping with it.
    /// Equal numbers mean the same domain.
    #[inline]
    #[must_use]
    pub fn dma_domain(&self) -> usize {
        // SAFETY: *header stays* while the page is ours.
        if self.desc().is_mapped() { unsafe { (*self.desc().header()).domain() } } else { 0 }
    }

    /// Removes `n` bytes from the front. Touches no count: no atomic.
    ///
    /// # Panics
    ///
    /// If there are fewer than `n` bytes.
    #[inline]
    pub fn advance(&mut self, n: usize) {
        self.span = self.span.from(self.check(n));
    }

    /// Shortens the page to its first `len` bytes; does nothing if it has no more. Touches no
    /// count: no atomic.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        if len < self.len() {
            self.span = self.span.to(len as u32);
        }
    }

    /// Cuts the page in two: `self` keeps the first `at` bytes, the rest is returned. One atomic
    /// addition.
    ///
    /// # Panics
    ///
    /// If there are fewer than `at` bytes.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Self {
        let at = self.check(at);
        self.desc().get();
        let rest = Self { span: self.span.from(at), ..*self };
        self.span = self.span.to(at);
        rest
    }

    /// Cuts the page in two: the first `at` bytes are returned, `self` keeps the rest. One atomic
    /// addition.
    ///
    /// # Panics
    ///
    /// If there are fewer than `at` bytes.
    #[must_use]
    pub fn split_to(&mut self, at: usize) -> Self {
        let rest = self.split_off(at);
        std::mem::replace(self, rest)
    }

    /// Separates the unused bytes behind these from the page, up to the next multiple of
    /// [`PAGE_SIZE`], as a value of its own. `None` if there are none, if another
    /// value is on the page (also if it has other bytes of it), or if the page is in quarantine.
    /// One atomic addition.
    ///
    /// With it, small payload can be copied behind other payload, and its own page returns.
    #[must_use]
    pub fn split_tail(&mut self) -> Option<Self> {
        let end = self.offset() + self.len();
        let tail = end.next_multiple_of(PAGE_SIZE) - end;
        if tail == 0 || !self.has_whole_page() {
            return None;
        }
        self.desc().get();
        // No other value is on the page, so that the bytes behind these are no other value's.
        Some(Self { span: Span::new(end as u32, tail as u32), ..*self })
    }

    /// Device address and length of the part of `bytes` that is in the page.
    pub(crate) fn dma_range(&self, bytes: &Range<usize>) -> (u64, usize) {
        let start = bytes.start.min(self.len());
        (self.dma_addr() + start as u64, bytes.end.min(self.len()).saturating_sub(start))
    }

    /// `at` as a `u32`, which the span needs. Panics if the page has fewer bytes.
    #[inline]
    fn check(&self, at: usize) -> u32 {
        assert!(at <= self.len(), "{at} of {} bytes", self.len());
        at as u32
    }

    /// Whether this value is the only one on its page. One load.
    #[inline]
    #[must_use]
    pub fn is_sole(&self) -> bool {
        self.desc().is_sole()
    }

    /// Whether this value may use the whole page: no other value is on the page, and no device kept
    /// a part of it that was dropped.
    #[inline]
    fn has_whole_page(&self) -> bool {
        self.is_sole() && !self.desc().is_quarantined()
    }

    /// Bytes behind these in the page, which are no other value's. 0 if the page has another value,
    /// or is in quarantine.
    #[inline]
    pub(crate) fn room_behind(&self) -> usize {
        if !self.has_whole_page() {
            return 0;
        }
        // SAFETY: *header stays* while the page is ours.
        let page_size = unsafe { (*self.desc().header()).page_size() };
        page_size as usize - (self.offset() + self.len())
    }

    /// Appends the `n` bytes behind these.
    ///
    /// # Panics
    ///
    /// If there is [no room](Self::room_behind) for so many.
    #[inline]
    pub(crate) fn grow(&mut self, n: usize) {
        let room = self.room_behind();
        assert!(n <= room, "{n} bytes behind a page's, where {room} are free");
        self.span = Span::new(self.span.offset(), self.span.len() + n as u32);
    }

    /// Drops the page. The same as `drop`, but always inlined.
    #[inline(always)]
    pub fn release(self) {
        // SAFETY: the count is ours, and put here.
        unsafe { recycle::put(self.into_desc()) }
    }

    /// Makes the bytes shareable, and no longer writable. Free.
    #[inline]
    #[must_use]
    pub fn freeze(self) -> Frag<M> {
        Frag::from_page(self)
    }

    /// [`freeze`](Self::freeze), of some of the bytes.
    ///
    /// # Panics
    ///
    /// If the range reaches beyond the page.
    #[inline]
    #[must_use]
    pub fn freeze_range(mut self, range: impl RangeBounds<usize>) -> Frag<M> {
        let range = within(range, self.len());
        self.span = self.span.to(range.end as u32).from(range.start as u32);
        self.freeze()
    }

    /// The first byte's address. Which accesses are sound there depends on the kind of memory; the
    /// methods below are the safe ones.
    #[inline]
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8
    where
        M: Mapped,
    {
        // SAFETY: the offset lies within the page.
        unsafe { self.desc().addr().add(self.span.offset() as usize) }
    }

    /// A private copy of `N` bytes, each read once.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`].
    #[inline]
    pub fn read_at<const N: usize>(&self, offset: usize) -> Result<[u8; N], OutOfRange>
    where
        M: Mapped,
    {
        // First, so that the copy stays in registers.
        OutOfRange::check(offset, N, self.len())?;
        let mut copy = [0; N];
        // SAFETY: just checked; the page is ours.
        unsafe { foreign::copy_out(self.as_ptr().add(offset), &mut copy) };
        Ok(copy)
    }

    /// Copies bytes from `offset` out, each read once.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`].
    #[inline]
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange>
    where
        M: Mapped,
    {
        OutOfRange::check(offset, to.len(), self.len())?;
        // SAFETY: just checked; the page is ours.
        unsafe { foreign::copy_out(self.as_ptr().add(offset), to) };
        Ok(())
    }

    /// Copies bytes in at `offset`.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`]; nothing is written then.
    #[inline]
    pub fn copy_from(&mut self, offset: usize, from: &[u8]) -> Result<(), OutOfRange>
    where
        M: Mapped,
    {
        OutOfRange::check(offset, from.len(), self.len())?;
        // SAFETY: just checked; no other value has these bytes.
        unsafe { foreign::copy_in(from, self.as_ptr().add(offset)) };
        Ok(())
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
        if header.len() > self.offset() || !self.has_whole_page() {
            return false;
        }
        let n = header.len() as u32;
        self.span = Span::new(self.span.offset() - n, self.span.len() + n);
        // SAFETY: the bytes lie in the page, and just proved to be this value's; it cannot be
        // cloned meanwhile.
        unsafe { foreign::copy_in(header, self.as_ptr()) };
        true
    }

    /// The bytes.
    #[inline]
    #[must_use]
    pub fn as_slice(&self) -> &[u8]
    where
        M: Readable,
    {
        // SAFETY: the bytes are ours; memory that is `Readable` is written by no other party.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }

    /// See [`Frag::readable`](crate::Frag::readable).
    #[inline]
    pub(crate) fn readable(&self) -> Option<&[u8]>
    where
        M: Mapped,
    {
        // SAFETY: the bytes are ours; a kind of memory has `READABLE` if it is `Readable`: no other
        // party writes it.
        M::READABLE.then(|| unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) })
    }

    /// The bytes, to be changed.
    #[inline]
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8]
    where
        M: Readable,
    {
        // SAFETY: as for `as_slice`; by exclusive reference this process does not read them
        // meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len()) }
    }
}

impl Page<Device> {
    /// Where these bytes begin in their region's file.
    #[inline]
    #[must_use]
    pub fn file_offset(&self) -> u64 {
        self.desc().addr().addr() as u64 + u64::from(self.span.offset())
    }
}

impl<M: Readable> Deref for Page<M> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl<M: Readable> DerefMut for Page<M> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

impl<M: Readable> AsRef<[u8]> for Page<M> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl<M: Readable> AsMut<[u8]> for Page<M> {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl<M: Memory> Drop for Page<M> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the count is ours, and we are gone.
        unsafe { recycle::put(self.desc) }
    }
}

impl<M: Memory> fmt::Debug for Page<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.offset() + self.len();
        write!(f, "Page<{}>(#{} {}..{end})", M::NAME, self.index(), self.offset())
    }
}

/// The range, of bytes of which there are `have`.
///
/// # Panics
///
/// If the range reaches beyond them, or ends before it begins.
#[inline]
pub(crate) fn within(range: impl RangeBounds<usize>, have: usize) -> Range<usize> {
    // A bound that overflows reaches beyond any bytes.
    let start = match range.start_bound() {
        Bound::Included(&at) => Some(at),
        Bound::Excluded(&at) => at.checked_add(1),
        Bound::Unbounded => Some(0),
    };
    let end = match range.end_bound() {
        Bound::Included(&at) => at.checked_add(1),
        Bound::Excluded(&at) => Some(at),
        Bound::Unbounded => Some(have),
    };
    let (start, end) = (start.unwrap_or(usize::MAX), end.unwrap_or(usize::MAX));
    if start > end || end > have {
        beyond(start, end, have);
    }
    start..end
}

/// By value and apart, so that the caller, which is on the receive path, keeps the range in
/// registers.
#[cold]
#[inline(never)]
#[track_caller]
fn beyond(start: usize, end: usize, have: usize) -> ! {
    panic!("{start}..{end} of {have} bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_all_kinds() {
        assert_eq!([within(.., 8), within(2.., 8), within(..=7, 8), within(..8, 8)], [0..8, 2..8, 0..8, 0..8]);
        assert_eq!(within((Bound::Excluded(2), Bound::Included(4)), 8), 3..5);
        type Bounds = (Bound<usize>, Bound<usize>);
        let beyond: [Bounds; 5] = [
            (Bound::Unbounded, Bound::Included(8)),
            (Bound::Unbounded, Bound::Included(usize::MAX)),
            (Bound::Included(9), Bound::Unbounded),
            (Bound::Included(5), Bound::Excluded(4)),
            (Bound::Excluded(usize::MAX), Bound::Unbounded),
        ];
        for range in beyond {
            assert!(std::panic::catch_unwind(|| within(range, 8)).is_err(), "{range:?}");
        }
    }
}
