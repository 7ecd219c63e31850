//! The source of receive pages for rows without a page pool: the two old ways.

use crate::args::AllocArg;
use netmem::pool::{PeerShared, Provider, Region, RegionError, RegionOptions};
use netmem::virtio::NetOptions;
use netmem_measure::frags::PageFrags;
use netmem_measure::pages::PageAllocator;
use std::sync::Arc;

/// Pages of the blocks that threads keep in their caches: each thread that carves and frees blocks
/// keeps some.
const FRAGS_KEEP: usize = 1024;

/// The allocator of a row without a page pool.
#[derive(Clone)]
pub(super) enum Baseline {
    /// A page per packet.
    Pages(Arc<PageAllocator>),
    /// Many buffers in a block of pages.
    Frags(Arc<PageFrags>),
}

impl Baseline {
    /// An allocator of `pages` pages. `maps`: whether the device reaches the pages by mappings.
    /// `None` for the page pool, which is not a baseline.
    pub(super) fn new(alloc: AllocArg, pages: usize, lock: bool, maps: bool) -> Result<Option<Self>, RegionError> {
        let region = |pages| RegionOptions::new(pages).lock(lock).reserved_huge_pages(true).build();
        Ok(match alloc {
            AllocArg::Pool => None,
            AllocArg::Page => Some(Self::Pages(PageAllocator::new(region(pages)?))),
            // A block stays allocated as long as one of its buffers does.
            AllocArg::Frags => Some(Self::Frags(PageFrags::new(region(2 * pages + FRAGS_KEEP)?, maps))),
        })
    }

    pub(super) fn region(&self) -> &Arc<Region<PeerShared>> {
        match self {
            Self::Pages(pages) => pages.region(),
            Self::Frags(frags) => frags.region(),
        }
    }

    pub(super) fn provider(&self) -> Arc<dyn Provider<PeerShared>> {
        match self {
            Self::Pages(pages) => pages.clone(),
            Self::Frags(frags) => frags.clone(),
        }
    }

    /// Lets a virtio-net driver take its pages from this allocator, for each buffer, because the
    /// driver's pools get no cache. The pool maps each page of `Pages`; `Frags` maps its blocks
    /// itself.
    pub(super) fn serve(&self, options: NetOptions) -> NetOptions {
        let premapped = matches!(self, Self::Pages(_));
        options.cache(0).premapped(premapped).memory(self.region().clone(), self.provider())
    }

    /// Pages that were not returned. All threads that used them must have ended.
    pub(super) fn out(&self) -> u64 {
        match self {
            Self::Pages(pages) => u64::from(pages.region().pages()).saturating_sub(pages.free_pages() as u64),
            Self::Frags(frags) => frags.out(),
        }
    }

    /// The numbers of maps and unmaps without the pool. Call it after [`out`](Self::out).
    pub(super) fn maps(&self) -> (u64, u64) {
        match self {
            Self::Pages(_) => (0, 0),
            Self::Frags(frags) => frags.maps(),
        }
    }
}
