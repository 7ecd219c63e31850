//! The baselines of Netmem's benchmarks. The suites that measure with them are in the program of
//! this package: `src/main.rs`.

pub mod baselines;
