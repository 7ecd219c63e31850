//! The page descriptor: one cache line that knows everything about a page, so that nothing ever looks a page up.

use crate::home::Home;
use crate::remote::Link;
#[cfg(loom)]
use loom::{
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering},
    thread,
};
use rustix::fd::RawFd;
use std::cell::Cell;
use std::hint::cold_path;
use std::ptr::NonNull;
#[cfg(not(loom))]
use std::{
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering},
    thread,
};

/// Beside a pool's identity: its page is being unmapped.
const UNMAPPING: u64 = 1 << 63;

/// All-zero is a valid descriptor, of a page that was never used.
///
/// Invariants:
/// * (*one owner*) a page is at any time with exactly one of: its provider; its pool (in the cache, the spill list, a
///   magazine or the return stack); the values ([`Page`](crate::Page), [`Frag`](crate::Frag)) whose number is `refs`; a
///   [`RawPage`](crate::RawPage). Only that owner writes the cells, and passes them on with a release.
/// * (*sole*) `refs` is 1 unless the page is shared, also while it is at home: a sole owner's drop writes nothing here.
/// * (*home stays*) `home` points to a live [`Home`] while the page is with a pool or its users.
#[repr(C)]
#[cfg_attr(not(loom), repr(align(64)))]
pub(crate) struct Desc {
    /// Fragments and pages that refer to this page.
    refs: AtomicU32,
    /// Which page of its region.
    index: Cell<u32>,
    /// Where the page goes when the last of them is dropped.
    home: AtomicPtr<Home>,
    /// The device's address of the first byte, while mapped.
    dma: AtomicU64,
    /// The first byte in this process; of memory that is not mapped here its offset in the file, which nobody follows.
    addr: Cell<*mut u8>,
    /// Identity of the pool that mapped the page, or 0; with [`UNMAPPING`] while somebody unmaps it, who then sets it to 0.
    mapped: AtomicU64,
    /// The next page in whatever list its owner keeps it.
    pub(crate) link: Link,
    /// The region's file, which lives as long as the region does, or -1.
    file: Cell<RawFd>,
    /// A device may still write to a part of the page that was dropped. Set once, until the region goes.
    quarantined: AtomicBool,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Desc>() == 64);

