//! Providers: the supply of pages behind every pool, as the kernel's `memory_provider_ops`.

use crate::desc::{Desc, ListNode};
use crate::header::PoolHeader;
use crate::list::{node_of, split_first};
use crate::memory::Memory;
use crate::page::Page;
use crate::raw_page::RawPage;
use crate::region::Region;
use crate::sync::Mutex;
use std::fmt;
use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::sync::{Arc, PoisonError};

/// A supply of pages, shared by pools and called from any thread.
///
/// A pool allocates pages when it has none left, and releases them when it ends. In between the
/// pages circulate, and the provider is not called. A pool without a cache (a page per packet)
/// allocates and releases a page for each packet. An implementation may drop pages during a call,
/// also pages of the calling pool: they are returned as from any other place.
///
/// A child of a fork may drop a provider that it inherited, and its pages: see [`Region`].
///
/// [`RegionProvider`] is the ordinary provider. An implementation has its pages from a [`Region`]
/// of its own, by number. In this example, the page that was returned first is handed out first:
///
/// ```
/// # use netmem_pool::{PoolOptions, Private, Provider, RawPage, Region, RegionOptions};
/// # use std::collections::VecDeque;
/// # use std::sync::{Arc, Mutex, PoisonError};
/// #[derive(Debug)]
/// struct Fifo {
///     region: Region<Private>,
///     free: Mutex<VecDeque<u32>>,
/// }
///
/// impl Fifo {
///     fn new(region: Region<Private>) -> Arc<Self> {
///         let free = Mutex::new((0..region.pages()).collect());
///         Arc::new(Self { region, free })
///     }
/// }
///
/// // SAFETY: a number is in the list, once, while its page is neither in a pool nor in use. The one region stays.
/// unsafe impl Provider<Private> for Fifo {
///     fn alloc(&self, pages: &mut [Option<RawPage<Private>>]) -> usize {
///         let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
///         let taken = pages.len().min(free.len());
///         for (page, index) in pages.iter_mut().zip(free.drain(..taken)) {
///             // SAFETY: just taken out of the list.
///             *page = Some(unsafe { self.region.claim(index) });
///         }
///         taken
///     }
///
///     unsafe fn release(&self, page: RawPage<Private>) {
///         // SAFETY: the page is one of ours, and we are here.
///         let index = unsafe { page.index() };
///         self.free.lock().unwrap_or_else(PoisonError::into_inner).push_back(index);
///     }
///
///     fn page_size(&self) -> usize {
///         self.region.page_size()
///     }
///
///     fn each(&self, f: &mut dyn FnMut(&Region<Private>)) {
///         f(&self.region);
///     }
/// }
///
/// let pages = Fifo::new(RegionOptions::new(100).huge_pages(false).build()?);
/// let mut pool = PoolOptions::new("rx0").build(pages.clone(), None)?;
/// drop((pool.alloc(), pool.alloc()));
/// drop(pool);
/// assert_eq!(pages.free.lock().unwrap().len(), 100);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Safety
///
/// The implementation hands every page out to one holder at a time. It keeps the [`Region`] of
/// every page that is in use. [`each`](Self::each) passes every region that pages may come from,
/// and each of those has pages of [`page_size`](Self::page_size) bytes.
pub unsafe trait Provider<M: Memory>: fmt::Debug + Send + Sync {
    /// Fills `pages` from the front and returns how many it had.
    fn alloc(&self, pages: &mut [Option<RawPage<M>>]) -> usize;

    /// Accepts a page that its pool releases.
    ///
    /// # Safety
    ///
    /// The page came out of this provider's [`alloc`](Self::alloc).
    unsafe fn release(&self, page: RawPage<M>);

    /// Bytes in each page.
    fn page_size(&self) -> usize;

    /// The regions that pages come from.
    fn each(&self, f: &mut dyn FnMut(&Region<M>));

    /// How many pages the provider can hand out, as far as it is known now. A pool sizes its
    /// magazines by that. By default, all pages of its regions.
    fn pages(&self) -> u64 {
        let mut pages = 0;
        self.each(&mut |region| pages += u64::from(region.pages()));
        pages
    }
}

/// The ordinary provider: one region. Returned pages are handed out before fresh ones.
#[repr(C)]
pub struct RegionProvider<M: Memory> {
    /// The header of pages that were taken for no pool; see [`Self::page`].
    header: PoolHeader,
    region: Arc<Region<M>>,
    supply: Mutex<Supply>,
}

/// Pages of one region that were never handed out, and pages that were released.
#[derive(Debug)]
pub(crate) struct Supply {
    /// Pages from here on were never handed out.
    fresh: u32,
    /// Pages that were released, by their nodes.
    free: *mut ListNode,
}

// SAFETY: the list's pages belong to the supply, and are reached under its lock only.
unsafe impl Send for Supply {}

impl Supply {
    pub(crate) fn new() -> Self {
        Self { fresh: 0, free: ptr::null_mut() }
    }

