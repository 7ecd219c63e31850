//! Frames that the kernel writes straight into the driver's buffers: one `readv` for each, and no copy in between.
//!
//! ```text
//!   readv │ header, private │ posted buffers, behind their virtio header │ rest, private │
//!            checked here      the frame, if it fits                        what does not fit
//! ```
//!
//! The number of posted buffers depends on the lengths of the last frames: one more buffer costs a translation, and a
//! frame that does not fit costs a copy. A frame is assembled in private memory, and shown by
//! [`Port::peek`](super::Port::peek) like any other, if
//!
//! * it is longer than the posted buffers: other buffers, or several chains of the driver, may hold it;
//! * the driver does not accept it as it is: it is changed in software, or dropped.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use netmem_pool::foreign::copy_out;

use super::MAX_WIRE;
use crate::guest_memory::buffer::Buffer;
use crate::net::{Offloads, VnetHdr};

/// The smallest page of memory.
const PAGE: usize = 4096;
/// The most buffers of the driver in one call. The rest of a frame goes into private memory.
pub(super) const MOST: usize = 62;
/// The same, if few buffers are enough.
const FEW: usize = 2;
/// The expected length of the first frame: one of the standard MTU, with a VLAN tag and its virtio header.
const EXPECTED: usize = VnetHdr::LEN + 1518;

/// Writable buffers that the driver has posted, for one frame. Other processes may read and write there.
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

    /// Reads from `fd`: first into `head`, then into the posted buffers (at most [`MOST`] of them), then into `rest` from the byte on
    /// that follows those of the buffers, as if `rest` held them too. Returns the bytes read, and how many of them the buffers hold
    /// at most.
    fn read(self, fd: &impl AsFd, head: &mut [u8], rest: &mut [u8]) -> io::Result<(usize, usize)> {
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
        // SAFETY: `head` and `rest` are private and borrowed; the buffers are *mapped* (their `MemoryTable` is borrowed by the pass),
        // and no slice is of their memory. At most `N` parts were written.
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
    fn copy_out(self, mut into: &mut [u8]) {
        for (host, len) in self.pieces() {
            let (now, later) = into.split_at_mut(len.min(into.len()));
            // SAFETY: the buffer is *mapped* for `len` bytes.
            unsafe { copy_out(host, now) };
            into = later;
        }
    }

    /// Reads a byte of each page of the first `len` bytes behind the header. If the kernel could not write to a page,
    /// it does not say which; Linux' tap reports no error at all. An access of this process finds such a page. The
    /// kernel has just written these lines, so they are in the cache.
    fn touch(self, len: usize) {
        touch(self.pieces(), len);
    }
}

