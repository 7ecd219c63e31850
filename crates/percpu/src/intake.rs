//! Where items enter: the part of a [`Depot`](crate::Depot) and of a [`CpuCache`](crate::CpuCache)
//! that a push on this CPU's magazine needs.
//!
//! Why a type: a caller that has a depot or a cache chooses between two addresses, and then
//! executes one sequence. Each copy of a sequence is 120 bytes of code, and its caller's branches
//! compete for the processor's predictions.

use crate::error::NoMemory;
use crate::gate::Gate;
use crate::sequence;
use crate::sync::handover;
use std::num::NonZeroUsize;

/// The magazines of CPUs on which items are pushed, of a [`Depot`](crate::Depot) or a
/// [`CpuCache`](crate::CpuCache).
#[derive(Debug)]
pub struct Intake {
    pub(crate) gate: Gate,
    /// Items in a magazine. Also the name by which the thread sanitizer is told of hand-overs: that
    /// of an atomic would not do, for a store to it (a gate that reopens) makes the sanitizer
    /// forget which threads have released it.
    pub(crate) capacity: usize,
    /// Read by threads that touch the depot or the cache, and written by the thread that frees it.
    #[cfg(loom)]
    witness: loom::cell::UnsafeCell<()>,
}

#[cfg(loom)]
// SAFETY: loom checks the accesses to the witness.
unsafe impl Sync for Intake {}
#[cfg(loom)]
// SAFETY: as above.
unsafe impl Send for Intake {}

impl Intake {
    pub(crate) fn new(capacity: usize) -> Result<Self, NoMemory> {
        Ok(Self {
            gate: Gate::new()?,
            capacity: capacity.clamp(1, crate::MAGAZINE),
            #[cfg(loom)]
            witness: loom::cell::UnsafeCell::new(()),
        })
    }

    /// Tells loom that no thread touches the depot or the cache any more.
    #[cfg(loom)]
    pub(crate) fn witness(&self) {
        self.witness.with_mut(|_| ());
    }

    /// Tells loom that a thread touches the depot or the cache. Does nothing outside of models.
    ///
    /// # Safety
    ///
    /// It is alive. In a model, loom reports it if it is not.
    #[inline(always)]
    pub(crate) unsafe fn touch(_this: *const Self) {
        #[cfg(loom)]
        // SAFETY: the caller's.
        unsafe {
            (*_this).witness.with(|_| ());
        }
    }

    /// Puts `item` on this CPU's magazine, if there is room: [`Depot::give_at_once`] of the depot,
    /// or [`CpuCache::push_at_once`] of the cache. If it returns false, the item is still the
    /// caller's.
    ///
    /// # Safety
    ///
    /// As for these two.
    ///
    /// [`Depot::give_at_once`]: crate::Depot::give_at_once
    /// [`CpuCache::push_at_once`]: crate::CpuCache::push_at_once
    #[inline(always)]
    pub unsafe fn push_at_once(this: *const Self, item: NonZeroUsize) -> bool {
        // By pointer: a reference to the whole would have to be good until the return, and the
        // depot or the cache need not be.
        // SAFETY: the caller's; the gate's word, and the slot's words are magazines.
        unsafe {
            Self::touch(this);
            handover::release(&(*this).capacity);
            sequence::push_at_once((*this).gate.word(), item.get())
        }
    }
}
