//! Tests that need a process: they fork, count the faults of the process, or wait for all critical
//! sections of it. Each is alone in the process while it runs.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod fork;
mod panics;
mod refused;
mod waiting;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the other tests of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
