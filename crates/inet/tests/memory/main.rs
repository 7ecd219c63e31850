//! The memory of connections. Why a program of its own: the tests count what the process allocates,
//! and what is resident. They run one at a time, for the same reason.
#![allow(clippy::unwrap_used, missing_docs, reason = "test")]

mod churn;
#[path = "../all/common/mod.rs"]
mod common;
mod idle;
mod kernel;
mod shrink;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the other test of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
