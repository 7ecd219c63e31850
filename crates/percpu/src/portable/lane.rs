//! The portable version of the sequences of a [`Depot`](crate::Depot): see `rseq/lane.rs` for what
//! they do.

use super::{magazine, sequence};
use crate::error::GateClosed;
use crate::lane::{Lanes, Position, placed};
use crate::magazine::{Magazine, numbered};
use crate::outcome::{Exchanged, Rotated};
use crate::sync::{AtomicUsize, Ordering};

/// # Safety
///
/// As for the assembly of the same name; so below.
pub(crate) unsafe fn rotate(gate: &AtomicUsize, lanes: &Lanes, magazines: &[Magazine]) -> Result<Rotated, GateClosed> {
    sequence(gate, |word| {
        // SAFETY: the caller's, and the lock.
        let Some(full) = (unsafe { magazine(word) }) else { return Rotated::Missing };
        if !full.is_full() {
            return Rotated::NotNeeded;
        }
        if lanes.unpublished(full.position()).is_some() {
            return Rotated::Unpublished;
        }
        let position = full.position().next();
        let Some(empty) = lanes.empty.get(position).and_then(|number| numbered(magazines, number)) else {
            return Rotated::NoEmpty;
        };
        let place = lanes.full.place(position);
        let last_lap = Position(place.load(Ordering::Relaxed) as u32);
        place.store(placed(last_lap, full.index), Ordering::Relaxed);
        empty.set_position(position);
        word.store(empty.address(), Ordering::Relaxed);
        Rotated::Done(position)
    })
}

pub(crate) unsafe fn publish(gate: &AtomicUsize, lanes: &Lanes) -> Result<(), GateClosed> {
    sequence(gate, |word| {
        // SAFETY: the caller's, and the lock.
        let Some(loaded) = (unsafe { magazine(word) }) else { return };
        let position = loaded.position();
        if let Some(number) = lanes.unpublished(position) {
            lanes.full.put(position, number);
        }
    })
}

pub(crate) unsafe fn exchange(
    gate: &AtomicUsize,
    lanes: *const Lanes,
    new: *const Magazine,
) -> Result<Exchanged, GateClosed> {
    sequence(gate, |word| {
        // SAFETY: the caller's, and the lock; alive until the commit.
        let (loaded, lanes, new) = unsafe { (magazine(word), &*lanes, new.as_ref()) };
        let Some(old) = loaded.filter(|old| old.is_full() && lanes.unpublished(old.position()).is_none()) else {
            return Exchanged::NotNeeded;
        };
        new.into_iter().for_each(|new| new.set_position(old.position()));
        word.store(new.map_or(0, Magazine::address), Ordering::Relaxed);
        Exchanged::Old(old.address())
    })
}

pub(crate) unsafe fn place(gate: &AtomicUsize, new: *const Magazine) -> Result<bool, GateClosed> {
    sequence(gate, |word| {
        let is_missing = word.load(Ordering::Relaxed) == 0;
        if is_missing {
            word.store(new.expose_provenance(), Ordering::Relaxed);
        }
        is_missing
    })
}
