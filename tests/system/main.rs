//! The command and the examples as processes, with real peers: the kernel, guests, DPDK, clients of
//! other projects. Needs root and programs; `tests/README.md` lists which, test by test.
//!
//! `NETMEM` names the command. Without it, the tests build it, unoptimised.
#![allow(clippy::unwrap_used, missing_docs)]

mod scripts;
mod xsk_examples;

use std::sync::RwLock;

/// Polling peers need whole CPUs, and a machine may have only two. So a test with such peers holds
/// this lock alone, and so does a test that lets no ping be lost. The other tests with emulated
/// guests share the lock.
static CPUS: RwLock<()> = RwLock::new(());
