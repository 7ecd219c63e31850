//! The buffers of a chain: ranges of guest memory, by host address or by guest address.
//!
//! A buffer borrows the table of its region, so that none outlives the pass that has translated it.

use std::marker::PhantomData;

use super::table::MemoryTable;
use super::view::View;

/// A range of the driver's memory, of the table that is borrowed for `'t`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer<'t> {
    /// Its address in this process. Null if the range is in an imported region, whose bytes are
    /// copied by their guest address.
    pub(crate) host: *mut u8,
    /// Bytes.
    pub(crate) len: usize,
    /// Whether the device writes it.
    pub(crate) write: bool,
    /// Its guest address, from the descriptor.
    pub(crate) guest: u64,
    table: PhantomData<&'t MemoryTable>,
}

impl<'t> Buffer<'t> {
    /// The `len` bytes at guest address `guest`, which are at `host` in this process.
    #[inline(always)]
    pub(crate) fn mapped(_: &View<'t>, host: *mut u8, len: usize, write: bool, guest: u64) -> Self {
        Self { host, len, write, guest, table: PhantomData }
    }

    /// The first bytes of the `left` (at least one) at guest address `guest`: those that lie in one
    /// region. `None` if no region has them.
    pub(crate) fn first_run(memory: &mut View<'t>, guest: u64, left: u32, write: bool) -> Option<Self> {
        let (host, len) = match memory.mapped_run(guest, left) {
            Some(mapped) => mapped,
            None => (std::ptr::null_mut(), memory.imported_run(guest, left)?),
        };
        Some(Self { host, len: len as usize, write, guest, table: PhantomData })
    }

    /// A writable buffer in memory that the caller keeps.
    #[cfg(test)]
    pub(crate) fn over(bytes: &'t mut [u8]) -> Self {
        Self { host: bytes.as_mut_ptr(), len: bytes.len(), write: true, guest: 0, table: PhantomData }
    }
}

/// The bytes of `buffers`, all of them mapped, behind the first `skip`: where each piece is, and
/// its bytes.
pub(crate) fn pieces<'p>(buffers: &'p [Buffer<'p>], mut skip: usize) -> impl Iterator<Item = (*mut u8, usize)> + 'p {
    buffers.iter().filter_map(move |buffer| {
        let n = skip.min(buffer.len);
        skip -= n;
        (buffer.len > n).then(|| (buffer.host.wrapping_add(n), buffer.len - n))
    })
}

/// The allocation of a list of buffers, kept between passes. It is empty then, because no address
/// outlives its pass.
#[derive(Debug, Default)]
pub(crate) struct BufferList(Vec<Buffer<'static>>);

// SAFETY: it is empty between passes, and a pass is on one thread.
unsafe impl Send for BufferList {}

impl BufferList {
    /// The allocation, for a pass.
    pub(crate) fn acquire<'t>(&mut self) -> Vec<Buffer<'t>> {
        std::mem::take(&mut self.0)
    }

    /// Returns the allocation, and forgets the buffers.
    pub(crate) fn release(&mut self, mut list: Vec<Buffer<'_>>) {
        list.clear();
        // The lifetime of the elements is changed. There are none, and the allocation stays.
        self.0 = list.into_iter().map(|b| Buffer { table: PhantomData, ..b }).collect();
    }
}
