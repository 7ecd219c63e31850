//! The Internet checksum (RFC 1071) in software: of bytes, and of packets whose checksum was not
//! computed yet.

use super::words::{plus, words};
use crate::frags::MAX_FRAGS;
use crate::meta::Checksum;
use crate::packet::Packet;
use netmem_pool::{Frag, Mapped, OutOfRange, Page, WriteError};
use std::ops::Range;

/// Bytes copied out of a fragment at a time. The copy is in the first-level cache when it is added
/// up.
const BOUNCE: usize = 1024;
/// Bytes that [`Packet::complete_checksum`] leaves free in front of a head that it has to copy.
const HEADROOM: usize = 128;

/// A ones' complement sum of 16-bit words, to which bytes are added piece by piece.
///
/// Pieces may have any length and alignment: a piece behind an odd number of bytes is added as if
/// the bytes were in one piece. Adding costs one instruction for each 8 bytes, or two without AVX2.
///
/// ```
/// use netmem_packet::Sum;
///
/// // The example of RFC 1071, in pieces.
/// let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
/// let mut sum = Sum::default();
/// for piece in [&bytes[..3], &bytes[3..4], &bytes[4..]] {
///     sum.add(piece);
/// }
/// assert_eq!(sum.value(), 0xddf2);
/// assert_eq!(sum.checksum(), !0xddf2);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// The sum of words in the byte order of this machine, not folded: modulo 2^64 - 1, which is a
    /// multiple of 0xffff.
    words: u64,
    /// Whether the bytes so far are odd in number.
    odd: bool,
}

impl Sum {
    /// Adds bytes, behind those that were added before.
    #[inline]
    pub fn add(&mut self, bytes: &[u8]) {
        let words = words(bytes);
        // One byte further on, every byte is in the other half of its word.
        let words = if self.odd { words.rotate_left(8) } else { words };
        self.words = plus(self.words, words);
        self.odd ^= bytes.len() % 2 == 1;
    }

    /// Adds a range of the bytes of a fragment, behind those that were added before. They are read
    /// in place if the kind of memory allows it, and copied out otherwise.
    ///
    /// # Panics
    ///
    /// If the fragment has fewer bytes.
    #[inline]
    pub fn add_fragment<M: Mapped>(&mut self, frag: &Frag<M>, range: Range<usize>) {
        match frag.readable() {
            Some(bytes) => self.add(&bytes[range]),
            None => self.add_copied(frag, range),
        }
    }

    /// Adds bytes that can change, so that they are copied out first.
    fn add_copied<M: Mapped>(&mut self, frag: &Frag<M>, range: Range<usize>) {
        assert!(range.end <= frag.len(), "{range:?} of {} bytes", frag.len());
        let mut bounce = [0; BOUNCE];
        for at in range.clone().step_by(BOUNCE) {
            let now = &mut bounce[..BOUNCE.min(range.end - at)];
            let copied = frag.copy_to(at, now);
            debug_assert!(copied.is_ok());
            self.add(now);
        }
    }

    /// Adds a number of 16 bits, independent of how many bytes were added before.
    #[inline]
    pub fn add_word(&mut self, word: u16) {
        self.words = plus(self.words, u64::from(word.to_be()));
    }

    /// The sum, as the number that its two bytes are on the wire.
    #[inline]
    #[must_use]
    pub fn value(self) -> u16 {
        u16::from_be(fold(self.words))
    }

    /// The complement of the sum: what a checksum field holds. A result of 0 is returned as 0xffff,
    /// which is equal in ones' complement, because in UDP, 0 means that there is no checksum.
    #[inline]
    #[must_use]
    pub fn checksum(self) -> u16 {
        match !self.value() {
            0 => 0xffff,
            checksum => checksum,
        }
    }
}

/// The sum of the four words of 16 bits, in ones' complement. It is 0 only if all of them are.
#[inline]
pub(super) fn fold(sum: u64) -> u16 {
    let (half, carry) = (sum as u32).overflowing_add((sum >> 32) as u32);
    let half = half + u32::from(carry);
    let (word, carry) = (half as u16).overflowing_add((half >> 16) as u16);
    word + u16::from(carry)
}

