//! The division of a UMEM into chunks, and the addresses of chunks and pages in it.
//!
//! ```text
//!   region   [ page 0         ][ page 1         ] ...
//!   chunks   [ 0     ][ 1     ][ 2     ][ 3     ] ...   a chunk is a page or a part of one
//!   address  0        2048     4096 ...                 bytes from the region's first
//! ```

/// The division of a UMEM into chunks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Bytes of the UMEM, which are the bytes of all pages.
    pub(crate) len: usize,
    /// Bytes in a chunk, a power of two.
    pub(crate) chunk: usize,
    /// The binary logarithm of the bytes in a chunk.
    pub(crate) shift: u32,
    /// Chunks in a page.
    pub(crate) per_page: u32,
    /// The binary logarithm of the bytes in a page.
    pub(crate) page_shift: u32,
    /// Bytes in front of a received frame, in addition to those of the kernel.
    pub(crate) headroom: u32,
    pub(crate) tx_metadata: bool,
    pub(crate) software_checksums: bool,
}

impl Layout {
    /// A UMEM of one chunk.
    pub(crate) const ONE_CHUNK: Self = Self {
        len: 4096,
        chunk: 4096,
        shift: 12,
        per_page: 1,
        page_shift: 12,
        headroom: 0,
        tx_metadata: false,
        software_checksums: false,
    };

    /// The number of chunks.
    pub(crate) fn chunks(&self) -> u32 {
        (self.len >> self.shift) as u32
    }

    /// The chunk that contains an address, or `None` if the address is not in the UMEM.
    #[inline(always)]
    pub(crate) fn chunk_of(&self, addr: u64) -> Option<u32> {
        (addr < self.len as u64).then_some((addr >> self.shift) as u32)
    }

    /// The page of a chunk, and the offset of the chunk in the page.
    #[inline(always)]
    pub(crate) fn page_of(&self, chunk: u32) -> (u32, usize) {
        let page = chunk >> (self.page_shift - self.shift);
        (page, ((chunk & (self.per_page - 1)) as usize) << self.shift)
    }

    /// The number of the page at an address. If the address is beyond the UMEM, so is the number.
    #[inline(always)]
    pub(crate) fn page_index(&self, addr: u64) -> u32 {
        u32::try_from(addr >> self.page_shift).unwrap_or(u32::MAX)
    }

    /// The address of a byte of a page.
    #[inline(always)]
    pub(crate) fn addr(&self, page: u32, offset: usize) -> u64 {
        (u64::from(page) << self.page_shift) + offset as u64
    }

    /// How many chunks `len` bytes from `addr` touch.
    #[inline(always)]
    pub(crate) fn chunks_of(&self, addr: u64, len: usize) -> u32 {
        if len == 0 {
            return 0;
        }
        ((addr + len as u64 - 1) >> self.shift) as u32 - (addr >> self.shift) as u32 + 1
    }
}
