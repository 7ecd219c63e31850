//! The choice of the version of a sequence that runs.
//!
//! The assembly for `mm_cid` is tried first, and is inlined. If it reports a closed gate, there are
//! three possible reasons: the gate is closed; this thread has no rseq area; or this process uses
//! `cpu_id` or the portable version. The locks of the portable version do not exclude sequences, so
//! a process uses one version from its start to its end.

use crate::decision::mode;
use crate::error::GateClosed;
use crate::mode::{Index, Mode};
use crate::outcome::Pushed;
use crate::sync::AtomicUsize;
use crate::{portable, rseq};

pub(crate) mod lane;
pub(crate) mod pair;

/// # Safety
///
/// As for [`rseq::add`].
#[inline(always)]
pub(crate) unsafe fn add(gate: &AtomicUsize, n: isize) -> Result<(), GateClosed> {
    // SAFETY: the caller's.
    match unsafe { rseq::add(gate, n) } {
        Ok(()) => Ok(()),
        // SAFETY: the caller's.
        Err(GateClosed) => unsafe { cold_add(gate, n) },
    }
}

#[cold]
#[inline(never)]
unsafe fn cold_add(gate: &AtomicUsize, n: isize) -> Result<(), GateClosed> {
    // SAFETY: the caller's.
    unsafe {
        match mode() {
            Mode::Rseq(Index::MmCid) => Err(GateClosed),
            Mode::Rseq(Index::CpuId) => rseq::cpu_id::add(gate, n),
            Mode::Portable(_) => portable::add(gate, n),
        }
    }
}

/// The inlined fast path of [`push`]. If it returns false, [`push`] finds out why.
///
/// # Safety
///
/// As for [`rseq::push`].
#[inline(always)]
pub(crate) unsafe fn push_at_once(gate: &AtomicUsize, item: usize) -> bool {
    // SAFETY: the caller's.
    matches!(unsafe { rseq::push(gate, item) }, Ok(Pushed::Done))
}

/// # Safety
///
/// As for [`rseq::push`].
pub(crate) unsafe fn push(gate: &AtomicUsize, item: usize) -> Result<Pushed, GateClosed> {
    // SAFETY: the caller's.
    match unsafe { rseq::push(gate, item) } {
        Ok(pushed) => Ok(pushed),
        // SAFETY: the caller's.
        Err(GateClosed) => unsafe { cold_push(gate, item) },
    }
}

#[cold]
#[inline(never)]
unsafe fn cold_push(gate: &AtomicUsize, item: usize) -> Result<Pushed, GateClosed> {
    // SAFETY: the caller's.
    unsafe {
        match mode() {
            Mode::Rseq(Index::MmCid) => Err(GateClosed),
            Mode::Rseq(Index::CpuId) => rseq::cpu_id::push(gate, item),
            Mode::Portable(_) => portable::push(gate, item),
        }
    }
}
