//! Tests that count what a process has: open descriptors, and threads that close them. They are
//! alone in their process, and run one at a time, because any other test opens descriptors.
#![allow(clippy::unwrap_used, missing_docs)]

mod closing;
mod messages;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the other test of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
