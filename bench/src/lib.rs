//! The old ways of handling network memory, as fair baselines for Netmem's figures.
//!
//! * [`PageAllocator`] is a page per packet: the general-purpose allocator that a driver without a page pool asks for every
//!   buffer. Put a pool with [`cache(0)`](netmem_pool::PoolOptions::cache) in front of it, and every allocation takes and
//!   maps, every drop unmaps and gives back.
//! * [`LockedPool`] is a page pool whose pages come back through a locked ring, one by one.
//! * [`Forward`] and [`SpscPool`] are the floor under every way back between CPUs: none, and one that knows its returning threads.
//! * [`DPDK_POOL`] is DPDK's answer, a program of its own.
//! * [`C_SEQUENCE`] is a per-CPU counter in C, without a gate, a program of its own, too.
//! * [`tokens`] are the ways in which a socket could find the page of a token that is given back.

mod buddy;
mod floor;
mod locked;
mod pages;
pub mod tokens;

pub use floor::{FloorPage, Forward, SpscPool, SpscReturner};
pub use locked::{LockedPage, LockedPool};
pub use pages::PageAllocator;

/// Source text in C of a program that measures DPDK's mempools and mbufs when it is told to; it says there how.
///
/// To be built where it is to run: with `-O3 -march=native` and what `pkg-config --cflags --libs libdpdk` prints.
pub const DPDK_POOL: &str = include_str!("../peers/pool/dpdk.c");

/// Source text in C of a program that measures an add in a restartable sequence that has no gate; it says there how.
///
/// To be built where it is to run, with `-O3 -march=native`. Needs x86-64 and glibc 2.35.
pub const C_SEQUENCE: &str = include_str!("../peers/refs/sequence.c");
