//! The operations of a [`CpuCache`] that close its gate: reclaim, pause and close.
//!
//! One thread at a time closes the gate; the races with pops and pushes are at the head of
//! `cpu_cache.rs`.

use super::CpuCache;
use crate::error::BarrierError;
use crate::gate::QuiescentGate;
use crate::magazine::at_word;
use crate::sync::{Ordering, handover};
use crate::word::clear;

impl CpuCache {
    /// Moves what all CPUs hold to the depot, where any thread finds it. Returns how many items.
    /// One membarrier (about 1 us, and an interrupt of each CPU where this process runs); pushes
    /// are refused and pops go to the depot until it is over. Threads that reclaim at the same time
    /// wait for each other. Not for signal handlers.
    ///
    /// # Errors
    ///
    /// The barrier failed, and the items are where they were.
    pub fn reclaim(&self) -> Result<usize, BarrierError> {
        // A poisoned lock still excludes, and nothing that it guards can be half done.
        let _gatekeeper = self.close_lock.lock();
        let Some(quiet) = self.intake.gate.close()? else { return Ok(0) };
        let taken = self.unload_cpus(&quiet);
        quiet.reopen();
        Ok(self.return_to_depot(taken))
    }

    /// Refuses all pushes from now on. What the CPUs hold goes to the depot, where
    /// [`pop`](Self::pop) still finds it. One membarrier. Not for signal handlers.
    ///
    /// If another thread holds a magazine at this moment, its items are found when that thread's
    /// call is over. A pop and a reclaim put the magazine on the list. A push passes the items to
    /// its `refused`.
    ///
    /// # Errors
    ///
    /// The barrier failed: what the CPUs hold stays where it is. Pushes are refused nevertheless.
    /// Another call tries again.
    pub fn close(&self) -> Result<(), BarrierError> {
        let _gatekeeper = self.close_lock.lock();
        let closed = self.intake.gate.close_for_good().map(|quiet| {
            let Some(quiet) = quiet else { return };
            let taken = self.unload_cpus(&quiet);
            quiet.stay_closed();
            self.return_to_depot(taken);
        });
        self.full.0.close();
        closed
    }

    /// Whether the barrier of the last [`close`](Self::close) failed, so that CPUs may still hold
    /// items.
    pub fn close_failed(&self) -> bool {
        self.intake.gate.close_failed()
    }

    /// Refuses all pushes until [`reopen`](Self::reopen), and moves what the CPUs hold to the
    /// depot, where [`pop`](Self::pop) still finds it. Returns how many items were moved. For a
    /// thread that waits for an item: each item that is put in from now on is refused, or passed to
    /// the `refused` of its push, so that the pushing thread learns of the wait. One membarrier, if
    /// the cache has magazines. Not for signal handlers.
    ///
    /// If another thread holds a magazine at this moment, the thread puts it back later. A pop that
    /// has done so finds [`is_closed`](Self::is_closed) true afterwards.
    ///
    /// # Errors
    ///
    /// The barrier failed: nothing has changed.
    pub fn pause(&self) -> Result<usize, BarrierError> {
        let _gatekeeper = self.close_lock.lock();
        let mut moved = 0;
        if !self.magazines.is_empty()
            && let Some(quiet) = self.intake.gate.close()?
        {
            let taken = self.unload_cpus(&quiet);
            quiet.stay_closed();
            moved = self.return_to_depot(taken);
        }
        self.full.0.close();
        Ok(moved)
    }

    /// Ends a [`pause`](Self::pause), or undoes a [`close`](Self::close) that succeeded: pushes are
    /// accepted again. Two atomics. The caller makes sure that no other thread closes the cache for
    /// good meanwhile.
    pub fn reopen(&self) {
        self.full.0.reopen();
        self.intake.gate.reopen();
    }

    /// Whether the cache is [closed](Self::close) or [paused](Self::pause). A load.
    ///
    /// If a thread's pop or push has put a magazine with items into the depot, and the cache was
    /// closed before that, the thread finds it closed afterwards, unless it was reopened.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.full.0.is_closed()
    }

    /// Takes all CPUs' magazines out of their words, as a list. Returns the index plus 1 of the
    /// first of them.
    fn unload_cpus(&self, quiet: &QuiescentGate<'_>) -> u32 {
        handover::acquire(&self.intake.capacity);
        let mut first = 0;
        for word in quiet.words() {
            // SAFETY: the gate is quiet: magazines of ours or null, and only this thread's.
            let Some(loaded) = (unsafe { at_word(word.load(Ordering::Relaxed)) }) else { continue };
            clear(word);
            let previous = self.numbered(loaded.next.load(Ordering::Relaxed));
            for magazine in [Some(loaded), previous].into_iter().flatten() {
                magazine.next.store(first, Ordering::Relaxed);
                first = magazine.index;
            }
        }
        first
    }

    /// Puts the magazines of a list that only the caller has on the depot's lists. Returns how many
    /// items are in them.
    fn return_to_depot(&self, first: u32) -> usize {
        let (mut at, mut items) = (first, 0);
        while let Some(magazine) = self.numbered(at) {
            at = magazine.next.load(Ordering::Relaxed);
            items += magazine.len();
            self.put_back(magazine);
        }
        items
    }
}
