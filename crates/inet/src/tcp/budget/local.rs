//! The budget of a stack or of one of its connections, on the thread of the stack.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
#[cfg(any(test, feature = "stack", feature = "compare"))]
use std::task::Waker;

#[cfg(feature = "compare")]
use super::Charges;
use super::count::Count;
use super::{Budget, Counts};

/// A [`Budget`] in which the thread that makes it counts without atomic operations, as long as this
/// value or a clone of it lives.
///
/// It must be dropped on that thread, as all values of a stack are. Otherwise the memory of its
/// counts is never freed. For a connection without a stack, it is the same as a budget.
pub(crate) struct LocalBudget(Budget);

impl LocalBudget {
    /// [`Budget::within`]. The thread counts without atomic operations if it does so in `parent`.
    pub(crate) fn within(limit: u32, parent: Option<&Budget>) -> Self {
        let at_home = parent.is_some_and(|parent| parent.0.charged.is_home());
        Self::new(at_home, Budget::counting(Count::new(at_home), limit, parent.cloned(), None))
    }

    /// [`Budget::waking`].
    #[cfg(any(test, feature = "stack", feature = "compare"))]
    pub(crate) fn waking(limit: u32, waker: Waker) -> Self {
        Self::new(true, Budget::counting(Count::new(true), limit, None, Some(waker)))
    }

    fn new(at_home: bool, budget: Budget) -> Self {
        if at_home {
            budget.0.locals.store(1, Ordering::Relaxed);
            // The reference that belongs to no value.
            std::mem::forget(budget.0.clone());
        }
        Self(budget)
    }

    /// [`Budget::copy`].
    #[cfg(feature = "compare")]
    pub(crate) fn copy(&self, copied: &mut Vec<Charges>) -> Self {
        Self::new(false, self.0.copy(copied))
    }

    fn locals(&self) -> Option<&AtomicU32> {
        let Counts { charged, locals, .. } = &*self.0.0;
        charged.is_home().then_some(locals)
    }
}

impl Clone for LocalBudget {
    fn clone(&self) -> Self {
        if let Some(locals) = self.locals() {
            locals.store(locals.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        Self(self.0.clone())
    }
}

impl Drop for LocalBudget {
    fn drop(&mut self) {
        let Some(locals) = self.locals() else { return };
        let left = locals.load(Ordering::Relaxed) - 1;
        locals.store(left, Ordering::Relaxed);
        if left == 0 && self.0.0.charged.leave() {
            // SAFETY: it is the reference that belongs to no value, and `self` has another one.
            unsafe { Arc::decrement_strong_count(Arc::as_ptr(&self.0.0)) };
        }
    }
}

impl Deref for LocalBudget {
    type Target = Budget;

    #[inline]
    fn deref(&self) -> &Budget {
        &self.0
    }
}

impl fmt::Debug for LocalBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
