//! DMA domains: which addresses a device knows memory by, and what has to be done before it or the CPU looks.

use crate::desc::Desc;
use crate::memory::{Memory, PeerShared};
use crate::region::Region;
use rustix::fd::BorrowedFd;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why memory could not be mapped for a device.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The domain does not cover the address.
    #[error("{len} bytes at {addr:#x} are in none of the domain's regions; put the region into the table before use")]
    Outside {
        /// Where the memory began.
        addr: usize,
        /// How long it was.
        len: usize,
    },
    /// The domain does not know the file.
    #[error(
        "{len} bytes at offset {offset} of a file that this process does not map are nothing that the DMA domain can reach; \
         use a domain that was given the file"
    )]
    File {
        /// Where in the file the memory began.
        offset: u64,
        /// How long it was.
        len: usize,
    },
    /// The domain can take no more.
    #[error("the DMA domain is full: {0}")]
    Full(String),
}

/// An address space that one device, or several, reach memory through.
///
/// Called on slow paths only: a page is mapped when it enters a pool and unmapped when it leaves, a fragment when a device
/// of another domain sends it and unmapped when that is done. Syncs are called per
/// packet, and only in domains that say they need them. Pools compare domains by identity: pages go between two devices
/// of one domain without being mapped again.
pub trait DmaDomain: fmt::Debug + Send + Sync {
    /// Makes `len` bytes at `addr` reachable and returns the device's address of the first. The same bytes may be mapped
    /// several times at once, and are then unmapped as often.
    ///
    /// # Errors
    ///
    /// [`MapError`]; nothing is mapped then.
    fn map(&self, addr: *mut u8, len: usize) -> Result<u64, MapError>;

    /// The same for memory that this process has not mapped ([`Device`](crate::Device)): `len` bytes from `offset` of
    /// `file`, which is the descriptor that [`Region::fd`] gives, the same number while the region lives. Domains that
    /// know of no files refuse.
    ///
    /// # Errors
    ///
    /// [`MapError`]; nothing is mapped then.
    fn map_file(&self, file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<u64, MapError> {
        let _ = file;
        Err(MapError::File { offset, len })
    }

    /// Takes back what [`map`](Self::map) or [`map_file`](Self::map_file) gave, once.
    fn unmap(&self, dma: u64, len: usize);

    /// Whether the two syncs do anything.
    fn needs_sync(&self) -> bool {
        false
    }

    /// The device wrote these bytes, the CPU is about to read them.
    fn sync_for_cpu(&self, dma: u64, len: usize) {
        let _ = (dma, len);
    }

    /// The CPU is done with these bytes, the device is about to read or write them.
    fn sync_for_device(&self, dma: u64, len: usize) {
        let _ = (dma, len);
    }
}

/// Maps a page of a kind of memory that is mapped here, or not.
///
/// # Safety
///
/// The page's region is alive.
pub(crate) unsafe fn map_page<M: Memory>(domain: &dyn DmaDomain, desc: &Desc, len: usize) -> Result<u64, MapError> {
    if M::MAPPED {
        return domain.map(desc.addr(), len);
    }
    // SAFETY: memory that is not mapped is a file, which the region keeps open.
    let file = unsafe { BorrowedFd::borrow_raw(desc.file()) };
    domain.map_file(file, desc.addr().addr() as u64, len)
}

/// One region of a [`MemoryTable`].
#[derive(Clone, Debug)]
pub struct TableEntry {
    /// The memory.
    pub region: Arc<Region<PeerShared>>,
    /// The device's address of its first byte.
    pub bus: u64,
}

/// A vhost memory table: whole regions at fixed bus addresses, so that mapping a page is an addition.
#[derive(Debug)]
pub struct MemoryTable {
    entries: Vec<TableEntry>,
}

impl MemoryTable {
    /// Puts the regions one after another into a bus address space that begins at 64 GiB, where no small integer and no
    /// pointer of this process passes for an address by accident.
    #[must_use]
    pub fn new(regions: &[Arc<Region<PeerShared>>]) -> Self {
        let mut bus = 64 << 30;
        let entries = regions.iter().map(|region| {
            let at = bus;
            bus += region.len() as u64;
            TableEntry { region: region.clone(), bus: at }
        });
        Self { entries: entries.collect() }
    }

    /// The regions, in order of address.
    #[must_use]
    pub fn entries(&self) -> &[TableEntry] {
        &self.entries
    }
}

impl DmaDomain for MemoryTable {
    fn map(&self, addr: *mut u8, len: usize) -> Result<u64, MapError> {
        let addr = addr.addr();
        for e in &self.entries {
            let start = e.region.as_ptr().addr();
            if addr >= start && addr - start <= e.region.len() && len <= e.region.len() - (addr - start) {
                return Ok(e.bus + (addr - start) as u64);
            }
        }
        Err(MapError::Outside { addr, len })
    }

    fn unmap(&self, _dma: u64, _len: usize) {}
}

/// Counts what another domain is asked to do. For tests and for seeing that a program keeps its books.
#[derive(Debug)]
pub struct CountingDomain<D> {
    inner: D,
    maps: AtomicU64,
    unmaps: AtomicU64,
    syncs: AtomicU64,
    synced: AtomicU64,
}

impl<D> CountingDomain<D> {
    /// Counts what is asked of `inner`.
    pub fn new(inner: D) -> Self {
        let zero = AtomicU64::default;
        Self { inner, maps: zero(), unmaps: zero(), syncs: zero(), synced: zero() }
    }

    /// Successful maps so far.
    pub fn maps(&self) -> u64 {
        self.maps.load(Ordering::Relaxed)
    }

    /// Unmaps so far.
    pub fn unmaps(&self) -> u64 {
        self.unmaps.load(Ordering::Relaxed)
    }

    /// Syncs so far, in either direction, and the bytes they covered.
    pub fn syncs(&self) -> (u64, u64) {
        (self.syncs.load(Ordering::Relaxed), self.synced.load(Ordering::Relaxed))
    }

    fn sync(&self, len: usize) {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        self.synced.fetch_add(len as u64, Ordering::Relaxed);
    }
}

impl<D: DmaDomain> DmaDomain for CountingDomain<D> {
    fn map(&self, addr: *mut u8, len: usize) -> Result<u64, MapError> {
        let dma = self.inner.map(addr, len)?;
        self.maps.fetch_add(1, Ordering::Relaxed);
        Ok(dma)
    }

    fn map_file(&self, file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<u64, MapError> {
        let dma = self.inner.map_file(file, offset, len)?;
        self.maps.fetch_add(1, Ordering::Relaxed);
        Ok(dma)
    }

    fn unmap(&self, dma: u64, len: usize) {
        self.unmaps.fetch_add(1, Ordering::Relaxed);
        self.inner.unmap(dma, len);
    }

    /// Always, so that the syncs are seen.
    fn needs_sync(&self) -> bool {
        true
    }

    fn sync_for_cpu(&self, dma: u64, len: usize) {
        self.sync(len);
        self.inner.sync_for_cpu(dma, len);
    }

    fn sync_for_device(&self, dma: u64, len: usize) {
        self.sync(len);
        self.inner.sync_for_device(dma, len);
    }
}
