//! The errors of this crate, but for [`ForcedModeError`](crate::ForcedModeError), which is in
//! `mode.rs`.

use std::fmt;
use thiserror::Error;

/// There is no memory for another slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("no memory for another area of per-CPU data ({bytes} bytes)")]
pub struct NoMemory {
    /// What was asked for.
    pub bytes: usize,
}

/// The kernel refused the barrier that it offered at the start. The usual cause is a seccomp filter
/// that was installed since. Nothing has changed: the gate is still open.
#[derive(Debug, Error)]
#[error("membarrier failed: {0}; a seccomp filter must let it through")]
pub struct BarrierError(pub(crate) std::io::Error);

/// The gate is closed, or this thread cannot use this CPU's data at the moment: take the shared
/// path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateClosed;

impl fmt::Display for GateClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the gate is closed to this thread")
    }
}

impl std::error::Error for GateClosed {}

/// Why a [pop](crate::CpuCache::pop) has no item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NothingFound {
    /// This CPU's magazines and the depot are empty. Other CPUs may hold items.
    #[error("this CPU's magazines and the depot are empty")]
    Empty,
    /// The depot is empty, and this CPU's magazines cannot be used now: another thread reclaims,
    /// the cache is closed, or, in portable mode, another thread of this CPU is in an operation.
    #[error("the depot is empty, and the gate is closed to this thread")]
    Refused,
}

/// Why a [`CpuCache`](crate::CpuCache) was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NewCacheError {
    /// There is no memory.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
    /// A cache has fewer magazines: the heads of its lists have 23 bits for a number.
    #[error("{magazines} magazines are too many: a cache has at most {most}")]
    TooMany {
        /// What was asked for.
        magazines: usize,
        /// The most that there can be.
        most: usize,
    },
}
