//! The portable version of a sequence: the same steps under this CPU's lock, for machines without
//! restartable sequences, and for loom, which then sees the steps of a sequence: other threads may
//! run between them, but a barrier waits for their end.
//!
//! ```text
//!   sequence                             barrier
//!   if !cpu.lock.try_lock: exit closed   for each cpu: lock, unlock
//!   slot = *gate
//!   if slot & 1: exit closed             a sequence that saw the gate open has ended, and what it wrote is seen;
//!   ... store                            one that comes later sees it closed
//!   cpu.lock.unlock
//! ```
//!
//! A sequence tries its lock once. The lock can be taken: by a thread that lost this CPU in the
//! middle of a sequence, or by the code that this signal handler interrupted. The sequence then
//! answers as if the gate were closed, and its thread takes the shared path. So no sequence waits,
//! and nothing deadlocks. The lock, not the CPU's number, is what keeps a word to one thread: a
//! number that is out of date only costs time.

use crate::cpus::this_cpu;
use crate::error::GateClosed;
use crate::magazine::{Magazine, at_word};
use crate::outcome::Pushed;
use crate::sync::{AtomicUsize, Ordering, handover};
use crate::word::{self, CLOSED_BIT};

pub(crate) mod lane;
pub(crate) mod pair;

#[cfg(not(loom))]
use crate::process::cpu_locks as locks;

#[cfg(loom)]
use model::locks;

/// Runs `body` on this CPU's word, if its lock is free and the gate is open.
fn sequence<R>(gate: &AtomicUsize, body: impl FnOnce(&AtomicUsize) -> R) -> Result<R, GateClosed> {
    #[cfg(all(test, not(loom)))]
    SEQUENCES.with(|sequences| sequences.set(sequences.get() + 1));
    let cpu = this_cpu();
    #[cfg(not(loom))]
    let _lock = locks()[cpu].try_lock().ok_or(GateClosed)?;
    #[cfg(loom)]
    let _lock = model::enter(&locks()[cpu])?;
    let slot = gate.load(Ordering::Acquire);
    if slot & CLOSED_BIT != 0 {
        return Err(GateClosed);
    }
    // SAFETY: an open gate is the address of a slot, which has a word for every CPU and is never
    // given back to the system.
    let word = unsafe { word::word(slot, cpu) };
    handover::acquire(word);
    let answer = body(word);
    handover::release(word);
    Ok(answer)
}

#[cfg(all(test, not(loom)))]
std::thread_local! {
    static SEQUENCES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// How many sequences this thread has begun.
#[cfg(all(test, not(loom)))]
pub(crate) fn sequences() -> usize {
    SEQUENCES.get()
}

/// Waits for every sequence that may have seen a gate open.
pub(crate) fn barrier() {
    locks().iter().for_each(|lock| lock.wait());
}

/// # Safety
///
/// As for the assembly of the same name; so below.
pub(crate) unsafe fn add(gate: &AtomicUsize, n: isize) -> Result<(), GateClosed> {
    sequence(gate, |word| {
        let was = word.load(Ordering::Relaxed);
        word.store(was.wrapping_add_signed(n), Ordering::Relaxed);
    })
}

/// The magazine that a word addresses.
///
/// # Safety
///
/// The word is null or addresses a magazine, and its lock is held.
unsafe fn magazine(word: &AtomicUsize) -> Option<&Magazine> {
    // SAFETY: the caller's.
    unsafe { at_word(word.load(Ordering::Relaxed)) }
}

pub(crate) unsafe fn push(gate: &AtomicUsize, item: usize) -> Result<Pushed, GateClosed> {
    sequence(gate, |word| {
        // SAFETY: the caller's, and the lock.
        match unsafe { magazine(word) } {
            None => Pushed::Missing,
            Some(magazine) if magazine.push(item) => Pushed::Done,
            Some(_) => Pushed::Full,
        }
    })
}

/// What a model has instead of a machine.
#[cfg(loom)]
pub(crate) mod model {
    use crate::cpus::areas;
    use crate::error::GateClosed;
    use crate::sync::Mutex;
    use std::cell::Cell;

    pub(super) struct Lock(Mutex<()>);

    impl Lock {
        pub(super) fn wait(&self) {
            drop(self.0.lock());
        }
    }

    loom::lazy_static! {
        static ref LOCKS: Box<[Lock]> = (0..areas()).map(|_| Lock(Mutex::new(()))).collect();
    }

    pub(super) fn locks() -> &'static [Lock] {
        // loom hands out a reference for the length of one execution, which is as long as anything
        // lives.
        let locks: &Box<[Lock]> = &LOCKS;
        // SAFETY: nothing outlives the execution.
        unsafe { &*std::ptr::from_ref::<[Lock]>(locks) }
    }

    std::thread_local! {
        /// Whether a sequence that finds its CPU's lock taken is restarted. One for all threads of
        /// a model: loom runs them on the one that started it.
        static RESTARTS: Cell<bool> = const { Cell::new(false) };
    }

    /// Runs `model` for both versions of a sequence, which differ where two threads are on one CPU.
    /// The portable one is refused if the other thread is in the middle of its own. A restartable
    /// one is restarted: its first attempt has no effect, so that the model has it wait, and run
    /// when the other has ended.
    pub fn both_ways(model: impl Fn()) {
        for restarts in [false, true] {
            RESTARTS.set(restarts);
            model();
        }
        RESTARTS.set(false);
    }

    /// Tries all interleavings of `body`, [both ways](both_ways); only those in which no thread is
    /// preempted more often than `preemptions`, if that is set. `LOOM_MAX_PREEMPTIONS` overrides
    /// it.
    pub fn check(preemptions: Option<usize>, body: impl Fn() + Sync + Send + 'static) {
        let body = std::sync::Arc::new(body);
        both_ways(|| {
            let body = body.clone();
            let mut model = loom::model::Builder::new();
            model.preemption_bound = model.preemption_bound.or(preemptions);
            model.check(move || body());
        });
    }

    /// Which of the [two ways](both_ways) runs.
    #[cfg(test)]
    pub(crate) fn restarts() -> bool {
        RESTARTS.get()
    }

    pub(super) fn enter(lock: &Lock) -> Result<loom::sync::MutexGuard<'_, ()>, GateClosed> {
        let taken = if RESTARTS.get() { lock.0.lock().ok() } else { lock.0.try_lock().ok() };
        taken.ok_or(GateClosed)
    }
}
