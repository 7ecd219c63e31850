//! Tests that need a process: they fork, limit its memory, measure it, or read what the process has
//! one of (the list of pools that linger, the state of `tracing`). Each is alone in the process
//! while it runs.
#![allow(clippy::unwrap_used, reason = "these are tests")]

#[path = "../common/mod.rs"]
mod common;

mod fork;
mod fork_regions;
mod fork_shared;
mod logs;
mod memlock;
mod refused;
mod refused_barrier;
mod resident;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the other tests of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
