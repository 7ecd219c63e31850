//! Lower bounds for the cost of passing pages between CPUs: passing pages on, and taking them back.
//!
//! ```text
//!   Forward      descriptors in a circle ──► the caller's ring ──► the count is looked at, and that is all
//!   SpscPool     descriptors ──► the caller's ring ──► the count is looked at ──┐
//!                     ▲                                                        │
//!                     └──── one ring for each returning thread, a batch ◄───────┘
//! ```
//!
//! A page here has the usual form: sixteen bytes that lead to a descriptor of one cache line.
//! Everything else of a pool is left out. `SpscPool` needs what a general return path cannot have:
//! every returning thread is known in advance, has a ring of its own that never fills up, and
//! publishes a whole batch with one store.

use super::fair::Home;
use rtrb::chunks::WriteChunkUninit;
use rtrb::{Consumer, Producer, RingBuffer};
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes in a page.
const PAGE_SIZE: u32 = 4096;

/// The descriptor of a page: one cache line.
#[repr(align(64))]
#[derive(Debug)]
pub(super) struct Desc {
    refs: AtomicU32,
    /// Where the page returns to, if it returns by itself.
    pub(super) home: Option<&'static Home>,
}

const _: () = assert!(size_of::<Desc>() == 64);

impl Desc {
    /// Whether there is one count of the page.
    #[inline]
    pub(super) fn is_sole(&self) -> bool {
        self.refs.load(Ordering::Acquire) == 1
    }
}

/// Descriptors of `pages` pages with this home. They are never freed, so that a page can be a plain
/// reference.
pub(super) fn descs_of(pages: usize, home: Option<&'static Home>) -> &'static [Desc] {
    Box::leak((0..pages).map(|_| Desc { refs: AtomicU32::new(1), home }).collect())
}

fn descs(pages: usize) -> &'static [Desc] {
    descs_of(pages, None)
}

/// A page of a [`Forward`] or an [`SpscPool`]. It is as large as other pages, and has no
/// destructor.
#[derive(Debug)]
#[must_use = "a page of a ring's pool comes back by its returner"]
pub struct FloorPage {
    desc: &'static Desc,
    /// Offset and, in the upper half, length.
    span: u64,
}

const _: () = assert!(size_of::<FloorPage>() == size_of::<netmem_pool::Page<netmem_pool::Private>>());

impl FloorPage {
    #[inline]
    pub(super) fn new(desc: &'static Desc) -> Self {
        Self { desc, span: u64::from(PAGE_SIZE) << 32 }
    }

    /// Whether the holder has the only count of the page. Every drop of a page checks this first.
    #[inline]
    #[must_use]
    pub fn is_sole(&self) -> bool {
        self.desc.is_sole()
    }

    #[inline]
    pub(super) fn desc(&self) -> &'static Desc {
        self.desc
    }

    /// Bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        (self.span >> 32) as usize
    }

    /// Always `false`: a page has bytes.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Pages that are handed out and never returned. After the last page, the first is handed out
/// again.
#[derive(Debug)]
pub struct Forward {
    descs: &'static [Desc],
    next: usize,
}

impl Forward {
    /// A circle of `pages` pages. Their descriptors, 64 bytes each, stay until the process ends.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        Self { descs: descs(pages.max(1)), next: 0 }
    }

    /// Hands out the next page.
    #[inline]
    pub fn alloc(&mut self) -> FloorPage {
        let desc = &self.descs[self.next];
        self.next = if self.next + 1 < self.descs.len() { self.next + 1 } else { 0 };
        FloorPage::new(desc)
    }
}

/// A pool with a plain ring from each returning thread.
#[derive(Debug)]
pub struct SpscPool {
    descs: &'static [Desc],
    /// Pages in the pool that are on no ring in use.
    home: Vec<&'static Desc>,
    rings: Vec<Consumer<&'static Desc>>,
    /// The ring from which pages are taken next.
    next: usize,
}

