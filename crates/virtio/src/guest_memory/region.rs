//! One region of guest memory: what the front end states about it, what is accepted, and how its
//! bytes are reached.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use netmem_pool::FileMapping;

use super::error::{CopyFailed, MemoryError};
use super::file::SourceFile;
use super::import::{ImportedMemory, Importer};

/// The addresses, the size and the file offset of a region are multiples of this: a page of every
/// guest.
const PAGE: u64 = 4096;

/// The most bytes of a table, and of each other file of a front end, where no lower limit is set.
///
/// A process has 128 TiB of addresses on most systems. Without this limit a front end could map a
/// sparse file over all of them, and no mapping and no larger allocation of this process would
/// succeed any more. Up to six mappings of this size exist at once: table, log and in-flight
/// region, each with the one that replaces it.
pub const MAX_BYTES: u64 = 1 << 44;

/// A region, as the front end describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// Its first address in descriptors (guest address).
    pub guest_addr: u64,
    /// Its first address in `VHOST_USER_SET_VRING_ADDR` (user address).
    pub user_addr: u64,
    /// Bytes.
    pub size: u64,
    /// Its offset in the file.
    pub mmap_offset: u64,
}

impl RegionInfo {
    /// Whether the two have a guest address or a user address in common. Neither wraps around.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let meet = |a: u64, b: u64| a < b + other.size && b < a + self.size;
        meet(self.guest_addr, other.guest_addr) || meet(self.user_addr, other.user_addr)
    }

    /// Checks that the region has bytes, that none of its addresses wraps around, and that all of
    /// its words are multiples of a page. `index` is its number in messages.
    pub(super) fn validate(&self, index: usize) -> Result<(), MemoryError> {
        let Self { guest_addr, user_addr, size, mmap_offset } = *self;
        let ends = [guest_addr, user_addr, mmap_offset].map(|at| at.checked_add(size));
        if size == 0 || ends.contains(&None) {
            return Err(MemoryError::RegionRange { index, addr: guest_addr, size, offset: mmap_offset });
        }
        if !(guest_addr | user_addr | size | mmap_offset).is_multiple_of(PAGE) {
            let (addr, user, offset) = (guest_addr, user_addr, mmap_offset);
            return Err(MemoryError::RegionUnaligned { index, addr, user, size, offset });
        }
        Ok(())
    }
}

/// The limits of the memory that a device accepts.
#[derive(Clone, Debug, Default)]
pub struct MemoryLimits {
    /// Whether to refuse memory that can be shortened: see
    /// [`Options::require_sealed`](crate::device::Options::require_sealed).
    pub require_sealed: bool,
    /// Whether to accept memory in files of any kind: see
    /// [`Options::any_memory_file`](crate::device::Options::any_memory_file).
    pub any_memory_file: bool,
    /// The most bytes that a front end may have mapped: see
    /// [`Options::max_memory`](crate::device::Options::max_memory).
    pub max_bytes: Option<u64>,
    /// Imports memory that cannot be mapped: see
    /// [`Options::importer`](crate::device::Options::importer).
    pub importer: Option<Arc<dyn Importer>>,
}

impl MemoryLimits {
    /// Checks that a front end may have `bytes` mapped.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Limit`].
    pub(crate) fn check(&self, bytes: u64) -> Result<(), MemoryError> {
        let max = self.max_bytes.unwrap_or(MAX_BYTES).min(MAX_BYTES);
        if bytes > max { Err(MemoryError::Limit { bytes, max }) } else { Ok(()) }
    }
}

/// How the bytes of a region are reached.
#[derive(Debug)]
pub(super) enum Backing {
    /// They are mapped in this process.
    Mapped(FileMapping),
    /// By copies. The flag is set once a copy has failed.
    Imported(Box<dyn ImportedMemory>, AtomicBool),
}

impl Backing {
    /// Memory that is reached by copies, none of which has failed yet.
    pub(super) fn imported(memory: Box<dyn ImportedMemory>) -> Self {
        Self::Imported(memory, AtomicBool::new(false))
    }
}

/// A region of a table.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) info: RegionInfo,
    pub(super) backing: Backing,
    pub(super) file: Arc<SourceFile>,
    /// How many of its lost accesses [`count_lost`](Self::count_lost) has returned.
    counted: AtomicU64,
}

impl Region {
    pub(super) fn new(info: RegionInfo, backing: Backing, file: Arc<SourceFile>) -> Self {
        Self { info, backing, file, counted: AtomicU64::new(0) }
    }

    /// Whether its bytes are reached by copies.
    pub(super) fn is_imported(&self) -> bool {
        matches!(self.backing, Backing::Imported(..))
    }

    /// How many accesses found that a page was gone.
    pub(super) fn lost(&self) -> u64 {
        match &self.backing {
            Backing::Mapped(map) => map.lost(),
            Backing::Imported(..) => 0,
        }
    }

    /// Accesses of [`lost`](Self::lost) that no earlier call has returned.
    pub(super) fn count_lost(&self) -> u64 {
        let lost = self.lost();
        lost.saturating_sub(self.counted.fetch_max(lost, Ordering::Relaxed))
    }

    /// Of `len` bytes from `offset` on, how many are in the region.
    pub(super) fn until_end(&self, offset: u64, len: usize) -> usize {
        (self.info.size - offset).min(len as u64) as usize
    }

    /// Reports that a copy has failed. Logged once, because the front end may make every copy fail.
    pub(super) fn failed(&self, error: &std::io::Error) -> CopyFailed {
        if let Backing::Imported(_, failed) = &self.backing
            && !failed.swap(true, Ordering::Relaxed)
        {
            netmem_pool::trace::warn!(%error, addr = self.info.guest_addr, "a copy to or from imported memory failed; frames are dropped");
        }
        CopyFailed
    }
}
