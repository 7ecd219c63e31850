//! The memory of a front end, mapped here, and the table of its regions by guest address.
//!
//! ```text
//!   SET_MEM_TABLE ──► a new table ──────────────────────┐
//!   ADD_MEM_REG   ──► the old regions and one more ─────┼──► each pair, between two passes ──► the old table is dropped
//!   REM_MEM_REG   ──► the old regions without one ──────┘                                   regions in no table are unmapped
//! ```
//!
//! * *A table never changes.* Another one takes its place as a whole. Both share the regions that stay, so that adding a region
//!   remaps nothing.
//! * *A translation does not outlive its pass.* A pass translates by a `View`, which borrows the table. The table belongs to the
//!   pair that the pass has locked. Between two passes a queue keeps the number of the region that it used last and no
//!   address.
//!
//! A file that has no size is not mapped but [imported](super::import), if the device has an importer. So is a
//! dma-buf, by the device itself. Such a region has no address here: a translation does not find it, and
//! its bytes are copied by their guest addresses.
//!
//! # What a front end can do with its files
//!
//! * *It can shorten a file that is not sealed*, and punch holes into every file. The device's next access is then a
//!   SIGBUS, which the process survives with the [handler](netmem_pool::sigbus): the rings stop, and their fault is
//!   [`MemoryLost`](crate::device::DriverFault::MemoryLost). Seals (`F_SEAL_SHRINK`) are counted, and
//!   [`Options::require_sealed`](crate::device::Options::require_sealed) refuses memory without them.
//! * *It can make this process allocate its memory.* A page of a memfd or of a file on tmpfs is charged to the memory
//!   control group of the process that touches it first. If a guest posts buffers which it has never written, the
//!   device touches them first. The device writes only to posted buffers, and all of them are in mapped regions. The
//!   bound is therefore the number of bytes mapped, [`Options::max_memory`](crate::device::Options::max_memory). By default it
//!   is [`MAX_BYTES`], which only keeps addresses free: the device does not know how large a guest's memory may be, and
//!   most of it is charged to other processes. [`MemoryUse`] says how much the files have grown.
//! * *It can share a file of its own file system* (FUSE), and then not answer. Measuring and mapping such a file, and each
//!   access, wait for that file system without a limit, and an access is made by a pass, with the pair locked. By default
//!   the memory must therefore be a file of kernel memory: one that has seals (memfd, tmpfs, hugetlbfs), or a dma-buf. Both
//!   questions are answered by the kernel alone, and come before all others. [`Options::any_memory_file`] accepts other
//!   files, with this risk.
//!
//! [`Options::any_memory_file`]: crate::device::Options::any_memory_file

use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use netmem_pool::FileMapping;
use rustix::fs::{AtFlags, FileType, SealFlags, Statx, StatxFlags, statx};
use rustix::io::Errno;

use super::copy::CopyFailed;
use super::dma_buf::DmaBuf;
use super::import::{ImportedMemory, Importer};
use crate::device::DeviceError;
use crate::vhost_user::received::Received;

/// The most regions of a table, as many as other back ends have.
pub const MAX_REGIONS: usize = 509;

/// What the addresses, the size and the file offset of a region are multiples of: a page of every guest.
const PAGE: u64 = 4096;

/// The most bytes of a table, and of each other file of a front end, where no lower limit is set. A process has 128 TiB of
/// addresses on most systems. Without this limit a front end could map a sparse file over all of them, and no mapping and no
/// larger allocation of this process would succeed any more. Up to six mappings of this size exist at once: table, log and
/// in-flight region, each with the one that replaces it.
pub const MAX_BYTES: u64 = 1 << 44;

/// The place of a region, as the front end describes it.
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
    fn overlaps(&self, other: &Self) -> bool {
        let meet = |a: u64, b: u64| a < b + other.size && b < a + self.size;
        meet(self.guest_addr, other.guest_addr) || meet(self.user_addr, other.user_addr)
    }
}

/// The limits of the memory that a device accepts.
#[derive(Clone, Debug, Default)]
pub struct MemoryLimits {
    /// See [`Options::require_sealed`](crate::device::Options::require_sealed).
    pub require_sealed: bool,
    /// See [`Options::any_memory_file`](crate::device::Options::any_memory_file).
    pub any_memory_file: bool,
    /// See [`Options::max_memory`](crate::device::Options::max_memory).
    pub max_bytes: Option<u64>,
    /// See [`Options::importer`](crate::device::Options::importer).
    pub importer: Option<Arc<dyn Importer>>,
}

