//! Time, as an argument.
//!
//! Why not `Instant`: a simulation with a seed and a replayed recording have a clock of their own.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A moment, in microseconds since a beginning that all callers of one stack share.
///
/// The stack never reads a clock. The caller passes the time, which must not go back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Time(u64);

impl Time {
    /// The beginning.
    pub const ZERO: Self = Self(0);

    /// The last moment. A timer that ends then does not run: times are compared without a branch.
    pub(crate) const NEVER: Self = Self(u64::MAX);

    /// The moment `micros` microseconds after the beginning.
    #[inline]
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the beginning.
    #[inline]
    #[must_use]
    pub const fn micros(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this moment; zero if `earlier` is later.
    #[inline]
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.micros_since(earlier))
    }

    /// As [`since`](Self::since), in microseconds: a `Duration` is made by a division.
    #[inline]
    pub(crate) const fn micros_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// The earlier of two times, if there is one.
#[cfg(feature = "stack")]
#[inline]
pub(crate) fn earlier<T: Ord>(one: Option<T>, two: Option<T>) -> Option<T> {
    match (one, two) {
        (Some(one), Some(two)) => Some(one.min(two)),
        (one, two) => one.or(two),
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    /// The moment `after` later, or the last possible one.
    #[inline]
    fn add(self, after: Duration) -> Self {
        Self(u64::try_from(after.as_micros()).map_or(u64::MAX, |micros| self.0.saturating_add(micros)))
    }
}

impl AddAssign<Duration> for Time {
    #[inline]
    fn add_assign(&mut self, after: Duration) {
        *self = *self + after;
    }
}

impl Sub for Time {
    type Output = Duration;

    /// Like [`since`](Time::since).
    #[inline]
    fn sub(self, earlier: Self) -> Duration {
        self.since(earlier)
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06} s", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_saturates_on_both_sides() {
        let late = Time::from_micros(u64::MAX - 1) + Duration::from_secs(5);
        assert_eq!(late.micros(), u64::MAX);
        assert_eq!((Time::ZERO + Duration::MAX).micros(), u64::MAX);
        assert_eq!(Time::ZERO - late, Duration::ZERO);
        assert_eq!(Time::from_micros(1_500_000).to_string(), "1.500000 s");
    }
}
