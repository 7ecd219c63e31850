//! What the smart pointers need of a count.

use crate::rcu::{self, read};
use crate::{KillError, PercpuRef, RcuRef, RefCount};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

pub(crate) mod sealed {
    /// Only the counts of this crate are counts: the pointers' safety rests on them.
    pub trait Sealed {}
}

/// A reference count for [`Owner`](crate::Owner) and [`Ref`](crate::Ref). Sealed: [`RefCount`], [`RcuRef`], [`PercpuRef`].
///
/// Of all puts of a life, `kill` being one, exactly one returns true; after it no get succeeds. Exceptions only err
/// towards never: a saturated or unbalanced count tells nobody.
pub trait Count: sealed::Sealed + Send + Sync + 'static {
    /// One more, for a caller that has one.
    fn hold(&self);

    /// One more, unless the object is dead. The caller makes sure that the count's memory is there.
    #[must_use]
    fn try_get(&self) -> bool;

    /// One more, unless the object is dead or killed. Only a count that remembers being killed refuses more than
    /// [`try_get`](Self::try_get) does.
    #[must_use]
    fn try_get_live(&self) -> bool {
        self.try_get()
    }

    /// One less. True: it was the last.
    #[must_use]
    fn put(&self) -> bool;

    /// One less, the one that the count was made with. True: it was the last. Once.
    #[must_use]
    fn kill(&self) -> bool {
        self.put()
    }

    /// Whether this is a count with one reference and nothing else; any other is made one that tells nobody, ever.
    fn adopt(&mut self) -> bool;

    /// Has `free` called on `at`, which contains a count whose last reference was put: at once, if the caller is in no
    /// critical section, or when nobody can be in one that it was in. `prompt`: such a delay is not to be prolonged to gather
    /// company.
    ///
    /// # Safety
    ///
    /// A put or kill of the count in `at` returned true, this is the first that is done about it, and nobody finds `at`
    /// from now on. `free` may be called on it once, on any thread.
    unsafe fn release<T: Release>(at: NonNull<T>, prompt: bool) {
        // SAFETY: the caller's promise; who told nobody else looks at the count either.
        unsafe { if rcu::in_section() { after_sections(at, prompt) } else { T::release(at) } }
    }
}

/// An allocation that knows how it is freed.
pub trait Release {
    /// # Safety
    ///
    /// Nobody else uses `at`; once.
    unsafe fn release(at: NonNull<Self>);
}

impl sealed::Sealed for RefCount {}

impl Count for RefCount {
    #[inline]
    fn hold(&self) {
        self.get();
    }

    #[inline]
    fn try_get(&self) -> bool {
        RefCount::try_get(self)
    }

    #[inline]
    fn put(&self) -> bool {
        RefCount::put(self)
    }

    fn adopt(&mut self) -> bool {
        RefCount::adopt(self)
    }
}

impl sealed::Sealed for RcuRef {}

impl Count for RcuRef {
    #[inline]
    fn hold(&self) {
        self.add();
    }

    #[inline]
    fn try_get(&self) -> bool {
        self.add()
    }

    #[inline]
    fn put(&self) -> bool {
        RcuRef::put(self)
    }

    fn adopt(&mut self) -> bool {
        RcuRef::adopt(self)
    }

    /// Past a grace period: others may be looking at the count, having lost a race, and at the object, having found it.
    unsafe fn release<T: Release>(at: NonNull<T>, prompt: bool) {
        // SAFETY: the caller's promise.
        unsafe { after_sections(at, prompt) };
    }
}

/// Has `at` released once every section that is open now has ended, the caller's included.
///
/// # Safety
///
/// As for [`Count::release`].
#[cold]
unsafe fn after_sections<T: Release>(at: NonNull<T>, prompt: bool) {
    /// Runs where somebody leaves a critical section: a panic must not keep others' memory from being released.
    unsafe fn after<T: Release>(at: *mut T, _: &rcu::Collector) {
        // SAFETY: never null: it was not when it was retired. All sections that could know it have ended.
        let release = AssertUnwindSafe(|| unsafe { T::release(NonNull::new_unchecked(at)) });
        if let Err(what) = catch_unwind(release) {
            crate::faults::panicked(what);
        }
    }
    // SAFETY: dead, so that whoever finds it does not get it; and the caller's promise.
    read(|guard| unsafe { guard.retire(at, after::<T>, prompt) });
}

impl sealed::Sealed for PercpuRef {}

impl Count for PercpuRef {
    #[inline]
    fn hold(&self) {
        self.get();
    }

    #[inline]
    fn try_get(&self) -> bool {
        PercpuRef::try_get(self)
    }

    #[inline]
    fn try_get_live(&self) -> bool {
        PercpuRef::try_get_live(self)
    }

    #[inline]
    fn put(&self) -> bool {
        PercpuRef::put(self)
    }

    fn adopt(&mut self) -> bool {
        PercpuRef::adopt(self)
    }

    /// There is an owner, who is gone after this; without a barrier, its object is leaked rather than freed early.
    fn kill(&self) -> bool {
        match PercpuRef::kill(self) {
            Ok(last) => last,
            Err(KillError::AlreadyDying) => false,
            Err(KillError::Barrier(error)) => {
                crate::faults::leaked(&error);
                false
            }
        }
    }
}
