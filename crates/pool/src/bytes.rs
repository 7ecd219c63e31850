//! Pages and fragments as buffers of the crate `bytes`.

use crate::frag::Frag;
use crate::memory::Readable;
use crate::page::Page;
use bytes::buf::UninitSlice;
use bytes::{Buf, BufMut, Bytes};

/// Reads from the front, and removes what was read from the fragment ([`advance`](Frag::advance)).
/// No byte is copied by [`copy_to_bytes`](Buf::copy_to_bytes): it makes one heap allocation and one
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
