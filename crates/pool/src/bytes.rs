//! Copies between private memory and memory that another process may be writing.
//!
//! A peer that writes during a copy makes the copy's contents arbitrary, and nothing more: each byte is read once, by a
//! volatile access that the compiler can neither repeat nor split, and only the copy is used.

use std::ptr;

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
/// `from` is valid for reads of `to.len()` bytes (by volatile accesses; other processes may write it).
#[inline]
pub(crate) unsafe fn copy_out(from: *const u8, to: &mut [u8]) {
    let words = to.len() / WORD;
    let out = to.as_mut_ptr();
    for i in 0..words {
        // SAFETY: word `i` ends at or before `to.len()` on both sides, and needs no alignment.
        unsafe { move_out::<u64>(from.add(i * WORD), out.add(i * WORD)) };
    }
    let mut at = words * WORD;
    if to.len() - at >= HALF {
        // SAFETY: as above, half a word.
        unsafe { move_out::<u32>(from.add(at), out.add(at)) };
        at += HALF;
    }
    for i in at..to.len() {
        // SAFETY: as above, a byte at a time.
        unsafe { *out.add(i) = ptr::read_volatile(from.add(i)) };
    }
}

/// Copies into memory that another process may read or write meanwhile.
///
/// # Safety
///
/// `to` is valid for writes of `from.len()` bytes (by volatile accesses; other processes may touch it).
#[inline]
pub(crate) unsafe fn copy_in(from: &[u8], to: *mut u8) {
    let words = from.len() / WORD;
    let src = from.as_ptr();
    for i in 0..words {
        // SAFETY: word `i` ends at or before `from.len()` on both sides, and needs no alignment.
        unsafe { move_in::<u64>(src.add(i * WORD), to.add(i * WORD)) };
    }
    let mut at = words * WORD;
    if from.len() - at >= HALF {
        // SAFETY: as above, half a word.
        unsafe { move_in::<u32>(src.add(at), to.add(at)) };
        at += HALF;
    }
    for i in at..from.len() {
        // SAFETY: as above, a byte at a time.
        unsafe { ptr::write_volatile(to.add(i), *src.add(i)) };
    }
}

/// # Safety
///
/// `from` is readable by volatile accesses, `to` writable, for a `T` without alignment.
#[inline(always)]
unsafe fn move_out<T: Copy>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller's.
    unsafe { to.cast::<Unaligned<T>>().write(from.cast::<Unaligned<T>>().read_volatile()) }
}

/// # Safety
///
/// `from` is readable, `to` writable by volatile accesses, for a `T` without alignment.
#[inline(always)]
unsafe fn move_in<T: Copy>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller's.
    unsafe { to.cast::<Unaligned<T>>().write_volatile(from.cast::<Unaligned<T>>().read()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_arrives() {
        let source: Vec<u8> = (0..64).collect();
        for start in 0..9 {
            for len in 0..40 {
                let mut middle = [0xeeu8; 80];
                let mut end = vec![0; len];
                // SAFETY: 3 + 40 bytes fit in 80.
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
