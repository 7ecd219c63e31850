//! The table of a front end's regions, by guest address.
//!
//! Why a value that never changes: a pass translates without a lock. A change makes another table,
//! which shares the regions that stay.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use netmem_pool::FileMapping;
use rustix::fs::SealFlags;

use super::dma_buf::DmaBuf;
use super::error::{CopyFailed, MemoryError};
use super::file::{self, FileKind, SourceFile};
use super::import::ImportedMemory;
use super::region::{Backing, MemoryLimits, Region, RegionInfo};
use super::view::{View, Window};
use crate::vhost_user::received::Received;

/// The most regions of a table, as many as other back ends have.
pub const MAX_REGIONS: usize = 509;

/// The sizes of a table and of its files, in bytes unless the field has another unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUse {
    /// Regions.
    pub regions: usize,
    /// Bytes mapped or imported.
    pub mapped: u64,
    /// Regions whose file can be shortened. Not those that are imported.
    pub unsealed: usize,
    /// The allocated size of the files, in memory or on disk, when they were mapped. A file counts
    /// once, also if it has several regions.
    pub allocated_before: u64,
    /// Their allocated size now. The pages in the difference were touched first by the front end or
    /// by this device.
    pub allocated: u64,
}

/// The regions of one front end, in the order of their guest addresses. Clones have the same
/// regions.
///
/// Invariant (*mapped*): an address that a translation returns is valid for reads and writes of the
/// length asked for, for as long as the table exists. The front end may write there at any time.
#[derive(Clone, Debug, Default)]
pub struct MemoryTable {
    regions: Vec<Arc<Region>>,
    /// Their guest addresses, which are searched.
    starts: Vec<u64>,
    /// How many are imported.
    imported: usize,
}

impl MemoryTable {
    /// Checks and maps `regions`, one file each. Nothing stays mapped on an error.
    ///
    /// # Errors
    ///
    /// [`MemoryError::RegionCount`], [`MemoryError::RegionFds`], and those of [`add`](Self::add).
    pub fn new(regions: &[RegionInfo], files: Vec<OwnedFd>, limits: &MemoryLimits) -> Result<Self, MemoryError> {
        // From here on, every way to close them is one that does not wait.
        let files: Vec<_> = files.into_iter().map(Received::from).collect();
        if regions.is_empty() || regions.len() > MAX_REGIONS {
            return Err(MemoryError::RegionCount { count: regions.len(), max: MAX_REGIONS });
        }
        if regions.len() != files.len() {
            return Err(MemoryError::RegionFds { regions: regions.len(), fds: files.len() });
        }
        // Checked before the first region is mapped, because mapping may be slow.
        for (index, info) in regions.iter().enumerate() {
            info.validate(index)?;
            if let Some(a) = regions[..index].iter().position(|other| info.overlaps(other)) {
                return Err(MemoryError::RegionOverlap { a, b: index });
            }
        }
        let mut table = Self::default();
        for (index, (&info, file)) in regions.iter().zip(files).enumerate() {
            table.insert(index, info, file, limits)?;
        }
        table.report();
        Ok(table)
    }

    /// The table with another region, which is checked and mapped. The others are not touched.
    ///
    /// # Errors
    ///
    /// [`MemoryError::RegionCount`], [`MemoryError::RegionRange`],
    /// [`MemoryError::RegionUnaligned`], [`MemoryError::RegionOverlap`],
    /// [`MemoryError::RegionUnsealed`], [`MemoryError::RegionNotMemory`], [`MemoryError::Limit`],
    /// [`MemoryError::RegionBeyondFile`], [`MemoryError::RegionMap`],
    /// [`MemoryError::RegionImport`].
    pub fn add(&self, info: RegionInfo, file: OwnedFd, limits: &MemoryLimits) -> Result<Self, MemoryError> {
        let (index, file) = (self.regions.len(), Received::from(file));
        if index >= MAX_REGIONS {
            return Err(MemoryError::RegionCount { count: index + 1, max: MAX_REGIONS });
        }
        info.validate(index)?;
        if let Some(a) = self.regions.iter().position(|region| info.overlaps(&region.info)) {
            return Err(MemoryError::RegionOverlap { a, b: index });
        }
        let mut table = self.clone();
        table.insert(index, info, file, limits)?;
        table.report();
        Ok(table)
    }

    /// The table without a region, which is named by its two addresses and its size, as it was
    /// added.
    ///
    /// # Errors
    ///
    /// [`MemoryError::NoSuchRegion`].
    pub fn remove(&self, info: &RegionInfo) -> Result<Self, MemoryError> {
        let key = |r: &RegionInfo| (r.guest_addr, r.user_addr, r.size);
        let Some(at) = self.regions.iter().position(|region| key(&region.info) == key(info)) else {
            return Err(MemoryError::NoSuchRegion { addr: info.guest_addr, size: info.size });
        };
        let mut table = self.clone();
        let removed = table.regions.remove(at);
        table.starts.remove(at);
        table.imported -= usize::from(removed.is_imported());
        Ok(table)
    }

