//! The operations of a binding that a token table uses.
//!
//! The table knows neither queues nor dma-bufs. A trait of four operations lets models and
//! measurements use it with a binding of their own.

use netmem_refs::{Count, Ref};
use std::sync::Arc;

/// A handle on a binding of device memory, whose pages are counted. The binding exists as long as
/// the handle.
///
/// A token table holds one handle on each binding from which it has received, independent of the
/// number of its tokens.
///
/// # Safety
///
/// * [`id`](Self::id) is the same for all handles on a binding. No other binding of this process
///   ever has this id, not even after this binding was released.
/// * [`pages`](Self::pages) never changes.
/// * [`drained`](Self::drained) is true only if there is no reference to any of the pages and never
///   will be one. A thread for which it returns true sees everything that other threads did before
///   their last [`put`](Self::put) (an acquire).
pub unsafe trait Pages: Send + Sync + 'static {
    /// The binding's id.
    fn id(&self) -> u64;

    /// The number of pages of the binding.
    fn pages(&self) -> u32;

    /// Ends `n` references to page `index`. Called from any thread, in a critical section of
    /// [`rcu`](netmem_refs::rcu). Must not block, nor panic.
    ///
    /// # Safety
    ///
    /// `index` is below [`pages`](Self::pages). The caller owns `n` references to that page, and
    /// owns none of them after the call.
    unsafe fn put(&self, index: u32, n: u32);

    /// Whether the binding has been unbound, all of its pages were returned, and none will be
    /// allocated again. A returning thread calls this about once for each 16 tokens, so it should
    /// cost no more than a load.
    fn drained(&self) -> bool;
}

/// Implements [`Pages`] for a pointer to a value that has it.
macro_rules! by_pointer {
    ($pointer:ty, $($count:tt)*) => {
        // SAFETY: the pointer forwards to a value that keeps the promises.
        unsafe impl<T: Pages, $($count)*> Pages for $pointer {
            #[inline]
            fn id(&self) -> u64 {
                (**self).id()
            }

            #[inline]
            fn pages(&self) -> u32 {
                (**self).pages()
            }

            #[inline]
            unsafe fn put(&self, index: u32, n: u32) {
                // SAFETY: the caller's promises.
                unsafe { (**self).put(index, n) };
            }

            #[inline]
            fn drained(&self) -> bool {
                (**self).drained()
            }
        }
    };
}

by_pointer!(Arc<T>,);
by_pointer!(Ref<T, C>, C: Count + 'static);
