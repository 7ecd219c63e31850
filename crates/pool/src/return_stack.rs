//! The return stack: pages that return without a magazine, by one compare-and-swap each.
//!
//! Why a stack: the owner pops all of it at once, and no thread pops a single page, so there is no
//! ABA (Treiber). A push compares the head with the one to which it linked its page. If that page
//! was taken and pushed again in between, the link is still right.
//!
//! **Ordering.** The push releases the page's contents and its cells to the owner's acquiring swap.
//! Closing is a release, too: a thread that finds the stack closed sees what the owner did before.

use crate::desc::ListNode;
use crate::sync::{AtomicPtr, Ordering};
use std::ptr;

/// A value that is never the address of a node: the stack accepts no pages any more.
fn closed() -> *mut ListNode {
    ptr::without_provenance_mut(1)
}

/// Another one: threads wait for a page. The stack is empty, and accepts none: see
/// [`crate::waiters`].
fn waited() -> *mut ListNode {
    ptr::without_provenance_mut(3)
}

/// The bit that both have, and no address of a node.
const REFUSES: usize = 1;

/// The return stack accepts no page: it is closed, or threads wait for a page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refused;

/// The stack.
#[derive(Debug)]
pub(crate) struct ReturnStack {
    head: AtomicPtr<ListNode>,
    /// Loom models read this cell wherever a thread touches the pool, and write it where the pool
    /// is freed.
    #[cfg(loom)]
    alive: loom::cell::UnsafeCell<()>,
}

impl ReturnStack {
    pub(crate) fn new() -> Self {
        Self {
            head: AtomicPtr::new(ptr::null_mut()),
            #[cfg(loom)]
            alive: loom::cell::UnsafeCell::new(()),
        }
    }

    /// Reports to a loom model that this thread touches the pool.
    #[inline(always)]
    pub(crate) fn touch(_this: *const Self) {
        #[cfg(loom)]
        // SAFETY: the models keep a freed pool's memory, and loom reports an access after the pool
        // was freed.
        unsafe {
            (*_this).alive.with(|_| ());
        }
    }

    /// Reports to a loom model that the pool is freed.
    #[cfg(all(loom, test))]
    pub(crate) fn freed(&self) {
        self.alive.with_mut(|_| ());
    }

    /// Puts a page on the return stack. After `Ok` the caller touches neither page nor pool.
    ///
    /// # Safety
    ///
    /// `page` is the caller's, and keeps `this` until then.
    #[inline]
    pub(crate) unsafe fn push(this: *const Self, page: *mut ListNode) -> Result<(), Refused> {
        // By pointer: a reference to the whole would have to be good until the return, and the pool
        // need not be.
        // SAFETY: the page keeps the pool.
        let at = unsafe { &raw const (*this).head };
        // SAFETY: as above. Acquire: a thread that finds the stack closed comes after all that the
        // owner did before closing it.
        let mut head = unsafe { (*at).load(Ordering::Acquire) };
        while head.addr() & REFUSES == 0 {
            Self::touch(this);
            // SAFETY: the page is the caller's, and keeps the pool, until the exchange succeeds.
            unsafe {
                (*page).set(head);
                match (*at).compare_exchange_weak(head, page, Ordering::Release, Ordering::Acquire) {
                    Ok(_) => return Ok(()),
                    Err(now) => head = now,
                }
            }
        }
        Err(Refused)
    }

    /// Marks the stack: from now on each page that is returned is passed to a waiter. Pops all
    /// pages off it. Only the owner calls it, under the lock of the queue.
    pub(crate) fn mark(&self) -> *mut ListNode {
        Self::touch(self);
        self.head.swap(waited(), Ordering::AcqRel)
    }

    /// Removes the mark. Under the lock of the queue.
    pub(crate) fn unmark(&self) {
        Self::touch(self);
        // A marked stack is changed by no other thread: it refuses pages, and the owner finds it
        // empty.
        self.head.store(ptr::null_mut(), Ordering::Release);
    }

    /// Whether the stack is empty. The owner tests this before a swap, because a load is cheaper,
    /// and because the swap would remove the mark.
    pub(crate) fn is_empty(&self) -> bool {
        let head = self.head.load(Ordering::Relaxed);
        head.is_null() || head == waited()
    }

    /// Pops all pages from the stack: a list by [`ListNode::next`], ended by null. Only the owner
    /// calls it.
    pub(crate) fn take_all(&self) -> *mut ListNode {
        self.head.swap(ptr::null_mut(), Ordering::Acquire)
    }

    /// Pops all pages from the stack for the last time: from now on `push` fails. Only the owner
    /// calls it.
    pub(crate) fn close(&self) -> *mut ListNode {
        self.head.swap(closed(), Ordering::AcqRel)
    }

    /// Whether the stack is closed: the owner has taken what was on it for the last time.
    pub(crate) fn is_closed(&self) -> bool {
        // Acquire: as in `push`.
        self.head.load(Ordering::Acquire) == closed()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_stack_takes_pages_until_it_is_closed() {
        let stack = ReturnStack::new();
        let page = Box::new(ListNode::new());
        let at = (&raw const *page).cast_mut();
        // SAFETY: the page outlives the stack.
        unsafe {
            assert!(stack.is_empty());
            assert_eq!(ReturnStack::push(&stack, at), Ok(()));
            assert!(!stack.is_empty());
            assert_eq!(stack.take_all(), at);
            assert_eq!(ReturnStack::push(&stack, at), Ok(()));
            assert_eq!(stack.mark(), at);
            assert!(stack.is_empty());
            assert_eq!(ReturnStack::push(&stack, at), Err(Refused));
            stack.unmark();
            assert_eq!(ReturnStack::push(&stack, at), Ok(()));
            assert_eq!(stack.close(), at);
            assert_eq!(ReturnStack::push(&stack, at), Err(Refused));
        }
    }
}
