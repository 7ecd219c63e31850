//! Older ways of handling network memory, as fair baselines for Netmem's figures.
//!
//! * [`LockedPool`] is a page pool whose pages return through a locked ring, one by one.
//! * [`Forward`] and [`SpscPool`] are lower bounds for the cost of every return path between CPUs.
//!   `Forward` returns no pages. `SpscPool` has a ring from each thread that returns pages, and all
//!   of these threads are known in advance.
//! * [`FairPool`] is the floor under a path by which each page returns by itself, in a call: `fair`
//!   with a call, `fair_drop` by a destructor.
//! * [`DPDK_POOL`] is the source of a program that measures DPDK's pools.
//! * [`C_SEQUENCE`] is the source of a program that measures a per-CPU counter in C, without a
//!   gate.
//! * [`tokens`] has several ways in which a socket can find the page of a token that is returned.
//!
//! A page per packet and page fragments are in [`netmem_measure`], because `netmem perf` compares
//! with them, too.

mod fair;
mod floor;
mod locked;
pub mod tokens;

pub use fair::{FairPage, FairPool, FairReturner, return_as};
pub use floor::{FloorPage, Forward, SpscPool, SpscReturner};
pub use locked::{LockedPage, LockedPool};

/// Source text in C of a program that measures DPDK's mempools and mbufs on request. The text
/// states how to use it.
///
/// Build it on the machine that runs it: with `-O3 -march=native` and the output of
/// `pkg-config --cflags --libs libdpdk`.
pub const DPDK_POOL: &str = include_str!("../../peers/pool/dpdk.c");

/// Source text in C of a program that measures an add in a restartable sequence without a gate. The
/// text states how to use it.
///
/// Build it on the machine that runs it, with `-O3 -march=native`. Needs x86-64 and glibc 2.35.
pub const C_SEQUENCE: &str = include_str!("../../peers/refs/sequence.c");
