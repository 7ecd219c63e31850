//! Threads that are moved, preempted and interrupted in the middle of sequences.
//!
//! A program of its own: the tests send signals, so each is alone in the process while it runs. CI
//! runs it optimised, in each mode of per-CPU data, and under the thread sanitizer.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod counter_and_depot;
mod cpu_cache;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the other tests of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
