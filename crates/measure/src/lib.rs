//! What programs that measure Netmem share: threads on CPUs of their own, measurements in turns,
//! statistics, goals and reports.
//!
//! Why a crate of its own: the command `netmem perf` and the benchmarks measure in the same way and
//! compare with the same baselines. Neither is below the other.
//!
//! * [`threads`] starts threads, and [`cpus`] moves them to CPUs. [`turns`] measures variants in
//!   turns, so that a disturbance of the machine affects all of them alike.
//! * [`load`] reads CPU time from the kernel, and [`own_time`] adds up the time of polls that found
//!   packets.
//! * [`stats`] has medians, ranges, confidence intervals and tests. [`goals`] compares medians with
//!   bounds. [`against`] compares two builds of a program. [`units`] prints quantities.
//! * [`machine`] and [`report`] have the parts that all reports share. [`table`] and [`output`]
//!   print them.
//! * [`program`] runs a program and makes its exit status. [`signals`] ends a measurement early.
//!   [`arguments`] checks the command line.
//! * [`pages`] and [`frags`] are older ways to allocate network memory, as baselines. [`endpoint`]
//!   has the parts of a stack over the embedded device.

pub mod against;
pub mod arguments;
mod buddy;
pub mod cpus;
pub mod endpoint;
pub mod frags;
pub mod goals;
pub mod load;
pub mod machine;
pub mod output;
pub mod own_time;
pub mod pages;
pub mod program;
pub mod report;
pub mod signals;
pub mod stats;
pub mod table;
mod thread_cache;
pub mod threads;
pub mod turns;
pub mod units;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
