//! A counter with a word on every CPU.

use crate::barrier::BarrierError;
use crate::gate::{Gate, NoMemory, clear};
use crate::sequence::{self, GateClosed};
use crate::sync::{Ordering, handover};

/// A counter that each CPU adds to on its own, while its gate is open; closed, it has one sum.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};
/// let (packets, shared) = (netmem_percpu::Counter::new()?, AtomicIsize::new(0));
/// let count = |n| {
///     if packets.add(n).is_err() {
///         shared.fetch_add(n, Relaxed); // the shared path: always right, and slower
///     }
/// };
/// count(64);
/// let sum = packets.close()?.unwrap_or(0);
/// count(-1);
/// assert_eq!(sum + shared.load(Relaxed), 63);
/// # Ok(())
/// # }
/// ```
///
/// Eight bytes, and eight in the arena for each CPU. Any thread may use any method at any time; [`add`](Self::add) is safe in
/// signal handlers, too, also while it interrupts itself.
#[derive(Debug)]
pub struct Counter(Gate);

impl Counter {
    /// A counter of 0, open. Takes a lock.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn new() -> Result<Self, NoMemory> {
        Gate::new().map(Self)
    }

    /// Adds `n`, which may be negative, to this CPU's word. With sequences: thirteen instructions, no lock prefix, no
    /// line that another CPU writes.
    ///
    /// What the calling thread did before is seen by whoever closes the counter.
    ///
    /// # Errors
    ///
    /// [`GateClosed`]: nothing was added. The gate may yet be open, if this thread has no sequences or, in portable mode,
    /// this CPU's lock was taken.
    #[inline(always)]
    pub fn add(&self, n: isize) -> Result<(), GateClosed> {
        handover::release(self);
        // SAFETY: the gate's word, and its slot has counters.
        unsafe { sequence::add(self.0.word(), n) }
    }

    /// Closes the gate: from the end of the call on nothing is added, and all that was is in the sum, which is taken out.
    /// None: it is closed, or somebody else is closing it.
    ///
    /// One membarrier (about 1 us, and an interrupt for each CPU where this process runs), then a load for each CPU. Not for
    /// signal handlers.
    ///
    /// # Errors
    ///
    /// The barrier failed, and the counter is as it was.
    pub fn close(&self) -> Result<Option<isize>, BarrierError> {
        let Some(quiet) = self.0.close()? else { return Ok(None) };
        handover::acquire(self);
        let mut sum = 0_usize;
        for word in quiet.words() {
            sum = sum.wrapping_add(word.load(Ordering::Relaxed));
            clear(word);
        }
        quiet.stay_closed();
        Ok(Some(sum.cast_signed()))
    }

    /// The sum as it is about now, for statistics. It is off by additions that other CPUs make during the call, and 0 while
    /// the counter is closed. A load for each CPU.
    pub fn approximate(&self) -> isize {
        self.0.peek().fold(0_usize, usize::wrapping_add).cast_signed()
    }

    /// Opens the gate of a counter that was closed. False: it is open, or being closed.
    pub fn reopen(&self) -> bool {
        self.0.reopen()
    }

    /// Whether the gate is open now.
    pub fn is_open(&self) -> bool {
        self.0.is_open()
    }
}
