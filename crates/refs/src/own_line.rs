//! A count on a cache line of its own.

use std::ops::Deref;

/// Bytes in a cache line.
pub const CACHE_LINE: usize = 64;

/// Keeps a count on a cache line with nothing else.
///
/// Every get and put of a shared object moves the line of its count to its CPU, away from all
/// others. Fields that are read after a get must be on another line, or each read waits for the
/// count's line again: Linux found its route cache four times slower for this alone. The allocation
/// of the smart pointers is laid out so. A struct that embeds its count uses this type. It costs 64
/// bytes per object instead of 4.
///
/// ```
/// use netmem_refs::{OwnLine, RefCount};
///
/// struct Route {
///     refs: OwnLine<RefCount>,
///     gateway: u32, // no line in common with the count, wherever the compiler puts it
/// }
///
/// let route = Route { refs: OwnLine::new(RefCount::new(1)), gateway: 1 };
/// assert!(route.refs.try_get());
/// let apart = (&raw const route.gateway).addr().abs_diff((&raw const *route.refs).addr());
/// assert!(apart >= 64);
/// ```
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct OwnLine<C>(C);

impl<C> OwnLine<C> {
    /// The count, on its own line.
    #[must_use]
    pub const fn new(count: C) -> Self {
        const { assert!(align_of::<Self>() >= CACHE_LINE && size_of::<Self>().is_multiple_of(CACHE_LINE)) };
        Self(count)
    }
}

impl<C> Deref for OwnLine<C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.0
    }
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<OwnLine<crate::RefCount>>() == CACHE_LINE);
    assert!(size_of::<OwnLine<crate::RcuRef>>() == CACHE_LINE);
};

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Owner, RcuRef, RefCount};

    /// A value of an owner is on a line that its count does not touch, whatever its alignment; the
    /// count's offset and the rest of its line are asserted when the allocation is compiled. Proves
    /// REF-6.
    #[test]
    fn values_are_on_other_lines() {
        #[repr(align(128))]
        struct Wide(u8);
        struct Embedded {
            before: u8,
            refs: OwnLine<RefCount>,
            after: u8,
        }
        let line = |at: *const u8| at.addr() / CACHE_LINE;
        let of = Embedded { before: 1, refs: OwnLine::new(RefCount::new(1)), after: 2 };
        let refs = line((&raw const of.refs).cast());
        assert!(line(&raw const of.before) != refs && line(&raw const of.after) != refs);
        let (small, wide) = (Owner::<_, RefCount>::new(1_u8), Owner::<_, RcuRef>::new(Wide(1)));
        assert_eq!(((&raw const *small).addr() % CACHE_LINE, (&raw const wide.0).addr() % 128), (0, 0));
    }
}
