//! One mapping of a front end's file that is not guest memory: the dirty log or the in-flight
//! region.

use std::os::fd::AsFd;

use netmem_pool::FileMapping;

use super::error::MemoryError;
use crate::vhost_user::received::is_memory;

/// A mapped range of a file, readable and writable, unmapped when it is dropped.
///
/// Invariant (*mapped*): `at` is valid for reads and writes of `len` bytes for as long as the value
/// exists. The front end may write there at any time, so every access is atomic and what is read is
/// checked.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// The first of the requested bytes.
    pub(crate) at: *mut u8,
    /// The number of requested bytes.
    pub(crate) len: usize,
    _map: FileMapping,
}

// SAFETY: the mapping belongs to the value and to no thread; its bytes are accessed by atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset` on. `what` names the file in errors.
    ///
    /// # Errors
    ///
    /// [`MemoryError::NotMemory`]: the file is no memory file. [`MemoryError::SharedFile`]: the
    /// range is empty, or not wholly inside the file. [`MemoryError::Io`]: the kernel refuses.
    pub(crate) fn new(what: &'static str, file: impl AsFd, offset: u64, len: u64) -> Result<Self, MemoryError> {
        let failed = |source: std::io::Error| MemoryError::Io { what, source };
        // Only memory files have seals, and the kernel answers this by itself. On another file, the
        // next calls could wait for a file system that the front end serves.
        if !is_memory(file.as_fd()) {
            return Err(MemoryError::NotMemory { what });
        }
        let stat = rustix::fs::fstat(&file).map_err(|e| failed(e.into()))?;
        let file_len = u64::try_from(stat.st_size).unwrap_or(0);
        let outside = MemoryError::SharedFile { what, offset, len, file: file_len };
        offset.checked_add(len).filter(|end| len > 0 && *end <= file_len).ok_or(outside)?;
        let map = FileMapping::new(file.as_fd(), offset, len).map_err(failed)?;
        Ok(Self { at: map.as_ptr(), len: map.len(), _map: map })
    }
}
