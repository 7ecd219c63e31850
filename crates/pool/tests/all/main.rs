//! Tests of pools, regions, providers, pages and fragments.
//!
//! One program, because each program is linked with all libraries. Tests that need a process have
//! programs of their own: `process` (limits, forks, and lists of the process), `stress` (signals),
//! `sigbus` (a handler of the process).
#![allow(clippy::unwrap_used, reason = "these are tests")]

#[path = "../common/mod.rs"]
mod common;

mod bytes;
mod callbacks;
mod context;
mod counts;
mod device;
mod fragments;
mod large_machine;
mod limits;
mod magazines;
mod page_per_packet;
mod panics;
mod provided;
mod providers;
mod quarantine;
mod region;
mod shared_pool;
mod stats;
mod teardown;
mod ui;
mod unmapped;
