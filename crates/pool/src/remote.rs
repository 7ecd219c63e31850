//! The return stack: how a page comes home that the depot refused, and how a pool dies.
//!
//! A Treiber stack of which one thread, the owner, takes everything at once. Nobody pops a single page, so there is no
//! ABA: a push compares with the head it linked to, and if that head came back meanwhile, linking to it is right again.
//!
//! ```text
//!   head ──► page ──► page ──► null        open: return = link to head, compare-and-swap
//!   head ──► CLOSED                        the owner is gone: return = give the page to the provider, count it
//! ```
//!
//! **Who frees the pool.** `left` starts at 0. Every page that goes to the provider without passing through the owner
//! takes 1 from it, as the returner's *last* touch of the pool. The owner, when it goes, closes the stack, takes what was
//! on it, and adds the pages that it handed out and never saw again: from then on `left` is the number of pages still
//! out. Whoever makes it zero frees; a returner before the owner goes cannot, for it finds it zero or less.
//!
//! ```text
//!   owner                                   last returner
//!   swap(head, CLOSED), takes all
//!   left += out          (now 1)
//!                                           load(head) = CLOSED
//!                                           page -> provider
//!                                           left -= 1   (now 0)  -> frees the pool
//! ```
//! In the other order of the two additions `left` is -1, then 0, and the owner frees. A returner whose push succeeded has
//! touched the pool for the last time with that compare-and-swap: its page is on the stack, counted by the owner.
//! Ordering: the push releases the page's contents and its cells to the owner's acquiring swap; closing releases what the
//! owner did before to those who find the stack closed; the additions are acquire-release, so the freeing thread sees
//! every other's last touch. The loom models below take each interleaving.

#[cfg(loom)]
use loom::sync::atomic::{AtomicI64, AtomicPtr, Ordering};
use std::ptr;
use std::sync::Arc;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicI64, AtomicPtr, Ordering};

/// The place for one list's pointer in a page descriptor. Belongs to the page's owner.
pub(crate) struct Link(AtomicPtr<Link>);

impl Link {
    #[cfg(any(test, loom))]
    pub(crate) fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    pub(crate) fn set(&self, next: *mut Link) {
        self.0.store(next, Ordering::Relaxed);
    }

    pub(crate) fn next(&self) -> *mut Link {
        self.0.load(Ordering::Relaxed)
    }
}

/// Never the address of a link.
fn closed() -> *mut Link {
    ptr::without_provenance_mut(1)
}

/// The pool's owner is gone.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Gone;

/// Minus the pages that have left past the owner; after it, the pages still out. Outlives the pool, for reports.
#[derive(Debug)]
pub(crate) struct Left(AtomicI64);

impl Left {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(AtomicI64::new(0)))
    }

    /// Pages still out, after the owner left; 0 before.
    pub(crate) fn still_out(&self) -> u64 {
        u64::try_from(self.0.load(Ordering::Relaxed)).unwrap_or(0)
    }
}

#[derive(Debug)]
pub(crate) struct Remote {
    head: AtomicPtr<Link>,
    left: Arc<Left>,
}

impl Remote {
    pub(crate) fn new(left: Arc<Left>) -> Self {
        Self { head: AtomicPtr::new(ptr::null_mut()), left }
    }

    /// Returns a page to the owner. After `Ok` the caller touches neither page nor pool.
    ///
    /// # Safety
    ///
    /// `page` is live and the caller's to give away, and keeps `this` until then.
    pub(crate) unsafe fn push(this: *const Self, page: *mut Link) -> Result<(), Gone> {
        // By pointer: a reference to the whole would have to be good until the return, and the pool need not be.
        // SAFETY: the page keeps the pool.
        let at = unsafe { &(*this).head };
        // Acquire: whoever finds the stack closed comes after all that the owner did.
        let mut head = at.load(Ordering::Acquire);
        loop {
            if head == closed() {
                return Err(Gone);
            }
            // SAFETY: the page is the caller's until the exchange succeeds.
            unsafe { (*page).set(head) };
            match at.compare_exchange_weak(head, page, Ordering::Release, Ordering::Acquire) {
                Ok(_) => return Ok(()),
                Err(now) => head = now,
            }
        }
    }

