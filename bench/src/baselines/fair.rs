//! The floor under a return path that does not know its returning threads' batches: each page is
//! returned by itself, in a call, and the pages become visible 62 at a time.
//!
//! ```text
//!   FairPool     descriptors ──► the caller's ring ──► count read (and home, and context), call ───────┐
//!                     ▲                                                                               │
//!                     └──── an array for each returning thread, published every 62 pages ◄─────────────┘
//! ```
//!
//! Why beside [`SpscPool`](super::SpscPool): that one returns a batch by one loop that the compiler
//! sees whole. A page that is dropped where its last holder ends cannot have that.
//!
//! A thread has an array with a place for every page, so an array never overflows. What is left out
//! is all that a general path needs: threads that come, go and are preempted, pools that end, and
//! pages that wait on a thread that returns no more.

use super::floor::{Desc, FloorPage, descs_of};
use rtrb::chunks::WriteChunkUninit;
use std::cell::Cell;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// Pages that become visible to the allocating thread at once: as many as a magazine holds.
const PUBLISHED: usize = 62;

thread_local! {
    /// The number of this thread's array.
    static THREAD: Cell<usize> = const { Cell::new(0) };
    /// The pool that this thread is polling, or null. No thread of the benchmark that drops polls.
    static CONTEXT: Cell<*const Home> = const { Cell::new(ptr::null()) };
}

/// Makes this thread the one that returns pages by array `number` of each [`FairPool`]. One thread
/// at a time has a number.
pub fn return_as(number: usize) {
    THREAD.set(number);
}

/// A value on a pair of lines of its own.
#[repr(align(128))]
#[derive(Debug)]
struct Line<T>(T);

/// The array by which one thread returns pages.
#[derive(Debug)]
struct Way {
    /// Written by the returning thread alone.
    given: Line<AtomicUsize>,
    /// How many of these the allocating thread may have.
    published: Line<AtomicUsize>,
    /// A power of two of places, used in turn.
    pages: Box<[AtomicPtr<Desc>]>,
}

impl Way {
    fn new(pages: usize) -> Self {
        let places = pages.next_power_of_two();
        let zero = || Line(AtomicUsize::new(0));
        Self { given: zero(), published: zero(), pages: (0..places).map(|_| AtomicPtr::default()).collect() }
    }

    #[inline(always)]
    fn give(&self, desc: &'static Desc) {
        let given = self.given.0.load(Ordering::Relaxed);
        self.pages[given & (self.pages.len() - 1)].store(ptr::from_ref(desc).cast_mut(), Ordering::Relaxed);
        self.given.0.store(given + 1, Ordering::Relaxed);
        if (given + 1).is_multiple_of(PUBLISHED) {
            self.published.0.store(given + 1, Ordering::Release);
        }
    }

    /// The page that was given as the `at`th.
    #[inline]
    fn page(&self, at: usize) -> &'static Desc {
        let desc = self.pages[at & (self.pages.len() - 1)].load(Ordering::Relaxed);
        // SAFETY: the caller has seen that it was published; descriptors are never freed.
        unsafe { &*desc }
    }
}

/// Where pages return to. Never freed.
#[derive(Debug)]
pub(super) struct Home {
    ways: Box<[Way]>,
}

/// A page of a [`FairPool`] that returns when it is dropped.
#[derive(Debug)]
pub struct FairPage(FloorPage);

impl Deref for FairPage {
    type Target = FloorPage;

    #[inline]
    fn deref(&self) -> &FloorPage {
        &self.0
    }
}

/// What every drop of a page has: the count, the page's home, and whether this thread polls it.
impl Drop for FairPage {
    #[inline]
    fn drop(&mut self) {
        if !self.is_sole() {
            return;
        }
        let Some(home) = self.desc().home else { return };
        // In the context, a pool with an array cache would put the page there. This one has none.
        if !ptr::eq(CONTEXT.get(), home) {
            give_home(home, self.desc());
        }
    }
}

#[inline(never)]
fn give_home(home: &'static Home, desc: &'static Desc) {
    if let Some(way) = home.ways.get(THREAD.get()) {
        way.give(desc);
    }
}

/// Returns pages of one [`FairPool`] one by one, for one thread.
#[derive(Debug)]
pub struct FairReturner {
    way: &'static Way,
}

impl FairReturner {
    /// Returns one page of this returner's pool, after a look at its count.
    #[inline(never)]
    pub fn put(&mut self, page: FloorPage) {
        if page.is_sole() {
            self.way.give(page.desc());
        }
    }
}