impl MemoryLimits {
    /// Whether a front end may have `bytes` mapped.
    ///
    /// # Errors
    ///
    /// [`DeviceError::MemoryLimit`].
    pub(crate) fn check(&self, bytes: u64) -> Result<(), DeviceError> {
        let max = self.max_bytes.unwrap_or(MAX_BYTES).min(MAX_BYTES);
        if bytes > max { Err(DeviceError::MemoryLimit { bytes, max }) } else { Ok(()) }
    }
}

/// The sizes of a table and its files, in bytes if nothing else is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUse {
    /// Regions.
    pub regions: usize,
    /// Bytes mapped or imported.
    pub mapped: u64,
    /// Regions whose file can be shortened. Not those that are imported.
    pub unsealed: usize,
    /// The allocated size of the files, in memory or on disk, when they were mapped. A file counts once, also if it has
    /// several regions.
    pub allocated_before: u64,
    /// Their allocated size now. The pages in the difference were touched first by the front end or by this device.
    pub allocated: u64,
}

/// A range of guest addresses, and its place in this process. The empty one matches no address.
#[derive(Clone, Copy, Debug)]
struct Window<'t> {
    start: u64,
    len: u64,
    host: *mut u8,
    table: PhantomData<&'t MemoryTable>,
}

impl Window<'_> {
    const EMPTY: Self = Self { start: 0, len: 0, host: std::ptr::null_mut(), table: PhantomData };

    /// The host address of `len` bytes (at least one) at `addr`, if the window holds them all.
    #[inline(always)]
    fn translate(&self, addr: u64, len: u32) -> Option<*mut u8> {
        let offset = addr.wrapping_sub(self.start);
        if offset < self.len && u64::from(len) <= self.len - offset {
            return Some(self.host.wrapping_add(offset as usize));
        }
        None
    }
}

/// How one pass over one queue reaches memory: the table, and the region that was used last. The addresses that it returns
/// are *mapped* (see [`MemoryTable`]) as long as the borrow lasts.
#[derive(Debug)]
pub(crate) struct View<'t> {
    table: &'t MemoryTable,
    last: Window<'t>,
    index: usize,
}

impl<'t> View<'t> {
    /// The table.
    #[inline(always)]
    pub(crate) fn table(&self) -> &'t MemoryTable {
        self.table
    }

    /// The number of the region that was used last: a hint for the next view.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// The host address of `len` bytes (at least one) at `addr`, if one mapped region holds them all. Two comparisons if
    /// it is the region of the last call; else a binary search.
    #[inline(always)]
    pub(crate) fn translate(&mut self, addr: u64, len: u32) -> Option<*mut u8> {
        match self.last.translate(addr, len) {
            Some(host) => Some(host),
            None => self.search(addr, len),
        }
    }

    #[cold]
    fn search(&mut self, addr: u64, len: u32) -> Option<*mut u8> {
        let index = self.table.starts.partition_point(|&start| start <= addr).checked_sub(1)?;
        let window = self.table.window(index);
        window.translate(addr, 1)?;
        (self.last, self.index) = (window, index);
        window.translate(addr, len)
    }

    /// The first piece of `len` bytes (at least one) at `addr` that lies in one imported region: its bytes.
    pub(crate) fn imported(&self, addr: u64, len: u32) -> Option<u32> {
        let (_, offset, region) = self.table.imported(addr)?;
        Some((region.info.size - offset).min(u64::from(len)) as u32)
    }

    /// The first piece of `len` bytes (at least one) at `addr` that lies in one mapped region: where it is, and its bytes.
    pub(crate) fn piece(&mut self, addr: u64, len: u32) -> Option<(*mut u8, u32)> {
        let host = self.translate(addr, 1)?;
        let here = self.last.len - (addr - self.last.start);
        Some((host, here.min(u64::from(len)) as u32))
    }
}

/// A file, and its allocated size when it was first mapped.
#[derive(Debug)]
struct Source {
    fd: Received,
    /// The file system and the number of the file there.
    id: (u32, u32, u64),
    sealed: bool,
    before: u64,
}

/// The kind of a file, as far as the kernel can tell it without a question to the file's own file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A memfd, or a file on tmpfs or hugetlbfs, with these seals.
    Memory(SealFlags),
    /// A buffer of a driver, which has a size, and can be mapped.
    DmaBuf,
    /// Any other file: one of a disk, one that another process serves, a device, a socket.
    Other,
}

impl Kind {
    fn of(fd: &Received) -> Self {
        match rustix::fs::fcntl_get_seals(fd) {
            Ok(seals) => Self::Memory(seals),
            Err(_) if is_dma_buf(fd) => Self::DmaBuf,
            Err(_) => Self::Other,
        }
    }
}

