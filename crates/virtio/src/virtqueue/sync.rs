//! The atomics of rings, in one place, so that loom's can replace them.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
