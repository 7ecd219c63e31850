//! Guest memory that is a dma-buf: a buffer of a driver, which devices reach without the CPU.
//!
//! The CPU's caches and the exporter's device need not agree. An access by the CPU is therefore
//! between two calls of `DMA_BUF_IOCTL_SYNC`: the first makes visible what the exporter's device
//! has written, the second flushes what the CPU has written. Both are made for each copy, because a
//! copy is what lies between the pop of a chain and its completion:
//!
//! ```text
//!   a chain is popped ── START ── copy ── END ── the chain is completed
//! ```
//!
//! For the device, such memory is [imported](super::import): it has no address in a translation,
//! rings cannot be in it, and every access comes here.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use netmem_pool::FileMapping;
use netmem_pool::foreign::{copy_in, copy_out};
use rustix::io::Errno;

use super::import::ImportedMemory;
use crate::vhost_user::received::Received;

/// The flags of `struct dma_buf_sync`.
const READ: u64 = 1;
const WRITE: u64 = 2;
const END: u64 = 4;

/// Calls `DMA_BUF_IOCTL_SYNC`, with these flags. It begins again if a signal interrupts it.
fn sync(fd: BorrowedFd<'_>, flags: u64) -> io::Result<()> {
    const SYNC: libc::Ioctl = libc::_IOW::<u64>(b'b' as u32, 0);
    loop {
        // SAFETY: the request reads a `struct dma_buf_sync`, which consists of these flags.
        if unsafe { libc::ioctl(fd.as_raw_fd(), SYNC, &raw const flags) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if !matches!(Errno::from_io_error(&error), Some(Errno::INTR | Errno::AGAIN)) {
            return Err(error);
        }
    }
}

/// [`sync`], or what a test calls in its place.
type Sync = fn(BorrowedFd<'_>, u64) -> io::Result<()>;

/// A range of a dma-buf, mapped here.
#[derive(Debug)]
pub(super) struct DmaBuf {
    map: FileMapping,
    file: Received,
    /// Where the range begins in the file.
    start: u64,
    sync: Sync,
}

impl DmaBuf {
    /// Maps `len` bytes of a dma-buf from `start` on. The caller has checked that the file has
    /// them.
    ///
    /// # Errors
    ///
    /// The system's answer: not every exporter lets its buffers be mapped.
    pub(super) fn new(file: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<Self> {
        Self::with(file, start, len, sync)
    }

    fn with(file: BorrowedFd<'_>, start: u64, len: u64, sync: Sync) -> io::Result<Self> {
        let map = FileMapping::new(file, start, len)?;
        Ok(Self { map, file: file.try_clone_to_owned()?.into(), start, sync })
    }

    /// Calls `copy` with the address of the `len` bytes at `offset` of the file, between the two
    /// calls.
    fn access(&self, kind: u64, offset: u64, len: usize, copy: impl FnOnce(*mut u8)) -> io::Result<()> {
        let at = offset.checked_sub(self.start).and_then(|at| usize::try_from(at).ok());
        let at = at.filter(|at| at.checked_add(len).is_some_and(|end| end <= self.map.len()));
        let at = at.ok_or(io::ErrorKind::InvalidInput)?;
        let lost = self.map.lost();
        (self.sync)(self.file.as_fd(), kind)?;
        copy(self.map.as_ptr().wrapping_add(at));
        (self.sync)(self.file.as_fd(), END | kind)?;
        // Another thread's loss in the same buffer counts as well: the exporter has revoked the
        // buffer.
        if self.map.lost() == lost { Ok(()) } else { Err(Errno::FAULT.into()) }
    }
}

impl ImportedMemory for DmaBuf {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        // SAFETY: `access` has found that the bytes are *mapped*; foreign memory never overlaps
        // ours.
        self.access(WRITE, offset, bytes.len(), |at| unsafe { copy_in(bytes, at) })
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        // SAFETY: as in `write`.
        self.access(READ, offset, bytes.len(), |at| unsafe { copy_out(at, bytes) })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Mutex;

    use super::*;

    /// What the file has at offset 4096 at each call.
    static SEEN: Mutex<Vec<(u64, u8)>> = Mutex::new(Vec::new());

    fn seen(fd: BorrowedFd<'_>, flags: u64) -> io::Result<()> {
        let mut byte = [0];
        File::from(fd.try_clone_to_owned()?).read_exact_at(&mut byte, 4096)?;
        SEEN.lock().unwrap().push((flags, byte[0]));
        Ok(())
    }

    /// The CPU touches no byte before the first call of an access or after the last. The memory is
    /// a memfd, whose calls are recorded: where there is `/dev/udmabuf`,
    /// `tests/all/device/memory.rs` has dma-bufs of the kernel.
    #[test]
    fn accesses_are_between_the_calls() {
        let memory: File = rustix::fs::memfd_create(c"netmem-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
        memory.set_len(16384).unwrap();
        let buffer = DmaBuf::with(memory.as_fd(), 4096, 8192, seen).unwrap();
        buffer.write(4096, &[7; 100]).unwrap();
        let mut bytes = [0; 100];
        buffer.read(4096, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 100]);
        let calls = SEEN.lock().unwrap().clone();
        assert_eq!(calls, [(WRITE, 0), (END | WRITE, 7), (READ, 7), (END | READ, 7)]);
        // Bytes outside of the range are not reached.
        for (offset, len) in [(0, 1), (4095, 2), (4096 + 8192, 1), (4096 + 8100, 100), (u64::MAX, 1)] {
            assert!(buffer.write(offset, &vec![1; len]).is_err() && buffer.read(offset, &mut vec![0; len]).is_err());
        }
        assert_eq!(SEEN.lock().unwrap().len(), 4);
        // A file that is no dma-buf does not have the call.
        let buffer = DmaBuf::new(memory.as_fd(), 0, 4096).unwrap();
        assert_eq!(Errno::from_io_error(&buffer.write(0, &[1]).unwrap_err()), Some(Errno::NOTTY));
    }
}
