//! What a token table must know of a binding.

use netmem_refs::{Count, Ref};
use std::sync::Arc;

/// A binding's pages, which are counted: a handle on a binding of device memory, which keeps the binding while it exists.
///
/// A token table holds one handle on each binding that it has met, whatever the number of its tokens.
///
/// # Safety
///
/// * [`id`](Self::id) is the same for all handles on a binding, and never that of another binding of this process, also
///   when this one is gone.
/// * [`pages`](Self::pages) never changes.
/// * [`drained`](Self::drained) is true only if there is no reference to any of the pages and never will be one. It comes
///   after everything that others did before their last [`put`](Self::put) (an acquire).
pub unsafe trait Pages: Send + Sync + 'static {
    /// Which binding.
    fn id(&self) -> u64;

    /// How many pages it has.
    fn pages(&self) -> u32;

    /// Ends `n` references to page `index`. Called from any thread, in a critical section of [`rcu`](netmem_refs::rcu).
    /// Must not block, nor panic.
    ///
    /// # Safety
    ///
    /// `index` is below [`pages`](Self::pages), and `n` references to that page are the caller's, who gives them up.
    unsafe fn put(&self, index: u32, n: u32);

    /// Whether the binding has been unbound and every page is home, for good. Asked for every 16 tokens
    /// that are given back, or so: it should cost no more than a load.
    fn drained(&self) -> bool;
}

/// The handle is what it points to.
macro_rules! by_pointer {
    ($pointer:ty, $($count:tt)*) => {
        // SAFETY: the promises of what it points to.
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
