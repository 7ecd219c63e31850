//! How one pass over one queue translates guest addresses.
//!
//! Consecutive buffers are usually in one region, or in two that take turns: a guest's memory below
//! and above 4 GiB, or headers and payload. A view keeps the last region, so that the common
//! translation is two comparisons, and the number of the one before, which is tried before a
//! search.

use std::marker::PhantomData;

use super::table::MemoryTable;

/// A range of guest addresses, and where it is mapped in this process. The empty one matches no
/// address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window<'t> {
    start: u64,
    len: u64,
    host: *mut u8,
    table: PhantomData<&'t MemoryTable>,
}

impl Window<'_> {
    pub(super) const EMPTY: Self = Self { start: 0, len: 0, host: std::ptr::null_mut(), table: PhantomData };

    /// The `len` bytes at guest address `start`, which are mapped at `host`.
    #[inline]
    pub(super) fn new(start: u64, len: u64, host: *mut u8) -> Self {
        Self { start, len, host, table: PhantomData }
    }

    /// The host address of `len` bytes (at least one) at `addr`, if the window has them all.
    #[inline(always)]
    fn translate(&self, addr: u64, len: u32) -> Option<*mut u8> {
        let offset = addr.wrapping_sub(self.start);
        if offset < self.len && u64::from(len) <= self.len - offset {
            return Some(self.host.wrapping_add(offset as usize));
        }
        None
    }
}

/// How one pass over one queue reaches memory: the table, and the region that was used last. The
/// addresses that it returns are *mapped* (see [`MemoryTable`]) as long as the borrow lasts.
#[derive(Debug)]
pub(crate) struct View<'t> {
    table: &'t MemoryTable,
    last: Window<'t>,
    index: usize,
    /// The index of the region that was used before the last one.
    earlier: usize,
}

impl<'t> View<'t> {
    /// A view of `table` that tries region `hint` first.
    #[inline]
    pub(crate) fn new(table: &'t MemoryTable, hint: usize) -> Self {
        Self { table, last: table.window(hint), index: hint, earlier: usize::MAX }
    }

    /// The table.
    #[inline(always)]
    pub(crate) fn table(&self) -> &'t MemoryTable {
        self.table
    }

    /// The index of the region that was used last: a hint for the next view.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// The host address of `len` bytes (at least one) at `addr`, if one mapped region has them all.
    /// Two comparisons if it is the region of the last call; a few more and a load if it is the one
    /// before; else a binary search.
    #[inline(always)]
    pub(crate) fn translate(&mut self, addr: u64, len: u32) -> Option<*mut u8> {
        match self.last.translate(addr, len) {
            Some(host) => Some(host),
            None => self.other(addr, len),
        }
    }

    #[cold]
    fn other(&mut self, addr: u64, len: u32) -> Option<*mut u8> {
        let window = self.table.window(self.earlier);
        let Some(host) = window.translate(addr, len) else { return self.search(addr, len) };
        self.last = window;
        std::mem::swap(&mut self.index, &mut self.earlier);
        Some(host)
    }

    #[cold]
    fn search(&mut self, addr: u64, len: u32) -> Option<*mut u8> {
        let index = self.table.find(addr)?;
        let window = self.table.window(index);
        window.translate(addr, 1)?;
        (self.last, self.index, self.earlier) = (window, index, self.index);
        window.translate(addr, len)
    }

    /// Of `len` bytes (at least one) at `addr`, how many lie in one imported region from `addr` on.
    pub(crate) fn imported_run(&self, addr: u64, len: u32) -> Option<u32> {
        self.table.imported_run(addr, len)
    }

    /// Of `len` bytes (at least one) at `addr`, those that lie in one mapped region from `addr` on:
    /// their host address, and how many they are.
    pub(crate) fn mapped_run(&mut self, addr: u64, len: u32) -> Option<(*mut u8, u32)> {
        let host = self.translate(addr, 1)?;
        let here = self.last.len - (addr - self.last.start);
        Some((host, here.min(u64::from(len)) as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MemoryLimits, RegionInfo};
    use super::*;

    /// A view translates like one that has kept nothing, in whatever order regions take turns, and
    /// its index is that of the region that was used last.
    #[test]
    fn regions_that_take_turns() {
        const SIZE: u64 = 8192;
        let starts = [0x1_0000, 0x1_0000 + SIZE, 0x9_0000];
        let regions =
            starts.map(|start| RegionInfo { guest_addr: start, user_addr: start, size: SIZE, mmap_offset: 0 });
        let files = starts.map(|_| {
            let file = rustix::fs::memfd_create(c"netmem-view", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, SIZE).unwrap();
            file
        });
        let table = MemoryTable::new(&regions, files.into(), &MemoryLimits::default()).unwrap();
        let (mut view, mut rng) = (View::new(&table, usize::MAX), fastrand::Rng::with_seed(3));
        let mut found = [0; 3];
        for _ in 0..10_000 {
            // Some are in no region, and some reach over the end of one.
            let region = rng.usize(..3);
            let (addr, len) = (starts[region] + rng.u64(..SIZE + 100), rng.u32(1..300));
            let host = view.translate(addr, len);
            assert_eq!(host, table.translate(addr, len), "{len} bytes at {addr:#x}");
            if let Some(host) = host {
                let index = starts.iter().position(|start| (*start..start + SIZE).contains(&addr)).unwrap();
                assert_eq!(view.index(), index);
                assert_eq!(view.mapped_run(addr, u32::MAX), Some((host, (starts[index] + SIZE - addr) as u32)));
                found[index] += 1;
            }
        }
        assert!(found.iter().all(|&n| n > 1000), "{found:?}");
    }
}
