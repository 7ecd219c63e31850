//! The gate: one word with the address of a slot and a state, which allows or forbids sequences.
//! Why one word: a sequence loads both at once, so it cannot use the words of a gate that it found
//! open before a close.
//!
//! ```text
//!   word = address of the slot | state
//!
//!   open (0) ──close: compare-and-swap──► closing (1) ──barrier, all words read──► closed (3) ──reopen──► open (0)
//!                                            │
//!                                            └── the barrier failed, or it is only to be emptied ──► open (0)
//!
//!   open (0) or failed (5) ──close for good──► closing (1) ──barrier──► closed (3)
//!                                               └── the barrier failed ──► failed (5)
//! ```
//!
//! If the barrier of a close for good has *failed*, the gate keeps sequences out, but the last one
//! may not have left: no thread may touch the words before another attempt to close for good has
//! succeeded.
//!
//! Bit 0 keeps sequences out. The thread that makes the step from open owns all CPUs' words from
//! the end of the barrier until it leaves *closing*. There is one such thread, so closing and
//! reopening need no lock.
//!
//! ```text
//!   sequence on another CPU               closing
//!   start
//!   slot = *gate           (open)
//!                                         gate |= 1
//!   commit                                membarrier: interrupts that CPU
//!        committed before: seen now    or    not yet: restarted, finds the gate closed
//!                                         read all words
//! ```
//!
//! Ordering: the exchange that closes is sequentially consistent and the barrier is one on every
//! CPU that runs a thread of this process; other threads pass one when they get a CPU. So the
//! closing thread sees what a sequence wrote, and what its thread did before. Reopening is a
//! release, and the sequence's load of the gate an acquire.

use crate::arena;
use crate::barrier::barrier;
use crate::cpus::areas;
use crate::error::{BarrierError, NoMemory};
use crate::sync::{AtomicUsize, Ordering};
use crate::word::{clear, word};

const CLOSING: usize = 1;
const CLOSED: usize = 3;
const CLOSE_FAILED: usize = 5;
const STATE: usize = 7;

/// A slot and its gate, which is open at first. When the value is dropped, the slot is freed.
#[derive(Debug)]
pub(crate) struct Gate(AtomicUsize);

impl Gate {
    /// A new gate, whose slot has words of zero.
    pub(crate) fn new() -> Result<Self, NoMemory> {
        Ok(Self(AtomicUsize::new(arena::alloc()?)))
    }

    /// The word that sequences load.
    #[inline(always)]
    pub(crate) fn word(&self) -> &AtomicUsize {
        &self.0
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.load(Ordering::Relaxed) & STATE == 0
    }

    /// Closes the gate and waits until no sequence is left inside. Returns `None` if it is not
    /// open.
    ///
    /// Costs one membarrier: about a microsecond, and an interrupt of each CPU that runs a thread
    /// of this process.
    pub(crate) fn close(&self) -> Result<Option<QuiescentGate<'_>>, BarrierError> {
        let slot = self.0.load(Ordering::Relaxed) & !STATE;
        self.close_from(slot, slot)
    }

    /// Closes the gate, as [`close`](Self::close), never to be opened again. If the barrier fails,
    /// the gate stays closed to sequences, and another call tries again. Returns `None` if it is
    /// closed, or another thread is closing it.
    pub(crate) fn close_for_good(&self) -> Result<Option<QuiescentGate<'_>>, BarrierError> {
        let word = self.0.load(Ordering::Relaxed);
        let slot = word & !STATE;
        let from = if word & STATE == CLOSE_FAILED { word } else { slot };
        self.close_from(from, slot | CLOSE_FAILED)
    }

    /// From `from` to closing, and to `failed` if the barrier fails.
    fn close_from(&self, from: usize, failed: usize) -> Result<Option<QuiescentGate<'_>>, BarrierError> {
        let slot = from & !STATE;
        let closing = self.0.compare_exchange(from, slot | CLOSING, Ordering::SeqCst, Ordering::Relaxed);
        if closing.is_err() {
            return Ok(None);
        }
        match barrier() {
            Ok(()) => Ok(Some(QuiescentGate { gate: self, slot })),
            Err(e) => {
                self.0.store(failed, Ordering::Release);
                Err(e)
            }
        }
    }

    /// Whether the barrier of the last attempt to close for good failed.
    pub(crate) fn close_failed(&self) -> bool {
        self.0.load(Ordering::Relaxed) & STATE == CLOSE_FAILED
    }

    /// Opens a gate that was left closed. Returns false if it was not.
    pub(crate) fn reopen(&self) -> bool {
        let slot = self.0.load(Ordering::Relaxed) & !STATE;
        self.0.compare_exchange(slot | CLOSED, slot, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// The words at this moment, for a guess: the CPUs own them, and may change them at any time.
    pub(crate) fn peek(&self) -> impl Iterator<Item = usize> {
        let slot = self.0.load(Ordering::Relaxed) & !STATE;
        // SAFETY: the gate's slot, and the gate is borrowed.
        (0..areas()).map(move |cpu| unsafe { word(slot, cpu) }.load(Ordering::Relaxed))
    }

    /// All CPUs' words. The gate is borrowed exclusively, so no barrier is needed.
    pub(crate) fn words_mut(&mut self) -> impl Iterator<Item = &AtomicUsize> {
        let slot = self.0.load(Ordering::Relaxed) & !STATE;
        // SAFETY: the gate's slot, until it is dropped.
        (0..areas()).map(move |cpu| unsafe { word(slot, cpu) })
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.words_mut().for_each(clear);
        arena::free(self.0.load(Ordering::Relaxed) & !STATE);
    }
}

/// The right to all CPUs' words: the gate is closing and no sequence is left.
#[must_use = "the gate is closed until it is said how it goes on"]
pub(crate) struct QuiescentGate<'g> {
    gate: &'g Gate,
    slot: usize,
}

impl QuiescentGate<'_> {
    pub(crate) fn words(&self) -> impl Iterator<Item = &AtomicUsize> {
        // SAFETY: the gate's slot, and the gate is borrowed.
        (0..areas()).map(|cpu| unsafe { word(self.slot, cpu) })
    }

    /// Reopens the gate. The words must be zero, or null.
    pub(crate) fn reopen(self) {
        self.gate.0.store(self.slot, Ordering::Release);
    }

    /// Leaves the gate closed. The words must be zero. Any thread may reopen it.
    pub(crate) fn stay_closed(self) {
        self.gate.0.store(self.slot | CLOSED, Ordering::Release);
    }
}
