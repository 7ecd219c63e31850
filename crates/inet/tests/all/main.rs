//! A stack over queues in memory, and over devices with the kernel as peer.
//!
//! Tests that measure the memory of their process are in `tests/memory`. Connections without a
//! stack, over a bad link, are in `tests/sim`.
#![allow(clippy::unwrap_used, missing_docs, reason = "test")]

mod budget;
mod common;
mod example_server;
mod handles;
mod kernel_peer;
mod model;
mod page_waits;
mod processing;
mod queues;
#[cfg(feature = "quinn")]
mod quinn;
mod remote;
mod remote_udp;
mod restart;
mod send;
mod shares;
mod sockets;
mod stack;
mod tap;
mod time;
#[cfg(feature = "tokio")]
mod tokio;
mod udp;
mod xsk;
