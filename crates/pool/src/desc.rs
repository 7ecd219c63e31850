//! The page descriptor: one cache line with all data of a page.
//!
//! Why a line of its own, and not fields in the page: the device, or a peer, can write the page.
//! And why not a table that is searched by address: a page and a fragment point to the descriptor,
//! so a drop needs no lookup.

use crate::sync::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Condvar, Mutex, Ordering};
use rustix::fd::RawFd;
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::PoisonError;

/// A bit of `mapped`: a thread has claimed the right to unmap the page, and has not finished.
const CLAIMED: u64 = 1 << 63;
/// A bit of `mapped`, next to [`CLAIMED`]: the pool's owner waits until the page is unmapped.
const AWAITED: u64 = 1 << 62;

/// A lock and a condition variable, by which a pool's owner waits for threads that are unmapping
/// pages of the pool. Each pool has one.
#[derive(Debug)]
pub(crate) struct UnmapEvent {
    lock: Mutex<()>,
    event: Condvar,
}

impl UnmapEvent {
    pub(crate) fn new() -> Self {
        Self { lock: Mutex::new(()), event: Condvar::new() }
    }

    #[cold]
    #[inline(never)]
    fn wake(&self) {
        // Under the lock, so that the owner either has not read the word for the last time yet, or
        // is asleep.
        let _lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.event.notify_all();
    }
}

/// A page descriptor's pointer to the next page of the list that the page is in. Only the page's
/// owner uses it.
pub(crate) struct ListNode(AtomicPtr<ListNode>);

