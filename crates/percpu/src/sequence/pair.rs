//! The choice of the version of a sequence of a [`CpuCache`](crate::CpuCache) that runs.

use crate::decision::mode;
use crate::error::GateClosed;
use crate::magazine::Magazine;
use crate::mode::{Index, Mode};
use crate::outcome::{Popped, Replaced, Swapped};
use crate::portable::pair as portable;
use crate::rseq::pair as rseq;
use crate::sync::AtomicUsize;
use std::num::NonZeroUsize;

/// The inlined fast path of [`pop`]. If it returns `None`, [`pop`] finds out why.
///
/// # Safety
///
/// As for `rseq::pair::pop_at`.
#[inline(always)]
pub(crate) unsafe fn pop_at_once(gate: &AtomicUsize) -> Option<NonZeroUsize> {
    // SAFETY: the caller's.
    match unsafe { rseq::pop(gate) } {
        Ok(Popped::Item(item)) => Some(item),
        _ => None,
    }
}

/// # Safety
///
/// As for `rseq::pair::pop_at`.
pub(crate) unsafe fn pop(gate: &AtomicUsize) -> Result<Popped, GateClosed> {
    // SAFETY: the caller's.
    unsafe {
        match rseq::pop(gate) {
            Err(GateClosed) => match mode() {
                Mode::Rseq(Index::MmCid) => Err(GateClosed),
                Mode::Rseq(Index::CpuId) => rseq::cpu_id::pop(gate),
                Mode::Portable(_) => portable::pop(gate),
            },
            done => done,
        }
    }
}

/// # Safety
///
/// As for `rseq::pair::swap_at`.
pub(crate) unsafe fn swap(gate: &AtomicUsize, magazines: &[Magazine], limit: u32) -> Result<Swapped, GateClosed> {
    // SAFETY: the caller's.
    unsafe {
        match rseq::swap(gate, magazines, limit) {
            Err(GateClosed) => match mode() {
                Mode::Rseq(Index::MmCid) => Err(GateClosed),
                Mode::Rseq(Index::CpuId) => rseq::cpu_id::swap(gate, magazines, limit),
                Mode::Portable(_) => portable::swap(gate, magazines, limit),
            },
            done => done,
        }
    }
}

/// # Safety
///
/// As for `rseq::pair::replace_at`.
pub(crate) unsafe fn replace(
    gate: &AtomicUsize,
    magazines: *const [Magazine],
    limit: u32,
    new: *const Magazine,
) -> Result<Replaced, GateClosed> {
    // SAFETY: the caller's.
    unsafe {
        match rseq::replace(gate, magazines, limit, new) {
            Err(GateClosed) => match mode() {
                Mode::Rseq(Index::MmCid) => Err(GateClosed),
                Mode::Rseq(Index::CpuId) => rseq::cpu_id::replace(gate, magazines, limit, new),
                Mode::Portable(_) => portable::replace(gate, magazines, limit, new),
            },
            done => done,
        }
    }
}
