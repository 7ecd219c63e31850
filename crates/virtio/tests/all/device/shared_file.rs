//! A file that the front end shares in addition to the guest's memory: a dirty log, or an in-flight
//! region.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A file of `len` bytes that the front end shares in addition to its memory.
pub(super) struct SharedFile {
    pub(super) file: std::fs::File,
    at: *mut u8,
    pub(super) len: usize,
}

impl SharedFile {
    pub(super) fn new(file: std::fs::File, len: usize) -> Self {
        // SAFETY: a new mapping of the whole file.
        let at = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &file, 0).unwrap()
        };
        Self { file, at: at.cast(), len }
    }

    /// Where byte `n` is.
    pub(super) fn at(&self, n: usize) -> *mut u8 {
        assert!(n < self.len);
        self.at.wrapping_add(n)
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        // SAFETY: inside the mapping; read by bytes, while the device may write.
        (0..self.len).map(|n| unsafe { self.at(n).read_volatile() }).collect()
    }

    pub(super) fn fill(&self, byte: impl Fn(usize) -> u8) {
        // SAFETY: inside the mapping.
        (0..self.len).for_each(|n| unsafe { self.at(n).write_volatile(byte(n)) });
    }

    pub(super) fn u16(&self, n: usize) -> u16 {
        // SAFETY: inside the mapping; aligned by its callers.
        unsafe { self.at(n).cast::<u16>().read_volatile() }
    }

    pub(super) fn set_u16(&self, n: usize, value: u16) {
        // SAFETY: as above.
        unsafe { self.at(n).cast::<u16>().write_volatile(value) }
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { munmap(self.at.cast(), self.len).unwrap() };
    }
}
