//! The dirty log: one bit for each 4 KiB page of guest memory that the device has written.
//!
//! A front end that migrates its guest shares the log (`SET_LOG_BASE`) and accepts `VHOST_F_LOG_ALL`. It reads and
//! clears the bits while the device runs, and copies the pages whose bits were set. The order is therefore: the device
//! writes a page, then sets its bit. If the bit were set before the write, the front end could clear it and copy the
//! page before the write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::mapping::Mapping;
use crate::device::Stats;

/// Bytes of guest memory per bit, as the specification has it for every architecture.
const PAGE: u64 = 4096;

/// The log of one front end.
#[derive(Debug)]
pub(crate) struct DirtyLog {
    map: Mapping,
    stats: Arc<Stats>,
    /// What a front end would copy that looks at each bit at once.
    #[cfg(test)]
    copies: Option<copies::Copies>,
}

impl DirtyLog {
    pub(crate) fn new(map: Mapping, stats: Arc<Stats>) -> Self {
        Self {
            map,
            stats,
            #[cfg(test)]
            copies: None,
        }
    }

    /// Notes that the `len` bytes at guest address `addr` were written. One locked instruction per page.
    ///
    /// A page for which the log has no bit is counted ([`Stats::log_misses`]); the front end made the log too small.
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
                    // Release: a front end that reads the bit also reads what was written before it.
                    byte.fetch_or(1 << (page % 8), Ordering::Release);
                }
                _ => {
                    self.stats.log_misses.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Copies what is noted, at the moment in which it is noted: the earliest at which a front end can copy it.
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
    }

    impl Copies {
        /// Of all that `log` notes from now on.
        pub(crate) fn of(log: &mut DirtyLog, table: Arc<MemoryTable>) -> Self {
            let copies = Self { table, bytes: Arc::default() };
            log.copies = Some(copies.clone());
            copies
        }

        fn read(&self, addr: u64) -> u8 {
            let at = self.table.translate(addr, 1).expect("memory of the table");
            // SAFETY: *mapped*; only this thread writes there.
            unsafe { at.read_volatile() }
        }

        pub(super) fn copy(&self, addr: u64, len: u64) {
            let mut bytes = self.bytes.lock().unwrap();
            bytes.extend((addr..addr + len).map(|addr| (addr, self.read(addr))));
        }

        /// The copies, and the addresses of those that differ from what is there now.
        pub(crate) fn take(&self) -> (BTreeMap<u64, u8>, Vec<u64>) {
            let bytes = std::mem::take(&mut *self.bytes.lock().unwrap());
            let stale = bytes.iter().filter(|&(&addr, &byte)| self.read(addr) != byte).map(|(&addr, _)| addr).collect();
            (bytes, stale)
        }
    }
}
