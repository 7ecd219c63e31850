//! A range of another process's file, mapped here.

use crate::mapping::{Mapping, huge_page};
use crate::memory::PAGE_SIZE;
use rustix::fd::BorrowedFd;
use std::fmt;
use std::io;

/// A range of a file, mapped for reading and writing, for memory that a peer shares with this
/// process.
///
/// Unlike a [`Region`](crate::Region) it has no pages and no descriptors, it begins and ends at any
/// byte, and the file is not sealed: it is the peer's. The peer can write all bytes at any time,
/// and it can take pages away. If the [handler](crate::sigbus) of SIGBUS is installed, an access to
/// such a page is counted in [`lost`](Self::lost).
///
/// The range is not in the address space of a child process.
///
/// Invariant (*mapped*): the bytes from [`as_ptr`](Self::as_ptr) on can be read and written until
/// the value is dropped. Their contents are arbitrary at all times.
pub struct FileMapping {
    mapping: Mapping,
    /// Bytes in front of the range, because mappings begin where pages do.
    before: usize,
    len: usize,
}

// SAFETY: only the value's address can be reached.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps `len` bytes of `file` from `offset`. The caller checks that the file is long enough. A
    /// range of a file of huge pages is mapped in whole huge pages. They are reserved here, so that
    /// it is an error if there are too few. Costs four system calls.
    ///
    /// # Errors
    ///
    /// The system's answer; `InvalidInput` if the range has no bytes, or more than there are
    /// addresses.
    pub fn new(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<Self> {
        let page = huge_page(file).unwrap_or(PAGE_SIZE);
        let start = offset - offset % page as u64;
        let before = (offset - start) as usize;
        let end = offset.checked_add(len).and_then(|end| end.checked_next_multiple_of(page as u64));
        let mapped = end.and_then(|end| usize::try_from(end - start).ok()).filter(|_| len > 0);
        let mapped = mapped.ok_or(io::ErrorKind::InvalidInput)?;
        let mut mapping = Mapping::of_file(file, start, mapped, page)?;
        mapping.keep_from_children()?;
        Ok(Self { mapping, before, len: len as usize })
    }

    /// The first byte's address.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.at.as_ptr().cast::<u8>().wrapping_add(self.before)
    }

    /// Bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "there is at least one byte")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// How many accesses found that a page had been taken away. 0 without the
    /// [handler](crate::sigbus).
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.mapping.lost()
    }
}

impl fmt::Debug for FileMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileMapping({} bytes)", self.len)
    }
}
