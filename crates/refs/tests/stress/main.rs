//! Many threads on few objects, and threads that are moved, preempted and interrupted.
//!
//! A program of its own: one test sends signals, so each is alone in the process while it runs. CI
//! runs it optimised, in each mode of per-CPU data, and under the thread sanitizer.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod few_objects;
mod percpu_stress;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the other tests of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