    /// Whether anything waits. The owner's cheap look before a swap.
    pub(crate) fn is_empty(&self) -> bool {
        self.head.load(Ordering::Relaxed).is_null()
    }

    /// Takes all that was returned: a list by [`Link::next`], ended by null. The owner's.
    pub(crate) fn take_all(&self) -> *mut Link {
        self.head.swap(ptr::null_mut(), Ordering::Acquire)
    }

    /// Takes all that was returned, for the last time: from now on `push` fails. The owner's.
    pub(crate) fn close(&self) -> *mut Link {
        self.head.swap(closed(), Ordering::AcqRel)
    }

    /// A page went to the provider without passing through the owner. True: the caller frees the pool; else it touches
    /// the pool no more.
    ///
    /// # Safety
    ///
    /// The page is one that `this` counts, and this is the first that is said of it.
    #[must_use]
    pub(crate) unsafe fn leave(this: *const Self) -> bool {
        // SAFETY: a page that is not counted yet keeps the pool.
        let Left(left) = unsafe { &*Arc::as_ptr(&(*this).left) };
        left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// How many left that way, while the owner is there.
    pub(crate) fn gone_past_owner(&self) -> u64 {
        self.left.0.load(Ordering::Acquire).unsigned_abs()
    }

    /// The owner leaves; of all the pages it ever took, `out` came back to it neither directly nor by the stack. True:
    /// the caller frees the pool; else it touches the pool no more.
    ///
    /// # Safety
    ///
    /// The caller is the owner, and this is the last that it does.
    #[must_use]
    pub(crate) unsafe fn owner_leaves(this: *const Self, out: u64) -> bool {
        // SAFETY: the owner keeps the pool.
        let Left(left) = unsafe { &*Arc::as_ptr(&(*this).left) };
        let out = out.cast_signed();
        left.fetch_add(out, Ordering::AcqRel) == -out
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc as LoomArc;
    use loom::thread;
    use std::mem::offset_of;

    /// What a page stands for: its link, and contents that its users wrote without any atomics.
    #[repr(C)]
    struct Page {
        link: Link,
        contents: UnsafeCell<u32>,
    }

    /// What a pool stands for: everybody on a way home looks at `alive`, and whoever frees the pool writes it.
    struct Pool {
        remote: Remote,
        alive: UnsafeCell<bool>,
    }

    // SAFETY: loom checks every access to the cell.
    unsafe impl Sync for Pool {}
    // SAFETY: as above.
    unsafe impl Send for Pool {}

    fn pool() -> LoomArc<Pool> {
        LoomArc::new(Pool { remote: Remote::new(Left::new()), alive: UnsafeCell::new(true) })
    }

    impl Pool {
        fn touch(&self) {
            // SAFETY: loom checks that nobody writes.
            self.alive.with(|alive| assert!(unsafe { *alive }));
        }

        fn free(&self) {
            // SAFETY: loom checks that nobody else reads or writes.
            self.alive.with_mut(|alive| assert!(unsafe { alive.replace(false) }, "freed twice"));
        }
    }

    fn page() -> usize {
        Box::into_raw(Box::new(Page { link: Link::new(), contents: UnsafeCell::new(0) })) as usize
    }

    fn free(page: usize) {
        // SAFETY: made by `page`, freed once, at a model's end.
        drop(unsafe { Box::from_raw(page as *mut Page) });
    }

    /// Counts the pages of a list, looking at the contents of each as its next user would.
    fn count(mut list: *mut Link) -> u64 {
        let mut n = 0;
        while !list.is_null() {
            n += 1;
            // SAFETY: the models free pages at their end only; loom checks the contents.
            unsafe {
                let page = list.byte_sub(offset_of!(Page, link)).cast::<Page>();
                (*page).contents.with_mut(|c| assert_eq!(*c, 1));
                list = (*list).next();
            }
        }
        n
    }

    /// A drop on another thread: of a page that it wrote, to a pool that may end meanwhile. Without a cache, the pool
    /// wants to see no page again.
    fn give_back(pool: &Pool, page: usize, circulates: bool) {
        let page = page as *mut Page;
        // SAFETY: given away once.
        unsafe {
            (*page).contents.with_mut(|c| *c = 1);
            pool.touch();
            if circulates && Remote::push(&pool.remote, &raw mut (*page).link).is_ok() {
                return;
            }
            pool.touch();
            if Remote::leave(&pool.remote) {
                pool.free();
            }
        }
    }

    /// Return against teardown: every page is counted once, and exactly one thread frees the pool, after everybody.
    #[test]
    fn return_against_teardown() {
        teardown(true);
    }

    /// The same for a pool without a cache, whose pages leave past the owner also before it goes.
    #[test]
    fn page_per_packet_against_teardown() {
        teardown(false);
    }

    fn teardown(circulates: bool) {
        loom::model(move || {
            let pool = pool();
            let pages = [page(), page()];
            let threads = pages.map(|p| {
                let pool = pool.clone();
                thread::spawn(move || give_back(&pool, p, circulates))
            });
            let back = count(pool.remote.close());
            pool.touch();
            // SAFETY: the last that the owner does.
            if unsafe { Remote::owner_leaves(&pool.remote, 2 - back) } {
                pool.free();
            }
            threads.into_iter().for_each(|t| t.join().unwrap());
            // SAFETY: all others are done.
            assert!(!pool.alive.with(|alive| unsafe { *alive }), "nobody freed the pool");
            assert_eq!(pool.remote.left.still_out(), 0);
            pages.into_iter().for_each(free);
        });
    }

    /// Return against drain: nothing is lost between a push and the owner's swap, nor handed over twice, and what was
    /// written to a page is there when it is allocated again.
    #[test]
    fn return_against_drain() {
        loom::model(|| {
            let pool = pool();
            let pages = [page(), page()];
            let threads = pages.map(|p| {
                let pool = pool.clone();
                thread::spawn(move || give_back(&pool, p, true))
            });
            let mut back = count(pool.remote.take_all());
            threads.into_iter().for_each(|t| t.join().unwrap());
            back += count(pool.remote.take_all());
            assert_eq!(back, 2);
            pages.into_iter().for_each(free);
        });
    }

    /// What the owner did before it closed the stack, such as unmapping, is done for whoever finds it closed.
    #[test]
    fn closing_is_a_release() {
        loom::model(|| {
            let pool = pool();
            let unmapped = LoomArc::new(UnsafeCell::new(false));
            let (page, returner) = (page(), (pool.clone(), unmapped.clone()));
            let thread = thread::spawn(move || {
                let (pool, unmapped) = returner;
                // SAFETY: given away once; loom checks the cell.
                unsafe {
                    (*(page as *mut Page)).contents.with_mut(|c| *c = 1);
                    if Remote::push(&pool.remote, page as *mut Link).is_err() {
                        unmapped.with(|done| assert!(*done));
                    }
                }
            });
            // SAFETY: loom checks the cell.
            unmapped.with_mut(|done| unsafe { *done = true });
            count(pool.remote.close());
            thread.join().unwrap();
            free(page);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn last_one_out_frees() {
        let remote = Remote::new(Left::new());
        let page = Box::new(Link::new());
        let at = (&raw const *page).cast_mut();
        // SAFETY: the page outlives the stack.
        assert_eq!(unsafe { Remote::push(&remote, at) }, Ok(()));
        assert!(!remote.is_empty());
        assert_eq!(remote.close(), at);
        // SAFETY: as above.
        unsafe {
            assert_eq!(Remote::push(&remote, at), Err(Gone));
            assert!(!Remote::owner_leaves(&remote, 2));
            assert!(!Remote::leave(&remote));
            assert_eq!(remote.left.still_out(), 1);
            assert!(Remote::leave(&remote));
        }
    }
}