    /// Maps or imports a region that was checked. `index` is its number in messages.
    fn insert(
        &mut self,
        index: usize,
        info: RegionInfo,
        fd: Received,
        limits: &MemoryLimits,
    ) -> Result<(), MemoryError> {
        // The kind of the file comes first: other system calls on a file of unknown kind can wait
        // for the front end.
        let kind = FileKind::of(&fd);
        let sealed = match kind {
            FileKind::Memory(seals) => seals.contains(SealFlags::SHRINK),
            // Its size never changes, but that is not a seal, which `require_sealed` demands.
            FileKind::DmaBuf => !limits.require_sealed,
            FileKind::Other => false,
        };
        if limits.require_sealed && !sealed {
            return Err(MemoryError::RegionUnsealed { index });
        }
        let failed = |source| MemoryError::RegionMap { index, source };
        let stat = file::measure(&fd).map_err(|e| failed(e.into()))?;
        let known = limits.any_memory_file || kind != FileKind::Other;
        if !known && (limits.importer.is_none() || !file::is_driver_file(&stat)) {
            return Err(MemoryError::RegionNotMemory { index });
        }
        limits.check(self.mapped().saturating_add(info.size))?;
        let (end, file) = (info.mmap_offset + info.size, stat.stx_size);
        let (backing, file) = match &limits.importer {
            Some(importer) if file == 0 => {
                let memory = importer.import(fd.as_fd(), end);
                let memory = memory.map_err(|source| MemoryError::RegionImport { index, source })?;
                // Files of a driver share one inode, and their memory cannot be shortened.
                (Backing::imported(memory), Arc::new(SourceFile::new(fd, &stat, true)))
            }
            _ if end > file => return Err(MemoryError::RegionBeyondFile { index, end, file }),
            _ if kind == FileKind::DmaBuf => {
                let memory = DmaBuf::new(fd.as_fd(), info.mmap_offset, info.size).map_err(failed)?;
                // One inode is one buffer, but it is counted by region: none of its pages are of a
                // file system.
                (Backing::imported(Box::new(memory)), Arc::new(SourceFile::new(fd, &stat, sealed)))
            }
            _ => {
                let map = FileMapping::new(fd.as_fd(), info.mmap_offset, info.size).map_err(failed)?;
                let id = file::id(&stat);
                let known = self.regions.iter().map(|region| &region.file).find(|file| file.id() == id);
                let new = || Arc::new(SourceFile::new(fd, &stat, sealed));
                (Backing::Mapped(map), known.cloned().unwrap_or_else(new))
            }
        };
        let region = Region::new(info, backing, file);
        self.imported += usize::from(region.is_imported());
        let at = self.starts.partition_point(|&start| start < info.guest_addr);
        self.starts.insert(at, info.guest_addr);
        self.regions.insert(at, Arc::new(region));
        Ok(())
    }

    /// Logs one line for a table whose files can be shortened. Without the handler, an access would
    /// then end the process.
    fn report(&self) {
        let unsealed = self.unsealed();
        let regions = self.regions.len();
        if unsealed == 0 {
            return;
        }
        if netmem_pool::sigbus::installed() {
            netmem_pool::trace::info!(unsealed, regions, "the front end's memory is not sealed against shrinking");
        } else {
            netmem_pool::trace::warn!(
                unsealed,
                regions,
                "the front end's memory is not sealed against shrinking: if the front end shortens a file, this process ends"
            );
        }
    }

    /// Whether there are no regions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Regions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Regions whose file can be shortened. Not those that are imported.
    #[must_use]
    pub fn unsealed(&self) -> usize {
        self.regions.iter().filter(|region| !region.file.is_sealed()).count()
    }

    /// Bytes mapped or imported.
    #[must_use]
    pub fn mapped(&self) -> u64 {
        self.regions.iter().map(|region| region.info.size).fold(0, u64::saturating_add)
    }

