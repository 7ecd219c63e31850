//! A page pool whose pages return through a locked ring, one by one. Linux's page pool does the
//! same with a page that is dropped outside of the owner's poll context.
//!
//! ```text
//!   owner: array cache of 128 ◄── up to 64 under the consumer's lock ── ring ◄── one under the producers' lock ── drop, anywhere
//! ```
//!
//! As in Linux, both ends of the ring have a lock of their own. An empty place is a null pointer,
//! so that the ends share no index. A page is its descriptor of one cache line, which knows its
//! pool.

use std::cell::UnsafeCell;
use std::fmt;
use std::hint::spin_loop;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

/// Places in the array cache, and how many of them a refill fills: the numbers of the kernel.
const CACHE: usize = 128;
const REFILL: usize = 64;
/// Bytes in a page.
const PAGE_SIZE: u32 = 4096;

/// A value behind a test-and-set lock.
#[repr(align(128))]
struct Spin<T> {
    locked: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only accessed under the lock.
unsafe impl<T: Send> Sync for Spin<T> {}

impl<T> Spin<T> {
    fn new(value: T) -> Self {
        Self { locked: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// `f` must not panic: the lock would never be released.
    #[inline]
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        while self.locked.swap(true, Ordering::Acquire) {
            while self.locked.load(Ordering::Relaxed) {
                spin_loop();
            }
        }
        // SAFETY: this thread holds the lock.
        let done = f(unsafe { &mut *self.value.get() });
        self.locked.store(false, Ordering::Release);
        done
    }
}

/// The descriptor of a page: one cache line.
#[repr(align(64))]
struct Desc {
    refs: AtomicU32,
    index: u32,
    home: NonNull<Ring>,
}

const _: () = assert!(size_of::<Desc>() == 64);

/// The ring. It has a place for every page, so it is never full.
struct Ring {
    places: Box<[AtomicPtr<Desc>]>,
    /// Where the next page is put.
    producer: Spin<usize>,
    /// Where the next page is taken.
    consumer: Spin<usize>,
}

impl Ring {
    #[inline]
    fn produce(&self, page: NonNull<Desc>) {
        self.producer.with(|at| {
            self.places[*at].store(page.as_ptr(), Ordering::Release);
            *at = if *at + 1 == self.places.len() { 0 } else { *at + 1 };
        });
    }

    /// Allocates up to `n` pages.
    fn consume(&self, n: usize, pages: &mut Vec<NonNull<Desc>>) {
        self.consumer.with(|at| {
            for _ in 0..n {
                let place = &self.places[*at];
                let Some(page) = NonNull::new(place.load(Ordering::Acquire)) else { break };
                place.store(ptr::null_mut(), Ordering::Relaxed);
                pages.push(page);
                *at = if *at + 1 == self.places.len() { 0 } else { *at + 1 };
            }
        });
    }
}

/// A pool of descriptors without memory: only their circulation is compared.
pub struct LockedPool {
    /// Made by a box. It lives as long as the pool, or for ever if pages are in use when the pool
    /// is dropped.
    ring: NonNull<Ring>,
    /// The same holds for the descriptors.
    descs: NonNull<[Desc]>,
    /// The page that was used last is at the end.
    cache: Vec<NonNull<Desc>>,
}

// SAFETY: descriptors and ring are made to be shared, and only the owner uses the cache.
unsafe impl Send for LockedPool {}

impl LockedPool {
    /// A pool of this many pages.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        let ring = Box::new(Ring {
            places: (0..pages).map(|_| AtomicPtr::default()).collect(),
            producer: Spin::new(0),
            consumer: Spin::new(0),
        });
        let ring = NonNull::from(Box::leak(ring));
        let descs: Box<[Desc]> = (0..pages).map(|index| Desc { refs: AtomicU32::new(1), index, home: ring }).collect();
        let descs = NonNull::from(Box::leak(descs));
        let pool = Self { ring, descs, cache: Vec::with_capacity(CACHE) };
        // SAFETY: just made.
        unsafe { descs.as_ref() }.iter().for_each(|desc| pool.ring().produce(NonNull::from(desc)));
        pool
    }

    #[inline]
    fn ring(&self) -> &Ring {
        // SAFETY: the pool keeps the ring alive.
        unsafe { self.ring.as_ref() }
    }

    /// Allocates a page: a pop of the array cache, which is refilled under a lock when it is empty.
    /// `None` if no page is in the pool.
    #[inline]
    pub fn alloc(&mut self) -> Option<LockedPage> {
        let desc = match self.cache.pop() {
            Some(page) => page,
            None => self.refill()?,
        };
        Some(LockedPage { desc, span: u64::from(PAGE_SIZE) << 32 })
    }

    #[inline(never)]
    fn refill(&mut self) -> Option<NonNull<Desc>> {
        // SAFETY: as for `ring`; the cache is borrowed beside it.
        unsafe { self.ring.as_ref() }.consume(REFILL, &mut self.cache);
        self.cache.pop()
    }

    /// Pages that are neither in use nor being returned.
    #[must_use]
    pub fn at_home(&mut self) -> usize {
        let ring = self.ring();
        // With both locks held, no thread is in the middle of adding a page.
        let waiting = ring.producer.with(|_| {
            ring.consumer.with(|_| ring.places.iter().filter(|place| !place.load(Ordering::Relaxed).is_null()).count())
        });
        self.cache.len() + waiting
    }
}

