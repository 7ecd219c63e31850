//! A range of a page in one word.
//!
//! Why one word: a page or a fragment is then two words, which the compiler keeps in registers. If
//! offset and length are separate fields, the compiler passes them through memory: it writes them
//! in small pieces and reads them in one large piece. The processor then waits for the stores (no
//! store forwarding), which costs 20 ns per packet in the driver's receive path.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span(u64);

impl Span {
    #[inline]
    pub(crate) fn new(offset: u32, len: u32) -> Self {
        Self(u64::from(offset) | u64::from(len) << 32)
    }

    #[inline]
    pub(crate) fn offset(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(crate) fn len(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The range without its first `n` bytes. The range has at least `n` bytes.
    #[inline]
    pub(crate) fn from(self, n: u32) -> Self {
        debug_assert!(n <= self.len());
        Self::new(self.offset() + n, self.len() - n)
    }

    /// The first `n` bytes of the range. The range has at least `n` bytes.
    #[inline]
    pub(crate) fn to(self, n: u32) -> Self {
        debug_assert!(n <= self.len());
        Self::new(self.offset(), n)
    }
}