/// The bytes of `buffers` behind the first `skip`: where each piece is, and its bytes.
pub(super) fn pieces<'p>(buffers: &'p [Buffer<'p>], mut skip: usize) -> impl Iterator<Item = (*mut u8, usize)> + 'p {
    buffers.iter().filter_map(move |buffer| {
        let n = skip.min(buffer.len);
        skip -= n;
        (buffer.len > n).then(|| (buffer.host.wrapping_add(n), buffer.len - n))
    })
}

/// Reads a byte of each page of the first `len` bytes of these pieces of buffers.
pub(super) fn touch(pieces: impl Iterator<Item = (*mut u8, usize)>, mut len: usize) {
    for (host, piece) in pieces {
        let n = piece.min(len);
        for at in (0..n).step_by(PAGE).chain(n.checked_sub(1)) {
            // SAFETY: the buffer is *mapped* for `piece` bytes, of which `at` is one.
            unsafe { copy_out(host.wrapping_add(at), &mut [0]) };
        }
        len -= n;
    }
}

/// A reader of frames in wire form from a descriptor: one frame with each call.
#[derive(Debug)]
pub(super) struct Reader {
    buffer: Box<[u8]>,
    /// Bytes in `buffer` of the frame that is shown.
    pending: usize,
    expected: usize,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self { buffer: vec![0; MAX_WIRE].into(), pending: 0, expected: EXPECTED }
    }

    /// The frame in private memory, if there is one.
    #[inline]
    pub(super) fn pending(&mut self) -> Option<&mut [u8]> {
        (self.pending > 0).then(|| &mut self.buffer[..self.pending])
    }

    /// Forgets the frame in private memory. Returns whether there was one.
    #[inline]
    pub(super) fn forget(&mut self) -> bool {
        std::mem::take(&mut self.pending) > 0
    }

    /// See [`Port::expects`](super::Port::expects).
    #[inline]
    pub(super) fn expects(&self) -> Option<usize> {
        (self.pending == 0).then_some(self.expected)
    }

    /// Reads the next frame into private memory. Returns whether there is one.
    pub(super) fn read_private(&mut self, fd: &impl AsFd) -> io::Result<bool> {
        let n = rustix::io::read(fd, &mut self.buffer[..])?;
        self.pending = if n > VnetHdr::LEN { n } else { 0 };
        Ok(self.pending > 0)
    }

    /// Reads the next frame into the driver's buffers. Returns `None` if there was none, or if it is in private memory
    /// now.
    pub(super) fn read(
        &mut self,
        fd: &impl AsFd,
        accepts: Offloads,
        posted: Posted<'_>,
    ) -> io::Result<Option<(VnetHdr, usize)>> {
        let Some((head, rest)) = self.buffer.split_first_chunk_mut::<{ VnetHdr::LEN }>() else { return Ok(None) };
        let (n, room) = match posted.read(fd, head, rest) {
            Ok(read) => read,
            Err(e) => {
                if e.raw_os_error() == Some(libc::EFAULT) {
                    posted.touch(usize::MAX);
                }
                return Err(e);
            }
        };
        if n <= VnetHdr::LEN {
            return Ok(None);
        }
        self.expected = n.max(self.expected - self.expected / 8);
        let len = n - VnetHdr::LEN;
        match accepts.check(VnetHdr::from_bytes(*head), len) {
            Ok(header) if len <= room => {
                posted.touch(len);
                Ok(Some((header, len)))
            }
            _ => {
                posted.copy_out(&mut rest[..len.min(room)]);
                self.pending = n;
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::feature;
    use std::os::unix::net::UnixDatagram;

    /// Reads `frame` into buffers of `lens` bytes, behind a header of 12; what the reader says, and the bytes of the buffers.
    fn read(reader: &mut Reader, accepts: u64, frame: &[u8], lens: &[usize]) -> (Option<(VnetHdr, usize)>, Vec<u8>) {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        ours.send(frame).unwrap();
        let mut memory: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0xee; len]).collect();
        let buffers: Vec<_> = memory.iter_mut().map(|bytes| Buffer::over(bytes)).collect();
        let read = reader.read(&theirs, Offloads::received(accepts), Posted::new(&buffers, VnetHdr::LEN)).unwrap();
        drop(buffers);
        (read, memory.concat())
    }

    fn frame(header: VnetHdr, len: usize) -> Vec<u8> {
        header.to_bytes().into_iter().chain((0..len).map(|i| (i * 7) as u8)).collect()
    }

    #[test]
    fn frames_land_behind_the_header() {
        for lens in [&[2000][..], &[12, 2000], &[5, 20, 1, 1, 500, 1500], &[1; 60], &[3; 100]] {
            for len in [14, 30, 46, 60, 200, 1514] {
                let (mut reader, sent) = (Reader::new(), frame(VnetHdr::PLAIN, len));
                let (read, memory) = read(&mut reader, 0, &sent, lens);
                let room = memory.len() - VnetHdr::LEN;
                // Buffers that the header fills are not counted.
                let given = if lens.len() > MOST { 3 * MOST } else { room };
                if len <= given.min(room) {
                    assert_eq!(read, Some((VnetHdr::PLAIN, len)), "{len} bytes in {lens:?}");
                    assert_eq!(memory[..12], [0xee; 12]);
                    assert_eq!(memory[12..12 + len], sent[12..]);
                    assert!(memory[12 + len..].iter().all(|&byte| byte == 0xee));
                    assert!(reader.pending().is_none() && reader.expects().is_some());
                } else {
                    // Part of it is in the buffers, and all of it is shown.
                    assert_eq!(read, None, "{len} bytes in {lens:?}");
                    assert_eq!((reader.expects(), reader.pending()), (None, Some(&mut sent.clone()[..])));
                    assert!(reader.forget() && reader.expects().is_some());
                }
            }
        }
    }

    /// The largest frame, and buffers for more than it.
    #[test]
    fn nothing_is_read_beyond_the_longest_frame() {
        let sent = frame(VnetHdr::PLAIN, MAX_WIRE - VnetHdr::LEN);
        for lens in [&[100_000][..], &[2000; 50], &[60_000, 1000]] {
            let mut reader = Reader::new();
            let (read, memory) = read(&mut reader, 0, &sent, lens);
            let shown = match read {
                Some((_, len)) => [&sent[..12], &memory[12..12 + len]].concat(),
                None => reader.pending().unwrap().to_vec(),
            };
            assert!(shown == sent, "{lens:?}");
        }
    }

    /// A frame with an offload that the driver did not accept is kept as it came: software changes it.
    #[test]
    fn offloads_are_judged_before_the_driver_has_the_frame() {
        let header = VnetHdr { flags: VnetHdr::NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..VnetHdr::PLAIN };
        let (mut reader, sent) = (Reader::new(), frame(header, 100));
        assert_eq!(read(&mut reader, 0, &sent, &[2000]).0, None);
        assert_eq!(reader.pending(), Some(&mut sent.clone()[..]));
        reader.forget();
        assert_eq!(read(&mut reader, feature::GUEST_CSUM, &sent, &[2000]).0, Some((header, 100)));
        let verified = VnetHdr { flags: VnetHdr::DATA_VALID, ..VnetHdr::PLAIN };
        assert_eq!(read(&mut reader, 0, &frame(verified, 100), &[2000]).0, Some((VnetHdr::PLAIN, 100)));
        // Impossible values are left to the receiver, which checks them.
        let nonsense = frame(VnetHdr { csum_start: 99, ..header }, 100);
        assert_eq!(read(&mut reader, feature::GUEST_CSUM, &nonsense, &[2000]).0, None);
        assert_eq!(reader.pending(), Some(&mut nonsense.clone()[..]));
    }

    /// As many buffers are asked for as the last frames needed.
    #[test]
    fn expectations_follow_the_traffic() {
        let mut reader = Reader::new();
        assert_eq!(reader.expects(), Some(EXPECTED));
        read(&mut reader, 0, &frame(VnetHdr::PLAIN, 60_000), &[70_000]);
        assert_eq!(reader.expects(), Some(60_012));
        for _ in 0..100 {
            read(&mut reader, 0, &frame(VnetHdr::PLAIN, 60), &[70_000]);
        }
        assert_eq!(reader.expects(), Some(72));
    }

    #[test]
    fn no_frame_is_no_frame() {
        let (_ours, theirs) = UnixDatagram::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let (mut reader, mut bytes) = (Reader::new(), [0; 100]);
        let buffers = [Buffer::over(&mut bytes)];
        let error = reader.read(&theirs, Offloads::default(), Posted::new(&buffers, 12)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert_eq!((read(&mut reader, 0, &[0; 12], &[100]).0, reader.expects()), (None, Some(EXPECTED)));
    }
}
