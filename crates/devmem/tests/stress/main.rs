//! Threads against each other. CI runs this program alone: a hundred million operations optimised,
//! and ten million under the thread sanitizer.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

#[path = "../all/common.rs"]
mod common;

mod sockets;
mod threads;
