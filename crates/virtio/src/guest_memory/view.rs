//! How one pass over one queue translates guest addresses.
//!
//! Consecutive buffers are usually in one region. A view keeps that region, so that the common
//! translation is two comparisons.

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
}

impl<'t> View<'t> {
    /// A view of `table` that tries region `hint` first.
    #[inline]
    pub(crate) fn new(table: &'t MemoryTable, hint: usize) -> Self {
        Self { table, last: table.window(hint), index: hint }
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
    /// Two comparisons if it is the region of the last call; else a binary search.
    #[inline(always)]
    pub(crate) fn translate(&mut self, addr: u64, len: u32) -> Option<*mut u8> {
        match self.last.translate(addr, len) {
            Some(host) => Some(host),
            None => self.search(addr, len),
        }
    }

    #[cold]
    fn search(&mut self, addr: u64, len: u32) -> Option<*mut u8> {
        let index = self.table.find(addr)?;
        let window = self.table.window(index);
        window.translate(addr, 1)?;
        (self.last, self.index) = (window, index);
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
