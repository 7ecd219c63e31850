//! A provider that allocates more memory from the system when it has no page left, up to a limit.
//!
//! ```text
//!   alloc ◄── released pages ◄── release    one list for all regions: a page has its region
//!         ◄── fresh pages of the newest region
//!         ◄── a new region, while the limit allows
//! ```

use crate::error::RegionError;
use crate::memory::SystemMemory;
use crate::provider::{Provider, Supply};
use crate::raw_page::RawPage;
use crate::region::Region;
use crate::region_options::RegionOptions;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// After the system has refused a region, so many requests fail without a system call. A queue
/// without pages makes a request with every poll.
const FAILURES_PER_REFUSAL: u32 = 1024;

/// A provider that begins with one region and adds another of the same kind whenever all pages are
/// out, up to a limit.
///
/// It keeps every region until it is dropped. Pages that are released are handed out again, the
/// latest first. At the limit, or when the system has no more memory, [`alloc`](Provider::alloc)
/// finds no page; pools count that as `alloc_failed`, and this provider in
/// [`out_of_pages`](Self::out_of_pages).
///
/// Use it with domains that map any memory. A [`VhostDomain`](crate::VhostDomain) knows only the
/// regions that it was made of. There, use a sparse region ([`RegionOptions::populate`]), which
/// grows by being touched; the pools' limits are then the limit of growth.
/// [`Page::index`](crate::Page::index) is the page's number in its region, of which there are
/// several here.
///
/// The thread whose request makes the provider grow waits until the region is made,
/// and so does each thread that finds no page meanwhile. Pages can be released at any time.
pub struct GrowingProvider<M: SystemMemory> {
    step: RegionOptions,
    limit: usize,
    state: Mutex<State<M>>,
    /// Requests that still fail without asking the system. The holder of the lock may be making a
    /// region. Locked before `state`.
    growth: Mutex<u32>,
}

struct State<M: SystemMemory> {
    supply: Supply,
    /// The newest last; never empty.
    regions: Vec<Arc<Region<M>>>,
    pages: usize,
    out_of_pages: u64,
}

impl<M: SystemMemory> State<M> {
    fn newest(&self) -> &Arc<Region<M>> {
        &self.regions[self.regions.len() - 1]
    }
}

impl<M: SystemMemory> GrowingProvider<M> {
    /// Makes the first region, and every further one, by the options `step`; the last is smaller if
    /// the `limit`, in pages, is not a multiple.
    ///
    /// # Errors
    ///
    /// [`RegionError::Growth`] if the limit does not allow one region; or any error of making the
    /// first region.
    pub fn new(step: RegionOptions, limit: usize) -> Result<Arc<Self>, RegionError> {
        if limit < step.pages {
            return Err(RegionError::Growth { limit, step: step.pages });
        }
        let pages = step.pages;
        let regions = vec![Arc::new(step.clone().build()?)];
        let state = Mutex::new(State { supply: Supply::new(), regions, pages, out_of_pages: 0 });
        Ok(Arc::new(Self { step, limit, state, growth: Mutex::new(0) }))
    }

    fn state(&self) -> MutexGuard<'_, State<M>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages in all regions so far, in use or not.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.state().pages
    }

    /// Pages that there may be at most.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Requests for pages that got none, because of the limit or the system.
    #[must_use]
    pub fn out_of_pages(&self) -> u64 {
        self.state().out_of_pages
    }

    /// Makes sure that there are pages to take, though other threads may take them first. False if
    /// there cannot be any.
    fn grow(&self) -> bool {
        let mut believed = self.growth.lock().unwrap_or_else(PoisonError::into_inner);
        let room = {
            let mut state = self.state();
            if state.supply.has_any(state.newest()) {
                return true;
            }
            let room = self.limit - state.pages;
            if room == 0 || *believed > 0 {
                state.out_of_pages += 1;
                *believed = believed.saturating_sub(1);
                return false;
            }
            room
        };
        let mut step = self.step.clone();
        step.pages = step.pages.min(room);
        let pages = step.pages;
        match step.build() {
            Ok(region) => {
                let mut state = self.state();
                state.supply.next_region();
                state.regions.push(Arc::new(region));
                state.pages += pages;
                netmem_percpu::trace::debug!(pages = state.pages, limit = self.limit, "a provider grew");
                true
            }
            Err(error) => {
                let mut state = self.state();
                state.out_of_pages += 1;
                netmem_percpu::trace::warn!(%error, pages = state.pages, limit = self.limit, "a provider cannot grow");
                *believed = FAILURES_PER_REFUSAL;
                false
            }
        }
    }
}

// SAFETY: the newest region's fresh pages are handed out once, before there is a newer, and a page
// is on the supply's list once; regions are made of one set of options and stay until the provider
// goes.
unsafe impl<M: SystemMemory> Provider<M> for GrowingProvider<M> {
    fn alloc(&self, pages: &mut [Option<RawPage<M>>]) -> usize {
        if pages.is_empty() {
            return 0;
        }
        loop {
            let mut state = self.state();
            let newest = state.newest().clone();
            // SAFETY: the regions are ours, and kept together with the supply.
            let taken = unsafe { state.supply.alloc(&newest, pages) };
            drop(state);
            if taken > 0 || !self.grow() {
                return taken;
            }
        }
    }

    unsafe fn release(&self, page: RawPage<M>) {
        // SAFETY: the caller guarantees that the page is one of ours.
        unsafe { self.state().supply.release(page) };
    }

    fn page_size(&self) -> usize {
        self.state().newest().page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<M>)) {
        // Without the lock: domains may do anything, returning pages included.
        let regions = self.state().regions.clone();
        regions.iter().for_each(|region| f(region));
    }
}

impl<M: SystemMemory> fmt::Debug for GrowingProvider<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        let (pages, regions) = (state.pages, state.regions.len());
        write!(f, "GrowingProvider<{}>({pages} of {} pages, {regions} regions)", M::NAME, self.limit)
    }
}
