//! The return of a page that no magazine accepts: onto the return stack, to a thread that waits for
//! a page, or past the owner to the provider.
//!
//! Why one value: a thread that returns a page may touch nothing else of the pool after its last
//! access. The states and the races are at the head of `end.rs`.

use crate::desc::Desc;
use crate::list::node_of;
use crate::panics::Panics;
use crate::record::Record;
use crate::return_stack::{Refused, ReturnStack};
use crate::sync::Ordering;
use crate::waiters::Waiters;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::task::Waker;

/// The return stack, the waiters and the [`Record`] of a pool.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ReturnPath {
    pub(crate) stack: ReturnStack,
    pub(crate) record: Arc<Record>,
    /// Of a pool for every thread.
    waiters: OnceLock<Arc<Waiters>>,
}

impl ReturnPath {
    pub(crate) fn new(record: Arc<Record>) -> Self {
        Self { stack: ReturnStack::new(), record, waiters: OnceLock::new() }
    }

    /// Reports to a loom model that this thread touches the pool.
    #[inline(always)]
    pub(crate) fn touch(this: *const Self) {
        // SAFETY: the pool is alive, or else loom reports it.
        ReturnStack::touch(unsafe { &raw const (*this).stack });
    }

    /// Puts a page on the return stack. After `Ok` the caller touches neither page nor pool.
    ///
    /// # Safety
    ///
    /// The page is the caller's, and keeps `this` until then.
    #[inline]
    pub(crate) unsafe fn push(this: *const Self, desc: NonNull<Desc>) -> Result<(), Refused> {
        // SAFETY: the caller's.
        unsafe { ReturnStack::push(&raw const (*this).stack, node_of(desc)) }
    }

    /// Passes a page that the stack has refused to the first of the threads that wait for one.
    /// Pushes it if none waits any more. Returns false if the stack is closed; the page is then
    /// still the caller's.
    ///
    /// # Safety
    ///
    /// As for [`push`](Self::push).
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn pass(this: *const Self, desc: NonNull<Desc>, panics: &mut Panics) -> bool {
        // The queue is needed until its lock is released, and the pool may be gone by then.
        // SAFETY: the page keeps the pool until it is passed on.
        let Some(waiters) = (unsafe { (*this).waiters.get().cloned() }) else { return false };
        // SAFETY: as above.
        while !unsafe { (*this).stack.is_closed() } {
            if let Ok(waker) = waiters.pass(desc) {
                panics.call(|| waker.map(Waker::wake));
                return true;
            }
            // SAFETY: the page was not passed on.
            if unsafe { Self::push(this, desc) }.is_ok() {
                return true;
            }
        }
        false
    }

    /// Lets threads wait for pages of the pool. Before any other thread has the pool.
    pub(crate) fn set_waiters(&self, waiters: Arc<Waiters>) {
        let _ = self.waiters.set(waiters);
    }

    /// Counts a page that went to the provider without passing through the owner. If the answer is
    /// true, the caller frees the pool. Otherwise the caller must not touch the pool again.
    ///
    /// # Safety
    ///
    /// The page is one that `this` counts, and it is counted here once.
    #[must_use]
    pub(crate) unsafe fn leave(this: *const Self) -> bool {
        Self::touch(this);
        // SAFETY: a page that is not counted yet keeps the pool, and with it the record.
        let record = unsafe { &*Arc::as_ptr(&(*this).record) };
        record.outstanding.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// How many pages returning threads have taken out of the pool. Valid while the owner exists.
    #[inline]
    pub(crate) fn released_remotely(&self) -> u64 {
        self.record.outstanding.load(Ordering::Acquire).unsigned_abs()
    }
}
