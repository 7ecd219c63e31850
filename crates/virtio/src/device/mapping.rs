//! One mapping of a front end's file that is not guest memory: the dirty log and the in-flight region.

use std::os::fd::AsFd;

use rustix::mm::{MapFlags, ProtFlags};

use super::DeviceError;

/// A mapped piece of a file, readable and writable, unmapped when it is dropped.
///
/// Invariant (*mapped*): `at` is valid for reads and writes of `len` bytes for as long as the value exists. The front
/// end may write there at any time, so every access is atomic and what is read is checked.
#[derive(Debug)]
pub(super) struct Mapping {
    base: *mut u8,
    mapped: usize,
    /// Where the bytes asked for begin.
    pub(super) at: *mut u8,
    /// Bytes asked for.
    pub(super) len: usize,
}

// SAFETY: the mapping belongs to the value and to no thread; its bytes are accessed by atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset` on.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NotMemory`]: the file is no memory file. [`DeviceError::SharedFile`]: the range is empty, or not wholly inside the file. [`DeviceError::Io`]: the kernel
    /// refuses.
    pub(super) fn new(what: &'static str, file: impl AsFd, offset: u64, len: u64) -> Result<Self, DeviceError> {
        let failed = |source: rustix::io::Errno| DeviceError::Io { what, source: source.into() };
        // Only memory files have seals, and the kernel answers this by itself. On another file, the next calls could wait for
        // a file system that the front end serves.
        rustix::fs::fcntl_get_seals(&file).map_err(|_| DeviceError::NotMemory { what })?;
        let file_len = u64::try_from(rustix::fs::fstat(&file).map_err(failed)?.st_size).unwrap_or(0);
        let outside = || DeviceError::SharedFile { what, offset, len, file: file_len };
        let end = offset.checked_add(len).filter(|end| len > 0 && *end <= file_len).ok_or_else(outside)?;
        let from = offset & !4095;
        let mapped = usize::try_from(end - from).map_err(|_| outside())?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe {
            let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            rustix::mm::mmap(std::ptr::null_mut(), mapped, prot, flags, file, from)
        }
        .map_err(failed)?
        .cast::<u8>();
        Ok(Self { base, mapped, at: base.wrapping_add((offset - from) as usize), len: len as usize })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `mapped` are the mapping that `new` made.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.mapped) };
    }
}
