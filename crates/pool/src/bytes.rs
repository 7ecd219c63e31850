//! Accesses to bytes of pages, which another process may be writing: checked ranges, and [copies](crate::foreign).

use crate::foreign;

/// An access outside of a page or fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at offset {offset} reach beyond the {have} bytes there are")]
pub struct OutOfRange {
    /// Where the access began.
    pub offset: usize,
    /// Bytes asked for.
    pub len: usize,
    /// Bytes there are.
    pub have: usize,
}

impl OutOfRange {
    /// Checks that `len` bytes at `offset` lie within `have`.
    ///
    /// # Errors
    ///
    /// Itself, if they do not.
    #[inline]
    pub fn check(offset: usize, len: usize, have: usize) -> Result<(), Self> {
        if offset <= have && len <= have - offset { Ok(()) } else { Err(Self { offset, len, have }) }
    }
}

#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unaligned<T>(T);

const WORD: usize = size_of::<u64>();
const HALF: usize = size_of::<u32>();

/// Copies out of memory that may change meanwhile.
///
/// # Safety
///
/// `from` is valid for reads of `to.len()` bytes; other processes may write it.
#[inline]
pub(crate) unsafe fn copy_out(from: *const u8, to: &mut [u8]) {
    // SAFETY: the caller's; no foreign memory is in a slice.
    unsafe { foreign::copy(from, to.as_mut_ptr(), to.len()) }
}

/// Copies into memory that another process may read or write meanwhile.
///
/// # Safety
///
/// `to` is valid for writes of `from.len()` bytes; other processes may touch it.
#[inline]
pub(crate) unsafe fn copy_in(from: &[u8], to: *mut u8) {
    // SAFETY: the caller's; no foreign memory is in a slice.
    unsafe { foreign::copy(from.as_ptr(), to, from.len()) }
}

/// Copies `len` bytes by volatile accesses: words, a half word, bytes.
///
/// # Safety
///
/// `from` is readable and `to` writable for `len` bytes, by volatile accesses.
#[inline(always)]
pub(crate) unsafe fn words(from: *const u8, to: *mut u8, len: usize) {
    let whole = len / WORD;
    for i in 0..whole {
        // SAFETY: word `i` ends at or before `len` on both sides, and needs no alignment.
        unsafe { volatile::<u64>(from.add(i * WORD), to.add(i * WORD)) };
    }
    let mut at = whole * WORD;
    if len - at >= HALF {
        // SAFETY: as above, half a word.
        unsafe { volatile::<u32>(from.add(at), to.add(at)) };
        at += HALF;
    }
    for i in at..len {
        // SAFETY: as above, a byte at a time.
        unsafe { volatile::<u8>(from.add(i), to.add(i)) };
    }
}

/// # Safety
///
/// `from` is readable and `to` writable by volatile accesses, for a `T` without alignment.
#[inline(always)]
unsafe fn volatile<T: Copy>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller's.
    unsafe { to.cast::<Unaligned<T>>().write_volatile(from.cast::<Unaligned<T>>().read_volatile()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_arrives() {
        let source: Vec<u8> = (0..=255).collect();
        for start in 0..9 {
            for len in 0..240 {
                let mut middle = [0xeeu8; 256];
                let mut end = vec![0; len];
                // SAFETY: 3 + 239 bytes fit in 256.
                unsafe {
                    copy_in(&source[start..start + len], middle.as_mut_ptr().add(3));
                    copy_out(middle.as_ptr().add(3), &mut end);
                }
                assert_eq!(end, &source[start..start + len]);
                assert!(middle[..3].iter().chain(&middle[3 + len..]).all(|&b| b == 0xee));
            }
        }
    }

    #[test]
    fn range_checks_do_not_overflow() {
        assert!(OutOfRange::check(4, 4, 8).is_ok());
        assert!(OutOfRange::check(8, 0, 8).is_ok());
        assert!(OutOfRange::check(5, 4, 8).is_err());
        assert!(OutOfRange::check(usize::MAX, 2, 8).is_err());
        assert!(OutOfRange::check(2, usize::MAX, 8).is_err());
    }
}
