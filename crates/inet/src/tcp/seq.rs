//! Sequence numbers in a space of 2^32 that wraps.

use std::cmp::Ordering;
use std::ops::{Add, AddAssign, Sub};

use serde::{Deserialize, Serialize};

/// A sequence number. Two of them can be compared if they are less than 2^31 apart, which any
/// window guarantees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seq(pub u32);

impl Seq {
    /// The number of bytes from `earlier` to this number. It is negative if `earlier` is in fact
    /// later.
    #[inline]
    #[must_use]
    pub const fn distance(self, earlier: Self) -> i32 {
        self.0.wrapping_sub(earlier.0) as i32
    }

    /// Whether this number is one of the `len` numbers from `start` on.
    #[inline]
    #[must_use]
    pub const fn is_in(self, start: Self, len: u32) -> bool {
        self.0.wrapping_sub(start.0) < len
    }

    /// The later of two numbers.
    #[inline]
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        if self < other { other } else { self }
    }

    /// The earlier of two numbers.
    #[inline]
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        if other < self { other } else { self }
    }
}

/// Compares by the shorter way round the space.
impl PartialOrd for Seq {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.distance(*other).cmp(&0))
    }
}

impl Add<u32> for Seq {
    type Output = Self;

    #[inline]
    fn add(self, n: u32) -> Self {
        Self(self.0.wrapping_add(n))
    }
}

impl AddAssign<u32> for Seq {
    #[inline]
    fn add_assign(&mut self, n: u32) {
        *self = *self + n;
    }
}

impl Sub<u32> for Seq {
    type Output = Self;

    #[inline]
    fn sub(self, n: u32) -> Self {
        Self(self.0.wrapping_sub(n))
    }
}

impl Sub for Seq {
    type Output = u32;

    /// The number of bytes from `earlier` to this number. `earlier` must not be later.
    #[inline]
    fn sub(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_compare_across_the_wrap() {
        let before = Seq(u32::MAX - 1);
        let after = before + 4;
        assert_eq!(after, Seq(2));
        assert!(before < after);
        assert_eq!((after - before, before.distance(after)), (4, -4));
        assert!(after.is_in(before, 5) && !after.is_in(before, 4) && !before.is_in(after, 100));
        assert_eq!((before.max(after), before.min(after)), (after, before));
    }
}
