//! The return stack: how a page comes home from a thread that does not own the pool, and how a pool dies.
//!
//! A Treiber stack of which one thread, the owner, takes everything at once. Nobody pops a single page, so there is no
//! ABA: a push compares with the head it linked to, and if that head came back meanwhile, linking to it is right again.
//!
//! ```text
//!   head ──► page ──► page ──► null        open: return = link to head, compare-and-swap
//!   head ──► CLOSED                        the owner is gone: return = give the page to the provider, count it
//! ```
//!
//! **Who frees the pool.** `left` starts at a bias that no count of pages reaches. Every page that goes to the provider
//! without passing through the owner takes 1 from it, as the returner's *last* touch of the pool. The owner, when it goes,
//! closes the stack, takes what was on it, and takes away the bias less the pages still out. Whoever makes it zero frees.
//!
//! ```text
//!   owner                                   last returner
//!   swap(head, CLOSED), takes all
//!   left -= BIAS - out   (now 1)
//!                                           load(head) = CLOSED
//!                                           page -> provider
//!                                           left -= 1   (now 0)  -> frees the pool
//! ```
//! In the other order of the two subtractions `left` is `BIAS - 1`, then 0, and the owner frees. A returner whose push
//! succeeded has touched the pool for the last time with that compare-and-swap: its page is on the stack, counted by the
//! owner. Ordering: the push releases the page's contents and its cells to the owner's acquiring swap; the subtractions
//! are acquire-release, so the freeing thread sees every other returner's last touch. The loom models below take each
//! interleaving.

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
    fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    pub(crate) fn set(&self, next: *mut Link) {
        self.0.store(next, Ordering::Relaxed);
    }

    pub(crate) fn next(&self) -> *mut Link {
        self.0.load(Ordering::Relaxed)
    }
}

/// More than the pages of any machine.
const BIAS: i64 = 1 << 62;

/// Never the address of a link.
fn closed() -> *mut Link {
    ptr::without_provenance_mut(1)
}

/// The pool's owner is gone.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Gone;

/// How many pages have left past the owner, and after it how many are still out. Outlives the pool, for reports.
#[derive(Debug)]
pub(crate) struct Left(AtomicI64);

impl Left {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(AtomicI64::new(BIAS)))
    }

    /// Pages still out, after the owner left; 0 before.
    pub(crate) fn still_out(&self) -> u64 {
        match self.0.load(Ordering::Relaxed) {
            out @ 0.. if out < BIAS / 2 => out.cast_unsigned(),
            _ => 0,
        }
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
        (BIAS - self.left.0.load(Ordering::Acquire)).cast_unsigned()
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
        left.fetch_sub(BIAS - out, Ordering::AcqRel) == BIAS - out
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::thread;

    fn count(mut list: *mut Link) -> u64 {
        let mut n = 0;
        while !list.is_null() {
            n += 1;
            // SAFETY: the models below leak every link.
            list = unsafe { (*list).next() };
        }
        n
    }

    /// What a drop on another thread does; whether it must free the pool.
    fn give_back(remote: &Remote, page: usize) -> bool {
        // SAFETY: leaked, and given away once.
        unsafe {
            match Remote::push(remote, page as *mut Link) {
                Ok(()) => false,
                Err(Gone) => Remote::leave(remote),
            }
        }
    }

    fn page() -> usize {
        Box::into_raw(Box::new(Link::new())) as usize
    }

    fn free(page: usize) {
        // SAFETY: made by `page`, freed once, at a model's end.
        drop(unsafe { Box::from_raw(page as *mut Link) });
    }

    /// Return against teardown: every page is counted once, and exactly one thread frees the pool.
    #[test]
    fn return_against_teardown() {
        loom::model(|| {
            let remote = Arc::new(Remote::new(Left::new()));
            let pages = [page(), page()];
            let threads = pages.map(|p| {
                let remote = remote.clone();
                thread::spawn(move || give_back(&remote, p))
            });
            let back = count(remote.close());
            // SAFETY: the stack is kept by count here.
            let owner_frees = unsafe { Remote::owner_leaves(&*remote, 2 - back) };
            let frees = threads.into_iter().filter_map(|t| t.join().unwrap().then_some(())).count();
            assert_eq!(frees + usize::from(owner_frees), 1);
            assert_eq!(remote.left.still_out(), 0);
            pages.map(free);
        });
    }

    /// Return against drain: nothing is lost between a push and the owner's swap, nor handed over twice.
    #[test]
    fn return_against_drain() {
        loom::model(|| {
            let remote = Arc::new(Remote::new(Left::new()));
            let pages = [page(), page()];
            let threads = pages.map(|p| {
                let remote = remote.clone();
                thread::spawn(move || give_back(&remote, p))
            });
            let mut back = count(remote.take_all());
            for t in threads {
                assert!(!t.join().unwrap());
            }
            back += count(remote.take_all());
            assert_eq!(back, 2);
            pages.map(free);
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
