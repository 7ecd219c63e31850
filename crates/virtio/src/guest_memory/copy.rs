//! Copies of frames into the buffers of chains, and out of them.
//!
//! Two cases: all regions are mapped, which is the common one and has a loop of its own, or the
//! buffers may be in memory of both kinds.

use netmem_pool::foreign::{copy_across, copy_in, copy_out};

use super::buffer::{Buffer, pieces};
use super::error::CopyFailed;
use super::table::MemoryTable;

/// Writes `parts`, one after the other, into `buffers`, which have room for them.
pub(crate) fn scatter(table: &MemoryTable, parts: [&[u8]; 2], buffers: &[Buffer<'_>]) -> Result<(), CopyFailed> {
    if table.imports() {
        let mut place = (0, 0);
        return parts.into_iter().try_for_each(|part| put(table, part, buffers, &mut place));
    }
    // The common case by itself: a test for each frame, and not for each buffer.
    let mut buffers = buffers.iter();
    let (mut to, mut room) = (std::ptr::null_mut::<u8>(), 0);
    for mut part in parts {
        while !part.is_empty() {
            if room == 0 {
                let Some(b) = buffers.next() else { return Ok(()) };
                (to, room) = (b.host, b.len);
            }
            let n = room.min(part.len());
            // SAFETY: the buffer is *mapped* (its `MemoryTable` is borrowed by the pass), and
            // foreign memory never overlaps ours.
            unsafe { copy_in(&part[..n], to) };
            (to, room, part) = (to.wrapping_add(n), room - n, &part[n..]);
        }
    }
    Ok(())
}

/// Writes `bytes` into `buffers`, which have room for them, from `place` on: a number of a buffer,
/// and an offset in it. `place` moves behind the bytes. It stays if the copy fails. For a table
/// with imported regions: the buffers may be in memory of both kinds.
#[cold]
pub(crate) fn put(
    table: &MemoryTable,
    mut bytes: &[u8],
    buffers: &[Buffer<'_>],
    place: &mut (usize, usize),
) -> Result<(), CopyFailed> {
    let (mut index, mut at) = *place;
    while !bytes.is_empty() {
        let Some(buffer) = buffers.get(index) else { break };
        if buffer.host.is_null() {
            let (now, rest) = bytes.split_at(run(&buffers[index..], at, bytes.len()));
            table.write(buffer.guest + at as u64, now)?;
            (bytes, at) = (rest, at + now.len());
            while let Some(buffer) = buffers.get(index)
                && at >= buffer.len
            {
                (index, at) = (index + 1, at - buffer.len);
            }
            continue;
        }
        let (now, rest) = bytes.split_at(bytes.len().min(buffer.len - at));
        // SAFETY: the buffer is *mapped* (its `MemoryTable` is borrowed by the pass) and has so
        // many bytes behind `at`; foreign memory never overlaps ours.
        unsafe { copy_in(now, buffer.host.wrapping_add(at)) };
        (bytes, at) = (rest, at + now.len());
        if at == buffer.len {
            (index, at) = (index + 1, 0);
        }
    }
    *place = (index, at);
    Ok(())
}

/// Copies the `len` bytes behind the first `skip` of `from` into `to`, behind as many there. All
/// buffers are mapped, and there is room for the bytes. The two may be of one guest and overlap.
pub(crate) fn transfer(from: &[Buffer<'_>], to: &[Buffer<'_>], skip: usize, len: usize) {
    let (mut to, mut left) = (pieces(to, skip), len);
    let (mut at, mut room) = (std::ptr::null_mut::<u8>(), 0);
    for (mut piece, bytes) in pieces(from, skip) {
        let mut bytes = bytes.min(left);
        left -= bytes;
        while bytes > 0 {
            if room == 0 {
                let Some(next) = to.next() else { return };
                (at, room) = next;
            }
            let n = room.min(bytes);
            // SAFETY: both pieces are *mapped* (a pass borrows their `MemoryTable`s) and have `n`
            // bytes.
            unsafe { copy_across(piece, at, n) };
            (piece, bytes) = (piece.wrapping_add(n), bytes - n);
            (at, room) = (at.wrapping_add(n), room - n);
        }
    }
}

/// Copies the bytes of `buffers` into `into`, as far as there is room. Returns how many.
pub(crate) fn gather(table: &MemoryTable, buffers: &[Buffer<'_>], into: &mut [u8]) -> Result<usize, CopyFailed> {
    let (mut filled, mut done) = (0, 0);
    for (index, b) in buffers.iter().enumerate() {
        let room = into.len() - filled;
        if b.host.is_null() {
            // The bytes of `done` buffers were copied together with those of an earlier one.
            if index >= done {
                let bytes = run(&buffers[index..], 0, room);
                table.read(b.guest, &mut into[filled..filled + bytes])?;
                filled += bytes;
                done = index + joined(&buffers[index..]);
            }
            continue;
        }
        let n = b.len.min(room);
        // SAFETY: as in `put`; `into` has `n` bytes from `filled`.
        unsafe { copy_out(b.host, &mut into[filled..filled + n]) };
        filled += n;
    }
    Ok(filled)
}

/// How many of the first buffers are imported memory and follow each other in guest addresses: one
/// copy reaches them all.
#[cold]
fn joined(buffers: &[Buffer<'_>]) -> usize {
    let follows = |pair: &[Buffer<'_>]| pair[1].host.is_null() && pair[1].guest == pair[0].guest + pair[0].len as u64;
    1 + buffers.windows(2).take_while(|pair| follows(pair)).count()
}

/// How many bytes one copy reaches from byte `at` of the first buffer on, at most `most`.
#[cold]
fn run(buffers: &[Buffer<'_>], at: usize, most: usize) -> usize {
    let bytes: usize = buffers[..joined(buffers)].iter().map(|b| b.len).sum();
    (bytes - at).min(most)
}
