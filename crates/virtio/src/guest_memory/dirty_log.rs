//! The dirty log: one bit for each 4 KiB page of guest memory that the device has written.
//!
//! Why: a front end that migrates its guest copies the guest's memory while the device runs, and
//! must copy each page again that the device has written since. It shares the log (`SET_LOG_BASE`)
//! and accepts `VHOST_F_LOG_ALL`. It reads and clears the bits, and copies the pages whose bits
//! were set.
//!
//! The order is therefore: the device writes a page, then sets its bit. If the bit were set before
//! the write, the front end could clear it and copy the page before the write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::mapping::Mapping;

/// Bytes of guest memory for each bit, the same on every architecture.
const PAGE: u64 = 4096;

/// The log of one front end.
#[derive(Debug)]
pub(crate) struct DirtyLog {
    map: Mapping,
    /// Pages that were written and for which the log has no bit.
    misses: Arc<AtomicU64>,
    /// The copies of a front end that reads each bit at once.
    #[cfg(test)]
    copies: Option<copies::Copies>,
}

impl DirtyLog {
    /// A log in `map`. Pages for which it has no bit are counted in `misses`.
    pub(crate) fn new(map: Mapping, misses: Arc<AtomicU64>) -> Self {
        Self {
            map,
            misses,
            #[cfg(test)]
            copies: None,
        }
    }

    /// Sets the bits of the pages of the `len` bytes at guest address `addr`, which were written.
    /// One locked instruction for each page.
    ///
    /// A page for which the log has no bit is counted: the front end made the log too small.
    pub(crate) fn mark(&self, addr: u64, len: u64) {
        let Some(last) = len.checked_sub(1).and_then(|n| addr.checked_add(n)) else { return };
        #[cfg(test)]
        if let Some(copies) = &self.copies {
            copies.copy(addr, len);
        }
        for page in addr / PAGE..=last / PAGE {
            match usize::try_from(page / 8) {
                Ok(at) if at < self.map.len => {
                    // SAFETY: *mapped*, and `at` is below its length.
                    let byte = unsafe { &*self.map.at.add(at).cast::<AtomicU8>() };
                    // Release: a front end that reads the bit also reads what was written before
                    // it.
                    byte.fetch_or(1 << (page % 8), Ordering::Release);
                }
                _ => {
                    self.misses.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Copies the bytes of each mark when it is set: the earliest moment at which a front end can copy
/// them.
#[cfg(test)]
pub(crate) mod copies {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use super::DirtyLog;
    use crate::guest_memory::table::MemoryTable;

    #[derive(Clone, Debug)]
    pub(crate) struct Copies {
        table: Arc<MemoryTable>,
        /// By guest address.
        bytes: Arc<Mutex<BTreeMap<u64, u8>>>,
        /// Where each mark began, in their order.
        marks: Arc<Mutex<Vec<u64>>>,
    }

    impl Copies {
        /// Of all that is marked in `log` from now on.
        pub(crate) fn of(log: &mut DirtyLog, table: Arc<MemoryTable>) -> Self {
            let copies = Self { table, bytes: Arc::default(), marks: Arc::default() };
            log.copies = Some(copies.clone());
            copies
        }

        fn read(&self, addr: u64) -> u8 {
            let at = self.table.translate(addr, 1).expect("memory of the table");
            // SAFETY: *mapped*; only this thread writes there.
            unsafe { at.read_volatile() }
        }

        pub(super) fn copy(&self, addr: u64, len: u64) {
            self.marks.lock().unwrap().push(addr);
            let mut bytes = self.bytes.lock().unwrap();
            bytes.extend((addr..addr + len).map(|addr| (addr, self.read(addr))));
        }

        /// Where the marks since the last call began, in their order.
        pub(crate) fn marks(&self) -> Vec<u64> {
            std::mem::take(&mut *self.marks.lock().unwrap())
        }

        /// The copies, and the addresses of those that differ from what is there now.
        pub(crate) fn take(&self) -> (BTreeMap<u64, u8>, Vec<u64>) {
            let bytes = std::mem::take(&mut *self.bytes.lock().unwrap());
            let stale = bytes.iter().filter(|&(&addr, &byte)| self.read(addr) != byte).map(|(&addr, _)| addr).collect();
            (bytes, stale)
        }
    }
}
