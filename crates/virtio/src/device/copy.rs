//! Copies of frames into the buffers of chains, and out of them.

use netmem_pool::foreign::{copy_in, copy_out};

use crate::virtqueue::device::Buffer;

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
            unsafe { copy_in(&part[..n], to) };
            (to, room, part) = (to.wrapping_add(n), room - n, &part[n..]);
        }
    }
}

/// Copies the bytes of `buffers` into `into`, as far as there is room. Returns how many.
pub(super) fn gather(buffers: &[Buffer<'_>], into: &mut [u8]) -> usize {
    let mut at = 0;
    for b in buffers {
        let n = b.len.min(into.len() - at);
        // SAFETY: as in `scatter`; `into` has `n` bytes from `at`.
        unsafe { copy_out(b.host, &mut into[at..at + n]) };
        at += n;
    }
    at
}