impl Drop for LockedPool {
    fn drop(&mut self) {
        if self.at_home() == self.descs.len() {
            // SAFETY: both were made by boxes. All pages are in the pool, and the threads that
            // returned them have left the ring: `at_home` took the lock after they released it.
            unsafe {
                drop(Box::from_raw(self.descs.as_ptr()));
                drop(Box::from_raw(self.ring.as_ptr()));
            }
        }
    }
}

impl fmt::Debug for LockedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockedPool({} pages, {} in the cache)", self.descs.len(), self.cache.len())
    }
}

/// The bytes of a page that returns through its pool's ring, from any thread. It is as large as
/// other pages, so that passing it on moves as many bytes.
pub struct LockedPage {
    desc: NonNull<Desc>,
    /// The offset and, in the upper half, the length. They share a word, because a page of two
    /// words moves in registers.
    span: u64,
}

const _: () = assert!(size_of::<LockedPage>() == size_of::<netmem_pool::Page<netmem_pool::Private>>());

// SAFETY: the value is the only holder of a page, and the page's descriptor is made to be shared.
unsafe impl Send for LockedPage {}

impl LockedPage {
    /// The page's number.
    #[must_use]
    #[inline]
    pub fn index(&self) -> u32 {
        // SAFETY: the page is in use, so its pool keeps the descriptor.
        unsafe { self.desc.as_ref() }.index
    }

    /// Where the page's bytes begin, and how many there are.
    #[must_use]
    #[inline]
    pub fn range(&self) -> std::ops::Range<usize> {
        let (offset, len) = (self.span as u32 as usize, (self.span >> 32) as usize);
        offset..offset + len
    }
}

impl Drop for LockedPage {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the page is in use, so its pool keeps descriptor and ring until the page is
        // returned.
        unsafe {
            let desc = self.desc.as_ref();
            // A sole owner writes nothing. The kernel's pools check the count in the same way.
            if desc.refs.load(Ordering::Acquire) == 1 || desc.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
                desc.home.as_ref().produce(self.desc);
            }
        }
    }
}

impl fmt::Debug for LockedPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockedPage(#{} {:?})", self.index(), self.range())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_page_once_and_all_of_them_back() {
        let mut pool = LockedPool::new(1000);
        for _ in 0..3 {
            let pages: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
            let numbers: HashSet<_> = pages.iter().map(LockedPage::index).collect();
            assert_eq!((pages.len(), numbers.len(), pool.at_home()), (1000, 1000, 0));
            drop(pages);
            assert_eq!(pool.at_home(), 1000);
        }
    }

    #[test]
    fn pages_come_home_from_any_thread() {
        const MANY: usize = if cfg!(miri) { 100 } else { 20_000 };
        let mut pool = LockedPool::new(256);
        let (send, threads): (Vec<_>, Vec<_>) = (0..3)
            .map(|_| {
                let (send, receive) = std::sync::mpsc::sync_channel::<LockedPage>(32);
                (send, std::thread::spawn(move || receive.into_iter().map(drop).count()))
            })
            .unzip();
        let mut sent = 0;
        while sent < MANY {
            if let Some(page) = pool.alloc() {
                send[sent % send.len()].send(page).unwrap();
                sent += 1;
            }
        }
        drop(send);
        assert_eq!(threads.into_iter().map(|t| t.join().unwrap()).sum::<usize>(), MANY);
        assert_eq!(pool.at_home(), 256);
    }

    #[test]
    fn a_page_may_outlive_its_pool() {
        let mut pool = LockedPool::new(4);
        let page = pool.alloc().unwrap();
        drop(pool);
        assert!(page.index() < 4 && page.range() == (0..4096));
        drop(page);
    }
}