impl SpscPool {
    /// A pool of `pages` pages. Their descriptors, 64 bytes each, stay until the process ends.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        let descs = descs(pages);
        Self { descs, home: descs.iter().rev().collect(), rings: Vec::new(), next: 0 }
    }

    /// Makes the rings, one for each of `threads` returning threads. Rings that were made earlier
    /// end, and their pages are in the pool again.
    pub fn returners(&mut self, threads: usize) -> Vec<SpscReturner> {
        for mut ring in self.rings.drain(..) {
            self.home.extend(std::iter::from_fn(|| ring.pop().ok()));
        }
        // A ring with a place for every page is never full.
        let (returners, rings) = (0..threads).map(|_| RingBuffer::new(self.descs.len())).unzip();
        self.rings = rings;
        Vec::into_iter(returners).map(|ring| SpscReturner { ring }).collect()
    }

    /// Fills places with pages and returns how many. Whole batches come first: from a ring, then
    /// from the pages in the pool. A ring with fewer pages than there are places is emptied only if
    /// there is no other page.
    #[inline]
    pub fn alloc(&mut self, places: WriteChunkUninit<'_, FloorPage>) -> usize {
        let n = places.len();
        for _ in 0..self.rings.len() {
            self.next = if self.next + 1 < self.rings.len() { self.next + 1 } else { 0 };
            if let Ok(pages) = self.rings[self.next].read_chunk(n) {
                return places.fill_from_iter(pages.into_iter().map(FloorPage::new));
            }
        }
        self.alloc_otherwise(places)
    }

    #[cold]
    fn alloc_otherwise(&mut self, places: WriteChunkUninit<'_, FloorPage>) -> usize {
        let n = places.len();
        if self.home.is_empty()
            && let Some(ring) = self.rings.iter_mut().find(|ring| !ring.is_empty())
            && let Ok(pages) = ring.read_chunk(ring.slots())
        {
            return places.fill_from_iter(pages.into_iter().map(FloorPage::new));
        }
        let from = self.home.len().saturating_sub(n);
        places.fill_from_iter(self.home.drain(from..).map(FloorPage::new))
    }

    /// Pages that are neither in use nor being returned.
    #[must_use]
    pub fn at_home(&self) -> usize {
        self.home.len() + self.rings.iter().map(Consumer::slots).sum::<usize>()
    }
}

/// The ring by which one thread returns pages of one [`SpscPool`].
#[derive(Debug)]
pub struct SpscReturner {
    ring: Producer<&'static Desc>,
}

impl SpscReturner {
    /// Returns pages of this returner's pool: it checks the count of each page, and publishes all
    /// of them with one store.
    #[inline]
    pub fn put(&mut self, pages: impl ExactSizeIterator<Item = FloorPage>) {
        if let Ok(places) = self.ring.write_chunk_uninit(pages.len()) {
            places.fill_from_iter(pages.filter(FloorPage::is_sole).map(|page| page.desc));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(pool: &mut SpscPool, n: usize) -> Vec<FloorPage> {
        let (mut to, mut from) = RingBuffer::new(n);
        let filled = to.write_chunk_uninit(n).map_or(0, |places| pool.alloc(places));
        let pages: Vec<_> = std::iter::from_fn(|| from.pop().ok()).collect();
        assert_eq!(pages.len(), filled);
        pages
    }

    #[test]
    fn every_page_comes_back_by_some_ring() {
        let mut pool = SpscPool::new(100);
        let mut returners = pool.returners(2);
        for _ in 0..3 {
            let mut pages = Vec::new();
            while pages.len() < 100 {
                let some = take(&mut pool, 7);
                assert!(!some.is_empty());
                pages.extend(some);
            }
            assert!(take(&mut pool, 7).is_empty() && pool.at_home() == 0);
            let rest = pages.split_off(40);
            returners[0].put(pages.into_iter());
            returners[1].put(rest.into_iter());
            assert_eq!(pool.at_home(), 100);
        }
        // Pages on rings that end are not lost.
        drop(returners);
        assert_eq!((pool.returners(1).len(), pool.at_home()), (1, 100));
    }

    #[test]
    fn a_circle_of_pages() {
        let mut forward = Forward::new(3);
        let pages: Vec<_> = (0..4).map(|_| forward.alloc()).collect();
        assert!(pages.iter().all(|page| page.is_sole() && page.len() == 4096 && !page.is_empty()));
        assert!(std::ptr::eq(pages[0].desc, pages[3].desc) && !std::ptr::eq(pages[0].desc, pages[1].desc));
    }
}