/// A pool with an array for each of the threads that return pages.
#[derive(Debug)]
pub struct FairPool {
    home: &'static Home,
    /// Pages that were never handed out.
    fresh: Vec<&'static Desc>,
    /// How many pages were taken from each array.
    taken: Vec<usize>,
    /// The array from which pages are taken next.
    next: usize,
}

impl FairPool {
    /// A pool of `pages` pages, which `threads` threads return. Its memory stays until the process
    /// ends. Each thread keeps up to 61 pages that are not visible yet.
    #[must_use]
    pub fn new(pages: usize, threads: usize) -> Self {
        let home: &'static Home = Box::leak(Box::new(Home { ways: (0..threads).map(|_| Way::new(pages)).collect() }));
        let fresh = descs_of(pages, Some(home)).iter().rev().collect();
        Self { home, fresh, taken: vec![0; threads], next: 0 }
    }

    /// The arrays, for threads that return pages by a call. As many as there are threads.
    pub fn returners(&mut self) -> impl Iterator<Item = FairReturner> + use<> {
        self.home.ways.iter().map(|way| FairReturner { way })
    }

    /// Fills places with pages that `make` makes of descriptors, and returns how many. Whole
    /// batches come first: from an array, then from the pages that were never handed out.
    #[inline]
    fn fill<T>(&mut self, places: WriteChunkUninit<'_, T>, make: impl Fn(&'static Desc) -> T) -> usize {
        let n = places.len();
        for _ in 0..self.taken.len() {
            self.next = if self.next + 1 < self.taken.len() { self.next + 1 } else { 0 };
            let (way, at) = (&self.home.ways[self.next], self.taken[self.next]);
            if way.published.0.load(Ordering::Acquire) - at >= n {
                self.taken[self.next] = at + n;
                return places.fill_from_iter((at..at + n).map(|at| make(way.page(at))));
            }
        }
        if self.fresh.is_empty() {
            return 0;
        }
        let from = self.fresh.len().saturating_sub(n);
        places.fill_from_iter(self.fresh.drain(from..).map(make))
    }

    /// Fills places with pages that a [`FairReturner`] returns.
    #[inline]
    pub fn alloc(&mut self, places: WriteChunkUninit<'_, FloorPage>) -> usize {
        self.fill(places, FloorPage::new)
    }

    /// Fills places with pages that return when they are dropped.
    #[inline]
    pub fn alloc_dropping(&mut self, places: WriteChunkUninit<'_, FairPage>) -> usize {
        self.fill(places, |desc| FairPage(FloorPage::new(desc)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rtrb::RingBuffer;

    fn take<T>(n: usize, alloc: impl FnOnce(WriteChunkUninit<'_, T>) -> usize) -> Vec<T> {
        let (mut to, mut from) = RingBuffer::new(n);
        let filled = to.write_chunk_uninit(n).map_or(0, alloc);
        let pages: Vec<_> = std::iter::from_fn(|| from.pop().ok()).collect();
        assert_eq!(pages.len(), filled);
        pages
    }

    /// All pages are handed out once; what comes back is handed out again when it is published.
    #[test]
    fn pages_come_back_62_at_a_time() {
        let mut pool = FairPool::new(100, 2);
        let mut returners: Vec<_> = pool.returners().collect();
        for round in 0..3 {
            let mut pages = take(31, |places| pool.alloc(places));
            pages.extend(take(31, |places| pool.alloc(places)));
            assert_eq!(pages.len(), 62, "round {round}");
            let first: Vec<_> = pages.iter().map(|page| ptr::from_ref(page.desc())).collect();
            pages.into_iter().for_each(|page| returners[round % 2].put(page));
            let again = take(62, |places| pool.alloc(places));
            assert!(again.iter().map(|page| ptr::from_ref(page.desc())).eq(first));
            again.into_iter().for_each(|page| returners[round % 2].put(page));
        }
        assert_eq!(take(100, |places| pool.alloc(places)).len(), 38);
        assert_eq!(take(100, |places| pool.alloc(places)).len(), 0);
    }

    #[test]
    fn a_drop_returns_by_this_threads_array() {
        let mut pool = FairPool::new(62, 2);
        return_as(1);
        let pages = take(62, |places| pool.alloc_dropping(places));
        assert!(pages.len() == 62 && pages.iter().all(|page| page.len() == 4096 && !page.is_empty()));
        drop(pages);
        let published: Vec<_> = pool.home.ways.iter().map(|way| way.published.0.load(Ordering::Relaxed)).collect();
        assert_eq!(published, [0, 62]);
        assert_eq!(take(62, |places| pool.alloc_dropping(places)).len(), 62);
    }
}
