//! The first bytes of a frame, which are read with checks.
//!
//! Why a type: a frame is longer than the bytes that a CPU can read here. `Bytes` distinguishes a
//! header that is cut short by the frame's end from one that continues behind the readable bytes.
//! Its methods are the only way by which parsers read.

/// A range of bytes that lies within a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByteRange {
    /// The first, counted from the frame's first.
    pub at: usize,
    /// How many.
    pub len: usize,
}

impl ByteRange {
    /// The byte behind the last.
    #[inline]
    #[must_use]
    pub const fn end(self) -> usize {
        self.at + self.len
    }
}

/// Why a frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// A length or a checksum of a header is wrong.
    #[error("a length or a checksum of a header is wrong")]
    Malformed,
    /// The headers are longer than the bytes that can be read; the frame has more bytes.
    #[error("headers go on behind the bytes that can be read")]
    Beyond {
        /// The port that a UDP datagram is for, if that much could be read.
        port: Option<u16>,
    },
    /// An unknown protocol, or a VLAN tag.
    #[error("a protocol that is not known")]
    Unknown,
    /// The sender wants to determine the route.
    #[error("a source route")]
    SourceRoute,
    /// An address that a frame on a link cannot have there.
    #[error("an address that a frame cannot have there")]
    Martian,
}

/// The first bytes of a frame, and how many there are in all.
#[derive(Clone, Copy)]
pub(super) struct Bytes<'h> {
    pub(super) head: &'h [u8],
    pub(super) len: usize,
}

impl<'h> Bytes<'h> {
    /// `head` may have more bytes than the frame; those are not looked at.
    #[inline]
    pub(super) fn new(head: &'h [u8], len: usize) -> Self {
        Self { head: &head[..head.len().min(len)], len }
    }

    /// `N` bytes from `at` on.
    #[inline]
    pub(super) fn at<const N: usize>(self, at: usize) -> Result<&'h [u8; N], ParseError> {
        match self.head.get(at..).and_then(|rest| rest.first_chunk()) {
            Some(bytes) => Ok(bytes),
            None => Err(self.missing(at, N)),
        }
    }

    /// `len` bytes from `at` on.
    #[inline]
    pub(super) fn range(self, at: usize, len: usize) -> Result<&'h [u8], ParseError> {
        match self.head.get(at..at + len) {
            Some(bytes) => Ok(bytes),
            None => Err(self.missing(at, len)),
        }
    }

    #[cold]
    fn missing(self, at: usize, len: usize) -> ParseError {
        if at + len <= self.len { ParseError::Beyond { port: None } } else { ParseError::Malformed }
    }
}

#[inline]
pub(super) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

#[inline]
pub(super) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
