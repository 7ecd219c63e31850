//! The driver, the device, and both against the specification, on memory and sockets of this
//! process.
//!
//! Tests that count what a process has are in `tests/process`, and those with other programs that
//! poll a CPU each in `tests/peers`.
#![allow(clippy::unwrap_used, missing_docs)]

mod conformance;
mod device;
mod driver;
mod hostile_events;
mod misuse;
mod unnegotiated;
