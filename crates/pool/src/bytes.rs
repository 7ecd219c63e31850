//! The check that a range of bytes lies within a page or fragment, and the traits of the crate
//! `bytes`.

use crate::frag::Frag;
use crate::memory::Readable;
use crate::page::Page;
use bytes::buf::UninitSlice;
use bytes::{Buf, BufMut, Bytes};
use std::ops::{Bound, Range, RangeBounds};

/// An access outside of a page or fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at offset {offset} reach beyond the {have} bytes there are")]
pub struct OutOfRange {
    /// The first byte of the access.
    pub offset: usize,
    /// Bytes asked for.
    pub len: usize,
    /// Bytes that the page or fragment has.
    pub have: usize,
}

impl OutOfRange {
    /// Checks that `len` bytes at `offset` lie within `have`.
    ///
    /// # Errors
    ///
    /// Itself, if they do not.
    #[inline]
    pub fn check(offset: usize, len: usize, have: usize) -> Result<(), Self> {
        if offset <= have && len <= have - offset { Ok(()) } else { Err(Self { offset, len, have }) }
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

/// By value and apart, so that the caller, which is on the receive path, keeps the range in registers.
#[cold]
#[inline(never)]
#[track_caller]
fn beyond(start: usize, end: usize, have: usize) -> ! {
    panic!("{start}..{end} of {have} bytes")
}

/// Reads from the front, and takes what was read off the fragment ([`advance`](Frag::advance)). No
/// byte is copied by [`copy_to_bytes`](Buf::copy_to_bytes): it makes one heap allocation and one
/// more count of the page.
impl<M: Readable> Buf for Frag<M> {
    #[inline]
    fn remaining(&self) -> usize {
        self.len()
    }

    #[inline]
    fn chunk(&self) -> &[u8] {
        self
    }

    #[inline]
    fn advance(&mut self, n: usize) {
        Frag::advance(self, n);
    }

    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        if len == 0 {
            return Bytes::new();
        }
        self.split_to(len).into()
    }
}

/// Appends behind the bytes, up to the end of the page. A page as it was allocated is full:
/// [`truncate`](Page::truncate) it first. If another value is on the page, or the page is in
/// quarantine, there is no room.
///
/// ```
/// # use netmem_pool::{PoolOptions, Private, RegionOptions, RegionProvider};
/// use bytes::BufMut;
/// # let region = RegionOptions::new(8).huge_pages(false).build::<Private>()?;
/// # let mut pool = PoolOptions::new("tx0").build(RegionProvider::new(region), None)?;
/// let mut page = pool.alloc().ok_or("no page")?;
/// page.truncate(0);
/// page.put_u16(0x0800);
/// page.put_slice(b"hello");
/// assert_eq!((&*page, page.remaining_mut()), (&b"\x08\0hello"[..], 4089));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
// SAFETY: the chunk is the room behind the bytes, which is no other value's, and `advance_mut`
// makes a part of it theirs.
unsafe impl<M: Readable> BufMut for Page<M> {
    #[inline]
    fn remaining_mut(&self) -> usize {
        self.room_behind()
    }

    #[inline]
    unsafe fn advance_mut(&mut self, n: usize) {
        self.grow(n);
    }

    #[inline]
    fn chunk_mut(&mut self) -> &mut UninitSlice {
        let (room, end) = (self.room_behind(), self.len());
        // SAFETY: within the page, and of no other value: this is the only one on the page, and
        // borrowed exclusively.
        unsafe { UninitSlice::from_raw_parts_mut(self.as_ptr().add(end), room) }
    }
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

    #[test]
    fn range_checks_do_not_overflow() {
        assert!(OutOfRange::check(4, 4, 8).is_ok());
        assert!(OutOfRange::check(8, 0, 8).is_ok());
        assert!(OutOfRange::check(5, 4, 8).is_err());
        assert!(OutOfRange::check(usize::MAX, 2, 8).is_err());
        assert!(OutOfRange::check(2, usize::MAX, 8).is_err());
    }
}
