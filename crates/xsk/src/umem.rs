//! The UMEM: the memory that sockets receive into and send from. It is also their DMA domain.
//!
//! The kernel pins the whole region when the first socket is opened, and releases it when the last
//! socket is closed.

use crate::error::XskError;
use crate::held;
use crate::layout::Layout;
use crate::options::UmemOptions;
use crate::socket::{Retry, XskSocket};
use crate::sys;
use crate::umem_memory::UmemMemory;
use netmem_pool::{Direction, DmaDomain, MapError, Region};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Bytes that the kernel leaves free in front of each received frame.
pub(crate) const KERNEL_HEADROOM: usize = 256;
/// The smallest size of a chunk, and the least number of bytes that a chunk must have for the
/// frame.
const LEAST_CHUNK: usize = 2048;
/// Bytes that the headroom has to leave in a chunk: the shortest Ethernet frame.
const LEAST_FRAME: usize = 64;

/// A UMEM. This is a handle: clones are the same UMEM, which exists until the last handle and the
/// last queue are gone.
pub struct Umem<M: UmemMemory>(Arc<Inner<M>>);

struct Inner<M: UmemMemory> {
    region: Arc<Region<M>>,
    domain: Arc<UmemDomain>,
    layout: Layout,
    /// The sockets that use the UMEM. While there is one, others share its registration. Closed
    /// sockets are among them until the next one is bound.
    sockets: Mutex<Vec<Weak<XskSocket>>>,
    /// The number by which pages are kept for it that the kernel has: see `held.rs`.
    number: u64,
}

impl<M: UmemMemory> Umem<M> {
    /// A UMEM of all pages of `region`. It is registered with the kernel when the first socket is
    /// opened.
    ///
    /// # Errors
    ///
    /// [`XskError::Chunk`] and [`XskError::Headroom`].
    pub fn new(region: Arc<Region<M>>, options: &UmemOptions) -> Result<Self, XskError> {
        let page = region.page_size();
        let chunk = options.chunk.unwrap_or(page.min(4096));
        // The kernel (7.3) refuses larger chunks, even in memory of huge pages.
        if !chunk.is_power_of_two() || chunk < LEAST_CHUNK || chunk > page.min(4096) {
            return Err(XskError::Chunk { chunk, page });
        }
        let headroom = options.headroom as usize;
        if KERNEL_HEADROOM + headroom + LEAST_FRAME > chunk {
            return Err(XskError::Headroom { headroom, chunk, least: LEAST_FRAME });
        }
        let len = region.pages() as usize * page;
        let domain = Arc::new(UmemDomain { at: region.as_ptr().addr(), len });
        let layout = Layout {
            len,
            chunk,
            shift: chunk.ilog2(),
            per_page: (page / chunk) as u32,
            page_shift: page.ilog2(),
            headroom: options.headroom,
            tx_metadata: options.tx_metadata,
            software_checksums: options.software_checksums,
        };
        let (sockets, number) = (Mutex::default(), held::number());
        Ok(Self(Arc::new(Inner { region, domain, layout, sockets, number })))
    }

    /// The memory of the UMEM.
    #[must_use]
    pub fn region(&self) -> &Arc<Region<M>> {
        &self.0.region
    }

