//! Tests of the facade: hosts on taps and interfaces, the device's port on an interface, and the
//! examples. Each module needs the features that its part of the facade has.
#![allow(clippy::unwrap_used, missing_docs)]

#[cfg(all(feature = "device", feature = "devmem", feature = "inet", feature = "tokio"))]
mod examples;
#[cfg(all(feature = "device", feature = "inet", feature = "tokio", feature = "xsk"))]
mod hosts;
mod io_uring_echo;
#[cfg(all(feature = "device", feature = "inet", feature = "tokio", feature = "xsk"))]
mod quic_quinn;
#[cfg(all(feature = "device", feature = "xsk"))]
mod xsk_port;
