//! The memory of a front end, mapped here: the table that `VHOST_USER_SET_MEM_TABLE` brings.
//!
//! Every descriptor is measured before it is mapped, so that no address in the table lies beyond the end of its file.
//! What cannot be helped: a front end that shrinks a file afterwards (one that is not sealed, or that lies on a file
//! system of its own making) turns our next access into a SIGBUS or a wait; vhost-user back ends trust their front
//! ends that far.

use std::fs::File;
use std::os::fd::AsFd;

use rustix::mm::{MapFlags, ProtFlags};

use super::DeviceError;

/// The most regions of a table; the protocol's own limit on descriptors in one message.
pub const MAX_REGIONS: usize = 32;

/// Where a region lies, as a front end says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// Its first address as descriptors say it.
    pub guest_addr: u64,
    /// Its first address as `VHOST_USER_SET_VRING_ADDR` says it.
    pub user_addr: u64,
    /// Bytes.
    pub size: u64,
    /// Its offset in the file.
    pub mmap_offset: u64,
}

/// A run of guest addresses and where it is here. The empty one matches no address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    start: u64,
    len: u64,
    host: *mut u8,
}

// SAFETY: an address; who dereferences it answers for that.
unsafe impl Send for Window {}

impl Window {
    pub(super) const EMPTY: Self = Self { start: 0, len: 0, host: std::ptr::null_mut() };

    /// The host address of `len` bytes (at least one) at `addr`, if the window holds them all.
    #[inline(always)]
    pub(super) fn translate(&self, addr: u64, len: u32) -> Option<*mut u8> {
        let offset = addr.wrapping_sub(self.start);
        if offset < self.len && u64::from(len) <= self.len - offset {
            return Some(self.host.wrapping_add(offset as usize));
        }
        None
    }

    /// Bytes of the window from `addr`, which is in it.
    pub(super) fn from(&self, addr: u64) -> u64 {
        self.len - (addr - self.start)
    }
}

#[derive(Debug)]
struct Region {
    info: RegionInfo,
    base: *mut u8,
    mapped: usize,
    host: *mut u8,
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `base` and `mapped` are a mapping of our own (see `map`), and whoever held addresses in it borrowed
        // them from the table that is being dropped.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.mapped) };
    }
}

impl Region {
    fn map(index: usize, info: RegionInfo, file: &File) -> Result<Self, DeviceError> {
        let failed = |source: rustix::io::Errno| DeviceError::RegionMap { index, source: source.into() };
        let stat = rustix::fs::fstat(file).map_err(failed)?;
        let (end, length) = (info.mmap_offset + info.size, u64::try_from(stat.st_size).unwrap_or(0));
        if end > length {
            return Err(DeviceError::RegionBeyondFile { index, end, file: length });
        }
        // Huge-page files are mapped and unmapped in whole huge pages, which is their block size.
        let page = match u64::try_from(stat.st_blksize) {
            Ok(n) if n.is_power_of_two() && n <= 1 << 30 => n.max(4096),
            _ => 4096,
        };
        let offset = info.mmap_offset & !(page - 1);
        let before = (info.mmap_offset - offset) as usize;
        let too_long =
            || DeviceError::RegionRange { index, addr: info.guest_addr, size: info.size, offset: info.mmap_offset };
        let mapped = (end - offset).checked_next_multiple_of(page).and_then(|n| usize::try_from(n).ok());
        let mapped = mapped.ok_or_else(too_long)?;
        // Reserving, so that huge pages that are not there are an error here and not a SIGBUS later.
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe {
            let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            rustix::mm::mmap(std::ptr::null_mut(), mapped, prot, flags, file.as_fd(), offset)
        }
        .map_err(failed)?
        .cast::<u8>();
        Ok(Self { info, base, mapped, host: base.wrapping_add(before) })
    }

    fn window(&self) -> Window {
        Window { start: self.info.guest_addr, len: self.info.size, host: self.host }
    }
}

/// The mapped regions of one front end, in the order of their guest addresses.
///
/// Invariant (*mapped*): an address that a translation returns is valid for reads and writes of the length asked for,
/// for as long as the table exists. The other side may write there at any time.
#[derive(Debug, Default)]
pub struct MemoryTable {
    regions: Vec<Region>,
}

// SAFETY: the table owns its mappings; nothing about them belongs to a thread.
unsafe impl Send for MemoryTable {}

impl MemoryTable {
    /// Checks and maps `regions`, one file each. Nothing stays mapped on an error.
    ///
    /// # Errors
    ///
    /// [`DeviceError::RegionCount`], [`DeviceError::RegionFds`], [`DeviceError::RegionRange`], [`DeviceError::RegionOverlap`],
    /// [`DeviceError::RegionBeyondFile`], [`DeviceError::RegionMap`].
    pub fn new(regions: &[RegionInfo], files: &[File]) -> Result<Self, DeviceError> {
        if regions.is_empty() || regions.len() > MAX_REGIONS {
            return Err(DeviceError::RegionCount { count: regions.len(), max: MAX_REGIONS });
        }
        if regions.len() != files.len() {
            return Err(DeviceError::RegionFds { regions: regions.len(), fds: files.len() });
        }
        for (index, r) in regions.iter().enumerate() {
            let ends = [r.guest_addr, r.user_addr, r.mmap_offset].map(|at| at.checked_add(r.size));
            if r.size == 0 || ends.contains(&None) {
                let (addr, size, offset) = (r.guest_addr, r.size, r.mmap_offset);
                return Err(DeviceError::RegionRange { index, addr, size, offset });
            }
            for (b, s) in regions[..index].iter().enumerate() {
                let meet = |x: u64, y: u64| x < y + s.size && y < x + r.size;
                if meet(r.guest_addr, s.guest_addr) || meet(r.user_addr, s.user_addr) {
                    return Err(DeviceError::RegionOverlap { a: b, b: index });
                }
            }
        }
        let mapped = regions.iter().zip(files).enumerate().map(|(i, (&info, file))| Region::map(i, info, file));
        let mut regions = mapped.collect::<Result<Vec<_>, _>>()?;
        regions.sort_by_key(|r| r.info.guest_addr);
        Ok(Self { regions })
    }

    /// Whether there are no regions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// The region that holds guest address `addr`.
    pub(super) fn window(&self, addr: u64) -> Option<Window> {
        let at = self.regions.partition_point(|r| r.info.guest_addr <= addr);
        let window = self.regions[..at].last()?.window();
        window.translate(addr, 1).map(|_| window)
    }

    /// The host address of `len` bytes (at least one) at guest address `addr`, if one region holds them all.
    #[must_use]
    pub fn translate(&self, addr: u64, len: u32) -> Option<*mut u8> {
        self.window(addr)?.translate(addr, len)
    }

    /// The host address of `len` bytes (at least one) at user address `addr`, if one region holds them all.
    #[must_use]
    pub fn translate_user(&self, addr: u64, len: u64) -> Option<*mut u8> {
        self.regions.iter().find_map(|r| {
            let offset = addr.checked_sub(r.info.user_addr)?;
            let fits = offset < r.info.size && len <= r.info.size - offset;
            fits.then(|| r.host.wrapping_add(offset as usize))
        })
    }
}
