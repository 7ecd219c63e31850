//! The return of a page when its last holder drops it.
//!
//! Why there is no call to forget: the drop itself finds the pool, by the header in the page's
//! descriptor. The functions are in the order of their cost: the comparison with the poll context,
//! the array cache, this CPU's magazine, then the slow paths.

use crate::cache::PolledHeader;
use crate::context;
use crate::desc::{Desc, cold_path, put_last};
use crate::header::{PoolHeader, desc_of, item_of};
use crate::panics::Panics;
use netmem_percpu::{CpuCache, Depot, Intake, MAGAZINE};
use std::cell::Cell;
use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};

/// Drops one count of a page, and returns the page to its owner if the count was the last. This is
/// the return hook.
///
/// # Safety
///
/// The caller owns a count of this page (*one owner*), which this call puts.
#[inline(always)]
pub(crate) unsafe fn put(desc: NonNull<Desc>) {
    // SAFETY: the caller's. *header stays*, and after the last count only this thread may return
    // the page.
    unsafe {
        if put_last(desc) {
            PoolHeader::recycle(NonNull::new_unchecked(desc.as_ref().header()), desc);
        }
    }
}

/// [`put`] for `n` counts at once.
///
/// # Safety
///
/// The caller owns `n` counts of this page, at least one, which this call puts.
#[inline]
pub(crate) unsafe fn put_many(desc: NonNull<Desc>, n: u32) {
    // SAFETY: the caller's: one of the counts is left until the last line.
    unsafe {
        if n > 1 {
            desc.as_ref().put_some(n - 1);
        }
        put(desc);
    }
}

#[cfg(not(loom))]
thread_local! {
    /// The address of the header of the pool for every thread from which this thread last allocated
    /// a page. See [`PoolHeader::intake`]. The pool may have been freed, and the header of another
    /// pool, of either kind, may have its address.
    static LAST_HEADER: Cell<usize> = const { Cell::new(0) };
}
#[cfg(loom)]
loom::thread_local! {
    static LAST_HEADER: Cell<usize> = Cell::new(0);
}

/// Records that this thread allocates a page from the pool for every thread with this header.
#[inline(always)]
pub(crate) fn allocates_from(header: *const PoolHeader) {
    LAST_HEADER.with(|last| last.set(header.expose_provenance()));
}

/// Returns its argument, and hides from the compiler that the two are equal.
#[inline(always)]
fn opaque(number: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let mut number = number;
        // Not `pure`: the compiler would move a pure block behind a comparison and use the other
        // operand there.
        // SAFETY: no instruction.
        unsafe { std::arch::asm!("/* {0} */", inlateout(reg) number, options(nomem, nostack, preserves_flags)) };
        number
    }
    #[cfg(not(target_arch = "x86_64"))]
    number
}

/// Fewer pages than this go into this CPU's magazine one by one.
const MIN_FOR_MAGAZINE: usize = 8;

impl PoolHeader {
    /// Returns a page that is not in use to its owner.
    ///
    /// # Safety
    ///
    /// `header` is the header of `desc`, whose ownership the caller passes on (*one owner*). The
    /// pool may be gone afterwards.
    #[inline(always)]
    pub(crate) unsafe fn recycle(header: NonNull<Self>, desc: NonNull<Desc>) {
        // No reference to the header is held across the calls below, because they may free it.
        // SAFETY: *header stays* until the page is returned.
        unsafe {
            let context = context::current();
            if context.cast() != header.as_ptr().cast_const() {
                cold_path();
                // In line: a call costs a fifth of the drop of a page that was allocated elsewhere.
                let intake = Self::intake(header, context);
                if intake.is_null() {
                    return Self::recycle_remote(header, desc, context);
                }
                if !Intake::push_at_once(intake, item_of(desc)) {
                    Self::recycle_remote_slow(header, desc);
                }
                return;
            }
            Self::recycle_to_cache(header, desc);
        }
    }

    /// The magazines on which a page is pushed that is dropped outside of its pool's context. Null
    /// if [`recycle_remote`](Self::recycle_remote) is to find out what to do.
    ///
    /// A page that is dropped soon after its allocation was on this CPU's magazine just before. The
    /// page, its descriptor, its header, the gate and the magazine would be loads of which each
    /// waits for the one before, and the next pop waits for the length that this push stores. If
    /// the header is that of the pool for every thread from which this thread last allocated a
    /// page, its address is known without the page: the comparison is a branch, which the processor
    /// predicts, and the push starts at once.
    ///
    /// # Safety
    ///
    /// The page keeps the header.
    #[inline(always)]
    unsafe fn intake(header: NonNull<Self>, context: *const PolledHeader) -> *const Intake {
        let last = LAST_HEADER.with(Cell::get);
        // SAFETY: the caller's. The address is that of the header, in both cases.
        unsafe {
            if header.addr().get() == last {
                // Whatever the context: a push is possible on any thread, at any time.
                let at: *const Self = ptr::with_exposed_provenance(opaque(last));
                if let Some(cpus) = (*at).cpus() {
                    return CpuCache::intake(cpus);
                }
            }
            // One jump for both tests: a line of code has few that the processor predicts well.
            let depot = (*header.as_ptr()).depot().map_or(ptr::null(), ptr::from_ref);
            if context.is_null() & !depot.is_null() { Depot::intake(depot) } else { ptr::null() }
        }
    }

