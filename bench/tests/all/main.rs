//! `netmem-bench` from outside: what it measures, prints and writes, and how it refuses.
#![allow(clippy::unwrap_used, missing_docs)]

mod command;
mod page;
mod reports;
mod suites;