/// Whether a descriptor is a dma-buf: its `fdinfo` then has a line with the name of the exporter, which no other kind of file
/// has. The file's name does not tell: a peer can give a file of its own file system the name that a dma-buf has.
#[cold]
fn is_dma_buf(fd: &Received) -> bool {
    let info = std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", fd.as_fd().as_raw_fd()));
    info.is_ok_and(|info| info.lines().any(|line| line.starts_with("exp_name:")))
}

/// What the kernel knows of a file already: no file system is asked.
fn measure(fd: &Received) -> Result<Statx, Errno> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::SIZE | StatxFlags::BLOCKS;
    statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, wanted)
}

/// Whether a descriptor may be what a GPU's driver exports: a device, a socket or an anonymous file, without a size. A
/// regular file or a directory may be one of a file system that the peer serves, and what an importer asks of it could wait.
fn is_driver_file(stat: &Statx) -> bool {
    let kind = FileType::from_raw_mode(stat.stx_mode.into());
    stat.stx_size == 0 && !matches!(kind, FileType::RegularFile | FileType::Directory)
}

/// The allocated size of a file, in bytes.
fn allocated(stat: &Statx) -> u64 {
    stat.stx_blocks.saturating_mul(512)
}

/// How the bytes of a region are reached.
#[derive(Debug)]
enum Place {
    /// They are in this process.
    Mapped(FileMapping),
    /// By copies. The flag is set once a copy has failed.
    Imported(Box<dyn ImportedMemory>, AtomicBool),
}

impl Place {
    /// How many accesses found that a page had been taken away.
    fn lost(&self) -> u64 {
        match self {
            Self::Mapped(map) => map.lost(),
            Self::Imported(..) => 0,
        }
    }
}

#[derive(Debug)]
struct Region {
    info: RegionInfo,
    place: Place,
    source: Arc<Source>,
    /// How many of its lost accesses [`MemoryTable::count_lost`] has returned.
    counted: AtomicU64,
}

impl Region {
    /// Of `len` bytes from `offset` on, how many are in the region.
    fn until_end(&self, offset: u64, len: usize) -> usize {
        (self.info.size - offset).min(len as u64) as usize
    }

    /// A copy has failed. Logged once, because the front end may make every copy fail.
    fn failed(&self, error: &std::io::Error) -> CopyFailed {
        if let Place::Imported(_, failed) = &self.place
            && !failed.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(%error, addr = self.info.guest_addr, "a copy to or from imported memory failed; frames are dropped");
        }
        CopyFailed
    }
}