impl ListNode {
    #[cfg(test)]
    pub(crate) fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    #[inline]
    pub(crate) fn set(&self, next: *mut ListNode) {
        self.0.store(next, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn next(&self) -> *mut ListNode {
        self.0.load(Ordering::Relaxed)
    }
}

/// All-zero is a valid descriptor, of a page that was never used.
///
/// Invariants:
/// * (*one owner*) a page is at any time with exactly one of: its provider; its pool (in the cache,
///   the spill list, a magazine or the return stack); the values ([`Page`](crate::Page),
///   [`Frag`](crate::Frag)) whose number is `refs`; a [`RawPage`](crate::RawPage). Only that owner
///   writes the cells, and passes them on with a release.
/// * (*sole*) `refs` is 1 unless the page is shared, also while the page is with its pool. A sole
///   owner's drop therefore writes nothing here.
/// * (*frozen*) while `frozen` is set, the owner that set it holds a fragment. That was the only
///   value when it was set, so that all others are its clones, which are fragments, too. Before a
///   fragment can become a page, and before the page returns to its pool, that owner has been
///   dropped and has cleared it.
/// * (*header stays*) `header` points to a live [`PoolHeader`](crate::header::PoolHeader) while the
///   page is with a pool or its users.
#[repr(C)]
#[cfg_attr(not(loom), repr(align(64)))]
pub(crate) struct Desc {
    /// Fragments and pages that refer to this page.
    refs: AtomicU32,
    /// The page's number in its region.
    index: Cell<u32>,
    /// The header of the owner to which the page returns when the last of them is dropped.
    header: AtomicPtr<()>,
    /// The device's address of the first byte, while mapped.
    dma: AtomicU64,
    /// The first byte in this process. For memory that is not mapped here, its offset in the file:
    /// a number that is never dereferenced.
    addr: Cell<*mut u8>,
    /// Identity of the pool that mapped the page, or 0. With [`CLAIMED`] while a thread unmaps it,
    /// which then sets it to 0.
    mapped: AtomicU64,
    /// The next page in the list in which its owner keeps it.
    pub(crate) node: ListNode,
    /// The region's file, which lives as long as the region does, or -1.
    file: Cell<RawFd>,
    /// A device may still write to a part of the page that was dropped. Once set, it stays set
    /// until a provider claims the page anew, or the region is dropped.
    quarantined: AtomicBool,
    /// A [`BytesOwner`](crate::BytesOwner) has a fragment that was the only value on the page: all
    /// values on it are fragments.
    frozen: AtomicBool,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Desc>() == 64);

impl Desc {
    /// Fills in the fields that never change. Only the provider calls this, and every call for a
    /// page writes the same values.
    #[inline]
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

    #[inline]
    pub(crate) fn file(&self) -> RawFd {
        self.file.get()
    }

    #[inline]
    pub(crate) fn dma(&self) -> u64 {
        self.dma.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn header_addr(&self) -> *mut () {
        self.header.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn set_header_addr(&self, header: *mut ()) {
        self.header.store(header, Ordering::Relaxed);
    }

    /// Notes that pool `id` mapped the page at `dma`.
    #[inline]
    pub(crate) fn set_mapped(&self, id: u64, dma: u64) {
        self.dma.store(dma, Ordering::Relaxed);
        self.mapped.store(id, Ordering::Release);
    }

    /// Whether a pool has the page mapped. True from the mapping until the pool's device is gone,
    /// wherever the page is.
    #[inline]
    pub(crate) fn is_mapped(&self) -> bool {
        // Neither 0 nor being unmapped.
        self.mapped.load(Ordering::Relaxed).cast_signed() > 0
    }

    /// Whether pool `id` has the page mapped.
    pub(crate) fn is_mapped_by(&self, id: u64) -> bool {
        // Relaxed: the caller is the pool's owner, which maps its pages itself.
        self.mapped.load(Ordering::Relaxed) == id
    }

    /// The number of values that refer to the page. Other threads may be changing it.
    pub(crate) fn refs(&self) -> u32 {
        self.refs.load(Ordering::Relaxed)
    }

    /// Claims the right to unmap the page for pool `id`, and returns the address at which the
    /// caller must unmap it; after that the caller calls [`finish_unmap`](Self::finish_unmap). The
    /// thread that unmaps a page first sets its CLAIMED bit; only one thread can set it.
    ///
    /// [`PagePool::device_gone`](crate::PagePool::device_gone) calls this for pages that it does
    /// not own. The load comes first, so that pages of other pools are not written. While the claim
    /// is held, the page stays with this pool.
    #[inline]
    pub(crate) fn claim_unmap(&self, id: u64) -> Option<u64> {
        if self.mapped.load(Ordering::Acquire) != id {
            return None;
        }
        let claimed = self.mapped.compare_exchange(id, id | CLAIMED, Ordering::AcqRel, Ordering::Acquire);
        claimed.ok().map(|_| self.dma())
    }

    /// Releases the claim: the page is unmapped. Wakes the pool's owner if it waits for this page.
    #[inline]
    pub(crate) fn finish_unmap(&self, pool: &UnmapEvent) {
        // Release: for the owner that waits.
        if self.mapped.swap(0, Ordering::Release) & AWAITED != 0 {
            pool.wake();
        }
    }

    /// Sleeps while another thread unmaps the page for pool `id`. Only the pool's owner calls it.
    pub(crate) fn wait_unmapped(&self, id: u64, pool: &UnmapEvent) {
        let (claimed, waited_for) = (id | CLAIMED, id | CLAIMED | AWAITED);
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

    /// Claims the right to unmap a page that the pool's owner holds. No thread competes for it,
    /// because only the owner calls `device_gone`. The claim need not be released.
    #[inline]
    pub(crate) fn claim_unmap_alone(&self, id: u64) -> Option<u64> {
        if self.mapped.load(Ordering::Relaxed) != id {
            return None;
        }
        self.mapped.store(0, Ordering::Relaxed);
        Some(self.dma())
    }

    /// Notes that a device may still write to a part of the page. The caller holds a count for that
    /// part, and drops the count next.
    #[inline]
    pub(crate) fn set_quarantined(&self) {
        // Relaxed: the drop of the count releases it, and a holder that finds itself alone has
        // acquired that.
        self.quarantined.store(true, Ordering::Relaxed);
    }

    /// Notes that no device writes to the page any more. The caller is the page's only owner.
    #[inline]
    pub(crate) fn leave_quarantine(&self) {
        self.quarantined.store(false, Ordering::Relaxed);
    }

    /// Whether a device may still write to a part of the page. For the sole holder.
    #[inline]
    pub(crate) fn is_quarantined(&self) -> bool {
        self.quarantined.load(Ordering::Relaxed)
    }

    /// Notes that all values on the page are fragments, and stay fragments until the page is
    /// [thawed](Self::thaw). The caller has the only value.
    #[inline]
    pub(crate) fn freeze(&self) {
        // Relaxed, as below: passing the bytes on to another thread orders it.
        self.frozen.store(true, Ordering::Relaxed);
    }

    /// Ends [`freeze`](Self::freeze). The caller drops its fragment next.
    #[inline]
    pub(crate) fn thaw(&self) {
        self.frozen.store(false, Ordering::Relaxed);
    }

    /// Whether all values on the page are fragments. Asked by a borrower of bytes of the page.
    #[inline]
    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed)
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
        // Acquire: what the other holders did with the page happened before they put their counts.
        self.refs.load(Ordering::Acquire) == 1
    }

    /// Puts `n` counts of a caller that has more.
    #[cold]
    pub(crate) fn put_some(&self, n: u32) {
        // Release: what the caller did with the page.
        self.refs.fetch_sub(n, Ordering::Release);
    }

    /// Puts one of several counts; true if it was the last after all.
    #[inline]
    fn put(&self) -> bool {
        if self.refs.fetch_sub(1, Ordering::AcqRel) != 1 {
            return false;
        }
        self.refs.store(1, Ordering::Relaxed);
        true
    }
}

/// Drops one count of a page. If it was the last count (true), the caller must return the page.
///
/// # Safety
///
/// The caller owns a count of this page (*one owner*), which this call puts.
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

/// Marks a branch as rarely taken, so that the compiler moves the branch's code out of line. It
/// compiles to no instruction.
// `std::hint::cold_path`, for compilers before 1.95.
#[cold]
#[inline(always)]
pub(crate) const fn cold_path() {}

#[cfg(all(test, loom))]
impl Desc {
    /// A page that `refs` hold.
    pub(crate) fn for_model(refs: u32) -> Self {
        Self {
            refs: AtomicU32::new(refs),
            index: Cell::new(0),
            header: AtomicPtr::new(std::ptr::null_mut()),
            dma: AtomicU64::new(0),
            addr: Cell::new(std::ptr::null_mut()),
            mapped: AtomicU64::new(0),
            node: ListNode::new(),
            file: Cell::new(-1),
            quarantined: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
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

    /// Last drops: if several holders are dropped at once, one of them returns the page, after the
    /// last reads of the others.
    #[test]
    fn last_drops() {
        loom::model(|| {
            let page = page(3);
            let drops = |page: &Page| {
                // SAFETY: loom checks that no thread writes.
                page.bytes.with(|b| assert_eq!(unsafe { *b }, 0));
                let last = page.desc.is_sole() || page.desc.put();
                if last {
                    assert!(page.desc.is_sole(), "the count is 1 while the page is with its pool");
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

    /// Last drop against clone: one holder clones itself while the others are dropped. The thread
    /// of the last drop has the page alone.
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
            assert!(mine != thread.join().unwrap(), "exactly one of them returns the page");
        });
    }
}
