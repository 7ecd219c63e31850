//! [`PoolHeader`]: the part of a pool that a thread reads when it drops a page.
//!
//! ```text
//!   RegionProvider, quarantine    │ PoolHeader │
//!   PagePool                      │ PoolHeader │ Cache │     this one can be entered: PolledHeader
//! ```
//!
//! Why a header: a page's descriptor points to it, whatever the page returns to. It has a function
//! for the slow path, the identity of the DMA domain, and the magazines, if the owner collects
//! pages by CPU. Every core that drops a page reads these words, which are constant. The magazines
//! of a pool for every thread lie in the header, too, in lines of their own. Only a pool that is
//! polled has a cache behind its header.

use crate::desc::Desc;
use netmem_percpu::{CpuCache, Depot};
use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};

/// A function that returns a page to its owner. It may free the header.
///
/// # Safety
///
/// The header is the page's, and the caller passes on the page's ownership (*one owner*).
pub(crate) type ReturnFn = unsafe fn(NonNull<PoolHeader>, NonNull<Desc>);

/// The header: the part of the owner that a dropped page needs. It is the first field of the owner,
/// or at a fixed offset in it, so that the owner's functions find the owner by the header's
/// address.
#[repr(C, align(128))]
pub(crate) struct PoolHeader {
    /// Returns a page that neither the cache nor a magazine accepts. Called on any thread.
    pub(crate) remote_free: ReturnFn,
    /// Identity of the DMA domain that pages of this header are mapped in, or 0.
    domain: usize,
    /// Of a pool for every thread: collects pages, on whichever CPU they are dropped. At most one
    /// of this field and the next is set. In place: a box would be one more load of each allocation
    /// and of each drop.
    cpus: Option<CpuCache>,
    /// For a pool that is polled: collects pages that are dropped outside of the poll context, if
    /// the owner wants them collected.
    depot: Option<Depot>,
    /// Bytes in each page. The last field, because no return reads it.
    page_size: u32,
}

impl PoolHeader {
    pub(crate) fn new(remote_free: ReturnFn, domain: usize, depot: Option<Depot>, page_size: u32) -> Self {
        Self { remote_free, domain, cpus: None, depot, page_size }
    }

    /// The header of pages that any thread allocates.
    pub(crate) fn with_cpu_cache(remote_free: ReturnFn, domain: usize, cpus: CpuCache, page_size: u32) -> Self {
        Self { remote_free, domain, cpus: Some(cpus), depot: None, page_size }
    }

    #[inline]
    pub(crate) fn page_size(&self) -> u32 {
        self.page_size
    }

    #[inline]
    pub(crate) fn domain(&self) -> usize {
        self.domain
    }

    #[inline]
    pub(crate) fn depot(&self) -> Option<&Depot> {
        self.depot.as_ref()
    }

    #[inline]
    pub(crate) fn cpus(&self) -> Option<&CpuCache> {
        self.cpus.as_ref()
    }

    /// The depot and the CPU cache of a header, as pointers: a reference would have to be valid
    /// until the end of a call, and the header may be freed during the call.
    ///
    /// # Safety
    ///
    /// The header is alive, and both may be used as long.
    #[inline(always)]
    pub(crate) unsafe fn magazines_of(at: *const Self) -> (Option<*const Depot>, Option<*const CpuCache>) {
        // SAFETY: the caller's.
        unsafe { ((*at).depot.as_ref().map(ptr::from_ref), (*at).cpus.as_ref().map(ptr::from_ref)) }
    }
}

impl Desc {
    /// The header of the owner to which the page returns.
    #[inline]
    pub(crate) fn header(&self) -> *mut PoolHeader {
        self.header_addr().cast()
    }

    #[inline]
    pub(crate) fn set_header(&self, header: *mut PoolHeader) {
        // For the return, which may know the header by its address alone.
        let _ = header.expose_provenance();
        self.set_header_addr(header.cast());
    }
}

/// A page in the form in which the depot stores it.
#[inline(always)]
pub(crate) fn item_of(desc: NonNull<Desc>) -> NonZeroUsize {
    desc.expose_provenance()
}

/// The page that the depot stores as `item`.
#[inline(always)]
pub(crate) fn desc_of(item: NonZeroUsize) -> NonNull<Desc> {
    NonNull::with_exposed_provenance(item)
}
