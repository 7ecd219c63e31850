//! How long a loop polls before it sleeps.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// How long a loop goes on polling after it last found work, before it sleeps.
///
/// Polling costs CPU time. A sleep and a wake-up cost a few microseconds of latency, a system call
/// in this process and one in the peer. As text it is a number of microseconds, or `forever`:
///
/// ```
/// use netmem_virtio::Spin;
///
/// assert_eq!("0".parse(), Ok(Spin::NONE));
/// assert_eq!("forever".parse(), Ok(Spin::Forever));
/// assert_eq!(Spin::default().to_string().parse(), Ok(Spin::default()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spin {
    /// The loop polls for this long, then sleeps.
    For(Duration),
    /// The loop only polls.
    Forever,
}

impl Spin {
    /// The loop sleeps as soon as there is no work.
    pub const NONE: Self = Self::For(Duration::ZERO);

    /// The time. `None` means forever.
    #[must_use]
    pub fn poll_for(self) -> Option<Duration> {
        match self {
            Self::For(time) => Some(time),
            Self::Forever => None,
        }
    }
}

impl Default for Spin {
    /// 50 us: several times the cost, for both sides, of a sleep and a wake-up.
    fn default() -> Self {
        Self::For(Duration::from_micros(50))
    }
}

impl fmt::Display for Spin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::For(time) => time.as_micros().fmt(f),
            Self::Forever => f.write_str("forever"),
        }
    }
}

/// A text is neither a number of microseconds nor `forever`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a number of microseconds, or `forever`")]
pub struct BadSpin;

impl FromStr for Spin {
    type Err = BadSpin;

    fn from_str(text: &str) -> Result<Self, BadSpin> {
        match text {
            "forever" => Ok(Self::Forever),
            _ => text.parse().map(|us| Self::For(Duration::from_micros(us))).map_err(|_| BadSpin),
        }
    }
}