    /// The DMA domain, for pools whose pages are sent. An address in it is an offset in the region.
    /// Pools of this domain and of any other domain over the same region exchange pages with the
    /// sockets without a copy.
    #[must_use]
    pub fn domain(&self) -> Arc<dyn DmaDomain> {
        self.0.domain.clone()
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// The sockets that use the UMEM, locked. No code of the user's may run meanwhile.
    pub(crate) fn sockets(&self) -> MutexGuard<'_, Vec<Weak<XskSocket>>> {
        self.0.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether code runs that may run no code of the user's: see [`sockets`](Self::sockets).
    #[cfg(all(test, not(loom)))]
    pub(crate) fn is_locked(&self) -> bool {
        self.0.sockets.try_lock().is_err()
    }

    /// Registers the memory with a socket. If the limit of locked memory is reached, this is
    /// repeated as `retry` says: the kernel counts the memory of a UMEM until some time after its
    /// last socket was closed.
    pub(crate) fn register(&self, fd: BorrowedFd<'_>, retry: Retry) -> Result<(), XskError> {
        let bytes = self.0.layout.len;
        let register = || sys::register(fd, self.0.region.as_ptr(), &self.0.layout);
        retry.run(libc::ENOBUFS, register).map_err(|source| match source.raw_os_error() {
            Some(libc::ENOBUFS | libc::EPERM | libc::ENOMEM) => {
                XskError::Memlock { bytes, queues: 1, limit: sys::memlock_limit(), source }
            }
            Some(libc::EINVAL) if self.0.layout.tx_metadata && sys::kernel() < (6, 11) => {
                let step = "register a UMEM with metadata of sent frames, which takes Linux 6.11";
                XskError::System { step, source }
            }
            _ => XskError::System { step: "register the memory as a UMEM", source },
        })
    }

    pub(crate) fn number(&self) -> u64 {
        self.0.number
    }

    /// The number of sent pages that are kept because a transmit queue ended before the kernel was
    /// done with them. They return to their pools when a socket is bound to the same queue again,
    /// because the kernel allows that only when it is done. When the UMEM ends, its last handle
    /// waits for that, for half a second at most; for what is kept then, see
    /// [`reclaim`](crate::reclaim).
    #[must_use]
    pub fn held(&self) -> usize {
        held::sent_of(self.0.number)
    }

    /// Bytes in a chunk.
    #[must_use]
    pub fn chunk_size(&self) -> usize {
        self.0.layout.chunk
    }

    /// Bytes of a frame that fit into a chunk, behind both headrooms. A longer frame is in several
    /// chunks.
    #[must_use]
    pub fn frame_capacity(&self) -> usize {
        self.0.layout.chunk - KERNEL_HEADROOM - self.0.layout.headroom as usize
    }
}

impl<M: UmemMemory> Drop for Inner<M> {
    fn drop(&mut self) {
        held::end(self.number);
    }
}

impl<M: UmemMemory> Clone for Umem<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M: UmemMemory> fmt::Debug for Umem<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Umem({:?}, chunks of {} B)", self.0.region, self.0.layout.chunk)
    }
}

/// The address space of a UMEM. Mapping is a subtraction. The kernel has pinned the memory, for
/// both directions.
#[derive(Debug)]
struct UmemDomain {
    at: usize,
    len: usize,
}

impl DmaDomain for UmemDomain {
    fn map(&self, addr: *mut u8, len: usize, _: Direction) -> Result<u64, MapError> {
        let addr = addr.addr();
        match addr.checked_sub(self.at) {
            Some(offset) if offset <= self.len && len <= self.len - offset => Ok(offset as u64),
            _ => Err(MapError::Outside { addr, len }),
        }
    }

    fn unmap(&self, _: u64, _: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use netmem_pool::{KernelShared, RegionOptions};

    fn region(order: u8) -> Arc<Region<KernelShared>> {
        Arc::new(RegionOptions::new(8).order(order).huge_pages(false).build().unwrap())
    }

    #[test]
    fn chunks_are_powers_of_two_within_a_page() {
        let umem = |order, chunk| Umem::new(region(order), &UmemOptions::new().chunk(chunk));
        assert_eq!(umem(0, 4096).unwrap().frame_capacity(), 3840);
        assert_eq!(umem(1, 2048).unwrap().frame_capacity(), 1792);
        for (order, chunk) in [(0, 1024), (0, 3000), (0, 8192), (1, 8192)] {
            assert!(matches!(umem(order, chunk), Err(XskError::Chunk { .. })), "{order} {chunk}");
        }
        // The region uses reserved huge pages, if the system has any.
        let huge: Region<KernelShared> = RegionOptions::new(8).order(1).build().unwrap();
        assert!(matches!(Umem::new(Arc::new(huge), &UmemOptions::new().chunk(8192)), Err(XskError::Chunk { .. })));
        let large = UmemOptions::new().chunk(2048).headroom(1728 + 64);
        assert!(matches!(Umem::new(region(0), &large), Err(XskError::Headroom { .. })));
    }

    #[test]
    fn an_address_is_an_offset() {
        let umem = Umem::new(region(0), &UmemOptions::new()).unwrap();
        let (at, domain) = (umem.region().as_ptr(), umem.domain());
        assert_eq!(domain.map(at.wrapping_add(4096), 4096, Direction::Bidirectional).unwrap(), 4096);
        assert_eq!(domain.map(at.wrapping_add(8 * 4096 - 1), 1, Direction::ToDevice).unwrap(), 8 * 4096 - 1);
        for (offset, len) in [(8 * 4096 - 1, 2), (8 * 4096 + 1, 0), (-1, 1)] {
            assert!(domain.map(at.wrapping_offset(offset), len, Direction::ToDevice).is_err(), "{offset} {len}");
        }
    }
}
