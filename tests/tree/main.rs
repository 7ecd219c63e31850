//! Checks of the tree itself: pages and code agree, packages are complete, tests look for the
//! programs that they start. These tests read files and need no privileges.
#![allow(clippy::unwrap_used, missing_docs)]

mod packages;
mod pages;
mod programs;
mod promises;
