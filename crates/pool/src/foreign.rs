//! Copies between private memory and memory that another process may be writing.
//!
//! # Why these copies are not plain ones
//!
//! If a peer writes during a copy, the copy's contents are arbitrary. That is allowed. But the
//! bytes that were checked in the private copy must be the bytes that are used. A plain copy does
//! not promise that. The compiler may assume that no other process changes the memory. It may
//! therefore
//!
//! * turn a copy of the private copy into a second copy of the source (LLVM does this with
//!   `memcpy`);
//! * load a word of the source again where the program uses it again, instead of keeping it.
//!
//! Rust has no copy for memory that changes. Each access here is therefore one of these:
//!
//! | bytes | access | why the source is read once |
//! | --- | --- | --- |
//! | up to 31 | words, by volatile accesses | a volatile access is neither repeated nor left out |
//! | 32 to 128 | vectors, each passed through an empty `asm` block as a register | to the compiler the block has made a new value, which is in no memory |
//! | more | `memcpy`, then an empty `asm` block that may have changed all memory | the private copy may differ from the source from then on, so it is the one that is read |
//!
//! None of this costs an instruction. The last access also keeps the compiler from holding values
//! of other memory in registers during the copy; the call of `memcpy` does so anyway.
//!
//! Words on which a decision depends directly, such as those of a ring, are read as atomics. No
//! code makes a `&[u8]` of such memory.

const WORD: usize = size_of::<u64>();
const HALF: usize = size_of::<u32>();
/// From this length on, copies are vectors or `memcpy`.
const VECTORS: usize = 32;
/// Up to this length, copies are a few vectors, all of a block loaded before the first is stored.
const BLOCKS: usize = 128;

/// Copies out of foreign memory, each byte read once. 32 to 128 bytes take at most eight vector
/// moves, where a call would cost as much as the copy.
///
/// # Safety
///
/// `from` is readable for `to.len()` bytes. Other processes may write there.
#[inline(always)]
pub unsafe fn copy_out(from: *const u8, to: &mut [u8]) {
    let (len, to) = (to.len(), to.as_mut_ptr());
    if len >= VECTORS {
        // SAFETY: the caller's; no foreign memory is in a slice.
        return unsafe { copy(from, to, len) };
    }
    // SAFETY: the pieces are those of `len` bytes on both sides.
    accesses(len, |at, access| unsafe {
        match access {
            Access::Word => move_out::<u64>(from.add(at), to.add(at)),
            Access::Half => move_out::<u32>(from.add(at), to.add(at)),
            Access::Byte => move_out::<u8>(from.add(at), to.add(at)),
        }
    });
}

/// Copies into foreign memory. Cost as [`copy_out`].
///
/// # Safety
///
/// `to` is writable for `from.len()` bytes. Other processes may read and write there.
#[inline(always)]
pub unsafe fn copy_in(from: &[u8], to: *mut u8) {
    let (len, from) = (from.len(), from.as_ptr());
    if len >= VECTORS {
        // SAFETY: the caller's; no foreign memory is in a slice.
        return unsafe { copy(from, to, len) };
    }
    // SAFETY: the pieces are those of `len` bytes on both sides.
    accesses(len, |at, access| unsafe {
        match access {
            Access::Word => move_in::<u64>(from.add(at), to.add(at)),
            Access::Half => move_in::<u32>(from.add(at), to.add(at)),
            Access::Byte => move_in::<u8>(from.add(at), to.add(at)),
        }
    });
}

/// Copies `len` bytes between two places of foreign memory, which may overlap: what arrives then is
/// arbitrary, as if a peer had written meanwhile. Nothing in this process depends on the bytes.
/// Cost as [`copy_out`].
///
/// # Safety
///
/// `from` is readable and `to` is writable for `len` bytes. Other processes may read and write
/// both.
#[inline(always)]
pub unsafe fn copy_across(from: *const u8, to: *mut u8, len: usize) {
    if len > BLOCKS {
        // SAFETY: the caller's.
        return unsafe { std::ptr::copy(from, to, len) };
    }
    if len >= VECTORS {
        // SAFETY: the caller's. Up to `BLOCKS` bytes are moved by blocks, which may overlap.
        return unsafe { copy(from, to, len) };
    }
    // SAFETY: the pieces are those of `len` bytes on both sides.
    accesses(len, |at, access| unsafe {
        match access {
            Access::Word => move_across::<u64>(from.add(at), to.add(at)),
            Access::Half => move_across::<u32>(from.add(at), to.add(at)),
            Access::Byte => move_across::<u8>(from.add(at), to.add(at)),
        }
    });
}

enum Access {
    Word,
    Half,
    Byte,
}

/// Cuts `len` bytes into words, at most one half word, and bytes; calls `f` with the place of each.
#[inline(always)]
fn accesses(len: usize, mut f: impl FnMut(usize, Access)) {
    let mut at = 0;
    while len - at >= WORD {
        f(at, Access::Word);
        at += WORD;
    }
    if len - at >= HALF {
        f(at, Access::Half);
        at += HALF;
    }
    (at..len).for_each(|at| f(at, Access::Byte));
}

#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unaligned<T>(T);

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

/// # Safety
///
/// `from` is readable, `to` writable by volatile accesses, for a `T` without alignment.
#[inline(always)]
unsafe fn move_across<T: Copy>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller's.
    unsafe { to.cast::<Unaligned<T>>().write_volatile(from.cast::<Unaligned<T>>().read_volatile()) }
}

/// Copies at least [`VECTORS`] bytes.
///
/// # Safety
///
/// `from` is readable and `to` writable for `len` bytes. If these are more than [`BLOCKS`], they do
/// not overlap. Either may be foreign memory.
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: each block lies within `len` bytes of both; two blocks may overlap each other, which
    // writes some bytes twice. The `asm` block has no instruction.
    unsafe {
        if (64..=80).contains(&len) {
            block::<4>(from, to);
            block::<1>(from.add(len - 16), to.add(len - 16));
        } else if (80..=BLOCKS).contains(&len) {
            block::<4>(from, to);
            block::<4>(from.add(len - 64), to.add(len - 64));
        } else if len < 64 {
            block::<2>(from, to);
            block::<2>(from.add(len - 32), to.add(len - 32));
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

/// Hides from the compiler where a loaded value came from, so that the compiler cannot load it
/// again.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Between two places that do not overlap, every byte arrives, and no other is written.
    #[test]
    fn every_length_crosses() {
        let source: Vec<u8> = (0..=255).collect();
        for (start, len) in (0..9).flat_map(|start| (0..240).map(move |len| (start, len))) {
            let mut to = [0xeeu8; 256];
            // SAFETY: 8 + 239 bytes fit in 256.
            unsafe { copy_across(source.as_ptr().add(start), to.as_mut_ptr().add(3), len) };
            assert_eq!(to[3..3 + len], source[start..start + len]);
            assert!(to[..3].iter().chain(&to[3 + len..]).all(|&b| b == 0xee));
        }
    }

    /// Places that overlap: nothing outside of the destination is written.
    #[test]
    fn places_that_overlap() {
        for (by, len) in (1..40).flat_map(|by| (0..200).map(move |len| (by, len))) {
            for (from, to) in [(0, by), (by, 0)] {
                let mut bytes: Vec<u8> = (0..=255).collect();
                let start = bytes.as_mut_ptr();
                // SAFETY: 39 + 199 bytes fit in 256.
                unsafe { copy_across(start.add(from), start.add(to), len) };
                let kept = |at: &usize| !(to..to + len).contains(at);
                assert!((0..256).filter(kept).all(|at| bytes[at] == at as u8));
            }
        }
    }

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
}
