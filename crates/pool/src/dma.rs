//! DMA domains: the addresses by which a device reaches memory, and the syncs before the device or
//! the CPU accesses it.

use crate::desc::Desc;
use crate::error::MapError;
use crate::memory::Memory;
use rustix::fd::BorrowedFd;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The direction of bytes between memory and the devices of a [`DmaDomain`]: what a mapping allows,
/// and what a transfer does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Direction {
    /// A device writes the bytes: for receive buffers.
    FromDevice,
    /// A device reads the bytes: for data that is sent.
    ToDevice,
    /// A device does both: for receive buffers whose pages may be sent again unchanged. This is the
    /// default, because it is correct for every program.
    #[default]
    Bidirectional,
}

/// An address space that one device, or several, reach memory through.
///
/// Called on slow paths only: a page is mapped when it enters a pool and unmapped when it leaves, a
/// fragment when a device of another domain sends it and unmapped when that is done. Syncs are
/// called per packet, and only in domains that [need them](DmaDomain::needs_sync). Pools compare
/// domains by identity: pages go between two devices of one domain without being mapped again.
pub trait DmaDomain: fmt::Debug + Send + Sync {
    /// Makes `len` bytes at `addr` reachable in the given direction, and returns the device's
    /// address of the first. The same bytes may be mapped several times at once, also in other
    /// directions, and are then unmapped as often.
    ///
    /// If a domain can, for example behind an IOMMU, it keeps the device from all other accesses: a
    /// device cannot write memory that is mapped [`ToDevice`](Direction::ToDevice).
    ///
    /// # Errors
    ///
    /// [`MapError`]; nothing is mapped then.
    fn map(&self, addr: *mut u8, len: usize, direction: Direction) -> Result<u64, MapError>;

    /// The same for memory that this process has not mapped ([`Device`](crate::Device)): `len`
    /// bytes from `offset` of `file`, which is the descriptor that
    /// [`Region::fd`](crate::Region::fd) returns, the same number while the region lives. Domains
    /// that know of no files refuse.
    ///
    /// # Errors
    ///
    /// [`MapError`]; nothing is mapped then.
    fn map_file(&self, file: BorrowedFd<'_>, offset: u64, len: usize, direction: Direction) -> Result<u64, MapError> {
        let _ = (file, direction);
        Err(MapError::File { offset, len })
    }

    /// Undoes one [`map`](Self::map) or [`map_file`](Self::map_file). Called once for each.
    fn unmap(&self, dma: u64, len: usize);

    /// Whether the two syncs have any effect.
    fn needs_sync(&self) -> bool {
        false
    }

    /// The device wrote these bytes, the CPU is about to read them. Of a mapping that allows the
    /// device to write.
    fn sync_for_cpu(&self, dma: u64, len: usize) {
        let _ = (dma, len);
    }

    /// The CPU has finished with these bytes. The device is about to write them
    /// ([`FromDevice`](Direction::FromDevice): what the CPU wrote is of no interest), to read them
    /// ([`ToDevice`](Direction::ToDevice)), or both.
    fn sync_for_device(&self, dma: u64, len: usize, direction: Direction) {
        let _ = (dma, len, direction);
    }
}

/// Maps a page of any kind of memory, mapped in this process or not.
///
/// # Safety
///
/// The page's region is alive.
#[inline]
pub(crate) unsafe fn map_page<M: Memory>(
    domain: &dyn DmaDomain,
    desc: &Desc,
    len: usize,
    direction: Direction,
) -> Result<u64, MapError> {
    if M::MAPPED {
        return domain.map(desc.addr(), len, direction);
    }
    // SAFETY: memory that is not mapped is a file, and the region keeps the file open.
    let file = unsafe { BorrowedFd::borrow_raw(desc.file()) };
    domain.map_file(file, desc.addr().addr() as u64, len, direction)
}

/// Counts the calls to another domain. For tests, and to check that a program balances its maps and
/// unmaps.
#[derive(Debug)]
pub struct CountingDomain<D> {
    inner: D,
    maps: AtomicU64,
    unmaps: AtomicU64,
    syncs: AtomicU64,
    synced: AtomicU64,
}

impl<D> CountingDomain<D> {
    /// Counts the calls to `inner`.
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
    fn map(&self, addr: *mut u8, len: usize, direction: Direction) -> Result<u64, MapError> {
        let dma = self.inner.map(addr, len, direction)?;
        self.maps.fetch_add(1, Ordering::Relaxed);
        Ok(dma)
    }

    fn map_file(&self, file: BorrowedFd<'_>, offset: u64, len: usize, direction: Direction) -> Result<u64, MapError> {
        let dma = self.inner.map_file(file, offset, len, direction)?;
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

    fn sync_for_device(&self, dma: u64, len: usize, direction: Direction) {
        self.sync(len);
        self.inner.sync_for_device(dma, len, direction);
    }
}
