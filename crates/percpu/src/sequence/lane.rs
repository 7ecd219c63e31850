//! The choice of the version of a sequence of a [`Depot`](crate::Depot) that runs.

use crate::decision::mode;
use crate::error::GateClosed;
use crate::lane::Lanes;
use crate::magazine::Magazine;
use crate::mode::{Index, Mode};
use crate::outcome::{Exchanged, Rotated};
use crate::portable::lane as portable;
use crate::rseq::lane as rseq;
use crate::sync::AtomicUsize;

/// Runs the version of this process's mode.
macro_rules! choose {
    ($name:ident($gate:expr, $($with:expr),*)) => {
        match rseq::$name($gate, $($with),*) {
            Err(GateClosed) => match mode() {
                Mode::Rseq(Index::MmCid) => Err(GateClosed),
                Mode::Rseq(Index::CpuId) => rseq::cpu_id::$name($gate, $($with),*),
                Mode::Portable(_) => portable::$name($gate, $($with),*),
            },
            done => done,
        }
    };
}

/// # Safety
///
/// As for `rseq::lane::rotate_at`.
pub(crate) unsafe fn rotate(gate: &AtomicUsize, lanes: &Lanes, magazines: &[Magazine]) -> Result<Rotated, GateClosed> {
    // SAFETY: the caller's.
    unsafe { choose!(rotate(gate, lanes, magazines)) }
}

/// # Safety
///
/// As for `rseq::lane::publish_at`.
pub(crate) unsafe fn publish(gate: &AtomicUsize, lanes: &Lanes) -> Result<(), GateClosed> {
    // SAFETY: the caller's.
    unsafe { choose!(publish(gate, lanes)) }
}

/// # Safety
///
/// As for `rseq::lane::exchange_at`.
pub(crate) unsafe fn exchange(
    gate: &AtomicUsize,
    lanes: *const Lanes,
    new: *const Magazine,
) -> Result<Exchanged, GateClosed> {
    // SAFETY: the caller's.
    unsafe { choose!(exchange(gate, lanes, new)) }
}

/// # Safety
///
/// As for `rseq::lane::place_at`.
pub(crate) unsafe fn place(gate: &AtomicUsize, new: *const Magazine) -> Result<bool, GateClosed> {
    // SAFETY: the caller's.
    unsafe { choose!(place(gate, new)) }
}