    /// Fills `pages` from the front: first with returned pages, then with fresh pages of `region`.
    ///
    /// # Safety
    ///
    /// Only this supply hands out pages of the region, and the caller keeps the regions of returned
    /// pages alive.
    pub(crate) unsafe fn alloc<M: Memory>(&mut self, region: &Region<M>, pages: &mut [Option<RawPage<M>>]) -> usize {
        let mut taken = 0;
        for slot in pages {
            // SAFETY: the pages on the list belong to the supply.
            let desc = match unsafe { split_first(self.free) } {
                Some((desc, rest)) => {
                    self.free = rest;
                    desc
                }
                None if self.fresh < region.pages() => {
                    self.fresh += 1;
                    region.desc(self.fresh - 1)
                }
                None => break,
            };
            // SAFETY: the page was just taken off the list, or was never handed out before.
            *slot = Some(unsafe { RawPage::from_desc(desc) });
            taken += 1;
        }
        taken
    }

    /// # Safety
    ///
    /// The page came from this supply. The caller keeps the supply and its regions alive.
    pub(crate) unsafe fn release<M: Memory>(&mut self, page: RawPage<M>) {
        let node = node_of(page.into_desc());
        // SAFETY: the page belongs to the supply now.
        unsafe { (*node).set(self.free) };
        self.free = node;
    }

    /// Another region replaces one that has no fresh pages left.
    pub(crate) fn next_region(&mut self) {
        self.fresh = 0;
    }

    /// Whether a page is available.
    pub(crate) fn has_any<M: Memory>(&self, region: &Region<M>) -> bool {
        !self.free.is_null() || self.fresh < region.pages()
    }
}

impl<M: Memory> RegionProvider<M> {
    /// Supplies all pages of `region`. Therefore it consumes the region as a whole.
    #[must_use]
    pub fn new(region: Region<M>) -> Arc<Self> {
        let region = Arc::new(region);
        let supply = Mutex::new(Supply::new());
        // A page has at most 2 MiB.
        let header = PoolHeader::new(Self::free_page, 0, None, region.page_size() as u32);
        Arc::new(Self { header, region, supply })
    }

    /// The memory, in the form that a [`VhostDomain`](crate::VhostDomain) needs. Only this provider
    /// hands out its pages.
    #[must_use]
    pub fn region(&self) -> &Arc<Region<M>> {
        &self.region
    }

    /// A page that belongs to no pool. Its drop, on any thread, returns it straight to this
    /// provider. The call acquires a lock, and so does the drop.
    #[must_use]
    pub fn page(self: &Arc<Self>) -> Option<Page<M>> {
        let mut one = [None];
        self.alloc(&mut one);
        let [raw] = one;
        let desc = raw?.into_desc();
        let header = Arc::into_raw(self.clone()).cast_mut().cast::<PoolHeader>();
        // SAFETY: the page is ours. Its header is the first field of this provider, of which the
        // page now holds a count.
        unsafe {
            desc.as_ref().set_header(header);
            desc.as_ref().set_mapped(0, desc.as_ref().addr().addr() as u64);
            Some(Page::from_desc(desc, 0, self.region.page_size() as u32))
        }
    }

    /// Quarantines a [`page`](Self::page) that a device kept when it stopped answering. The page is
    /// not used again until the region is dropped. It does not keep the region alive.
    pub fn quarantine(&self, page: Page<M>) {
        let header = page.desc().header();
        if header.cast_const() != (&raw const self.header) || !page.desc().is_sole() {
            // The page is of another provider, or has other holders. It is leaked, with everything
            // that it keeps alive.
            return std::mem::forget(page);
        }
        let _ = page.into_desc();
        // SAFETY: `page` made this header of a counted pointer to this provider, which the page
        // alone had; the caller has another.
        drop(unsafe { Arc::from_raw(header.cast_const().cast::<Self>()) });
    }

    /// The return path of a page that belongs to no pool.
    unsafe fn free_page(header: NonNull<PoolHeader>, desc: NonNull<Desc>) {
        const { assert!(offset_of!(Self, header) == 0) };
        // SAFETY: `page` made this header of a counted pointer to a provider, and gave it to this
        // page alone.
        unsafe {
            let provider = Arc::from_raw(header.as_ptr().cast_const().cast::<Self>());
            provider.release(RawPage::from_desc(desc));
        }
    }
}

// SAFETY: `fresh` only grows, and a page is on the free list at most once. The region is part of
// the provider, and pools and pages hold a count of the provider.
unsafe impl<M: Memory> Provider<M> for RegionProvider<M> {
    fn alloc(&self, pages: &mut [Option<RawPage<M>>]) -> usize {
        let mut supply = self.supply.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the region was passed in as a whole, and both values are kept in the provider.
        unsafe { supply.alloc(&self.region, pages) }
    }

    unsafe fn release(&self, page: RawPage<M>) {
        let mut supply = self.supply.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller guarantees that the page is one of this provider.
        unsafe { supply.release(page) };
    }

    fn page_size(&self) -> usize {
        self.region.page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<M>)) {
        f(&self.region);
    }
}

impl<M: Memory> fmt::Debug for RegionProvider<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionProvider").field("region", &self.region).finish_non_exhaustive()
    }
}