/// The regions of one front end, in the order of their guest addresses. Clones have the same regions.
///
/// Invariant (*mapped*): an address that a translation returns is valid for reads and writes of the length asked for, for as
/// long as the table exists. The front end may write there at any time.
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
    /// [`DeviceError::RegionCount`], [`DeviceError::RegionFds`], and those of [`add`](Self::add).
    pub fn new(regions: &[RegionInfo], files: Vec<OwnedFd>, limits: &MemoryLimits) -> Result<Self, DeviceError> {
        // From here on, every way to close them is one that does not wait.
        let files: Vec<_> = files.into_iter().map(Received::from).collect();
        if regions.is_empty() || regions.len() > MAX_REGIONS {
            return Err(DeviceError::RegionCount { count: regions.len(), max: MAX_REGIONS });
        }
        if regions.len() != files.len() {
            return Err(DeviceError::RegionFds { regions: regions.len(), fds: files.len() });
        }
        // Checked before the first region is mapped, which may take long.
        for (index, info) in regions.iter().enumerate() {
            check(index, info)?;
            if let Some(a) = regions[..index].iter().position(|other| info.overlaps(other)) {
                return Err(DeviceError::RegionOverlap { a, b: index });
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
    /// [`DeviceError::RegionCount`], [`DeviceError::RegionRange`], [`DeviceError::RegionUnaligned`],
    /// [`DeviceError::RegionOverlap`], [`DeviceError::RegionUnsealed`], [`DeviceError::RegionNotMemory`], [`DeviceError::MemoryLimit`],
    /// [`DeviceError::RegionBeyondFile`], [`DeviceError::RegionMap`], [`DeviceError::RegionImport`].
    pub fn add(&self, info: RegionInfo, file: OwnedFd, limits: &MemoryLimits) -> Result<Self, DeviceError> {
        let (index, file) = (self.regions.len(), Received::from(file));
        if index >= MAX_REGIONS {
            return Err(DeviceError::RegionCount { count: index + 1, max: MAX_REGIONS });
        }
        check(index, &info)?;
        if let Some(a) = self.regions.iter().position(|region| info.overlaps(&region.info)) {
            return Err(DeviceError::RegionOverlap { a, b: index });
        }
        let mut table = self.clone();
        table.insert(index, info, file, limits)?;
        table.report();
        Ok(table)
    }

    /// The table without a region, which is named by its two addresses and its size, as it was added.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NoSuchRegion`].
    pub fn remove(&self, info: &RegionInfo) -> Result<Self, DeviceError> {
        let key = |r: &RegionInfo| (r.guest_addr, r.user_addr, r.size);
        let Some(at) = self.regions.iter().position(|region| key(&region.info) == key(info)) else {
            return Err(DeviceError::NoSuchRegion { addr: info.guest_addr, size: info.size });
        };
        let mut table = self.clone();
        let removed = table.regions.remove(at);
        table.starts.remove(at);
        table.imported -= usize::from(matches!(removed.place, Place::Imported(..)));
        Ok(table)
    }

    /// Maps or imports a region that was checked. `index` is its number in messages.
    fn insert(
        &mut self,
        index: usize,
        info: RegionInfo,
        fd: Received,
        limits: &MemoryLimits,
    ) -> Result<(), DeviceError> {
        // The kind of the file comes first: the other system calls on a file of unknown kind can wait for the front end.
        let kind = Kind::of(&fd);
        let sealed = match kind {
            Kind::Memory(seals) => seals.contains(SealFlags::SHRINK),
            // Its size never changes, but that is not a seal, which `require_sealed` asks for.
            Kind::DmaBuf => !limits.require_sealed,
            Kind::Other => false,
        };
        if limits.require_sealed && !sealed {
            return Err(DeviceError::RegionUnsealed { index });
        }
        let failed = |source| DeviceError::RegionMap { index, source };
        let stat = measure(&fd).map_err(|e| failed(e.into()))?;
        let known = limits.any_memory_file || kind != Kind::Other;
        if !known && (limits.importer.is_none() || !is_driver_file(&stat)) {
            return Err(DeviceError::RegionNotMemory { index });
        }
        limits.check(self.mapped().saturating_add(info.size))?;
        let (end, file) = (info.mmap_offset + info.size, stat.stx_size);
        let id = (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino);
        let (place, source) = match &limits.importer {
            Some(importer) if file == 0 => {
                let memory = importer.import(fd.as_fd(), end);
                let memory = memory.map_err(|source| DeviceError::RegionImport { index, source })?;
                self.imported += 1;
                // Files of a driver share one inode, and their memory cannot be shortened.
                let source = Source { fd, id, sealed: true, before: allocated(&stat) };
                (Place::Imported(memory, AtomicBool::new(false)), Arc::new(source))
            }
            _ if end > file => return Err(DeviceError::RegionBeyondFile { index, end, file }),
            _ if kind == Kind::DmaBuf => {
                let memory = DmaBuf::new(fd.as_fd(), info.mmap_offset, info.size).map_err(failed)?;
                self.imported += 1;
                // One inode is one buffer, but it is counted by region: none of its pages are of a file system.
                let source = Source { fd, id, sealed, before: allocated(&stat) };
                (Place::Imported(Box::new(memory), AtomicBool::new(false)), Arc::new(source))
            }
            _ => {
                let map = FileMapping::new(fd.as_fd(), info.mmap_offset, info.size).map_err(failed)?;
                let known = self.regions.iter().map(|region| &region.source).find(|source| source.id == id);
                let new = || Arc::new(Source { fd, id, sealed, before: allocated(&stat) });
                (Place::Mapped(map), known.cloned().unwrap_or_else(new))
            }
        };
        let at = self.starts.partition_point(|&start| start < info.guest_addr);
        self.starts.insert(at, info.guest_addr);
        self.regions.insert(at, Arc::new(Region { info, place, source, counted: AtomicU64::new(0) }));
        Ok(())
    }

    /// Logs one line for a table whose memory can be taken away. Without the handler, an access would then end the
    /// process.
    fn report(&self) {
        let unsealed = self.unsealed();
        let regions = self.regions.len();
        if unsealed == 0 {
            return;
        }
        if netmem_pool::sigbus::installed() {
            tracing::info!(unsealed, regions, "the front end's memory is not sealed against shrinking");
        } else {
            tracing::warn!(
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
        self.regions.iter().filter(|region| !region.source.sealed).count()
    }

    /// Bytes mapped or imported.
    #[must_use]
    pub fn mapped(&self) -> u64 {
        self.regions.iter().map(|region| region.info.size).fold(0, u64::saturating_add)
    }

    /// How many accesses found that a page of a region had been taken away. See [`netmem_pool::sigbus`].
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.regions.iter().map(|region| region.place.lost()).sum()
    }

    /// Accesses of [`lost`](Self::lost) that no earlier call has returned, from any table that has the region.
    pub(crate) fn count_lost(&self) -> u64 {
        let news = |region: &Arc<Region>| {
            let lost = region.place.lost();
            lost.saturating_sub(region.counted.fetch_max(lost, Ordering::Relaxed))
        };
        self.regions.iter().map(news).sum()
    }

    /// What the table takes. A system call for each file.
    #[must_use]
    pub fn usage(&self) -> MemoryUse {
        let mut seen: Vec<&Arc<Source>> = Vec::new();
        for source in self.regions.iter().map(|region| &region.source) {
            if !seen.iter().any(|other| Arc::ptr_eq(other, source)) {
                seen.push(source);
            }
        }
        let now = |source: &Arc<Source>| measure(&source.fd).map_or(source.before, |stat| allocated(&stat));
        let sum = |bytes: &dyn Fn(&Arc<Source>) -> u64| seen.iter().map(|s| bytes(s)).fold(0, u64::saturating_add);
        MemoryUse {
            regions: self.len(),
            mapped: self.mapped(),
            unsealed: self.unsealed(),
            allocated_before: sum(&|source| source.before),
            allocated: sum(&now),
        }
    }

    /// A view for a pass over a queue that has used region `hint` last.
    #[inline]
    pub(crate) fn view(&self, hint: usize) -> View<'_> {
        let last = if hint < self.regions.len() { self.window(hint) } else { Window::EMPTY };
        View { table: self, last, index: hint }
    }

    #[inline]
    fn window(&self, index: usize) -> Window<'_> {
        let Region { info, place, .. } = &*self.regions[index];
        match place {
            Place::Mapped(map) => {
                Window { start: info.guest_addr, len: info.size, host: map.as_ptr(), table: PhantomData }
            }
            Place::Imported(..) => Window::EMPTY,
        }
    }

    /// Whether there are imported regions.
    #[inline(always)]
    pub(crate) fn imports(&self) -> bool {
        self.imported > 0
    }

    /// The imported region at guest address `addr`: its memory, the offset of `addr` in the region, and the region.
    fn imported(&self, addr: u64) -> Option<(&dyn ImportedMemory, u64, &Region)> {
        let index = self.starts.partition_point(|&start| start <= addr).checked_sub(1)?;
        let region = &*self.regions[index];
        let offset = addr - region.info.guest_addr;
        match &region.place {
            Place::Imported(memory, _) if offset < region.info.size => Some((&**memory, offset, region)),
            _ => None,
        }
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

    /// The host address of `len` bytes (at least one) at guest address `addr`, if one mapped region holds them all.
    #[must_use]
    pub fn translate(&self, addr: u64, len: u32) -> Option<*mut u8> {
        self.view(usize::MAX).translate(addr, len)
    }

    /// The guest address of the byte at user address `addr`.
    pub(crate) fn guest_of_user(&self, addr: u64) -> Option<u64> {
        let mut regions = self.regions.iter().map(|region| &region.info);
        regions.find_map(|r| Some(r.guest_addr + addr.checked_sub(r.user_addr).filter(|&offset| offset < r.size)?))
    }

    /// The host address of `len` bytes (at least one) at user address `addr`, if one mapped region holds them all.
    #[must_use]
    pub fn translate_user(&self, addr: u64, len: u64) -> Option<*mut u8> {
        self.regions.iter().find_map(|r| {
            let offset = addr.checked_sub(r.info.user_addr)?;
            let fits = offset < r.info.size && len <= r.info.size - offset;
            match &r.place {
                Place::Mapped(map) if fits => Some(map.as_ptr().wrapping_add(offset as usize)),
                _ => None,
            }
        })
    }
}

/// A region with bytes, none of whose addresses wraps around, and all of whose words are multiples of a page.
fn check(index: usize, r: &RegionInfo) -> Result<(), DeviceError> {
    let ends = [r.guest_addr, r.user_addr, r.mmap_offset].map(|at| at.checked_add(r.size));
    if r.size == 0 || ends.contains(&None) {
        let (addr, size, offset) = (r.guest_addr, r.size, r.mmap_offset);
        return Err(DeviceError::RegionRange { index, addr, size, offset });
    }
    if !(r.guest_addr | r.user_addr | r.size | r.mmap_offset).is_multiple_of(PAGE) {
        let (addr, user, size, offset) = (r.guest_addr, r.user_addr, r.size, r.mmap_offset);
        return Err(DeviceError::RegionUnaligned { index, addr, user, size, offset });
    }
    Ok(())
}
