//! A counter with a word on every CPU.

use crate::error::{BarrierError, GateClosed, NoMemory};
use crate::gate::Gate;
use crate::sequence;
use crate::sync::{Ordering, handover};
use crate::word::clear;

/// A counter with a word for each CPU. While its gate is open, each thread adds to the word of its
/// CPU. Closing the gate yields the sum.
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
/// Eight bytes, and eight in the arena for each CPU. Any thread may use any method at any time;
/// [`add`](Self::add) is safe in signal handlers, too, also while it interrupts itself.
#[derive(Debug)]
pub struct Counter(Gate);

impl Counter {
    /// A counter of 0, open. Acquires a lock.
    ///
    /// # Errors
    ///
    /// There is no memory.
    pub fn new() -> Result<Self, NoMemory> {
        Gate::new().map(Self)
    }

    /// Adds `n`, which may be negative, to this CPU's word. With sequences this costs thirteen
    /// instructions, without a lock prefix and without a cache line that another CPU writes.
    ///
    /// The thread that closes the counter sees what the calling thread did before.
    ///
    /// # Errors
    ///
    /// [`GateClosed`]: nothing was added. This happens also while the gate is open, if this thread has no sequences or,
    /// in portable mode, this CPU's lock was taken.
    #[inline(always)]
    pub fn add(&self, n: isize) -> Result<(), GateClosed> {
        handover::release(self);
        // SAFETY: the gate's word, and its slot has counters.
        unsafe { sequence::add(self.0.word(), n) }
    }

    /// Closes the gate, and returns the sum of all words, which are set to 0. After the call
    /// nothing can be added. Returns `None` if the gate is closed already, or another thread is
    /// closing it.
    ///
    /// One membarrier (about 1 us, and an interrupt for each CPU where this process runs), then a
    /// load for each CPU. Not for signal handlers.
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

    /// The sum of all CPUs' words, read one after the other while other threads may add: an
    /// approximation, for reports. It can miss an add that was made before a later one that it has
    /// seen, so that a counter which is never below zero can read as less. While the counter is
    /// being closed it may be anything between the sum and 0, and 0 from then on. If no thread adds
    /// or closes meanwhile, it is exact.
    ///
    /// No barrier: a load for each CPU.
    pub fn approximate(&self) -> isize {
        self.0.peek().fold(0_usize, usize::wrapping_add).cast_signed()
    }

    /// Opens the gate of a counter that was closed. Returns false if it is open, or is being
    /// closed.
    pub fn reopen(&self) -> bool {
        self.0.reopen()
    }

    /// Whether the gate is open now.
    pub fn is_open(&self) -> bool {
        self.0.is_open()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cpus::areas;
    use crate::word::word;

    /// An add may have gone to the word of any index below the bound that sequences and chunks
    /// know, whatever numbers of CPUs `/sys` or this process's affinity give: each way to a sum
    /// finds it.
    #[test]
    fn a_sum_covers_every_index() {
        for index in 0..areas() {
            let counter = Counter::new().unwrap();
            // What a sequence on a CPU of that index does.
            let add = |counter: &Counter| {
                let slot = counter.0.word().load(Ordering::Relaxed);
                // SAFETY: the counter's slot, which is open.
                unsafe { word(slot, index) }.store(3, Ordering::Relaxed);
            };
            add(&counter);
            assert_eq!((counter.approximate(), counter.close().unwrap()), (3, Some(3)), "{index}");
            assert!(counter.approximate() == 0 && counter.reopen());
            // This one is dropped with a sum that is not 0. The next one gets its slot.
            add(&counter);
            drop(counter);
            assert_eq!(Counter::new().unwrap().close().unwrap(), Some(0));
        }
        assert!(areas() >= 64, "one word of the kernel's set of CPUs");
    }
}
