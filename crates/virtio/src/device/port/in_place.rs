//! The driver's buffers, handed to the kernel as they are: one `readv` or `writev` for each frame,
//! and no copy in this process.
//!
//! ```text
//!   readv  │ header, private │ posted buffers, behind their virtio header │ rest, private │
//!             checked here      the frame, if it fits                        what does not fit
//!
//!   writev │ head, private │ the driver's buffers, behind the bytes of the head │
//!             checked here    payload
//! ```
//!
//! The head of a sent frame has the virtio header and all others up to that of the transport. What
//! is behind it is read once, by the kernel: a driver that changes it meanwhile changes what it
//! sends.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use netmem_pool::foreign::copy_out;

use crate::guest_memory::buffer::{Buffer, pieces};

/// The smallest page of memory.
const PAGE: usize = 4096;
/// The most buffers of the driver in one call. The rest of a frame goes into private memory.
pub(super) const MOST: usize = 62;
/// The same, if few buffers are enough.
const FEW: usize = 2;

/// Writable buffers that the driver has posted, for one frame. Other processes may read and write
/// there.
#[derive(Clone, Copy, Debug)]
pub struct Posted<'p> {
    buffers: &'p [Buffer<'p>],
    /// Bytes at the front of the buffers that are skipped: the place of the virtio header.
    header: usize,
}

impl<'p> Posted<'p> {
    pub(in crate::device) fn new(buffers: &'p [Buffer<'p>], header: usize) -> Self {
        Self { buffers, header }
    }

    /// The pieces behind the header: where each is, and its bytes.
    fn pieces(self) -> impl Iterator<Item = (*mut u8, usize)> + 'p {
        pieces(self.buffers, self.header)
    }

    /// Reads from `fd`: first into `head`, then into the posted buffers (at most [`MOST`] of them),
    /// then into `rest` from the byte on that follows those of the buffers, as if `rest` held them
    /// too. Returns the bytes read, and how many of them the buffers hold at most.
    pub(super) fn read(self, fd: &impl AsFd, head: &mut [u8], rest: &mut [u8]) -> io::Result<(usize, usize)> {
        if self.buffers.len() <= FEW {
            self.read_with::<{ FEW + 2 }>(fd, head, rest)
        } else {
            self.read_with::<{ MOST + 2 }>(fd, head, rest)
        }
    }

    fn read_with<const N: usize>(self, fd: &impl AsFd, head: &mut [u8], rest: &mut [u8]) -> io::Result<(usize, usize)> {
        let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; N];
        let (mut used, mut room) = (1, 0);
        parts[0] = libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: head.len() };
        for (part, (host, len)) in parts[1..N - 1].iter_mut().zip(self.pieces()) {
            // Never more than `rest` could hold.
            let len = len.min(rest.len() - room);
            *part = libc::iovec { iov_base: host.cast(), iov_len: len };
            (used, room) = (used + 1, room + len);
        }
        let rest = &mut rest[room..];
        parts[used] = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        // SAFETY: `head` and `rest` are private and borrowed; the buffers are *mapped* (their
        // `MemoryTable` is borrowed by the pass), and no slice is of their memory. At most `N`
        // parts were written.
        let read = unsafe { libc::readv(fd.as_fd().as_raw_fd(), parts.as_ptr(), used as libc::c_int + 1) };
        usize::try_from(read).map(|n| (n, room)).map_err(|_| io::Error::last_os_error())
    }

    /// Writes a frame behind the header, for tests of what happens to it then.
    #[cfg(test)]
    pub(in crate::device) fn fill(self, mut frame: &[u8]) {
        for (at, len) in self.pieces() {
            let (now, rest) = frame.split_at(frame.len().min(len));
            // SAFETY: the piece is *mapped*, and foreign memory does not overlap ours.
            unsafe { netmem_pool::foreign::copy_in(now, at) };
            frame = rest;
        }
    }

    /// The first bytes behind the header, as many as `into` has.
    pub(super) fn copy_out(self, mut into: &mut [u8]) {
        for (host, len) in self.pieces() {
            let (now, later) = into.split_at_mut(len.min(into.len()));
            // SAFETY: the buffer is *mapped* for `len` bytes.
            unsafe { copy_out(host, now) };
            into = later;
        }
    }

    /// Reads a byte of each page of the first `len` bytes behind the header. If the kernel could
    /// not write to a page, it does not report which; Linux' tap reports no error at all. An access
    /// of this process finds such a page. The kernel has just written these lines, so they are in
    /// the cache.
    pub(super) fn touch(self, len: usize) {
        touch(self.pieces(), len);
    }
}

/// Reads a byte of each page of the first `len` bytes of these pieces of buffers.
fn touch(pieces: impl Iterator<Item = (*mut u8, usize)>, mut len: usize) {
    for (host, piece) in pieces {
        let n = piece.min(len);
        for at in (0..n).step_by(PAGE).chain(n.checked_sub(1)) {
            // SAFETY: the buffer is *mapped* for `piece` bytes, of which `at` is one.
            unsafe { copy_out(host.wrapping_add(at), &mut [0]) };
        }
        len -= n;
    }
}

/// The bytes of the driver's frame that were not copied out. Other processes may write there.
#[derive(Clone, Copy, Debug)]
pub struct Rest<'p> {
    buffers: &'p [Buffer<'p>],
    /// Bytes at the front of the buffers that were copied.
    copied: usize,
}

impl<'p> Rest<'p> {
    /// Behind the first `copied` bytes of `buffers`; `None` if there are too many buffers for one
    /// call.
    pub(in crate::device) fn new(buffers: &'p [Buffer<'p>], copied: usize) -> Option<Self> {
        (buffers.len() <= MOST).then_some(Self { buffers, copied })
    }

    /// Bytes.
    pub(in crate::device) fn len(self) -> usize {
        pieces(self.buffers, self.copied).map(|(_, len)| len).sum()
    }

    /// Writes `head` and the bytes to `fd`, by one call. Returns how many were written.
    pub(super) fn write(self, fd: &impl AsFd, head: &[u8]) -> io::Result<usize> {
        let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MOST + 1];
        parts[0] = libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() };
        let mut used = 1;
        for (part, (host, len)) in parts[1..].iter_mut().zip(pieces(self.buffers, self.copied)) {
            *part = libc::iovec { iov_base: host.cast(), iov_len: len };
            used += 1;
        }
        // SAFETY: the kernel only reads. `head` is borrowed; the buffers are *mapped* (their
        // `MemoryTable` is borrowed by the pass), and no slice is of their memory. At most `MOST +
        // 1` parts were written.
        let written = unsafe { libc::writev(fd.as_fd().as_raw_fd(), parts.as_ptr(), used) };
        let written = usize::try_from(written).map_err(|_| io::Error::last_os_error());
        if written.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EFAULT)) {
            // The kernel does not report which page is gone. An access of this process finds it.
            touch(pieces(self.buffers, self.copied), usize::MAX);
        }
        written
    }
}
