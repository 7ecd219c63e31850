//! Copies between private and foreign memory, short ones without a call.

use super::queue::Buffer;

/// Copies `len` bytes; 32 to 128 of them in at most eight vector moves, where a call would cost as much as the copy.
///
/// # Safety
///
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap. Either may be foreign memory: what
/// another process writes meanwhile makes the bytes arbitrary, and nothing else.
#[inline(always)]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: each block lies within `len` bytes of both; two blocks may overlap each other, which writes the same
    // bytes twice.
    unsafe {
        if (64..=80).contains(&len) {
            block::<64>(from, to);
            block::<16>(from.add(len - 16), to.add(len - 16));
        } else if (80..=128).contains(&len) {
            block::<64>(from, to);
            block::<64>(from.add(len - 64), to.add(len - 64));
        } else if (32..64).contains(&len) {
            block::<32>(from, to);
            block::<32>(from.add(len - 32), to.add(len - 32));
        } else {
            std::ptr::copy_nonoverlapping(from, to, len);
        }
    }
}

/// # Safety
///
/// As [`copy`], for `N` bytes.
#[inline(always)]
unsafe fn block<const N: usize>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller's.
    unsafe { to.cast::<[u8; N]>().write_unaligned(from.cast::<[u8; N]>().read_unaligned()) }
}

/// Writes `parts`, one after the other, into `buffers`, which have room for them.
pub(super) fn scatter(parts: [&[u8]; 2], buffers: &[Buffer<'_>]) {
    let mut buffers = buffers.iter();
    let (mut to, mut room) = (std::ptr::null_mut::<u8>(), 0);
    for mut part in parts {
        while !part.is_empty() {
            if room == 0 {
                let Some(b) = buffers.next() else { return };
                (to, room) = (b.host, b.len);
            }
            let n = room.min(part.len());
            // SAFETY: the buffer is *mapped* (its `MemoryTable` is borrowed by the pass), and foreign memory never
            // overlaps ours.
            unsafe { copy(part.as_ptr(), to, n) };
            (to, room, part) = (to.wrapping_add(n), room - n, &part[n..]);
        }
    }
}

/// Reads the bytes of `buffers` into `into`, as far as there is room; says how many.
pub(super) fn gather(buffers: &[Buffer<'_>], into: &mut [u8]) -> usize {
    let mut at = 0;
    for b in buffers {
        let n = b.len.min(into.len() - at);
        // SAFETY: as in `scatter`; `into` has `n` bytes from `at`.
        unsafe { copy(b.host, into[at..].as_mut_ptr(), n) };
        at += n;
    }
    at
}
