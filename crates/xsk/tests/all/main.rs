//! The tests of AF_XDP on interfaces, in one program: it is built and linked once.
//!
//! * `frames`: every byte of a frame, in both directions.
//! * `gone`: pages of interfaces that were deleted.
//! * `lifecycle`: sockets, interfaces and processes that end, in any order.
//! * `queues`: several queues and devices on one memory; waiting; offloads.
//! * `rx_metadata`: metadata of a program of the user's own.
//!
//! `quirks.rs` and `worker.rs` need processes of their own: their first lines have the reasons.

mod frames;
mod gone;
mod lifecycle;
mod queues;
mod rx_metadata;
