//! Tests of the smart pointers, and of programs that must not compile.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod pointers;
mod ui;
