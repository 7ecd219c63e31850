//! Stands in for the sequences where none are written, and in loom's models: every gate looks
//! closed to them, which sends the caller to the portable version.

use crate::error::GateClosed;
use crate::mode::Index;
use crate::outcome::Pushed;
use crate::sync::AtomicUsize;

pub(crate) const WRITTEN: bool = false;

pub(crate) fn start(_area: isize, _index: Index) {}

pub(crate) fn aborts() -> u64 {
    0
}

#[inline(always)]
pub(crate) unsafe fn add(_gate: &AtomicUsize, _n: isize) -> Result<(), GateClosed> {
    Err(GateClosed)
}

#[inline(always)]
pub(crate) unsafe fn push(_gate: &AtomicUsize, _item: usize) -> Result<Pushed, GateClosed> {
    Err(GateClosed)
}

pub(crate) mod cpu_id {
    pub(crate) use super::{add, push};
}

pub(crate) mod pair {
    use super::*;
    use crate::magazine::Magazine;
    use crate::outcome::{Popped, Replaced, Swapped};

    #[inline(always)]
    pub(crate) unsafe fn pop(_gate: &AtomicUsize) -> Result<Popped, GateClosed> {
        Err(GateClosed)
    }

    #[inline(always)]
    pub(crate) unsafe fn swap(
        _gate: &AtomicUsize,
        _magazines: &[Magazine],
        _limit: u32,
    ) -> Result<Swapped, GateClosed> {
        Err(GateClosed)
    }

    #[inline(always)]
    pub(crate) unsafe fn replace(
        _gate: &AtomicUsize,
        _magazines: *const [Magazine],
        _limit: u32,
        _new: *const Magazine,
    ) -> Result<Replaced, GateClosed> {
        Err(GateClosed)
    }

    pub(crate) mod cpu_id {
        pub(crate) use super::{pop, replace, swap};
    }
}

pub(crate) mod lane {
    use super::*;
    use crate::lane::Lanes;
    use crate::magazine::Magazine;
    use crate::outcome::{Exchanged, Rotated};

    #[inline(always)]
    pub(crate) unsafe fn rotate(
        _gate: &AtomicUsize,
        _lanes: &Lanes,
        _magazines: &[Magazine],
    ) -> Result<Rotated, GateClosed> {
        Err(GateClosed)
    }

    #[inline(always)]
    pub(crate) unsafe fn publish(_gate: &AtomicUsize, _lanes: &Lanes) -> Result<(), GateClosed> {
        Err(GateClosed)
    }

    #[inline(always)]
    pub(crate) unsafe fn exchange(
        _gate: &AtomicUsize,
        _lanes: *const Lanes,
        _new: *const Magazine,
    ) -> Result<Exchanged, GateClosed> {
        Err(GateClosed)
    }

    #[inline(always)]
    pub(crate) unsafe fn place(_gate: &AtomicUsize, _new: *const Magazine) -> Result<bool, GateClosed> {
        Err(GateClosed)
    }

    pub(crate) mod cpu_id {
        pub(crate) use super::{exchange, place, publish, rotate};
    }
}
