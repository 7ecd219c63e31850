//! What a sequence answers, and which version of it runs.
//!
//! The assembly goes first. It says closed for three reasons: the gate is, this thread has no area, or this process has no
//! sequences; only in the last may the portable version touch the words, for its locks exclude each other and not sequences.

use crate::mode::{Mode, mode};
use crate::sync::AtomicUsize;
use crate::{portable, rseq};
use std::fmt;

/// The gate is closed, or this thread cannot use this CPU's data just now: take the shared path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the gate is closed to this thread")
    }
}

impl std::error::Error for Closed {}

/// How a push ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// The item is on this CPU's magazine.
    Done,
    /// The magazine is full.
    Full,
    /// This CPU has no magazine yet.
    Missing,
}

/// How an exchange of magazines ended.
pub(crate) enum Exchanged {
    /// The old magazine; 0 if there was none.
    Old(usize),
    /// The magazine in place is not as expected.
    NotNeeded,
}

fn is_portable() -> bool {
    matches!(mode(), Mode::Portable(_))
}

/// # Safety
///
/// As for [`rseq::add`].
#[inline(always)]
pub(crate) unsafe fn add(gate: &AtomicUsize, n: isize) -> Result<(), Closed> {
    // SAFETY: the caller's.
    match unsafe { rseq::add(gate, n) } {
        Ok(()) => Ok(()),
        // SAFETY: the caller's.
        Err(Closed) => unsafe { cold_add(gate, n) },
    }
}

#[cold]
#[inline(never)]
unsafe fn cold_add(gate: &AtomicUsize, n: isize) -> Result<(), Closed> {
    // SAFETY: the caller's.
    if is_portable() { unsafe { portable::add(gate, n) } } else { Err(Closed) }
}

/// # Safety
///
/// As for [`rseq::push`].
#[inline(always)]
pub(crate) unsafe fn push(gate: &AtomicUsize, item: usize) -> Result<Pushed, Closed> {
    // SAFETY: the caller's.
    match unsafe { rseq::push(gate, item) } {
        Ok(pushed) => Ok(pushed),
        // SAFETY: the caller's.
        Err(Closed) => unsafe { cold_push(gate, item) },
    }
}

#[cold]
#[inline(never)]
unsafe fn cold_push(gate: &AtomicUsize, item: usize) -> Result<Pushed, Closed> {
    // SAFETY: the caller's.
    if is_portable() { unsafe { portable::push(gate, item) } } else { Err(Closed) }
}

/// 0: nothing to take, or closed.
///
/// # Safety
///
/// As for [`rseq::pop`].
#[inline(always)]
pub(crate) unsafe fn pop(gate: &AtomicUsize) -> usize {
    // SAFETY: the caller's.
    match unsafe { rseq::pop(gate) } {
        // SAFETY: the caller's.
        0 => unsafe { cold_pop(gate) },
        item => item,
    }
}

#[cold]
#[inline(never)]
unsafe fn cold_pop(gate: &AtomicUsize) -> usize {
    // SAFETY: the caller's.
    if is_portable() { unsafe { portable::pop(gate) } } else { 0 }
}

/// # Safety
///
/// As for [`rseq::exchange`].
pub(crate) unsafe fn exchange(gate: &AtomicUsize, new: usize, length: usize) -> Result<Exchanged, Closed> {
    // SAFETY: the caller's.
    match unsafe { rseq::exchange(gate, new, length) } {
        // SAFETY: the caller's.
        Err(Closed) if is_portable() => unsafe { portable::exchange(gate, new, length) },
        answer => answer,
    }
}
