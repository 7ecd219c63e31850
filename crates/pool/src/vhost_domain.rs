//! The DMA domain of a vhost-user device: whole regions, each at a fixed bus address.

use crate::dma::{Direction, DmaDomain};
use crate::error::MapError;
use crate::mapping::HUGE;
use crate::memory::{Device, Memory, PeerMemory};
use crate::region::Region;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// The DMA domain of a vhost-user device, as its driver sees it: the regions of the memory table
/// that the driver sends, each at a fixed bus address.
///
/// Mapping a page is an addition, because whole regions are in the domain. The device process maps
/// the regions' files for reading and writing, so the domain restricts the device to the regions,
/// and to no [`Direction`].
///
/// ```
/// use netmem_pool::{Direction, DmaDomain, PeerShared, RegionOptions, VhostDomain};
/// use std::sync::Arc;
///
/// let [pages, rings] = [64, 4].map(|n| RegionOptions::new(n).huge_pages(false).build::<PeerShared>());
/// // SAFETY: the peer of this domain writes nothing but posted buffers.
/// let pages = Arc::new(unsafe { pages?.trust_peer() });
/// let rings = Arc::new(rings?);
/// let domain = VhostDomain::new(&[pages.clone()]).and_shared(rings.clone());
/// assert_eq!(domain.map(pages.as_ptr(), 4096, Direction::Bidirectional)?, domain.regions()[0].bus());
/// assert_eq!(domain.map(rings.as_ptr(), 4096, Direction::Bidirectional)?, domain.regions()[1].bus());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct VhostDomain {
    regions: Vec<VhostRegion>,
    /// The bus address behind the last.
    end: u64,
    added: AddedMemory,
}

impl VhostDomain {
    /// Puts the regions one after another into a bus address space that begins at 64 GiB, where no
    /// small integer and no pointer of this process passes for an address by accident.
    #[must_use]
    pub fn new<M: PeerMemory>(regions: &[Arc<Region<M>>]) -> Self {
        let domain = Self { regions: Vec::new(), end: 64 << 30, added: AddedMemory::default() };
        regions.iter().cloned().fold(domain, Self::and_shared)
    }

    /// The same with another region behind the others. It may be of another kind.
    #[must_use]
    pub fn and_shared<M: PeerMemory>(mut self, region: Arc<Region<M>>) -> Self {
        self.push(region);
        self
    }

    /// The same with a region of a device's memory behind the others, which
    /// [`map_file`](DmaDomain::map_file) then knows.
    #[must_use]
    pub fn and_device(mut self, region: Arc<Region<Device>>) -> Self {
        self.push(region);
        self
    }

    fn push<M: Memory>(&mut self, region: Arc<Region<M>>) {
        let entry = VhostRegion::new(region, self.end);
        // Each begins where a huge page can, as those of the system's memory do anyway.
        self.end += (entry.len() as u64).next_multiple_of(HUGE as u64);
        self.regions.push(entry);
    }

    /// A handle to add device memory while the domain is in use.
    #[must_use]
    pub fn added(&self) -> AddedMemory {
        self.added.clone()
    }

    /// The regions, in order of address, but those that were [added](Self::added) later.
    #[must_use]
    pub fn regions(&self) -> &[VhostRegion] {
        &self.regions
    }
}

impl DmaDomain for VhostDomain {
    fn map(&self, addr: *mut u8, len: usize, _: Direction) -> Result<u64, MapError> {
        let addr = addr.addr();
        for e in &self.regions {
            let Some(start) = e.at else { continue };
            if addr >= start && addr - start <= e.len && len <= e.len - (addr - start) {
                return Ok(e.bus + (addr - start) as u64);
            }
        }
        Err(MapError::Outside { addr, len })
    }

    fn map_file(&self, file: BorrowedFd<'_>, offset: u64, len: usize, _: Direction) -> Result<u64, MapError> {
        let fixed = self.regions.iter().find(|e| e.is_device() && e.has(file, offset, len)).map(|e| e.bus + offset);
        fixed.or_else(|| self.added.map_file(file, offset, len)).ok_or(MapError::File { offset, len })
    }

    fn unmap(&self, dma: u64, _: usize) {
        if dma >= ADDED_BASE {
            self.added.unmap(dma);
        }
    }
}

/// One region of a [`VhostDomain`]: what a vhost-user front end sends of it in `SET_MEM_TABLE`.
#[derive(Clone, Debug)]
pub struct VhostRegion {
    memory: Arc<dyn FileRegion>,
    /// The first byte in this process; `None` if the memory is not mapped here. As the next, it
    /// stands here because a page is mapped for each packet where no pool keeps it.
    at: Option<usize>,
    len: usize,
    bus: u64,
}

/// A region of any kind that is shared by file descriptor.
trait FileRegion: fmt::Debug + Send + Sync {
    fn fd(&self) -> Option<BorrowedFd<'_>>;
    /// # Safety
    ///
    /// As [`Region::in_process_fd`].
    unsafe fn in_process_fd(&self) -> Option<BorrowedFd<'_>>;
    fn file_offset(&self) -> u64;
}