    /// How many accesses found that a page of a region was gone. See [`netmem_pool::sigbus`].
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.regions.iter().map(|region| region.lost()).sum()
    }

    /// Accesses of [`lost`](Self::lost) that no earlier call has returned, from any table that has
    /// the region.
    pub(crate) fn count_lost(&self) -> u64 {
        self.regions.iter().map(|region| region.count_lost()).sum()
    }

    /// The sizes of the table and of its files. A system call for each file.
    #[must_use]
    pub fn usage(&self) -> MemoryUse {
        let mut files: Vec<&Arc<SourceFile>> = Vec::new();
        for file in self.regions.iter().map(|region| &region.file) {
            if !files.iter().any(|other| Arc::ptr_eq(other, file)) {
                files.push(file);
            }
        }
        let sum = |bytes: fn(&SourceFile) -> u64| files.iter().map(|file| bytes(file)).fold(0, u64::saturating_add);
        MemoryUse {
            regions: self.len(),
            mapped: self.mapped(),
            unsealed: self.unsealed(),
            allocated_before: sum(SourceFile::allocated_before),
            allocated: sum(SourceFile::allocated),
        }
    }

    /// The index of the last region that begins at guest address `addr` or before it.
    pub(super) fn find(&self, addr: u64) -> Option<usize> {
        self.starts.partition_point(|&start| start <= addr).checked_sub(1)
    }

    /// The mapped region `index`; empty if it is imported, or if there is none.
    #[inline]
    pub(super) fn window(&self, index: usize) -> Window<'_> {
        let Some(region) = self.regions.get(index) else { return Window::EMPTY };
        let Region { info, backing, .. } = &**region;
        match backing {
            Backing::Mapped(map) => Window::new(info.guest_addr, info.size, map.as_ptr()),
            Backing::Imported(..) => Window::EMPTY,
        }
    }

    /// Whether there are imported regions.
    #[inline(always)]
    pub(crate) fn imports(&self) -> bool {
        self.imported > 0
    }

    /// The imported region at guest address `addr`: its memory, the offset of `addr` in the region,
    /// and the region.
    fn imported(&self, addr: u64) -> Option<(&dyn ImportedMemory, u64, &Region)> {
        let region = &*self.regions[self.find(addr)?];
        let offset = addr - region.info.guest_addr;
        match &region.backing {
            Backing::Imported(memory, _) if offset < region.info.size => Some((&**memory, offset, region)),
            _ => None,
        }
    }

    /// Of `len` bytes (at least one) at `addr`, how many lie in one imported region from `addr` on.
    pub(super) fn imported_run(&self, addr: u64, len: u32) -> Option<u32> {
        let (_, offset, region) = self.imported(addr)?;
        Some((region.info.size - offset).min(u64::from(len)) as u32)
    }

    /// Copies `bytes` into imported regions, from guest address `addr` on.
    #[cold]
    pub(crate) fn write(&self, mut addr: u64, mut bytes: &[u8]) -> Result<(), CopyFailed> {
        while !bytes.is_empty() {
            let (memory, offset, region) = self.imported(addr).ok_or(CopyFailed)?;
            let (now, rest) = bytes.split_at(region.until_end(offset, bytes.len()));
            memory.write(region.info.mmap_offset + offset, now).map_err(|e| region.failed(&e))?;
            (addr, bytes) = (addr.wrapping_add(now.len() as u64), rest);
        }
        Ok(())
    }

    /// Copies bytes out of imported regions, from guest address `addr` on.
    #[cold]
    pub(crate) fn read(&self, mut addr: u64, mut bytes: &mut [u8]) -> Result<(), CopyFailed> {
        while !bytes.is_empty() {
            let (memory, offset, region) = self.imported(addr).ok_or(CopyFailed)?;
            let n = region.until_end(offset, bytes.len());
            let (now, rest) = bytes.split_at_mut(n);
            memory.read(region.info.mmap_offset + offset, now).map_err(|e| region.failed(&e))?;
            (addr, bytes) = (addr.wrapping_add(n as u64), rest);
        }
        Ok(())
    }

    /// The host address of `len` bytes (at least one) at guest address `addr`, if one mapped region
    /// holds them all.
    #[must_use]
    pub fn translate(&self, addr: u64, len: u32) -> Option<*mut u8> {
        View::new(self, usize::MAX).translate(addr, len)
    }

    /// The guest address of the byte at user address `addr`.
    pub(crate) fn guest_of_user(&self, addr: u64) -> Option<u64> {
        let mut regions = self.regions.iter().map(|region| &region.info);
        regions.find_map(|r| Some(r.guest_addr + addr.checked_sub(r.user_addr).filter(|&offset| offset < r.size)?))
    }

    /// The host address of `len` bytes (at least one) at user address `addr`, if one mapped region
    /// holds them all.
    #[must_use]
    pub fn translate_user(&self, addr: u64, len: u64) -> Option<*mut u8> {
        self.regions.iter().find_map(|r| {
            let offset = addr.checked_sub(r.info.user_addr)?;
            let fits = offset < r.info.size && len <= r.info.size - offset;
            match &r.backing {
                Backing::Mapped(map) if fits => Some(map.as_ptr().wrapping_add(offset as usize)),
                _ => None,
            }
        })
    }
}
