//! The dirty log: one bit for each 4 KiB page of guest memory that the device has written.
//!
//! A front end that migrates its guest shares the log (`SET_LOG_BASE`) and accepts `VHOST_F_LOG_ALL`. It reads and
//! clears the bits while the device runs, and copies the pages whose bits were set. The order is therefore: the device
//! writes a page, then sets its bit. If the bit were set before the write, the front end could clear it and copy the
//! page before the write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::mapping::Mapping;
use super::stats::Stats;

/// Bytes of guest memory per bit, as the specification has it for every architecture.
const PAGE: u64 = 4096;

/// The log of one front end.
#[derive(Debug)]
pub(crate) struct DirtyLog {
    map: Mapping,
    stats: Arc<Stats>,
}

impl DirtyLog {
    pub(super) fn new(map: Mapping, stats: Arc<Stats>) -> Self {
        Self { map, stats }
    }

    /// Notes that the `len` bytes at guest address `addr` were written. One locked instruction per page.
    ///
    /// A page for which the log has no bit is counted ([`Stats::log_misses`]); the front end made the log too small.
    pub(crate) fn mark(&self, addr: u64, len: u64) {
        let Some(last) = len.checked_sub(1).and_then(|n| addr.checked_add(n)) else { return };
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
