//! The portable version of the sequences of a [`CpuCache`](crate::CpuCache): see `rseq/pair.rs` for
//! what they do and for what `limit` means.

use super::{magazine, sequence};
use crate::error::GateClosed;
use crate::magazine::{Magazine, numbered};
use crate::outcome::{Popped, Replaced, Swapped};
use crate::sync::{AtomicUsize, Ordering};

/// # Safety
///
/// As for the assembly of the same name; so below.
pub(crate) unsafe fn pop(gate: &AtomicUsize) -> Result<Popped, GateClosed> {
    sequence(gate, |word| {
        // SAFETY: the caller's, and the lock.
        let item = unsafe { magazine(word) }.and_then(Magazine::pop);
        item.map_or(Popped::Edge, Popped::Item)
    })
}

pub(crate) unsafe fn swap(gate: &AtomicUsize, magazines: &[Magazine], limit: u32) -> Result<Swapped, GateClosed> {
    let limit = limit as usize;
    sequence(gate, |word| {
        // SAFETY: the caller's, and the lock.
        let Some(loaded) = (unsafe { magazine(word) }) else { return Swapped::Edge };
        if loaded.len() != limit {
            return Swapped::NotNeeded;
        }
        match numbered(magazines, loaded.next.load(Ordering::Relaxed)) {
            Some(previous) if previous.len() != limit => {
                previous.next.store(loaded.index, Ordering::Relaxed);
                word.store(previous.address(), Ordering::Relaxed);
                Swapped::Done
            }
            _ => Swapped::Edge,
        }
    })
}

pub(crate) unsafe fn replace(
    gate: &AtomicUsize,
    magazines: *const [Magazine],
    limit: u32,
    new: *const Magazine,
) -> Result<Replaced, GateClosed> {
    let limit = limit as usize;
    sequence(gate, |word| {
        // SAFETY: the caller's, and the lock.
        let loaded = unsafe { magazine(word) };
        let old = loaded.map_or(0, |loaded| loaded.next.load(Ordering::Relaxed));
        // SAFETY: the caller's: alive until the commit.
        let (magazines, new) = unsafe { (&*magazines, &*new) };
        let pair = [loaded, numbered(magazines, old)];
        if pair.into_iter().flatten().any(|magazine| magazine.len() != limit) {
            return Replaced::NotNeeded;
        }
        new.next.store(loaded.map_or(0, |loaded| loaded.index), Ordering::Relaxed);
        word.store(new.address(), Ordering::Relaxed);
        Replaced::Old(old)
    })
}
