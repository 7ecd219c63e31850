//! The page descriptor: one cache line that knows everything about a page, so that nothing ever looks a page up.

use crate::home::Home;
use crate::list::Link;
use crate::sync::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Condvar, Mutex, Ordering};
use rustix::fd::RawFd;
use std::cell::Cell;
use std::hint::cold_path;
use std::ptr::NonNull;
use std::sync::PoisonError;

/// Beside a pool's identity: a thread has claimed to unmap the page, and has not finished.
const UNMAPPING: u64 = 1 << 63;
/// Beside [`UNMAPPING`]: the pool's owner waits for that.
const WAITED_FOR: u64 = 1 << 62;

/// Where a pool's owner waits for threads that are unmapping pages of the pool. Each pool has one.
#[derive(Debug)]
pub(crate) struct Unmapped {
    lock: Mutex<()>,
    event: Condvar,
}

impl Unmapped {
    pub(crate) fn new() -> Self {
        Self { lock: Mutex::new(()), event: Condvar::new() }
    }
}

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
    /// The first byte in this process. Of memory that is not mapped here, its offset in the file: a number that is never followed.
    addr: Cell<*mut u8>,
    /// Identity of the pool that mapped the page, or 0. With [`UNMAPPING`] while a thread unmaps it, which then sets it to 0.
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

    /// Claims to unmap the page for pool `id`: the address at which the caller is to unmap it. The caller then says that it is
    /// [`unmapped`](Self::unmapped). One claim succeeds for each mapping.
    ///
    /// [`PagePool::device_gone`](crate::PagePool::device_gone) asks about pages that it does not own. The first look leaves pages of
    /// other pools alone. While the claim is held the page stays this pool's.
    pub(crate) fn claim_unmap(&self, id: u64) -> Option<u64> {
        if self.mapped.load(Ordering::Acquire) != id {
            return None;
        }
        let claimed = self.mapped.compare_exchange(id, id | UNMAPPING, Ordering::AcqRel, Ordering::Acquire);
        claimed.ok().map(|_| self.dma())
    }

    /// Releases the claim: the page is unmapped. Wakes the pool's owner if it waits for this page.
    pub(crate) fn unmapped(&self, pool: &Unmapped) {
        // Release: for the owner that waits.
        if self.mapped.swap(0, Ordering::Release) & WAITED_FOR != 0 {
            // Under the lock, so that the owner is either before its last look at the word or asleep.
            let _lock = pool.lock.lock().unwrap_or_else(PoisonError::into_inner);
            pool.event.notify_all();
        }
    }

    /// Sleeps while another thread unmaps the page for pool `id`. The owner's.
    pub(crate) fn wait_unmapped(&self, id: u64, pool: &Unmapped) {
        let (claimed, waited_for) = (id | UNMAPPING, id | UNMAPPING | WAITED_FOR);
        // Acquire, also below: the owner comes after the unmapping.
        if self.mapped.load(Ordering::Acquire) != claimed {
            return;
        }
        let mut lock = pool.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Fails if the page has been unmapped meanwhile.
        let _ = self.mapped.compare_exchange(claimed, waited_for, Ordering::Relaxed, Ordering::Relaxed);
        while self.mapped.load(Ordering::Acquire) == waited_for {
            lock = pool.event.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Claims to unmap a page that the pool's owner has: no thread competes for it, because only the owner lets a device go. There is
    /// nothing to release.
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
        // Relaxed: the caller holds a count already. The limit leaves 2^31 threads time to notice.
        if self.refs.fetch_add(1, Ordering::Relaxed) > u32::MAX / 2 {
            std::process::abort();
        }
    }

    /// Whether the caller's count is the only one.
    #[inline]
    pub(crate) fn is_sole(&self) -> bool {
        // Acquire: what the other holders did with the page happened before they gave up their counts.
        self.refs.load(Ordering::Acquire) == 1
    }

    /// Gives up `n` counts of a caller that has more.
    #[cold]
    fn put_some(&self, n: u32) {
        // Release: what the caller did with the page.
        self.refs.fetch_sub(n, Ordering::Release);
    }

    /// Gives up one of several counts; true if it was the last after all.
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
    use loom::thread;

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
                // SAFETY: loom checks that no thread writes.
                page.bytes.with(|b| assert_eq!(unsafe { *b }, 0));
                let last = page.desc.is_sole() || page.desc.put();
                if last {
                    assert!(page.desc.is_sole(), "as it is at home");
                    // SAFETY: loom checks that no other thread reads or writes.
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

    /// Last drop against clone: a holder makes another while the rest let go. The thread of the last drop has the page alone.
    #[test]
    fn last_drop_against_clone() {
        loom::model(|| {
            let page = page(2);
            let reads = |page: &Page| {
                // SAFETY: loom checks that no thread writes.
                page.bytes.with(|b| assert_eq!(unsafe { *b }, 0));
            };
            let drops = |page: &Page| {
                let last = page.desc.is_sole() || page.desc.put();
                if last {
                    // SAFETY: loom checks that no other thread reads or writes.
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
}
