//! Tests of counters, and of programs that use them.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod counter;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod program;