impl<M: Memory> FileRegion for Region<M> {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd()
    }

    unsafe fn in_process_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the caller's.
        unsafe { self.in_process_fd() }
    }

    fn file_offset(&self) -> u64 {
        self.file_offset()
    }
}

impl VhostRegion {
    /// A region that the device knows by this process's addresses.
    #[must_use]
    pub fn plain<M: PeerMemory>(region: Arc<Region<M>>) -> Self {
        let bus = region.as_ptr().addr() as u64;
        Self::new(region, bus)
    }

    /// A region that the device knows by addresses from `bus` on, which the caller has chosen:
    /// those of the entry that this one replaces.
    #[must_use]
    pub fn at<M: PeerMemory>(region: Arc<Region<M>>, bus: u64) -> Self {
        Self::new(region, bus)
    }

    fn new<M: Memory>(region: Arc<Region<M>>, bus: u64) -> Self {
        let (at, len) = (M::MAPPED.then(|| region.addr()), region.len());
        Self { memory: region, at, len, bus }
    }

    /// The device's address of the first byte.
    #[must_use]
    pub fn bus(&self) -> u64 {
        self.bus
    }

    /// Bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a region has at least one page")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The file behind it: [`Region::fd`].
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.memory.fd()
    }

    /// The file behind it, also if the region is for a device in this process:
    /// [`Region::in_process_fd`].
    ///
    /// # Safety
    ///
    /// As for that.
    #[must_use]
    pub unsafe fn in_process_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the caller's.
        unsafe { self.memory.in_process_fd() }
    }

    /// Whether these bytes of a file are in the region.
    fn has(&self, file: BorrowedFd<'_>, offset: u64, len: usize) -> bool {
        let have = self.len as u64;
        let same = self.fd().is_some_and(|fd| fd.as_raw_fd() == file.as_raw_fd());
        same && offset <= have && len as u64 <= have - offset
    }

    /// Where in the file the first byte is.
    #[must_use]
    pub fn file_offset(&self) -> u64 {
        self.memory.file_offset()
    }

    /// The address by which a vhost-user front end speaks of the first byte: its address in this
    /// process. A region that is not mapped in this process gets a number that is no address here,
    /// and that differs from every other entry's.
    #[must_use]
    pub fn user_addr(&self) -> u64 {
        self.at.map_or(UNMAPPED_ADDR + self.bus, |at| at as u64)
    }

    /// Whether it is this region.
    #[must_use]
    pub fn is(&self, region: &Region<Device>) -> bool {
        Arc::as_ptr(&self.memory).addr() == std::ptr::from_ref(region).addr()
    }

    /// Whether it is a device's memory, which this process does not map.
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.at.is_none()
    }
}

/// Above all addresses that a process can have, and below the addresses that are negative as signed
/// numbers.
const UNMAPPED_ADDR: u64 = 1 << 62;

/// The bus address of the first region that is added to a domain in use. Other regions have lower
/// addresses.
const ADDED_BASE: u64 = 1 << 50;

/// Device memory that is added to a [`VhostDomain`] and removed from it while the domain is in use.
///
/// A handle, from [`VhostDomain::added`]. No bus address is used twice, so that an address that is
/// kept for too long is in no region.
#[derive(Clone, Debug, Default)]
pub struct AddedMemory(Arc<RwLock<Added>>);

#[derive(Debug, Default)]
struct Added {
    /// Bytes of address space that were ever assigned.
    used: u64,
    /// Each with the number of mappings that there are of it.
    entries: Vec<(VhostRegion, AtomicUsize)>,
}

impl AddedMemory {
    /// Adds a region. From now on the domain can map it. The caller makes sure that the device
    /// knows the region.
    #[must_use]
    pub fn add(&self, region: Arc<Region<Device>>) -> VhostRegion {
        let mut added = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let entry = VhostRegion::new(region, ADDED_BASE + added.used);
        added.used += (entry.len() as u64).next_multiple_of(HUGE as u64);
        added.entries.push((entry.clone(), AtomicUsize::new(0)));
        entry
    }

    /// Removes the region whose address is `bus`, if nothing of it is mapped. False if there is no
    /// such region.
    ///
    /// # Errors
    ///
    /// The number of mappings. Nothing has changed then.
    pub fn remove(&self, bus: u64) -> Result<bool, usize> {
        let mut added = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = added.entries.iter().position(|(entry, _)| entry.bus == bus) else { return Ok(false) };
        match added.entries[at].1.load(Ordering::Acquire) {
            0 => {
                added.entries.remove(at);
                Ok(true)
            }
            mapped => Err(mapped),
        }
    }

    fn map_file(&self, file: BorrowedFd<'_>, offset: u64, len: usize) -> Option<u64> {
        let added = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let (entry, mapped) = added.entries.iter().find(|(entry, _)| entry.has(file, offset, len))?;
        mapped.fetch_add(1, Ordering::Relaxed);
        Some(entry.bus + offset)
    }

    #[cold]
    fn unmap(&self, dma: u64) {
        let added = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let within = |entry: &VhostRegion| dma >= entry.bus && dma - entry.bus < entry.len as u64;
        if let Some((_, mapped)) = added.entries.iter().find(|(entry, _)| within(entry)) {
            mapped.fetch_sub(1, Ordering::Release);
        }
    }
}