    /// # Safety
    ///
    /// As for [`recycle`](Self::recycle), and this thread is in the header's context. It is
    /// therefore the thread that polls, and no other thread uses the cache.
    #[inline(always)]
    unsafe fn recycle_to_cache(header: NonNull<Self>, desc: NonNull<Desc>) {
        // SAFETY: a header that was entered is the first field of a `PolledHeader`.
        unsafe {
            let cache = &raw const (*header.cast::<PolledHeader>().as_ptr()).cache;
            if !(*cache).push(desc) {
                cold_path();
                ((*cache).overflow)(header, desc);
            }
        }
    }

    /// Pushes onto this CPU's magazine, if there is room, in the cases in which
    /// [`recycle`](Self::recycle) has not tried: this thread is in the context of another pool, or
    /// the pool is one for every thread from which it has not allocated last. The function does
    /// nothing else, so that it needs only the registers of its arguments.
    #[inline(never)]
    unsafe fn recycle_remote(header: NonNull<Self>, desc: NonNull<Desc>, context: *const PolledHeader) {
        // SAFETY: the caller's.
        unsafe {
            let at = header.as_ptr();
            if context.is_null() || !Self::is_around(at, context) {
                let collected = match Self::magazines_of(at) {
                    (_, Some(cpus)) => CpuCache::push_at_once(cpus, item_of(desc)),
                    (Some(depot), _) if !context.is_null() => Depot::give_at_once(depot, item_of(desc)),
                    _ => false,
                };
                if collected {
                    return;
                }
            }
            Self::recycle_remote_slow(header, desc);
        }
    }

    /// Returns a page in the other cases: this thread is in a context inside of this header's; the
    /// magazine is full; the depot refuses the page, or there is none.
    #[cold]
    #[inline(never)]
    unsafe fn recycle_remote_slow(header: NonNull<Self>, desc: NonNull<Desc>) {
        // SAFETY: the caller's. Pages that other threads gave, and that the depot hands back
        // because it has closed, keep the pool as this page does.
        unsafe {
            let at = header.as_ptr();
            if Self::is_outer_context(at) {
                return Self::recycle_to_cache(header, desc);
            }
            let remote_free = (*at).remote_free;
            let mut panics = Panics::default();
            let past = |late| {
                panics.call(|| remote_free(header, desc_of(late)));
            };
            let collected = match Self::magazines_of(at) {
                (Some(depot), _) => Depot::give_on_another(depot, item_of(desc), past),
                (_, Some(cpus)) => CpuCache::push(cpus, item_of(desc), past),
                _ => false,
            };
            if !collected {
                panics.call(|| remote_free(header, desc));
            }
            panics.resume();
        }
    }

    /// Returns up to [`MAGAZINE`] pages that are not in use: all of them, also if user code panics
    /// over one.
    ///
    /// # Safety
    ///
    /// As for [`recycle`](Self::recycle), of each of them; there is at least one.
    pub(crate) unsafe fn recycle_many(header: NonNull<Self>, descs: &[NonNull<Desc>], panics: &mut Panics) {
        // SAFETY: the caller's.
        unsafe {
            let at = header.as_ptr();
            if Self::is_outer_context(at) {
                for &desc in descs {
                    panics.call(|| Self::recycle_to_cache(header, desc));
                }
                return;
            }
            let mut items = [NonZeroUsize::MIN; MAGAZINE];
            items.iter_mut().zip(descs).for_each(|(item, &desc)| *item = item_of(desc));
            let items = &items[..descs.len()];
            let given = match Self::magazines_of(at) {
                _ if items.len() < MIN_FOR_MAGAZINE => 0,
                (Some(depot), _) => Depot::give_many(depot, items),
                (_, Some(cpus)) => CpuCache::push_many(cpus, items),
                _ => 0,
            };
            // The pages that are left keep the pool alive.
            for &desc in &descs[given..] {
                panics.call(|| Self::recycle(header, desc));
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{PagePool, PoolOptions, Private, RegionOptions, RegionProvider};

    fn pool() -> PagePool<Private> {
        let region = RegionOptions::new(64).huge_pages(false).build().expect("a region");
        PoolOptions::new("polled").build(RegionProvider::new(region), None).expect("a pool")
    }

    /// The pool for every thread from which this thread has allocated last is gone, and a pool that
    /// is polled has its header at the same address: its pages return as if the thread knew none.
    #[test]
    fn another_header_has_the_address() {
        let (mut pool, mut other) = (pool(), pool());
        let pages: Vec<_> = (0..4).map(|_| pool.alloc().expect("a page")).collect();
        let header = NonNull::from(&pool.shared().front.header);
        // SAFETY: the pool has its header.
        let intake = || unsafe { PoolHeader::intake(header, ptr::null()) };
        let unknown = intake();
        allocates_from(header.as_ptr());
        assert_eq!(intake(), unknown);
        let mut dropped = 0;
        for page in pages {
            // Also in the context of another pool.
            if dropped % 2 == 0 {
                drop(page)
            } else {
                other.poll(|_| drop(page))
            }
            dropped += 1;
        }
        assert_eq!((dropped, pool.stats().inflight()), (4, 0));
        assert_eq!(pool.close().outstanding, 0);
    }
}
