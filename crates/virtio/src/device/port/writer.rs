//! Frames that the kernel reads straight from the driver's buffers: one `writev` for each.
//!
//! ```text
//!   writev │ head, private │ the driver's buffers, behind the bytes of the head │
//!           checked here     payload
//! ```
//!
//! The head has the virtio header and all others up to that of the transport. What is behind it is read once, by the kernel:
//! a driver that changes it meanwhile changes what it sends.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use super::reader::{self, MOST};
use crate::guest_memory::buffer::Buffer;

/// The bytes of the driver's frame that were not copied out. Other processes may write there.
#[derive(Clone, Copy, Debug)]
pub struct Rest<'p> {
    buffers: &'p [Buffer<'p>],
    /// Bytes at the front of the buffers that were copied.
    copied: usize,
}

impl<'p> Rest<'p> {
    /// Behind the first `copied` bytes of `buffers`; `None` if there are too many buffers for one call.
    pub(in crate::device) fn new(buffers: &'p [Buffer<'p>], copied: usize) -> Option<Self> {
        (buffers.len() <= MOST).then_some(Self { buffers, copied })
    }

    /// Bytes.
    pub(in crate::device) fn len(self) -> usize {
        reader::pieces(self.buffers, self.copied).map(|(_, len)| len).sum()
    }

    /// Writes `head` and the bytes to `fd`, by one call. Returns how many were written.
    pub(super) fn write(self, fd: &impl AsFd, head: &[u8]) -> io::Result<usize> {
        let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MOST + 1];
        parts[0] = libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() };
        let mut used = 1;
        for (part, (host, len)) in parts[1..].iter_mut().zip(reader::pieces(self.buffers, self.copied)) {
            *part = libc::iovec { iov_base: host.cast(), iov_len: len };
            used += 1;
        }
        // SAFETY: the kernel only reads. `head` is borrowed; the buffers are *mapped* (their `MemoryTable` is borrowed by the
        // pass), and no slice is of their memory. At most `MOST + 1` parts were written.
        let written = unsafe { libc::writev(fd.as_fd().as_raw_fd(), parts.as_ptr(), used) };
        let written = usize::try_from(written).map_err(|_| io::Error::last_os_error());
        if written.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EFAULT)) {
            // The kernel does not say which page is gone. An access of this process finds it.
            reader::touch(reader::pieces(self.buffers, self.copied), usize::MAX);
        }
        written
    }
}
