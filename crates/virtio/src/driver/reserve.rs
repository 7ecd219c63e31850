//! A reserve of pages for transmit pools, out of the memory of the receive pages.
//!
//! Receive pools and transmit pools have one region, and so one entry in the device's memory table
//! and one DMA domain. If they also had one provider, packets that a user keeps could use up the
//! pages to send from, and packets that wait to be sent could use up the pages to receive into. A
//! reserve allocates its pages when the device is probed, and provides only these.

use super::panics::Panics;
use netmem_pool::{Memory, Provider, RawPage, Region};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// See the module.
pub(super) struct Reserve<M: Memory> {
    from: Arc<dyn Provider<M>>,
    /// How many pages were set aside.
    count: usize,
    /// Pages that are in no pool, the latest last.
    pages: Mutex<Vec<RawPage<M>>>,
}

impl<M: Memory> Reserve<M> {
    /// Allocates `count` pages from `from`.
    ///
    /// # Errors
    ///
    /// The number of pages that there were. They are returned to `from`.
    pub(super) fn new(from: Arc<dyn Provider<M>>, count: usize) -> Result<Arc<Self>, usize> {
        let mut this = Self { from, count, pages: Mutex::default() };
        let pages = this.pages.get_mut().unwrap_or_else(PoisonError::into_inner);
        while pages.len() < count {
            let mut some = [const { None }; 64];
            let most = some.len().min(count - pages.len());
            let mut panics = Panics::default();
            let taken = panics.call(|| this.from.alloc(&mut some[..most]));
            // This includes the pages that the provider handed out before it panicked: the drop of
            // the reserve returns them.
            pages.extend(some.into_iter().flatten());
            panics.resume();
            if taken.is_none_or(|taken| taken == 0) {
                return Err(pages.len());
            }
        }
        Ok(Arc::new(this))
    }
}

// SAFETY: a page is in the list while it is nowhere else, once; all are of the provider behind,
// which the reserve keeps and whose promises about regions and sizes hold for them.
unsafe impl<M: Memory> Provider<M> for Reserve<M> {
    fn alloc(&self, pages: &mut [Option<RawPage<M>>]) -> usize {
        let mut mine = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = pages.len().min(mine.len());
        let rest = mine.len() - taken;
        for (page, raw) in pages.iter_mut().zip(mine.drain(rest..)) {
            *page = Some(raw);
        }
        taken
    }

    unsafe fn release(&self, page: RawPage<M>) {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner).push(page);
    }

    fn page_size(&self) -> usize {
        self.from.page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<M>)) {
        self.from.each(f);
    }

    fn pages(&self) -> u64 {
        self.count as u64
    }
}

impl<M: Memory> Drop for Reserve<M> {
    fn drop(&mut self) {
        let mut panics = Panics::default();
        for page in self.pages.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: it came from there.
            panics.call(|| unsafe { self.from.release(page) });
        }
        panics.resume();
    }
}

impl<M: Memory> fmt::Debug for Reserve<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reserve").field("from", &self.from).finish_non_exhaustive()
    }
}
