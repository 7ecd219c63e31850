//! Copies between private memory and memory that another process may be writing.
//!
//! # Why these copies are not plain ones
//!
//! A peer that writes during a copy makes the copy's contents arbitrary. It must make them nothing more: what was checked in
//! the private copy must be what is used. A plain copy does not promise that. The compiler may assume that memory does
//! not change behind its back, and so
//!
//! * turn a copy of the private copy into a second copy of the source (LLVM does this with `memcpy`);
//! * load a word of the source again where it needs it again, instead of keeping it.
//!
//! Rust has no copy for memory that changes. Each access here is therefore one of these:
//!
//! | bytes | access | why the source is read once |
//! | --- | --- | --- |
//! | up to 31 | words, by volatile accesses | a volatile access is neither repeated nor left out |
//! | 32 to 128 | vectors, each passed through an empty `asm` block as a register | to the compiler the block has made a new value, which is in no memory |
//! | more | `memcpy`, then an empty `asm` block that may have changed all memory | the private copy may differ from the source from then on, so it is the one that is read |
//!
//! None of this costs an instruction, but that the last keeps the compiler from holding values of other memory in registers over
//! the copy, which the call of `memcpy` does anyway.
//!
//! Words that decide something by themselves, as those of a ring, are atomics. Nothing makes a `&[u8]` of such memory.

use crate::bytes;

/// Copies `len` bytes, each read once. 32 to 128 of them take at most eight vector moves, where a call would cost as much as the
/// copy.
///
/// # Safety
///
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap. Either may be foreign memory.
#[inline(always)]
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: each block lies within `len` bytes of both; two blocks may overlap each other, which writes some bytes twice.
    unsafe {
        if (64..=80).contains(&len) {
            block::<4>(from, to);
            block::<1>(from.add(len - 16), to.add(len - 16));
        } else if (80..=128).contains(&len) {
            block::<4>(from, to);
            block::<4>(from.add(len - 64), to.add(len - 64));
        } else if (32..64).contains(&len) {
            block::<2>(from, to);
            block::<2>(from.add(len - 32), to.add(len - 32));
        } else {
            other(from, to, len);
        }
    }
}

/// A copy of another length.
///
/// # Safety
///
/// As [`copy`].
#[inline(always)]
unsafe fn other(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's. The block has no instruction.
    unsafe {
        if len < 32 {
            bytes::words(from, to, len);
        } else {
            std::ptr::copy_nonoverlapping(from, to, len);
            std::arch::asm!("/* {0} {1} */", in(reg) from, in(reg) to, options(nostack, preserves_flags));
        }
    }
}

#[cfg(target_arch = "x86_64")]
type Vector = std::arch::x86_64::__m128i;
#[cfg(not(target_arch = "x86_64"))]
type Vector = [u64; 2];

/// Copies `N` vectors of 16 bytes. All are loaded before the first is stored.
///
/// # Safety
///
/// As [`copy`], for `16 * N` bytes.
#[inline(always)]
unsafe fn block<const N: usize>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller's.
    unsafe {
        let mut vectors = from.cast::<[Vector; N]>().read_unaligned();
        vectors.iter_mut().for_each(launder);
        to.cast::<[Vector; N]>().write_unaligned(vectors);
    }
}

/// Makes of a value that was loaded one that the compiler knows nothing about, and so cannot load again.
#[inline(always)]
fn launder(vector: &mut Vector) {
    // SAFETY: no instruction; the register keeps its value.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!("/* {0} */", inout(xmm_reg) * vector, options(pure, nomem, nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    for word in vector {
        // SAFETY: as above.
        unsafe { std::arch::asm!("/* {0} */", inout(reg) * word, options(pure, nomem, nostack, preserves_flags)) };
    }
}
