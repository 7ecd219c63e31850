//! Frames that the kernel writes straight into the driver's buffers: one `readv` for each, and no
//! copy in between.
//!
//! ```text
//!   readv │ header, private │ posted buffers, behind their virtio header │ rest, private │
//!            checked here      the frame, if it fits                        what does not fit
//! ```
//!
//! The number of posted buffers depends on the lengths of the last frames: one more buffer costs a
//! translation, and a frame that does not fit costs a copy. A frame is assembled in private memory,
//! and shown by [`Port::peek`](super::Port::peek) like any other, if
//!
//! * it is longer than the posted buffers: other buffers, or several chains of the driver, may hold
//!   it;
//! * the driver does not accept it as it is: it is changed in software, or dropped.

use std::io;
use std::os::fd::AsFd;

use super::in_place::Posted;
use super::interface::MAX_WIRE;
use crate::net::{Offloads, VnetHdr};

/// The expected length of the first frame: one of the standard MTU, with a VLAN tag and its virtio
/// header.
const EXPECTED: usize = VnetHdr::LEN + 1518;

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

    /// Reads the next frame into the driver's buffers. Returns `None` if there was none, or if it
    /// is in private memory now.
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
    use super::super::in_place::MOST;
    use super::*;
    use crate::guest_memory::buffer::Buffer;
    use crate::net::feature;
    use std::os::unix::net::UnixDatagram;

    /// Reads `frame` into buffers of `lens` bytes, behind a header of 12; what the reader returns,
    /// and the bytes of the buffers.
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

    /// A frame with an offload that the driver did not accept is kept as it came: software changes
    /// it.
    #[test]
    fn offloads_are_validated_before_the_driver_has_the_frame() {
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