impl Desc {
    /// Fills in what never changes. All callers write the same values, and only the provider calls.
    pub(crate) fn describe(&self, index: u32, addr: *mut u8, file: RawFd) {
        self.index.set(index);
        self.addr.set(addr);
        self.file.set(file);
        self.refs.store(1, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn index(&self) -> u32 {
        self.index.get()
    }

    #[inline]
    pub(crate) fn addr(&self) -> *mut u8 {
        self.addr.get()
    }

    pub(crate) fn file(&self) -> RawFd {
        self.file.get()
    }

    #[inline]
    pub(crate) fn dma(&self) -> u64 {
        self.dma.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn home(&self) -> *mut Home {
        self.home.load(Ordering::Relaxed)
    }

    pub(crate) fn set_home(&self, home: *mut Home) {
        self.home.store(home, Ordering::Relaxed);
    }

    /// Notes that pool `id` mapped the page at `dma`.
    pub(crate) fn set_mapped(&self, id: u64, dma: u64) {
        self.dma.store(dma, Ordering::Relaxed);
        self.mapped.store(id, Ordering::Release);
    }

    /// Whether a pool has the page mapped. It says so until its device goes, wherever the page is.
    #[inline]
    pub(crate) fn is_mapped(&self) -> bool {
        // Neither 0 nor being unmapped.
        self.mapped.load(Ordering::Relaxed).cast_signed() > 0
    }

    /// The address at which the caller, and nobody else, is to unmap the page for pool `id`, and then say that it is
    /// [`unmapped`](Self::unmapped): once per mapping.
    ///
    /// A page without an owner's claim to it may be asked, as [`PagePool::device_gone`](crate::PagePool::device_gone)
    /// does: hence the first look, which leaves other pools' pages alone. From the claim on the page stays this pool's.
    pub(crate) fn claim_unmap(&self, id: u64) -> Option<u64> {
        if self.mapped.load(Ordering::Acquire) != id {
            return None;
        }
        let claimed = self.mapped.compare_exchange(id, id | UNMAPPING, Ordering::AcqRel, Ordering::Acquire);
        claimed.ok().map(|_| self.dma())
    }

    /// The page was unmapped by who claimed that.
    pub(crate) fn unmapped(&self) {
        // Release: for who waits for it.
        self.mapped.store(0, Ordering::Release);
    }

    /// Waits for somebody who is unmapping the page for pool `id` right now.
    pub(crate) fn wait_unmapped(&self, id: u64) {
        // Acquire: whoever waited comes after the unmapping.
        while self.mapped.load(Ordering::Acquire) == id | UNMAPPING {
            thread::yield_now();
        }
    }

    /// The same for a caller with whom nobody competes: the pool's owner, which is also who lets a device go.
    pub(crate) fn claim_unmap_alone(&self, id: u64) -> Option<u64> {
        if self.mapped.load(Ordering::Relaxed) != id {
            return None;
        }
        self.mapped.store(0, Ordering::Relaxed);
        Some(self.dma())
    }

    /// Notes that a device may still write to the part of the page of which the caller holds a count, and drops it next.
    pub(crate) fn set_quarantined(&self) {
        // Relaxed: the drop of the count releases it, and a holder that finds itself alone has acquired that.
        self.quarantined.store(true, Ordering::Relaxed);
    }

    /// Whether a device may still write to a part of the page: asked by the only holder.
    #[inline]
    pub(crate) fn is_quarantined(&self) -> bool {
        self.quarantined.load(Ordering::Relaxed)
    }

    /// Counts one more user.
    #[inline]
    pub(crate) fn get(&self) {
        // Relaxed: whoever counts up holds a count already. The limit leaves 2^31 threads time to notice.
        if self.refs.fetch_add(1, Ordering::Relaxed) > u32::MAX / 2 {
            std::process::abort();
        }
    }

    /// Whether the caller, who holds a count, holds the only one.
    #[inline]
    pub(crate) fn is_sole(&self) -> bool {
        // Acquire: what the others did with the page happened before they let go.
        self.refs.load(Ordering::Acquire) == 1
    }

    /// Lets go of `n` counts of a caller who has more.
    #[cold]
    fn put_some(&self, n: u32) {
        // Release: what the caller did with the page.
        self.refs.fetch_sub(n, Ordering::Release);
    }

    /// Lets go of one of several counts; true if it was the last after all.
    #[inline]
    fn put(&self) -> bool {
        if self.refs.fetch_sub(1, Ordering::AcqRel) != 1 {
            return false;
        }
        self.refs.store(1, Ordering::Relaxed);
        true
    }
}

/// Drops one count of a page, and sends the page home if it was the last. This is the return hook.
///
/// # Safety
///
/// The caller owns a count of this page (*one owner*) and gives it up.
#[inline(always)]
pub(crate) unsafe fn put(desc: NonNull<Desc>) {
    // SAFETY: the caller's. *home stays*, and the page is now ours alone to send there.
    unsafe {
        if put_last(desc) {
            Home::take_back(NonNull::new_unchecked(desc.as_ref().home()), desc);
        }
    }
}

/// The same, but the page, if it was the last count, is the caller's to send home.
///
/// # Safety
///
/// As for [`put`].
#[inline(always)]
pub(crate) unsafe fn put_last(desc: NonNull<Desc>) -> bool {
    // SAFETY: the count keeps the descriptor's memory.
    let d = unsafe { desc.as_ref() };
    if d.is_sole() {
        return true;
    }
    // Out of the straight line, which is the sole owner's.
    cold_path();
    d.put()
}

/// [`put`] for `n` counts at once.
///
/// # Safety
///
/// The caller owns `n` counts of this page, at least one, and gives them up.
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

#[cfg(all(test, loom))]
impl Desc {
    /// A page that `refs` hold.
    pub(crate) fn for_model(refs: u32) -> Self {
        Self {
            refs: AtomicU32::new(refs),
            index: Cell::new(0),
            home: AtomicPtr::new(std::ptr::null_mut()),
            dma: AtomicU64::new(0),
            addr: Cell::new(std::ptr::null_mut()),
            mapped: AtomicU64::new(0),
            link: Link::new(),
            file: Cell::new(-1),
            quarantined: AtomicBool::new(false),
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    struct Page {
        desc: Desc,
        bytes: UnsafeCell<u32>,
    }

    // SAFETY: loom checks every access to the bytes; the descriptor's cells are not used here.
    unsafe impl Sync for Page {}
    // SAFETY: as above.
    unsafe impl Send for Page {}

    fn page(refs: u32) -> Arc<Page> {
        Arc::new(Page { desc: Desc::for_model(refs), bytes: UnsafeCell::new(0) })
    }

    /// Last drops: of several holders that go at once, one takes the page home, after the others have read their last.
    #[test]
    fn last_drops() {
        loom::model(|| {
            let page = page(3);
            let drops = |page: &Page| {
                // SAFETY: loom checks that nobody writes.
                page.bytes.with(|b| assert_eq!(unsafe { *b }, 0));
                let last = page.desc.is_sole() || page.desc.put();
                if last {
                    assert!(page.desc.is_sole(), "as it is at home");
                    // SAFETY: loom checks that nobody else reads or writes.
                    page.bytes.with_mut(|b| unsafe { *b = 1 });
                }
                last
            };
            let threads = [(); 2].map(|()| {
                let page = page.clone();
                thread::spawn(move || drops(&page))
            });
            let mine = usize::from(drops(&page));
            assert_eq!(mine + threads.into_iter().map(|t| usize::from(t.join().unwrap())).sum::<usize>(), 1);
        });
    }

    /// Last drop against clone: a holder that makes another while the rest let go. Whoever is last has the page alone.
    #[test]
    fn last_drop_against_clone() {
        loom::model(|| {
            let page = page(2);
            let reads = |page: &Page| {
                // SAFETY: loom checks that nobody writes.
                page.bytes.with(|b| assert_eq!(unsafe { *b }, 0));
            };
            let drops = |page: &Page| {
                let last = page.desc.is_sole() || page.desc.put();
                if last {
                    // SAFETY: loom checks that nobody else reads or writes.
                    page.bytes.with_mut(|b| unsafe { *b = 1 });
                }
                last
            };
            let other = page.clone();
            let thread = thread::spawn(move || {
                other.desc.get();
                reads(&other);
                let first = drops(&other);
                assert!(!first, "its own count was left");
                reads(&other);
                drops(&other)
            });
            reads(&page);
            let mine = drops(&page);
            assert!(mine != thread.join().unwrap(), "one of them, and one only, takes the page home");
        });
    }

    /// Late return against a device that goes: one of them unmaps, at the address at which this pool mapped the page,
    /// even if the page is the next pool's before the other has looked; and the device goes after that.
    #[test]
    fn late_return_against_device_gone() {
        loom::model(|| {
            let (page, unmapped) = (page(1), Arc::new(UnsafeCell::new(0)));
            page.desc.set_mapped(1, 100);
            let (returner, at) = (page.clone(), unmapped.clone());
            let unmap = |desc: &Desc, at: &UnsafeCell<u64>| {
                let dma = desc.claim_unmap(1);
                if let Some(dma) = dma {
                    // SAFETY: loom checks that nobody else does.
                    at.with_mut(|at| unsafe { *at += dma });
                    desc.unmapped();
                }
                dma
            };
            let thread = thread::spawn(move || {
                let claimed = unmap(&returner.desc, &at);
                // If it was not for us to do, the page waits for the owner, who is at it.
                if claimed.is_some() {
                    returner.desc.set_mapped(2, 200);
                }
                claimed
            });
            let claimed = unmap(&page.desc, &unmapped);
            page.desc.wait_unmapped(1);
            // SAFETY: loom checks that nobody writes.
            unmapped.with(|at| assert_eq!(unsafe { *at }, 100));
            let other = thread.join().unwrap();
            assert!(claimed.is_none() || other.is_none());
            assert_eq!(page.desc.claim_unmap_alone(2), other.map(|_| 200));
        });
    }
}