/// Completes a partial checksum in a frame that is a slice: the sum is from `start` to the frame's
/// end, and is stored at `start + offset`, where the sum of the pseudo header is at first. Returns
/// false and does nothing if the place is outside of the frame.
///
/// ```
/// # use netmem_packet::complete_checksum;
/// let mut frame = [0xaa, 0x12, 0x34, 0, 0];
/// assert!(complete_checksum(&mut frame, 1, 2));
/// assert_eq!(frame[3..], (!0x1234_u16).to_be_bytes());
/// assert!(!complete_checksum(&mut frame, 1, 3));
/// ```
#[must_use]
pub fn complete_checksum(frame: &mut [u8], start: u16, offset: u16) -> bool {
    let (start, at) = (usize::from(start), usize::from(start) + usize::from(offset));
    if at + 2 > frame.len() {
        return false;
    }
    let mut sum = Sum::default();
    sum.add(&frame[start..]);
    frame[at..at + 2].copy_from_slice(&sum.checksum().to_be_bytes());
    true
}

/// Why the checksum of a packet was not computed. The packet is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChecksumError {
    /// The place of the checksum is outside of the packet.
    #[error("the checksum's place is outside of the packet")]
    OutOfRange(#[from] OutOfRange),
    /// The bytes are shared, and there is no page to copy them into.
    #[error("the checksum's place is shared with another holder of the page, and no page is free for a copy")]
    NoPage,
    /// The bytes are shared, and the part of the packet that has to be copied does not fit a page.
    #[error("the checksum's place is shared with another holder of the page, and the head does not fit a page")]
    TooLong,
}

/// The sum of `len` bytes from `offset` of fragments.
pub(crate) fn sum<'f, M: Mapped>(
    fragments: impl Iterator<Item = &'f Frag<M>>,
    offset: usize,
    len: usize,
) -> Result<Sum, OutOfRange> {
    let mut sum = Sum::default();
    let (mut skip, mut left, mut have) = (offset, len, 0);
    for frag in fragments {
        have += frag.len();
        let at = skip.min(frag.len());
        let now = left.min(frag.len() - at);
        sum.add_fragment(frag, at..at + now);
        (skip, left) = (skip - at, left - now);
    }
    if left > 0 { Err(OutOfRange { offset, len, have }) } else { Ok(sum) }
}

impl<M: Mapped> Packet<M> {
    /// The sum of `len` bytes from `offset`, across fragments. Each byte is read once.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] if the packet is shorter.
    #[inline]
    pub fn sum(&self, offset: usize, len: usize) -> Result<Sum, OutOfRange> {
        if OutOfRange::check(offset, len, self.head().len()).is_ok() {
            let mut sum = Sum::default();
            sum.add_fragment(self.head(), offset..offset + len);
            return Ok(sum);
        }
        sum(self.fragments(), offset, len)
    }

    /// Computes the checksum in software if it is [`Checksum::Partial`], and stores it; `meta` is
    /// then [`Checksum::Verified`] then. Does nothing to another packet.
    ///
    /// If another holder is on the page of the checksum's place, the packet's bytes up to there are
    /// copied into a page that `page` returns. Reads every byte behind the place where the sum
    /// begins, once.
    ///
    /// # Errors
    ///
    /// [`ChecksumError`]; the packet is as it was.
    pub fn complete_checksum(&mut self, page: impl FnOnce() -> Option<Page<M>>) -> Result<(), ChecksumError> {
        let Checksum::Partial { start, offset } = self.meta.checksum else { return Ok(()) };
        let (start, at) = (usize::from(start), usize::from(start) + usize::from(offset));
        OutOfRange::check(at, 2, self.len())?;
        let checksum = self.sum(start, self.len() - start)?.checksum().to_be_bytes();
        match self.write_at(at, &checksum) {
            Ok(()) => {}
            Err(WriteError::OutOfRange(error)) => return Err(error.into()),
            Err(_) => {
                self.own_front(at + 2, page)?;
                // The bytes are in a page of the packet's own now.
                let written = self.write_at(at, &checksum);
                debug_assert!(written.is_ok());
            }
        }
        self.meta.checksum = Checksum::Verified;
        Ok(())
    }

