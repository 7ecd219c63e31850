//! The operations of a count that the smart pointers need.

use crate::{KillError, NoMemory, PercpuRef, RcuRef, RefCount};

pub(crate) mod sealed {
    /// Only the counts of this crate are counts: the pointers' safety rests on them.
    pub trait Sealed {}
}

/// A reference count for [`Owner`](crate::Owner) and [`Ref`](crate::Ref). Sealed: [`RefCount`],
/// [`RcuRef`], [`PercpuRef`].
///
/// Of all puts of a life, `kill` being one, exactly one returns true; after it no get succeeds. A
/// saturated or unbalanced count is the exception: none of its puts returns true, and its object is
/// leaked.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a reference count",
    note = "the counts are `RefCount`, `RcuRef` and `PercpuRef`; no other type can be one"
)]
pub trait Count: sealed::Sealed + Send + Sync + Sized + 'static {
    /// Whether a thread may access the count in a critical section without holding a reference.
    /// Such an object is released after all sections that are open at its last put.
    const READ_IN_SECTIONS: bool = false;

    /// A count of one reference.
    ///
    /// # Errors
    ///
    /// There is no memory for the count.
    fn try_one() -> Result<Self, NoMemory>;

    /// Acquires a reference, for a caller that holds one. Cannot fail.
    fn get(&self);

    /// Acquires a reference, unless the object is dead. The caller makes sure that the count's
    /// memory is there.
    #[must_use]
    fn try_get(&self) -> bool;

    /// Acquires a reference, unless the object is dead or was killed. Only [`PercpuRef`] remembers
    /// that it was killed; with the others this is [`try_get`](Self::try_get).
    #[must_use]
    fn try_get_live(&self) -> bool {
        self.try_get()
    }

    /// [`try_get_live`](Self::try_get_live), and how often its compare-and-swap had to be repeated.
    /// Only [`RefCount`] has one. For measurements, and not stable.
    #[cfg(feature = "bench")]
    #[must_use]
    #[inline]
    fn try_get_live_counting(&self) -> (bool, u32) {
        (self.try_get_live(), 0)
    }

    /// Puts a reference. Returns whether it was the last.
    #[must_use]
    fn put(&self) -> bool;

    /// Puts the initial reference. Returns whether it was the last. Must be called until it has
    /// succeeded, and not again.
    ///
    /// # Errors
    ///
    /// The kernel refuses the barrier of a [`PercpuRef`], which is live as before. The other counts
    /// never fail.
    fn kill(&self) -> Result<bool, KillError> {
        Ok(self.put())
    }

    /// The number of references, which may be wrong while other threads get and put. See
    /// [`Owner::approximate_count`](crate::Owner::approximate_count).
    fn approximate_count(&self) -> u64;
}

/// A count that can always be made: [`RefCount`] and [`RcuRef`], which allocate nothing.
#[diagnostic::on_unimplemented(
    message = "making a `{Self}` can fail, for want of memory",
    note = "use `Owner::try_new` or `Owner::try_with_release`"
)]
pub trait InfallibleCount: Count {
    /// A count of one reference.
    fn one() -> Self;
}

/// A count whose number of references is known at each moment: [`RefCount`] and [`RcuRef`]. That of
/// a live [`PercpuRef`] is not.
#[diagnostic::on_unimplemented(
    message = "the number of references of a `{Self}` is not known while it is live",
    note = "replace the object in an `RcuCell`, or kill it and take the value out by `Owner::into_inner`"
)]
pub trait ExactCount: Count {
    /// Whether there is one reference. If so, all that other threads did before they put theirs
    /// happened before.
    #[must_use]
    fn is_one(&self) -> bool;
}

impl sealed::Sealed for RefCount {}

impl Count for RefCount {
    fn try_one() -> Result<Self, NoMemory> {
        Ok(Self::one())
    }

    #[inline]
    fn get(&self) {
        RefCount::get(self);
    }

    #[inline]
    fn try_get(&self) -> bool {
        RefCount::try_get(self)
    }

    #[cfg(feature = "bench")]
    #[inline]
    fn try_get_live_counting(&self) -> (bool, u32) {
        RefCount::try_get_counting(self)
    }

    #[inline]
    fn put(&self) -> bool {
        RefCount::put(self)
    }

    fn approximate_count(&self) -> u64 {
        self.count().into()
    }
}

impl InfallibleCount for RefCount {
    fn one() -> Self {
        Self::new(1)
    }
}

impl ExactCount for RefCount {
    fn is_one(&self) -> bool {
        RefCount::is_one(self)
    }
}

impl sealed::Sealed for RcuRef {}

impl Count for RcuRef {
    /// A put that lost the race to be the last still reads the count.
    const READ_IN_SECTIONS: bool = true;

    fn try_one() -> Result<Self, NoMemory> {
        Ok(Self::one())
    }

    #[inline]
    fn get(&self) {
        RcuRef::get(self);
    }

    #[inline]
    fn try_get(&self) -> bool {
        self.add()
    }

    #[inline]
    fn put(&self) -> bool {
        RcuRef::put(self)
    }

    fn approximate_count(&self) -> u64 {
        self.count().into()
    }
}

impl InfallibleCount for RcuRef {
    fn one() -> Self {
        Self::new(1)
    }
}

impl ExactCount for RcuRef {
    fn is_one(&self) -> bool {
        RcuRef::is_one(self)
    }
}

impl sealed::Sealed for PercpuRef {}

impl Count for PercpuRef {
    fn try_one() -> Result<Self, NoMemory> {
        Self::new()
    }

    #[inline]
    fn get(&self) {
        PercpuRef::get(self);
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

    fn kill(&self) -> Result<bool, KillError> {
        PercpuRef::kill(self)
    }

    fn approximate_count(&self) -> u64 {
        PercpuRef::approximate_count(self)
    }
}
