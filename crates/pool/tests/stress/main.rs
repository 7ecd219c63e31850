//! Many threads that allocate and return, and threads that are moved and interrupted.
//!
//! A program of its own: two tests send signals, so each is alone in the process while it runs. CI
//! runs it optimised, in each mode of per-CPU data, and under the thread sanitizer.
#![allow(clippy::unwrap_used, reason = "these are tests")]

#[path = "../common/mod.rs"]
mod common;

mod returns;
mod signals;
mod soak;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the other tests of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