    /// Copies the first `len` bytes into a page of their own, and the whole head if the packet has
    /// no room for another fragment.
    fn own_front(&mut self, len: usize, page: impl FnOnce() -> Option<Page<M>>) -> Result<(), ChecksumError> {
        let len = if self.frags().len() == MAX_FRAGS { len.max(self.head().len()) } else { len };
        let page = page().ok_or(ChecksumError::NoPage)?;
        let headroom = HEADROOM.min(page.len().checked_sub(len).ok_or(ChecksumError::TooLong)?);
        self.copy_head(len, page, headroom).map_err(|_| ChecksumError::TooLong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_pool::{PeerShared, PoolOptions, Private, RegionOptions, RegionProvider, SystemMemory};

    /// One word after the other, as in RFC 1071.
    fn plain(bytes: &[u8]) -> u16 {
        let words = bytes.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], *w.get(1).unwrap_or(&0)])));
        let mut sum = 0;
        for word in words {
            sum += word;
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    /// Proves NET-9: the sum of any bytes, in any pieces and at any alignment, is the sum word
    /// by word.
    #[test]
    fn sums_in_pieces() {
        let mut rng = fastrand::Rng::with_seed(3);
        let mut bytes: Vec<u8> = (0..4096).map(|_| rng.u8(..)).collect();
        for turn in 0..2000 {
            if turn % 100 == 0 {
                // The most carries, and the most zeroes.
                bytes.fill([0xff, 0][turn / 100 % 2]);
                (0..40).for_each(|_| bytes[rng.usize(..4096)] = rng.u8(..));
            }
            let start = rng.usize(..40);
            let whole = &bytes[start..start + rng.usize(..if turn % 2 == 0 { 100 } else { 4000 })];
            let (mut rest, mut sum) = (whole, Sum::default());
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rng.usize(1..=rest.len()));
                sum.add(now);
                rest = later;
            }
            // 0 and 0xffff are equal; bytes that are not all zero never sum up to 0.
            assert_eq!(sum.value(), plain(whole));
            sum.add_word(0x1234);
            assert_eq!(sum.value(), plain(&[whole, &[0][..whole.len() % 2], &[0x12, 0x34]].concat()));
        }
    }

    /// The sum of a packet is the same in memory that is read in place and in memory that is copied
    /// out first, wherever it begins and ends.
    #[test]
    fn memory_is_read_in_place_or_copied() {
        fn sums<M: Mapped + SystemMemory>(bytes: &[u8], cuts: &[usize], ranges: &[(usize, usize)]) -> Vec<u16> {
            let region = RegionOptions::new(8).huge_pages(false).build::<M>().unwrap();
            let mut pool = PoolOptions::new("rx0").build(RegionProvider::new(region), None).unwrap();
            let mut frags = cuts.windows(2).map(|cut| {
                let (part, mut page) = (&bytes[cut[0]..cut[1]], pool.alloc().unwrap());
                page.copy_from(7, part).unwrap();
                page.freeze_range(7..7 + part.len())
            });
            let mut packet = Packet::new(frags.next().unwrap());
            frags.for_each(|frag| packet.push(frag).unwrap());
            assert!(packet.sum(0, packet.len() + 1).is_err());
            assert_eq!(packet.head().readable().is_some(), M::READABLE);
            ranges.iter().map(|(at, len)| packet.sum(*at, *len).unwrap().value()).collect()
        }
        let mut rng = fastrand::Rng::with_seed(7);
        let bytes: Vec<u8> = (0..5000).map(|_| rng.u8(..)).collect();
        let mut range = || {
            let at = rng.usize(0..5000);
            (at, rng.usize(0..=5000 - at))
        };
        let ranges: Vec<_> = (0..300).map(|_| range()).collect();
        let expected: Vec<_> = ranges.iter().map(|(at, len)| plain(&bytes[*at..at + len])).collect();
        let cuts = [0, 55, 2078, 4001, 5000];
        assert_eq!(sums::<Private>(&bytes, &cuts, &ranges), expected);
        assert_eq!(sums::<PeerShared>(&bytes, &cuts, &ranges), expected);
    }
}
